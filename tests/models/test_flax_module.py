"""A network of one's own: Flax modules, and one of two functions."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import nnx

from grpo_jax import grpo
from grpo_jax.errors import UserError
from grpo_jax.logprobs import rollout_logprobs
from grpo_jax.models import decoders, flax_module, transformer
from grpo_jax.models.architecture import Architecture, Model
from grpo_jax.sampling import Sampling

VOCAB = 13
ARCH = Architecture(VOCAB, VOCAB, 1, 1, 1, 1, 2, 1)
HOW = Sampling(group_size=3, max_tokens=6, stop_ids=(0,), pad_id=0)
PROMPTS = toys.pack_prompts([[1, 2, 3, 4], [5], [6, 7]])


class Averages(nnx.Module):
  """Logits of the mean of what was read so far; causal, no attention."""

  def __init__(self, vocab, rngs):
    self.table = nnx.Embed(vocab, 8, rngs=rngs)
    self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(11)])
    self.out = nnx.Linear(8, vocab, rngs=rngs)

  def __call__(self, ids):
    x = self.table(ids)
    for layer in self.layers:
      x = x + jnp.tanh(layer(x))
    count = jnp.arange(1, ids.shape[1] + 1, dtype=jnp.float32)
    return self.out(4 * jnp.cumsum(x, axis=1) / count[None, :, None])


class LinenAverages(nn.Module):
  """The same idea, in Linen."""

  backwards: bool = False

  @nn.compact
  def __call__(self, ids):
    x = nn.Dense(8)(jnp.tanh(nn.Embed(VOCAB, 8)(ids)))
    x = jnp.cumsum(x, axis=1)
    if self.backwards:
      x = x + jnp.flip(jnp.cumsum(jnp.flip(x, 1), axis=1), 1)
    return nn.Dense(VOCAB)(x)


def nnx_model():
  net = flax_module.nnx(lambda rngs: Averages(VOCAB, rngs))
  return Model(ARCH, decoder=net)


def linen_model(**options):
  return Model(ARCH, decoder=flax_module.linen(LinenAverages(**options)))


def draw(model):
  return model.decoder.init(jax.random.key(3), model)


@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_sampled_and_scored_as_the_module_says(make):
  model = make()
  params = draw(model)
  assert all(isinstance(k, str) for k in params)

  def run(params):
    rollout = grpo.sample(
      params, PROMPTS, jax.random.key(0), model=model, sampling=HOW
    )
    slabs = ((1, 6), (2, 6))
    found = rollout_logprobs(params, rollout, model=model, slabs=slabs)
    return rollout, found[0]

  rollout, logprobs = jax.device_get(toys.jit(run)(params))
  np.testing.assert_allclose(
    logprobs, rollout.sampler_logprobs, rtol=1e-4, atol=1e-5
  )
  if make is nnx_model:
    module = Averages(VOCAB, nnx.Rngs(jax.random.key(3)))
  else:

    def module(ids):
      return LinenAverages().apply({"params": params}, ids)

  for b, g in np.ndindex(rollout.lengths.shape):
    n, size = rollout.lengths[b, g], PROMPTS.lengths[b]
    prompt = PROMPTS.ids[b, 4 - size :]
    row = np.concatenate((prompt, rollout.ids[b, g, :n]))[None]
    want = jax.nn.log_softmax(module(jnp.asarray(row)), -1)[0]
    want = want[np.arange(size - 1, size - 1 + n), row[0, size:]]
    np.testing.assert_allclose(logprobs[b, g, :n], want, rtol=1e-4, atol=1e-5)


def test_gradients_are_the_modules():
  model = nnx_model()
  params = draw(model)
  rollout = toys.pack_rollout(PROMPTS, [[[1, 2]], [[3, 4]], [[5, 6]]])
  grads = toys.jit(
    jax.grad(lambda p: rollout_logprobs(p, rollout, model=model)[0].sum())
  )(params)
  module = Averages(VOCAB, nnx.Rngs(jax.random.key(3)))

  def total(module):
    out = 0.0
    for b, row in enumerate(([1, 2], [3, 4], [5, 6])):
      size = PROMPTS.lengths[b]
      ids = jnp.array([*PROMPTS.ids[b, 4 - size :], *row])
      x = jax.nn.log_softmax(module(ids[None]), -1)[0]
      out += x[size - 1, row[0]] + x[size, row[1]]
    return out

  want = nnx.grad(total)(module)
  np.testing.assert_allclose(
    grads["layers"]["10"]["kernel"],
    want.layers[10].kernel[...],
    rtol=1e-4,
    atol=1e-5,
  )


def test_a_module_that_looks_ahead_is_noticed():
  """Sampler and scorer then differ, which the first rollout's check refuses."""
  model = linen_model(backwards=True)
  params = draw(model)

  def run(params):
    rollout = grpo.sample(
      params, PROMPTS, jax.random.key(0), model=model, sampling=HOW
    )
    return rollout, rollout_logprobs(params, rollout, model=model)[0]

  rollout, logprobs = toys.jit(run)(params)
  assert np.abs(logprobs - rollout.sampler_logprobs).max() > 0.05


def test_two_functions_are_enough():
  """`joint` of `prefill` and `extend` is the transformer's own."""
  own = transformer.DECODER
  built = decoders.network(
    init=own.init,
    prefill=own.prefill,
    extend=own.extend,
    empty_cache=own.empty_cache,
    logits=own.logits,
    unstack=own.unstack,
    prepare=own.prepare,
  )
  params = toys.draw_params(toys.ARCH)
  rollout = toys.some_rollout(toys.some_prompts())
  model = dataclasses.replace(toys.MODEL, decoder=built)

  def run(params, model):
    return jax.value_and_grad(
      lambda p: rollout_logprobs(p, rollout, model=model)[0].sum()
    )(params)

  want, got = (
    toys.jit(run, static_argnums=1)(params, m) for m in (toys.MODEL, model)
  )
  for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got)):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_state_beside_the_parameters_is_refused():
  class Dropped(nnx.Module):
    def __init__(self, rngs):
      self.drop = nnx.Dropout(0.1, rngs=rngs)

  class Normed(nn.Module):
    @nn.compact
    def __call__(self, ids):
      x = nn.Embed(VOCAB, 8)(ids)
      return nn.BatchNorm(use_running_average=False)(x)

  with pytest.raises(UserError, match=r"drop\.rngs"):
    flax_module.nnx(Dropped)
  net = flax_module.linen(Normed())
  with pytest.raises(UserError, match="batch_stats"):
    net.init(jax.random.key(0), None)
