"""One call of a reward function, and what may be believed of its answer.

The same for every place a function runs in: here, on an event loop, in a
process of its own.
"""

import dataclasses
import inspect
import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.tasks.base import Completion, Example, Reward, RewardFunction


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
  """One call of one reward function.

  Attributes:
    row: place of the completion in its batch.
    part: place of the function in its task.
  """

  row: int
  part: int
  function: RewardFunction
  limit: float
  example: Example
  completion: Completion


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A checked answer: plain numbers and text, or the reason for none.

  Attributes:
    reward: its numbers are finite Python floats that float32 holds. Without a
      total, `error` says why; with neither, the function abstained.
    timed_out: it was stopped at its time limit.
    incidental: without a score for a reason that another attempt may not meet:
      time, memory, the death of a process. Such an outcome is stored and used
      again when the step is replayed.
  """

  reward: Reward
  timed_out: bool = False
  incidental: bool = False


def call(
  function: RewardFunction, example: Example, completion: Completion
) -> Outcome:
  """Calls a function for one completion; only interrupts are raised."""
  try:
    return Outcome(checked(function.fn(example, completion)))
  except (Exception, SystemExit) as error:
    return failed(error)


async def call_async(
  function: RewardFunction, example: Example, completion: Completion
) -> Outcome:
  """`call`, of a coroutine function."""
  try:
    return Outcome(checked(await function.fn(example, completion)))
  except (Exception, SystemExit) as error:
    return failed(error)


def failed(error: BaseException) -> Outcome:
  """The outcome of a call that raised."""
  try:
    text = " ".join(str(error).split())[:300]
  except Exception:  # the exception is the user's code too
    text = "(its message cannot be printed)"
  if not isinstance(error, NotAScore):
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
  return lost(text, incidental=isinstance(error, MemoryError))


def lost(
  why: str, timed_out: bool = False, incidental: bool = False
) -> Outcome:
  """An outcome without a score."""
  return Outcome(Reward(None, error=why), timed_out, timed_out or incidental)


def timed_out(limit: float) -> Outcome:
  """The outcome of a call that was stopped at its limit."""
  return lost(f"no answer within {limit:g} s", timed_out=True)


class NotAScore(Exception):
  """An answer that is no score; the message says why."""


def checked(value: Any) -> Reward:
  """What a reward function returned, as a `Reward` of plain finite numbers.

  Args:
    value: a `Reward`, a number (its total), or None (it abstained).

  Raises:
    NotAScore: anything else, or a number that float32 cannot hold.
  """
  if value is None:
    return Reward(None)
  if inspect.iscoroutine(value):
    value.close()  # else Python warns that it was never awaited
    raise NotAScore(
      "the reward function returned a coroutine, but is not an async function"
    )
  if not isinstance(value, Reward):
    what = "the reward function's value"
    return Reward(_finite(what, value))
  if not isinstance(value.extracted, str | None):
    raise NotAScore(f"extracted is {_kind(value.extracted)}, not a string")
  extracted = None if value.extracted is None else str(value.extracted)
  if value.total is None:
    error = None if value.error is None else str(value.error)[:300]
    return Reward(None, extracted=extracted, error=error)
  if not isinstance(value.parts, Mapping):
    raise NotAScore(f"parts is {_kind(value.parts)}, not a mapping")
  return Reward(
    _finite("total", value.total),
    None if value.success is None else _finite("success", value.success),
    {
      str(name): None if part is None else _finite(f"part {name}", part)
      for name, part in value.parts.items()
    },
    extracted,
    steps=_steps(value.steps),
  )


def _steps(steps: Any) -> tuple[tuple[int, float], ...]:
  """Rewards of steps, their ends rising."""
  try:
    out = [(end, _finite("a step's reward", x)) for end, x in steps]
  except (TypeError, ValueError) as error:
    raise NotAScore(
      f"steps is {_kind(steps)}, not pairs of (end, reward)"
    ) from error
  ends = [end for end, _ in out]
  if not all(type(end) is int for end in ends):
    raise NotAScore(f"ends of steps {ends[:8]} must be whole numbers")
  if ends != sorted(set(ends)) or (ends and ends[0] < 1):
    raise NotAScore(f"ends of steps {ends[:8]} must rise from 1 on")
  return tuple(out)


def _finite(name: str, value: Any) -> float:
  if not isinstance(value, numbers.Real | np.bool_):
    raise NotAScore(f"{name} is {_kind(value)}, not a number")
  try:
    number = float(value)
  except OverflowError:
    number = math.inf
  if not abs(number) <= np.finfo(np.float32).max:
    raise NotAScore(f"{name} is {number}, which float32 cannot hold")
  return float(np.float32(number))


def _kind(value: Any) -> str:
  return f"{type(value).__name__} {repr(value)[:60]}"
