import numpy as np
import pytest

from grpo_jax.rewards.runner import score_batch
from grpo_jax.tasks.base import Completion, Example, Reward, Task, combine


def _task(reward, parts=()):
  train = [Example("a", "P1", "x"), Example("b", "P2", "y")]
  splits = {"train": train, "tuning": (), "heldout": ()}
  return Task("t", splits, reward, parts=parts)


def _run(reward, texts, parts=(), poll=None):
  """Scores `texts`, a list per prompt."""
  task = _task(reward, parts)
  rows = [[Completion(t, len(t), False) for t in group] for group in texts]
  return score_batch(task, task.split("train")[: len(texts)], rows, poll)


def test_each_completion_is_scored_against_its_own_prompt():
  # Faults A06: the reward depends on the prompt; 1,0,0,0 and 1,1,1,0.
  right = {("P1", "a"), ("P2", "b"), ("P2", "c"), ("P2", "d")}
  calls = []

  def reward(example, completion):
    calls.append((example.prompt, completion.text))
    return Reward(float((example.prompt, completion.text) in right))

  out = _run(reward, ["abcd", "bcda"])
  assert out.total.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
  assert out.total.dtype == np.float32 and out.scored.all()
  assert out.success.tolist() == out.total.tolist()
  assert calls == [("P1", t) for t in "abcd"] + [("P2", t) for t in "bcda"]
  assert out.parts.shape == (2, 4, 0)
  assert (out.errors, out.first_error) == (0, "")


def test_abstaining_parts():
  # Faults A04: f1 = 1,None,0,None and f2 = None,1,0,None.
  table = {"a": (1, None), "b": (None, 1), "c": (0, 0), "d": (None, None)}

  def reward(example, completion):
    f1, f2 = table[completion.text]
    return combine({"f1": f1, "f2": f2}, {"f1": 1.0, "f2": 1.0})

  out = _run(reward, ["abcd"], parts=("f1", "f2"))
  assert out.total.tolist() == [[1, 1, 0, 0]]
  assert out.scored.tolist() == [[True, True, True, False]]
  assert out.errors == 1 and "abstained" in out.first_error
  expected = [[1, np.nan], [np.nan, 1], [0, 0], [0, 0]]
  np.testing.assert_array_equal(out.parts[0], expected)


def test_success_parts_and_extracted_keep_their_places():
  def reward(example, completion):
    parts = {"b": 2.0, "a": np.float64(1)}
    return Reward(np.float32(0.5), True, parts, completion.text + "!")

  out = _run(reward, ["xy"], parts=("a", "b"))
  assert out.total.tolist() == [[0.5, 0.5]]
  assert out.success.tolist() == [[1, 1]]
  assert out.parts[0, 0].tolist() == [1, 2]
  assert out.extracted == [["x!", "y!"]]


BAD = {
  "none": lambda: None,
  "number": lambda: 1.0,
  "total none": lambda: Reward(None),
  "nan": lambda: Reward(float("nan")),
  "inf": lambda: Reward(float("inf")),
  "past float32": lambda: Reward(1e39),
  "past float64": lambda: Reward(10**400),
  "string": lambda: Reward("1"),
  "complex": lambda: Reward(1j),
  "nan success": lambda: Reward(1.0, float("nan")),
  "unknown part": lambda: Reward(1.0, parts={"z": 1.0}),
  "nan part": lambda: Reward(1.0, parts={"p": float("nan")}),
  "parts none": lambda: Reward(1.0, parts=None),
  "extracted": lambda: Reward(1.0, parts={"p": 1.0}, extracted=3),
  "raises": lambda: 1 / 0,
  "exits": lambda: exit(1),
  "recursion": lambda: BAD["recursion"](),
}


@pytest.mark.parametrize("how", list(BAD))
def test_failure_is_a_row_without_a_score(how):
  def reward(example, completion):
    if completion.text == "b":
      return BAD[how]()
    return Reward(1.0, parts={"p": 1.0})

  out = _run(reward, ["abc", "cab"], parts=("p",))
  assert out.scored.tolist() == [[True, False, True], [True, True, False]]
  assert out.total.tolist() == [[1, 0, 1], [1, 1, 0]]
  assert np.isfinite(out.success).all() and np.isfinite(out.parts).all()
  assert out.errors == 2
  assert "P1" in out.first_error and "\n" not in out.first_error


def test_keyboard_interrupt_passes():
  def reward(example, completion):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    _run(reward, ["a"])


def test_poll_stops_between_rows():
  class Stop(Exception):
    pass

  seen = []

  def poll():
    if len(seen) == 3:
      raise Stop

  def reward(example, completion):
    seen.append(completion.text)
    return Reward(0.0)

  with pytest.raises(Stop):
    _run(reward, ["ab", "cd"], poll=poll)
  assert seen == ["a", "b", "c"]


def test_ragged_groups_are_refused():
  with pytest.raises(ValueError, match=r"\[1, 2\]"):
    _run(lambda e, c: Reward(0.0), ["a", "bc"])
  task = _task(lambda e, c: Reward(0.0))
  with pytest.raises(ValueError, match="2 examples"):
    score_batch(task, task.split("train"), [[]])
