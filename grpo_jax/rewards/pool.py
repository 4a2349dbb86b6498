"""CPU-bound reward functions, in processes that can be killed.

Workers are fresh interpreters and not forks: the parent has threads and
devices that a fork would break. Nor are they `multiprocessing`'s, which would
import the parent's main module, and JAX with it, into each.
"""

import collections
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe, connection
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.rewards.outcome import Job, Outcome, lost, timed_out
from grpo_jax.rewards.worker import HELLO
from grpo_jax.tasks.base import RewardFunction

MEMORY_LIMIT = 4 * 2**30  # bytes a worker may take beyond its loaded modules
MOST_WORKERS = 32  # when the number is left to the machine
LOAD_LIMIT = 120.0  # seconds to start and import what the functions need
FAILED_STARTS = 3  # in a row, after which a batch's other rows are given up
GROW_AFTER = 0.1  # seconds of a batch that one worker may need for it

_BOOT = """import sys
sys.path[:] = {path!r}
from grpo_jax.rewards import worker
worker.main({connection}, {lifeline})
"""


class Pool:
  """Worker processes, started when needed and replaced when they die.

  One thread at a time may use it.

  Args:
    functions: place in the task -> function.
    workers: most processes; 0 is one per core, up to `MOST_WORKERS`.
    memory: bytes each may take beyond what its modules need.

  Raises:
    UserError: a function that cannot be pickled.
  """

  def __init__(
    self,
    functions: dict[int, RewardFunction],
    workers: int = 0,
    memory: int = MEMORY_LIMIT,
  ):
    self.size = workers or min(_cores(), MOST_WORKERS)
    self._places = {part: i for i, part in enumerate(functions)}
    pickled = [(f.name, _pickled(f)) for f in functions.values()]
    self._setup = pickle.dumps((pickled, memory))
    self._todo: collections.deque[Job] = collections.deque()
    self._workers: list[_Worker] = []
    self._began = 0.0
    self._loaded_once = False
    self._failed_starts = 0
    # Runs at exit, at the latest.
    self._finalizer = weakref.finalize(self, _kill_all, self._workers)

  def start(self) -> None:
    """Starts a first worker, if there is none."""
    if not self._workers:
      self._start()

  def ready(self, timeout: float) -> bool:
    """Waits up to `timeout` for a worker that has loaded the functions.

    Raises:
      UserError: they cannot be loaded.
    """
    if self._failed_starts >= FAILED_STARTS:
      raise UserError("no reward worker process could be started")
    self.start()
    self.collect(timeout)
    return self._loaded_once

  def submit(self, jobs: Sequence[Job]) -> None:
    """Queues the jobs of a batch."""
    self._todo.extend(jobs)
    self._began, self._failed_starts = time.monotonic(), 0

  def collect(self, timeout: float) -> list[tuple[Job, Outcome]]:
    """Waits up to `timeout` seconds; returns the jobs that ended meanwhile.

    Raises:
      UserError: the functions cannot be loaded, and never were.
    """
    done = self._assign()
    workers = {w.pipe: w for w in self._workers}
    soonest = min([w.deadline for w in self._workers], default=float("inf"))
    wait = max(0.0, min(timeout, soonest - time.monotonic()))
    for pipe in connection.wait(list(workers), 0 if done else wait):
      done += self._receive(workers[pipe])
    for worker in list(self._workers):
      # A forked child may hold the pipe of a dead worker open.
      if worker.process.poll() is not None and not worker.pipe.poll():
        done += self._buried(worker)
      elif time.monotonic() > worker.deadline:
        done += self._expired(worker)
    return done

  def cancel(self) -> None:
    """Drops what is queued and kills what runs."""
    self._todo.clear()
    for worker in [w for w in self._workers if w.job]:
      self._discard(worker)

  def close(self) -> None:
    """Kills every worker; a later use would start new ones."""
    self._todo.clear()
    _kill_all(self._workers)

  def _assign(self) -> list[tuple[Job, Outcome]]:
    """Gives queued jobs to free workers, and starts workers for the rest."""
    done = []
    for worker in [w for w in self._workers if w.ready and not w.job]:
      if not self._todo:
        break
      job = self._todo.popleft()
      try:
        data = pickle.dumps(
          (self._places[job.part], job.limit, job.example, job.completion)
        )
      except Exception as error:
        why = f"the example cannot be pickled: {type(error).__name__}: {error}"
        done.append((job, lost(why)))
        continue
      try:
        worker.give(job, data)
      except OSError:  # it died between two rows, which is no row's fault
        self._todo.appendleft(job)
        self._discard(worker)
    done += self._grow()
    return done

  def _grow(self) -> list[tuple[Job, Outcome]]:
    if self._failed_starts >= FAILED_STARTS and not self._workers:
      why = "no worker process could be started"
      done = [(job, lost(why, incidental=True)) for job in self._todo]
      self._todo.clear()
      return done
    idle = sum(not w.job for w in self._workers)
    wanted = min(len(self._todo) - idle, self.size - len(self._workers))
    if self._workers and time.monotonic() < self._began + GROW_AFTER:
      wanted = 0  # the rows may be done sooner than a worker has started
    for _ in range(min(wanted, 4)):
      if self._failed_starts < FAILED_STARTS:
        self._start()
    return []

  def _start(self) -> None:
    try:
      self._workers.append(_Worker())
    except OSError:  # no process, memory or file descriptor to be had
      self._failed_starts += 1

  def _receive(self, worker: "_Worker") -> list[tuple[Job, Outcome]]:
    try:
      data = worker.pipe.recv_bytes()
      if worker.job:
        outcome = pickle.loads(data)
        return [(worker.release(), outcome)]
      if data == HELLO:
        worker.pipe.send_bytes(self._setup)
        return []
    except (EOFError, OSError):
      return self._buried(worker)
    refused = pickle.loads(data)
    if refused is None:
      worker.ready, worker.deadline = True, float("inf")
      self._loaded_once, self._failed_starts = True, 0
    else:
      self._discard(worker)
      self._failed_starts += 1
      if not self._loaded_once:
        name, why = refused
        raise UserError(
          f"reward function {name!r} cannot be loaded in a worker process:"
          f" {why}; define it at the top level of a module that can be"
          " imported, or set cpu_bound=False"
        )
    return []

  def _expired(self, worker: "_Worker") -> list[tuple[Job, Outcome]]:
    self._discard(worker)
    if worker.job:
      return [(worker.job, timed_out(worker.job.limit))]
    self._failed_starts += 1
    if not self._loaded_once:
      raise UserError(
        f"a reward worker was not ready after {LOAD_LIMIT:g} s: the modules of"
        " the reward functions take too long to import"
      )
    return []

  def _buried(self, worker: "_Worker") -> list[tuple[Job, Outcome]]:
    """Removes a dead worker; its row, if it had one, is lost."""
    how = worker.how_it_ended()
    self._discard(worker)
    if worker.job and worker.process.returncode == -signal.SIGALRM:
      return [(worker.job, timed_out(worker.job.limit))]  # its own alarm
    if worker.job:
      return [(worker.job, lost(f"its process ended: {how}", incidental=True))]
    if not worker.ready:
      self._failed_starts += 1
      if not self._loaded_once and self._failed_starts >= FAILED_STARTS:
        raise UserError(
          "reward workers end while they load the modules of the reward"
          f" functions: {how}"
        )
    return []

  def _discard(self, worker: "_Worker") -> None:
    self._workers.remove(worker)
    worker.kill()


class _Worker:
  """One process and the job it has.

  Attributes:
    ready: it has loaded the functions.
    deadline: when it is killed, if nothing comes from it.
  """

  def __init__(self):
    self.pipe, theirs = Pipe()
    alive, self._lifeline = os.pipe()
    boot = _BOOT.format(
      path=sys.path, connection=theirs.fileno(), lifeline=alive
    )
    try:
      self.process = subprocess.Popen(
        [sys.executable, "-c", boot],
        pass_fds=(theirs.fileno(), alive),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, to be killed as one
        env=_environment(),
      )
    except OSError:
      self.pipe.close()
      os.close(self._lifeline)
      raise
    finally:
      theirs.close()
      os.close(alive)
    self.ready = False
    self.job: Job | None = None
    self.deadline = time.monotonic() + LOAD_LIMIT

  def give(self, job: Job, data: bytes) -> None:
    self.pipe.send_bytes(data)
    self.job, self.deadline = job, time.monotonic() + job.limit

  def release(self) -> Job:
    job, self.job, self.deadline = self.job, None, float("inf")
    return job

  def how_it_ended(self) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(0.2)
    code = self.process.returncode
    if code is None:
      return "it closed its pipe"
    if code >= 0:
      return f"exit status {code}"
    with contextlib.suppress(ValueError):
      return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"

  def kill(self) -> None:
    # The group outlives its leader while a reward's child lives. On macOS a
    # group of zombies is "not permitted".
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self.process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(5)
    self.pipe.close()
    with contextlib.suppress(OSError):
      os.close(self._lifeline)


def _kill_all(workers: list[_Worker]) -> None:
  while workers:
    workers.pop().kill()


def _pickled(function: RewardFunction) -> bytes:
  try:
    return pickle.dumps(function)
  except Exception as error:
    why = " ".join(str(error).split())[:200]
    raise UserError(
      f"reward function {function.name!r} cannot run in a worker process:"
      f" {why}; define it at the top level of a module (not a lambda, not"
      " inside a function), or set cpu_bound=False"
    ) from error


def _cores() -> int:
  if hasattr(os, "sched_getaffinity"):  # what this process may use; not macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _environment() -> dict[str, Any]:
  one = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
  )
  return {
    **os.environ,
    **one,
    # A user's module may import JAX: never with the parent's devices.
    "JAX_PLATFORMS": "cpu",
    # A reward that depends on the order of a set is the same in each worker.
    "PYTHONHASHSEED": "0",
  }
