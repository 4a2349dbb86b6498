"""Routed experts against a loop over tokens, and what the router reports."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from grpo_jax import metrics
from grpo_jax.logprobs import rollout_scores
from grpo_jax.models import experts
from grpo_jax.models.architecture import Model
from grpo_jax.sharding import AXES

ARCH = dataclasses.replace(
  toys.ARCH, experts=4, experts_per_token=2, renormalise=True
)
MODEL = Model(ARCH)


def draw(seed=0, arch=ARCH, scale=3.0):
  """One layer's weights, and inputs [B, G, S, D] that spread over experts."""
  rng = np.random.default_rng(seed)
  w = toys.draw_params(arch, seed, scale)["layers"]["mlp"]
  x = rng.normal(size=(4, 2, 3, arch.embed)).astype(np.float32)
  return {k: v[0] for k, v in w.items()}, x


def looped(w, x, arch):
  """Token by token, in float64."""
  w = {k: v.astype(np.float64) for k, v in w.items()}
  out = np.zeros(x.shape)
  for at in np.ndindex(x.shape[:-1]):
    y = x[at].astype(np.float64)
    probs = np.exp(y @ w["router"])
    probs /= probs.sum()
    best = np.argsort(-probs)[: arch.experts_per_token]
    share = probs[best] / (probs[best].sum() if arch.renormalise else 1)
    for e, p in zip(best, share):
      gate = y @ w["gate"][e]
      hidden = gate / (1 + np.exp(-gate)) * (y @ w["up"][e])
      out[at] += p * (hidden @ w["down"][e])
  return out


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_loop_over_tokens(renormalise):
  arch = dataclasses.replace(ARCH, renormalise=renormalise)
  w, x = draw(arch=arch)
  y, aux = toys.jit(lambda w, x: experts.routed(w, x, None, Model(arch)))(w, x)
  np.testing.assert_allclose(y, looped(w, x, arch), rtol=2e-5, atol=1e-6)
  assert aux["router/chosen"].sum() == 2 * 24
  assert len(set(np.asarray(aux["router/chosen"]).tolist())) > 1


def test_all_tokens_may_choose_the_same_experts():
  """No capacity: nothing is dropped, however uneven the choice."""
  w, x = draw()
  w["router"] = np.zeros_like(w["router"])
  w["router"][:, 1], w["router"][:, 3] = 1.0, 0.5
  x = np.abs(x)
  y, aux = toys.jit(lambda w, x: experts.routed(w, x, None, MODEL))(w, x)
  np.testing.assert_allclose(y, looped(w, x, ARCH), rtol=2e-5, atol=1e-6)
  np.testing.assert_array_equal(aux["router/chosen"], [0, 24, 0, 24])


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4), (8, 1, 1)])
def test_a_mesh_changes_nothing(shape):
  """Prompts over data and fsdp, experts over tensor."""
  mesh = jax.make_mesh(
    shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  w, x = draw(1)
  x = np.concatenate((x, -x))
  real = np.random.default_rng(2).integers(0, 2, x.shape[:-1]) > 0

  def run(w, x):
    def loss(w, x):
      y, aux = experts.routed(w, x, jnp.asarray(real), MODEL)
      return jnp.sum(y * jnp.cos(y)), (y, aux)

    return jax.grad(loss, (0, 1), has_aux=True)(w, x)

  want = toys.jit(run)(w, x)
  with jax.set_mesh(mesh):
    got = toys.jit(run)(w, x)
  for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got)):
    size = np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * size)


def test_what_is_counted():
  """Real tokens: a prompt's once for its group, padding never."""
  params = toys.draw_params(ARCH)
  prompts = toys.pack_prompts([[1, 2, 3, 4], [5, 6]])
  rollout = toys.pack_rollout(
    prompts, [[[1, 2], [3, 4, 5]], [[6, 7, 8, 9], [1]]], size=6
  )
  plans = None, ((1, 6), (1, 3)), ((2, 6),)
  found = []
  for slabs in plans:
    _, aux = toys.jit(
      lambda p, r, s=slabs: rollout_scores(p, r, model=MODEL, slabs=s)
    )(params, rollout)
    found.append(aux)
  prompt_stream, inputs = 3 + 1, 2 + 3 + 4 + 1
  for aux in found:
    np.testing.assert_array_equal(
      aux["router/tokens"], [prompt_stream + inputs] * ARCH.layers
    )
    for name in aux:
      np.testing.assert_allclose(aux[name], found[0][name], rtol=1e-5)
  means = metrics.router_means(found[0])
  chosen = np.asarray(found[0]["router/chosen"], np.float64)
  prob = np.asarray(found[0]["router/prob"], np.float64) / 14
  share = chosen / chosen.sum(1, keepdims=True)
  want = np.mean([4 * (f * p).sum() for f, p in zip(share, prob)])
  np.testing.assert_allclose(means["router/balance"], want, rtol=1e-6)
  even = {
    "router/chosen": np.ones((2, 4)),
    "router/prob": np.ones((2, 4)) / 2,
    "router/tokens": np.full(2, 2.0),
  }
  assert float(metrics.router_means(even)["router/balance"]) == 1
