"""What a task is: examples in three splits, a reward, maybe demonstrations.

A task is a record of plain functions. To add one, write a function that
returns a `Task` and name it in `grpo_jax.tasks.TASKS`.
"""

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.named import suggest

SPLITS = ("train", "tuning", "heldout")


@dataclasses.dataclass(frozen=True)
class Example:
  """One question, ready to be asked.

  Attributes:
    id: `question_id` of the question: its identity across splits and files.
    prompt: the text the policy sees, template applied.
    answer: the reference answer.
    source: whatever else the task's reward needs, for instance the entry a
      verifier was generated with.
  """

  id: str
  prompt: str
  answer: str
  source: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """What a policy wrote, as a reward sees it.

  Attributes:
    text: the decoded completion. The tokenizer's stop id prints nothing; a
      stop string that ended it (say a newline) may still be its last
      character.
    tokens: number of tokens, the stop token included.
    truncated: True when it reached its maximum length without a stop token.
  """

  text: str
  tokens: int
  truncated: bool


@dataclasses.dataclass(frozen=True)
class Reward:
  """The outcome of scoring one completion.

  Attributes:
    total: the reward, or None: "could not score", a third outcome that is
      neither 0 nor 1 and takes no part in its group's statistics.
    success: the task's own measure of success in 0..1; None means `total` is
      the measure.
    parts: one value per name in `Task.parts`; None where a part abstains.
    extracted: the answer that was read from the text; None if none was found.
    error: why `total` is None.
    steps: rewards of the completion's steps, for process supervision: (number
      of characters of the text up to the step's end, its reward) each, in the
      order of the text.
  """

  total: float | None
  success: float | None = None
  parts: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
  extracted: str | None = None
  error: str | None = None
  steps: Sequence[tuple[int, float]] = ()


@dataclasses.dataclass(frozen=True)
class RewardFunction:
  """One reward function of a task, and how it is run.

  Attributes:
    name: for messages; the name of its part where a task has several.
    fn: `(example, completion) -> Reward`, or a number (its total), or None (it
      abstains). A coroutine function is awaited, with many others at a time.
    weight: of its total in the task's, where the task has several.
    limit: seconds for one completion; None is the run's `reward.time_limit`.
    cpu_bound: run it in a pool of processes. Nothing it does there can stop
      the run or slow it down: its process is killed at the limit. It must be
      defined at the top level of a module, and what it prints is discarded.
      False is for rules that are fast on every text, and for what needs this
      process: a plain function runs on a thread, which cannot be killed, only
      left behind.

  Raises:
    UserError: a setting that it cannot be run with.
  """

  name: str
  fn: Callable[[Example, Completion], Any]
  weight: float = 1.0
  limit: float | None = None
  cpu_bound: bool = False

  def __post_init__(self):
    what = f"reward function {self.name!r}"
    if not self.name or not isinstance(self.name, str):
      raise UserError(f"{what}: its name must be a text")
    if not callable(self.fn):
      raise UserError(f"{what}: {self.fn!r} is not a function")
    if not math.isfinite(self.weight):
      raise UserError(f"{what}: weight {self.weight} must be finite")
    if self.limit is not None and not 0 < self.limit < math.inf:
      raise UserError(f"{what}: limit {self.limit} must be above 0 seconds")
    if self.cpu_bound and self.is_async:
      raise UserError(
        f"{what} is async, so it waits more than it computes: set"
        " cpu_bound=False, or make it a plain function"
      )

  @property
  def is_async(self) -> bool:
    """Whether it is a coroutine function."""
    call = type(self.fn).__call__  # of an object with an async __call__
    return any(map(inspect.iscoroutinefunction, (self.fn, call)))

  def __call__(self, example: Example, completion: Completion) -> Any:
    return self.fn(example, completion)


def no_demonstration(example: Example, rng: np.random.Generator) -> None:
  """The demonstration of a task that has none."""
  del example, rng
  return None


def answer_itself(example: Example, rng: np.random.Generator) -> str | None:
  """The reference answer as a demonstration; None where there is none."""
  del rng
  return example.answer or None


@dataclasses.dataclass(frozen=True)
class Task:
  """A source of prompts with a rule that scores completions.

  Attributes:
    name: for messages and logs.
    splits: examples of 'train', 'tuning' (for choosing settings) and 'heldout'
      (for reporting). Fixed by content, never by a run's seed.
    reward: `(example, completion) -> Reward`, total: no text makes it raise.
      A `RewardFunction` says how it is run. Several of those, in a list, are
      summed: see `combine`.
    stop: strings, one token each, that end a completion besides the
      tokenizer's stop id.
    parts: names of the reward's parts, in the order they are logged. With
      several functions these are their names, and are not given.
    success: with several functions, the one whose success is the task's; 0
      where it abstains. '': the total is the measure.
    demonstration: `(example, rng) -> str | None`, a completion to imitate
      during warm-up, without stop token; None if the task has none.
    notes: lines that a run prints before it starts: what was left out, say.

  Raises:
    UserError: the names of `splits` are not the three above, the train split
      is empty, two splits share a question, or the reward functions do not
      fit together.
  """

  name: str
  splits: Mapping[str, Sequence[Example]]
  reward: Callable[[Example, Completion], Reward] | Sequence[RewardFunction]
  stop: tuple[str, ...] = ()
  parts: tuple[str, ...] = ()
  success: str = ""
  demonstration: Callable[[Example, np.random.Generator], str | None] = (
    no_demonstration
  )
  notes: tuple[str, ...] = ()

  def __post_init__(self):
    if set(self.splits) != set(SPLITS):
      raise UserError(
        f"task {self.name} has splits {sorted(self.splits)}; a task has "
        f"exactly {', '.join(SPLITS)}"
      )
    if not self.splits["train"]:
      raise UserError(f"task {self.name} has no training example")
    check_disjoint(self.splits)
    if self.composed:
      self._compose()
    elif self.success:
      raise UserError(
        f"task {self.name}: success {self.success!r} chooses among several"
        " reward functions, and there is one"
      )

  def _compose(self):
    what = f"task {self.name}: reward"
    if not all(isinstance(f, RewardFunction) for f in self.reward):
      raise UserError(f"{what} must be a list of RewardFunction")
    names = tuple(f.name for f in self.reward)
    if not names or len(set(names)) < len(names):
      raise UserError(f"{what} functions {names} need a name each, unique")
    if self.parts not in ((), names):
      raise UserError(f"{what} has the parts {names}; do not give others")
    if self.success not in ("", *names):
      raise UserError(
        f"task {self.name}: success {self.success!r} is none of its reward"
        f" functions {', '.join(names)}"
      )
    object.__setattr__(self, "parts", names)

  @property
  def composed(self) -> bool:
    """Whether the reward is a sum of several functions."""
    return isinstance(self.reward, Sequence)

  @property
  def functions(self) -> tuple[RewardFunction, ...]:
    """The reward functions, in the order of `parts` where there are several."""
    if self.composed:
      return tuple(self.reward)
    if isinstance(self.reward, RewardFunction):
      return (self.reward,)
    return (RewardFunction("reward", self.reward),)

  def split(self, name: str) -> Sequence[Example]:
    """Examples of one split.

    Raises:
      UserError: no such split, or it is empty.
    """
    if name not in SPLITS:
      raise UserError(
        f"unknown split {name!r}{suggest(name, SPLITS)}; splits are "
        f"{', '.join(SPLITS)}"
      )
    if not self.splits[name]:
      raise UserError(
        f"the {name} split of task {self.name} is empty; give it a size above 0"
      )
    return self.splits[name]


def selected(
  examples: Sequence[Example], places: Iterable[int]
) -> Sequence[Example]:
  """The examples at these places: by the sequence's own `select` if it has one.

  A split may be any sequence, also one that reads its examples when asked.
  """
  if hasattr(examples, "select"):
    return examples.select(places)
  return tuple(examples[i] for i in places)


def question_id(question: str) -> str:
  """A short stable hash of a question: its identity across splits.

  White space is collapsed first, so a copy with a trailing blank is the same
  question and cannot leak from train to held-out.

  Returns:
    16 hexadecimal digits, uniformly distributed, the same on every machine.
  """
  text = " ".join(question.split())
  digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass"))
  return digest.hexdigest()[:16]


def check_disjoint(splits: Mapping[str, Iterable[Example]]) -> None:
  """Asserts that no question is in two splits.

  Raises:
    UserError: naming the question and the two splits.
  """
  owner: dict[str, str] = {}
  for name, examples in splits.items():
    for example in examples:
      other = owner.setdefault(example.id, name)
      if other != name:
        raise UserError(
          f"question {_tail(example.prompt)!r} is in both the {other} and the "
          f"{name} split; remove it from one"
        )


def _tail(prompt: str) -> str:
  # The question is at the end of a prompt, after a template's examples.
  return prompt if len(prompt) <= 120 else "..." + prompt[-120:]


def check_template(template: str) -> None:
  """Refuses a template that would lose the question.

  Raises:
    UserError: `template` lacks `{question}`.
  """
  if "{question}" not in template:
    raise UserError(
      f"template {template[:60]!r} lacks the placeholder {{question}}"
    )


def render(template: str, question: str) -> str:
  """Puts `question` in the template; other braces are left as they are.

  Examples that come before the question (few-shot) are part of the template.

  Raises:
    UserError: `template` lacks `{question}`.
  """
  check_template(template)
  return template.replace("{question}", question)


def check_range(
  task: str,
  name: str,
  value: float,
  low: float,
  high: float = math.inf,
  *,
  whole: bool = False,
) -> None:
  """Checks one setting of a task.

  Raises:
    UserError: `value` is not in [low, high], or not whole where it must be.
  """
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    raise UserError(f"task {task}: {name} {value!r} must be a number")
  if whole and value % 1 != 0:  # also true of inf and nan
    raise UserError(f"task {task}: {name} {value} must be a whole number")
  if not low <= value <= high:
    bound = f"between {low} and {high}" if high < math.inf else f"{low} or more"
    raise UserError(f"task {task}: {name} {value} must be {bound}")


def strings(
  task: str, name: str, value: str | Sequence[str]
) -> tuple[str, ...]:
  """A setting that is one string or several, as a tuple.

  Raises:
    UserError: it holds something that is not a string.
  """
  values = (value,) if isinstance(value, str) else tuple(value)
  for item in values:
    if not isinstance(item, str):
      raise UserError(f"task {task}: {name} holds {item!r}; it takes strings")
  return values


def combine(
  parts: Mapping[str, float | None],
  weights: Mapping[str, float],
  extracted: str | None = None,
) -> Reward:
  """A weighted sum of parts, any of which may abstain.

  Args:
    parts: a value per part, None where the part has nothing to say.
    weights: a weight per part.
    extracted: kept in the reward.

  Returns:
    total = Σ weight * value over the parts that spoke; None, "could not
    score", when all abstained, because a sum of nothing is not 0.
  """
  spoken = [n for n, value in parts.items() if value is not None]
  if not spoken:
    return Reward(None, None, dict(parts), extracted, "every part abstained")
  total = sum(weights[n] * parts[n] for n in spoken)
  return Reward(float(total), None, dict(parts), extracted)
