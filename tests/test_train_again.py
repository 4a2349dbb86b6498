"""The same command again, a changed one, a run from another's parameters."""

import json
import shutil

import train_runs
from train_runs import assert_one_line, baseline, train

from grpo_jax import metrics


def test_finished_run_says_so(tmp_path):
  before = train_runs.rollout_bytes(baseline())
  result = train(baseline())
  assert result["code"] == 0, result["err"]
  assert "finished already at step 12" in result["out"]
  assert "compiled" not in result["out"]
  assert train_runs.rollout_bytes(baseline()) == before


def test_changed_configuration_is_refused_by_name():
  result = train(baseline(), "--config.seed=1", "--config.eval.every=2")
  assert_one_line(result, 2, "eval.every: 4 -> 2; seed: 0 -> 1")


def test_what_does_not_matter_may_change(tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(baseline(), workdir)
  free = ("--config.log.every=3", "--config.checkpoint.keep_last=5")
  assert train(workdir, *free)["code"] == 0


def test_every_metric_is_documented():
  for line in train_runs.stable_metrics(baseline()):
    for name in line:
      assert name == "step" or metrics.documented(name), name


def test_two_arms_share_a_warm_up(tmp_path):
  source, lineage = f"{baseline()}@4", {"run": str(baseline()), "step": 4}
  lineage["parent"] = None
  # The arms differ in their rewards, which are no part of what is compiled.
  for name in ("even", "constant"):
    task = f"--config.task.name=tiny_config:{name}"
    short = ("--config.steps=2", "--config.eval.every=0")
    result = train(
      tmp_path / name, f"--config.init_from={source}", task, *short
    )
    assert result["code"] == 0, result["err"]
    assert "compiled imitate" not in result["out"]
    stored = json.loads((tmp_path / name / "config.json").read_text())
    assert stored["lineage"] == lineage
    with train_runs.open_run(tmp_path / name) as checkpoints:
      assert checkpoints.host(2)["lineage"] == lineage
      assert checkpoints.host(0)["phase"] == "rl"
    starts = train_runs.arrays(tmp_path / name, 0, "trainable")
    for x, y in zip(starts, train_runs.arrays(baseline(), 4, "trainable")):
      assert (x == y).all()
  first, second = (
    train_runs.read_texts(tmp_path / name, 1) for name in ("even", "constant")
  )
  assert first == second
  # A copy of a copy remembers both.
  grandchild = tmp_path / "grandchild"
  source = f"--config.init_from={tmp_path / 'even'}@2"
  assert train(grandchild, source, "--probe=4")["code"] == 0
  stored = json.loads((grandchild / "config.json").read_text())
  assert stored["lineage"]["parent"] == lineage


def test_bad_sources_are_refused_before_any_work(tmp_path):
  def start(source, *argv):
    return train(tmp_path / "run", f"--config.init_from={source}", *argv)

  assert_one_line(start("/no/such"), 2, "/no/such")
  assert_one_line(start(f"{baseline()}@7"), 2, "step 7", "10, 12")
  assert_one_line(start(f"{baseline()}@last"), 2, "RUN@STEP")
  wide = start(f"{baseline()}@best", "--config.model.ffn=64")
  assert_one_line(wide, 2, "model.ffn: 32 -> 64")
