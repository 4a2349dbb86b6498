"""What a model is: facts of an architecture, and how to compute it."""

import dataclasses

import jax.numpy as jnp


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

  def window(self, layer: int) -> int:
    """Tokens that a layer sees; 0 for all."""
    return self.windows[layer % len(self.windows)] if self.windows else 0


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
  """

  arch: Architecture
  dtype: str = "float32"
  remat: bool = False
  logit_elements: int = 2**24

  @property
  def compute_dtype(self) -> jnp.dtype:
    """The dtype that matrix products read."""
    return jnp.dtype(self.dtype)
