"""What commands print: plans, probes, JSON; into pipes and on terminals."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
import train_runs
from train_runs import CONFIG, baseline, run, train

from grpo_jax.records import read_metrics


def test_explain_stops(tmp_path):
  result = train(tmp_path / "run", "--explain")
  assert result["code"] == 0, result["err"]
  assert result["err"] == ""
  assert "compiled" not in result["out"]
  assert "4 of imitation, then 8 of grpo_sequence" in result["out"]
  assert "4 prompts x 4 = 16 completions" in result["out"]
  assert not (tmp_path / "run").exists()


def test_probe_of_a_run_without_warm_up_leaves_it_free(tmp_path):
  start = f"--config.init_from={baseline()}@12"
  result = train(tmp_path / "run", start, "--probe=4")
  assert result["code"] == 0, result["err"]
  assert re.findall("compiled (\\w+)", result["out"]) == ["optimizer", "sample"]
  assert result["out"].count("extracted") == 3
  assert "success rate about" in result["out"]
  again = train(tmp_path / "run", start, "--probe=4", "--config.eval.every=2")
  assert again["code"] == 0, again["err"]


def test_evaluate_prints_json_alone():
  workdir = f"--workdir={baseline()}@best"
  result = run("evaluate", workdir, "--samples=2", "--prompts=10")
  assert result["code"] == 0, result["err"]
  out = json.loads(result["out"])
  assert out["step"] in (4, 8, 10, 12)
  assert out["sampled"]["samples"] == 2
  assert out["sampled"]["prompts"] == out["greedy"]["prompts"] == 10
  assert set(out["sampled"]["pass_at_k"]) == {"1", "2"}


def test_dead_batches_move_nothing(tmp_path):
  workdir = tmp_path / "run"
  result = train(
    workdir,
    "--config.task.name=tiny_config:constant",
    "--config.algorithm.beta=0",
    "--config.warmup.steps=0",
    "--config.steps=12",
    "--config.eval.every=0",
  )
  assert result["code"] == 0, result["err"]
  assert result["out"].count("10 steps without a mixed group") == 1
  lines = [x for x in read_metrics(workdir) if "loss" in x]
  assert [x["update/dead"] for x in lines] == [1] * 12
  assert lines[-1]["update/dead_total"] == 12
  for item in ("trainable", "opt"):
    first, last = (train_runs.arrays(workdir, k, item) for k in (0, 12))
    for x, y in zip(first, last):
      np.testing.assert_array_equal(x, y)


def test_sigterm_in_a_real_compilation(tmp_path):
  moment = ("SIGTERM", "compiled optimizer", 1.0)
  result = train(tmp_path / "run", kill=moment, TINY_CACHE="")
  assert result["code"] == 75, result["err"]
  assert result["after_signal"] < 3
  assert "stopped by SIGTERM; nothing to save yet" in result["out"]


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path):
  result = train(tmp_path / "run", "--explain", TINY_CACHE="/dev/null/cache")
  assert (result["code"], result["err"]) == (0, "")


@pytest.mark.slow
def test_a_pipe_that_closes_does_not_end_the_run(tmp_path):
  command = [sys.executable, "-m", "grpo_jax.train", CONFIG]
  with subprocess.Popen(
    [*command, f"--workdir={tmp_path / 'run'}"],
    cwd=train_runs.ROOT,
    env=train_runs.environment(PYTHONUNBUFFERED="1"),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
  assert process.returncode == 0, error
  assert error == ""
  train_runs.assert_same_run(baseline(), tmp_path / "run")


def on_terminal(argv):
  """Runs a command on a pseudo-terminal; returns its code and its output."""
  ours, theirs = pty.openpty()
  env = train_runs.environment(TERM="xterm-256color", COLUMNS="100")
  with subprocess.Popen(
    [sys.executable, *argv],
    cwd=train_runs.ROOT,
    env=env,
    stdin=theirs,
    stdout=theirs,
    stderr=theirs,
  ) as process:
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the other side is closed
      while part := os.read(ours, 1 << 16):
        text += part
  os.close(ours)
  return process.returncode, text.decode()


@pytest.mark.slow
def test_progress_on_a_terminal(tmp_path):
  code, text = on_terminal(
    ["-m", "grpo_jax.train", CONFIG, f"--workdir={tmp_path / 'run'}"]
  )
  assert code == 0, text
  plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
  assert "12/12" in plain
  assert "finished at step 12" in plain
  assert "step      8  heldout  sampled" in plain
  assert "Traceback" not in plain
  assert text.rstrip().endswith("curve.png") or "\x1b[?25h" in text
