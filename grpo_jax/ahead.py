"""Every shape a run may use, compiled before its first step.

A program that compiles in the middle of a run costs minutes at a bad moment;
here the set of shapes is closed and known from the records alone.
"""

from typing import Any

import jax
import numpy as np

from grpo_jax import memory, sharding
from grpo_jax.build import Built
from grpo_jax.compile import Program
from grpo_jax.types import Batch, Prompts, Rewards, Scores

Job = tuple[Program, tuple]  # a program and its abstract arguments


def compile_all(built: Built, first_phase: str) -> None:
  """Compiles every shape the run may use, before its first step.

  Args:
    built: the programs.
    first_phase: 'warmup' or 'rl'; what is done already is not compiled.

  Raises:
    OutOfMemory: one of them does not fit.
  """
  e = built.experiment
  jobs = rl_programs(built)
  if first_phase == "warmup":
    b, t = e.warmup_prompts, e.sampling.max_tokens
    arguments = (
      built.shapes["warmup"],
      _abstract_prompts(built, b),
      _abstract(built, (b, 1, t), np.int32),
      _abstract(built, (b, 1), np.int32),
    )
    jobs = [(built.imitate, arguments), *jobs]
  if e.evaluation.every:
    jobs += eval_programs(built)
  built.programs.compile_all(jobs)
  memory.check(built, jobs)


def eval_programs(built: Built) -> list[Job]:
  """The evaluators and their abstract arguments."""
  arguments = (
    built.params_target(),
    _abstract_prompts(built, built.experiment.evaluation.prompts_per_batch),
    built.shapes["rl"].key,
    _abstract(built, (), np.int32),
  )
  return [(program, arguments) for program in built.evaluators.values()]


def update_programs(built: Built, part: Batch, step: Any) -> list[Job]:
  """One program per slab plan; with micro-batches, those of the host's loop."""
  state, jobs = built.shapes["rl"], []
  if built.experiment.algorithm.select is not None:
    jobs = [(built.select, (state.params, part))]
    part = built.select.abstract(state.params, part)
  if built.experiment.batching.micro_batches == 1:
    return [(p, (state, part, step)) for p in built.update.values()] + jobs
  size = built.experiment.batching.micro_batch_prompts
  which, index = built.cut, (part, step)
  if built.ways == 1:
    which, index = built.take, (part, _abstract(built, (size,), np.int32))
  micro = which.abstract(*index)
  ref = state.reference if built.experiment.algorithm.exact_kl else None
  weights = (state.trainable, state.frozen, ref)
  total = built.zeros.abstract(*weights, micro)
  gradients = (*weights, micro, total)
  return [
    *[(program, gradients) for program in built.accumulate.values()],
    (built.apply, (state, total, step)),
    (built.zeros, (*weights, micro)),
    (which, index),
    *jobs,
  ]


def rl_programs(built: Built) -> list[Job]:
  """The programs of a step and their abstract arguments, largest first."""
  e, state = built.experiment, built.shapes["rl"]
  algorithm, weights = e.algorithm, built.params_target()
  prompts = _abstract_prompts(built, e.batching.prompts_per_step)
  step = _abstract(built, (), np.int32)
  sample = (weights, prompts, state.key, step)
  rollout = built.sample.abstract(*sample)
  shape = rollout.ids.shape
  logprobs = _abstract(built, shape, np.float32)
  values = _abstract(built, (*shape[:2], shape[2] + 1), np.float32)
  rewards = abstract_rewards(built, shape)
  old, ref = e.needs_old_scores, algorithm.reference is not None
  scores = Scores(
    logprobs=logprobs if old else None,
    ref_logprobs=logprobs if ref else None,
    values=values if algorithm.critic is not None else None,
  )
  scale = None
  if algorithm.adaptive is not None:
    scale = _abstract(built, (), np.float32)
  batch = built.advantage.abstract(rewards, rollout, scores, scale)
  part = batch
  jobs = [(built.sample, sample)]
  if e.batching.minibatches > 1:
    part = built.minibatch.abstract(batch, step)
    jobs.append((built.minibatch, (batch, step)))
  jobs = update_programs(built, part, step) + jobs
  if old or ref:
    jobs += [(program, (weights, rollout)) for program in built.score.values()]
  if algorithm.critic is not None:
    jobs.append((built.value, (state.params, rollout)))
  if algorithm.baseline_rollout:
    jobs.append((built.baseline, sample))
  if algorithm.resample is not None:
    index = _abstract(built, shape[:1], np.int32)
    jobs.append((built.pick, (rollout, rollout, index)))
  return [*jobs, (built.advantage, (rewards, rollout, scores, scale))]


def abstract_rewards(built: Built, shape: tuple[int, ...]) -> Rewards:
  """What a task says of a rollout of [B, G, T], as abstract arrays."""
  e = built.experiment
  rows, steps = shape[:2], e.algorithm.steps
  return Rewards(
    total=_abstract(built, rows, np.float32),
    scored=_abstract(built, rows, bool),
    metric=_abstract(built, rows, np.float32),
    parts=_abstract(built, (*rows, len(e.task.parts)), np.float32),
    per_token=_abstract(built, shape, np.float32) if steps else None,
    steps=_abstract(built, shape, bool) if steps else None,
    baseline=_abstract(built, rows[:1], np.float32)
    if e.algorithm.baseline_rollout
    else None,
  )


def _abstract(built: Built, shape: tuple[int, ...], dtype: Any) -> Any:
  x = jax.ShapeDtypeStruct(shape, dtype)
  where = sharding.prompts_sharding(built.mesh, x)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def _abstract_prompts(built: Built, size: int) -> Prompts:
  return Prompts(
    ids=_abstract(built, (size, built.experiment.prompt_width), np.int32),
    lengths=_abstract(built, (size,), np.int32),
    ordinals=_abstract(built, (size,), np.int32),
  )
