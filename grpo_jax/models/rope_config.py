"""Rotary positions as config.json writes them: an old form and a nested one."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.models.architecture import RopeScaling

ROPE_KEYS = frozenset(
  {"rope_theta", "rope_parameters", "rope_scaling", "rope_local_base_freq"}
)
_KINDS = ("linear", "llama3", "yarn")
# Their names of a scaling's numbers -> ours.
_NUMBERS = {
  "factor": "factor",
  "low_freq_factor": "low",
  "beta_slow": "low",
  "high_freq_factor": "high",
  "beta_fast": "high",
  "original_max_position_embeddings": "original",
  "attention_factor": "attention",
}


def ropes(c: Mapping[str, Any]) -> dict[str, Any]:
  """rope_theta, rope_scaling and window_theta of an architecture.

  Args:
    c: the parsed config.json.

  Raises:
    UserError: a kind or a number that is not known.
  """
  nested = dict(c.get("rope_parameters") or {})
  theta = float(c.get("rope_theta") or 10_000.0)
  local = float(c.get("rope_local_base_freq") or 0.0)
  if "full_attention" in nested:  # one form for each kind of layer
    window = dict(nested.pop("sliding_attention", {}))
    whole = dict(nested.pop("full_attention"))
    if nested:
      raise UserError(f"rotary parameters {sorted(nested)} are not known")
    if window.pop("rope_type", "default") != "default":
      raise UserError("rotary scaling of layers with a window is not supported")
    local = float(window.pop("rope_theta", local) or 0.0)
    if window:
      raise UserError(f"rotary parameters {sorted(window)} are not known")
    nested = whole
  theta = float(nested.pop("rope_theta", theta))
  scaling = dict(c.get("rope_scaling") or {}) or nested
  theta = float(scaling.pop("rope_theta", theta))
  kind = scaling.pop("rope_type", scaling.pop("type", "default"))
  scaling.pop("type", None)
  out = {"rope_theta": theta, "window_theta": local}
  if kind == "default":
    if scaling:
      raise UserError(f"rotary parameters {sorted(scaling)} are not known")
    return out
  if kind not in _KINDS:
    raise UserError(
      f"rotary scaling {kind!r} is not supported; {', '.join(_KINDS)} are"
    )
  unknown = scaling.keys() - _NUMBERS.keys()
  if unknown or scaling.get("factor") is None:
    raise UserError(
      f"rotary scaling {kind!r} with {dict(scaling)}: {sorted(unknown)} are not"
      " known, and factor is needed"
    )
  numbers = {_NUMBERS[k]: v for k, v in scaling.items() if v is not None}
  if kind == "yarn":
    numbers = {"low": 1.0, "high": 32.0, **numbers}
  if "original" not in numbers and c.get("max_position_embeddings"):
    numbers["original"] = c["max_position_embeddings"]
  return {**out, "rope_scaling": RopeScaling(kind, **numbers)}
