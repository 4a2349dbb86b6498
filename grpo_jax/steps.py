"""One step of each phase: host and device take turns.

    warm-up   demonstrations -> update (imitation)
    rl        sample -> reward (host) -> score -> advantage -> update(s)

A state's buffers are donated to its update, so from there to the end of the
step nothing may be abandoned: that part is shielded from signals. Before it, a
signal leaves the last finished step untouched.
"""

import dataclasses
import functools
import operator
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax import data, metrics, probe
from grpo_jax.build import Built
from grpo_jax.logprobs import Slabs, cover
from grpo_jax.rewards.runner import RewardBatch
from grpo_jax.tasks.base import Completion, Example
from grpo_jax.types import Batch, Rewards, Rollout, Scores, TrainState
from grpo_jax.updates import update_all


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
class StepResult:
  """What one step gives back; `groups` is the rollout as it is stored."""

  state: TrainState
  metrics: dict[str, Any]
  batch: Any  # of the last update, to inspect one that failed
  groups: list[dict] | None = None
  samples: int = 0  # completions sampled
  first_error: str = ""
  verdict: probe.Verdict | None = None


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


def imitate_step(
  built: Built, state: TrainState, stream: data.Stream, step: int
) -> StepResult:
  """One warm-up step: maximum likelihood of the task's demonstrations."""
  e, guard = built.experiment, built.programs.guard
  clock = Clock()
  examples, ordinals = stream.batch(step, e.warmup_prompts)
  arrays = data.encode_demonstrations(
    e.task,
    examples,
    ordinals,
    e.tokenizer,
    e.config["seed"],
    e.sampling.max_tokens,
  )
  prompts = built.prompts(examples, ordinals)
  ids, lengths = built.to_device((arrays["ids"], arrays["lengths"]))
  guard.check()
  with guard.shielded():
    state, sums = built.imitate(state, prompts, ids, lengths)
    guard.wait((state, sums))
  clock.lap("time/step")
  values = metrics.scalars(sums)
  kept = ("loss", "entropy", "tokens/trained")
  out = {k: v for k, v in values.items() if k in kept or "update/" in k}
  batch = {"prompts": prompts, "ids": ids, "lengths": lengths}
  return StepResult(state, {"phase": "warmup", **out, **clock.seconds}, batch)


def sample_and_reward(
  built: Built, state: TrainState, stream: data.Stream, index: int, clock: Clock
) -> tuple[Rollout, HostRollout, RewardBatch]:
  """The first half of a step: completions and what the task says of them."""
  guard = built.programs.guard
  b = built.experiment.batching.prompts_per_step
  examples, ordinals = stream.batch(index, b)
  prompts = built.prompts(examples, ordinals)
  rollout = built.sample(state.params, prompts, state.key, state.step)
  host = fetch(built, rollout, examples, ordinals)
  clock.lap("time/sample")
  step = built.experiment.warmup_steps + index + 1
  ids = [("rl", step, int(ordinal)) for ordinal in ordinals]
  rewards = built.runner.score(examples, host.completions, guard.check, ids)
  clock.lap("time/reward")
  return rollout, host, rewards


def make_batch(
  built: Built,
  state: TrainState,
  rollout: Rollout,
  rewards: RewardBatch,
  plan: Slabs,
) -> Batch:
  """Reference and old-policy log-probs where needed, then advantages."""
  e = built.experiment
  scores = Scores(
    logprobs=built.score[plan](state.params, rollout)
    if e.needs_old_scores
    else None,
    ref_logprobs=built.score[plan](state.ref, rollout)
    if e.algorithm.kl is not None
    else None,
  )
  on_device = built.to_device(
    Rewards(
      total=rewards.total,
      scored=rewards.scored,
      metric=rewards.success,
      parts=np.nan_to_num(rewards.parts),
    )
  )
  return built.advantage(on_device, rollout, scores)


def reinforce_step(
  built: Built, state: TrainState, stream: data.Stream, index: int
) -> StepResult:
  """One step of reinforcement learning.

  Args:
    built: the programs.
    state: donated to the updates.
    stream: training examples.
    index: steps of this phase before this one.
  """
  e, guard = built.experiment, built.programs.guard
  clock = Clock()
  rollout, host, rewards = sample_and_reward(built, state, stream, index, clock)
  plan = cover(host.lengths, e.batching.slabs)
  batch = make_batch(built, state, rollout, rewards, plan)
  guard.wait(batch)
  clock.lap("time/score")
  state, sums, parts, computed = update_all(built, state, batch, host.lengths)
  values = [metrics.scalars(x) for x in sums]
  # The one to look at: the first that was not finite, if any.
  odd = [i for i, x in enumerate(values) if x["update/nonfinite"]]
  clock.lap("time/update")
  seconds = {**clock.seconds, "time/step": sum(clock.seconds.values())}
  out = {
    "phase": "rl",
    **metrics.reward_metrics(
      rewards.total,
      rewards.scored,
      rewards.success,
      rewards.parts,
      e.task.parts,
      rewards.errors,
      int(rewards.timed_out.sum()),
    ),
    **metrics.length_metrics(host.lengths, host.truncated),
    **average(values),
    "tokens/computed_frac": computed / real_tokens(host, e.batching.epochs),
    **seconds,
    "time/tokens_per_second": float(host.lengths.sum() / seconds["time/step"]),
  }
  return StepResult(
    state,
    out,
    parts[odd[0] if odd else -1],
    groups=stored_groups(host, rewards, np.asarray(batch.advantages)),
    samples=host.lengths.size,
    first_error=rewards.first_error,
    verdict=probe.verdict(rewards),
  )


def probe_step(
  built: Built, state: TrainState, stream: data.Stream, prompts: int
) -> tuple[HostRollout, RewardBatch]:
  """Samples and scores at least `prompts` prompts; trains nothing."""
  b = built.experiment.batching.prompts_per_step
  parts = [
    sample_and_reward(built, state, stream, index, Clock())[1:]
    for index in range(-(-prompts // b))
  ]
  if len(parts) == 1:
    return parts[0]
  hosts, rewards = zip(*parts)
  return join(hosts), join(rewards)


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


def average(values: list[dict[str, float]]) -> dict[str, float]:
  """Means over a step's updates; of what is named max, the maximum."""
  return {
    k: (max if k.endswith("max") else np.mean)([float(v[k]) for v in values])
    for k in values[0]
  }


def real_tokens(host: HostRollout, epochs: int) -> float:
  """Tokens of prompts (once a group) and completions in a step's updates."""
  return float(
    epochs * max((host.prompt_lengths - 1).sum() + host.lengths.sum(), 1)
  )


def stored_groups(
  host: HostRollout, rewards: RewardBatch, advantages: np.ndarray
) -> list[dict]:
  """A rollout as it is written: one record per prompt, its group inside.

  Args:
    host: ids, lengths and text.
    rewards: of each completion.
    advantages: [B, G, T].
  """
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
      rows.append(row)
    groups.append(
      {
        "ordinal": int(host.ordinals[b]),
        "id": example.id,
        "prompt": example.prompt,
        "answer": example.answer,
        "completions": rows,
      }
    )
  return groups
