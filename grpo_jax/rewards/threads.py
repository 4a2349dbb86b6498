"""Reward functions that run in this process: plain ones and coroutines.

A thread cannot be killed. One that overstays is left behind, asked to end at
its next line of Python, and a fresh one goes on with the other rows. What
never comes back from C (a regular expression that backtracks for hours) holds
the whole process up; such functions belong in the pool (`cpu_bound`).
"""

import asyncio
import collections
import contextlib
import ctypes
import threading
import time
from collections.abc import Sequence

from grpo_jax.rewards.outcome import (
  Job,
  Outcome,
  call,
  call_async,
  failed,
  lost,
  timed_out,
)

CONCURRENCY = 64  # coroutines at a time
GRACE = 1.0  # seconds for a coroutine to notice that its time is up
HEARTBEAT = 0.05  # seconds between two signs of life of an event loop


class _TimeUp(BaseException):
  """Raised inside a thread that was left behind."""


def _leave_behind(thread: threading.Thread) -> None:
  """Asks a thread to end; it does at its next line of Python, if ever."""
  ctypes.pythonapi.PyThreadState_SetAsyncExc(
    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TimeUp)
  )


class Inline:
  """Plain functions, one row after the other, on a thread.

  The thread does a batch by itself, so that a cheap row costs no switch.
  """

  def __init__(self):
    self._lock = threading.Lock()  # of all below
    self._todo: collections.deque[Job] = collections.deque()
    self._done: list[tuple[Job, Outcome]] = []
    self._thread: threading.Thread | None = None
    self._job: Job | None = None
    self._deadline = float("inf")
    self._error: BaseException | None = None
    self._finished = threading.Event()

  def submit(self, jobs: Sequence[Job]) -> None:
    """Queues the jobs of a batch."""
    with self._lock:
      self._todo.extend(jobs)
      self._launch()

  def collect(self, timeout: float) -> list[tuple[Job, Outcome]]:
    """Waits up to `timeout` seconds; returns the jobs that ended meanwhile.

    Raises:
      KeyboardInterrupt: passed on from a function.
    """
    self._finished.wait(timeout)
    with self._lock:
      done, self._done = self._done, []
      if self._error:
        error, self._error = self._error, None
        raise error
      if self._job and time.monotonic() > self._deadline:
        done.append((self._job, timed_out(self._job.limit)))
        self._abandon()
        self._launch()
    return done

  def cancel(self) -> None:
    """Drops what is queued and leaves what runs behind."""
    with self._lock:
      self._todo.clear()
      self._done.clear()
      if self._job:
        self._abandon()

  close = cancel

  def _launch(self) -> None:
    self._finished.clear()
    self._thread = threading.Thread(
      target=self._work, name="rewards", daemon=True
    )
    self._thread.start()

  def _abandon(self) -> None:
    thread, self._thread, self._job = self._thread, None, None
    _leave_behind(thread)

  def _work(self) -> None:
    me = threading.current_thread()
    with contextlib.suppress(_TimeUp):
      while (job := self._next(me)) is not None:
        try:
          outcome = call(job.function, job.example, job.completion)
        except _TimeUp:
          return
        except BaseException as error:
          with self._lock:
            if self._thread is me:
              self._error, self._job = error, None
              self._finished.set()
          return
        with self._lock:
          if self._thread is not me:
            return
          self._job = None
          self._done.append((job, outcome))

  def _next(self, me: threading.Thread) -> Job | None:
    with self._lock:
      if self._thread is not me:
        return None
      if not self._todo:
        self._finished.set()
        return None
      self._job = self._todo.popleft()
      self._deadline = time.monotonic() + self._job.limit
      return self._job


class Loop:
  """Coroutine functions, many at a time, on one event loop.

  The loop lives as long as this object, so what a function keeps between rows
  (a client, a connection) stays usable. One that blocks the loop past its
  limit loses its row and takes the loop with it: the others begin again on a
  new one.
  """

  def __init__(self, concurrency: int = CONCURRENCY):
    self._concurrency = concurrency
    self._todo: collections.deque[Job] = collections.deque()
    self._flying: dict[Job, float] = {}  # job -> latest end
    self._ended: collections.deque[tuple[Job, Outcome]] = collections.deque()
    self._wake = threading.Event()
    self._turn: _Turn | None = None

  def submit(self, jobs: Sequence[Job]) -> None:
    """Queues the jobs of a batch."""
    self._todo.extend(jobs)

  def collect(self, timeout: float) -> list[tuple[Job, Outcome]]:
    """Waits up to `timeout` seconds; returns the jobs that ended meanwhile."""
    if self._turn is None:
      self._turn = _Turn(self._ended, self._wake)
    while self._todo and len(self._flying) < self._concurrency:
      job = self._todo.popleft()
      self._flying[job] = time.monotonic() + job.limit + GRACE
      self._turn.begin(job)
    self._wake.wait(timeout)
    self._wake.clear()
    done = []
    while self._ended:
      job, outcome = self._ended.popleft()
      if self._flying.pop(job, None) is not None:  # else given up before
        done.append((job, outcome))
    return done + self._overdue()

  def _overdue(self) -> list[tuple[Job, Outcome]]:
    """Gives up what has outlived its limit, and a loop that is blocked."""
    now = time.monotonic()
    if silent := self._turn.silent(now):
      gone = [job for job in self._turn.running() if silent > job.limit]
      if gone:
        self._turn.stop()
        self._turn = None
        # The others waited for the loop, not for their answers.
        self._todo.extendleft(job for job in self._flying if job not in gone)
        self._flying.clear()
    else:
      gone = [job for job, latest in self._flying.items() if now > latest]
      for job in gone:  # it ignores being cancelled
        del self._flying[job]
    return [(job, timed_out(job.limit)) for job in gone]

  def cancel(self) -> None:
    """Drops what is queued and what runs."""
    self._todo.clear()
    self._flying.clear()
    self._ended.clear()
    if self._turn:
      self._turn.stop()
      self._turn = None

  close = cancel


class _Turn:
  """One event loop on one thread, until it is stopped or left behind."""

  def __init__(self, ended: collections.deque, wake: threading.Event):
    self._ended, self._wake = ended, wake
    self._loop = asyncio.new_event_loop()
    self._jobs: dict[asyncio.Task, Job] = {}
    self._beat = time.monotonic()
    self._left = False
    self._thread = threading.Thread(
      target=self._run, name="async rewards", daemon=True
    )
    self._thread.start()

  def begin(self, job: Job) -> None:
    self._loop.call_soon_threadsafe(self._create, job)

  def silent(self, now: float) -> float:
    """Seconds since the last sign of life, when they are too many, else 0."""
    silent = now - self._beat
    return silent if silent > 10 * HEARTBEAT else 0.0

  def running(self) -> list[Job]:
    """The job that holds the loop; all, where it is in a task of its own."""
    task = asyncio.current_task(self._loop)
    known = self._jobs.get(task) if task else None
    return [known] if known else list(self._jobs.values())

  def stop(self) -> None:
    """Ends the loop when it can be ended; does not wait for that."""
    self._left = True
    with contextlib.suppress(RuntimeError):  # it is closed
      self._loop.call_soon_threadsafe(self._loop.stop)
    if self.silent(time.monotonic()):
      _leave_behind(self._thread)

  def _run(self) -> None:
    asyncio.set_event_loop(self._loop)
    try:
      with contextlib.suppress(_TimeUp):
        self._pulse()
        self._loop.run_forever()
      with contextlib.suppress(_TimeUp):
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
          task.cancel()
        if tasks:
          self._loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
    finally:
      self._loop.close()

  def _pulse(self) -> None:
    self._beat = time.monotonic()
    if not self._left:
      self._loop.call_later(HEARTBEAT, self._pulse)

  def _create(self, job: Job) -> None:
    task = self._loop.create_task(self._score(job))
    self._jobs[task] = job
    task.add_done_callback(self._jobs.pop)

  async def _score(self, job: Job) -> None:
    limit = asyncio.timeout(job.limit)
    outcome = None
    try:
      async with limit:
        outcome = await call_async(job.function, job.example, job.completion)
    except TimeoutError:
      outcome = timed_out(job.limit)
    except asyncio.CancelledError:
      if self._left:
        raise
      outcome = lost("it was cancelled")  # by itself
    except KeyboardInterrupt as error:
      outcome = failed(error)
    except _TimeUp:
      return
    if limit.expired():
      outcome = timed_out(job.limit)
    if not self._left:
      self._ended.append((job, outcome))
      self._wake.set()
