"""Metrics: what is counted, and under which name. Pure; writes nothing.

`TABLE` documents every name that a run may log; docs/metrics.md is made from
it, and a test refuses a name that is not there.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.types import Array, Batch, Tokens

Metrics = dict[str, Array]

TABLE: Mapping[str, str] = {
  "phase": "'warmup' (imitation) or 'rl'",
  "loss": "the minimised value. Near 0 on fresh samples is right: the ratio"
  " is 1 and advantages sum to 0 in a group; its gradient is not 0",
  "loss/kl": "the KL term's part of the loss, coefficient included",
  "reward/mean": "mean reward over scored rows",
  "reward/std": "standard deviation of the reward over scored rows",
  "reward/group_std": "standard deviation within a group, mean over groups",
  "reward/part/*": "mean of one named part of the reward over rows it spoke"
  " on; not there where it spoke on none",
  "success": "the task's own success, mean over scored rows",
  "group/frac_zero_std": "share of groups whose rewards are equal: no signal",
  "group/frac_all_right": "share of groups in which every row succeeds",
  "group/frac_all_wrong": "share of groups in which no row succeeds",
  "group/frac_mixed": "share of groups with unequal rewards: these train",
  "reward/unscored": "rows that could not be scored; they train nothing",
  "reward/errors": "rows on which the reward function failed",
  "reward/timed_out": "rows on which it met its time limit",
  "completion/length_mean": "tokens of a completion, stop token included",
  "completion/length_max": "longest completion in tokens",
  "completion/length_min": "shortest completion in tokens",
  "completion/truncated_frac": "share of completions cut by the length limit",
  "kl/ref": "KL(policy||reference) per token, k3 estimate over real tokens;"
  " exact for the loss's policy only while samples are fresh",
  "kl/ref_k1": "the same by k1: unbiased, noisier, may be negative",
  "kl/exact": "KL(policy||reference) of whole distributions, per token",
  "kl/scale": "multiple of the KL coefficient that its controller has set",
  "value/loss": "the critic's part of the loss, coefficient included",
  "value/mean": "mean value over real tokens",
  "value/explained_variance": "1 - error of the values / variance of their"
  " targets; 1 is exact, 0 no better than a constant",
  "update/selected_frac": "share of tokens that the algorithm singled out",
  "group/accepted_frac": "share of sampled groups that dynamic sampling found"
  " useful",
  "group/surplus": "useful groups sampled beyond what a step trains on",
  "group/rounds": "rollout batches that dynamic sampling drew for the step",
  "data/epoch": "prompts drawn since RL began over the training questions",
  "data/rested_frac": "share of the training questions that the curriculum"
  " rests after this step",
  "data/pass_rate_mean": "mean over the questions asked so far of each one's"
  " own pass rate, older visits weighing less; unlike success it is not of the"
  " questions that the curriculum chose",
  "entropy": "of the sampled distribution per token, in nats; like all token"
  " means over the groups the update computed: without a KL term,"
  " micro-batches leave out those without a signal",
  "ratio/mean": "the algorithm's ratio, weighted as in the loss; 1 on fresh"
  " samples",
  "ratio/max": "its largest value",
  "ratio/clip_frac_low": "share of tokens the lower clip binds on",
  "ratio/clip_frac_high": "share of tokens the upper clip binds on",
  "sampler/logprob_gap_mean": "|scorer's - sampler's log-prob| per token",
  "sampler/logprob_gap_max": "its largest value",
  "router/balance": "load-balancing loss of the routers, mean over layers; 1"
  " is even. Reported, not trained",
  "router/max_load": "the busiest expert's share of a layer's choices, over an"
  " even share",
  "update/grad_norm": "global gradient norm before clipping",
  "update/learning_rate": "of this step",
  "update/nonfinite": "updates skipped: loss or gradient not finite",
  "update/dead": "updates skipped because no group carried a signal",
  "update/nonfinite_total": "the same since the start",
  "update/dead_total": "the same since the start",
  "tokens/trained": "completion tokens with a loss in the last update",
  "tokens/computed_frac": "token positions computed per real token in the"
  " update, prompts included: 1 is no padding",
  "tokens/sampled": "completion tokens sampled in this step",
  "tokens/total": "completion tokens sampled since the start",
  "samples/total": "completions sampled since the start",
  "eval/sampled": "success on held-out prompts at the evaluation temperature",
  "eval/sampled_stderr": "its standard error, clustered by prompt",
  "eval/greedy": "success on held-out prompts, likeliest tokens",
  "eval/greedy_stderr": "its standard error",
  "eval/pass_at_*": "where eval.samples is n > 1, at n: share of held-out"
  " prompts that one of n sampled completions answers; and its _stderr",
  "eval/maj_at_*": "at the same n: success of a majority vote among the answers"
  " of n completions; and its _stderr. Not there while none has an answer",
  "eval/part/*": "mean of one named part of the reward over the held-out"
  " prompts it spoke on, sampled; and its _stderr",
  "eval/length": "tokens of a sampled held-out completion",
  "eval/truncated_frac": "share of sampled held-out completions cut short",
  "time/step": "seconds of the step, evaluation and checkpoint apart",
  "time/sample": "seconds of sampling",
  "time/reward": "seconds of scoring on the host",
  "time/score": "seconds of reference and old-policy log-probs",
  "time/update": "seconds of all updates of the step",
  "time/eval": "seconds of evaluation",
  "time/tokens_per_second": "sampled completion tokens per second of the step",
  "memory/peak_gib": "peak memory: of the device where it tells, else of the"
  " process",
  "compile/count": "programs compiled since the process started",
  "compile/seconds": "seconds spent compiling since the process started",
}

# What may differ between a run and the same run killed and resumed.
VOLATILE = ("time/", "memory/", "compile/")


def token_sums(
  batch: Batch,
  tokens: Tokens,
  *,
  loss: Array,
  loss_kl: Array,
  ratio: Array,
  clipped: tuple[Array, Array],
) -> Metrics:
  """Sums over the trained tokens of a micro-batch; `max_*` are maxima.

  Args:
    batch: the micro-batch.
    tokens: what the loss saw of it.
    loss: [].
    loss_kl: [].
    ratio: [B, G, T], the algorithm's own.
    clipped: two flags [B, G, T], below and above.
  """
  mask = tokens.mask

  def total(x: Array) -> Array:
    return jnp.sum(jnp.where(mask, x, 0))

  gap = jnp.abs(tokens.old - tokens.sampler)
  sums = {
    "loss": loss,
    "loss_kl": loss_kl,
    "tokens": jnp.sum(mask),
    "weight": jnp.sum(batch.weights),
    "signal": jnp.sum(jnp.abs(batch.weights * batch.advantages)),
    "entropy": total(tokens.entropy),
    "ratio": jnp.sum(batch.weights * ratio),
    "max_ratio": jnp.max(jnp.where(mask, ratio, 0)),
    "clip_low": total(clipped[0]),
    "clip_high": total(clipped[1]),
    "gap": total(gap),
    "max_gap": jnp.max(jnp.where(mask, gap, 0)),
  }
  if tokens.ref is not None:
    k1 = tokens.logprobs - tokens.ref
    sums["kl_k1"] = total(k1)
    sums["kl_k3"] = total(jnp.exp(jnp.minimum(-k1, 20.0)) - 1 + k1)
  if tokens.exact_kl is not None:
    sums["kl_exact"] = total(tokens.exact_kl)
  if tokens.selected is not None:
    sums["selected"] = total(tokens.selected)
  return sums


def value_sums(batch: Batch, values: Array, loss: Array) -> Metrics:
  """Sums about a critic over a micro-batch's trained tokens.

  Args:
    batch: the micro-batch.
    values: [B, G, T], being trained.
    loss: [], the value loss.
  """
  mask, target = batch.rollout.mask, batch.value_targets

  def total(x: Array) -> Array:
    return jnp.sum(jnp.where(mask, x, 0))

  return {
    "value_loss": loss,
    "value": total(values),
    "value_error": total(jnp.square(target - values)),
    "value_target": total(target),
    "value_target_squares": total(jnp.square(target)),
  }


def combine(a: Metrics, b: Metrics) -> Metrics:
  """Joins the sums of two micro-batches."""
  return {
    k: jnp.maximum(a[k], b[k]) if k.startswith("max_") else a[k] + b[k]
    for k in a
  }


def token_means(sums: Metrics) -> Metrics:
  """Means over real tokens, under the names of `TABLE`."""
  tokens = jnp.maximum(sums["tokens"], 1)
  weight = jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
  out = {
    "loss": sums["loss"],
    "loss/kl": sums["loss_kl"],
    "entropy": sums["entropy"] / tokens,
    "ratio/mean": sums["ratio"] / weight,
    "ratio/max": sums["max_ratio"],
    "ratio/clip_frac_low": sums["clip_low"] / tokens,
    "ratio/clip_frac_high": sums["clip_high"] / tokens,
    "sampler/logprob_gap_mean": sums["gap"] / tokens,
    "sampler/logprob_gap_max": sums["max_gap"],
    "tokens/trained": sums["tokens"],
  }
  if "kl_exact" in sums:
    out["kl/exact"] = sums["kl_exact"] / tokens
  if "selected" in sums:
    out["update/selected_frac"] = sums["selected"] / tokens
  if "value_loss" in sums:
    mean = sums["value_target"] / tokens
    spread = sums["value_target_squares"] / tokens - jnp.square(mean)
    out["value/loss"] = sums["value_loss"]
    out["value/mean"] = sums["value"] / tokens
    # Targets that are all equal have no variance to explain.
    out["value/explained_variance"] = jnp.where(
      spread > 1e-8,
      1 - sums["value_error"] / tokens / jnp.maximum(spread, 1e-8),
      0.0,
    )
  if "kl_k3" in sums:
    out["kl/ref"] = sums["kl_k3"] / tokens
    out["kl/ref_k1"] = sums["kl_k1"] / tokens
  return out | router_means(sums)


def router_means(sums: Metrics) -> Metrics:
  """How evenly routers spread tokens; {} where there are none.

  The load-balancing loss of Switch Transformers (Fedus et al. 2021, eq. 4), X
  Σ_e f_e P_e with f the share of choices and P the mean probability, of each
  layer, mean over layers. A prompt's tokens count once for its group.
  """
  if "router/chosen" not in sums:
    return {}
  chosen, prob = sums["router/chosen"], sums["router/prob"]  # [L, X]
  share = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
  mean = prob / sums["router/tokens"][:, None]
  experts = chosen.shape[-1]
  return {
    "router/balance": experts * jnp.mean(jnp.sum(share * mean, axis=-1)),
    "router/max_load": experts * jnp.max(share),
  }


def mixed_groups(total: np.ndarray, scored: np.ndarray) -> np.ndarray:
  """Groups with unequal rewards, [B] bool, as `advantages.informative`."""
  low = np.where(scored, total, np.inf).min(axis=1)
  high = np.where(scored, total, -np.inf).max(axis=1)
  size = np.maximum(np.abs(low), np.abs(high))
  with np.errstate(invalid="ignore"):
    return (scored.sum(axis=1) > 1) & (high - low > 1e-6 * size)


def reward_metrics(
  total: np.ndarray,
  scored: np.ndarray,
  success: np.ndarray,
  parts: np.ndarray,
  part_names: tuple[str, ...],
  errors: int,
  timed_out: int = 0,
) -> dict[str, float]:
  """Rewards and groups of one rollout, on the host.

  Args:
    total: [B, G].
    scored: [B, G] bool.
    success: [B, G].
    parts: [B, G, C]; NaN where a part abstained.
    part_names: C names.
    errors: rows on which the reward function failed.
    timed_out: those of them that met a time limit.
  """
  rows = np.maximum(scored.sum(), 1)
  kept = np.where(scored, total, 0.0)
  mean = kept.sum() / rows
  std = np.sqrt((np.where(scored, total - mean, 0.0) ** 2).sum() / rows)
  per_group = np.maximum(scored.sum(axis=1), 1)
  group_mean = kept.sum(axis=1) / per_group
  group_std = np.sqrt(
    (np.where(scored, total - group_mean[:, None], 0.0) ** 2).sum(axis=1)
    / per_group
  )
  mixed = mixed_groups(total, scored)
  any_scored = scored.any(axis=1)
  right = np.where(scored, success >= 1, True).all(axis=1) & any_scored
  wrong = np.where(scored, success <= 0, True).all(axis=1) & any_scored
  out = {
    "reward/mean": float(mean),
    "reward/std": float(std),
    "reward/group_std": float(group_std.mean()),
    "success": float(np.where(scored, success, 0.0).sum() / rows),
    "group/frac_mixed": float(mixed.mean()),
    "group/frac_zero_std": float(1 - mixed.mean()),
    "group/frac_all_right": float(right.mean()),
    "group/frac_all_wrong": float(wrong.mean()),
    "reward/unscored": float((~scored).sum()),
    "reward/errors": float(errors),
    "reward/timed_out": float(timed_out),
  }
  for i, name in enumerate(part_names):
    spoke = scored & ~np.isnan(parts[..., i])
    if spoke.any():  # a mean of nothing is not 0
      out[f"reward/part/{name}"] = float(parts[..., i][spoke].mean())
  return out


def length_metrics(
  lengths: np.ndarray, truncated: np.ndarray
) -> dict[str, float]:
  """Completion lengths in tokens, on the host: [B, G] and [B, G] bool."""
  return {
    "completion/length_mean": float(lengths.mean()),
    "completion/length_max": float(lengths.max()),
    "completion/length_min": float(lengths.min()),
    "completion/truncated_frac": float(truncated.mean()),
    "tokens/sampled": float(lengths.sum()),
  }


def documented(name: str) -> bool:
  """Whether TABLE has the name, `*` standing for the rest of it."""
  return any(
    name == key or (key.endswith("*") and name.startswith(key[:-1]))
    for key in TABLE
  )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Fetches a dict of [] arrays to the host in one go."""
  return {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
