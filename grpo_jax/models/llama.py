"""The Llama family: its config.json, read strictly, and its tensor names.

Covers Llama-shaped models with plain rotary positions (SmolLM2 among them).
An attribute that is not listed here is refused by name: a model whose facts
are not all understood would load, and be another model.
"""

from collections.abc import Mapping
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.models.architecture import Architecture
from grpo_jax.models.names import Names, Tensor

MODEL_TYPES = ("llama",)

# Attributes that become facts of the architecture.
_READ = frozenset(
  {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
    "model_type",
  }
)

# Attributes that must have this value: anything else is another model.
_REQUIRED: Mapping[str, Any] = {
  "hidden_act": "silu",
  "attention_bias": False,
  "mlp_bias": False,
  "pretraining_tp": 1,
  "rope_interleaved": False,
  "is_llama_config": True,
  "add_cross_attention": False,
  "is_decoder": False,
  "is_encoder_decoder": False,
  "chunk_size_feed_forward": 0,
}

# Attributes that change nothing that is computed here.
_IGNORED = frozenset(
  {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "use_cache",
  }
)


def read_config(c: Mapping[str, Any], tokenizer_vocab: int) -> Architecture:
  """Facts of a config.json, in the old or the nested rotary form.

  Args:
    c: the parsed file.
    tokenizer_vocab: ids the tokenizer can produce; further rows are never
      sampled.

  Raises:
    UserError: an attribute that is not known, lacks, or has a value that makes
      this another model.
  """
  for key, value in c.items():
    if key in _READ or key in _IGNORED:
      continue
    if key not in _REQUIRED:
      raise UserError(
        f"config.json has the attribute {key!r} = {value!r}, which this"
        " importer does not know; it may change the model"
      )
    if value is not None and value != _REQUIRED[key]:
      raise UserError(
        f"config.json has {key} = {value!r}; only {_REQUIRED[key]!r} is"
        " supported"
      )
  for key in ("vocab_size", "hidden_size", "intermediate_size"):
    _needed(c, key)
  if tokenizer_vocab > c["vocab_size"]:
    raise UserError(
      f"the tokenizer has {tokenizer_vocab} ids, the model {c['vocab_size']}"
      " rows: they do not belong together"
    )
  heads = _needed(c, "num_attention_heads")
  return Architecture(
    vocab=c["vocab_size"],
    real_vocab=tokenizer_vocab,
    layers=_needed(c, "num_hidden_layers"),
    embed=c["hidden_size"],
    heads=heads,
    kv_heads=c.get("num_key_value_heads") or heads,
    head_dim=c.get("head_dim") or c["hidden_size"] // heads,
    ffn=c["intermediate_size"],
    tied=bool(c.get("tie_word_embeddings", False)),
    rope_theta=_rope_theta(c),
    norm_eps=c.get("rms_norm_eps", 1e-6),
  )


def _needed(c: Mapping[str, Any], key: str) -> Any:
  if c.get(key) is None:
    raise UserError(f"config.json lacks the attribute {key!r}")
  return c[key]


def _rope_theta(c: Mapping[str, Any]) -> float:
  """The base of plain rotary positions; scaled ones are refused."""
  nested = dict(c.get("rope_parameters") or {})
  scaling = nested.pop("rope_type", "default")
  theta = nested.pop("rope_theta", c.get("rope_theta", 10_000.0))
  old = dict(c.get("rope_scaling") or {})
  scaling = old.pop("rope_type", old.pop("type", scaling))
  if scaling != "default":
    raise UserError(f"rotary scaling {scaling!r} is not supported")
  unknown = nested.keys() | (old.keys() - {"rope_theta"})
  if unknown:
    raise UserError(f"rotary parameters {sorted(unknown)} are not known")
  return float(theta)


def write_config(arch: Architecture, base: Mapping[str, Any]) -> dict[str, Any]:
  """A config.json for an architecture, over what an import had."""
  return {
    **base,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": arch.vocab,
    "hidden_size": arch.embed,
    "intermediate_size": arch.ffn,
    "num_hidden_layers": arch.layers,
    "num_attention_heads": arch.heads,
    "num_key_value_heads": arch.kv_heads,
    "head_dim": arch.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": arch.norm_eps,
    "rope_theta": arch.rope_theta,
    "tie_word_embeddings": arch.tied,
    "torch_dtype": "float32",
  }


def names(arch: Architecture) -> Names:
  """Our paths -> their tensors. `{}` is the layer; ours is stacked over it."""
  layer = "model.layers.{}."
  table = {
    "embed": Tensor("model.embed_tokens.weight", (0, 1)),
    "layers/attn_norm": Tensor(layer + "input_layernorm.weight", (0,)),
    "layers/attn/q": Tensor(layer + "self_attn.q_proj.weight", (1, 2, 0)),
    "layers/attn/k": Tensor(layer + "self_attn.k_proj.weight", (1, 2, 0)),
    "layers/attn/v": Tensor(layer + "self_attn.v_proj.weight", (1, 2, 0)),
    "layers/attn/o": Tensor(layer + "self_attn.o_proj.weight", (2, 0, 1)),
    "layers/mlp_norm": Tensor(layer + "post_attention_layernorm.weight", (0,)),
    "layers/mlp/gate": Tensor(layer + "mlp.gate_proj.weight", (1, 0)),
    "layers/mlp/up": Tensor(layer + "mlp.up_proj.weight", (1, 0)),
    "layers/mlp/down": Tensor(layer + "mlp.down_proj.weight", (1, 0)),
    "final_norm": Tensor("model.norm.weight", (0,)),
  }
  if not arch.tied:
    table["head"] = Tensor("lm_head.weight", (0, 1))
  return table
