"""Sources of prompts, each with the rule that scores its completions."""

import inspect

from grpo_jax.errors import UserError
from grpo_jax.tasks import jsonl, reasoning_gym, words
from grpo_jax.tasks.base import Task, suggest

TASKS = {
  "words": words.words,
  "reasoning_gym": reasoning_gym.reasoning_gym,
  "jsonl": jsonl.jsonl,
}


def make_task(name: str, **settings) -> Task:
  """Builds a task by name; unset settings take the constructor's defaults.

  Args:
    name: a key of `TASKS`.
    **settings: arguments of that constructor.

  Raises:
    UserError: no such task, a setting it does not have or that has the wrong
      type, one it needs and did not get, or whatever the constructor refuses.
  """
  if name not in TASKS:
    raise UserError(
      f"unknown task {name!r}{suggest(name, TASKS)}; tasks are "
      f"{', '.join(TASKS)}"
    )
  parameters = inspect.signature(TASKS[name]).parameters
  for key, value in settings.items():
    if key not in parameters:
      raise UserError(
        f"task {name} has no setting {key!r}{suggest(key, parameters)}; it has "
        f"{', '.join(parameters)}"
      )
    _check_type(name, key, value, parameters[key])
  for key, parameter in parameters.items():
    if parameter.default is parameter.empty and not settings.get(key):
      raise UserError(f"task {name} needs the setting {key!r}")
  return TASKS[name](**settings)


def _check_type(task: str, key: str, value, parameter) -> None:
  """A text where a number belongs, and the reverse, are told by the default."""
  example = parameter.default
  if isinstance(example, (int, float)):
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    right = right and (isinstance(example, float) or value % 1 == 0)
    what = "a number" if isinstance(example, float) else "a whole number"
  elif isinstance(example, tuple):
    right, what = isinstance(value, (str, tuple, list)), "one or more strings"
  else:
    right, what = isinstance(value, str), "a string"
  if not right:
    raise UserError(f"task {task}: {key} {value!r} must be {what}")
