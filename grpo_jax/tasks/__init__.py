"""Sources of prompts, each with the rule that scores its completions."""

from typing import Any

from grpo_jax import named
from grpo_jax.tasks import (
  hf_datasets,
  jsonl,
  mathematics,
  reasoning_gym,
  words,
)
from grpo_jax.tasks.base import Task

TASKS = {
  "words": words.words,
  "reasoning_gym": reasoning_gym.reasoning_gym,
  "jsonl": jsonl.jsonl,
  "datasets": hf_datasets.from_datasets,
  "gsm8k": mathematics.gsm8k,
  "math": mathematics.math,
}


def make_task(name: str, **settings: Any) -> Task:
  """Builds a task by name; unset settings take the constructor's defaults.

  Args:
    name: a key of `TASKS`, or `module:function` for one that is not there.
    **settings: arguments of that constructor.

  Raises:
    UserError: no such task, a setting it does not have or that has the wrong
      type, one it needs and did not get, or whatever the constructor refuses.
  """
  return named.make("task", TASKS, {"name": name, **settings})
