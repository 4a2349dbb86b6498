"""Opening a set with the `datasets` library, of the hub or of local files."""

import contextlib
import logging
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.named import suggest

FILES = {
  ".parquet": "parquet",
  ".jsonl": "json",
  ".json": "json",
  ".csv": "csv",
  ".arrow": "arrow",
}


def open_tables(
  path: str, configuration: str, wanted: Sequence[str], columns: Sequence[str]
) -> dict[str, Any]:
  """The tables of the splits that are wanted, on disk.

  Args:
    path: a hub id with an optional `@revision`, a directory or a file.
    configuration: one or several, joined by commas; '' where there is one.
    wanted: names of splits.
    columns: the columns to read; the others stay unread.

  Returns:
    a `datasets.Dataset` for each.

  Raises:
    UserError: they cannot be had, in one line with the mend.
  """
  try:
    import datasets
  except ImportError as error:
    raise UserError(
      f"task datasets needs the datasets library ({error}); pip install"
      " -e '.[data]'"
    ) from None
  names = [x.strip() for x in configuration.split(",")]
  with _quiet(datasets):
    found = [_load(datasets, path, name) for name in names]
  return {
    split: datasets.concatenate_datasets(
      [_columns(path, one, split, columns) for one in found]
    )
    for split in wanted
  }


def _columns(path: str, one: Any, split: str, columns: Sequence[str]) -> Any:
  """One split's table of these columns."""
  if split not in one:
    has = ", ".join(f"{k} ({len(v):,} rows)" for k, v in one.items())
    raise UserError(
      f"{path} has no split {split!r}{suggest(split, one)}; it has {has}"
    )
  names = one[split].column_names
  for column in columns:
    if column not in names:
      raise UserError(
        f"{path} {split} lacks the column {column!r}{suggest(column, names)};"
        f" it has {', '.join(map(repr, names[:12]))}"
      )
  return one[split].select_columns(list(dict.fromkeys(columns)))


def _load(datasets: Any, path: str, configuration: str) -> dict[str, Any]:
  """Every split of one configuration."""
  local = pathlib.Path(path).expanduser()
  if not local.exists() and path.startswith(("/", ".", "~")):
    raise UserError(f"task datasets cannot read {path!r}: no such file")
  try:
    if local.is_file():
      kind = FILES.get(local.suffix)
      if kind is None:
        raise UserError(
          f"task datasets cannot read {path!r}: a file ends in one of"
          f" {', '.join(FILES)}"
        )
      return datasets.load_dataset(kind, data_files={"train": str(local)})
    if local.is_dir():
      if (local / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(local))
      if (local / "state.json").exists():
        return {"train": datasets.load_from_disk(str(local))}
      return datasets.load_dataset(str(local), configuration or None)
    name, _, revision = path.partition("@")
    return datasets.load_dataset(
      name, configuration or None, revision=revision or None
    )
  except UserError:
    raise
  except Exception as error:  # its readers raise anything
    raise UserError(
      f"task datasets cannot read {path!r}: {_why(error)}"
    ) from None


def _why(error: Exception) -> str:
  text = " ".join(str(error).split())[:300]
  kind = type(error).__name__
  if isinstance(error, StopIteration):
    return "it has no rows"
  if "gated" in text:
    return f"{text}; accept its terms on the hub, then run hf auth login"
  if isinstance(error, ConnectionError):
    return (
      f"{text}; check its name and the network, or set task.path to a local"
      " copy"
    )
  if kind == "DatasetNotFoundError":
    return f"{text}; check its name, and hf auth login if it is private"
  if "BuilderConfig" in text or "Config name is missing" in text:
    return f"{text}; set task.configuration"
  cause = error.__cause__  # what a reader of files met
  why = f": {' '.join(str(cause).split())[:200]}" if cause else ""
  return f"{kind}: {text}{why}"


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
  """Progress bars on a terminal alone, and no line for every attempt."""
  loggers = [logging.getLogger(x) for x in ("huggingface_hub", "datasets")]
  levels = [x.level for x in loggers]
  bars = datasets.are_progress_bars_disabled()
  for logger in loggers:
    logger.setLevel(logging.ERROR)
  if not sys.stderr.isatty():
    datasets.disable_progress_bars()
  try:
    yield
  finally:
    for logger, level in zip(loggers, levels):
      logger.setLevel(level)
    if not bars:
      datasets.enable_progress_bars()
