"""Micro-batches on the host change nothing, whatever the algorithm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import base
from grpo_jax import algorithms, build, config, data, sharding, steps
from grpo_jax.advantages import Outcome
from grpo_jax.algorithm import Algorithm
from grpo_jax.compile import Programs
from grpo_jax.preemption import Guard
from grpo_jax.rollouts import Position


def fixed_baseline() -> Algorithm:
  """Advantages that are not relative to a group: equal rewards train too."""
  return dataclasses.replace(
    algorithms.grpo(beta=0.0),
    advantage=Outcome(lambda r, scored: jnp.where(scored, r - 0.25, 0.0)),
  )


pytestmark = pytest.mark.usefixtures("quick_compilation")


def one_step(algorithm, micro):
  c = base.get_config()
  c.task.name = "test_learns:letter"
  c.algorithm.name = algorithm
  if algorithm == "grpo":
    c.algorithm.beta = 0.0
  c.model.embed, c.model.ffn, c.model.layers = 16, 16, 1
  c.model.heads = c.model.kv_heads = 1
  c.batch.prompts_per_step, c.sampling.group_size = 4, 3
  c.batch.micro_batch_prompts = micro
  c.sampling.max_tokens = 2
  c.optimizer.name = "sgd"
  c.optimizer.warmup_steps = 0
  c.eval.every = 0
  e = config.resolve(c)
  with Guard() as guard:
    quiet = Programs(sharding.one_device(), guard, say=lambda text: None)
    built = build.build(e, quiet)
    key = jax.device_put(jax.random.key(0), built.replicated())
    state = built.begin["rl"](built.init(key), key, built.put_scalar(0))
    stream = data.Stream(e.task.split("train"), 0, "rl")
    return steps.reinforce_step(built, state, stream, Position(1, 0))


@pytest.mark.parametrize("algorithm", ["test_micro_batches:fixed_baseline"])
def test_they_are_a_matter_of_memory(algorithm):
  whole, cut = one_step(algorithm, 0), one_step(algorithm, 1)
  assert whole.metrics["group/frac_zero_std"] > 0, "some group is dead"
  for name in ("loss", "update/grad_norm", "tokens/trained", "entropy"):
    assert cut.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-4)
  for a, b in zip(
    jax.tree.leaves(whole.state.trainable), jax.tree.leaves(cut.state.trainable)
  ):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_groups_without_a_signal_are_left_out():
  whole, cut = one_step("grpo", 0), one_step("grpo", 1)
  assert cut.metrics["tokens/trained"] < whole.metrics["tokens/trained"]
  assert cut.metrics["tokens/computed_frac"] < 1
  for name in ("loss", "update/grad_norm"):
    assert cut.metrics[name] == pytest.approx(
      whole.metrics[name], rel=1e-4, abs=1e-7
    )
