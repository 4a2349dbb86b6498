"""Questions with reference answers: what files and data sets have in common.

How a row is read and checked, how one file is cut into splits, and how the
splits and a rule of comparison become a task.
"""

import dataclasses
import decimal
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.named import suggest
from grpo_jax.rewards import rules
from grpo_jax.tasks import answers
from grpo_jax.tasks.answers import AnswerReward
from grpo_jax.tasks.base import (
  Example,
  Task,
  answer_itself,
  check_range,
  no_demonstration,
  strings,
)

_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(UserError):
  """A reference answer that no completion could match."""


@dataclasses.dataclass(frozen=True)
class Reader:
  """Reads one row to (question, answer), or says what is wrong with it.

  Attributes:
    prompt_field: key of the question, a string.
    answer_field: key of the answer, a string or a number.
    answer_from: rule that reads the reference answer out of that field
      (`rules.make_extractor`); 'text' takes all of it.
    match: how it will be compared, a key of `answers.MATCHES`.
  """

  prompt_field: str
  answer_field: str
  answer_from: str
  match: str

  def __call__(self, row: Mapping[str, Any]) -> tuple[str, str]:
    """The question and its reference answer.

    Raises:
      UserError: a predicate to put after the row's name: 'lacks the field …';
        `Unreadable` where the row is whole but its answer cannot be read.
    """
    question, written = self.texts(row)
    answer = rules.make_extractor(self.answer_from)(written)
    if answer is None and written:
      raise Unreadable(
        f"has no answer by answer_from={self.answer_from!r} in"
        f" {self.answer_field!r}: {written[-60:]!r}; mend it or choose another"
        " rule"
      )
    if answer is None or not answers.readable(self.match, answer):
      raise Unreadable(
        f"has the answer {(answer or '')[:60]!r}, which match={self.match!r}"
        " cannot read: no completion could be right; mend it or choose another"
        " match"
      )
    return question, answer

  def texts(self, row: Mapping[str, Any]) -> tuple[str, str]:
    """The question and the whole text of the answer's field."""
    question = self._field(row, self.prompt_field, (str,), "a string")
    kinds = (str, int, float, decimal.Decimal)
    answer = self._field(row, self.answer_field, kinds, "a string or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
      raise UserError(f"has {answer} in {self.answer_field!r}")
    answer = str(answer).strip()
    if not question.strip():
      raise UserError(f"has an empty {self.prompt_field!r}")
    for name, text in (
      (self.prompt_field, question),
      (self.answer_field, answer),
    ):
      if _SURROGATE.search(text):
        raise UserError(f"has a lone surrogate in {name!r}")
    return question, answer

  def _field(self, row: Mapping, name: str, kinds: tuple, what: str) -> Any:
    if name not in row:
      raise UserError(
        f"lacks the field {name!r}{suggest(name, row)}; it has "
        f"{', '.join(map(repr, list(row)[:8])) or 'none'}"
      )
    value = row[name]
    # To Python a bool is an int; to the author of the file it is not.
    if isinstance(value, bool) or not isinstance(value, kinds):
      raise UserError(
        f"has a {type(value).__name__} in {name!r}, which must be {what}"
      )
    return value


def check_fractions(task: str, tuning: float, heldout: float) -> None:
  """Refuses shares that leave nothing to train on.

  Raises:
    UserError: one is not in [0, 0.9], or they add up to 1.
  """
  check_range(task, "tuning_fraction", tuning, 0, 0.9)
  check_range(task, "heldout_fraction", heldout, 0, 0.9)
  if tuning + heldout >= 1:
    raise UserError(
      f"task {task}: tuning_fraction {tuning} + heldout_fraction {heldout} "
      "leave nothing to train on; lower them"
    )


def cut(
  ids: Sequence[str], tuning: float, heldout: float, source: str
) -> dict[str, list[int]]:
  """Splits rows by their question's hash, read as a number in [0, 1).

  A question stays in its split when rows are added or moved, and rows that
  repeat a question stay together. Shares are met on average, not exactly.

  Args:
    ids: `question_id` of each row.
    tuning: share of the tuning split; 0: none is cut.
    heldout: the same.
    source: where the rows are from, for messages.

  Returns:
    places of the rows of each split.

  Raises:
    UserError: a split that is to be cut came out empty.
  """
  out: dict[str, list[int]] = {"heldout": [], "tuning": [], "train": []}
  for place, key in enumerate(ids):
    position = int(key, 16) / 16 ** len(key)
    if position < heldout:
      out["heldout"].append(place)
    elif position < heldout + tuning:
      out["tuning"].append(place)
    else:
      out["train"].append(place)
  shares = {"heldout": heldout, "tuning": tuning, "train": 1 - tuning - heldout}
  for name, share in shares.items():
    if share and not out[name]:
      raise UserError(
        f"{source}: none of its {len(ids)} questions fell into the {name} "
        f"split (share {share:.2g}); give that split its own source, or "
        "another fraction"
      )
  return out


def make(
  name: str,
  splits: Mapping[str, Sequence[Example]],
  reward: AnswerReward,
  stop: str | Sequence[str],
  notes: tuple[str, ...] = (),
) -> Task:
  """The task of questions with reference answers.

  With `reward.extract` 'text' the reference answer itself is the demonstration
  that a warm-up imitates; other rules have none.
  """
  whole = reward.extract == "text"
  return Task(
    name=name,
    splits=splits,
    reward=reward.function(),
    stop=strings(name, "stop", stop),
    parts=answers.PARTS,
    demonstration=answer_itself if whole else no_demonstration,
    notes=notes,
  )
