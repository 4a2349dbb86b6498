"""The tokenizer inside a GGUF file, for transformers. No JAX, no PyTorch.

transformers' own reader of GGUF tokenizers needs PyTorch, and splits text the
same way for every model. A GGUF file says which way its model was trained
with; those that are known here are built with the `tokenizers` library: byte
pairs as GPT-2 has them, and SentencePiece's.
"""

from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.models.gguf_file import File

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
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE_KIND = 1, 3, 4, 6  # token types
_BLANK = "\u2581"  # SentencePiece's
_BYTE = "<0x%02X>"

# Metadata of a tokenizer that is understood, or must have this value.
_KNOWN = frozenset(
  {
    "chat_template",
    "ggml.add_bos_token",
    "ggml.add_space_prefix",
    "ggml.merges",
    "ggml.model",
    "ggml.pre",
    "ggml.scores",
    "ggml.token_type",
    "ggml.tokens",
  }
)
_REQUIRED = {
  "ggml.add_eos_token": False,
  "ggml.add_sep_token": False,
  "ggml.remove_extra_whitespaces": False,
}
_BESIDE = ("chat_template.", "chat_templates", "huggingface.")


def load(path: str) -> Any:
  """A transformers tokenizer of a GGUF file's vocabulary.

  Raises:
    UserError: it has none, or one of a kind that is not known here.
  """
  import tokenizers
  from transformers import PreTrainedTokenizerFast

  fields = File(path).fields
  _check(path, fields)

  def value(name: str) -> Any:
    return fields.get(f"tokenizer.{name}")

  tokens, kinds = value("ggml.tokens"), value("ggml.token_type")
  kind, cut = value("ggml.model"), value("ggml.pre") or "default"
  if kind == "llama":
    raw = _sentencepiece(path, tokens, kinds, value("ggml.scores"))
  elif kind == "gpt2" and cut in _CUTS:
    raw = _byte_level(tokens, value("ggml.merges"), cut)
  else:
    raise UserError(
      f"{path} has a {kind!r} tokenizer that cuts text like {cut!r}; known are"
      f" 'llama' ones, and 'gpt2' ones that cut like {', '.join(_CUTS)}"
    )
  added = [
    tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
    for token, kind in zip(tokens, kinds)
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
  bos = value("ggml.add_bos_token")
  if bos is None:  # what llama.cpp does with such
    bos = kind == "llama" or cut == "llama-bpe"
  if bos and "bos_token" in named:
    raw.post_processor = _with_bos(named["bos_token"], tokens)
  out = PreTrainedTokenizerFast(tokenizer_object=raw, **named)
  out.chat_template = value("chat_template")
  return out


def _check(path: str, fields: dict[str, Any]) -> None:
  """Refuses what changes a text's ids in a way that is not known here."""
  for key, value in fields.items():
    name = key.removeprefix("tokenizer.")
    if name == key or name in _KNOWN or name.startswith(_BESIDE):
      continue
    if name.endswith("_token_id"):  # of what a text is never given by itself
      continue
    if name not in _REQUIRED or value != _REQUIRED[name]:
      raise UserError(
        f"{path} has the attribute {key!r} = {str(value)[:60]}, which this"
        " reader of tokenizers does not support"
      )
  if fields.get("tokenizer.ggml.model") == "llama":
    prefix = "tokenizer.ggml.add_space_prefix"
    if fields.get(prefix, True):
      raise UserError(
        f"{path} has a tokenizer that puts a blank before a text ({prefix}),"
        " which is not supported; use the model's directory of safetensors"
      )


def _byte_level(tokens: list[str], merges: list[str], cut: str) -> Any:
  """Byte pairs as GPT-2 has them, merged in the order of a list."""
  import tokenizers
  from tokenizers import decoders, models

  raw = tokenizers.Tokenizer(
    models.BPE(
      {token: i for i, token in enumerate(tokens)},
      [tuple(pair.split(" ")) for pair in merges],
      ignore_merges=cut == "llama-bpe",
    )
  )
  raw.pre_tokenizer = _cutter(*_CUTS[cut])
  raw.decoder = decoders.ByteLevel()
  return raw


def _sentencepiece(
  path: str, tokens: list[str], kinds: list[int], scores: list[float]
) -> Any:
  """Pieces as SentencePiece's byte-pair model merges them: best score first.

  Of two neighbours whose union is a normal piece, those with the best union
  are merged first, so every cut of a piece into two pieces is a merge of the
  piece's rank. A character without a piece is its UTF-8 bytes.
  """
  import tokenizers
  from tokenizers import decoders, models, normalizers

  ids = {token: i for i, token in enumerate(tokens)}
  lacking = [
    byte for byte in range(256) if kinds[ids.get(_BYTE % byte, 0)] != _BYTE_KIND
  ]
  if lacking:
    raise UserError(
      f"{path} has a 'llama' tokenizer without {len(lacking)} of the 256 bytes"
    )
  pieces = [i for i, kind in enumerate(kinds) if kind == _NORMAL]
  normal = {tokens[i] for i in pieces}
  # Of equal unions SentencePiece takes the leftmost; a list must put one cut of
  # a piece before another. In 11,420 texts no id of Gemma's depended on it.
  merges = [
    (tokens[i][:at], tokens[i][at:])
    for i in sorted(pieces, key=lambda i: -scores[i])
    for at in range(len(tokens[i]) - 1, 0, -1)
    if tokens[i][:at] in normal and tokens[i][at:] in normal
  ]
  raw = tokenizers.Tokenizer(models.BPE(ids, merges, byte_fallback=True))
  raw.normalizer = normalizers.Replace(" ", _BLANK)
  raw.decoder = decoders.Sequence(
    [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  return raw


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
