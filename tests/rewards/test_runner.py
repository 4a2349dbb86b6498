import asyncio
import contextlib
import dataclasses
import threading
import time

import hostile
import numpy as np
import pytest

from grpo_jax.errors import UserError
from grpo_jax.rewards.runner import Runner, score_batch
from grpo_jax.tasks.base import (
  Completion,
  Example,
  Reward,
  RewardFunction,
  Task,
  combine,
)


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
  "list": lambda: [1.0, 0.0],
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


def test_poll_stops_a_hang_in_this_process():
  class Stop(BaseException):
    pass

  start = time.monotonic()

  def poll():
    if time.monotonic() - start > 0.1:
      raise Stop

  def reward(example, completion):
    if completion.text == "b":
      time.sleep(1)
    return Reward(0.0)

  with pytest.raises(Stop):
    _run(reward, ["ab", "cd"], poll=poll)
  assert time.monotonic() - start < 0.5


def _run_with(reward, text, limit=0.3, poll=None, success=""):
  """Scores one group of one-letter completions."""
  splits = {"train": [Example("a", "P", "x")], "tuning": (), "heldout": ()}
  task = Task("t", splits, reward, success=success)
  rows = [[Completion(c, 1, False) for c in text]]
  with Runner(task, limit, workers=2) as runner:
    return runner.score(splits["train"], rows, poll)


def _threads():
  return [t for t in threading.enumerate() if "rewards" in t.name]


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_a_hang_in_this_process_costs_its_row(how):
  def reward(example, completion):
    while completion.text == "b" and how == "spin":
      pass
    if completion.text == "b":
      time.sleep(0.6)
    return Reward(1.0)

  out = _run_with(reward, "abcb", limit=0.2)
  assert out.scored.tolist() == [[True, False, True, False]]
  assert out.timed_out.tolist() == [[False, True, False, True]]
  end = time.monotonic() + 3
  while _threads() and time.monotonic() < end:
    time.sleep(0.02)
  assert not _threads(), "a thread that was left behind goes on"


async def _slow(example, completion):
  text = completion.text
  if text == "h":
    await asyncio.sleep(1000)
  if text == "s":
    with contextlib.suppress(BaseException):
      await asyncio.sleep(1000)
    await asyncio.sleep(3)
  if text == "b":
    time.sleep(1.2)
  if text == "c":
    raise asyncio.CancelledError
  if text == "k":
    raise KeyboardInterrupt
  if text == "t":
    raise TimeoutError
  await asyncio.sleep(0.05)
  return {"n": None, "f": float("nan")}.get(text, 1)


def test_async_functions_wait_together():
  start = time.monotonic()
  out = _run_with(_slow, "x" * 60, limit=10.0)
  assert out.scored.all() and time.monotonic() - start < 2  # 3 s in a row


def test_async_failures_cost_their_rows():
  out = _run_with(_slow, "xhsxctknfx", limit=0.3)
  assert out.scored.tolist() == [[c == "x" for c in "xhsxctknfx"]]
  assert out.timed_out.tolist() == [[c in "hs" for c in "xhsxctknfx"]]
  assert out.total.tolist() == out.scored.tolist()


def test_a_blocked_event_loop_costs_the_row_that_blocks_it():
  out = _run_with(_slow, "xxbxxh", limit=0.3)
  assert out.scored.tolist() == [[True, True, False, True, True, False]]
  assert out.timed_out.tolist() == [[False, False, True, False, False, True]]


def test_an_event_loop_outlives_a_batch():
  loops = []

  async def reward(example, completion):
    loops.append(asyncio.get_running_loop())
    return 1.0

  task = _task(reward)
  rows = [[Completion("a", 1, False)]]
  with Runner(task) as runner:
    for _ in range(2):
      assert runner.score(task.split("train")[:1], rows).total == 1
  assert loops[0] is loops[1]


def test_a_coroutine_of_a_plain_function_is_no_score():
  out = _run_with(lambda e, c: _slow(e, c), "x")
  assert out.errors == 1 and "not an async function" in out.first_error


def test_several_functions_anywhere_are_summed():
  # Faults A04 again, each function in another place.
  async def waits(example, completion):
    return hostile.other_half(example, completion)

  functions = [
    RewardFunction("f1", hostile.half, cpu_bound=True),
    RewardFunction("f2", waits),
  ]
  out = _run_with(functions, "abcd")
  assert out.total.tolist() == [[1, 1, 0, 0]]
  assert out.scored.tolist() == [[True, True, True, False]]
  assert "abstained" in out.first_error
  expected = [[1, np.nan], [np.nan, 1], [0, 0], [0, 0]]
  np.testing.assert_array_equal(out.parts[0], expected)


def test_weights_success_and_a_function_that_fails():
  def accuracy(example, completion):
    right = float(completion.text in "ab")
    return Reward(right, extracted=completion.text)

  def shape(example, completion):
    return {"a": 1.0, "b": -1.0, "c": 1.0, "d": None}[completion.text]

  functions = [
    RewardFunction("accuracy", accuracy, weight=2.0),
    RewardFunction("format", shape, weight=0.5),
  ]
  out = _run_with(functions, "abcde", success="accuracy")
  assert out.total.tolist() == [[2.5, 1.5, 0.5, 0, 0]]
  assert out.success.tolist() == [[1, 1, 0, 0, 0]]
  # What f would have said of "e" is not known, so neither is the sum.
  assert out.scored.tolist() == [[True, True, True, True, False]]
  assert "format: KeyError" in out.first_error
  assert out.extracted[0][:4] == list("abcd")
  assert _task(functions).parts == ("accuracy", "format")


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda f: _task([f, f]), "unique"),
    (lambda f: _task([]), "unique"),
    (lambda f: _task([f, lambda e, c: 1]), "list of RewardFunction"),
    (lambda f: _task([f], ("other",)), "parts"),
    (lambda f: dataclasses.replace(_task([f]), success="x"), "none of its"),
    (lambda f: dataclasses.replace(_task(f), success="f"), "there is one"),
    (lambda f: dataclasses.replace(f, weight=float("nan")), "finite"),
    (lambda f: dataclasses.replace(f, limit=0), "above 0"),
    (lambda f: dataclasses.replace(f, fn=3), "not a function"),
  ],
)
def test_functions_that_do_not_fit_are_refused(make, message):
  with pytest.raises(UserError, match=message):
    make(RewardFunction("f", lambda e, c: 1.0))


def test_a_function_has_its_own_limit():
  def reward(example, completion):
    time.sleep(0.2)
    return 1.0

  slow = RewardFunction("slow", reward, limit=5.0)
  assert _run_with(slow, "a", limit=0.1).total == 1
  assert _run_with(reward, "a", limit=0.1).timed_out.all()


def test_cheap_rows_cost_little_here():
  task = _task(lambda e, c: Reward(1.0))
  rows = [[Completion("a", 1, False)] * 128] * 2
  with Runner(task) as runner:
    start = time.perf_counter()
    assert runner.score(task.split("train"), rows).total.sum() == 256
    seconds = time.perf_counter() - start
  print(f"256 rows in process: {1000 * seconds:.1f} ms")
  assert seconds < 0.2  # 5 ms on an idle machine


def test_ragged_groups_are_refused():
  with pytest.raises(ValueError, match=r"\[1, 2\]"):
    _run(lambda e, c: Reward(0.0), ["a", "bc"])
  task = _task(lambda e, c: Reward(0.0))
  with pytest.raises(ValueError, match="2 examples"):
    score_batch(task, task.split("train"), [[]])
