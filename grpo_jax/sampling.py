"""Sampling completions: one prefill per prompt, then a compiled decode loop.

A completion depends on the seed, the step and its own prompt: the key of token
t is fold_in(fold_in(fold_in(key, ordinal), g), t). It does not depend on the
batch split, the order of rows, the number of devices or the host.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax import types
from grpo_jax.logprobs import gather_support, tempered
from grpo_jax.models.architecture import Model
from grpo_jax.models.decoders import decoder
from grpo_jax.models.layers import MASKED
from grpo_jax.sharding import shard
from grpo_jax.types import Array, Params, Prompts, Rollout

BLOCK = 128  # ids that the draw looks at together


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are drawn.

  Attributes:
    group_size: G, completions per prompt.
    max_tokens: T, the stop token included.
    stop_ids: any of these ends a completion; it is part of the completion.
    pad_id: written after the end; never read as a mark of anything.
    temperature: logits are divided by it; 0 takes the likeliest token, and
      log-probs are then those at temperature 1.
    top_k: keep the k likeliest ids; 0 keeps all.
    top_p: keep the likeliest ids up to this mass; 1 keeps all.
    min_p: keep ids with at least this share of the likeliest's probability.
    max_support: ids stored at most where top_p or min_p is used without top_k;
      a wider nucleus is cut there, for sampler and scorer alike.
    ignore_stop: run every row to its limit (benchmarks).
    early_exit: stop when all rows have; False runs T steps, so a map over
      seeds costs no more than its longest member.
  """

  group_size: int
  max_tokens: int
  stop_ids: tuple[int, ...]
  pad_id: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_support: int = 128
  ignore_stop: bool = False
  early_exit: bool = True

  def likeliest(self) -> "Sampling":
    """One completion a prompt, of the likeliest tokens."""
    return dataclasses.replace(self, group_size=1, temperature=0.0)

  def support_size(self, vocab: int) -> int:
    """Ids to store per token; 0 where the whole vocabulary is sampled."""
    if self.temperature == 0:
      return 0
    if self.top_k:
      return min(self.top_k, vocab)
    if self.top_p < 1 or self.min_p > 0:
      return min(self.max_support, vocab)
    return 0


@struct.dataclass
class _Loop:
  """State of the decode loop after `t` tokens."""

  t: Array  # [] int32
  token: Array  # [B, G] int32, the next input
  cache: Any  # the network's own
  ids: Array  # [B, G, T] int32
  logprobs: Array  # [B, G, T] float32
  support: Array | None  # [B, G, T, k] int32
  lengths: Array  # [B, G] int32
  done: Array  # [B, G] bool
  truncated: Array  # [B, G] bool


def stream_key(root: Array, step: Array | int, name: str) -> Array:
  """The key of one named stream of randomness at one step."""
  return jax.random.fold_in(
    jax.random.fold_in(root, step), zlib.crc32(name.encode()) & 0x7FFFFFFF
  )


def row_keys(key: Array, ordinals: Array, group: int) -> Array:
  """One key per completion: [B] ordinals -> [B, G] keys."""
  fold = jax.random.fold_in
  per_prompt = jax.vmap(fold, (None, 0))(key, ordinals)
  return jax.vmap(jax.vmap(fold, (None, 0)), (0, None))(
    per_prompt, jnp.arange(group)
  )


def inverse_cdf(probs: Array, u: Array) -> Array:
  """Index i with P(i) = probs[i] / sum, from one uniform number per row.

  In two levels where V is large: a block of ids by the blocks' sums, then an
  id within it. A running sum over a whole vocabulary costs many times that.

  Args:
    probs: [..., V], not negative, not all zero; need not be normalised.
    u: [...], uniform in [0, 1).

  Returns:
    [...] int32. An index whose probability is 0 is never returned.
  """
  size = probs.shape[-1]
  if size <= 4 * BLOCK:
    return _first_above(probs, u * _total(probs))[0]
  pad = [(0, 0)] * (probs.ndim - 1) + [(0, -size % BLOCK)]
  blocks = jnp.pad(probs, pad).reshape(*probs.shape[:-1], -1, BLOCK)
  sums = jnp.sum(blocks, axis=-1)
  block, before = _first_above(sums, u * _total(sums))
  own = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
  within, _ = _first_above(own, u * _total(sums) - before)
  return block * BLOCK + within


def _total(probs: Array) -> Array:
  """The last running sum, as `_first_above` has it."""
  return jnp.max(jnp.cumsum(probs, axis=-1), axis=-1)


def _first_above(probs: Array, target: Array) -> tuple[Array, Array]:
  """The first index whose running sum exceeds `target`, and the sum before it.

  A target that rounding put past the end gets the last index of all that have
  a probability.
  """
  # A parallel sum may rise by rounding where the probability is 0, so only
  # indices that have one count, for the total as well.
  cumulative = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0.0)
  total = jnp.max(cumulative, axis=-1)
  target = jnp.clip(target, 0.0, jnp.nextafter(total, jnp.zeros_like(total)))
  index = jnp.argmax(cumulative > target[..., None], axis=-1)
  # Of indices without a probability the running sum is not kept.
  reached = jnp.where(cumulative <= target[..., None], cumulative, 0.0)
  return index.astype(jnp.int32), jnp.max(reached, axis=-1)


def truncate(logits: Array, sampling: Sampling) -> Array:
  """Ids kept by top-k, then top-p, then min-p: [..., V] -> [..., k], -1 none.

  Masses are those of the tempered softmax, renormalised after top-k. An id is
  in the nucleus where the mass before it is below top_p, so the likeliest
  always is.
  """
  size = sampling.support_size(logits.shape[-1])
  values, ids = jax.lax.top_k(logits, size)
  norm = jax.nn.logsumexp(
    values if sampling.top_k else logits, axis=-1, keepdims=True
  )
  probs = jnp.exp(values - norm)
  keep = values > MASKED / 2
  if sampling.top_p < 1:
    keep &= jnp.cumsum(probs, axis=-1) - probs < sampling.top_p
  if sampling.min_p > 0:
    keep &= probs >= sampling.min_p * probs[..., :1]
  return jnp.where(keep, ids, -1).astype(jnp.int32)


def choose(
  logits: Array, u: Array, sampling: Sampling
) -> tuple[Array, Array, Array | None]:
  """Draws one token per row.

  Args:
    logits: [..., V] float32.
    u: [...] uniform numbers.
    sampling: the record.

  Returns:
    token [...], its log-prob [...] under the sampled distribution, and the
    kept ids [..., k] or None.
  """
  if sampling.temperature == 0:
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    norm = jax.nn.logsumexp(logits, axis=-1)
    value = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return token, value - norm, None
  logits = tempered(logits, sampling.temperature)
  support = None
  if sampling.support_size(logits.shape[-1]):
    support = truncate(logits, sampling)
    logits = gather_support(logits, support)
  top = jnp.max(logits, axis=-1)
  probs = jnp.exp(logits - top[..., None])
  norm = top + jnp.log(jnp.sum(probs, axis=-1))
  index = inverse_cdf(probs, u)
  value = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
  token = index
  if support is not None:
    token = jnp.take_along_axis(support, index[..., None], axis=-1)[..., 0]
  return token, value - norm, support


def sample(
  params: Params,
  prompts: Prompts,
  key: Array,
  *,
  model: Model,
  sampling: Sampling,
  budgets: Array | None = None,
  policy_step: Array | int = 0,
) -> Rollout:
  """Draws G completions of each prompt.

  Args:
    params: stacked parameters of the policy.
    prompts: ids [B, P] left-padded.
    key: a typed key, already the step's and the stream's own.
    model: the sampler's model record.
    sampling: how to draw.
    budgets: [B, G] int32, each row's own limit on tokens; None is T for all.
    policy_step: recorded in the rollout.

  Returns:
    The rollout. Columns past a row's length hold `pad_id` and log-prob 0.
  """
  b, g, t = prompts.ids.shape[0], sampling.group_size, sampling.max_tokens
  # The sampler's copy: cast, gathered and unstacked once per rollout.
  net = decoder(model)
  params = net.prepare(params, model)
  kept, _ = net.prefill(params, prompts, model=model)
  params = net.unstack(params, model)
  keys = row_keys(key, prompts.ordinals, g)
  limits = jnp.full((b, g), t, jnp.int32)
  if budgets is not None:
    limits = jnp.clip(budgets, 1, t)
  stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)

  def step(s: _Loop) -> _Loop:
    hidden, cache, _ = net.extend(
      params,
      s.token[..., None],
      kept,
      s.cache,
      lengths=prompts.lengths,
      start=s.t,
      model=model,
    )
    logits = net.logits(params, hidden[:, :, 0], model=model)
    # Whole rows: one gather, where each reduction below would need its own,
    # and sums in one order on every mesh.
    logits = shard(logits, "prompts", None, None)
    draw = jax.vmap(
      jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, s.t)))
    )
    token, logprob, support = choose(logits, draw(keys), sampling)
    live = ~s.done
    token = jnp.where(live, token, sampling.pad_id)
    stopped = jnp.any(token[..., None] == stop_ids[None, None], axis=-1)
    stopped = stopped & live & (not sampling.ignore_stop)
    full = live & (s.t + 1 >= limits) & ~stopped

    def write(x: Array, value: Array) -> Array:
      return jax.lax.dynamic_update_index_in_dim(x, value, s.t, axis=2)

    return _Loop(
      t=s.t + 1,
      token=token,
      cache=cache,
      ids=write(s.ids, token),
      logprobs=write(s.logprobs, jnp.where(live, logprob, 0.0)),
      support=None
      if support is None
      else write(s.support, jnp.where(live[..., None], support, -1)),
      lengths=s.lengths + live,
      done=s.done | stopped | full,
      truncated=s.truncated | full,
    )

  state = _start(prompts, b, g, t, model, sampling)
  if sampling.early_exit:
    state = jax.lax.while_loop(
      lambda s: (s.t < t) & ~jnp.all(s.done), step, state
    )
  else:
    state = jax.lax.fori_loop(0, t, lambda _, s: step(s), state)
  return _rollout(prompts, state, sampling, policy_step)


def _rollout(
  prompts: Prompts, state: _Loop, sampling: Sampling, policy_step: Array | int
) -> Rollout:
  """What the decode loop wrote, and the distribution it drew from."""
  return Rollout(
    prompts=prompts,
    ids=state.ids,
    lengths=state.lengths,
    truncated=state.truncated,
    mask=types.length_mask(state.lengths, sampling.max_tokens),
    sampler_logprobs=state.logprobs,
    support=state.support,
    temperature=jnp.float32(sampling.temperature or 1.0),
    policy_step=jnp.asarray(policy_step, jnp.int32),
  )


def _start(
  prompts: Prompts, b: int, g: int, t: int, model: Model, sampling: Sampling
) -> _Loop:
  """The decode loop before its first token."""

  def rows(value: int | float | bool, dtype: jnp.dtype, *tail: int) -> Array:
    x = jnp.full((b, g, *tail), value, dtype)
    return shard(x, "prompts", *[None] * (x.ndim - 1))

  kept = sampling.support_size(model.arch.vocab)
  return _Loop(
    t=jnp.int32(0),
    token=jnp.broadcast_to(prompts.ids[:, -1:], (b, g)),
    cache=decoder(model).empty_cache(b, g, t, model),
    ids=rows(sampling.pad_id, jnp.int32, t),
    logprobs=rows(0.0, jnp.float32, t),
    support=rows(-1, jnp.int32, t, kept) if kept else None,
    lengths=rows(0, jnp.int32),
    done=rows(False, jnp.bool_),
    truncated=rows(False, jnp.bool_),
  )
