"""The questions of a reasoning_gym dataset: made, split, each only once."""

import dataclasses
import functools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.named import suggest
from grpo_jax.tasks.base import Example, question_id, render
from grpo_jax.tasks.mixture import Part

# Questions are drawn with this seed, whatever the run's: splits never move.
QUESTION_SEED = 20250101

# The setting that says how many questions a split has.
SETTINGS = {"train": "size", "tuning": "tuning", "heldout": "heldout"}


@functools.cache
def create(dataset: str, options: str, draws: int) -> Any:
  """The reasoning_gym dataset, its name and options checked.

  Args:
    dataset: its name.
    options: a JSON object or ''.
    draws: questions it can generate.
  """
  # Inside the function: the import takes a second that other tasks save.
  import reasoning_gym as gym
  from reasoning_gym.factory import DATASETS

  where = f"reasoning_gym dataset {dataset!r}"
  if dataset == "composite":
    raise UserError(f"{where}: say its parts in task.mixture instead")
  if dataset not in DATASETS:
    raise UserError(
      f"{where} does not exist{suggest(dataset, DATASETS)}; there are "
      f"{len(DATASETS)}"
    )
  try:
    chosen = json.loads(options) if options.strip() else {}
  except (ValueError, RecursionError) as e:
    raise UserError(
      f"{where}: options {options[:60]!r} is not JSON: {e}"
    ) from None
  if not isinstance(chosen, dict):
    raise UserError(
      f"{where}: options {options[:60]!r} must be a JSON object, like "
      '{"max_terms": 2}'
    )
  known = {f.name for f in dataclasses.fields(DATASETS[dataset][1])}
  known -= {"seed", "size"}
  for key in chosen:
    if key not in known:
      raise UserError(
        f"{where} has no option {key!r}{suggest(key, known)}; it has "
        f"{', '.join(sorted(known))}"
      )
  try:
    return gym.create_dataset(dataset, seed=QUESTION_SEED, size=draws, **chosen)
  except Exception as e:
    raise UserError(
      f"{where} refuses options {options[:100]!r}: {type(e).__name__}: "
      f"{' '.join(str(e).split())[:200]}"
    ) from None


def _cut(question: str, part: Part) -> str:
  """The asked part of a generated text."""
  if not part.question_regex:
    return question
  found = re.search(part.question_regex, question, re.DOTALL)
  if not found or not found.groups():
    raise UserError(
      f"question_regex {part.question_regex!r} finds no group in"
      f" {question[:80]!r}, a question of {part.title}"
    )
  return found.group(1)


def _split(key: str) -> str:
  """The split of a question, by its id alone."""
  return {0: "heldout", 1: "tuning"}.get(int(key, 16) % 8, "train")


def make(
  part: Part, wanted: Mapping[str, int], taken: Collection[str]
) -> tuple[dict[str, tuple[Example, ...]], int]:
  """The first distinct questions of each split, in the order of the index.

  Args:
    part: dataset, options, question and template.
    wanted: how many of each split.
    taken: ids of questions that are not to be asked again.

  Returns:
    {split: examples}, and the draws the dataset was made for.

  Raises:
    UserError: an unknown dataset or option, or too few distinct questions.
  """
  size = wanted["train"] * 4 // 3
  draws = 10 * max(8 * wanted["heldout"], 8 * wanted["tuning"], size) + 1000
  generator = create(part.dataset, part.options, draws)
  return _distinct(generator, part, wanted, draws, taken), draws


def _distinct(
  generator: Any,
  part: Part,
  wanted: Mapping[str, int],
  draws: int,
  taken: Collection[str],
) -> dict[str, tuple[Example, ...]]:
  splits: dict[str, list[Example]] = {name: [] for name in wanted}
  seen = set(taken)
  newest = index = 0
  for index in range(draws):
    lacking = [k for k, count in wanted.items() if len(splits[k]) < count]
    # Give up early on a dataset that has nothing new to say.
    if not lacking or index - newest > sum(wanted.values()) + 1000:
      break
    try:
      entry = generator[index]
    except Exception as e:
      raise UserError(
        f"{part.title} failed to generate question "
        f"{index}: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
      ) from None
    question = _cut(entry["question"], part)
    key = question_id(question)
    if key in seen:
      continue
    seen.add(key)
    newest = index
    if _split(key) in lacking:
      # Some datasets have no single answer: only their verifier knows.
      answer = "" if entry["answer"] is None else str(entry["answer"])
      prompt = render(part.template, question)
      splits[_split(key)].append(Example(key, prompt, answer, entry))
  for split, key in SETTINGS.items():
    if len(splits[split]) < wanted[split]:
      raise UserError(
        f"{part.title} gave {len(splits[split])} distinct questions of the"
        f" {split} split in {index} draws, fewer than the {wanted[split]} of"
        f" {key}; lower it{' or its weight' * bool(part.name)}, or widen its"
        " options"
      )
  return {name: tuple(examples) for name, examples in splits.items()}
