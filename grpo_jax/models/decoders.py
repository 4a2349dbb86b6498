"""Which functions compute a model: the transformer's, or another network's.

Two functions make any network a policy: `prefill` and `extend`, with a cache
that is their own (`network`). All else follows from them, and each of the rest
may be written for speed as well.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models import transformer
from grpo_jax.models.architecture import Aux, Decoder, Model
from grpo_jax.types import Array, Params, Prompts


def decoder(model: Model) -> Decoder:
  """The functions of a model."""
  return model.decoder or transformer.DECODER


def parameter_count(model: Model) -> int:
  """Number of parameters, adapters apart; a tied head counts once."""
  shapes = jax.eval_shape(lambda: decoder(model).init(jax.random.key(0), model))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def network(
  *,
  init: Callable[..., Params],
  prefill: Callable[..., Any],
  extend: Callable[..., Any],
  empty_cache: Callable[..., Any],
  logits: Callable[..., Array],
  **rest: Callable[..., Any],
) -> Decoder:
  """A decoder of few functions; see `architecture.Decoder` for what they take.

  Where they are not given: `joint` is `extend` after `prefill`; the sampler
  reads the parameters as they are; every device holds them whole.

  Args:
    init: (key, model) -> parameters, a nested dict of float32 arrays.
    prefill: the prompts, once for their groups.
    extend: the next tokens of all completions, against what is kept.
    empty_cache: (B, G, T, model) -> a cache with room for T tokens.
    logits: hidden -> float32 logits.
    **rest: others of the decoder's functions.
  """

  def joint(
    params: Params,
    prompts: Prompts,
    slabs: tuple[Array, ...],
    *,
    model: Model,
    real: tuple[Array, ...] | None = None,
  ) -> tuple[tuple[Array, ...], Aux]:
    own = prepare(params, model)
    kept, _ = prefill(own, prompts, model=model)
    own = unstack(own, model)
    out = []
    for tokens in slabs:
      hidden, _, _ = extend(
        own,
        tokens,
        kept,
        empty_cache(*tokens.shape, model),
        lengths=prompts.lengths,
        start=0,
        model=model,
      )
      out.append(hidden)
    return tuple(out), {}

  def axes(model: Model) -> Any:
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), model))
    return jax.tree.map(lambda x: (None,) * x.ndim, shapes)

  def as_it_is(params: Params, model: Model) -> Params:
    return params

  prepare = rest.pop("prepare", as_it_is)
  unstack = rest.pop("unstack", as_it_is)
  return Decoder(
    init=init,
    prefill=prefill,
    extend=extend,
    empty_cache=empty_cache,
    logits=logits,
    prepare=prepare,
    unstack=unstack,
    joint=rest.pop("joint", joint),
    head=rest.pop("head", lambda params: params),
    axes=rest.pop("axes", axes),
    **rest,
  )


def whole_sequences(prompts: Prompts, inputs: Array) -> tuple[Array, Array]:
  """Prompt and completion of each row in one piece, without padding between.

  Args:
    prompts: ids [B, P], left-padded.
    inputs: [B, G, S] of the completion stream: the last prompt token first.

  Returns:
    ids [B, G, P-1+S], padding at the end alone (its ids mean nothing), and the
    columns [B, S] at which the inputs stand.
  """
  b, g, s = inputs.shape
  size = prompts.ids.shape[1]
  stream = jnp.broadcast_to(prompts.ids[:, None, :-1], (b, g, size - 1))
  ids = jnp.concatenate((stream, inputs), axis=-1)
  column = jnp.arange(size - 1 + s)[None] + (size - prompts.lengths)[:, None]
  column = jnp.minimum(column, size - 2 + s)
  ids = jnp.take_along_axis(ids, column[:, None], axis=-1)
  return ids, prompts.lengths[:, None] - 1 + jnp.arange(s)[None]
