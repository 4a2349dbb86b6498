"""One token from logits: exact probabilities, and what is never drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from scipy import stats

from grpo_jax import draws, logprobs
from grpo_jax.models.architecture import Architecture, Model
from grpo_jax.models.layers import MASKED

DRAW = toys.jit(draws.inverse_cdf)
EDGES = np.array([0, 1e-45, 1e-8, 0.5, 1 - 2**-24, 1 - 2**-23], np.float32)


def chi_square(index, chance):
  """p-value of draws [N] against probabilities [V]; zeros must not occur."""
  seen = np.bincount(index, minlength=len(chance))
  assert (seen[chance == 0] == 0).all()
  kept = chance > 0
  want = np.float64(chance[kept]) / np.float64(chance[kept]).sum()
  return stats.chisquare(seen[kept], want * len(index)).pvalue


@functools.cache
def chooser(how):
  return toys.jit(functools.partial(draws.choose, sampling=how))


def test_indices_have_their_probabilities():
  chance = np.array([0, 0.4, 0, 0.05, 0.25, 0.3, 0], np.float32)
  u = np.random.default_rng(0).random(100_000, np.float32)
  probs = np.broadcast_to(chance * 3, (len(u), 7))  # need not be normalised
  assert chi_square(np.asarray(DRAW(probs, u)), chance) > 1e-3
  # One uniform number maps to one index, in order.
  grid = np.array([0, 0.39, 0.41, 0.44, 0.46, 0.69, 0.71, 0.999], np.float32)
  index = DRAW(np.broadcast_to(chance, (8, 7)), grid)
  assert np.asarray(index).tolist() == [1, 1, 3, 3, 4, 4, 5, 5]


def test_the_edges_of_the_unit_interval():
  for chance in (
    [0, 0, 1, 0],
    [0.5, 0, 0, 0.5],
    [0, 1e-30, 0, 0],
    [0, 1e-7, 1, 0],
    [0.1] * 3 + [0],
  ):
    probs = np.broadcast_to(np.float32(chance), (len(EDGES), len(chance)))
    index = np.asarray(DRAW(probs, EDGES))
    assert (probs[np.arange(len(EDGES)), index] > 0).all(), (chance, index)


def test_a_large_vocabulary_is_drawn_in_two_levels():
  """Blocks of ids, then an id: the same chances, ends and zeros."""
  rng = np.random.default_rng(4)
  for size in (4 * draws.BLOCK + 1, 1000, 8 * draws.BLOCK):
    chance = rng.gamma(0.2, size=size).astype(np.float32)
    chance[rng.random(size) < 0.3] = 0
    chance[: draws.BLOCK] = chance[2 * draws.BLOCK : 3 * draws.BLOCK] = 0
    chance[-draws.BLOCK // 2 :] = 0
    exact = np.cumsum(np.float64(chance))
    u = rng.random(20_000).astype(np.float32)
    index = np.asarray(DRAW(np.broadcast_to(chance, (len(u), size)), u))
    assert (chance[index] > 0).all()
    # The exact inverse, but for numbers within rounding of a boundary.
    want = np.searchsorted(exact, np.float64(u) * exact[-1], side="right")
    near = np.abs(exact[:, None] / exact[-1] - u[None, :2000]).min(0) < 1e-6
    assert (index[:2000] == want[:2000])[~near].all() and near.mean() < 0.05
    edges = np.asarray(DRAW(np.broadcast_to(chance, (6, size)), EDGES))
    alive = np.flatnonzero(chance)
    assert (chance[edges] > 0).all()
    assert edges[0] == alive[0] and edges[4] >= alive[-3]


def test_rounding_of_a_parallel_sum_makes_no_id_possible():
  # A cumulative sum computed in parallel can rise, by its last bit, at an
  # index of probability 0. Aim u at every such step.
  rng = np.random.default_rng(0)
  probs = rng.gamma(0.3, size=(64, 1000)).astype(np.float32)
  probs[:, rng.random(1000) < 0.5] = 0
  probs[:, 900:] = 0  # rows past the tokenizer
  probs /= probs.sum(-1, keepdims=True)
  total = np.asarray(toys.jit(functools.partial(jnp.cumsum, axis=-1))(probs))
  below = np.pad(total, ((0, 0), (1, 0)))[:, :-1]
  row, column = np.nonzero((probs == 0) & (total > below))
  aims = (below[row, column] / total[row, -1]).astype(np.float32)
  up, down = (
    np.nextafter(aims, np.float32(1)),
    np.nextafter(aims, np.float32(0)),
  )
  aims = np.minimum(np.concatenate((aims, up, down)), EDGES[4])
  row = np.tile(row, 3)
  index = np.asarray(DRAW(probs[row], aims))
  assert (probs[row, index] > 0).all()
  every = np.repeat(np.arange(64), len(EDGES))
  index = np.asarray(DRAW(probs[every], np.tile(EDGES, 64)))
  assert (probs[every, index] > 0).all()


def test_temperature_comes_before_the_softmax():
  # A10, in the sampler.
  logits = np.tile(np.float32([2, 1, 0]), (30_000, 1))
  u = np.random.default_rng(1).random(30_000, np.float32)
  token, logprob, support = chooser(toys.settings(temperature=0.6))(logits, u)
  want = np.array([-0.202573, -1.869240, -3.535906])
  assert support is None
  np.testing.assert_allclose(logprob, want[token], atol=1e-5)
  assert chi_square(np.asarray(token), np.exp(want)) > 1e-3


def test_greedy_takes_the_likeliest_and_divides_by_nothing():
  logits = np.float32([[2, 1, 0], [0, 5, 5], [-1, -2, MASKED]])
  for u in (0.0, 0.999):
    token, logprob, support = chooser(toys.settings(temperature=0.0))(
      logits, np.full(3, u, np.float32)
    )
    assert np.asarray(token).tolist() == [0, 1, 0] and support is None
    np.testing.assert_allclose(
      logprob, [-0.407606, -0.696510, -0.313262], atol=1e-5
    )


def kept_by_loops(logits, temperature, top_k, top_p, min_p, most):
  """Ids that survive, likeliest first."""
  x = logits.astype(np.float64) / temperature
  order = np.argsort(-x, kind="stable")
  order = [i for i in order if logits[i] > MASKED / 2]
  if top_k:
    order = order[:top_k]
  chance = np.exp(x[order] - x[order[0]])
  chance /= chance.sum()
  out, before = [], 0.0
  for i, p in zip(order[:most], chance):
    if before < top_p and p >= min_p * chance[0]:
      out.append(i)
    before += p
  return out


@pytest.mark.parametrize(
  "changes",
  [
    {"top_k": 3},
    {"top_k": 40},
    {"top_p": 0.7},
    {"top_p": 0.7, "max_support": 2},
    {"min_p": 0.3},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.15, "temperature": 1.7},
  ],
  ids=str,
)
def test_kept_ids_against_loops(changes):
  how = toys.settings(**changes)
  rng = np.random.default_rng(3)
  logits = rng.normal(size=(40, 12)).astype(np.float32) * 2
  logits[:, 9:] = MASKED  # no tokenizer has these
  logits[0, 1:] = MASKED  # one id left
  u = rng.random(40, np.float32)
  token, logprob, support = jax.device_get(chooser(how)(logits, u))
  assert support.shape[-1] == how.support_size(12) <= 12
  for i, row in enumerate(logits):
    kept = [x for x in support[i] if x >= 0]
    assert kept == kept_by_loops(
      row, how.temperature, how.top_k, how.top_p, how.min_p, len(support[i])
    )
    x = row[kept].astype(np.float64) / how.temperature
    chance = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    at = kept.index(token[i])
    assert abs(np.log(chance[at]) - logprob[i]) < 1e-5
    assert chance[:at].sum() - 1e-5 <= u[i] <= chance[: at + 1].sum() + 1e-5


def test_a_dropped_id_is_never_drawn():
  how = toys.settings(top_k=4, top_p=0.9)
  logits = np.tile(np.float32([3, 1, 2, 0, -1, 2.5]), (60_000, 1))
  u = np.random.default_rng(4).random(60_000, np.float32)
  u[: len(EDGES)] = EDGES
  token, _, support = chooser(how)(logits, u)
  kept = np.asarray(support)[0]
  assert kept.tolist() == [0, 5, 2, -1]
  chance = np.zeros(6)
  chance[kept[:3]] = np.exp(logits[0, kept[:3]])
  assert chi_square(np.asarray(token), chance / chance.sum()) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_softmax_is_float32_whatever_the_weights(dtype):
  # A11: 131,072 logits of 0 are -17 ln 2 each, not the nearest bfloat16.
  n = 131_072
  model = Model(Architecture(n, n, 1, 2, 1, 1, 2, 2), dtype=dtype)
  score = functools.partial(
    logprobs.token_logprobs, model=model, temperature=1.0
  )
  zeros = np.zeros((n, 2), np.float32)
  token, entropy = toys.jit(score)(
    {"embed": zeros, "head": zeros},
    jnp.ones((1, 1, 1, 2), model.compute_dtype),
    np.full((1, 1, 1), n - 1, np.int32),
  )
  assert token.dtype == entropy.dtype == np.float32
  assert abs(token.item() + 11.783502) < 1e-4
  assert abs(entropy.item() - 11.783502) < 1e-3
