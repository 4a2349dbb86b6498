"""A Flax module trained, killed, evaluated and asked, as any policy."""

import pytest
from train_runs import (
  assert_one_line,
  assert_same_run,
  run,
  stable_metrics,
  train,
)

OWN = "--config.model.module=own_network:make"


def test_a_module_is_trained_like_any_policy(tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  result = train(whole, OWN)
  assert result["code"] == 0, result["err"]
  lines = [x for x in stable_metrics(whole) if x.get("phase") == "rl"]
  assert len(lines) == 8
  assert max(x["sampler/logprob_gap_max"] for x in lines) < 1e-4
  result = train(killed, OWN, kill=("SIGKILL", r"step +8  rl", 0))
  assert result["code"] != 0
  result = train(killed, OWN)
  assert result["code"] == 0, result["err"]
  assert_same_run(whole, killed)
  result = run("evaluate", f"--workdir={whole}@12", "--prompts=8")
  assert result["code"] == 0, result["err"]
  result = run("generate", f"--model={whole}", "--prompt=cat>")
  assert result["code"] == 0, result["err"]
  result = run("export", f"--workdir={whole}", f"--out={tmp_path}/x")
  assert_one_line(result, 2, "model.module")


@pytest.mark.parametrize(
  ("name", "more", "words"),
  [
    ("own_network:missing", [], ["cannot be imported", "missing"]),
    ("own_network", [], ["own_network", "module:function"]),
    ("own_network:narrow", [], ["logits", "(2, 2, 4, 258)"]),
    ("own_network:raises", [], ["KeyError", "width"]),
    ("own_network:nothing", [], ["NoneType", "flax_module.nnx"]),
    ("own_network:make", ["--config.model.dtype=bfloat16"], ["model.dtype"]),
    ("own_network:make", ["--config.algorithm.name=ppo"], ["critic"]),
  ],
)
def test_mistakes_are_one_line(tmp_path, name, more, words):
  flags = [f"--config.model.module={name}", *more]
  assert_one_line(train(tmp_path / "run", *flags), 2, *words)
