"""Rotary positions: frequencies, plain or stretched, and the turn itself."""

import math

import jax.numpy as jnp
import numpy as np

from grpo_jax.models.architecture import RopeScaling
from grpo_jax.types import Array

Rotation = tuple[Array, Array]  # cosines and sines, [B, 1, S, 1, E/2]


def frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray, float]:
  """theta^(-2i/E), stretched; and a factor on cosines and sines.

  Chosen once, from the configuration, never from a sequence's length.
  """
  half = head_dim // 2
  plain = theta ** (-np.arange(half, dtype=np.float64) / half)
  if scaling is None:
    return plain.astype(np.float32), 1.0
  stretched, factor = SCALINGS[scaling.kind](plain, head_dim, theta, scaling)
  return stretched.astype(np.float32), factor


def _linear(
  plain: np.ndarray, head_dim: int, theta: float, s: RopeScaling
) -> tuple[np.ndarray, float]:
  return plain / s.factor, 1.0


def _llama3(
  plain: np.ndarray, head_dim: int, theta: float, s: RopeScaling
) -> tuple[np.ndarray, float]:
  """Long waves are stretched, short ones kept, those between blended."""
  turns = s.original * plain / (2 * math.pi)  # in the original context
  blend = np.clip((turns - s.low) / (s.high - s.low), 0.0, 1.0)
  return (1 - blend) * plain / s.factor + blend * plain, 1.0


def _yarn(
  plain: np.ndarray, head_dim: int, theta: float, s: RopeScaling
) -> tuple[np.ndarray, float]:
  """YaRN (2309.00071): a ramp over dimensions, and warmer attention."""

  def dimension(turns: float) -> float:
    span = s.original / (turns * 2 * math.pi)
    return head_dim * math.log(span) / (2 * math.log(theta))

  low = max(math.floor(dimension(s.high)), 0)
  high = min(math.ceil(dimension(s.low)), head_dim - 1)
  width = max(high - low, 0.001)
  ramp = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
  factor = s.attention or (
    0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
  )
  return plain / s.factor * ramp + plain * (1 - ramp), factor


SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def rotation(
  positions: Array,
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None = None,
) -> Rotation:
  """Cosines and sines of rotary positions, taken once for all layers.

  Args:
    positions: [B, S], counting real tokens.
    head_dim: E.
    theta: base of the frequencies.
    scaling: how they are stretched.
  """
  by, factor = frequencies(head_dim, theta, scaling)
  angles = positions.astype(jnp.float32)[..., None] * by[None, None]
  angles = angles[:, None, :, None]
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rope(x: Array, by: Rotation) -> Array:
  """Rotates queries or keys, a head's two halves together, in float32.

  Args:
    x: [B, G, S, heads, E].
    by: from `rotation`.
  """
  cos, sin = by
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  out = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
  return out.astype(x.dtype)
