"""What can be put around any row: the keys that every algorithm has.

`config.algorithm.KEY` goes to the row's constructor if it has that argument,
and here if not. An unset key leaves the row as its paper has it.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from grpo_jax import corrections, kl, losses
from grpo_jax.algorithm import (
  Algorithm,
  DynamicSampling,
  EntropyBonus,
  SoftOverlong,
  complete_rows,
)
from grpo_jax.errors import UserError
from grpo_jax.named import suggest


def adjust(
  row: Algorithm,
  *,
  kl_place: str | None = None,
  kl_beta: float | None = None,
  kl_estimator: str | None = None,
  kl_sequence: bool | None = None,
  kl_ratio_weighted: bool | None = None,
  kl_target: float | None = None,
  reference_every: int | None = None,
  reference_decay: float | None = None,
  entropy: float | None = None,
  correction: str | None = None,
  correction_level: str | None = None,
  correction_low: float | None = None,
  correction_high: float | None = None,
  dual_clip: float | None = None,
  overlong: str | None = None,
  overlong_cache: int | None = None,
  dynamic_rounds: int | None = None,
  max_tokens: int = 0,
) -> Algorithm:
  """A row with other surroundings.

  Args:
    row: the algorithm.
    kl_place: none, loss or reward.
    kl_beta: coefficient of the KL.
    kl_estimator: k1, k2, k3 or exact (the whole vocabulary; in the loss).
    kl_sequence: estimate from the whole sequence's log-ratio (in the loss).
    kl_ratio_weighted: multiply by the row's ratio (in the loss).
    kl_target: nats per token; the coefficient is doubled over 1.5 times it and
      halved under a 1.5th.
    reference_every: steps after which the reference becomes the policy.
    reference_decay: of the reference as an exponential average.
    entropy: coefficient of an entropy bonus.
    correction: sampler to trainer: none, truncated (TIS), masked (MIS) or
      banded (IcePop); their ends are `correction_low` and `correction_high`.
    correction_level: token, sequence or geometric.
    correction_low: of the band; 0.5 as in IcePop.
    correction_high: cap, or end of the band: 2 for truncated and masked, 5 for
      banded.
    dual_clip: for negative advantages, a bound on the ratio's effect.
    overlong: none, mask (truncated rows train nothing) or soft (DAPO's
      penalty over the last `overlong_cache` tokens before the limit).
    overlong_cache: tokens.
    dynamic_rounds: rollout batches to fill a step with useful groups; 0 none.
    max_tokens: the run's limit of a completion, for `overlong`.

  Raises:
    UserError: a value that is none of those named, or has nothing to act on.
  """
  row = _with_kl(
    row,
    kl_place,
    kl_beta,
    kl_estimator,
    sequence=kl_sequence,
    ratio_weighted=kl_ratio_weighted,
  )
  changes: dict[str, Any] = {}
  if kl_target:
    _needs(row.kl or row.kl_in_reward, "kl_target", "a KL to steer")
    changes["adaptive"] = kl.Adaptive(kl_target)
  if reference_every is not None or reference_decay is not None:
    _needs(row.reference, "reference_every and reference_decay", "a reference")
    given = {"refresh_every": reference_every, "decay": reference_decay}
    given = {k: v for k, v in given.items() if v is not None}
    changes["reference"] = dataclasses.replace(row.reference, **given)
  if entropy:
    changes["bonus"] = EntropyBonus(entropy)
  if correction is not None:
    changes["correction"] = _correction(
      correction, correction_level, correction_low, correction_high
    )
  if correction in (None, "none") and (
    correction_level or correction_low or correction_high
  ):
    raise UserError("algorithm.correction_* need algorithm.correction")
  if dual_clip:
    clipped = isinstance(row.surrogate, losses.Clipped)
    _needs(clipped, "dual_clip", "PPO's clip")
    changes["surrogate"] = dataclasses.replace(row.surrogate, dual=dual_clip)
  changes |= _overlong(overlong, overlong_cache, max_tokens)
  if dynamic_rounds is not None:
    rounds = DynamicSampling(dynamic_rounds) if dynamic_rounds else None
    changes["resample"] = rounds
  return dataclasses.replace(row, **changes)


def _with_kl(
  row: Algorithm,
  place: str | None,
  beta: float | None,
  estimator: str | None,
  **how: bool | None,
) -> Algorithm:
  how = {k: v for k, v in how.items() if v is not None}
  if place is None and beta is None and estimator is None and not how:
    return row
  now = row.kl or row.kl_in_reward
  if place is None:
    place = "reward" if row.kl_in_reward is not None else "loss"
  _one_of("kl_place", place, ("none", "loss", "reward"))
  if estimator is not None:
    _one_of("kl_estimator", estimator, ("exact", *kl.ESTIMATORS))
  if place == "none" or beta == 0:
    needs = row.offline
    return dataclasses.replace(
      row,
      kl=None,
      kl_in_reward=None,
      reference=row.reference if needs else None,
    )
  if beta is None:
    _needs(now, "kl_place", "algorithm.kl_beta, its coefficient")
    beta = now.coefficient
  reference = row.reference or kl.Reference()
  if place == "reward":
    _needs(estimator != "exact" and not how, "kl_place=reward", "k1, k2 or k3")
    chosen = kl.ESTIMATORS[estimator or "k1"]
    term = kl.KLInReward(chosen, beta)
    return dataclasses.replace(
      row, kl=None, kl_in_reward=term, reference=reference
    )
  settings = {"estimator": kl.k3}
  if row.kl is not None:
    settings = {
      k: getattr(row.kl, k) for k in ("estimator", "sequence", "ratio_weighted")
    }
  if estimator is not None:
    settings["estimator"] = kl.ESTIMATORS.get(estimator)  # exact: None
  term = kl.KL(coefficient=beta, **(settings | how))
  return dataclasses.replace(
    row, kl=term, kl_in_reward=None, reference=reference
  )


def _correction(
  name: str, level: str | None, low: float | None, high: float | None
) -> Any:
  _one_of("correction", name, ("none", "truncated", "masked", "banded"))
  level = level or "token"
  _one_of("correction_level", level, corrections.LEVELS)
  if name == "truncated":
    return corrections.Truncated(high or 2.0, level)
  if name == "masked":
    return corrections.Banded(0.0, high or 2.0, level)
  if name == "banded":
    return corrections.Banded(0.5 if low is None else low, high or 5.0, level)
  return Algorithm.__dataclass_fields__["correction"].default


def _overlong(how: str | None, cache: int | None, limit: int) -> dict[str, Any]:
  if cache is not None and how != "soft":
    raise UserError("algorithm.overlong_cache needs algorithm.overlong=soft")
  if how is None:
    return {}
  _one_of("overlong", how, ("none", "mask", "soft"))
  if how == "mask":
    return {"keep": complete_rows}
  if how == "soft":
    if not cache or not 0 < cache <= limit:
      raise UserError(
        f"algorithm.overlong_cache {cache} must be between 1 and"
        f" sampling.max_tokens {limit}"
      )
    return {"length_penalty": SoftOverlong(limit, cache)}
  fields = Algorithm.__dataclass_fields__
  return {k: fields[k].default for k in ("keep", "length_penalty")}


def _needs(there: Any, key: str, what: str) -> None:
  if not there:
    raise UserError(f"algorithm.{key} needs {what}")


def _one_of(key: str, value: str, choices: Any) -> None:
  if value not in choices:
    raise UserError(
      f"algorithm.{key} {value!r}{suggest(value, choices)} must be one of"
      f" {', '.join(choices)}"
    )


KEYS = tuple(
  name
  for name, p in inspect.signature(adjust).parameters.items()
  if p.kind is p.KEYWORD_ONLY and name != "max_tokens"
)


def split(
  group: Mapping[str, Any], own: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The constructor's keys of a group, and those for `adjust`; unset left out.

  Args:
    group: `config.algorithm`.
    own: arguments of the row's constructor.
  """
  given = {k: v for k, v in group.items() if v is not None}
  for mine, other in (
    ("beta", "kl_beta"),
    ("refresh_every", "reference_every"),
  ):
    if mine in given and other in given and mine in own:
      raise UserError(
        f"algorithm.{mine} and algorithm.{other} are the same; give one"
      )
  around = {k: v for k, v in given.items() if k in KEYS and k not in own}
  return {k: v for k, v in given.items() if k not in around}, around
