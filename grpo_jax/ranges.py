"""Ranges of every number in a configuration."""

import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.errors import UserError

# Key -> smallest value, for those that are set; fractions are checked against
# 1 as well.
_AT_LEAST = {
  "seed": 0,
  "steps": 0,
  "mesh.fsdp": 1,
  "mesh.tensor": 1,
  "data.max_prompt_tokens": 0,
  "model.layers": 1,
  "model.embed": 1,
  "model.heads": 1,
  "model.kv_heads": 1,
  "model.head_dim": 2,
  "model.ffn": 1,
  "model.logit_elements": 1,
  "lora.rank": 0,
  "lora.alpha": 0,
  "batch.prompts_per_step": 1,
  "batch.prompts_per_update": 0,
  "batch.micro_batch_prompts": 0,
  "batch.epochs": 1,
  "batch.slabs": 1,
  "batch.slab_lengths": 1,
  "reward.workers": 0,
  "sampling.group_size": 1,
  "sampling.max_tokens": 1,
  "sampling.compact": 0,
  "sampling.top_k": 0,
  "sampling.max_support": 1,
  "sampling.temperature": 0,
  "sampling.min_p": 0,
  "optimizer.learning_rate": 0,
  "optimizer.eps": 0,
  "optimizer.weight_decay": 0,
  "optimizer.clip_norm": 0,
  "optimizer.warmup_steps": 0,
  "warmup.steps": 0,
  "warmup.prompts_per_step": 1,
  "warmup.learning_rate": 0,
  "warmup.warmup_steps": 0,
  "eval.every": 0,
  "eval.prompts": 1,
  "eval.samples": 1,
  "eval.prompts_per_batch": 0,
  "eval.temperature": 0,
  "eval.top_k": 0,
  "eval.max_tokens": 0,
  "checkpoint.every": 0,
  "checkpoint.keep_last": 1,
  "log.every": 1,
}
_FRACTIONS = (
  "sampling.top_p",
  "sampling.min_p",
  "eval.top_p",
  "optimizer.b1",
  "optimizer.b2",
  "optimizer.momentum",
  "optimizer.final_fraction",
  "warmup.final_fraction",
  "algorithm.gamma",
  "algorithm.lam",
  "algorithm.critic_lam",
  "algorithm.fraction",
  "algorithm.reference_decay",
)
_ABOVE_ZERO = (
  "algorithm.tokens",
  "algorithm.alpha",
  "algorithm.positive",
  "algorithm.negative",
  "algorithm.correction_high",
  "algorithm.kl_target",
)


def check_numbers(flat: Mapping[str, Any]) -> None:
  """Refuses a number out of its range.

  Args:
    flat: dotted key -> value, as `config.flatten` gives.

  Raises:
    UserError: naming the key, its value and the bound.
  """
  for key, value in flat.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise UserError(f"{key} {value} must be finite")
  for key, value in flat.items():  # an algorithm's numbers: none is negative
    number = isinstance(value, int | float)
    if key.startswith("algorithm.") and number and value < 0:
      raise UserError(f"{key} {value} must be at least 0")
  for key, low in _AT_LEAST.items():
    if flat[key] is not None and flat[key] < low:
      raise UserError(f"{key} {flat[key]} must be at least {low}")
  for key in _ABOVE_ZERO:
    if flat[key] is not None and flat[key] <= 0:
      raise UserError(f"{key} {flat[key]} must be above 0")
  for key in _FRACTIONS:
    if flat[key] is not None and not 0 <= flat[key] <= 1:
      raise UserError(f"{key} {flat[key]} must be between 0 and 1")
  for key in ("optimizer.b1", "optimizer.b2"):
    if flat.get(key) == 1:
      raise UserError(f"{key} 1 never forgets its start; set it below 1")
  for key in ("model.rope_theta", "model.norm_eps"):
    if flat[key] <= 0:
      raise UserError(f"{key} {flat[key]} must be above 0")
  for key in ("sampling.temperature", "eval.temperature"):
    if 0 < flat[key] < 1e-3:
      raise UserError(f"{key} {flat[key]} overflows logits; 0.001 is least")
  for key in ("sampling.top_p", "eval.top_p"):
    if flat[key] == 0:
      raise UserError(f"{key} 0 keeps nothing; 1 keeps all")
  if flat["sampling.temperature"] == 0:
    raise UserError(
      "sampling.temperature 0 draws G equal completions, which train nothing;"
      " set it above 0"
    )
  if flat["reward.time_limit"] <= 0:
    raise UserError(
      f"reward.time_limit {flat['reward.time_limit']} must be above 0 seconds"
    )
  if flat["seed"] >= 2**32:
    raise UserError(f"seed {flat['seed']} must be below {2**32}")
