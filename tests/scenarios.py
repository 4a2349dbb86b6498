"""Runs of the tiny experiment in one process, disturbed at chosen moments.

    python tests/scenarios.py DIRECTORY > results.json

The programs are built once, so a run takes seconds; the signals are real. Each
scenario tells how its run ended and, where it can, how it went on. One JSON
object, scenario -> results, is printed at the end.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from unittest import mock

import numpy as np
import tiny_config
import train_runs
from tensorboardX.event_file_writer import EventsWriter

from grpo_jax import (
  ahead,
  build,
  cli,
  config,
  data,
  plots,
  preemption,
  records,
  rollouts,
  session,
  sharding,
  steps,
  train,
)
from grpo_jax.checkpoint import Checkpoints
from grpo_jax.compile import Programs, use_cache
from grpo_jax.console import Console
from grpo_jax.errors import UserError
from grpo_jax.rewards.runner import Runner

SCENARIOS = {}
ROOT = pathlib.Path(sys.argv[1])


def scenario(*cases):
  """Registers a function of (workdir), or of (workdir, *case) for each case."""

  def register(fn):
    for name, *case in cases or [(fn.__name__,)]:
      SCENARIOS[name] = (fn, case)
    return fn

  return register


class Left(BaseException):
  """Stands for the end of the process."""


def leave(code):
  raise Left(code, time.perf_counter())


def start(built, workdir, probe=0):
  """One process's worth of `train.main`; returns how it ended."""
  out, err = io.StringIO(), io.StringIO()
  SENT.clear()
  console = Console(1, file=out)
  end = None
  with preemption.Guard() as guard:
    built.programs.guard, built.programs.say = guard, console.say
    with (
      contextlib.redirect_stderr(err),
      mock.patch.object(preemption, "leave", leave),
    ):
      try:
        code = train.run(built, str(workdir), console, probe)
      except SystemExit as left:
        code = left.code
      except UserError as error:
        code = cli.USAGE
        err.write(f"error: {error}\n")
      except Left as left:
        code, end = left.args
  signalled = SENT[0] if SENT else None
  return {
    "code": code,
    "out": out.getvalue(),
    "err": err.getvalue(),
    "seconds": end and signalled and end - signalled,
  }


SENT = []  # when the signal was sent


def send():
  """The signal, once."""
  if not SENT:
    SENT.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def before(owner, name, call, do):
  """Does something before the n-th call of a function."""
  real, count = getattr(owner, name), [0]

  def wrapped(*args, **kwargs):
    count[0] += 1
    if count[0] == call:
      do()
    return real(*args, **kwargs)

  with mock.patch.object(owner, name, wrapped):
    yield count


def same(workdir):
  """'' if the run equals the undisturbed one, else how it differs."""
  try:
    train_runs.assert_same_run(ROOT / "reference", workdir)
  except AssertionError:
    return traceback.format_exc()
  return ""


def with_task(name):
  """The programs with another reward: rewards are no part of them."""
  task = getattr(tiny_config, name)()
  e = dataclasses.replace(BUILT.experiment, task=task)
  runner = Runner(task, e.scoring.time_limit, e.scoring.workers)
  return dataclasses.replace(BUILT, experiment=e, runner=runner)


@scenario(
  ("warm-up", data, "encode_demonstrations", 2),
  ("warm-up's update", build.Program, "__call__", 4),
  ("begin of rl", session.Session, "begin_rl", 1),
  ("generation", rollouts, "fetch", 11),
  ("reward", Runner, "score", 11),
  ("scores", steps, "make_batch", 2),
  ("update", steps, "update_all", 3),
  ("record", records.Records, "write_rollouts", 2),
  ("first evaluation", Runner, "score", 3),
  ("evaluation", Runner, "score", 18),
  ("last evaluation", Runner, "score", 30),
  ("save", Checkpoints, "save", 3),
  ("wait for a save", Checkpoints, "wait", 5),
)
def sigterm(workdir, owner, name, call):
  with before(owner, name, call, send) as count:
    first = start(BUILT, workdir)
  second = start(BUILT, workdir)
  return {**first, "calls": count[0], "again": second, "same": same(workdir)}


@scenario()
def sigterm_in_compilation(workdir):
  def compile_for_long(built, phase):
    send()
    built.programs.guard.run(time.sleep, 20)

  with mock.patch.object(ahead, "compile_all", compile_for_long):
    first = start(BUILT, workdir)
  second = start(BUILT, workdir)
  return {**first, "again": second, "same": same(workdir)}


@scenario()
def sigterm_at_the_end(workdir):
  with before(plots, "curve", 1, send):
    first = start(BUILT, workdir)
  return {**first, "same": same(workdir)}


@scenario()
def sigterm_in_probe(workdir):
  with before(Runner, "score", 1, send):
    first = start(BUILT, workdir, probe=8)
  second = start(BUILT, workdir)
  return {**first, "again": second, "same": same(workdir)}


@scenario()
def probe_then_train(workdir):
  first = start(BUILT, workdir, probe=16)
  second = start(BUILT, workdir)
  return {**first, "again": second, "same": same(workdir)}


@scenario()
def nonfinite(workdir):
  real = steps.make_batch

  def make_batch(*args):
    batch = real(*args)
    return batch.replace(advantages=batch.advantages * np.nan)

  with mock.patch.object(steps, "make_batch", make_batch):
    first = start(BUILT, workdir)
  lines = train_runs.stable_metrics(workdir)
  before, after = (
    train_runs.arrays(workdir, step, "trainable") for step in (4, 9)
  )
  return {
    **first,
    "saved": sorted(p.name for p in (workdir / "nonfinite").iterdir()),
    "names": sorted(np.load(workdir / "nonfinite/00000005.npz").files),
    "moved": any((x != y).any() for x, y in zip(before, after)),
    "lines": [x for x in lines if "loss" in x],
  }


@scenario()
def reward_raises_on_some_rows(workdir):
  first = start(with_task("flaky"), workdir)
  return {**first, "lines": train_runs.stable_metrics(workdir)}


@contextlib.contextmanager
def small_disk(path):
  """A file system of two MiB, and a function that fills it."""
  path.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
  if subprocess.run(mount, capture_output=True).returncode:
    yield None
    return
  try:
    yield lambda: fill(path / "filler")
  finally:
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path):
  with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
    while True:
      file.write(b"x" * 4096)


@scenario(
  ("disk full in metrics", records.Records, "write_metrics", 6),
  ("disk full in rollouts", records.Records, "write_rollouts", 3),
  ("disk full in a checkpoint", Checkpoints, "save", 4),
  ("disk full in an evaluation", records.Records, "sync", 5),
  ("disk full in TensorBoard", EventsWriter, "write_event", 9),
)
def full_disk(workdir, owner, name, call):
  with small_disk(workdir.with_suffix(".disk")) as fill_it:
    if fill_it is None:
      return {"skipped": "cannot mount"}
    workdir = workdir.with_suffix(".disk") / "run"
    with before(owner, name, call, fill_it):
      first = start(BUILT, workdir)
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
      intact = checkpoints.steps()
    still_full = start(BUILT, workdir)
    os.remove(workdir.parent / "filler")
    second = start(BUILT, workdir)
    return {
      **first,
      "intact": intact,
      "still_full": still_full,
      "again": second,
      "same": same(workdir),
    }


def main():
  results = {}
  reference = start(BUILT, ROOT / "reference")
  assert reference["code"] == 0, reference
  only = sys.argv[2:]
  for name, (fn, case) in SCENARIOS.items():
    if only and name not in only:
      continue
    try:
      results[name] = fn(ROOT / name.replace(" ", "_"), *case)
    except Exception:
      results[name] = {"broken": traceback.format_exc()}
  print(json.dumps(results))


if __name__ == "__main__":
  use_cache(os.environ["TINY_CACHE"])
  BUILT = build.build(
    config.resolve(tiny_config.get_config()),
    Programs(sharding.make_mesh(1, 1, 1), preemption.Guard()),
  )
  main()
