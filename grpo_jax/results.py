"""What an evaluation measured of one policy, kept so that it can be compared.

A results file is JSON lines: a head, then one line per prompt,

    {"id": "8f1c…", "n": 4, "correct": 2, "greedy": {…}, "sampled":
     {"success": [1, 0, 1, null], "answers": ["7", "8", "7", null],
      "tokens": [2, 2, 2, 9], "truncated": [0, 0, 0, 1], "parts": {}}}

`n` and `correct` are those of the sampled completions; success is null where
the task could not score. Two of them, or one and a policy, are compared without
sampling again.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.console import Console, interval
from grpo_jax.disk import explained, replacing
from grpo_jax.errors import UserError
from grpo_jax.estimates import Outcome, compare, summary
from grpo_jax.tasks.base import Example

FORMAT = "grpo_jax evaluation 1"
LONGEST_ANSWER = 200  # characters; of a longer one the hash is kept


@dataclasses.dataclass(frozen=True)
class Results:
  """One policy on some prompts.

  Attributes:
    source: where the policy came from: run and step, or model.
    asked: what must be equal where two are compared: task, split, a hash of
      the prompts, and how completions were sampled.
    majority_answer: success of the commonest reference answer alone.
    ids: of the N questions.
    outcomes: {'sampled' | 'greedy': outcome of the N prompts}.
  """

  source: dict[str, Any]
  asked: dict[str, Any]
  majority_answer: float | None
  ids: list[str]
  outcomes: dict[str, Outcome]

  def report(self) -> dict[str, Any]:
    """What the command prints, in JSON's own types."""
    shown = ("task", "split", "temperature")
    return {
      **self.source,
      **{key: self.asked[key] for key in shown},
      "majority_answer": self.majority_answer,
      **{how: summary(x) for how, x in self.outcomes.items()},
    }


def fingerprint(examples: Sequence[Example]) -> str:
  """A short hash of prompts, their template and order included."""
  text = json.dumps([(x.id, x.prompt) for x in examples])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def comparison(first: Results, second: Results) -> dict[str, Any]:
  """Paired differences first - second: {'sampled': …, 'greedy': …}.

  Raises:
    UserError: they were not asked the same prompts in the same way.
  """
  check_same(first, second)
  return {
    how: compare(first.outcomes[how], second.outcomes[how])
    for how in first.outcomes
  }


def show(
  console: Console,
  first: Results,
  second: Results | None = None,
  differences: dict[str, Any] | None = None,
) -> None:
  """Prints a table of one policy, or of two with their difference."""
  reports = [x.report() for x in (first, second) if x is not None]
  columns = ["", *(_name(x) for x in reports)]
  if differences:
    columns += ["difference", "better / worse / equal", "p (sign test)"]
  rows = []
  for how in first.outcomes:
    for label, path in _numbers(reports[0][how]):
      row = [f"{how} {label}", *(_value(x[how], path) for x in reports)]
      if differences:
        row += _change(_at(differences[how], path))
      rows.append(row)
  asked, n = first.asked, reports[0]["sampled"]["samples"]
  title = (
    f"{len(first.ids)} {asked['split']} prompts of {asked['task']}, {n} samples"
    f" at T = {asked['temperature']:g}; ± 95 %, clustered by prompt"
  )
  console.table(title, columns, rows)


def _name(report: dict[str, Any]) -> str:
  """Which policy, in a column's head."""
  if "model" in report:
    return pathlib.Path(report["model"]).name
  return f"{pathlib.Path(report['run']).name}@{report['step']}"


def _numbers(one: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
  """What a table shows of a summary: a label, and the keys that lead there."""
  out = [("mean", ("mean",))]
  for kind, sign in (("pass_at_k", "pass@"), ("maj_at_k", "maj@")):
    out += [(sign + k, (kind, k)) for k in one[kind] or () if k != "1"]
  out += [(name, ("parts", name)) for name in one["parts"]]
  out += [(x, (x,)) for x in ("length_mean", "truncated_frac", "unscored")]
  return out


def _at(tree: Any, path: Sequence[str]) -> Any:
  """What the keys lead to; None where they lead nowhere."""
  for key in path:
    tree = None if tree is None else tree.get(key)
  return tree


def _value(one: dict[str, Any], path: tuple[str, ...]) -> str:
  """A number of a summary with its interval, where it has one."""
  value, error = _at(one, path), None
  if path == ("mean",):
    error = one["stderr"]
  elif isinstance(value, dict):
    value, error = value["mean"], value["stderr"]
  elif len(path) > 1:
    error = _at(one, (f"{path[0]}_stderr", path[1]))
  if value is None:
    return "-"
  if isinstance(value, int):
    return str(value)
  return f"{value:.3f}" if error is None else interval(value, error)


def _change(pair: dict[str, Any] | None) -> tuple[str, ...]:
  """A difference in three cells."""
  if pair is None or pair["difference"] is None:
    return "", "", ""
  text = f"{pair['difference']:+.3f}"
  if pair["low"] is not None:
    text += f" [{pair['low']:+.3f}, {pair['high']:+.3f}]"
  counts = f"{pair['better']} / {pair['worse']} / {pair['equal']}"
  return text, counts, f"{pair['p_value']:.2g}"


def check_same(first: Results, second: Results) -> None:
  """Refuses two policies that were not asked the same.

  Raises:
    UserError: naming what differs, with both values.
  """
  keys = sorted({*first.asked, *second.asked})
  changed = [
    f"{key}: {first.asked.get(key)!r} -> {second.asked.get(key)!r}"
    for key in keys
    if first.asked.get(key) != second.asked.get(key)
  ]
  if not changed and first.ids != second.ids:
    changed = [f"prompts: {len(first.ids)} -> {len(second.ids)}"]
  if changed:
    raise UserError(
      f"these two were not asked the same ({'; '.join(changed)}), so their"
      " difference is not the policies'; evaluate both alike"
    )


def write(path: str, results: Results) -> None:
  """Writes a results file, whole or not at all.

  Raises:
    UserError: it cannot be written.
  """
  head = {
    "format": FORMAT,
    "source": results.source,
    "asked": results.asked,
    "majority_answer": results.majority_answer,
  }
  lines = [head]
  for i, name in enumerate(results.ids):
    right = results.outcomes["sampled"].success[i] >= 1
    line = {"id": name, "n": len(right), "correct": int(right.sum())}
    line |= {how: _row(x, i) for how, x in results.outcomes.items()}
    lines.append(line)
  text = "".join(json.dumps(x, allow_nan=False) + "\n" for x in lines)
  with explained(f"could not write {path}"), replacing(path) as file:
    file.write(text.encode())


def is_file(name: str) -> bool:
  """Whether a policy's name is that of a results file."""
  return name.endswith(".jsonl")


def check_writable(path: str) -> None:
  """Refuses, before anything is sampled, a file that could not be written.

  Raises:
    UserError: another ending than .jsonl, or no such directory.
  """
  target = pathlib.Path(path)
  if not is_file(path) or target.is_dir() or not target.parent.is_dir():
    raise UserError(
      f"--out={path} must be FILE.jsonl in a directory that exists"
    )


def read(path: str) -> Results:
  """Reads a results file.

  Raises:
    UserError: it cannot be read, or is not one.
  """
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
    head, *rows = [json.loads(line) for line in text.splitlines()]
    if head["format"] != FORMAT:
      raise ValueError(f"its format is {head['format']!r}, not {FORMAT!r}")
    if not rows:
      raise ValueError("it has no prompts")
    return Results(
      head["source"],
      head["asked"],
      head["majority_answer"],
      [row["id"] for row in rows],
      {how: _outcome([r[how] for r in rows]) for how in ("sampled", "greedy")},
    )
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error}") from error
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    why = f"it lacks {error}" if isinstance(error, KeyError) else error
    raise UserError(
      f"{path} is not a file that evaluate --out wrote: {why}"
    ) from error


def _row(outcome: Outcome, i: int) -> dict[str, Any]:
  """One prompt of an outcome, in JSON's own types."""
  scored = outcome.scored[i]
  return {
    "success": [
      _short(x) if ok else None for x, ok in zip(outcome.success[i], scored)
    ],
    "answers": [_answer(x) for x in outcome.answers[i]],
    "tokens": outcome.lengths[i].tolist(),
    "truncated": outcome.truncated[i].astype(int).tolist(),
    "parts": {
      name: [None if math.isnan(x) else _short(x) for x in values[i]]
      for name, values in outcome.parts.items()
      if not np.isnan(values[i]).all()
    },
  }


def _short(x: float) -> float:
  """1.0 as 1."""
  return int(x) if float(x).is_integer() else float(x)


def _answer(text: str | None) -> str | None:
  """An answer, or of a long one what tells it from others."""
  if text is None or len(text) <= LONGEST_ANSWER:
    return text
  digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass"))
  return f"sha256:{digest.hexdigest()[:16]}"


def _outcome(rows: list[dict[str, Any]]) -> Outcome:
  """Inverse of `_row`, of every prompt."""
  shape = (len(rows), len(rows[0]["success"]))

  def grid(name: str, dtype: Any) -> np.ndarray:
    return np.array([row[name] for row in rows], dtype).reshape(shape)

  success = grid("success", np.float32)  # None becomes NaN
  names = dict.fromkeys(name for row in rows for name in row["parts"])
  nothing = [math.nan] * shape[1]
  return Outcome(
    success=np.nan_to_num(success),
    scored=~np.isnan(success),
    lengths=grid("tokens", np.int64),
    truncated=grid("truncated", bool),
    answers=grid("answers", object),
    parts={
      name: np.array([row["parts"].get(name, nothing) for row in rows], float)
      for name in names
    },
  )
