"""What a model is: facts of an architecture, and how to compute it."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Facts of a decoder of the Llama line; never runtime choices.

  RMSNorm before attention and before the feed-forward, rotary positions,
  grouped-query attention, SwiGLU, an output head of its own or the input
  table's.
  """

  vocab: int  # rows of the table, padding rows included
  real_vocab: int  # ids a tokenizer can produce; others are never sampled
  layers: int
  embed: int
  heads: int
  kv_heads: int
  head_dim: int
  ffn: int
  tied: bool = False
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-5


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
