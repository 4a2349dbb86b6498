"""What a model is: facts of an architecture, and how to compute it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Aux = dict[str, jax.Array]  # what a family adds: sums that a router reports


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched for longer contexts.

  Attributes:
    kind: linear, llama3 or yarn.
    factor: of the stretch.
    low: llama3's low_freq_factor; yarn's beta_slow.
    high: llama3's high_freq_factor; yarn's beta_fast.
    original: tokens that the model was trained on before.
    attention: yarn's factor on cosines and sines; 0: its own rule.
  """

  kind: str
  factor: float
  low: float = 1.0
  high: float = 4.0
  original: int = 8192
  attention: float = 0.0


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Facts of a decoder of the Llama line; never runtime choices.

  RMSNorm, rotary positions, grouped-query attention, a gated feed-forward, an
  output head of its own or the input table's.

  Attributes:
    vocab: rows of the table, padding rows included.
    real_vocab: ids a tokenizer can produce; others are never sampled.
    tied: the output head is the input table.
    qkv_bias: queries, keys and values have a bias.
    qk_norm: RMSNorm of queries and keys: none, head (each head) or width (all
      heads together).
    norms: pre (before attention and feed-forward), post (of their outputs) or
      both.
    activation: of the gate: silu or gelu (its tanh form).
    embed_scale: multiplies the looked-up embeddings.
    query_scale: multiplies queries; 0: 1/sqrt(head_dim).
    attention_cap: attention logits are cap·tanh(x/cap); 0: as they are.
    logit_cap: the same of the output.
    windows: tokens that a layer's attention sees, in a repeating period of
      layers; 0 sees all.
    rope_scaling: of the layers that see all.
    window_theta: rotary base of the layers with a window; 0: rope_theta's.
    experts: feed-forwards that a router chooses from; 0: one, for all tokens.
    experts_per_token: how many it chooses.
    renormalise: the chosen ones' probabilities are made to sum to 1.
  """

  vocab: int
  real_vocab: int
  layers: int
  embed: int
  heads: int
  kv_heads: int
  head_dim: int
  ffn: int
  tied: bool = False
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-5
  qkv_bias: bool = False
  qk_norm: str = "none"
  norms: str = "pre"
  activation: str = "silu"
  embed_scale: float = 1.0
  query_scale: float = 0.0
  attention_cap: float = 0.0
  logit_cap: float = 0.0
  windows: tuple[int, ...] = ()
  rope_scaling: RopeScaling | None = None
  window_theta: float = 0.0
  experts: int = 0
  experts_per_token: int = 0
  renormalise: bool = False

  def window(self, layer: int) -> int:
    """Tokens that a layer sees; 0 for all."""
    return self.windows[layer % len(self.windows)] if self.windows else 0


@dataclasses.dataclass(frozen=True)
class Lora:
  """Adapters: W x becomes W x + alpha/rank * B A x (Hu et al. 2021, eq. 3).

  Attributes:
    rank: of the products.
    alpha: their scale, times rank.
    targets: the projections of every layer that have one, such as 'attn/q'.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]

  @property
  def scale(self) -> float:
    """The factor of B A."""
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Model:
  """An architecture and how it is computed. Sampler and trainer are two.

  Attributes:
    arch: the facts.
    dtype: compute dtype of matrix products, 'float32' or 'bfloat16'; logits,
      softmax, norms and rotary angles are float32 in any case.
    remat: recompute each layer in the backward pass instead of storing it.
    logit_elements: the most logits (float32) a device may hold at once;
      log-probs are taken in chunks over T of at most this size.
    lora: adapters; then they alone are trained.
    decoder: the functions that compute it; None: `transformer`'s.
  """

  arch: Architecture
  dtype: str = "float32"
  remat: bool = False
  logit_elements: int = 2**24
  lora: Lora | None = None
  decoder: "Decoder | None" = None

  @property
  def compute_dtype(self) -> jnp.dtype:
    """The dtype that matrix products read."""
    return jnp.dtype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A network as sampling and scoring call it: a record of pure functions.

  `B` prompts of `P` tokens, `G` completions of `T`. The prompt stream is the
  first len-1 prompt tokens, left-padded; the last one is the first input of
  the completion stream. What the network keeps between calls is its own.

  Attributes:
    prefill: (params, prompts, *, model) -> what it keeps of them, aux.
    extend: (params, tokens [B, G, S], kept, cache, *, lengths [B] of the
      prompts, start [], model) -> hidden [B, G, S, D], cache, aux.
    joint: (params, prompts, slabs, *, model) -> hidden of each slab [B, g, S],
      aux: `extend` after `prefill`, in one pass.
    logits: (params, hidden [..., D], *, model) -> [..., V] float32.
    head: params -> the part of them that `logits` reads.
    prepare: (params, model) -> the sampler's copy, once per rollout.
    unstack: (params, model) -> the form of it that `extend` reads.
    empty_cache: (B, G, T, model) -> a cache of nothing yet.
    axes: model -> logical axes of the parameters, a tree like theirs.
    init: (key, model) -> float32 parameters.
  """

  prefill: Callable[..., Any]
  extend: Callable[..., Any]
  joint: Callable[..., Any]
  logits: Callable[..., Any]
  head: Callable[..., Any]
  prepare: Callable[..., Any]
  unstack: Callable[..., Any]
  empty_cache: Callable[..., Any]
  axes: Callable[..., Any]
  init: Callable[..., Any]
