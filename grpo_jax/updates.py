"""Every optimizer step of a rollout: epochs x mini-batches x micro-batches.

With one micro-batch an update is one program. With several the host loops over
them, so their number may differ from step to step without a new shape: groups
that cannot train are left out, and a signal is answered between two of them.
"""

import contextlib

import numpy as np

from grpo_jax.build import Built
from grpo_jax.logprobs import cover
from grpo_jax.types import Batch, TrainState


def update_all(
  built: Built,
  state: TrainState,
  batch: Batch,
  lengths: np.ndarray,
) -> tuple[TrainState, list[dict], list[Batch], float]:
  """Trains on a rollout.

  From the first optimizer step on, the state's old buffers are gone, so what
  follows is shielded from signals; before it nothing is lost by stopping.

  Args:
    built: the programs.
    state: donated.
    batch: the rollout batch.
    lengths: [B, G] on the host.

  Returns:
    the next state, each update's metrics and mini-batch, and the token
    positions that were computed, prompts included.
  """
  e = built.experiment
  b, guard = e.batching, built.programs.guard
  # With no other term a group whose advantages are all 0 has no gradient.
  trains = np.ones(len(lengths), bool)
  if not e.algorithm.moves_without_advantage and b.micro_batches > 1:
    trains = (np.asarray(batch.advantages) != 0).any(axis=(1, 2))
  sums, parts, computed = [], [], 0.0
  with contextlib.ExitStack() as shield:
    for update in range(b.updates_per_step):
      which = update % b.minibatches
      rows = slice(which, None, b.minibatches)
      part = batch
      if b.minibatches > 1:
        part = built.minibatch(batch, built.put_scalar(which))
      if e.algorithm.select is not None:
        part = built.select(state.params, part)
      last = built.put_scalar(int(update == b.updates_per_step - 1))
      if b.micro_batches == 1:
        plan = cover(lengths[rows], b.slabs)
        computed += positions(built, len(lengths[rows]), plan)
        guard.check()
        shield.enter_context(guard.shielded())
        state, values = built.update[plan](state, part, last)
      else:
        total, count = gradients(
          built, state, part, lengths[rows], trains[rows]
        )
        computed += count
        shield.enter_context(guard.shielded())
        state, values = built.apply(state, total, last)
      sums.append(guard.wait(values))
      parts.append(part)
    guard.wait(state)
  return state, sums, parts, computed


def gradients(
  built: Built,
  state: TrainState,
  part: Batch,
  lengths: np.ndarray,
  trains: np.ndarray,
) -> tuple[tuple, float]:
  """Gradients of a mini-batch, summed over its micro-batches.

  Args:
    built: the programs.
    state: its parameters are read.
    part: the mini-batch.
    lengths: [B, G].
    trains: [B] bool, groups with a gradient; the others are left out where
      prompts are not split over devices (their rows would have to travel).

  Returns:
    (gradients, sums), and the token positions computed.
  """
  b, guard = built.experiment.batching, built.programs.guard
  size, count = b.micro_batch_prompts, b.micro_batches
  order = np.arange(len(lengths)).reshape(size, count).T.ravel()  # strided
  if built.ways == 1 and not trains.all():
    order = np.argsort(~trains, kind="stable")
    count = max(1, -(-int(trains.sum()) // size))
  total, computed = None, 0.0
  ref = state.reference if built.experiment.algorithm.exact_kl else None
  weights = (state.trainable, state.frozen, ref)
  for i in range(count):
    index = order[i * size : (i + 1) * size].astype(np.int32)
    if built.ways == 1:
      micro = built.take(part, built.to_device(index))
    else:
      micro = built.cut(part, built.put_scalar(i))
    if total is None:
      total = built.zeros(*weights, micro)
    plan = cover(lengths[index], b.slabs)
    computed += positions(built, size, plan)
    program = built.accumulate[plan]
    total = guard.wait(program(*weights, micro, total))
  return total, computed


def positions(built: Built, prompts: int, plan: tuple) -> float:
  """Token positions that a pass over `prompts` prompts computes."""
  tokens = sum(rows * size for rows, size in plan)
  return float(prompts * (built.experiment.prompt_width - 1 + tokens))
