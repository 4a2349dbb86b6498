"""A step rebuilt from its rollout: what each token was worth, and why.

    python -m grpo_jax.inspect --workdir=RUN --step=240            its groups
    python -m grpo_jax.inspect --workdir=RUN --step=240 --group=3  its tokens

The policy that a step trained is rebuilt exactly: from the last checkpoint
before it, by repeating the updates on the stored rollouts. That its log-probs
equal the stored ones of the sampler is checked and printed.
"""

import dataclasses
from typing import Any

import numpy as np
from absl import flags

from grpo_jax import (
  build,
  cli,
  config,
  rollouts,
  session,
  sharding,
  steps,
  stored,
)
from grpo_jax.build import Built
from grpo_jax.checkpoint import open_run
from grpo_jax.compile import Programs, use_cache
from grpo_jax.console import Console
from grpo_jax.errors import UserError
from grpo_jax.logprobs import cover
from grpo_jax.policy import stored_config
from grpo_jax.preemption import Guard, Preempted, leave
from grpo_jax.records import read_rollouts
from grpo_jax.rewards.runner import RewardBatch
from grpo_jax.rollouts import Sampled
from grpo_jax.tasks.base import Example
from grpo_jax.types import Batch, Rollout, TrainState, length_mask, policy
from grpo_jax.updates import update_all


@dataclasses.dataclass(frozen=True)
class Rebuilt:
  """One step, as it was before its first update.

  Attributes:
    batch: the rollout batch with advantages and weights.
    logprobs: [B, G, T] of the policy that the step trained.
    ref_logprobs: [B, G, T], or None without a KL term.
    groups: the stored rollout.
  """

  batch: Batch
  logprobs: np.ndarray
  ref_logprobs: np.ndarray | None
  groups: list[dict]


def stored_rollout(
  built: Built, groups: list[dict], policy_step: int
) -> Sampled:
  """A stored step: the rollout on the mesh, rewards on the host."""
  e = built.experiment
  t = e.sampling.max_tokens
  rows = [group["completions"] for group in groups]

  def column(name: str, dtype: Any) -> np.ndarray:
    return np.array(
      [[row[name] or 0 for row in group] for group in rows], dtype
    )

  def padded(name: str, fill: float, dtype: Any) -> np.ndarray:
    out = np.full((len(rows), len(rows[0]), t), fill, dtype)
    for b, group in enumerate(rows):
      for g, row in enumerate(group):
        out[b, g, : len(row[name])] = row[name]
    return out

  lengths = np.array(
    [[len(row["ids"]) for row in group] for group in rows], np.int32
  )
  examples = [
    Example(group["id"], group["prompt"], group["answer"]) for group in groups
  ]
  ordinals = np.array([group["ordinal"] for group in groups], np.int32)
  arrays = built.to_device(
    {
      "ids": padded("ids", e.tokenizer.pad_id, np.int32),
      "lengths": lengths,
      "truncated": column("truncated", bool),
      "mask": np.asarray(length_mask(lengths, t)),
      "sampler_logprobs": padded("logprobs", 0.0, np.float32),
      "temperature": np.float32(e.sampling.temperature),
      "policy_step": np.int32(policy_step),
    }
  )
  support = None
  if e.sampling.support_size(e.model.arch.vocab):
    kept = e.sampling.support_size(e.model.arch.vocab)
    out = np.full((*lengths.shape, t, kept), -1, np.int32)
    for b, group in enumerate(rows):
      for g, row in enumerate(group):
        out[b, g, : len(row["ids"])] = row["support"]
    support = built.to_device(out)
  rollout = Rollout(
    prompts=built.prompts(examples, ordinals), support=support, **arrays
  )
  scored = np.array(
    [[row["reward"] is not None for row in group] for group in rows]
  )
  rewards = RewardBatch(
    total=column("reward", np.float32),
    scored=scored,
    success=column("success", np.float32),
    parts=column("parts", np.float32),
    extracted=[[row["extracted"] for row in group] for group in rows],
    timed_out=np.zeros_like(scored),
    errors=int((~scored).sum()),
    first_error="",
    steps=[[row.get("steps", ()) for row in group] for group in rows],
  )
  baseline = None
  if e.algorithm.baseline_rollout:
    found = [group["baseline"] for group in groups]
    baseline = np.array([np.nan if x is None else x for x in found])
  host = rollouts.fetch(built, rollout, examples, ordinals)
  return Sampled(rollout, host, rewards, baseline, {})


def restore_before(built: Built, run: str, step: int) -> TrainState:
  """The state of the last checkpoint before a step of RL."""
  e = built.experiment
  with open_run(run) as checkpoints:
    usable = [s for s in checkpoints.steps() if e.warmup_steps <= s < step]
    if not usable:
      raise UserError(
        f"no checkpoint between the end of the warm-up ({e.warmup_steps}) and"
        f" step {step} in {run}"
      )
    at = usable[-1]
    phase = session.phase_of(at, e.warmup_steps)
    state = stored.restore_state(
      built, checkpoints, at, built.shapes[phase], checkpoints.host(at)
    )
    if phase == "rl" and at > e.warmup_steps:
      return state
    begin = built.begin["rl"]
    return begin(policy(state.params), state.key, state.step)


def rebuild(built: Built, run: str, step: int) -> Rebuilt:
  """Rebuilds a step: repeats the updates between a checkpoint and it."""
  state = restore_before(built, run, step)
  guard = built.programs.guard
  for k in range(int(state.step) + 1, step + 1):
    groups = read_rollouts(run, k)
    sampled = stored_rollout(built, groups, k - 1)
    rollout, lengths = sampled.rollout, sampled.host.lengths
    plan = cover(lengths, built.experiment.batching.slabs)
    rewards = rollouts.device_rewards(built, sampled)
    batch = steps.make_batch(built, state, rollout, rewards, plan)
    if k == step:
      logprobs = built.score[plan](policy(state.params), rollout)
      guard.wait(logprobs)
      ref = batch.ref_logprobs
      return Rebuilt(
        batch,
        np.asarray(logprobs),
        None if ref is None else np.asarray(ref),
        groups,
      )
    state = update_all(built, state, batch, lengths)[0]
  raise AssertionError("a checkpoint before the step leaves a step to rebuild")


def show_groups(console: Console, rebuilt: Rebuilt) -> None:
  """One line per group."""
  rows = []
  for i, group in enumerate(rebuilt.groups):
    rewards = [row["reward"] for row in group["completions"]]
    known = [r for r in rewards if r is not None]
    best = max(group["completions"], key=lambda row: row["reward"] or 0)
    rows.append(
      (
        str(i),
        repr(group["prompt"][-40:]),
        repr(group["answer"][:20]),
        " ".join("-" if r is None else f"{r:g}" for r in rewards),
        f"{np.mean(known):.3f}" if known else "-",
        repr(best["text"][:30]),
      )
    )
  columns = ("group", "prompt", "answer", "rewards", "mean", "best completion")
  console.table("Groups (--group=i shows one's tokens)", columns, rows)


def _show(built: Built, token: int) -> str:
  e = built.experiment
  if token in e.sampling.stop_ids:
    return "<stop>"
  return repr(e.tokenizer.decode([token]))


def show_tokens(
  console: Console, built: Built, rebuilt: Rebuilt, group: int
) -> None:
  """Every token of one group: log-probs, ratio, advantage, weight."""
  record, batch = rebuilt.groups[group], rebuilt.batch
  advantages, weights = np.asarray(batch.advantages), np.asarray(batch.weights)
  console.say(f"prompt {record['prompt']!r}, answer {record['answer']!r}")
  for g, row in enumerate(record["completions"]):
    rows = []
    for t, token in enumerate(row["ids"]):
      logprob = rebuilt.logprobs[group, g, t]
      ref = rebuilt.ref_logprobs
      rows.append(
        (
          str(t),
          _show(built, token),
          f"{row['logprobs'][t]:.4f}",
          f"{logprob:.4f}",
          "-" if ref is None else f"{ref[group, g, t]:.4f}",
          f"{np.exp(logprob - row['logprobs'][t]):.5f}",
          f"{advantages[group, g, t]:+.4f}",
          f"{weights[group, g, t]:.3g}",
        )
      )
    reward = "unscored" if row["reward"] is None else f"{row['reward']:g}"
    title = f"completion {g}: {row['text']!r}, reward {reward}"
    columns = ("t", "token", "sampler", "policy", "reference")
    columns += ("ratio", "advantage", "weight")
    console.table(title, columns, rows)


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("workdir", None, "the run")
  flags.DEFINE_integer("step", None, "a step of reinforcement learning")
  flags.DEFINE_integer("group", None, "show the tokens of this group")


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  if not f.workdir or f.step is None:
    raise UserError("--workdir=RUN and --step=N are needed")
  c = stored_config(f.workdir)
  e = config.resolve_plain(c)
  if not e.warmup_steps < f.step <= e.total_steps:
    raise UserError(
      f"--step={f.step} is no step of reinforcement learning; those are"
      f" {e.warmup_steps + 1} to {e.total_steps}"
    )
  cli.check_platform("")
  use_cache(c["compile_cache"])
  mesh = sharding.make_mesh(-1, 1, 1)
  console = Console()
  groups = len(read_rollouts(f.workdir, f.step))
  if f.group is not None and not 0 <= f.group < groups:
    raise UserError(
      f"--group={f.group} is not one of the {groups} groups, 0 to {groups - 1}"
    )
  with Guard() as guard:
    built = build.build(e, Programs(mesh, guard, console.say))
    build.check_mesh(e, mesh)
    try:
      rebuilt = rebuild(built, f.workdir, f.step)
    except Preempted:
      leave(cli.PREEMPTED)
  if f.group is None:
    show_groups(console, rebuilt)
  else:
    show_tokens(console, built, rebuilt, f.group)
  rollout = rebuilt.batch.rollout
  gap = np.abs(rebuilt.logprobs - np.asarray(rollout.sampler_logprobs)).max()
  console.say(f"largest |policy - sampler| log-prob gap: {gap:.2e}")
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
