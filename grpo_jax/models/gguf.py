"""GGUF files: one file with weights, facts and tokenizer of a model.

Names, facts and values are translated to those of a Hugging Face checkpoint, so
one strict importer serves both. What llama.cpp's converter changes is undone:
it permutes the query and key rows of a Llama for its own rotary layout, and
adds 1 to the norm scales of a Gemma.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.models.gguf_file import File

_LAYER = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_QK_NORM = {
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
}
# Where there are norms on both sides, ffn_norm has another name.
_BOTH_NORMS = {
  "post_attention_norm": "post_attention_layernorm",
  "ffn_norm": "pre_feedforward_layernorm",
  "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}

_TABLE = "rope_freqs.weight"

# Metadata of the model (not the file or its tokenizer) that is understood.
_FACTS = frozenset(
  {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
  }
)
# Of other keys, these say nothing of what is computed.
_BESIDE = ("general.", "tokenizer.", "quantize.", "split.")

Fact = Callable[..., Any]  # name -> value; of a second argument: if it lacks


@dataclasses.dataclass(frozen=True)
class _Kind:
  """How llama.cpp writes one family.

  Attributes:
    model_type: Hugging Face's.
    names: of a layer's tensors, beside or instead of a Llama's.
    own: metadata that only this family has.
    facts: metadata -> further attributes of the config.json.
    permuted: rows of queries and keys are.
    offset: norm scales have 1 added.
  """

  model_type: str
  names: dict[str, str] = dataclasses.field(default_factory=dict)
  own: frozenset[str] = frozenset()
  facts: Callable[[Fact], dict[str, Any]] = lambda fact: {}
  permuted: bool = False
  offset: bool = False


def _gemma3(fact: Fact) -> dict[str, Any]:
  """Facts of Gemma 3 that llama.cpp's code holds, where the file does not."""
  layers, heads = fact("block_count"), fact("attention.head_count")
  head_dim = fact("attention.key_length")
  fact("rope.freq_base")  # 10,000, where others lack it, is not Gemma's
  # A period, whose last layer sees all, or one bool for each layer.
  local = fact("attention.sliding_window_pattern", 6)
  if not isinstance(local, list):
    local = [i % local < local - 1 for i in range(layers)]
  if len(local) != layers:
    raise UserError(
      f"gemma3.attention.sliding_window_pattern has {len(local)} entries for"
      f" {layers} layers"
    )
  names = ("full_attention", "sliding_attention")
  # The one of 62 layers (27B) scales by the width a head would have had.
  scalar = fact("embedding_length") // heads if layers == 62 else head_dim
  return {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": scalar,
    "sliding_window": fact("attention.sliding_window"),
    "layer_types": [names[bool(x)] for x in local],
    "rope_local_base_freq": fact("rope.freq_base_swa", 10_000.0),
    "final_logit_softcapping": fact("final_logit_softcapping", None),
  }


_KINDS = {
  "llama": _Kind("llama", permuted=True),
  "qwen2": _Kind("qwen2"),
  "qwen3": _Kind("qwen3", _QK_NORM),
  "gemma3": _Kind(
    "gemma3_text",
    {**_QK_NORM, **_BOTH_NORMS},
    own=frozenset(
      {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "final_logit_softcapping",
        "rope.freq_base_swa",
      }
    ),
    facts=_gemma3,
    offset=True,
  ),
}


class GGUF:
  """A GGUF file behind the names of a Hugging Face checkpoint."""

  def __init__(self, path: str):
    """Opens the file; reads no weights.

    Raises:
      UserError: it cannot be read, is truncated, or of another family.
    """
    self.where = path
    self._file = File(path)
    self._fields = self._file.fields
    self._prefix = self._fields.get("general.architecture")
    if self._prefix not in _KINDS:
      raise UserError(
        f"{path} holds a {self._prefix!r} model; supported are"
        f" {', '.join(_KINDS)}"
      )
    if self._fields.get("general.type", "model") != "model":
      raise UserError(
        f"{path} holds no model but {self._fields['general.type']!r}"
      )
    self._kind = _KINDS[self._prefix]
    layer = {**_LAYER, **self._kind.names}
    self._theirs = {_name(name, layer): name for name in self._file.tensors}

  def _fact(self, name: str, *default: Any) -> Any:
    """A fact; without a default, one that must be there."""
    value = self._fields.get(f"{self._prefix}.{name}", *default)
    if value is None and not default:
      raise UserError(
        f"{self.where} lacks the attribute '{self._prefix}.{name}'"
      )
    return value

  @functools.cached_property
  def config(self) -> dict[str, Any]:
    """The facts as a config.json.

    Raises:
      UserError: a fact that is not known, or that makes this another model.
    """
    known = {f"{self._prefix}.{x}" for x in _FACTS | self._kind.own}
    for key in self._fields.keys() - known:
      if not key.startswith(_BESIDE):
        raise UserError(
          f"{self.where} has the attribute {key!r} ="
          f" {str(self._fields[key])[:60]}, which this importer does not know;"
          " it may change the model"
        )
    fact = self._fact
    heads = fact("attention.head_count")
    head_dim = fact("attention.key_length", fact("embedding_length") // heads)
    rows = self.shape("model.embed_tokens.weight")[0]
    for name, want in (
      ("attention.value_length", head_dim),
      ("rope.dimension_count", head_dim),
      ("vocab_size", rows),
    ):
      if fact(name, want) != want:
        raise UserError(
          f"{self.where} has {self._prefix}.{name} = {fact(name)}; only {want}"
          " is supported"
        )
    stops = self._file.stops()
    return {
      "model_type": self._kind.model_type,
      "vocab_size": rows,
      "hidden_size": fact("embedding_length"),
      "intermediate_size": fact("feed_forward_length"),
      "num_hidden_layers": fact("block_count"),
      "num_attention_heads": heads,
      "num_key_value_heads": fact("attention.head_count_kv", heads),
      "head_dim": head_dim,
      "rms_norm_eps": _decimal(fact("attention.layer_norm_rms_epsilon")),
      "rope_theta": _decimal(fact("rope.freq_base", 10_000.0)),
      **self._rope_scaling(head_dim),
      "tie_word_embeddings": "lm_head.weight" not in self._theirs,
      "max_position_embeddings": fact("context_length"),
      "eos_token_id": stops if len(stops) > 1 else (*stops, None)[0],
      "bos_token_id": self._fields.get("tokenizer.ggml.bos_token_id"),
      **self._kind.facts(fact),
    }

  def _rope_scaling(self, head_dim: int) -> dict[str, Any]:
    """Linear, which llama.cpp takes where a factor has no type, or a table."""
    kind = self._fact("rope.scaling.type", "linear")
    factor = self._fact("rope.scaling.factor", 0.0)
    if kind not in ("linear", "none"):
      raise UserError(
        f"{self.where} has {self._prefix}.rope.scaling.type = {kind!r}; only"
        " 'linear' and 'none' are supported"
      )
    linear = kind == "linear" and factor not in (0.0, 1.0)
    if _TABLE in self._file.tensors and self._prefix == "llama":
      if linear:
        raise UserError(f"{self.where} has two rotary scalings")
      return self._llama3(self._file.read(_TABLE), head_dim)
    if not linear:
      return {}
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}

  def _llama3(self, table: np.ndarray, head_dim: int) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, whose result is all that is stored.

    Frequency i is divided by table[i]; its constants are those of every such
    model that was published, and the table must follow from them.
    """
    theta = self._fact("rope.freq_base")
    factor, low, high, original = float(table.max()), 1.0, 4.0, 8192
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    want = 1 / ((1 - smooth) / factor + smooth)
    if table.shape != want.shape or not np.allclose(table, want, rtol=1e-5):
      raise UserError(
        f"{self.where} has a tensor {_TABLE!r} that is not Llama 3's scaling"
        f" by {factor} of {original} tokens"
      )
    scaling = {
      "rope_type": "llama3",
      "factor": factor,
      "low_freq_factor": low,
      "high_freq_factor": high,
      "original_max_position_embeddings": original,
    }
    return {"rope_scaling": scaling}

  def names(self) -> set[str]:
    """Every tensor there is, a Llama's rotary table apart."""
    derived = {_TABLE} if self._prefix == "llama" else set()
    return self._theirs.keys() - derived

  def shape(self, name: str) -> tuple[int, ...]:
    """Its shape, without reading it.

    Raises:
      UserError: there is no such tensor.
    """
    if name not in self._theirs:
      raise UserError(f"{self.where} lacks the tensor {name!r}")
    return self._file.tensors[self._theirs[name]].shape

  def read(self, name: str) -> np.ndarray:
    """Its values in float32, as a Hugging Face checkpoint has them."""
    x = self._file.read(self._theirs[name])
    if self._kind.permuted and name.endswith(
      ("q_proj.weight", "k_proj.weight")
    ):
      half = self.config["head_dim"] // 2
      x = x.reshape(-1, half, 2, x.shape[-1]).swapaxes(1, 2)
      x = x.reshape(self.shape(name))
    if self._kind.offset and name.endswith("norm.weight"):
      x = x - np.float32(1)
    return x


def _decimal(x: float) -> float:
  """A float32 as the number that it was written as: 1e-6, not 9.99…e-7."""
  return float(str(np.float32(x)))


def _name(name: str, layer: dict[str, str]) -> str:
  """A GGUF tensor's name as Hugging Face's; unknown ones stay as they are."""
  if name in _TOP:
    return _TOP[name]
  found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
  if found and found[2] in layer:
    return f"model.layers.{found[1]}.{layer[found[2]]}.{found[3]}"
  return name
