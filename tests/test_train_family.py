"""The rows that need a host, through the command: run, killed, resumed."""

import numpy as np
import pytest
import train_runs
from train_runs import assert_same_run, read_metrics, run, train

from grpo_jax.checkpoint import open_run

SHORT = (
  "--config.warmup.steps=2",
  "--config.steps=5",
  "--config.eval.every=0",
  "--config.checkpoint.every=2",
  "--config.checkpoint.keep_last=9",
)


def flags(**algorithm):
  return [f"--config.algorithm.{k}={v}" for k, v in algorithm.items()]


RUNS = {
  "ppo": flags(name="ppo", beta=0.05, pretrain_steps=2),
  "a shared head": flags(name="ppo", shared=True, beta=0, lam=1.0),
  "dapo": flags(name="dapo", rounds=3),
  "a reference that moves": flags(
    name="grpo", reference_decay=0.9, reference_every=3, kl_target=0.01
  ),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
  """One warm-up for all: arms begin from it."""
  path = tmp_path_factory.mktemp("family") / "warm"
  out = train(path, "--config.warmup.steps=2", "--config.steps=0")
  assert out["code"] == 0, out["err"]
  return f"--config.init_from={path}@2"


def last(workdir):
  return read_metrics(workdir)[-1]


@pytest.mark.parametrize("name", RUNS)
def test_killed_and_resumed_it_is_the_same_run(name, tmp_path, warm):
  argv = (warm, *SHORT, *RUNS[name])
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  out = train(whole, *argv)
  assert out["code"] == 0, out["err"]
  train(cut, *argv, kill=("SIGKILL", r"step +3 "))
  out = train(cut, *argv)
  assert out["code"] == 0, out["err"]
  assert_same_run(whole, cut, 5)
  for line in read_metrics(whole):
    assert not line["update/nonfinite"]
  if name in ("ppo", "a shared head"):
    for x, y in zip(
      *(train_runs.arrays(path, 5, "critic") for path in (whole, cut))
    ):
      np.testing.assert_array_equal(x, y)
    assert "value/explained_variance" in last(whole)
  if name == "ppo":  # the first two steps are the critic's alone
    zero, two, four = (
      train_runs.arrays(whole, k, "trainable") for k in (0, 2, 4)
    )
    assert all((x == y).all() for x, y in zip(zero, two))
    assert any((x != y).any() for x, y in zip(two, four))
  if name == "a reference that moves":
    assert last(whole)["kl/scale"] != 1
    for x, y in zip(
      train_runs.arrays(whole, 4, "ref"), train_runs.arrays(whole, 5, "ref")
    ):
      assert (x != y).any()


def test_dynamic_sampling_trains_on_useful_groups(tmp_path, warm):
  workdir = tmp_path / "run"
  out = train(workdir, warm, *SHORT, *flags(name="dapo", rounds=6))
  assert out["code"] == 0, out["err"]
  lines = read_metrics(workdir)
  assert any(line["group/rounds"] > 1 for line in lines)
  drawn = 0
  for line in lines:
    groups = train_runs.read_rollouts(workdir, line["step"])
    mixed = [len({r["success"] for r in g["completions"]}) > 1 for g in groups]
    filled = line["group/accepted_frac"] * line["group/rounds"] * 4 >= 4
    assert all(mixed) or not filled
    ordinals = [g["ordinal"] for g in groups if len(g["completions"])]
    assert ordinals == sorted(ordinals) or not filled
    assert min(ordinals) >= drawn
    drawn += round(line["group/rounds"]) * 4
    assert max(ordinals) < drawn
  with open_run(workdir) as checkpoints:
    assert checkpoints.host(5)["totals"]["batches"] * 4 == drawn


@pytest.mark.parametrize(
  ("name", "more"),
  [
    ("remax", ()),
    ("rft", ()),
    ("dpo", ("--config.sampling.group_size=2",)),
    ("grpo_process", ("--config.task.name=tiny_config:stepwise",)),
    ("kl_cov", ("--config.batch.epochs=2",)),
  ],
)
def test_a_step_is_rebuilt_by_inspect(name, more, tmp_path, warm):
  workdir = tmp_path / "run"
  short = [x for x in SHORT if "steps=5" not in x]
  out = train(
    workdir, warm, *short, "--config.steps=3", *flags(name=name), *more
  )
  assert out["code"] == 0, out["err"]
  shown = run("inspect", f"--workdir={workdir}", "--step=3", "--group=1")
  assert shown["code"] == 0, shown["err"]
  assert last(workdir)["update/grad_norm"] >= 0
  if name == "grpo_process":  # tokens of a row differ in what follows them
    groups = train_runs.read_rollouts(workdir, 3)
    assert any("steps" in row for g in groups for row in g["completions"])
