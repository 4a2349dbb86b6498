"""Log-probabilities of finished completions, without [B, G, T, V].

THE ONLY SHIFT: `completion_inputs` is the one place where token t's input is
made of token t-1. Everything else is aligned with the generated tokens.

Ragged lengths are met by slabs: rows are sorted within each group, longest
first, and G is cut at static points, so `((2, 64), (6, 16))` computes two rows
of every group at 64 tokens and six at 16. All slabs share one prompt pass, and
results come back as [B, G, T] in the original order.
"""

import jax
import jax.numpy as jnp

from grpo_jax.models.architecture import Aux, Model
from grpo_jax.models.decoders import decoder
from grpo_jax.models.layers import MASKED
from grpo_jax.sharding import gather, ways
from grpo_jax.types import Array, Params, Prompts, Rollout, length_mask

Slabs = tuple[tuple[int, int], ...]  # (rows of each group, tokens), static


def completion_inputs(prompts: Prompts, ids: Array, *, heads: bool) -> Array:
  """The completion stream's inputs: the last prompt token, then the tokens.

  Args:
    prompts: ids [B, P], left-padded, so the last token is the last column.
    ids: completion ids [B, g, T].
    heads: keep the last completion token as an input (S = T+1), for value and
      reward heads; log-probs need S = T.

  Returns:
    [B, g, S].
  """
  last = jnp.broadcast_to(
    prompts.ids[:, -1][:, None, None], (*ids.shape[:2], 1)
  )
  return jnp.concatenate((last, ids if heads else ids[..., :-1]), axis=-1)


def tempered(logits: Array, temperature: Array | float) -> Array:
  """The logits of the distribution that is sampled, before any truncation."""
  return logits / temperature


def gather_support(logits: Array, support: Array) -> Array:
  """Logits of the kept ids: [..., V], [..., k] -> [..., k]; -1 is no id."""
  kept = jnp.take_along_axis(logits, jnp.maximum(support, 0), axis=-1)
  return jnp.where(support >= 0, kept, MASKED)


@jax.named_scope("token_logprobs")
def token_logprobs(
  params: Params,
  hidden: Array,
  ids: Array,
  *,
  model: Model,
  temperature: Array | float,
  support: Array | None = None,
  ref: tuple[Params, Array] | None = None,
) -> tuple[Array, ...]:
  """log π(token) and the entropy of π at each position, in chunks over T.

  A chunk's logits are dropped after use and made anew in the backward pass, so
  memory is bounded by `model.logit_elements`, not by T.

  Args:
    params: parameters.
    hidden: [B, g, T, D] after the final norm.
    ids: [B, g, T], the tokens to score.
    model: the model record.
    temperature: scalar; logits are divided by it before the softmax.
    support: [B, g, T, k] kept ids, or None for the whole vocabulary.
    ref: the reference's parameters and hidden [B, g, T, D], for the exact KL.

  Returns:
    log-probs [B, g, T] and entropies [B, g, T] in nats, float32; with `ref`
    also KL(π‖π_ref) of the whole distribution at each position.
  """
  net = decoder(model)

  def distribution(
    params: Params, hidden: Array, ids: Array, support: Array | None
  ) -> tuple[Array, Array]:
    """log π of the token, and of every id that can be drawn: [..., V or k]."""
    x = tempered(net.logits(params, hidden, model=model), temperature)
    token = jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0]
    if support is not None:
      x = gather_support(x, support)
    norm = jax.nn.logsumexp(x, axis=-1)
    return token - norm, x - norm[..., None]

  @jax.checkpoint
  def chunk(params: tuple, piece: tuple) -> tuple[Array, ...]:
    hidden, ids, support, ref_hidden = piece
    token, x = distribution(params[0], hidden, ids, support)
    probs = jnp.exp(x)
    out = token, -jnp.sum(probs * x, axis=-1)
    if ref_hidden is None:
      return out
    _, y = distribution(params[1], ref_hidden, ids, support)
    # Ids nobody can draw are -1e30 in both: their difference is not used.
    gap = jnp.where(probs > 0, x - y, 0.0)
    return *out, jnp.sum(probs * gap, axis=-1)

  ref_hidden = None if ref is None else ref[1]
  params = (net.head(params), None if ref is None else net.head(ref[0]))
  ids = jnp.clip(ids, 0, model.arch.vocab - 1)
  b, g, t, _ = hidden.shape
  per_token = b * g * model.arch.vocab // ways("prompts", "vocab")
  size = max(1, min(t, model.logit_elements // per_token))
  if size == t:
    return chunk(params, (hidden, ids, support, ref_hidden))

  count = -(-t // size)

  def cut(x: Array) -> Array:  # [B, g, T, ...] -> [count, B, g, size, ...]
    pad = [(0, 0)] * x.ndim
    pad[2] = (0, count * size - t)
    x = jnp.pad(x, pad).reshape(b, g, count, size, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)

  # Once, not in each chunk; its gradient is reduced over devices once as well.
  axes = net.head(net.axes(model))
  params = tuple(x and gather(x, axes) for x in params)
  pieces = jax.tree.map(cut, (hidden, ids, support, ref_hidden))
  _, out = jax.lax.scan(
    lambda carry, piece: (carry, chunk(params, piece)), None, pieces
  )
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 2).reshape(b, g, count * size)[..., :t], out
  )


def rollout_logprobs(
  params: Params,
  rollout: Rollout,
  *,
  model: Model,
  slabs: Slabs | None = None,
  ref: Params | None = None,
) -> tuple[Array, ...]:
  """log π of every completion token under `params`, and π's entropy there.

  The distribution is the rollout's own: its temperature and its support.

  Args:
    params: stacked parameters.
    rollout: ids [B, G, T].
    model: the model record.
    slabs: a static plan that covers the rollout (see `cover`), or None for
      one slab of G rows and T tokens.
    ref: parameters of a reference, for the exact KL to it; no gradient flows
      there.

  Returns:
    log-probs [B, G, T] and entropies [B, G, T], float32, 0 off the lengths;
    with `ref` the exact KL of each token's distribution, too.
  """
  out, _ = rollout_scores(params, rollout, model=model, slabs=slabs, ref=ref)
  return out


def rollout_scores(
  params: Params,
  rollout: Rollout,
  *,
  model: Model,
  slabs: Slabs | None = None,
  ref: Params | None = None,
) -> tuple[tuple[Array, ...], Aux]:
  """`rollout_logprobs`, and what the network reports beside (its router)."""
  _, g, t = rollout.ids.shape
  slabs = slabs or ((g, t),)
  assert sum(rows for rows, _ in slabs) == g, (slabs, g)
  if len(slabs) == 1 and slabs[0][1] == t:
    order = None
  else:
    order = jnp.argsort(-rollout.lengths, axis=1, stable=True)  # [B, G]

  def rows(x: Array | None, start: int, count: int, size: int) -> Array | None:
    if x is None or order is None:
      return x
    index = order[:, start : start + count]
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x[:, :, :size], index, axis=1)

  real = length_mask(rollout.lengths, t)
  parts, start = (rollout.ids, rollout.support, real), 0
  pieces = []
  for count, size in slabs:
    pieces.append(tuple(rows(x, start, count, size) for x in parts))
    start += count
  inputs = tuple(
    completion_inputs(rollout.prompts, ids, heads=False) for ids, _, _ in pieces
  )
  net = decoder(model)
  masks = tuple(mask for _, _, mask in pieces)
  hidden, aux = net.joint(
    params, rollout.prompts, inputs, model=model, real=masks
  )
  refs: list[tuple[Params, Array] | None] = [None] * len(hidden)
  if ref is not None:
    ref = jax.lax.stop_gradient(ref)
    theirs, _ = net.joint(ref, rollout.prompts, inputs, model=model)
    refs = [(ref, h) for h in theirs]
  out = [
    token_logprobs(
      params,
      h,
      ids,
      model=model,
      temperature=rollout.temperature,
      support=support,
      ref=other,
    )
    for h, (ids, support, _), other in zip(hidden, pieces, refs)
  ]

  def restore(parts: list[Array]) -> Array:
    parts = [jnp.pad(x, ((0, 0), (0, 0), (0, t - x.shape[2]))) for x in parts]
    x = jnp.concatenate(parts, axis=1)
    if order is not None:
      inverse = jnp.argsort(order, axis=1)[..., None]
      x = jnp.take_along_axis(x, inverse, axis=1)
    return jnp.where(real, x, 0.0)

  return tuple(restore(list(column)) for column in zip(*out)), aux


def plans(group: int, size: int, cuts: int, buckets: int) -> tuple[Slabs, ...]:
  """Every slab plan that may be used: a small, closed set of shapes.

  G is cut into `cuts` nearly equal parts; each part's tokens are one of
  `buckets` even fractions of T, not growing from one part to the next.

  Args:
    group: G.
    size: T.
    cuts: slabs in a plan.
    buckets: lengths a slab may have.
  """
  cuts = min(cuts, group)
  rows = [group // cuts + (i < group % cuts) for i in range(cuts)]
  lengths = sorted({-(-size * (i + 1) // buckets) for i in range(buckets)})
  out: list[Slabs] = [()]
  for count in rows:
    out = [
      (*plan, (count, n))
      for plan in out
      for n in lengths
      if not plan or n <= plan[-1][1]
    ]
  return tuple(out)


def cover(lengths: Array, choices: tuple[Slabs, ...]) -> Slabs:
  """The plan with the fewest tokens that holds every row, chosen on the host.

  Args:
    lengths: numpy [B, G].
    choices: from `plans`; one of them holds T tokens everywhere.
  """
  ranked = (-lengths).argsort(axis=1, kind="stable")
  ordered = lengths[[[i] for i in range(len(lengths))], ranked]

  def fits(plan: Slabs) -> bool:
    start = 0
    for count, size in plan:
      if ordered[:, start].max() > size:
        return False
      start += count
    return True

  usable = [plan for plan in choices if fits(plan)]
  return min(usable, key=lambda plan: sum(g * t for g, t in plan))
