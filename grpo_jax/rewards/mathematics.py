r"""Whether two mathematical answers are the same: `equal`.

Three stages, each asked only where the one before cannot decide:

  1. text: equal normal forms are equal answers (`latex.normal`);
  2. structure and numbers: lists, intervals, units and exact fractions, here;
  3. what is left, expressions and equations, is read by the math-verify
     library and compared by value (`expressions.py`).

The first two need no library and decide most answers in microseconds. The
third can be slow on hostile text, so a reward calls `equal` in a process that
is killed at its limit. docs/mathematics.md has the policies in a table.
"""

import functools
import re
from fractions import Fraction

from grpo_jax.rewards import expressions, rules
from grpo_jax.rewards.latex import Form, normal, parse

# Where one side is written with a decimal point; exact numbers must be equal.
TOLERANCE = Fraction(1, 10**9)


def equal(answer: str | None, reference: str | None) -> bool:
  """Whether two answers are the same; symmetric, and never true of nothing.

  Args:
    answer: text as it was extracted.
    reference: the same.
  """
  a, b = normal(answer), normal(reference)
  if a is None or b is None:
    return False
  return a == b or same(_parsed(a), _parsed(b))


def readable(reference: str) -> bool:
  """Whether an answer could be found equal to `reference`."""
  return normal(reference) is not None


_parsed = functools.lru_cache(4096)(parse)


def same(a: Form, b: Form) -> bool:
  """Whether two answers are the same, part for part.

  A named variable may be left out (`x = 5` and `5`), but not be another.
  """
  if a.kind != b.kind or len(a.items) != len(b.items):
    return False
  if {a.joined, b.joined} == {"and", "or"}:
    return False
  if a.kind == "atom":
    return same_atom(*_whole(a, b))
  if a.variable and b.variable and a.variable != b.variable:
    return False
  # Of a part the variable must not be left out: `x=1, y=2` is not `2, 1`.
  if a.ordered:
    return all(map(_same_part, a.items, b.items))
  return _same_in_any_order(list(a.items), list(b.items))


def _whole(a: Form, b: Form) -> tuple[str, str]:
  """The texts of two atoms, with a variable that must not be left out."""
  texts = [a.items[0], b.items[0]]
  for i, (form, other) in enumerate(((a, b), (b, a))):
    # `y = 2x` beside `2x - y = 0` or `2x = y` is an equation.
    another = other.variable != form.variable and other.variable
    if form.variable and (another or "=" in other.items[0]):
      texts[i] = f"{form.variable}={texts[i]}"
  return texts[0], texts[1]


def _same_part(a: Form, b: Form) -> bool:
  return a == b or (a.variable == b.variable and same(a, b))


def _same_in_any_order(a: list[Form], b: list[Form]) -> bool:
  # What is equal as text first, so that few pairs are compared by value.
  for item in list(a):
    if item in b:
      a.remove(item)
      b.remove(item)
  for item in a:
    match = next((x for x in b if _same_part(item, x)), None)
    if match is None:
      return False
    b.remove(match)
  return True


# --- One value --------------------------------------------------------------

# Words that only say what a number counts; a single letter may be a variable.
_UNITS = (
  "cm mm km inch inches ft feet foot yard yards mile miles meter meters metre"
  " metres kg gram grams pound pounds liter liters second seconds minute"
  " minutes hour hours day days week weeks month months year years degree"
  " degrees dollar dollars cent cents unit units mph"
)
_UNIT = re.compile(
  rf"(.*(?:[\d}})]\s*|\w\s+))(?:(%)|(\^\\circ)|"
  rf"((?:(?:square|cubic|sq\.?|cu\.?) )?(?:{'|'.join(_UNITS.split())})"
  r"(?:\s*\^\{?[23]\}?)?))"
)
_ONE_UNIT = {
  "inches": "inch",
  "feet": "foot",
  "ft": "foot",
  "^\\circ": "degree",
  "metre": "meter",
}
_CURRENCY = re.compile(r"([-+]?)(\\dollar|[€£¥])\s*([-+]?.+)")
_FRACTION = re.compile(
  r"([-+]?)(?:(\d+)\s*)?\\frac\{([-+]?\d+)\}\{([-+]?\d+)\}"
)
_SLASH = re.compile(r"([-+]?)(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\{(\d+)\}")
# Letters side by side that may be a product; all others are words.
_PRODUCT = re.compile(r"[abckmnpqrtuvwxyz]{2}|[abc]{3}|[xyz]{3}")
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]*\}")


def same_atom(a: str, b: str) -> bool:
  """Whether two single values are the same: numbers, words, expressions."""
  if a == b:
    return bool(a)
  (a, unit_a), (b, unit_b) = split_unit(a), split_unit(b)
  if unit_a and unit_b and unit_a != unit_b:
    return False
  x, y = number(a), number(b)
  if x is not None and y is not None:
    exact = "." not in a + b and "e" not in (a + b).lower()
    wide = 0 if exact or "\\overline" in a + b else TOLERANCE
    return abs(x - y) <= wide * max(abs(x), abs(y))
  if _is_words(a) or _is_words(b):
    return a.casefold() == b.casefold()
  return a == b or expressions.same(a, b)


_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def split_unit(text: str) -> tuple[str, str]:
  r"""A value and its unit, '' if it has none.

  `%`, a degree sign, a currency sign and a closed list of words are units.
  """
  found = _CURRENCY.fullmatch(text)
  if found:
    return found[1] + found[3], found[2].lstrip("\\")
  found = _UNIT.fullmatch(text)
  # A degree inside a function changes its value: it is no unit of it.
  if not found or ("circ" in found[0] and _FUNCTION.search(found[1])):
    return text, ""
  name = found[2] or found[3] or found[4]
  name = name.replace("{", "").replace("}", "").replace(" ^", "^")
  name = _ONE_UNIT.get(name, name)
  if len(name) > 3 and name.endswith("s"):
    name = _ONE_UNIT.get(name[:-1], name[:-1])
  return found[1].rstrip(), name


def number(text: str) -> Fraction | None:
  r"""The exact number that a normal form is; None if it is anything else.

  Decimals, thousands, exponents (`rules.parse_number`), a fraction of whole
  numbers as `\frac{a}{b}` or `a/b`, with a whole part before it or not, and
  repeating decimals `0.1\overline{6}`.
  """
  plain = rules.parse_number(text)
  if plain is not None or len(text) > rules.MAX_NUMERAL:
    return plain
  found = _FRACTION.fullmatch(text) or _SLASH.fullmatch(text)
  if found:
    top, bottom = int(found[3]), int(found[4])
    if bottom == 0 or (found[2] and min(top, bottom) < 0):
      return None
    value = int(found[2] or 0) + Fraction(top, bottom)
    return -value if found[1] == "-" else value
  found = _REPEATING.fullmatch(text)
  if not found:
    return None
  first, again = found[3], found[4]
  value = Fraction(int(found[2] or 0)) + Fraction(
    int(first + again) - int(first or 0),
    (10 ** len(again) - 1) * 10 ** len(first),
  )
  return -value if found[1] == "-" else value


def _is_words(text: str) -> bool:
  runs = _LETTERS.findall(_ENVIRONMENT.sub(" ", text))
  return any(not _PRODUCT.fullmatch(run) for run in runs)
