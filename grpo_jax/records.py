"""What a run leaves in its workdir beside checkpoints: metrics and rollouts.

    metrics.jsonl             one line per call of `write_metrics`
    rollouts/00000123.jsonl.gz  one line per group of step 123
    outcomes.jsonl            rewards that depended on time, by rollout id
    tensorboard/              the same numbers, for TensorBoard

A resumed run calls `restore(k)` with its checkpoint's step: whatever was
written after step k is removed, so that no line is lost or doubled. Outcomes
stay: the steps that are replayed take them instead of trying their luck again.
"""

import contextlib
import gzip
import json
import math
import os
import pathlib
import re
import time
import zlib

import numpy as np
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

from grpo_jax.disk import explained, replacing, save_json
from grpo_jax.errors import UserError

__all__ = ["Records", "read_metrics", "read_rollouts", "save_json"]

_NON_FINITE = {
  "nan": math.nan,
  "inf": math.inf,
  "-inf": -math.inf,
}


class Records:
  """Writes one run's metrics and rollouts.

  Local directories only. Metrics are plain numbers: whatever needs a device
  transfer is transferred by the caller.

  Args:
    workdir: the run's directory; made if missing.
    tensorboard: whether to write TensorBoard events too.

  Raises:
    UserError: the directory cannot be made or written.
  """

  def __init__(self, workdir, *, tensorboard: bool = True):
    self._workdir = pathlib.Path(workdir)
    self._metrics_path = self._workdir / "metrics.jsonl"
    self._rollouts = self._workdir / "rollouts"
    self._outcomes = self._workdir / "outcomes.jsonl"
    self._events = self._workdir / "tensorboard" if tensorboard else None
    self._writer = None
    with explained(f"could not use workdir {workdir}", "choose another"):
      self._rollouts.mkdir(parents=True, exist_ok=True)
      if self._events:
        self._events.mkdir(exist_ok=True)
      self._file = _open_to_append(self._metrics_path)

  def restore(self, step: int):
    """Drops everything that was written after a step.

    Lines of `metrics.jsonl` above `step` and a partial last line go, as do
    rollout files above it and half-written ones; TensorBoard is told to hide
    its later points. A run that starts anew passes -1, which drops outcomes
    too.

    Args:
      step: the step of the checkpoint that the run goes on from.

    Raises:
      UserError: the disk is full or the files cannot be written.
    """
    with explained(f"could not write {self._metrics_path}"):
      lines = _whole_lines(self._metrics_path.read_bytes())
      kept = [line for line, values in lines if values["step"] <= step]
      with replacing(self._metrics_path) as file:
        file.write(b"".join(kept))
      os.close(self._file)
      self._file = _open_to_append(self._metrics_path)
    with explained(f"could not write {self._outcomes}"):
      if step < 0:
        self._outcomes.unlink(missing_ok=True)
      elif self._outcomes.exists():  # without a last line that was cut off
        lines = _whole_lines(self._outcomes.read_bytes())
        with replacing(self._outcomes) as file:
          file.write(b"".join(line for line, _ in lines))
    with explained(f"could not write {self._rollouts}"):
      for path in self._rollouts.iterdir():
        number = re.fullmatch(r"(\d+)\.jsonl\.gz", path.name)
        if path.name.endswith(".part") or (number and int(number[1]) > step):
          path.unlink()
    if self._events:
      with explained(f"could not write {self._events}"):
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._open_events()
        self._writer.write_event(
          event_pb2.Event(
            wall_time=time.time(), step=step + 1, session_log=start
          )
        )
        self._writer.flush()

  def write_metrics(self, step: int, metrics: dict):
    """Appends one line of metrics, in one write, and tells TensorBoard.

    JSON has no NaN and no infinity: they are written as the strings "nan",
    "inf" and "-inf", which `read_metrics` turns back.

    Args:
      step: the step that the numbers describe.
      metrics: name -> a number (of Python or numpy), or a short string such as
        the phase, which TensorBoard does not get.

    Raises:
      UserError: the disk is full or the file cannot be written.
    """
    values = {name: _number(name, value) for name, value in metrics.items()}
    line = json.dumps({"step": int(step), **_encode(values)}, allow_nan=False)
    with explained(f"could not write {self._metrics_path}"):
      _write_all(self._file, line.encode() + b"\n")
    if not self._events:
      return
    points = [
      summary_pb2.Summary.Value(tag=name, simple_value=value)
      for name, value in values.items()
      if not isinstance(value, str)
    ]
    with explained(f"could not write {self._events}"):
      if self._writer is None:
        self._open_events()
      self._writer.write_event(
        event_pb2.Event(
          wall_time=time.time(),
          step=int(step),
          summary=summary_pb2.Summary(value=points),
        )
      )
      self._writer.flush()

  def write_rollouts(self, step: int, groups: list[dict]):
    """Writes a step's rollouts as one immutable file, whole or not at all.

    The same groups give the same bytes.

    Args:
      step: the step that sampled them.
      groups: one dict per prompt, of JSON values and numpy arrays. Non-finite
        numbers become the strings "nan", "inf" and "-inf".

    Raises:
      UserError: the disk is full or the file cannot be written.
    """
    path = _rollout_path(self._workdir, step)
    lines = "".join(json.dumps(_encode(group)) + "\n" for group in groups)
    # No time in the header: a replayed step rewrites the same file.
    packed = gzip.compress(lines.encode(), compresslevel=1, mtime=0)
    with explained(f"could not write {path}"), replacing(path) as file:
      file.write(packed)

  def write_outcomes(self, outcomes: list[dict]):
    """Appends outcomes that a replay must reuse, and puts them on disk.

    Args:
      outcomes: one dict each, of JSON values, with "step".

    Raises:
      UserError: the disk is full or the file cannot be written.
    """
    if not outcomes:
      return
    text = "".join(json.dumps(outcome) + "\n" for outcome in outcomes)
    with explained(f"could not write {self._outcomes}"):
      file = _open_to_append(self._outcomes)
      try:
        _write_all(file, text.encode())
        os.fsync(file)
      finally:
        os.close(file)

  def read_outcomes(self) -> list[dict]:
    """What `write_outcomes` has written to this workdir, in order."""
    if not self._outcomes.exists():
      return []
    return [value for _, value in _whole_lines(self._outcomes.read_bytes())]

  def sync(self):
    """Puts the metrics on disk; to be called before a checkpoint commits.

    Rollout files are on disk as soon as they have their name.

    Raises:
      UserError: the disk is full or the file cannot be written.
    """
    with explained(f"could not write {self._metrics_path}"):
      os.fsync(self._file)

  def close(self):
    """Closes the files; what was written stays."""
    os.close(self._file)
    if self._writer:
      self._writer.close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def _open_events(self):
    # The synchronous writer: tensorboardX's threaded one loses its thread when
    # the disk is full, and the run then hangs on a queue that nobody empties.
    # Its file names count seconds, so two openings in one would share a file.
    suffix = f".{os.getpid()}.{time.time_ns()}"
    self._writer = event_file_writer.EventsWriter(
      str(self._events / "events"), suffix
    )


def read_metrics(workdir) -> list[dict]:
  """Reads `metrics.jsonl`.

  Args:
    workdir: a run's directory; the run may be alive.

  Returns:
    One dict per line, in order, with "step". A partial last line is left out.

  Raises:
    UserError: there is no such file.
  """
  path = pathlib.Path(workdir) / "metrics.jsonl"
  try:
    text = path.read_bytes()
  except (FileNotFoundError, NotADirectoryError) as error:
    raise UserError(f"no metrics in {workdir}: {path} is missing") from error
  return [
    {
      k: _NON_FINITE.get(v, v) if isinstance(v, str) else v
      for k, v in values.items()
    }
    for _, values in _whole_lines(text)
  ]


def read_rollouts(workdir, step: int) -> list[dict]:
  """Reads a step's groups as `Records.write_rollouts` was given them.

  Args:
    workdir: a run's directory.
    step: the step that sampled them.

  Returns:
    One dict per group; arrays come back as lists, non-finite numbers as the
    strings that numpy's `asarray(x, float)` reads.

  Raises:
    UserError: the step left no rollouts; the message names those that did.
  """
  path = _rollout_path(workdir, step)
  try:
    with gzip.open(path, "rt", encoding="utf-8") as file:
      return [json.loads(line) for line in file]
  except (FileNotFoundError, NotADirectoryError) as error:
    names = path.parent.glob("*.jsonl.gz")
    steps = sorted(int(p.name.split(".")[0]) for p in names)
    have = f"it has {steps[0]} to {steps[-1]}" if steps else "it has none"
    raise UserError(
      f"{workdir} has no rollouts of step {step}: {have}"
    ) from error
  except (OSError, EOFError, zlib.error, ValueError) as error:
    raise UserError(f"{path} cannot be read: {error}") from error


def _rollout_path(workdir, step):
  return pathlib.Path(workdir) / "rollouts" / f"{int(step):08d}.jsonl.gz"


def _whole_lines(text: bytes):
  """The complete lines that parse, with their values."""
  lines = []
  for line in text.splitlines(keepends=True):
    if not line.endswith(b"\n"):
      continue  # cut off by a kill
    with contextlib.suppress(ValueError):
      values = json.loads(line)
      if isinstance(values, dict) and "step" in values:
        lines.append((line, values))
  return lines


def _open_to_append(path):
  return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def _write_all(file, data: bytes):
  """Appends all of `data`, or nothing and raises."""
  before = os.fstat(file).st_size
  try:
    while data:
      data = data[os.write(file, data) :]
  except OSError:
    os.ftruncate(file, before)
    raise


def _number(name, value):
  if isinstance(value, (str, int, float)):
    return value
  try:
    return float(value)
  except (TypeError, ValueError) as error:
    kind = type(value).__name__
    raise TypeError(f"metric {name} is a {kind}, not a number") from error


def _encode(value):
  """JSON values with NaN and infinities as strings and arrays as lists."""
  if isinstance(value, dict):
    return {key: _encode(item) for key, item in value.items()}
  if isinstance(value, np.ndarray) and np.isfinite(value).all():
    return value.tolist()
  if isinstance(value, (np.ndarray, np.generic)):
    value = value.tolist()
  if isinstance(value, (list, tuple)):
    return [_encode(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value
