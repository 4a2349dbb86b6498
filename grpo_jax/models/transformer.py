"""The group-native decoder: prefill, extend and joint over a plain tree.

A prompt is computed once for its whole group. The prompt stream is the first
len-1 prompt tokens; the last prompt token is the first input of the completion
stream, so every logit that matters comes out of one place. Positions count
real tokens: completion input s sits at len-1+s, so padding never matters.

`joint` equals `extend` after `prefill`. It exists because two passes would
read, and under FSDP gather, every weight twice.
"""

import jax
import jax.numpy as jnp

from grpo_jax.models import kv, weight_table
from grpo_jax.models.architecture import Architecture, Aux, Decoder, Model
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
from grpo_jax.models.weight_table import cast
from grpo_jax.sharding import gather, shard
from grpo_jax.types import Array, Params, Prompts

# Up to so many layers a scan is unrolled: a sixth faster, and compiled as soon.
# Not where they are recomputed: what all of them need would be alive at once.
UNROLLED = 4


def _unroll(model: Model) -> int:
  few = model.arch.layers <= UNROLLED and not model.remat
  return model.arch.layers if few else 1


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
    x, kept, _ = prompt_layer(w, kind_of(kind), model, x, lengths, turns)
    return x, kept

  x = _embed(params, ids, arch)
  _, stacked = jax.lax.scan(
    body, x, (params["layers"], kinds(arch)), unroll=_unroll(model)
  )
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
    x, entry, _ = completion_layer(
      w, kind, model, x, prompt, lengths, turns, entry, start
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
  real: tuple[Array, ...] | None = None,
) -> tuple[tuple[Array, ...], Aux]:
  """Runs prompts and whole completions in one pass over the layers.

  Args:
    params: stacked parameters.
    prompts: ids [B, P] left-padded.
    slabs: completion inputs, each [B, g, S]: rows of every group, cut by
      length, so that short completions are not padded to the longest. All
      slabs share one prompt pass.
    model: the model record.
    real: of each slab [B, g, S] bool, the tokens that aux counts; None: all.

  Returns:
    hidden [B, g, S, D] of each slab after the final norm; aux, stacked over
    layers: a prompt's tokens count once for its group.
  """
  params = cast(params, model)
  arch = model.arch
  ids, lengths = _streams(prompts)
  turns = prompt_turns(arch, lengths, ids.shape[2])
  own = [completion_turns(arch, lengths, 0, y.shape[2]) for y in slabs]
  counted = real or (None,) * len(slabs)

  def body(carry: tuple, layer: tuple) -> tuple[tuple, Aux]:
    x, streams = carry
    w, kind = layer[0], kind_of(layer[1])
    x, prompt, aux = prompt_layer(w, kind, model, x, lengths, turns)
    out = [
      completion_layer(w, kind, model, y, prompt, lengths, by, real=mask)
      for y, by, mask in zip(streams, own, counted)
    ]
    for _, _, more in out:
      aux = jax.tree.map(jnp.add, aux, more)
    return (x, tuple(y for y, _, _ in out)), aux

  if model.remat:
    body = jax.checkpoint(body)
  streams = tuple(_embed(params, tokens, arch) for tokens in slabs)
  (_, streams), aux = jax.lax.scan(
    body,
    (_embed(params, ids, arch), streams),
    (params["layers"], kinds(arch)),
    unroll=_unroll(model),
  )
  return tuple(
    rms_norm(y, params["final_norm"], arch.norm_eps) for y in streams
  ), aux


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


def head(params: Params) -> Params:
  """The part of the parameters that `logits` reads."""
  return {k: v for k, v in params.items() if k in ("embed", "head")}


def prepare(params: Params, model: Model) -> Params:
  """The sampler's copy: cast, and gathered once for all its steps."""
  params = cast(params, model)
  return gather(params, weight_table.axes(model.arch, model.lora))


DECODER = Decoder(
  prefill=prefill,
  extend=extend,
  joint=joint,
  logits=logits,
  head=head,
  prepare=prepare,
  unstack=lambda params, model: unstack(params, model.arch),
  empty_cache=kv.empty_cache,
  axes=lambda model: weight_table.axes(model.arch, model.lora),
  init=lambda key, model: weight_table.init(key, model.arch),
)
