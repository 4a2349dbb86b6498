"""Mixtures of reasoning_gym datasets: shares, order, verifiers, refusals."""

import itertools
import json
import math
import pickle

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.errors import UserError
from grpo_jax.rewards.runner import score_batch
from grpo_jax.tasks import mixture
from grpo_jax.tasks.base import Completion
from grpo_jax.tasks.mixture import Part
from grpo_jax.tasks.reasoning_gym import reasoning_gym

SUMS = {"dataset": "chain_sum", "options": {"max_terms": 2}, "weight": 3}
GCD = {"dataset": "gcd", "extract": "boxed"}
SIZES = {"size": 80, "tuning": 8, "heldout": 16}


def mixed(*parts, **settings):
  return reasoning_gym(mixture=json.dumps(parts), **{**SIZES, **settings})


def parts_of(examples):
  return [x.source["part"] for x in examples]


def complete(text, truncated=False):
  return Completion(text, len(text), truncated)


def part(name, weight):
  return Part("chain_sum", "", "", "{question}", "text", 0.99, name, weight)


@pytest.mark.parametrize("total", [10, 97, 1000])
def test_shares_are_as_close_to_the_weights_as_whole_numbers_are(total):
  weights = [0.5, 2, 3, 1.7]
  parts = [part(str(i), w) for i, w in enumerate(weights)]
  got = mixture.shares(total, parts, "size")
  assert sum(got) == total
  for count, weight in zip(got, weights):
    assert abs(count - total * weight / sum(weights)) < 1
  assert mixture.shares(0, parts, "size") == [0] * 4
  scaled = [part(str(i), 1e6 * w) for i, w in enumerate(weights)]
  assert mixture.shares(total, scaled, "size") == got


def test_every_beginning_of_a_split_has_the_proportion():
  rows = [[f"a{i}" for i in range(60)], [f"b{i}" for i in range(30)], ["c0"]]
  got = mixture.interleave(rows)
  assert sorted(got) == sorted(itertools.chain(*rows))
  for row in rows:
    assert [x for x in got if x[0] == row[0][0]] == row  # in their order
    for n in range(len(got) + 1):
      count = sum(x[0] == row[0][0] for x in got[:n])
      assert abs(count - n * len(row) / len(got)) <= 1.5


def test_splits_are_shared_out_by_weight():
  task = mixed(SUMS, GCD)
  assert task.name == "reasoning_gym/chain_sum+gcd"
  assert task.parts == ("chain_sum", "gcd")
  for split, total in (("train", 80), ("tuning", 8), ("heldout", 16)):
    names = parts_of(task.splits[split])
    assert len(names) == total
    assert names.count("gcd") == total // 4
  assert set(parts_of(task.splits["heldout"][:4])) == {"chain_sum", "gcd"}
  # The questions are those of the data sets alone: a mixture moves none.
  alone = reasoning_gym(options='{"max_terms": 2}', **SIZES)
  got = [x for x in task.split("heldout") if x.source["part"] == "chain_sum"]
  want = alone.split("heldout")[:12]
  assert [(x.id, x.prompt) for x in got] == [(x.id, x.prompt) for x in want]
  assert [x.source["entry"] for x in got] == [x.source for x in want]


def test_an_epoch_draws_by_weight_and_repeats_nothing():
  task = mixed(SUMS, GCD)
  stream = data.Stream(task.split("train"), 5, "rl")
  for epoch in range(3):
    drawn = [stream.draw(epoch * 80 + i) for i in range(80)]
    assert len({x.id for x in drawn}) == 80
    assert parts_of(drawn).count("gcd") == 20
  # A pure function of (seed, ordinal), whatever was drawn before.
  again = data.Stream(mixed(SUMS, GCD).split("train"), 5, "rl")
  assert [again.draw(i) for i in (200, 3, 81)] == [
    stream.draw(i) for i in (200, 3, 81)
  ]


def test_each_part_is_asked_and_judged_in_its_own_way():
  sums = {**SUMS, "template": "Sum: {question}"}
  task = mixed(sums, GCD, template="Ask: {question}")
  by_part = {x.source["part"]: x for x in task.split("train")}
  a, b = by_part["chain_sum"], by_part["gcd"]
  assert a.prompt.startswith("Sum: ") and b.prompt.startswith("Ask: ")
  got = task.reward(a, complete(a.answer))
  assert got.total == got.success == 1
  assert got.parts == {"chain_sum": 1, "gcd": None}
  assert got.extracted == a.answer
  assert task.reward(a, complete(f"\\boxed{{{a.answer}}}")).total == 0
  got = task.reward(b, complete(f"so \\boxed{{{b.answer}}}"))
  assert got.total == 1 and got.parts == {"chain_sum": None, "gcd": 1}
  assert task.reward(b, complete(b.answer)).total == 0  # it wants a box
  cut = task.reward(a, complete(a.answer, truncated=True))
  assert cut.total == 0 and cut.parts["chain_sum"] == 0
  assert task.demonstration(a, None) is None  # not all parts are plain text
  assert mixed(SUMS).demonstration(a, None) == a.answer


def test_the_reward_of_each_part_through_the_pool():
  task = pickle.loads(pickle.dumps(mixed(SUMS, GCD)))
  few = list(task.split("heldout")[:8])
  right = {"chain_sum": "{}", "gcd": "\\boxed{{{}}}"}
  rows = [
    [complete(right[x.source["part"]].format(x.answer)), complete("nothing")]
    for x in few
  ]
  got = score_batch(task, few, rows)
  assert got.errors == 0, got.first_error
  np.testing.assert_array_equal(got.success, [[1, 0]] * 8)
  for i, name in enumerate(task.parts):
    own = np.array([x == name for x in parts_of(few)])
    np.testing.assert_array_equal(got.parts[own, :, i], got.success[own])
    assert np.isnan(got.parts[~own, :, i]).all() and own.any()


def test_a_verifier_that_raises_makes_the_row_unscored(monkeypatch):
  from reasoning_gym.arithmetic.gcd import GCDDataset

  def broken(self, answer, entry):
    raise ZeroDivisionError("in the verifier")

  monkeypatch.setattr(GCDDataset, "score_answer", broken)
  task = mixed(SUMS, GCD)
  example = next(x for x in task.split("train") if x.source["part"] == "gcd")
  got = task.reward(example, complete("\\boxed{3}"))
  assert got.total is None and "ZeroDivisionError" in got.error


def test_two_difficulties_of_one_data_set_share_no_question():
  easy = {"dataset": "chain_sum", "name": "easy", "options": {"max_terms": 2}}
  wide = {"dataset": "chain_sum", "name": "wide", "options": {"max_terms": 3}}
  for one in (easy, wide):
    one["options"] |= {"min_terms": 2, "max_digits": 1}
  task = mixed(easy, wide, size=100)
  ids = [x.id for split in task.splits.values() for x in split]
  assert len(set(ids)) == len(ids) == 124
  assert task.parts == ("easy", "wide")
  terms = {"easy": set(), "wide": set()}
  for x in task.split("train"):
    terms[x.source["part"]].add(x.source["entry"]["metadata"]["num_terms"])
  assert terms["easy"] == {2} and 3 in terms["wide"]


def test_unsafe_text_stays_out_of_every_verifier():
  task = mixed({"dataset": "puzzle24"}, SUMS, size=8, tuning=0, heldout=0)
  example = next(
    x for x in task.split("train") if x.source["part"] == "puzzle24"
  )
  got = task.reward(example, complete("__import__('os').getcwd()"))
  assert got.total == 0


@pytest.mark.parametrize(
  ("parts", "why"),
  [
    ("{", "is not JSON"),
    ("{}", "must be a JSON list"),
    ("[]", "must be a JSON list"),
    ("[1]", "part 0: 1 must be a JSON object"),
    ([{"weight": 1}], 'part 0 needs a "dataset"'),
    ([{"dataset": "chainsum"}], "did you mean chain_sum"),
    ([{"dataset": "composite"}], "task.mixture"),
    ([{"dataset": 3}], "dataset 3 must be a string"),
    ([{**SUMS, "wieght": 1}], r"'wieght' \(did you mean weight\?\)"),
    ([SUMS, {**GCD, "weight": 0}], "part 1: weight 0 must be above 0"),
    ([{**GCD, "weight": -1}], "weight -1"),
    ([{**GCD, "weight": "2"}], "weight '2' must be a number"),
    ([{**GCD, "weight": math.inf}], "weight inf must be above 0 and finite"),
    ([{**GCD, "weight": math.nan}], "weight nan"),
    ([{**GCD, "options": "{}"}], "options '{}' must be a JSON object"),
    ([{**GCD, "options": {"seed": 1}}], "no option 'seed'"),
    ([{**GCD, "name": "a/b"}], "name 'a/b'"),
    ([{**GCD, "template": "x"}], "lacks the placeholder"),
    ([{**GCD, "extract": "box"}], "unknown extraction rule"),
    ([{**GCD, "success_from": 2}], "success_from 2"),
    ([GCD, {**GCD, "options": {"max_numbers": 2}}], "two parts 'gcd'"),
    ([GCD, {**GCD, "name": "again"}], "'gcd' and 'again' are the same"),
    ([{**SUMS, "weight": 99}, GCD], "'gcd' gets none of tuning 8"),
    (
      [GCD, {**SUMS, "options": {"max_terms": 2, "max_digits": 1}}],
      r"'chain_sum' gave \d+ distinct.*of size; lower it or its weight",
    ),
  ],
)
def test_refuses(parts, why):
  text = parts if isinstance(parts, str) else json.dumps(parts)
  size = 400 if "gave" in why else 80
  with pytest.raises(UserError, match=why):
    reasoning_gym(mixture=text, **{**SIZES, "size": size})


def test_a_mixture_stands_alone():
  for setting in ({"dataset": "gcd"}, {"options": "{}"}):
    with pytest.raises(UserError, match="leave them out"):
      mixed(SUMS, **setting)
