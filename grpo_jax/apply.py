"""The end of an update: one optimizer step on summed gradients, or none."""

import jax
import jax.numpy as jnp
import optax

from grpo_jax import metrics
from grpo_jax.algorithm import Algorithm
from grpo_jax.critic import Critic
from grpo_jax.metrics import Metrics
from grpo_jax.optimizer import Optimizer
from grpo_jax.types import Array, Params, TrainState, policy


@jax.named_scope("apply")
def apply(
  state: TrainState,
  total: tuple[Params, Metrics],
  ends_step: Array | int = 1,
  *,
  algorithm: Algorithm,
  optimizer: Optimizer,
) -> tuple[TrainState, Metrics]:
  """One optimizer step, or none: no momentum, no decay, nothing moves.

  It is skipped where a loss or gradient is not finite, and where the batch
  carries no signal: no token to train, or all advantages 0 and no KL term,
  which would have a gradient of its own.
  """
  grads, sums = total
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
  alive = sums["signal"] > 0
  if algorithm.moves_without_advantage:
    alive |= sums["weight"] > 0
  use = finite & alive
  direction, opt = optimizer.transform.update(grads, state.opt, state.trainable)
  rate = optimizer.learning_rate(state.step)
  trainable = _step(state, direction, rate, algorithm.critic)
  trainable, opt = jax.tree.map(
    lambda new, old: jnp.where(use, new, old),
    (trainable, opt),
    (state.trainable, state.opt),
  )
  out = {
    **metrics.token_means(sums),
    "update/grad_norm": norm,
    "update/learning_rate": rate,
    "update/nonfinite": 1.0 - finite,
    "update/dead": 1.0 - alive,
  }
  step = state.step + ends_step
  state = state.replace(trainable=trainable, opt=opt, step=step)
  return _after(state, out, ends_step, algorithm), out


def _step(
  state: TrainState, direction: Params, rate: Array, critic: Critic | None
) -> Params:
  """The parameters after a step; a critic's rate is its own."""
  if critic is None:
    return jax.tree.map(lambda p, d: p - rate * d, state.trainable, direction)
  policy_rate = rate * (state.controllers["pretrain_left"] <= 0)

  def one(path: tuple, p: Array, d: Array) -> Array:
    own = path[0].key == "critic"
    return p - (rate * critic.learning_rate if own else policy_rate) * d

  return jax.tree_util.tree_map_with_path(one, state.trainable, direction)


def _after(
  state: TrainState, out: Metrics, ends_step: Array | int, algorithm: Algorithm
) -> TrainState:
  """What follows the policy at the end of a step: reference, controllers."""
  controllers, ends = dict(state.controllers), jnp.asarray(ends_step) > 0
  if algorithm.adaptive is not None:
    scale = controllers["kl_scale"]
    changed = algorithm.adaptive(scale, out["kl/ref"])
    # A policy that stood still says nothing of the coefficient.
    moved = ends & (out["update/dead"] + out["update/nonfinite"] == 0)
    if "pretrain_left" in controllers:
      moved &= controllers["pretrain_left"] <= 0
    controllers["kl_scale"] = jnp.where(moved, changed, scale)
    out["kl/scale"] = scale
  for name, count in (("pretrain_left", -1), ("rl_steps", 1)):
    if name in controllers:
      controllers[name] += jnp.int32(count * ends)
  ref = state.ref
  if algorithm.reference is not None and algorithm.reference.moves:
    now = controllers["rl_steps"]
    moved = algorithm.reference(ref, policy(state.trainable), now)
    ref = jax.tree.map(lambda new, old: jnp.where(ends, new, old), moved, ref)
  return state.replace(ref=ref, controllers=controllers)


def controllers(algorithm: Algorithm) -> dict[str, Array]:
  """What a run begins with."""
  out = {}
  if algorithm.adaptive is not None:
    out["kl_scale"] = jnp.float32(1)
  if algorithm.reference is not None and algorithm.reference.moves:
    out["rl_steps"] = jnp.int32(0)
  if algorithm.critic is not None:
    out["pretrain_left"] = jnp.int32(algorithm.critic.pretrain_steps)
  return out
