"""The weight table: every parameter of a decoder, declared once.

Shapes, layout over a mesh, first values, import, export and the places of
adapters derive from it.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models.architecture import Architecture, Lora, Model
from grpo_jax.types import Array, Params, merge


@dataclasses.dataclass(frozen=True)
class Weight:
  """One weight: everything else about it derives from this.

  Attributes:
    shape: its axes, layers first where it is stacked over them.
    axes: their logical names, see sharding.RULES.
    std: first values are normal(0, std); None: ones.
    inner: axes after the first that a product contracts; 0: no projection.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  std: float | None
  inner: int = 0


def weights(arch: Architecture) -> dict[str, Any]:
  """The weight table: a nested dict whose paths are the parameters' own.

  Layers are stacked on a leading axis. Projections that write into the
  residual stream start smaller by sqrt(2 L), as in GPT-2.
  """
  d, fan_in = arch.embed, 1 / math.sqrt(arch.embed)
  table = {
    "embed": Weight((arch.vocab, d), ("vocab", "embed"), fan_in),
    "layers": {
      **_norms(arch),
      "attn": _attention(arch),
      "mlp": _experts(arch) if arch.experts else _feed_forward(arch),
    },
    "final_norm": Weight((d,), (None,), None),
  }
  if not arch.tied:
    table["head"] = Weight((arch.vocab, d), ("vocab", "embed"), fan_in)
  return table


def _stack(
  arch: Architecture, shape: tuple, axes: tuple, std: float | None, inner=0
) -> Weight:
  return Weight((arch.layers, *shape), (None, *axes), std, inner)


def _norms(arch: Architecture) -> dict[str, Weight]:
  names = []
  if arch.norms in ("pre", "both"):
    names += ["attn_norm", "mlp_norm"]
  if arch.norms in ("post", "both"):
    names += ["attn_post_norm", "mlp_post_norm"]
  return {name: _stack(arch, (arch.embed,), (None,), None) for name in names}


def _attention(arch: Architecture) -> dict[str, Weight]:
  d, h, k, e = arch.embed, arch.heads, arch.kv_heads, arch.head_dim
  fan_in, residual = 1 / math.sqrt(d), 1 / math.sqrt(2 * arch.layers)
  sizes = {"q": (h, "heads"), "k": (k, "kv_heads"), "v": (k, "kv_heads")}
  table = {
    name: _stack(arch, (d, n, e), ("embed", axis, None), fan_in, 1)
    for name, (n, axis) in sizes.items()
  }
  table["o"] = _stack(
    arch,
    (h, e, d),
    ("heads", None, "embed"),
    residual / math.sqrt(h * e),
    2,
  )
  if arch.qkv_bias:
    for name, (n, axis) in sizes.items():
      table[f"{name}_bias"] = _stack(arch, (n, e), (axis, None), 0.0)
  for name in ("q", "k"):
    if arch.qk_norm == "head":
      table[f"{name}_norm"] = _stack(arch, (e,), (None,), None)
    elif arch.qk_norm == "width":
      shape = (sizes[name][0], e)
      table[f"{name}_norm"] = _stack(arch, shape, ("heads", None), None)
  return table


def _feed_forward(arch: Architecture) -> dict[str, Weight]:
  d, f = arch.embed, arch.ffn
  fan_in, residual = 1 / math.sqrt(d), 1 / math.sqrt(2 * arch.layers)
  return {
    "gate": _stack(arch, (d, f), ("embed", "ffn"), fan_in, 1),
    "up": _stack(arch, (d, f), ("embed", "ffn"), fan_in, 1),
    "down": _stack(arch, (f, d), ("ffn", "embed"), residual / math.sqrt(f), 1),
  }


def _experts(arch: Architecture) -> dict[str, Weight]:
  x, d, f = arch.experts, arch.embed, arch.ffn
  fan_in, residual = 1 / math.sqrt(d), 1 / math.sqrt(2 * arch.layers)
  wide = ("experts", "embed", None)
  return {
    "router": _stack(arch, (d, x), ("embed", None), fan_in, 1),
    "gate": _stack(arch, (x, d, f), wide, fan_in),
    "up": _stack(arch, (x, d, f), wide, fan_in),
    "down": _stack(
      arch, (x, f, d), ("experts", None, "embed"), residual / math.sqrt(f)
    ),
  }


def adapters(arch: Architecture, lora: Lora) -> dict[str, Any]:
  """The table of LoRA's factors, beside the weights that they adapt.

  W [*in, *out] gets `a` [*in, rank] and `b` [rank, *out] under `<name>_lora`.
  `a` has the variance of PEFT's first values, 1/(3 in); `b` is 0, so that an
  adapted model begins as the model itself.
  """
  out: dict[str, Any] = {"layers": {}}
  for path in lora.targets:
    group, name = path.split("/")
    w = weights(arch)["layers"][group][name]
    split, rank = 1 + w.inner, lora.rank
    inner = w.shape[1:split]
    a = Weight(
      (*w.shape[:split], rank),
      (*w.axes[:split], None),
      1 / math.sqrt(3 * math.prod(inner)),
    )
    b = Weight(
      (w.shape[0], rank, *w.shape[split:]), (None, None, *w.axes[split:]), 0.0
    )
    out["layers"].setdefault(group, {})[f"{name}_lora"] = {"a": a, "b": b}
  return out


def adaptable(arch: Architecture) -> tuple[str, ...]:
  """The projections that adapters may be put on: 'attn/q', 'mlp/up', …"""
  layers = weights(arch)["layers"]
  return tuple(
    f"{group}/{name}"
    for group, table in layers.items()
    if isinstance(table, dict)
    for name, w in table.items()
    if w.inner and name != "router"
  )


def _map(fn: Any, table: Any) -> Any:
  return jax.tree.map(fn, table, is_leaf=lambda x: isinstance(x, Weight))


def _count(table: Any) -> int:
  return sum(jax.tree.leaves(_map(lambda w: math.prod(w.shape), table)))


def axes(arch: Architecture, lora: Lora | None = None) -> dict[str, Any]:
  """Logical axes of every parameter, adapters too, a tree like theirs."""
  table = weights(arch)
  if lora is not None:
    table = merge(table, adapters(arch, lora))
  return _map(lambda w: w.axes, table)


def parameter_count(arch: Architecture) -> int:
  """Number of parameters, adapters apart; a tied head counts once."""
  return _count(weights(arch))


def init(key: Array, arch: Architecture) -> Params:
  """Draws a decoder's float32 parameters."""
  return draw(key, weights(arch))


def adapter_count(arch: Architecture, lora: Lora) -> int:
  """Number of parameters of all adapters."""
  return _count(adapters(arch, lora))


def draw(key: Array, table: dict[str, Any]) -> Params:
  """Draws the float32 parameters of a table, a key for each place in it."""
  flat, treedef = jax.tree_util.tree_flatten(
    table, is_leaf=lambda x: isinstance(x, Weight)
  )
  keys = jax.random.split(key, len(flat))
  leaves = [
    jnp.ones(w.shape, jnp.float32)
    if w.std is None
    else jax.random.normal(k, w.shape, jnp.float32) * w.std
    for k, w in zip(keys, flat)
  ]
  return jax.tree_util.tree_unflatten(treedef, leaves)


def cast(params: Params, model: Model) -> Params:
  """The copy that matrix products read; norms and routers stay float32."""

  def one(path: Any, x: Array) -> Array:
    exact = path[-1].key.endswith(("norm", "router"))
    return x if exact else x.astype(model.compute_dtype)

  return jax.tree_util.tree_map_with_path(one, params)
