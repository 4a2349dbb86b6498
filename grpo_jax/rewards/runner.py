"""Scoring a rollout batch with a task's reward, one completion at a time.

A reward that fails is a row without a score, never a row with a bad score, and
never the end of a run.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence

import numpy as np

from grpo_jax.tasks.base import Completion, Example, Reward, Task


@dataclasses.dataclass(frozen=True)
class RewardBatch:
  """Scores of B groups of G completions, with C named parts each.

  Attributes:
    total: [B, G] float32; 0 where not scored.
    scored: [B, G] bool; False means "could not score": neither 0 nor 1.
    success: [B, G] float32, the task's own measure; 0 where not scored.
    parts: [B, G, C] float32 in the order of `Task.parts`; NaN where a part of
      a scored row abstained, 0 where the row is not scored.
    extracted: B lists of G answers read from the texts, None where none was.
    errors: number of rows not scored.
    first_error: why the first of them was not; '' if there is none.
  """

  total: np.ndarray
  scored: np.ndarray
  success: np.ndarray
  parts: np.ndarray
  extracted: list[list[str | None]]
  errors: int
  first_error: str


def score_batch(
  task: Task,
  examples: Sequence[Example],
  completions: Sequence[Sequence[Completion]],
  poll: Callable[[], None] | None = None,
) -> RewardBatch:
  """Scores every completion once, in order, against its own example.

  In this process and without a time limit: a reward that never returns holds
  up the run.

  Args:
    task: whose `reward` is called.
    examples: B examples.
    completions: B lists of G completions; list b belongs to example b.
    poll: called before each row; what it raises stops the scoring.

  Returns:
    A `RewardBatch`.

  Raises:
    ValueError: the numbers of examples and completions do not fit.
    KeyboardInterrupt: passed on from a reward; every other failure of one is a
      row that is not scored.
  """
  b = len(examples)
  g = len(completions[0]) if completions else 0
  if len(completions) != b or any(len(group) != g for group in completions):
    raise ValueError(
      f"{b} examples need {b} groups of equal size, got groups of "
      f"{[len(group) for group in completions]}"
    )
  total = np.zeros((b, g), np.float32)
  scored = np.zeros((b, g), bool)
  success = np.zeros((b, g), np.float32)
  parts = np.zeros((b, g, len(task.parts)), np.float32)
  extracted: list[list[str | None]] = [[None] * g for _ in range(b)]
  first_error = ""
  for i, example in enumerate(examples):
    for j, completion in enumerate(completions[i]):
      if poll is not None:
        poll()
      row, error = score_one(task, example, completion)
      if row is None:
        first_error = first_error or error
        continue
      total[i, j], success[i, j], parts[i, j], extracted[i][j] = row
      scored[i, j] = True
  errors = int(scored.size - scored.sum())
  return RewardBatch(
    total, scored, success, parts, extracted, errors, first_error
  )


def score_one(
  task: Task, example: Example, completion: Completion
) -> tuple[tuple[np.float32, np.float32, list, str | None] | None, str]:
  """Calls the reward for one completion and checks what it returns.

  Returns:
    ((total, success, parts, extracted), '') for a scored row, or (None, why)
    for a row that could not be scored.
  """
  try:
    reward = task.reward(example, completion)
    return _checked(task, reward), ""
  except (Exception, SystemExit) as e:
    text = " ".join(str(e).split())[:300]
    why = text if isinstance(e, _NotScored) else f"{type(e).__name__}: {text}"
    return None, f"{task.name}, prompt {example.prompt[-60:]!r}: {why}"


class _NotScored(Exception):
  """A reward that is not a score; the message says why."""


def _checked(
  task: Task, reward: Reward
) -> tuple[np.float32, np.float32, list, str | None]:
  if not isinstance(reward, Reward):
    raise _NotScored(
      f"the reward function returned {_kind(reward)}, not a Reward"
    )
  if reward.total is None:
    raise _NotScored(reward.error or "the reward function abstained")
  if set(reward.parts) != set(task.parts):
    raise _NotScored(
      f"the reward has parts {sorted(reward.parts)}, the task declares "
      f"{sorted(task.parts)}"
    )
  if not isinstance(reward.extracted, (str, type(None))):
    raise _NotScored(f"extracted is {_kind(reward.extracted)}, not a string")
  total = _finite("total", reward.total)
  success = total
  if reward.success is not None:
    success = _finite("success", reward.success)
  values = [reward.parts[name] for name in task.parts]
  parts = [
    math.nan if v is None else _finite(f"part {name}", v)
    for name, v in zip(task.parts, values)
  ]
  return total, success, parts, reward.extracted


def _finite(name: str, value: float) -> np.float32:
  if not isinstance(value, (numbers.Real, np.bool_)):
    raise _NotScored(f"{name} is {_kind(value)}, not a number")
  if not abs(float(value)) <= np.finfo(np.float32).max:
    raise _NotScored(f"{name} is {value}, which float32 cannot hold")
  return np.float32(value)


def _kind(value: object) -> str:
  return f"{type(value).__name__} {repr(value)[:60]}"
