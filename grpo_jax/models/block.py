"""One decoder layer over each of the two streams, prompt and completion."""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.models import kv
from grpo_jax.models.architecture import Architecture, Aux, Model
from grpo_jax.models.experts import routed
from grpo_jax.models.layers import ACTIVATIONS, attention, rms_norm
from grpo_jax.models.lora import linear
from grpo_jax.models.rope import Rotation, rope, rotation
from grpo_jax.sharding import shard
from grpo_jax.types import Array, Params

Turns = tuple[Rotation, Rotation]  # of layers that see all; with a window


@dataclasses.dataclass(frozen=True)
class Kind:
  """What one layer has of its own: numbers, so that a scan may carry them.

  Attributes:
    window: tokens its attention sees; None: all, in every layer.
    local: whether it has a window; chooses its rotation.
  """

  window: Array | int | None
  local: Array | bool


def kinds(arch: Architecture) -> tuple[Array, Array] | None:
  """window [L] and whether there is one [L]; None where no layer has one."""
  if not any(arch.windows):
    return None
  windows = jnp.array([arch.window(i) for i in range(arch.layers)])
  # A layer that sees all has a window that nothing reaches the end of.
  return jnp.where(windows > 0, windows, 2**30), windows > 0


def kind_of(entry: tuple[Array, Array] | None) -> Kind:
  """A layer's own entry of `kinds`, as a scan hands it over."""
  return Kind(None, False) if entry is None else Kind(*entry)


def _turn(turns: Turns, kind: Kind) -> Rotation:
  """A layer's own rotation."""
  if turns[0] is turns[1]:
    return turns[0]
  return jax.tree.map(
    lambda a, b: jnp.where(kind.local, b, a), turns[0], turns[1]
  )


def _normed(w: Params, name: str, x: Array, arch: Architecture) -> Array:
  """A norm where the architecture has it; x itself where not."""
  return rms_norm(x, w[name], arch.norm_eps) if name in w else x


def _head(w: Params, name: str, y: Array, model: Model) -> Array:
  """Queries, keys or values: [B, G, S, D] -> [B, G, S, heads, E]."""
  arch, x = model.arch, linear(w, name, y, model)
  if f"{name}_bias" in w:
    x = x + jnp.broadcast_to(w[f"{name}_bias"], x.shape)
  if f"{name}_norm" not in w:
    return x
  scale = w[f"{name}_norm"]
  if scale.ndim == 1:
    return rms_norm(x, scale, arch.norm_eps)
  flat = rms_norm(
    x.reshape(*x.shape[:-2], -1), scale.reshape(-1), arch.norm_eps
  )
  return flat.reshape(x.shape)


@jax.named_scope("queries_keys_values")
def _qkv(
  w: Params, model: Model, x: Array, turn: Rotation
) -> tuple[Array, Array, Array]:
  """Queries, keys, values of a stream: [B, G, S, D] -> [B, G, S, heads, E]."""
  y = _normed(w, "attn_norm", x, model.arch)
  q, k, v = (_head(w["attn"], name, y, model) for name in ("q", "k", "v"))
  q = shard(q, "prompts", None, None, "heads", None)
  k = shard(k, "prompts", None, None, "kv_heads", None)
  v = shard(v, "prompts", None, None, "kv_heads", None)
  return rope(q, turn), rope(k, turn), v


def _finish(
  w: Params, model: Model, x: Array, attended: Array, real: Array | None
) -> tuple[Array, Aux]:
  """Adds attention's output and the feed-forward to the residual stream."""
  arch = model.arch
  out = linear(w["attn"], "o", attended, model, 2)
  x = x + _normed(w, "attn_post_norm", out, arch)
  y, aux = _normed(w, "mlp_norm", x, arch), {}
  if arch.experts:
    out, aux = routed(w["mlp"], y, real, model)
  else:
    out = _gated(w["mlp"], y, model)
  x = x + _normed(w, "mlp_post_norm", out, arch)
  return shard(x, "prompts", None, None, None), aux


@jax.named_scope("feed_forward")
def _gated(w: Params, x: Array, model: Model) -> Array:
  """down(act(gate(x)) * up(x)): [..., D] -> [..., D]; SwiGLU with silu."""
  act = ACTIVATIONS[model.arch.activation]
  hidden = act(linear(w, "gate", x, model)) * linear(w, "up", x, model)
  return linear(w, "down", hidden, model)


def prompt_layer(
  w: Params,
  kind: Kind,
  model: Model,
  x: Array,
  lengths: Array,
  turns: Turns,
) -> tuple[Array, tuple[Array, Array], Aux]:
  """One layer over the prompt stream [B, 1, P', D], left-padded."""
  arch, size = model.arch, x.shape[2]
  q, k, v = _qkv(w, model, x, _turn(turns, kind))
  attended = attention(
    q,
    None,
    (k, v),
    own_pad=size - lengths,
    window=kind.window,
    scale=arch.query_scale,
    cap=arch.attention_cap,
  )
  real = jnp.arange(size)[None, None] >= (size - lengths)[:, None, None]
  x, aux = _finish(w, model, x, attended, real)
  return x, (k[:, 0], v[:, 0]), aux


def completion_layer(
  w: Params,
  kind: Kind,
  model: Model,
  x: Array,
  prompt: tuple[Array, Array],
  lengths: Array,
  turns: Turns,
  cache: tuple[Array, Array] | None = None,
  start: Array | int = 0,
  real: Array | None = None,
) -> tuple[Array, tuple[Array, Array] | None, Aux]:
  """One layer over a completion stream [B, g, S, D], with or without a past.

  `real` [B, g, S]: the tokens that `aux` counts; None: all.
  """
  arch = model.arch
  q, k, v = _qkv(w, model, x, _turn(turns, kind))
  if cache is not None:
    cache = kv.append(cache, k, v, start)
    k, v = cache
  attended = attention(
    q,
    prompt,
    (k, v),
    prompt_lengths=lengths,
    start=start,
    window=kind.window,
    scale=arch.query_scale,
    cap=arch.attention_cap,
  )
  x, aux = _finish(w, model, x, attended, real)
  return x, cache, aux


def _turns(arch: Architecture, positions: Array) -> Turns:
  """Rotations of both kinds of layers; one object where they are the same."""
  whole = rotation(positions, arch.head_dim, arch.rope_theta, arch.rope_scaling)
  if not arch.window_theta:
    return whole, whole
  return whole, rotation(positions, arch.head_dim, arch.window_theta)


def prompt_turns(arch: Architecture, lengths: Array, size: int) -> Turns:
  """Of a left-padded stream with `lengths` real tokens; pads sit at 0."""
  columns = jnp.arange(size)[None] - (size - lengths)[:, None]
  return _turns(arch, jnp.maximum(columns, 0))


def completion_turns(
  arch: Architecture, lengths: Array, start: Array | int, size: int
) -> Turns:
  """Of own positions start .. start+size-1 after `lengths` prompt tokens."""
  return _turns(arch, lengths[:, None] + start + jnp.arange(size)[None])
