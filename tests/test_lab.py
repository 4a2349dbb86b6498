"""Runs in one program: equal to train.py's, and every algorithm in one."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from experiments import base
from grpo_jax import (
  algorithms,
  build,
  config,
  data,
  lab,
  losses,
  optimizer,
  sharding,
)
from grpo_jax import steps as host_steps
from grpo_jax.compile import Programs
from grpo_jax.preemption import Guard
from grpo_jax.rollouts import Position
from grpo_jax.types import Prompts, Rewards

STEPS = 3


def lower_case(rollout):
  """The reward of `test_learns.letter`: the first byte is a letter."""
  first = rollout.ids[..., 0]
  right = ((first >= ord("a")) & (first <= ord("z"))).astype(jnp.float32)
  return Rewards(right, right >= 0, right, right[..., None][..., :0])


def experiment(**algorithm):
  c = base.get_config()
  c.task.name = "test_learns:letter"
  c.model.embed, c.model.ffn, c.model.layers = 16, 16, 1
  c.model.heads = c.model.kv_heads = 1
  c.batch.prompts_per_step, c.sampling.group_size = 4, 4
  c.sampling.max_tokens = 2
  c.steps, c.eval.every = STEPS, 0
  c.optimizer.learning_rate, c.optimizer.decay = 1e-2, "constant"
  c.algorithm.update(algorithm)
  return config.resolve(c)


def through_train(e):
  """Metrics and last state of `train.py`'s own steps."""
  with Guard() as guard:
    quiet = Programs(sharding.one_device(), guard, say=lambda text: None)
    built = build.build(e, quiet)
    key = jax.device_put(jax.random.key(0), built.replicated())
    state = built.begin["rl"](built.init(key), key, built.put_scalar(0))
    first = jax.tree.map(np.array, state.trainable)
    stream = data.Stream(e.task.split("train"), 0, "rl")
    out, drawn = [], []
    for i in range(STEPS):
      result = host_steps.reinforce_step(
        built, state, stream, Position(i + 1, i)
      )
      state = result.state
      out.append(result.metrics)
      examples, ordinals = stream.batch(i, 4)
      drawn.append(
        data.encode_prompts(examples, ordinals, e.tokenizer, e.prompt_width)
      )
    prompts = Prompts(**{k: np.stack([d[k] for d in drawn]) for k in drawn[0]})
    return first, prompts, out, state


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
  "algorithm",
  [
    {"name": "grpo_sequence", "beta": 0.05},
    {"name": "ppo", "beta": 0.05},
    {"name": "remax"},
  ],
)
def test_it_equals_train(algorithm):
  e = experiment(**algorithm)
  first, prompts, metrics, state = through_train(e)
  start = lab.begin(
    jax.tree.map(jnp.asarray, first),
    jax.random.key(0),
    algorithm=e.algorithm,
    optimizer=e.optimizer,
  )
  run = functools.partial(
    lab.run,
    reward=lower_case,
    model=e.model,
    algorithm=e.algorithm,
    optimizer=e.optimizer,
    sampling=e.sampling,
  )
  last, got = toys.jit(run)(start, prompts)
  for i, want in enumerate(metrics):
    for name in ("loss", "update/grad_norm", "reward/mean", "entropy"):
      assert got[name][i] == pytest.approx(want[name], rel=1e-3, abs=1e-5)
  assert metrics[-1]["reward/mean"] > 0
  for a, b in zip(
    jax.tree.leaves(last.trainable), jax.tree.leaves(state.trainable)
  ):
    np.testing.assert_allclose(a, b, atol=1e-5)


def rewards_of(rollout):
  """Varied rewards with two parts and a step at the first and last token."""
  ids = rollout.ids
  total = (ids[..., 0] % 2).astype(jnp.float32)
  place = jnp.arange(ids.shape[-1])[None, None]
  last = place == (rollout.lengths - 1)[..., None]
  steps = last | ((place == 0) & (rollout.lengths > 1)[..., None])
  return Rewards(
    total=total,
    scored=total >= 0,
    metric=total,
    parts=jnp.stack((total, (ids[..., 0] % 3 == 0).astype(jnp.float32)), -1),
    per_token=jnp.where(steps, (ids % 2).astype(jnp.float32), 0.0),
    steps=steps,
  )


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_algorithm_runs_and_stays_finite(name):
  constructor = algorithms.ALGORITHMS[name]
  needs = [
    p.name
    for p in inspect.signature(constructor).parameters.values()
    if p.default is p.empty
  ]
  algorithm = constructor(**dict.fromkeys(needs, 4))
  made = optimizer.adamw(lambda step: jnp.float32(1e-2))
  params = toys.draw_params(toys.ARCH)
  group = 2 if name == "dpo" else 4
  one = toys.some_prompts()
  prompts = jax.tree.map(lambda x: np.stack([x] * STEPS), one)
  start = lab.begin(
    jax.tree.map(jnp.asarray, params),
    jax.random.key(1),
    algorithm=algorithm,
    optimizer=made,
  )
  run = functools.partial(
    lab.run,
    reward=rewards_of,
    model=toys.MODEL,
    algorithm=algorithm,
    optimizer=made,
    sampling=toys.settings(group_size=group, max_tokens=4, early_exit=False),
    epochs=2 if algorithm.select is not None else 1,
  )
  last, metrics = toys.jit(run)(start, prompts)
  for key, value in metrics.items():
    assert np.isfinite(value).all(), key
  assert not metrics["update/nonfinite"].any()
  moved = [
    np.abs(np.asarray(a) - b).max()
    for a, b in zip(
      jax.tree.leaves({k: last.trainable[k] for k in params}),
      jax.tree.leaves(params),
    )
  ]
  pretraining = algorithm.critic and algorithm.critic.pretrain_steps
  assert (max(moved) > 1e-4) == (not pretraining)


@pytest.mark.slow
@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_algorithm_learns(name):
  """One token of thirteen is rewarded: from a tenth to most, in 60 steps."""
  constructor = algorithms.ALGORITHMS[name]
  arguments = inspect.signature(constructor).parameters
  given = {"tokens": 2, "pretrain_steps": 10, "fraction": 0.02}
  given = {k: v for k, v in given.items() if k in arguments}
  algorithm = constructor(**given)
  steps = 60
  made = optimizer.adamw(lambda step: jnp.float32(1e-2))
  params = toys.draw_params(toys.ARCH, scale=0.5)
  one = toys.some_prompts(lengths=(3,) * 16)
  prompts = jax.tree.map(lambda x: np.stack([x] * steps), one)
  key = jax.random.key(1)
  start = lab.begin(
    jax.tree.map(jnp.asarray, params),
    key,
    algorithm=algorithm,
    optimizer=made,
  )

  def reward(rollout):
    right = (rollout.ids[..., 0] == 7).astype(jnp.float32)
    first = jnp.arange(rollout.ids.shape[-1])[None, None] == 0
    steps = jnp.broadcast_to(first, rollout.ids.shape)
    return Rewards(
      right,
      right >= 0,
      right,
      right[..., None],
      per_token=jnp.where(steps, right[..., None], 0.0),
      steps=steps,
    )

  run = functools.partial(
    lab.run,
    reward=reward,
    model=toys.MODEL,
    algorithm=algorithm,
    optimizer=made,
    sampling=toys.settings(
      group_size=2 if name == "dpo" else 8, max_tokens=2, early_exit=False
    ),
    epochs=1 if algorithm.ratio is losses.log_policy else 2,
  )
  last, metrics = toys.jit(run)(start, prompts)
  rewards = np.asarray(metrics["reward/mean"])
  if algorithm.offline:  # rewards are the first policy's: sample anew
    policy = {k: last.trainable[k] for k in params}
    how = toys.settings(group_size=64, max_tokens=2)
    rollout = toys.sampler(how)(policy, one, key)
    after = float((np.asarray(rollout.ids)[..., 0] == 7).mean())
  else:
    after = rewards[-5:].mean()
  assert rewards[0] < 0.3 and after > 0.8
