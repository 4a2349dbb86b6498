"""Models of random weights, for timings: made once, kept in the cache."""

import functools
import hashlib
import json
import os
import pathlib

import numpy as np

from grpo_jax.models import families, hf_names, names

WORDS = 512  # that the tokenizer knows

MODELS = {
  "tiny": {  # 0.85 M parameters
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
  },
  "qwen": {  # the shape of Qwen2.5-0.5B
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
  },
}


@functools.cache
def make(name: str) -> pathlib.Path:
  """Writes a model's directory, where it is not there yet.

  Its tokenizer has words w4 to w511; further rows are computed, and never
  sampled.
  """
  from safetensors.numpy import save_file

  config = MODELS[name]
  text = json.dumps(config, indent=2)
  home = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
  mark = hashlib.sha256(text.encode()).hexdigest()[:8]
  out = home.expanduser() / "grpo_jax" / f"{name}-{mark}"
  if (out / "config.json").exists():
    return out
  out.mkdir(parents=True, exist_ok=True)
  _tokenizer().save_pretrained(out)
  arch = families.read_config(config, WORDS)
  table, rng = hf_names.names(arch), np.random.default_rng(0)
  weights = {}
  for path, weight in names.table(arch).items():
    tensor = table[path]
    for _, key in names.pieces(weight, tensor):
      shape = names.their_shape(weight, tensor)
      x = rng.standard_normal(shape, np.float32) * np.float32(0.02)
      weights[key] = np.ones(shape, np.float32) if weight.std is None else x
  save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
  (out / "config.json").write_text(text)  # last: it says that all is there
  return out


def _tokenizer():
  """Words of one token each."""
  import tokenizers
  import transformers
  from tokenizers import models, pre_tokenizers

  special = ["<unk>", "<s>", "</s>", "<pad>"]
  words = special + [f"w{i}" for i in range(len(special), WORDS)]
  vocab = {word: i for i, word in enumerate(words)}
  raw = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
  raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=raw,
    unk_token="<unk>",
    bos_token="<s>",
    eos_token="</s>",
    pad_token="<pad>",
  )
