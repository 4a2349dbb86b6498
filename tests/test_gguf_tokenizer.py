"""A tokenizer out of a GGUF file: as its model was trained, without PyTorch."""

import subprocess
import sys

import pytest

from grpo_jax.errors import UserError

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

BYTES = [chr(x) for x in (*range(33, 127), 0x120, 0x10A)]  # Ġ a blank, Ċ a line
TOKENS = ["<s>", "</s>", "<turn>", *BYTES, "Ġt", "he", "Ġthe", "12", "ĠĠ"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ Ġ"]


def write(path, pre="smollm", model="gpt2", bos=True):
  out = gguf.GGUFWriter(path, "llama")
  out.add_tokenizer_model(model)
  out.add_tokenizer_pre(pre)
  out.add_token_list(TOKENS)
  out.add_token_types([3, 3, 4] + [1] * (len(TOKENS) - 3))
  out.add_token_merges(MERGES)
  out.add_bos_token_id(0)
  out.add_eos_token_id(1)
  out.add_add_bos_token(bos)
  out.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.write_tensors_to_file()
  out.close()
  return str(path)


def test_text_is_cut_as_the_file_says(tmp_path):
  from grpo_jax import gguf_tokenizer

  texts = {}
  for pre in ("smollm", "gpt-2"):
    t = gguf_tokenizer.load(write(tmp_path / f"{pre}.gguf", pre))
    ids = t.encode("12 the  12<turn>", add_special_tokens=False)
    assert (
      t.decode(ids, clean_up_tokenization_spaces=False) == "12 the  12<turn>"
    )
    texts[pre] = t.convert_ids_to_tokens(ids)
  # Digits stand alone for one, and the blanks before them are one token.
  assert texts["smollm"] == ["1", "2", "Ġthe", "ĠĠ", "1", "2", "<turn>"]
  assert texts["gpt-2"] == ["12", "Ġthe", "Ġ", "Ġ", "12", "<turn>"]


def test_one_bos_its_stop_and_its_template(tmp_path):
  from grpo_jax.hf_tokenizer import HFTokenizer

  t = HFTokenizer(write(tmp_path / "m.gguf"), chat=True)
  assert t.encode_prompt("the")[:1] == [0]
  assert t.encode_prompt("<s>the").count(0) == 1
  assert t.stop_ids() == (1,)
  assert t.render([{"role": "user", "content": "12"}]) == "12"
  assert HFTokenizer(write(tmp_path / "n.gguf", bos=False))._bos == []


@pytest.mark.parametrize("how", [{"pre": "tekken"}, {"model": "llama"}])
def test_other_kinds_are_refused(tmp_path, how):
  from grpo_jax.hf_tokenizer import HFTokenizer

  with pytest.raises(UserError, match="known are") as error:
    HFTokenizer(write(tmp_path / "m.gguf", **how))
  assert "\n" not in str(error.value)


def test_it_needs_no_pytorch(tmp_path):
  code = "import sys; sys.modules['torch'] = None\n"
  code += "from grpo_jax.hf_tokenizer import HFTokenizer\n"
  code += f"print(HFTokenizer({write(tmp_path / 'm.gguf')!r}).encode('the'))"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip().startswith("[")
  assert "PyTorch" not in done.stderr
