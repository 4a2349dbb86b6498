"""One optimizer step: slicing, skipping, counting. Log-probs from tables."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from grpo_jax import (
  algorithms,
  baselines,
  grpo,
  metrics,
  optimizer,
)
from grpo_jax import token_weights as tw
from grpo_jax.types import Scores, TrainState

B, G, T = 4, 3, 5


def row_source(params, rollout, *, model, slabs=None, ref=None):
  """The parameters are the log-probs of each prompt's group, by ordinal."""
  del model, slabs, ref
  logprobs = params["logprobs"][rollout.prompts.ordinals]
  return logprobs, 0.5 * jnp.abs(logprobs)


@pytest.fixture(autouse=True)
def source(monkeypatch):
  toys.use_source(monkeypatch, row_source)


def flat(peak):
  return optimizer.schedule(
    peak,
    start=0,
    steps=10,
    warmup_steps=0,
    decay="constant",
    final_fraction=1.0,
  )


SGD = optimizer.sgd(flat(1.0))
HEAVY = optimizer.adamw(flat(0.1), weight_decay=0.1)  # moves on 0 gradients

GRPO, GRPO_NO_KL = algorithms.grpo(), algorithms.grpo(beta=0.0)
SEQUENCE, SEQUENCE_NO_KL = (
  algorithms.grpo_sequence(),
  algorithms.grpo_sequence(0),
)


def fresh(params, how=SGD):
  """A train state after one step, so that its moments are not 0."""
  opt = how.transform.init(params)
  ones = jax.tree.map(lambda x: jnp.ones_like(x), params)
  _, opt = how.transform.update(ones, opt, params)
  return TrainState(
    trainable=params,
    frozen={},
    ref=None,
    opt=opt,
    controllers={},
    step=jnp.int32(3),
    key=jax.random.key(0),
  )


@dataclasses.dataclass
class Case:
  """A ragged rollout with unscored rows, and three policies over it."""

  rollout: object
  rewards: np.ndarray
  policy: np.ndarray
  old: np.ndarray
  ref: np.ndarray


@pytest.fixture(scope="module")
def case():
  rng = np.random.default_rng(2)
  rows = [[[0] * rng.integers(1, T + 1) for _ in range(G)] for _ in range(B)]
  rewards = rng.normal(size=(B, G))
  rewards[1, 0] = np.nan
  rewards[2] = 1.0
  policies = -rng.gamma(1, 1, size=(3, B, G, T)).astype(np.float32)
  rollout = toys.pack_rollout(toys.pack_prompts([[1]] * B), rows, T)
  return Case(rollout, rewards, *policies)


@functools.cache
def program(algorithm, how, micro_batches):
  """advantage and update as one program, shared by the tests."""

  def fn(state, rewards, rollout, old, ref, ends_step):
    batch = grpo.advantage(
      rewards, rollout, Scores(old, ref), algorithm=algorithm
    )
    after, seen = grpo.update(
      state,
      batch,
      ends_step,
      model=None,
      algorithm=algorithm,
      optimizer=how,
      micro_batches=micro_batches,
    )
    return after, seen, batch

  return toys.jit(fn)


def run(case, algorithm, how=SGD, old=True, ends_step=1, micro_batches=1):
  """One update on the case: state before, after, metrics, batch."""
  state = fresh({"logprobs": case.policy}, how)
  after, seen, batch = jax.device_get(
    program(algorithm, how, micro_batches)(
      state,
      toys.give(case.rewards),
      case.rollout,
      case.old if old else None,
      case.ref,
      np.int32(ends_step),
    )
  )
  assert all(metrics.documented(name) for name in seen), seen.keys()
  return state, after, seen, batch


def gradient(before, after):
  return np.asarray(before.trainable["logprobs"] - after.trainable["logprobs"])


@pytest.mark.parametrize(
  "algorithm,cuts",
  [
    (GRPO, (2, 4)),
    (dataclasses.replace(GRPO, weights=tw.token_mean), (4,)),
    (SEQUENCE, (4,)),
  ],
  ids=["sequence mean", "token mean", "sequence ratio"],
)
def test_the_number_of_micro_batches_changes_nothing(case, algorithm, cuts):
  # A07, A13: through the weights, with ragged and unscored rows.
  before, after, seen, batch = run(case, algorithm)
  whole = gradient(before, after)
  mask = np.asarray(batch.rollout.mask)
  assert (whole[~mask] == 0).all() and (np.abs(whole[mask]) > 0).any()
  for micro_batches in cuts:
    _, other, again, _ = run(case, algorithm, micro_batches=micro_batches)
    np.testing.assert_allclose(gradient(before, other), whole, atol=1e-7)
    for name, value in seen.items():
      np.testing.assert_allclose(
        again[name], value, rtol=1e-5, atol=1e-7, err_msg=name
      )


def test_metrics_are_means_over_real_tokens(case):
  _, _, seen, batch = run(case, GRPO, micro_batches=2)
  m = np.array(case.rollout.mask & ~np.isnan(case.rewards)[..., None])
  a = np.asarray(batch.advantages)
  ratio, d = np.exp(case.policy - case.old), case.ref - case.policy
  lengths, rows = m.sum(-1, keepdims=True), (m.sum(-1) > 0).sum()
  w = m / np.maximum(lengths, 1) / rows
  k3 = np.exp(d) - 1 - d
  surrogate = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
  want = {
    "loss": (w * (0.04 * k3 - surrogate)).sum(),
    "loss/kl": (w * 0.04 * k3).sum(),
    "entropy": np.abs(0.5 * case.policy)[m].mean(),
    "kl/ref": k3[m].mean(),
    "kl/ref_k1": -d[m].mean(),
    "ratio/mean": (w * ratio).sum(),
    "ratio/max": ratio[m].max(),
    "ratio/clip_frac_low": ((a < 0) & (ratio < 0.8))[m].mean(),
    "ratio/clip_frac_high": ((a > 0) & (ratio > 1.2))[m].mean(),
    "sampler/logprob_gap_mean": np.abs(case.old)[m].mean(),
    "sampler/logprob_gap_max": np.abs(case.old)[m].max(),
    "tokens/trained": m.sum(),
    "update/learning_rate": 1.0,
    "update/nonfinite": 0.0,
    "update/dead": 0.0,
  }
  assert seen.keys() == {*want, "update/grad_norm"}
  for name, value in want.items():
    np.testing.assert_allclose(seen[name], value, rtol=2e-5, err_msg=name)


def test_a_fresh_rollout_needs_no_old_scores(case):
  # The ratio is 1, nothing clips, and the gradient is that of log π.
  for old, policy in ((False, case.policy), (True, case.old)):
    on = dataclasses.replace(case, policy=policy, old=policy)
    before, after, seen, batch = run(on, GRPO_NO_KL, old=old)
    assert seen["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert seen["ratio/max"] == 1
    assert seen["ratio/clip_frac_low"] == seen["ratio/clip_frac_high"] == 0
    want = -np.asarray(batch.weights * batch.advantages)
    np.testing.assert_allclose(gradient(before, after), want, atol=1e-6)


def test_a_loss_of_zero_still_trains(monkeypatch):
  # A03: two one-token answers under logits (0, 0), rewards 1 and 0.
  def softmax_source(params, rollout, **_):
    logits = jax.nn.log_softmax(params["logits"])
    return jnp.where(rollout.mask, logits[rollout.ids], 0), rollout.ids * 0.0

  toys.use_source(monkeypatch, softmax_source)
  for rows, weights, want in (
    ([[[0], [1]]], tw.sequence_mean, 0.0),
    ([[[0], [1, 1, 1]]], tw.sequence_mean, 0.0),
    ([[[0], [1, 1, 1]]], tw.token_mean, 0.353553),
  ):
    rollout = toys.pack_rollout(toys.pack_prompts([[1]]), rows)
    algorithm = dataclasses.replace(
      algorithms.grpo(beta=0.0, epsilon=0.0), weights=weights
    )

    def fn(params, rollout=rollout, algorithm=algorithm):
      batch = grpo.advantage(
        toys.give([[1.0, 0.0]]), rollout, Scores(), algorithm=algorithm
      )
      return grpo.loss(params, {}, batch, model=None, algorithm=algorithm)[0]

    loss, slope = toys.jit(jax.value_and_grad(fn))({"logits": jnp.zeros(2)})
    assert abs(loss - want) < 1e-6
    if want == 0:
      assert abs(loss) < 1e-7
      np.testing.assert_allclose(
        slope["logits"], [-0.353553, 0.353553], atol=1e-6
      )


def unmoved(before, after):
  """Parameters, moments and counts bit-equal; the step counted."""
  jax.tree.map(
    np.testing.assert_array_equal,
    (before.trainable, before.opt),
    (after.trainable, after.opt),
  )
  assert after.step == before.step + 1


def test_a_dead_batch_moves_nothing(case):
  # Every group has equal rewards: no momentum, no decay.
  dead = dataclasses.replace(case, rewards=np.full((B, G), 0.1))
  momentum = optimizer.sgd(flat(1.0), momentum=0.9)
  for algorithm, how in (
    (GRPO_NO_KL, HEAVY),
    (GRPO_NO_KL, momentum),
    (SEQUENCE_NO_KL, HEAVY),
  ):
    before, after, seen, _ = run(dead, algorithm, how)
    unmoved(before, after)
    assert seen["update/dead"] == 1 and seen["update/nonfinite"] == 0
  # A KL term has a gradient of its own.
  for algorithm in (GRPO, SEQUENCE):
    before, after, seen, _ = run(dead, algorithm, HEAVY)
    assert (gradient(before, after) != 0).any()
    assert seen["update/dead"] == 0


@pytest.mark.parametrize(
  "algorithm,micro_batches",
  [(GRPO, 1), (GRPO, 2), (GRPO_NO_KL, 1), (SEQUENCE, 1), (SEQUENCE_NO_KL, 1)],
)
def test_a_batch_without_a_token_moves_nothing(case, algorithm, micro_batches):
  # A15: all completions masked, or no row scored.
  nothing = case.rollout.replace(mask=case.rollout.mask & False)
  unscored = np.full((B, G), np.nan)
  for change in ({"rollout": nothing}, {"rewards": unscored}):
    empty = dataclasses.replace(case, **change)
    before, after, seen, _ = run(
      empty, algorithm, HEAVY, micro_batches=micro_batches
    )
    unmoved(before, after)
    assert seen["update/dead"] == 1
    assert seen["loss"] == seen["update/grad_norm"] == 0
    assert all(np.isfinite(x) for x in seen.values()), seen


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_skipped_and_counted(case, bad):
  policy = case.policy.copy()
  policy[0, 0, 0] = bad
  for algorithm in (GRPO, SEQUENCE):
    before, after, seen, _ = run(
      dataclasses.replace(case, policy=policy), algorithm, HEAVY
    )
    unmoved(before, after)
    assert seen["update/nonfinite"] == 1


def test_steps_are_counted_once_and_set_the_rate(case):
  rate = optimizer.schedule(
    1.0, start=0, steps=9, warmup_steps=8, decay="linear", final_fraction=0.0
  )
  how = optimizer.sgd(rate)
  for ends_step in (0, 1):
    before, after, seen, _ = run(case, GRPO, how, ends_step=ends_step)
    assert after.step == before.step + ends_step
    assert seen["update/learning_rate"] == pytest.approx(0.5)
  assert after.step.dtype == jnp.int32


def test_two_passes_over_a_rollout(case):
  # A19: the old log-probs stay those of the policy that sampled.
  state = fresh({"logprobs": case.policy})
  scores = grpo.score(state.params, case.rollout, model=None)
  old = np.asarray(scores.logprobs)
  np.testing.assert_array_equal(old, case.policy)
  step = program(GRPO_NO_KL, SGD, 1)
  rest = (toys.give(case.rewards), case.rollout, old, case.ref)
  first, one, batch = step(state, *rest, np.int32(0))
  second, two, again = step(first, *rest, np.int32(1))
  np.testing.assert_array_equal(batch.old_logprobs, again.old_logprobs)
  assert one["ratio/max"] == 1 and one["ratio/mean"] == pytest.approx(1)
  assert two["ratio/max"] > 1 + 1e-3 and second.step == state.step + 1
  # The second gradient is at the moved policy against the old one.
  ratio = np.exp(np.asarray(first.trainable["logprobs"]) - case.policy)
  want = np.max(ratio[np.asarray(batch.rollout.mask)])
  assert two["ratio/max"] == pytest.approx(want, rel=1e-5)


def test_a_mini_batch_is_weighed_by_itself(case):
  algorithm = GRPO
  *_, batch = run(case, algorithm)
  cut = toys.jit(
    functools.partial(grpo.minibatch, parts=2, algorithm=algorithm)
  )
  seen = []
  for index in range(2):
    part = cut(batch, index)
    rows = np.asarray(part.rollout.prompts.ordinals)
    seen += rows.tolist()
    for name in ("advantages", "old_logprobs", "ref_logprobs"):
      np.testing.assert_array_equal(
        getattr(part, name), getattr(batch, name)[rows]
      )
    np.testing.assert_array_equal(part.rollout.ids, batch.rollout.ids[rows])
    np.testing.assert_allclose(
      part.weights,
      tw.sequence_mean(batch.rollout.mask[rows]),
      rtol=1e-6,
    )
    assert part.rollout.temperature == 1
  assert sorted(seen) == [0, 1, 2, 3]


def test_imitation_is_maximum_likelihood(case):
  algorithm = baselines.imitation()
  ones = dataclasses.replace(case, rewards=np.ones((B, G)))
  before, after, seen, batch = run(ones, algorithm, old=False)
  weights = np.asarray(batch.weights)
  np.testing.assert_allclose(gradient(before, after), -weights, atol=1e-6)
  assert seen["loss"] == pytest.approx(-np.sum(weights * case.policy), 1e-5)
  assert seen["update/dead"] == 0


def test_a_coefficient_may_be_traced(case):
  def beta_of(beta):
    batch = grpo.advantage(
      toys.give(case.rewards),
      case.rollout,
      Scores(case.old, case.ref),
      algorithm=algorithms.grpo(beta),
    )
    return grpo.loss(
      {"logprobs": case.policy},
      {},
      batch,
      model=None,
      algorithm=algorithms.grpo(beta),
    )[0]

  many = toys.jit(jax.vmap(beta_of))(np.float32([0.0, 0.04, 0.5]))
  _, _, seen, _ = run(case, GRPO)
  assert many[1] == pytest.approx(float(seen["loss"]), rel=1e-5)
  slope = np.diff(many) / np.diff([0.0, 0.04, 0.5])
  assert slope[0] == pytest.approx(slope[1], rel=1e-3) and slope[0] > 0
