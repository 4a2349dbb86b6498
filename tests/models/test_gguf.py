"""GGUF files of every family against the same weights as safetensors."""

import dataclasses
import json
import math
import pathlib

import gguf_writer
import jax
import numpy as np
import pytest

from grpo_jax.errors import UserError
from grpo_jax.models import weight_table
from grpo_jax.models.gguf_file import File
from grpo_jax.models.pretrained import open_model

gguf = pytest.importorskip("gguf")
FILES = pathlib.Path(__file__).parent.parent / "golden" / "families"
# llama.cpp's name -> the fixture with such weights.
FAMILIES = {
  "llama": "llama3",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
  "gemma3": "gemma3",
}


def fixture(arch):
  """Its config.json, where GGUF can say it, and its weights."""
  found = np.load(FILES / f"{FAMILIES[arch]}.npz")
  config = json.loads(str(found["config"]))
  if arch == "llama":  # its scaling is no published model's
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
  if arch == "gemma3":  # the scale is the width of a head
    config["query_pre_attn_scalar"] = config["head_dim"]
    # Three layers of a period of six have windows, all.
    config["layer_types"] = ["sliding_attention"] * 3
  return config, {k[7:]: found[k] for k in found if k.startswith("weight/")}


def directory(path, config, weights):
  save_file = pytest.importorskip("safetensors.numpy").save_file
  (path / "config.json").write_text(json.dumps(config))
  save_file(weights, path / "model.safetensors")
  return str(path)


def load(path):
  opened = open_model(path)
  arch = opened.architecture(32)
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shapes = jax.eval_shape(lambda: weight_table.init(jax.random.key(0), arch))
  return arch, opened.load(arch, jax.tree.map(lambda _: where, shapes))


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_file_is_the_directory_it_was_made_of(arch, tmp_path):
  config, weights = fixture(arch)
  want, params = load(directory(tmp_path, config, weights))
  got, loaded = load(
    gguf_writer.write(tmp_path / "m.gguf", arch, config, weights)
  )
  assert dataclasses.replace(got, windows=()) == dataclasses.replace(
    want, windows=()
  )
  layers = range(want.layers)
  assert [*map(got.window, layers)] == [*map(want.window, layers)]
  assert jax.tree.structure(params) == jax.tree.structure(loaded)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(loaded)):
    # A norm's 1 was added in float32.
    atol = 1.2e-7 if arch == "gemma3" else 0
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", FAMILIES)
def test_transformers_reads_the_same_file_alike(arch, tmp_path):
  """Its own reader, in PyTorch, fills every tensor with the same values."""
  pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  gguf_writer.write(
    tmp_path / "m.gguf", arch, *fixture(arch), lambda o: o.add_vocab_size(32)
  )
  opened = open_model(str(tmp_path / "m.gguf"))
  source = opened.source
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path,
    gguf_file="m.gguf",
    config=transformers.AutoConfig.for_model(**opened.config),
  )
  state = theirs.state_dict()
  if arch == "gemma3":
    del state["lm_head.weight"]  # the table's
  assert source.names() == state.keys()
  for name, x in state.items():
    np.testing.assert_array_equal(source.read(name), x.numpy(), err_msg=name)


def gemma(tmp_path, change, layers=3, **facts):
  """The architecture of a Gemma's file."""
  config, weights = fixture("gemma3")
  kept = {
    k.replace("layers.0.", f"layers.{i}."): v
    for k, v in weights.items()
    for i in range(layers)
    if ".layers." not in k or ".layers.0." in k
  }
  config |= {"num_hidden_layers": layers, **facts}
  path = gguf_writer.write(tmp_path / "m.gguf", "gemma3", config, kept, change)
  return open_model(path).architecture(32)


def test_what_llama_cpp_knows_of_gemma(tmp_path):
  """Five layers in six have a window and the smaller rotary base."""
  arch = gemma(tmp_path, lambda out: out.add_final_logit_softcapping(30.0), 8)
  assert [arch.window(i) for i in range(8)] == [5] * 5 + [0, 5, 5]
  assert (arch.rope_theta, arch.window_theta) == (1e6, 1e4)
  assert arch.query_scale == pytest.approx(8**-0.5)
  assert (arch.logit_cap, arch.attention_cap) == (30.0, 0.0)
  assert arch.embed_scale == 4.0 and arch.tied and arch.norm_eps == 1e-6


def test_what_a_file_of_gemma_says_counts(tmp_path):
  def change(out):
    out.add_sliding_window_pattern([True, False, True])
    out.add_rope_freq_base_swa(500.0)
    out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    out.add_rope_scaling_factor(8.0)

  arch = gemma(tmp_path, change)
  assert [arch.window(i) for i in range(3)] == [5, 0, 5]
  assert arch.window_theta == 500.0
  assert (arch.rope_scaling.kind, arch.rope_scaling.factor) == ("linear", 8.0)


def test_the_largest_gemma_scales_its_queries_otherwise(tmp_path):
  assert gemma(tmp_path, lambda out: None, 62).query_scale == pytest.approx(
    (16 // 2) ** -0.5
  )
  (tmp_path / "b").mkdir()
  arch = gemma(tmp_path / "b", lambda out: None, 62, num_attention_heads=4)
  assert arch.query_scale == pytest.approx((16 // 4) ** -0.5)


def llama(tmp_path, change, arch="llama"):
  path = gguf_writer.write(tmp_path / "m.gguf", arch, *fixture(arch), change)
  return load(path)[0]


def table(factor, theta=5e5, size=8):
  """The converter's loop over frequencies."""
  out = []
  for i in range(0, size, 2):
    wave = 2 * math.pi * theta ** (i / size)
    if wave < 8192 / 4.0:
      out.append(1.0)
    elif wave > 8192 / 1.0:
      out.append(factor)
    else:
      smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
      out.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(out, np.float32)


def test_the_rotary_table_of_llama_3_is_its_scaling(tmp_path):
  freqs = table(32.0)
  arch = llama(tmp_path, lambda out: out.add_tensor("rope_freqs.weight", freqs))
  scaling = arch.rope_scaling
  assert (scaling.kind, scaling.factor) == ("llama3", 32.0)
  assert (scaling.low, scaling.high, scaling.original) == (1.0, 4.0, 8192)


def key(name, value):
  def change(out):
    add = out.add_string if isinstance(value, str) else out.add_float32
    add(name, value)

  return change


@pytest.mark.parametrize(
  ("arch", "change", "words"),
  [
    ("llama", key("llama.attention.sliding_window", 8), "sliding_window"),
    ("llama", key("llama.final_logit_softcapping", 30), "logit_softcapping"),
    ("llama", key("llama.attn_logit_softcapping", 50), "logit_softcapping"),
    ("llama", key("llama.rope.scaling.attn_factor", 1), "attn_factor"),
    ("llama", key("llama.rope.scaling.type", "yarn"), "'yarn'"),
    ("llama", key("llama.expert_count", 8), "expert_count"),
    ("llama", key("llama.logit_scale", 8), "logit_scale"),
    ("llama", key("llama.vocab_size", 31), "only 32"),
    ("llama", key("llama.rope.dimension_count", 4), "only 8"),
    ("llama", key("llama.attention.value_length", 4), "only 8"),
    ("llama", key("adapter.lora.alpha", 4), "adapter.lora.alpha"),
    ("llama", key("general.type", "adapter"), "'adapter'"),
    ("llama", key("split.count", 3), "one of 3"),
    ("qwen2", key("qwen2.attention.scale", 8), "attention.scale"),
    ("gemma3", key("gemma3.attn_logit_softcapping", 50), "logit_softcapping"),
    ("gemma3", key("gemma3.attention.scale", 8), "attention.scale"),
    (
      "gemma3",
      lambda out: out.add_sliding_window_pattern([True, False]),
      "2 entries for 3 layers",
    ),
    (
      "llama",
      lambda out: out.add_tensor("rope_freqs.weight", table(32.0) * 1.01),
      "rope_freqs.weight",
    ),
    (
      "qwen3",
      lambda out: out.add_tensor("rope_freqs.weight", table(32.0)),
      "nothing reads, such as 'rope_freqs.weight'",
    ),
    (
      "llama",
      lambda out: out.add_tensor("blk.0.attn_q.bias", table(32.0)),
      "q_proj.bias",
    ),
  ],
)
def test_what_would_be_another_model_is_refused_by_name(
  arch, change, words, tmp_path
):
  with pytest.raises(UserError, match=words) as error:
    llama(tmp_path, change, arch)
  assert "\n" not in str(error.value)


def test_a_factor_without_a_type_is_linear_and_none_is_none(tmp_path):
  arch = llama(tmp_path, lambda out: out.add_rope_scaling_factor(2.0))
  assert (arch.rope_scaling.kind, arch.rope_scaling.factor) == ("linear", 2.0)

  def none(out):
    out.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    out.add_rope_scaling_factor(2.0)

  (tmp_path / "b").mkdir()
  assert llama(tmp_path / "b", none).rope_scaling is None


def test_a_family_that_is_not_known_is_refused(tmp_path):
  out = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
  with pytest.raises(UserError, match=r"'mamba'.*supported are llama, qwen2"):
    open_model(gguf_writer.close(out, tmp_path / "m.gguf"))


def test_a_fact_that_lacks_is_named(tmp_path):
  out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
  out.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
  with pytest.raises(UserError, match=r"lacks .*llama\.attention\.head_count"):
    open_model(gguf_writer.close(out, tmp_path / "m.gguf"))


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS")


@pytest.fixture
def packed(tmp_path):
  """A file with a tensor [3, 512] of many kinds, of random bytes."""
  rng = np.random.default_rng(0)
  out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", use_temp_file=False)
  out.add_custom_alignment(64)
  out.add_array("some.list", [1.5, -2.0])
  out.add_array("some.words", ["a", "é"])
  for name in KINDS:
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 60, (3, 512 // values * size), np.uint8)
    out.add_tensor(name, raw, raw_dtype=kind)
  return gguf_writer.close(out, tmp_path / "m.gguf")


def test_tensors_and_metadata_are_what_the_package_reads(packed):
  file, other = File(packed), gguf.GGUFReader(packed)
  assert file.fields == {
    k: v.contents()
    for k, v in other.fields.items()
    if not k.startswith("GGUF.")
  }
  assert set(file.tensors) == set(KINDS)
  for tensor in other.tensors:
    want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    got = file.read(tensor.name)
    assert (got.shape, got.dtype) == ((3, 512), np.float32)
    np.testing.assert_array_equal(got, want.reshape(3, 512))


def test_a_file_that_was_cut_anywhere_is_one_line(packed, tmp_path):
  whole = pathlib.Path(packed).read_bytes()
  rng = np.random.default_rng(1)
  for end in (3, 4, 20, len(whole) - 40, *rng.integers(0, len(whole) - 64, 40)):
    (tmp_path / "cut.gguf").write_bytes(whole[:end])
    with pytest.raises(UserError, match="cannot be read as GGUF") as error:
      File(str(tmp_path / "cut.gguf"))
    assert "\n" not in str(error.value)


def test_bytes_that_were_changed_never_make_another_error(packed, tmp_path):
  """The header, a byte at a time: it is read, or it is a UserError."""
  whole = bytearray(pathlib.Path(packed).read_bytes())
  rng = np.random.default_rng(2)
  for at in rng.integers(0, 700, 300):
    broken = whole.copy()
    broken[at] ^= 1 << int(rng.integers(8))
    (tmp_path / "b.gguf").write_bytes(broken)
    try:
      File(str(tmp_path / "b.gguf"))
    except UserError as error:
      assert "\n" not in str(error)
