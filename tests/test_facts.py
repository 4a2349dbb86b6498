"""Theory without expectations: identities, golden numbers and invariances.

Fixed ragged batches in float64, the policy's log-probs being the parameters;
what must come out is numpy's. Expectations: `test_facts_gradients.py`.
"""

import functools
import math

import jax
import numpy as np
import pytest
import test_article
import toys
from test_facts_gradients import TREE, but, exactly, program  # noqa: F401

from grpo_jax import advantages, algorithms, grpo, losses, returns, variants
from grpo_jax import token_weights as tw
from grpo_jax.algorithm import GROUP_MEAN, SoftOverlong, normalized
from grpo_jax.estimates import pass_at_k
from grpo_jax.kl import k1, k2, k3
from grpo_jax.logprobs import rollout_logprobs
from grpo_jax.selection import covariance
from grpo_jax.types import Scores, Tokens, split_prompts

RNG = np.random.default_rng(0)
B, G, T = 3, 4, 5
LENGTHS = np.array([[5, 1, 3, 2], [2, 2, 5, 4], [1, 4, 4, 3]])
MASK = np.arange(T) < LENGTHS[..., None]
NOW, OLD, REF = -RNG.gamma(1, 1, size=(3, B, G, T)) * MASK
REWARDS = RNG.normal(size=(B, G))
plain = algorithms.grpo(beta=0.0)
cispo = variants.cispo(float("inf"))
asis = advantages.Outcome(advantages.no_baseline)
PARTS = {
  "mean": GROUP_MEAN,
  "loo": advantages.Outcome(advantages.leave_one_out),
  "std0": normalized(0, 0.0),
  "std1": normalized(1, 0.0),
  "eps": normalized(0, 0.01),
  "maxrl": variants.maxrl().advantage,
  "opo": variants.opo().advantage,
  "none": asis,
}
JUDGE = toys.jit(lambda *x: {k: fn(*x)[..., 0] for k, fn in PARTS.items()})


def packed(lengths, size=None):
  rows = [[[0] * n for n in row] for row in lengths]
  return toys.pack_rollout(toys.pack_prompts([[1]] * len(rows)), rows, size)


def ran(rows, total, lengths=LENGTHS, now=NOW, old=None, ref=None):
  """Loss and gradient by log-prob of each row."""
  rollout = packed(lengths).replace(sampler_logprobs=now)
  share = np.full(len(now), 1 / len(now))
  known = toys.give(total), rollout, now, Scores(old, ref), share
  return jax.device_get(program(tuple(rows))(*known))


def judged(total, lengths=1):
  """Every advantage of rewards [B, G]."""
  total = np.asarray(total, float)
  lengths = np.int32(np.broadcast_to(lengths, total.shape))
  rollout = packed([[1]]).replace(lengths=lengths)
  return jax.device_get(JUDGE(toys.give(total), rollout, Scores()))


def right_of(size):  # rewards of the groups with 0 to `size` right answers
  return np.tri(size + 1, size, -1)


def binomial(n, p):
  chance = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
  return np.array(chance)


def test_sums_bounds_and_binary_groups():
  total = np.abs(np.concatenate((RNG.normal(size=(40, 8)), right_of(8)[1:8])))
  lengths = RNG.integers(1, 9, total.shape)
  a = judged(total, lengths)
  for name in ("mean", "loo", "std0", "std1", "maxrl"):
    assert np.abs(a[name].sum(1)).max() < 1e-12
    assert np.abs((lengths * a[name]).sum(1)).max() > 0.1
  assert np.abs((lengths * a["opo"]).sum(1)).max() < 1e-12
  for ddof, bound in ((0, 7**0.5), (1, 7 / 8**0.5)):
    std = a[f"std{ddof}"]
    toys.close(np.square(std).sum(1), np.full(47, 8.0 - ddof), 1e-12)
    assert np.abs(std).max() < bound + 1e-12
    assert abs(std[40, 0] - bound) < 1e-12  # one right of eight
  toys.close(a["maxrl"][40:].min(1), -np.ones(7), 1e-12)
  a, k = judged(right_of(8)), np.arange(1, 8)
  want = np.array([np.sqrt((8 - k) / k), -np.sqrt(k / (8 - k))]).T
  toys.close(a["std0"][1:8, [0, 7]], want, 1e-12)
  toys.close(a["std1"][1:8, [0, 7]], want * (7 / 8) ** 0.5, 1e-12)
  signs = judged(2 * right_of(8) - 1)
  toys.close(signs["mean"], 2 * a["mean"], 1e-12)
  toys.close(signs["std1"], a["std1"], 1e-12)
  two = judged([[1, 0], [5, -3]])  # no prompt weighs more than another
  toys.close(two["std0"], np.array([[1.0, -1], [1, -1]]), 1e-12)
  toys.close(two["std0"][0], 2 * two["mean"][0], 1e-12)


def test_shift_scale_and_noise():
  total = RNG.random((5, 6))
  lengths = RNG.integers(1, 9, total.shape)
  a, std = judged(total, lengths), total.std(1, keepdims=True)
  moved, wide = judged(total + 3.7, lengths), judged(2.5 * total, lengths)
  scales = {"std0": 1, "std1": 1, "maxrl": 1}
  scales["eps"] = 2.5 * (std + 0.01) / (2.5 * std + 0.01)
  for name in PARTS:
    same = name not in ("maxrl", "none")
    assert (np.abs(moved[name] - a[name]).max() < 1e-12) == same
    toys.close(wide[name], a[name] * scales.get(name, 2.5), 1e-12)
  noisy = judged((total[..., None] + [-0.8, 0.8]).reshape(5, 12))["std0"]
  left = noisy.reshape(5, 6, 2).mean(-1)  # noise of each row's own
  toys.close(left, a["std0"] * std / np.hypot(std, 0.8), 1e-12)


W = {
  2: (1, 1, 1, 1),
  4: (1.728, 1.690, 1.635, 1.616),
  8: (2.609, 2.328, 1.963, 1.856),
  16: (3.733, 2.848, 2.093, 1.934),
  64: (6.736, 3.255, 2.162, 1.984),
}
HALF = {0.01: 69, 0.1: 7, 0.3: 3, 0.5: 2, 0.05: 14}


@pytest.mark.parametrize("size", [*W, 6, 7, 13, 14, 68, 69, 512])
def test_the_weight_of_a_prompt_and_dead_groups(size):
  """E[gradient] = w(p) ∇p; groups of equal rewards have none."""
  a, right, k = judged(right_of(size)), right_of(size), np.arange(size + 1)
  for i, (p, half) in enumerate(HALF.items()):
    slope = right / p - (1 - right) / (1 - p)  # ∇log π by p
    chance = binomial(size, p)
    w, shrunk = (chance @ (a[x] * slope).mean(1) for x in ("std0", "mean"))
    assert abs(shrunk - (1 - 1 / size)) < 1e-10
    law = chance @ np.sqrt(k * (size - k)) / size
    assert abs(w - law / (p * (1 - p))) < 1e-10
    if size in W and i < 4:
      assert abs(w - W[size][i]) < 6e-4
    assert size < 512 or p < 0.3 or abs(w - (p * (1 - p)) ** -0.5) < 0.01
    dead = chance @ (a["std0"] == 0).all(1)
    assert abs(dead - (p**size + (1 - p) ** size)) < 1e-12
    assert (dead <= 0.5) == (size >= half), "the least of which half train"
    printed = (0.923, 0.431, 0.058, 0.008, dead)[i]
    assert size != 8 or abs(dead - printed) < 6e-4


def test_process_supervision():
  value, steps, last = np.zeros((3, 1, 2, 6))
  value[0, [0, 0, 1], [1, 5, 4]] = last[0, [0, 1], [5, 4]] = 1
  steps[0, [0, 0, 0, 1, 1], [1, 3, 5, 2, 4]] = 1
  run = toys.jit(returns.ProcessSupervision(0, 0.0))

  def of(value, steps):
    rewards = toys.give(np.zeros((1, 2)))
    rewards = rewards.replace(per_token=value, steps=steps > 0)
    return np.asarray(run(rewards, packed([[6, 5]]), Scores()))[0]

  up, down = 0.4 / 0.24**0.5, -0.6 / 0.24**0.5
  a = of(value, steps)
  toys.close(a[0], np.repeat([up + down + up, down + up, up], 2), 1e-12)
  assert abs(a[0] - np.repeat([0.4082, -0.4082, 0.8165], 2)).max() < 5e-5
  toys.close(a[1, :5], np.repeat([down + up, up], [3, 2]), 1e-12)
  one = of(last * [[[2.0], [0.5]]], last)  # the same as of outcomes
  toys.close(one[:, :5], np.array([[1.0] * 5, [-1.0] * 5]), 1e-12)


def test_generalised_advantages():
  @toys.jit
  def gae(gamma, lam, values, step):
    part = returns.GAE(gamma, lam, whiten=False)
    rewards = toys.give(REWARDS).replace(per_token=step)
    return part(rewards, packed(LENGTHS), Scores(values=values))

  values, step = RNG.normal(size=(2, B, G, T + 1))
  step = step[..., 1:] * MASK
  for gamma, lam in ((0.9, 0.0), (0.9, 0.6), (0.9, 1.0), (1.0, 0.95)):
    a = np.asarray(gae(gamma, lam, values, step))
    for b, g in np.ndindex(B, G):
      n = LENGTHS[b, g]
      r, v = step[b, g, :n].copy(), np.append(values[b, g, :n], 0)
      r[-1] += REWARDS[b, g]
      delta = r + gamma * v[1:] - v[:-1]
      for t in range(n):
        far = np.arange(n - t)
        want = (gamma * lam) ** far @ delta[t:]
        assert lam > 0 or want == delta[t]
        assert lam < 1 or abs(want - (gamma**far @ r[t:] - v[t])) < 1e-12
        assert abs(a[b, g, t] - want) < 1e-12
  for v in (values, REWARDS.mean(1)[:, None, None] + 0 * values):
    left = (REWARDS[..., None] - v[..., :-1]) * MASK  # of the mean: GRPO's
    toys.close(gae(1.0, 1.0, v, 0 * step), left, 1e-12)


AVERAGES = {
  tw.sequence_mean: 1 / (12 * LENGTHS[..., None]),
  tw.token_mean: 1 / LENGTHS.sum(),
  tw.prompt_token_mean: 1 / (3 * LENGTHS.sum(1)[:, None, None]),
  tw.sequence_sum_mean: 1 / 12,
  tw.Constant(9): 1 / 108,
}


def test_the_weight_of_a_length():
  run = toys.jit(lambda mask: [f(mask)[0, :, 0] for f in AVERAGES])
  got = run(np.arange(8) < np.array([[[2], [8]]]))
  want = [(1 / 4, 1 / 16), (0.1, 0.1), (0.1, 0.1), (0.5, 0.5), (1 / 18, 1 / 18)]
  toys.close(np.array(got), np.array(want), 1e-12)
  assert np.ptp(run(np.ones((1, 2, 8), bool)), axis=1).max() == 0


@pytest.mark.parametrize("average", AVERAGES)
def test_the_first_step_is_the_same(average):
  rows = [plain, variants.dapo(), variants.dr_grpo(9), variants.dppo(9)]
  rows += [cispo, variants.sapo()]
  rows += [algorithms.grpo(0.0, eps, eps) for eps in (0.01, 10.0)]
  if average is tw.sequence_mean:  # those of whole sequences
    rows += [variants.gspo(), variants.gspo_token(), variants.gmpo()]
  rows = [but(x, advantage=normalized(1, 0.0), weights=average) for x in rows]
  rows += [but(plain, weights=average, ratio=lambda now, *_: 0 * now + 1)]
  a = judged(REWARDS)["std1"][..., None]
  weight = AVERAGES[average] * MASK
  *found, (_, constant) = ran(rows, REWARDS)
  assert (constant == 0).all()
  for _, gradient in found:
    toys.close(gradient, -weight * a, 1e-10)
  assert all((found[i][1] == found[0][1]).all() for i in (6, 7))  # ε: any
  level = -np.sum(weight * a)
  assert (abs(level) < 1e-12) == (average is tw.sequence_mean)
  soft = -np.sum(weight * a * np.where(a > 0, 2, 2 / 1.05))
  want = [level] * 4 + [-np.sum(weight * a * NOW), soft] + [level] * 5
  toys.close([float(x) for x, _ in found], want[: len(found)], 1e-10)


@pytest.mark.parametrize("average", AVERAGES)
def test_micro_batches(average):
  row = but(plain, weights=average)
  of = functools.partial(grpo.gradients, frozen={}, model=None, algorithm=row)
  run = toys.jit(lambda now, batch: of({"logprobs": now}, batch=batch)[0])
  fix = toys.jit(functools.partial(grpo.advantage, algorithm=row))
  both = NOW, fix(toys.give(REWARDS), packed(LENGTHS), Scores(OLD))
  cut = toys.jit(split_prompts, static_argnums=1)(both, B)
  for i in range(B):
    part = run(*jax.tree.map(lambda x, i=i: x[i], jax.device_get(cut)))
    toys.close(part["logprobs"][0], run(*both)["logprobs"][i], 1e-12)


def test_where_each_gate_closes():
  old = np.array([1, 1, 1, 1, 1, 0.01, 0.01, 0.9] * 2)
  new = np.array([0.5, 0.9, 1.1, 1.5, 4, 0.0119, 0.0121, 1] * 2)
  r, a = new / old, np.repeat([1.0, -1.0], 8)
  is_open = np.where(a > 0, r < 1.2, r > 0.8)
  gate = np.cosh(np.where(a > 0, 1, 1.05) * (r - 1) / 2) ** -2
  toys.close(gate[[3, 11]], np.array([0.9400, 0.9341]), 5e-5)  # r = 1.5
  dual = but(plain, surrogate=losses.Clipped(0.2, 0.2, 3.0))
  cases = {
    plain: is_open,
    dual: is_open & ((a > 0) | (r < 3)),
    variants.gspo(0.2, 0.2): is_open,  # of one token: the same
    variants.sapo(): gate,
    variants.cispo(0.2): np.minimum(1.2 / r, 1),
  }
  rows = [but(x, advantage=asis, weights=tw.token_mean) for x in cases]
  now, before = (np.log(x)[None, :, None] for x in (new, old))
  found = ran(rows, a[None], np.ones((1, 16), int), now, before)
  for (_, gradient), factor in zip(found, cases.values()):
    toys.close(gradient.ravel(), -a * r * factor / 16, 1e-12)
  value = np.where(a > 0, np.minimum(r, 1.2), -np.maximum(r, 0.8))
  for (loss, _), want in zip(found, (value, np.maximum(value, -3.0), value)):
    assert abs(loss + want.mean()) < 1e-12


def test_one_objective_by_two_names():
  rows = [variants.gspo(0.03, 0.04), variants.gspo_token(0.03, 0.04)]
  rows += [but(variants.gspo(), surrogate=losses.Clipped(1.0, 1e9))]
  rows += [variants.gmpo(90.0), variants.dapo(), cispo]
  found = ran(rows, REWARDS, old=OLD)
  toys.close(found[:3:2], found[1:4:2], 1e-10)
  free = found[4][1] != 0
  assert 0 < np.sum(MASK & ~free) < MASK.sum() / 2
  toys.close(found[4][1][free], found[5][1][free], 1e-10)
  # Of k3 in the loss, β (π_ref/π - 1) is the coefficient; carried, k2's.
  rows = algorithms.grpo(0.3), algorithms.deepseek_v32(0.3)
  (_, k3s), (_, carried) = ran(rows, 0 * REWARDS, ref=REF)
  share = 0.3 * AVERAGES[tw.sequence_mean] * MASK
  toys.close(k3s, share * (1 - np.exp(REF - NOW)), 1e-10)
  toys.close(carried, share * (NOW - REF), 1e-10)


def test_preferences():
  now, ref = NOW[:1, :2], REF[:1, :2]
  rows = [algorithms.ALGORITHMS["dpo"](0.3)]
  run = functools.partial(ran, rows, lengths=LENGTHS[:1, :2], ref=ref)
  gain = 0.3 * (now - ref).sum(-1)[0]
  first = 1 / (1 + np.exp(gain[1] - gain[0]))
  sign = np.array([[[1.0], [-1]]]) * MASK[:1, :2]
  for total, chance in (([1, 0], first), ([8, 7], first), ([0, 1], 1 - first)):
    [(value, gradient)] = run(np.array([total]), now=now)
    assert abs(value + np.log(chance)) < 1e-12
    pull = 0.3 * (1 - chance) * (total[0] - total[1])
    toys.close(gradient, -pull * sign, 1e-12)
  [(value, gradient)] = run(np.array([[1, 0]]), now=ref)
  assert abs(value - np.log(2)) < 1e-12
  toys.close(gradient, -0.15 * sign, 1e-12)


def test_pass_at_k():
  for n, k, p in ((8, 1, 0.3), (8, 3, 0.05), (8, 8, 0.05), (20, 5, 0.5)):
    got = [pass_at_k(n, c, k) for c in range(n + 1)]
    assert abs(binomial(n, p) @ got - (1 - (1 - p) ** k)) < 1e-12
    want = [1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
    toys.close(got, want, 1e-12)
    assert got[n - k + 1 :] == [1] * k
  low = binomial(8, 0.05) @ (1 - (1 - np.arange(9) / 8) ** 8)
  assert abs(low - 0.235) < 5e-4  # of .337


def test_soft_overlong():
  for scale in (1.0, 204.8):  # the paper's is from 16,384 to 20,480
    part = SoftOverlong(int(100 * scale), int(20 * scale))
    got = part(scale * np.array([10, 80, 90, 100, 101]))
    toys.close(got, np.array([0, 0, -0.5, -1, -1]), 1e-12)


def test_estimators_of_a_gaussian_kl():
  x, w = np.polynomial.hermite_e.hermegauss(80)
  for mean, bias, std in (
    (0.1, [0, 0.002, 0], [20, 1.42, 1.42]),
    (1.0, [0, 0.25, 0], [2, 1.73, 1.70]),
  ):
    kl = mean**2 / 2
    value = np.array([k(mean * x - kl) for k in (k1, k2, k3)]) / kl
    first, second = (value**n @ w / w.sum() for n in (1, 2))
    toys.close(first - 1, np.array(bias), 1e-3)
    toys.close(np.sqrt(second - first**2), np.array(std), 6e-3)


def test_entropy_falls_with_the_covariance():
  """A natural step η A of the logits: dH/dη = -Cov(log π, A)."""
  p, a = np.array([1, 2, 1, 4]) / 8, np.array([0.3, -1, 2, 0.7])
  at = np.repeat(np.arange(4), [1, 2, 1, 4])[None, :, None]
  logs = np.log(p)[at]
  found = covariance(Tokens(logs, logs, logs, a[at], logs < 0, logs))
  tilted = (p * np.exp(x * a) for x in (1e-5, -1e-5))
  up, down = (-np.sum(x * np.log(x)) for x in (y / y.sum() for y in tilted))
  assert abs((up - down) / 2e-5 + np.mean(found)) < 1e-9


def test_permutations_and_padding():
  own = {"dr_grpo", "dppo", "clip_cov", "kl_cov"}
  names = [name for name in algorithms.ALGORITHMS if name not in own]
  rows = [but(algorithms.ALGORITHMS[name](), critic=None) for name in names]
  rows += [variants.dr_grpo(9), variants.dppo(9)]
  more = {"per_token": NOW, "steps": MASK, "parts": RNG.random((B, G, 2))}
  rewards = toys.give(REWARDS).replace(baseline=REWARDS[:, 0], **more)

  def run(lengths, rewards, now, old, ref, values):
    rollout = packed(lengths, now.shape[-1]).replace(sampler_logprobs=ref)
    scores = Scores(old, ref, values=values)
    known = rewards, rollout, now, scores, np.full(B, 1 / B)
    return jax.device_get(program(tuple(rows))(*known))

  mix = lambda x: x[[2, 0, 1]][:, [1, 3, 0, 2]] if x.ndim > 1 else x[[2, 0, 1]]
  pad = lambda x: np.append(x, x[..., :2], -1) if x.shape[2:] > (2,) else x
  known = rewards, NOW, OLD, REF, RNG.normal(size=(B, G, T + 1))
  want = run(LENGTHS, *known)
  mixed = run(mix(LENGTHS), *jax.tree.map(mix, known))
  padded = run(LENGTHS, *jax.tree.map(pad, known))
  for (a, x), (b, y), (c, z) in zip(want, mixed, padded):
    toys.close([b, y, c, z[..., :T]], [a, mix(x), a, x], 1e-12)
    assert (z[..., T:] == 0).all()


def test_the_exact_kl_of_the_decoder():
  """Over all ids at a token and over the tree; in float32, so to 1e-6."""
  model = test_article.DECODER
  rollout = test_article.decoder_rollout([range(len(TREE))])
  ours, ref = (toys.draw_params(model.arch, seed) for seed in (0, 5))

  @toys.jit
  def run(ours, ref, rollout):
    now, _, exact = rollout_logprobs(ours, rollout, model=model, ref=ref)
    return now, rollout_logprobs(ref, rollout, model=model)[0], exact

  with jax.enable_x64(False):
    found = jax.device_get(run(ours, ref, rollout))
    other = rollout.replace(ids=np.where(rollout.mask, rollout.ids, 3))
    toys.close(run(ours, ref, other), found, 0)  # another pad id
  now, at_ref, exact = (np.float64(x[0]) for x in found)
  for i, t in np.argwhere(rollout.mask[0]):
    same = [j for j, row in enumerate(TREE) if row[:t] == TREE[i][:t]]
    twins = list({TREE[j][t]: j for j in same}.values())
    p, q = now[twins, t], at_ref[twins, t]
    assert len(twins) == 3 and abs(exact[i, t] - np.exp(p) @ (p - q)) < 1e-6
  gap = np.exp(now.sum(-1)) @ np.sum([exact, at_ref - now], axis=(0, 2))
  assert abs(gap) < 1e-6
