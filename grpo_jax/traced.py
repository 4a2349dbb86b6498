"""The functions that a run compiles: records bound, arrays left open.

Each returns a pure function of arrays. `build` makes programs of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import grpo, lab, tokens, values
from grpo_jax.algorithm import Algorithm
from grpo_jax.config import Experiment
from grpo_jax.logprobs import Slabs
from grpo_jax.models import lora
from grpo_jax.models.decoders import decoder
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
  length_mask,
  policy,
  split_prompts,
)


def init(e: Experiment) -> Callable[..., Any]:
  """key -> parameters drawn from it."""

  def fn(key: Array) -> Params:
    return decoder(e.model).init(stream_key(key, 0, "init"), e.model)

  return fn


def adapt(e: Experiment) -> Callable[..., Any]:
  """params, key -> them with fresh adapters, where there are to be any."""

  def fn(params: Params, key: Array) -> Params:
    return lora.adapt(params, stream_key(key, 0, "lora"), e.model)

  return fn


def begin(optimizer: Optimizer, algorithm: Algorithm) -> Callable[..., Any]:
  """params, key, step -> a phase's first state, its optimizer fresh."""
  return functools.partial(lab.begin, algorithm=algorithm, optimizer=optimizer)


def sample(
  e: Experiment,
  how: Sampling,
  stream: str,
  limits: np.ndarray | None = None,
) -> Callable[..., Any]:
  """params, prompts, key, step -> a rollout; `limits` [B, G] of its rows."""

  def fn(params: Params, prompts: Prompts, key: Array, step: Array) -> Rollout:
    return grpo.sample(
      params,
      prompts,
      stream_key(key, step, stream),
      model=e.model,
      sampling=how,
      budgets=limits,
      policy_step=step,
    )

  return fn


def score(e: Experiment, plan: Slabs) -> Callable[..., Any]:
  """params, rollout -> log-probs."""

  def fn(params: Params, rollout: Rollout) -> Array:
    scores = grpo.score(policy(params), rollout, model=e.model, slabs=plan)
    return scores.logprobs

  return fn


def value(e: Experiment) -> Callable[..., Any]:
  """params, rollout -> a critic's values."""

  def fn(params: Params, rollout: Rollout) -> Array:
    return values.values(params, rollout, model=e.model)

  return fn


def select(e: Experiment) -> Callable[..., Any]:
  """params, mini-batch -> it, with the tokens that a part singles out."""

  def fn(params: Params, batch: grpo.Batch) -> grpo.Batch:
    return tokens.select(
      policy(params), batch, model=e.model, algorithm=e.algorithm
    )

  return fn


def pick(first: Rollout, second: Rollout, index: Array) -> Rollout:
  """Chosen groups of two rollouts, counted through: [B], [B], [B] -> [B]."""

  def one(a: Array, b: Array) -> Array:
    return jnp.concatenate((a, b))[index] if a.ndim else a

  return jax.tree.map(one, first, second)


def advantage(e: Experiment) -> Callable[..., Any]:
  """rewards, rollout, scores, multiple of the KL -> a batch."""

  def fn(
    rewards: Rewards, rollout: Rollout, scores: Scores, kl_scale: Array | None
  ) -> grpo.Batch:
    return grpo.advantage(
      rewards, rollout, scores, algorithm=e.algorithm, kl_scale=kl_scale
    )

  return fn


def minibatch(e: Experiment) -> Callable[..., Any]:
  """batch, index -> a mini-batch."""

  def fn(batch: grpo.Batch, index: Array) -> grpo.Batch:
    return grpo.minibatch(
      batch, index, parts=e.batching.minibatches, algorithm=e.algorithm
    )

  return fn


def update(e: Experiment, plan: Slabs) -> Callable[..., Any]:
  """state, batch, ends_step -> state, metrics."""

  def fn(
    state: TrainState, batch: grpo.Batch, ends_step: Array
  ) -> tuple[TrainState, grpo.Metrics]:
    return grpo.update(
      state,
      batch,
      ends_step,
      model=e.model,
      algorithm=e.algorithm,
      optimizer=e.optimizer,
      micro_batches=e.batching.micro_batches,
      slabs=plan,
    )

  return fn


def take(batch: grpo.Batch, index: Array) -> grpo.Batch:
  """Chosen prompts of a mini-batch, its weights as they are."""
  return jax.tree.map(lambda x: x[index] if x.ndim else x, batch)


def cut(e: Experiment) -> Callable[..., Any]:
  """batch, i -> its i-th strided micro-batch: no row leaves its device."""

  def fn(batch: grpo.Batch, index: Array) -> grpo.Batch:
    parts = split_prompts(batch, e.batching.micro_batches)
    return jax.tree.map(lambda x: x[index], parts)

  return fn


def accumulate(e: Experiment, plan: Slabs) -> Callable[..., Any]:
  """trainable, frozen, exact KL's reference, micro-batch, total -> total."""

  def fn(
    trainable: Params,
    frozen: Params,
    ref: Params | None,
    part: grpo.Batch,
    total: tuple,
  ) -> tuple:
    grads = grpo.gradients(
      trainable,
      frozen,
      part,
      model=e.model,
      algorithm=e.algorithm,
      slabs=plan,
      ref=ref,
    )
    return grpo.add(total, grads)

  return fn


def zeros(e: Experiment) -> Callable[..., Any]:
  """trainable, frozen, reference, micro-batch -> a total of none of them."""

  def fn(
    trainable: Params, frozen: Params, ref: Params | None, part: grpo.Batch
  ) -> tuple:
    shapes = jax.eval_shape(
      lambda: grpo.gradients(
        trainable,
        frozen,
        part,
        model=e.model,
        algorithm=e.algorithm,
        ref=ref,
      )
    )
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  return fn


def apply(e: Experiment) -> Callable[..., Any]:
  """state, total, ends_step -> state, metrics."""

  def fn(
    state: TrainState, total: tuple, ends_step: Array
  ) -> tuple[TrainState, grpo.Metrics]:
    return grpo.apply(
      state, total, ends_step, algorithm=e.algorithm, optimizer=e.optimizer
    )

  return fn


def imitate(e: Experiment) -> Callable[..., Any]:
  """Warm-up: the same update, on given completions, as groups of one."""

  def fn(
    state: TrainState, prompts: Prompts, ids: Array, lengths: Array
  ) -> tuple[TrainState, grpo.Metrics]:
    zeros = jnp.zeros(ids.shape, jnp.float32)
    rollout = Rollout(
      prompts=prompts,
      ids=ids,
      lengths=lengths,
      truncated=jnp.zeros(lengths.shape, bool),
      mask=length_mask(lengths, ids.shape[-1]),
      sampler_logprobs=zeros,
      support=None,
      temperature=jnp.float32(1),
      policy_step=state.step,
    )
    one = jnp.ones(lengths.shape, jnp.float32)
    rewards = Rewards(
      total=one, scored=one > 0, metric=one, parts=one[..., None][..., :0]
    )
    batch = grpo.advantage(
      rewards, rollout, Scores(), algorithm=e.warmup_algorithm
    )
    return grpo.update(
      state,
      batch,
      model=e.model,
      algorithm=e.warmup_algorithm,
      optimizer=e.warmup_optimizer,
    )

  return fn
