"""Results of an evaluation: kept, read back, compared, shown."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest

from grpo_jax import results
from grpo_jax.console import Console
from grpo_jax.errors import UserError
from grpo_jax.estimates import Outcome
from grpo_jax.results import Results
from grpo_jax.tasks.base import Example

nan = math.nan


def some(success, answers, scored=None):
  success = np.array(success, np.float32)
  return Outcome(
    success=success,
    scored=np.ones(success.shape, bool) if scored is None else scored,
    lengths=np.arange(success.size).reshape(success.shape),
    truncated=success == 0,
    answers=np.array(answers, object).reshape(success.shape),
    parts={
      "sums": np.where(np.arange(len(success))[:, None] == 0, success, nan),
      "words": np.where(np.arange(len(success))[:, None] > 0, success, nan),
    },
  )


def made(**changes):
  unscored = np.array([[True, True], [True, False], [True, True]])
  sampled = some([[1, 0.1], [0, 0], [1, 1]], ["7", "x\n", None, "ü", "", "7"])
  sampled = dataclasses.replace(sampled, scored=unscored)
  values = {
    "source": {"run": "/runs/one", "step": 20},
    "asked": {"task": "sums", "split": "heldout", "temperature": 1.0},
    "majority_answer": 0.25,
    "ids": ["a", "b", "c"],
    "outcomes": {
      "sampled": sampled,
      "greedy": some([[1], [0], [1]], ["7", None, "8"]),
    },
  }
  return Results(**{**values, **changes})


def test_what_is_written_is_read(tmp_path):
  path = str(tmp_path / "one.jsonl")
  results.write(path, made())
  back = results.read(path)
  assert back.report() == made().report()
  assert (back.ids, back.asked) == (made().ids, made().asked)
  for how, one in made().outcomes.items():
    for field in ("success", "scored", "lengths", "truncated", "answers"):
      got, want = (getattr(x, field) for x in (back.outcomes[how], one))
      np.testing.assert_array_equal(got, want, err_msg=field)
    for name, want in one.parts.items():
      np.testing.assert_array_equal(back.outcomes[how].parts[name], want)
  text = (tmp_path / "one.jsonl").read_text()
  lines = [json.loads(x) for x in text.splitlines()]
  assert [x["id"] for x in lines[1:]] == ["a", "b", "c"]
  assert [(x["n"], x["correct"]) for x in lines[1:]] == [(2, 1), (2, 0), (2, 2)]
  assert lines[2]["sampled"]["success"] == [0, None]
  assert "nan" not in text.lower()


def test_long_answers_are_told_apart_by_their_hash(tmp_path):
  path = str(tmp_path / "one.jsonl")
  long = ["a" * 999, "a" * 999, "a" * 998 + "b", "c"]
  one = some([[1, 1, 0, 0]], long)
  alone = made(ids=["a"], outcomes={"sampled": one, "greedy": one})
  results.write(path, alone)
  back = results.read(path)
  assert len(set(back.outcomes["sampled"].answers[0])) == 3
  assert (tmp_path / "one.jsonl").stat().st_size < 1500
  assert back.report() == alone.report()


@pytest.mark.parametrize(
  ("text", "why"),
  [
    (None, "cannot be read"),
    ("", "is not a file that evaluate --out wrote"),
    ("{}\n", "it lacks 'format'"),
    ("[]\n", "is not a file"),
    ('{"format": "x"}\n', "its format is 'x'"),
    ("HEAD", "it has no prompts"),
    ("HEAD{\n", "is not a file"),
    ('HEAD{"id": "a"}\n', "it lacks 'sampled'"),
    ('HEAD{"id": "a", "sampled": 1, "greedy": 1}\n', "is not a file"),
  ],
)
def test_a_broken_file_is_refused(tmp_path, text, why):
  path = tmp_path / "one.jsonl"
  results.write(str(path), made())
  head = path.read_text().splitlines()[0] + "\n"
  path.unlink()
  if text is not None:
    path.write_text(text.replace("HEAD", head))
  with pytest.raises(UserError, match=why):
    results.read(str(path))


def test_rows_of_unequal_length_are_refused(tmp_path):
  path = tmp_path / "one.jsonl"
  results.write(str(path), made())
  path.write_text(path.read_text().replace('"tokens": [0, 1]', '"tokens": [0]'))
  with pytest.raises(UserError, match="is not a file that evaluate --out"):
    results.read(str(path))


@pytest.mark.parametrize("name", ["one.json", "no/one.jsonl", "dir.jsonl"])
def test_where_results_cannot_be_written(tmp_path, name):
  (tmp_path / "dir.jsonl").mkdir()
  with pytest.raises(UserError, match=r"--out=.* must be FILE\.jsonl"):
    results.check_writable(str(tmp_path / name))
  results.check_writable(str(tmp_path / "one.jsonl"))


def test_only_the_same_questions_asked_alike_are_compared():
  one = made()
  other = {**one.asked, "temperature": 0.7}
  with pytest.raises(UserError, match=r"temperature: 1\.0 -> 0\.7"):
    results.comparison(one, made(asked=other))
  with pytest.raises(UserError, match="not asked the same"):
    results.comparison(one, made(ids=["a", "c", "b"]))


def test_the_fingerprint_sees_template_and_order():
  a, b = Example("1", "1+1=", "2"), Example("2", "1+2=", "3")
  prints = {
    results.fingerprint(x)
    for x in ([a, b], [b, a], [a], [a, dataclasses.replace(b, prompt="1+2?")])
  }
  assert len(prints) == 4
  # Answers are not asked.
  assert results.fingerprint([a]) == results.fingerprint(
    [dataclasses.replace(a, answer="3")]
  )


def test_the_difference_is_the_first_less_the_second():
  worse = some([[0], [0], [1]], ["9", None, "8"])
  second = made(outcomes={**made().outcomes, "greedy": worse})
  got = results.comparison(made(), second)
  mean = got["greedy"]["mean"]
  assert mean["difference"] == pytest.approx(1 / 3)
  assert (mean["better"], mean["worse"], mean["equal"]) == (1, 0, 2)
  assert got["sampled"]["mean"]["difference"] == 0
  parts = got["greedy"]["parts"]
  assert (parts["sums"]["better"], parts["words"]["equal"]) == (1, 2)
  json.dumps(got, allow_nan=False)


def shown(first, second=None):
  file = io.StringIO()
  change = None if second is None else results.comparison(first, second)
  results.show(Console(file=file), first, second, change)
  return file.getvalue()


def test_tables_hold_every_number():
  file = io.StringIO()
  results.show(Console(file=file), made())
  text = file.getvalue()
  for word in (
    "one@20",
    "sampled mean",
    "pass@2",
    "maj@2",
    "words",
    "unscored",
  ):
    assert word in text, word
  assert "p (sign test)" not in text
  text = shown(made(), made(source={"model": "hub/some-1B"}))
  for word in ("some-1B", "p (sign test)", "0 / 0 / 3", "+0.000"):
    assert word in text, word


def test_a_table_of_one_prompt_without_an_answer():
  one = some([[1, 0]], [None, None])
  alone = made(ids=["a"], outcomes={"sampled": one, "greedy": one})
  text = shown(alone, alone)
  assert "maj@" not in text and "nan" not in text
