"""A model's own tokenizer, through transformers. No JAX.

Exactly one beginning-of-text token, all stop ids of tokenizer, config and
generation config, and never an id past the tokenizer's vocabulary.
"""

import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_jax import gguf_tokenizer
from grpo_jax.errors import UserError
from grpo_jax.models.gguf_file import File


def load(path: str) -> Any:
  """transformers' tokenizer of a model directory or GGUF file.

  Raises:
    UserError: transformers is missing, or there is no tokenizer.
  """
  # It speaks of PyTorch, which no tokenizer needs.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  try:
    from transformers import AutoTokenizer
  except ImportError as error:
    raise UserError(
      "a model's own tokenizer needs transformers: pip install -e '.[hf]'"
    ) from error
  try:
    if os.path.isfile(path):
      return gguf_tokenizer.load(path)
    return AutoTokenizer.from_pretrained(path)
  except UserError:
    raise
  except Exception as error:  # it raises whatever it met
    text = str(error).split("\n")[0]
    raise UserError(f"no tokenizer can be read from {path}: {text}") from error


def check_options(template: str, options: Mapping[str, Any]) -> None:
  """Refuses variables that a chat template does not read.

  Raises:
    UserError: naming them, and those that it has.
  """
  from jinja2 import meta
  from jinja2.sandbox import ImmutableSandboxedEnvironment

  # The extensions that transformers renders templates with.
  parse = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
  known = meta.find_undeclared_variables(
    parse.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template))
  )
  unknown = sorted(options.keys() - known)
  if unknown:
    raise UserError(
      f"data.chat_options {', '.join(unknown)}: the chat template has no such"
      f" variable; it has {', '.join(sorted(known))}"
    )


def configured_stops(path: str) -> list[int]:
  """Stop ids of a GGUF file, or of a directory's two configurations."""
  if os.path.isfile(path):
    return File(path).stops()
  out: list[int] = []
  for name in ("generation_config.json", "config.json"):
    file = pathlib.Path(path) / name
    if file.is_file():
      found = json.loads(file.read_text()).get("eos_token_id")
      if found is not None:
        out += found if isinstance(found, list) else [found]
  return out


class HFTokenizer:
  """A tokenizer of transformers behind this package's methods.

  Attributes:
    vocab_size: ids it can produce; a model may have more rows.
    pad_id: may equal a stop id: lengths, not ids, say where a row ends.
    stop_id: the first stop id.
  """

  def __init__(
    self,
    path: str,
    *,
    chat: bool = False,
    system: str = "",
    options: Mapping[str, Any] | None = None,
  ):
    """Args:
      path: a model directory or GGUF file.
      chat: render prompts through the model's chat template.
      system: the system message of that chat; '' gives none.
      options: variables of the template, such as Qwen3's enable_thinking.

    Raises:
      UserError: no tokenizer, no stop id, no chat template, or one without
        such a variable.
    """
    self.raw = load(path)
    self.vocab_size = len(self.raw)
    self._chat, self._system, self._options = chat, system, options or {}
    ids = [self.raw.eos_token_id, *configured_stops(path)]
    self._stops = tuple(dict.fromkeys(i for i in ids if i is not None))
    if not self._stops:
      raise UserError(f"the tokenizer of {path} names no stop token")
    self.stop_id = self._stops[0]
    pad = self.raw.pad_token_id
    self.pad_id = self.stop_id if pad is None else pad
    if chat and not self.raw.chat_template:
      raise UserError(f"the tokenizer of {path} has no chat template")
    if options:
      check_options(self.raw.chat_template, options)
    bare = self.raw.encode("", add_special_tokens=True)
    self._bos = [i for i in bare[:1] if i == self.raw.bos_token_id]
    # What a model's template wraps around an answer is not the answer.
    self._special = frozenset(self.raw.all_special_ids) | set(self._stops)
    self._texts: list[str] | None = None

  def encode(self, text: str) -> list[int]:
    """Ids of `text` and nothing else."""
    return self.raw.encode(text, add_special_tokens=False)

  def encode_prompt(self, text: str) -> list[int]:
    """Ids of a prompt: chat template if asked for, exactly one BOS if any."""
    if self._chat:
      text = self.render([{"role": "user", "content": text}])
    ids = self.encode(text)
    if self._bos and ids[:1] != self._bos:
      ids = self._bos + ids
    return ids

  def render(self, messages: Sequence[Mapping[str, str]]) -> str:
    """A chat as text, open for the assistant's turn."""
    if self._system and messages[0]["role"] != "system":
      messages = [{"role": "system", "content": self._system}, *messages]
    return self.raw.apply_chat_template(
      list(messages),
      tokenize=False,
      add_generation_prompt=True,
      **self._options,
    )

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`; special tokens print nothing."""
    kept = [i for i in map(int, ids) if i not in self._special]
    return self.raw.decode(kept, clean_up_tokenization_spaces=False)

  def stop_ids(self, extra_strings: Sequence[str] = ()) -> tuple[int, ...]:
    """The model's stop ids, then every id whose text has an extra string.

    A byte-pair vocabulary has many tokens with a newline in them; a completion
    that is to stop at one must stop at each.

    Raises:
      UserError: no token has the string.
    """
    if isinstance(extra_strings, str):
      extra_strings = (extra_strings,)
    out = list(self._stops)
    for string in extra_strings:
      found = [i for i, text in enumerate(self._all()) if string in text]
      if not found:
        raise UserError(f"no token of this tokenizer has the text {string!r}")
      out += found
    return tuple(dict.fromkeys(out))

  def _all(self) -> list[str]:
    """The text of every id."""
    if self._texts is None:
      self._texts = self.raw.batch_decode(
        [[i] for i in range(self.vocab_size)],
        clean_up_tokenization_spaces=False,
      )
    return self._texts
