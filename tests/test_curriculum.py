"""The curriculum against populations of questions whose rates are known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from grpo_jax import config, curriculum, data
from grpo_jax.errors import UserError
from grpo_jax.tasks.base import Example

G = 8
FEW = settings(max_examples=40, deadline=None, derandomize=True)


def rule(questions, rest_below=0.5, half_life=8.0, group=G):
  return curriculum.Rule(questions, group, rest_below, half_life)


def stream(questions):
  rows = [Example(str(i), f"{i}>", "") for i in range(questions)]
  return data.Stream(rows, 0, "rl")


class Population:
  """Questions that are solved by chance, asked through a curriculum."""

  def __init__(self, rates, batch=16, **kwargs):
    self.rates = np.array(rates)
    self.batch, self.step = batch, 0
    self.stream = stream(len(rates))
    self.c = curriculum.begin(rule(len(rates), **kwargs))
    self.asked, self.mixed = [], []

  def run(self, epochs):
    """Asks for so many epochs; returns what was asked, in order."""
    start = len(self.asked)
    for _ in range(round(epochs * len(self.rates) / self.batch)):
      self.one_step()
    return np.concatenate(self.asked[start:])

  def one_step(self):
    now = self.step * self.batch
    chosen, self.c = self.c.draw(self.stream.order, now, self.batch)
    # A row depends on seed and draw alone, as in a run.
    rng = np.random.default_rng([7, self.step])
    rows = rng.random((self.batch, G)) < self.rates[chosen, None]
    success, scored = rows.astype(np.float32), np.ones_like(rows)
    self.c = self.c.observe(chosen, success, scored, now)
    self.asked.append(chosen)
    self.mixed += (rows.any(1) & ~rows.all(1)).tolist()
    self.step += 1


# The estimator


@pytest.mark.parametrize("s, n", [(0, 0), (8, 8), (0, 16), (3.2, 7.5), (1, 8)])
def test_the_chance_of_a_mixed_group_is_the_posterior_s(s, n):
  for group in (2, 8, 16):
    belief = stats.beta(s + 1, n - s + 1)
    want, _ = integrate.quad(
      lambda p, b=belief, g=group: b.pdf(p) * (1 - p**g - (1 - p) ** g), 0, 1
    )
    found = rule(1, 0.1, group=group).mixed_chance(s, n)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_a_beta_binomial_has_a_mixed_group_as_often():
  r = rule(1)
  for s, n in ((5, 8), (16, 16)):
    k = stats.betabinom(G, s + 1, n - s + 1)
    want = 1 - k.pmf(0) - k.pmf(G)
    np.testing.assert_allclose(r.mixed_chance(s, n), want)
  never = rule(1, 0.1, group=4).mixed_chance(0, 0)
  np.testing.assert_allclose(never, 3 / 5)


def test_evidence_halves_with_the_half_life_and_with_each_visit():
  c = curriculum.begin(rule(10, half_life=3.0))
  ones, scored = np.ones((1, G)), np.ones((1, G), bool)
  c = c.observe([4], ones, scored, 0)
  c = c.observe([4], 0 * ones, scored, 30)
  assert (c.successes[4], c.attempts[4]) == (G / 4, G / 4 + G)
  assert c.attempts.sum() == c.attempts[4] and c.seen[4] == 30


@FEW
@given(
  st.integers(2, 16),
  st.floats(0, 1),
  st.floats(0.1, 500),
  st.floats(0.05, 0.95),
  st.floats(0.5, 20),
)
def test_a_rest_ends_at_the_first_draw_that_forgetting_allows(
  group, rate, attempts, part, half_life
):
  r = rule(30, part * (group - 1) / (group + 1), half_life, group)
  s, n = np.array([rate * attempts]), np.array([attempts])
  (rest,) = r.rest(s, n)

  def chance(draws):
    left = 2.0 ** (-draws / (half_life * 30))
    return r.mixed_chance(s * left, n * left)[0]

  assert (rest == 0) == (chance(0) >= r.rest_below)
  if rest:
    assert chance(rest) >= r.rest_below > chance(rest - 1)


# Draws


def test_while_nobody_rests_it_is_the_stream():
  s = stream(40)
  c = curriculum.begin(rule(40, rest_below=0.0))
  for step in range(15):  # eight to a batch: epochs end with a batch
    chosen, c = c.draw(s.order, 8 * step, 8)
    plain, _ = s.batch(step, 8)
    assert [str(i) for i in chosen] == [x.id for x in plain]
    ones = np.ones((8, G))
    c = c.observe(chosen, ones, ones > 0, 8 * step)
  assert not c.metrics(8 * 15)["data/rested_frac"]


def put(c, **arrays):
  values = {**c.arrays(), **{k: np.array(v) for k, v in arrays.items()}}
  return curriculum.restored(c.rule, values)


@FEW
@given(
  st.integers(1, 12),
  st.integers(1, 30),
  st.integers(0, 40),
  st.lists(st.integers(0, 60), min_size=12, max_size=12),
  st.integers(0, 12),
)
def test_a_batch_is_full_and_asks_the_awake_first(n, size, now, wake, place):
  c = curriculum.begin(rule(n))
  c = put(c, wake=np.int32(wake[:n]), cursor=np.int32([3, min(place, n)]))
  chosen, after = c.draw(stream(n).order, now, size)
  assert len(chosen) == size
  counts = np.bincount(chosen, minlength=n)
  assert counts.max() - counts.min() <= 1  # all before any a second time
  awake = c.wake <= now
  if awake.any() and not awake.all() and size < n:
    assert counts[awake].min() >= counts[~awake].max()
  # Of those at rest, the first to wake.
  early = c.wake[~awake & (counts > counts.min())]
  left = c.wake[~awake & (counts == counts.min())]
  if size < n and len(early) and len(left):
    assert early.max() <= left.min()
  assert tuple(after.cursor) > tuple(c.cursor) or counts[~awake].any()
  np.testing.assert_array_equal(c.wake, wake[:n])  # a draw changes nothing


def test_a_pass_asks_each_of_the_awake_once():
  wake = np.where(np.arange(60) % 3, 0, 10_000).astype(np.int32)
  c, asked = put(curriculum.begin(rule(60)), wake=wake), []
  for step in range(20):  # two passes over the 40 awake
    chosen, c = c.draw(stream(60).order, 4 * step, 4)
    asked += chosen.tolist()
  want = np.flatnonzero(wake == 0).tolist()
  assert sorted(asked[:40]) == want == sorted(asked[40:])
  assert asked[:40] != asked[40:]


def test_everything_at_rest_goes_on():
  p = Population([1.0] * 10 + [0.0] * 10, batch=6)
  asked = p.run(60)
  assert not any(p.mixed)
  counts = np.bincount(asked, minlength=20)
  assert counts.min() > 0 and counts.max() <= counts.min() + 6
  assert p.c.metrics(p.step * 6)["data/rested_frac"] > 0.5


def test_a_step_that_is_abandoned_leaves_no_trace():
  p = Population(np.linspace(0, 1, 50))
  p.run(10)
  before = {k: v.copy() for k, v in p.c.arrays().items()}
  held = p.c
  p.run(2)
  for name, value in held.arrays().items():
    np.testing.assert_array_equal(value, before[name])


def test_stored_and_restored_it_draws_the_same():
  rates = np.random.default_rng(1).beta(0.2, 0.2, 90)
  whole, again = Population(rates), Population(rates)
  whole.run(30)
  again.run(12)
  arrays = {k: v.copy() for k, v in again.c.arrays().items()}
  assert sum(x.nbytes for x in arrays.values()) == 16 * 90 + 8
  again.c = curriculum.restored(again.c.rule, arrays)
  again.stream = stream(90)  # a new process has no order in its cache
  again.run(18)
  assert [x.tolist() for x in whole.asked] == [x.tolist() for x in again.asked]
  for name, value in whole.c.arrays().items():
    np.testing.assert_array_equal(value, again.c.arrays()[name])
    assert value.dtype == again.c.arrays()[name].dtype


# What it is for


def test_draws_go_to_questions_of_intermediate_rate():
  # 40 % always solved, 40 % never, the rest between.
  middle = np.linspace(0.15, 0.85, 80)
  rates = np.concatenate((np.ones(160), np.zeros(160), middle))
  p = Population(rates)
  p.run(20)
  late = p.run(20)
  between = (rates[late] > 0) & (rates[late] < 1)
  # Each of the 320 extreme ones is asked once in the rule's steady gap, or in
  # two passes over the awake, whichever is longer; the others share the rest.
  gap = p.c.rule.gaps(20)[-1]
  want = 1 - 320 / 400 / gap
  assert abs(between.mean() - want) < 0.05, (between.mean(), want)
  assert want > 0.75  # without it: 0.2
  chance = (1 - middle**G - (1 - middle) ** G).mean()
  mixed = np.mean(p.mixed[-len(late) :])
  factor = mixed / (0.2 * chance)  # over a curriculum that rests nobody
  assert abs(factor - want / 0.2) < 0.25, factor
  plain = Population(rates, rest_below=0.0)
  plain.run(20)
  assert abs(np.mean(plain.mixed) - 0.2 * chance) < 0.01


def test_the_always_solved_come_back_at_the_stated_rate():
  rates = np.concatenate((np.ones(100), np.full(300, 0.5)))
  p = Population(rates, batch=10)
  p.run(12)
  late = p.run(40)
  visits = np.bincount(late, minlength=400)[:100]
  gap = p.c.rule.gaps(20)[-1]
  assert visits.min() >= math.floor(40 / (gap + 1))
  # It is asked at the first pass after it wakes, and a pass over the awake is
  # shorter than an epoch.
  assert 40 / (gap + 1) < visits.mean() < 40 / gap + 1
  # The same by hand: evidence falls to G - 1 of G - 1, halves, and gains G.
  steady = 8 * math.log2(((G - 1) / 2 + G) / (G - 1))
  np.testing.assert_allclose(gap, steady, rtol=2e-3)


def test_a_question_that_is_forgotten_is_found_again():
  rates = np.concatenate((np.ones(300), np.full(100, 0.5)))
  p = Population(rates)
  p.run(20)
  p.rates[:50] = 0.4  # the policy forgot these
  found = p.run(8)  # one rest and a pass
  assert (np.bincount(found, minlength=400)[:50] > 0).all()
  late = np.bincount(p.run(8), minlength=400)
  assert late[:50].mean() > 0.9 * late[300:].mean()
  assert late[:50].mean() > 4 * late[50:300].mean()


def test_success_between_0_and_1_is_not_rested_while_it_differs():
  c = curriculum.begin(rule(4))
  scored = np.ones((4, G), bool)
  success = np.zeros((4, G), np.float32)
  success[0], success[1], success[2] = 1.0, 0.99, 0.5
  success[1, 0] = 0.98
  for now in (0, 4, 8):
    c = c.observe(np.arange(4), success, scored, now)
  assert (c.wake > 8).tolist() == [True, False, False, True]
  rate = c.successes / c.attempts
  np.testing.assert_allclose(rate, success.mean(1), rtol=1e-6)


def test_rows_without_a_score_are_no_evidence():
  c = curriculum.begin(rule(3))
  success = np.ones((3, G), np.float32)
  scored = np.zeros((3, G), bool)
  scored[1, :2] = True
  success[1, 2:] = 0  # what a row without a score holds says nothing
  success[2], scored[2] = np.nan, True
  c = c.observe(np.arange(3), success, scored, 0)
  assert c.attempts.tolist() == [0, 2, 0] and c.successes.tolist() == [0, 2, 0]
  assert not c.wake.any()


def test_out_of_range_success_is_cut_and_twins_are_taken_together():
  c = curriculum.begin(rule(3))
  success = np.full((4, G), 5.0, np.float32)
  success[3] = -5.0
  c = c.observe([0, 0, 1, 1], success, success > -9, 0)
  assert c.attempts.tolist() == [16, 16, 0]
  assert c.successes.tolist() == [16, 8, 0]
  assert (c.wake > 0).tolist() == [True, False, False]  # 1 of G, 0 of G: mixed


def test_metrics():
  c = curriculum.begin(rule(4))
  assert c.metrics(2) == {"data/epoch": 0.5, "data/rested_frac": 0.0}
  rows = np.array([[1.0] * G, [0.0] * 6 + [1.0] * 2])
  for now in (0, 2):
    c = c.observe([0, 1], rows, rows >= 0, now)
  found = c.metrics(4)
  assert found["data/rested_frac"] == 0.25 and found["data/epoch"] == 1.0
  np.testing.assert_allclose(found["data/pass_rate_mean"], (1 + 0.25) / 2)


def test_half_a_million_questions_cost_little():
  n = 500_000
  c, order = curriculum.begin(rule(n)), stream(1000).order
  big = np.concatenate([order(0) + 1000 * i for i in range(n // 1000)])
  chosen, c = c.draw(lambda epoch: big, 0, 512)
  c = c.observe(chosen, np.ones((512, G)), np.ones((512, G), bool), 0)
  assert sum(x.nbytes for x in c.arrays().values()) == 16 * n + 8


def test_refusals():
  with pytest.raises(UserError, match=r"rest_below 0.5.*0.333.*group of 2"):
    rule(9, group=2)
  with pytest.raises(UserError, match=r"rest_below -0\.1"):
    rule(9, rest_below=-0.1)
  with pytest.raises(UserError, match="half_life 0 must be above 0"):
    rule(9, half_life=0)
  c = {"curriculum": "passrate", "rest_below": 0.5, "half_life": 8.0}
  with pytest.raises(UserError, match="'passrate' must be none or pass_rate"):
    config.make_curriculum(c, 9, G)
  assert config.make_curriculum({**c, "curriculum": "none"}, 9, 1) is None
  made = config.make_curriculum({**c, "curriculum": "pass_rate"}, 9, G)
  assert made == rule(9)
