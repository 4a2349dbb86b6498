"""One step of each phase: host and device take turns.

    warm-up   demonstrations -> update (imitation)
    rl        sample -> reward (host) -> score -> advantage -> update(s)

A state's buffers are donated to its update, so from there to the end of the
step nothing may be abandoned: that part is shielded from signals. Before it, a
signal leaves the last finished step untouched.
"""

import dataclasses
from typing import Any

import numpy as np

from grpo_jax import data, metrics, preflight, probe, rollouts
from grpo_jax.build import Built
from grpo_jax.curriculum import Curriculum
from grpo_jax.logprobs import Slabs, cover
from grpo_jax.rewards.runner import RewardBatch
from grpo_jax.rollouts import Clock, HostRollout, Position
from grpo_jax.types import Batch, Rewards, Rollout, Scores, TrainState, policy
from grpo_jax.updates import update_all


@dataclasses.dataclass(frozen=True)
class StepResult:
  """What one step gives back; `groups` is the rollout as it is stored."""

  state: TrainState
  metrics: dict[str, Any]
  batch: Any  # of the last update, to inspect one that failed
  groups: list[dict] | None = None
  batches: int = 0  # of prompts that were drawn from the stream
  curriculum: Curriculum | None = None  # after them
  samples: int = 0  # completions sampled
  first_error: str = ""
  verdict: probe.Verdict | None = None


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


def make_batch(
  built: Built,
  state: TrainState,
  rollout: Rollout,
  rewards: Rewards,
  plan: Slabs,
) -> Batch:
  """Reference, old-policy and value passes where needed, then advantages."""
  e = built.experiment
  logprobs = ref = values = None
  if e.needs_old_scores:
    logprobs = built.score[plan](policy(state.params), rollout)
  if e.algorithm.reference is not None:
    ref = built.score[plan](state.reference, rollout)
  if e.algorithm.critic is not None:
    values = built.value(state.params, rollout)
  scores = Scores(logprobs=logprobs, ref_logprobs=ref, values=values)
  scale = state.controllers.get("kl_scale")
  return built.advantage(rewards, rollout, scores, scale)


def reinforce_step(
  built: Built,
  state: TrainState,
  stream: data.Stream,
  at: Position,
  first: bool = False,
) -> StepResult:
  """One step of reinforcement learning.

  Args:
    built: the programs.
    state: donated to the updates.
    stream: training examples.
    at: the step, and how far the stream has been read.
    first: of a run; its rollout is checked (`preflight`).
  """
  e, guard = built.experiment, built.programs.guard
  clock = Clock()
  sampled = rollouts.gather(built, state, stream, at, clock)
  host, rewards = sampled.host, sampled.rewards
  plan = cover(host.lengths, e.batching.slabs)
  on_device = rollouts.device_rewards(built, sampled)
  batch = make_batch(built, state, sampled.rollout, on_device, plan)
  guard.wait(batch)
  clock.lap("time/score")
  if first:
    preflight.check(built, state, sampled, batch, plan)
  state, sums, parts, computed = update_all(built, state, batch, host.lengths)
  values = [metrics.scalars(x) for x in sums]
  # The one to look at: the first that was not finite, if any.
  odd = [i for i, x in enumerate(values) if x["update/nonfinite"]]
  if first:
    preflight.check_gap(built, values[0])
  clock.lap("time/update")
  seconds = {**clock.seconds, "time/step": sum(clock.seconds.values())}
  tokens = sampled.metrics["tokens/sampled"]
  learned = {}
  if sampled.curriculum is not None:
    drawn = (at.batches + sampled.batches) * len(host.examples)
    learned = sampled.curriculum.metrics(drawn)
  out = {
    "phase": "rl",
    **sampled.metrics,
    **learned,
    **average(values),
    "tokens/computed_frac": computed / real_tokens(host, e.batching.epochs),
    **seconds,
    "time/tokens_per_second": tokens / seconds["time/step"],
  }
  return StepResult(
    state,
    out,
    parts[odd[0] if odd else -1],
    groups=rollouts.stored_groups(sampled, np.asarray(batch.advantages)),
    batches=sampled.batches,
    curriculum=sampled.curriculum,
    samples=sampled.batches * host.lengths.size,
    first_error=rewards.first_error,
    verdict=probe.verdict(rewards),
  )


def probe_step(
  built: Built, state: TrainState, stream: data.Stream, prompts: int
) -> tuple[HostRollout, RewardBatch]:
  """Samples and scores at least `prompts` prompts; trains nothing."""
  b = built.experiment.batching.prompts_per_step
  parts = []
  for index in range(-(-prompts // b)):
    at = Position(built.experiment.warmup_steps + index + 1, index)
    one = rollouts.sample_and_reward(built, state, stream, at, Clock())
    parts.append((one.host, one.rewards))
  if len(parts) == 1:
    return parts[0]
  hosts, rewards = zip(*parts)
  return rollouts.join(hosts), rollouts.join(rewards)


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
