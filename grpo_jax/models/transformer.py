"""The group-native decoder: prefill, extend and joint over a plain tree.

A prompt is computed once for its whole group. The prompt stream is the first
len-1 prompt tokens; the last prompt token is the first input of the completion
stream, so every logit that matters comes out of one place. Positions count
real tokens: completion input s sits at len-1+s, so padding never matters.

`joint` equals `extend` after `prefill`. It exists because two passes would
read, and under FSDP gather, every weight twice.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models import kv
from grpo_jax.models.architecture import Architecture, Model
from grpo_jax.models.layers import (
  MASKED,
  Rotation,
  attention,
  rms_norm,
  rope,
  rotation,
  swiglu,
)
from grpo_jax.models.projection import project
from grpo_jax.sharding import shard
from grpo_jax.types import Array, Params, Prompts

Aux = dict[str, Array]  # what a family adds (router loss); none here


@dataclasses.dataclass(frozen=True)
class Weight:
  """One weight, declared once: everything else about it derives from this."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]  # logical names, see sharding.RULES
  std: float | None  # normal(0, std); None: ones


def weights(arch: Architecture) -> dict[str, Any]:
  """The weight table: a nested dict whose paths are the parameters' own.

  Layers are stacked on a leading axis. Projections that write into the
  residual stream start smaller by sqrt(2 L), as in GPT-2.
  """
  n, d, f = arch.layers, arch.embed, arch.ffn
  h, k, e = arch.heads, arch.kv_heads, arch.head_dim
  fan_in, residual = 1 / math.sqrt(d), 1 / math.sqrt(2 * n)

  def stack(shape: tuple, axes: tuple, std: float | None) -> Weight:
    return Weight((n, *shape), (None, *axes), std)

  table = {
    "embed": Weight((arch.vocab, d), ("vocab", "embed"), fan_in),
    "layers": {
      "attn_norm": stack((d,), (None,), None),
      "attn": {
        "q": stack((d, h, e), ("embed", "heads", None), fan_in),
        "k": stack((d, k, e), ("embed", "kv_heads", None), fan_in),
        "v": stack((d, k, e), ("embed", "kv_heads", None), fan_in),
        "o": stack(
          (h, e, d), ("heads", None, "embed"), residual / math.sqrt(h * e)
        ),
      },
      "mlp_norm": stack((d,), (None,), None),
      "mlp": {
        "gate": stack((d, f), ("embed", "ffn"), fan_in),
        "up": stack((d, f), ("embed", "ffn"), fan_in),
        "down": stack((f, d), ("ffn", "embed"), residual / math.sqrt(f)),
      },
    },
    "final_norm": Weight((d,), (None,), None),
  }
  if not arch.tied:
    table["head"] = Weight((arch.vocab, d), ("vocab", "embed"), fan_in)
  return table


def _table_map(fn: Any, table: Any) -> Any:
  return jax.tree.map(fn, table, is_leaf=lambda x: isinstance(x, Weight))


def axes(arch: Architecture) -> dict[str, Any]:
  """Logical axes of every parameter, a tree like the parameters'."""
  return _table_map(lambda w: w.axes, weights(arch))


def parameter_count(arch: Architecture) -> int:
  """Number of parameters; a tied head counts once."""
  leaves = jax.tree.leaves(
    _table_map(lambda w: math.prod(w.shape), weights(arch))
  )
  return sum(leaves)


def init(key: Array, arch: Architecture) -> Params:
  """Draws float32 parameters, a key for each place in the weight table."""
  table = weights(arch)
  flat, treedef = jax.tree_util.tree_flatten(
    table, is_leaf=lambda x: isinstance(x, Weight)
  )
  keys = jax.random.split(key, len(flat))
  leaves = [
    jnp.ones(w.shape, jnp.float32)
    if w.std is None
    else jax.random.normal(k, w.shape, jnp.float32) * w.std
    for k, w in zip(keys, flat)
  ]
  return jax.tree_util.tree_unflatten(treedef, leaves)


def cast(params: Params, model: Model) -> Params:
  """The copy that matrix products read; norms stay float32."""

  def one(path: Any, x: Array) -> Array:
    is_norm = path[-1].key.endswith("norm")
    return x if is_norm else x.astype(model.compute_dtype)

  return jax.tree_util.tree_map_with_path(one, params)


def unstack(params: Params, arch: Architecture) -> Params:
  """Layers as a tuple instead of a leading axis: what `extend` reads.

  A loop over unstacked layers decodes almost twice as fast as a scan, whose
  slices of the carried cache are copies.
  """
  layers = tuple(
    jax.tree.map(lambda x, i=i: x[i], params["layers"])
    for i in range(arch.layers)
  )
  return {**params, "layers": layers}


def _qkv(
  w: Params, arch: Architecture, x: Array, turn: Rotation
) -> tuple[Array, Array, Array]:
  """Queries, keys, values of a stream: [B, G, S, D] -> [B, G, S, heads, E]."""
  y = rms_norm(x, w["attn_norm"], arch.norm_eps)
  q = project(y, w["attn"]["q"])
  k = project(y, w["attn"]["k"])
  v = project(y, w["attn"]["v"])
  q = shard(q, "prompts", None, None, "heads", None)
  k = shard(k, "prompts", None, None, "kv_heads", None)
  v = shard(v, "prompts", None, None, "kv_heads", None)
  return rope(q, turn), rope(k, turn), v


def _finish(w: Params, arch: Architecture, x: Array, attended: Array) -> Array:
  """Adds attention's output and the feed-forward to the residual stream."""
  x = x + project(attended, w["attn"]["o"], 2)
  x = x + swiglu(w["mlp"], rms_norm(x, w["mlp_norm"], arch.norm_eps))
  return shard(x, "prompts", None, None, None)


def _prompt_layer(
  w: Params, arch: Architecture, x: Array, lengths: Array, turn: Rotation
) -> tuple[Array, tuple[Array, Array]]:
  """One layer over the prompt stream [B, 1, P', D], left-padded."""
  q, k, v = _qkv(w, arch, x, turn)
  attended = attention(q, None, (k, v), own_pad=x.shape[2] - lengths)
  return _finish(w, arch, x, attended), (k[:, 0], v[:, 0])


def _completion_layer(
  w: Params,
  arch: Architecture,
  x: Array,
  prompt: tuple[Array, Array],
  lengths: Array,
  turn: Rotation,
  cache: tuple[Array, Array] | None = None,
  start: Array | int = 0,
) -> tuple[Array, tuple[Array, Array] | None]:
  """One layer over a completion stream [B, g, S, D], with or without a past."""
  q, k, v = _qkv(w, arch, x, turn)
  if cache is not None:
    cache = kv.append(cache, k, v, start)
    k, v = cache
  attended = attention(q, prompt, (k, v), prompt_lengths=lengths, start=start)
  return _finish(w, arch, x, attended), cache


def _prompt_rotation(arch: Architecture, lengths: Array, size: int) -> Rotation:
  """Of a left-padded stream with `lengths` real tokens; pads sit at 0."""
  columns = jnp.arange(size)[None] - (size - lengths)[:, None]
  positions = jnp.maximum(columns, 0)
  return rotation(positions, arch.head_dim, arch.rope_theta)


def _completion_rotation(
  arch: Architecture, lengths: Array, start: Array | int, size: int
) -> Rotation:
  """Of own positions start .. start+size-1 after `lengths` prompt tokens."""
  positions = lengths[:, None] + start + jnp.arange(size)[None]
  return rotation(positions, arch.head_dim, arch.rope_theta)


def _embed(params: Params, ids: Array) -> Array:
  """Looks tokens up: [B, G, S] -> [B, G, S, D]."""
  # Padding ids may lie past the table; they are read by nothing.
  ids = jnp.minimum(ids, params["embed"].shape[0] - 1)
  # Gathered over fsdp, or else ids and hidden states travel in its stead; and
  # a lookup in a table whose columns are split makes the partitioner copy it.
  table = shard(params["embed"], "vocab", None)
  return shard(table[ids], "prompts", None, None, None)


def _streams(prompts: Prompts) -> tuple[Array, Array]:
  """The prompt stream's ids [B, 1, P-1] and its real lengths [B]."""
  return prompts.ids[:, None, :-1], prompts.lengths - 1


def prefill(
  params: Params, prompts: Prompts, *, model: Model
) -> tuple[kv.PromptKV, Aux]:
  """Runs the prompt stream alone and keeps its keys and values.

  Args:
    params: stacked parameters.
    prompts: ids [B, P] left-padded.
    model: the model record.
  """
  params = cast(params, model)
  ids, lengths = _streams(prompts)
  turn = _prompt_rotation(model.arch, lengths, ids.shape[2])

  def body(x: Array, w: Params) -> tuple[Array, tuple[Array, Array]]:
    return _prompt_layer(w, model.arch, x, lengths, turn)

  _, stacked = jax.lax.scan(body, _embed(params, ids), params["layers"])
  return kv.prompt_kv(stacked), {}


def extend(
  params: Params,
  tokens: Array,
  prompt_kv: kv.PromptKV,
  cache: kv.Cache,
  *,
  lengths: Array,
  start: Array | int,
  model: Model,
) -> tuple[Array, kv.Cache, Aux]:
  """Runs S new tokens of each completion against prompt and cache.

  Args:
    params: cast and unstacked parameters (`unstack(cast(params))`).
    tokens: [B, G, S].
    prompt_kv: from `prefill`.
    cache: with tokens 0 .. start-1 of each completion stream.
    lengths: [B], real tokens of the prompts.
    start: own position of the first token.
    model: the model record.

  Returns:
    hidden [B, G, S, D] after the final norm, the longer cache, aux.
  """
  arch, lengths = model.arch, lengths - 1
  x = _embed(params, tokens)
  turn = _completion_rotation(arch, lengths, start, tokens.shape[2])
  layers = []
  for w, prompt, entry in zip(params["layers"], prompt_kv, cache):
    x, entry = _completion_layer(
      w, arch, x, prompt, lengths, turn, entry, start
    )
    layers.append(entry)
  x = rms_norm(x, params["final_norm"], model.arch.norm_eps)
  return x, tuple(layers), {}


def joint(
  params: Params,
  prompts: Prompts,
  slabs: tuple[Array, ...],
  *,
  model: Model,
) -> tuple[tuple[Array, ...], Aux]:
  """Runs prompts and whole completions in one pass over the layers.

  Args:
    params: stacked parameters.
    prompts: ids [B, P] left-padded.
    slabs: completion inputs, each [B, g, S]: rows of every group, cut by
      length, so that short completions are not padded to the longest. All
      slabs share one prompt pass.
    model: the model record.

  Returns:
    hidden [B, g, S, D] of each slab after the final norm; aux.
  """
  params = cast(params, model)
  arch = model.arch
  ids, lengths = _streams(prompts)
  turn = _prompt_rotation(arch, lengths, ids.shape[2])
  turns = [_completion_rotation(arch, lengths, 0, y.shape[2]) for y in slabs]

  def body(carry: tuple, w: Params) -> tuple[tuple, None]:
    x, streams = carry
    x, prompt = _prompt_layer(w, arch, x, lengths, turn)
    streams = tuple(
      _completion_layer(w, arch, y, prompt, lengths, by)[0]
      for y, by in zip(streams, turns)
    )
    return (x, streams), None

  if model.remat:
    body = jax.checkpoint(body)
  streams = tuple(_embed(params, tokens) for tokens in slabs)
  (_, streams), _ = jax.lax.scan(
    body, (_embed(params, ids), streams), params["layers"]
  )
  return tuple(
    rms_norm(y, params["final_norm"], arch.norm_eps) for y in streams
  ), {}


def logits(params: Params, hidden: Array, *, model: Model) -> Array:
  """Logits in float32; ids no tokenizer can produce get no probability.

  Args:
    params: parameters, cast or not.
    hidden: [..., D] after the final norm.
    model: the model record.
  """
  table = params["embed"] if model.arch.tied else params["head"]
  table = shard(table.astype(model.compute_dtype), "vocab", None)
  out = jnp.einsum(
    "...d,vd->...v", hidden, table, preferred_element_type=jnp.float32
  )
  if model.arch.real_vocab < model.arch.vocab:
    real = jnp.arange(model.arch.vocab) < model.arch.real_vocab
    out = jnp.where(
      jnp.reshape(real, (1,) * (out.ndim - 1) + real.shape), out, MASKED
    )
  return out
