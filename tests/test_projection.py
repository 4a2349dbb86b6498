"""Products with weights: their gradients, and the platform they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.projection import project


def operands(axes, dtype):
  inner, outer = ((4, 6), (5,)) if axes == 2 else ((8,), (3, 5))
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (2, 3, 7, *inner), dtype)
  w = jax.random.normal(keys[1], (*inner, *outer), dtype)
  return x, w, jax.random.normal(keys[2], (2, 3, 7, *outer), dtype)


def both(fn, x, w, dy):
  out, back = jax.vjp(fn, x, w)
  return out, *back(dy)


@pytest.mark.parametrize("axes", [1, 2])
def test_value_and_gradients_are_tensordots(axes):
  x, w, dy = operands(axes, jnp.float32)
  got = both(lambda x, w: project(x, w, axes), x, w, dy)
  want = both(lambda x, w: jnp.tensordot(x, w, axes), x, w, dy)
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_stream_of_no_tokens_has_a_gradient_of_zeros():
  x, w, dy = operands(1, jnp.float32)
  _, dx, dw = both(project, x[:, :, :0], w, dy[:, :, :0])
  assert dx.shape == (2, 3, 0, 8)
  np.testing.assert_array_equal(dw, jnp.zeros_like(w))


@pytest.mark.parametrize("axes", [1, 2])
def test_in_bfloat16_they_differ_from_float32_by_its_rounding(axes):
  x, w, dy = operands(axes, jnp.bfloat16)
  got = both(lambda x, w: project(x, w, axes), x, w, dy)
  wide = [y.astype(jnp.float32) for y in (x, w, dy)]
  want = both(lambda x, w: jnp.tensordot(x, w, axes), *wide)
  for a, b in zip(got, want):
    assert a.dtype == jnp.bfloat16
    np.testing.assert_allclose(
      np.asarray(a, np.float32), b, rtol=2**-7, atol=1e-2
    )


def lowered(fn, platform):
  x, w, dy = operands(1, jnp.bfloat16)

  def gradients(x, w, dy):
    # As in the decoder: inside a scan, where a choice by platform that
    # crossed from the forward to the backward pass would stay open.
    def loss(x, w):
      body = jax.checkpoint(lambda s, w: (s + jnp.sum(fn(x, w) * dy), None))
      return jax.lax.scan(body, jnp.zeros((), x.dtype), w)[0]

    return jax.grad(loss, argnums=(0, 1))(x, w)

  traced = jax.jit(gradients).trace(x, jnp.stack([w, w]), dy)
  return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_order_for_a_cpu_never_reaches_an_accelerator(platform):
  mine = lowered(project, platform)
  plain = lowered(lambda x, w: jnp.tensordot(x, w, 1), platform)

  def shape_of_the_work(text):
    lines = [x.partition("dot_general")[2] for x in text.splitlines()]
    products = sorted(x.partition(":")[2] for x in lines if x)
    return products, text.count("optimization_barrier")

  assert shape_of_the_work(mine) == shape_of_the_work(plain)


def test_a_cpu_has_it():
  text = lowered(project, "cpu")
  assert text.count("contracting_dims = [0, 1] x [0, 1]") == 1
  assert "[0, 1, 2] x [0, 1, 2]" not in text  # the other form is not there
