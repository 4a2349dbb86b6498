"""Configurations of models that are not here: built from their facts alone.

A directory with the published config.json, a small tokenizer and no weights
stands for each model, and a few lines in GSM8K's and MATH's columns for the
data: everything but downloading is that of the real run.
"""

import importlib
import json

import jax
import pytest

from grpo_jax import ahead, build, config, hf_tokenizer, sharding
from grpo_jax.compile import Programs
from grpo_jax.errors import UserError
from grpo_jax.models import weight_table
from grpo_jax.preemption import Guard

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("math_verify")

QWEN = {
  "hidden_act": "silu",
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
# Facts of the published config.json, and the parameters that they imply.
MODELS = {
  "Qwen/Qwen2.5-0.5B-Instruct": (
    494_032_768,
    QWEN
    | {
      "model_type": "qwen2",
      "hidden_size": 896,
      "intermediate_size": 4864,
      "num_attention_heads": 14,
      "num_hidden_layers": 24,
      "num_key_value_heads": 2,
      "tie_word_embeddings": True,
    },
  ),
  "Qwen/Qwen2.5-1.5B-Instruct": (
    1_543_714_304,
    QWEN
    | {
      "model_type": "qwen2",
      "hidden_size": 1536,
      "intermediate_size": 8960,
      "num_attention_heads": 12,
      "num_hidden_layers": 28,
      "num_key_value_heads": 2,
      "tie_word_embeddings": True,
    },
  ),
  "Qwen/Qwen3-1.7B": (
    1_720_574_976,
    QWEN
    | {
      "model_type": "qwen3",
      "head_dim": 128,
      "hidden_size": 2048,
      "intermediate_size": 6144,
      "num_attention_heads": 16,
      "num_hidden_layers": 28,
      "num_key_value_heads": 8,
      "tie_word_embeddings": True,
    },
  ),
  "Qwen/Qwen3-30B-A3B-Instruct-2507": (
    30_532_122_624,
    QWEN
    | {
      "model_type": "qwen3_moe",
      "decoder_sparse_step": 1,
      "head_dim": 128,
      "hidden_size": 2048,
      "intermediate_size": 6144,
      "mlp_only_layers": [],
      "moe_intermediate_size": 768,
      "norm_topk_prob": True,
      "num_attention_heads": 32,
      "num_experts": 128,
      "num_experts_per_tok": 8,
      "num_hidden_layers": 48,
      "num_key_value_heads": 4,
      "rope_theta": 10000000,
      "router_aux_loss_coef": 0.001,
      "tie_word_embeddings": False,
    },
  ),
  "google/gemma-3-1b-it": (
    999_885_952,
    {
      "model_type": "gemma3_text",
      "head_dim": 256,
      "hidden_activation": "gelu_pytorch_tanh",
      "hidden_size": 1152,
      "intermediate_size": 6912,
      "num_attention_heads": 4,
      "num_hidden_layers": 26,
      "num_key_value_heads": 1,
      "query_pre_attn_scalar": 256,
      "rms_norm_eps": 1e-06,
      "rope_local_base_freq": 10000,
      "rope_theta": 1000000,
      "sliding_window": 512,
      "sliding_window_pattern": 6,
      "vocab_size": 262144,
    },
  ),
  "meta-llama/Llama-3.2-1B-Instruct": (
    1_235_814_400,
    {
      "model_type": "llama",
      "head_dim": 64,
      "hidden_act": "silu",
      "hidden_size": 2048,
      "intermediate_size": 8192,
      "num_attention_heads": 32,
      "num_hidden_layers": 16,
      "num_key_value_heads": 8,
      "rms_norm_eps": 1e-05,
      "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
      },
      "rope_theta": 500000.0,
      "tie_word_embeddings": True,
      "vocab_size": 128256,
    },
  ),
}
TEMPLATE = (
  "{% for m in messages %}{{ m['content'] }}{% endfor %}"
  "{% if enable_thinking is defined and not enable_thinking %}{% endif %}"
)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
  """Directories by hub id, and of both data sets' columns."""
  import tokenizers
  from safetensors.numpy import save_file
  from tokenizers import models, pre_tokenizers
  from transformers import PreTrainedTokenizerFast

  root = tmp_path_factory.mktemp("models")
  raw = tokenizers.Tokenizer(
    models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>")
  )
  raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  fast = PreTrainedTokenizerFast(
    tokenizer_object=raw, unk_token="<unk>", eos_token="</s>"
  )
  fast.chat_template = TEMPLATE
  for name, (_, facts) in MODELS.items():
    path = root / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(facts))
    save_file({}, path / "model.safetensors")
  rows = {
    "gsm8k": lambda i: {"question": f"{i} + 1?", "answer": f"\n#### {i + 1}"},
    "math": lambda i: {
      "problem": f"{i} + 1?",
      "solution": f"\\boxed{{{i + 1}}}",
    },
  }
  for name, row in rows.items():
    (root / name).mkdir()
    for split, first, count in (("train", 0, 80), ("test", 100, 20)):
      lines = [json.dumps(row(first + i)) for i in range(count)]
      (root / name / f"{split}.jsonl").write_text("\n".join(lines))
  with pytest.MonkeyPatch.context() as patch:
    # transformers has a class of its own for each of these models.
    patch.setattr(hf_tokenizer, "load", lambda path: fast)
    yield root


def resolved(name, forms, root):
  """The experiment, and its configuration with local paths."""
  c = importlib.import_module(f"experiments.{name}").get_config(*forms)
  hub = c.model.path
  c.model.path = str(root / hub)
  c.task.path, c.task.configuration = str(root / c.task.name), ""
  c.eval.prompts = 20
  return hub, c


@pytest.mark.parametrize(
  ("name", "forms", "mesh"),
  [
    ("gsm8k_qwen2p5_0p5b", ("full",), (1, 8, 1)),
    ("gsm8k_qwen2p5_0p5b", ("lora",), (1, 8, 1)),
    ("gsm8k_qwen2p5_1p5b", ("full",), (1, 8, 1)),
    ("gsm8k_qwen2p5_1p5b", ("lora",), (8, 1, 1)),
    ("gsm8k_qwen3_1p7b", (), (1, 8, 1)),
    ("gsm8k_gemma3_1b", (), (1, 8, 1)),
    ("gsm8k_llama3p2_1b", (), (1, 8, 1)),
    ("qwen3_30b_a3b_gspo", (), (1, 2, 4)),
  ],
)
def test_every_program_of_it_traces(name, forms, mesh, stand_in):
  hub, c = resolved(name, forms, stand_in)
  e = config.resolve(c)
  assert weight_table.parameter_count(e.model.arch) == MODELS[hub][0]
  assert (e.model.lora is not None) == (forms == ("lora",))
  devices = sharding.make_mesh(*mesh)
  build.check_mesh(e, devices)
  with Guard() as guard:
    built = build.build(e, Programs(devices, guard))
  for program, args in ahead.rl_programs(built) + ahead.eval_programs(built):
    program.abstract(*args)
  built.runner.close()
  if e.model.lora is not None:
    rl = built.shapes["rl"]
    trained = sum(x.size for x in jax.tree.leaves(rl.trainable))
    assert trained == weight_table.adapter_count(e.model.arch, e.model.lora)
    assert {x.dtype.name for x in jax.tree.leaves(rl.frozen)} == {
      "bfloat16",
      "float32",
    }


def test_the_slice_that_is_named_divides_it(stand_in):
  _, c = resolved("qwen3_30b_a3b_gspo", (), stand_in)
  sizes = (1, c.mesh.fsdp, c.mesh.tensor)
  mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
  assert mesh.size == 64
  build.check_mesh(config.resolve(c), mesh)


def test_forms():
  module = importlib.import_module("experiments.gsm8k_qwen2p5_0p5b")
  with pytest.raises(UserError, match="forms are full, lora"):
    module.get_config("lorra")
