"""A trained policy leaves: text from it, and a directory others read."""

import json

import jax
import numpy as np
import pytest
from train_runs import CONFIG, arrays, assert_one_line, baseline, run

from grpo_jax.models import weight_table
from grpo_jax.models.pretrained import open_model

pytest.importorskip("safetensors")


def test_generate_from_a_run_and_from_a_file(tmp_path):
  model = f"--model={baseline()}"
  how = ("--max_tokens=6", "--temperature=1", "--samples=2")
  one = run("generate", model, "--prompt=cat>", *how)
  assert one["code"] == 0, one["err"]
  assert one["out"] == run("generate", model, "--prompt=cat>", *how)["out"]
  (tmp_path / "prompts.txt").write_text("cat>\n\ndog>\n")
  file = run("generate", model, f"--file={tmp_path}/prompts.txt", *how)
  assert file["code"] == 0, file["err"]
  lines = [json.loads(line) for line in file["out"].splitlines()]
  assert [line["prompt"] for line in lines] == ["cat>", "dog>"]
  assert all(len(line["completions"]) == 2 for line in lines)


def test_export_holds_the_trained_weights(tmp_path):
  out = tmp_path / "model"
  result = run("export", f"--workdir={baseline()}@12", f"--out={out}")
  assert result["code"] == 0, result["err"]
  opened = open_model(str(out))
  arch = opened.architecture(258)
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shardings = jax.tree.map(
    lambda x: where,
    weight_table.axes(arch),
    is_leaf=lambda x: isinstance(x, tuple),
  )
  got = jax.tree.leaves(opened.load(arch, shardings))
  for a, b in zip(got, arrays(baseline(), 12, "trainable")):
    # Rows that no byte has are masked here and must not be sampled there.
    np.testing.assert_array_equal(a, b[:258] if len(b) == 320 else b)
  stops = json.loads((out / "generation_config.json").read_text())
  assert stops == {"eos_token_id": 257, "pad_token_id": 256}
  again = run("export", f"--workdir={baseline()}@12", f"--out={out}")
  assert_one_line(again, 2, "holds a model already")


def test_an_exported_model_is_evaluated_like_its_run(tmp_path):
  out, few = f"{tmp_path}/model", ("--prompts=12", "--samples=2")
  run("export", f"--workdir={baseline()}@12", f"--out={out}")
  mine = run("evaluate", f"--workdir={baseline()}@12", *few)
  assert mine["code"] == 0, mine["err"]
  how = (CONFIG, "--config.tokenizer=byte", *few)
  theirs = run("evaluate", f"--model={out}", *how)
  assert theirs["code"] == 0, theirs["err"]
  other = run("evaluate", f"--model={baseline()}@12", *how)  # a run's task
  mine, theirs, other = (json.loads(x["out"]) for x in (mine, theirs, other))
  assert mine["step"] == other["step"] == 12
  assert theirs["model"] == out
  for key in ("sampled", "greedy", "majority_answer"):
    assert mine[key] == theirs[key] == other[key]
  assert mine["majority_answer"] == pytest.approx(1 / 12)


@pytest.mark.parametrize(
  ("command", "flags", "words"),
  [
    ("generate", ["--prompt=a"], ["--model"]),
    ("generate", ["--model=nothing/here/x", "--prompt=a"], ["nothing/here"]),
    ("generate", ["--model=RUN"], ["--prompt", "--file", "--chat"]),
    ("generate", ["--model=RUN", "--chat"], ["chat"]),
    ("generate", ["--model=RUN", "--file=no.txt"], ["no.txt"]),
    ("generate", ["--model=RUN@7", "--prompt=a"], ["no checkpoint of step 7"]),
    ("evaluate", ["--model=RUN", "--workdir=RUN"], ["one of"]),
    ("evaluate", ["--model=no/model"], ["--config=FILE"]),
    ("evaluate", ["--model=/no/model", CONFIG], ["/no/model"]),
    ("export", ["--workdir=RUN"], ["--out"]),
    ("export", ["--workdir=nowhere", "--out=x"], ["nowhere"]),
  ],
)
def test_mistakes_are_one_line(command, flags, words):
  flags = [flag.replace("RUN", str(baseline())) for flag in flags]
  assert_one_line(run(command, *flags), 2, *words)
