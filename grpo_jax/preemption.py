"""Stopping within milliseconds of a signal, wherever the program waits.

A run spends its time inside XLA: generating, updating, compiling. Python's
signal handlers run between bytecodes, so a program that blocks in XLA answers
SIGTERM only when XLA is done, which may be after the grace time. Here every
wait is a loop of short sleeps that looks at a flag.
"""

import contextlib
import os
import signal
import sys
import threading
import time

import jax

_FIRST_SLEEP = 5e-5  # seconds
_LONGEST_SLEEP = 0.02  # the signal is seen within this time


class Preempted(BaseException):
  """The run was asked to stop: save the last safe point and exit.

  Like KeyboardInterrupt it is no `Exception`, so that code which forgives a
  failed reward or a failed plot cannot swallow it.
  """


class Guard:
  """Turns SIGTERM and the first SIGINT into `Preempted` at the next wait.

  A context manager: the handlers stand inside its block, the earlier ones
  return after it. A second SIGINT finds the earlier handler and aborts. Off the
  main thread, where Python allows no handlers, only `request` sets the flag.

  The flag is this process's own; agreeing on a step with other hosts is not
  done here.

  Attributes:
    signal: the signal's number, or None where there was none.
  """

  def __init__(self):
    self.signal = None
    self._requested = False
    self._shields = 0
    self._earlier = {}

  def __enter__(self):
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._earlier[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_):
    for number in list(self._earlier):
      self._restore(number)

  def _handle(self, number, _):
    self.signal = number
    self._requested = True
    if number == signal.SIGINT:
      self._restore(number)

  def _restore(self, number):
    earlier = self._earlier.pop(number, None)
    if earlier is not None:  # None: a handler that was not set from Python
      signal.signal(number, earlier)

  @property
  def requested(self) -> bool:
    """Whether the run was asked to stop, also inside a shield."""
    return self._requested

  def request(self):
    """Asks the run to stop, as a signal would."""
    self._requested = True

  def check(self):
    """Raises `Preempted` if the run was asked to stop and is not shielded."""
    if self._requested and not self._shields:
      name = signal.Signals(self.signal).name if self.signal else "a request"
      raise Preempted(f"stopped by {name}")

  @contextlib.contextmanager
  def shielded(self):
    """Inside this block `check`, `wait` and `run` do not raise `Preempted`.

    For a step that has begun to overwrite donated buffers: it is finished
    first. Nothing is raised at the block's end; the next `check` does that.
    """
    self._shields += 1
    try:
      yield
    finally:
      self._shields -= 1

  def wait(self, tree):
    """Blocks until every array of a tree is computed.

    Sleeps between two looks for a hundredth of the time waited so far, from
    0.05 ms up to 20 ms, so that waiting adds at most about 1 % to short steps
    and nothing that matters to long ones.

    Args:
      tree: a pytree; leaves that are no jax arrays, and arrays that were
        donated meanwhile, count as ready.

    Returns:
      The tree.

    Raises:
      Preempted: the run was asked to stop; the computation itself goes on.
      Exception: what the computation raised.
    """
    # A typed PRNG key has no `is_ready`, and no work of its own.
    pending = [x for x in jax.tree.leaves(tree) if hasattr(x, "is_ready")]
    start = time.perf_counter()
    while True:
      self.check()
      while pending and (pending[-1].is_deleted() or pending[-1].is_ready()):
        done = pending.pop()
        if not done.is_deleted():
          done.block_until_ready()  # raises the computation's own error
      if not pending:
        return tree
      waited = time.perf_counter() - start
      time.sleep(min(max(waited / 100, _FIRST_SLEEP), _LONGEST_SLEEP))

  def run(self, fn, *args, **kwargs):
    """Calls a function that blocks for long, such as an XLA compilation.

    The call happens on a daemon thread. JAX's context managers (a mesh, a
    default device, `jax.disable_jit`) belong to a thread and do not reach it;
    `jax.config.update` does.

    Args:
      fn: the function.
      *args: its arguments.
      **kwargs: its keyword arguments.

    Returns:
      What `fn` returned.

    Raises:
      Preempted: the run was asked to stop; `fn` goes on and its result is
        dropped.
      Exception: what `fn` raised.
    """
    self.check()
    done = threading.Event()
    outcome = {}

    def call():
      try:
        outcome["value"] = fn(*args, **kwargs)
      except BaseException as error:
        outcome["error"] = error
      finally:
        done.set()

    threading.Thread(target=call, name="guarded", daemon=True).start()
    while not done.wait(_LONGEST_SLEEP):
      self.check()
    if "error" in outcome:
      raise outcome["error"]
    return outcome["value"]


def leave(code: int):
  """Ends the process at once, without waiting for abandoned computations.

  Python's own exit waits for XLA to finish what `wait` gave up on, which may
  take longer than the grace time. Close checkpoints and records first: no
  `finally`, no exit handler runs after this.

  Args:
    code: the exit status.
  """
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):  # closed, or a dead pipe
      stream.flush()
  os._exit(code)
