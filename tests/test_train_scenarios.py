"""Signals, full disks and bad numbers, each at a chosen moment of a run."""

import functools
import json
import subprocess
import sys

import pytest
import train_runs

ESSENTIAL = (
  "warm-up's update",
  "begin of rl",
  "generation",
  "reward",
  "update",
  "evaluation",
  "save",
  "sigterm_in_compilation",
  "sigterm_in_probe",
  "probe_then_train",
  "nonfinite",
  "reward_raises_on_some_rows",
  "disk full in metrics",
  "disk full in a checkpoint",
)
SLOW = (
  "warm-up",
  "scores",
  "record",
  "first evaluation",
  "last evaluation",
  "wait for a save",
  "sigterm_at_the_end",
  "disk full in rollouts",
  "disk full in an evaluation",
  "disk full in TensorBoard",
)


@functools.cache
def results(names):
  """Runs scenarios in one process; see `scenarios.py`."""
  train_runs.baseline()  # fills the cache of compiled programs
  root = train_runs.scratch() / f"scenarios{len(names)}"
  command = [sys.executable, "tests/scenarios.py", str(root), *names]
  done = subprocess.run(
    command,
    cwd=train_runs.ROOT,
    env=train_runs.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def result(name):
  out = results(ESSENTIAL if name in ESSENTIAL else SLOW)[name]
  assert "broken" not in out, out["broken"]
  if "skipped" in out:
    pytest.skip(out["skipped"])
  return out


def every(kind):
  """Scenarios of a kind; those that are not essential are slow."""
  chosen = [name for name in (*ESSENTIAL, *SLOW) if kind(name)]
  slow = pytest.mark.slow
  return [pytest.param(n, marks=slow if n in SLOW else ()) for n in chosen]


OTHERS = ("probe_then_train", "nonfinite", "reward_raises_on_some_rows")


@pytest.mark.parametrize(
  "name", every(lambda n: "disk" not in n and n not in OTHERS)
)
def test_sigterm(name):
  out = result(name)
  if name == "sigterm_at_the_end":  # nothing is left to save
    assert out["code"] == 0
    assert out["same"] == ""
    return
  assert out["code"] == 75, out
  assert out["seconds"] < 2
  assert "Run the same command" in out["out"]
  assert out["again"]["code"] == 0, out["again"]
  assert out["same"] == ""


@pytest.mark.parametrize("name", every(lambda n: "disk" in n))
def test_full_disk(name):
  out = result(name)
  for run in (out, out["still_full"]):
    assert run["code"] == 2, run
    assert run["err"].count("\n") == 1
    assert "no space left on device" in run["err"]
  assert out["intact"]
  assert out["again"]["code"] == 0, out["again"]
  assert out["same"] == ""


def test_probe_shows_groups_and_changes_nothing():
  out = result("probe_then_train")
  assert out["code"] == 0
  assert out["out"].count("extracted") == 3
  assert "success rate about" in out["out"].splitlines()[-1]
  assert out["same"] == ""


def test_five_updates_that_are_not_finite():
  out = result("nonfinite")
  assert out["code"] == 1
  assert out["err"].startswith("error: 5 updates in a row were not finite")
  assert out["err"].count("\n") == 1
  assert "saved step 9" in out["err"]
  assert out["saved"] == [f"{step:08d}.npz" for step in range(5, 10)]
  assert "rollout.ids" in out["names"]
  assert not out["moved"]
  assert [x["update/nonfinite_total"] for x in out["lines"][4:]] == [
    1,
    2,
    3,
    4,
    5,
  ]


def test_a_reward_that_raises_on_some_rows():
  out = result("reward_raises_on_some_rows")
  assert out["code"] == 0
  assert out["out"].count("could not be computed") == 1
  assert "ZeroDivisionError" in out["out"]
  errors = [x["reward/errors"] for x in out["lines"] if "reward/errors" in x]
  assert 0 < sum(errors) < 16 * 8
