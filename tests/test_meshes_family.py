"""Rows with more than a policy and a reference: eight devices equal one."""

import mesh_runs
import pytest

from grpo_jax import steps
from grpo_jax.rollouts import Position

ROWS = {
  "ppo": {"algorithm__beta": 0.05},
  "dapo": {"algorithm__rounds": 2, "algorithm__beta": None},
  "remax": {"algorithm__beta": 0.05},
}
ROWS["grpo"] = {"algorithm__kl_estimator": "exact"}


def one_step(sizes, name):
  e = mesh_runs.resolve(
    batch__prompts_per_step=8,
    batch__prompts_per_update=8,
    algorithm__name=name,
    **ROWS[name],
  )
  built = mesh_runs.build_on(sizes, e)
  state = mesh_runs.start(built, "rl")
  out = steps.reinforce_step(
    built, state, mesh_runs.stream(built), Position(1, 0)
  )
  return out.metrics


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
  "name",
  [
    "ppo",
    "dapo",
    pytest.param("remax", marks=pytest.mark.slow),
    pytest.param("grpo", marks=pytest.mark.slow),
  ],
)
def test_a_step_is_the_same(name):
  here, there = (one_step(sizes, name) for sizes in ((1, 1, 1), (1, 2, 4)))
  for key in ("loss", "update/grad_norm", "reward/mean", "entropy"):
    assert there[key] == pytest.approx(here[key], rel=1e-4, abs=1e-5), key
  if name == "ppo":
    assert here["value/loss"] > 0
    for key in ("value/loss", "value/mean"):
      assert there[key] == pytest.approx(here[key], rel=1e-4, abs=1e-5), key
  if name == "dapo":
    for key in ("group/rounds", "group/accepted_frac"):
      assert there[key] == here[key]
  if name == "grpo":
    assert abs(here["kl/exact"]) < 1e-6  # the reference is the policy yet
