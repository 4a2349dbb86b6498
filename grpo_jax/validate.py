"""Combinations of parts that cannot mean anything, or that can never act.

A refusal is a `UserError`; a warning is a line that a run prints before it
starts. Both read records alone.
"""

import functools
import math
from typing import Any

from grpo_jax import advantages, kl, losses, returns
from grpo_jax.algorithm import Algorithm, uncorrected
from grpo_jax.errors import UserError

# Ratios that are one number for a whole sequence.
OF_SEQUENCE = (losses.sequence_ratio, losses.geometric_ratio)
# Advantages that may differ from token to token.
PER_TOKEN = (
  returns.Discounted,
  returns.ProcessSupervision,
  returns.Whitened,
  returns.GAE,
)
# Outcomes that compare a row with the others of its group.
OF_GROUP = (
  advantages.group_mean,
  advantages.group_normalized,
  advantages.leave_one_out,
  advantages.group_mean_batch_std,
  advantages.centred_batch_std,
  advantages.success_normalized,
  advantages.per_informative_group,
)
WIDE_FOR_GEOMETRIC = 0.05  # a geometric mean of ratios never gets there


def outcome_of(a: Algorithm) -> Any:
  """The function of outcomes behind an advantage, or None."""
  fn = getattr(a.advantage, "fn", None)
  return fn.func if isinstance(fn, functools.partial) else fn


def check(a: Algorithm, *, group: int, prompts: int, task_parts: int) -> None:
  """Refuses what cannot mean anything.

  Args:
    a: the algorithm.
    group: G.
    prompts: of a step.
    task_parts: named parts of the task's reward.

  Raises:
    UserError: the first such combination, and what to choose instead.
  """
  name = f"algorithm {a.name}"
  if a.ratio in OF_SEQUENCE and isinstance(a.advantage, PER_TOKEN):
    raise UserError(
      f"{name}: a ratio of the whole sequence has one advantage, and these"
      " differ by token; take losses.geometric_token_ratio or token_ratio"
    )
  plain = a.ratio is losses.log_policy
  if plain and isinstance(a.surrogate, losses.WeightedLogPolicy):
    raise UserError(f"{name}: a weight on log π needs a ratio to be made of")
  if plain and isinstance(a.surrogate, losses.Clipped):
    raise UserError(f"{name}: log π is no ratio, and cannot be clipped about 1")
  if a.kl is not None and a.kl.ratio_weighted and plain:
    raise UserError(f"{name}: a KL weighted by the ratio needs a ratio")
  _check_kl(a, name)
  blind = returns.PartwiseNormalized | returns.ProcessSupervision
  shaped = a.kl_in_reward is not None or a.length_penalty is not None
  if isinstance(a.advantage, blind) and shaped:
    raise UserError(
      f"{name} reads parts or steps of the reward, and a penalty is in neither:"
      " take kl_place=loss, and no overlong=soft"
    )
  _check_numbers(a, name, group)
  compares = outcome_of(a) in OF_GROUP or isinstance(
    a.advantage, returns.PartwiseNormalized
  )
  compares |= getattr(a.advantage, "centre", False) is True
  compares |= getattr(a.advantage, "baseline", False) is True
  compares |= a.advantage is returns.length_weighted_baseline
  if group < 2 and compares:
    raise UserError(
      f"{name} compares the completions of a prompt; sampling.group_size"
      f" {group} must be at least 2"
    )
  preference = isinstance(a.surrogate, losses.Preference)
  if preference and group != 2:
    raise UserError(
      f"{name} is about pairs; sampling.group_size {group} must be 2"
    )
  of_batch = (advantages.group_mean_batch_std, advantages.centred_batch_std)
  if outcome_of(a) in of_batch and prompts < 2:
    raise UserError(
      f"{name} compares groups; batch.prompts_per_step {prompts} must be at"
      " least 2"
    )
  if isinstance(a.advantage, returns.PartwiseNormalized):
    weights = a.advantage.weights
    if not task_parts or (weights and len(weights) != task_parts):
      raise UserError(
        f"{name} normalises each part of the reward; the task names"
        f" {task_parts} parts"
      )
  if a.correction is not uncorrected and a.anchor is losses.sampler_policy:
    raise UserError(
      f"{name} takes its ratio against the sampler already; a correction from"
      " the sampler would count it twice"
    )


def _check_numbers(a: Algorithm, name: str, group: int) -> None:
  """Constants with which a part is nothing."""
  dual = getattr(a.surrogate, "dual", math.inf)
  if dual <= 1:
    raise UserError(
      f"{name}: dual_clip {dual} must be above 1, or fresh samples are clipped"
    )
  low, high = (getattr(a.correction, x, None) for x in ("low", "high"))
  if low is not None and low >= high:
    raise UserError(
      f"{name}: the correction's band from {low} to {high} holds no weight"
    )
  part = getattr(a.advantage, "fn", a.advantage)
  given = getattr(part, "keywords", {})
  ddof = given.get("ddof", getattr(part, "ddof", 0))
  of_group = outcome_of(a) is advantages.group_normalized
  if of_group and ddof >= group:
    raise UserError(
      f"{name}: ddof {ddof} must be below sampling.group_size {group}"
    )


def _check_kl(a: Algorithm, name: str) -> None:
  """KL terms whose gradient is not a KL's."""
  if a.kl is not None and a.kl.estimator is kl.k1 and not a.kl.ratio_weighted:
    raise UserError(
      f"{name}: k1 in the loss has a gradient of mean 0 on fresh samples; take"
      " k2, k3, kl_place=reward, or kl_ratio_weighted"
    )
  normalised = outcome_of(a) is advantages.group_normalized
  if a.kl_in_reward is not None and normalised:
    raise UserError(
      f"{name}: a KL in the reward and a division by the group's std: in a"
      " group of equal rewards the coefficient cancels and noise is all that"
      " is left; take kl_place=loss, or an advantage without std"
    )
  if a.kl_in_reward is not None and a.kl_in_reward.estimator is kl.k3:
    raise UserError(
      f"{name}: k3 in the reward has the gradient of neither KL; take k1"
    )
  if a.adaptive is not None and a.reference is None:
    raise UserError(f"{name}: a KL controller needs a reference")


def warnings(a: Algorithm, *, updates: int, group: int) -> list[str]:
  """Settings that can never act, one line each.

  Args:
    a: the algorithm.
    updates: optimizer steps per rollout.
    group: G.
  """
  out = []
  clip = a.surrogate
  fresh = updates == 1 and a.anchor is losses.old_policy
  if fresh and isinstance(clip, losses.Clipped):
    out.append(
      "one update per rollout: every ratio is 1, so the clip never binds"
    )
  if fresh and isinstance(clip, losses.GeometricClipped | losses.Soft):
    out.append("one update per rollout: every ratio is 1, so its bound is idle")
  if fresh and isinstance(clip, losses.SelectedHeld):
    out.append("one update per rollout: |log r| is 0, so nothing is held")
  wide = isinstance(clip, losses.Clipped) and clip.high > WIDE_FOR_GEOMETRIC
  geometric = (losses.geometric_ratio, losses.geometric_token_ratio)
  if a.ratio in geometric and wide:
    out.append(
      f"clip_high {clip.high} is far from any geometric-mean ratio and never"
      " binds; the paper takes 4e-4"
    )
  if isinstance(clip, losses.Clipped) and clip.low >= 1 and updates > 1:
    out.append(f"clip_low {clip.low}: a ratio is never below 0: it never binds")
  if a.ratio is losses.log_policy and updates > 1 and not a.offline:
    out.append(
      f"{updates} updates per rollout without a ratio: all but the first are"
      " off policy and nothing corrects it"
    )
  if a.reference is not None and (
    a.reference.refresh_every == 1 or a.reference.decay == 0
  ):
    out.append(
      "the reference is the policy anew at every step: the KL to it is 0"
    )
  if outcome_of(a) is advantages.group_normalized and group == 2:
    out.append(
      "with two completions a group's std is all the spread there is: for 0"
      " and 1 this is twice the plain mean"
    )
  return out
