"""One token of each row from its logits: truncation, and a draw by inversion.

One uniform number decides a token, so a completion depends on its own key and
on nothing else in the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.logprobs import gather_support, tempered
from grpo_jax.models.layers import MASKED
from grpo_jax.types import Array

BLOCK = 128  # ids that the draw looks at together


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are drawn.

  Attributes:
    group_size: G, completions per prompt.
    max_tokens: T, the stop token included.
    stop_ids: any of these ends a completion; it is part of the completion.
    pad_id: written after the end; never read as a mark of anything.
    temperature: logits are divided by it; 0 takes the likeliest token, and
      log-probs are then those at temperature 1.
    top_k: keep the k likeliest ids; 0 keeps all.
    top_p: keep the likeliest ids up to this mass; 1 keeps all.
    min_p: keep ids with at least this share of the likeliest's probability.
    max_support: ids stored at most where top_p or min_p is used without top_k;
      a wider nucleus is cut there, for sampler and scorer alike.
    ignore_stop: run every row to its limit (benchmarks).
    early_exit: stop when all rows have; False runs T steps, so a map over
      seeds costs no more than its longest member.
    compact: smaller sizes that the batch shrinks to as its rows end; each is
      compiled. 0: rows that have ended are computed until the last has.
  """

  group_size: int
  max_tokens: int
  stop_ids: tuple[int, ...]
  pad_id: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_support: int = 128
  ignore_stop: bool = False
  early_exit: bool = True
  compact: int = 0

  def likeliest(self) -> "Sampling":
    """One completion a prompt, of the likeliest tokens."""
    return dataclasses.replace(self, group_size=1, temperature=0.0)

  def support_size(self, vocab: int) -> int:
    """Ids to store per token; 0 where the whole vocabulary is sampled."""
    if self.temperature == 0:
      return 0
    if self.top_k:
      return min(self.top_k, vocab)
    if self.top_p < 1 or self.min_p > 0:
      return min(self.max_support, vocab)
    return 0


def inverse_cdf(probs: Array, u: Array) -> Array:
  """Index i with P(i) = probs[i] / sum, from one uniform number per row.

  In two levels where V is large: a block of ids by the blocks' sums, then an
  id within it. A running sum over a whole vocabulary costs many times that.

  Args:
    probs: [..., V], not negative, not all zero; need not be normalised.
    u: [...], uniform in [0, 1).

  Returns:
    [...] int32. An index whose probability is 0 is never returned.
  """
  size = probs.shape[-1]
  if size <= 4 * BLOCK:
    sums = _running_sum(probs)
    return _first_above(sums, u * jnp.max(sums, axis=-1))[0]
  pad = [(0, 0)] * (probs.ndim - 1) + [(0, -size % BLOCK)]
  blocks = jnp.pad(probs, pad).reshape(*probs.shape[:-1], -1, BLOCK)
  sums = _running_sum(jnp.sum(blocks, axis=-1))
  target = u * jnp.max(sums, axis=-1)
  block, before = _first_above(sums, target)
  own = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
  within, _ = _first_above(_running_sum(own), target - before)
  return block * BLOCK + within


def _running_sum(probs: Array) -> Array:
  """Running sums over the last axis, 0 where the probability is 0.

  A parallel sum may rise by rounding where there is none, so only indices that
  have one count, for the total as well.
  """
  return jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0.0)


def _first_above(cumulative: Array, target: Array) -> tuple[Array, Array]:
  """The first index whose running sum exceeds `target`, and the sum before it.

  A target that rounding put past the end gets the last index of all that have
  a probability.
  """
  total = jnp.max(cumulative, axis=-1)
  target = jnp.clip(target, 0.0, jnp.nextafter(total, jnp.zeros_like(total)))
  index = jnp.argmax(cumulative > target[..., None], axis=-1)
  reached = jnp.where(cumulative <= target[..., None], cumulative, 0.0)
  return index.astype(jnp.int32), jnp.max(reached, axis=-1)


def truncate(logits: Array, sampling: Sampling) -> Array:
  """Ids kept by top-k, then top-p, then min-p: [..., V] -> [..., k], -1 none.

  Masses are those of the tempered softmax, renormalised after top-k. An id is
  in the nucleus where the mass before it is below top_p, so the likeliest
  always is.
  """
  size = sampling.support_size(logits.shape[-1])
  values, ids = jax.lax.top_k(logits, size)
  norm = jax.nn.logsumexp(
    values if sampling.top_k else logits, axis=-1, keepdims=True
  )
  probs = jnp.exp(values - norm)
  keep = values > MASKED / 2
  if sampling.top_p < 1:
    keep &= jnp.cumsum(probs, axis=-1) - probs < sampling.top_p
  if sampling.min_p > 0:
    keep &= probs >= sampling.min_p * probs[..., :1]
  return jnp.where(keep, ids, -1).astype(jnp.int32)


def choose(
  logits: Array, u: Array, sampling: Sampling
) -> tuple[Array, Array, Array | None]:
  """Draws one token per row.

  Args:
    logits: [..., V] float32.
    u: [...] uniform numbers.
    sampling: the record.

  Returns:
    token [...], its log-prob [...] under the sampled distribution, and the
    kept ids [..., k] or None.
  """
  if sampling.temperature == 0:
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    norm = jax.nn.logsumexp(logits, axis=-1)
    value = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return token, value - norm, None
  logits = tempered(logits, sampling.temperature)
  support = None
  if sampling.support_size(logits.shape[-1]):
    support = truncate(logits, sampling)
    logits = gather_support(logits, support)
  top = jnp.max(logits, axis=-1)
  probs = jnp.exp(logits - top[..., None])
  norm = top + jnp.log(jnp.sum(probs, axis=-1))
  index = inverse_cdf(probs, u)
  value = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
  token = index
  if support is not None:
    token = jnp.take_along_axis(support, index[..., None], axis=-1)[..., 0]
  return token, value - norm, support
