"""Checks on a run's first rollout, by the programs that it has compiled anyway.

What would spoil a run silently is cheap to see here: a sampler and a scorer
that disagree, padding that is read, rows that change places, a stop token that
is not trained on, a reference that acts where β is 0 or does not where it is
not. A failure names the row.
"""

import jax
import numpy as np

from grpo_jax.build import Built
from grpo_jax.errors import UserError
from grpo_jax.logprobs import Slabs
from grpo_jax.memory import available
from grpo_jax.rollouts import Sampled
from grpo_jax.types import Batch, Rollout, TrainState, policy

# Largest difference of two ways to the same log-prob, in nats.
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.5}


def check(
  built: Built, state: TrainState, sampled: Sampled, batch: Batch, plan: Slabs
) -> None:
  """Checks the first rollout of a run, before its update.

  Without a reference or a second update there is no scorer yet; its gap to the
  sampler is then checked by `check_gap`, after the update.

  Args:
    built: the programs.
    state: before the update.
    sampled: the rollout batch.
    batch: what the update will read.
    plan: the slabs that cover it.

  Raises:
    UserError: the first check that fails.
  """
  check_stops(built, sampled, batch)
  check_rewards(built, sampled)
  e = built.experiment
  if e.needs_old_scores or e.algorithm.reference is not None:
    check_scorer(built, state, sampled, plan)
  check_reference(built, state, batch)


def _row(sampled: Sampled, b: int, g: int) -> str:
  prompt = sampled.host.examples[b].prompt
  return f"completion {g} of prompt {b} ({prompt[-40:]!r})"


def check_stops(built: Built, sampled: Sampled, batch: Batch) -> None:
  """A completion that stopped has its stop token, and trains on it."""
  host, stops = sampled.host, built.experiment.sampling.stop_ids
  weights, mask = np.asarray(batch.weights), np.asarray(batch.rollout.mask)
  for b, g in np.argwhere(~host.truncated):
    last = host.lengths[b, g] - 1
    if host.ids[b, g, last] not in stops:
      raise UserError(
        f"{_row(sampled, b, g)} ended at token {host.ids[b, g, last]}, which is"
        " no stop id"
      )
    if mask[b, g].any() and not weights[b, g, last]:
      raise UserError(
        f"{_row(sampled, b, g)}: its stop token is not trained on"
      )
  past = np.arange(mask.shape[-1]) >= host.lengths[..., None]
  for b, g in np.argwhere((past & (weights != 0)).any(-1)):
    raise UserError(f"{_row(sampled, b, g)}: padding is trained on")


def check_rewards(built: Built, sampled: Sampled) -> None:
  """The first group's rewards are those of its rows scored in reverse.

  A reward that draws or asks a judge may differ; that is said, not refused.
  """
  host, rewards = sampled.host, sampled.rewards
  again = built.runner.score(
    host.examples[:1],
    [host.completions[0][::-1]],
    built.programs.guard.check,
  )
  both = rewards.scored[:1] & again.scored[:, ::-1]
  differ = both & (rewards.total[:1] != again.total[:, ::-1])
  for b, g in np.argwhere(differ):
    built.programs.say(
      f"{_row(sampled, b, g)} has reward {rewards.total[b, g]:g} in its batch"
      f" and {again.total[b, ::-1][g]:g} when scored again: is the reward"
      " random?"
    )
    return


def check_scorer(
  built: Built, state: TrainState, sampled: Sampled, plan: Slabs
) -> None:
  """Ratios are 1; neither padding nor a row's place changes a log-prob."""
  guard, host = built.programs.guard, sampled.host
  score, weights = built.score[plan], policy(state.params)
  if built.experiment.algorithm.offline:
    weights = state.reference
  found = np.asarray(guard.wait(score(weights, sampled.rollout)))
  _compare(
    built, sampled, found, host.logprobs, "the scorer's log-prob", "sampler's"
  )
  order = np.roll(np.arange(len(host.lengths)), 1)
  moved = _moved(built, sampled.rollout, order)
  other = np.asarray(guard.wait(score(weights, moved)))
  back = np.empty_like(other)
  back[order] = other
  _compare(
    built,
    sampled,
    back,
    found,
    "with other padding and in another place, the log-prob",
    "one before",
  )


def _moved(built: Built, rollout: Rollout, order: np.ndarray) -> Rollout:
  """Rows in another order, with other ids where there is padding."""
  host = jax.tree.map(np.asarray, rollout)
  width, size = host.prompts.ids.shape[-1], host.ids.shape[-1]
  real = np.arange(width) >= width - host.prompts.lengths[:, None]
  other = (host.prompts.ids + 1) % built.experiment.model.arch.real_vocab
  ids = (host.ids + 1) % built.experiment.model.arch.real_vocab
  written = np.arange(size) < host.lengths[..., None]
  host = host.replace(
    prompts=host.prompts.replace(ids=np.where(real, host.prompts.ids, other)),
    ids=np.where(written, host.ids, ids).astype(np.int32),
  )
  return built.to_device(
    jax.tree.map(lambda x: x[order] if x.ndim else x, host)
  )


def _compare(
  built: Built,
  sampled: Sampled,
  got: np.ndarray,
  want: np.ndarray,
  what: str,
  than: str,
) -> None:
  gap = np.abs(got - want)
  size = np.arange(gap.shape[-1]) < sampled.host.lengths[..., None]
  # What is not finite is the update's to skip and to count.
  gap = np.where(size & np.isfinite(gap), gap, 0.0)
  b, g, t = np.unravel_index(np.argmax(gap), gap.shape)
  limit = TOLERANCE[built.experiment.model.dtype]
  if gap[b, g, t] > limit:
    raise UserError(
      f"{_row(sampled, b, g)}, token {t}: {what} {got[b, g, t]:.4f} differs"
      f" from the {than} {want[b, g, t]:.4f} by more than {limit}: a model or"
      " a sampler that does not say the same of a token twice"
    )


def check_reference(built: Built, state: TrainState, batch: Batch) -> None:
  """The gradient depends on the reference's log-probs as β says.

  Only where an update is computed in micro-batches: its gradients are then
  there before they are applied. Skipped where a copy of them does not fit.
  """
  algorithm, b = built.experiment.algorithm, built.experiment.batching
  if batch.ref_logprobs is None or b.micro_batches == 1 or built.ways > 1:
    return
  if b.minibatches > 1 or algorithm.select is not None:
    return
  size = sum(x.nbytes for x in jax.tree.leaves(state.trainable))
  room = available(built.mesh.local_devices[0])
  if room is not None and 4 * size > room:
    return
  ref = state.reference if algorithm.exact_kl else None
  weights = (state.trainable, state.frozen, ref)
  trains = (np.asarray(batch.weights) != 0).any(axis=(1, 2))
  if not trains.any():
    return
  order = np.argsort(~trains, kind="stable").astype(np.int32)
  index = built.to_device(order[: b.micro_batch_prompts])
  plan = max(b.slabs, key=lambda p: sum(rows * n for rows, n in p))
  norms = []
  for shift in (0.0, 0.5):
    shifted = batch.replace(ref_logprobs=batch.ref_logprobs + shift)
    part = built.take(shifted, index)
    total = built.zeros(*weights, part)
    grads, _ = built.accumulate[plan](*weights, part, total)
    built.programs.guard.wait(grads)
    leaves = jax.tree.leaves(jax.device_get(grads))
    norms.append(sum(float(np.square(x).sum()) for x in leaves))
  reads = algorithm.kl is not None and not algorithm.exact_kl
  moves = abs(norms[0] - norms[1]) > 1e-9 * max(norms)
  # Without a KL in the loss the reference acts through the reward alone.
  if moves and algorithm.kl is None and not algorithm.offline:
    raise UserError("the gradient moves with the reference, and β is 0")
  if reads and not moves:
    raise UserError(
      "the gradient does not move with the reference's log-probs, and β is not"
      " 0: is the reference the policy itself?"
    )


def check_gap(built: Built, metrics: dict[str, float]) -> None:
  """The first update's own gap between sampler and trainer.

  Raises:
    UserError: it is larger than rounding.
  """
  gap = metrics["sampler/logprob_gap_max"]
  limit = TOLERANCE[built.experiment.model.dtype]
  if gap > limit and not built.experiment.algorithm.offline:
    raise UserError(
      f"sampler and trainer differ by {gap:.4f} nats on a token of the first"
      f" rollout, more than {limit}: ratios are not 1 on fresh samples"
    )
