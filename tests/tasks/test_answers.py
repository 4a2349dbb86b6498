"""Answers through the whole reward path: extracted, compared, in processes."""

import pathlib
import pickle
import re
import time

import pytest

from grpo_jax.errors import UserError
from grpo_jax.rewards.runner import Runner
from grpo_jax.tasks import answers
from grpo_jax.tasks.answers import AnswerReward, final_answer
from grpo_jax.tasks.base import Completion, Example, Task, question_id

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "mathematics.md"
YES = {"yes": 1.0, "no": 0.0}


def score(reward, pairs, **settings):
  """A batch of groups of one: (reference, completion) each."""
  examples = [
    Example(question_id(str(i)), "q", r) for i, (r, _) in enumerate(pairs)
  ]
  splits = {"train": examples, "tuning": (), "heldout": ()}
  task = Task("t", splits, reward.function(), parts=answers.PARTS)
  rows = [[Completion(text, len(text), False)] for _, text in pairs]
  with Runner(task, **settings) as runner:
    runner.check()
    return runner.score(examples, rows)


def decided():
  """Rows of the page's table: case, format, reference, completion, verdicts."""
  for line in PAGE.read_text().splitlines():
    if line.startswith("| TA"):
      case, *cells = [x.strip() for x in re.split(r" \| ", line.strip("| "))]
      how, reference, text = (
        x.strip("`").replace(" ⏎ ", "\n") for x in cells[:3]
      )
      yield case, how, reference, text, YES[cells[3]], YES[cells[4]]


def test_every_decided_case():
  pytest.importorskip("math_verify")
  rows = list(decided())
  assert {row[0] for row in rows} == {f"TA{i:02}" for i in range(1, 24)}
  for how in sorted({row[1] for row in rows}):
    chosen = [row for row in rows if row[1] == how]
    pairs = [row[2:4] for row in chosen]
    out = score(AnswerReward(how, "math", "strict"), pairs, workers=1)
    assert out.scored.all(), out.first_error
    parts = out.parts[:, 0].tolist()
    for row, total, (_, strict, lenient) in zip(chosen, out.total[:, 0], parts):
      assert (strict, lenient) == row[4:], row
      assert total == strict


def test_hostile_text_ends_in_time():
  pytest.importorskip("math_verify")
  slow = r"\boxed{f(x)+(x+1)^{300}(y+2)^{300}}"  # passes every guard
  texts = [
    *(r"\boxed{9**9**9**9}", r"\boxed{9^{9^{9^{9}}}}", slow),
    *(r"\boxed{" + "{" * 10_000 + "}" * 10_000 + "}", "x" * 10**6),
    *(r"\boxed{" + "1" * 10**6 + "}", r"\boxed{" * 10_000, "\x00\ud800", ""),
    *(r"\boxed{__import__('os').system('sleep 60')}", r"\boxed{f(x)+1}"),
  ]
  start = time.monotonic()
  reward = AnswerReward("boxed", "math", "strict")
  out = score(
    reward, [("f(x)+1", t) for t in texts], time_limit=12.0, workers=1
  )
  assert time.monotonic() - start < 120
  assert out.timed_out[:, 0].tolist() == [text == slow for text in texts]
  assert out.total[:, 0].tolist() == [0.0] * (len(texts) - 1) + [1.0]
  assert out.errors == 1


@pytest.mark.parametrize(
  ("text", "how", "strict", "lenient"),
  [
    ("#### 5", "after:####", 1, 1),
    (r"so \boxed{5}", "after:####", 0, 1),
    ("#### \n 5", "after:####", 0, 0),
    ("#### 6\n5", "after:####", 0, 0),
    ("<think>a</think><answer>5</answer>", "think_answer", 1, 1),
    ("Sure! <answer>5</answer> bye 6", "think_answer", 0, 1),
    ("<answer>5", "think_answer", 0, 0),
    ("The answer is 5.", "text", 0, 1),
    ("The answer is 5.\nCheck: 2 + 4 = 6", "text", 0, 0),
    ("5", "boxed", 0, 1),
    (r"\boxed{6} or 5", "boxed", 0, 0),
    (r"\boxed 5", "boxed", 0, 0),
    ("", "boxed", 0, 0),
    ("none", "text", 0, 0),
  ],
)
def test_strict_and_lenient(text, how, strict, lenient):
  example = Example("a", "q", "5")
  for grade, total in (("strict", strict), ("lenient", lenient)):
    reward = AnswerReward(how, "number", grade)
    assert reward.function() is reward  # fast: in this process
    out = reward(example, Completion(text, 1, False))
    assert out.total == out.success == total
    assert (out.parts["strict"], out.parts["lenient"]) == (strict, lenient)
    cut = reward(example, Completion(text, 1, True))
    assert cut.total == cut.parts["strict"] == cut.parts["lenient"] == 0


def test_what_follows_the_words():
  def final(text):
    return final_answer(text, "boxed", "math")

  assert (
    final("Thus the final answer is $\\frac{1}{2}$.\nBye 7") == r"$\frac{1}{2}$"
  )
  assert final("Answer: 3\nNo, the ANSWER IS: x = 4") == "x = 4"
  assert final("The answer is **7**.") == "7"
  assert final("**Answer:** -.5\n") == "-.5"
  assert final("an answer is") is None and final("no words, 3 of 4") == "4"
  assert len(final("answer is " + "x" * 10**6)) == answers.MOST_PHRASE


@pytest.mark.parametrize("text", ["answer " * 10**5, "answer is " * 10**5])
def test_words_are_found_quickly(text):
  start = time.process_time()
  final_answer(text, "boxed", "math")
  assert time.process_time() - start < 1


def test_refuses(monkeypatch):
  with pytest.raises(UserError, match="did you mean math"):
    AnswerReward("boxed", "maths", "strict")
  with pytest.raises(UserError, match="unknown grade 'strickt'"):
    AnswerReward("boxed", "exact", "strickt")
  with pytest.raises(UserError, match="unknown extraction rule"):
    AnswerReward("box", "exact", "strict")
  monkeypatch.setattr(answers.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(UserError, match=r"pip install -e '.\[math\]'"):
    AnswerReward("boxed", "math", "strict")


def test_a_worker_gets_what_it_needs():
  pytest.importorskip("math_verify")
  reward = AnswerReward("boxed", "math", "lenient")
  assert pickle.loads(pickle.dumps(reward)) == reward
  assert reward.function().cpu_bound
