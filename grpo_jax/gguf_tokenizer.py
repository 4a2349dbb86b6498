"""The tokenizer inside a GGUF file, for transformers. No JAX, no PyTorch.

transformers' own reader of GGUF tokenizers needs PyTorch, and splits text the
same way for every model. A GGUF file says which way its model was trained
with; those that are known here are built with the `tokenizers` library.
"""

from typing import Any

from grpo_jax.errors import UserError

_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before byte pairs are merged: by regular expression, or, at
# None, as GPT-2 cuts it; and whether digits are single first.
_CUTS = {
  "smollm": (None, True),
  "gpt-2": (None, False),
  "default": (None, False),
  "llama-bpe": (_LLAMA3, False),
  "qwen2": (_LLAMA3.replace("{1,3}", ""), False),
}
_CONTROL, _USER_DEFINED = 3, 4  # token types


def load(path: str) -> Any:
  """A transformers tokenizer of a GGUF file's vocabulary.

  Raises:
    UserError: it has none, or one of a kind that is not known here.
  """
  import gguf
  import tokenizers
  from tokenizers import decoders, models
  from transformers import PreTrainedTokenizerFast

  fields = gguf.GGUFReader(path).fields

  def value(name: str) -> Any:
    field = fields.get(f"tokenizer.{name}")
    return None if field is None else field.contents()

  kind, cut = value("ggml.model"), value("ggml.pre") or "default"
  if kind != "gpt2" or cut not in _CUTS:
    raise UserError(
      f"{path} has a {kind!r} tokenizer that cuts text like {cut!r}; known are"
      f" 'gpt2' ones that cut like {', '.join(_CUTS)}"
    )
  tokens = value("ggml.tokens")
  merges = [tuple(pair.split(" ")) for pair in value("ggml.merges")]
  raw = tokenizers.Tokenizer(
    models.BPE(
      {token: i for i, token in enumerate(tokens)},
      merges,
      ignore_merges=cut == "llama-bpe",
    )
  )
  raw.pre_tokenizer = _cutter(*_CUTS[cut])
  raw.decoder = decoders.ByteLevel()
  added = [
    tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
    for token, kind in zip(tokens, value("ggml.token_type"))
    if kind in (_CONTROL, _USER_DEFINED)
  ]
  raw.add_tokens(added)
  named = {
    f"{name}_token": tokens[i]
    for name, i in (
      ("bos", value("ggml.bos_token_id")),
      ("eos", value("ggml.eos_token_id")),
      ("unk", value("ggml.unknown_token_id")),
      ("pad", value("ggml.padding_token_id")),
    )
    if i is not None
  }
  if value("ggml.add_bos_token") and "bos_token" in named:
    raw.post_processor = _with_bos(named["bos_token"], tokens)
  out = PreTrainedTokenizerFast(tokenizer_object=raw, **named)
  out.chat_template = value("chat_template")
  return out


def _cutter(expression: str | None, digits: bool) -> Any:
  from tokenizers import Regex, pre_tokenizers

  if expression is not None:
    parts = [
      pre_tokenizers.Split(Regex(expression), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)
  whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  if not digits:
    return whole
  single = pre_tokenizers.Digits(individual_digits=True)
  return pre_tokenizers.Sequence([single, whole])


def _with_bos(token: str, tokens: list[str]) -> Any:
  from tokenizers import processors

  return processors.TemplateProcessing(
    single=f"{token} $A", special_tokens=[(token, tokens.index(token))]
  )
