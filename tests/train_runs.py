"""Runs of the commands for the tests of `test_train_*.py`, and their equality.

All share one directory of compiled programs and one uninterrupted run, made at
their first use.
"""

import atexit
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax import metrics
from grpo_jax.checkpoint import open_run
from grpo_jax.records import read_metrics, read_rollouts

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = "--config=tests/tiny_config.py"


@functools.cache
def scratch() -> pathlib.Path:
  """A directory of this test session."""
  path = pathlib.Path(tempfile.mkdtemp(prefix="grpo_jax_runs_"))
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path


def environment(**more) -> dict[str, str]:
  """One CPU device, quick compilations that are kept."""
  return {
    **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # they cost more than they save
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    "TINY_CACHE": str(scratch() / "compiled"),
    **more,
  }


@functools.cache
def _server() -> subprocess.Popen:
  server = subprocess.Popen(
    [sys.executable, "tests/forked.py"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=environment(),
    cwd=ROOT,
  )

  def end():
    server.stdin.close()
    server.stdout.close()
    server.wait()

  atexit.register(end)
  return server


def run(module: str, *argv: str, kill=None, **env) -> dict:
  """Runs a command in a fork of `forked.py`; see there."""
  job = {"module": f"grpo_jax.{module}", "argv": argv, "env": env, "kill": kill}
  server = _server()
  server.stdin.write(json.dumps(job) + "\n")
  server.stdin.flush()
  return json.loads(server.stdout.readline())


def train(workdir, *argv: str, kill=None, **env) -> dict:
  """Trains the tiny experiment."""
  return run("train", CONFIG, f"--workdir={workdir}", *argv, kill=kill, **env)


@functools.cache
def baseline() -> pathlib.Path:
  """The workdir of the uninterrupted run."""
  path = scratch() / "baseline"
  result = train(path)
  assert result["code"] == 0, result["err"]
  return path


def stable_metrics(workdir) -> list[dict]:
  """Every line, without what may differ between equal runs."""
  return [
    {k: v for k, v in line.items() if not k.startswith(metrics.VOLATILE)}
    for line in read_metrics(workdir)
  ]


def rollout_bytes(workdir) -> dict[str, bytes]:
  """File name -> contents."""
  files = pathlib.Path(workdir, "rollouts").iterdir()
  return {path.name: path.read_bytes() for path in files}


def read_texts(workdir, step: int) -> list[list[str]]:
  """The completions of a step, by group."""
  groups = read_rollouts(workdir, step)
  return [[row["text"] for row in g["completions"]] for g in groups]


def arrays(workdir, step: int, item: str) -> list[np.ndarray]:
  """The leaves of a checkpoint's item."""
  path = pathlib.Path(workdir, "checkpoints", str(step), item).resolve()
  tree = ocp.StandardCheckpointHandler().metadata(path).tree
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
  )
  with ocp.StandardCheckpointer() as reader:
    return [
      np.asarray(x) for x in jax.tree.leaves(reader.restore(path, target))
    ]


def assert_same_run(a, b, step: int = 12) -> None:
  """Metrics, rollouts, best and last checkpoint of two runs are equal."""
  assert stable_metrics(a) == stable_metrics(b)
  assert rollout_bytes(a) == rollout_bytes(b)
  with open_run(a) as one, open_run(b) as two:
    assert one.best() == two.best()
    assert one.latest() == two.latest() == step
    assert one.host(step) == two.host(step)
  for item in ("trainable", "opt"):
    for x, y in zip(arrays(a, step, item), arrays(b, step, item)):
      np.testing.assert_array_equal(x, y)


def assert_one_line(result: dict, code: int, *words: str) -> None:
  """A refusal: one line on stderr that holds every word, and the code."""
  err = result["err"]
  assert result["code"] == code, err
  assert err.startswith("error: ") and err.count("\n") == 1, err
  assert "compiled" not in result["out"]
  for word in words:
    assert word in err, err
