"""Rows that have ended leave the decode loop: gathers to smaller static sizes.

A batch of [B, G] rows becomes one of [N, 1] when N rows are enough for those
that still run, each with its own prompt. Rows never leave their data shard: a
shard keeps as many as every other. Which rows are kept, and when, changes no
token, because a row's draws are its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.sharding import ways
from grpo_jax.types import Array

SHARES = (0.75, 0.5, 0.25, 0.125, 0.0625)


def sizes(rows: int, count: int, shards: int = 1) -> tuple[int, ...]:
  """The first `count` smaller sizes of a batch, falling, divided by shards."""
  found = []
  for share in SHARES[:count]:
    size = int(rows * share) // shards * shards
    if size and size < (found[-1] if found else rows):
      found.append(size)
  return tuple(found)


def fits(done: Array, size: int) -> Array:
  """Whether the rows that still run fit `size`, on every shard alike."""
  shards = ways("prompts")
  live = jnp.sum(~_split(_merge(done), shards), axis=1)
  return jnp.max(live) <= size // shards


def live_first(done: Array, size: int) -> Array:
  """Places [size, 1] of the rows to keep, those that run first, in order."""
  shards = ways("prompts")
  order = jnp.argsort(_split(_merge(done), shards), axis=1, stable=True)
  return order[:, : size // shards].reshape(size, 1)


def take(tree: Any, place: Array) -> Any:
  """Rows at `place` [N, 1] of arrays [B, G, ...]: [N, 1, ...] each."""
  return jax.tree.map(lambda x: _gather(_merge(x), place), tree)


def take_prompts(tree: Any, place: Array, group: int) -> Any:
  """The prompts of rows at `place` of arrays [B, ...]: [N, ...] each.

  Args:
    tree: arrays of prompts, such as their keys and values.
    place: rows [N, 1], counted through the groups of `group`.
    group: rows of a prompt.
  """
  return jax.tree.map(lambda x: _gather(x, place // group)[:, 0], tree)


def put(tree: Any, part: Any, place: Array) -> Any:
  """Arrays [B, G, ...], rows at `place` replaced by those of `part`."""
  shards = ways("prompts")

  def one(x: Array, new: Array) -> Array:
    rows, index = _split(_merge(x), shards), _split(place[:, 0], shards)
    new = _split(new[:, 0], shards)
    rows = jax.vmap(lambda r, n, i: r.at[i].set(n))(rows, new, index)
    return rows.reshape(x.shape)

  return jax.tree.map(one, tree, part)


def _merge(x: Array) -> Array:
  """[B, G, ...] -> [B G, ...]."""
  return x.reshape(-1, *x.shape[2:])


def _split(x: Array, shards: int) -> Array:
  """[N, ...] -> [shards, N / shards, ...]."""
  return x.reshape(shards, -1, *x.shape[1:])


def _gather(x: Array, place: Array) -> Array:
  """Rows of [M, ...] at `place` [N, 1] of each shard: [N, 1, ...]."""
  shards = ways("prompts")
  index = _split(place[:, 0], shards)
  out = jax.vmap(lambda rows, i: rows[i])(_split(x, shards), index)
  return out.reshape(-1, 1, *x.shape[1:])


def computed(lengths: np.ndarray, count: int, shards: int = 1) -> int:
  """Rows times tokens that decoding computes for completions of these lengths.

  Args:
    lengths: [B, G], on the host.
    count: `Sampling.compact`.
    shards: of the prompts.
  """
  flat = lengths.reshape(shards, -1)
  rest = [*sizes(lengths.size, count, shards), 0]
  now, total = lengths.size, 0
  for t in range(int(lengths.max())):
    live = (flat > t).sum(axis=1).max() * shards
    while live <= rest[0]:
      now = rest.pop(0)
    total += now
  return total
