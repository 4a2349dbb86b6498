"""Processes: what goes wrong in one costs its row and nothing else."""

import os
import subprocess
import sys
import threading
import time

import hostile
import pytest

from grpo_jax.errors import UserError
from grpo_jax.rewards.runner import Runner
from grpo_jax.tasks import make_task
from grpo_jax.tasks.base import Completion, Example, RewardFunction, Task

LIMIT = 0.3


def make(fn=hostile.act, limit=LIMIT, **how):
  examples = [Example(str(i), f"P{i}", "x") for i in range(64)]
  splits = {"train": examples, "tuning": (), "heldout": ()}
  reward = RewardFunction("act", fn, cpu_bound=True)
  return Runner(Task("t", splits, reward), limit, **{"workers": 2, **how})


@pytest.fixture(scope="module")
def shared():
  """One pool for the whole module: it survives everything."""
  with make(memory=2**29) as runner:
    runner.check()
    yield runner


def score(runner, texts, poll=None, ids=None):
  rows = [[Completion(t, len(t), False) for t in texts]]
  return runner.score(runner._task.split("train")[:1], rows, poll, ids)


def group(pid):
  """Processes alive in a process group or with it as parent."""
  out = subprocess.run(
    ["ps", "-A", "-o", "pid=,pgid=,stat=,command="],
    capture_output=True,
    text=True,
  ).stdout
  rows = [line.split(None, 3) for line in out.splitlines()]
  return [r for r in rows if r[1] == str(pid) and not r[2].startswith("Z")]


def gone(pids, seconds=5):
  end = time.monotonic() + seconds
  while any(group(pid) for pid in pids):
    if time.monotonic() > end:
      return False
    time.sleep(0.05)
  return True


def pids(runner):
  return [w.process.pid for w in runner._pool._workers]


@pytest.mark.parametrize("how", hostile.HANGS)
def test_a_hang_costs_its_row(shared, how):
  start = time.monotonic()
  out = score(shared, ["1", how, "2", "3"])
  assert out.scored.tolist() == [[True, False, True, True]]
  assert out.total.tolist() == [[1, 0, 2, 3]]
  assert out.timed_out.tolist() == [[False, True, False, False]]
  assert out.errors == 1 and "0.3 s" in out.first_error
  assert time.monotonic() - start < 5


@pytest.mark.parametrize("how", list(hostile.DIES))
def test_a_death_costs_its_row(shared, how):
  out = score(shared, ["1", how, "2", "3"])
  assert out.scored.tolist() == [[True, False, True, True]]
  assert out.total.tolist() == [[1, 0, 2, 3]]
  word = {"segfault": "SIGSEGV", "os_exit": "status 3", "killed": "SIGKILL"}
  assert word.get(how, "") in out.first_error


@pytest.mark.parametrize("how", list(hostile.FAILS))
def test_a_failure_costs_its_row(shared, how):
  out = score(shared, ["1", how, "2"])
  assert out.scored.tolist() == [[True, False, True]]
  assert out.total.tolist() == [[1, 0, 2]] and out.errors == 1


@pytest.mark.parametrize("how", list(hostile.WORKS))
def test_strange_but_right(shared, how):
  out = score(shared, ["0", how, "2"])
  assert out.total.tolist() == [[0, 1, 2]], out.first_error


def test_everything_at_once_in_order_off_the_main_thread():
  bad = [*hostile.HANGS, *hostile.DIES, *hostile.FAILS, "child_then_hang"]
  texts = []
  for i, how in enumerate(bad):
    texts += [str(i), how]
  runner = make(memory=2**29, workers=4)
  outs, seen = [], set()

  def poll():
    seen.update(pids(runner))

  def work():
    outs.append(score(runner, texts, poll))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join(60)
  out = outs[0]
  assert out.scored.tolist() == [[True, False] * len(bad)]
  assert out.total[0, ::2].tolist() == list(range(len(bad)))
  assert score(runner, ["7"]).total == 7
  seen.update(pids(runner))
  runner.close()
  assert gone(seen), "processes are left"


def test_workers_are_reused_and_do_not_import_jax(shared):
  with make(hostile.who) as runner:
    runner.check()
    first = score(runner, list("abc")).total
    assert (first == first[0, 0]).all() and first[0, 0] != os.getpid()
    assert (score(runner, list("abc")).total == first).all()
    (pid,) = pids(runner)
  assert gone([pid])
  with make(hostile.modules) as runner:
    assert score(runner, ["a"]).total == 0


def test_cheap_rows_are_cheap(shared):
  rows = [[Completion("1", 1, False)] * 4] * 64
  examples = shared._task.split("train")
  shared.score(examples, rows)
  start = time.perf_counter()
  out = shared.score(examples, rows)
  seconds = time.perf_counter() - start
  print(f"256 rows through a warm pool: {1000 * seconds:.1f} ms")
  assert out.total.sum() == 256
  assert seconds < 0.5  # 20 ms on an idle machine


def test_poll_stops_a_hang_at_once():
  class Stop(BaseException):
    pass

  with make(limit=60.0) as runner:
    runner.check()
    before = pids(runner)
    start = time.monotonic()

    def poll():
      if time.monotonic() - start > 0.2:
        raise Stop

    with pytest.raises(Stop):
      score(runner, ["spin", "regex", "1"], poll)
    assert time.monotonic() - start < 2
    assert gone(before)
    assert score(runner, ["1", "2"]).total.tolist() == [[1, 2]]


def test_what_cannot_be_pickled_is_refused_by_name():
  with pytest.raises(UserError, match=r"'act' cannot run in a worker.*lambda"):
    make(lambda example, completion: 1.0)


def test_what_cannot_be_loaded_is_refused_by_name(monkeypatch):
  main = sys.modules["__main__"]
  act = type(hostile.act)(hostile.act.__code__, {}, "absent")
  act.__module__, act.__qualname__ = "__main__", "absent"
  monkeypatch.setattr(main, "absent", act, raising=False)
  with make(act) as runner, pytest.raises(UserError, match=r"'act' .*absent"):
    runner.check()


def test_async_in_the_pool_is_refused():
  async def fn(example, completion):
    return 1.0

  with pytest.raises(UserError, match="cpu_bound=False"):
    RewardFunction("slow", fn, cpu_bound=True)


_PARENT = """
import os, sys, threading, time
sys.path.insert(0, {tests!r})
import test_pool
runner = test_pool.make(limit=60.0)
runner.check()
def poll():
  job = [w for w in runner._pool._workers if w.job]
  if len(job) == 2 and time.monotonic() - start > 0.2:
    print(*test_pool.pids(runner), flush=True)
    os._exit(0)
start = time.monotonic()
test_pool.score(runner, ["child_then_hang", "sleep"], poll)
"""


def test_no_orphans_after_a_sudden_end_of_the_parent():
  tests = os.path.dirname(__file__)
  done = subprocess.run(
    [sys.executable, "-c", _PARENT.format(tests=tests)],
    capture_output=True,
    text=True,
    timeout=30,
  )
  found = done.stdout.split()
  assert len(found) == 2, done.stderr
  assert gone(found)


def test_reasoning_gym_verifies_in_the_pool():
  task = make_task("reasoning_gym", size=20, tuning=1, heldout=1)
  example = task.split("train")[0]
  rows = [[Completion(t, 3, False) for t in (example.answer, "no", "")]]
  with Runner(task, workers=1) as runner:
    out = runner.score([example], rows)
  assert out.total.tolist() == [[1, 0, 0]] and out.scored.all()
  assert out.parts.shape == (1, 3, 1) and out.extracted[0][1] == "no"


def test_replay_takes_what_time_decided():
  ids = [("rl", 3, 17)]
  with make() as runner:
    first = score(runner, ["1", "sleep", "raises"], ids=ids)
    fresh = runner.take_fresh()
  assert first.errors == 2
  assert [(r["phase"], r["step"], r["ordinal"], r["g"]) for r in fresh] == [
    ("rl", 3, 17, 1)
  ]
  with make() as runner:
    runner.remember(fresh)
    again = score(runner, ["1", "2", "raises"], ids=ids)
    assert again.scored.tolist() == first.scored.tolist()
    assert again.timed_out.tolist() == first.timed_out.tolist()
    assert again.first_error == first.first_error
    assert runner.take_fresh() == []
    # Another step's row is another row.
    assert score(runner, ["1", "2"], ids=[("rl", 4, 17)]).scored.all()
