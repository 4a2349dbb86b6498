"""Named constructors: from a group of configuration keys to a record.

A group is `name` and settings. The constructor's signature is the group's
schema: a setting it does not have is refused, and one that is unset stands at
the constructor's own default. A name with a colon, `module:function`, is a
constructor of one's own, in no table: `experiments.my_task:addition`.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpo_jax.errors import UserError


def make(
  kind: str,
  known: Mapping[str, Callable[..., Any]],
  group: Mapping[str, Any],
  *args: Any,
) -> Any:
  """Calls the constructor that a group names.

  Args:
    kind: 'task', 'algorithm' or 'optimizer', for messages.
    known: name -> constructor.
    group: `name` and settings; a setting that is None is unset.
    *args: positional arguments that come before the settings.

  Raises:
    UserError: no such constructor, a setting it does not have or of the wrong
      type, or one it needs and did not get.
  """
  settings = {k: v for k, v in group.items() if v is not None}
  name = settings.pop("name")
  constructor = find(kind, name, known)
  parameters = inspect.signature(constructor).parameters
  parameters = dict(list(parameters.items())[len(args) :])
  for key, value in settings.items():
    if key not in parameters:
      has = f"it has {', '.join(parameters)}" if parameters else "it has none"
      raise UserError(
        f"{kind} {name} has no setting {key!r}{suggest(key, parameters)}; {has}"
      )
    _check_type(f"{kind} {name}", key, value, parameters[key].default)
  for key, parameter in parameters.items():
    if parameter.default is parameter.empty and settings.get(key) in (None, ""):
      raise UserError(f"{kind} {name} needs the setting {key!r}")
  try:
    return constructor(*args, **settings)
  except UserError:
    raise
  except Exception as error:  # one's own constructor may raise anything
    why = " ".join(f"{type(error).__name__}: {error}".split())
    raise UserError(f"{kind} {name!r} cannot be made: {why}") from error


def find(
  kind: str, name: str, known: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
  """The constructor of a name, or of `module:function`.

  Raises:
    UserError: there is none; the message has the names closest to it.
  """
  if name in known:
    return known[name]
  if ":" not in name:
    raise UserError(
      f"unknown {kind} {name!r}{suggest(name, known)}; known are"
      f" {', '.join(known)}, or module:function for one of your own"
    )
  module, _, function = name.partition(":")
  try:
    return getattr(importlib.import_module(module), function)
  except Exception as error:  # a module of one's own may raise anything
    why = f"{type(error).__name__}: {error}"
    raise UserError(f"{kind} {name!r} cannot be imported: {why}") from error


def suggest(name: str, known: Iterable[str]) -> str:
  """' (did you mean X?)' for the known names closest to `name`, or ''."""
  close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.6)
  return f" (did you mean {' or '.join(close)}?)" if close else ""


def _check_type(of: str, key: str, value: Any, default: Any) -> None:
  """A text where a number belongs, and the reverse, told by the default."""
  if isinstance(default, bool):
    right, what = isinstance(value, bool), "true or false"
  elif isinstance(default, int | float):
    right = isinstance(value, int | float) and not isinstance(value, bool)
    right = right and (isinstance(default, float) or value % 1 == 0)
    what = "a number" if isinstance(default, float) else "a whole number"
  elif isinstance(default, tuple):
    right, what = isinstance(value, str | tuple | list), "one or more strings"
  elif isinstance(default, str):
    right, what = isinstance(value, str), "a string"
  else:
    return
  if not right:
    raise UserError(f"{of}: {key} {value!r} must be {what}")
