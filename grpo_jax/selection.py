"""Tokens singled out by a statistic of the mini-batch at the current weights.

cov_t = (A_t - mean A)(log π_t - mean log π), over the mini-batch's tokens: the
tokens whose probability and advantage rise together are those that use up
entropy (2505.22617).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from grpo_jax.types import Tokens

Select = Callable[[Tokens, Array], Array]  # tokens, key -> [B, G, T] bool


def covariance(tokens: Tokens) -> Array:
  """cov_t at each token, [B, G, T]; 0 off the mask."""
  mask = tokens.mask
  count = jnp.maximum(jnp.sum(mask), 1)

  def centred(x: Array) -> Array:
    mean = jnp.sum(jnp.where(mask, x, 0.0)) / count
    return jnp.where(mask, x - mean, 0.0)

  return centred(tokens.advantages) * centred(tokens.logprobs)


def _largest(score: Array, candidates: Array, count: Array) -> Array:
  """The `count` candidates with the largest score; ties in array order."""
  flat = jnp.where(candidates, score, -jnp.inf).ravel()
  order = jnp.argsort(-flat, stable=True)
  rank = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.arange(flat.size))
  return (rank < count).reshape(score.shape) & candidates


def _share(fraction: float, mask: Array) -> Array:
  """A share of all tokens, at least 1 where there is a token at all."""
  count = jnp.sum(mask)
  return jnp.minimum(jnp.maximum(jnp.floor(fraction * count), 1), count)


@dataclasses.dataclass(frozen=True)
class HighCovariance:
  """The share of tokens with the largest covariance: KL-Cov.

  Attributes:
    fraction: 2e-3 for the paper's 7B, 2e-4 for its 32B. At least one token.
  """

  fraction: float = 2e-3

  def __call__(self, tokens: Tokens, key: Array) -> Array:
    del key
    count = _share(self.fraction, tokens.mask)
    return _largest(covariance(tokens), tokens.mask, count)


@dataclasses.dataclass(frozen=True)
class RandomInBand:
  """A share of tokens, at random among those in a covariance band: Clip-Cov.

  Attributes:
    fraction: of all tokens; 2e-4 in the paper.
    low: band, exclusive; 1 in the paper's code.
    high: band, exclusive; 5.
  """

  fraction: float = 2e-4
  low: float = 1.0
  high: float = 5.0

  def __call__(self, tokens: Tokens, key: Array) -> Array:
    cov = covariance(tokens)
    inside = tokens.mask & (cov > self.low) & (cov < self.high)
    count = _share(self.fraction, tokens.mask)
    return _largest(jax.random.uniform(key, cov.shape), inside, count)
