"""Text to token ids and back. No JAX: a tokenizer lives on the host.

The byte tokenizer needs no file and no training, so a from-scratch policy can
use it. Anything with the methods of `Tokenizer` can stand in its place.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from grpo_jax.errors import UserError


class Tokenizer(Protocol):
  """What the rest of the package asks of a tokenizer.

  Attributes:
    vocab_size: number of ids the policy may emit, pad and stop included.
    pad_id: fills rows. It never marks where a row ends: lengths do.
    stop_id: ends a text; different from `pad_id`.
  """

  vocab_size: int
  pad_id: int
  stop_id: int

  def encode(self, text: str) -> list[int]:
    """Ids of `text` and nothing else: no start, no stop, no template."""
    ...

  def encode_prompt(self, text: str) -> list[int]:
    """Ids of a whole prompt: with the start token, if the model has one."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`; never raises on ids a policy can emit."""
    ...

  def stop_ids(self, extra_strings: Sequence[str] = ()) -> tuple[int, ...]:
    """`stop_id` first, then one id for each extra stop string."""
    ...


class ByteTokenizer:
  """UTF-8 bytes as tokens: ids 0..255 are bytes, 256 is pad, 257 is stop."""

  pad_id = 256
  stop_id = 257
  vocab_size = 258

  def encode(self, text: str) -> list[int]:
    """The UTF-8 bytes of `text`; adds nothing.

    Args:
      text: any string UTF-8 can write.

    Returns:
      One id in 0..255 per byte.

    Raises:
      UserError: `text` holds a lone surrogate, which UTF-8 cannot write.
    """
    try:
      return list(text.encode("utf-8"))
    except UnicodeEncodeError as e:
      raise UserError(
        f"text {text[:60]!r} holds the lone surrogate {text[e.start]!r} at "
        f"character {e.start}, which UTF-8 cannot encode; remove it"
      ) from None

  def encode_prompt(self, text: str) -> list[int]:
    """The same: bytes have no start token."""
    return self.encode(text)

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`, total: no id makes it raise.

    The stop id prints nothing. Every other id that is not a byte (a pad that
    the policy sampled, a row of a padded vocabulary) and every byte that is
    not UTF-8 prints U+FFFD, so that a reward cannot mistake `a <pad> b` for
    `ab`. Cut a padded row to its length before decoding it.

    Args:
      ids: token ids, Python or numpy integers.
    """
    data = bytes(
      i if 0 <= i < 256 else 0xFF for i in map(int, ids) if i != self.stop_id
    )
    return data.decode("utf-8", errors="replace")

  def stop_ids(self, extra_strings: Sequence[str] = ()) -> tuple[int, ...]:
    """Ids that end a completion.

    Args:
      extra_strings: stop strings of a task, each exactly one token long. One
        bare string counts as one stop string.

    Returns:
      `stop_id`, then the id of each extra string, without repeats.

    Raises:
      UserError: an extra string is not exactly one token.
    """
    if isinstance(extra_strings, str):
      extra_strings = (extra_strings,)
    ids = [self.stop_id]
    for string in extra_strings:
      tokens = self.encode(string)
      if len(tokens) != 1:
        raise UserError(
          f"stop string {string!r} is {len(tokens)} tokens; a stop string must "
          "be exactly one token of this tokenizer"
        )
      ids += tokens
    return tuple(dict.fromkeys(ids))


TOKENIZERS = {"byte": ByteTokenizer}


def make_tokenizer(
  name: str,
  model: str = "",
  *,
  chat: bool = False,
  system: str = "",
  options: str = "",
) -> Tokenizer:
  """Builds a tokenizer by name.

  Args:
    name: a key of `TOKENIZERS`; '' is the model's own, and bytes for a policy
      from scratch.
    model: local path of the model the policy starts from, or ''.
    chat: render prompts through the model's chat template.
    system: the system message of that chat.
    options: variables of its template, a JSON object, or ''.

  Raises:
    UserError: no tokenizer has that name, or a chat without a template.
  """
  variables = _variables(options)
  if variables and not chat:
    raise UserError("data.chat_options are read where data.chat is set")
  if not name and model:
    from grpo_jax.hf_tokenizer import HFTokenizer

    return HFTokenizer(model, chat=chat, system=system, options=variables)
  name = name or "byte"
  if chat:
    raise UserError(
      f"data.chat needs a model's chat template; the {name} tokenizer has none"
    )
  if name not in TOKENIZERS:
    raise UserError(
      f"unknown tokenizer {name!r}; known: {', '.join(sorted(TOKENIZERS))}"
    )
  return TOKENIZERS[name]()


def _variables(options: str) -> dict[str, Any]:
  """`data.chat_options` as a dict."""
  try:
    found = json.loads(options or "{}")
  except ValueError as error:
    raise UserError(f"data.chat_options is not JSON: {error}") from None
  if not isinstance(found, dict):
    raise UserError(f"data.chat_options {options!r} is not a JSON object")
  return found
