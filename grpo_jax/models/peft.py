"""LoRA adapters in PEFT's format: a directory of two files, in and out.

`adapter_config.json` says rank, alpha and what else there may be;
`adapter_model.safetensors` holds A and B of each projection of each layer.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.models import hf, hf_names, lora, weight_table
from grpo_jax.models.architecture import Architecture, Lora, Model
from grpo_jax.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

# Attributes that must have one of these values, or none: anything else is
# another kind of adapter.
_REQUIRED: Mapping[str, tuple] = {
  "peft_type": ("LORA",),
  "task_type": ("CAUSAL_LM",),
  "bias": ("none",),
  "fan_in_fan_out": (False,),
  # Others change the base model's weights when training begins.
  "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
_READ = {"r", "lora_alpha", "use_rslora"}
_IGNORED = {
  "auto_mapping",
  "base_model_name_or_path",
  "exclude_modules",
  "inference_mode",
  "lora_dropout",
  "megatron_core",
  "peft_version",
  "qalora_group_size",
  "revision",
  "runtime_config",
  "target_modules",  # the tensors say it, layer by layer
}


def read(directory: str, arch: Architecture) -> Lora:
  """What a directory of adapters holds, without its tensors' values.

  Raises:
    UserError: a file is missing, an attribute makes this another kind of
      adapter, or a tensor is no adapter of a projection of every layer.
  """
  where = pathlib.Path(directory).expanduser()
  c = hf.read_json(where / CONFIG)
  for key, value in c.items():
    if key in _REQUIRED:
      if value is not None and value not in _REQUIRED[key]:
        raise UserError(
          f"{where / CONFIG} has {key} = {value!r}; supported is"
          f" {' or '.join(map(repr, _REQUIRED[key]))}"
        )
    elif value and key not in _READ | _IGNORED:
      raise UserError(
        f"{where / CONFIG} has {key} = {value!r}, which is not supported"
      )
  rank, alpha = c.get("r"), c.get("lora_alpha")
  if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
    raise UserError(
      f"{where / CONFIG} has r = {rank!r}, lora_alpha = {alpha!r}"
    )
  if c.get("use_rslora"):  # its scale is alpha/sqrt(r)
    alpha *= rank**0.5
  source, paths = hf.Safetensors(directory, WEIGHTS), []
  left = source.names()
  for path in weight_table.adaptable(arch):
    found = {name for pair in _names(arch, path) for name in pair} & left
    if not found:
      continue
    paths.append(path)
    left -= found
    _check(source, arch, path, rank)
  if left or not paths:
    raise UserError(
      f"{where / WEIGHTS} has {len(left)} tensors that belong to no projection"
      f" of this model, such as {min(left, default='none')!r}"
    )
  return Lora(rank, float(alpha), tuple(paths))


def _names(arch: Architecture, path: str) -> list[tuple[str, str]]:
  """Names of A and B of one projection, by layer."""
  theirs = hf_names.names(arch)[f"layers/{path}"].name
  stem = PREFIX + theirs.removesuffix(".weight")
  return [
    tuple(f"{stem.format(i)}.lora_{x}.weight" for x in "AB")
    for i in range(arch.layers)
  ]


def _sizes(arch: Architecture, path: str) -> tuple[int, int]:
  """Input and output size of one projection."""
  group, name = path.split("/")
  w = weight_table.weights(arch)["layers"][group][name]
  cut = 1 + w.inner
  return int(np.prod(w.shape[1:cut])), int(np.prod(w.shape[cut:]))


def _check(
  source: hf.Safetensors, arch: Architecture, path: str, rank: int
) -> None:
  inner, outer = _sizes(arch, path)
  for names in _names(arch, path):
    for name, want in zip(names, ((rank, inner), (outer, rank))):
      if name not in source.names():
        raise UserError(
          f"{source.where} lacks {name!r}: adapters on some layers only are"
          " not supported"
        )
      if source.shape(name) != want:
        raise UserError(
          f"{source.where}: {name!r} has shape {source.shape(name)}, this model"
          f" needs {want}"
        )


def load(directory: str, model: Model, shardings: Params) -> Params:
  """Reads the factors of `model.lora` into sharded float32 arrays.

  Args:
    directory: as given to `read`.
    model: with the adapters that `read` found.
    shardings: a tree with the adapters in it.
  """
  check(directory, model)
  source, out = hf.Safetensors(directory, WEIGHTS), {"layers": {}}
  table = weight_table.adapters(model.arch, model.lora)["layers"]
  for path in model.lora.targets:
    group, name = path.split("/")[0], path.split("/")[1] + lora.SUFFIX
    pair = {}
    for i, key in enumerate("ab"):
      shape = table[group][name][key].shape
      layers = [
        source.read(names[i]).T.reshape(shape[1:])
        for names in _names(model.arch, path)
      ]
      where = shardings["layers"][group][name][key]
      pair[key] = jax.device_put(np.stack(layers), where)
    out["layers"].setdefault(group, {})[name] = pair
  return out


def check(directory: str, model: Model) -> None:
  """Refuses adapters of another rank, alpha or targets than `model.lora`.

  Raises:
    UserError: with both.
  """
  found = read(directory, model.arch)
  if found != model.lora:
    raise UserError(
      f"{directory} holds adapters with {_words(found)}, and config.lora asks"
      f" for {_words(model.lora)}; with lora.path alone the directory decides"
    )


def _words(lora: Lora) -> str:
  return f"rank {lora.rank}, alpha {lora.alpha:g} on {'|'.join(lora.targets)}"


def export(params: Params, model: Model, base: str, directory: str) -> None:
  """Writes the adapters as PEFT reads them, in float32.

  Args:
    params: a tree with the adapters in it.
    model: its record.
    base: the model that they belong to, for PEFT to find.
    directory: made if missing; refused if it holds adapters.

  Raises:
    UserError: there are no adapters, or the directory holds some already.
  """
  from safetensors.numpy import save_file

  if model.lora is None:
    raise UserError("this policy has no adapters; export it without --adapters")
  out = pathlib.Path(directory)
  if (out / CONFIG).exists():
    raise UserError(f"{directory} holds adapters already; choose another")
  out.mkdir(parents=True, exist_ok=True)
  rank, tensors, modules = model.lora.rank, {}, []
  for path in model.lora.targets:
    group, name = path.split("/")
    pair = params["layers"][group][name + lora.SUFFIX]
    a, b = (np.asarray(pair[key], np.float32) for key in "ab")
    for layer, names in enumerate(_names(model.arch, path)):
      factors = a[layer].reshape(-1, rank).T, b[layer].reshape(rank, -1).T
      for name, x in zip(names, factors):
        tensors[name] = np.ascontiguousarray(x)
    modules.append(hf_names.names(model.arch)[f"layers/{path}"].name)
  config: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": rank,
    "lora_alpha": model.lora.alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "target_modules": [x.split(".")[-2] for x in modules],
    "inference_mode": True,
  }
  save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
  (out / WEIGHTS).chmod(0o644)
  (out / CONFIG).write_text(json.dumps(config, indent=2))
