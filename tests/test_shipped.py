"""Configurations of models that are not here: built from their facts alone.

A directory with the published config.json, a small tokenizer and no weights
stands for each model, and a few lines in GSM8K's and MATH's columns for the
data: everything but downloading is that of the real run.
"""

import importlib
import json

import jax
import pytest
from published import MODELS

from grpo_jax import ahead, build, config, hf_tokenizer, sharding
from grpo_jax.compile import Programs
from grpo_jax.errors import UserError
from grpo_jax.models import weight_table
from grpo_jax.preemption import Guard

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("math_verify")

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
