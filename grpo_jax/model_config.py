"""From `config.model` and `config.lora` to the model record."""

import re
from collections.abc import Mapping
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.models import peft, weight_table
from grpo_jax.models.architecture import Architecture, Lora, Model
from grpo_jax.models.pretrained import Pretrained
from grpo_jax.tokenizer import Tokenizer

# Rows of the embedding are rounded up, so that meshes divide them.
VOCAB_MULTIPLE = 64


def make_model(
  c: Mapping[str, Any], pretrained: Pretrained | None, tokenizer: Tokenizer
) -> tuple[Model, dict[str, Any]]:
  """The model record, and `config.lora` with every size filled in.

  Args:
    c: the whole configuration; its groups `model` and `lora` are read.
    pretrained: the model of `model.path`, or None.
    tokenizer: whose vocabulary the model has.

  Raises:
    UserError: sizes that do not fit, or adapters that do not.
  """
  how = computed(c["model"])
  if pretrained:
    arch = pretrained.architecture(tokenizer.vocab_size)
  else:
    arch = architecture(c["model"], tokenizer.vocab_size)
  lora = lora_config(c, arch)
  return Model(arch, **how, lora=make_lora(lora, arch)), lora


def architecture(c: Mapping[str, Any], vocab: int) -> Architecture:
  """The sizes of `config.model`, for a tokenizer's vocabulary."""
  how = computed(c)
  c = {k: v for k, v in c.items() if k not in (*how, "path")}
  if c["heads"] % c["kv_heads"]:
    raise UserError(
      f"model.kv_heads {c['kv_heads']} does not divide model.heads {c['heads']}"
    )
  if c["head_dim"] % 2:
    raise UserError(
      f"model.head_dim {c['head_dim']} must be even: rotary positions turn"
      " pairs"
    )
  rows = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
  return Architecture(vocab=rows, real_vocab=vocab, **c)


def lora_config(c: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
  """`config.lora`, with the sizes of the adapters that it starts from.

  Raises:
    UserError: there is nothing to adapt, or they are of another rank.
  """
  own = c["lora"]
  if (own["rank"] or own["path"]) and not (
    c["model"]["path"] or c["init_from"]
  ):
    raise UserError(
      "lora needs a trained model to adapt: set model.path or init_from"
    )
  if not own["path"] or own["rank"]:
    return own
  found = peft.read(own["path"], arch)
  targets = "|".join(found.targets)
  return {**own, "rank": found.rank, "alpha": found.alpha, "targets": targets}


def make_lora(c: Mapping[str, Any], arch: Architecture) -> Lora | None:
  """The adapters of `config.lora`; None where all weights are trained."""
  if not c["rank"]:
    return None
  known = weight_table.adaptable(arch)
  try:
    targets = tuple(x for x in known if re.fullmatch(c["targets"], x))
  except re.error as error:
    raise UserError(
      f"lora.targets {c['targets']!r} is no pattern: {error}"
    ) from error
  if not targets:
    raise UserError(
      f"lora.targets {c['targets']!r} matches none of {', '.join(known)}"
    )
  return Lora(c["rank"], c["alpha"], targets)


def computed(c: Mapping[str, Any]) -> dict[str, Any]:
  """How a model is computed: the keys of `config.model` that are no facts."""
  if c["dtype"] not in ("float32", "bfloat16"):
    raise UserError(f"model.dtype {c['dtype']!r} must be float32 or bfloat16")
  return {k: c[k] for k in ("dtype", "remat", "logit_elements")}
