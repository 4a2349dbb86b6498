"""Any task of the reasoning_gym package, scored by its own verifier."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.named import suggest
from grpo_jax.rewards import rules
from grpo_jax.tasks.base import (
  Completion,
  Example,
  Reward,
  RewardFunction,
  Task,
  answer_itself,
  check_range,
  check_template,
  no_demonstration,
  question_id,
  render,
  strings,
)

# Questions are drawn with this seed, whatever the run's: splits never move.
QUESTION_SEED = 20250101


def reasoning_gym(
  dataset: str = "chain_sum",
  options: str = "",
  size: int = 4096,
  tuning: int = 256,
  heldout: int = 256,
  question_regex: str = "",
  template: str = "{question}\n",
  stop: str | Sequence[str] = ("\n",),
  extract: str = "text",
  success_from: float = 0.99,
) -> Task:
  """Questions and verifier of one reasoning_gym dataset.

  The reward is 1 when the verifier's score of the extracted answer is at least
  `success_from` and the completion was not truncated, else 0. The raw score is
  the part 'score': many verifiers pay part marks for a long text that contains
  the answer, so it is no reward. A verifier that raises makes the row
  unscored.

  With `extract` 'text' the generator's own answer is the demonstration that a
  warm-up imitates.

  Some verifiers evaluate the answer as Python. Text that is not plainly an
  answer of their kind scores 0 and never reaches them (`safe_to_verify`).

  A question's text decides its split: an eighth of all are held out, an eighth
  are for tuning. Within a split they come in the order of the dataset's index,
  so a larger `size` leaves the other two as they are, and no split gets the
  easy questions that a generator soon repeats. All are generated at start-up:
  a second for most datasets, minutes for a few (20 ms a question for
  'countdown').

  Args:
    dataset: name of the dataset in reasoning_gym.
    options: its options as a JSON object, for instance
      '{"max_terms": 2, "max_digits": 2}'; not 'seed' or 'size'.
    size: distinct training questions.
    tuning: distinct tuning questions.
    heldout: distinct held-out questions.
    question_regex: what of the generator's text is the question: the first
      group of the first match; '' takes the whole text.
    template: text with `{question}`; few-shot examples are part of it.
    stop: strings, one token each, that end a completion.
    extract: rule that reads the answer from the text (`rules.make_extractor`);
      'text' is the whole completion without surrounding white space.
    success_from: lowest score that counts as success, above 0 up to 1.

  Raises:
    UserError: unknown dataset or option, an option's bad value, or fewer
      distinct questions than asked for.
  """
  check_template(template)
  check_range("reasoning_gym", "size", size, 1, whole=True)
  check_range("reasoning_gym", "tuning", tuning, 0, whole=True)
  check_range("reasoning_gym", "heldout", heldout, 0, whole=True)
  check_range("reasoning_gym", "success_from", success_from, 1e-6, 1)
  rules.make_extractor(extract)  # refuses an unknown rule before the draws
  wanted = {"train": size, "tuning": tuning, "heldout": heldout}
  draws = 10 * max(8 * heldout, 8 * tuning, size * 4 // 3) + 1000
  generator = _create(dataset, options, draws)
  return Task(
    name=f"reasoning_gym/{dataset}",
    splits=_distinct(
      generator, dataset, wanted, draws, template, question_regex
    ),
    # In a process: some verifiers search, and a few texts take them minutes.
    reward=RewardFunction(
      "verifier",
      _Verifier(dataset, options, draws, extract, success_from),
      cpu_bound=True,
    ),
    stop=strings("reasoning_gym", "stop", stop),
    parts=("score",),
    demonstration=answer_itself if extract == "text" else no_demonstration,
  )


class _Verifier:
  """Extracts the answer and asks the dataset's own verifier.

  Pickled as its arguments: a few datasets hold what pickle refuses, and some
  megabytes that a worker makes itself as it loads.
  """

  def __init__(
    self,
    dataset: str,
    options: str,
    draws: int,
    extract: str,
    success_from: float,
  ):
    self._arguments = (dataset, options, draws, extract, success_from)
    self._dataset = dataset
    self._score = _create(dataset, options, draws).score_answer
    self._extractor = rules.make_extractor(extract)
    self._success_from = success_from

  def __reduce__(self):
    return _Verifier, self._arguments

  def __call__(self, example: Example, completion: Completion) -> Reward:
    answer = self._extractor(completion.text)
    value = 0.0
    if answer is not None and safe_to_verify(self._dataset, answer):
      try:
        value = float(self._score(answer, example.source))
      except (Exception, SystemExit) as e:
        why = f"its verifier raised {type(e).__name__}: {e}"
        return Reward(None, None, {}, answer, why)
    right = float(value >= self._success_from and not completion.truncated)
    return Reward(right, right, {"score": value}, answer)


# --- Text that may reach a verifier that evaluates it ------------------------

# These compare first and evaluate only to pay part marks, below success.
_PLAIN = frozenset(
  ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
)
_ARITHMETIC = frozenset(("countdown", "puzzle24"))
_ALGEBRA = frozenset(
  (
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
  )
)
_ALGEBRA_NAMES = frozenset(
  ("sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan")
)
# One small power of a letter or a bracket: x**2, sin(x)**2, x**(3/2).
_POWER = re.compile(r"([A-Za-z)])\s*\*\*\s*(?:[0-9]{1,2}|\([0-9/ ]{1,5}\))")


def safe_to_verify(dataset: str, answer: str) -> bool:
  """Whether the dataset's verifier may see `answer`.

  True for every text of a dataset whose verifier only compares. Where the
  verifier hands the text to Python's or sympy's evaluator, True only for short
  text in the characters, names and small powers of a plain answer: nothing
  that calls, imports, indexes, or builds a tower of powers.

  Args:
    dataset: name in reasoning_gym, of the version the package pins from below.
    answer: text written by a model.
  """
  if dataset in _PLAIN:
    return re.fullmatch(r"[A-Za-z0-9_\s]*", answer) is not None
  if dataset not in _ARITHMETIC | _ALGEBRA:
    return True
  if len(answer) > 300:
    return False
  if dataset in _ARITHMETIC:
    plain = re.fullmatch(r"[0-9+\-*/(). ]*", answer) is not None
    return plain and "**" not in answer
  if not re.fullmatch(r"(?:[A-Za-z0-9+\-*/() ]|[0-9]\.[0-9])*", answer):
    return False
  names = re.findall(r"[A-Za-z]+", answer)
  if any(len(n) > 1 and n not in _ALGEBRA_NAMES for n in names):
    return False
  powers = _POWER.findall(answer)
  return len(powers) == answer.count("**") and powers.count(")") <= 1


# --- Building the questions -------------------------------------------------


@functools.cache
def _create(dataset: str, options: str, draws: int) -> Any:
  """The reasoning_gym dataset, its name and options checked."""
  # Inside the function: the import takes a second that other tasks save.
  import reasoning_gym as gym
  from reasoning_gym.factory import DATASETS

  where = f"reasoning_gym dataset {dataset!r}"
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


def _cut(question: str, pattern: str, dataset: str) -> str:
  """The asked part of a generated text."""
  if not pattern:
    return question
  found = re.search(pattern, question, re.DOTALL)
  if not found or not found.groups():
    raise UserError(
      f"question_regex {pattern!r} finds no group in {question[:80]!r}, a"
      f" question of reasoning_gym dataset {dataset!r}"
    )
  return found.group(1)


def _split(key: str) -> str:
  """The split of a question, by its id alone."""
  return {0: "heldout", 1: "tuning"}.get(int(key, 16) % 8, "train")


def _distinct(
  generator: Any,
  dataset: str,
  wanted: dict[str, int],
  draws: int,
  template: str,
  pattern: str,
) -> dict[str, tuple[Example, ...]]:
  """The first distinct questions of each split, in the order of the index."""
  splits: dict[str, list[Example]] = {name: [] for name in wanted}
  seen: set[str] = set()
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
        f"reasoning_gym dataset {dataset!r} failed to generate question "
        f"{index}: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
      ) from None
    question = _cut(entry["question"], pattern, dataset)
    key = question_id(question)
    if key in seen:
      continue
    seen.add(key)
    newest = index
    if _split(key) in lacking:
      # Some datasets have no single answer: only their verifier knows.
      answer = "" if entry["answer"] is None else str(entry["answer"])
      prompt = render(template, question)
      splits[_split(key)].append(Example(key, prompt, answer, entry))
  for name, key in (("train", "size"), ("tuning",) * 2, ("heldout",) * 2):
    if len(splits[name]) < wanted[name]:
      raise UserError(
        f"reasoning_gym dataset {dataset!r} gave {len(splits[name])} distinct"
        f" questions of the {name} split in {index} draws, fewer than the"
        f" {wanted[name]} of {key}; lower it or widen its options"
      )
  return {name: tuple(examples) for name, examples in splits.items()}
