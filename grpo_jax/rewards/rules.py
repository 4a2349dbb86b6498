"""Reading answers out of text and comparing them, by rule.

Every function is total: no text makes it raise, none is ever evaluated, and
each takes time about linear in the text. An extractor returns None when it
finds no answer; a comparison with an empty or unreadable reference is False,
so "nothing equals nothing" can never pay.
"""

import decimal
import functools
import re
from collections.abc import Callable
from fractions import Fraction

from grpo_jax.errors import UserError

# --- Comparison -------------------------------------------------------------

# Longer numerals are not numbers: converting them is quadratic, and no
# reference answer is one.
MAX_NUMERAL = 300

_NUMERAL = (
  r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
  r"|\.[0-9]+"
)
_EXPONENT = r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
_WHOLE_NUMBER = re.compile(
  rf"([-+\u2212]?)[$€£¥]?([-+\u2212]?)((?:{_NUMERAL}){_EXPONENT})\.?"
)
# In running text a sign after a digit, letter or bracket is an operator, and
# digits inside a word or after `1.2.` are no number of their own.
_NUMBER_IN_TEXT = re.compile(
  rf"(?<![\w)\]])(?<![0-9]\.)[-+\u2212]?[$€£¥]?(?:{_NUMERAL}){_EXPONENT}"
)
_QUOTES = "\"'`“”‘’"


def exact(answer: str, reference: str) -> bool:
  """True when the strings are equal and the reference is not blank."""
  return bool(reference.strip()) and answer == reference


def normalize(text: str) -> str:
  """Case folded, white space collapsed, quotes and end punctuation removed.

  Only quotes (both ends) and `. , ; :` (at the end) go: removing a sign, a
  bracket, `%` or a leading point would make different answers equal.
  """
  text = " ".join(text.casefold().split())
  return text.rstrip(".,;: " + _QUOTES).lstrip(_QUOTES + " ")


def normalized(answer: str, reference: str) -> bool:
  """True when both normalise to the same text with a letter or digit in it."""
  target = normalize(reference)
  return any(c.isalnum() for c in target) and normalize(answer) == target


def parse_number(text: str) -> Fraction | None:
  """The one number that `text` is, exactly; None if it is anything else.

  Reads a sign, one currency sign, thousands separators in their places, a
  decimal part, an exponent of up to three digits, and one final full stop. A
  fraction, a percent sign, a unit or a second number make it no number.

  Args:
    text: at most `MAX_NUMERAL` characters, else None.
  """
  text = text.strip()
  match = len(text) <= MAX_NUMERAL and _WHOLE_NUMBER.fullmatch(text)
  if not match or (match[1] and match[2]):
    return None
  value = Fraction(decimal.Decimal(match[3].replace(",", "")))
  return -value if (match[1] or match[2]) in ("-", "\u2212") else value


def number(answer: str, reference: str, tolerance: float = 1e-9) -> bool:
  """True when both are numbers and differ by at most tolerance * |reference|.

  Whole numbers without a decimal point or an exponent must be equal. The
  tolerance is relative: an absolute one would make 2^-98 equal 2^-99.
  """
  got, want = parse_number(answer), parse_number(reference)
  if got is None or want is None:
    return False
  if not any(set(x.rstrip(". ")) & set(".eE") for x in (answer, reference)):
    return got == want
  return abs(got - want) <= Fraction(tolerance) * abs(want)


MATCHES: dict[str, Callable[[str, str], bool]] = {
  "exact": exact,
  "normalized": normalized,
  "number": number,
}


def readable(match: str, reference: str) -> bool:
  """Whether `reference` can be matched at all: whether it matches itself.

  Args:
    match: a key of `MATCHES`.
    reference: a reference answer, to be checked at start-up.
  """
  return MATCHES[match](reference, reference)


# --- Extraction -------------------------------------------------------------


def whole_text(text: str) -> str | None:
  """The text without surrounding white space; None if nothing is left."""
  return text.strip() or None


def last_number(text: str) -> str | None:
  """The last number in running text, as written: `$70,000` of `... $70,000.`"""
  found = None
  for match in _NUMBER_IN_TEXT.finditer(text):
    found = match[0]
  return found


def last_boxed(text: str) -> str | None:
  r"""What is inside the last `\boxed{...}`, braces balanced.

  The last box decides. If it is empty or does not end, there is no answer: an
  earlier box is not fallen back to.
  """
  start = text.rfind("\\boxed{")
  if start < 0:
    return None
  start = i = start + len("\\boxed{")
  depth = 1
  while i < len(text):
    if text[i] == "\\":  # an escaped brace is a character, not a brace
      i += 2
      continue
    depth += {"{": 1, "}": -1}.get(text[i], 0)
    if depth == 0:
      return text[start:i].strip() or None
    i += 1
  return None


def after_marker(text: str, marker: str) -> str | None:
  """The rest of the line after the last `marker`; None if empty or absent."""
  _, found, rest = text.rpartition(marker)
  line = rest.lstrip(" \t").split("\n", 1)[0].strip()
  return line or None if found else None


def think_answer(text: str) -> str | None:
  """The answer of a strictly formatted text, else None.

  Strict: exactly one `<think>...</think>`, then exactly one
  `<answer>...</answer>`, white space between and around them, nothing else.
  An answer of white space alone has the format but is no answer: None.
  """
  blocks = _format_blocks(text)
  return blocks[1].strip() or None if blocks else None


def has_format(text: str) -> bool:
  """Whether `text` obeys the strict format of `think_answer`."""
  return _format_blocks(text) is not None


def _format_blocks(text: str) -> tuple[str, str] | None:
  tags = ("<think>", "</think>", "<answer>", "</answer>")
  if any(text.count(tag) != 1 for tag in tags):
    return None
  # With one of each, cutting at the tags in order checks the order too.
  pieces, rest = [], text
  for tag in tags:
    before, found, rest = rest.partition(tag)
    if not found:
      return None
    pieces.append(before)
  before, thought, between, answer = pieces
  if before.strip() or between.strip() or rest.strip():
    return None
  return thought, answer


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
  "text": whole_text,
  "last_number": last_number,
  "boxed": last_boxed,
  "think_answer": think_answer,
}


def make_extractor(rule: str) -> Callable[[str], str | None]:
  """An extraction rule by name.

  Args:
    rule: a key of `EXTRACTORS`, or `after:MARKER` (for instance `after:####`).

  Raises:
    UserError: no such rule, or an empty marker.
  """
  if rule.startswith("after:") and rule != "after:":
    return functools.partial(after_marker, marker=rule[len("after:") :])
  if rule not in EXTRACTORS:
    raise UserError(
      f"unknown extraction rule {rule!r}; rules are {', '.join(EXTRACTORS)} "
      "and after:MARKER"
    )
  return EXTRACTORS[rule]
