"""GGUF files: one file with weights, facts and tokenizer of a model.

The `gguf` package dequantises. llama.cpp stores the query and key rows of a
Llama permuted for its own rotary layout; that is undone here. Names and facts
are translated to those of a Hugging Face checkpoint, so one strict importer
serves both.
"""

import functools
import re
from typing import Any

import numpy as np

from grpo_jax.errors import UserError

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
_TOP = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}

# Metadata of the model (not the file or its tokenizer) that is understood.
_FACTS = frozenset(
  {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
  }
)


class GGUF:
  """A GGUF file behind the names of a Hugging Face checkpoint."""

  def __init__(self, path: str):
    """Opens the file; reads no weights.

    Raises:
      UserError: it cannot be read, is truncated, or is no Llama.
    """
    try:
      import gguf
    except ImportError as error:
      raise UserError(
        "a GGUF file needs the gguf package: pip install -e '.[hf]'"
      ) from error
    self.where = path
    try:
      self._reader = gguf.GGUFReader(path)
    except Exception as error:  # the package raises whatever it met
      raise UserError(f"{path} cannot be read as GGUF: {error}") from error
    self._dequantize = gguf.quants.dequantize
    self._tensors = {_name(t.name): t for t in self._reader.tensors}
    if self._value("general.architecture") != "llama":
      raise UserError(
        f"{path} holds a {self._value('general.architecture')!r} model; only"
        " llama is supported"
      )

  def _value(self, key: str) -> Any:
    field = self._reader.fields.get(key)
    return None if field is None else field.contents()

  @functools.cached_property
  def config(self) -> dict[str, Any]:
    """The facts as a config.json.

    Raises:
      UserError: a fact that is not known.
    """
    prefix = "llama."
    for key in self._reader.fields:
      if key.startswith(prefix) and key[len(prefix) :] not in _FACTS:
        raise UserError(
          f"{self.where} has the attribute {key!r} ="
          f" {self._value(key)!r}, which this importer does not know"
        )

    def fact(name: str) -> Any:
      return self._value(prefix + name)

    heads = fact("attention.head_count")
    head_dim = fact("embedding_length") // heads
    if fact("rope.dimension_count") not in (None, head_dim):
      raise UserError(f"{self.where} rotates only a part of each head")
    stops = self._value("tokenizer.ggml.eos_token_id")
    return {
      "model_type": "llama",
      "vocab_size": self.shape("model.embed_tokens.weight")[0],
      "hidden_size": fact("embedding_length"),
      "intermediate_size": fact("feed_forward_length"),
      "num_hidden_layers": fact("block_count"),
      "num_attention_heads": heads,
      "num_key_value_heads": fact("attention.head_count_kv"),
      "head_dim": head_dim,
      "hidden_act": "silu",
      "rms_norm_eps": float(
        np.float32(fact("attention.layer_norm_rms_epsilon"))
      ),
      "rope_theta": float(fact("rope.freq_base") or 10_000.0),
      "tie_word_embeddings": "lm_head.weight" not in self._tensors,
      "max_position_embeddings": fact("context_length"),
      "eos_token_id": stops,
      "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
    }

  def names(self) -> set[str]:
    """Every tensor there is."""
    return set(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    """Its shape; GGUF lists the fastest axis first."""
    return tuple(int(n) for n in reversed(self._tensors[name].shape))

  def read(self, name: str) -> np.ndarray:
    """Its values in float32, rotary rows in half-split order."""
    tensor = self._tensors[name]
    x = self._dequantize(tensor.data, tensor.tensor_type)
    x = np.asarray(x, np.float32).reshape(self.shape(name))
    if name.endswith(("q_proj.weight", "k_proj.weight")):
      half = self.config["head_dim"] // 2
      x = x.reshape(-1, half, 2, x.shape[-1]).swapaxes(1, 2)
      x = x.reshape(self.shape(name))
    return x


def _name(name: str) -> str:
  """A GGUF tensor's name as Hugging Face's; unknown ones stay as they are."""
  if name in _TOP:
    return _TOP[name]
  found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
  if found and found[2] in _LAYER:
    return f"model.layers.{found[1]}.{_LAYER[found[2]]}.weight"
  return name
