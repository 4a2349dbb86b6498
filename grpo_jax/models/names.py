"""The map between our parameters and a foreign checkpoint's tensors.

An entry says which tensor a parameter is and in which order its axes lie
there; shapes follow from the weight table, so import and export are one table
read in two directions, and neither can disagree with the other.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.models.architecture import Architecture
from grpo_jax.models.weight_table import Weight, weights
from grpo_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A foreign tensor: its name, `{}` for the layer, and its order of axes.

  A second `{}` is the expert.

  theirs = ours.transpose(order), the leading or trailing axes then joined
  until it has as many as theirs.
  """

  name: str
  order: tuple[int, ...]
  flat: bool = False  # all axes joined into one
  add: float = 0.0  # ours = theirs + add

  @property
  def stacked(self) -> int:
    """Leading axes of ours over which theirs are one tensor each."""
    return self.name.count("{}")


Names = Mapping[str, Tensor]  # our path, joined by '/' -> tensor


class Source(Protocol):
  """Tensors of a checkpoint, read one by one."""

  where: str  # for messages

  def names(self) -> set[str]:
    """Every tensor there is."""

  def shape(self, name: str) -> tuple[int, ...]:
    """Its shape, without reading it."""

  def read(self, name: str) -> np.ndarray:
    """Its values in float32."""


def table(arch: Architecture) -> dict[str, Weight]:
  """The weight table, flat: path joined by '/' -> weight."""
  flat, _ = jax.tree_util.tree_flatten_with_path(
    weights(arch), is_leaf=lambda x: isinstance(x, Weight)
  )
  return {"/".join(k.key for k in path): weight for path, weight in flat}


def pieces(
  weight: Weight, tensor: Tensor
) -> Iterator[tuple[tuple[int, ...], str]]:
  """(index in ours, their name) of each tensor behind one of our parameters."""
  for index in np.ndindex(weight.shape[: tensor.stacked]):
    yield index, tensor.name.format(*index)


def their_shape(weight: Weight, tensor: Tensor) -> tuple[int, ...]:
  """Shape of one foreign tensor: a projection's head axes are joined."""
  ours = weight.shape[tensor.stacked :]
  moved = [ours[axis] for axis in tensor.order]
  if tensor.flat:
    return (math.prod(moved),)
  if len(moved) < 3:
    return tuple(moved)
  # q, k, v: [heads, head_dim, embed]; o: [embed, heads, head_dim].
  if tensor.order[-1] == 0:
    return (math.prod(moved[:2]), moved[2])
  return (moved[0], math.prod(moved[1:]))


def to_ours(x: np.ndarray, weight: Weight, tensor: Tensor) -> np.ndarray:
  """One foreign tensor in our layout (of one layer, one expert)."""
  ours = weight.shape[tensor.stacked :]
  if not np.isfinite(x).all():
    raise UserError(f"tensor {tensor.name!r} has values that are not finite")
  x = x.reshape([ours[axis] for axis in tensor.order])
  x = x.transpose(np.argsort(tensor.order))
  return np.ascontiguousarray(x + np.float32(tensor.add) if tensor.add else x)


def to_theirs(x: np.ndarray, weight: Weight, tensor: Tensor) -> np.ndarray:
  """One of our parameters (of one layer, one expert) in the foreign layout."""
  x = x.transpose(tensor.order).reshape(their_shape(weight, tensor))
  return np.ascontiguousarray(x - np.float32(tensor.add) if tensor.add else x)


def check(
  source: Source, arch: Architecture, names: Names, allowed: frozenset[str]
) -> None:
  """Refuses a tensor that is unread, a parameter unfilled, a wrong shape.

  Args:
    source: the checkpoint.
    arch: what `config.json` said.
    names: the family's table.
    allowed: tensors that may be there and are not read.

  Raises:
    UserError: naming the tensor and both shapes.
  """
  found, used = source.names(), set()
  for path, weight in table(arch).items():
    tensor = names[path]
    for _, name in pieces(weight, tensor):
      used.add(name)
      if name not in found:
        raise UserError(
          f"{source.where} lacks the tensor {name!r}, which fills {path}"
        )
      want, got = their_shape(weight, tensor), source.shape(name)
      if got != want:
        raise UserError(
          f"{source.where}: tensor {name!r} has shape {got}, config.json"
          f" implies {want}"
        )
  unread = sorted(found - used - allowed)
  if unread:
    raise UserError(
      f"{source.where} has {len(unread)} tensors that nothing reads, such as"
      f" {unread[0]!r}: this is another architecture"
    )


def load(
  source: Source,
  arch: Architecture,
  names: Names,
  shardings: Params,
  *,
  allowed: frozenset[str] = frozenset(),
) -> Params:
  """Reads tensors one by one straight into sharded float32 arrays.

  The host holds one of our parameters' own shards at a time beside one foreign
  tensor.

  Args:
    source: the checkpoint.
    arch: its architecture.
    names: the family's table.
    shardings: a tree like the parameters'.
    allowed: tensors that may be there unread.

  Raises:
    UserError: as `check`.
  """
  check(source, arch, names, allowed)
  flat, _ = jax.tree_util.tree_flatten_with_path(shardings)
  where = {"/".join(k.key for k in path): s for path, s in flat}
  out: dict[str, Any] = {}
  for path, weight in table(arch).items():
    read = _reader(source, weight, names[path])
    array = jax.make_array_from_callback(weight.shape, where[path], read)
    group = out
    *parents, leaf = path.split("/")
    for name in parents:
      group = group.setdefault(name, {})
    group[leaf] = array
  return out


def _reader(
  source: Source, weight: Weight, tensor: Tensor
) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """Reads any slice of one of our parameters."""
  lead = tensor.stacked
  if not lead:
    whole: list[np.ndarray] = []

    def read(index: tuple[slice, ...]) -> np.ndarray:
      if not whole:  # several devices ask in turn
        whole.append(to_ours(source.read(tensor.name), weight, tensor))
      return whole[0][index]

    return read

  def read_pieces(index: tuple[slice, ...]) -> np.ndarray:
    ranges = [range(*i.indices(n)) for i, n in zip(index, weight.shape)]
    out = np.empty([len(r) for r in ranges], np.float32)
    for row in np.ndindex(out.shape[:lead]):
      which = [r[i] for r, i in zip(ranges, row)]
      x = source.read(tensor.name.format(*which))
      out[row] = to_ours(x, weight, tensor)[index[lead:]]
    return out

  return read_pieces


def tensors(
  params: Params, arch: Architecture, names: Names
) -> Iterator[tuple[str, np.ndarray]]:
  """Our parameters as foreign tensors, one by one, in float32."""
  flat, _ = jax.tree_util.tree_flatten_with_path(params)
  arrays = {"/".join(k.key for k in path): x for path, x in flat}
  for path, weight in table(arch).items():
    tensor = names[path]
    for index, name in pieces(weight, tensor):
      x = arrays[path][index] if index else arrays[path]
      yield name, to_theirs(np.asarray(x, np.float32), weight, tensor)
