"""A run that trains adapters: killed and resumed, evaluated, exported."""

import functools
import json
import shutil

import numpy as np
import pytest
from train_runs import (
  arrays,
  assert_one_line,
  assert_same_run,
  baseline,
  run,
  scratch,
  stable_metrics,
  train,
)

HOW = (
  "--config.init_from={}@4",
  "--config.lora.rank=2",
  "--config.lora.targets=attn/.*|mlp/up",
  "--config.algorithm.beta=0.1",
)


def flags():
  return [HOW[0].format(baseline()), *HOW[1:]]


@functools.cache
def adapted():
  path = scratch() / "adapted"
  result = train(path, *flags())
  assert result["code"] == 0, result["err"]
  return path


def test_checkpoints_hold_the_adapters_alone():
  path = adapted()
  # Five projections' factors, of one layer.
  trained = arrays(path, 8, "trainable")
  assert len(trained) == 10
  base = sum(x.size for x in arrays(baseline(), 4, "trainable"))
  assert sum(x.size for x in trained) < base / 3
  begun = stable_metrics(path)
  assert any(line.get("kl/ref", 0) > 0 for line in begun)
  first = next(line for line in begun if line["step"] == 1)
  assert first["kl/ref"] == 0  # the reference is the policy it began with
  frozen = list((path / "frozen").iterdir())
  assert [x.name for x in frozen] == ["0"]


def test_killed_and_resumed_is_the_same_run(tmp_path):
  workdir = tmp_path / "run"
  result = train(workdir, *flags(), kill=("SIGKILL", r"step +6  rl", 0))
  assert result["code"] != 0
  result = train(workdir, *flags())
  assert result["code"] == 0, result["err"]
  assert "resumed at step" in result["out"]
  assert_same_run(workdir, adapted(), step=8)


def test_it_is_evaluated_and_exported(tmp_path):
  pytest.importorskip("safetensors")
  few = ("--prompts=12", "--samples=2")
  mine = run("evaluate", f"--workdir={adapted()}@8", *few)
  assert mine["code"] == 0, mine["err"]
  # A run without adapters may be the first, and another task may be given.
  full = f"--workdir={baseline()}@12"
  other = run("evaluate", full, f"--against={adapted()}@8", *few)
  assert other["code"] == 0, other["err"]
  assert (
    json.loads(other["out"])["against"]["greedy"]
    == (json.loads(mine["out"])["greedy"])
  )
  task = "--config=tests/tiny_config.py"
  asked = run("evaluate", f"--workdir={adapted()}@8", task, *few)
  assert asked["code"] == 0, asked["err"]
  assert json.loads(asked["out"])["greedy"] == json.loads(mine["out"])["greedy"]
  out = f"{tmp_path}/model"
  result = run("export", f"--workdir={adapted()}@8", f"--out={out}")
  assert result["code"] == 0, result["err"]
  how = ("--config=tests/tiny_config.py", "--config.tokenizer=byte", *few)
  theirs = run("evaluate", f"--model={out}", *how)
  assert theirs["code"] == 0, theirs["err"]
  mine, theirs = json.loads(mine["out"]), json.loads(theirs["out"])
  assert mine["greedy"] == theirs["greedy"]
  assert mine["sampled"]["mean"] == theirs["sampled"]["mean"]

  only = f"{tmp_path}/adapters"
  result = run(
    "export", f"--workdir={adapted()}@8", f"--out={only}", "--adapters"
  )
  assert result["code"] == 0, result["err"]
  result = run(
    "export", f"--workdir={baseline()}", f"--out={tmp_path}/x", "--adapters"
  )
  assert_one_line(result, 2, "no adapters")
  # A new run may begin with them: its first policy is the one exported.
  first, few = tmp_path / "first", ("--config.steps=1", "--config.eval.every=1")
  result = train(first, flags()[0], f"--config.lora.path={only}", *few)
  assert result["code"] == 0, result["err"]
  a, b = arrays(first, 0, "trainable"), arrays(adapted(), 8, "trainable")
  for x, y in zip(a, b):
    np.testing.assert_array_equal(x, y)
  config = json.loads((first / "config.json").read_text())["config"]["lora"]
  assert (config["rank"], config["alpha"]) == (2, 32.0)
  assert stable_metrics(first)[1]["kl/ref"] == 0
  mine = run("evaluate", f"--workdir={first}@0", "--prompts=12")
  assert mine["code"] == 0, mine["err"]
  # What else is said of them must agree.
  path = f"--config.lora.path={only}"
  for wrong in ([flags()[1]], [flags()[1], "--config.lora.rank=3"]):
    result = train(tmp_path / "wrong", flags()[0], path, *wrong)
    assert_one_line(result, 2, "rank 2", "mlp/gate")
  result = train(tmp_path / "wrong", f"--config.init_from={adapted()}@8", path)
  assert_one_line(result, 2, "adapters of its own")


def test_a_bfloat16_base_becomes_float32_weights(tmp_path):
  few = ("--config.steps=1", "--config.eval.every=0")
  half = tmp_path / "half"
  result = train(half, *flags(), *few, "--config.model.dtype=bfloat16")
  assert result["code"] == 0, result["err"]
  full = tmp_path / "full"
  result = train(full, f"--config.init_from={half}@1", *few)
  assert result["code"] == 0, result["err"]
  assert {x.dtype.name for x in arrays(full, 0, "trainable")} == {"float32"}


def test_a_full_run_may_begin_with_an_adapted_one(tmp_path):
  few = ("--config.steps=1", "--config.eval.every=1")
  result = train(tmp_path / "full", f"--config.init_from={adapted()}@8", *few)
  assert result["code"] == 0, result["err"]
  assert len(arrays(tmp_path / "full", 1, "opt")) > 10
  evaluated = stable_metrics(tmp_path / "full")[0]
  last = [x for x in stable_metrics(adapted()) if "eval/greedy" in x][-1]
  assert evaluated["eval/greedy"] == last["eval/greedy"]
  result = train(
    tmp_path / "other",
    *flags()[1:],
    "--config.lora.rank=3",
    *few,
    f"--config.init_from={adapted()}@8",
  )
  assert result["code"] == 0, result["err"]
  evaluated = stable_metrics(tmp_path / "other")[0]
  assert evaluated["eval/greedy"] == last["eval/greedy"]


def test_the_weights_under_the_adapters_are_needed(tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(adapted(), workdir)
  shutil.rmtree(workdir / "frozen")
  result = run("evaluate", f"--workdir={workdir}@8", "--prompts=4")
  assert_one_line(result, 2, "frozen", "missing")


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (["--config.lora.rank=2"], ["model.path or init_from"]),
    (["FROM", "--config.lora.rank=-1"], ["lora.rank"]),
    (["FROM", "--config.lora.rank=2", "--config.lora.targets=q"], ["attn/q"]),
    (["FROM", "--config.lora.rank=2", "--config.lora.targets=("], ["pattern"]),
    (["FROM", "--config.lora.path=nowhere"], ["nowhere", "missing"]),
    (
      ["FROM", "--config.lora.rank=2", "--config.algorithm.name=ppo"],
      ["algorithm.shared"],
    ),
  ],
)
def test_mistakes_are_one_line(tmp_path, given, words):
  given = [flags()[0] if x == "FROM" else x for x in given]
  assert_one_line(train(tmp_path / "run", *given), 2, *words)
