r"""The reward of a question with a reference answer: extract, then compare.

Two gradings of every completion. *Strict* reads the answer in the asked-for
format only. *Lenient* also takes a final answer that stands outside it, where
the format was not begun at all. A run trains on one; both are reported, so
that a policy that learns the format and one that learns to answer differ.
"""

import dataclasses
import importlib.util
import re

from grpo_jax.errors import UserError
from grpo_jax.named import suggest
from grpo_jax.rewards import expressions, mathematics, rules
from grpo_jax.tasks.base import Completion, Example, Reward, RewardFunction

MATCHES = {**rules.MATCHES, "math": mathematics.equal}
GRADES = ("strict", "lenient")
PARTS = ("answered", *GRADES)

_PHRASE = re.compile(
  r"\b(?:answer|result)(?:\s+is|\s*[:=])\s*:?\s*", re.IGNORECASE
)
MOST_PHRASE = 200  # characters of an answer after such words


def readable(match: str, reference: str) -> bool:
  """Whether `reference` can be matched at all; to be checked at start-up.

  Args:
    match: a key of `MATCHES`.
    reference: a reference answer.
  """
  if match == "math":
    return mathematics.readable(reference)
  return rules.readable(match, reference)


@dataclasses.dataclass(frozen=True)
class AnswerReward:
  """1 where the extracted answer matches, else 0; never for a truncated text.

  Parts: 'answered', whether the format's answer was found at all; 'strict' and
  'lenient', the reward under each grading.

  Attributes:
    extract: the asked-for format (`rules.make_extractor`).
    match: a key of `MATCHES`.
    grade: which of `GRADES` is the reward.

  Raises:
    UserError: a value that is none of those, or a library that is missing.
  """

  extract: str
  match: str
  grade: str

  def __post_init__(self):
    rules.make_extractor(self.extract)
    for what, value, known in (
      ("match", self.match, MATCHES),
      ("grade", self.grade, GRADES),
    ):
      if value not in known:
        raise UserError(
          f"unknown {what} {value!r}{suggest(value, known)}; there are"
          f" {', '.join(known)}"
        )
    if self.match == "math" and not importlib.util.find_spec("math_verify"):
      raise UserError(
        "match='math' needs the math-verify library; pip install -e '.[math]'"
      )

  def __setstate__(self, state: dict):
    self.__dict__.update(state)
    if self.match == "math":  # in a worker, before its first answer
      expressions.load()

  def __call__(self, example: Example, completion: Completion) -> Reward:
    text, reference = completion.text, example.answer
    equal = MATCHES[self.match]
    answer = rules.make_extractor(self.extract)(text)
    strict = answer is not None and equal(answer, reference)
    final, lenient = answer, strict
    if not strict:
      final = final_answer(text, self.extract, self.match)
      new = final is not None and final != answer
      lenient = new and equal(final, reference)
    grades = {
      "strict": float(strict and not completion.truncated),
      "lenient": float(lenient and not completion.truncated),
    }
    total = grades[self.grade]
    parts = {"answered": float(answer is not None), **grades}
    shown = answer if self.grade == "strict" else final
    return Reward(total, total, parts, shown)

  def function(self) -> "RewardFunction | AnswerReward":
    """As a task's reward: mathematics in a process that can be killed."""
    if self.match != "math":
      return self
    return RewardFunction("answer", self, cpu_bound=True)


def final_answer(text: str, extract: str, match: str) -> str | None:
  r"""The answer that a lenient reader takes a text to give, or None.

  Where the text has begun the asked-for format, that decides, as in strict
  reading: an unfinished last `\boxed{` has no answer. Else a box; else, unless
  numbers are compared, what follows the last "answer is" or "answer:" on its
  line; else the last number.

  Args:
    text: a completion.
    extract: the asked-for format (`rules.make_extractor`).
    match: how it will be compared.
  """
  if extract.startswith("after:") and extract[len("after:") :] in text:
    return rules.make_extractor(extract)(text)
  if extract == "think_answer" and "<answer>" in text:
    answer, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
    return answer.strip() or None if closed else None
  if "\\boxed" in text:
    return rules.last_boxed(text)
  if match != "number":
    ends = [found.end() for found in _PHRASE.finditer(text)]
    if ends:
      line = text[ends[-1] : ends[-1] + MOST_PHRASE].split("\n", 1)[0]
      # Chat models print it bold, or the words before it: `**Answer:** 7`.
      return line.lstrip(" \t*").rstrip(" \t\r*.") or None
  return rules.last_number(text)
