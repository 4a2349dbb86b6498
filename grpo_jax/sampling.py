"""Sampling completions: one prefill per prompt, then a compiled decode loop.

A completion depends on the seed, the step and its own prompt: the key of token
t is fold_in(fold_in(fold_in(key, ordinal), g), t). It does not depend on the
batch split, the order of rows, the number of devices or the host.
"""

import functools
import itertools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax import compaction, types
from grpo_jax.draws import Sampling, choose
from grpo_jax.models.architecture import Model
from grpo_jax.models.decoders import decoder
from grpo_jax.sharding import shard, ways
from grpo_jax.types import Array, Params, Prompts, Rollout


@struct.dataclass
class _Written:
  """What decoding has written so far."""

  ids: Array  # [B, G, T] int32
  logprobs: Array  # [B, G, T] float32
  support: Array | None  # [B, G, T, k] int32
  lengths: Array  # [B, G] int32
  truncated: Array  # [B, G] bool


@struct.dataclass
class _Loop:
  """State of the decode loop after `t` tokens."""

  t: Array  # [] int32
  token: Array  # [B, G] int32, the next input
  cache: Any  # the network's own
  done: Array  # [B, G] bool
  out: _Written


@struct.dataclass
class _Rows:
  """What a loop reads of its rows, and never changes."""

  kept: Any  # the network's own, of the prompts
  lengths: Array  # [B] int32, of the prompts
  keys: Array  # [B, G] keys
  limits: Array  # [B, G] int32


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


@jax.named_scope("sample")
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
  with jax.named_scope("prefill"):
    kept, _ = net.prefill(params, prompts, model=model)
  params = net.unstack(params, model)
  limits = jnp.full((b, g), t, jnp.int32)
  if budgets is not None:
    limits = jnp.clip(budgets, 1, t)
  rows = _Rows(
    kept, prompts.lengths, row_keys(key, prompts.ordinals, g), limits
  )
  step = functools.partial(_step, params=params, model=model, sampling=sampling)
  state = _start(prompts, b, g, t, model, sampling)
  if not sampling.early_exit:
    state = jax.lax.fori_loop(0, t, lambda _, s: step(s, rows), state)
    return _rollout(prompts, state.out, sampling, policy_step)
  sizes = (*compaction.sizes(b * g, sampling.compact, ways("prompts")), 0)

  def run(state: _Loop, rows: _Rows, until: int) -> _Loop:
    return jax.lax.while_loop(
      lambda s: (s.t < t) & ~compaction.fits(s.done, until),
      lambda s: step(s, rows),
      state,
    )

  state = run(state, rows, sizes[0])
  out, place = state.out, None
  for size, until in itertools.pairwise(sizes):
    chosen = compaction.live_first(state.done, size)
    place = chosen if place is None else compaction.take(place, chosen)
    state, rows = _shrunk(state, rows, chosen)
    state = run(state, rows, until)
    out = compaction.put(out, state.out, place)
  return _rollout(prompts, out, sampling, policy_step)


def _shrunk(state: _Loop, rows: _Rows, place: Array) -> tuple[_Loop, _Rows]:
  """The loop and its rows [N, 1], of those at `place` [N, 1]."""
  group = state.done.shape[1]
  kept, lengths = compaction.take_prompts(
    (rows.kept, rows.lengths), place, group
  )
  keys, limits = compaction.take((rows.keys, rows.limits), place)
  part = compaction.take(state.replace(t=None), place)
  return part.replace(t=state.t), _Rows(kept, lengths, keys, limits)


@jax.named_scope("decode")
def _step(
  s: _Loop, rows: _Rows, *, params: Params, model: Model, sampling: Sampling
) -> _Loop:
  """One more token of every row."""
  net = decoder(model)
  hidden, cache, _ = net.extend(
    params,
    s.token[..., None],
    rows.kept,
    s.cache,
    lengths=rows.lengths,
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
  token, logprob, support = choose(logits, draw(rows.keys), sampling)
  live = ~s.done
  token = jnp.where(live, token, sampling.pad_id)
  stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)
  stopped = jnp.any(token[..., None] == stop_ids[None, None], axis=-1)
  stopped = stopped & live & (not sampling.ignore_stop)
  full = live & (s.t + 1 >= rows.limits) & ~stopped

  def write(x: Array, value: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, s.t, axis=2)

  out = s.out.replace(
    ids=write(s.out.ids, token),
    logprobs=write(s.out.logprobs, jnp.where(live, logprob, 0.0)),
    lengths=s.out.lengths + live,
    truncated=s.out.truncated | full,
  )
  if support is not None:
    kept = jnp.where(live[..., None], support, -1)
    out = out.replace(support=write(s.out.support, kept))
  done = s.done | stopped | full
  return _Loop(t=s.t + 1, token=token, cache=cache, done=done, out=out)


def _rollout(
  prompts: Prompts, out: _Written, sampling: Sampling, policy_step: Array | int
) -> Rollout:
  """What the decode loop wrote, and the distribution it drew from."""
  return Rollout(
    prompts=prompts,
    ids=out.ids,
    lengths=out.lengths,
    truncated=out.truncated,
    mask=types.length_mask(out.lengths, sampling.max_tokens),
    sampler_logprobs=out.logprobs,
    support=out.support,
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
    done=rows(False, jnp.bool_),
    out=_Written(
      ids=rows(sampling.pad_id, jnp.int32, t),
      logprobs=rows(0.0, jnp.float32, t),
      support=rows(-1, jnp.int32, t, kept) if kept else None,
      lengths=rows(0, jnp.int32),
      truncated=rows(False, jnp.bool_),
    ),
  )
