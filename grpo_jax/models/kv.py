"""Keys and values that decoding keeps. Their layout is private to this file.

`PromptKV` and `Cache` are tuples over layers, rows leading: opaque outside.
"""

import jax
import jax.numpy as jnp

from grpo_jax.models.architecture import Model
from grpo_jax.sharding import shard
from grpo_jax.types import Array

PromptKV = tuple  # of (keys, values), each [B, P', K, E]
Cache = tuple  # of (keys, values), each [B, G, T, K, E]


def prompt_kv(stacked: tuple[Array, Array]) -> PromptKV:
  """Cuts what a scan over layers stacked, [L, B, P', K, E], into layers."""
  keys, values = stacked
  return tuple(
    (
      shard(keys[i], "prompts", None, "kv_heads", None),
      shard(values[i], "prompts", None, "kv_heads", None),
    )
    for i in range(keys.shape[0])
  )


def empty_cache(batch: int, group: int, size: int, model: Model) -> Cache:
  """A cache with room for `size` tokens of each of B x G completions."""
  arch = model.arch
  shape = (batch, group, size, arch.kv_heads, arch.head_dim)

  def zeros() -> Array:
    x = jnp.zeros(shape, model.compute_dtype)
    return shard(x, "prompts", None, None, "kv_heads", None)

  return tuple((zeros(), zeros()) for _ in range(arch.layers))


def append(
  entry: tuple[Array, Array], keys: Array, values: Array, start: Array | int
) -> tuple[Array, Array]:
  """Writes [B, G, S, K, E] at own position `start` of one layer's cache."""
  return (
    jax.lax.dynamic_update_slice_in_dim(entry[0], keys, start, axis=2),
    jax.lax.dynamic_update_slice_in_dim(entry[1], values, start, axis=2),
  )
