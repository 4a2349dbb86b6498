"""Whole rollouts: exact distributions, stops, budgets, whose randomness."""

import dataclasses

import jax
import numpy as np
import pytest
import toys
from scipy import stats

from grpo_jax.models.architecture import Architecture, Model
from grpo_jax.types import Prompts

KEY = jax.random.key(11)
TABLE = np.random.default_rng(0).normal(size=(4, 4)) * 1.2
BIGRAM, BIGRAM_PARAMS = toys.bigram(TABLE)


def bigram_rollout(prompts, budgets=None, key=KEY, **changes):
  how = toys.settings(**{"max_tokens": 4, "stop_ids": (0,), **changes})
  if budgets is None:
    budgets = np.full((len(prompts.lengths), how.group_size), 99, np.int32)
  run = toys.sampler(how, BIGRAM)
  return jax.device_get(run(BIGRAM_PARAMS, prompts, key, budgets))


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_completions_have_their_probabilities():
  # Every completion of the tree, by its exact chance under the policy.
  prompts = toys.pack_prompts([[3, 2]] * 512)
  rollout = bigram_rollout(prompts, group_size=24, max_tokens=3)
  chance = np.exp(TABLE) / np.exp(TABLE).sum(1, keepdims=True)
  tree = toys.tree_of(4, 3)
  seen = dict.fromkeys(tree, 0)
  for b, g in np.ndindex(rollout.lengths.shape):
    row = tuple(rollout.ids[b, g, : rollout.lengths[b, g]].tolist())
    seen[row] += 1
    logs = [np.log(chance[a, b]) for a, b in zip((2, *row), row)]
    found = rollout.sampler_logprobs[b, g]
    np.testing.assert_allclose(found[: len(row)], logs, atol=1e-5)
    assert (found[len(row) :] == 0).all()
  want = [np.prod([chance[a, b] for a, b in zip((2, *r), r)]) for r in tree]
  assert abs(sum(want) - 1) < 1e-9
  total = rollout.lengths.size
  assert stats.chisquare(list(seen.values()), np.array(want) * total)[1] > 1e-3
  # The first token may be the stop: it is the completion, and not truncated.
  short = rollout.lengths == 1
  assert (rollout.ids[short][:, 0] == 0).all()
  assert short.any() and not rollout.truncated[short].any()
  assert (rollout.mask.sum(-1) == rollout.lengths).all()
  # Rows of a group are independent of each other: pairs have the product.
  first = rollout.ids[..., 0]
  pairs = first[:, 0::2] * 4 + first[:, 1::2]
  expected = np.outer(chance[2], chance[2]).reshape(-1)
  counts = np.bincount(pairs.reshape(-1), minlength=16)
  assert stats.chisquare(counts, expected * counts.sum())[1] > 1e-3


def test_a_row_is_a_function_of_its_seed_prompt_and_place():
  # Not of the batch it is in, of the order of prompts, of G or of the loop.
  prompts = toys.pack_prompts([[1, 2], [3], [2], [2], [3, 3, 1]])
  prompts = prompts.replace(ordinals=np.int32([7, 3, 11, 12, 4]))
  whole = bigram_rollout(prompts)
  assert len({r.tobytes() for r in whole.ids.reshape(15, -1)}) > 6
  assert (whole.ids[2] != whole.ids[3]).any()  # same prompt, another draw
  same(bigram_rollout(prompts), whole)
  same(bigram_rollout(prompts, early_exit=False), whole)
  other = bigram_rollout(prompts, key=jax.random.key(12))
  assert (other.ids != whole.ids).any()

  order = [4, 1]
  part = Prompts(*(x[order] for x in jax.tree.leaves(prompts)))
  few = bigram_rollout(part, group_size=2)
  same(few.ids, whole.ids[order, :2])
  same(few.lengths, whole.lengths[order, :2])
  np.testing.assert_allclose(
    few.sampler_logprobs, whole.sampler_logprobs[order, :2], atol=1e-6
  )


def test_budgets_cut_rows_and_change_nothing_else():
  prompts = toys.pack_prompts([[1, 2], [3], [2], [2], [3, 3, 1]])
  whole = bigram_rollout(prompts)
  budgets = np.tile(np.int32([1, 3, 99]), (5, 1))
  cut = bigram_rollout(prompts, budgets)
  limit = np.minimum(budgets, 4)
  same(cut.lengths, np.minimum(whole.lengths, limit))
  kept = np.arange(4) < cut.lengths[..., None]
  same(cut.ids, np.where(kept, whole.ids, 0))
  last = np.take_along_axis(cut.ids, cut.lengths[..., None] - 1, 2)[..., 0]
  same(cut.truncated, last != 0)
  assert cut.truncated.any() and not cut.truncated.all()


# --- a policy that follows a script ------------------------------------------

SCRIPT, SCRIPT_PARAMS = toys.scripted(
  {
    **{3: 5, 5: 6, 6: 106, 106: 9, 9: 9},  # a second kind of stop
    **{4: 1, 1: 1},  # a stop at once
    **{7: 7},  # never
    **{10: 11, 11: 12, 12: 13, 13: 14, 14: 15, 15: 1},  # in the last place
  },
  vocab=110,
)


def test_any_stop_id_ends_a_row_and_belongs_to_it():
  # A26; and A08: a pad that is a stop id hides nothing.
  how = toys.settings(stop_ids=(1, 106), pad_id=1, group_size=2)
  prompts = toys.pack_prompts([[3], [4], [7], [10]])
  run = toys.sampler(how, SCRIPT)
  rollout = jax.device_get(run(SCRIPT_PARAMS, prompts, KEY))
  for g in range(2):
    assert rollout.ids[:, g].tolist() == [
      [5, 6, 106, 1, 1, 1],
      [1, 1, 1, 1, 1, 1],
      [7, 7, 7, 7, 7, 7],
      [11, 12, 13, 14, 15, 1],
    ]
    assert rollout.lengths[:, g].tolist() == [3, 1, 6, 6]
    assert rollout.truncated[:, g].tolist() == [False, False, True, False]
  want = np.arange(6) < rollout.lengths[..., None]
  same(rollout.mask, want)
  assert (rollout.sampler_logprobs[~want] == 0).all()
  # The trainer scores the stop, and nothing after it.
  logprobs, _ = toys.scorer(SCRIPT)(SCRIPT_PARAMS, rollout)
  toys.close(logprobs, rollout.sampler_logprobs, 1e-5)


def test_ignoring_stops_runs_every_row_to_the_end():
  rollout = bigram_rollout(toys.pack_prompts([[1], [2]]), ignore_stop=True)
  assert (rollout.lengths == 4).all() and rollout.mask.all()
  assert (rollout.ids[..., :-1] == 0).any() and rollout.truncated.all()


# --- the sampler and the scorer are one distribution -------------------------


@pytest.mark.parametrize(
  "changes",
  [{"temperature": 0.7}, {"top_k": 6, "top_p": 0.9, "temperature": 1.3}],
  ids=["temperature", "support"],
)
def test_the_scorer_finds_what_the_sampler_said(changes):
  params = toys.draw_params(toys.ARCH)
  how = toys.settings(max_tokens=5, **changes)
  run = toys.sampler(how, toys.MODEL)
  rollout = jax.device_get(run(params, toys.some_prompts(), KEY))
  assert rollout.temperature == np.float32(how.temperature)
  logprobs, entropy = toys.scorer()(params, rollout)
  toys.close(logprobs, rollout.sampler_logprobs, 2e-5)
  assert np.abs(logprobs).max() > 1
  if rollout.support is None:
    # At another temperature they part: the scorer reads the rollout's own.
    other, _ = toys.scorer()(params, rollout.replace(temperature=np.float32(1)))
    assert np.abs(other - logprobs).max() > 0.05
  else:
    inside = (rollout.support == rollout.ids[..., None]).any(-1)
    assert inside[rollout.mask].all()
    assert (rollout.support[~rollout.mask] == -1).all()
    kept = (rollout.support >= 0).sum(-1)
    assert (np.exp(entropy)[rollout.mask] < kept[rollout.mask] + 1e-3).all()
    assert kept.max() == 6 and kept[rollout.mask].min() >= 1


def test_greedy_rollouts_repeat_the_likeliest_token():
  rollout = bigram_rollout(toys.pack_prompts([[1], [2]]), temperature=0.0)
  chance = np.exp(TABLE) / np.exp(TABLE).sum(1, keepdims=True)
  for b, last in enumerate((1, 2)):
    for t in range(rollout.lengths[b, 0]):
      token = int(np.argmax(TABLE[last]))
      assert (rollout.ids[b, :, t] == token).all()
      want = np.log(chance[last, token])
      assert abs(rollout.sampler_logprobs[b, 0, t] - want) < 1e-5
      last = token
  assert rollout.temperature == 1


def test_ids_past_the_tokenizer_do_not_exist():
  # A27: 16 rows, 13 of them real, all logits 0.
  arch = Architecture(16, 13, 1, 4, 1, 1, 2, 2)
  model = Model(arch)
  params = toys.draw_params(arch)
  params["head"] = params["head"] * 0
  how = toys.settings(group_size=50, max_tokens=5, stop_ids=(99,))
  prompts = toys.pack_prompts([[2]] * 40)
  rollout = jax.device_get(toys.sampler(how, model)(params, prompts, KEY))
  assert rollout.ids.size == 10_000
  counts = np.bincount(rollout.ids.reshape(-1), minlength=16)
  assert (counts[13:] == 0).all()
  assert stats.chisquare(counts[:13])[1] > 1e-3
  logprobs, entropy = toys.scorer(model)(params, rollout)
  np.testing.assert_allclose(rollout.sampler_logprobs, -2.564949, atol=1e-5)
  np.testing.assert_allclose(logprobs, rollout.sampler_logprobs, atol=1e-6)
  np.testing.assert_allclose(entropy, 2.564949, atol=1e-5)


def test_settings_are_a_value():
  assert toys.settings() == dataclasses.replace(toys.settings())
  assert toys.settings(top_k=3, temperature=0.0).support_size(16) == 0
  assert toys.settings(top_p=0.5).support_size(16) == 16
  assert toys.settings(top_p=0.5).support_size(10**6) == 128
