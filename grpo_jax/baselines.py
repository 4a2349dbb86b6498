"""PPO with its critic, and the offline baselines: the same record.

DeepSeekMath's unified paradigm (2402.03300 §5.2) is one table here: every row
is data (who sampled), a reward, and the coefficient of ∇log π.
"""

from jax import Array

from grpo_jax import advantages, losses
from grpo_jax import token_weights as tw
from grpo_jax.advantages import Outcome
from grpo_jax.algorithm import Algorithm, kl_reward
from grpo_jax.critic import Critic
from grpo_jax.kl import Reference
from grpo_jax.returns import GAE


def ppo(
  clip: float = 0.2,
  gamma: float | Array = 1.0,
  lam: float | Array = 0.95,
  beta: float | Array = 0.02,
  whiten: bool = True,
  value_clip: float = 0.2,
  value_coefficient: float = 0.5,
  critic_rate: float = 1.0,
  shared: bool = False,
  pretrain_steps: int = 0,
) -> Algorithm:
  """PPO (1707.06347) with GAE (1506.02438), as InstructGPT used it.

  λ = 0 is the article's A_t = R_t + γ V(s_{t+1}) - V(s_t).

  Args:
    clip: ε.
    gamma: γ, of policy and values.
    lam: λ of both.
    beta: β of a k1 in the reward: 0.02 in InstructGPT (2203.02155).
    whiten: standardise advantages over the batch's tokens, as implementations
      do; the paper does not.
    value_clip: of the value loss; 0: none, as in the paper.
    value_coefficient: of the value loss.
    critic_rate: the critic's learning rate over the policy's.
    shared: values from a head on the policy, not from a decoder of their own.
    pretrain_steps: steps in which the critic alone learns.
  """
  return Algorithm(
    name="ppo",
    source="1707.06347",
    advantage=GAE(gamma, lam, whiten=whiten),
    weights=tw.token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip, clip),
    critic=Critic(
      GAE(gamma, lam),
      shared,
      value_clip or float("inf"),
      value_coefficient,
      critic_rate,
      pretrain_steps,
    ),
    **kl_reward(beta),
  )


def vc_ppo(
  clip: float = 0.2,
  lam: float | Array = 0.95,
  critic_lam: float | Array = 1.0,
  pretrain_steps: int = 50,
) -> Algorithm:
  """VC-PPO (2503.01491): values are learned first, and with their own λ.

  Args:
    clip: ε.
    lam: λ of the policy.
    critic_lam: λ of the values; 1 is the Monte Carlo return.
    pretrain_steps: steps in which the critic alone learns.
  """
  return Algorithm(
    name="vc_ppo",
    source="2503.01491",
    advantage=GAE(1.0, lam),
    weights=tw.token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip, clip),
    critic=Critic(GAE(1.0, critic_lam), pretrain_steps=pretrain_steps),
  )


def vapo(
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  alpha: float = 0.05,
  critic_rate: float = 2.0,
  pretrain_steps: int = 50,
) -> Algorithm:
  """VAPO (2504.05118), but for its likelihood term on positive examples.

  Args:
    clip_low: ε below.
    clip_high: ε above.
    alpha: α of λ = 1 - 1/(α l), for completions of hundreds of tokens or more:
      under 1/α tokens λ is 0.
    critic_rate: 2e-6 over 1e-6 in the paper.
    pretrain_steps: steps in which the critic alone learns.
  """
  return Algorithm(
    name="vapo",
    source="2504.05118",
    advantage=GAE(1.0, length_adaptive=alpha),
    weights=tw.token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip_low, clip_high),
    critic=Critic(
      GAE(1.0, 1.0), learning_rate=critic_rate, pretrain_steps=pretrain_steps
    ),
  )


def imitation() -> Algorithm:
  """Maximum likelihood of given completions: SFT, and the warm-up phase.

    max 1/N Σ_i 1/|o_i| Σ_t log π_θ(o_{i,t})

  The case G = 1, Â = 1, log π in the ratio's place.
  """
  return Algorithm(
    name="imitation",
    source="2203.02155",
    advantage=Outcome(advantages.ones),
    weights=tw.sequence_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
  )


def rft() -> Algorithm:
  """RFT: imitation of the first policy's own correct completions.

  Rejection-sampling fine-tuning in 2402.03300 §5.2: data from π_sft, the
  coefficient of ∇log π is 1 where correct and 0 elsewhere.
  """
  return Algorithm(
    name="rft",
    source="2402.03300",
    advantage=Outcome(advantages.no_baseline),
    weights=tw.sequence_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
    offline=True,
    reference=Reference(),
  )


def online_rft() -> Algorithm:
  """Online RFT (2402.03300 §5.2): the same on the policy's own completions."""
  return Algorithm(
    name="online_rft",
    source="2402.03300",
    advantage=Outcome(advantages.no_baseline),
    weights=tw.sequence_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
  )


def dpo(beta: float = 0.1) -> Algorithm:
  """DPO (2305.18290) on pairs that the first policy sampled: G = 2.

  The reward says which of the two is preferred; pairs of equal rewards train
  nothing. Sequence log-probs are sums, as in the paper of DPO.

  Args:
    beta: β: 0.1, and 0.5 for TL;DR.
  """
  return Algorithm(
    name="dpo",
    source="2305.18290",
    advantage=Outcome(advantages.group_mean),
    weights=tw.sequence_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Preference(beta),
    offline=True,
    reference=Reference(),
  )
