"""A curriculum by measured pass rate: which questions rest. No JAX, no files.

A group whose rows all succeed, or all fail, has no advantage and trains
nothing. Each training question therefore keeps counts of its own, S successes
in N attempts. A group with s successes in n scored rows, d epochs after the
question's last one, gives

    S ← S / 2 · 2^(-d / half_life) + s        N ← N / 2 · 2^(-d / half_life) + n

Each group weighs twice the one before, since the policy has moved in between,
and what is believed of a policy that is gone is forgotten. With a uniform prior
the chance that the question's next G completions are mixed is

    m(S, N) = 1 - E[p^G] - E[(1 - p)^G],    p ~ Beta(S + 1, N - S + 1)
    E[p^G] = Π_{i<G} (S + 1 + i) / (N + 2 + i)

    never asked                  m = (G - 1) / (G + 1)
    N of N right, or none right  m ≈ G / (N + G + 1): a half after one group

A question rests while m is below `rest_below`. Forgetting alone ends a rest:
with d, S and N shrink until m is above again, so nothing rests for ever. A
second group that says the same rests a question longer than the first. A
question whose last group was mixed does not rest.

An epoch is here as many draws as there are questions. Rest is counted in
draws, not in passes over what is awake, so that checks of resting questions
take the same share of the draws however few others are left.

What the field does: Kimi k1.5 (2501.12599) draws a problem in proportion to
1 - its success rate; DAPO (2503.14476) samples until enough groups are mixed
and drops the others; SPO (2509.13232) keeps a Beta tracker with forgetting for
each prompt. Here too all is measured in the run: no difficulty is given, and
nothing is inferred from one question about another.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from grpo_jax.errors import UserError

_LAST = np.iinfo(np.int32).max  # ordinals are int32


@dataclasses.dataclass(frozen=True)
class Rule:
  """When a question rests.

  Attributes:
    questions: in the training split; draws of an epoch.
    group: G, completions per question.
    rest_below: least chance of a mixed group at which a question is asked.
    half_life: epochs in which evidence halves, apart from that by a visit.

  Raises:
    UserError: numbers under which a question could rest for ever.
  """

  questions: int
  group: int
  rest_below: float
  half_life: float

  def __post_init__(self):
    if self.half_life <= 0:
      raise UserError(f"data.half_life {self.half_life} must be above 0 epochs")
    most = (self.group - 1) / (self.group + 1)
    if not 0 <= self.rest_below < most:
      raise UserError(
        f"data.rest_below {self.rest_below} must be 0 or more and below"
        f" {most:.3g}, the chance that a question never asked gives a mixed"
        f" group of {self.group}: else all rest; lower it, or raise"
        " sampling.group_size"
      )

  def mixed_chance(
    self, successes: np.ndarray, attempts: np.ndarray
  ) -> np.ndarray:
    """m of the module's formula.

    Args:
      successes: any shape, 0 or more, fractions allowed.
      attempts: the same shape, not below `successes`.
    """
    s, n = (np.float64(x)[..., None] for x in (successes, attempts))
    i = np.arange(self.group)
    right = np.prod((s + 1 + i) / (n + 2 + i), axis=-1)
    wrong = np.prod((n - s + 1 + i) / (n + 2 + i), axis=-1)
    return 1 - right - wrong

  def rest(self, successes: np.ndarray, attempts: np.ndarray) -> np.ndarray:
    """Draws until forgetting lifts m to `rest_below`; 0 where it is there.

    Args:
      successes: [K].
      attempts: [K].

    Returns:
      [K] int64, at most 64 half-lives.
    """
    out = np.zeros(len(attempts), np.int64)
    asleep = self.mixed_chance(successes, attempts) < self.rest_below
    s, n = (np.float64(x)[asleep] for x in (successes, attempts))
    low = np.zeros(len(n), np.int64)
    high = low + int(np.ceil(64 * self.half_life * self.questions))
    while (high - low > 1).any():  # m is below at `low`, not below at `high`
      middle = (low + high) // 2
      kept = self.kept(middle)
      below = self.mixed_chance(s * kept, n * kept) < self.rest_below
      low, high = np.where(below, middle, low), np.where(below, high, middle)
    out[asleep] = high
    return out

  def kept(self, draws: np.ndarray) -> np.ndarray:
    """The share of evidence that is left after draws without a visit."""
    return np.exp2(-np.float64(draws) / (self.half_life * self.questions))

  def gaps(self, visits: int) -> list[float]:
    """Epochs between the visits to a question that is always solved.

    While it is awake it is asked once an epoch, as if all others were.
    """
    n, out = 0.0, []
    for _ in range(visits):
      n = n / 2 + self.group
      draws = self.rest(np.array([n]), np.array([n]))
      draws = np.maximum(draws, self.questions)
      n *= float(self.kept(draws)[0])
      out.append(float(draws[0] / self.questions))
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Curriculum:
  """What a run knows of its questions, and where it reads their order.

  A value: `draw` and `observe` return another one, so a step that is abandoned
  leaves no trace. It is a function of past rewards and of nothing else.

  Attributes:
    rule: when a question rests.
    successes: [N] float32, S at the last visit.
    attempts: [N] float32, N at the last visit.
    seen: [N] int32, the first ordinal of the batch of that visit.
    wake: [N] int32, the first ordinal at which the question is not at rest.
    cursor: [2] int32, epoch of the order and place in it, to be read next.
  """

  rule: Rule
  successes: np.ndarray
  attempts: np.ndarray
  seen: np.ndarray
  wake: np.ndarray
  cursor: np.ndarray

  def draw(
    self, order: Callable[[int], np.ndarray], now: int, size: int
  ) -> tuple[np.ndarray, "Curriculum"]:
    """The questions of one batch.

    The order is read on from where the last batch stopped, and who rests is
    passed over, to the end of the next epoch at most. If that does not fill
    the batch, those at rest are asked early, the first to wake first. Within a
    batch nothing is asked twice before all has been asked.

    Args:
      order: epoch -> a permutation [N] of the questions' indices.
      now: ordinal of the batch's first draw.
      size: B.

    Returns:
      indices [B] int64, and the curriculum that has read them.
    """
    epoch, place = (int(x) for x in self.cursor)
    resting = self.wake > now
    batch: list[int] = []
    while len(batch) < size:
      free = np.ones(self.rule.questions, bool)
      for last in (False, True):
        rest_of_epoch = order(epoch)[place:]
        ready = (free & ~resting)[rest_of_epoch]
        (places,) = np.nonzero(ready)
        places = places[: size - len(batch)]
        batch += rest_of_epoch[places].tolist()
        free[rest_of_epoch[places]] = False
        if len(batch) == size:
          place += int(places[-1]) + 1
          break
        epoch, place = epoch + 1, 0
        if last:
          batch += self._early(free, size - len(batch)).tolist()
    cursor = np.array([epoch, place], np.int32)
    return np.array(batch), dataclasses.replace(self, cursor=cursor)

  def _early(self, free: np.ndarray, count: int) -> np.ndarray:
    """Of the questions not yet in the batch those that wake first."""
    (left,) = np.nonzero(free)
    return left[np.lexsort((self.seen[left], self.wake[left]))[:count]]

  def observe(
    self,
    indices: np.ndarray,
    success: np.ndarray,
    scored: np.ndarray,
    now: int,
  ) -> "Curriculum":
    """Takes in what the groups of one batch got.

    Rows without a score are no evidence. A success between 0 and 1 counts as
    that part of one; below 0 and above 1 it is cut to them.

    Args:
      indices: [B] from `draw`; the groups of one question are taken together.
      success: [B, G], the task's own measure.
      scored: [B, G] bool.
      now: as given to `draw`.
    """
    scored = scored & np.isfinite(success)
    value = np.where(scored, np.clip(success, 0, 1), 0).astype(np.float64)
    which, group = np.unique(indices, return_inverse=True)
    rows = np.repeat(group, success.shape[1])
    low, high = np.full(len(which), np.inf), np.full(len(which), -np.inf)
    seen = scored.ravel()
    np.minimum.at(low, rows[seen], success.ravel()[seen])
    np.maximum.at(high, rows[seen], success.ravel()[seen])
    kept = self.rule.kept(now - self.seen[which]) / 2
    s = self.successes[which] * kept + np.bincount(rows, value.ravel())
    n = self.attempts[which] * kept + np.bincount(rows, seen)
    # What a resumed run reads is float32: so is what is decided on.
    s, n = np.float32(np.minimum(s, n)), np.float32(n)
    rest = np.where(high > low, 0, self.rule.rest(s, n))
    return dataclasses.replace(
      self,
      successes=_put(self.successes, which, s),
      attempts=_put(self.attempts, which, n),
      seen=_put(self.seen, which, now),
      wake=_put(self.wake, which, np.minimum(now + rest, _LAST)),
    )

  def metrics(self, now: int) -> dict[str, float]:
    """What is logged, under the names of `metrics.TABLE`.

    Args:
      now: ordinal of the next draw.
    """
    asked = self.attempts > 0
    rates = self.successes[asked] / np.float64(self.attempts[asked])
    return {
      "data/epoch": now / self.rule.questions,
      "data/rested_frac": float((self.wake > now).mean()),
      # A mean of nothing is not 0.
      **({"data/pass_rate_mean": float(rates.mean())} if asked.any() else {}),
    }

  def arrays(self) -> dict[str, np.ndarray]:
    """The state as a checkpoint holds it: 16 bytes a question."""
    names = [x.name for x in dataclasses.fields(self)[1:]]
    return {name: getattr(self, name) for name in names}


def _put(array: np.ndarray, index: np.ndarray, values: object) -> np.ndarray:
  out = array.copy()
  out[index] = values
  return out


def begin(rule: Rule) -> Curriculum:
  """Nothing is known and nobody rests."""
  n = rule.questions
  return Curriculum(
    rule,
    successes=np.zeros(n, np.float32),
    attempts=np.zeros(n, np.float32),
    seen=np.zeros(n, np.int32),
    wake=np.zeros(n, np.int32),
    cursor=np.zeros(2, np.int32),
  )


def restored(rule: Rule, arrays: Mapping[str, np.ndarray]) -> Curriculum:
  """The curriculum that `Curriculum.arrays` is of."""
  return Curriculum(rule, **{k: np.asarray(v) for k, v in arrays.items()})
