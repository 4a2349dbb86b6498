"""Advantages: each reward against its own group. Small functions of arrays.

A row that could not be scored is no number: it is left out of its group's
statistics and gets advantage 0.
"""

import jax.numpy as jnp
from jax import Array

# Equal rewards that are not exact in binary leave a residue of a few units in
# the last place; a spread below this share of their size is no spread at all.
RELATIVE_SPREAD = 1e-6


def spread(rewards: Array, scored: Array) -> tuple[Array, Array]:
  """Lowest and highest scored reward of each group: [B, G] -> [B, 1] twice."""
  low = jnp.min(jnp.where(scored, rewards, jnp.inf), axis=1, keepdims=True)
  high = jnp.max(jnp.where(scored, rewards, -jnp.inf), axis=1, keepdims=True)
  return low, high


def informative(rewards: Array, scored: Array) -> Array:
  """Groups whose rewards differ: [B, G] -> [B, 1] bool.

  Judged by max against min, never by a floating-point standard deviation,
  which is not 0 for seven copies of 0.1. A group with fewer than two scored
  rows is not informative.
  """
  low, high = spread(rewards, scored)
  enough = jnp.sum(scored, axis=1, keepdims=True) > 1
  size = jnp.maximum(jnp.abs(low), jnp.abs(high))
  return enough & (high - low > RELATIVE_SPREAD * size)


def group_mean(rewards: Array, scored: Array) -> Array:
  """Â_i = R_i - mean(R), the mean over the group's scored rows.

  The baseline includes R_i itself, so E[gradient] is (G-1)/G times the true
  one: same direction, a shrunken step.

  Args:
    rewards: [B, G].
    scored: [B, G] bool.

  Returns:
    [B, G]; exactly 0 in a group whose rewards are equal.
  """
  count = jnp.maximum(jnp.sum(scored, axis=1, keepdims=True), 1)
  kept = jnp.where(scored, rewards, 0.0)
  mean = jnp.sum(kept / count, axis=1, keepdims=True)
  use = scored & informative(rewards, scored)
  return jnp.where(use, rewards - mean, 0.0)


def group_normalized(
  rewards: Array, scored: Array, *, ddof: int, epsilon: float
) -> Array:
  """Â_i = (R_i - mean(R)) / (std(R) + ε), DeepSeekMath (2402.03300) eq. 3.

  Args:
    rewards: [B, G].
    scored: [B, G] bool.
    ddof: 1 divides the squares by n-1 (sample), 0 by n (population).
    epsilon: added outside the root.

  Returns:
    [B, G]; exactly 0 in a group whose rewards are equal.
  """
  centred = group_mean(rewards, scored)
  count = jnp.sum(scored, axis=1, keepdims=True)
  use = informative(rewards, scored)
  # Squares of rewards over 1e19 would overflow; the inner `where` keeps the
  # root's gradient finite where nothing is used.
  size = jnp.max(jnp.abs(centred), axis=1, keepdims=True)
  size = jnp.where(use, size, 1.0)
  squares = jnp.sum(jnp.square(centred / size), axis=1, keepdims=True)
  variance = squares / jnp.maximum(count - ddof, 1)
  std = size * jnp.sqrt(jnp.where(use, variance, 1.0))
  return centred / (std + epsilon)


def ones(rewards: Array, scored: Array) -> Array:
  """Â_i = 1 on every scored row: imitation of the given completions."""
  return jnp.where(scored, jnp.ones_like(rewards), 0.0)
