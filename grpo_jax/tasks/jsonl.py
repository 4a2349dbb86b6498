"""Prompts with reference answers from JSON-lines files."""

import decimal
import json
import pathlib
from collections.abc import Sequence

from grpo_jax.errors import UserError
from grpo_jax.tasks import questions
from grpo_jax.tasks.answers import AnswerReward
from grpo_jax.tasks.base import (
  Example,
  Task,
  check_template,
  question_id,
  render,
)


def jsonl(
  train_path: str,
  tuning_path: str = "",
  heldout_path: str = "",
  tuning_fraction: float = 0.1,
  heldout_fraction: float = 0.1,
  prompt_field: str = "prompt",
  answer_field: str = "answer",
  answer_from: str = "text",
  template: str = "{question}",
  extract: str = "text",
  match: str = "exact",
  grade: str = "strict",
  stop: str | Sequence[str] = (),
) -> Task:
  """One JSON object a line, with a question and its reference answer.

  The reward is `answers.AnswerReward`: 1 when the extracted answer matches the
  reference and the completion was not truncated, else 0. With `extract` 'text'
  the reference answer itself is the demonstration that a warm-up imitates;
  other rules have none.

  A split with a file of its own is that file. A split without one is cut from
  the training file by a hash of each question (`questions.cut`); lines that
  repeat a question are examples of their own.

  Args:
    train_path: the training file.
    tuning_path: the tuning file; '' cuts it from the training file.
    heldout_path: the held-out file; '' cuts it from the training file.
    tuning_fraction: share of the training file's questions cut for tuning.
    heldout_fraction: the same for held-out.
    prompt_field: key of the question, a string.
    answer_field: key of the answer, a string or a number. Surrounding white
      space is removed.
    answer_from: rule that reads the reference answer out of that field, for
      instance 'after:####'; 'text' takes all of it.
    template: text with `{question}`; few-shot examples are part of it.
    extract: rule that reads the answer from a completion
      (`rules.make_extractor`).
    match: 'exact', 'normalized', 'number' or 'math' (`answers.MATCHES`).
    grade: 'strict' or 'lenient', which grading is the reward.
    stop: strings, one token each, that end a completion.

  Raises:
    UserError: a file that cannot be read, a line that is not a JSON object, a
      field that is missing or of the wrong type, a reference answer that no
      completion could match (all naming file and line), a question in two
      files, or a split that came out empty.
  """
  check_template(template)
  questions.check_fractions("jsonl", tuning_fraction, heldout_fraction)
  reward = AnswerReward(extract, match, grade)
  reader = questions.Reader(prompt_field, answer_field, answer_from, match)
  rows = _read(train_path, reader, template)
  places = questions.cut(
    [row.id for row in rows],
    0.0 if tuning_path else tuning_fraction,
    0.0 if heldout_path else heldout_fraction,
    train_path,
  )
  splits = {k: tuple(rows[i] for i in chosen) for k, chosen in places.items()}
  if tuning_path:
    splits["tuning"] = _read(tuning_path, reader, template)
  if heldout_path:
    splits["heldout"] = _read(heldout_path, reader, template)
  return questions.make("jsonl", splits, reward, stop)


def _read(
  path: str, reader: questions.Reader, template: str
) -> tuple[Example, ...]:
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
      question, answer = reader(_row(line))
    except UserError as e:
      raise UserError(f"{path} line {number} {e}") from None
    prompt = render(template, question)
    examples.append(Example(question_id(question), prompt, answer))
  if not examples:
    raise UserError(f"{path} holds no examples")
  return tuple(examples)


def _row(line: bytes) -> dict:
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
  return row


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is not a JSON number")
