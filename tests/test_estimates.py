"""Statistics of an evaluation against enumeration, loops and scipy."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from grpo_jax import estimates
from grpo_jax.estimates import Outcome, maj_at_k, paired

FEW = settings(max_examples=40, deadline=None, derandomize=True)
ROWS = st.lists(
  st.tuples(st.sampled_from("abcd0"), st.booleans()), min_size=1, max_size=8
)


def outcome(success, answers, scored=None, parts=None):
  success = np.asarray(success, np.float32)
  return Outcome(
    success=success,
    scored=np.ones(success.shape, bool) if scored is None else scored,
    lengths=np.full(success.shape, 3),
    truncated=np.zeros(success.shape, bool),
    answers=np.array(answers, object).reshape(success.shape),
    parts=parts or {},
  )


def vote(rows):
  """How right the winner of one vote is: of tied answers any, and of its
  completions any, with equal chances."""
  ballots = {}
  for answer, right in rows:
    if answer is not None:
      ballots.setdefault(answer, []).append(Fraction(int(right)))
  most = max(map(len, ballots.values()), default=0)
  tied = [sum(x) / len(x) for x in ballots.values() if len(x) == most]
  return sum(tied) / len(tied) if tied else Fraction(0)


@FEW
@given(ROWS)
@example([("a", True)])
@example([("0", True)] * 4)
@example([("a", True), ("a", False), ("b", True), ("0", False)])
def test_maj_at_k_is_the_mean_over_all_choices(rows):
  rows = [(None if a == "0" else a, right) for a, right in rows]
  n = len(rows)
  want = []
  for k in range(1, n + 1):
    choices = list(itertools.combinations(rows, k))
    want.append(float(sum(map(vote, choices)) / len(choices)))
  got = maj_at_k(*zip(*rows), range(1, n + 1))
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
  turned = maj_at_k(*zip(*rows[::-1]), range(1, n + 1))
  np.testing.assert_allclose(turned, got, rtol=0, atol=1e-12)


def test_what_a_vote_decides():
  assert maj_at_k("aab", [1, 1, 0], [3]) == [1]  # most voices win
  assert maj_at_k("aab", [0, 0, 1], [1, 3]) == [pytest.approx(1 / 3), 0]
  assert maj_at_k("ab", [1, 0], [2]) == [0.5]  # a tie is a fair draw
  assert maj_at_k([None, None, "a"], [0, 0, 1], [3]) == [1]  # None never wins
  assert maj_at_k([None] * 3, [0, 0, 0], [1, 2, 3]) == [0, 0, 0]
  assert maj_at_k("aa", [1, 0], [1, 2]) == [0.5, 0.5]  # one was cut off


def test_many_samples_stay_exact():
  # Two answers: the first wins with more voices than the second.
  n, m, k = 1024, 400, 255
  wins = sum(
    math.comb(m, x) * math.comb(n - m, k - x) for x in range(k // 2 + 1, k + 1)
  )
  got = maj_at_k(["a"] * m + ["b"] * (n - m), [1] * m + [0] * (n - m), [k])
  assert got[0] == pytest.approx(wins / math.comb(n, k), rel=1e-10)
  distinct = [str(i) for i in range(256)]  # every vote is a tie
  got = maj_at_k(distinct, [1] + [0] * 255, [128, 256])
  assert got == pytest.approx([1 / 256] * 2)


def test_every_number_is_a_mean_over_prompts_with_its_own_error():
  answers = [list("aabc"), list("abbb"), ["a", None, None, None]]
  success = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
  out = estimates.summary(outcome(success, answers))
  n, want = 4, {"pass_at_k": {}, "maj_at_k": {}}
  for k in (1, 2, 4):
    chosen = list(itertools.combinations(range(n), k))
    want["pass_at_k"][str(k)] = [
      np.mean([max(s[i] for i in c) for c in chosen]) for s in success
    ]
    want["maj_at_k"][str(k)] = [
      np.mean([float(vote([(a[i], s[i]) for i in c])) for c in chosen])
      for a, s in zip(answers, success)
    ]
  for kind, by_k in want.items():
    assert out[kind].keys() == by_k.keys()
    for k, values in by_k.items():
      assert out[kind][k] == pytest.approx(np.mean(values))
      error = np.std(values, ddof=1) / math.sqrt(3)
      assert out[f"{kind}_stderr"][k] == pytest.approx(error)
  assert out["mean"] == pytest.approx(out["pass_at_k"]["1"])
  assert (out["unanswered"], out["unscored"]) == (3, 0)


def test_the_error_is_clustered_by_prompt():
  # Copies of a completion say nothing new.
  once = outcome([[1], [0], [1], [0]], list("abcd"))
  often = outcome(np.repeat(once.success, 50, 1), np.repeat(once.answers, 50))
  assert often.stderr == pytest.approx(once.stderr)
  a, b = estimates.summary(once), estimates.summary(often)
  for kind in ("pass_at_k_stderr", "maj_at_k_stderr"):
    assert b[kind]["32"] == pytest.approx(a[kind]["1"])


def test_ks():
  assert estimates.ks_of(1) == [1]
  assert estimates.ks_of(2) == [1, 2]
  assert estimates.ks_of(6) == [1, 2, 4, 6]
  assert estimates.ks_of(300)[-2:] == [256, 300]


def test_one_prompt_one_sample_and_no_answer():
  one = estimates.summary(outcome([[1]], ["a"]))
  assert one["stderr"] is None and one["pass_at_k_stderr"] == {"1": None}
  assert one["maj_at_k"] == {"1": 1} and one["maj_at_k_stderr"] == {"1": None}
  none = estimates.summary(outcome([[1, 0], [0, 0]], [None] * 4))
  assert none["maj_at_k"] is None and none["maj_at_k_stderr"] is None
  assert none["mean"] == 0.25 and none["unanswered"] == 4


def test_unscored_and_fractional_success():
  # Not scored is no success, and votes; half a success is not right.
  scored = np.array([[True, False], [True, True]])
  out = estimates.summary(
    outcome([[1, 0], [0.5, 0.5]], ["a", "b", "c", "c"], scored)
  )
  assert out["mean"] == 0.5 and out["unscored"] == 1
  assert out["pass_at_k"] == {"1": 0.25, "2": 0.5}
  assert out["maj_at_k"] == {"1": 0.25, "2": 0.25}


def test_parts_are_means_where_they_spoke():
  nan = math.nan
  parts = {
    "sums": np.array([[1.0, 0.0], [nan, nan], [1.0, nan]]),
    "never": np.full((3, 2), nan),
  }
  out = outcome(np.ones((3, 2)), [None] * 6, parts=parts)
  got = estimates.summary(out)["parts"]
  assert got["sums"] == {"mean": 0.75, "stderr": 0.25, "prompts": 2}
  assert "never" not in got


def test_paired_against_scipy():
  rng = np.random.default_rng(0)
  first, second = rng.random((2, 30))
  got = paired(first, second)
  t = stats.ttest_rel(first, second)
  want = t.confidence_interval(0.95)
  assert got["difference"] == pytest.approx(np.mean(first) - np.mean(second))
  assert (got["low"], got["high"]) == pytest.approx((want.low, want.high))
  assert got["difference"] / got["stderr"] == pytest.approx(t.statistic)
  assert got["better"] + got["worse"] == 30 and got["equal"] == 0
  sign = stats.binomtest(got["better"], 30).pvalue
  assert got["p_value"] == pytest.approx(sign)


def test_paired_cancels_what_prompts_share():
  hard = np.linspace(0, 1, 20)
  got = paired(hard + 0.1, hard)
  assert got["stderr"] == pytest.approx(0, abs=1e-9)
  assert (got["better"], got["worse"], got["equal"]) == (20, 0, 0)
  assert paired(hard + 1e-15, hard)["equal"] == 20
  same = paired(hard, hard)
  assert same["p_value"] == 1 and (same["low"], same["high"]) == (0, 0)


def test_paired_of_few_prompts_has_no_nan():
  one = paired(np.array([1.0]), np.array([0.0]))
  assert one["difference"] == 1
  assert one["stderr"] is one["low"] is one["high"] is None
  none = paired(np.array([math.nan]), np.array([1.0]))
  assert none["difference"] is None and none["p_value"] == 1


@pytest.mark.parametrize("better", range(7))
def test_sign_test(better):
  want = stats.binomtest(better, 6).pvalue
  assert estimates.sign_test(better, 6 - better) == pytest.approx(want)


def test_compare_takes_the_ks_that_both_have():
  a = outcome([[1, 1, 0, 0], [0, 0, 0, 0]], list("aabbcccc"))
  b = outcome([[0, 1], [0, 0]], [None] * 4)
  got = estimates.compare(a, b)
  assert got["pass_at_k"].keys() == got["maj_at_k"].keys() == {"1", "2"}
  assert got["maj_at_k"]["1"]["better"] == 1  # the other's votes are all lost
  assert got["mean"]["difference"] == 0
  assert estimates.compare(b, b)["maj_at_k"] is None
