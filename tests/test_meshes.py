"""One code path on every mesh: what eight devices compute, one computes."""

import dataclasses
import functools
import io
import re

import jax
import jax.numpy as jnp
import mesh_runs
import numpy as np
import pytest
from mesh_runs import MESHES, ONE, SHORT, WHOLE, collectives, host

from grpo_jax import sharding, steps
from grpo_jax.console import Console
from grpo_jax.errors import UserError
from grpo_jax.logprobs import cover
from grpo_jax.models import weight_table
from grpo_jax.rollouts import Position
from grpo_jax.session import open_session

every_mesh = pytest.mark.parametrize("sizes", MESHES, ids=str)
split_model = pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
PROGRAMS = ("sample", "score", "advantage", "minibatch")
PROGRAMS += ("cut", "accumulate", "apply")


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def run_on():
  """Mesh sizes -> the recorded run on it, made once."""
  e = mesh_runs.resolve()
  return functools.cache(lambda sizes: mesh_runs.Run(sizes, e))


@pytest.fixture(scope="module")
def imitation_on():
  """Mesh sizes -> warm-up state before and after a step, and its metrics."""
  e = mesh_runs.resolve()

  @functools.cache
  def imitate(sizes):
    built = mesh_runs.build_on(sizes, e)
    before = mesh_runs.start(built, "warmup")
    result = steps.imitate_step(built, before, mesh_runs.stream(built), 0)
    return built, before, result

  return imitate


def assert_close(a, b, atol, rtol=1e-5):
  assert a.keys() == b.keys()
  for name, value in a.items():
    np.testing.assert_allclose(value, b[name], rtol, atol, err_msg=name)


def computed(metrics):
  """A step's metrics without those that the machine decides."""
  return {
    k: v
    for k, v in metrics.items()
    if not k.startswith("time/") and k != "phase"
  }


def rows(result, name):
  return [row[name] for group in result.groups for row in group["completions"]]


@every_mesh
def test_tokens_are_those_of_one_device(run_on, sizes):
  ours, one = run_on(sizes), run_on(ONE)
  for a, b in zip(ours.results, one.results):
    for x, y in zip(rows(a, "ids"), rows(b, "ids")):
      np.testing.assert_array_equal(x, y)
    for x, y in zip(rows(a, "logprobs"), rows(b, "logprobs")):
      np.testing.assert_allclose(x, y, atol=1e-5)
  lengths = [len(x) for x in rows(one.results[0], "ids")]
  assert min(lengths) == 1 and max(lengths) == 6, "lengths should differ"


@every_mesh
def test_log_probs_are_those_of_one_device(run_on, sizes):
  ours, one = run_on(sizes), run_on(ONE)
  np.testing.assert_allclose(ours.first, one.first, atol=1e-5)
  np.testing.assert_allclose(ours.logprobs, one.logprobs, atol=1e-5)
  assert np.abs(one.logprobs - one.first).max() > 1e-2, "nothing was learnt"


@every_mesh
def test_updates_and_metrics_are_those_of_one_device(run_on, sizes):
  """The momentum is a sum of the four gradients, in two micro-batches each."""
  ours, one = run_on(sizes), run_on(ONE)
  for a, b in zip(ours.results, one.results):
    assert_close(computed(a.metrics), computed(b.metrics), 1e-5, 1e-4)
  moments = host(one.state.opt)
  assert max(np.abs(x).max() for x in moments.values()) > 1e-2
  assert_close(host(ours.state.opt), moments, 1e-6, 1e-4)
  assert_close(host(ours.state.trainable), host(one.state.trainable), 1e-6)


@pytest.mark.slow
def test_sequence_ratios_are_those_of_one_device(run_on):
  ours = run_on((2, 2, 2)).with_sequence_ratios()
  one = run_on(ONE).with_sequence_ratios()
  assert_close(computed(ours.metrics), computed(one.metrics), 1e-5, 1e-4)
  assert_close(host(ours.state.opt), host(one.state.opt), 1e-6, 1e-4)


@pytest.mark.slow
def test_imitation_is_that_of_one_device(imitation_on):
  """Adam's first moment after one step is a tenth of the gradient."""
  (_, _, ours), (_, _, one) = imitation_on((2, 2, 2)), imitation_on(ONE)
  assert_close(computed(ours.metrics), computed(one.metrics), 1e-5, 1e-4)
  assert_close(host(ours.state.opt), host(one.state.opt), 1e-7, 1e-4)


def assert_laid_out(state, mesh, arch):
  """Every leaf where the rules say: weights, moments, reference; rest whole."""
  axes = {
    jax.tree_util.keystr(path): value
    for path, value in jax.tree_util.tree_flatten_with_path(
      weight_table.axes(arch), is_leaf=lambda x: isinstance(x, tuple)
    )[0]
  }
  seen = 0
  for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
    name = jax.tree_util.keystr(path)
    spec = jax.P()
    for weight, names in axes.items():
      if name.endswith(weight):
        spec = sharding.spec(names, x.shape, dict(mesh.shape))
        seen += 1
    want = jax.NamedSharding(mesh, spec)
    assert x.sharding.is_equivalent_to(want, x.ndim), (name, x.sharding)
  return seen / len(axes)


@split_model
def test_every_leaf_is_split_as_the_rules_say(run_on, sizes):
  run = run_on(sizes)
  arch = run.built.experiment.model.arch
  copies = assert_laid_out(run.state, run.built.mesh, arch)
  assert copies == 3, "parameters, momentum, reference"
  split = run.state.trainable["layers"]["mlp"]["gate"]
  local = split.addressable_shards[0].data.size
  assert split.size == local * sizes[1] * sizes[2]


@split_model
def test_adams_moments_are_born_split(run_on, sizes):
  built = run_on(sizes).built
  state = mesh_runs.start(built, "warmup")
  copies = assert_laid_out(state, built.mesh, built.experiment.model.arch)
  assert copies == 3, "parameters and two moments"


@pytest.mark.slow
def test_adams_moments_stay_split(imitation_on):
  built, before, result = imitation_on((2, 2, 2))
  arch = built.experiment.model.arch
  assert assert_laid_out(result.state, built.mesh, arch) == 3
  assert all(x.is_deleted() for x in jax.tree.leaves(before))


@every_mesh
def test_the_updated_states_buffers_are_taken(run_on, sizes):
  leaves = jax.tree.leaves(run_on(sizes).before)
  assert all(x.is_deleted() for x in leaves)


@every_mesh
def test_nothing_is_rematerialised_by_accident(run_on, sizes):
  lines = run_on(sizes).stderr
  assert not [line for line in lines if mesh_runs.WARNING in line]


@pytest.mark.skipif(
  jax.__version_info__ >= (0, 11), reason="later versions do not say"
)
def test_the_warning_would_be_seen():
  """A lookup in a table whose columns are split."""
  mesh, lines = mesh_runs.mesh_of((2, 2, 2)), []

  def lookup(table, ids):
    return sharding.shard(table[ids], "prompts", None, None)

  def abstract(axes, shape, dtype):
    where = sharding.named(mesh, axes, shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  table = abstract(("vocab", "embed"), (64, 32), jnp.float32)
  ids = abstract(("prompts", None), (16, 8), jnp.int32)
  with mesh_runs.stderr_into(lines), jax.set_mesh(mesh):
    jax.jit(lookup).lower(table, ids).compile()
  assert [line for line in lines if mesh_runs.WARNING in line]


@every_mesh
def test_no_row_of_a_rollout_travels(run_on, sizes):
  """Ids and flags never leave their device; splitting moves nothing at all."""
  for name in PROGRAMS:
    found = collectives(run_on(sizes).text(name))
    for operation, dtype, shape in found:
      assert "all-to-all" not in operation, (name, shape)
      assert "permute" not in operation, (name, shape)
      if dtype in ("s32", "u32", "pred") or name in (
        "advantage",
        "minibatch",
        "cut",
      ):
        assert shape == (), (name, operation, dtype, shape)


@every_mesh
def test_what_decoding_moves(run_on, sizes):
  """Weights over fsdp once per rollout; per token, hidden states and logits.

  Whatever is not listed stays: the cache, the prompts' keys and values, the
  tokens. Hidden states are summed over tensor after the lookup and twice a
  layer; logits are put together once.
  """
  run, (data, fsdp, tensor) = run_on(sizes), sizes
  arch, b = run.built.experiment.model.arch, 32 // (data * fsdp)
  table = weight_table.weights(arch)
  weights = [
    whole_over_fsdp(w, tensor)
    for w in jax.tree.leaves(
      table, is_leaf=lambda x: isinstance(x, weight_table.Weight)
    )
    if fsdp > 1 and "embed" in w.axes
  ]
  logits = [(b, 4, arch.vocab)] if tensor > 1 else []
  token, prompt = (b, 4, 1, arch.embed), run.prompt_stream(b)
  per_pass = 1 + 2 * arch.layers if tensor > 1 else 0
  found = [x for x in collectives(run.text("sample")) if x[2] != ()]
  gathers = [shape for kind, _, shape in found if kind == "all-gather"]
  sums = [shape for kind, _, shape in found if kind == "all-reduce"]
  assert len(gathers) + len(sums) == len(found)
  assert sorted(gathers) == sorted(weights + logits)
  assert sums.count(token) == per_pass
  # The prefill scans the layers: one lookup, two sums in the loop's body.
  assert sums.count(prompt) == len(sums) - per_pass <= 3


def whole_over_fsdp(weight, tensor):
  """A weight's shape on one device once it is gathered."""
  return tuple(
    size // tensor if name in ("heads", "kv_heads", "ffn", "vocab") else size
    for size, name in zip(weight.shape, weight.axes)
  )


@split_model
def test_the_cache_is_split_over_prompts_and_heads(run_on, sizes):
  """Every array of the decode loop with a cache's outline is one part."""
  run, (data, fsdp, tensor) = run_on(sizes), sizes
  text, b = run.text("sample"), 32 // (data * fsdp)
  caches = set(re.findall(r"f32\[(\d+),4,6,(\d+),8\]", text))
  assert caches == {(str(b), str(4 // tensor))}
  prompts = run.prompt_stream(b)[2]
  keys = set(re.findall(rf"f32\[(\d+),{prompts},(\d+),8\]", text))
  assert keys == {(str(b), str(4 // tensor))}


@split_model
def test_a_step_moves_nothing_unasked(run_on, sizes):
  """No numpy array slips in, and no array is laid out anew on the way."""
  built = run_on(sizes).built
  state = mesh_runs.start(built, "rl")
  with (
    jax.transfer_guard_host_to_device("disallow"),
    jax.transfer_guard_device_to_device("disallow"),
  ):
    steps.reinforce_step(built, state, mesh_runs.stream(built), Position(1, 0))


def test_key_value_heads_may_be_whole_on_every_device(run_on):
  """Two of them on four parts of tensor are four on one device, each twice.

  On the mesh the scorer takes slabs, on one device the whole width.
  """
  sizes = (1, 2, 4)
  with pytest.raises(UserError, match=r"kv_heads 2 .*mesh.tensor 4"):
    mesh_runs.build_on(sizes, mesh_runs.resolve(model__kv_heads=2))
  e = mesh_runs.resolve(model__kv_heads=2, mesh__replicate_kv=True)
  batching = dataclasses.replace(e.batching, slabs=(SHORT,))
  ours = mesh_runs.build_on(sizes, dataclasses.replace(e, batching=batching))
  params = ours.init(mesh_runs.put_key(ours))
  rollout = mesh_runs.draw(ours, params)
  logprobs = np.asarray(ours.score[SHORT](params, rollout))

  one = run_on(ONE).built
  wide = jax.device_get(params)
  for name in "kv":
    weight = wide["layers"]["attn"][name]
    wide["layers"]["attn"][name] = np.repeat(weight, 2, axis=2)
  where = jax.tree.map(lambda x: x.sharding, one.params_target())
  wide = jax.device_put(wide, where)
  expected = mesh_runs.draw(one, wide)
  assert cover(np.asarray(expected.lengths), (SHORT, WHOLE)) == SHORT
  np.testing.assert_array_equal(rollout.ids, expected.ids)
  for ours, theirs in (
    (logprobs, one.score[WHOLE](wide, expected)),
    (logprobs, expected.sampler_logprobs),
    (rollout.sampler_logprobs, expected.sampler_logprobs),
  ):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_bfloat16_scores_are_near(run_on):
  """bfloat16 keeps 8 bits: about 1 % of a log-prob of -5."""
  run = run_on((2, 2, 2))
  e = mesh_runs.resolve(model__dtype="bfloat16")
  built = mesh_runs.build_on((2, 2, 2), e)
  params = run.built.init(mesh_runs.put_key(run.built))
  ours = np.asarray(built.score[WHOLE](params, run.rollout))
  np.testing.assert_allclose(ours, run.first, atol=0.05)
  assert np.abs(ours - run.first).max() > 1e-4, "this was float32"


@pytest.mark.slow
def test_a_run_in_bfloat16_is_near():
  e = mesh_runs.resolve(model__dtype="bfloat16")
  ours = mesh_runs.Run((2, 2, 2), e)
  for result in ours.results:
    assert result.metrics["sampler/logprob_gap_max"] < 0.05
    assert result.metrics["update/nonfinite"] == 0
    assert all(np.isfinite(v) for v in computed(result.metrics).values())
  assert {x.dtype for x in host(ours.state).values()} == {
    np.dtype("float32"),
    np.dtype("int32"),
  }
  assert not [line for line in ours.stderr if mesh_runs.WARNING in line]


def test_a_run_goes_on_upon_another_mesh(run_on, tmp_path):
  """Two steps on eight devices, then a third: there, and on one."""
  workdir, console = tmp_path / "run", Console(file=io.StringIO())
  there, one = run_on((2, 2, 2)), run_on(ONE)
  with open_session(there.built, str(workdir), console) as session:
    session.state = mesh_runs.start(there.built, "rl")
    session.phase, session.step = "rl", 0
    session.save_reference()
    for index in range(2):
      result = steps.reinforce_step(
        there.built,
        session.state,
        mesh_runs.stream(there.built),
        Position(index + 1, index),
      )
      session.state, session.step = result.state, index + 1
    session.save()
    session.checkpoints.wait()
    saved = host(session.state)
    third = steps.reinforce_step(
      there.built, session.state, mesh_runs.stream(there.built), Position(3, 2)
    )
  with open_session(one.built, str(workdir), console) as session:
    assert (session.phase, session.step) == ("rl", 2)
    for name, value in host(session.state).items():
      np.testing.assert_array_equal(value, saved[name], err_msg=name)
    where = {x.sharding.mesh.size for x in jax.tree.leaves(session.state)}
    assert where == {1}
    result = steps.reinforce_step(
      one.built, session.state, mesh_runs.stream(one.built), Position(3, 2)
    )
  assert_close(computed(result.metrics), computed(third.metrics), 1e-5, 1e-4)
