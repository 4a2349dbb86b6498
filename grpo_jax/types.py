"""The arrays that travel between the four functions, field by field.

Letters: `B` prompts, `G` completions per prompt, `P` prompt tokens, `T`
completion tokens, `k` kept ids of a truncated sampling distribution, `C` parts
of a reward. Anything per completion token is `[..., T]`, and index t is the
t-th generated token. Masks come from lengths, never from token values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array
Params = Any  # a nested dict of arrays; its paths are permanent


@struct.dataclass
class Prompts:
  """Prompts of one batch, left-padded, so the last token is in column P-1."""

  ids: Array  # [B, P] int32
  lengths: Array  # [B] int32, real tokens, at least 1
  ordinals: Array  # [B] int32, the draw's number in the data stream


@struct.dataclass
class Rollout:
  """G completions of each prompt, as sampled. Token ids are never re-encoded.

  The rollout carries the distribution it was drawn from: `sampler_logprobs`
  and every later log-prob are taken after `temperature` and, where `support`
  is given, renormalised on the ids that top-k, top-p or min-p kept.
  """

  prompts: Prompts
  ids: Array  # [B, G, T] int32, right-padded
  lengths: Array  # [B, G] int32, the stop token included
  truncated: Array  # [B, G] bool, ended by its length limit, not a stop token
  mask: Array  # [B, G, T] bool, tokens the policy wrote and may be trained on
  sampler_logprobs: Array  # [B, G, T] float32, 0 on padding
  support: Array | None  # [B, G, T, k] int32, -1 where nothing is kept
  temperature: Array  # [] float32, of every log-prob taken of this rollout
  policy_step: Array  # [] int32, the step of the policy that sampled


@struct.dataclass
class Rewards:
  """What a task says of a rollout. "Could not score" is neither 0 nor 1."""

  total: Array  # [B, G] float32, the number that is trained on
  scored: Array  # [B, G] bool, False: no reward, and no loss on this row
  metric: Array  # [B, G] float32, the task's own success, for filters and logs
  parts: Array  # [B, G, C] float32, named components, for logs
  per_token: Array | None = None  # [B, G, T] float32, of steps, beside total
  steps: Array | None = None  # [B, G, T] bool, the last token of each step
  baseline: Array | None = None  # [B] float32, the likeliest completion's
  penalty: Array | None = None  # [B, G, T] float32, KL and length, shaped in


@struct.dataclass
class Scores:
  """What a network says of a finished rollout."""

  logprobs: Array | None = None  # [B, G, T] float32
  ref_logprobs: Array | None = None  # [B, G, T] float32
  entropy: Array | None = None  # [B, G, T] float32, in nats
  values: Array | None = None  # [B, G, T+1] float32
  reward: Array | None = None  # [B, G] float32, a learned reward


@struct.dataclass
class Batch:
  """All that an update reads. The loss is a plain weighted sum over tokens."""

  rollout: Rollout
  advantages: Array  # [B, G, T] float32
  weights: Array  # [B, G, T] float32, fixed before any slicing; 0 off the mask
  old_logprobs: Array | None = None  # [B, G, T] float32; None: this policy's
  ref_logprobs: Array | None = None  # [B, G, T] float32
  selected: Array | None = None  # [B, G, T] bool, tokens a part singled out
  value_targets: Array | None = None  # [B, G, T] float32
  old_values: Array | None = None  # [B, G, T] float32, when it was sampled
  kl_scale: Array | None = None  # [] float32, the controller's; None: 1


@struct.dataclass
class Tokens:
  """What a loss knows of each completion token, all [B, G, T].

  The gradient flows through `logprobs`, `entropy` and `exact_kl`.
  """

  logprobs: Array  # of the policy being trained
  old: Array  # of the policy before the step; on fresh samples the same
  sampler: Array  # of the sampler that drew them
  advantages: Array
  mask: Array  # bool
  entropy: Array  # of the policy's distribution there
  ref: Array | None = None  # of the reference
  exact_kl: Array | None = None  # over the whole vocabulary
  selected: Array | None = None  # bool


@struct.dataclass
class TrainState:
  """Everything that changes during a run, and the root of its randomness.

  `jax.grad` sees `trainable` alone, so frozen bases, adapters and a critic's
  pre-training need no special case.
  """

  trainable: Params
  frozen: Params
  ref: Params | None
  opt: Any
  controllers: dict[str, Array]  # numbers that steer, such as a KL's multiple
  step: Array  # [] int32, finished steps, warm-up steps included
  key: Array  # [] typed PRNG key, never advanced: streams are folded in

  @property
  def params(self) -> Params:
    """The whole parameter tree: trainable and frozen parts merged."""
    return merge(self.frozen, self.trainable)

  @property
  def reference(self) -> Params | None:
    """The reference policy: of an adapted one `ref` holds the adapters."""
    return None if self.ref is None else merge(self.frozen, self.ref)


def policy(params: Params) -> Params:
  """The policy's own parameters: what a critic has beside them left out."""
  return {k: v for k, v in params.items() if k != "critic"}


def merge(base: Params, over: Params) -> Params:
  """Merges two nested dicts; where both have a leaf, `over` wins."""
  if not isinstance(base, dict) or not isinstance(over, dict):
    return over
  out = dict(base)
  for name, value in over.items():
    out[name] = merge(base[name], value) if name in base else value
  return out


def length_mask(lengths: Array, size: int) -> Array:
  """Mask of the first `lengths` positions: [...] -> [..., size] bool."""
  shape = (*lengths.shape, size)
  positions = jax.lax.broadcasted_iota(lengths.dtype, shape, lengths.ndim)
  return positions < lengths[..., None]


def split_prompts(tree: Any, parts: int) -> Any:
  """Cuts B into strided parts: [B, ...] -> [parts, B/parts, ...].

  A part is always whole prompts. Contiguous parts would move rows between
  devices; strided ones stay where they are.
  """

  def cut(x: Array) -> Array:
    if not x.ndim:
      return jnp.broadcast_to(x, (parts,))
    return jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)

  return jax.tree.map(cut, tree)
