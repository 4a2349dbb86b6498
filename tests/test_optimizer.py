"""Optimizers against numpy loops, schedules by value, and fault A33."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from grpo_jax import optimizer

SHAPES = {"q": (3, 4), "attn_norm": (4,), "head": (5, 2)}


def flat(rate):
  return lambda step: jnp.float32(rate)


def follow(how, params, gradients):
  """Applies the optimizer as grpo.apply does."""

  def run(params, gradients):
    def one(carry, grads):
      params, opt, step = carry
      direction, opt = how.transform.update(grads, opt, params)
      rate = how.learning_rate(step)
      params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
      return (params, opt, step + 1), None

    start = (params, how.transform.init(params), jnp.int32(0))
    return jax.lax.scan(one, start, gradients)[0][0]

  return jax.device_get(toys.jit(run)(params, gradients))


def draw(steps, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)

  def tree(*lead):
    return {
      k: (scale * rng.normal(size=(*lead, *s))).astype(np.float32)
      for k, s in SHAPES.items()
    }

  return tree(), tree(steps)


def clipped(grads, limit):
  norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
  return {k: g * min(1.0, limit / norm) for k, g in grads.items()}


def test_adamw_against_a_loop():
  params, gradients = draw(6)
  how = optimizer.adamw(
    flat(0.01), b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0
  )
  found = follow(how, params, gradients)
  want = {k: x.astype(np.float64) for k, x in params.items()}
  m = {k: 0 * x for k, x in want.items()}
  v = {k: 0 * x for k, x in want.items()}
  for t in range(6):
    grads = clipped({k: g[t].astype(float) for k, g in gradients.items()}, 1.0)
    for k, g in grads.items():
      m[k] = 0.9 * m[k] + 0.1 * g
      v[k] = 0.95 * v[k] + 0.05 * g**2
      step = m[k] / (1 - 0.9 ** (t + 1))
      step = step / (np.sqrt(v[k] / (1 - 0.95 ** (t + 1))) + 1e-8)
      if not k.endswith("norm"):  # vectors are left alone by decay
        step = step + 0.1 * want[k]
      want[k] = want[k] - 0.01 * step
  toys.close(found, want, 2e-6)


def test_sgd_against_a_loop():
  params, gradients = draw(6)
  how = optimizer.sgd(flat(0.1), momentum=0.9, clip_norm=0.5)
  found = follow(how, params, gradients)
  want, trace = dict(params), {k: 0 * x for k, x in params.items()}
  for t in range(6):
    grads = clipped({k: g[t] for k, g in gradients.items()}, 0.5)
    for k, g in grads.items():
      trace[k] = 0.9 * trace[k] + g
      want[k] = want[k] - 0.1 * trace[k]
  toys.close(found, want, 2e-6)


def test_adam_forgets_the_scale_of_a_loss():
  # So mean and leave-one-out baselines train alike under it (papers 4.18).
  params, gradients = draw(5)
  how = optimizer.adamw(flat(0.01), clip_norm=0.0)
  shrunk = jax.tree.map(lambda g: g * 0.5, gradients)
  toys.close(follow(how, params, gradients), follow(how, params, shrunk), 1e-6)


@pytest.mark.parametrize(
  "decay,values",
  [
    ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
    ("linear", [0.25, 0.5, 0.75, 1, 1, 0.775, 0.55, 0.325, 0.1]),
    ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.868198, 0.55, 0.231802, 0.1]),
  ],
)
def test_schedules_by_value(decay, values):
  # Nine steps that begin at 20, four of them rising, a tenth left at the end.
  at = optimizer.schedule(
    2.0, start=20, steps=9, warmup_steps=4, decay=decay, final_fraction=0.1
  )
  steps = jnp.arange(20, 31, dtype=jnp.int32)
  found = np.asarray(toys.jit(jax.vmap(at))(steps)) / 2
  np.testing.assert_allclose(found[:9], values, atol=1e-6)
  # Past the end nothing jumps.
  np.testing.assert_allclose(found[9:], values[-1], atol=1e-6)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("steps,warmup", [(1, 0), (1, 1), (3, 5), (2, 0)])
def test_short_schedules_are_finite(decay, steps, warmup):
  at = optimizer.schedule(
    1.0,
    start=0,
    steps=steps,
    warmup_steps=warmup,
    decay=decay,
    final_fraction=0.0,
  )
  found = toys.jit(jax.vmap(at))(jnp.arange(6, dtype=jnp.int32))
  assert np.isfinite(found).all() and found[0] > 0
  assert (np.asarray(found) <= 1).all() and (np.asarray(found) >= 0).all()


@functools.cache
def many_steps(how, steps):
  def run(weight, grad):
    def one(_, carry):
      params, opt = carry
      direction, opt = how.transform.update({"w": grad}, opt, params)
      rate = how.learning_rate(jnp.int32(0))
      return {"w": params["w"] - rate * direction["w"]}, opt

    params = {"w": weight}
    start = (params, how.transform.init(params))
    return jax.lax.fori_loop(0, steps, one, start)[0]["w"]

  return toys.jit(run)


@pytest.mark.parametrize(
  "how,steps,weight,grad,want,tolerance",
  [
    (optimizer.sgd(flat(0.001)), 100, 1.0, 1.0, 0.9, 1e-5),
    (optimizer.sgd(flat(1e-6)), 1000, 0.02, -1.0, 0.021, 1e-5),
    (optimizer.adamw(flat(1e-6)), 100, 0.02, 0.3, 0.0199, 1e-6),
  ],
  ids=["sgd 1e-3", "sgd 1e-6", "adam 1e-6"],
)
def test_small_updates_do_not_vanish(how, steps, weight, grad, want, tolerance):
  # A33: the master weights are float32 and take what bfloat16 would lose.
  found = many_steps(how, steps)(np.float32(weight), np.float32(grad))
  assert found.dtype == np.float32
  assert abs(found - want) < tolerance
