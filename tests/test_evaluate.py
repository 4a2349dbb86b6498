"""The evaluation in the loop and as a command, alone and of two policies."""

import json
import math
import shutil

import numpy as np
import pytest
from train_runs import assert_one_line, baseline, run, train

from grpo_jax import evaluate, metrics, policy
from grpo_jax.errors import UserError
from grpo_jax.estimates import Outcome
from grpo_jax.records import read_metrics

FEW = ("--samples=2", "--prompts=5")


def outcome(success, answers):
  success = np.array(success, np.float32)
  return Outcome(
    success=success,
    scored=np.ones(success.shape, bool),
    lengths=np.full(success.shape, 3),
    truncated=np.zeros(success.shape, bool),
    answers=np.array(answers, object).reshape(success.shape),
    parts={"text": success * 2, "mute": success * math.nan},
  )


def test_metrics_of_one_sample_and_of_several():
  one = outcome([[1], [0]], ["a", "b"])
  several = outcome([[1, 0, 0], [0, 0, 0]], list("abcabb"))
  got = evaluate.eval_metrics(one, one)
  assert not any("_at_" in name for name in got)
  assert "eval/part/mute" not in got
  assert got["eval/part/text"] == 1 and got["eval/part/text_stderr"] == 1
  got = evaluate.eval_metrics(several, one)
  assert got["eval/pass_at_3"] == 0.5 and got["eval/pass_at_3_stderr"] == 0.5
  assert got["eval/maj_at_3"] == pytest.approx(1 / 6)
  assert all(map(metrics.documented, got))
  silent = outcome([[1, 0], [0, 0]], [None] * 4)
  got = evaluate.eval_metrics(silent, one)
  assert "eval/pass_at_2" in got and "eval/maj_at_2" not in got


def test_in_the_loop_with_several_samples_of_one_prompt(tmp_path):
  how = ("--config.eval.samples=2", "--config.eval.prompts=1")
  short = ("--config.warmup.steps=0", "--config.steps=1")
  result = train(tmp_path / "run", *how, *short)
  assert result["code"] == 0, result["err"]
  lines = [x for x in read_metrics(tmp_path / "run") if "eval/sampled" in x]
  assert [x["step"] for x in lines] == [0, 1]
  for line in lines:
    assert line["eval/pass_at_2"] in (0, 1)
    assert line["eval/maj_at_2"] in (0, 0.5, 1)
    assert math.isnan(line["eval/pass_at_2_stderr"])
    assert all(map(metrics.documented, line.keys() - {"step"}))


def test_a_policy_does_not_differ_from_itself():
  workdir = str(baseline())
  both = (f"--workdir={workdir}@12", f"--against={workdir}")
  result = run("evaluate", *both, "--samples=2", "--prompts=1")
  assert result["code"] == 0, result["err"]
  out = json.loads(result["out"])
  assert out["sampled"] == out["against"]["sampled"]
  assert out["sampled"]["stderr"] is None
  assert out["sampled"]["pass_at_k_stderr"] == {"1": None, "2": None}
  mean = out["difference"]["sampled"]["mean"]
  assert mean["difference"] == 0 and mean["low"] is None
  assert (mean["better"], mean["worse"], mean["equal"]) == (0, 0, 1)


def test_two_policies_live_and_from_files(tmp_path):
  w, a, b = baseline(), tmp_path / "a.jsonl", tmp_path / "b.jsonl"
  first = run(
    "evaluate", f"--workdir={w}@12", f"--against={w}@4", f"--out={a}", *FEW
  )
  assert first["code"] == 0, first["err"]
  second = run(
    "evaluate", f"--workdir={w}@4", f"--against={a}", f"--out={b}", *FEW
  )
  assert second["code"] == 0, second["err"]
  third = run("evaluate", f"--results={a}", f"--against={b}")
  assert third["code"] == 0 and third["err"] == ""
  one, two, three = (json.loads(x["out"]) for x in (first, second, third))
  assert one == three  # the same without sampling
  assert two["sampled"] == one["against"]["sampled"]
  assert (one["step"], one["against"]["step"]) == (12, 4)
  for how in ("sampled", "greedy"):
    x, y = (z["difference"][how]["mean"] for z in (one, two))
    gap = one[how]["mean"] - one["against"][how]["mean"]
    assert x["difference"] == pytest.approx(gap, abs=1e-6)
    assert x["difference"] == -y["difference"]
    assert (x["better"], x["worse"]) == (y["worse"], y["better"])
  table = run("evaluate", f"--results={a}", f"--against={b}", "--format=table")
  assert "baseline@12" in table["out"] and "pass@2" in table["out"]
  other = run("evaluate", f"--workdir={w}@4", f"--against={a}", "--prompts=4")
  assert_one_line(other, 2, "not asked the same", "prompts_hash:")
  assert "compiled" not in other["err"]
  text = b.read_text()
  assert '"grading": {}' in text
  b.write_text(text.replace('"grading": {}', '"grading": {"grade": "lenient"}'))
  other = run("evaluate", f"--results={a}", f"--against={b}")
  assert_one_line(other, 2, "not asked the same", "grading:", "lenient")


def test_a_second_policy_takes_the_firsts_configuration(tmp_path):
  other = tmp_path / "other"
  shutil.copytree(baseline(), other)
  stored = json.loads((other / "config.json").read_text())
  stored["config"]["eval"]["top_k"] = 3
  stored["config"]["model"]["layers"] = 2
  stored["config"]["seed"] = 7
  (other / "config.json").write_text(json.dumps(stored))
  c = policy.stored_config(str(baseline()))
  got = policy.compared_by(c, str(other), given=False)
  assert got["model"]["layers"] == 2 and got["eval"]["top_k"] == 0
  assert got["seed"] == c["seed"] == 0  # the same random numbers
  assert c["model"]["layers"] == 1
  stored["config"]["task"]["heldout"] = 32
  (other / "config.json").write_text(json.dumps(stored))
  with pytest.raises(UserError, match=r"task\.heldout: None -> 32.*--config"):
    policy.compared_by(c, str(other), given=False)
  assert policy.compared_by(c, str(other), given=True)["task"] == c["task"]


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (["--workdir=RUN", "--against=RUN@7"], ["step 7"]),
    (["--workdir=RUN", "--against=/no/such"], ["/no/such"]),
    (["--workdir=RUN", "--against=/no/such.jsonl"], ["/no/such.jsonl"]),
    (["--workdir=RUN", "--out=/no/such/x.jsonl"], ["--out=/no/such/x.jsonl"]),
    (["--workdir=RUN", "--out=x.json"], ["FILE.jsonl"]),
    (["--workdir=RUN", "--samples=1025"], ["1025"]),
    (["--results=x.jsonl"], ["--against=FILE"]),
    (["--results=x.jsonl", "--against=RUN"], ["--against=FILE"]),
    (["--results=x.jsonl", "--workdir=RUN"], ["--results=FILE"]),
    (["--results=x.jsonl", "--samples=4"], ["--results=FILE", "--samples"]),
    (["--results=x.jsonl", "--against=y.jsonl"], ["y.jsonl cannot be read"]),
  ],
)
def test_mistakes_are_one_line(argv, words):
  argv = [x.replace("RUN", str(baseline())) for x in argv]
  result = run("evaluate", *argv)
  assert_one_line(result, 2, *words)
