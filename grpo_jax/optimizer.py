"""Optimizers: an optax transformation and a schedule of its step size.

The schedule is a function of the step, not of the transformation's count, so a
skipped update (a dead batch, non-finite gradients) does not shift it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """What `grpo.update` applies: params -= learning_rate(step) * direction.

  Attributes:
    transform: gradients -> direction, clipping and weight decay included.
    learning_rate: step [] int32 (the run's own counter) -> [] float32.
  """

  transform: optax.GradientTransformation
  learning_rate: Callable[[Array], Array]


def schedule(
  peak: float | Array,
  *,
  start: int,
  steps: int,
  warmup_steps: int,
  decay: str,
  final_fraction: float,
) -> Callable[[Array], Array]:
  """Linear rise to `peak`, then decay to `final_fraction` of it.

  Args:
    peak: the learning rate.
    start: the step at which this phase begins.
    steps: length of the phase in steps.
    warmup_steps: steps of the rise; the first one is not 0.
    decay: 'constant', 'linear' or 'cosine'.
    final_fraction: share of the peak left in the last step.
  """
  shapes = {
    "constant": jnp.ones_like,
    "linear": lambda x: 1 - (1 - final_fraction) * x,
    "cosine": lambda x: (
      final_fraction + (1 - final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * x))
    ),
  }
  shape = shapes[decay]

  def at(step: Array) -> Array:
    now = (step - start).astype(jnp.float32)
    rise = jnp.minimum((now + 1) / max(warmup_steps, 1), 1.0)
    span = max(steps - warmup_steps - 1, 1)
    progress = jnp.clip((now - warmup_steps) / span, 0.0, 1.0)
    return peak * rise * shape(progress)

  return at


def adamw(
  learning_rate: Callable[[Array], Array],
  *,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  clip_norm: float = 1.0,
) -> Optimizer:
  """AdamW with the gradient clipped by its global norm.

  Moments are float32, as parameters are. Weight decay is decoupled and leaves
  vectors (norms) alone.

  Args:
    learning_rate: from `schedule`.
    b1: decay of the first moment.
    b2: decay of the second.
    eps: added to the root of the second moment.
    weight_decay: 0 turns it off.
    clip_norm: largest global gradient norm; 0 turns clipping off.
  """
  parts = []
  if clip_norm:
    parts.append(optax.clip_by_global_norm(clip_norm))
  parts.append(optax.scale_by_adam(b1=b1, b2=b2, eps=eps))
  if weight_decay:
    parts.append(optax.add_decayed_weights(weight_decay, mask=_matrices))
  return Optimizer(optax.chain(*parts), learning_rate)


def sgd(
  learning_rate: Callable[[Array], Array],
  *,
  momentum: float = 0.0,
  clip_norm: float = 0.0,
) -> Optimizer:
  """Plain gradient descent, for experiments where scale must matter.

  Args:
    learning_rate: from `schedule`.
    momentum: 0 turns it off.
    clip_norm: largest global gradient norm; 0 turns clipping off.
  """
  parts = [optax.identity()]  # a chain of nothing is refused
  if clip_norm:
    parts.append(optax.clip_by_global_norm(clip_norm))
  if momentum:
    parts.append(optax.trace(decay=momentum))
  return Optimizer(optax.chain(*parts), learning_rate)


def _matrices(params: object) -> object:
  """True for weights; norms and biases, stacked too, are named for it."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: not path[-1].key.endswith(("norm", "bias")), params
  )


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": adamw, "sgd": sgd}
