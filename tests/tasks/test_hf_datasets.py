"""Sets of the `datasets` library, from local copies in their real layout."""

import json
import pickle

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets

from grpo_jax import data
from grpo_jax.errors import UserError
from grpo_jax.tasks import make_task
from grpo_jax.tasks.base import SPLITS, Completion, question_id
from grpo_jax.tokenizer import ByteTokenizer

GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  """Nothing of a test stays in the user's cache, or reaches the network."""
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def rows(n, start=0):
  return [
    {"prompt": f"What is {i}+1?", "answer": f"so\n#### {i + 1:,}", "other": i}
    for i in range(start, start + n)
  ]


def write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix == ".parquet":
    datasets.Dataset.from_list(content).to_parquet(path)
  else:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
  return str(path)


def folder(tmp_path, train, test=None, kind="parquet"):
  where = tmp_path / "set"
  write(where / f"train.{kind}", train)
  if test is not None:
    write(where / f"test.{kind}", test)
  return str(where)


def make(path, **settings):
  given = {"answer_from": "after:####", "match": "number", **settings}
  return make_task("datasets", path=path, **given)


def prompts(task, split):
  return [example.prompt for example in task.splits[split]]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "disk", "disk2"])
def test_every_kind_of_local_copy_gives_the_same_task(tmp_path, kind):
  table = datasets.Dataset.from_list(rows(60))
  path = tmp_path / f"train.{kind}"
  if kind == "csv":
    table.to_csv(path)
  elif kind == "disk":
    table.save_to_disk(path)
  elif kind == "disk2":
    datasets.DatasetDict({"train": table}).save_to_disk(path)
  else:
    write(path, rows(60))
  task = make(str(path))
  every = sorted(
    (e.id, e.prompt, e.answer) for s in SPLITS for e in task.splits[s]
  )
  assert every == sorted(
    (question_id(r["prompt"]), r["prompt"], f"{r['other'] + 1:,}")
    for r in rows(60)
  )
  assert min(len(task.split(s)) for s in SPLITS) > 0


def test_splits_are_by_content_and_given_ones_are_whole(tmp_path):
  path = folder(tmp_path, rows(300), rows(20, 1000), "jsonl")
  task = make(path, heldout_split="test", tuning_fraction=0.2)
  assert prompts(task, "heldout") == [r["prompt"] for r in rows(20, 1000)]
  assert 30 < len(task.split("tuning")) < 90
  write(tmp_path / "set" / "train.jsonl", rows(310, 0)[::-1])
  again = make(path, heldout_split="test", tuning_fraction=0.2)
  for split in ("train", "tuning"):
    assert set(prompts(task, split)) <= set(prompts(again, split))


def test_rows_are_read_when_asked_for(tmp_path):
  task = make(folder(tmp_path, rows(2500)))
  train = task.split("train")
  every = list(train)
  assert len(every) == len(train) > 1900
  for i in (0, np.int64(7), 1999 % len(train), -1):
    assert train[i] == every[i]
  assert list(train[5:9]) == every[5:9] and train[3:][0] == every[3]
  with pytest.raises(IndexError):
    train[len(train)]
  assert pickle.loads(pickle.dumps(train[0])) == every[0]
  stream = data.Stream(train, 0, "train")
  assert len({stream.draw(i).id for i in range(len(train))}) == len(train)
  again = data.Stream(make(str(tmp_path / "set")).split("train"), 0, "train")
  assert [stream.draw(i) for i in (0, 5000)] == [
    again.draw(0),
    again.draw(5000),
  ]


def test_long_prompts_are_dropped_without_reading_all(tmp_path):
  long = [{"prompt": "x" * 50 + str(i), "answer": "#### 1"} for i in range(9)]
  task = make(folder(tmp_path, [*rows(80), *long], rows(5, 900)))
  fewer, width, lost = data.fit_prompts(task, ByteTokenizer(), 20, "drop")
  assert sum(lost.values()) == 9 and width == len("What is 79+1?")
  assert all("x" not in p for s in SPLITS for p in prompts(fewer, s))


def test_a_question_of_two_splits(tmp_path):
  copy = {"prompt": " what is  3+1?", "answer": "#### 4"}
  path = folder(tmp_path, rows(50), [copy, *rows(5, 900)])
  how = {"heldout_split": "test", "tuning_fraction": 0.2}
  with pytest.raises(UserError, match=r"1 of \d+ \w+ questions are in the"):
    make(path, **how)
  task = make(path, **how, unfit="drop")
  assert "left out of" in task.notes[0] and len(task.notes) == 1
  assert len(task.split("heldout")) == 6
  assert sum(len(task.split(s)) for s in SPLITS) == 55
  assert "What is 3+1?" not in prompts(task, "train") + prompts(task, "tuning")


def test_unreadable_references(tmp_path):
  bad = [
    {"prompt": "a", "answer": "#### no"},
    {"prompt": "b", "answer": "5"},
  ]
  path = folder(tmp_path, [*rows(60), *bad])
  with pytest.raises(UserError, match=r"train row 60 has the answer 'no'"):
    make(path)
  with pytest.raises(UserError, match=r"row 60.* has no answer by answer_from"):
    make(folder(tmp_path, [*rows(60), bad[1]]))
  path = folder(tmp_path, [*rows(60), *bad])
  task = make(path, unfit="drop")
  assert task.notes[0].startswith("2 of 62 rows of train left out; the first: ")
  assert sum(len(task.split(s)) for s in SPLITS) == 60


def test_shots(tmp_path):
  path = folder(tmp_path, rows(60), rows(9, 900))
  how = {"heldout_split": "test", "tuning_fraction": 0.2, "shots": 3}
  task = make(path, **how, template="Q: {question}\nA:")
  plain = make(path, **{**how, "shots": 0}, template="Q: {question}\nA:")
  for split in SPLITS:
    for prompt in prompts(task, split):
      assert prompt.count("Q: ") == 4 and prompt.count("####") == 3
  head, question = prompts(task, "heldout")[0].rsplit("\n\n", 1)
  assert question == "Q: What is 900+1?\nA:"
  shown = [x.split("\n")[0] for x in head.split("\n\n")]
  asked = {p.split("\n")[0] for p in prompts(plain, "train")}
  assert set(shown) <= asked and len(task.split("train")) == len(asked) - 3
  left = {p.rsplit("\n\n", 1)[1].split("\n")[0] for p in prompts(task, "train")}
  assert left == asked - set(shown)
  assert "A: so\n#### " in head
  again = make(path, **how, template="Q: {question}\nA:")
  other = make(path, **how, template="Q: {question}\nA:", shots_seed=1)
  assert prompts(again, "train") == prompts(task, "train")
  assert prompts(other, "train")[0] != prompts(task, "train")[0]


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"path": "/nowhere/at/all"}, "'/nowhere/at/all': no such file"),
    (
      {"path": "no/such-set"},
      "'no/such-set': .*name and the network",
    ),
    ({"path": "no/such-set@v1"}, "cannot read 'no/such-set@v1'"),
    ({"path": __file__}, r"a file ends in one of \.parquet"),
    (
      {"train_split": "trian"},
      r"'trian' \(did you mean train\?\).* \(60 ",
    ),
    ({"heldout_split": "test"}, "no split 'test'"),
    ({"train_split": ""}, "train_split must be"),
    ({"answer_field": "anwser"}, r"lacks the column 'anwser' \(did you mean"),
    (
      {"prompt_field": "other"},
      "row 0 has a int in 'other', which must",
    ),
    ({"configuration": "x"}, "'x' not found.*set task.configuration"),
    ({"template": "{q}"}, "placeholder"),
    ({"shots": 60}, "shots 60 leave none of"),
    ({"shots": -1}, "shots -1 must be"),
    ({"unfit": "keep"}, "unfit 'keep' must be refuse or drop"),
    ({"match": "math", "answer_from": "box"}, "unknown extraction rule 'box'"),
    ({"tuning_fraction": 0.6, "heldout_fraction": 0.4}, "nothing to train on"),
    ({"splits": "x"}, "has no setting 'splits'"),
  ],
)
def test_mistakes_are_one_line(tmp_path, settings, message):
  path = settings.pop("path", None) or folder(tmp_path, rows(60))
  with pytest.raises(UserError, match=message) as e:
    make(path, **settings)
  assert "\n" not in str(e.value)


def test_broken_files_are_one_line(tmp_path):
  for name in ("a.parquet", "a.jsonl"):
    (tmp_path / name).write_bytes(b"\x00broken {")
    with pytest.raises(UserError, match=name) as e:
      make(str(tmp_path / name))
    assert "\n" not in str(e.value) and len(str(e.value)) < 700
  (tmp_path / "empty").mkdir()
  with pytest.raises(UserError, match="empty"):
    make(str(tmp_path / "empty"))


def test_without_the_library(monkeypatch, tmp_path):
  monkeypatch.setitem(__import__("sys").modules, "datasets", None)
  with pytest.raises(UserError, match=r"pip install -e '.\[data\]'"):
    make(str(tmp_path))


# --- The known sets ---------------------------------------------------------


def gsm8k_rows(n, start):
  return [
    {
      "question": f"Ann has {i} boxes of 1,000 pens. How many pens?",
      "answer": f"She has {i}*1000 = <<{i}*1000={i}000>>{i},000 pens.\n"
      f"#### {i},000",
    }
    for i in range(start, start + n)
  ]


def test_gsm8k(tmp_path):
  where = tmp_path / "gsm8k"
  write(where / "main" / "train-00000-of-00001.parquet", gsm8k_rows(80, 1))
  write(where / "main" / "test-00000-of-00001.parquet", gsm8k_rows(7, 101))
  write(where / "socratic" / "train-00000-of-00001.parquet", gsm8k_rows(2, 1))
  (where / "README.md").write_text(GSM8K_CARD)
  task = make_task("gsm8k", path=str(where), shots=2)
  assert len(task.split("heldout")) == 7
  assert len(task.split("train")) + len(task.split("tuning")) == 78
  example = task.split("heldout")[0]
  assert example.answer == "101,000" and "<<" not in example.prompt
  for text, total in (
    ("#### 101000", 1),
    ("101*1000\n#### $101,000.00", 1),
    ("#### 101", 0),
    ("#### 0", 0),
    ("101,000", 0),
  ):
    assert task.reward(example, Completion(text, 9, False)).total == total
  with pytest.raises(UserError, match=r"Available: \['main', 'socratic'\]"):
    make_task("gsm8k", path=str(where), configuration="other")
  # The files of the original repository: no configuration.
  folder(tmp_path, gsm8k_rows(80, 1), gsm8k_rows(7, 101), "jsonl")
  plain = make_task("gsm8k", path=str(tmp_path / "set"), configuration="")
  assert plain.split("heldout")[0].answer == "101,000"


def math_rows(n, start):
  return [
    {
      "problem": f"Simplify $\\frac{{{i}}}{{{i + 1}}}\\cdot 2$.",
      "solution": f"It is $\\boxed{{\\frac{{{2 * i}}}{{{i + 1}}}}}$.",
      "answer": f"\\frac{{{2 * i}}}{{{i + 1}}}",
      "subject": "Prealgebra",
      "level": 1,
      "unique_id": f"test/prealgebra/{i}.json",
    }
    for i in range(start, start + n)
  ]


def test_math(tmp_path):
  pytest.importorskip("math_verify")
  odd = {**math_rows(1, 500)[0], "solution": "It is $\\boxed 5$."}
  path = folder(tmp_path, [*math_rows(70, 1), odd], math_rows(6, 101))
  task = make_task("math", path=path, shots=1)
  assert len(task.split("heldout")) == 6
  assert task.notes[0].startswith("1 of 71 rows of train left out")
  example = task.split("heldout")[0]
  assert example.answer == r"\frac{202}{102}"
  assert "\\boxed{" in example.prompt and task.functions[0].cpu_bound
  for text, total in ((r"\boxed{101/51}", 1), (r"\boxed{\frac{202}{103}}", 0)):
    assert task.reward(example, Completion(text, 9, False)).total == total
  with pytest.raises(UserError, match="train row 70 has no answer"):
    make_task("math", path=path, unfit="refuse")


def test_configurations_are_put_together(tmp_path):
  where = tmp_path / "two"
  card = "---\nconfigs:\n"
  for k, name in enumerate(("algebra", "geometry")):
    card += f"- config_name: {name}\n  data_files:\n"
    for split, n in (("train", 40), ("test", 3)):
      card += f"  - split: {split}\n    path: {name}/{split}-*\n"
      start = 1000 * k + 100 * n
      write(where / name / f"{split}-0.parquet", math_rows(n, start))
  (where / "README.md").write_text(card + "---\n")
  task = make_task(
    "math", path=str(where), configuration="algebra,geometry", match="exact"
  )
  assert len(task.split("heldout")) == 6
  assert len(task.split("train")) + len(task.split("tuning")) == 80
