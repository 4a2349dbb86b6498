import pytest

from grpo_jax.errors import UserError
from grpo_jax.tasks import base, make_task


def _example(question):
  return base.Example(base.question_id(question), question, "")


def _task(**splits):
  return base.Task("t", splits, lambda e, c: base.Reward(0.0))


def test_overlap_is_named():
  with pytest.raises(UserError, match=r"'2\+2 '.*train.*heldout"):
    _task(
      train=[_example("2+2"), _example("3+3")],
      tuning=[],
      heldout=[_example("2+2 ")],
    )


def test_splits():
  task = _task(train=[_example("a")], tuning=[], heldout=[_example("b")])
  assert task.split("train")[0].prompt == "a"
  with pytest.raises(UserError, match="did you mean heldout"):
    task.split("held_out")
  with pytest.raises(UserError, match="empty"):
    task.split("tuning")
  with pytest.raises(UserError, match="exactly"):
    _task(train=[_example("a")], test=[])


def test_question_id_is_stable():
  assert base.question_id("2+2") == "1acf86226c68c148"
  assert base.question_id(" 2+2\n") == base.question_id("2+2")
  assert base.question_id("2 +2") != base.question_id("2+2")
  base.question_id("\ud800")


def test_template():
  assert base.render("{x}{question}=", "1{y}") == "{x}1{y}="
  with pytest.raises(UserError, match="placeholder"):
    base.render("Q: {prompt}", "1")


def test_combine_with_abstaining_parts():
  # Faults A04: totals 1, 1, 0 and a row on which everything abstains.
  weights = {"f1": 1.0, "f2": 1.0}
  rows = zip([1, None, 0, None], [None, 1, 0, None])
  totals = [base.combine({"f1": a, "f2": b}, weights).total for a, b in rows]
  assert totals == [1, 1, 0, None]


@pytest.mark.parametrize(
  ("name", "settings", "message"),
  [
    ("word", {}, "did you mean words"),
    ("words", {"max_leters": 3}, r"did you mean max_letters.*teacher_accuracy"),
    ("words", {"max_letters": "3"}, "whole number"),
    ("words", {"max_letters": 3.5}, "whole number"),
    ("words", {"heldout": float("inf")}, "whole number"),
    ("words", {"tuning": True}, "whole number"),
    ("words", {"template": 3}, "a string"),
    ("jsonl", {}, "needs the setting 'train_path'"),
    ("jsonl", {"train_path": ""}, "needs the setting 'train_path'"),
  ],
)
def test_make_task_refuses(name, settings, message):
  with pytest.raises(UserError, match=message):
    make_task(name, **settings)


def test_make_task_builds():
  task = make_task("words", kind="sort", heldout=7)
  assert len(task.split("heldout")) == 7
