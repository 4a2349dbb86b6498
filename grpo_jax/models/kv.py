"""Keys and values that decoding keeps, and their layout.

`PromptKV` and `Cache` are tuples over layers, rows leading: opaque outside.
Where `model.heads_first`, keys are [..., K, E, T] and values [..., K, T, E], as
a CPU's products read them without a copy; else both are [..., T, K, E], as they
are made.
"""

import jax
import jax.numpy as jnp

from grpo_jax.models.architecture import Model
from grpo_jax.sharding import shard
from grpo_jax.types import Array

PromptKV = tuple  # of (keys, values) of [B, P', K, E]
Cache = tuple  # of (keys, values) of [B, G, T, K, E]


def laid_out(keys: Array, values: Array, model: Model) -> tuple[Array, Array]:
  """[..., T, K, E] each -> the layout that decoding reads."""
  if not model.heads_first:
    return keys, values
  return jnp.moveaxis(keys, -3, -1), jnp.moveaxis(values, -3, -2)


def prompt_kv(stacked: tuple[Array, Array], model: Model) -> PromptKV:
  """Cuts what a scan over layers stacked, [L, B, P', K, E], into layers."""

  def layer(keys: Array, values: Array) -> tuple[Array, Array]:
    keys = shard(keys, "prompts", None, "kv_heads", None)
    values = shard(values, "prompts", None, "kv_heads", None)
    return laid_out(keys, values, model)

  return tuple(layer(k, v) for k, v in zip(*stacked))


def empty_cache(batch: int, group: int, size: int, model: Model) -> Cache:
  """A cache with room for `size` tokens of each of B x G completions."""
  arch = model.arch
  shape = (batch, group, size, arch.kv_heads, arch.head_dim)

  def zeros() -> Array:
    x = jnp.zeros(shape, model.compute_dtype)
    return shard(x, "prompts", None, None, "kv_heads", None)

  return tuple(laid_out(zeros(), zeros(), model) for _ in range(arch.layers))


def append(
  entry: tuple[Array, Array],
  keys: Array,
  values: Array,
  start: Array | int,
  model: Model,
) -> tuple[Array, Array]:
  """Writes [B, G, S, K, E] at own position `start` of one layer's cache."""
  keys, values = laid_out(keys, values, model)
  columns = (4, 3) if model.heads_first else (2, 2)
  write = jax.lax.dynamic_update_slice_in_dim
  return tuple(
    write(x, new, start, axis=axis)
    for x, new, axis in zip(entry, (keys, values), columns)
  )
