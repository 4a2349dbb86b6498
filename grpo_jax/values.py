"""A critic's network: its parameters and what it says of a rollout.

Its parameters are part of `trainable`, under `critic`: a decoder of its own,
or, where it shares the policy's, a head alone. So gradients, the optimizer,
sharding and checkpoints need no second path.
"""

import jax
import jax.numpy as jnp

from grpo_jax.logprobs import completion_inputs
from grpo_jax.models.architecture import Model
from grpo_jax.models.decoders import decoder
from grpo_jax.types import Array, Params, Rollout


def init(policy: Params, shared: bool) -> Params:
  """A critic's first parameters: a copy of the policy, values 0 everywhere."""
  size = policy["final_norm"].shape
  head = {"value": jnp.zeros(size, jnp.float32)}
  if shared:
    return head
  body = {k: v for k, v in policy.items() if k not in ("head", "critic")}
  return {**jax.tree.map(jnp.copy, body), **head}


def values(params: Params, rollout: Rollout, *, model: Model) -> Array:
  """V before each token and after the last: [B, G, T+1] float32.

  V_t is read where token t is about to be drawn: of the prompt and the first t
  tokens.

  Args:
    params: the policy's parameters with `critic` among them.
    rollout: completions.
    model: the policy's model record.
  """
  critic = params["critic"]
  body = critic if "layers" in critic else params
  inputs = completion_inputs(rollout.prompts, rollout.ids, heads=True)
  joint = decoder(model).joint
  hidden, _ = joint(body, rollout.prompts, (inputs,), model=model)
  hidden = hidden[0].astype(jnp.float32)
  return jnp.einsum("bgsd,d->bgs", hidden, critic["value"])
