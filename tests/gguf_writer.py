"""GGUF files as llama.cpp's converter writes them, for tests.

Names are the gguf package's own table of them; what the converter changes is
done here from the Hugging Face side.
"""

import numpy as np

METADATA = {  # config.json -> metadata
  "max_position_embeddings": "context_length",
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_hidden_layers": "block_count",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
}


def convert(name, x, arch, config):
  """A tensor's values as the converter leaves them."""
  if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
    kind = "attention" if "q_proj" in name else "key_value"
    heads = config[f"num_{kind}_heads"]
    x = x.reshape(heads, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
  if arch == "gemma3" and name.endswith("norm.weight"):
    x = x + np.float32(1)
  return np.ascontiguousarray(x)


def metadata(out, arch, config):
  """What the converter says of a model's facts."""
  for key, name in METADATA.items():
    out.add_uint32(f"{arch}.{name}", config[key])
  out.add_layer_norm_rms_eps(config["rms_norm_eps"])
  rope = config["rope_parameters"]
  rope = rope.get("full_attention", rope)
  out.add_rope_freq_base(rope["rope_theta"])
  if arch in ("gemma3", "qwen3"):
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
  if arch == "gemma3":
    out.add_sliding_window(config["sliding_window"])


def write(path, arch, config, weights, change=lambda out: None):
  """A file of a model: its facts, its weights, a stop id.

  Args:
    path: of the file.
    arch: llama.cpp's name of the family.
    config: a config.json.
    weights: Hugging Face's name -> values.
    change: adds to the writer what is to be different.
  """
  import gguf

  out = gguf.GGUFWriter(path, arch)
  metadata(out, arch, config)
  out.add_eos_token_id(2)
  table = gguf.get_tensor_name_map(
    next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch),
    config["num_hidden_layers"],
  )
  for name, x in weights.items():
    stem, _, suffix = name.rpartition(".")
    theirs = f"{table.get_name(stem)}.{suffix}"
    out.add_tensor(theirs, convert(name, x, arch, config))
  change(out)
  return close(out, path)


def close(out, path):
  """Writes the file."""
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.write_tensors_to_file()
  out.close()
  return str(path)
