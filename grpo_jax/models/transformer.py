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
from grpo_jax.models.block import (
  Kind,
  completion_layer,
  completion_turns,
  kind_of,
  kinds,
  prompt_layer,
  prompt_turns,
)
from grpo_jax.models.layers import MASKED, capped, rms_norm
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

  def norm(*shape: int) -> Weight:
    axes = ("heads", None) if len(shape) == 2 else (None,) * len(shape)
    return stack(shape, axes, None)

  before = arch.norms in ("pre", "both")
  after = arch.norms in ("post", "both")
  qk = {"none": None, "head": ((e,), (e,)), "width": ((h, e), (k, e))}
  qk_norm = qk[arch.qk_norm]
  table = {
    "embed": Weight((arch.vocab, d), ("vocab", "embed"), fan_in),
    "layers": {
      **({"attn_norm": norm(d), "mlp_norm": norm(d)} if before else {}),
      **(
        {"attn_post_norm": norm(d), "mlp_post_norm": norm(d)} if after else {}
      ),
      "attn": {
        "q": stack((d, h, e), ("embed", "heads", None), fan_in),
        "k": stack((d, k, e), ("embed", "kv_heads", None), fan_in),
        "v": stack((d, k, e), ("embed", "kv_heads", None), fan_in),
        "o": stack(
          (h, e, d), ("heads", None, "embed"), residual / math.sqrt(h * e)
        ),
        **(
          {"q_norm": norm(*qk_norm[0]), "k_norm": norm(*qk_norm[1])}
          if qk_norm
          else {}
        ),
        **(
          {
            "q_bias": stack((h, e), ("heads", None), 0.0),
            "k_bias": stack((k, e), ("kv_heads", None), 0.0),
            "v_bias": stack((k, e), ("kv_heads", None), 0.0),
          }
          if arch.qkv_bias
          else {}
        ),
      },
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


def _embed(params: Params, ids: Array, arch: Architecture) -> Array:
  """Looks tokens up: [B, G, S] -> [B, G, S, D]."""
  # Padding ids may lie past the table; they are read by nothing.
  ids = jnp.minimum(ids, params["embed"].shape[0] - 1)
  # Gathered over fsdp, or else ids and hidden states travel in its stead; and
  # a lookup in a table whose columns are split makes the partitioner copy it.
  table = shard(params["embed"], "vocab", None)
  x = table[ids]
  if arch.embed_scale != 1:
    x = x * jnp.asarray(arch.embed_scale, x.dtype)
  return shard(x, "prompts", None, None, None)


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
  arch = model.arch
  turns = prompt_turns(arch, lengths, ids.shape[2])

  def body(x: Array, layer: tuple) -> tuple[Array, tuple[Array, Array]]:
    w, kind = layer
    return prompt_layer(w, kind_of(kind), arch, x, lengths, turns)

  x = _embed(params, ids, arch)
  _, stacked = jax.lax.scan(body, x, (params["layers"], kinds(arch)))
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
  x = _embed(params, tokens, arch)
  turns = completion_turns(arch, lengths, start, tokens.shape[2])
  layers = []
  for i, (w, prompt, entry) in enumerate(
    zip(params["layers"], prompt_kv, cache)
  ):
    size = arch.window(i)
    kind = Kind(size or None, bool(size))
    x, entry = completion_layer(
      w, kind, arch, x, prompt, lengths, turns, entry, start
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
  turns = prompt_turns(arch, lengths, ids.shape[2])
  own = [completion_turns(arch, lengths, 0, y.shape[2]) for y in slabs]

  def body(carry: tuple, layer: tuple) -> tuple[tuple, None]:
    x, streams = carry
    w, kind = layer[0], kind_of(layer[1])
    x, prompt = prompt_layer(w, kind, arch, x, lengths, turns)
    streams = tuple(
      completion_layer(w, kind, arch, y, prompt, lengths, by)[0]
      for y, by in zip(streams, own)
    )
    return (x, streams), None

  if model.remat:
    body = jax.checkpoint(body)
  streams = tuple(_embed(params, tokens, arch) for tokens in slabs)
  (_, streams), _ = jax.lax.scan(
    body,
    (_embed(params, ids, arch), streams),
    (params["layers"], kinds(arch)),
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
  out = capped(out, model.arch.logit_cap)
  if model.arch.real_vocab < model.arch.vocab:
    real = jnp.arange(model.arch.vocab) < model.arch.real_vocab
    out = jnp.where(
      jnp.reshape(real, (1,) * (out.ndim - 1) + real.shape), out, MASKED
    )
  return out
