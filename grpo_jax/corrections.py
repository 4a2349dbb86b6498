"""Weights for what the loss's policy is not: the sampler, or an old policy.

A correction maps `Tokens` to a factor [B, G, T] on each token's objective. It
is a number, not a function of the parameters: no gradient flows through it. It
multiplies the objective after the clip, so it does not move the clip's bounds.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from grpo_jax.losses import bounded_exp, sequence_sum
from grpo_jax.types import Tokens


def token_weight(tokens: Tokens) -> Array:
  """π_old/μ at each token. Biased for sequences, low variance."""
  return _weight(tokens.old - tokens.sampler, tokens.mask)


def sequence_weight(tokens: Tokens) -> Array:
  """π_old/μ of the whole completion: unbiased, high variance."""
  gap = sequence_sum(tokens.old - tokens.sampler, tokens.mask)
  return _weight(gap, tokens.mask)


def geometric_weight(tokens: Tokens) -> Array:
  """The geometric mean of π_old/μ over the completion's tokens."""
  gap = sequence_sum(tokens.old - tokens.sampler, tokens.mask)
  count = sequence_sum(jnp.ones_like(gap), tokens.mask)
  return _weight(gap / jnp.maximum(count, 1), tokens.mask)


def _weight(log_ratio: Array, mask: Array) -> Array:
  return jax.lax.stop_gradient(bounded_exp(jnp.where(mask, log_ratio, 0.0)))


LEVELS = {
  "token": token_weight,
  "sequence": sequence_weight,
  "geometric": geometric_weight,
}


@dataclasses.dataclass(frozen=True)
class Truncated:
  """min(w, cap): TIS (fengyao.notion.site/off-policy-rl).

  Attributes:
    cap: C. The authors and verl 2; TRL 3. Infinity with level 'sequence' is
      the unbiased importance weight.
    level: token, sequence or geometric.
  """

  cap: float = 2.0
  level: str = "token"

  def __call__(self, tokens: Tokens) -> Array:
    return jnp.minimum(LEVELS[self.level](tokens), self.cap)


@dataclasses.dataclass(frozen=True)
class Banded:
  """w inside [low, high], 0 outside.

  IcePop: token level, [.5, 5] (third-party; the original page was not read).
  MIS: low 0. Geo-RS: geometric level, about [.999, 1.001], `weighted` False.

  Attributes:
    low: smallest weight kept.
    high: largest.
    level: token, sequence or geometric.
    weighted: multiply what is kept by its weight; False keeps it as it is.
  """

  low: float = 0.5
  high: float = 5.0
  level: str = "token"
  weighted: bool = True

  def __call__(self, tokens: Tokens) -> Array:
    w = LEVELS[self.level](tokens)
    keep = (w >= self.low) & (w <= self.high)
    return jnp.where(keep, w if self.weighted else 1.0, 0.0)


@dataclasses.dataclass(frozen=True)
class OffPolicyMask:
  """0 on a completion with Â < 0 that the policy has left far behind.

  DeepSeek-V3.2 (2512.02556): M_i = 0 if Â_i < 0 and mean_t log(π_μ/π_θ) > δ,
  with the sampler's log-probs as π_μ.

  Attributes:
    delta: δ in nats per token. The paper gives none; TRL suggests 0.5.
  """

  delta: float = 0.5

  def __call__(self, tokens: Tokens) -> Array:
    gap = sequence_sum(tokens.sampler - tokens.logprobs, tokens.mask)
    count = sequence_sum(jnp.ones_like(gap), tokens.mask)
    far = jax.lax.stop_gradient(gap) > self.delta * count
    return jnp.where((tokens.advantages < 0) & far, 0.0, 1.0)
