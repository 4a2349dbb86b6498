"""Every family from files, against what PyTorch computed (golden/families)."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from published import MODELS

from grpo_jax import grpo
from grpo_jax.errors import UserError
from grpo_jax.logprobs import rollout_logprobs
from grpo_jax.models import families, hf, hf_names, names, weight_table
from grpo_jax.models.architecture import Model
from grpo_jax.models.pretrained import open_model
from grpo_jax.models.rope_config import ropes
from grpo_jax.sampling import Sampling

FILES = pathlib.Path(__file__).parent.parent / "golden" / "families"
NAMES = sorted(path.stem for path in FILES.glob("*.npz"))
PROMPT = 4


def load(directory):
  opened = open_model(str(directory))
  model = Model(opened.architecture(32))
  shapes = jax.eval_shape(
    lambda: weight_table.init(jax.random.key(0), model.arch)
  )
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return model, opened.load(model.arch, jax.tree.map(lambda _: where, shapes))


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
  """What PyTorch found, the directory, our model and its parameters."""
  save_file = pytest.importorskip("safetensors.numpy").save_file
  found = dict(np.load(FILES / f"{request.param}.npz"))
  directory = tmp_path_factory.mktemp(request.param)
  (directory / "config.json").write_text(str(found["config"]))
  weights = {k[7:]: v for k, v in found.items() if k.startswith("weight/")}
  save_file(weights, directory / "model.safetensors")
  return found, directory, *load(directory)


def rollout_of(ids):
  prompts = toys.pack_prompts(ids[:, :PROMPT])
  return toys.pack_rollout(prompts, [[row[PROMPT:]] for row in ids])


def test_logprobs_gradients_and_decoding(family):
  found, _, model, params = family
  rollout = rollout_of(found["ids"])
  how = Sampling(
    group_size=1,
    max_tokens=12,
    stop_ids=(0,),
    pad_id=0,
    temperature=0.0,
    ignore_stop=True,
  )

  def run(params):
    def mean(params):
      logprobs, _ = rollout_logprobs(params, rollout, model=model)
      return logprobs.mean(), logprobs

    drawn = grpo.sample(
      params, rollout.prompts, jax.random.key(0), model=model, sampling=how
    )
    return jax.grad(mean, has_aux=True)(params), drawn.ids[:, 0]

  (grads, logprobs), decoded = toys.jit(run)(params)
  np.testing.assert_allclose(
    logprobs[:, 0], found["logprobs"], rtol=1e-4, atol=1e-5
  )
  np.testing.assert_array_equal(decoded, found["decoded"])
  ours = dict(names.tensors(grads, model.arch, hf_names.names(model.arch)))
  for key, want in found.items():
    if key.startswith("grad/"):
      scale = np.abs(want).max()
      np.testing.assert_allclose(
        ours[key[5:]], want, rtol=1e-4, atol=2e-5 * scale, err_msg=key
      )


def test_one_token_at_a_time_is_the_whole_pass(family):
  """The sampler's log-probs, through its cache, are the scorer's."""
  _found, _, model, params = family
  prompts = toys.pack_prompts([[3, 4, 5, 6, 7, 8], [9, 1]])
  how = Sampling(3, 10, (0,), 0)

  def run(params):
    rollout = grpo.sample(
      params, prompts, jax.random.key(1), model=model, sampling=how
    )
    return rollout, rollout_logprobs(params, rollout, model=model)[0]

  rollout, logprobs = toys.jit(run)(params)
  np.testing.assert_allclose(
    logprobs, rollout.sampler_logprobs, rtol=1e-4, atol=2e-5
  )


def test_round_trip(family, tmp_path):
  _found, directory, model, params = family
  config = hf.read_json(directory / "config.json")
  moved = jax.tree.map(lambda x: x + jnp.float32(0.25), params)
  hf.export(moved, model.arch, config, str(tmp_path / "out"))
  again, loaded = load(tmp_path / "out")
  assert again.arch == model.arch
  for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(loaded)):
    np.testing.assert_allclose(a, b, rtol=0, atol=3e-7)
  written = json.loads((tmp_path / "out" / "config.json").read_text())
  assert written["model_type"] == config["model_type"]


@pytest.mark.parametrize("name", MODELS)
def test_published_facts_are_accepted(name):
  count, facts = MODELS[name]
  arch = families.read_config(facts, 1000)
  assert weight_table.parameter_count(arch) == count


def test_windows_follow_their_period():
  arch = families.read_config(MODELS["google/gemma-3-1b-it"][1], 1000)
  assert [arch.window(i) for i in range(7)] == [512] * 5 + [0, 512]
  assert (arch.rope_theta, arch.window_theta) == (1e6, 1e4)
  assert arch.tied and arch.embed_scale == pytest.approx(1152**0.5)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
    ({"rope_scaling": {"rope_type": "yarn", "mscale": 1.0}}, "mscale"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is needed"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
    ({"model_type": "gemma3"}, "'gemma3' is not supported"),
    ({"model_type": "qwen2", "layer_types": ["other"]}, "other"),
    ({"rms_norm_eps": float("nan")}, "norm_eps nan"),
    ({"rope_theta": -1.0}, "rope_theta -1.0"),
    ({"num_key_value_heads": 0}, "kv_heads 0"),
    ({"num_key_value_heads": 5}, "do not divide"),
    ({"tie_word_embeddings": "false"}, "not a bool"),
    ({"model_type": ["llama"]}, "is not supported"),
  ],
)
def test_other_facts_are_refused(changes, words):
  config = MODELS["meta-llama/Llama-3.2-1B-Instruct"][1] | changes
  with pytest.raises(UserError, match=words):
    families.read_config(config, 1000)


def test_both_forms_of_rotary_positions_are_one():
  scaling = MODELS["meta-llama/Llama-3.2-1B-Instruct"][1]["rope_scaling"]
  old = ropes({"rope_theta": 5e5, "rope_scaling": scaling})
  nested = {"rope_parameters": {"rope_theta": 5e5, **scaling}}
  assert ropes(nested) == old


def test_the_table_of_families_is_the_files(family):
  found = family[0]
  kind = json.loads(str(found["config"]))["model_type"]
  assert kind in families.FAMILIES


def test_every_family_has_a_file():
  kinds = {
    json.loads(str(np.load(FILES / f"{name}.npz")["config"]))["model_type"]
    for name in NAMES
  }
  assert kinds == set(families.FAMILIES)
