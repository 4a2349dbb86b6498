"""The decoder once more, in float64, one sequence at a time and by loops.

It shares no line and no layout with the package: no padding, no groups, no
cache, no masks, rotations by complex numbers.
"""

import numpy as np


def norm(x, scale, eps):
  return x / np.sqrt(np.mean(x**2) + eps) * scale


def turn(x, position, theta):
  """Rotates pairs (i, i + E/2) by position * theta^(-2i/E)."""
  half = len(x) // 2
  z = (x[:half] + 1j * x[half:]) * np.exp(
    1j * position * theta ** (-np.arange(half) / half)
  )
  return np.concatenate((z.real, z.imag))


def softmax(x):
  e = np.exp(x - np.max(x))
  return e / e.sum()


def attend(w, arch, rows):
  """Causal attention of one sequence: list of [D] -> list of [D]."""
  keys = [np.einsum("d,dke->ke", x, w["k"]) for x in rows]
  values = [np.einsum("d,dke->ke", x, w["v"]) for x in rows]
  out = []
  for i, x in enumerate(rows):
    queries = np.einsum("d,dhe->he", x, w["q"])
    total = np.zeros_like(x)
    for h in range(arch.heads):
      k = h * arch.kv_heads // arch.heads
      query = turn(queries[h], i, arch.rope_theta)
      scores = [
        query @ turn(keys[j][k], j, arch.rope_theta) / arch.head_dim**0.5
        for j in range(i + 1)
      ]
      chance = softmax(np.array(scores))
      mixed = sum(p * values[j][k] for j, p in enumerate(chance))
      total += mixed @ w["o"][h]
    out.append(total)
  return out


def feed_forward(w, x):
  gate = x @ w["gate"]
  return (gate / (1 + np.exp(-gate)) * (x @ w["up"])) @ w["down"]


def logits(params, arch, tokens):
  """Logits after each token of one sequence: [n] -> [n, real_vocab]."""
  rows = [params["embed"][t].astype(np.float64) for t in tokens]
  for layer in range(arch.layers):
    w = {
      part: {
        k: v[layer].astype(np.float64)
        for k, v in params["layers"][part].items()
      }
      for part in ("attn", "mlp")
    }
    scale = params["layers"]["attn_norm"][layer]
    normed = [norm(x, scale, arch.norm_eps) for x in rows]
    rows = [x + y for x, y in zip(rows, attend(w["attn"], arch, normed))]
    scale = params["layers"]["mlp_norm"][layer]
    rows = [
      x + feed_forward(w["mlp"], norm(x, scale, arch.norm_eps)) for x in rows
    ]
  head = params["embed" if arch.tied else "head"][: arch.real_vocab]
  return np.array(
    [
      head.astype(np.float64) @ norm(x, params["final_norm"], arch.norm_eps)
      for x in rows
    ]
  )


def score(params, arch, prompt, completion, temperature=1.0):
  """log π and entropy at each token of one completion, in float64."""
  tokens = [*prompt, *completion]
  found = []
  after = logits(params, arch, tokens)
  for t, token in enumerate(completion):
    chance = softmax(after[len(prompt) - 1 + t] / temperature)
    found.append((np.log(chance[token]), -np.sum(chance * np.log(chance))))
  return np.array(found).T
