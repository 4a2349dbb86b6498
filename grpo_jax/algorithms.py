"""Named algorithms, a few lines each: the parts that a paper chose.

A constructor's signature is its configuration: `config.algorithm.beta=0.04`
becomes `grpo(beta=0.04)`, and a key it lacks is refused. The defaults are the
constants of the paper named in the docstring. What can be put around any row
(a KL, corrections, an entropy bonus, filters) is in `adjust.py`, later papers
are in `variants.py`, PPO and the offline baselines in `baselines.py`. A variant
of one's own needs no registry: `dataclasses.replace(grpo(), ratio=my_ratio)`.
"""

import dataclasses
from collections.abc import Callable

from jax import Array

from grpo_jax import (
  advantages,
  baselines,
  corrections,
  losses,
  returns,
  variants,
)
from grpo_jax import token_weights as tw
from grpo_jax.advantages import Outcome
from grpo_jax.algorithm import (
  GROUP_MEAN,
  Algorithm,
  choice,
  kl_loss,
  kl_reward,
  normalized,
)
from grpo_jax.kl import k3

# --- the article, and what came before --------------------------------------


def grpo_sequence(beta: float | Array = 0.01) -> Algorithm:
  """The objective of "An In-Depth Look at GRPO", exactly.

    L(θ) = E[ ρ_i Â_i ] - β KL(π_θ‖π_ref),   ρ_i = π_θ(o_i|q)/π_old(o_i|q),
    Â_i = R_i - mean(R)

  No clip and no standard deviation. The KL is carried by the sequence ratio,
  ρ·k3 of the sequence, whose value and gradient are exact in expectation on
  and off policy. In expectation the first term is (G-1)/G times the policy
  improvement J(θ) - J(π_old), and so is its gradient.

  Args:
    beta: β. The article gives no value; 0 drops the term and the reference.
  """
  return Algorithm(
    name="grpo_sequence",
    source="An In-Depth Look at GRPO",
    advantage=GROUP_MEAN,
    weights=tw.sequence_mean,
    ratio=losses.sequence_ratio,
    surrogate=losses.unclipped,
    **kl_loss(beta, k3, sequence=True, ratio_weighted=True),
  )


def reinforce(
  gamma: float | Array = 1.0, baseline: str = "none", beta: float | Array = 0.0
) -> Algorithm:
  """REINFORCE (Williams 1992): Σ_t γ^t (Σ_{l>=t} γ^{l-t} r_l) ∇log π.

  Args:
    gamma: γ of the return J = E[Σ γ^t r_t].
    baseline: none, batch (the batch's mean reward) or group (at each token the
      group's mean return).
    beta: β of a k1 in the reward.
  """
  choices = {
    "none": returns.Discounted(gamma, baseline=False),
    "batch": Outcome(advantages.batch_mean),
    "group": returns.Discounted(gamma),
  }
  return Algorithm(
    name="reinforce",
    source="Williams 1992",
    advantage=choice("baseline", baseline, choices),
    weights=tw.sequence_sum_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
    **kl_reward(beta),
  )


def rloo(beta: float | Array = 0.03) -> Algorithm:
  """RLOO (2402.14740): R_i less the mean of the others, no ratio, no clip.

  Libraries that take two steps per rollout add PPO's ratio and clip; the paper
  does not.

  Args:
    beta: β of the sequence's k1 in the reward: 0.03 TL;DR, 0.10 HH.
  """
  return Algorithm(
    name="rloo",
    source="2402.14740",
    advantage=Outcome(advantages.leave_one_out),
    weights=tw.sequence_sum_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
    **kl_reward(beta),
  )


def remax(beta: float | Array = 0.0) -> Algorithm:
  """ReMax (2310.10505): the baseline is the likeliest completion's reward.

  It costs one more rollout per prompt.
  """
  return Algorithm(
    name="remax",
    source="2310.10505",
    advantage=returns.greedy_baseline,
    weights=tw.sequence_sum_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
    baseline_rollout=True,
    **kl_reward(beta),
  )


# --- DeepSeek ---------------------------------------------------------------


def grpo(
  beta: float | Array = 0.04,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  ddof: int = 1,
  epsilon: float = 1e-6,
  refresh_every: int = 0,
) -> Algorithm:
  """GRPO with outcome supervision, DeepSeekMath (2402.03300) eq. 3.

    1/G Σ_i 1/|o_i| Σ_t [ min(r Â, clip(r, 1-ε, 1+ε) Â) - β k3 ],
    Â = (R - mean(R)) / std(R)

  Args:
    beta: β = 0.04 in the paper; 0 drops the term and the reference.
    clip_low: ε below. The paper gives no ε; 0.2 is PPO's.
    clip_high: ε above.
    ddof: of the standard deviation; the paper does not say (see `normalized`).
    epsilon: added to it; not in the paper. Groups of equal rewards get exactly
      0 whatever it is.
    refresh_every: steps after which the reference becomes the policy; 0 never.
      Above 0 this is iterative GRPO, algorithm 1.
  """
  return Algorithm(
    name="grpo",
    source="2402.03300",
    advantage=normalized(ddof, epsilon),
    weights=tw.sequence_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip_low, clip_high),
    **kl_loss(beta, k3, refresh_every),
  )


def grpo_process(beta: float | Array = 0.04, clip: float = 0.2) -> Algorithm:
  """GRPO with process supervision, DeepSeekMath (2402.03300) §4.1.3.

  The task gives a reward for each step (`Reward.steps`); they are normalised
  over all steps of the group, and a token gets the sum of those after it.
  """
  return dataclasses.replace(
    grpo(beta, clip, clip),
    name="grpo_process",
    advantage=returns.ProcessSupervision(),
    steps=True,
  )


def grpo_iterative(
  beta: float | Array = 0.04, refresh_every: int = 100
) -> Algorithm:
  """Iterative GRPO, DeepSeekMath (2402.03300) algorithm 1, its policy loop.

  The reference becomes the policy every `refresh_every` steps. The paper's 10 %
  of old data is in the reward model's training, not here.
  """
  return dataclasses.replace(
    grpo(beta, refresh_every=refresh_every), name="grpo_iterative"
  )


def r1(
  beta: float | Array = 0.001, clip: float = 10.0, refresh_every: int = 400
) -> Algorithm:
  """DeepSeek-R1's objective as written (2501.12948): whole-sequence ratio.

  Args:
    beta: 0.001 for R1-Zero.
    clip: ε = 10 in R1's first stage: below it never binds.
    refresh_every: the reference becomes the policy every 400 steps.
  """
  return Algorithm(
    name="r1",
    source="2501.12948",
    advantage=normalized(),
    weights=tw.sequence_mean,
    ratio=losses.sequence_ratio,
    surrogate=losses.Clipped(clip, clip),
    **kl_loss(beta, k3, refresh_every, sequence=True),
  )


def deepseek_v32(
  beta: float | Array = 0.001, clip: float = 0.2, delta: float = 0.5
) -> Algorithm:
  """The form of DeepSeek-V3.2 (2512.02556).

  KL weighted by the ratio (its gradient per token is k2's), and completions
  with Â < 0 masked that the policy has left by more than δ.

  Args:
    beta: not given; 0.001 is R1's.
    clip: not given; 0.2 is PPO's.
    delta: not given; TRL suggests 0.5.
  """
  return Algorithm(
    name="deepseek_v32",
    source="2512.02556",
    advantage=GROUP_MEAN,
    weights=tw.sequence_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip, clip),
    correction=corrections.OffPolicyMask(delta),
    **kl_loss(beta, k3, ratio_weighted=True),
  )


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
  fn.__name__: fn
  for fn in (
    grpo_sequence,
    reinforce,
    rloo,
    remax,
    grpo,
    grpo_process,
    grpo_iterative,
    r1,
    deepseek_v32,
    variants.dr_grpo,
    variants.dapo,
    variants.gspo,
    variants.gspo_token,
    variants.gmpo,
    variants.cispo,
    variants.sapo,
    variants.dppo,
    variants.reinforce_pp,
    variants.reinforce_pp_baseline,
    variants.lite_ppo,
    variants.scalerl,
    variants.maxrl,
    variants.gdpo,
    variants.opo,
    variants.gpg,
    variants.clip_cov,
    variants.kl_cov,
    baselines.ppo,
    baselines.vc_ppo,
    baselines.vapo,
    baselines.rft,
    baselines.online_rft,
    baselines.dpo,
  )
}
