"""Adapters of low rank on a frozen network (LoRA, Hu et al. 2021).

The factors lie beside the weights that they adapt, as `<name>_lora`. A tree
without them is the network with its adapters off, so a reference policy needs
no second copy of the weights.
"""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models import weight_table
from grpo_jax.models.architecture import Model
from grpo_jax.models.projection import product, project
from grpo_jax.models.weight_table import cast
from grpo_jax.types import Array, Params, merge

SUFFIX = "_lora"


def linear(
  w: Params, name: str, x: Array, model: Model, axes: int = 1
) -> Array:
  """x W, and where W has an adapter + alpha/rank (x A) B.

  The factors are multiplied with x, never with each other: added to W in
  bfloat16, a small B A would be rounded away.

  Args:
    w: the group of weights that `name` is in.
    name: of the projection.
    x: [..., *inner].
    model: its `lora` has the scale. With it W is frozen, and no gradient of W
      is computed.
    axes: how many axes are inner.
  """
  if model.lora is None:
    return project(x, w[name], axes)
  y = product(x, w[name], axes)
  factors = w.get(name + SUFFIX)
  if factors is None:
    return y
  low = project(x, factors["a"], axes)
  return y + model.lora.scale * project(low, factors["b"])


def adapt(params: Params, key: Array, model: Model) -> Params:
  """Parameters with fresh adapters, the rest in the compute dtype.

  Frozen weights are read in that dtype alone, so nothing is lost by keeping
  them in it. Without adapters: params as they are.
  """
  if model.lora is None:
    return params
  table = weight_table.adapters(model.arch, model.lora)
  return merge(cast(params, model), weight_table.draw(key, table))


def split(params: Params) -> tuple[Params, Params]:
  """The adapters, and all else, of a tree; without adapters: all, {}."""
  found = _keep(params, inside=True)
  return (found, _keep(params, inside=False)) if found else (params, {})


def _keep(tree: Any, inside: bool) -> Any:
  out = {}
  for name, value in tree.items():
    if name.endswith(SUFFIX):
      if inside:
        out[name] = value
    elif isinstance(value, dict):
      if kept := _keep(value, inside):
        out[name] = kept
    elif not inside:
      out[name] = value
  return out


def merged(params: Params, model: Model) -> Params:
  """W + alpha/rank A B in float32, adapters gone: what an export holds."""
  factors, base = split(params)
  if not base:
    return params
  base = jax.tree.map(lambda x: x.astype(jnp.float32), base)
  layers = {}
  for path in model.lora.targets:
    group, name = path.split("/")
    w = base["layers"][group][name]
    pair = factors["layers"][group][name + SUFFIX]
    # Stacked over layers: one product for each.
    delta = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(pair["a"], pair["b"])
    layers.setdefault(group, {})[name] = w + model.lora.scale * delta
  return merge(base, {"layers": layers})
