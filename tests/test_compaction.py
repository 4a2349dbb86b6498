"""Rows that end leave the loop, and no token changes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import toys

from grpo_jax import compaction, grpo
from grpo_jax.draws import Sampling
from grpo_jax.sharding import AXES

KEY = jax.random.key(5)
PROMPTS = toys.pack_prompts(
  [[1, 2, 3], [4], [5, 6], [7, 8, 9, 1], [2], [3, 3], [4, 5, 6], [1]]
)
HOW = Sampling(group_size=4, max_tokens=24, stop_ids=(0,), pad_id=0)
RNG = np.random.default_rng(0)
LIMITS = np.clip(RNG.lognormal(1.8, 0.9, (8, 4)), 1, 24).astype(np.int32)


@functools.cache
def sampled(how, mesh=None):
  params = toys.draw_params(toys.ARCH)
  run = toys.jit(
    lambda p, prompts, key: grpo.sample(
      p, prompts, key, model=toys.MODEL, sampling=how, budgets=LIMITS
    )
  )
  if mesh is None:
    return jax.device_get(run(params, PROMPTS, KEY))
  axes = (jax.sharding.AxisType.Auto,) * 3
  with jax.set_mesh(jax.make_mesh(mesh, AXES, axis_types=axes)):
    return jax.device_get(run(params, PROMPTS, KEY))


def equal(a, b):
  for name in ("ids", "lengths", "truncated", "mask"):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
  np.testing.assert_allclose(
    a.sampler_logprobs, b.sampler_logprobs, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("count", [1, 3, 5])
def test_no_token_changes(count):
  want = sampled(HOW)
  assert len(np.unique(want.lengths)) > 5
  equal(want, sampled(dataclasses.replace(HOW, compact=count)))


def test_with_stored_supports_and_forced_lengths():
  how = dataclasses.replace(HOW, top_k=5, ignore_stop=True)
  want, got = sampled(how), sampled(dataclasses.replace(how, compact=3))
  equal(want, got)
  np.testing.assert_array_equal(want.support, got.support)
  np.testing.assert_array_equal(got.lengths, LIMITS)


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)])
def test_on_a_mesh_rows_stay_on_their_shard(mesh):
  equal(sampled(HOW), sampled(dataclasses.replace(HOW, compact=3), mesh))


def test_sizes():
  assert compaction.sizes(64, 5) == (48, 32, 16, 8, 4)
  assert compaction.sizes(64, 2) == (48, 32)
  assert compaction.sizes(64, 0) == ()
  assert compaction.sizes(64, 5, shards=8) == (48, 32, 16, 8)
  assert compaction.sizes(2, 5) == (1,)
  assert compaction.sizes(1, 5) == ()


def test_what_is_computed():
  lengths = np.array([[1, 2], [3, 8]])
  # All four rows for one token, three for another, two, then the last one.
  assert compaction.computed(lengths, 0) == 4 * 8
  assert compaction.computed(lengths, 3) == 4 + 3 + 2 + 1 * 5
  # Two shards keep as many rows as the fuller one needs.
  assert compaction.computed(lengths, 3, shards=2) == 4 * 3 + 2 * 5
  rng = np.random.default_rng(0)
  draw = rng.lognormal(np.log(64) - 0.75**2 / 2, 0.75, (8, 8))
  ragged = np.clip(np.round(draw), 1, 256).astype(int)
  assert compaction.computed(ragged, 0) / ragged.sum() > 2.5
  assert compaction.computed(ragged, 5) / ragged.sum() < 1.25
