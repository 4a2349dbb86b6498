"""Routed experts: each token through the few feed-forwards a router chooses.

Dropless: tokens are sorted by expert and each expert multiplies as many rows
as chose it (`lax.ragged_dot`), so there is no capacity and no token is lost.
Over a mesh every device sorts the tokens of its own prompts; experts are split
over the tensor axis, and a device computes the rows of its own ones.
"""

import functools

import jax
import jax.numpy as jnp

from grpo_jax.models.architecture import Architecture, Aux, Model
from grpo_jax.models.layers import ACTIVATIONS
from grpo_jax.sharding import RULES
from grpo_jax.types import Array, Params


@jax.named_scope("experts")
def routed(
  w: Params, x: Array, real: Array | None, model: Model
) -> tuple[Array, Aux]:
  """Σ_e p_e expert_e(x) over the experts e that the router chooses.

  p is the router's softmax over all experts, in float32, renormalised over the
  chosen ones where the architecture says so.

  Args:
    w: router [D, X]; gate, up [X, D, F]; down [X, F, D].
    x: [B, G, S, D].
    real: [B, G, S] bool, the tokens that aux counts; None: all.
    model: the model record.

  Returns:
    [B, G, S, D]; aux: `router/chosen` [X], tokens that chose each expert,
    `router/prob` [X], their summed probability, `router/tokens` [], how many
    there were. Sums, so that those of streams and micro-batches add up.
  """
  if real is None:
    real = jnp.ones(x.shape[:-1], bool)
  real = jnp.broadcast_to(real, x.shape[:-1])
  weights = [w[name] for name in ("router", "gate", "up", "down")]
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return _local(*weights, x, real, arch=model.arch)
  axis = RULES["experts"][0]
  rows, whole, mine = jax.P(RULES["prompts"]), jax.P(), jax.P(axis)
  run = jax.shard_map(
    functools.partial(_local, arch=model.arch, axis=axis),
    in_specs=(whole, mine, mine, mine, rows, rows),
    out_specs=(rows, whole),
    check_vma=False,
  )
  return run(*weights, x, real)


def _local(
  router: Array,
  gate: Array,
  up: Array,
  down: Array,
  x: Array,
  real: Array,
  *,
  arch: Architecture,
  axis: str | None = None,
) -> tuple[Array, Aux]:
  """One device's tokens through its own experts, summed over `axis`."""
  chosen = arch.experts_per_token
  flat = x.reshape(-1, x.shape[-1])
  logits = flat.astype(jnp.float32) @ router
  probs = jax.nn.softmax(logits, axis=-1)
  share, expert = jax.lax.top_k(probs, chosen)  # [N, chosen]
  if arch.renormalise:
    share = share / jnp.sum(share, axis=-1, keepdims=True)
  aux = _counts(probs, expert, real.reshape(-1))

  own = gate.shape[0]
  local = expert.reshape(-1)
  if axis is not None:
    local = local - jax.lax.axis_index(axis) * own
  # Other devices' rows sort behind the last expert's and belong to no group.
  local = jnp.where((local >= 0) & (local < own), local, own)
  order = jnp.argsort(local, stable=True)
  sizes = jnp.sum(jax.nn.one_hot(local, own, dtype=jnp.int32), axis=0)
  rows = flat[order // chosen]
  act = ACTIVATIONS[arch.activation]
  hidden = act(jax.lax.ragged_dot(rows, gate, sizes))
  hidden = hidden * jax.lax.ragged_dot(rows, up, sizes)
  y = jax.lax.ragged_dot(hidden, down, sizes)
  y = jnp.where((local[order] < own)[:, None], y, 0)
  # Back to each token's own order, then one sum over its experts.
  y = y[jnp.argsort(order)].reshape(*expert.shape, -1).astype(jnp.float32)
  out = jnp.sum(y * share[..., None], axis=1)
  if axis is not None:
    out = jax.lax.psum(out, axis)
    aux = jax.lax.psum(aux, RULES["prompts"])
  return out.astype(x.dtype).reshape(x.shape), aux


def _counts(probs: Array, expert: Array, real: Array) -> Aux:
  """What the router did with the real tokens; no gradient flows from here."""
  hot = jax.nn.one_hot(expert, probs.shape[-1], dtype=jnp.float32)
  weight = real.astype(jnp.float32)[:, None]
  sums = {
    "router/chosen": jnp.sum(jnp.sum(hot, axis=1) * weight, axis=0),
    "router/prob": jnp.sum(probs * weight, axis=0),
    "router/tokens": jnp.sum(weight),
  }
  return jax.lax.stop_gradient(sums)
