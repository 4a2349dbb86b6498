import numpy as np
import pytest

from grpo_jax.errors import UserError
from grpo_jax.tasks.base import Completion
from grpo_jax.tasks.words import words


def _ids(examples):
  return {e.id for e in examples}


def test_examples():
  task = words()
  every = [e for s in task.splits.values() for e in s]
  assert len(every) == len(_ids(every)) > 10_000
  for e in every:
    word = e.prompt[:-1]
    assert e.prompt[-1] == ">" and word.islower() and word.isascii()
    assert 3 <= len(word) <= 5 and e.answer == word[::-1]
  assert len(task.split("heldout")) == len(task.split("tuning")) == 512


def test_splits_do_not_move():
  reverse, sort = words(), words(kind="sort", teacher_accuracy=1)
  assert [e.prompt for e in reverse.split("heldout")[:3]] == [
    "idly>",
    "tubar>",
    "bleb>",
  ]
  assert _ids(reverse.split("heldout")) == _ids(sort.split("heldout"))
  fewer = words(heldout=100)
  assert _ids(fewer.split("heldout")) < _ids(reverse.split("heldout"))


def test_reward_is_exact_and_needs_a_stop():
  task = words()
  example = task.split("train")[0]
  answer = example.answer

  def total(text, truncated=False):
    reward = task.reward(example, Completion(text, 4, truncated))
    assert reward.total == reward.success
    return reward.total

  assert total(answer) == 1
  for wrong in ("", answer + " ", answer.upper(), answer[:-1], answer * 2):
    assert total(wrong) == 0
  assert total(answer, truncated=True) == 0
  for hostile in ("(" * 100_000, "9^9^9^9", "\x00", "\ud800"):
    assert total(hostile) == 0


def test_teacher():
  task = words(kind="sort", teacher_accuracy=0.3)
  rows = task.split("train")[:4000]
  right = 0
  for i, e in enumerate(rows):
    told = task.demonstration(e, np.random.default_rng(i))
    swapped = e.answer[1] + e.answer[0] + e.answer[2:]
    assert told in (e.answer, swapped)
    right += told == e.answer
  # 0.3, and the words on which the swap changes nothing.
  same = np.mean([e.answer[0] == e.answer[1] for e in rows])
  assert abs(right / 4000 - (0.3 + 0.7 * same)) < 0.03
  always = words(teacher_accuracy=1.0)
  e = always.split("train")[0]
  assert always.demonstration(e, np.random.default_rng(0)) == e.answer


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"kind": "revers"}, "did you mean reverse"),
    ({"min_letters": 6}, "max_letters 5 must be 6 or more"),
    ({"teacher_accuracy": 1.5}, "between 0 and 1"),
    ({"heldout": 20_000}, r"heldout 20000 leave none of the \d+ words"),
    ({"template": "spell:"}, "placeholder"),
  ],
)
def test_refuses(settings, message):
  with pytest.raises(UserError, match=message):
    words(**settings)
