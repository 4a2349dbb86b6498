"""Ratios, surrogates, KL and token weights: hand values and faults A13-A18."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from grpo_jax import algorithms, grpo, losses
from grpo_jax import token_weights as tw
from grpo_jax.kl import KL, k1, k2, k3
from grpo_jax.types import Scores

LENGTHS = [[1, 3], [2, 0]]
MASK = np.arange(4) < np.array(LENGTHS)[..., None]


def row(*values):
  """[1, 1, T], the shape of one row."""
  return np.array(values, np.float32)[None, None]


def slope(fn, x, *args):
  """Value, and gradient of the sum, by the first argument."""

  def total(x):
    out = fn(x, *args)
    out = out[0] if isinstance(out, tuple) else out
    return jnp.sum(out), out

  (_, value), gradient = toys.jit(jax.value_and_grad(total, has_aux=True))(x)
  return np.asarray(value), np.asarray(gradient)


def test_the_clip_binds_on_one_side_only():
  # A18, with the gradient by the ratio.
  clip = losses.Clipped(0.2, 0.2)
  ratio = row(0.7, 1.0, 1.3)
  for sign, objective, gradient, low, high in (
    (1, (0.7, 1.0, 1.2), (1, 1, 0), (0, 0, 0), (0, 0, 1)),
    (-1, (-0.8, -1.0, -1.3), (0, -1, -1), (1, 0, 0), (0, 0, 0)),
  ):
    value, got = slope(clip, ratio, np.full_like(ratio, sign))
    np.testing.assert_allclose(value, row(*objective), rtol=1e-6)
    np.testing.assert_allclose(got, row(*gradient), atol=1e-6)
    _, below, above = clip(ratio, np.full_like(ratio, sign))
    assert (np.asarray(below) == row(*low)).all()
    assert (np.asarray(above) == row(*high)).all()


def test_the_two_sides_have_bounds_of_their_own():
  # R1 clips at ε = 10: the lower bound is negative and never binds.
  value, gradient = slope(
    losses.Clipped(10.0, 0.28), row(0.01, 1.27, 1.29), row(-1, 1, 1)
  )
  np.testing.assert_allclose(value, row(-0.01, 1.27, 1.28), rtol=1e-6)
  np.testing.assert_allclose(gradient, row(-1, 1, 0), atol=1e-6)


def test_k3_and_its_direction():
  # A16 (ii), (iii): by the policy's log-prob, 1 - exp(ref - policy).
  kl = KL(k3, 1.0)
  policy, ref, mask = row(-1.0, -1.5), row(-1.5, -1.0), row(1, 1) > 0
  value, gradient = slope(kl, policy, ref, row(1, 1), mask)
  np.testing.assert_allclose(value, row(0.106531, 0.148721), atol=1e-6)
  np.testing.assert_allclose(gradient, row(0.393469, -0.648721), atol=1e-6)
  estimate1, _ = slope(KL(k1, 1.0), policy, ref, row(1, 1), mask)
  estimate2, _ = slope(KL(k2, 1.0), policy, ref, row(1, 1), mask)
  np.testing.assert_allclose(estimate1, row(0.5, -0.5), atol=1e-6)
  np.testing.assert_allclose(estimate2, row(0.125, 0.125), atol=1e-6)
  # No gradient flows to the reference.
  by_ref = jax.grad(lambda r: kl(policy, r, row(1, 1), mask).sum())(ref)
  assert (np.asarray(by_ref) == 0).all()


@pytest.mark.parametrize("gap", [119.0, 1e4])
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_overflows_however_far_two_policies_part(gap, weighted):
  # A16 (i): above a log-ratio of 20 the exponential goes on as its tangent.
  kl = KL(k3, 1.0, sequence=weighted, ratio_weighted=weighted)
  mask = row(1, 1) > 0

  def loss(policy):
    make = losses.sequence_ratio if weighted else losses.token_ratio
    ratio = make(policy, row(-1.0, -1.0) - gap * weighted, mask)
    return kl(policy, row(-1.0, -1.0), ratio, mask) - ratio

  for policy in (row(-1 - gap, -1.0), row(-1.0, -1 - gap)):
    value, gradient = slope(loss, policy)
    assert np.isfinite(value).all() and np.isfinite(gradient).all()
  value, gradient = slope(
    losses.token_ratio, row(gap - 1), row(-1), mask[..., :1]
  )
  assert value > np.exp(20) and gradient > 0


def test_the_bound_joins_smoothly():
  x = row(-200.0, 0.0, 19.99, 20.01, 30.0)
  value, gradient = slope(losses.bounded_exp, x)
  e = np.exp(np.minimum(x, 20.0))
  np.testing.assert_allclose(value, e * (1 + np.maximum(x - 20, 0)), rtol=1e-5)
  np.testing.assert_allclose(gradient, e, rtol=1e-5)


def test_weights_by_hand():
  w = np.asarray(tw.sequence_mean(MASK))
  # Three rows have a token; the empty one is not counted.
  np.testing.assert_allclose(w[0, 0], [1 / 3, 0, 0, 0], rtol=1e-6)
  np.testing.assert_allclose(w[0, 1], [1 / 9] * 3 + [0], rtol=1e-6)
  np.testing.assert_allclose(w[1, 0], [1 / 6] * 2 + [0, 0], rtol=1e-6)
  assert (w[1, 1] == 0).all()
  np.testing.assert_allclose(tw.token_mean(MASK), MASK / 6, rtol=1e-6)
  for weights in (tw.sequence_mean, tw.token_mean):
    none = np.asarray(weights(MASK & False))
    assert (none == 0).all()
    # Padding changes nothing.
    wide = np.pad(MASK, ((0, 0), (0, 0), (0, 3)))
    np.testing.assert_allclose(weights(wide)[..., :4], weights(MASK))


def test_accumulation_does_not_rescale():
  # A13: rows of one token (loss 4θ) and three (loss 0), as one batch.
  mask = np.arange(3) < np.array([[[1]], [[3]]])
  loss = np.array([4.0, 0.0])[:, None, None] * mask
  for weights, want in (
    (tw.token_mean, 1),
    (tw.sequence_mean, 2),
  ):
    w = np.asarray(weights(mask))
    assert abs((w * loss).sum() - want) < 1e-6
    pieces = (w[:1] * loss[:1]).sum() + (w[1:] * loss[1:]).sum()
    assert abs(pieces - want) < 1e-6


def test_every_term_has_the_same_mask():
  # A14: policy loss and KL under one weight, padding at 5 and 9.
  mask = np.array([[[1, 1, 0, 0]], [[1, 0, 0, 0]]], bool)
  policy = np.array([[[1, 1, 5, 5]], [[2, 5, 5, 5]]], np.float32)
  kl = np.array([[[0.2, 0.4, 9, 9]], [[0.6, 9, 9, 9]]], np.float32)
  for weights, want in (
    (tw.sequence_mean, 1.545),
    (tw.token_mean, 1.373333),
  ):
    total = np.sum(np.asarray(weights(mask)) * (policy + 0.1 * kl))
    assert abs(total - want) < 1e-6


# --- through grpo.loss, the log-probs being the parameters -------------------


def through_loss(monkeypatch, algorithm, rewards, policy, old, ref, mask=None):
  """Loss, gradient by log-prob and sums of one fixed rollout."""
  toys.use_source(monkeypatch, toys.array_source)
  b, g, t = policy.shape
  rows = [[[0] * t] * g] * b
  rollout = toys.pack_rollout(toys.pack_prompts([[1]] * b), rows)
  if mask is not None:
    rollout = rollout.replace(mask=mask)

  def run(policy, old, ref):
    batch = grpo.advantage(
      toys.give(rewards), rollout, Scores(old, ref), algorithm=algorithm
    )
    return batch.advantages, *jax.value_and_grad(grpo.loss, has_aux=True)(
      {"logprobs": policy}, {}, batch, model=None, algorithm=algorithm
    )

  advantages, (loss, sums), gradient = toys.jit(run)(policy, old, ref)
  return loss, np.asarray(gradient["logprobs"]), sums, np.asarray(advantages)


def test_beta_acts_once(monkeypatch):
  # A17: 0.1 * mean(k3) and the advantages as they were.
  policy = np.full((1, 2, 1), -1.0, np.float32)
  ref = np.array([[[-1.5], [-1.0]]], np.float32)
  found = {
    beta: through_loss(
      monkeypatch, algorithms.grpo(beta=beta), [[1.0, 0.0]], policy, None, ref
    )
    for beta in (0.0, 0.1)
  }
  assert abs(found[0.1][0] - found[0.0][0] - 0.0053265) < 1e-6
  for _, _, _, advantages in found.values():
    np.testing.assert_allclose(
      advantages[0, :, 0], [0.70711, -0.70711], atol=1e-5
    )
  assert abs(found[0.1][2]["loss_kl"] - 0.0053265) < 1e-6
  assert found[0.0][2]["loss_kl"] == 0


@pytest.mark.parametrize("name", ["grpo", "grpo_sequence"])
def test_a_token_the_policy_did_not_write_gets_no_gradient(name, monkeypatch):
  rng = np.random.default_rng(0)
  policy, old, ref = -rng.gamma(1, 1, size=(3, 2, 3, 4)).astype(np.float32)
  mask = rng.random((2, 3, 4)) < 0.6
  mask[0, 0] = False  # a whole row of somebody else's
  rewards = rng.normal(size=(2, 3))
  run = functools.partial(
    through_loss, monkeypatch, algorithms.ALGORITHMS[name](beta=0.1), rewards
  )
  loss, gradient, sums, _ = run(policy, old, ref, mask)
  assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).all()
  assert sums["tokens"] == mask.sum()
  # Whatever stands there, in any of the three, changes nothing.
  noise = np.where(mask, 0, rng.normal(size=mask.shape) * 50)
  noise = noise.astype(np.float32)
  again, _, _, _ = run(policy + noise, old - noise, ref + 2 * noise, mask)
  assert abs(again - loss) < 1e-6


def test_sums_against_numpy(monkeypatch):
  rng = np.random.default_rng(1)
  policy, old, ref = -rng.gamma(1, 1, size=(3, 2, 3, 4)).astype(np.float32)
  mask = rng.random((2, 3, 4)) < 0.7
  _, _, sums, advantages = through_loss(
    monkeypatch,
    algorithms.grpo(beta=0.1),
    rng.normal(size=(2, 3)),
    policy,
    old,
    ref,
    mask,
  )
  ratio, d = np.exp(policy - old), ref - policy
  want = {
    "tokens": mask.sum(),
    "weight": 1.0,
    "kl_k3": (np.exp(d) - 1 - d)[mask].sum(),
    "kl_k1": -d[mask].sum(),
    "max_ratio": ratio[mask].max(),
    "clip_low": ((advantages < 0) & (ratio < 0.8))[mask].sum(),
    "clip_high": ((advantages > 0) & (ratio > 1.2))[mask].sum(),
    "gap": np.abs(old)[mask].sum(),  # the sampler's are 0 here
    "max_gap": np.abs(old)[mask].max(),
  }
  for name, value in want.items():
    assert abs(sums[name] - value) < 1e-4 * max(1, abs(value)), name
  assert want["clip_low"] > 0 and want["clip_high"] > 0


def test_an_algorithm_is_data():
  assert algorithms.grpo(beta=0.0).kl is None
  assert algorithms.grpo_sequence(beta=0).kl is None
  assert algorithms.grpo_sequence().kl.coefficient == 0.01
  assert algorithms.grpo().kl.coefficient == 0.04
  assert dataclasses.replace(algorithms.grpo(), name="mine").name == "mine"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
  arrays.arrays(np.float32, (2, 3, 4), elements=st.floats(-3, 0, width=32)),
  arrays.arrays(np.bool_, (2, 3, 4)),
)
def test_a_ratio_of_the_policy_to_itself_is_one(policy, mask):
  for make in (token, sequence):
    value, gradient = make(policy, policy, mask)
    assert (np.asarray(value) == 1).all()
    assert (np.asarray(gradient)[~mask] == 0).all()
    assert (np.asarray(gradient)[mask] != 0).all()


def _with_slope(fn):
  def run(policy, old, mask):
    value, pull = jax.vjp(lambda x: fn(x, old, mask), policy)
    return value, pull(jnp.ones_like(value))[0]

  return toys.jit(run)


token = _with_slope(losses.token_ratio)
sequence = _with_slope(losses.sequence_ratio)
