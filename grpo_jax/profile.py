"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

import contextlib
import pathlib

import jax

from grpo_jax.errors import UserError

DIRECTORY = "profile"  # within a workdir


def window(text: str) -> tuple[int, int] | None:
  """The steps of `config.profile`: 'FIRST-LAST', one step, or '' for none.

  Raises:
    UserError: it is none of these.
  """
  if not text:
    return None
  first, _, last = text.partition("-")
  try:
    steps = int(first), int(last or first)
  except ValueError:
    steps = 0, 0
  if not 1 <= steps[0] <= steps[1]:
    raise UserError(
      f"profile {text!r} must be FIRST-LAST, two steps of the run, such as"
      " 10-12"
    )
  return steps


class Tracer:
  """Starts a trace before the first step of a window, ends it after the last.

  The first step of a process compiles nothing but runs cold: trace later ones.
  """

  def __init__(self, text: str, workdir: pathlib.Path):
    """Args:
    text: `config.profile`.
    workdir: the trace lies in its `profile/`.
    """
    self._window, self._path = window(text), workdir / DIRECTORY
    self._running = False

  def before(self, step: int) -> None:
    """Called before a step, by its number."""
    if self._window and not self._running and step == self._window[0]:
      jax.profiler.start_trace(str(self._path))
      self._running = True

  def after(self, step: int) -> str | None:
    """Called after a step; where the trace lies, once it is written."""
    if not self._running or step < self._window[1]:
      return None
    self.close()
    return str(self._path)

  def close(self) -> None:
    """Ends a trace that is still running."""
    if self._running:
      self._running = False
      with contextlib.suppress(RuntimeError):  # a failed step ended it
        jax.profiler.stop_trace()
