"""Whole runs as one compiled program: the four functions in a scan.

The same `grpo.py` as `train.py` calls, with a reward that is computed on the
device, so that nothing leaves it between two steps. What needs a host (dynamic
sampling, rewards of text, checkpoints) is not here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax import grpo, values
from grpo_jax.algorithm import Algorithm
from grpo_jax.apply import controllers
from grpo_jax.metrics import Metrics
from grpo_jax.models import lora
from grpo_jax.models.architecture import Model
from grpo_jax.optimizer import Optimizer
from grpo_jax.sampling import Sampling, stream_key
from grpo_jax.types import (
  Array,
  Params,
  Prompts,
  Rewards,
  Rollout,
  Scores,
  TrainState,
  policy,
)

Reward = Callable[[Rollout], Rewards]


def begin(
  params: Params,
  key: Array,
  step: Array | int = 0,
  *,
  algorithm: Algorithm,
  optimizer: Optimizer,
) -> TrainState:
  """A phase's first state: reference and critic begin as the policy does.

  Where `params` have adapters, they alone are trained, and a reference is a
  copy of them: the rest is shared.
  """
  # Copies: were they the policy's own buffers, a donated update would overwrite
  # the reference.
  trainable, frozen = lora.split(params)
  ref = None
  if algorithm.reference is not None:
    ref = jax.tree.map(jnp.copy, trainable)
  if algorithm.critic is not None:
    critic = values.init(params, algorithm.critic.shared)
    trainable = {**trainable, "critic": critic}
  return TrainState(
    trainable=trainable,
    frozen=frozen,
    ref=ref,
    opt=optimizer.transform.init(trainable),
    controllers=controllers(algorithm),
    step=jnp.asarray(step, jnp.int32),
    key=key,
  )


def run(
  state: TrainState,
  prompts: Prompts,
  reward: Reward,
  *,
  model: Model,
  algorithm: Algorithm,
  optimizer: Optimizer,
  sampling: Sampling,
  minibatches: int = 1,
  epochs: int = 1,
) -> tuple[TrainState, Metrics]:
  """Runs as many steps as there are batches of prompts.

  Args:
    state: from `begin`.
    prompts: ids [steps, B, P], lengths and ordinals [steps, B].
    reward: rollout -> rewards, traced.
    model, algorithm, optimizer, sampling: the records.
    minibatches: optimizer steps per pass over a rollout.
    epochs: passes.

  Returns:
    the last state; metrics of each step [steps], those of its last update, and
    `reward/mean` and `success`.
  """
  updates = minibatches * epochs

  def step(state: TrainState, prompts: Prompts) -> tuple[TrainState, Metrics]:
    batch, out = collect(
      state,
      prompts,
      reward,
      model=model,
      algorithm=algorithm,
      sampling=sampling,
      needs_old=updates > 1,
    )
    for update in range(updates):
      part = batch
      if minibatches > 1:
        part = grpo.minibatch(
          batch, update % minibatches, parts=minibatches, algorithm=algorithm
        )
      if algorithm.select is not None:
        part = grpo.select(
          policy(state.params), part, model=model, algorithm=algorithm
        )
      state, sums = grpo.update(
        state,
        part,
        int(update == updates - 1),
        model=model,
        algorithm=algorithm,
        optimizer=optimizer,
      )
    return state, out | sums

  return jax.lax.scan(step, state, prompts)


def collect(
  state: TrainState,
  prompts: Prompts,
  reward: Reward,
  *,
  model: Model,
  algorithm: Algorithm,
  sampling: Sampling,
  needs_old: bool,
) -> tuple[grpo.Batch, Metrics]:
  """sample -> reward -> score -> advantage, of one step."""
  weights = state.params if not algorithm.offline else state.reference
  weights = policy(weights)
  key = stream_key(state.key, state.step, "sample")

  def draw(how: Sampling) -> Rollout:
    return grpo.sample(
      weights,
      prompts,
      key,
      model=model,
      sampling=how,
      policy_step=state.step,
    )

  rollout = draw(sampling)
  rewards = reward(rollout)
  if algorithm.baseline_rollout:
    greedy = reward(draw(sampling.likeliest()))
    known = jnp.where(greedy.scored, greedy.total, jnp.nan)
    rewards = rewards.replace(baseline=known[:, 0])
  scores = Scores()
  if needs_old or algorithm.critic is not None:
    scores = grpo.score(state.params, rollout, model=model)
    if not needs_old:
      scores = scores.replace(logprobs=None)
  if algorithm.reference is not None:
    ref = grpo.score(state.reference, rollout, model=model)
    scores = scores.replace(ref_logprobs=ref.logprobs)
  scale = state.controllers.get("kl_scale")
  batch = grpo.advantage(
    rewards, rollout, scores, algorithm=algorithm, kl_scale=scale
  )
  count = jnp.maximum(jnp.sum(rewards.scored), 1)
  return batch, {
    "reward/mean": jnp.sum(rewards.total * rewards.scored) / count,
    "success": jnp.sum(rewards.metric * rewards.scored) / count,
  }
