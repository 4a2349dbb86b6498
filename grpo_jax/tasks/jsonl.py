"""Prompts with reference answers from JSON-lines files."""

import dataclasses
import decimal
import functools
import json
import pathlib
from collections.abc import Callable, Sequence

from grpo_jax.errors import UserError
from grpo_jax.named import suggest
from grpo_jax.rewards import rules
from grpo_jax.tasks.base import (
  Completion,
  Example,
  Reward,
  Task,
  answer_itself,
  check_range,
  check_template,
  no_demonstration,
  question_id,
  render,
  strings,
)


def jsonl(
  train_path: str,
  tuning_path: str = "",
  heldout_path: str = "",
  tuning_fraction: float = 0.1,
  heldout_fraction: float = 0.1,
  prompt_field: str = "prompt",
  answer_field: str = "answer",
  template: str = "{question}",
  extract: str = "text",
  match: str = "exact",
  stop: str | Sequence[str] = (),
) -> Task:
  """One JSON object a line, with a question and its reference answer.

  The reward is 1 when the extracted answer matches the reference and the
  completion was not truncated, else 0; the part 'answered' is 1 when an answer
  was found at all. With `extract` 'text' the reference answer itself is the
  demonstration that a warm-up imitates; other rules have none.

  A split with a file of its own is that file. A split without one is cut from
  the training file by a hash of each question: a question stays in its split
  when lines are added or moved, and lines that repeat a question stay
  together (each is kept, as an example of its own). Fractions are therefore
  met on average, not exactly.

  Args:
    train_path: the training file.
    tuning_path: the tuning file; '' cuts it from the training file.
    heldout_path: the held-out file; '' cuts it from the training file.
    tuning_fraction: share of the training file's questions cut for tuning.
    heldout_fraction: the same for held-out.
    prompt_field: key of the question, a string.
    answer_field: key of the answer, a string or a number. Surrounding white
      space is removed.
    template: text with `{question}`; few-shot examples are part of it.
    extract: rule that reads the answer from a completion
      (`rules.make_extractor`).
    match: 'exact', 'normalized' or 'number' (`rules.MATCHES`).
    stop: strings, one token each, that end a completion.

  Raises:
    UserError: a file that cannot be read, a line that is not a JSON object, a
      field that is missing or of the wrong type, a reference answer that no
      completion could match (all naming file and line), a question in two
      files, or a split that came out empty.
  """
  check_template(template)
  check_range("jsonl", "tuning_fraction", tuning_fraction, 0, 0.9)
  check_range("jsonl", "heldout_fraction", heldout_fraction, 0, 0.9)
  if tuning_fraction + heldout_fraction >= 1:
    raise UserError(
      f"task jsonl: tuning_fraction {tuning_fraction} + heldout_fraction "
      f"{heldout_fraction} leave nothing to train on; lower them"
    )
  if match not in rules.MATCHES:
    raise UserError(
      f"task jsonl: unknown match {match!r}{suggest(match, rules.MATCHES)}; "
      f"matches are {', '.join(rules.MATCHES)}"
    )
  extractor = rules.make_extractor(extract)
  read = functools.partial(
    _read,
    reader=_Reader(prompt_field, answer_field, match),
    template=template,
  )
  cut = {
    "heldout": 0.0 if heldout_path else heldout_fraction,
    "tuning": 0.0 if tuning_path else tuning_fraction,
  }
  splits = _cut(read(train_path), cut, train_path)
  if tuning_path:
    splits["tuning"] = read(tuning_path)
  if heldout_path:
    splits["heldout"] = read(heldout_path)
  return Task(
    name="jsonl",
    splits=splits,
    reward=functools.partial(
      _compare, extractor=extractor, equal=rules.MATCHES[match]
    ),
    stop=strings("jsonl", "stop", stop),
    parts=("answered",),
    demonstration=answer_itself if extract == "text" else no_demonstration,
  )


def _compare(
  example: Example,
  completion: Completion,
  *,
  extractor: Callable[[str], str | None],
  equal: Callable[[str, str], bool],
) -> Reward:
  answer = extractor(completion.text)
  right = answer is not None and equal(answer, example.answer)
  total = float(right and not completion.truncated)
  parts = {"answered": float(answer is not None)}
  return Reward(total, total, parts, answer)


def _cut(
  examples: Sequence[Example], shares: dict[str, float], path: str
) -> dict[str, tuple[Example, ...]]:
  """Splits by the question's hash, read as a number in [0, 1)."""
  bound = shares["heldout"] + shares["tuning"]
  split: dict[str, list[Example]] = {"heldout": [], "tuning": [], "train": []}
  for example in examples:
    position = int(example.id, 16) / 16 ** len(example.id)
    if position < shares["heldout"]:
      split["heldout"].append(example)
    elif position < bound:
      split["tuning"].append(example)
    else:
      split["train"].append(example)
  for name, share in {**shares, "train": 1 - bound}.items():
    if share and not split[name]:
      raise UserError(
        f"{path}: none of its {len(examples)} lines fell into the {name} "
        f"split (share {share:.2g}); give that split its own file, or another "
        "fraction"
      )
  return {name: tuple(rows) for name, rows in split.items()}


@dataclasses.dataclass(frozen=True)
class _Reader:
  """Reads one line to (question, answer), or says what is wrong with it."""

  prompt_field: str
  answer_field: str
  match: str

  def __call__(self, line: bytes) -> tuple[str, str]:
    try:
      # Decimals keep the digits as written: 1.50 stays "1.50".
      row = json.loads(
        line.decode("utf-8-sig"),
        parse_float=decimal.Decimal,
        parse_constant=_refuse_constant,
      )
    except (ValueError, RecursionError, ArithmeticError) as e:
      raise UserError(f"is not JSON in UTF-8: {e}") from None
    if not isinstance(row, dict):
      raise UserError(f"is a JSON {type(row).__name__}, not an object")
    question = self._field(row, self.prompt_field, (str,), "a string")
    kinds = (str, int, decimal.Decimal)
    answer = self._field(row, self.answer_field, kinds, "a string or a number")
    answer = str(answer).strip()
    if not question.strip():
      raise UserError(f"has an empty {self.prompt_field!r}")
    for name, text in (
      (self.prompt_field, question),
      (self.answer_field, answer),
    ):
      if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"has a lone surrogate in {name!r}")
    if not rules.readable(self.match, answer):
      raise UserError(
        f"has the answer {answer[:60]!r}, which match={self.match!r} cannot "
        "read: no completion could be right; mend the line or choose another "
        "match"
      )
    return question, answer

  def _field(self, row: dict, name: str, kinds: tuple, what: str):
    if name not in row:
      raise UserError(
        f"lacks the field {name!r}{suggest(name, row)}; it has "
        f"{', '.join(map(repr, list(row)[:8])) or 'none'}"
      )
    value = row[name]
    # To Python a bool is an int; to the author of the file it is not.
    if isinstance(value, bool) or not isinstance(value, kinds):
      raise UserError(
        f"has a {type(value).__name__} in {name!r}, which must be {what}"
      )
    return value


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is not a JSON number")


def _read(path: str, *, reader: _Reader, template: str) -> tuple[Example, ...]:
  """Examples of one file in its order; blank lines are skipped."""
  examples = []
  try:
    lines = pathlib.Path(path).expanduser().read_bytes().split(b"\n")
  except (OSError, ValueError, RuntimeError) as e:
    why = getattr(e, "strerror", None) or e
    raise UserError(f"task jsonl cannot read {path!r}: {why}") from None
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      question, answer = reader(line)
    except UserError as e:
      raise UserError(f"{path} line {number} {e}") from None
    prompt = render(template, question)
    examples.append(Example(question_id(question), prompt, answer))
  if not examples:
    raise UserError(f"{path} holds no examples")
  return tuple(examples)
