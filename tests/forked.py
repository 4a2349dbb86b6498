"""Runs command lines of the package, each in a fork of one warm process.

    python tests/forked.py < commands.jsonl > results.jsonl

Importing takes most of a short command's time; a fork before the first use of
a device has it for nothing. One line in, {"module", "argv", "env", "kill"}, is
one line out, {"code", "out", "err", "seconds", "after_signal"}. "kill" is a
signal's name, a regular expression and seconds: the signal is sent so long
after stdout matches.
"""

import gc
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time

import jax

from grpo_jax import cli, evaluate, preemption, train  # noqa: F401


def child(job, out, err):
  """Becomes the command; never returns."""
  os.dup2(out, 1)
  os.dup2(err, 2)
  os.environ.update(job.get("env", {}))
  module = importlib.import_module(job["module"])
  sys.argv = [module.__file__, *job["argv"]]
  if platform := job.get("env", {}).get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", platform)  # it was read on import
  try:
    cli.run(module.main, module.define_flags)
  except SystemExit as end:
    if end.code in (cli.USAGE, cli.WRONG_PLATFORM):  # nothing runs any more
      preemption.leave(end.code)
    raise


def run(job):
  """One command, to its end."""
  start = time.time()
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    pid = os.fork()
    if pid == 0:
      child(job, out.fileno(), err.fileno())
    status, sent = watch(pid, job.get("kill"), out)
    end = time.time()
    texts = []
    for file in (out, err):
      file.seek(0)
      texts.append(file.read().decode())
  code = os.waitstatus_to_exitcode(status)
  return {
    "code": code,
    "out": texts[0],
    "err": texts[1],
    "seconds": end - start,
    "after_signal": sent and end - sent,
  }


def watch(pid, kill, out):
  """Waits; sends the signal once when stdout matches; says when it did."""
  sent = None
  while True:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
      return status, sent
    if kill:
      text = os.pread(out.fileno(), 1 << 20, 0).decode()
      if re.search(kill[1], text):
        time.sleep(kill[2] if len(kill) > 2 else 0)
        os.kill(pid, getattr(signal, kill[0]))
        kill, sent = None, time.time()
    time.sleep(0.005)


if __name__ == "__main__":
  gc.freeze()  # what children do not collect they do not copy
  real = os.dup(1)
  os.dup2(2, 1)
  for line in sys.stdin:
    os.write(real, (json.dumps(run(json.loads(line))) + "\n").encode())
