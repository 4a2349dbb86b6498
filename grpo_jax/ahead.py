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
    built.shapes["rl"].trainable,
    _abstract_prompts(built, built.experiment.evaluation.prompts_per_batch),
    built.shapes["rl"].key,
    _abstract(built, (), np.int32),
  )
  return [(program, arguments) for program in built.evaluators.values()]


def update_programs(built: Built, part: Batch, step: Any) -> list[Job]:
  """One program per slab plan; with micro-batches, those of the host's loop."""
  state = built.shapes["rl"]
  if built.experiment.batching.micro_batches == 1:
    return [(p, (state, part, step)) for p in built.update.values()]
  size = built.experiment.batching.micro_batch_prompts
  which, index = built.cut, (part, step)
  if built.ways == 1:
    which, index = built.take, (part, _abstract(built, (size,), np.int32))
  micro = which.abstract(*index)
  total = built.zeros.abstract(state.trainable, micro)
  return [
    *[(p, (state.trainable, micro, total)) for p in built.accumulate.values()],
    (built.apply, (state, total, step)),
    (built.zeros, (state.trainable, micro)),
    (which, index),
  ]


def rl_programs(built: Built) -> list[Job]:
  """The programs of a step and their abstract arguments, largest first."""
  e, state = built.experiment, built.shapes["rl"]
  prompts = _abstract_prompts(built, e.batching.prompts_per_step)
  step = _abstract(built, (), np.int32)
  sample = (state.trainable, prompts, state.key, step)
  rollout = built.sample.abstract(*sample)
  score = (state.trainable, rollout)
  logprobs = next(iter(built.score.values())).abstract(*score)
  shape = rollout.lengths.shape
  rewards = Rewards(
    total=_abstract(built, shape, np.float32),
    scored=_abstract(built, shape, bool),
    metric=_abstract(built, shape, np.float32),
    parts=_abstract(built, (*shape, len(e.task.parts)), np.float32),
  )
  scores = Scores(
    logprobs=logprobs if e.needs_old_scores else None,
    ref_logprobs=logprobs if e.algorithm.kl is not None else None,
  )
  batch = built.advantage.abstract(rewards, rollout, scores)
  part = batch
  jobs = [(built.sample, sample)]
  if e.batching.minibatches > 1:
    part = built.minibatch.abstract(batch, step)
    jobs.append((built.minibatch, (batch, step)))
  jobs = update_programs(built, part, step) + jobs
  if e.needs_old_scores or e.algorithm.kl is not None:
    jobs += [(program, score) for program in built.score.values()]
  return [*jobs, (built.advantage, (rewards, rollout, scores))]


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
