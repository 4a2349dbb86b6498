"""An algorithm in words and symbols, from its parts' own docstrings."""

import dataclasses
import functools
import inspect
from typing import Any

from grpo_jax.algorithm import Algorithm

# Fields that are parts, in the order in which a token meets them.
PARTS = (
  "advantage",
  "kl_in_reward",
  "length_penalty",
  "keep",
  "resample",
  "ratio",
  "anchor",
  "surrogate",
  "select",
  "correction",
  "bonus",
  "kl",
  "adaptive",
  "reference",
  "critic",
  "weights",
)
FLAGS = ("steps", "baseline_rollout", "offline")


def _opened(part: Any) -> tuple[Any, dict[str, Any]]:
  """What a part is named and documented by, and its constants."""
  if isinstance(part, functools.partial):
    return part.func, part.keywords
  if not dataclasses.is_dataclass(part):
    return part, {}
  values = {x.name: getattr(part, x.name) for x in dataclasses.fields(part)}
  if values.get("fn") is not None:  # an outcome is what its function is
    return _opened(values["fn"])
  return type(part), values


def words(part: Any) -> str:
  """A part as one line: what it is and its constants.

  Args:
    part: a function, a record, a partial, or None.
  """
  if part is None:
    return "none"
  what, values = _opened(part)
  return f"{_first_line(what)} {_constants(values)}".rstrip()


def name(part: Any) -> str:
  """A part's name and its constants, for tables."""
  if part is None:
    return ""
  what, values = _opened(part)
  return f"{what.__name__}{_constants(values)}"


def _first_line(thing: Any) -> str:
  text = inspect.getdoc(thing)
  if not text:
    return getattr(thing, "__name__", repr(thing))
  return text.split("\n\n")[0].split("\n")[0].rstrip(".")


def _constants(values: dict[str, Any]) -> str:
  shown = []
  for key, value in values.items():
    if value is None or value is False or value == float("inf"):
      continue  # what does not act
    if isinstance(value, bool | int | float | str | tuple):
      shown.append(f"{key}={value}")
    elif callable(value) or dataclasses.is_dataclass(value):
      shown.append(f"{key}={name(value)}")
    else:
      shown.append(f"{key}=array")
  return f"({', '.join(shown)})" if shown else ""


def formula(a: Algorithm) -> str:
  """The maximised objective, its parts named by letters."""
  factor = "" if _is_default(a, "correction") else "c·"
  out = f"Σ w · {factor}surrogate(r, Â)"
  if not _is_default(a, "bonus"):
    out = f"Σ w · [{factor}surrogate(r, Â) + bonus]"
  if a.kl is not None:
    out += f" - Σ w · β KL, β = {a.kl.coefficient}"
  if a.critic is not None:
    out += " - value loss"
  return out


def _is_default(a: Algorithm, field: str) -> bool:
  default = Algorithm.__dataclass_fields__[field].default
  return default is not dataclasses.MISSING and getattr(a, field) is default


def rows(a: Algorithm, preset: Algorithm | None) -> list[tuple[str, str]]:
  """(what, how) of an algorithm: the formula, each part that acts, and what
  differs from the row of that name as its paper has it.

  Args:
    a: as configured.
    preset: the row with its constructor's defaults, or None if it has none.
  """
  out = [("objective", f"{a.name} ({a.source}): maximise {formula(a)}")]
  for field in PARTS:
    if not _is_default(a, field):
      out.append((f"  {field}", words(getattr(a, field))))
  out += [(f"  {x}", "yes") for x in FLAGS if getattr(a, x)]
  if preset is not None:
    changed = [
      f"{field}: {name(getattr(a, field)) or 'none'}, not"
      f" {name(getattr(preset, field)) or 'none'}"
      for field in PARTS
      if name(getattr(a, field)) != name(getattr(preset, field))
    ]
    out.append(("  differs", "; ".join(changed) or "nothing: as its paper"))
  return out
