"""The parts of a policy objective: ratios, surrogates, KL, token weights.

Every function is over completion-aligned arrays [B, G, T] and knows nothing of
the others. A quantity of a whole sequence is broadcast over its tokens, so the
loss is `-(weights * objective).sum()` at either level.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

# exp is continued by its tangent above this log-ratio, so that value and
# gradient stay finite and keep their sign however far two policies part.
MAX_LOG_RATIO = 20.0


def bounded_exp(x: Array) -> Array:
  """exp(x) for x <= 20, and its tangent there above: finite, monotone, C¹."""
  low = jnp.minimum(x, MAX_LOG_RATIO)
  return jnp.exp(low) * (1 + (x - low))


def sequence_sum(x: Array, mask: Array) -> Array:
  """Sum over a row's tokens, broadcast back over them: [B, G, T]."""
  total = jnp.sum(jnp.where(mask, x, 0.0), axis=-1, keepdims=True)
  return jnp.broadcast_to(total, x.shape)


# --- ratio: (logprobs, old_logprobs, mask) -> [B, G, T] ---------------------


def token_ratio(logprobs: Array, old: Array, mask: Array) -> Array:
  """r_{i,t} = π_θ(o_{i,t}) / π_old(o_{i,t}), PPO (1707.06347)."""
  return bounded_exp(jnp.where(mask, logprobs - old, 0.0))


def sequence_ratio(logprobs: Array, old: Array, mask: Array) -> Array:
  """ρ_i = π_θ(o_i|q) / π_old(o_i|q), the product over tokens.

  Not length-normalised: the only ratio whose gradient is unbiased when the
  sampling policy is old. The price is the variance of a product.
  """
  return bounded_exp(sequence_sum(logprobs - old, mask))


def log_policy(logprobs: Array, old: Array, mask: Array) -> Array:
  """log π_θ itself, in a ratio's place: REINFORCE, and imitation at Â = 1."""
  del old
  return jnp.where(mask, logprobs, 0.0)


# --- surrogate: (ratio, advantages) -> objective, clipped low, clipped high --

Surrogate = Callable[[Array, Array], tuple[Array, Array, Array]]


def unclipped(ratio: Array, advantages: Array) -> tuple[Array, Array, Array]:
  """r Â."""
  never = jnp.zeros(ratio.shape, bool)
  return ratio * advantages, never, never


@dataclasses.dataclass(frozen=True)
class Clipped:
  """min(r Â, clip(r, 1-low, 1+high) Â), PPO eq. 7.

  The clip binds on one side only: above for Â > 0, below for Â < 0. The two
  flags mark exactly the tokens whose gradient it removes.
  """

  low: float
  high: float

  def __call__(
    self, ratio: Array, advantages: Array
  ) -> tuple[Array, Array, Array]:
    clipped = jnp.clip(ratio, 1 - self.low, 1 + self.high)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    low = (advantages < 0) & (ratio < 1 - self.low)
    high = (advantages > 0) & (ratio > 1 + self.high)
    return objective, low, high


# --- KL to the reference ----------------------------------------------------


def k1(log_ratio: Array) -> Array:
  """-log ρ, with ρ = π_ref/π_θ: unbiased, high variance."""
  return -log_ratio


def k2(log_ratio: Array) -> Array:
  """½ (log ρ)²."""
  return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: Array) -> Array:
  """ρ - 1 - log ρ: unbiased, never negative, low variance.

  `log_ratio` is log π_ref - log π_θ, of samples from π_θ (Schulman 2020).
  Above 20 the exponential goes on as its tangent (see `bounded_exp`).
  """
  return bounded_exp(log_ratio) - 1 - log_ratio


@dataclasses.dataclass(frozen=True)
class KL:
  """A KL(π_θ‖π_ref) term in the loss.

  Attributes:
    estimator: k1, k2 or k3, of log π_ref - log π_θ.
    coefficient: β.
    sequence: estimate from the whole sequence's log-ratio, not per token.
    ratio_weighted: multiply by the algorithm's ratio. With a sequence ratio
      and a sequence estimator, value and gradient are then those of the exact
      KL in expectation, also when the sampling policy is old.
  """

  estimator: Callable[[Array], Array]
  coefficient: float | Array
  sequence: bool = False
  ratio_weighted: bool = False

  def __call__(
    self, logprobs: Array, ref: Array, ratio: Array, mask: Array
  ) -> Array:
    """The estimate at each token, [B, G, T], without the coefficient."""
    log_ratio = jnp.where(mask, jax.lax.stop_gradient(ref) - logprobs, 0.0)
    if self.sequence:
      log_ratio = sequence_sum(log_ratio, mask)
    value = self.estimator(log_ratio)
    return ratio * value if self.ratio_weighted else value


# --- token weights: mask -> [B, G, T], fixed before any slicing -------------


def sequence_mean(mask: Array) -> Array:
  """1/|o_i| in each row, and the mean over rows that have a token to train.

  Rows without one (not scored, or masked for being truncated) are not counted.
  All masked: all 0, so the loss is 0 and finite.
  """
  lengths = jnp.sum(mask, axis=-1, keepdims=True)
  rows = jnp.sum(lengths > 0)
  return jnp.where(
    mask, 1.0 / (jnp.maximum(lengths, 1) * jnp.maximum(rows, 1)), 0.0
  )


def token_mean(mask: Array) -> Array:
  """1/Σ|o|: the mean over all trained tokens of the mini-batch."""
  return jnp.where(mask, 1.0 / jnp.maximum(jnp.sum(mask), 1), 0.0)
