import json

import pytest

from grpo_jax.errors import UserError
from grpo_jax.tasks.base import Completion
from grpo_jax.tasks.jsonl import jsonl


@pytest.fixture
def write(tmp_path):
  def write(rows, name="train.jsonl"):
    path = tmp_path / name
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)

  return write


def _rows(n, start=0):
  return [
    {"prompt": f"{i}+1", "answer": i + 1} for i in range(start, start + n)
  ]


def _prompts(task, split):
  return [e.prompt for e in task.splits[split]]


def test_split_of_one_file_is_fixed_by_content(write):
  rows = _rows(300)
  first = jsonl(write(rows))
  moved = jsonl(write([*_rows(20, 300), *reversed(rows), rows[0]]))
  for split in ("train", "tuning", "heldout"):
    assert set(_prompts(first, split)) <= set(_prompts(moved, split))
  sizes = [len(first.split(s)) for s in ("train", "tuning", "heldout")]
  assert sum(sizes) == 300 and 15 < sizes[1] < 50 and 15 < sizes[2] < 50
  # The repeated question is two examples of one split.
  assert sum(len(s) for s in moved.splits.values()) == 321


def test_given_files_are_the_splits(write):
  train, held = write(_rows(50)), write(_rows(5, 50), "held.jsonl")
  task = jsonl(train, heldout_path=held, template="Q: {question}\nA:")
  assert _prompts(task, "heldout") == [f"Q: {i}+1\nA:" for i in range(50, 55)]
  assert len(task.split("train")) + len(task.split("tuning")) == 50


def test_overlap_between_files_is_named(write):
  held = write([{"prompt": "7+1 ", "answer": "8"}], "held.jsonl")
  with pytest.raises(UserError, match=r"7\+1.*both.*heldout|heldout.*7\+1"):
    jsonl(write(_rows(50)), heldout_path=held)


def test_rewards(write):
  path = write(_rows(50))
  task = jsonl(path, extract="after:####", match="number", stop="\n")
  example = task.split("train")[0]
  want = example.answer

  def reward(text, truncated=False):
    return task.reward(example, Completion(text, 3, truncated))

  assert task.stop == ("\n",)
  assert reward(f"because #### ${want}.00").total == 1
  assert reward(f"#### {want}", truncated=True).total == 0
  none = {"answered": 0.0, "strict": 0.0, "lenient": 0.0}
  assert reward(want).total == 0
  assert reward(want).parts == {**none, "lenient": 1.0}
  assert reward("#### 999").parts == {**none, "answered": 1.0}
  lenient = jsonl(path, extract="after:####", match="number", grade="lenient")
  assert lenient.reward(example, Completion(want, 3, False)).total == 1


def test_numbers_keep_their_digits(write):
  rows = ['{"prompt": "a", "answer": 1.50}', '{"prompt": "b", "answer": -3}']
  task = jsonl(write(rows), tuning_fraction=0, heldout_fraction=0)
  assert [e.answer for e in task.split("train")] == ["1.50", "-3"]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", "line 2 is not JSON"),
    ("[" * 100_000, "line 2 is not JSON"),
    ("[1]", "line 2 is a JSON list"),
    ({"prompt": "a", "anwser": "1"}, "lacks the field 'answer' .*anwser"),
    ({"prompt": 3, "answer": "1"}, "int in 'prompt', which must be a string"),
    ({"prompt": "a", "answer": None}, "NoneType in 'answer'"),
    ({"prompt": "a", "answer": True}, "bool in 'answer'"),
    ({"prompt": "a", "answer": ["1"]}, "list in 'answer'"),
    ('{"prompt": "a", "answer": NaN}', "NaN is not a JSON number"),
    ({"prompt": " ", "answer": "1"}, "empty 'prompt'"),
    ({"prompt": "a\ud800", "answer": "1"}, "lone surrogate in 'prompt'"),
    ({"prompt": "a", "answer": ""}, "no completion could be right"),
    ({"prompt": "a", "answer": " \n"}, "no completion could be right"),
    ({"prompt": "a", "answer": "?!"}, "no completion could be right"),
    ({"prompt": "a", "answer": "12 apples"}, "match='number' cannot read"),
  ],
)
def test_bad_line_is_named(write, line, message):
  path = write([*_rows(1), line, *_rows(60, 1)])
  with pytest.raises(UserError, match=message) as e:
    jsonl(path, match="number")
  assert path in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"match": "numbers"}, "did you mean number"),
    ({"extract": "boxd"}, "unknown extraction rule"),
    ({"template": "{prompt}"}, "placeholder"),
    ({"heldout_path": "/nowhere/x"}, "'/nowhere/x': No such file"),
    ({"heldout_fraction": 0.6, "tuning_fraction": 0.5}, "nothing to train"),
    ({"heldout_fraction": 1e-9}, "heldout split"),
  ],
)
def test_refuses(write, settings, message):
  with pytest.raises(UserError, match=message):
    jsonl(write(_rows(50)), **settings)


def test_empty_or_binary_file(tmp_path):
  path = tmp_path / "x"
  path.write_bytes(b"\n \n")
  with pytest.raises(UserError, match="no examples"):
    jsonl(str(path))
  path.write_bytes(b"\xff\xfe\x00")
  with pytest.raises(UserError, match="line 1 is not JSON in UTF-8"):
    jsonl(str(path))
  with pytest.raises(UserError, match="cannot read"):
    jsonl(str(tmp_path))
