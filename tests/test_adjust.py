"""What goes around any row, what is refused, and what is warned about."""

import dataclasses
import inspect

import numpy as np
import pytest

from experiments import base
from grpo_jax import (
  adjust,
  advantages,
  algorithms,
  config,
  corrections,
  losses,
  validate,
)
from grpo_jax.advantages import Outcome
from grpo_jax.algorithm import EntropyBonus, SoftOverlong, complete_rows
from grpo_jax.errors import UserError
from grpo_jax.kl import KL, Adaptive, KLInReward, Reference, k1, k2, k3


def made(name="dr_grpo", task="words", **keys):
  """The algorithm that a configuration resolves to."""
  c = base.get_config()
  c.task.name, c.eval.every = task, 0
  c.algorithm.name = name
  if name in ("dr_grpo", "dppo"):
    c.algorithm.tokens = 16
  for key, value in keys.items():
    if key in ("group_size", "max_tokens"):
      c.sampling[key] = value
    elif key in ("prompts_per_step", "epochs"):
      c.batch[key] = value
    else:
      c.algorithm[key] = value
  return config.resolve(c).algorithm


@pytest.mark.parametrize(
  ("keys", "want"),
  [
    (
      {"kl_place": "loss", "kl_beta": 0.1},
      {"kl": KL(k3, 0.1), "reference": Reference()},
    ),
    ({"kl_beta": 0.1, "kl_estimator": "k2"}, {"kl": KL(k2, 0.1)}),
    ({"kl_beta": 0.1, "kl_estimator": "exact"}, {"kl": KL(None, 0.1)}),
    (
      {"kl_beta": 0.1, "kl_ratio_weighted": True},
      {"kl": KL(k3, 0.1, ratio_weighted=True)},
    ),
    (
      {"kl_place": "reward", "kl_beta": 0.1},
      {"kl_in_reward": KLInReward(k1, 0.1), "kl": None},
    ),
    (
      {"kl_beta": 0.1, "kl_target": 0.02, "reference_every": 50},
      {"adaptive": Adaptive(0.02), "reference": Reference(50)},
    ),
    (
      {"kl_beta": 0.1, "reference_decay": 0.99},
      {"reference": Reference(0, 0.99)},
    ),
    ({"entropy": 0.01}, {"bonus": EntropyBonus(0.01)}),
    ({"correction": "truncated"}, {"correction": corrections.Truncated(2.0)}),
    (
      {"correction": "masked", "correction_high": 3.0},
      {"correction": corrections.Banded(0.0, 3.0)},
    ),
    (
      {"correction": "banded", "correction_level": "sequence"},
      {"correction": corrections.Banded(0.5, 5.0, "sequence")},
    ),
    ({"dual_clip": 3.0}, {"surrogate": losses.Clipped(0.2, 0.2, 3.0)}),
    ({"overlong": "mask"}, {"keep": complete_rows}),
    (
      {"overlong": "soft", "overlong_cache": 4},
      {"length_penalty": SoftOverlong(16, 4)},
    ),
  ],
)
def test_keys_around_a_row(keys, want):
  got = made(**keys)
  for field, value in want.items():
    assert getattr(got, field) == value, field


def test_a_row_without_its_kl_has_no_reference():
  got = made("grpo", kl_place="none")
  assert got.kl is None and got.reference is None
  assert made("grpo").reference == Reference()
  assert made("dpo", kl_place="none", group_size=2).reference is not None


def test_every_adjustment_is_a_declared_key():
  declared = set(base.get_config().algorithm)
  assert set(adjust.KEYS) <= declared
  own = {
    name
    for fn in algorithms.ALGORITHMS.values()
    for name in inspect.signature(fn).parameters
  }
  assert own <= declared
  # A key that neither a row nor the surroundings know would do nothing.
  assert declared - {"name"} == own | set(adjust.KEYS)


@pytest.mark.parametrize(
  ("keys", "words"),
  [
    ({"kl_place": "los", "kl_beta": 0.1}, "'los' .did you mean loss"),
    ({"kl_place": "loss"}, "needs algorithm.kl_beta"),
    ({"kl_beta": 0.1, "kl_estimator": "k4"}, "'k4'"),
    ({"kl_beta": 0.1, "kl_estimator": "k1"}, "k1 in the loss"),
    ({"kl_target": 0.1}, "a KL to steer"),
    ({"reference_every": 3}, "a reference"),
    ({"correction": "cut"}, "truncated"),
    ({"correction": "banded", "correction_level": "row"}, "token"),
    ({"correction_high": 3.0}, "need algorithm.correction"),
    ({"overlong": "soft"}, "overlong_cache None"),
    ({"overlong": "soft", "overlong_cache": 17}, "overlong_cache 17"),
    ({"name": "sapo", "dual_clip": 3.0}, "PPO's clip"),
    ({"name": "grpo", "kl_place": "reward"}, "the coefficient cancels"),
    (
      {"kl_beta": 0.1, "kl_place": "reward", "kl_estimator": "k3"},
      "neither KL",
    ),
    ({"name": "rloo", "group_size": 1}, "group_size 1 must be at least 2"),
    ({"name": "dpo"}, "group_size 8 must be 2"),
    ({"name": "lite_ppo", "prompts_per_step": 1}, "prompts_per_step 1"),
    ({"name": "gdpo"}, "names 0 parts"),
    ({"name": "dppo", "correction": "truncated"}, "count it twice"),
    ({"name": "dapo", "average": "row"}, "row"),
    ({"name": "reinforce", "baseline": "mean"}, "mean"),
    ({"gamma": 0.9}, "has no setting 'gamma'"),
    ({"dual_clip": 0.5}, "dual_clip 0.5 must be above 1"),
    (
      {
        "correction": "banded",
        "correction_low": 3.0,
        "correction_high": 2.0,
      },
      "band from 3.0 to 2.0",
    ),
    ({"correction": "none", "correction_high": 2.0}, "need algorithm.correct"),
    ({"overlong_cache": 4}, "needs algorithm.overlong=soft"),
    ({"name": "grpo", "beta": 0.1, "kl_beta": 0.1}, "are the same"),
    ({"name": "grpo", "ddof": 9}, "ddof 9 must be below"),
    ({"name": "opo", "group_size": 1}, "at least 2"),
    ({"name": "reinforce_pp_baseline", "group_size": 1}, "at least 2"),
    ({"name": "reinforce", "baseline": "group", "group_size": 1}, "at least 2"),
    ({"kl_place": "none", "kl_estimator": "k4"}, "'k4'"),
    (
      {"name": "grpo_process", "kl_place": "reward", "kl_beta": 1.0},
      "a penalty is in neither",
    ),
    ({"entropy": -1.0}, "algorithm.entropy -1.0 must be at least 0"),
    ({"name": "ppo", "lam": 1.5}, "algorithm.lam 1.5 must be between 0 and 1"),
  ],
)
def test_what_cannot_mean_anything_is_refused(keys, words):
  with pytest.raises(UserError, match=words) as error:
    made(**keys)
  assert "\n" not in str(error.value)


def refusal(row, **changes):
  row = dataclasses.replace(row, **changes)
  with pytest.raises(UserError) as error:
    validate.check(row, group=4, prompts=4, task_parts=0)
  return str(error.value)


def test_records_of_ones_own_are_judged_too():
  grpo = algorithms.grpo(beta=0.0)
  gae = algorithms.ALGORITHMS["ppo"]().advantage
  text = refusal(grpo, ratio=losses.sequence_ratio, advantage=gae)
  assert "differ by token" in text
  assert "log π" in refusal(grpo, ratio=losses.log_policy)
  text = refusal(algorithms.ALGORITHMS["cispo"](), ratio=losses.log_policy)
  assert "needs a ratio" in text
  text = refusal(algorithms.rloo(beta=0.0), kl=KL(k3, 0.1, ratio_weighted=True))
  assert "needs a ratio" in text


def test_warnings():
  def said(row, updates=1, group=8):
    return " ".join(validate.warnings(row, updates=updates, group=group))

  rows = algorithms.ALGORITHMS
  assert "clip never binds" in said(rows["grpo"]())
  assert not said(rows["grpo"](), updates=4)
  assert "4e-4" in said(rows["gspo"](0.2, 0.2), updates=4)
  assert not said(rows["gspo"](), updates=4)
  assert "nothing is held" in said(rows["kl_cov"]())
  assert "never below 0" in said(rows["r1"](), updates=4)
  assert "off policy" in said(rows["rloo"](), updates=4)
  assert "twice the plain mean" in said(rows["grpo"](), updates=4, group=2)
  assert not said(rows["grpo_sequence"]())


def test_soft_overlong_in_tokens():
  penalty = SoftOverlong(100, 20)
  lengths = np.array([80, 90, 100, 101])
  np.testing.assert_allclose(penalty(lengths), [0, -0.5, -1, -1])


def test_a_reference_that_is_the_policy_is_said():
  row = made("grpo", refresh_every=1)
  assert "the KL to it is 0" in " ".join(
    validate.warnings(row, updates=4, group=8)
  )


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("os:getcwd", "gives str, not an Algorithm"),
    ("test_adjust:broken", "cannot be made: ZeroDivisionError"),
  ],
)
def test_constructors_of_ones_own_that_are_none(name, words):
  with pytest.raises(UserError, match=words):
    made(name)


def broken():
  return 1 / 0


def test_adaptive_kl_is_bounded():
  scale = np.float32(1)
  for measured, want in ((1e9, 1024.0), (0.0, 1 / 1024)):
    for _ in range(40):
      scale = Adaptive(0.1)(scale, np.float32(measured))
    assert scale == want


def test_an_outcome_is_compared_by_what_it_is():
  assert Outcome(advantages.group_mean) == algorithms.GROUP_MEAN
