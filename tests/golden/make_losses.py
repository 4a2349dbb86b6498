"""Makes losses.json: losses and gradients that owe nothing to the package.

    python tests/golden/make_losses.py

One fixed ragged batch, 3 prompts x 4 completions x at most 6 tokens, one group
of equal rewards, tokens on both sides of the clip. Float64 numpy; the gradient
of each loss in the policy's log-probs is a central difference, good to 1e-8.
"""

import json
import pathlib

import numpy as np

B, G, T = 3, 4, 6
EPSILON = 1e-6  # added to a standard deviation
BETA, CLIP = 0.04, 0.2

rng = np.random.default_rng(20261001)
lengths = np.array([[2, 6, 4, 3], [5, 1, 6, 2], [3, 3, 2, 6]])
rewards = np.array([[1.0, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
mask = (np.arange(T) < lengths[..., None]).astype(float)


def noise(scale):
  return scale * rng.normal(size=(B * G, T)).reshape(B, G, T)


old = np.round(-rng.gamma(1.2, 0.8, size=(B * G, T)).reshape(B, G, T), 4) * mask
new = np.round(old + noise(0.25), 4) * mask
sampler = np.round(old + noise(0.08), 4) * mask
ref = np.round(old + noise(0.3), 4) * mask

centred = rewards - rewards.mean(1, keepdims=True)


def normalised(ddof):
  return centred / (rewards.std(1, ddof=ddof, keepdims=True) + EPSILON)


def row_sum(x):
  return (x * mask).sum(-1)


def row_mean(x):
  return row_sum(x) / lengths


def k3(log_ratio):
  return np.exp(log_ratio) - 1 - log_ratio


def article(policy):
  ratio = np.exp(row_sum(policy - old))
  kl = ratio * k3(row_sum(ref - policy))
  return (-ratio * centred + BETA * kl).mean()


def clipped(policy, ddof, beta):
  ratio, advantage = np.exp(policy - old), normalised(ddof)[..., None]
  bounded = np.clip(ratio, 1 - CLIP, 1 + CLIP)
  objective = np.minimum(ratio * advantage, bounded * advantage)
  return row_mean(beta * k3(ref - policy) - objective).mean()


LOSSES = {
  "article_rho_k3_b0.04": article,
  "grpo_std1_k3_b0.04_eps0.2": lambda x: clipped(x, 1, BETA),
  "grpo_std0_nokl": lambda x: clipped(x, 0, 0.0),
}


def gradient(loss, policy, h=1e-6):
  out = np.zeros_like(policy)
  for index in zip(*np.nonzero(mask)):
    step = np.zeros_like(policy)
    step[index] = h
    out[index] = (loss(policy + step) - loss(policy - step)) / (2 * h)
  return np.round(out, 9)


def main():
  out = {
    "lengths": lengths.tolist(),
    "rewards": rewards.tolist(),
    "logprobs": {"offpolicy": new.tolist(), "onpolicy": old.tolist()},
    "old_logprobs": old.tolist(),
    "sampler_logprobs": sampler.tolist(),
    "ref_logprobs": ref.tolist(),
    "losses": {
      name: {
        where: {"loss": loss(at), "gradient": gradient(loss, at).tolist()}
        for where, at in (("offpolicy", new), ("onpolicy", old))
      }
      for name, loss in LOSSES.items()
    },
  }
  path = pathlib.Path(__file__).with_name("losses.json")
  path.write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
  main()
