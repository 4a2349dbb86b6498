"""Each reward against its own group: hand values, faults A01-A07, laws."""

import functools

import jax
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from grpo_jax import advantages, algorithms, metrics

MEAN = toys.jit(advantages.group_mean)


@functools.cache
def normalized(ddof, epsilon=1e-6):
  return toys.jit(
    functools.partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon)
  )


def of(fn, rewards, scored=None):
  rewards = np.asarray(rewards, np.float32)
  scored = ~np.isnan(rewards) if scored is None else np.asarray(scored)
  return np.asarray(fn(rewards, scored))


def test_dead_groups_are_exactly_zero():
  # A01: the spread over the batch is 5.3 while nothing can be learnt.
  rewards = [[5] * 4, [-5] * 4, [1, 0, 0, 0]]
  for ddof, high, low in ((1, 1.5, -0.5), (0, 1.7321, -0.5774)):
    a = of(normalized(ddof), rewards)
    assert (a[:2] == 0).all()
    np.testing.assert_allclose(a[2], [high, low, low, low], atol=1e-4)
  assert (of(MEAN, rewards)[2] == [0.75, -0.25, -0.25, -0.25]).all()
  seen = metrics.reward_metrics(
    np.array(rewards, float),
    np.ones((3, 4), bool),
    np.array(rewards, float),
    np.zeros((3, 4, 0)),
    (),
    0,
  )
  assert abs(seen["group/frac_zero_std"] - 2 / 3) < 1e-12


@pytest.mark.parametrize("value,size", [(0.1, 7), (0.7, 7), (0.3, 6)])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-8, 0.0])
def test_equal_rewards_that_binary_cannot_hold(value, size, epsilon):
  # A02: the float32 mean of seven copies of 0.1 is not 0.1.
  rewards = np.full((1, size), value, np.float32)
  for ddof in (0, 1):
    assert (of(normalized(ddof, epsilon), rewards) == 0).all()
  assert (of(MEAN, rewards) == 0).all()
  # A residue of the last place in one row is no spread either.
  rewards[0, 0] = np.nextafter(rewards[0, 0], np.float32(1))
  assert (of(normalized(1, epsilon), rewards) == 0).all()


def test_small_rewards_with_a_real_spread_still_count():
  tiny = np.array([[1e-7, 0, 0, 0]])
  np.testing.assert_allclose(
    of(normalized(1, 0.0), tiny), of(normalized(1, 0.0), tiny * 1e7), rtol=1e-5
  )


def test_a_row_without_a_score_is_no_number():
  # A04: unscored is neither 0 nor 1; one scored row alone says nothing.
  nan = np.nan
  a = of(normalized(1), [[1, 1, 0, nan], [nan, 1, nan, nan], [nan] * 4])
  np.testing.assert_allclose(a[0], [0.57735, 0.57735, -1.15470, 0], atol=1e-5)
  assert (a[1:] == 0).all()
  a = of(MEAN, [[1, 1, 0, nan], [nan, 1, nan, nan], [nan] * 4])
  np.testing.assert_allclose(a[0], [1 / 3, 1 / 3, -2 / 3, 0], atol=1e-6)
  assert (a[1:] == 0).all()
  # What an unscored row holds is not read.
  b = of(MEAN, [[1, 1, 0, 1e30]], [[True, True, True, False]])
  assert (b == a[:1]).all()


def test_groups_are_rows_and_nothing_else():
  # A06, A07: by prompt, whatever else is in the batch.
  rewards = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0]]
  want = [
    [1.5, -0.5, -0.5, -0.5],
    [0.5, 0.5, 0.5, -1.5],
    [0.5, -1.5, 0.5, 0.5],
    [-0.5, -0.5, 1.5, -0.5],
  ]
  np.testing.assert_allclose(of(normalized(1), rewards), want, atol=1e-5)
  for i, row in enumerate(rewards):
    np.testing.assert_allclose(of(normalized(1), [row])[0], want[i], atol=1e-5)


@pytest.mark.parametrize(
  "right,ddof,plus,minus",
  [
    (1, 0, 2.6458, -0.3780),
    (1, 1, 2.4749, -0.3536),
    (2, 0, 1.7321, -0.5774),
    (2, 1, 1.6202, -0.5401),
    (4, 0, 1, -1),
    (4, 1, 0.9354, -0.9354),
  ],
)
def test_right_answers_out_of_eight(right, ddof, plus, minus):
  a = of(normalized(ddof), [[1] * right + [0] * (8 - right)])[0]
  np.testing.assert_allclose(a[:right], plus, atol=1e-4)
  np.testing.assert_allclose(a[right:], minus, atol=1e-4)


def test_epsilon_is_added_outside_the_root():
  a = of(normalized(0, 1e-4), [[1, 0]])
  np.testing.assert_allclose(a, [[0.9998, -0.9998]], atol=1e-6)


def test_presets_carry_the_documented_constants():
  rewards = np.array([[1, 0, 0, 1.0]], np.float32)
  scored = np.ones((1, 4), bool)
  by = {
    "grpo_sequence": of(MEAN, rewards),
    "grpo": of(normalized(1, 1e-6), rewards),
  }
  for name, want in by.items():
    made = algorithms.ALGORITHMS[name]()
    np.testing.assert_allclose(
      toys.jit(made.advantage.fn)(rewards, scored), want, atol=1e-6
    )
  # With equal weights everywhere, imitation pushes every scored row up.
  assert (np.asarray(advantages.ones(rewards, ~scored)) == 0).all()


SHAPE = (3, 5)
REWARDS = arrays.arrays(
  np.float32,
  SHAPE,
  elements=st.sampled_from([-1.0, 0.0, 0.1, 0.35, 1.0, 2.5]),
)
SCORED = arrays.arrays(np.bool_, SHAPE)
FORMS = [MEAN, normalized(0), normalized(1)]
FEW = settings(max_examples=25, deadline=None, derandomize=True)


@FEW
@given(REWARDS, SCORED, st.permutations(range(SHAPE[1])), st.integers(-8, 8))
def test_laws_of_a_group(rewards, scored, order, shift):
  count = scored.sum(1, keepdims=True)
  spread = np.array(
    [np.ptp(r[s]) if s.any() else 0 for r, s in zip(rewards, scored)]
  )
  for fn in FORMS:
    a = of(fn, rewards, scored)
    assert np.isfinite(a).all()
    assert (a[~scored] == 0).all()
    assert np.abs(a.sum(1)).max() < 1e-5
    assert ((a != 0).any(1) == (spread > 0)).all()
    np.testing.assert_allclose(
      of(fn, rewards + shift, scored), a, atol=2e-4 * (1 + abs(shift))
    )
    permuted = of(fn, rewards[:, order], scored[:, order])
    np.testing.assert_allclose(permuted, a[:, order], atol=1e-6)
    # Other groups do not matter.
    np.testing.assert_allclose(of(fn, rewards[::-1], scored[::-1]), a[::-1])
  for ddof in (0, 1):
    a = of(normalized(ddof), rewards, scored)
    squares = np.square(a).sum(1)
    want = np.where(spread > 0, count[:, 0] - ddof, 0)
    np.testing.assert_allclose(squares, want, rtol=2e-4)
  assert (metrics.mixed_groups(rewards, scored) == (spread > 0)).all()
  live = jax.device_get(toys.jit(advantages.informative)(rewards, scored))
  assert (live[:, 0] == (spread > 0)).all()


@FEW
@given(REWARDS, st.floats(0.1, 10))
def test_scale_of_the_rewards(rewards, scale):
  scale = np.float32(scale)
  scored = np.ones(SHAPE, bool)
  np.testing.assert_allclose(
    of(MEAN, rewards * scale, scored),
    of(MEAN, rewards, scored) * scale,
    rtol=1e-4,
    atol=1e-5,
  )
  np.testing.assert_allclose(
    of(normalized(1), rewards * scale, scored),
    of(normalized(1), rewards, scored),
    rtol=1e-3,
    atol=1e-4,
  )


def test_rewards_whose_squares_overflow():
  rewards = np.array([[-1e20, 0, 1e20, 0], [3e36, 3e36, 0, 0]], np.float32)
  scored = np.ones(rewards.shape, bool)
  got = advantages.group_normalized(rewards, scored, ddof=0, epsilon=1e-6)
  want = [[-(2**0.5), 0, 2**0.5, 0], [1, 1, -1, -1]]
  np.testing.assert_allclose(got, want, rtol=1e-5)
