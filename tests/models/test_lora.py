"""Adapters: their arithmetic, what is trained, and PEFT's files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from grpo_jax import algorithms, grpo, lab, optimizer
from grpo_jax.errors import UserError
from grpo_jax.logprobs import rollout_logprobs
from grpo_jax.models import lora, peft, weight_table
from grpo_jax.models.architecture import Lora, Model

LORA = Lora(3, 6.0, ("attn/q", "attn/o", "mlp/down"))
MODEL = Model(toys.ARCH, lora=LORA)
PROMPTS = toys.pack_prompts([[1, 2, 3], [4, 5]])
ROLLOUT = toys.pack_rollout(PROMPTS, [[[1, 2], [3, 4, 5]], [[6], [7, 8]]])


def draw(seed=0):
  """A network whose adapters have been trained: B is not 0."""
  base = toys.draw_params(toys.ARCH, seed)
  rng = np.random.default_rng(seed + 1)
  table = weight_table.adapters(toys.ARCH, LORA)
  factors = jax.tree.map(
    lambda w: rng.normal(size=w.shape).astype(np.float32),
    table,
    is_leaf=lambda x: isinstance(x, weight_table.Weight),
  )
  return lora.merge(base, factors)


def logprobs(params, model):
  return toys.jit(lambda p: rollout_logprobs(p, ROLLOUT, model=model)[0])(
    params
  )


def test_the_formula():
  params, rng = draw(), np.random.default_rng(5)
  w = jax.tree.map(lambda x: x[1], params["layers"]["attn"])
  x = rng.normal(size=(2, 1, 4, 8)).astype(np.float32)
  got = toys.jit(lambda w, x: lora.linear(w, "q", x, MODEL))(w, x)
  a, b, q = (
    v.astype(np.float64) for v in (w["q_lora"]["a"], w["q_lora"]["b"], w["q"])
  )
  want = np.tensordot(x, q + 2.0 * np.tensordot(a, b, 1), 1)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_merged_weights_are_the_adapted_network():
  params = draw()
  merged = toys.jit(lambda p: lora.merged(p, MODEL))(params)
  assert jax.tree.structure(merged) == jax.tree.structure(
    toys.draw_params(toys.ARCH)
  )
  got = logprobs(params, MODEL)
  np.testing.assert_allclose(
    got, logprobs(merged, toys.MODEL), rtol=1e-4, atol=1e-5
  )
  base = lora.split(params)[1]
  gap = np.abs(got - logprobs(base, toys.MODEL)).max()
  assert gap > 0.1  # the adapters do something


def test_a_fresh_adapter_changes_nothing():
  base = toys.draw_params(toys.ARCH)
  params = lora.adapt(base, jax.random.key(0), MODEL)
  np.testing.assert_array_equal(logprobs(params, MODEL), logprobs(base, MODEL))
  a = np.asarray(params["layers"]["mlp"]["down_lora"]["a"])
  assert 0.5 < a.std() * np.sqrt(3 * toys.ARCH.ffn) < 1.5
  half = dataclasses.replace(MODEL, dtype="bfloat16")
  params = lora.adapt(base, jax.random.key(0), half)
  kinds = {
    path[-1].key: x.dtype.name
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
  }
  assert kinds["a"] == kinds["b"] == kinds["final_norm"] == "float32"
  assert kinds["embed"] == kinds["q"] == "bfloat16"
  exact = logprobs(base, dataclasses.replace(half, lora=None))
  np.testing.assert_array_equal(logprobs(params, half), exact)


def test_the_adapters_alone_are_trained():
  algorithm = algorithms.ALGORITHMS["grpo"](beta=0.1)
  how = optimizer.adamw(lambda step: jnp.float32(0.1))
  state = lab.begin(
    draw(), jax.random.key(0), algorithm=algorithm, optimizer=how
  )
  own = weight_table.adapter_count(toys.ARCH, LORA)
  for tree in (state.trainable, state.ref):
    assert sum(x.size for x in jax.tree.leaves(tree)) == own
  moments = sum(x.size for x in jax.tree.leaves(state.opt))
  assert 2 * own <= moments <= 2 * own + 3
  assert sum(x.size for x in jax.tree.leaves(state.frozen)) == (
    weight_table.parameter_count(toys.ARCH)
  )

  def step(state):
    ref = grpo.score(state.reference, ROLLOUT, model=MODEL)
    batch = grpo.Batch(
      ROLLOUT,
      jnp.array([[[1.0], [-1.0]]] * 2) * ROLLOUT.mask,
      algorithm.weights(ROLLOUT.mask),
      ref_logprobs=ref.logprobs,
    )
    state, sums = grpo.update(
      state, batch, model=MODEL, algorithm=algorithm, optimizer=how
    )
    after = grpo.score(state.reference, ROLLOUT, model=MODEL)
    return state, sums, ref.logprobs, after.logprobs

  after, sums, before, later = toys.jit(step)(state)
  assert float(sums["kl/ref"]) == 0  # the reference begins as the policy
  assert all(
    (a != b).any()
    for a, b in zip(
      jax.tree.leaves(state.trainable), jax.tree.leaves(after.trainable)
    )
  )
  for a, b in zip(jax.tree.leaves(state.frozen), jax.tree.leaves(after.frozen)):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(before, later)


def test_no_gradient_of_a_frozen_weight_is_computed():
  """An update costs the passes over activations, and the factors."""
  factors, base = lora.split(draw())

  def loss(factors, base):
    params = lora.merge(base, factors)
    return rollout_logprobs(params, ROLLOUT, model=MODEL)[0].sum()

  def flops(of):
    compiled = jax.jit(jax.grad(loss, of)).lower(factors, base).compile()
    return compiled.cost_analysis()["flops"]

  assert flops(0) < 0.8 * flops((0, 1))


@pytest.fixture
def directory(tmp_path):
  pytest.importorskip("safetensors")
  path = tmp_path / "adapters"
  peft.export(draw(), MODEL, "some/model", str(path))
  return path


def where():
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda _: one, draw())


def test_peft_files_come_back(directory, tmp_path):
  assert peft.read(str(directory), toys.ARCH) == LORA
  found = peft.load(str(directory), MODEL, where())
  want = lora.split(draw())[0]
  assert jax.tree.structure(found) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b)
  config = json.loads((directory / "adapter_config.json").read_text())
  assert config["target_modules"] == ["q_proj", "o_proj", "down_proj"]
  with pytest.raises(UserError, match="holds adapters already"):
    peft.export(draw(), MODEL, "some/model", str(directory))


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"use_dora": True}, "use_dora = True"),
    ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
    ({"bias": "all"}, "bias = 'all'"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"init_lora_weights": "pissa"}, "pissa"),
    ({"layers_to_transform": [0]}, "layers_to_transform"),
    ({"something_new": 1}, "something_new"),
    ({"r": 4}, r"shape \(3, 8\)"),
    ({"r": 0}, "r = 0"),
    ({"lora_alpha": None}, "lora_alpha = None"),
  ],
)
def test_another_kind_of_adapter_is_refused(directory, changes, words):
  path = directory / "adapter_config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | changes))
  with pytest.raises(UserError, match=words):
    peft.read(str(directory), toys.ARCH)


def test_scale_of_rank_stabilised_adapters(directory):
  path = directory / "adapter_config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {"use_rslora": True}))
  found = peft.read(str(directory), toys.ARCH)
  assert found.scale == pytest.approx(6 / 3**0.5)


def test_adapters_of_another_model_are_refused(directory):
  deeper = dataclasses.replace(toys.ARCH, layers=3)
  with pytest.raises(UserError, match=r"lacks .*layers\.2.*some layers only"):
    peft.read(str(directory), deeper)
  shallow = dataclasses.replace(toys.ARCH, layers=1)
  with pytest.raises(UserError, match="belong to no projection"):
    peft.read(str(directory), shallow)
  wider = dataclasses.replace(toys.ARCH, ffn=16)
  with pytest.raises(UserError, match=r"shape \(3, 12\), this model needs"):
    peft.read(str(directory), wider)


@pytest.mark.filterwarnings("ignore")  # other packages' deprecations
def test_peft_says_the_same(tmp_path):
  """A model with our adapters in PEFT's hands, and one merged by us."""
  torch = pytest.importorskip("torch")
  theirs = pytest.importorskip("peft")
  transformers = pytest.importorskip("transformers")
  from grpo_jax.models import hf

  config = {"model_type": "llama"}
  arch = dataclasses.replace(toys.ARCH, real_vocab=toys.ARCH.vocab)
  model = dataclasses.replace(MODEL, arch=arch)
  base, params = tmp_path / "base", draw()
  hf.export(lora.split(params)[1], arch, config, str(base))
  peft.export(params, model, str(base), str(tmp_path / "adapters"))
  ids = np.random.default_rng(0).integers(0, 16, (2, 7))
  found = transformers.AutoModelForCausalLM.from_pretrained(base).float()
  found = theirs.PeftModel.from_pretrained(found, tmp_path / "adapters")
  with torch.no_grad():
    want = torch.log_softmax(found(torch.tensor(ids)).logits, -1).numpy()
  rollout = toys.pack_rollout(
    toys.pack_prompts(ids[:, :3]), [[row[3:]] for row in ids]
  )
  got = toys.jit(lambda p: rollout_logprobs(p, rollout, model=model)[0])(params)
  want = np.take_along_axis(want[:, 2:-1], ids[:, 3:, None], -1)[..., 0]
  np.testing.assert_allclose(got[:, 0], want, rtol=1e-4, atol=1e-5)
  found.save_pretrained(tmp_path / "again")
  assert peft.read(str(tmp_path / "again"), arch) == LORA
