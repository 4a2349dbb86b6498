"""How a value function is learned beside the policy: PPO's critic."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from grpo_jax.returns import GAE
from grpo_jax.types import Batch, Rewards, Rollout, Scores


@dataclasses.dataclass(frozen=True)
class Critic:
  """How values are learned.

  Attributes:
    estimate: makes the targets, its λ on the critic's side: target = A_t + V_t.
      λ = 1 is the Monte Carlo return (VC-PPO decouples it from the policy's).
    shared: a head on the policy's own decoder, whose gradient it then shapes;
      False is a decoder of its own, begun as a copy of the policy.
    clip: V may move this far from the old V at once, in the loss; infinity:
      as far as it likes (the paper of PPO has no such clip).
    coefficient: of the value loss.
    learning_rate: of the critic, as a multiple of the policy's.
    pretrain_steps: steps in which the critic alone learns (VC-PPO).
  """

  estimate: GAE
  shared: bool = False
  clip: float = float("inf")
  coefficient: float = 0.5
  learning_rate: float = 1.0
  pretrain_steps: int = 0

  def targets(
    self, rewards: Rewards, rollout: Rollout, scores: Scores
  ) -> Array:
    """What values are to become: [B, G, T]."""
    lam = jnp.asarray(self.estimate.lam, scores.values.dtype)
    gain = self.estimate.estimate(rewards, rollout, scores.values, lam)
    return jax.lax.stop_gradient(gain + scores.values[..., :-1])

  def loss(self, batch: Batch, now: Array) -> Array:
    """½ mean of the larger of the plain and the clipped squared error: [].

    Args:
      batch: targets, old values and token weights.
      now: [B, G, T], the values being trained.
    """
    bound = min(self.clip, 1e30)
    near = batch.old_values + jnp.clip(now - batch.old_values, -bound, bound)
    target = batch.value_targets
    error = jnp.maximum(jnp.square(now - target), jnp.square(near - target))
    # Targets are not differentiated; errors off the mask have weight 0.
    return 0.5 * self.coefficient * jnp.sum(batch.weights * error)
