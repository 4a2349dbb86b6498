"""Token weights: mask [B, G, T] -> [B, G, T], fixed before any slicing.

The loss is `-(weights * objective).sum()`, so these are what an average is
over. Rows without a token to train (not scored, or masked for being truncated)
are not counted. All masked: all 0, so the loss is 0 and finite.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array


def _rows(mask: Array) -> Array:
  """Rows with a token to train, at least 1: []."""
  return jnp.maximum(jnp.sum(jnp.any(mask, axis=-1)), 1)


def sequence_mean(mask: Array) -> Array:
  """1/|o_i| in each row, and the mean over rows: GRPO, GSPO."""
  lengths = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
  return jnp.where(mask, 1.0 / (lengths * _rows(mask)), 0.0)


def token_mean(mask: Array) -> Array:
  """1/Σ|o|: the mean over all tokens of the mini-batch (DAPO's code)."""
  return jnp.where(mask, 1.0 / jnp.maximum(jnp.sum(mask), 1), 0.0)


def prompt_token_mean(mask: Array) -> Array:
  """The mean over a group's tokens, then over prompts (DAPO eq. 8)."""
  tokens = jnp.sum(mask, axis=(1, 2), keepdims=True)
  prompts = jnp.maximum(jnp.sum(tokens > 0), 1)
  return jnp.where(mask, 1.0 / (jnp.maximum(tokens, 1) * prompts), 0.0)


def sequence_sum_mean(mask: Array) -> Array:
  """Sums over a row's tokens, the mean over rows: REINFORCE, RLOO."""
  return jnp.where(mask, 1.0 / _rows(mask), 0.0)


@dataclasses.dataclass(frozen=True)
class Constant:
  """1/L in each row, L a constant, and the mean over rows: Dr. GRPO.

  Attributes:
    tokens: L. The authors' code takes the longest completion allowed. It must
      not depend on the batch.
  """

  tokens: float

  def __call__(self, mask: Array) -> Array:
    return jnp.where(mask, 1.0 / (self.tokens * _rows(mask)), 0.0)
