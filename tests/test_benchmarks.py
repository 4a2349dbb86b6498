"""Benchmarks: the work is what it says, and every script runs, tiny."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from train_runs import ROOT, environment

from experiments.benchmarks import gpu, growth, workloads
from grpo_jax.errors import UserError
from grpo_jax.models.architecture import Architecture

pytest.importorskip("transformers")


def run(module, *argv, cwd=ROOT):
  return subprocess.run(
    [sys.executable, "-m", f"experiments.benchmarks.{module}", *argv],
    capture_output=True,
    text=True,
    cwd=cwd,
    env=environment(JAX_COMPILATION_CACHE_DIR=""),
  )


def test_one_json_line_of_a_step():
  result = run("step", "--workload=tiny:2x2x8x4", "--steps=2", "--threads=1")
  assert result.returncode == 0, result.stderr
  found = json.loads(result.stdout)
  parts = [found[k] for k in ("rollout_s", "score_s", "update_s", "other_s")]
  assert sum(parts) == pytest.approx(found["step_s"], abs=1e-3)
  assert min(found["step_all"][1:]) == pytest.approx(found["step_s"], abs=1e-3)
  assert found["compiled_after_start"] == 0
  assert found["computed_frac_update"] == found["computed_frac_decode"] == 1
  assert found["gen_tok_s"] * found["rollout_s"] == pytest.approx(16, rel=0.1)
  assert found["threads"] == 1


def test_the_gpus_script_on_a_cpu():
  result = run("gpu", "--size=tiny", "--steps=1")
  assert result.returncode == 0, result.stderr
  found = json.loads(result.stdout)
  assert found["update_flops"] > 0 and "update_mfu" not in found


def test_flops_and_bytes_by_hand():
  arch = Architecture(10, 10, 2, 4, 2, 1, 2, 6, tied=True)
  w = workloads.Workload(3, 5, 7, 11)
  layer = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6 + 2 * 4
  tokens, written = 3 * (7 + 55), 3 * 55
  want = 6 * ((2 * layer + 4) * tokens + 40 * written)
  want += 12 * 2 * 4 * 3 * (7 * 7 / 2 + 55 * (7 + 5.5))
  assert gpu.flops(arch, w) == want
  kv = 2 * 2 * 1 * 2 * 2
  read = (2 * layer + 4 + 40) * 2 + kv * (21 + 15 * 5.5)
  assert gpu.decode_bytes(arch, w, 2) == 11 * read


def test_work_that_is_not_there():
  with pytest.raises(UserError, match="W1, W2"):
    workloads.named("W9")
  assert workloads.named("tiny:2x3x4x5").completion == 5
  result = run("compare", "--peers=/nowhere")
  assert result.returncode == 2 and result.stderr.count("\n") == 1


def test_a_ragged_workload_has_the_stated_lengths():
  w = workloads.WORKLOADS["W4"]
  lengths = w.lengths()
  assert lengths.shape == (8, 8) and lengths.max() <= 256
  assert abs(lengths.mean() - 64) < 15
  assert (lengths == w.lengths()).all()
  assert (workloads.WORKLOADS["W1"].lengths() == 64).all()


def test_the_growth_picture(tmp_path):
  rows = [
    {**n, "step_s": growth.shared(n) / 1e4, "rss_gib": 1.0}
    for n in growth.points()
  ]
  assert growth.flat(growth.MIDDLE) > 3 * growth.shared(growth.MIDDLE)
  growth.draw(rows, str(tmp_path / "growth.png"))
  assert os.path.getsize(tmp_path / "growth.png") > 10_000
  assert np.unique([str(n) for n in growth.points()]).size == 18
