"""Advantages: each reward against its own group. Small functions of arrays.

Two kinds. One takes outcomes, rewards [B, G] and which rows are scored, and
gives [B, G]; `Outcome` makes an algorithm's part of it. The other takes all
that is known, `(rewards, rollout, scores)`, and gives [B, G, T] (`returns.py`).

A row that could not be scored is no number: it is left out of its group's
statistics and gets advantage 0.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from grpo_jax.types import Rewards, Rollout, Scores

Advantage = Callable[[Rewards, Rollout, Scores], Array]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """An algorithm's part of a function of outcomes.

  The reward of a row is its total and, where a KL or a length penalty was
  shaped in, the sum of that.

  Attributes:
    fn: (rewards [B, G], scored [B, G]) -> [B, G].
  """

  fn: Callable[[Array, Array], Array]

  def __call__(
    self, rewards: Rewards, rollout: Rollout, scores: Scores
  ) -> Array:
    """[B, G, 1]."""
    del rollout, scores
    return self.fn(with_penalty(rewards), rewards.scored)[..., None]


def with_penalty(rewards: Rewards) -> Array:
  """[B, G]: the total, and what was shaped in token by token."""
  if rewards.penalty is None:
    return rewards.total
  return rewards.total + jnp.sum(rewards.penalty, axis=-1)


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


def leave_one_out(rewards: Array, scored: Array) -> Array:
  """Â_i = R_i - mean of the others: RLOO (2402.14740). Unbiased.

  G/(G-1) times `group_mean`; a group of fewer than two scored rows gives 0.
  """
  count = jnp.sum(scored, axis=1, keepdims=True)
  return group_mean(rewards, scored) * count / jnp.maximum(count - 1, 1)


def group_mean_batch_std(
  rewards: Array, scored: Array, *, ddof: int, epsilon: float
) -> Array:
  """(R_i - mean of the group) / (std of all rewards of the batch + ε).

  Lite PPO (2508.08221): of the raw rewards, not of the centred ones.
  """
  return group_mean(rewards, scored) / (
    batch_std(rewards, scored, ddof) + epsilon
  )


def centred_batch_std(
  rewards: Array, scored: Array, *, ddof: int, epsilon: float
) -> Array:
  """Group-centred, over the batch's std of those: ScaleRL (2510.13786)."""
  centred = group_mean(rewards, scored)
  return centred / (batch_std(centred, scored, ddof) + epsilon)


def batch_std(x: Array, scored: Array, ddof: int) -> Array:
  """Standard deviation over all scored rows of a batch: []."""
  count = jnp.sum(scored)
  mean = jnp.sum(jnp.where(scored, x, 0.0)) / jnp.maximum(count, 1)
  centred = jnp.where(scored, x - mean, 0.0)
  size = jnp.max(jnp.abs(centred))  # squares of large rewards would overflow
  flat = size == 0
  squares = jnp.sum(jnp.square(centred / jnp.where(flat, 1.0, size)))
  variance = squares / jnp.maximum(count - ddof, 1)
  return size * jnp.sqrt(jnp.where(flat, 1.0, variance))


def batch_mean(rewards: Array, scored: Array) -> Array:
  """Â_i = R_i - mean over the batch: REINFORCE with a plain baseline."""
  mean = jnp.sum(jnp.where(scored, rewards, 0.0)) / jnp.maximum(
    jnp.sum(scored), 1
  )
  return jnp.where(scored, rewards - mean, 0.0)


def no_baseline(rewards: Array, scored: Array) -> Array:
  """Â_i = R_i."""
  return jnp.where(scored, rewards, 0.0)


def success_normalized(rewards: Array, scored: Array) -> Array:
  """Â_i = (R_i - mean) / mean, 0 in a group without success: MaxRL.

  2602.02710. For rewards of 0 and 1, in expectation the gradient of
  -Σ_{k<=G-1} (1-p)^k / k, a truncated log-likelihood of success.
  """
  count = jnp.maximum(jnp.sum(scored, axis=1, keepdims=True), 1)
  mean = jnp.sum(jnp.where(scored, rewards, 0.0), axis=1, keepdims=True) / count
  centred = group_mean(rewards, scored)
  return jnp.where(mean > 0, centred / jnp.where(mean > 0, mean, 1.0), 0.0)


def per_informative_group(rewards: Array, scored: Array) -> Array:
  """`group_mean`, times groups / groups with a signal: GPG (2504.02546)."""
  useful = informative(rewards, scored)
  factor = useful.size / jnp.maximum(jnp.sum(useful), 1)
  return group_mean(rewards, scored) * factor


def ones(rewards: Array, scored: Array) -> Array:
  """Â_i = 1 on every scored row: imitation of the given completions."""
  return jnp.where(scored, jnp.ones_like(rewards), 0.0)
