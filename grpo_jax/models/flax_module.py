"""A Flax module of one's own as the policy, by computing everything anew.

    # my_model.py, for --config.model.module=my_model:make
    def make(vocab):
      return flax_module.nnx(lambda rngs: MyModel(vocab, rngs))

The module maps ids [N, S] to logits [N, S, vocab] and looks back only: padding
is at the end of a row. SLOW: there is no cache, so every new token costs a pass
over the whole sequence, and every completion one over its prompt. To be fast,
write `prefill` and `extend` (`decoders.network`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from grpo_jax.errors import UserError
from grpo_jax.models.architecture import Aux, Decoder, Model
from grpo_jax.models.decoders import network, whole_sequences
from grpo_jax.types import Array, Params, Prompts

Apply = Callable[[Params, Array], Array]


def linen(module: flax_linen.Module) -> Decoder:
  """A Linen module.

  Args:
    module: `module.apply({"params": ...}, ids [N, S])` gives [N, S, vocab].

  Raises:
    UserError: it has variables beside its parameters.
  """
  ids = jnp.zeros((1, 2), jnp.int32)

  def init(key: Array, model: Model) -> Params:
    found = module.init(key, ids)
    _no_state(sorted(found.keys() - {"params"}))
    return found["params"]

  def apply(params: Params, ids: Array) -> Array:
    return module.apply({"params": params}, ids)

  return recomputed(init, apply)


def nnx(make: Callable[[flax_nnx.Rngs], flax_nnx.Module]) -> Decoder:
  """An NNX module.

  Args:
    make: rngs -> the module; `module(ids [N, S])` gives [N, S, vocab].

  Raises:
    UserError: it has state beside its parameters, such as dropout's.
  """
  module = flax_nnx.eval_shape(lambda: make(flax_nnx.Rngs(0)))
  graph, shapes, others = flax_nnx.split(module, flax_nnx.Param, ...)
  _no_state([".".join(map(str, p)) for p, _ in flax_nnx.to_flat_state(others)])
  variables = list(flax_nnx.to_flat_state(shapes))

  def init(key: Array, model: Model) -> Params:
    state = flax_nnx.split(make(flax_nnx.Rngs(key)), flax_nnx.Param, ...)[1]
    out: dict[str, Any] = {}
    for path, x in flax_nnx.to_flat_state(state):
      *groups, leaf = map(str, path)  # lists have numbers, a tree of ours names
      at = out
      for name in groups:
        at = at.setdefault(name, {})
      at[leaf] = x[...]
    return out

  def apply(params: Params, ids: Array) -> Array:
    filled = []
    for path, variable in variables:
      x = functools.reduce(lambda tree, name: tree[str(name)], path, params)
      filled.append((path, variable.replace(x)))
    return flax_nnx.merge(graph, flax_nnx.from_flat_state(filled))(ids)

  return recomputed(init, apply)


def _no_state(names: list[str]) -> None:
  if names:
    raise UserError(
      f"the module has state beside its parameters ({', '.join(names)}); a"
      " policy is a function of its parameters: leave out dropout and running"
      " statistics"
    )


def recomputed(init: Callable[..., Params], apply: Apply) -> Decoder:
  """A policy without a cache, of a function from sequences to logits.

  Args:
    init: (key, model) -> parameters, a nested dict.
    apply: (params, ids [N, S]) -> logits [N, S, V], a position's of it and
      those before it alone.
  """

  def run(
    params: Params, prompts: Prompts, inputs: Array, columns: slice | Array
  ) -> Array:
    """Logits [B, G, n, V] at n of the inputs [B, G, S]."""
    ids, at = whole_sequences(prompts, inputs)
    out = apply(params, ids.reshape(-1, ids.shape[-1]))
    out = out.reshape(*ids.shape, -1)
    at = jnp.take(at, columns, axis=1)
    return jnp.take_along_axis(out, at[:, None, :, None], axis=2)

  def prefill(
    params: Params, prompts: Prompts, *, model: Model
  ) -> tuple[Prompts, Aux]:
    return prompts, {}

  def extend(
    params: Params,
    tokens: Array,
    kept: Prompts,
    cache: Array,
    *,
    lengths: Array,
    start: Array | int,
    model: Model,
  ) -> tuple[Array, Array, Aux]:
    """The cache is the tokens so far; all is computed anew from them."""
    cache = jax.lax.dynamic_update_slice_in_dim(cache, tokens, start, axis=2)
    columns = start + jnp.arange(tokens.shape[2])
    return run(params, kept, cache, columns), cache, {}

  def logits(params: Params, hidden: Array, *, model: Model) -> Array:
    return hidden.astype(jnp.float32)

  def empty_cache(b: int, g: int, t: int, model: Model) -> Array:
    return jnp.zeros((b, g, t), jnp.int32)

  return network(
    init=init,
    prefill=prefill,
    extend=extend,
    empty_cache=empty_cache,
    logits=logits,
    head=lambda params: {},  # the logits are there already
  )
