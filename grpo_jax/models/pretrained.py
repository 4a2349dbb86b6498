"""A model to start from: a directory, a GGUF file, or a hub id."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.models import families, hf, hf_names, names
from grpo_jax.models.architecture import Architecture
from grpo_jax.models.gguf import GGUF
from grpo_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """An opened model: its facts are read, its weights are not.

  Attributes:
    path: local directory or file.
    config: its config.json (of a GGUF file, the same facts).
    source: its tensors.
  """

  path: str
  config: Mapping[str, Any]
  source: names.Source

  def architecture(self, tokenizer_vocab: int) -> Architecture:
    """Its facts; ids past the tokenizer's are never sampled."""
    try:
      return families.read_config(self.config, tokenizer_vocab)
    except (TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
      if isinstance(error, UserError):
        raise
      raise UserError(
        f"the facts of {self.path} cannot be understood: {error}"
      ) from error

  def load(self, arch: Architecture, shardings: Params) -> Params:
    """Reads the weights straight into sharded float32 arrays."""
    offset = families.family(self.config).unit_offset
    # A tied head may be stored beside the table it equals.
    allowed = frozenset({"lm_head.weight"}) if arch.tied else frozenset()
    return names.load(
      self.source,
      arch,
      hf_names.names(arch, offset),
      shardings,
      allowed=allowed,
    )


def open_model(path: str) -> Pretrained:
  """Opens a model and reads its facts.

  Args:
    path: a directory of safetensors, a GGUF file, or a hub id[@revision].

  Raises:
    UserError: there is none, or it is broken or of another family.
  """
  local = hf.locate(path)
  try:
    if os.path.isfile(local):
      file = GGUF(local)
      return Pretrained(local, file.config, file)
    config = hf.read_json(pathlib.Path(local) / "config.json")
    families.family(config)
    return Pretrained(local, config, hf.Safetensors(local))
  except UserError:
    raise
  except (TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
    raise UserError(
      f"{local} cannot be understood: {type(error).__name__} {error}"
    ) from error
