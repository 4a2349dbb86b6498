"""What is added to a task's reward before advantages are taken."""

import jax.numpy as jnp

from grpo_jax.algorithm import Algorithm
from grpo_jax.returns import last_token
from grpo_jax.types import Array, Rewards, Rollout, Scores


def shape(
  rewards: Rewards,
  rollout: Rollout,
  scores: Scores,
  algorithm: Algorithm,
  kl_scale: Array | None = None,
) -> Rewards:
  """Rewards with their `penalty`: KL at each token, length at the last one.

  The task's own metric is left as it is: filters and logs look at that.

  Args:
    rewards: of the task.
    rollout: the completions.
    scores: `logprobs` of the policy that sampled, None where the sampler's own
      say the same; `ref_logprobs`.
    algorithm: whose parts these are.
    kl_scale: [] multiple of the KL coefficient.
  """
  penalties = []
  if algorithm.kl_in_reward is not None:
    sampled = scores.logprobs
    if sampled is None:
      sampled = rollout.sampler_logprobs
    penalty = algorithm.kl_in_reward(sampled, scores.ref_logprobs, rollout.mask)
    penalties.append(penalty if kl_scale is None else kl_scale * penalty)
  if algorithm.length_penalty is not None:
    length = algorithm.length_penalty(rollout.lengths)[..., None]
    penalties.append(jnp.where(last_token(rollout), length, 0.0))
  if not penalties:
    return rewards
  return rewards.replace(penalty=sum(penalties))
