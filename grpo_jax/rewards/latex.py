r"""The text of a mathematical answer: one spelling for one meaning, and parts.

Answers come as LaTeX, as plain text (`sqrt(2)/2`) and as a mixture. `normal`
rewrites what is only spelling; `parse` takes lists, tuples, intervals, sets,
unions, ratios and `\pm` apart, so that every element is compared for itself
and none is lost. Both are total, take linear time, and evaluate nothing.
"""

import dataclasses
import re

MOST_CHARACTERS = 1000  # longer text is no answer
MOST_DEPTH = 30  # of brackets
MOST_ITEMS = 64  # of a list

_SIGNS = {
  "\u2212": "-",
  "\u2013": "-",
  "×": r"\times ",
  "·": r"\cdot ",
  "÷": "/",
  "π": r"\pi ",
  "∞": r"\infty ",
  "°": r"^\circ",
  "∪": r"\cup ",
  "±": r"\pm ",
  "≤": r"\le ",
  "≥": r"\ge ",
  "≠": r"\ne ",
  "\u00a0": " ",
}
# One pass each, in this order: (pattern, replacement).
_SPELLINGS = [
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r"(?<!\\)\\[\[\]()]", ""),  # of math mode
    (r"\\(?:left|right)\.", ""),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"(?<=\d)(?:,\\!|\{,\}|\\[,!])(?=\d{3}(?!\d))", ""),  # thousands
    (r"\{,\}", ","),
    (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\\$", r"\\dollar "),
    (r"^\s*([-+]?)\s*\$(?=[\d.]+[\d,.]*$)", r"\1\\dollar "),
    (r"\$", ""),
    (r"\.{3,}|…", r"\\ldots "),
    (r"\\%|%|\\?\b(?:percent(?:age)?|pct)\b", "%"),
    (
      r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)"
      r"\s*\{([^{}]*)\}",
      r" \1 ",
    ),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"(?<![<>=])<=|\\l(?:eq|eqslant|e)(?![A-Za-z])", r"\\le "),
    (r">=|\\g(?:eq|eqslant|e)(?![A-Za-z])", r"\\ge "),
    (r"!=|\\neq?(?![A-Za-z])", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\^\s*\{\s*\\circ\s*\}|\\degree(?![A-Za-z])", r"^\\circ "),
    (r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty "),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"_\s*(\d+|[A-Za-z])", r"_{\1}"),
    (r"\*\*", "^"),
    (
      r"(?<![\\A-Za-z])(pi|sqrt|exp|ln|log|sin|cos|tan|cot|sec|csc|theta|alpha"
      r"|beta|gamma|lambda|phi)(?![A-Za-z])",
      r"\\\1 ",
    ),
  )
]
_BARE_ARGUMENT = re.compile(r"(\\sqrt|\^)\s*\(")
# White space counts between two letters or digits, and after a comma.
_IDLE_SPACE = re.compile(r"(?<![\w,])\s+|(?<=,)\s*(?=\s)|\s+(?![\w\s])|\s+$")
_QUOTED = re.compile(r"""(["'])([^"']*)\1""")


def normal(text: str | None) -> str | None:
  r"""The one spelling of an answer; None where there is nothing to compare.

  Delimiters of math mode, sizes of brackets, fonts, thin spaces and thousands
  marks go; `\dfrac`, `<=`, `**`, `sqrt(2)` and the like become LaTeX's own.
  Words keep the space between them.

  Args:
    text: an answer, as extracted.

  Returns:
    None for blank text, more than `MOST_CHARACTERS`, unbalanced braces, more
    than `MOST_DEPTH` brackets in each other, or nothing with a letter or digit.
  """
  if not text or len(text) > MOST_CHARACTERS or not _balanced(text):
    return None
  for sign, latex in _SIGNS.items():
    text = text.replace(sign, latex)
  for pattern, replacement in _SPELLINGS:
    text = pattern.sub(replacement, text)
  text = _braced_arguments(text)
  text = _IDLE_SPACE.sub("", " ".join(text.split())).strip().rstrip(".,;:")
  return text if any(c.isalnum() for c in text) else None


def _balanced(text: str) -> bool:
  depth = deepest = braces = 0
  previous = ""
  for c in text:
    step = (c in "([{") - (c in ")]}")
    depth += step
    if c in "{}" and previous != "\\":
      braces += step
      if braces < 0:
        return False
    deepest = max(deepest, depth)
    previous = "" if previous == "\\" else c
  return braces == 0 and deepest <= MOST_DEPTH


def _braced_arguments(text: str) -> str:
  r"""`\sqrt(...)` and `^(...)` with braces, where the bracket ends."""
  out, at = [], 0
  while found := _BARE_ARGUMENT.search(text, at):
    end = _end(text, found.end() - 1)
    if end < 0:
      break
    inner = _braced_arguments(text[found.end() : end])
    out += [text[at : found.start()], found[1], "{", inner, "}"]
    at = end + 1
  return "".join([*out, text[at:]])


def _end(text: str, start: int) -> int:
  """Index of the bracket that closes the one at `start`; -1 if none does."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] in "([{") - (text[i] in ")]}")
    if depth == 0:
      return i
  return -1


# --- Parts ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
  """An answer, taken apart.

  Attributes:
    kind: 'atom'; 'list' (any order: `1, 2`, `1 and 2`, a set, both values of
      `\\pm`); 'set' (of one element); 'union'; 'ratio'; or two brackets, such
      as '[)': an interval or a tuple, in its order.
    items: the text of an atom, else the parts.
    variable: what the answer is said to be the value of: x in `x = 5`.
    joined: 'and' or 'or', where relations are: `x<1 or x>2`.
  """

  kind: str
  items: tuple
  variable: str = ""
  joined: str = ""

  @property
  def ordered(self) -> bool:
    """Whether the order of the parts counts."""
    return self.kind not in ("list", "union")


_VARIABLE = r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?(?:\([a-z]\))?"
_ASSIGNED = re.compile(rf"({_VARIABLE})\s*(?:=|\\in(?![A-Za-z]))\s*(.+)")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|in)(?![A-Za-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])(and|or)(?![A-Za-z])")
_AND = re.compile(r",?\s*(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])\s*|;")
_SPACED_COMMA = re.compile(r",\s+")
_COMMA = re.compile(r",\s*")
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_COLON = re.compile(r"\s*:\s*")
_SIGN_OF_MONEY = re.compile(r"^\\dollar |^[€£¥]")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PM = re.compile(r"\\pm(?![A-Za-z])\s*")


def parse(text: str) -> Form:
  """Takes the normal form of an answer apart.

  Args:
    text: what `normal` returned.
  """
  text = _unquoted(text)
  if not text:
    return _atom(text)
  found = _ASSIGNED.fullmatch(text)
  if found and not _RELATION.search(found[2]):
    return dataclasses.replace(parse(found[2]), variable=found[1])
  parts = _split(_CUP, text)
  if len(parts) > 1:
    return Form("union", tuple(map(parse, parts)))
  parts = _elements(text, bracketed=False)
  if len(parts) > 1:
    return _listed(parts, _WORD.findall(text))
  if text.startswith("\\{") and text.endswith("\\}"):
    if _end(text, 1) == len(text) - 1:
      parts = _elements(text[2:-2], bracketed=True)
      return _listed(parts) if len(parts) > 1 else _one("set", parts)
  elif text[0] in "([" and _end(text, 0) == len(text) - 1:
    parts = _elements(text[1:-1], bracketed=True)
    brackets = text[0] + text[-1]
    if len(parts) > 1:
      return Form(brackets, tuple(map(parse, parts)))
    if brackets == "()" and parts[0]:
      return parse(parts[0])
    if brackets == "[]":
      return _one("[]", parts)
  return _parse_one(text)


def _parse_one(text: str) -> Form:
  parts = _split(_COLON, text)
  if len(parts) > 1 and all(map(_PLAIN_NUMBER.fullmatch, parts)):
    return Form("ratio", tuple(map(_atom, parts)))
  if len(_PM.findall(text)) == 1 and not _RELATION.search(text):
    before, after = _PM.split(text)
    plus = "" if not before or before[-1] in "([{" else "+"
    signs = (before + plus + after, before + "-" + after)
    return Form("list", tuple(map(_atom, signs)))
  return _atom(text)


def _atom(text: str) -> Form:
  return Form("atom", (text,))


def _one(kind: str, parts: list[str]) -> Form:
  return Form(kind, (parse(parts[0]),))


def _listed(parts: list[str], words: list[str] | None = None) -> Form:
  forms = [parse(part) for part in parts]
  # `x = 2 or x = 3`: all are values of one variable.
  names = {form.variable for form in forms}
  variable = names.pop() if len(names) == 1 else ""
  if variable:
    forms = [dataclasses.replace(form, variable="") for form in forms]
  items = []
  for form in forms:  # the two values of `\pm` are two of the list
    flat = form.kind == "list" and not form.variable
    items += form.items if flat else [form]
  said = set(words or ())
  joined = said.pop() if len(said) == 1 and any(map(_related, items)) else ""
  return Form("list", tuple(items), variable, joined)


def _related(form: Form) -> bool:
  """Whether a part of a list is a relation, not a value."""
  text = form.items[0] if form.kind == "atom" else ""
  return bool(form.variable or _RELATION.search(text))


def _elements(text: str, bracketed: bool) -> list[str]:
  """The parts between separators outside brackets.

  Without brackets around, `1,000` is a number and so are both of `1,000 and
  2,000`; within them a comma without a space separates, too.
  """
  if bracketed:
    return [p for q in _split(_AND, text) for p in _split(_COMMA, q)]
  parts = [p for q in _split(_AND, text) for p in _split(_SPACED_COMMA, q)]
  out = []
  for part in parts:
    whole = _THOUSANDS.fullmatch(_SIGN_OF_MONEY.sub("", part))
    out += [part] if whole else _split(_COMMA, part)
  return out


def _split(separator: re.Pattern, text: str) -> list[str]:
  """Cuts at separators that are in no bracket; `[` may be closed by `)`."""
  found = list(separator.finditer(text))
  if not found or len(found) > MOST_ITEMS:
    return [text]
  parts, start, at, depth = [], 0, 0, 0
  for match in found:
    for c in text[at : match.start()]:
      depth += (c in "([{") - (c in ")]}")
    at = match.start()
    if depth == 0:
      parts.append(text[start : match.start()].strip())
      start = match.end()
  return [*parts, text[start:].strip()]


def _unquoted(text: str) -> str:
  found = _QUOTED.fullmatch(text)
  return found[2] if found and found[2] else text
