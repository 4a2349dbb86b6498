"""GRPO as four pure functions, in reading order: START HERE.

    rollout = sample(params, prompts, key)         G completions of each prompt
    scores  = score(params, rollout)               what a network says of them
    batch   = advantage(rewards, rollout, scores)  each against its own group
    state   = update(state, batch)                 one optimizer step

Rewards that need text are computed on the host between `sample` and
`advantage`; a learned reward model is one more `score`. Nothing here knows a
mesh, file, tokenizer, clock or configuration. Arrays before the `*` are
traced; what follows is static and bound once, except for numbers inside an
algorithm or optimizer, which may be traced too.
"""

import jax
import jax.numpy as jnp
import optax

from grpo_jax import metrics, sampling
from grpo_jax.algorithms import Algorithm
from grpo_jax.logprobs import Slabs, rollout_logprobs
from grpo_jax.metrics import Metrics
from grpo_jax.models.architecture import Model
from grpo_jax.optimizer import Optimizer
from grpo_jax.types import (
  Array,
  Batch,
  Params,
  Rewards,
  Rollout,
  Scores,
  TrainState,
  merge,
  split_prompts,
)

# 1. sample(params, prompts, key, *, model, sampling) -> Rollout
sample = sampling.sample


# 2.
def score(
  params: Params, rollout: Rollout, *, model: Model, slabs: Slabs | None = None
) -> Scores:
  """What a network says of a finished rollout: log-probs and entropy.

  They are those of the distribution that was sampled (its temperature and
  support), so on fresh samples they equal `rollout.sampler_logprobs` up to
  rounding. Used for the reference policy, and for the old policy where a
  rollout serves more than one update. `slabs`: a static plan, or None.
  """
  logprobs, entropy = rollout_logprobs(
    params, rollout, model=model, slabs=slabs
  )
  return Scores(logprobs=logprobs, entropy=entropy)


# 3.
def advantage(
  rewards: Rewards, rollout: Rollout, scores: Scores, *, algorithm: Algorithm
) -> Batch:
  """Turns rewards into advantages and token weights over the rollout batch.

  A row that could not be scored trains nothing. Weights are over the whole
  batch given; `minibatch` takes them again over a part.

  Args:
    rewards: [B, G].
    rollout: the completions.
    scores: `logprobs` of the old policy, None where it is the one to update;
      `ref_logprobs` where the algorithm has a KL term.
    algorithm: the record.
  """
  per_row = algorithm.advantage(rewards.total, rewards.scored)
  mask = rollout.mask & rewards.scored[..., None]
  return Batch(
    rollout=rollout.replace(mask=mask),
    advantages=jnp.where(mask, per_row[..., None], 0.0),
    weights=algorithm.weights(mask),
    old_logprobs=scores.logprobs,
    ref_logprobs=scores.ref_logprobs,
  )


def minibatch(
  batch: Batch, index: Array | int, *, parts: int, algorithm: Algorithm
) -> Batch:
  """Mini-batch `index` of `parts`, its token weights taken over itself."""
  part = jax.tree.map(lambda x: x[index], split_prompts(batch, parts))
  return part.replace(weights=algorithm.weights(part.rollout.mask))


# 4.
def update(
  state: TrainState,
  batch: Batch,
  ends_step: Array | int = 1,
  *,
  model: Model,
  algorithm: Algorithm,
  optimizer: Optimizer,
  micro_batches: int = 1,
  slabs: Slabs | None = None,
) -> tuple[TrainState, Metrics]:
  """One optimizer step on one mini-batch: gradients, summed, then `apply`.

  Weights were fixed before, so the number of micro-batches changes nothing but
  rounding.

  Args:
    state: the train state; donate it.
    batch: one mini-batch [B, G, T].
    ends_step: 1 on the last update of a step, else 0; added to `state.step`.
    model, algorithm, optimizer: the records.
    micro_batches: a divisor of B; each is one gradient computation.
    slabs: a static plan for ragged lengths, or None.

  Returns:
    The next state and metrics, every one over the mini-batch's real tokens.
  """

  def of(part: Batch) -> tuple[Params, Metrics]:
    return gradients(
      state.trainable,
      state.frozen,
      part,
      model=model,
      algorithm=algorithm,
      slabs=slabs,
    )

  if micro_batches == 1:
    total = of(batch)
  else:
    pieces = split_prompts(batch, micro_batches)
    first = jax.tree.map(lambda x: x[0], pieces)
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of, first)
    )
    total, _ = jax.lax.scan(
      lambda total, piece: (add(total, of(piece)), None), zeros, pieces
    )
  return apply(
    state, total, ends_step, algorithm=algorithm, optimizer=optimizer
  )


def gradients(
  trainable: Params,
  frozen: Params,
  batch: Batch,
  *,
  model: Model,
  algorithm: Algorithm,
  slabs: Slabs | None = None,
) -> tuple[Params, Metrics]:
  """Gradients, and sums for metrics, of one micro-batch."""
  return jax.grad(loss, has_aux=True)(
    trainable, frozen, batch, model=model, algorithm=algorithm, slabs=slabs
  )


def add(
  a: tuple[Params, Metrics], b: tuple[Params, Metrics]
) -> tuple[Params, Metrics]:
  """Joins the gradients and sums of two micro-batches."""
  return jax.tree.map(jnp.add, a[0], b[0]), metrics.combine(a[1], b[1])


def loss(
  trainable: Params,
  frozen: Params,
  batch: Batch,
  *,
  model: Model,
  algorithm: Algorithm,
  slabs: Slabs | None = None,
) -> tuple[Array, Metrics]:
  """-(weights * objective).sum(), and sums for the metrics.

  Where `batch.old_logprobs` is None the old policy is this one: the ratio's
  value is 1 and its gradient is not 0.
  """
  params = merge(frozen, trainable)
  rollout, mask = batch.rollout, batch.rollout.mask
  logprobs, entropy = rollout_logprobs(
    params, rollout, model=model, slabs=slabs
  )
  old = batch.old_logprobs
  if old is None:
    old = jax.lax.stop_gradient(logprobs)
  ratio = algorithm.ratio(logprobs, old, mask)
  objective, low, high = algorithm.surrogate(ratio, batch.advantages)
  kl_loss = jnp.zeros_like(logprobs)
  if algorithm.kl is not None:
    kl = algorithm.kl(logprobs, batch.ref_logprobs, ratio, mask)
    kl_loss = algorithm.kl.coefficient * kl
  value = -jnp.sum(batch.weights * (objective - kl_loss))
  sums = metrics.token_sums(
    batch,
    loss=value,
    loss_kl=jnp.sum(batch.weights * kl_loss),
    logprobs=logprobs,
    old=old,
    entropy=entropy,
    ratio=ratio,
    clipped=(low, high),
  )
  return value, sums


def apply(
  state: TrainState,
  total: tuple[Params, Metrics],
  ends_step: Array | int = 1,
  *,
  algorithm: Algorithm,
  optimizer: Optimizer,
) -> tuple[TrainState, Metrics]:
  """One optimizer step, or none: no momentum, no decay, nothing moves.

  It is skipped where a loss or gradient is not finite, and where the batch
  carries no signal: no token to train, or all advantages 0 and no KL term,
  which would have a gradient of its own.
  """
  grads, sums = total
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
  alive = sums["signal"] > 0
  if algorithm.kl is not None:
    alive |= sums["weight"] > 0
  use = finite & alive
  direction, opt = optimizer.transform.update(grads, state.opt, state.trainable)
  rate = optimizer.learning_rate(state.step)
  trainable = jax.tree.map(
    lambda p, d: p - rate * d, state.trainable, direction
  )
  trainable, opt = jax.tree.map(
    lambda new, old: jnp.where(use, new, old),
    (trainable, opt),
    (state.trainable, state.opt),
  )
  step = state.step + ends_step
  return state.replace(trainable=trainable, opt=opt, step=step), {
    **metrics.token_means(sums),
    "update/grad_norm": norm,
    "update/learning_rate": rate,
    "update/nonfinite": 1.0 - finite,
    "update/dead": 1.0 - alive,
  }
