"""The papers that followed GRPO, a few lines each: see `algorithms.py`."""

import dataclasses
import functools

from jax import Array

from grpo_jax import advantages, losses, returns
from grpo_jax import token_weights as tw
from grpo_jax.advantages import Outcome
from grpo_jax.algorithm import (
  GROUP_MEAN,
  Algorithm,
  DynamicSampling,
  choice,
  kl_loss,
  kl_reward,
  normalized,
)
from grpo_jax.kl import k2
from grpo_jax.selection import HighCovariance, RandomInBand

# --- length, clip and ratio -------------------------------------------------


def dr_grpo(tokens: int, clip: float = 0.2) -> Algorithm:
  """Dr. GRPO (2503.20783): no std, and a constant in the length's place.

  Args:
    tokens: the constant, the longest completion allowed in the authors' code.
    clip: ε.
  """
  return Algorithm(
    name="dr_grpo",
    source="2503.20783",
    advantage=GROUP_MEAN,
    weights=tw.Constant(tokens),
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip, clip),
  )


def dapo(
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  average: str = "prompt",
  rounds: int = 4,
) -> Algorithm:
  """DAPO (2503.14476): clip-higher, token mean, dynamic sampling, no KL.

  Its soft overlong punishment is `overlong=soft` with `overlong_cache`, its
  overlong filtering `overlong=mask` (`adjust.py`).

  Args:
    clip_low: ε_low.
    clip_high: ε_high.
    average: prompt, as eq. 8 writes it, or batch, as the released code has it.
    rounds: rollout batches at most to fill a step with useful groups.
  """
  averages = {"prompt": tw.prompt_token_mean, "batch": tw.token_mean}
  return Algorithm(
    name="dapo",
    source="2503.14476",
    advantage=normalized(),
    weights=choice("average", average, averages),
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip_low, clip_high),
    resample=DynamicSampling(rounds),
  )


def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4) -> Algorithm:
  """GSPO (2507.18071) eq. 5: the sequence's geometric-mean ratio, clipped."""
  return Algorithm(
    name="gspo",
    source="2507.18071",
    advantage=normalized(),
    weights=tw.sequence_mean,
    ratio=losses.geometric_ratio,
    surrogate=losses.Clipped(clip_low, clip_high),
  )


def gspo_token(clip_low: float = 3e-4, clip_high: float = 4e-4) -> Algorithm:
  """GSPO-token (2507.18071) eq. 13: advantages may differ by token."""
  return dataclasses.replace(
    gspo(clip_low, clip_high),
    name="gspo_token",
    ratio=losses.geometric_token_ratio,
  )


def gmpo(bound: float = 0.4) -> Algorithm:
  """GMPO (2507.20673): the geometric mean of token-clipped ratios.

  Args:
    bound: the clip range is (e^-bound, e^bound).
  """
  return Algorithm(
    name="gmpo",
    source="2507.20673",
    advantage=normalized(),
    weights=tw.sequence_mean,
    ratio=losses.token_ratio,
    surrogate=losses.GeometricClipped(bound),
  )


def cispo(clip_high: float = 4.0, rounds: int = 4) -> Algorithm:
  """CISPO (MiniMax-M1, 2506.13585) eq. 4: the weight is clipped, no token is.

  Args:
    clip_high: the cap is 1 + clip_high. The paper does not give it; TRL's
      absolute 5 is 4 here.
    rounds: of dynamic sampling.
  """
  return Algorithm(
    name="cispo",
    source="2506.13585",
    advantage=normalized(),
    weights=tw.prompt_token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.WeightedLogPolicy(clip_high),
    resample=DynamicSampling(rounds),
  )


def sapo(positive: float = 1.0, negative: float = 1.05) -> Algorithm:
  """SAPO (2511.20347): a soft gate in the clip's place.

  Args:
    positive: τ where Â > 0.
    negative: τ where Â < 0.
  """
  return Algorithm(
    name="sapo",
    source="2511.20347",
    advantage=normalized(),
    weights=tw.sequence_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Soft(positive, negative),
  )


def dppo(tokens: int, bound: float = 0.15) -> Algorithm:
  """DPPO (2602.04879), total variation: mask what has moved far from μ.

  Args:
    tokens: the constant that a row's sum is divided by.
    bound: largest |π - μ| of a token.
  """
  return Algorithm(
    name="dppo",
    source="2602.04879",
    advantage=GROUP_MEAN,
    weights=tw.Constant(tokens),
    ratio=losses.token_ratio,
    surrogate=losses.DivergenceMasked(bound),
    anchor=losses.sampler_policy,
  )


# --- what a reward is compared with -----------------------------------------


def reinforce_pp(beta: float | Array = 0.001, clip: float = 0.2) -> Algorithm:
  """REINFORCE++ (2501.03262): k1-to-go in the reward, whitened over the batch.

  One completion per prompt is enough.
  """
  return Algorithm(
    name="reinforce_pp",
    source="2501.03262",
    advantage=returns.Whitened(),
    weights=tw.token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip, clip),
    **kl_reward(beta),
  )


def reinforce_pp_baseline(
  beta: float | Array = 0.001, clip: float = 0.2
) -> Algorithm:
  """REINFORCE++-baseline (2501.03262): less the group's mean, then whitened.

  Args:
    beta: β of a k2 in the loss (remembered, not read in the paper).
    clip: ε.
  """
  return Algorithm(
    name="reinforce_pp_baseline",
    source="2501.03262",
    advantage=returns.Whitened(centre=True),
    weights=tw.token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip, clip),
    **kl_loss(beta, k2),
  )


def lite_ppo(clip: float = 0.2, ddof: int = 1) -> Algorithm:
  """Lite PPO (2508.08221): group mean, the batch's std, token mean."""
  scale = functools.partial(
    advantages.group_mean_batch_std, ddof=ddof, epsilon=1e-6
  )
  return Algorithm(
    name="lite_ppo",
    source="2508.08221",
    advantage=Outcome(scale),
    weights=tw.token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip, clip),
  )


def scalerl(clip_high: float = 4.0, ddof: int = 1) -> Algorithm:
  """ScaleRL (2510.13786): CISPO against the sampler, batch std, prompt mean.

  Groups without a signal are dropped, not resampled. Its FP32 logits are what
  this package always has.

  Args:
    clip_high: the cap ε_max is 1 + clip_high; 4, 5 and 8 did equally well.
    ddof: of the batch's standard deviation.
  """
  scale = functools.partial(
    advantages.centred_batch_std, ddof=ddof, epsilon=1e-6
  )
  return Algorithm(
    name="scalerl",
    source="2510.13786",
    advantage=Outcome(scale),
    weights=tw.prompt_token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.WeightedLogPolicy(clip_high),
    anchor=losses.sampler_policy,
  )


def maxrl() -> Algorithm:
  """MaxRL (2602.02710): (R - mean)/mean, towards the likelihood of success."""
  return Algorithm(
    name="maxrl",
    source="2602.02710",
    advantage=Outcome(advantages.success_normalized),
    weights=tw.sequence_sum_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
  )


def gdpo(clip: float = 0.2, ddof: int = 1, epsilon: float = 1e-4) -> Algorithm:
  """GDPO (2601.05242): each part of the reward normalised by itself."""
  return Algorithm(
    name="gdpo",
    source="2601.05242",
    advantage=returns.PartwiseNormalized(ddof=ddof, epsilon=epsilon),
    weights=tw.sequence_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip, clip),
  )


def opo() -> Algorithm:
  """OPO (2505.23585): the length-weighted baseline, exactly on policy."""
  return Algorithm(
    name="opo",
    source="2505.23585",
    advantage=returns.length_weighted_baseline,
    weights=tw.sequence_sum_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
  )


def gpg() -> Algorithm:
  """GPG (2504.02546): no ratio, no clip, weighed up for dead groups."""
  return Algorithm(
    name="gpg",
    source="2504.02546",
    advantage=Outcome(advantages.per_informative_group),
    weights=tw.token_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
  )


def clip_cov(fraction: float = 2e-4, clip: float = 1.0) -> Algorithm:
  """Clip-Cov (2505.22617): tokens that use up entropy lose their loss.

  Args:
    fraction: of all tokens, drawn among those of covariance 1 to 5. The
      paper's 2e-4 is less than one token of a small batch.
    clip: PPO's, 1 in the authors' scripts: [0, 2].
  """
  return Algorithm(
    name="clip_cov",
    source="2505.22617",
    advantage=normalized(),
    weights=tw.token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.WithoutSelected(losses.Clipped(clip, clip)),
    select=RandomInBand(fraction),
  )


def kl_cov(fraction: float = 2e-3, coefficient: float = 1.0) -> Algorithm:
  """KL-Cov (2505.22617): such tokens are held by |log r|; no clip at all.

  Args:
    fraction: of all tokens: 2e-3 for 7B, 2e-4 for 32B.
    coefficient: of |log π_θ/π_old|.
  """
  return Algorithm(
    name="kl_cov",
    source="2505.22617",
    advantage=normalized(),
    weights=tw.token_mean,
    ratio=losses.token_ratio,
    surrogate=losses.SelectedHeld(losses.unclipped, coefficient),
    select=HighCovariance(fraction),
  )
