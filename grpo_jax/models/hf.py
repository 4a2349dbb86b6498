"""Hugging Face checkpoints: directories of safetensors, in and out."""

import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.models import families, hf_names, names, remote
from grpo_jax.models.architecture import Architecture
from grpo_jax.types import Params

# Buffers that old checkpoints stored beside their weights.
DERIVED = ("rotary_emb.inv_freq",)

SHARD_BYTES = 4 * 2**30  # of an export's largest file


class Safetensors:
  """Tensors of a directory's safetensors files, read when asked for."""

  def __init__(self, directory: str, file: str = ""):
    """Opens the files, or the one file named.

    Raises:
      UserError: no weights, a missing shard, or a file that is truncated.
    """
    needs_safetensors()
    import safetensors

    self.where = directory
    self._files: dict[str, Any] = {}
    where = pathlib.Path(directory).expanduser()
    for path in [where / file] if file else _weight_files(where):
      try:
        handle = safetensors.safe_open(path, framework="np")
      except Exception as error:  # safetensors has its own error type
        raise UserError(f"{path} cannot be read: {error}") from error
      for name in handle.keys():  # noqa: SIM118, it is no dict
        if name in self._files:
          raise UserError(f"{directory} has the tensor {name!r} twice")
        self._files[name] = handle

  def names(self) -> set[str]:
    """Every tensor there is, derived buffers apart."""
    return {n for n in self._files if not n.endswith(DERIVED)}

  def shape(self, name: str) -> tuple[int, ...]:
    """Its shape, without reading it."""
    return tuple(self._files[name].get_slice(name).get_shape())

  def read(self, name: str) -> np.ndarray:
    """Its values in float32."""
    dtype = self._files[name].get_slice(name).get_dtype()
    if dtype not in ("F32", "F16", "BF16", "F64"):
      raise UserError(
        f"{self.where}: tensor {name!r} is {dtype}, not a floating-point type;"
        " quantised weights are not supported"
      )
    return np.asarray(self._files[name].get_tensor(name), np.float32)


def needs_safetensors() -> None:
  """Says which extra to install where the package is missing."""
  if importlib.util.find_spec("safetensors") is None:
    raise UserError(
      "weights of other formats need safetensors: pip install -e '.[hf]'"
    )


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
  """The files a directory's index names, or its single file."""
  index = directory / "model.safetensors.index.json"
  if index.exists():
    shards = sorted(set(read_json(index)["weight_map"].values()))
    paths = [directory / shard for shard in shards]
  else:
    paths = sorted(directory.glob("*.safetensors"))
  missing = [path.name for path in paths if not path.exists()]
  if missing:
    raise UserError(
      f"{directory} lacks {len(missing)} of {len(paths)} weight files, such as"
      f" {missing[0]}"
    )
  if not paths:
    raise UserError(
      f"{directory} has no safetensors file; convert the model first"
    )
  return paths


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON file, or a UserError that names it."""
  try:
    return json.loads(path.read_text())
  except FileNotFoundError as error:
    raise UserError(f"{path} is missing") from error
  except (OSError, ValueError) as error:
    raise UserError(f"{path} cannot be read: {error}") from error


# What a model needs of a directory: no other framework's weights.
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def locate(path: str) -> str:
  """A local directory or file of a model: itself, or a copy of a remote one.

  Args:
    path: a directory, a GGUF file, a URL of an object store (gs://…), or a hub
      id with an optional @revision.

  Raises:
    UserError: there is no such model, it is gated, or there is no network.
  """
  if "://" in path:
    return remote.copy(path, (*FILES, "*.gguf"))
  local = os.path.expanduser(path)
  if os.path.exists(local):
    return local
  if path.startswith(("/", ".", "~")):
    raise UserError(f"model {path} does not exist")
  if path.count("/") != 1:
    raise UserError(f"model {path!r} is neither a local path nor a hub id")
  return remote.snapshot(path, FILES)


def export(
  params: Params,
  arch: Architecture,
  config: Mapping[str, Any],
  directory: str,
) -> None:
  """Writes weights and config.json of a directory that transformers loads.

  Args:
    params: float32 parameters.
    arch: their architecture.
    config: the config.json of the import, whose other attributes are kept.
    directory: made if missing; refused if it holds a model.

  Raises:
    UserError: the directory holds a model already.
  """
  needs_safetensors()
  from safetensors.numpy import save_file

  out = pathlib.Path(directory)
  if (out / "config.json").exists():
    raise UserError(f"{directory} holds a model already; choose another")
  out.mkdir(parents=True, exist_ok=True)
  offset = families.family(config).unit_offset
  table = hf_names.names(arch, offset)
  shards: list[dict[str, np.ndarray]] = [{}]
  size = 0
  for name, x in names.tensors(params, arch, table):
    if shards[-1] and size + x.nbytes > SHARD_BYTES:
      shards.append({})
      size = 0
    shards[-1][name] = x
    size += x.nbytes
  count, where = len(shards), {}
  for i, shard in enumerate(shards):
    name = "model.safetensors"
    if count > 1:
      name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
    save_file(shard, out / name, metadata={"format": "pt"})
    (out / name).chmod(0o644)  # safetensors leaves it to its owner alone
    where |= dict.fromkeys(shard, name)
  if count > 1:
    index = {"metadata": {}, "weight_map": where}
    text = json.dumps(index, indent=2)
    (out / "model.safetensors.index.json").write_text(text)
  text = json.dumps(families.write_config(arch, config), indent=2)
  (out / "config.json").write_text(text)
