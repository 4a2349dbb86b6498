"""Scoring a rollout batch with a task's reward functions.

A reward that fails is a row without a score, never a row with a bad score, and
never the end of a run. Every call has a time limit. Where a function runs is
its own to say (`tasks.base.RewardFunction`):

    plain      a thread of this process       threads.Inline
    async      one event loop                 threads.Loop
    cpu_bound  a pool of processes            pool.Pool, worker.py
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.rewards.outcome import Job, Outcome
from grpo_jax.rewards.pool import MEMORY_LIMIT, Pool
from grpo_jax.rewards.threads import Inline, Loop
from grpo_jax.tasks.base import Completion, Example, Reward, Task, combine

TIME_LIMIT = 10.0  # seconds for one completion, where nothing else is said
_TICK = 0.02  # seconds between two looks at whether to stop


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
    timed_out: [B, G] bool; not scored because a function met its time limit.
    errors: number of rows not scored.
    first_error: why the first of them was not; '' if there is none.
    steps: rewards of each completion's steps (`Reward.steps`).
  """

  total: np.ndarray
  scored: np.ndarray
  success: np.ndarray
  parts: np.ndarray
  extracted: list[list[str | None]]
  timed_out: np.ndarray
  errors: int
  first_error: str
  steps: list[list[tuple[tuple[int, float], ...]]] | None = None


def score_batch(
  task: Task,
  examples: Sequence[Example],
  completions: Sequence[Sequence[Completion]],
  poll: Callable[[], None] | None = None,
) -> RewardBatch:
  """`Runner.score`, with a runner that lives for this one batch."""
  with Runner(task) as runner:
    return runner.score(examples, completions, poll)


class Runner:
  """Scores batches; keeps its processes and its event loop between them.

  Outcomes that another attempt may not meet again (a row that timed out, ran
  out of memory or lost its process) are remembered by rollout id: phase, step,
  ordinal of the prompt, place in the group. `recorded` holds them, those of
  earlier attempts at the same run put there by the caller; a row found in it is
  not scored again, so a replayed step is the step it repeats.

  One thread at a time may use it, the main one or another.

  Args:
    task: whose functions are called.
    time_limit: seconds for one call, where the function has no limit.
    workers: most processes of the pool; 0: one a core.
    memory: bytes each of them may take.

  Attributes:
    recorded: rollout id -> {'error', 'timed_out'}.

  Raises:
    UserError: a cpu_bound function that cannot be pickled.
  """

  def __init__(
    self,
    task: Task,
    time_limit: float = TIME_LIMIT,
    workers: int = 0,
    memory: int = MEMORY_LIMIT,
  ):
    self.recorded: dict[tuple, dict[str, Any]] = {}
    self._fresh: list[dict[str, Any]] = []
    self._task = task
    self._functions = task.functions
    self._limit = time_limit
    pooled = {i: f for i, f in enumerate(self._functions) if f.cpu_bound}
    self._pool = Pool(pooled, workers, memory) if pooled else None
    self._inline, self._loop = Inline(), Loop()

  def check(self, poll: Callable[[], None] | None = None) -> None:
    """Waits until a worker process has loaded the functions it is to run.

    Raises:
      UserError: one cannot be loaded there.
    """
    while self._pool and not self._pool.ready(_TICK):
      if poll is not None:
        poll()

  def score(
    self,
    examples: Sequence[Example],
    completions: Sequence[Sequence[Completion]],
    poll: Callable[[], None] | None = None,
    ids: Sequence[tuple[str, int, int]] | None = None,
  ) -> RewardBatch:
    """Scores every completion once, against its own example.

    Args:
      examples: B examples.
      completions: B lists of G completions; list b belongs to example b.
      poll: called at least every 20 ms; what it raises stops the scoring, and
        what was running is killed.
      ids: (phase, step, ordinal) of each prompt; None: outcomes are neither
        looked up in `recorded` nor kept.

    Returns:
      A `RewardBatch`.

    Raises:
      ValueError: the numbers of examples and completions do not fit.
      KeyboardInterrupt: passed on from a plain function; every other failure
        of one is a row that is not scored.
    """
    b = len(examples)
    g = len(completions[0]) if completions else 0
    if len(completions) != b or any(len(group) != g for group in completions):
      raise ValueError(
        f"{b} examples need {b} groups of equal size, got groups of "
        f"{[len(group) for group in completions]}"
      )
    rows = [
      (example, c) for i, example in enumerate(examples) for c in completions[i]
    ]
    names = [
      None if ids is None else (*ids[i // g], i % g) for i in range(b * g)
    ]
    known = {
      i: self.recorded[name]
      for i, name in enumerate(names)
      if name in self.recorded
    }
    calls = self._call_all(
      {i: row for i, row in enumerate(rows) if i not in known}, poll
    )
    results = [
      _Row(None, error=known[i]["error"], timed_out=known[i]["timed_out"])
      if i in known
      else _Row.of(self._task, self._functions, calls[i])
      for i in range(b * g)
    ]
    for name, row in zip(names, results):
      if name is not None and row.incidental:
        self._remember(name, row)
    return self._gather(rows, results, (b, g))

  def take_fresh(self) -> list[dict[str, Any]]:
    """Outcomes to be stored that were not in `recorded`; each is given once.

    Records of JSON values, for `remember` when the run is resumed.
    """
    fresh, self._fresh = self._fresh, []
    return fresh

  def remember(self, records: Iterable[Mapping[str, Any]]) -> None:
    """Takes over what `take_fresh` gave to an earlier process."""
    for r in records:
      name = (r["phase"], r["step"], r["ordinal"], r["g"])
      self.recorded[name] = {k: r[k] for k in ("error", "timed_out")}

  def close(self) -> None:
    """Ends the processes and threads."""
    for lane in self._lanes:
      lane.close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  @property
  def _lanes(self) -> list[Inline | Loop | Pool]:
    lanes = (self._inline, self._loop, self._pool)
    return [lane for lane in lanes if lane is not None]

  def _lane(self, job: Job) -> Inline | Loop | Pool:
    if job.function.cpu_bound:
      return self._pool
    return self._loop if job.function.is_async else self._inline

  def _call_all(
    self,
    rows: Mapping[int, tuple[Example, Completion]],
    poll: Callable[[], None] | None,
  ) -> dict[int, list[Outcome]]:
    """Outcomes of every function for every row, by row."""
    out = {i: [None] * len(self._functions) for i in rows}
    jobs: dict[Any, list[Job]] = {}
    for i, (example, completion) in rows.items():
      for part, f in enumerate(self._functions):
        limit = self._limit if f.limit is None else f.limit
        job = Job(i, part, f, limit, example, completion)
        jobs.setdefault(self._lane(job), []).append(job)
    left = {lane: len(batch) for lane, batch in jobs.items()}
    try:
      if poll is not None:
        poll()
      for lane, batch in jobs.items():
        lane.submit(batch)
      while waiting := [lane for lane, count in left.items() if count]:
        for lane in waiting:
          for job, outcome in lane.collect(_TICK / len(waiting)):
            out[job.row][job.part] = outcome
            left[lane] -= 1
        # After the last row too: a signal to the whole job ends workers, and
        # that is no fault of their rows.
        if poll is not None:
          poll()
    except BaseException:
      for lane in jobs:
        lane.cancel()
      raise
    return out

  def _remember(self, name: tuple, row: "_Row") -> None:
    what = {"error": row.error, "timed_out": row.timed_out}
    phase, step, ordinal, g = name
    self.recorded[name] = what
    self._fresh.append(
      {"phase": phase, "step": step, "ordinal": ordinal, "g": g, **what}
    )

  def _gather(
    self, rows: Sequence, results: Sequence["_Row"], shape: tuple[int, int]
  ) -> RewardBatch:
    b, g = shape
    c = len(self._task.parts)
    lost = [i for i, row in enumerate(results) if row.total is None]
    first_error = ""
    if lost:
      prompt = rows[lost[0]][0].prompt[-60:]
      why = results[lost[0]].error
      first_error = f"{self._task.name}, prompt {prompt!r}: {why}"

    def grid(values: Iterable, dtype: Any, *more: int) -> np.ndarray:
      return np.array(list(values), dtype).reshape(b, g, *more)

    return RewardBatch(
      total=grid((row.total or 0 for row in results), np.float32),
      scored=grid((row.total is not None for row in results), bool),
      success=grid((row.success for row in results), np.float32),
      parts=grid((row.parts or [0] * c for row in results), np.float32, c),
      extracted=[
        [row.extracted for row in results[i * g : (i + 1) * g]]
        for i in range(b)
      ],
      timed_out=grid((row.timed_out for row in results), bool),
      errors=len(lost),
      first_error=first_error,
      steps=[
        [row.steps for row in results[i * g : (i + 1) * g]] for i in range(b)
      ],
    )


@dataclasses.dataclass(frozen=True)
class _Row:
  """What all functions together say of one completion."""

  total: float | None
  success: float = 0.0
  parts: tuple[float, ...] = ()
  extracted: str | None = None
  error: str = ""
  timed_out: bool = False
  incidental: bool = False
  steps: tuple[tuple[int, float], ...] = ()

  @classmethod
  def of(cls, task, functions, outcomes: Sequence[Outcome]) -> "_Row":
    """One function's answer, or the weighted sum of several.

    A function that abstains is left out of the sum; one that fails makes the
    row unscored, because what it would have said is not known.
    """
    for f, outcome in zip(functions, outcomes):
      if outcome.reward.error and outcome.reward.total is None:
        name = f"{f.name}: " if task.composed else ""
        return cls(
          None,
          error=name + outcome.reward.error,
          timed_out=outcome.timed_out,
          incidental=outcome.incidental,
        )
    rewards = [outcome.reward for outcome in outcomes]
    reward = _sum(task, functions, rewards) if task.composed else rewards[0]
    if reward.total is None:
      return cls(None, error=reward.error or "the reward function abstained")
    if set(reward.parts) != set(task.parts):
      return cls(
        None,
        error=f"the reward has parts {sorted(reward.parts)}, the task declares"
        f" {sorted(task.parts)}",
      )
    if not abs(reward.total) <= np.finfo(np.float32).max:
      return cls(None, error=f"total {reward.total} is past float32")
    values = [reward.parts[name] for name in task.parts]
    return cls(
      reward.total,
      reward.total if reward.success is None else reward.success,
      tuple(math.nan if v is None else v for v in values),
      reward.extracted,
      steps=tuple(reward.steps),
    )


def _sum(task: Task, functions: Sequence, rewards: Sequence[Reward]) -> Reward:
  """A composed task's reward, from those of its functions."""
  by_name = dict(zip(task.parts, rewards))
  total = combine(
    {name: r.total for name, r in by_name.items()},
    {f.name: f.weight for f in functions},
    next((r.extracted for r in rewards if r.extracted is not None), None),
  )
  steps = next((r.steps for r in rewards if r.steps), ())
  total = dataclasses.replace(total, steps=steps)
  if not task.success:
    return total
  chosen = by_name[task.success]
  success = chosen.total if chosen.success is None else chosen.success
  return dataclasses.replace(total, success=success or 0.0)
