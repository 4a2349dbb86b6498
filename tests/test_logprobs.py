"""The one shift, the chunks and the slab plans."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from grpo_jax import algorithms, grpo, logprobs, optimizer
from grpo_jax.models.architecture import Architecture, Model
from grpo_jax.types import Scores, TrainState, split_prompts


def test_the_shift_by_hand():
  prompts = toys.pack_prompts([[7, 8, 9], [4]], pad=1)
  ids = np.int32([[[5, 6, 2], [2, 0, 0]], [[3, 3, 3], [2, 0, 0]]])
  inputs = logprobs.completion_inputs(prompts, ids, heads=False)
  assert np.asarray(inputs).tolist() == [
    [[9, 5, 6], [9, 2, 0]],
    [[4, 3, 3], [4, 2, 0]],
  ]
  whole = logprobs.completion_inputs(prompts, ids, heads=True)
  assert np.asarray(whole).tolist() == [
    [[9, 5, 6, 2], [9, 2, 0, 0]],
    [[4, 3, 3, 3], [4, 2, 0, 0]],
  ]


def test_three_tokens_by_hand():
  # The stop token is scored, what follows it is not; temperature 0.6 (A10).
  table = np.array([[0.0, 0, 0], [2, 1, 0], [0, 1, 2]])
  model, params = toys.bigram(table)
  rollout = toys.pack_rollout(
    toys.pack_prompts([[1]]), [[[1, 2, 0], [0]]], 4, temperature=0.6
  )
  found, entropy = jax.device_get(toys.scorer(model)(params, rollout))
  want = [[-1.869240, -3.535906, -3.535906, 0], [-0.202573, 0, 0, 0]]
  np.testing.assert_allclose(found[0], want, atol=1e-5)
  p = np.exp([-0.202573, -1.869240, -3.535906])
  assert abs(entropy[0, 1, 0] + np.sum(p * np.log(p))) < 1e-5
  assert (entropy[0, 1, 1:] == 0).all()


def arrays_of(jaxpr):
  """Shapes of every value in a jaxpr and in those inside it."""
  for equation in jaxpr.eqns:
    for variable in equation.outvars:
      yield getattr(variable.aval, "shape", ())
    for inner in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
    ):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        yield from arrays_of(inner)


@pytest.mark.parametrize("slabs", [None, ((1, 8), (2, 4))])
@pytest.mark.parametrize("elements", [1, 1000, 2**24])
def test_what_an_update_holds_is_bounded(slabs, elements):
  # B*G*T*V appears only where the bound allows it. Traced, not compiled.
  b, g, t, v = 4, 3, 8, 50
  model = Model(Architecture(v, v, 1, 4, 1, 1, 2, 2), logit_elements=elements)
  prompts = toys.pack_prompts([[1, 2]] * b)
  rollout = toys.pack_rollout(prompts, [[[1] * t] * g] * b)
  algorithm = algorithms.grpo()
  how = optimizer.adamw(lambda step: 1e-3)

  def run(params, rollout):
    state = TrainState(
      trainable=params,
      frozen={},
      ref=None,
      opt=how.transform.init(params),
      controllers={},
      step=jnp.int32(0),
      key=None,
    )
    scores = Scores(ref_logprobs=rollout.sampler_logprobs)
    batch = grpo.advantage(
      toys.give(np.eye(b, g)), rollout, scores, algorithm=algorithm
    )
    return grpo.update(
      state,
      batch,
      model=model,
      algorithm=algorithm,
      optimizer=how,
      slabs=slabs,
    )

  traced = jax.make_jaxpr(run)(toys.draw_params(model.arch), rollout)
  rows = [math.prod(s) for s in arrays_of(traced.jaxpr) if s and s[-1] == v]
  whole = b * g * t * v
  if elements == 2**24:
    assert max(rows) == (whole if slabs is None else whole // 3)
  else:
    # One token of every row is the least.
    assert max(rows) <= max(elements, b * g * v)


LENGTHS = arrays.arrays(np.int64, (3, 4), elements=st.integers(1, 9))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 4))
def test_the_cheapest_plan_that_holds_every_row(lengths, cuts, buckets):
  plans = logprobs.plans(4, 9, cuts, buckets)
  assert len(set(plans)) == len(plans)
  assert tuple((rows, 9) for rows, _ in plans[0]) in plans

  def cost(plan):
    return sum(rows * size for rows, size in plan)

  def holds(plan):
    columns = np.repeat([s for _, s in plan], [r for r, _ in plan])
    return (-np.sort(-lengths, axis=1) <= columns).all()

  for plan in plans:
    assert sum(rows for rows, _ in plan) == 4
    sizes = [size for _, size in plan]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] <= 9
  best = logprobs.cover(lengths, plans)
  assert holds(best)
  assert cost(best) == min(cost(plan) for plan in plans if holds(plan))


def test_plans_are_all_that_one_would_list():
  lengths = (3, 6, 9)
  want = {
    tuple(zip((2, 2), pair))
    for pair in itertools.product(lengths, repeat=2)
    if pair[0] >= pair[1]
  }
  assert set(logprobs.plans(4, 9, 2, 3)) == want
  assert logprobs.plans(3, 5, 1, 1) == (((3, 5),),)


def test_a_part_is_whole_prompts_strided():
  rollout = toys.some_rollout(toys.some_prompts(lengths=(1, 2, 3, 4)))
  parts = functools.partial(jax.tree.map, np.asarray)(split_prompts(rollout, 2))
  assert parts.prompts.ordinals.tolist() == [[0, 2], [1, 3]]
  np.testing.assert_array_equal(parts.ids[1], rollout.ids[1::2])
  assert parts.temperature.tolist() == [1, 1]
