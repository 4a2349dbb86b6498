"""What the parts of a loss see of a batch, and the tokens one singles out."""

import jax

from grpo_jax.algorithm import Algorithm
from grpo_jax.logprobs import rollout_logprobs
from grpo_jax.models.architecture import Model
from grpo_jax.types import Array, Batch, Params, Tokens


def seen(
  batch: Batch, logprobs: Array, entropy: Array, exact: Array | None = None
) -> Tokens:
  """What the parts of a loss see of a batch at these log-probs."""
  old = batch.old_logprobs
  return Tokens(
    logprobs=logprobs,
    old=jax.lax.stop_gradient(logprobs) if old is None else old,
    sampler=batch.rollout.sampler_logprobs,
    advantages=batch.advantages,
    mask=batch.rollout.mask,
    entropy=entropy,
    ref=batch.ref_logprobs,
    exact_kl=exact,
    selected=batch.selected,
  )


def select(
  params: Params, batch: Batch, *, model: Model, algorithm: Algorithm
) -> Batch:
  """Marks the tokens that `algorithm.select` singles out at these weights.

  Over a whole mini-batch, before it is cut into micro-batches.
  """
  logprobs, entropy = rollout_logprobs(params, batch.rollout, model=model)
  key = jax.random.fold_in(jax.random.key(0), batch.rollout.policy_step)
  tokens = seen(batch, logprobs, entropy)
  return batch.replace(selected=algorithm.select(tokens, key))
