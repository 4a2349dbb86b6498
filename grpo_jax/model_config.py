"""From `config.model` and `config.lora` to the model record."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import named
from grpo_jax.errors import UserError
from grpo_jax.models import peft, weight_table
from grpo_jax.models.architecture import Architecture, Decoder, Lora, Model
from grpo_jax.models.pretrained import Pretrained
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Prompts

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
  if c["model"]["module"]:
    return own_network(c, tokenizer.vocab_size), c["lora"]
  if pretrained:
    arch = pretrained.architecture(tokenizer.vocab_size)
  else:
    arch = architecture(c["model"], tokenizer.vocab_size)
  lora = lora_config(c, arch)
  return Model(arch, **how, lora=make_lora(lora, arch)), lora


def own_network(c: Mapping[str, Any], vocab: int) -> Model:
  """The model of `model.module`: of its architecture only V is known.

  Raises:
    UserError: it cannot be made, is not one, or is asked for what only the
      decoder of this package has.
  """
  m = c["model"]
  for key, given in (
    ("model.path", m["path"]),
    ("lora.rank", c["lora"]["rank"]),
    ("model.remat", m["remat"]),
    ("model.dtype", m["dtype"] != "float32"),
  ):
    if given:
      raise UserError(f"{key} says nothing to a network of model.module")
  found = named.make("model.module", {}, {"name": m["module"]}, vocab)
  if not isinstance(found, Decoder):
    raise UserError(
      f"model.module {m['module']!r} gives a {type(found).__name__}; it must"
      " return flax_module.nnx(...), flax_module.linen(...) or"
      " decoders.network(...)"
    )
  arch = Architecture(vocab, vocab, 1, 1, 1, 1, 2, 1)
  elements = m["logit_elements"]
  model = Model(arch, decoder=found, logit_elements=elements)
  check_network(model, m["module"])
  return model


def check_network(model: Model, name: str) -> None:
  """Traces a network once: what it gives must have the right shape.

  Raises:
    UserError: it cannot be traced, or gives other logits.
  """
  net, ids = model.decoder, jax.ShapeDtypeStruct((2, 3), jnp.int32)
  lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

  def fn(ids: Any, lengths: Any) -> Any:
    params = net.init(jax.random.key(0), model)
    tokens = jnp.zeros((2, 2, 4), jnp.int32)
    prompts = Prompts(ids, lengths, lengths)
    (hidden,), _ = net.joint(params, prompts, (tokens,), model=model)
    return net.logits(params, hidden, model=model)

  try:
    found = jax.eval_shape(fn, ids, lengths)
  except UserError:
    raise
  except Exception as error:
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    raise UserError(f"model.module {name!r} cannot be traced: {why}") from error
  want = (2, 2, 4, model.arch.vocab)
  if found.shape != want:
    raise UserError(
      f"model.module {name!r} gives logits {found.shape} for 2 prompts, 2"
      f" completions of 4 tokens and {want[-1]} ids; they must be {want}"
    )


def architecture(c: Mapping[str, Any], vocab: int) -> Architecture:
  """The sizes of `config.model`, for a tokenizer's vocabulary."""
  how = computed(c)
  c = {k: v for k, v in c.items() if k not in (*how, "path", "module")}
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
