import pickle

import pytest

from grpo_jax.errors import UserError
from grpo_jax.tasks.base import Completion
from grpo_jax.tasks.reasoning_gym import reasoning_gym, safe_to_verify

SMALL = {"size": 40, "tuning": 10, "heldout": 10}


def _reward(task, text, truncated=False, index=0):
  example = task.split("train")[index]
  return task.reward(example, Completion(text, len(text), truncated))


def test_part_marks_are_no_success():
  task = reasoning_gym(**SMALL)
  answer = task.split("train")[0].answer
  right = _reward(task, f" {answer}\n")
  assert (right.total, right.parts["score"], right.extracted) == (1, 1, answer)
  wordy = _reward(task, f"The answer is {answer}")
  assert wordy.total == wordy.success == 0 and 0 < wordy.parts["score"] < 0.99
  assert _reward(task, "").total == 0 and _reward(task, "").extracted is None
  assert _reward(task, answer, truncated=True).total == 0


def test_splits_are_disjoint_and_do_not_depend_on_the_training_size():
  task = reasoning_gym(**SMALL)
  larger = reasoning_gym(**{**SMALL, "size": 60})
  for split in ("heldout", "tuning"):
    assert task.split(split) == larger.split(split)
  ids = [e.id for s in task.splits.values() for e in s]
  assert len(ids) == len(set(ids)) == 60


def test_too_few_questions():
  options = '{"max_terms": 2, "max_digits": 1}'
  with pytest.raises(UserError, match=r"gave 164 distinct .* train split"):
    reasoning_gym(options=options, size=500)


def test_verifier_that_raises_is_not_a_score(monkeypatch):
  from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

  def broken(self, answer, entry):
    raise ZeroDivisionError("in the verifier")

  monkeypatch.setattr(ChainSumDataset, "score_answer", broken)
  reward = _reward(reasoning_gym(**SMALL), "1")
  assert reward.total is None and "ZeroDivisionError" in reward.error


def test_model_text_is_never_evaluated(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  attacks = (
    "__import__('os').system('touch PWNED')",
    "[[1,2],[open('PWNED','w'),3]]",
    "(lambda: open('PWNED', 'w'))()",
    "9**9**9**9",
  )
  few = {"size": 2, "tuning": 1, "heldout": 1}
  for dataset in ("puzzle24", "spiral_matrix", "polynomial_multiplication"):
    task = reasoning_gym(dataset=dataset, **few)
    assert [_reward(task, a).total for a in attacks] == [0] * 4
    assert _reward(task, "(" * 100_000).total == 0
  assert not list(tmp_path.iterdir())


def test_plain_answers_reach_their_verifier():
  few = {"size": 20, "tuning": 1, "heldout": 1}
  names = ("spiral_matrix", "polynomial_multiplication", "simple_integration")
  for dataset in names:
    task = reasoning_gym(dataset=dataset, **few)
    for i, e in enumerate(task.split("train")):
      assert safe_to_verify(dataset, e.answer), (dataset, e.answer)
      if i < 3:
        assert _reward(task, e.answer, index=i).total == 1
  assert safe_to_verify("puzzle24", "(6 + 2) * 3.0 / 1")
  assert not safe_to_verify("puzzle24", "9**99")
  assert safe_to_verify("simple_integration", "x**(3/2)/2 + sin(x)**2 + C")
  assert not safe_to_verify("simple_integration", "((9)**99)**99")
  assert not safe_to_verify("simple_integration", "x.__class__")
  assert not safe_to_verify("simple_integration", "exit(1)")


def test_task_can_be_sent_to_another_process():
  task = pickle.loads(pickle.dumps(reasoning_gym(**SMALL)))
  assert _reward(task, task.split("train")[0].answer).total == 1


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"dataset": "chainsum"}, "did you mean chain_sum"),
    ({"options": "{'a': 1}"}, "is not JSON"),
    ({"options": "[1]"}, "must be a JSON object"),
    ({"options": '{"terms": 1}'}, "did you mean min_terms or max_terms"),
    ({"options": '{"seed": 1}'}, "no option 'seed'"),
    ({"options": '{"min_terms": 9}'}, "max_terms must be >= min_terms"),
    ({"extract": "box"}, "unknown extraction rule"),
    ({"success_from": 0}, "success_from"),
    ({"stop": (1,)}, "takes strings"),
  ],
)
def test_refuses(settings, message):
  with pytest.raises(UserError, match=message):
    reasoning_gym(**{**SMALL, **settings})


def test_no_split_gets_the_questions_that_repeat():
  options = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'
  task = reasoning_gym(
    options=options, size=2048, question_regex=r"(\d+ [+-] \d+) ="
  )

  def easy(split):
    short = [len(x.prompt) <= len("1 + 1\n") for x in task.splits[split]]
    return sum(short) / len(short)

  # A generator gives a quarter of these; there are 162 in all.
  assert easy("heldout") == pytest.approx(easy("train"), abs=0.07)


def test_a_larger_size_leaves_the_other_splits():
  one, two = (reasoning_gym(size=n, tuning=20, heldout=30) for n in (40, 400))
  for split in ("tuning", "heldout"):
    assert one.splits[split] == two.splits[split]
  assert one.splits["train"] == two.splits["train"][:40]
