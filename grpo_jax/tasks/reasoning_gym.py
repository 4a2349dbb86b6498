"""Any task of the reasoning_gym package, scored by its own verifier."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from grpo_jax.errors import UserError
from grpo_jax.rewards import rules
from grpo_jax.tasks import generated
from grpo_jax.tasks import mixture as mixtures
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
  strings,
)
from grpo_jax.tasks.mixture import Part


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
  mixture: str = "",
) -> Task:
  """Questions and verifier of one reasoning_gym dataset, or of several.

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

  With a mixture, each part has its own questions and its own verifier. `size`,
  `tuning` and `heldout` are shared out in proportion to the weights, so a
  uniform draw from a split is a draw by weight. In an epoch of training every
  question comes once: no part is repeated sooner than another, and one that
  has too few distinct questions for its share is refused. A question that two
  parts have is the earlier one's. The parts of the reward are then named after
  the mixture's, and hold the success of each on its own questions.

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
    mixture: a JSON list of parts in place of `dataset` and `options`, see
      `mixture.read`: '[{"dataset": "chain_sum", "options": {"max_terms": 2},
      "weight": 3}, {"dataset": "gcd"}]'. The settings above are the defaults
      of each.

  Raises:
    UserError: unknown dataset or option, an option's bad value, fewer distinct
      questions than asked for, or a mixture that is not one.
  """
  check_range("reasoning_gym", "size", size, 1, whole=True)
  check_range("reasoning_gym", "tuning", tuning, 0, whole=True)
  check_range("reasoning_gym", "heldout", heldout, 0, whole=True)
  one = Part(dataset, options, question_regex, template, extract, success_from)
  parts = mixtures.read(mixture, one) if mixture else (one,)
  if mixture and (dataset, options) != ("chain_sum", ""):
    raise UserError(
      "reasoning_gym: dataset and options belong in the mixture's parts; leave"
      " them out beside it"
    )
  for part in parts:  # before the draws
    check_template(part.template)
    check_range("reasoning_gym", "success_from", part.success_from, 1e-6, 1)
    rules.make_extractor(part.extract)
  totals = {"train": size, "tuning": tuning, "heldout": heldout}
  counts = {
    split: mixtures.shares(n, parts, generated.SETTINGS[split])
    for split, n in totals.items()
  }
  taken: set[str] = set()
  splits, verifiers = [], {}
  for i, part in enumerate(parts):
    wanted = {split: share[i] for split, share in counts.items()}
    found, draws = generated.make(part, wanted, taken)
    taken |= {x.id for examples in found.values() for x in examples}
    splits.append(found)
    verifiers[part.name] = _Verifier(
      part.dataset, part.options, draws, part.extract, part.success_from
    )
  itself = all(part.extract == "text" for part in parts)
  return Task(
    name=f"reasoning_gym/{'+'.join(x.name or x.dataset for x in parts)}",
    splits=_mixed(parts, splits) if mixture else splits[0],
    # In a process: some verifiers search, and a few texts take them minutes.
    reward=RewardFunction(
      "verifier",
      _ByPart(verifiers) if mixture else verifiers[one.name],
      cpu_bound=True,
    ),
    stop=strings("reasoning_gym", "stop", stop),
    parts=tuple(verifiers) if mixture else ("score",),
    demonstration=answer_itself if itself else no_demonstration,
  )


def _mixed(
  parts: Sequence[Part], splits: Sequence[Mapping[str, Sequence[Example]]]
) -> dict[str, tuple[Example, ...]]:
  """The splits of a mixture; each example's source names its part."""

  def marked(i: int, split: str) -> list[Example]:
    return [
      dataclasses.replace(x, source={"part": parts[i].name, "entry": x.source})
      for x in splits[i][split]
    ]

  return {
    split: mixtures.interleave([marked(i, split) for i in range(len(parts))])
    for split in splits[0]
  }


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
    self._score = generated.create(dataset, options, draws).score_answer
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


@dataclasses.dataclass(frozen=True)
class _ByPart:
  """Asks the verifier of the part that a question is of.

  The other parts have nothing to say of it: they abstain.
  """

  verifiers: Mapping[str, _Verifier]

  def __call__(self, example: Example, completion: Completion) -> Reward:
    own = example.source["part"]
    bare = dataclasses.replace(example, source=example.source["entry"])
    reward = self.verifiers[own](bare, completion)
    if reward.total is None:
      return reward
    success = {x: reward.success if x == own else None for x in self.verifiers}
    return dataclasses.replace(reward, parts=success)


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
