"""The decoder against loops in float64, and what must not change its scores."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_decoder
import pytest
import toys

from grpo_jax.logprobs import completion_inputs, rollout_logprobs
from grpo_jax.models import kv, transformer, weight_table
from grpo_jax.models.architecture import Model
from grpo_jax.types import Prompts

PARAMS = toys.draw_params(toys.ARCH)
PROMPTS = toys.some_prompts()  # 5, 1 and 3 tokens
ROLLOUT = toys.some_rollout(PROMPTS)  # four ragged completions each


def score(rollout, params=PARAMS, model=toys.MODEL):
  return jax.device_get(toys.scorer(model)(params, rollout))


def by_loops(rollout, params, arch):
  """Log-probs and entropies of a rollout, one completion at a time."""
  out = np.zeros((2, *rollout.ids.shape))
  p = rollout.prompts
  for b, g in np.ndindex(rollout.lengths.shape):
    prompt = p.ids[b, p.ids.shape[1] - p.lengths[b] :]
    n = rollout.lengths[b, g]
    out[:, b, g, :n] = numpy_decoder.score(
      params, arch, prompt, rollout.ids[b, g, :n], rollout.temperature
    )
  return out


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_joint_equals_loops_over_single_sequences(temperature):
  rollout = ROLLOUT.replace(temperature=np.float32(temperature))
  want = by_loops(rollout, PARAMS, toys.ARCH)
  toys.close(score(rollout), (want[0], want[1]), 1e-5)
  assert want[0].min() < -3


def test_a_tied_head_is_the_input_table():
  arch = dataclasses.replace(toys.ARCH, tied=True, layers=1)
  params = toys.draw_params(arch, seed=3)
  assert "head" not in params
  want = by_loops(ROLLOUT, params, arch)
  found = score(ROLLOUT, params, Model(arch))
  toys.close(found, (want[0], want[1]), 1e-5)


def test_decoding_token_by_token_equals_joint():
  model, (b, g, t) = toys.MODEL, ROLLOUT.ids.shape

  def both(params, rollout):
    prompts = rollout.prompts
    inputs = completion_inputs(prompts, rollout.ids, heads=False)
    (joint,), _ = transformer.joint(params, prompts, (inputs,), model=model)
    prompt_kv, _ = transformer.prefill(params, prompts, model=model)
    flat = transformer.unstack(transformer.cast(params, model), model.arch)

    def run(start, size, cache):
      tokens = jax.lax.dynamic_slice_in_dim(inputs, start, size, axis=2)
      hidden, cache, _ = transformer.extend(
        flat,
        tokens,
        prompt_kv,
        cache,
        lengths=prompts.lengths,
        start=start,
        model=model,
      )
      return hidden, cache

    def one(carry, _):
      start, cache = carry
      hidden, cache = run(start, 1, cache)
      return (start + 1, cache), hidden[:, :, 0]

    empty = kv.empty_cache(b, g, t, model)
    _, single = jax.lax.scan(one, (0, empty), length=t)
    first, cache = run(0, 2, empty)  # S > 1: two tokens, then the rest
    rest, _ = run(2, t - 2, cache)
    chunks = jnp.concatenate((first, rest), axis=2)
    return joint, jnp.moveaxis(single, 0, 2), chunks

  joint, single, chunks = toys.jit(both)(PARAMS, ROLLOUT)
  toys.close(single, joint, 2e-5)
  toys.close(chunks, joint, 2e-5)
  assert np.abs(joint).max() > 0.5


def test_nothing_but_the_tokens_matters():
  # A08, A09: contents of the padding, rows and their order; in one shape.
  plain = score(ROLLOUT)
  p = ROLLOUT.prompts
  noise = np.random.default_rng(7).integers(0, 16, (3, 4, 5)).astype(np.int32)
  filled = ROLLOUT.replace(ids=np.where(ROLLOUT.mask, ROLLOUT.ids, noise))
  toys.close(score(filled), plain, 1e-6)
  # An id past the table, and a stop id for padding, are as good.
  filled = ROLLOUT.replace(ids=np.where(ROLLOUT.mask, ROLLOUT.ids, 999))
  toys.close(score(filled), plain, 1e-6)
  real = np.arange(5) >= 5 - p.lengths[:, None]
  left = Prompts(np.where(real, p.ids, noise[:, 0]), p.lengths, p.ordinals)
  toys.close(score(ROLLOUT.replace(prompts=left)), plain, 1e-6)

  def pick(x, order):
    return x[order] if np.ndim(x) else x

  turned = jax.tree.map(lambda x: pick(x, [2, 0, 1]), ROLLOUT)
  toys.close(score(turned), jax.tree.map(lambda x: x[[2, 0, 1]], plain), 1e-6)
  order = [3, 1, 0, 2]
  within = ROLLOUT.replace(
    ids=ROLLOUT.ids[:, order], lengths=ROLLOUT.lengths[:, order]
  )
  toys.close(score(within), jax.tree.map(lambda x: x[:, order], plain), 1e-6)


def test_the_amount_of_padding_does_not_matter():
  prompts = toys.some_prompts(width=9, pad=5)
  wide = toys.some_rollout(prompts)
  ids = np.pad(wide.ids, ((0, 0), (0, 0), (0, 2)), constant_values=3)
  wide = wide.replace(ids=ids)
  want = jax.tree.map(
    lambda x: np.pad(x, ((0, 0),) * 2 + ((0, 2),)), score(ROLLOUT)
  )
  toys.close(score(wide), want, 1e-5)


def slopes(rollout, **changes):
  """Value, and gradient of a mixture of all log-probs and entropies."""
  slabs = changes.pop("slabs", None)
  model = dataclasses.replace(toys.MODEL, **changes)
  mix = np.random.default_rng(5).normal(size=(2, *rollout.ids.shape))
  mix = mix.astype(np.float32)

  def fn(params):
    out = rollout_logprobs(params, rollout, model=model, slabs=slabs)
    return sum(jnp.sum(m * x) for m, x in zip(mix, out)), out

  (_, out), gradient = toys.jit(jax.value_and_grad(fn, has_aux=True))(PARAMS)
  return jax.device_get((out, gradient))


@pytest.fixture(scope="module")
def plain():
  return slopes(ROLLOUT)


def test_slabs_chunks_and_remat_change_nothing(plain):
  # The longest row of each group at T, the rest shorter; one token's logits
  # at a time; layers recomputed.
  lengths = ROLLOUT.lengths.copy()
  assert np.sort(lengths, 1)[:, 2].max() <= 5
  longest = int(np.sort(lengths, 1)[:, :2].max())
  slabs = ((2, 5), (2, longest))
  cut = slopes(ROLLOUT, slabs=slabs, logit_elements=1, remat=True)
  toys.close(cut[0], plain[0], 1e-5)
  toys.close(cut[1], plain[1], 2e-5)


def test_gradient_against_differences_of_the_loops(plain):
  # One direction in parameter space, by float64 loops.
  mix = np.random.default_rng(5).normal(size=(2, *ROLLOUT.ids.shape))
  rng = np.random.default_rng(6)
  direction = jax.tree.map(lambda x: rng.normal(size=x.shape), PARAMS)
  h = 1e-5

  def at(step):
    moved = jax.tree.map(lambda x, d: x + step * d, PARAMS, direction)
    return np.sum(mix * by_loops(ROLLOUT, moved, toys.ARCH))

  want = (at(h) - at(-h)) / (2 * h)
  parts = jax.tree.map(lambda g, d: np.sum(g * d), plain[1], direction)
  assert abs(sum(jax.tree.leaves(parts)) - want) < 1e-3 * abs(want)


def test_a_prompt_of_one_token_has_an_empty_stream():
  rollout = toys.some_rollout(toys.some_prompts(lengths=(1, 1)), group=2)
  assert rollout.prompts.ids.shape == (2, 1)
  out, gradient = slopes(rollout)
  want = by_loops(rollout, PARAMS, toys.ARCH)
  toys.close(out, (want[0], want[1]), 1e-5)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
  assert np.abs(gradient["layers"]["attn"]["q"]).max() > 0


def test_the_weight_table_is_the_parameters():
  params = toys.jit(functools.partial(weight_table.init, arch=toys.ARCH))(
    jax.random.key(3)
  )
  table, axes = weight_table.weights(toys.ARCH), weight_table.axes(toys.ARCH)
  total = 0
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for path, x in leaves:
    weight = functools.reduce(lambda tree, key: tree[key.key], path, table)
    named = functools.reduce(lambda tree, key: tree[key.key], path, axes)
    assert x.shape == weight.shape and len(named) == x.ndim
    assert x.dtype == np.float32
    total += x.size
    if weight.std is None:
      assert (np.asarray(x) == 1).all()
    else:
      spread = np.std(x) / weight.std
      assert abs(spread - 1) < 4 / np.sqrt(x.size)
  assert total == weight_table.parameter_count(toys.ARCH)
