"""Import against what PyTorch computed, export back, and broken directories."""

import json
import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import grpo
from grpo_jax.errors import UserError
from grpo_jax.logprobs import completion_inputs, token_logprobs
from grpo_jax.models import (
  hf,
  hf_names,
  names,
  remote,
  transformer,
  weight_table,
)
from grpo_jax.models.architecture import Model
from grpo_jax.models.pretrained import open_model
from grpo_jax.sampling import Sampling
from grpo_jax.types import Prompts

safetensors = pytest.importorskip("safetensors.numpy")
TINY = pathlib.Path(__file__).parent.parent / "golden" / "tiny_llama"
PROMPT = 3  # tokens of the fixture's sequences that are the prompt


@pytest.fixture(scope="module")
def expected():
  return dict(np.load(TINY / "expected.npz"))


def place(arch, devices=1):
  mesh = jax.make_mesh(
    (devices,),
    ("fsdp",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:devices],
  )

  def one(axes):
    split = "fsdp" if devices > 1 else None
    spec = [split if name == "embed" else None for name in axes]
    return jax.sharding.NamedSharding(mesh, jax.P(*spec))

  return jax.tree.map(
    one, weight_table.axes(arch), is_leaf=lambda x: isinstance(x, tuple)
  )


@pytest.fixture(scope="module")
def tiny():
  opened = open_model(str(TINY))
  model = Model(opened.architecture(48))
  return model, opened.load(model.arch, place(model.arch))


def split(ids):
  prompts = Prompts(
    ids=jnp.asarray(ids[:, :PROMPT], jnp.int32),
    lengths=jnp.full(len(ids), PROMPT, jnp.int32),
    ordinals=jnp.arange(len(ids), dtype=jnp.int32),
  )
  return prompts, jnp.asarray(ids[:, None, PROMPT:], jnp.int32)


def test_logprobs_equal_pytorchs(tiny, expected):
  model, params = tiny
  prompts, completions = split(expected["ids"])
  tokens = completion_inputs(prompts, completions, heads=False)
  hidden, _ = transformer.joint(params, prompts, (tokens,), model=model)
  got = jax.nn.log_softmax(transformer.logits(params, hidden[0], model=model))
  want = expected["logprobs"][:, PROMPT - 1 :]
  np.testing.assert_allclose(got[:, 0], want, rtol=1e-4, atol=1e-5)


def test_gradients_equal_pytorchs(tiny, expected):
  """The whole sequence as completion of its first token, as PyTorch had it."""
  model, params = tiny
  ids = jnp.asarray(expected["ids"], jnp.int32)
  prompts = Prompts(
    ids=ids[:, :1],
    lengths=jnp.ones(len(ids), jnp.int32),
    ordinals=jnp.arange(len(ids), dtype=jnp.int32),
  )
  completions = ids[:, None, 1:]

  def mean(params):
    tokens = completion_inputs(prompts, completions, heads=False)
    hidden, _ = transformer.joint(params, prompts, (tokens,), model=model)
    logprobs, _ = token_logprobs(
      params, hidden[0], completions, model=model, temperature=1.0
    )
    return logprobs.mean()

  grads = dict(
    names.tensors(
      jax.grad(mean)(params), model.arch, hf_names.names(model.arch)
    )
  )
  for key in expected:
    if key.startswith("grad/"):
      np.testing.assert_allclose(
        grads[key[5:]], expected[key], rtol=1e-4, atol=1e-6
      )


def test_decoding_equals_pytorchs(tiny, expected):
  """The sampler's likeliest tokens, one by one through its cache."""
  model, params = tiny
  prompts, _ = split(expected["ids"])
  want = expected["decoded"][:, PROMPT:]
  how = Sampling(
    group_size=1,
    max_tokens=want.shape[1],
    stop_ids=(0,),
    pad_id=0,
    temperature=0.0,
    ignore_stop=True,
  )
  rollout = grpo.sample(
    params, prompts, jax.random.key(0), model=model, sampling=how
  )
  np.testing.assert_array_equal(rollout.ids[:, 0], want)


def test_sharded_import_is_the_same(tiny):
  model, params = tiny
  opened = open_model(str(TINY))
  sharded = opened.load(model.arch, place(model.arch, devices=8))
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(sharded)):
    assert len(b.sharding.device_set) == 8
    np.testing.assert_array_equal(a, b)


def test_export_is_what_was_imported_and_then_updated(tiny, tmp_path):
  model, params = tiny
  moved = jax.tree.map(lambda x: x + 0.5, params)
  config = hf.read_json(TINY / "config.json")
  hf.export(moved, model.arch, config, str(tmp_path / "out"))
  again = open_model(str(tmp_path / "out"))
  assert again.architecture(48) == model.arch
  loaded = again.load(model.arch, place(model.arch))
  for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(loaded)):
    np.testing.assert_array_equal(a, b)
  with pytest.raises(UserError, match="holds a model already"):
    hf.export(moved, model.arch, config, str(tmp_path / "out"))


def test_shards_of_an_export(tiny, tmp_path, monkeypatch):
  model, params = tiny
  monkeypatch.setattr(hf, "SHARD_BYTES", 8000)
  hf.export(params, model.arch, {"model_type": "llama"}, str(tmp_path / "o"))
  assert len(list((tmp_path / "o").glob("*.safetensors"))) > 2
  open_model(str(tmp_path / "o")).load(model.arch, place(model.arch))


def test_a_tied_head_is_not_written_and_not_needed(tiny, tmp_path):
  import dataclasses

  model, params = tiny
  arch = dataclasses.replace(model.arch, tied=True)
  tied = {k: v for k, v in params.items() if k != "head"}
  hf.export(tied, arch, {"model_type": "llama"}, str(tmp_path / "o"))
  opened = open_model(str(tmp_path / "o"))
  assert opened.architecture(48).tied
  assert "lm_head.weight" not in opened.source.names()
  opened.load(arch, place(arch))


@pytest.fixture
def copy(tmp_path):
  return pathlib.Path(shutil.copytree(TINY, tmp_path / "model"))


def edit(directory, **changes):
  c = json.loads((directory / "config.json").read_text())
  c |= changes
  c = {k: v for k, v in c.items() if v != "remove"}
  (directory / "config.json").write_text(json.dumps(c))


def load(directory):
  opened = open_model(str(directory))
  arch = opened.architecture(48)
  return opened.load(arch, place(arch))


def shard_with(directory, name):
  index = directory / "model.safetensors.index.json"
  found = json.loads(index.read_text())["weight_map"][name]
  return directory / found


NAME = "model.layers.1.mlp.up_proj.weight"


def rewrite(directory, change):
  path = shard_with(directory, NAME)
  tensors = safetensors.load_file(path)
  change(tensors)
  safetensors.save_file(tensors, path)


@pytest.mark.parametrize(
  ("breakage", "message"),
  [
    (lambda d: edit(d, model_type="mamba"), "'mamba' is not supported"),
    (lambda d: edit(d, new_fact=3), "attribute 'new_fact' = 3"),
    (lambda d: edit(d, hidden_act="gelu"), "hidden_act = 'gelu'"),
    (lambda d: edit(d, attention_bias=True), "attention_bias = True"),
    (lambda d: edit(d, num_hidden_layers="remove"), "lacks the attribute"),
    (lambda d: edit(d, intermediate_size=41), "shape .*config.json implies"),
    (lambda d: edit(d, num_hidden_layers=1), "tensors that nothing reads"),
    (lambda d: edit(d, num_hidden_layers=3), "lacks the tensor"),
    (lambda d: edit(d, rope_scaling={"rope_type": "yarn"}), "'yarn'"),
    (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
    (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    (lambda d: shard_with(d, NAME).unlink(), "lacks 1 of .* weight files"),
    (
      lambda d: shard_with(d, NAME).write_bytes(
        shard_with(d, NAME).read_bytes()[:900]
      ),
      "cannot be read",
    ),
    (
      lambda d: rewrite(d, lambda t: t.update(extra=np.zeros(3, np.float32))),
      "nothing reads, such as 'extra'",
    ),
    (
      lambda d: rewrite(d, lambda t: t.update({NAME: t[NAME].astype(np.int8)})),
      "is I8, not a floating-point type",
    ),
  ],
)
def test_broken_directories_are_one_line(copy, breakage, message):
  breakage(copy)
  with pytest.raises(UserError, match=message) as error:
    load(copy)
  assert "\n" not in str(error.value)


def test_old_and_nested_rotary_forms_are_one(copy):
  edit(copy, rope_parameters="remove", rope_theta=5000.0)
  old = open_model(str(copy)).architecture(48)
  nested = {"rope_type": "default", "rope_theta": 5000.0}
  edit(copy, rope_parameters=nested, rope_theta="remove")
  assert open_model(str(copy)).architecture(48) == old


def test_paths_that_are_no_model(tmp_path):
  with pytest.raises(UserError, match="does not exist"):
    open_model(str(tmp_path / "nothing"))
  (tmp_path / "empty").mkdir()
  (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
  with pytest.raises(UserError, match="no safetensors file"):
    open_model(str(tmp_path / "empty"))
  (tmp_path / "x.gguf").write_bytes(b"not a model")
  pytest.importorskip("gguf")
  with pytest.raises(UserError, match="cannot be read as GGUF"):
    open_model(str(tmp_path / "x.gguf"))


def test_a_model_in_an_object_store(tmp_path, monkeypatch):
  fsspec = pytest.importorskip("fsspec")
  monkeypatch.setattr(remote, "CACHE", str(tmp_path / "cache"))
  store = fsspec.filesystem("memory")
  for path in TINY.iterdir():
    store.pipe_file(f"/bucket/tiny/{path.name}", path.read_bytes())
  store.pipe_file("/bucket/tiny/pytorch_model.bin", b"not fetched")
  opened = open_model("memory://bucket/tiny")
  assert opened.architecture(48) == open_model(str(TINY)).architecture(48)
  (folder,) = (tmp_path / "cache").iterdir()
  assert not (folder / "pytorch_model.bin").exists()
  # A copy that was cut off is fetched again; what is whole is not.
  shard = sorted(folder.glob("*.safetensors"))[0]
  shard.write_bytes(shard.read_bytes()[:100])
  whole = (folder / "config.json").stat().st_mtime_ns
  open_model("memory://bucket/tiny").load(
    opened.architecture(48), place(opened.architecture(48))
  )
  assert (folder / "config.json").stat().st_mtime_ns == whole
  # Another file of the same size is another file; one that went is gone.
  time.sleep(0.01)
  changed = (TINY / shard.name).read_bytes()
  changed = changed[:-4] + b"\0\0\0\0"
  store.pipe_file(f"/bucket/tiny/{shard.name}", changed)
  store.rm("/bucket/tiny/generation_config.json")
  open_model("memory://bucket/tiny")
  assert shard.read_bytes() == changed
  assert not (folder / "generation_config.json").exists()


@pytest.mark.parametrize(
  ("url", "message"),
  [
    ("memory://nowhere", "nowhere"),
    ("memory://bucket/void", "void"),
    ("nosuch://bucket/x", "nosuch"),
  ],
)
def test_stores_without_a_model_are_one_line(url, message):
  fsspec = pytest.importorskip("fsspec")
  fsspec.filesystem("memory").mkdirs("/bucket/void", exist_ok=True)
  with pytest.raises(UserError, match=message) as error:
    open_model(url)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("GatedRepoError", "accept its terms"),
    ("RevisionNotFoundError", "no revision 'v2'"),
    ("RepositoryNotFoundError", "not on the hub"),
    ("LocalEntryNotFoundError", "with no network"),
  ],
)
def test_what_the_hub_refuses_is_one_line(monkeypatch, name, message):
  hub = pytest.importorskip("huggingface_hub")
  errors = pytest.importorskip("huggingface_hub.errors")
  kind = getattr(errors, name)
  asked = {}

  def refuse(repo, **how):
    asked.update(how, repo=repo)
    raise kind.__new__(kind)

  monkeypatch.setattr(hub, "snapshot_download", refuse)
  with pytest.raises(UserError, match=message) as error:
    open_model("some/model@v2")
  assert "some/model" in str(error.value) and "\n" not in str(error.value)
  assert (asked["repo"], asked["revision"]) == ("some/model", "v2")
