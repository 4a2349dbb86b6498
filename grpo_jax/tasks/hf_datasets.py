"""Any set that the `datasets` library reads: of the hub, or a local copy."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.tasks import questions
from grpo_jax.tasks.answers import AnswerReward
from grpo_jax.tasks.base import (
  SPLITS,
  Example,
  Task,
  check_range,
  check_template,
  question_id,
  render,
)
from grpo_jax.tasks.tables import open_tables

_BATCH = 1000  # rows read at a time


def from_datasets(
  path: str,
  configuration: str = "",
  train_split: str = "train",
  tuning_split: str = "",
  heldout_split: str = "",
  tuning_fraction: float = 0.1,
  heldout_fraction: float = 0.1,
  prompt_field: str = "prompt",
  answer_field: str = "answer",
  answer_from: str = "text",
  template: str = "{question}",
  shots: int = 0,
  shots_seed: int = 0,
  extract: str = "text",
  match: str = "exact",
  grade: str = "strict",
  unfit: str = "refuse",
  stop: str | Sequence[str] = (),
) -> Task:
  """Questions and reference answers from the columns of a data set.

  The set is read by the library and stays on disk; in memory are an id, a
  place and the reference answer of each row. No code of a set is ever run.

  A question in two splits (white space and case apart) would make held-out
  figures worthless, so it is refused, or left out of the split that is not
  reported on; so is a row whose reference answer cannot be read (`unfit`).

  Args:
    path: `owner/name[@revision]` of the hub; a local directory: a copy of such
      a repository, or of `save_to_disk`; or a Parquet, JSON, CSV or Arrow file.
    configuration: the set's configuration, where it has several; more than one
      of them, joined by commas, are put together.
    train_split: name of the split to train on.
    tuning_split: to choose settings by; '' cuts it from the training split by
      a hash of each question (`questions.cut`).
    heldout_split: to report on; '' cuts it.
    tuning_fraction: share of the training split that is cut for tuning.
    heldout_fraction: the same for held-out.
    prompt_field: column of the question, a string.
    answer_field: column of the answer, a string or a number.
    answer_from: rule that reads the reference answer out of that column, for
      instance 'after:####' or 'boxed'; 'text' takes all of it.
    template: text with `{question}`.
    shots: training questions that stand before every prompt, each in the
      template with the whole text of its answer column; they are not trained
      on.
    shots_seed: chooses them; not the run's seed, so that all arms share them.
    extract: rule that reads the answer from a completion.
    match: 'exact', 'normalized', 'number' or 'math' (`answers.MATCHES`).
    grade: 'strict' or 'lenient', which grading is the reward.
    unfit: 'refuse' or 'drop': rows without a readable reference answer, and
      questions of two splits.
    stop: strings, one token each, that end a completion.

  Raises:
    UserError: the library is missing, the set cannot be read, a split or a
      column is not there, a row is not what it must be, or a split is empty.
  """
  return build(
    f"datasets/{path}",
    Source(path, configuration, train_split, tuning_split, heldout_split),
    questions.Reader(prompt_field, answer_field, answer_from, match),
    AnswerReward(extract, match, grade),
    Prompting(template, shots, shots_seed),
    tuning_fraction=tuning_fraction,
    heldout_fraction=heldout_fraction,
    unfit=unfit,
    stop=stop,
  )


@dataclasses.dataclass(frozen=True)
class Source:
  """Where the rows are; the names as in `from_datasets`."""

  path: str
  configuration: str
  train: str
  tuning: str
  heldout: str


@dataclasses.dataclass(frozen=True)
class Prompting:
  """How a question is asked.

  Attributes:
    template: text with `{question}`.
    shots: training questions before every prompt.
    seed: chooses them.
    shown: of a shot, from the answer's text to what is shown.
  """

  template: str
  shots: int
  seed: int
  shown: Callable[[str], str] = str


def build(
  name: str,
  source: Source,
  reader: questions.Reader,
  reward: AnswerReward,
  prompting: Prompting,
  *,
  tuning_fraction: float,
  heldout_fraction: float,
  unfit: str,
  stop: str | Sequence[str],
) -> Task:
  """`from_datasets`, of records; for tasks that are one known set."""
  check_template(prompting.template)
  questions.check_fractions(name, tuning_fraction, heldout_fraction)
  check_range(name, "shots", prompting.shots, 0, 1000, whole=True)
  check_range(name, "shots_seed", prompting.seed, 0, whole=True)
  if unfit not in ("refuse", "drop"):
    raise UserError(f"task {name}: unfit {unfit!r} must be refuse or drop")
  given = {split: getattr(source, split) for split in SPLITS}
  wanted = [x for x in given.values() if x]
  if not source.train:
    raise UserError(f"task {name}: train_split must be the name of a split")
  columns = (reader.prompt_field, reader.answer_field)
  tables = open_tables(source.path, source.configuration, wanted, columns)
  reading = _Reading(source.path, reader, prompting.template, unfit == "drop")
  splits = {k: reading.rows(tables[x], x) for k, x in given.items() if x}
  whole = splits["train"]
  places = questions.cut(
    [f"{key:016x}" for key in whole.keys.tolist()],
    0.0 if source.tuning else tuning_fraction,
    0.0 if source.heldout else heldout_fraction,
    source.path,
  )
  for split, chosen in places.items():
    if split == "train" or not given[split]:
      splits[split] = whole.select(chosen)
  reading.part(splits)
  if prompting.shots:
    _add_shots(name, splits, reader, prompting)
  return questions.make(name, splits, reward, stop, tuple(reading.notes))


@dataclasses.dataclass(eq=False)
class Rows(Sequence[Example]):
  """Examples that are read from their table when they are asked for.

  Attributes:
    table: a `datasets.Dataset`, on disk.
    field: its column of questions.
    template: text with `{question}`.
    places: [N] int64, rows of the table.
    ids: [N] uint64, `question_id` of each.
    keys: [N] uint64, the same of the question in lower case.
    answers: [N] reference answers.
    before: text before every prompt.
  """

  table: Any
  field: str
  template: str
  places: np.ndarray
  ids: np.ndarray
  keys: np.ndarray
  answers: np.ndarray
  before: str = ""

  def __len__(self) -> int:
    return len(self.places)

  def __iter__(self) -> Iterator[Example]:
    for start in range(0, len(self), _BATCH):
      yield from self._read(range(start, min(start + _BATCH, len(self))))

  def __getitem__(self, i: int | slice) -> Any:
    found = range(len(self))[i]
    return (
      self.select(found) if isinstance(i, slice) else self._read([found])[0]
    )

  def select(self, places: Iterable[int]) -> "Rows":
    """Those at some places."""
    at = np.fromiter(places, np.int64)
    arrays = ("places", "ids", "keys", "answers")
    return dataclasses.replace(
      self, **{name: getattr(self, name)[at] for name in arrays}
    )

  def _read(self, at: Sequence[int]) -> list[Example]:
    asked = self.table[self.places[at].tolist()][self.field]
    return [
      Example(
        f"{self.ids[i]:016x}",
        self.before + render(self.template, question),
        self.answers[i],
      )
      for i, question in zip(at, asked)
    ]


class _Reading:
  """Reads and checks tables; `notes` says what was left out.

  Args:
    path: for messages.
    reader: reads a row.
    template: text with `{question}`.
    drop: leave out what cannot be used, instead of refusing it.
  """

  def __init__(
    self, path: str, reader: questions.Reader, template: str, drop: bool
  ):
    self.path, self.reader, self.drop = path, reader, drop
    self.template = template
    self.notes: list[str] = []

  def rows(self, table: Any, split: str) -> Rows:
    """The rows of a split that can be used.

    Raises:
      UserError: a row that cannot, or none that can.
    """
    fields = (self.reader.prompt_field, self.reader.answer_field)
    places, ids, keys, answers, lost = [], [], [], [], []
    for start in range(0, len(table), _BATCH):
      batch = table[start : start + _BATCH]
      for i, row in enumerate(zip(*(batch[x] for x in fields)), start):
        try:
          question, answer = self.reader(dict(zip(fields, row)))
        except questions.Unreadable as error:
          if not self.drop:
            raise UserError(
              f"{self.path} {split} row {i} {error}, or set task.unfit=drop"
            ) from None
          lost.append(f"row {i} {error}")
          continue
        except UserError as error:
          raise UserError(f"{self.path} {split} row {i} {error}") from None
        places.append(i)
        ids.append(int(question_id(question), 16))
        keys.append(int(question_id(question.casefold()), 16))
        answers.append(answer)
    if lost:
      self.notes.append(
        f"{len(lost)} of {len(table)} rows of {split} left out; the first:"
        f" {lost[0]}"
      )
    if not places:
      raise UserError(f"{self.path} {split} holds no examples")
    return Rows(
      table,
      fields[0],
      self.template,
      np.array(places, np.int64),
      np.array(ids, np.uint64),
      np.array(keys, np.uint64),
      np.array(answers, object),
    )

  def part(self, splits: dict[str, Rows]) -> None:
    """Takes questions of one split out of the less important ones.

    Raises:
      UserError: there are some, and nothing is to be dropped.
    """
    for split, others in (("tuning", ["heldout"]), ("train", SPLITS[1:])):
      for other in others:
        both = np.isin(splits[split].keys, splits[other].keys)
        if not both.any():
          continue
        what = f"{both.sum()} of {len(both)} {split} questions are"
        first = splits[split][int(both.argmax())].prompt[-120:]
        if not self.drop:
          raise UserError(
            f"{self.path}: {what} in the {other} split too, for instance"
            f" {first!r}; remove them from one, or set task.unfit=drop to leave"
            f" them out of {split}"
          )
        self.notes.append(f"{what} in {other} too, and left out of {split}")
        splits[split] = splits[split].select(np.flatnonzero(~both))
        if not len(splits[split]):
          raise UserError(f"{self.path}: nothing is left of {split}")


def _add_shots(
  name: str,
  splits: dict[str, Rows],
  reader: questions.Reader,
  prompting: Prompting,
) -> None:
  """Puts some training questions before every prompt, and out of training."""
  train = splits["train"]
  if prompting.shots >= len(train):
    raise UserError(
      f"task {name}: shots {prompting.shots} leave none of {len(train)}"
      " training questions to train on"
    )
  # Of the questions' hashes and not of places: rows that are added move no
  # others. Its own mixing, because the cut is by the hash too.
  mixed = [question_id(f"{prompting.seed}/{key:x}") for key in train.keys]
  chosen = sorted(range(len(train)), key=mixed.__getitem__)[: prompting.shots]
  texts = []
  for i in chosen:
    row = train.table[int(train.places[i])]
    answer = prompting.shown(reader.texts(row)[1])
    prompt = train[i].prompt
    gap = "" if prompt[-1:].isspace() else " "
    if prompting.template.endswith("{question}"):
      gap = "\n"
    texts.append(f"{prompt}{gap}{answer}\n\n")
  rest = ~np.isin(train.keys, train.keys[chosen])
  if not rest.any():
    raise UserError(f"task {name}: shots leave nothing to train on")
  splits["train"] = train.select(np.flatnonzero(rest))
  for rows in splits.values():
    rows.before = "".join(texts)
