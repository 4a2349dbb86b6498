"""The parts of a decoder layer: norm, attention, the gated feed-forward.

Letters: `B` prompts, `G` completions, `S` query tokens, `P` prompt keys,
`T` own keys, `K` key/value heads, `R` query heads per key/value head, `E` head
size, `D` embed, `F` feed-forward.
"""

import math

import jax
import jax.numpy as jnp

from grpo_jax.types import Array

# Finite, so that a row with no visible key softmaxes to something finite: it
# belongs to padding and is never read, but its gradient must not be NaN.
MASKED = -1e30


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  """x / rms(x) * scale over the last axis, computed in float32.

  Args:
    x: [..., D].
    scale: [D].
    eps: added to the mean square.
  """
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
  return (y * jnp.broadcast_to(scale, y.shape)).astype(x.dtype)


def capped(x: Array, cap: float) -> Array:
  """cap·tanh(x/cap); x itself at cap 0."""
  return cap * jnp.tanh(x / cap) if cap else x


@jax.named_scope("attention")
def attention(
  q: Array,
  prompt_kv: tuple[Array, Array] | None,
  own_kv: tuple[Array, Array],
  *,
  prompt_lengths: Array | None = None,
  own_pad: Array | None = None,
  start: Array | int = 0,
  window: Array | int | None = None,
  scale: float = 0.0,
  cap: float = 0.0,
) -> Array:
  """Each query sees its group's prompt and its own past; one softmax for both.

  Args:
    q: [B, G, S, H, E], queries at own positions start .. start+S-1.
    prompt_kv: keys and values [B, P, K, E] of the prompt, shared by the group,
      left-padded; None for the prompt stream itself.
    own_kv: keys and values [B, G, T, K, E] of the stream the queries are in.
    prompt_lengths: [B], real keys in `prompt_kv`.
    own_pad: [B], leading keys of `own_kv` that are padding.
    start: own position of the first query.
    window: keys this far back or further are not seen; None sees all.
    scale: of the queries; 0 is 1/sqrt(E).
    cap: of the logits, see `capped`.

  Returns:
    [B, G, S, H, E], the dtype of q. Rows of padding hold finite values.
  """
  b, g, s, h, e = q.shape
  k, v = own_kv
  kv_heads, t = k.shape[-2], k.shape[-3]
  q = q.reshape(b, g, s, kv_heads, h // kv_heads, e) * (
    scale or 1 / math.sqrt(e)
  )
  query = jnp.asarray(start) + jnp.arange(s)
  distance = query[:, None] - jnp.arange(t)[None, :]  # [S, T]
  visible = distance >= 0
  if window is not None:
    visible &= distance < window
  visible = visible[None]
  if own_pad is not None:
    visible = visible & (jnp.arange(t)[None, None] >= own_pad[:, None, None])
  scores = _scores(
    "bgskre,bgtke->bkrgst", q, k, visible[:, None, None, None], cap
  )
  if prompt_kv is None:
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkrgst,bgtke->bgskre", weights, v)
    return out.reshape(b, g, s, h, e)

  prompt_k, prompt_v = prompt_kv
  p = prompt_k.shape[1]
  column = jnp.arange(p)
  seen = column[None, None] >= (p - prompt_lengths)[:, None, None]
  if window is not None:  # positions count real tokens, so padding cancels
    seen = seen & ((query[:, None] + p - column[None])[None] < window)
  prompt_scores = _scores(
    "bgskre,bpke->bkrgsp", q, prompt_k, seen[:, None, None, None], cap
  )
  weights = jax.nn.softmax(
    jnp.concatenate((prompt_scores, scores), axis=-1), axis=-1
  ).astype(v.dtype)
  out = jnp.einsum("bkrgsp,bpke->bgskre", weights[..., :p], prompt_v)
  out = out + jnp.einsum("bkrgst,bgtke->bgskre", weights[..., p:], v)
  return out.reshape(b, g, s, h, e)


def _scores(
  formula: str, q: Array, k: Array, visible: Array, cap: float
) -> Array:
  """Masked attention logits in float32."""
  scores = jnp.einsum(formula, q, k, preferred_element_type=jnp.float32)
  return jnp.where(visible, capped(scores, cap), MASKED)


def _gelu(x: Array) -> Array:
  return jax.nn.gelu(x, approximate=True)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": _gelu}
