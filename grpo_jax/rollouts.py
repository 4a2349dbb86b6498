"""From prompts to rewarded completions: one rollout batch, or several.

With dynamic sampling, batches are drawn until enough groups are useful; a
step's position in the data is then not a function of the step, so the run keeps
it, and with it what a curriculum has learned of the questions.
"""

import bisect
import dataclasses
import functools
import operator
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax import data, metrics
from grpo_jax.build import Built
from grpo_jax.curriculum import Curriculum
from grpo_jax.errors import UserError
from grpo_jax.rewards.runner import RewardBatch
from grpo_jax.tasks.base import Completion, Example
from grpo_jax.types import Rewards, Rollout, TrainState, policy


@dataclasses.dataclass(frozen=True)
class Position:
  """Where a step stands.

  Attributes:
    step: the run's, counting from 1; names the step's outcomes.
    batches: batches of prompts drawn before it.
    curriculum: chooses the prompts; None: the stream's order does.
  """

  step: int
  batches: int
  curriculum: Curriculum | None = None


@dataclasses.dataclass(frozen=True)
class HostRollout:
  """What the host keeps of a rollout: numpy arrays and text."""

  examples: list[Example]
  ordinals: np.ndarray  # [B]
  prompt_lengths: np.ndarray  # [B]
  ids: np.ndarray  # [B, G, T]
  lengths: np.ndarray  # [B, G]
  truncated: np.ndarray  # [B, G] bool
  logprobs: np.ndarray  # [B, G, T], the sampler's
  support: np.ndarray | None  # [B, G, T, k]
  completions: list[list[Completion]]


@dataclasses.dataclass(frozen=True)
class Sampled:
  """A rollout batch, rewarded.

  Attributes:
    rollout: on the device.
    host: the same as numpy and text.
    rewards: of each completion.
    baseline: [B] reward of the likeliest completion, NaN where there is none;
      None where the algorithm asks for none.
    metrics: of everything sampled, also of what was dropped.
    batches: batches of prompts drawn.
    curriculum: `Position.curriculum`, after all that was sampled.
  """

  rollout: Rollout
  host: HostRollout
  rewards: RewardBatch
  baseline: np.ndarray | None
  metrics: dict[str, float]
  batches: int = 1
  curriculum: Curriculum | None = None


class Clock:
  """Seconds of the phases of a step, by name."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def lap(self, name: str) -> None:
    """Adds the time since the last lap to one phase."""
    now = time.perf_counter()
    self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
    self._last = now


def fetch(
  built: Built, rollout: Rollout, examples: list[Example], ordinals: np.ndarray
) -> HostRollout:
  """Waits for a rollout and decodes it. Ids are decoded once, for rewards."""
  built.programs.guard.wait(rollout)
  prompt_lengths, ids, lengths, truncated, logprobs, support = jax.device_get(
    (
      rollout.prompts.lengths,
      rollout.ids,
      rollout.lengths,
      rollout.truncated,
      rollout.sampler_logprobs,
      rollout.support,
    )
  )
  decode = built.experiment.tokenizer.decode
  completions = [
    [
      Completion(decode(row[:n].tolist()), int(n), bool(cut))
      for row, n, cut in zip(*group)
    ]
    for group in zip(ids, lengths, truncated)
  ]
  return HostRollout(
    examples,
    ordinals,
    prompt_lengths,
    ids,
    lengths,
    truncated,
    logprobs,
    support,
    completions,
  )


def sample_and_reward(
  built: Built,
  state: TrainState,
  stream: data.Stream,
  at: Position,
  clock: Clock,
) -> Sampled:
  """The first half of a step: completions and what the task says of them."""
  e, guard = built.experiment, built.programs.guard
  b = e.batching.prompts_per_step
  curriculum, now, chosen = at.curriculum, at.batches * b, None
  if curriculum is not None:
    chosen, curriculum = curriculum.draw(stream.order, now, b)
  examples, ordinals = stream.batch(at.batches, b, chosen)
  prompts = built.prompts(examples, ordinals)
  weights = policy(state.params)
  if e.algorithm.offline:
    weights = state.reference
  rollout = built.sample(weights, prompts, state.key, state.step)
  host = fetch(built, rollout, examples, ordinals)
  greedy = None
  if e.algorithm.baseline_rollout:
    likeliest = built.baseline(weights, prompts, state.key, state.step)
    greedy = fetch(built, likeliest, examples, ordinals)
  clock.lap("time/sample")

  def score(completions: list, phase: str) -> RewardBatch:
    ids = [(phase, at.step, int(ordinal)) for ordinal in ordinals]
    return built.runner.score(examples, completions, guard.check, ids)

  rewards, baseline = score(host.completions, "rl"), None
  if greedy is not None:
    found = score(greedy.completions, "baseline")
    baseline = np.where(found.scored, found.total, np.nan)[:, 0]
  if curriculum is not None:
    curriculum = curriculum.observe(
      chosen, rewards.success, rewards.scored, now
    )
  clock.lap("time/reward")
  return Sampled(
    rollout,
    host,
    rewards,
    baseline,
    measured(built, host, rewards),
    curriculum=curriculum,
  )


def measured(
  built: Built, host: HostRollout, rewards: RewardBatch
) -> dict[str, float]:
  """Metrics of rewards and lengths of what was sampled."""
  return {
    **metrics.reward_metrics(
      rewards.total,
      rewards.scored,
      rewards.success,
      rewards.parts,
      built.experiment.task.parts,
      rewards.errors,
      int(rewards.timed_out.sum()),
    ),
    **metrics.length_metrics(host.lengths, host.truncated),
  }


def useful(rewards: RewardBatch) -> np.ndarray:
  """Groups whose rows differ in the task's own metric: [B] bool.

  Judged by its largest and smallest value, not by a standard deviation, and
  not by the reward, which a length penalty would make different everywhere.
  """
  metric = rewards.success
  low = np.where(rewards.scored, metric, np.inf).min(axis=1)
  high = np.where(rewards.scored, metric, -np.inf).max(axis=1)
  return high > low


def gather(
  built: Built,
  state: TrainState,
  stream: data.Stream,
  at: Position,
  clock: Clock,
) -> Sampled:
  """A rollout batch to train on: the next one, or with dynamic sampling the
  first B useful groups in the order of the stream.

  Where all rounds together have fewer, groups of no use fill the batch.
  """
  resample = built.experiment.algorithm.resample
  kept = sample_and_reward(built, state, stream, at, clock)
  if resample is None:
    return kept
  b, rounds = len(kept.host.examples), 1
  good = useful(kept.rewards)
  accepted, seen = int(good.sum()), [kept]
  kept = choose(built, kept, kept, np.argsort(~good, kind="stable"))
  while accepted < b and rounds < resample.rounds:
    there = Position(at.step, at.batches + rounds, seen[-1].curriculum)
    more = sample_and_reward(built, state, stream, there, clock)
    found = np.flatnonzero(useful(more.rewards))
    index = np.arange(b)
    take = min(b - accepted, len(found))
    index[accepted : accepted + take] = b + found[:take]
    kept = choose(built, kept, more, index)
    accepted, rounds = accepted + len(found), rounds + 1
    seen.append(more)
  together = measured(
    built, join([x.host for x in seen]), join([x.rewards for x in seen])
  )
  together |= {
    "group/accepted_frac": accepted / (b * rounds),
    "group/surplus": float(max(accepted - b, 0)),
    "group/rounds": float(rounds),
  }
  return dataclasses.replace(
    kept, metrics=together, batches=rounds, curriculum=seen[-1].curriculum
  )


def choose(
  built: Built, first: Sampled, second: Sampled, index: np.ndarray
) -> Sampled:
  """Chosen groups of two batches, counted through: B of 2B."""
  if (index == np.arange(len(index))).all():
    return first

  def one(a: Any, b: Any) -> Any:
    if a is None:
      return None
    if isinstance(a, np.ndarray):
      return np.concatenate((a, b))[index]
    both = [*a, *b]
    return [both[i] for i in index]

  def record(a: Any, b: Any) -> Any:
    fields = {x.name: getattr(a, x.name) for x in dataclasses.fields(a)}
    rows = {
      k: one(v, getattr(b, k))
      for k, v in fields.items()
      if isinstance(v, np.ndarray | list)
    }
    return dataclasses.replace(a, **rows)

  places = built.to_device(index.astype(np.int32))
  rewards = record(first.rewards, second.rewards)
  lost = first.rewards.first_error or second.rewards.first_error
  return dataclasses.replace(
    first,
    rollout=built.pick(first.rollout, second.rollout, places),
    host=record(first.host, second.host),
    rewards=dataclasses.replace(rewards, first_error=lost),
    baseline=one(first.baseline, second.baseline),
  )


def device_rewards(built: Built, sampled: Sampled) -> Rewards:
  """What the task said, on the mesh, as the algorithm reads it."""
  rewards, per_token, steps = sampled.rewards, None, None
  if built.experiment.algorithm.steps:
    per_token, steps = step_rewards(built, sampled)
  return built.to_device(
    Rewards(
      total=rewards.total,
      scored=rewards.scored,
      metric=rewards.success,
      parts=rewards.parts,  # NaN where a part abstained
      per_token=per_token,
      steps=steps,
      baseline=None
      if sampled.baseline is None
      else sampled.baseline.astype(np.float32),
    )
  )


def step_rewards(
  built: Built, sampled: Sampled
) -> tuple[np.ndarray, np.ndarray]:
  """Rewards of steps at the token that ends each: [B, G, T] and bool.

  A step ends at the first token whose decoded text reaches its last character;
  steps that end in the same token are added.
  """
  host, decode = sampled.host, built.experiment.tokenizer.decode
  if not any(steps for group in sampled.rewards.steps for steps in group):
    task = built.experiment.task.name
    raise UserError(
      f"task {task} gave no completion a reward for its steps (Reward.steps),"
      f" which algorithm {built.experiment.algorithm.name} trains on"
    )
  out = np.zeros(host.ids.shape, np.float32)
  flags = np.zeros(host.ids.shape, bool)
  for b, g in np.ndindex(*host.lengths.shape):
    ids = host.ids[b, g, : host.lengths[b, g]].tolist()
    for end, reward in sampled.rewards.steps[b][g]:
      t = bisect.bisect_left(
        range(len(ids)), end, key=lambda i, ids=ids: len(decode(ids[: i + 1]))
      )
      t = min(t, len(ids) - 1)
      out[b, g, t] += reward
      flags[b, g, t] = True
  return out, flags


def join(parts: Sequence[Any]) -> Any:
  """Records of several rollouts as one: arrays, lists and texts joined."""

  def one(name: str) -> Any:
    values = [getattr(part, name) for part in parts]
    if values[0] is None:
      return None
    if isinstance(values[0], np.ndarray):
      return np.concatenate(values)
    return functools.reduce(operator.add, values)

  names = [field.name for field in dataclasses.fields(parts[0])]
  return type(parts[0])(**{name: one(name) for name in names})


def stored_groups(sampled: Sampled, advantages: np.ndarray) -> list[dict]:
  """A rollout as it is written: one record per prompt, its group inside.

  Args:
    sampled: the rollout batch that was trained on.
    advantages: [B, G, T].
  """
  host, rewards = sampled.host, sampled.rewards
  groups = []
  for b, example in enumerate(host.examples):
    rows = []
    for g, completion in enumerate(host.completions[b]):
      n = completion.tokens
      scored = bool(rewards.scored[b, g])
      row = {
        "text": completion.text,
        "ids": host.ids[b, g, :n],
        "logprobs": host.logprobs[b, g, :n],
        "truncated": completion.truncated,
        "reward": rewards.total[b, g] if scored else None,
        "success": rewards.success[b, g] if scored else None,
        "parts": rewards.parts[b, g],
        "extracted": rewards.extracted[b][g],
        "advantage": advantages[b, g, 0],
      }
      if host.support is not None:  # without it no later policy can score
        row["support"] = host.support[b, g, :n]
      if rewards.steps and rewards.steps[b][g]:
        row["steps"] = [list(step) for step in rewards.steps[b][g]]
      rows.append(row)
    group = {
      "ordinal": int(host.ordinals[b]),
      "id": example.id,
      "prompt": example.prompt,
      "answer": example.answer,
      "completions": rows,
    }
    if sampled.baseline is not None:
      known = np.isfinite(sampled.baseline[b])
      group["baseline"] = float(sampled.baseline[b]) if known else None
    groups.append(group)
  return groups
