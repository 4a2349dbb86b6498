"""Checkpoints: whole or absent, readable on another mesh, never a cast.

Orbax (behind `checkpoint_io`) writes a step to a temporary directory and
renames it. The books are kept here: which steps are finished is read from the
disk each time, and old ones are renamed before they are removed, so that a kill
at any moment leaves only whole checkpoints under a step's name.

    <directory>/120/trainable, opt, ...   one Orbax item per tree
    <directory>/120/host/metadata         JSON: layout version, score, host
    <directory>/../<name>/<step>          trees written once (`save_once`)
"""

import contextlib
import json
import math
import os

import jax
from etils import epath
from jax.experimental import multihost_utils

from grpo_jax import checkpoint_io as files
from grpo_jax.checkpoint_io import Damaged, abstract
from grpo_jax.disk import explain, explained
from grpo_jax.errors import UserError

__all__ = ["Checkpoints", "Damaged", "abstract", "open_run", "parse_run"]

DIRECTORY = "checkpoints"  # within a run's workdir


class Checkpoints:
  """The checkpoints of one run.

  Kept are the last `keep_last`, the best by score, and those saved with
  `keep=True`; the others go when a later one is finished. All processes of a
  run call every method alike. Two runs must not share a directory.

  Opening a directory removes what an interrupted save left and moves a damaged
  step N aside to N.damaged; `skipped` tells. Close it before the process ends
  (it is a context manager): Python stops the threads that write the last one.

  Args:
    directory: where the steps lie; made if missing.
    keep_last: how many of the last checkpoints to keep, at least 1.
    read_only: change nothing on disk; `save` is refused.

  Raises:
    UserError: the directory cannot be made or written.
  """

  def __init__(self, directory, *, keep_last: int = 2, read_only: bool = False):
    if keep_last < 1:
      raise UserError(f"keep_last is {keep_last}; it must be at least 1")
    path = os.fspath(directory)
    self._directory = epath.Path(
      path if "://" in path else os.path.abspath(path)
    )
    self._keep_last = keep_last
    self._read_only = read_only
    self._pending = None  # the path being written
    self._records = {}
    self._unreadable = set()
    self._reader = files.open_reader()
    self._writer = None if read_only else files.open_writer()
    if not read_only:
      with explained(f"could not use {self._directory}"):
        self._directory.mkdir(parents=True, exist_ok=True)
    with explained(f"could not tidy {self._directory}"):
      self._skipped = files.damaged_steps(self._directory, read_only)
      _barrier("looked", read_only)
      if not read_only and jax.process_index() == 0:
        files.tidy(self._directory, [step for step, _ in self._skipped])
      _barrier("tidied", read_only)

  def steps(self) -> list[int]:
    """The finished checkpoints, ascending; not one that is being written."""
    numbers = files.numbered(self._directory)
    return [step for step in numbers if self._is_whole(self._path(step))]

  def latest(self) -> int | None:
    """The last finished checkpoint's step, or None."""
    return max(self.steps(), default=None)

  def best(self) -> int | None:
    """The step with the highest score, the later of equals, or None."""
    scored = [(self._record(s)["score"], s) for s in self.steps()]
    scored = [pair for pair in scored if pair[0] is not None]
    return max(scored)[1] if scored else None

  def skipped(self) -> list[tuple[int, str]]:
    """The unfinished or damaged steps that were found, and why each is bad."""
    return list(self._skipped)

  def find(self, which) -> int:
    """The step that "latest", "best" or a number means here.

    Args:
      which: the second value of `parse_run`.

    Returns:
      A finished step.

    Raises:
      UserError: there is no such checkpoint; the message lists those there are.
    """
    steps = self.steps()
    if not steps:
      why = "".join(f"; {step} is unusable: {w}" for step, w in self._skipped)
      raise UserError(f"no finished checkpoint in {self._directory}{why}")
    if which == "latest":
      return steps[-1]
    if which == "best":
      best = self.best()
      if best is None:
        raise UserError(f"no checkpoint in {self._directory} has a score")
      return best
    if which not in steps:
      have = ", ".join(map(str, steps))
      raise UserError(
        f"no checkpoint of step {which} in {self._directory}; it has {have}"
      )
    return which

  def save(
    self,
    step: int,
    items: dict,
    host: dict,
    *,
    score: float | None = None,
    keep: bool = False,
  ):
    """Starts to save a checkpoint; a step that is there gains a score at most.

    Waits for the save before, copies the arrays to the host, and returns while
    they are written. The arrays may be donated right afterwards. A step saved
    in a hurry, before its evaluation, gets its score when it is saved again.

    Args:
      step: the step that the trees are the result of.
      items: name -> pytree of arrays (typed PRNG keys too), each an item that
        can be restored alone. An item without arrays is not stored.
      host: JSON values: counters, data position, config, lineage.
      score: higher is better; without one (or with NaN) it is never the best.
      keep: never remove it.

    Raises:
      UserError: this or the previous save failed for a reason that lies in the
        disk. The earlier checkpoints are intact.
      TypeError: an item is a bare array, a leaf is none, `host` is no JSON.
    """
    self._check_writable()
    self.wait()
    if score is not None:
      score = None if math.isnan(score) else float(score)
    if self._is_whole(self._path(step)):
      return self._add_score(step, score)
    self._records.pop(step, None)
    record = {"score": score, "keep": bool(keep), "host": host}
    self._start(self._path(step), items, record)

  def wait(self):
    """Blocks until the save in flight is on disk; then removes old ones.

    Raises:
      UserError: the save failed for a reason that lies in the disk.
    """
    if self._read_only or self._pending is None:
      return
    path = self._pending
    with self._failing_save(path):
      self._writer.wait_until_finished()
    self._pending = None
    self._remove_old()

  def close(self):
    """Waits, and ends the threads. Raises what `wait` raises."""
    try:
      self.wait()
    finally:
      self._reader.close()
      with explained(f"could not write {self._directory}"):
        if self._writer:  # of a save that failed, more may fail
          self._writer.close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def host(self, step: int) -> dict:
    """The `host` values that `step` was saved with.

    Raises:
      UserError: no such checkpoint, or one of an unknown layout.
    """
    self.find(step)
    files.check_layout(self._path(step), self._record(step))
    return self._record(step)["host"]

  def restore(self, step: int, targets: dict) -> dict:
    """Reads items of a checkpoint onto the shardings asked for.

    Args:
      step: a finished step.
      targets: item name -> pytree of jax.ShapeDtypeStruct with sharding (see
        `abstract`). Items not named are not read.

    Returns:
      Item name -> pytree of arrays, in the targets' structure.

    Raises:
      UserError: no such checkpoint or item, an unknown layout, or a tree,
        shape, dtype or sharding that does not fit; it names the parameter.
      Damaged: the files cannot be read; `latest` no longer counts the step.
    """
    self.host(step)
    try:
      return files.restore(self._reader, self._path(step), targets)
    except Damaged as error:
      # Left where it is: the fault may be one of the machine, not of the files.
      self._skipped.append((step, str(error)))
      self._unreadable.add(self._path(step))
      raise

  def restore_latest(self, targets: dict) -> tuple[int, dict, dict] | None:
    """Restores the newest checkpoint that can be read.

    Args:
      targets: as in `restore`.

    Returns:
      (step, host, trees), or None without any; `skipped` names those that were
      passed over.

    Raises:
      UserError: the newest readable one does not fit the targets.
    """
    while (step := self.latest()) is not None:
      with contextlib.suppress(Damaged):
        return step, self.host(step), self.restore(step, targets)
    return None

  def save_once(self, name: str, step: int, tree):
    """Saves a tree that checkpoints share, such as frozen weights.

    It lies beside the directory, at ../<name>/<step>, is never removed, and is
    on disk when this returns. What is there already is left alone.

    Args:
      name: what it is, e.g. "ref".
      step: the step that it comes from.
      tree: a pytree of arrays.

    Raises:
      UserError: the disk is full or the place cannot be written.
    """
    self._check_writable()
    self.wait()
    if not self._is_whole(self._once(name, step)):
      self._start(self._once(name, step), {"tree": tree}, {})
    self.wait()

  def restore_once(self, name: str, step: int, target):
    """Reads a tree that `save_once` wrote.

    Args:
      name: as given to `save_once`.
      step: as given to `save_once`.
      target: a pytree of jax.ShapeDtypeStruct with sharding, where the
        returned tree will lie.

    Raises:
      UserError: it is not there or does not fit.
      Damaged: it cannot be read.
    """
    path = self._once(name, step)
    if not path.exists():
      raise UserError(f"{path} is missing: nothing was saved as {name}@{step}")
    if why := files.damage(path):
      raise Damaged(f"{path} is damaged: {why}")
    return files.restore(self._reader, path, {"tree": target})["tree"]

  def _path(self, step):
    return self._directory / str(int(step))

  def _is_whole(self, path):
    return path not in self._unreadable and files.damage(path) is None

  def _once(self, name, step):
    if name == self._directory.name or "/" in name or not name:
      raise ValueError(f"save_once cannot use the name {name!r}")
    return self._directory.parent / name / str(int(step))

  def _record(self, step):
    if step not in self._records:
      self._records[step] = files.read_record(self._path(step))
    return self._records[step]

  def _add_score(self, step, score):
    record, path = self._record(step), self._path(step)
    if score is not None and record["score"] is None:
      record["score"] = score
      with self._failing_save(path):
        if jax.process_index() == 0:
          files.write_record(path, record)

  def _start(self, path, items, record):
    record = json.loads(json.dumps(record))  # the caller may change it later
    record["layout_version"] = files.LAYOUT_VERSION
    files.check_items(items)
    with self._failing_save(path):
      path.parent.mkdir(parents=True, exist_ok=True)
      if path.exists() and jax.process_index() == 0:
        files.set_aside(path)
      self._unreadable.discard(path)
      files.start_save(self._writer, path, items, record)
      self._pending = path

  def _check_writable(self):
    if self._read_only:
      raise ValueError(f"{self._directory} was opened to be read only")

  def _remove_old(self):
    steps = self.steps()
    kept = {*steps[-self._keep_last :], self.best()}
    kept |= {step for step in steps if self._record(step)["keep"]}
    if jax.process_index() == 0:
      for step in set(steps) - kept:
        with contextlib.suppress(OSError):  # tried again after the next save
          files.remove(self._path(step))
    _barrier("removed", self._read_only)

  @contextlib.contextmanager
  def _failing_save(self, path):
    """Says what a failed save means, and frees what it took."""
    try:
      yield
    except Exception as error:
      self._pending = None
      if jax.process_index() == 0:
        files.remove_parts(path)
      last = self.latest()
      after = f"the last finished checkpoint is {last}"
      known = explain(error, f"could not write checkpoint {path}", after)
      raise (known or error) from error


def parse_run(text: str) -> tuple[str, int | str]:
  """Splits RUN, RUN@STEP or RUN@best.

  Args:
    text: a workdir, optionally with "@" and a step, "best" or "latest".

  Returns:
    (workdir, step), the step a number, "best" or "latest".

  Raises:
    UserError: what follows the "@" is none of these.
  """
  run, at, which = text.rpartition("@")
  if not at:
    return text, "latest"
  if run and (which.isdecimal() or which in ("best", "latest")):
    return run, int(which) if which.isdecimal() else which
  if os.path.isdir(text):  # a directory whose own name has an "@"
    return text, "latest"
  raise UserError(f"{text!r} is not RUN, RUN@STEP or RUN@best")


def open_run(path) -> Checkpoints:
  """Opens another run's checkpoints to read them; the run may be alive.

  Args:
    path: its workdir (the first value of `parse_run`), or the directory of the
      checkpoints itself.

  Returns:
    Read-only checkpoints with at least one finished; `find` turns the second
    value of `parse_run` into a step.

  Raises:
    UserError: no such directory, or no finished checkpoint in it.
  """
  run = epath.Path(os.fspath(path))
  if not run.is_dir():
    raise UserError(f"no run at {path}: there is no such directory")
  inner = run / DIRECTORY
  checkpoints = Checkpoints(inner if inner.is_dir() else run, read_only=True)
  checkpoints.find("latest")
  return checkpoints


def _barrier(name, read_only):
  """Lets no process of a run look at the disk before process 0 changed it."""
  if jax.process_count() > 1 and not read_only:
    multihost_utils.sync_global_devices(f"grpo_jax_checkpoints_{name}")
