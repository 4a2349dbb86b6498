r"""Expressions, equations and matrices, read by math-verify and compared.

math-verify reads LaTeX into sympy (its `latex2sympy2_extended`); its own
comparison rounds to six places, drops subscripts and reads `3 4` as 7. So only
text whose meaning its reader keeps is given to it, and what has a value is
compared by value, to fifty digits and relative to its size. Its own `verify`
decides what has none (infinities, functions without a definition).

No text is evaluated as Python: sympy's `parse_expr` is never reached. The
library's time limits are signals, which a thread cannot have; they are off,
and the process that this runs in is killed at its limit instead.
"""

import contextlib
import functools
import logging
import re
import zlib
from typing import Any

from grpo_jax.errors import UserError

DIGITS = 60
CLOSE = 1e-50  # relative, of two exact values
CLOSE_DECIMAL = 1e-9  # relative, where one is written with a decimal point
MOST_CHARACTERS = 300
MOST_POWER = 10**5  # of the exponents' product

_UNKNOWN_COMMAND = re.compile(
  r"\\(?!(?:frac|sqrt|pi|exp|ln|log|sin|cos|tan|cot|sec|csc|arcsin|arccos"
  r"|arctan|sinh|cosh|tanh|cdot|times|div|infty|binom|begin|end|lfloor|rfloor"
  r"|lceil|rceil|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma"
  r"|tau|phi|psi|omega|Delta|Omega|le|ge|ne)(?![A-Za-z]))[A-Za-z]"
)
_MATRIX = re.compile(r"\\(?:begin|end)\{([a-z]*)\}")
_MATRICES = frozenset(("pmatrix", "bmatrix", "matrix", "vmatrix"))
# What the reader reads as something else, or two readers would differently.
_UNSAFE = re.compile(
  r"\d\s+\d"  # two numbers without a sign
  r"|\d\s*(?:\^\s*(?:\w|\{[^{}]*\})\s*)?_"  # a number's base: it drops it
  r"|\\(?:sin|cos|tan|cot|sec|csc|arc[a-z]+|exp)\s*_"  # and a function's
  r"|(?<!matrix\})\^\s*(?:[TH]|\{\s*[TH]\s*\})"  # to it a transpose: 2^T is 2
  r"|\d[eE][-+]?\d"  # 1e3, to it 1*e*3
  r"|[A-Za-z]\s*\^\s*\{\s*-\s*1\s*\}\s*(?:\\left)?\("  # f^{-1}(x), to it 1/f(x)
  r"|/\s*\d+\s*(?:[A-Za-z({]|\\(?!end|\\))"  # 2/3x
  r"|\\frac\s*\{\s*(?:d|\\partial)(?![A-Za-z}]*\})"  # a derivative
  r"|\\frac\s*\{d[A-Za-z]?\}\s*\{d"
  r"|[^\x20-\x7e]|[\"'`#&@?$:]"
)
_UNSAFE_MATRIX = re.compile(_UNSAFE.pattern.replace("#&@", "#@"))
_TOWER = re.compile(r"\^\s*\{[^{}]*\^|\^\s*\{[^{}]*\{[^{}]*\^|\^\w\s*\^")
_POWER = re.compile(r"\^\s*\{?\s*[-+]?(\d+)")
_MIXED = re.compile(r"(?<![\d.}])(\d+)\s*(\\frac\{\d+\}\{\d+\})")
_PRODUCT = re.compile(r"(\d)\s*\(")
_RELATION = re.compile(r"(=|<|>|\\(?:le|ge|ne)(?![A-Za-z]))")
_REVERSED = {">": "<", "\\ge": "\\le"}


def load() -> None:
  """Imports the library: half a second that no answer should pay.

  Raises:
    UserError: it is not installed.
  """
  try:
    import latex2sympy2_extended  # noqa: F401
    import math_verify  # noqa: F401
  except ImportError as error:
    raise UserError(
      f"match='math' needs the math-verify library ({error}); pip install"
      " -e '.[math]'"
    ) from None
  # It says once that its time limits are off.
  logging.getLogger("math_verify").setLevel(logging.ERROR)


def same(a: str, b: str) -> bool:
  """Whether two normal forms have one value, or are one relation.

  Args:
    a: an atom of `latex.parse`, without its unit.
    b: the same.

  Raises:
    UserError: math-verify is not installed.
  """
  a, b = sorted((a, b))  # `verify` is not symmetric
  left, right = _RELATION.split(a), _RELATION.split(b)
  if len(left) != len(right):
    return False
  if len(left) > 1:
    return _same_relation(_forward(left), _forward(right))
  x, y = value(a), value(b)
  return x is not None and y is not None and _same_value(x, y, _close(a, b))


def value(text: str) -> Any:
  """The sympy object that a normal form is, or None where that is not sure."""
  if not can_read(text):
    return None
  return _read(text)


def can_read(text: str) -> bool:
  """Whether the library may see a text, and would read what it says.

  Short, of known commands, without towers of powers, factorials of large
  numbers, or anything that it is known to misread.
  """
  matrix = "\\begin" in text
  unsafe = _UNSAFE_MATRIX if matrix else _UNSAFE
  if not text or len(text) > MOST_CHARACTERS or unsafe.search(text):
    return False
  if _UNKNOWN_COMMAND.search(text):
    return False
  if not set(_MATRIX.findall(text)) <= _MATRICES or _TOWER.search(text):
    return False
  power = 1
  for exponent in _POWER.findall(text):
    power *= max(int(exponent[:9]), 1)
  if power > MOST_POWER:
    return False
  if "!" in text or "\\binom" in text:
    return (
      "^" not in text and "!!" not in text and not re.search(r"\d{4}", text)
    )
  return True


@functools.lru_cache(4096)
def _read(text: str) -> Any:
  load()
  import sympy
  from latex2sympy2_extended import latex2sympy
  from latex2sympy2_extended.latex2sympy2 import ConversionConfig

  text = _MIXED.sub(r"(\1+\2)", text)
  text = _PRODUCT.sub(r"\1\\cdot (", text)
  with _undecided():  # a syntax error is a plain Exception there
    found = latex2sympy(
      text,
      is_real=True,
      convert_degrees=False,
      normalization_config=None,
      conversion_config=ConversionConfig(
        interpret_as_mixed_fractions=False, lowercase_symbols=False
      ),
    )
    if not isinstance(found, sympy.MatrixBase | sympy.Expr):
      return None
    return found.xreplace({sympy.Symbol("i", real=True): sympy.I})
  return None


# --- Values -----------------------------------------------------------------


@contextlib.contextmanager
def _undecided():
  """Passes over what sympy raises; not memory, which says nothing of a text."""
  try:
    yield
  except MemoryError:
    raise
  except Exception:
    return


def _close(a: str, b: str) -> float:
  return CLOSE_DECIMAL if "." in a + b else CLOSE


def _same_value(a: Any, b: Any, close: float) -> bool:
  import sympy

  a, b = _explicit(a), _explicit(b)
  if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
    if getattr(a, "shape", None) != getattr(b, "shape", None):
      return False
    pairs = zip(a, b, strict=True)
    return all(_same_value(x, y, close) for x, y in pairs)
  if not a.free_symbols | b.free_symbols:
    x, y = _rational(a), _rational(b)
    if x is not None and y is not None:
      wide = 0 if close == CLOSE else sympy.Rational(1, 10**9)
      return bool(abs(x - y) <= wide * max(abs(x), abs(y)))
  pairs = [(_at(a, p), _at(b, p)) for p in _points(a, b)]
  pairs = [(x, y) for x, y in pairs if x is not None and y is not None]
  if len(pairs) > 1:
    return all(_near(x, y, close) for x, y in pairs)
  return _verified(a, b)


def _explicit(expression: Any) -> Any:
  """The matrix that a sum or product of matrices is; all else as it is."""
  import sympy

  if isinstance(expression, sympy.MatrixExpr):
    with _undecided():
      return expression.doit().as_explicit()
  return expression


def _rational(expression: Any) -> Any:
  """An expression's exact value if that is rational, else None."""
  with _undecided():
    done = expression.doit()
    return done if done.is_Rational else None
  return None


def _points(*expressions: Any) -> list[dict]:
  """Values of the variables: three above zero, one below; by name alone."""
  import sympy

  symbols = set().union(*(x.free_symbols for x in expressions))
  points = []
  for k in range(4):
    point = {}
    for s in symbols:
      n = zlib.crc32(f"{s.name}/{k}".encode()) % 8999 + 1009
      point[s] = sympy.Rational(-n if k == 3 else n, 3001)
    points.append(point)
  return points


def _at(expression: Any, point: dict) -> tuple | None:
  """The finite complex number that an expression is there, or None."""
  found = _evaluated(expression, point, DIGITS)
  if found is None or max(map(abs, found)) > CLOSE:
    return found
  # Either it is that small, or 0 and these are the errors of its digits.
  again = _evaluated(expression, point, 3 * DIGITS)
  if again is None or _near(found, again, CLOSE_DECIMAL):
    return again
  return 0, 0


def _evaluated(expression: Any, point: dict, digits: int) -> tuple | None:
  with _undecided():
    parts = expression.evalf(digits, subs=point).as_real_imag()
    if all(x.is_number and x.is_finite and not x.args for x in parts):
      return parts
  return None


def _near(x: tuple, y: tuple, close: float) -> bool:
  size = max(abs(part) for part in (*x, *y))
  gap = max(abs(p - q) for p, q in zip(x, y))
  return bool(gap <= close * size)


def _verified(a: Any, b: Any) -> bool:
  from math_verify import verify

  return bool(verify(a, b, timeout_seconds=None))


# --- Relations --------------------------------------------------------------


def _forward(parts: list[str]) -> list[str]:
  """Sides and signs of a chain, so that `>` and `\\ge` do not occur."""
  if set(parts[1::2]) <= set(_REVERSED):
    return [_REVERSED.get(x, x) for x in reversed(parts)]
  return parts


def _same_relation(a: list[str], b: list[str]) -> bool:
  """Two relations with the same signs: side by side, or moved and scaled."""
  if a[1::2] != b[1::2] or not all(a[::2] + b[::2]):
    return False
  x, y = [list(map(value, sides)) for sides in (a[::2], b[::2])]
  if any(side is None for side in x + y):
    return False
  close = _close("".join(a), "".join(b))
  if all(_same_value(p, q, close) for p, q in zip(x, y)):
    return True
  return len(x) == 2 and _proportional(x, y, a[1], close)


def _proportional(x: list, y: list, sign: str, close: float) -> bool:
  r"""Whether lhs - rhs of one is a constant times the other's.

  The constant is not 0, and above 0 for `<` and `\le`, so that the relations
  hold in the same places.
  """
  import sympy

  with _undecided():
    p, q = x[0] - x[1], y[0] - y[1]
    if not p.free_symbols or p.free_symbols != q.free_symbols:
      return False
    pairs = [(_at(p, at), _at(q, at)) for at in _points(p, q)]
    if any(u is None or v is None for u, v in pairs):
      return False
    ratios = [
      (u[0] + sympy.I * u[1]) / (v[0] + sympy.I * v[1]) for u, v in pairs
    ]
    ratios = [r.evalf(DIGITS).as_real_imag() for r in ratios]
    first = ratios[0]
    if not all(_near(r, first, max(close, 1e-40)) for r in ratios):
      return False
    if sign in ("<", "\\le"):
      return bool(first[0] > 0 and abs(first[1]) < 1e-40)
    return any(abs(part) > 0 for part in first)
  return False
