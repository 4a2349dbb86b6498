"""One checkpoint directory on disk: is it whole, does it fit, read it.

The part of `checkpoint.py` that knows no run: paths in, trees or reasons out.
The only module that imports Orbax.
"""

import contextlib
import functools
import json
import logging
import os
import sys

import jax
import orbax.checkpoint as ocp
from etils import epath

from grpo_jax.disk import explain, replacing
from grpo_jax.errors import UserError

LAYOUT_VERSION = 1
_COMMITTED = "_CHECKPOINT_METADATA"
_SUCCESS = "commit_success.txt"
_TEMPORARY = ".orbax-checkpoint-tmp"
_REMOVED = ".removed"
_ASIDE = ".damaged"
_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"  # in its files' paths


class Damaged(UserError):
  """A finished checkpoint whose files cannot be read."""


def numbered(directory: epath.Path) -> list[int]:
  """The step numbers that have a directory, finished or not, ascending."""
  if not directory.is_dir():
    return []
  names = [path.name for path in directory.iterdir()]
  return sorted(int(name) for name in names if name.isdecimal())


def damage(path: epath.Path) -> str | None:
  """Why a step's directory is no finished checkpoint, or None.

  Looks at commit marks, and that each item's index is there. Does not read the
  arrays: a flipped bit shows when they are restored.
  """
  try:
    mark = json.loads((path / _COMMITTED).read_text())
    items = mark["item_handlers"]
    if not mark["commit_timestamp_nsecs"]:
      return f"{_COMMITTED} says that it was never committed"
  except FileNotFoundError:
    return f"{_COMMITTED} is missing"
  except (ValueError, KeyError, TypeError):
    return f"{_COMMITTED} is unreadable"
  # Orbax versions that write this file write it into the items too.
  succeeded = [(path / item / _SUCCESS).exists() for item in items]
  if any(succeeded) and not (path / _SUCCESS).exists():
    return f"{_SUCCESS} is missing"
  for item in items:
    if item == "host":
      continue
    for name in ("_METADATA", "manifest.ocdbt"):
      file = path / item / name
      if not file.exists() or not file.stat().length:
        return f"{item}/{name} is missing or empty"
  try:
    read_record(path)
  except (OSError, ValueError):
    return "host/metadata is missing or unreadable"
  return None


def damaged_steps(directory: epath.Path, finished_only: bool):
  """The steps in a directory that are no checkpoints, with the reasons.

  Args:
    directory: where the steps lie.
    finished_only: leave out those that are being written, or were when their
      process died.

  Returns:
    A list of (step, why), ascending.
  """
  found = []
  for step in numbered(directory):
    if why := damage(directory / str(step)):
      found.append((step, why))
  if directory.is_dir() and not finished_only:
    for path in directory.iterdir():
      step, temporary, _ = path.name.partition(_TEMPORARY)
      if temporary and step.isdecimal():
        found.append((int(step), "its save was interrupted"))
  return sorted(found)


def tidy(directory: epath.Path, steps: list[int]):
  """Removes leftovers of interrupted saves, moves damaged steps aside."""
  for path in list(directory.iterdir()):
    if _TEMPORARY in path.name or path.name.endswith(_REMOVED):
      path.rmtree()
  for step in set(steps):
    if (directory / str(step)).exists():
      set_aside(directory / str(step))


def set_aside(path: epath.Path):
  """Renames a damaged step so that the step can be saved again."""
  aside = path.parent / (path.name + _ASIDE)
  if aside.exists():
    aside.rmtree()
  path.rename(aside)


def remove(path: epath.Path):
  """Removes a step; killed midway, it leaves no half of it under its name."""
  gone = path.parent / (path.name + _REMOVED)
  if gone.exists():
    gone.rmtree()
  path.rename(gone)
  gone.rmtree()


def remove_parts(path: epath.Path):
  """Frees the disk that a failed save of a step took, as far as it lets us."""
  with contextlib.suppress(OSError):  # the save's own error says more
    for part in path.parent.glob(f"{path.name}{_TEMPORARY}*"):
      part.rmtree()


def read_record(path: epath.Path) -> dict:
  """The JSON item of a step: layout_version, score, keep, host."""
  record = json.loads((path / "host" / "metadata").read_text())
  if not isinstance(record, dict):
    raise ValueError(f"{path}/host holds no dict")
  if record.get("layout_version") != LAYOUT_VERSION:
    # Not ours to rank, nor to remove.
    return {**record, "score": None, "keep": True}
  return record


def write_record(path: epath.Path, record: dict):
  """Replaces the JSON item of a finished step, whole or not at all."""
  file, text = path / "host" / "metadata", json.dumps(record)
  if "://" in os.fspath(path):  # an object store replaces whole objects
    file.write_text(text)
    return
  with replacing(file) as part:
    part.write(text.encode())


def check_layout(path, record: dict):
  """Raises `UserError` for a checkpoint that this version cannot read."""
  version = record.get("layout_version")
  if version != LAYOUT_VERSION:
    raise UserError(
      f"checkpoint {path} has layout version {version}; this grpo_jax reads"
      f" version {LAYOUT_VERSION}: use the version that wrote it"
    )


def abstract(tree):
  """What `Checkpoints.restore` needs to know of a tree of arrays.

  Args:
    tree: a pytree of jax arrays, or of ShapeDtypeStructs with sharding.

  Returns:
    The same tree with a jax.ShapeDtypeStruct (shape, dtype, sharding) for each.
  """
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )


def check_items(items: dict):
  """Raises `TypeError` for a leaf that Orbax would not store as an array."""
  if "host" in items:
    raise ValueError("'host' is the name of the JSON item")
  for item, tree in items.items():
    if hasattr(tree, "dtype"):
      raise TypeError(f"item {item} is a bare array; put it into a dict")
    for name, leaf in _named_leaves(tree):
      if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        kind = type(leaf).__name__
        raise TypeError(f"{item}/{name} is a {kind}; only arrays can be saved")


def open_reader():
  """An Orbax checkpointer to restore with."""
  _quiet_orbax()
  return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def open_writer():
  """An Orbax checkpointer that writes on its own threads."""
  _quiet_orbax()
  return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


def start_save(writer, path: epath.Path, items: dict, record: dict):
  """Copies the trees to the host and starts to write them.

  Args:
    writer: from `open_writer`.
    path: the step's directory; must not exist.
    items: name -> pytree of arrays. Orbax refuses a tree without arrays, so
      such a one is not stored.
    record: the JSON item.
  """
  arguments = {"host": ocp.args.JsonSave(record)}
  for item, tree in items.items():
    if jax.tree.leaves(tree):
      arguments[item] = ocp.args.StandardSave(tree)
  writer.save(path, args=ocp.args.Composite(**arguments))


def restore(reader, path: epath.Path, targets: dict) -> dict:
  """Reads items of one step; see `Checkpoints.restore`.

  Args:
    reader: from `open_reader`.
    path: the step's directory.
    targets: item name -> pytree of jax.ShapeDtypeStruct with sharding.

  Returns:
    Item name -> pytree of arrays.

  Raises:
    UserError: an item is missing or does not fit.
    Damaged: the files cannot be read.
  """
  check_layout(path, read_record(path))
  arguments, trees = {}, {}
  for item, target in targets.items():
    if not jax.tree.leaves(target):
      trees[item] = target  # nothing was stored for it
      continue
    _check_fit(path, item, target)
    arguments[item] = ocp.args.StandardRestore(target)
  if not arguments:
    return trees
  try:
    restored = reader.restore(path, args=ocp.args.Composite(**arguments))
  except (OSError, ValueError, KeyError) as error:
    raise _reading_failed(path, error) from error
  for item in arguments:
    trees[item] = restored[item]
    _check_dtypes(path, item, targets[item], trees[item])
  return {item: trees[item] for item in targets}


def _check_fit(path, item, target):
  """Compares a target with what is stored, before anything large is read."""
  if not (path / item).is_dir():
    others = {p.name for p in path.iterdir() if p.is_dir()} - {"host"}
    have = ", ".join(sorted(others))
    raise UserError(f"checkpoint {path} has no item {item!r}; it has {have}")
  try:
    metadata = ocp.StandardCheckpointHandler().metadata(path / item)
    stored = dict(_named_leaves(metadata.tree))
  except (OSError, ValueError, KeyError) as error:
    raise _reading_failed(path, error) from error
  wanted = {name: _on_disk(leaf) for name, leaf in _named_leaves(target)}
  wrong = [
    f"{item}/{name}: asked for {_describe(want)}, stored {_describe(have)}"
    for name in sorted(wanted.keys() | stored.keys())
    if _differ(want := wanted.get(name), have := stored.get(name))
  ]
  if wrong:
    more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
    raise UserError(
      f"checkpoint {path} does not fit: {wrong[0]}{more}; restore it with the"
      " configuration that wrote it"
    )
  for name, leaf in _named_leaves(target):
    _check_sharding(path, f"{item}/{name}", leaf)


def _check_sharding(path, name, leaf):
  if getattr(leaf, "sharding", None) is None:
    raise TypeError(f"the target of {name} has no sharding")
  try:
    leaf.sharding.shard_shape(leaf.shape)
  except ValueError as error:
    raise UserError(
      f"checkpoint {path}: {name} {_describe(leaf)} cannot be laid out as"
      f" {leaf.sharding}"
    ) from error


def _check_dtypes(path, item, target, tree):
  """The last guard against a cast, and against a PRNG key of another kind."""
  for (name, want), have in zip(_named_leaves(target), jax.tree.leaves(tree)):
    if want.dtype != have.dtype:
      raise UserError(
        f"checkpoint {path}: {item}/{name} is stored as {have.dtype}, asked"
        f" for {want.dtype}"
      )


def _reading_failed(path, error):
  action = f"could not read checkpoint {path}"
  known = explain(error, action)
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return known or Damaged(f"{action}, it is damaged: {lines[0][:200]}")


def _named_leaves(tree):
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return [
    (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
    for path, leaf in leaves
  ]


def _on_disk(leaf):
  """A typed PRNG key is stored as the integers that it is made of."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    bare = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(jax.random.key_data, bare)
  return leaf


def _differ(want, have):
  if want is None or have is None:
    return True
  return tuple(want.shape) != tuple(have.shape) or want.dtype != have.dtype


def _describe(leaf):
  if leaf is None:
    return "nothing"
  return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _quiet_orbax():
  """Drops what Orbax logs: progress, and traces of errors that it raises too.

  Orbax logs to absl's one logger, so the filter looks at where a line is from.
  """
  logger = logging.getLogger("absl")
  if _not_from_orbax not in logger.filters:
    logger.addFilter(_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_not_a_lost_write)
    sys.unraisablehook = functools.partial(_unraisable, sys.unraisablehook)


def _not_a_lost_write(record):
  """Drops writes that failed beside the one whose error was raised."""
  text = f"{record.getMessage()} {record.exc_info}"
  return _ORBAX not in text and "os_error_code=" not in text


def _unraisable(earlier, event):
  """Drops what TensorStore's threads print when a save has failed already.

  Its other writes end later and report to an event loop that is closed. Only
  C++ calls that function as the outermost one.
  """
  trace = event.exc_traceback
  code = trace and trace.tb_frame.f_code
  if not code or code.co_name != "call_soon_threadsafe":
    earlier(event)


def _not_from_orbax(record):
  return _ORBAX not in record.pathname
