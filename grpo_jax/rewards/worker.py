"""A worker process: loads reward functions, then scores one row at a time.

Started by `pool.py` as a fresh interpreter. It imports no JAX of its own
accord, and if a user's module does, JAX gets the CPU.
"""

import contextlib
import os
import pickle
import resource
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from grpo_jax.rewards.outcome import call, failed

HELLO = b"hello"
GRACE = 1.0  # seconds after which a worker ends itself, if it still can


def main(connection: int, lifeline: int) -> None:
  """Serves until the other side closes the connection.

  Args:
    connection: file descriptor of a duplex pipe.
    lifeline: of a pipe that nobody writes to; it ends when the parent does.
  """
  threading.Thread(target=_die_with, args=(lifeline,), daemon=True).start()
  # A terminal or a scheduler signals the whole job; the parent decides. A
  # handler and not SIG_IGN, which programs that a reward starts would inherit.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
  with contextlib.suppress(EOFError, OSError):
    _serve(Connection(connection))
  os._exit(0)  # whatever threads and handlers a user's code has left behind


def _serve(parent: Connection) -> None:
  parent.send_bytes(HELLO)
  functions, memory = pickle.loads(parent.recv_bytes())
  loaded = []
  for name, data in functions:
    try:
      loaded.append(pickle.loads(data))
    except BaseException as error:
      parent.send_bytes(pickle.dumps((name, failed(error).reward.error)))
      return
  _limit_memory(memory)
  parent.send_bytes(pickle.dumps(None))
  me, full = os.getpid(), False
  while not full:
    data = parent.recv_bytes()
    try:
      which, limit, example, completion = pickle.loads(data)
      # The kernel's clock ends a row that holds the interpreter's lock, also
      # when there is no parent left to do it.
      signal.signal(signal.SIGALRM, signal.SIG_DFL)
      signal.setitimer(signal.ITIMER_REAL, limit + GRACE)
      outcome = call(loaded[which], example, completion)
      signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
      outcome = failed(error)
    if os.getpid() != me:
      return  # a fork that a reward made and forgot
    parent.send_bytes(pickle.dumps(outcome))
    # What one row has filled is not to be missing for the next.
    full = outcome.incidental


def _die_with(lifeline: int) -> None:
  with contextlib.suppress(OSError):
    os.read(lifeline, 1)
  os.killpg(0, signal.SIGKILL)  # this process and what its rewards started


def _limit_memory(more: int) -> None:
  """Allows `more` bytes of addresses beyond those in use, where possible."""
  used: Any = 0
  with contextlib.suppress(OSError), open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
  for kind, most in (
    (resource.RLIMIT_AS, used + more),
    (resource.RLIMIT_CORE, 0),
  ):
    # macOS refuses the first.
    with contextlib.suppress(ValueError, OSError):
      resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
