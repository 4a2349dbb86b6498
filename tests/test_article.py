"""The article's objective, by enumerating every group a tiny policy can draw.

For any policy θ and any older policy that sampled, in expectation

    -loss = (G-1)/G (J(θ) - J(old)) - β KL(θ‖ref)

exactly, and the same of the gradient. What is evaluated is the real
`grpo.advantage` and `grpo.loss`; the expectation is written into the token
weights, in which the loss is linear.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from grpo_jax import grpo, losses, token_weights
from grpo_jax.algorithms import grpo as grpo_clipped
from grpo_jax.algorithms import grpo_sequence
from grpo_jax.kl import KL, k1, k2, k3
from grpo_jax.logprobs import rollout_logprobs
from grpo_jax.models.architecture import Architecture, Model
from grpo_jax.types import Scores, length_mask

VOCAB, SIZE, PROMPTS = 3, 3, 2
TREE = toys.tree_of(VOCAB, SIZE)  # 15 completions, ragged, 0 stops


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


# --- a table of logits per prompt and prefix, in float64 ---------------------


def table_source(params, rollout, *, model, slabs=None, ref=None):
  """Log-probs of a softmax table [PROMPTS, SIZE, VOCAB^(SIZE-1), VOCAB]."""
  del model, slabs, ref
  powers = VOCAB ** jnp.arange(SIZE)
  digits = rollout.ids * powers[None, None]
  code = jnp.cumsum(digits, -1) - digits  # the tokens before t
  prompt = rollout.prompts.ids[:, 0][:, None, None]
  logits = params["table"][prompt, jnp.arange(SIZE)[None, None], code]
  logprobs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(logprobs, rollout.ids[..., None], -1)[..., 0]
  mask = length_mask(rollout.lengths, SIZE)
  entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
  return jnp.where(mask, chosen, 0), jnp.where(mask, entropy, 0)


def sequence_logprob(table, prompt, row):
  """One completion's log-probability, by a loop."""
  total, code = 0.0, 0
  for t, token in enumerate(row):
    logits = table[prompt, t, code]
    total += logits[token] - np.log(np.exp(logits).sum())
    code += token * VOCAB**t
  return total


def improvement_and_kl(table, ref, reward):
  """J(θ) and KL(θ‖ref), means over the prompts, by loops over the tree."""
  gain = divergence = 0.0
  for prompt in range(PROMPTS):
    for i, row in enumerate(TREE):
      now = sequence_logprob(table, prompt, row)
      gain += np.exp(now) * reward[prompt, i]
      before = sequence_logprob(ref, prompt, row)
      divergence += np.exp(now) * (now - before)
  return np.array([gain, divergence]) / PROMPTS


@functools.cache
def exact_slopes(h=1e-5):
  """Central differences of J and KL at the policy: [2, *table.shape]."""
  table, _, ref, reward = tables()
  slopes = np.zeros((2, *table.shape))
  for index in np.ndindex(table.shape):
    step = np.zeros_like(table)
    step[index] = h
    up = improvement_and_kl(table + step, ref, reward)
    down = improvement_and_kl(table - step, ref, reward)
    slopes[:, *index] = (up - down) / (2 * h)
  return slopes


def exact_loss(group, beta, off_policy):
  """What loss and gradient must be in expectation."""
  table, old, ref, reward = tables()
  share = (group - 1) / group
  gain, divergence = improvement_and_kl(table, ref, reward)
  if off_policy:
    gain -= improvement_and_kl(old, ref, reward)[0]
  else:
    gain = 0.0
  slopes = exact_slopes()
  return beta * divergence - share * gain, beta * slopes[1] - share * slopes[0]


def tables():
  rng = np.random.default_rng(0)
  shape = (PROMPTS, SIZE, VOCAB ** (SIZE - 1), VOCAB)
  policy, old, ref = rng.normal(size=(3, *shape))
  return policy, old, ref, rng.normal(size=(PROMPTS, len(TREE)))


def every_group(group):
  """All (prompt, G-tuple of completions): prompt [N], tree index [N, G]."""
  rows = list(itertools.product(range(len(TREE)), repeat=group))
  index = np.array(rows * PROMPTS)
  return np.repeat(np.arange(PROMPTS), len(rows)), index


def expected_losses(monkeypatch, algorithms, group, off_policy):
  """The real losses and gradients, in expectation over every group."""
  toys.use_source(monkeypatch, table_source)
  policy, old, ref, reward = tables()
  if not off_policy:
    old = policy
  prompt, index = every_group(group)
  rollout = toys.pack_rollout(
    toys.pack_prompts(prompt[:, None]),
    [[TREE[i] for i in row] for row in index],
  )
  rewards = toys.give(reward[prompt[:, None], index])

  def run(policy, old, ref, probability):
    scores = [
      table_source({"table": x}, rollout, model=None)[0] for x in (old, ref)
    ]
    out = []
    for algorithm in algorithms:
      batch = grpo.advantage(
        rewards,
        rollout,
        Scores(
          logprobs=scores[0] if off_policy else None, ref_logprobs=scores[1]
        ),
        algorithm=algorithm,
      )
      loss = functools.partial(grpo.loss, model=None, algorithm=algorithm)
      (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(
        {"table": policy}, {}, toys.exact(batch, probability)
      )
      out.append((value, gradient["table"]))
    return out

  at_old = np.array(
    [[sequence_logprob(old, p, row) for row in TREE] for p in range(PROMPTS)]
  )
  probability = np.exp(at_old[prompt[:, None], index].sum(-1)) / PROMPTS
  assert abs(probability.sum() - 1) < 1e-12
  return toys.jit(run)(policy, old, ref, probability)


@pytest.mark.parametrize("group,off_policy", [(2, False), (2, True), (3, True)])
def test_value_and_gradient_are_exact(group, off_policy, x64, monkeypatch):
  betas = (0, 0.3)
  found = expected_losses(
    monkeypatch, [grpo_sequence(beta) for beta in betas], group, off_policy
  )
  for beta, (value, gradient) in zip(betas, found):
    assert gradient.dtype == np.float64
    want, slope = exact_loss(group, beta, off_policy)
    assert abs(value - want) < 1e-9
    toys.close(gradient, slope, 1e-7)
    assert np.abs(slope).max() > 0.01


def test_the_common_variants_are_not_exact(x64, monkeypatch):
  # The test above has the power to tell them apart.
  variants = {
    "k3 per token": {"kl": KL(k3, 0.3)},
    "k3 of the sequence": {"kl": KL(k3, 0.3, sequence=True)},
    "k2 of the sequence": {"kl": KL(k2, 0.3, sequence=True)},
    "ρ k3 per token": {"kl": KL(k3, 0.3, ratio_weighted=True)},
    "token ratio": {"ratio": losses.token_ratio},
    "token mean": {"weights": token_weights.token_mean},
    "divided by std": {"advantage": grpo_clipped().advantage},
  }
  algorithms = [
    dataclasses.replace(grpo_sequence(0.3), **change)
    for change in variants.values()
  ]
  found = expected_losses(monkeypatch, algorithms, 2, True)
  _, slope = exact_loss(2, 0.3, True)
  for name, (_, gradient) in zip(variants, found):
    assert np.abs(gradient - slope).max() > 3e-3, name


def test_k1_carried_by_the_ratio_is_exact_too(x64, monkeypatch):
  kl = KL(k1, 0.3, sequence=True, ratio_weighted=True)
  algorithm = dataclasses.replace(grpo_sequence(), kl=kl)
  [(value, gradient)] = expected_losses(monkeypatch, [algorithm], 2, True)
  want, slope = exact_loss(2, 0.3, True)
  assert abs(value - want) < 1e-9
  toys.close(gradient, slope, 1e-7)


# --- the same of the real decoder, in float32 --------------------------------


DECODER = Model(Architecture(4, 3, 1, 4, 2, 1, 2, 4))  # id 3 is padding


def decoder_rollout(index):
  prompt = toys.pack_prompts([[2, 1]] * len(index), width=3)
  return toys.pack_rollout(prompt, [[TREE[i] for i in row] for row in index])


@pytest.fixture(scope="module")
def decoder():
  """Three policies, each one's log-probs over the tree, and exact slopes."""
  params = [toys.draw_params(DECODER.arch, seed) for seed in (0, 1, 5)]
  whole = decoder_rollout([range(len(TREE))])

  def objective(params, improvement, beta, ref, reward):
    token, _ = rollout_logprobs(params, whole, model=DECODER)
    now = token.sum(-1)[0]
    gain = jnp.sum(jnp.exp(now) * reward)
    divergence = jnp.sum(jnp.exp(now) * (now - ref))
    return improvement * gain - beta * divergence, token[0]

  slopes = toys.jit(jax.value_and_grad(objective, has_aux=True))
  zeros = np.zeros(len(TREE), np.float32)
  tree = [np.asarray(slopes(p, 0.0, 0.0, zeros, zeros)[0][1]) for p in params]
  return params, tree, slopes


def test_probabilities_over_the_tree_sum_to_one(decoder):
  for tokens in decoder[1]:
    probability = np.exp(tokens.sum(-1, dtype=np.float64))
    assert abs(probability.sum() - 1) < 1e-6
    assert probability.max() < 0.9


def test_the_real_decoder_climbs_the_exact_gradient(decoder):
  (policy, *_), (_, at_old, at_ref), slopes = decoder
  group, beta = 2, 0.3
  share = (group - 1) / group
  reward = np.random.default_rng(1).normal(size=len(TREE)).astype(np.float32)
  index = np.array(list(itertools.product(range(len(TREE)), repeat=group)))
  algorithm = grpo_sequence(beta)
  scores = Scores(logprobs=at_old[index], ref_logprobs=at_ref[index])

  def run(policy, scores, probability):
    batch = grpo.advantage(
      toys.give(reward[index]),
      decoder_rollout(index),
      scores,
      algorithm=algorithm,
    )
    return jax.value_and_grad(grpo.loss, has_aux=True)(
      policy,
      {},
      toys.exact(batch, probability),
      model=DECODER,
      algorithm=algorithm,
    )

  chance = np.exp(at_old.sum(-1))
  (value, _), gradient = toys.jit(run)(policy, scores, chance[index].prod(-1))
  (want, _), slope = slopes(policy, share, beta, at_ref.sum(-1), reward)
  want -= share * np.sum(chance * reward)
  assert abs(value + want) < 3e-6
  toys.close(gradient, jax.tree.map(lambda x: -x, slope), 1e-5)
  assert np.abs(slope["head"]).max() > 0.01
