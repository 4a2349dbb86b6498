"""Statistics of an evaluation: what n completions of N prompts say. No JAX.

Every number is a mean over prompts of one estimate per prompt, and its
standard error is that of this mean: completions of one prompt share their
prompt and are no independent draws (errors clustered by prompt).

    mean      success of one completion
    pass@k    the chance that one of k completions is right
    maj@k     the chance that the answer most of k completions gave is right
    parts     each named part of the reward, where it spoke
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

LARGEST_K = 256  # of the powers of two at which pass@k and maj@k are given
MOST_SAMPLES = 1024  # C(n, k) of more does not fit a float64


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Completions of N prompts, n each.

  Attributes:
    success: [N, n], 0 where not scored: an answer nobody could score is no
      success, and the count is reported beside it.
    scored: [N, n] bool.
    lengths: [N, n] tokens.
    truncated: [N, n] bool.
    answers: [N, n] texts that the task extracted, None where it found none.
    parts: {name: [N, n]} of the reward, NaN where a part abstained.
  """

  success: np.ndarray
  scored: np.ndarray
  lengths: np.ndarray
  truncated: np.ndarray
  answers: np.ndarray
  parts: Mapping[str, np.ndarray]

  @property
  def samples(self) -> int:
    """n, completions per prompt."""
    return self.success.shape[1]

  @property
  def mean(self) -> float:
    """Mean success over all completions."""
    return float(self.success.mean())

  @property
  def stderr(self) -> float:
    """Standard error of the mean, clustered by prompt (samples share one)."""
    return clustered(self.success.mean(axis=1))[1]

  @property
  def voted(self) -> bool:
    """Whether any completion had an answer to vote with."""
    return any(a is not None for a in self.answers.flat)


def clustered(values: np.ndarray) -> tuple[float, float]:
  """Mean of one estimate per prompt, and its standard error.

  Args:
    values: [N].

  Returns:
    the mean, and std(ddof=1) / sqrt(N): NaN for one prompt, which has no
    spread.
  """
  mean = float(np.mean(values))
  if len(values) < 2:
    return mean, math.nan
  return mean, float(np.std(values, ddof=1) / math.sqrt(len(values)))


def pass_at_k(samples: int, correct: int, k: int) -> float:
  """1 - C(n-c, k)/C(n, k): unbiased for the chance that one of k succeeds.

  Args:
    samples: n, at least k.
    correct: c of them succeeded.
    k: draws.
  """
  if samples - correct < k:
    return 1.0
  terms = np.arange(samples - correct + 1, samples + 1)
  return float(1.0 - np.prod(1.0 - k / terms))


def maj_at_k(
  answers: Sequence[str | None], right: Sequence[float], ks: Sequence[int]
) -> list[float]:
  """The chance that a majority vote among k of n completions is right.

  The expectation, exact up to rounding, over all C(n, k) choices of k and
  over everything that is left to chance:

  - A completion votes for its answer as the task extracted it; one without an
    answer (None) does not vote. Without any vote the majority is not right.
  - Of answers with equally many votes, the winner is drawn uniformly.
  - An answer is as right as the completions that gave it, on average. Equal
    answers may differ in success (one was cut off by the length limit).

  So the order of the completions does not matter, and maj@1 is the share of
  completions that are right and have an answer.

  Args:
    answers: n of them.
    right: n values, 0 or 1.
    ks: each from 1 to n, n at most `MOST_SAMPLES`, those below n at most
      `LARGEST_K`.
  """
  n = len(answers)
  given: dict[str, list[float]] = {}
  for answer, value in zip(answers, right):
    if answer is not None:
      given.setdefault(answer, []).append(float(value))
  votes = [(len(x), sum(x) / len(x)) for x in given.values()]
  fewer = [k for k in ks if k < n]
  wins = _wins(votes, n, max(fewer)) if fewer and votes else np.zeros(n)
  return [
    float(wins[k]) / math.comb(n, k) if k < n else _winner(votes) for k in ks
  ]


def _winner(votes: list[tuple[int, float]]) -> float:
  """How right the winner of a vote among all completions is."""
  most = max((m for m, _ in votes), default=0)
  tied = [share for m, share in votes if m == most]
  return sum(tied) / len(tied) if tied else 0.0


def _wins(votes: list[tuple[int, float]], n: int, top: int) -> np.ndarray:
  """Σ over all choices of k of n, of how right each one's winner is: [top + 1].

  By generating functions. For each number v of votes that a winner may have,
  the coefficient of x^k y^j in the product over answers with m completions of

      Σ_{u<v} C(m, u) x^u + C(m, v) x^v y

  counts the choices of k in which j answers have v votes and none has more.
  All terms are positive, so nothing cancels.

  Args:
    votes: (m, share of m that is right) of each answer.
    n: completions, those without an answer included.
    top: largest k.
  """
  total = np.zeros(top + 1)
  for v in range(1, min(max(m for m, _ in votes), top) + 1):
    able = [(m, share) for m, share in votes if m >= v]
    rest = n - sum(m for m, _ in able)  # these can neither win nor tie
    ties = min(len(able), top // v)
    # [count of choices, sum over them of the tied answers' shares][j][k]
    state = np.zeros((2, ties + 1, top + 1))
    state[0, 0] = _binomials(rest, top)
    for m, share in able:
      ways = _binomials(m, v)
      new = np.zeros_like(state)
      for u in range(v):
        new[..., u:] += ways[u] * state[..., : top + 1 - u]
      tied = ways[v] * state[:, :-1, : top + 1 - v]
      tied[1] += share * tied[0]
      new[:, 1:, v:] += tied
      state = new
    for j in range(1, ties + 1):
      total += state[1, j] / j
  return total


def _binomials(m: int, top: int) -> np.ndarray:
  """C(m, 0), ..., C(m, top)."""
  return np.array([math.comb(m, u) for u in range(top + 1)], np.float64)


def ks_of(samples: int) -> list[int]:
  """The k of pass@k and maj@k: powers of two, and all samples."""
  powers = [2**i for i in range(LARGEST_K.bit_length())]
  return sorted({k for k in powers if k < samples} | {samples})


def by_prompt(
  outcome: Outcome, ks: Sequence[int] = ()
) -> dict[str, dict[str, np.ndarray]]:
  """The estimates of each prompt: {kind: {which: [N]}}.

  Kinds are 'mean', 'pass_at_k', 'maj_at_k' and 'parts'. A completion is right
  for pass@k and maj@k where its success is 1 or more. A part is NaN for a
  prompt on which it never spoke.

  Args:
    outcome: of N prompts.
    ks: of pass@k and maj@k; none: those of `ks_of`.
  """
  right = outcome.success >= 1
  n, ks = outcome.samples, ks or ks_of(outcome.samples)
  passes = [[pass_at_k(n, int(c), k) for k in ks] for c in right.sum(axis=1)]
  votes = [
    maj_at_k(list(a), list(r), ks) for a, r in zip(outcome.answers, right)
  ]

  def columns(rows: list[list[float]]) -> dict[str, np.ndarray]:
    return {str(k): np.array(x) for k, x in zip(ks, zip(*rows))}

  return {
    "mean": {"": outcome.success.mean(axis=1, dtype=np.float64)},
    "pass_at_k": columns(passes),
    "maj_at_k": columns(votes),
    "parts": {name: _spoken(x) for name, x in outcome.parts.items()},
  }


def _spoken(values: np.ndarray) -> np.ndarray:
  """Means of rows without their NaN: [N, n] -> [N]; NaN of a row of NaN."""
  spoke = ~np.isnan(values)
  count = spoke.sum(axis=1)
  total = np.where(spoke, values, 0.0).sum(axis=1, dtype=np.float64)
  return np.where(count, total / np.maximum(count, 1), math.nan)


def summary(outcome: Outcome) -> dict[str, Any]:
  """What is reported of one way of sampling, in JSON's own types.

  A standard error of one prompt is None. So is maj@k where no completion had
  an answer: a task that extracts nothing holds no vote, which is not a vote
  that is always lost. A part that never spoke is left out.
  """
  values = by_prompt(outcome)
  out = {
    "mean": outcome.mean,
    "stderr": _number(outcome.stderr),
    "prompts": outcome.success.shape[0],
    "samples": outcome.samples,
    "unscored": int((~outcome.scored).sum()),
    "unanswered": sum(a is None for a in outcome.answers.flat),
    "length_mean": float(outcome.lengths.mean()),
    "truncated_frac": float(outcome.truncated.mean()),
  }
  for kind in ("pass_at_k", "maj_at_k"):
    pairs = {k: clustered(x) for k, x in values[kind].items()}
    known = kind == "pass_at_k" or outcome.voted
    out[kind] = {k: mean for k, (mean, _) in pairs.items()} if known else None
    errors = {k: _number(error) for k, (_, error) in pairs.items()}
    out[f"{kind}_stderr"] = errors if known else None
  out["parts"] = {}
  for name, x in values["parts"].items():
    x = x[~np.isnan(x)]
    if not len(x):
      continue
    mean, error = clustered(x)
    out["parts"][name] = {
      "mean": mean,
      "stderr": _number(error),
      "prompts": len(x),
    }
  return out


def _number(value: float) -> float | None:
  """JSON has no NaN."""
  return None if math.isnan(value) else value


def paired(first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
  """The difference first - second on the same prompts.

  What the prompts have in common (some are hard) cancels in the difference of
  each, so its standard error is smaller than two separate ones suggest.

  Args:
    first: [N] estimates, NaN where there is none.
    second: [N], of the same prompts in the same order.

  Returns:
    difference: its mean over the prompts that both have.
    stderr: std(ddof=1) of the prompts' differences / sqrt(N).
    low, high: its 95 % interval, difference ± t(0.975, N-1) stderr.
    better, worse, equal: prompts on which the first is so.
    p_value: of the two-sided sign test: how often a fair coin, thrown for
      each prompt that differs, would be as uneven as better against worse.
      For 0 and 1 it is McNemar's exact test.
    stderr, low and high are None for one prompt, difference too for none.
  """
  change = first - second
  change = change[~np.isnan(change)]
  n = len(change)
  better = int((change > 1e-9).sum())  # below that is rounding
  worse = int((change < -1e-9).sum())
  mean, error = clustered(change) if n else (math.nan, math.nan)
  width = special.stdtrit(n - 1, 0.975) * error if n > 1 else math.nan
  return {
    "difference": _number(mean),
    "stderr": _number(error),
    "low": _number(mean - width),
    "high": _number(mean + width),
    "better": better,
    "worse": worse,
    "equal": n - better - worse,
    "p_value": sign_test(better, worse),
  }


def sign_test(better: int, worse: int) -> float:
  """Two-sided exact sign test: min(1, 2 P(X <= min)), X ~ Bin(N, 1/2)."""
  n = better + worse
  tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
  return min(1.0, 2 * tail / 2**n)


def compare(first: Outcome, second: Outcome) -> dict[str, Any]:
  """`paired`, of every number that two outcomes of the same prompts share.

  Returns:
    {'mean': …, 'pass_at_k': {k: …}, 'maj_at_k': {k: …} or None, 'parts': …}
  """
  a, b = by_prompt(first), by_prompt(second)
  out: dict[str, Any] = {
    kind: {x: paired(a[kind][x], b[kind][x]) for x in a[kind] if x in b[kind]}
    for kind in a
  }
  out["mean"] = out["mean"][""]
  if not (first.voted or second.voted):
    out["maj_at_k"] = None
  return out
