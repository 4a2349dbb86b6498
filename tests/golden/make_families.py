"""Tiny random models of every family by transformers' PyTorch classes.

    pip install -e '.[parity]' && python tests/golden/make_families.py [NAME]

Writes families/NAME.npz: config.json, the weights, and what PyTorch computes
from them: log-probs of two sequences, the gradient of their mean for a few
weights, and the likeliest continuations of their first tokens.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers

HERE = pathlib.Path(__file__).parent / "families"
PROMPT, SIZE = 4, 8
SIZES = {
  "vocab_size": 32,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 3,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "max_position_embeddings": 64,
  "initializer_range": 0.3,
  "pad_token_id": None,
  "bos_token_id": 1,
  "eos_token_id": 2,
}
GEMMA = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 100.0,
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
YARN = {
  "rope_type": "yarn",
  "rope_theta": 100.0,
  "factor": 4.0,
  "original_max_position_embeddings": 16,
}
FAMILIES = {
  "llama3": ("Llama", {"rope_parameters": LLAMA3}),
  "yarn": ("Llama", {"rope_parameters": YARN}),
  "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 8}),
  "qwen2": ("Qwen2", {}),
  "qwen3": ("Qwen3", {"head_dim": 8}),
  "qwen3_moe": (
    "Qwen3Moe",
    {
      "head_dim": 8,
      "moe_intermediate_size": 12,
      "num_experts": 5,
      "num_experts_per_tok": 2,
      "norm_topk_prob": True,
    },
  ),
  "gemma2": ("Gemma2", GEMMA),
  "gemma3": (
    "Gemma3Text",
    GEMMA | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
  ),
  "olmo2": ("Olmo2", {}),
}


def published(named):
  """Tensors under the names of files: experts one by one, not joined."""
  out = {}
  for name, x in named.items():
    stem, _, last = name.rpartition(".")
    if not stem.endswith(".experts"):
      out[name] = x
      continue
    for i, expert in enumerate(x):
      parts = {"down_proj": expert}
      if last == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2)))
      for part, value in parts.items():
        out[f"{stem}.{i}.{part}.weight"] = value
  return out


def make(name):
  torch.manual_seed(0)
  kind, changes = FAMILIES[name]
  config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager"
  )
  model = model.float().eval()
  with torch.no_grad():
    for x in model.parameters():
      if x.ndim == 1:
        x.add_(0.3 * torch.randn_like(x))
  ids = np.random.default_rng(0).integers(0, 32, (2, PROMPT + SIZE))
  logprobs = torch.log_softmax(model(torch.tensor(ids)).logits, -1)[:, :-1]
  chosen = logprobs.gather(-1, torch.tensor(ids)[:, 1:, None])[..., 0]
  chosen[:, PROMPT - 1 :].mean().backward()
  decoded = model.generate(
    torch.tensor(ids[:, :PROMPT]),
    attention_mask=torch.ones(2, PROMPT),
    max_new_tokens=12,
    do_sample=False,
    eos_token_id=None,
    pad_token_id=0,
  )
  named = dict(model.named_parameters())
  weights = published(named)
  grads = published({n: x.grad for n, x in named.items()})
  with tempfile.TemporaryDirectory() as out:
    model.save_pretrained(out)
    saved = safetensors.torch.load_file(f"{out}/model.safetensors")
  assert all(torch.equal(weights[n], x) for n, x in saved.items())
  kept = [n for n in grads if "layers.1" in n or "embed" in n]
  np.savez_compressed(
    HERE / f"{name}.npz",
    config=json.dumps(json.loads(config.to_json_string(use_diff=False))),
    ids=ids,
    logprobs=chosen[:, PROMPT - 1 :].detach().numpy(),
    decoded=decoded[:, PROMPT:].numpy(),
    **{f"weight/{n}": x.detach().numpy() for n, x in weights.items()},
    **{f"grad/{n}": grads[n].numpy() for n in kept},
  )


if __name__ == "__main__":
  HERE.mkdir(exist_ok=True)
  for family in sys.argv[1:] or FAMILIES:
    make(family)
