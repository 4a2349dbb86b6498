"""Model families: their config.json, read strictly, and their tensor names.

A family is a record: which attributes must have which value, and which facts
follow from the rest. An attribute that is not listed is refused by name: a
model whose facts are not all understood would load, and be another model.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.models.architecture import Architecture
from grpo_jax.models.rope_config import ROPE_KEYS, ropes

Config = Mapping[str, Any]

# Attributes that become facts of the architecture in every family.
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
    "tie_word_embeddings",
    "model_type",
    "layer_types",
    *ROPE_KEYS,
  }
)

# Attributes that must have this value: anything else is another model.
_REQUIRED: Config = {
  "attention_bias": False,
  "mlp_bias": False,
  "pretraining_tp": 1,
  "rope_interleaved": False,
  "is_llama_config": True,
  "add_cross_attention": False,
  "is_decoder": False,
  "is_encoder_decoder": False,
  "chunk_size_feed_forward": 0,
  "use_bidirectional_attention": False,
}

# Attributes that change nothing that is computed here.
_IGNORED = frozenset(
  {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_position_embeddings",
    "max_window_layers",
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


@dataclasses.dataclass(frozen=True)
class Family:
  """What one family has of its own.

  Attributes:
    model: transformers' class, for exports.
    activation: config.json's names of it, and ours.
    own: attributes that only this family's `facts` read.
    facts: config.json -> further facts of the architecture.
    tied: whether the head is tied where config.json does not say.
    epsilon: of the norms where config.json does not say.
    unit_offset: stored norm scales are 0 where ours are 1.
  """

  model: str
  activation: tuple[str, str] = ("silu", "silu")
  own: frozenset[str] = frozenset()
  facts: Callable[[Config], dict[str, Any]] = lambda c: {}
  tied: bool = False
  epsilon: float = 1e-6
  unit_offset: bool = False


def _windows(c: Config, pattern: tuple[bool, ...]) -> tuple[int, ...]:
  """Windows by layer, from `layer_types` or a family's pattern of True."""
  size = c.get("sliding_window")
  types = c.get("layer_types")
  if types:
    known = {"sliding_attention": True, "full_attention": False}
    unknown = set(types) - known.keys()
    if unknown:
      raise UserError(f"config.json has layers of the types {sorted(unknown)}")
    pattern = tuple(known[x] for x in types)
  if not size or not any(pattern):
    return ()
  return tuple(size if local else 0 for local in pattern)


def _mistral(c: Config) -> dict[str, Any]:
  return {"windows": _windows(c, (True,))}


def _qwen(c: Config) -> dict[str, Any]:
  if c.get("use_sliding_window"):
    raise UserError(
      "config.json has use_sliding_window = True; only False is supported"
    )
  types = set(c.get("layer_types") or ()) - {"full_attention"}
  if types:
    raise UserError(f"config.json has layers of the types {sorted(types)}")
  return {}


def _qwen_moe(c: Config) -> dict[str, Any]:
  """Experts in every layer: a mixture with dense layers is another model."""
  if c.get("decoder_sparse_step", 1) != 1 or c.get("mlp_only_layers"):
    raise UserError(
      "config.json has decoder_sparse_step ="
      f" {c.get('decoder_sparse_step', 1)!r} and mlp_only_layers ="
      f" {c.get('mlp_only_layers')!r}; supported are experts in every layer"
    )
  experts = c.get("num_experts") or c.get("num_local_experts")
  chosen = c.get("num_experts_per_tok")
  sizes = {"num_experts": experts, "num_experts_per_tok": chosen}
  for name, value in sizes.items():
    if type(value) is not int or not 1 <= value <= experts:
      raise UserError(f"config.json has {name} = {value!r}")
  return {
    **_qwen(c),
    "qk_norm": "head",
    "ffn": _needed(c, "moe_intermediate_size"),
    "experts": experts,
    "experts_per_token": chosen,
    "renormalise": bool(c.get("norm_topk_prob", False)),
  }


def _gemma(c: Config, pattern: tuple[bool, ...]) -> dict[str, Any]:
  scalar = c.get("query_pre_attn_scalar", 256)
  return {
    "norms": "both",
    "embed_scale": math.sqrt(c["hidden_size"]),
    "query_scale": 1 / math.sqrt(scalar),
    "attention_cap": c.get("attn_logit_softcapping") or 0.0,
    "logit_cap": c.get("final_logit_softcapping") or 0.0,
    "windows": _windows(c, pattern),
  }


def _gemma3(c: Config) -> dict[str, Any]:
  every = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern", 6)
  pattern = (True,) * (every - 1) + (False,)
  return {**_gemma(c, pattern), "qk_norm": "head"}


_GEMMA = {
  "activation": ("gelu_pytorch_tanh", "gelu"),
  "tied": True,
  "unit_offset": True,
}
_GEMMA_OWN = frozenset(
  {
    "query_pre_attn_scalar",
    "sliding_window",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "hidden_activation",
  }
)
_QWEN_OWN = frozenset({"use_sliding_window", "sliding_window"})
_MOE_OWN = _QWEN_OWN | {
  "decoder_sparse_step",
  "mlp_only_layers",
  "moe_intermediate_size",
  "num_experts",
  "num_local_experts",
  "num_experts_per_tok",
  "norm_topk_prob",
  "output_router_logits",  # what is returned, and the loss of another trainer
  "router_aux_loss_coef",
}

FAMILIES: dict[str, Family] = {
  "llama": Family("LlamaForCausalLM"),
  "mistral": Family(
    "MistralForCausalLM", own=frozenset({"sliding_window"}), facts=_mistral
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    own=_QWEN_OWN,
    facts=lambda c: {**_qwen(c), "qkv_bias": True},
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    own=_QWEN_OWN,
    facts=lambda c: {**_qwen(c), "qk_norm": "head"},
  ),
  "qwen3_moe": Family("Qwen3MoeForCausalLM", own=_MOE_OWN, facts=_qwen_moe),
  "gemma2": Family(
    "Gemma2ForCausalLM",
    own=_GEMMA_OWN,
    facts=lambda c: _gemma(c, (True, False)),
    **_GEMMA,
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    own=_GEMMA_OWN | {"sliding_window_pattern", "_sliding_window_pattern"},
    facts=_gemma3,
    **_GEMMA,
  ),
  "olmo2": Family(
    "Olmo2ForCausalLM",
    facts=lambda c: {"norms": "post", "qk_norm": "width"},
    epsilon=1e-5,
  ),
}


def family(c: Config) -> Family:
  """The family of a config.json.

  Raises:
    UserError: one that is not supported.
  """
  kind = c.get("model_type") if isinstance(c, Mapping) else None
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise UserError(
      f"model_type {kind!r} is not supported; supported are"
      f" {', '.join(FAMILIES)}"
    )
  return FAMILIES[kind]


def read_config(c: Config, tokenizer_vocab: int) -> Architecture:
  """Facts of a config.json, in the old or the nested rotary form.

  Args:
    c: the parsed file.
    tokenizer_vocab: ids the tokenizer can produce; further rows are never
      sampled.

  Raises:
    UserError: an attribute that is not known, lacks, or has a value that makes
      this another model.
  """
  f = family(c)
  _check_attributes(c, f)
  for key in ("vocab_size", "hidden_size", "intermediate_size"):
    _needed(c, key)
  if tokenizer_vocab > c["vocab_size"]:
    raise UserError(
      f"the tokenizer has {tokenizer_vocab} ids, the model {c['vocab_size']}"
      " rows: they do not belong together"
    )
  heads = _needed(c, "num_attention_heads")
  arch = Architecture(
    vocab=c["vocab_size"],
    real_vocab=tokenizer_vocab,
    layers=_needed(c, "num_hidden_layers"),
    embed=c["hidden_size"],
    heads=heads,
    kv_heads=heads
    if c.get("num_key_value_heads") is None
    else c["num_key_value_heads"],
    head_dim=c.get("head_dim") or c["hidden_size"] // heads,
    ffn=c["intermediate_size"],
    tied=bool(c.get("tie_word_embeddings", f.tied)),
    norm_eps=c.get("rms_norm_eps", f.epsilon),
    activation=f.activation[1],
    **ropes(c),
  )
  arch = dataclasses.replace(arch, **f.facts(c))
  _check_facts(arch, c)
  return arch


def _check_facts(arch: Architecture, c: Config) -> None:
  """Refuses numbers that no model has."""
  counts = ("layers", "embed", "heads", "kv_heads", "head_dim", "ffn")
  for key in counts:
    value = getattr(arch, key)
    if type(value) is not int or value < 1:
      raise UserError(
        f"config.json makes {key} {value!r}, not a number above 0"
      )
  for key in ("rope_theta", "norm_eps"):
    value = getattr(arch, key)
    number = isinstance(value, int | float) and math.isfinite(value)
    if not number or value <= 0:
      raise UserError(
        f"config.json makes {key} {value!r}, not a number above 0"
      )
  if not isinstance(c.get("tie_word_embeddings", True), bool):
    raise UserError("config.json has tie_word_embeddings that is not a bool")
  if arch.heads % arch.kv_heads:
    raise UserError(
      f"config.json has {arch.heads} heads, which {arch.kv_heads} key/value"
      " heads do not divide"
    )


def _check_attributes(c: Config, f: Family) -> None:
  required = {**_REQUIRED, "hidden_act": f.activation[0]}
  if "hidden_activation" in f.own:
    required["hidden_activation"] = f.activation[0]
  for key, value in c.items():
    if key in _READ or key in _IGNORED or key in f.own - required.keys():
      continue
    if key not in required:
      raise UserError(
        f"config.json has the attribute {key!r} = {value!r}, which this"
        " importer does not know; it may change the model"
      )
    if value is not None and value != required[key]:
      raise UserError(
        f"config.json has {key} = {value!r}; only {required[key]!r} is"
        " supported"
      )


def _needed(c: Config, key: str) -> Any:
  if c.get(key) is None:
    raise UserError(f"config.json lacks the attribute {key!r}")
  return c[key]


def write_config(arch: Architecture, base: Config) -> dict[str, Any]:
  """A config.json for an architecture, over what an import had."""
  f = family(base)
  rope = {"rope_theta": arch.rope_theta}
  if ROPE_KEYS & base.keys():  # as it was: its forms are many
    rope = {}
  return {
    "rms_norm_eps": arch.norm_eps,
    "hidden_act": f.activation[0],
    **base,
    "architectures": [f.model],
    "vocab_size": arch.vocab,
    "hidden_size": arch.embed,
    ("moe_" if arch.experts else "") + "intermediate_size": arch.ffn,
    "num_hidden_layers": arch.layers,
    "num_attention_heads": arch.heads,
    "num_key_value_heads": arch.kv_heads,
    "head_dim": arch.head_dim,
    **rope,
    "tie_word_embeddings": arch.tied,
    "torch_dtype": "float32",
  }
