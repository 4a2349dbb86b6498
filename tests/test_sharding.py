"""The mesh, the rules, and what is refused before anything is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import mesh_runs
import numpy as np
import pytest
import toys

from grpo_jax import logprobs, sharding
from grpo_jax.errors import UserError
from grpo_jax.models import weight_table
from grpo_jax.models.architecture import Model

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def test_data_takes_the_devices_that_are_left():
  assert dict(sharding.make_mesh(-1, 2, 2).shape) == SIZES
  assert sharding.make_mesh(-1, 1, 8).shape["data"] == 1
  assert sharding.make_mesh(8, 1, 1).axis_types == (
    (jax.sharding.AxisType.Auto,) * 3
  )


@pytest.mark.parametrize(
  ("sizes", "product"),
  [
    ((2, 1, 1), 2),
    ((4, 2, 2), 16),
    ((-1, 3, 1), 6),
    ((-1, 16, 1), 16),
    ((0, 1, 1), 0),
    ((-1, 0, 1), 0),
    ((-2, -2, 2), 8),
  ],
)
def test_a_mesh_of_another_number_of_devices_is_refused(sizes, product):
  with pytest.raises(UserError) as error:
    sharding.make_mesh(*sizes)
  assert f"needs {product} devices, and there are 8" in str(error.value)
  assert f"fsdp={sizes[1]} x tensor={sizes[2]}" in str(error.value)


def test_axes_become_partitions():
  spec = sharding.spec(("embed", "heads", None), (32, 4, 8), SIZES)
  assert spec == jax.P(("fsdp",), ("tensor",), None)
  spec = sharding.spec(("prompts", None), (16, 3), SIZES)
  assert spec == jax.P(("data", "fsdp"), None)


def test_an_axis_that_does_not_divide_is_refused_with_its_numbers():
  with pytest.raises(UserError, match=r"'prompts' has 6 .* 4 shards"):
    sharding.spec(("prompts", None), (6, 3), SIZES)


def test_key_value_heads_that_do_not_divide_are_whole():
  axes = ("embed", "kv_heads", None)
  assert sharding.spec(axes, (32, 3, 8), SIZES) == jax.P(("fsdp",), None, None)


def test_without_a_mesh_nothing_is_done():
  x = jnp.ones((3, 5))
  assert sharding.shard(x, "prompts", "heads") is x
  assert sharding.gather({"w": x}, {"w": ("embed", "ffn")})["w"] is x
  assert sharding.ways("prompts", "vocab") == 1


def test_ways_counts_the_parts():
  with jax.set_mesh(mesh_runs.mesh_of((2, 2, 2))):
    assert sharding.ways("prompts") == 4
    assert sharding.ways("prompts", "vocab") == 8


def test_a_gathered_weight_is_whole_over_fsdp_alone():
  mesh = mesh_runs.mesh_of((2, 2, 2))
  axes = ("embed", "heads", None)
  w = jnp.arange(32 * 4 * 8.0).reshape(32, 4, 8)
  put = jax.device_put(w, sharding.named(mesh, axes, w.shape))
  with jax.set_mesh(mesh):
    out = jax.jit(lambda x: sharding.gather({"w": x}, {"w": axes}))(put)["w"]
  want = jax.NamedSharding(mesh, jax.P(None, "tensor", None))
  assert out.sharding.is_equivalent_to(want, 3)
  np.testing.assert_array_equal(out, w)


def test_batches_lie_by_prompts_and_scalars_everywhere():
  mesh = mesh_runs.mesh_of((2, 2, 2))
  tree = sharding.to_device(
    {"ids": np.zeros((8, 4, 3), np.int32), "step": np.int32(3)}, mesh
  )
  assert tree["ids"].addressable_shards[0].data.shape == (2, 4, 3)
  assert tree["step"].sharding.is_fully_replicated


# What config.resolve lets pass and a mesh does not divide: (mesh, key, the
# number in the message, and settings).
INDIVISIBLE = [
  ((8, 1, 1), "batch.prompts_per_step", 36, {"batch__prompts_per_step": 36}),
  ((8, 1, 1), "batch.prompts_per_update", 4, {"batch__prompts_per_update": 4}),
  ((2, 2, 2), "batch.micro_batch_prompts", 2, {}),
  ((2, 2, 2), "warmup.prompts_per_step", 6, {"warmup__prompts_per_step": 6}),
  (
    (2, 2, 2),
    "eval.prompts_per_batch",
    10,
    {"eval__every": 1, "eval__prompts": 16, "eval__prompts_per_batch": 10},
  ),
  ((1, 2, 4), "model.heads", 6, {"model__heads": 6, "model__kv_heads": 6}),
  ((1, 2, 4), "model.ffn", 66, {"model__ffn": 66}),
  ((1, 4, 2), "model.embed", 34, {"model__embed": 34}),
  ((1, 2, 4), "model.kv_heads", 2, {"model__kv_heads": 2}),
]


@pytest.mark.parametrize(
  ("sizes", "key", "number", "changes"), INDIVISIBLE, ids=lambda x: str(x)[:30]
)
def test_what_a_mesh_does_not_divide_is_refused(sizes, key, number, changes):
  changes = dict(changes)
  if key == "batch.prompts_per_step":
    changes |= {"batch__prompts_per_update": 0, "batch__micro_batch_prompts": 0}
  if key == "batch.prompts_per_update":
    changes["batch__micro_batch_prompts"] = 0
  if key == "batch.micro_batch_prompts":
    changes["batch__micro_batch_prompts"] = number
  with pytest.raises(UserError) as error:
    mesh_runs.build_on(sizes, mesh_runs.resolve(**changes))
  message = str(error.value)
  assert message.startswith(f"{key} {number} is not divisible by")
  assert "\n" not in message


def test_settings_of_a_phase_that_is_off_are_not_judged():
  changes = {"warmup__steps": 0, "warmup__prompts_per_step": 7}
  mesh_runs.build_on((2, 2, 2), mesh_runs.resolve(**changes))


def test_every_weight_has_its_part_of_every_device():
  """Each matrix is split over fsdp and tensor both; only norms are whole."""
  e = mesh_runs.resolve()
  built = mesh_runs.build_on((1, 2, 4), e)
  for phase, copies in (("warmup", 3), ("rl", 3)):
    state, split = built.shapes[phase], 0
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
      local = np.prod(x.sharding.shard_shape(x.shape), dtype=int)
      if x.ndim >= 2 and "norm" not in jax.tree_util.keystr(path):
        assert x.size == 8 * local, path
        split += 1
      else:
        assert x.size == local, path
    matrices = [
      w
      for w in jax.tree.leaves(
        weight_table.weights(e.model.arch),
        is_leaf=lambda w: isinstance(w, weight_table.Weight),
      )
      if w.std is not None
    ]
    assert split == copies * len(matrices)


@pytest.mark.parametrize(
  "elements", [2**24, 4 * 2 * 2], ids=["whole", "chunks"]
)
def test_kept_ids_are_read_across_a_split_vocabulary(elements):
  """Scores under top-k: the support's logits lie on several devices.

  In chunks: one token each on the mesh, whose devices hold an eighth.
  """
  rng = np.random.default_rng(0)
  arch = dataclasses.replace(toys.ARCH, kv_heads=4)
  model = Model(arch, logit_elements=elements)
  params = toys.draw_params(arch)
  hidden = rng.normal(size=(4, 2, 3, arch.embed)).astype(np.float32)
  ids = rng.integers(0, arch.real_vocab, (4, 2, 3), np.int32)
  others = rng.integers(-1, arch.real_vocab, (4, 2, 3, 4), np.int32)
  support = np.concatenate((ids[..., None], others), -1)

  def score(params, hidden, ids, support):
    return logprobs.token_logprobs(
      params, hidden, ids, model=model, temperature=0.7, support=support
    )

  args = (params, hidden, ids, support)
  expected = toys.jit(score)(*args)
  mesh = mesh_runs.mesh_of((1, 2, 4))
  where = jax.tree.map(
    lambda x, axes: sharding.named(mesh, axes, x.shape),
    params,
    weight_table.axes(arch),
  )
  args = (
    jax.device_put(params, where),
    *sharding.to_device((hidden, ids, support), mesh),
  )
  with jax.set_mesh(mesh):
    ours = toys.jit(score)(*args)
  for a, b in zip(ours, expected):
    np.testing.assert_allclose(a, b, atol=1e-5)
