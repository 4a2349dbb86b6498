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

from grpo_jax import metrics, sampling, shaping
from grpo_jax.algorithm import Algorithm
from grpo_jax.apply import apply
from grpo_jax.logprobs import Slabs, rollout_logprobs, rollout_scores
from grpo_jax.metrics import Metrics
from grpo_jax.models.architecture import Model
from grpo_jax.optimizer import Optimizer
from grpo_jax.tokens import seen, select
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
from grpo_jax.values import values

__all__ = ("advantage", "apply", "minibatch", "sample", "score", "select")
__all__ += ("add", "gradients", "loss", "update")

# 1. sample(params, prompts, key, *, model, sampling) -> Rollout
sample = sampling.sample


# 2.
@jax.named_scope("score")
def score(
  params: Params, rollout: Rollout, *, model: Model, slabs: Slabs | None = None
) -> Scores:
  """What a network says of a finished rollout: log-probs, entropy, values.

  Values where `params` have a critic. Log-probs are those of the distribution
  that was sampled (its temperature and support), so on fresh samples they equal
  `rollout.sampler_logprobs` up to rounding. Used for the reference policy, and
  for the old policy where a rollout serves more than one update. `slabs`: a
  static plan, or None.
  """
  logprobs, entropy = rollout_logprobs(
    params, rollout, model=model, slabs=slabs
  )
  found = values(params, rollout, model=model) if "critic" in params else None
  return Scores(logprobs=logprobs, entropy=entropy, values=found)


# 3.
@jax.named_scope("advantage")
def advantage(
  rewards: Rewards,
  rollout: Rollout,
  scores: Scores,
  *,
  algorithm: Algorithm,
  kl_scale: Array | None = None,
) -> Batch:
  """Turns rewards into advantages and token weights over the rollout batch.

  A row that could not be scored trains nothing. Weights are over the whole
  batch given; `minibatch` takes them again over a part.

  Args:
    rewards: [B, G].
    rollout: the completions.
    scores: `logprobs` of the old policy, None where it is the one to update;
      `ref_logprobs` and `values` where the algorithm has a reference, a critic.
    algorithm: the record.
    kl_scale: [] multiple of the KL coefficient; None is 1.
  """
  rewards = shaping.shape(rewards, rollout, scores, algorithm, kl_scale)
  mask = rollout.mask & algorithm.keep(rewards, rollout)[..., None]
  per_token = algorithm.advantage(rewards, rollout, scores)
  batch = Batch(
    rollout=rollout.replace(mask=mask),
    advantages=jnp.where(mask, per_token, 0.0),
    weights=algorithm.weights(mask),
    old_logprobs=scores.logprobs,
    ref_logprobs=scores.ref_logprobs,
    kl_scale=kl_scale,
  )
  if algorithm.critic is None:
    return batch
  return batch.replace(
    value_targets=algorithm.critic.targets(rewards, rollout, scores),
    old_values=scores.values[..., :-1],
  )


def minibatch(
  batch: Batch, index: Array | int, *, parts: int, algorithm: Algorithm
) -> Batch:
  """Mini-batch `index` of `parts`, its token weights taken over itself."""
  part = jax.tree.map(lambda x: x[index], split_prompts(batch, parts))
  return part.replace(weights=algorithm.weights(part.rollout.mask))


# 4.
@jax.named_scope("update")
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
      ref=state.reference if algorithm.exact_kl else None,
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
  ref: Params | None = None,
) -> tuple[Params, Metrics]:
  """Gradients, and sums for metrics, of one micro-batch."""
  return jax.grad(loss, has_aux=True)(
    trainable,
    frozen,
    batch,
    model=model,
    algorithm=algorithm,
    slabs=slabs,
    ref=ref,
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
  ref: Params | None = None,
) -> tuple[Array, Metrics]:
  """-(weights * objective).sum(), and sums for the metrics.

  Where `batch.old_logprobs` is None the old policy is this one: the ratio's
  value is 1 and its gradient is not 0. `ref`: the reference's parameters, where
  the KL is exact.
  """
  params = merge(frozen, trainable)
  (logprobs, entropy, *exact), aux = rollout_scores(
    params, batch.rollout, model=model, slabs=slabs, ref=ref
  )
  tokens = seen(batch, logprobs, entropy, *exact)
  ratio = algorithm.ratio(logprobs, algorithm.anchor(tokens), tokens.mask)
  objective, low, high = algorithm.surrogate(ratio, tokens.advantages, tokens)
  objective = algorithm.correction(tokens) * objective
  kl_loss = jnp.zeros_like(logprobs)
  if algorithm.kl is not None:
    kl = algorithm.kl(logprobs, tokens.ref, ratio, tokens.mask, tokens.exact_kl)
    scale = 1.0 if batch.kl_scale is None else batch.kl_scale
    kl_loss = algorithm.kl.coefficient * scale * kl
  objective = objective + algorithm.bonus(tokens) - kl_loss
  value = -jnp.sum(batch.weights * objective)
  sums = metrics.token_sums(
    batch,
    tokens,
    loss=value,
    loss_kl=jnp.sum(batch.weights * kl_loss),
    ratio=ratio,
    clipped=(low, high),
  )
  sums |= aux
  if algorithm.critic is None:
    return value, sums
  found = values(params, batch.rollout, model=model)[..., :-1]
  value_loss = algorithm.critic.loss(batch, found)
  value += value_loss
  sums |= metrics.value_sums(batch, found, value_loss)
  return value, sums | {"loss": value}
