"""A tiny random Llama by transformers' PyTorch classes: the import's fixture.

    pip install -e '.[parity]' && python tests/golden/make_tiny_llama.py

Writes tiny_llama/ (config.json, two safetensors shards) and, beside the
weights, what PyTorch computes from them: log-probs of the next token at each
position of two sequences, and the gradient of their mean for a few weights.
"""

import json
import pathlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent / "tiny_llama"
SIZES = {
  "vocab_size": 48,
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-5,
  "rope_theta": 5000.0,
  "tie_word_embeddings": False,
  "max_position_embeddings": 64,
  "initializer_range": 0.2,
  "eos_token_id": 2,
  "bos_token_id": 1,
}
IDS = np.array([[5, 9, 30, 7, 41, 2, 11], [8, 8, 13, 46, 3, 22, 2]])


def main():
  torch.manual_seed(0)
  model = LlamaForCausalLM(LlamaConfig(**SIZES)).float()
  model.save_pretrained(HERE, max_shard_size="20KB")
  logits = model(torch.tensor(IDS)).logits
  logprobs = torch.log_softmax(logits, -1)[:, :-1]
  chosen = logprobs.gather(-1, torch.tensor(IDS)[:, 1:, None])[..., 0]
  chosen.mean().backward()
  named = dict(model.named_parameters())
  names = [
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "lm_head.weight",
  ]
  decoded = model.generate(
    torch.tensor(IDS[:, :3]),
    attention_mask=torch.ones(2, 3),
    max_new_tokens=12,
    do_sample=False,
    eos_token_id=None,
    pad_token_id=0,
  )
  np.savez_compressed(
    HERE / "expected.npz",
    ids=IDS,
    decoded=decoded.numpy(),
    logprobs=logprobs.detach().numpy(),
    **{f"grad/{n}": named[n].grad.numpy() for n in names},
  )
  print(json.loads((HERE / "config.json").read_text()))


if __name__ == "__main__":
  main()
