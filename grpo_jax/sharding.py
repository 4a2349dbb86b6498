"""Mesh, and the rules from logical axes to mesh axes.

Arrays name their axes by meaning ("prompts", "heads", "ffn"); this file alone
knows which mesh axis each lives on. Without a mesh everything here is the
identity, so the same code runs on one device. The mesh has three axes:

  data    replicas of the parameters, prompts split
  fsdp    parameters split, gathered where used; prompts split as well
  tensor  heads, feed-forward and vocabulary split

Mesh axes are Auto: the compiler propagates, a few constraints steer it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. An axis that is not listed is not split.
RULES: Mapping[str, tuple[str, ...]] = {
  "prompts": ("data", "fsdp"),
  "embed": ("fsdp",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "ffn": ("tensor",),
  "vocab": ("tensor",),
  "experts": ("tensor",),
}

# Logical axes that may stay whole where the mesh axis does not divide them.
MAY_REPLICATE = frozenset({"kv_heads"})


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
  """Makes the mesh; `data=-1` takes all devices that the others leave.

  Raises:
    UserError: where the product is not the number of devices.
  """
  devices = jax.device_count()
  if data == -1:
    data = max(1, devices // max(1, fsdp * tensor))
  if min(data, fsdp, tensor) < 1 or data * fsdp * tensor != devices:
    raise UserError(
      f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs"
      f" {data * fsdp * tensor} devices, and there are {devices}; set"
      " config.mesh so that the product matches (data=-1 takes the rest)"
    )
  return jax.make_mesh(
    (data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES)
  )


def one_device() -> Mesh:
  """The trivial mesh, for work that cannot be split, such as one prompt."""
  return jax.make_mesh(
    (1, 1, 1),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=jax.devices()[:1],
  )


def spec(
  axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int]
) -> PartitionSpec:
  """The partition of an array: logical axes -> PartitionSpec.

  Args:
    axes: one logical name or None for each dimension.
    shape: the array's shape.
    sizes: mesh axis -> size.

  Raises:
    UserError: where a split dimension does not divide.
  """
  parts = []
  for name, dim in zip(axes, shape):
    mesh_axes = RULES.get(name, ()) if name else ()
    ways = math.prod(sizes[a] for a in mesh_axes)
    if dim % ways and name in MAY_REPLICATE:
      mesh_axes = ()
    elif dim % ways:
      raise UserError(
        f"axis '{name}' has {dim} elements, which {ways} shards"
        f" ({' x '.join(mesh_axes)}) do not divide"
      )
    parts.append(mesh_axes or None)
  return PartitionSpec(*parts)


def shard(x: jax.Array, *axes: str | None) -> jax.Array:
  """Constrains a traced array's layout; the identity without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  assert x.ndim == len(axes), (x.shape, axes)
  return jax.lax.with_sharding_constraint(
    x, spec(axes, x.shape, dict(mesh.shape))
  )


def gather(tree: Any, axes: Any) -> Any:
  """Weights whole over fsdp and still split over tensor: what products read.

  Training leaves this to the compiler, which gathers a layer where it is used
  and drops it. A loop that reads all weights at every turn, such as decoding,
  has to start from the gathered copy: on TPU the gathers stay in the loop.

  Args:
    tree: parameters, traced.
    axes: a tree like it, leaves tuples of axis names.
  """
  return jax.tree.map(
    lambda x, names: shard(x, *(a if a != "embed" else None for a in names)),
    tree,
    axes,
  )


def ways(*axes: str) -> int:
  """Parts that logical axes are split into together; 1 without a mesh."""
  sizes = jax.sharding.get_abstract_mesh().shape
  return math.prod(sizes.get(a, 1) for name in axes for a in RULES[name])


def named(
  mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]
) -> NamedSharding:
  """The sharding of one array on a mesh."""
  return NamedSharding(mesh, spec(axes, shape, dict(mesh.shape)))


def prompts_sharding(mesh: Mesh, tree: Any) -> Any:
  """Shardings of batch arrays: the leading axis is prompts, scalars whole."""
  return jax.tree.map(
    lambda x: named(
      mesh, ("prompts", *[None] * (x.ndim - 1)) if x.ndim else (), x.shape
    ),
    tree,
  )


def state_sharding(mesh: Mesh, abstract: Any, axes: Any) -> Any:
  """Shardings of a train state or any part: a weight's, wherever it appears.

  Optimizer moments keep a parameter's path as the tail of their own, so they
  get its layout; every other leaf (counts, keys, the step) is replicated.

  Args:
    mesh: the mesh.
    abstract: a tree of ShapeDtypeStructs, such as `jax.eval_shape` gives.
    axes: nested dict with the parameters' paths, leaves tuples of axis names.
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(
    axes, is_leaf=lambda x: isinstance(x, tuple)
  )
  table = {tuple(k.key for k in path): value for path, value in flat}

  def one(path: Any, leaf: Any) -> NamedSharding:
    names = tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))
    for start in range(len(names)):
      found = table.get(names[start:])
      if found is not None and len(found) == leaf.ndim:
        return named(mesh, found, leaf.shape)
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree_util.tree_map_with_path(one, abstract)


def placed(abstract: Any, shardings: Any) -> Any:
  """Abstract arrays with their shardings, two trees of one structure."""
  return jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    abstract,
    shardings,
  )


def to_device(tree: Any, mesh: Mesh) -> Any:
  """Puts host batch arrays on the mesh, split by prompts."""
  tree = jax.tree.map(np.asarray, tree)
  return jax.device_put(tree, prompts_sharding(mesh, tree))
