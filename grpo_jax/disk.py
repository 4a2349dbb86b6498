"""Files that are either whole or absent, and disk errors in one line."""

import contextlib
import errno
import json
import os
import re

from grpo_jax.errors import UserError

_MENDS = {
  errno.ENOSPC: "free some space or choose another --workdir",
  errno.EDQUOT: "free some of your quota or choose another --workdir",
  errno.EACCES: "check the permissions or choose another --workdir",
  errno.EPERM: "check the permissions or choose another --workdir",
  errno.EROFS: "choose a --workdir that can be written",
  errno.ENOTDIR: "a file stands where a directory is needed: move it away",
  errno.EEXIST: "a file stands where a directory is needed: move it away",
}

_NUMBER = re.compile(r"(?:os_error_code='|OS error )(\d+)")  # TensorStore


def explain(error: BaseException, action: str, after: str = ""):
  """Turns a disk error that a user can mend into a `UserError`.

  Looks through the error's causes, and into the text of errors from C++
  libraries, which carry the number.

  Args:
    error: what was raised.
    action: what could not be done, e.g. "could not write runs/a/metrics.jsonl".
    after: what the reader should know next, e.g. which checkpoint is intact.

  Returns:
    A `UserError`, or None for an error that no change of disk would mend.
  """
  seen = error
  while seen is not None:
    number = getattr(seen, "errno", None)
    if number is None:
      found = _NUMBER.search(str(seen))
      number = int(found.group(1)) if found else None
    if number in _MENDS:
      reason = os.strerror(number).lower()
      after = f"{after}; " if after else ""
      return UserError(f"{action}: {reason}; {after}{_MENDS[number]}")
    seen = seen.__cause__ or seen.__context__
  return None


@contextlib.contextmanager
def explained(action: str, mend: str = ""):
  """Raises the disk errors of its block as `UserError`, others unchanged.

  Args:
    action: what could not be done if the block fails.
    mend: what helps against every other `OSError`, where something does.
  """
  try:
    yield
  except OSError as error:
    known = explain(error, action)
    if known is None and mend:
      known = UserError(f"{action}: {(error.strerror or '').lower()}; {mend}")
    if known is None:
      raise
    raise known from error


@contextlib.contextmanager
def replacing(path):
  """Opens a file for writing bytes that replaces `path` only when complete.

  The bytes go to a temporary name beside `path`, reach the disk, and are then
  renamed, so a reader (or the next run, after a kill) finds the old file or the
  new one, never a part. The temporary file is removed if the block raises.

  Args:
    path: where the file is to stand; its directory must exist.

  Yields:
    The open binary file.
  """
  part = f"{os.fspath(path)}.part"
  try:
    with open(part, "wb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.remove(part)
    raise


def save_json(path, value):
  """Writes `value` as indented JSON, whole or not at all.

  Args:
    path: the file; its directory must exist.
    value: anything `json.dumps` takes, without NaN or infinities.

  Raises:
    UserError: the disk is full or the place cannot be written.
  """
  text = json.dumps(value, indent=2, allow_nan=False) + "\n"
  with explained(f"could not write {path}"), replacing(path) as file:
    file.write(text.encode())
