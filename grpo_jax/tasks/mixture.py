"""A mixture of reasoning_gym datasets: its parts, their shares, their order.

The package's own composite dataset is not used: it throws a die for every
index, so that a change of one weight moves every question of every part.
"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.named import suggest
from grpo_jax.tasks.base import Example, check_range

WHERE = "reasoning_gym mixture"


@dataclasses.dataclass(frozen=True)
class Part:
  """One dataset with its options, and how it is asked and judged.

  Attributes:
    dataset: its name in reasoning_gym.
    options: its options as a JSON object, '' for its defaults.
    name: of the part in metrics and messages; '' is the dataset's.
    weight: its share of the questions, before they are made to sum to 1.
    question_regex, template, extract, success_from: as in
      `reasoning_gym.reasoning_gym`.
  """

  dataset: str
  options: str
  question_regex: str
  template: str
  extract: str
  success_from: float
  name: str = ""
  weight: float = 1.0

  @property
  def title(self) -> str:
    """The part in a message."""
    what = f"reasoning_gym dataset {self.dataset!r}"
    named = self.name not in ("", self.dataset)
    return f"part {self.name!r} ({what})" if named else what


def read(text: str, default: Part) -> tuple[Part, ...]:
  """The parts of `task.mixture`.

  Args:
    text: a JSON list of objects with 'dataset' and any of 'options' (an
      object), 'weight' (above 0, 1 where not given), 'name',
      'question_regex', 'template', 'extract' and 'success_from'.
    default: what holds for a part that does not say.

  Raises:
    UserError: no such list, an unknown key, a weight that is not above 0, or
      two parts of one name or of the same questions.
  """
  try:
    entries = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f"{WHERE} {text[:60]!r} is not JSON: {error}") from None
  if not isinstance(entries, list) or not entries:
    raise UserError(
      f"{WHERE} {text[:60]!r} must be a JSON list, like"
      ' [{"dataset": "chain_sum", "weight": 2}, {"dataset": "gcd"}]'
    )
  parts = [
    _part(f"{WHERE}, part {i}", x, default) for i, x in enumerate(entries)
  ]
  for i, part in enumerate(parts):
    for other in parts[:i]:
      if part.name == other.name:
        raise UserError(
          f'{WHERE} has two parts {part.name!r}; give each a "name" of its own'
        )
      if (part.dataset, part.options) == (other.dataset, other.options):
        raise UserError(
          f"{WHERE}: parts {other.name!r} and {part.name!r} are the same"
          " questions; make one of them, with the sum of their weights"
        )
  return tuple(parts)


def _part(where: str, entry: Any, default: Part) -> Part:
  """One entry of the list, every value checked."""
  known = [x.name for x in dataclasses.fields(Part)]
  if not isinstance(entry, dict):
    raise UserError(f"{where}: {entry!r} must be a JSON object")
  for key, value in entry.items():
    if key not in known:
      raise UserError(
        f"{where} has an unknown key {key!r}{suggest(key, known)}; known are"
        f" {', '.join(known)}"
      )
    text = key not in ("options", "weight", "success_from")
    if text and not isinstance(value, str):
      raise UserError(f"{where}: {key} {value!r} must be a string")
  if not entry.get("dataset"):
    raise UserError(f'{where} needs a "dataset"')
  options = entry.get("options", {})
  if not isinstance(options, dict):
    raise UserError(f"{where}: options {options!r} must be a JSON object")
  weight = entry.get("weight", 1.0)
  check_range(where, "weight", weight, 0)
  if not 0 < weight < math.inf:
    raise UserError(f"{where}: weight {weight} must be above 0 and finite")
  name = entry.get("name") or entry["dataset"]
  if not re.fullmatch(r"[\w.-]+", name):  # it becomes a metric's name
    raise UserError(
      f"{where}: name {name!r} must be of letters, digits, '_', '-' and '.'"
    )
  settled = {
    "options": json.dumps(options, sort_keys=True) if options else "",
    "weight": float(weight),
    "name": name,
  }
  return dataclasses.replace(default, **{**entry, **settled})


def shares(total: int, parts: Sequence[Part], what: str) -> list[int]:
  """Whole numbers in proportion to the weights, by largest remainder.

  Args:
    total: what they sum to.
    parts: whose weights.
    what: is shared, for the message.

  Raises:
    UserError: a part gets none of a total above 0.
  """
  whole = math.fsum(x.weight for x in parts)
  exact = [total * x.weight / whole for x in parts]
  out = [math.floor(x) for x in exact]
  rest = sorted(range(len(parts)), key=lambda i: out[i] - exact[i])
  for i in rest[: total - sum(out)]:
    out[i] += 1
  for part, count in zip(parts, out):
    if total and not count:
      raise UserError(
        f"{WHERE}: part {part.name!r} gets none of {what} {total}, its share is"
        f" {part.weight / whole:.2g}; raise its weight, or {what}"
      )
  return out


def interleave(parts: Sequence[Sequence[Example]]) -> tuple[Example, ...]:
  """All examples, those of each part spread evenly and in their order.

  So the first N of a split hold every part in its proportion too.
  """
  places = [
    ((j + 0.5) / len(part), i, j)
    for i, part in enumerate(parts)
    for j in range(len(part))
  ]
  return tuple(parts[i][j] for _, i, j in sorted(places))
