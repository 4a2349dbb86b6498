"""Theory in expectation: every group that a tiny policy can draw, in float64.

The policy is a softmax per prefix, its log-probs and slopes by loops. The real
`grpo.advantage` and `grpo.loss` turn every multiset of outcomes into gradients
by log-prob; the chain rule and the sum over groups are numpy's.
"""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from grpo_jax import advantages, algorithms, grpo, losses, optimizer, variants
from grpo_jax import token_weights as tw
from grpo_jax.advantages import Outcome
from grpo_jax.algorithm import GROUP_MEAN, normalized
from grpo_jax.corrections import Banded, Truncated
from grpo_jax.kl import KL, KLInReward, k1, k2, k3
from grpo_jax.types import Scores, TrainState

TREE = toys.tree_of(3, 3)  # 15 ragged completions, 0 stops
ONE = toys.tree_of(3, 1)  # three answers of one token
Found = collections.namedtuple("Found", "value slope variance")

but = dataclasses.replace
mean = algorithms.grpo_sequence(beta=0.0)
loo = algorithms.rloo(beta=0.0)
none = algorithms.reinforce()


@pytest.fixture(autouse=True)
def exactly(monkeypatch):
  toys.use_source(monkeypatch, toys.array_source)
  with jax.enable_x64(True):
    yield


def nodes(tree):
  """Every prefix at which a token is drawn."""
  return list(dict.fromkeys(tuple(r[:t]) for r in tree for t in range(len(r))))


def softmax(x):
  return np.exp(x) / np.exp(x).sum()


def policy(logits, tree=TREE):
  """log π of each token [N, T], its slope [N, T, prefix, token], π [N]."""
  at, size = nodes(tree), max(map(len, tree))
  logp = np.zeros((len(tree), size))
  slope = np.zeros((*logp.shape, *logits.shape))
  for i, row in enumerate(tree):
    for t, token in enumerate(row):
      node = at.index(tuple(row[:t]))
      p = softmax(logits[node])
      logp[i, t] = np.log(p[token])
      slope[i, t, node] -= p
      slope[i, t, node, token] += 1
  return logp, slope, np.exp(logp.sum(-1))


def prefix_slopes(logits, ref, tree=TREE):
  """Σ chance(prefix) ∇KL there, of KL(π‖ref) and KL(ref‖π), by a loop."""
  reverse, forward = np.zeros((2, *logits.shape))
  at = nodes(tree)
  for node, prefix in enumerate(at):
    steps = [logits[at.index(prefix[:t])] for t in range(len(prefix))]
    chance = math.prod(softmax(x)[token] for x, token in zip(steps, prefix))
    p, q = softmax(logits[node]), softmax(ref[node])
    gap = np.log(p / q)
    reverse[node] = chance * p * (gap - np.sum(p * gap))
    forward[node] = chance * (p - q)
  return reverse, forward


def cosine(a, b):
  return np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b))


def along(weight, slope):
  return np.einsum("i,itnv->nv", weight, slope)


def some(tree=TREE):
  """Logits of three policies, and a reward of each completion."""
  rng = np.random.default_rng(0)
  return rng.normal(size=(3, len(nodes(tree)), 3)), rng.normal(size=len(tree))


def groups(outcomes, size):
  """Multisets of outcomes [M, G], and the orders each can be drawn in [M]."""
  rows = list(itertools.combinations_with_replacement(range(outcomes), size))
  repeats = [collections.Counter(row).values() for row in rows]
  orders = [math.prod(map(math.factorial, counts)) for counts in repeats]
  return np.array(rows), math.factorial(size) / np.array(orders)


@functools.cache
def program(rows):
  """Loss and gradient by log-prob of each row, in one program."""

  def run(rewards, rollout, now, scores, probability):
    out = []
    for row in rows:
      batch = grpo.advantage(rewards, rollout, scores, algorithm=row)
      loss = functools.partial(grpo.loss, model=None, algorithm=row)
      (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(
        {"logprobs": now}, {}, toys.exact(batch, probability)
      )
      out.append((value, gradient["logprobs"]))
    return out

  return toys.jit(run)


def drawn(rows, group, world, reward, chance=None, which=None, **other):
  """Each row's expected loss, expected ascent and trace of its variance.

  `world` is of `policy`; an outcome is a reward, a completion (`which`) and a
  chance; `other`: old, ref and sampler log-probs [N, T].
  """
  now, slope, chances = world
  chance = chances if chance is None else chance
  index, orders = groups(len(chance), group)
  probability = orders * chance[index].prod(-1)
  assert abs(probability.sum() - 1) < 1e-9
  at = index if which is None else which[index]
  rows_of = [[[0] * n for n in g] for g in (now != 0).sum(-1)[at]]
  rollout = toys.pack_rollout(toys.pack_prompts([[1]] * len(at)), rows_of)
  logs = {"sampler": now, "now": now, **other}
  logs = {k: x[at][..., : rollout.ids.shape[-1]] for k, x in logs.items()}
  rollout = rollout.replace(sampler_logprobs=logs["sampler"])
  known = toys.give(reward[index]), rollout, logs["now"]
  scores = Scores(logs.get("old"), logs.get("ref"))
  found, out = program(tuple(rows))(*known, scores, probability), []
  for value, by_logprob in jax.device_get(found):
    each = -by_logprob / probability[:, None, None]
    each = np.einsum("mgt,mgt...->m...", each, slope[at])
    whole = np.tensordot(probability, each, 1)
    size = np.square(each).reshape(len(each), -1).sum(-1)
    out.append(Found(value, whole, probability @ size - np.sum(whole**2)))
  return out


def law(world, reward):
  """V_J, Var(R)·tr F + |g|², g and tr F, by sums over completions."""
  _, slope, chance = world
  score = slope.sum(1).reshape(len(slope), -1)
  centred, fisher = reward - chance @ reward, np.square(score).sum(-1)
  g = (chance * centred) @ score
  noise = (chance @ centred**2) * (chance @ fisher)
  v = chance @ (centred**2 * fisher) - g @ g
  return v, noise + g @ g, g, chance @ fisher


@pytest.mark.parametrize("group", [2, 3, 4])
def test_baselines_and_the_variance_law(group):
  (logits, _, _), reward = some()
  world = _, slope, chance = policy(logits)
  truth, share = along(chance * reward, slope), (group - 1) / group
  rows = (mean, loo, none, algorithms.reinforce(baseline="group"))
  found = drawn(rows, group, world, reward)
  for f, scale in zip(found, (share, 1, 1, share)):
    toys.close(f.slope, scale * truth, 1e-10)
  # The group's mean is leave-one-out, shrunk, in its spread as well.
  assert abs(found[0].variance - share**2 * found[1].variance) < 1e-10
  v, c, _, _ = law(world, reward)
  assert abs(group * found[1].variance - (v + c / (group - 1))) < 1e-9
  index, orders = groups(len(TREE), group)
  probability = orders * chance[index].prod(-1)
  variance = chance @ reward**2 - (chance @ reward) ** 2
  two = (advantages.group_mean, advantages.leave_one_out)
  run = toys.jit(lambda r: [fn(r, r == r) for fn in two])
  a, b = jax.device_get(run(reward[index]))
  toys.close(a, share * b, 1e-12)
  for x, scale in ((a, share), (b, 1 / share)):
    assert abs(probability @ np.square(x).mean(-1) - scale * variance) < 1e-10


def test_the_law_over_several_prompts():
  """N·tr Var = E[V_J] + E[Var(R) tr F + |g|²]/(G-1) + G tr Cov(g)."""
  rng = np.random.default_rng(3)
  logits, offsets = rng.normal(size=(1, 3)), 2 * rng.normal(size=(6, 1, 3))
  worlds = [policy(logits + x, ONE) for x in offsets]
  rewards = np.eye(3)[[0, 1, 2, 0, 1, 2]]
  parts = [law(*pair) for pair in zip(worlds, rewards)]
  v, c = (np.mean([x[i] for x in parts]) for i in (0, 1))
  cov = np.sum(np.var([x[2] for x in parts], axis=0))
  got = {}
  for group in (2, 3, 4, 5, 8):
    found = [drawn([loo], group, *pair)[0] for pair in zip(worlds, rewards)]
    between = np.sum(np.var([f.slope for f in found], axis=0))
    got[group] = group * (np.mean([f.variance for f in found]) + between)
    assert abs(got[group] - (v + c / (group - 1) + group * cov)) < 1e-9
  best = 1 + np.sqrt(c / cov)
  assert 2 < best < 5, "an optimum inside the range"
  assert min(got, key=got.get) in (math.floor(best), math.ceil(best))


# By G: E[g]·g*/|g*|² and 1000 tr Var of 64 samples; then a cosine to g*.
PRINTED = {
  2: ((0.5, 1.039), (1, 4.155), (0.9998, 4.153), (0.7070, 2.077), 0.968),
  4: ((0.75, 1.347), (1, 2.394), (1.6505, 6.289), (1.4294, 4.717), 0.987),
  8: ((0.875, 1.448), (1, 1.891), (2.0621, 6.141), (1.9289, 5.374), 0.998),
}
ESTIMATORS = (
  none,
  but(loo, advantage=Outcome(lambda r, scored: r - 0.226)),  # J itself
  but(loo, advantage=GROUP_MEAN),
  loo,
  but(loo, advantage=normalized(0, 1e-4)),
  but(loo, advantage=normalized(1, 1e-4)),
)


@pytest.mark.parametrize("group", PRINTED)
def test_the_table_of_group_sizes(group):
  def run(p, reward):
    world = policy(np.log([p]), toys.tree_of(4, 1))
    truth = along(world[2] * reward, world[1])
    return truth, drawn(ESTIMATORS, group, world, np.array(reward))

  p, right = [0.226, 0.175, 0.378, 0.221], np.eye(4)[0]
  truth, found = run(p, right)
  want = ((1, 2.245), (1, 1.514), *PRINTED[group][:4])
  for f, (ratio, variance) in zip(found, want):
    got = np.sum(f.slope * truth) / np.sum(truth**2)
    assert abs(got - ratio) < 6e-5
    assert abs(f.variance * group / 64 - variance / 1000) < 1e-6
    toys.close(f.slope, got * truth, 1e-10)  # 0/1 rewards: its direction
  # Small groups do worse than no baseline, and longer so where p is small.
  assert (found[3].variance > found[0].variance) == (group < 8)
  _, rare = run([0.025, 0.325, 0.325, 0.325], right)
  assert rare[3].variance > rare[0].variance
  # With other rewards the deviation turns the direction.
  truth, found = run(p, [1, 0.5, 0, 0.2])
  assert abs(cosine(found[3].slope, truth) - 1) < 1e-10
  assert abs(cosine(found[4].slope, truth) - PRINTED[group][4]) < 6e-4


@pytest.mark.parametrize("group", [2, 3, 4])
def test_maxrl_climbs_a_truncated_likelihood(group):
  (logits, _, _), reward = some()
  right = (reward > 0.5) * 1.0
  world = _, slope, chance = policy(logits)
  # 1/K on each of the K right ones, and nothing where there is none.
  own = Outcome(lambda r, _: group * r / jnp.maximum(r.sum(1)[:, None], 1))
  rows = variants.maxrl(), but(loo, advantage=own)
  p, truth = chance @ right, along(chance * right, slope)
  found = drawn(rows, group, world, right)
  for f, terms in zip(found, (group - 1, group)):
    scale = sum((1 - p) ** (k - 1) for k in range(1, terms + 1))
    toys.close(f.slope, scale * truth, 1e-10)


def test_noise():
  (logits, _, _), reward = some()
  world = _, slope, chance = policy(logits)
  twice = np.repeat(np.arange(len(TREE)), 2)
  run = functools.partial(drawn, (mean, loo), 2, world, which=twice)
  right = (reward > 0) * 1.0
  truth = along(chance * right, slope)
  total = np.stack((right, 1 - right), -1).ravel()
  for up, down in ((0.1, 0.3), (0.5, 0.5)):  # false rights, false wrongs
    wrong = np.where(right > 0, down, up)
    share = np.stack((1 - wrong, wrong), -1) * chance[:, None]
    for f, scale in zip(run(total, share.ravel()), (0.5, 1)):
      toys.close(f.slope, scale * (1 - up - down) * truth, 1e-10)
  # Noise of each row's own: unbiased, and its variance is added.
  noise, half = 0.7 * np.tile([1, -1], len(TREE)), chance[twice] / 2
  found = run(reward[twice] + noise, half)[1]
  toys.close(found.slope, along(chance * reward, slope), 1e-10)
  v, c, _, fisher = law(world, reward)
  assert abs(2 * found.variance - (v + c + 2 * 0.49 * fisher)) < 1e-9
  # A reward that says nothing: of P G samples P (G-1) count.
  found = run(noise, half)[1]
  toys.close(found.slope, 0 * truth, 1e-10)
  assert abs(2 * found.variance - 0.49 * fisher * 2) < 1e-9


def test_only_the_product_of_ratios_is_unbiased():
  (logits, before, _), reward = some()
  world = _, slope, chance = policy(logits)
  old, _, old_chance = policy(before)
  token = but(mean, ratio=losses.token_ratio, weights=tw.sequence_sum_mean)
  geometric = but(token, ratio=losses.geometric_ratio)
  clip = but(mean, surrogate=losses.Clipped(0.2, 0.2))
  rows = (mean, token, geometric, clip)
  exact, *biased = drawn(rows, 3, world, reward, old_chance, old=old)
  truth = along(chance * reward, slope)
  toys.close(exact.slope, 2 / 3 * truth, 1e-10)
  assert abs(exact.value + 2 / 3 * (chance - old_chance) @ reward) < 1e-10
  for f in biased:
    assert cosine(f.slope, truth) < 0.99
  for f in drawn(rows, 3, world, reward):  # on policy they are all the same
    toys.close(f.slope, 2 / 3 * truth, 1e-10)


def test_weights_for_another_sampler():
  (logits, other, _), reward = some()
  world = _, slope, chance = policy(logits)
  sampler, _, sampled = policy(other)
  fixes = [Banded(0.0, np.inf, "sequence"), Truncated(1.5, "sequence")]
  fixes += [Truncated(np.inf, x) for x in ("sequence", "token", "geometric")]
  rows = (loo, *(but(loo, correction=x) for x in fixes))
  found = drawn(rows, 2, world, reward, sampled, sampler=sampler)
  truth = along(chance * reward, slope)
  for i, f in enumerate(found):  # the sequence's weight, uncut, is unbiased
    off = np.abs(f.slope - truth).max()
    assert off < 1e-10 if i in (1, 3) else off > 0.01
  assert found[2].variance < found[3].variance
  for f in drawn(rows, 2, world, reward):  # the sampler is the policy
    toys.close(f.slope, truth, 1e-10)


@pytest.mark.parametrize("tree", [TREE, ONE], ids=["sequences", "one token"])
def test_what_each_kl_descends(tree):
  (logits, ref, before), _ = some(tree)
  world = now, slope, chance = policy(logits, tree)
  at_ref, _, ref_chance = policy(ref, tree)
  gap = (now - at_ref).sum(-1)
  reverse = along(chance * gap, slope)  # ∇KL(π‖ref)
  forward = -along(ref_chance, slope)  # ∇KL(ref‖π)
  still, still_forward = prefix_slopes(logits, ref, tree)
  for a, b in ((still, reverse), (still_forward, forward)):
    assert (np.abs(a - b).max() < 1e-12) == (tree is ONE)
  whole = functools.partial(KL, coefficient=1.0, sequence=True)
  tokens = functools.partial(KL, coefficient=1.0)
  per_token = {"ratio": losses.token_ratio, "weights": tw.sequence_sum_mean}
  cases = [
    (but(mean, kl=whole(k1)), 0 * reverse),
    (but(mean, kl=whole(k2)), reverse),
    (but(mean, kl=whole(k3)), forward),
    (but(mean, kl=whole(k1, ratio_weighted=True)), reverse),
    (but(mean, kl=whole(k3, ratio_weighted=True)), reverse),
    (but(mean, kl=tokens(k1), **per_token), 0 * reverse),
    (but(mean, kl=tokens(k2), **per_token), still),
    (but(mean, kl=tokens(k3), **per_token), still_forward),
    (but(mean, kl=tokens(k3, ratio_weighted=True), **per_token), still),
    (algorithms.reinforce(beta=1.0), reverse),  # k1 in the reward, to go
  ]
  rows, wants = zip(*cases)
  nothing = np.zeros(len(tree))
  found = drawn(rows, 1, world, nothing, ref=at_ref)
  for f, want in zip(found, wants):
    toys.close(f.slope, -want, 1e-10)
  exact = chance @ gap
  for i in (0, 2, 3, 4, 5, 7):  # k1 and k3 estimate it, k2 does not
    assert abs(found[i].value - exact) < 1e-10
  paid = [but(loo, kl_in_reward=KLInReward(k, 1.0)) for k in (k1, k2, k3)]
  in1, in2, in3 = drawn(paid, 2, world, nothing, ref=at_ref)
  toys.close(in1.slope, -reverse, 1e-10)
  toys.close(in3.slope, still_forward - reverse, 1e-10)
  for other in (reverse, forward, still, still_forward):
    assert np.abs(in2.slope + other).max() > 1e-3
  # Off policy the ratio's product still carries it, and nothing else does.
  old, _, old_chance = policy(before, tree)
  logs = {"ref": at_ref, "old": old}
  found = drawn(rows[:5], 1, world, nothing, old_chance, **logs)
  for i, f in enumerate(found):
    assert (np.abs(f.slope + reverse).max() < 1e-10) == (i > 2)
    assert (abs(f.value - exact) < 1e-10) == (i > 2)


def test_adam_does_not_see_a_scale():
  (logits, before, _), reward = some()
  now, old = (policy(x)[0][None] for x in (logits, before))
  rollout = toys.pack_rollout(toys.pack_prompts([[1]]), [TREE])
  row = but(loo, ratio=losses.token_ratio)
  rows = [row, but(row, advantage=GROUP_MEAN)]
  rows += [but(row, weights=tw.Constant(size)) for size in (7, 700)]

  def run(now, how, row):
    start = {"logprobs": now}
    zero, opt = jnp.int32(0), how.transform.init(start)
    state = TrainState(start, {}, None, opt, {}, zero, None)
    known = toys.give(reward[None]), rollout, Scores(old)
    batch = grpo.advantage(*known, algorithm=row)
    step = functools.partial(grpo.update, algorithm=row, optimizer=how)
    for _ in range(3):
      state, _ = step(state, batch, model=None)
    return state.trainable["logprobs"] - now

  adam = optimizer.adamw(lambda _: 0.1, eps=1e-30, clip_norm=0.0)
  sgd, seen = optimizer.sgd(lambda _: 1e-6), (1, 14 / 15, 1 / 7, 1 / 700)
  for how, scales, tolerance in ((adam, [1] * 4, 1e-9), (sgd, seen, 1e-5)):
    moved = toys.jit(lambda x, how=how: [run(x, how, row) for row in rows])(now)
    first, *_ = moved = jax.device_get(moved)
    for x, scale in zip(moved, scales):
      np.testing.assert_allclose(x, scale * first, rtol=tolerance)
