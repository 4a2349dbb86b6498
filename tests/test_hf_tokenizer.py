"""A model's tokenizer: one BOS, all stops, chat, nothing re-encoded."""

import json

import pytest

from grpo_jax.errors import UserError
from grpo_jax.hf_tokenizer import HFTokenizer
from grpo_jax.tokenizer import make_tokenizer

pytest.importorskip("transformers")

TEMPLATE = (
  "{% for m in messages %}<s>[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
  "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture
def directory(tmp_path):
  """Words as tokens: a newline, and one with a newline inside."""
  import tokenizers
  from tokenizers import models, pre_tokenizers, processors
  from transformers import PreTrainedTokenizerFast

  words = ["<unk>", "<s>", "</s>", "<turn>", "a", "b", "\n", "b\n", "[", "]"]
  vocab = {w: i for i, w in enumerate(words)}
  raw = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
  raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  raw.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 1)]
  )
  fast = PreTrainedTokenizerFast(
    tokenizer_object=raw,
    bos_token="<s>",
    eos_token="</s>",
    unk_token="<unk>",
    additional_special_tokens=["<turn>"],
  )
  fast.chat_template = TEMPLATE
  fast.save_pretrained(tmp_path)
  stops = {"eos_token_id": [2, 3]}
  (tmp_path / "generation_config.json").write_text(json.dumps(stops))
  return str(tmp_path)


def test_exactly_one_bos(directory):
  plain = HFTokenizer(directory)
  assert plain.encode("ab") == [4, 5]
  assert plain.encode_prompt("ab") == [1, 4, 5]
  assert plain.encode_prompt("<s>ab") == [1, 4, 5]
  chat = HFTokenizer(directory, chat=True)
  ids = chat.encode_prompt("b")
  assert ids.count(1) == 1
  assert ids[0] == 1


def test_a_system_message_comes_first(directory):
  chat = HFTokenizer(directory, chat=True, system="a")
  text = chat.render([{"role": "user", "content": "b"}])
  assert text == "<s>[system]a<s>[user]b[a]"


def test_all_stop_ids_and_every_token_with_a_stop_string(directory):
  tokenizer = HFTokenizer(directory)
  assert tokenizer.stop_ids() == (2, 3)
  assert tokenizer.stop_ids(["\n"]) == (2, 3, 6, 7)
  with pytest.raises(UserError, match="no token"):
    tokenizer.stop_ids(["zebra"])


def test_pad_may_equal_a_stop(directory):
  tokenizer = HFTokenizer(directory)
  assert tokenizer.pad_id == tokenizer.stop_id == 2
  assert tokenizer.vocab_size == 10


def test_special_tokens_print_nothing(directory):
  tokenizer = HFTokenizer(directory)
  assert tokenizer.decode([4, 5, 2]).replace(" ", "") == "ab"
  assert tokenizer.decode([3]) == ""


def test_what_is_not_there_is_one_line(directory, tmp_path):
  (tmp_path / "none").mkdir()
  with pytest.raises(UserError, match="no tokenizer can be read") as error:
    HFTokenizer(str(tmp_path / "none"))
  assert "\n" not in str(error.value)
  with pytest.raises(UserError, match="chat needs a model"):
    make_tokenizer("byte", chat=True)


def test_a_models_own_tokenizer_is_the_default(directory):
  assert isinstance(make_tokenizer("", directory), HFTokenizer)
  assert make_tokenizer("").vocab_size == 258
  assert make_tokenizer("byte", directory).vocab_size == 258


def test_variables_of_the_template(directory):
  raw = HFTokenizer(directory).raw
  raw.chat_template = TEMPLATE + "{% if not think %}[b]{% endif %}"
  raw.save_pretrained(directory)
  message = [{"role": "user", "content": "a"}]
  how = {"chat": True}
  assert make_tokenizer("", directory, **how).render(message).endswith("[b]")
  on = make_tokenizer("", directory, **how, options='{"think": true}')
  assert on.render(message).endswith("[a]")
  for options, words in (
    ('{"thinks": true}', r"thinks: .* it has .*think"),
    ("{think}", "not JSON"),
    ("[1]", "not a JSON object"),
  ):
    with pytest.raises(UserError, match=words):
      make_tokenizer("", directory, **how, options=options)
  with pytest.raises(UserError, match=r"where data\.chat is set"):
    make_tokenizer("", directory, options='{"think": true}')
