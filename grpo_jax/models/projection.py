"""Products of activations with weights, and the order of their gradients.

The one place where a program depends on its platform. The weight gradient that
differentiation writes is slow in XLA's CPU backend, in bfloat16 on processors
that have it by a multiple; the same sum in another order is not. TPU and GPU
programs hold what differentiation writes.
"""

import functools
import math

import jax
import jax.numpy as jnp

from grpo_jax.types import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(
  x: Array, w: Array, axes: int = 1, dtype: jnp.dtype | None = None
) -> Array:
  """Contracts the last `axes` axes of x with the first ones of w.

  Args:
    x: [..., *inner], two axes or more before the inner ones.
    w: [*inner, *outer].
    axes: how many are inner.
    dtype: of the result; None is x's.

  Returns:
    [..., *outer].
  """
  return product(x, w, axes, dtype)


def product(
  x: Array, w: Array, axes: int = 1, dtype: jnp.dtype | None = None
) -> Array:
  """`project` with the gradient that differentiation writes.

  Of weights that are not trained: no gradient of them is computed.
  """
  last, first = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
  return jax.lax.dot_general(
    x, w, ((last, first), ((), ())), preferred_element_type=dtype
  )


def _forward(
  x: Array, w: Array, axes: int, dtype: jnp.dtype | None
) -> tuple[Array, tuple[Array, Array]]:
  return product(x, w, axes, dtype), (x, w)


def _backward(
  axes: int, dtype: jnp.dtype | None, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
  return jax.lax.platform_dependent(
    *saved,
    dy,
    cpu=functools.partial(_ordered, axes, dtype),
    default=functools.partial(_differentiated, axes, dtype),
  )


def _differentiated(
  axes: int, dtype: jnp.dtype | None, x: Array, w: Array, dy: Array
) -> tuple[Array, Array]:
  _, backward = jax.vjp(lambda x, w: product(x, w, axes, dtype), x, w)
  return backward(dy)


def _ordered(
  axes: int, dtype: jnp.dtype | None, x: Array, w: Array, dy: Array
) -> tuple[Array, Array]:
  """dw as a sum over two row axes: inputs first, nothing to transpose."""
  x, w, dy = jax.lax.optimization_barrier((x, w, dy))
  rows = x.ndim - axes
  outer = tuple(range(axes, w.ndim))
  dx = jax.lax.dot_general(
    dy,
    w,
    ((tuple(range(rows, dy.ndim)), outer), ((), ())),
    preferred_element_type=x.dtype,
  )
  lead = (math.prod(x.shape[: rows - 1]), x.shape[rows - 1])
  dw = jax.lax.dot_general(
    x.reshape(*lead, math.prod(x.shape[rows:])),
    dy.astype(x.dtype).reshape(*lead, math.prod(dy.shape[rows:])),
    (((0, 1), (0, 1)), ((), ())),
    preferred_element_type=w.dtype,
  )
  return jax.lax.optimization_barrier((dx, dw.reshape(w.shape)))


project.defvjp(_forward, _backward)
