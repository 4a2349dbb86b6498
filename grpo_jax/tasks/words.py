"""Spelling real English words backwards, or their letters in order.

The word list ships with reasoning_gym. A policy of a hundred thousand
parameters learns it in under a minute, from a start that is right for a reason
that is said openly: see `words`.
"""

import functools
import importlib.util
import pathlib

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.named import suggest
from grpo_jax.tasks.base import (
  Completion,
  Example,
  Reward,
  Task,
  check_range,
  question_id,
  render,
)

KINDS = {
  "reverse": lambda word: word[::-1],
  "sort": lambda word: "".join(sorted(word)),
}


def words(
  kind: str = "reverse",
  min_letters: int = 3,
  max_letters: int = 5,
  teacher_accuracy: float = 0.3,
  tuning: int = 512,
  heldout: int = 512,
  template: str = "{question}>",
) -> Task:
  """Prompt: a word and a separator. Completion: its letters, then stop.

  The reward is 1 when the whole completion is the answer and stopped by
  itself, else 0. There are no part marks.

  The warm-up teacher is synthetic. With probability `teacher_accuracy` it
  writes the answer; otherwise it makes always the same mistake, the first two
  letters of the answer swapped. A policy that imitates it has the mistake as
  its mode and the right answer in its support, which is a start that
  reinforcement learning can overturn. A teacher that is always right would
  solve the task by imitation alone.

  The list is lower-case ASCII words without repeats. Splits come from a hash
  of each word: they depend on nothing but the word and the two sizes, so
  'reverse' and 'sort' hold out the same words.

  Args:
    kind: 'reverse' or 'sort'.
    min_letters: shortest word.
    max_letters: longest word.
    teacher_accuracy: share of right demonstrations, 0..1. The swap changes
      nothing where the first two letters are equal, so slightly more are
      right.
    tuning: words in the tuning split.
    heldout: words in the held-out split.
    template: text with `{question}` where the word goes.

  Raises:
    UserError: an unknown kind, a setting out of its range, or too few words.
  """
  if kind not in KINDS:
    raise UserError(
      f"task words: unknown kind {kind!r}{suggest(kind, KINDS)}; kinds are "
      f"{', '.join(KINDS)}"
    )
  check_range("words", "min_letters", min_letters, 1, whole=True)
  check_range("words", "max_letters", max_letters, min_letters, whole=True)
  check_range("words", "teacher_accuracy", teacher_accuracy, 0, 1)
  check_range("words", "tuning", tuning, 0, whole=True)
  check_range("words", "heldout", heldout, 0, whole=True)
  chosen = [w for w in _word_list() if min_letters <= len(w) <= max_letters]
  if tuning + heldout >= len(chosen):
    raise UserError(
      f"task words: tuning {tuning} + heldout {heldout} leave none of the "
      f"{len(chosen)} words of {min_letters} to {max_letters} letters to train "
      "on; lower them"
    )
  examples = tuple(
    Example(question_id(w), render(template, w), KINDS[kind](w)) for w in chosen
  )
  return Task(
    name=f"words/{kind}",
    splits={
      "heldout": examples[:heldout],
      "tuning": examples[heldout : heldout + tuning],
      "train": examples[heldout + tuning :],
    },
    reward=exact_and_stopped,
    demonstration=functools.partial(_teach, accuracy=teacher_accuracy),
  )


def exact_and_stopped(example: Example, completion: Completion) -> Reward:
  """1 when the whole text is the answer and it was not cut off, else 0."""
  right = completion.text == example.answer and not completion.truncated
  return Reward(float(right), float(right), {}, completion.text)


def _teach(
  example: Example, rng: np.random.Generator, *, accuracy: float
) -> str:
  answer = example.answer
  if rng.random() < accuracy:
    return answer
  return answer[1::-1] + answer[2:]


@functools.cache
def _word_list() -> tuple[str, ...]:
  """Words in the order of their hash, which is a fixed random order.

  A hash and not a generator: numpy may change its streams between versions,
  and a word must never move from the held-out to the training split.
  """
  # find_spec, because importing the package takes a second.
  spec = importlib.util.find_spec("reasoning_gym")
  if spec is None or not spec.submodule_search_locations:
    raise UserError(
      "the words task reads its list from reasoning_gym, which is not "
      "installed; pip install reasoning-gym"
    )
  folder = pathlib.Path(spec.submodule_search_locations[0])
  text = (folder / "data" / "words3to10.txt").read_text(encoding="utf-8")
  plain = {w for w in text.split() if w.isascii() and w.islower()}
  return tuple(sorted((w for w in plain if w.isalpha()), key=question_id))
