"""What a GGUF file holds: metadata, and tensors read one by one. No JAX.

The `gguf` package knows how blocks of weights are packed, and unpacks them.
Its reader makes an array object of every element of a list, 13 s and 0.7 GB
for a vocabulary of 262,144; one pass over the header takes half a second.
The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import math
import mmap
import struct
from typing import Any

import numpy as np

from grpo_jax.errors import UserError

_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
_STRING, _ARRAY = 8, 9  # the other types of values
_CONTROL = 3  # type of a token
# What reading any bytes as a header can raise.
_BROKEN = (
  OSError,
  ValueError,
  KeyError,
  TypeError,
  ArithmeticError,
  struct.error,
)
_ENDS = ("eos", "eot", "eom")
# llama.cpp's converter of Gemma does not write which token ends a turn.
_TURN_ENDS = ("<end_of_turn>",)


@dataclasses.dataclass(frozen=True)
class Stored:
  """Where a tensor lies: shape, slowest axis first; packing; first byte."""

  shape: tuple[int, ...]
  kind: Any  # gguf.GGMLQuantizationType
  start: int
  bytes: int


class File:
  """A GGUF file whose header was read.

  Attributes:
    where: its path.
    fields: its metadata; a list is a list, a number a Python number.
    tensors: by name.
  """

  def __init__(self, path: str):
    """Reads the header, no weights.

    Raises:
      UserError: it cannot be read, is truncated, or is one of several parts.
    """
    try:
      import gguf
    except ImportError as error:
      raise UserError(
        "a GGUF file needs the gguf package: pip install -e '.[hf]'"
      ) from error
    self._gguf = gguf
    self.where = path
    try:
      with open(path, "rb") as file:
        self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
      self.fields, self.tensors = self._header()
    except _BROKEN as error:
      raise UserError(f"{path} cannot be read as GGUF: {error}") from error
    if self.fields.get("split.count", 1) != 1:
      raise UserError(
        f"{path} is one of {self.fields['split.count']} parts; join them with"
        " llama.cpp's gguf-split"
      )

  def _header(self) -> tuple[dict[str, Any], dict[str, Stored]]:
    at = _Cursor(self._data)
    if self._data[:4] != b"GGUF":
      raise ValueError("it does not begin with 'GGUF'")
    at.place = 4
    version = at.number("I")
    if version not in (2, 3):
      raise ValueError(f"it has version {version}; 2 and 3 are known")
    tensors, keys = at.number("Q"), at.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(keys):
      key = at.text()
      if key in fields:
        raise ValueError(f"it has the key {key!r} twice")
      fields[key] = at.value(at.number("I"))
    found: dict[str, Stored] = {}
    for _ in range(tensors):
      name = at.text()
      if name in found:
        raise ValueError(f"it has the tensor {name!r} twice")
      shape = [at.number("Q") for _ in range(at.number("I"))]
      found[name] = self._stored(shape, at.number("I"), at.number("Q"))
    unit = fields.get("general.alignment", 32)
    begin = -(-at.place // unit) * unit
    for name, tensor in found.items():
      start = begin + tensor.start
      if start + tensor.bytes > len(self._data):
        raise ValueError(f"it ends before the tensor {name!r} does")
      found[name] = dataclasses.replace(tensor, start=start)
    return fields, found

  def _stored(self, shape: list[int], kind: int, start: int) -> Stored:
    packing = self._gguf.GGMLQuantizationType(kind)
    values, size = self._gguf.GGML_QUANT_SIZES[packing]
    if not shape or 0 in shape or shape[0] % values:
      raise ValueError(f"{shape} values are no blocks of {packing.name}")
    size *= math.prod(shape) // values
    return Stored(tuple(reversed(shape)), packing, start, size)

  def read(self, name: str) -> np.ndarray:
    """A tensor's values in float32.

    Raises:
      UserError: its packing cannot be undone.
    """
    tensor = self.tensors[name]
    raw = np.frombuffer(self._data, np.uint8, tensor.bytes, tensor.start)
    raw = raw.reshape(*tensor.shape[:-1], -1)  # it is unpacked by rows
    try:
      x = self._gguf.quants.dequantize(raw, tensor.kind)
    except NotImplementedError as error:
      raise UserError(f"{self.where}: tensor {name!r}: {error}") from error
    return np.asarray(x, np.float32).reshape(tensor.shape)

  def stops(self) -> list[int]:
    """Ids that end a text: of the text, of a turn, of a message."""
    fields = self.fields
    ids = [fields.get(f"tokenizer.ggml.{x}_token_id") for x in _ENDS]
    tokens = fields.get("tokenizer.ggml.tokens", ())
    kinds = fields.get("tokenizer.ggml.token_type", ())
    named = (i for i, kind in enumerate(kinds) if kind == _CONTROL)
    ids += [i for i in named if tokens[i] in _TURN_ENDS]
    return list(dict.fromkeys(i for i in ids if i is not None))


class _Cursor:
  """Reads values in turn."""

  def __init__(self, data: mmap.mmap):
    self._data = data
    self.place = 0

  def number(self, code: str) -> Any:
    return self._numbers(code, 1)[0]

  def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
    form = f"<{count}{code}"
    out = struct.unpack_from(form, self._data, self.place)
    self.place += struct.calcsize(form)
    return out

  def text(self) -> str:
    size = self.number("Q")
    out = self._data[self.place : self.place + size]
    if len(out) < size:
      raise ValueError("it ends early")
    self.place += size
    return out.decode()

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.text()
    if kind != _ARRAY:
      return self.number(_NUMBERS[kind])
    inner, count = self.number("I"), self.number("Q")
    if inner == _STRING:
      return [self.text() for _ in range(count)]
    return list(self._numbers(_NUMBERS[inner], count))
