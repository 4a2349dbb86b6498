"""Which answers are the same: neighbours of every decided case."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from grpo_jax.rewards import expressions
from grpo_jax.rewards.mathematics import equal, number, readable

SAME = {
  "numbers": r"""
    1,234,567 = 1234567 | 12,345.60 = 12345.6 | -5 = \text{-}5 | 007 = 7
    \$1{,}000 = 1000 | \$70,000.00 = 70000 | 10,\!000 = 10000 | 0.50 = .5
    10\,000 = 10000 | 3\times10^4 = 30000 | 10^{-3} = 0.001 | 0 = -0
    1/2 = \frac{2}{4} | -\frac{1}{2} = \frac{-1}{2} | \dfrac{3}{4} = \frac34
    1 1/2 = 1.5 | 1\frac12 = 3/2 | -1\frac{1}{2} = -1.5 | 3\frac{1}{2} = 3.5
    0.\overline{3} = \frac13 | 0.1\overline{6} = 1/6 | 5(3) = 15 | 5. = 5
    \frac{2}{3} = 0.6666666667 | 1.0000000001 = 1 | 2*pi = 6.283185307
    \frac{1}{12} = 0.0833333333333333""",
  "units": r"""
    50% = 50\text{ percent} | 50 percent = 50 pct | 12.5% = 12.5\% | 5\% = 5
    5 \text{ cm} = 5 | 90^\circ = 90 | 90^{\circ} = 90 \text{ degrees}
    10\text{ inches} = 10\text{ inch} | 10\text{ feet} = 10 ft | 3 hours = 3
    16\pi \text{ cm}^2 = 16\pi | \$5 = 5 dollars | €5 = 5 | €1,000 = 1000""",
  "lists": r"""
    1, 2, 3 = 3, 2, 1 | 1 \text{ or } 2 = 1,2 | 1\text{ and }2 = 2 and 1
    \pm3 = -3, 3 | \pm\sqrt{2} = \sqrt2, -\sqrt2 | \{1,2\} = \{2,1\}
    2\pm\sqrt3 = 2+\sqrt{3}, 2-\sqrt{3} | \{1,2\} = 2,1 | 1;2 = 1,2
    1,000, 2,000 = 2000 and 1000 | \pm 1, \pm 2 = -2, -1, 1, 2
    \frac12, 3 = 3, 0.5 | red and blue = blue and red""",
  "brackets": r"""
    (1,2] = (1,2] | \left(\frac12,3\right] = (0.5,3] | (1,2) = \bigl(1, 2\bigr)
    [0,\infty) = [0,+\infty) | (100,200) = (100, 200) | 2:5 = 2 : 5
    (-\infty,1)\cup(2,\infty) = (2,\infty)\cup(-\infty, 1)
    ['-97.8', '-95.7'] = [-97.8,-95.7] | (5) = 5 | ((1,2),3) = ((1, 2), 3)""",
  "variables": r"""
    x:=:5 = 5 | x:=:2 or x:=:3 = 2,3 | x:=:\pm 3 = \pm 3 | y:=:x+1 = x+1
    x:=:1,y:=:2 = y:=:2,x:=:1 | f(x):=:x+1 = x+1 | x\in[0,1] = [0,1]""",
  "relations": r"""
    x^2+y^2:=:1 = 1-x^2-y^2:=:0 | 2x+2y:=:4 = x+y:=:2 | x:=:y = y:=:x
    y:=:2x+1 = 2x-y+1:=:0 | x<5 = 5>x | 2x<10 = x<5 | x\ne 2 = 2\neq x
    x<1 or x>2 = x>2 or x<1 | x<1 or x>2 = x<1, x>2
    1<x\le5 = 5\ge x>1 | x+y<1 = -x-y>-1 | x <= 5 = 5 \geq x""",
  "expressions": r"""
    2\sqrt{3} = \sqrt{12} | \frac{\sqrt{3}}{3} = \frac{1}{\sqrt{3}}
    x^2-1 = (x-1)(x+1) | (x+1)^2 = x^2+2x+1 | 2\cos^2 x-1 = \cos 2x
    \ln 4 = 2\ln 2 | \log_2 8 = 3 | \log_{2}{8} = 3 | e^{i\pi} = -1
    \sin^2x+\cos^2x = 1 | i^2 = -1 | 3+4i = 4i+3 | 2i = 2\sqrt{-1}
    \sqrt{2}^2-2 = 0 | 10! = 3628800 | \binom{10}{3} = 120 | 2**10 = 1024
    sqrt(2)/2 = \frac{\sqrt{2}}{2} | 2^(3+1) = 16 | \frac{2}{3}x = 2x/3
    \frac{1}{3^{50}} = 3^{-50} | 2^{400} = 4^{200} | x^2y = yx^2 | xy = yx
    \begin{pmatrix} -1/3 \\ 2 \end{pmatrix} = \begin{pmatrix}\frac{-1}3\\2\end{pmatrix}
    4\sqrt(2) = 4\sqrt{2} | x_1 = x_{1} | x(x+1) = x^2+x
    \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}1.0\\\frac{4}{2}\end{pmatrix}
    2\begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}2\\4\end{pmatrix}
    \begin{pmatrix}1\\2\end{pmatrix}+t\begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}1+t\\2+2t\end{pmatrix}
    \begin{pmatrix}1&2\\3&4\end{pmatrix}^T = \begin{pmatrix}1&3\\2&4\end{pmatrix}
    """,  # noqa: E501
  "words": r"""
    \text{Monday} = monday | \text{(B)} = B | \textbf{(C)} = (C) | Yes = yes
    \infty = +\infty | \emptyset = \emptyset""",
}
DIFFERENT = {
  "numbers": r"""
    -5 = 5 | 1,23 = 123 | 3 4 = 7 | 3 4 = 34 | 12 = 1 2 | 5(3) = 8
    1000000000 = 1000000001 | 100000000001 = 100000000000 | 0.99999 = 1
    \frac{2}{3} = 0.67 | \frac{1}{12} = 0.08333 | 0.333333 = \frac13
    -1\frac{1}{2} = -0.5 | 3\frac{1}{2} = \frac{3}{2} | \frac{1}{0} = 5
    10^{-20} = 10^{-21} | 10^{-15} = 0 | 1e-20 = 0 | 10^{100} = 10^{100}+1
    2^{-9999} = 0 | 2^{-300} = 2^{-299} | e^{\pi\sqrt{163}} = 262537412640768744
    \sqrt{2}\cdot 10^{-200} = \sqrt{3}\cdot 10^{-200} | 3.14 = \pi""",
  "units": r"""
    50\% = 0.5 | 50\% = \frac12 | 5 \text{ cm} = 5 \text{ m} | 3 hours = 3 days
    5 \text{ cm}^2 = 5\text{ cm}^3 | 5 million = 5 | \$5 = 5 cents | 5x = 5
    10\text{ inches} = 10\text{ feet} | 3 apples = 3 | 5m = 5 | 5 thousand = 5
    \$5 = 5\% | 12\pi = 12 | €5 = £5 | €5 = \$5 | €5 = 5 cents""",
  "lists": r"""
    1, 2, 3 = 1, 2 | 1, 2 = 1, 2, 2 | 2, 2 = 2 | \pm 3 = 3 | \pm 3 = -3
    \pm 3 = \mp 3 | 2\pm\sqrt3 = 2+\sqrt{3} | \{1,2\} = \{1,2,3\} | 1,2 = 1
    \{5\} = 5 | 100, 200 = 100200 | red and blue = red | 1 and 2 = 12
    ['1','2'] = ['2','1'] | 1331 and 1728 = 1331 | 1, 2 = 3
    1, 2, 3, ... = 1, 2, 3 | 0.333... = 0.333""",
  "brackets": r"""
    (1,2,3) = (1,2) | (1,2) = 1,2 | (1,2) = [1,2] | (a,b) = (b,a)
    [2,5] = [5,2]
    \{1,2\} = (1,2) | [0,\infty) = [0,-\infty) | (100,200) = 100200
    [0,\infty) = x\ge 0 | 12:30 = 6:15 | 3:4 = 4:3 | 3:4 = 3/4
    (-\infty,1)\cup(2,\infty) = (-\infty,1]\cup(2,\infty)
    (-\infty,1)\cup(2,\infty) = (-\infty,1)""",
  "variables": r"""
    x:=:5 = y:=:5 | x:=:1,y:=:2 = 2,1 | a:=:1,b:=:2 = a:=:2,b:=:1
    x:=:\pm 3 = 3
    x:=:1,x:=:2 = x:=:1 | f(x):=:x+1 = g(x):=:x+1 | n:=:2, 3 = n:=:1, 3""",
  "relations": r"""
    x<1 or x>2 = x<1 and x>2 | x:=:1 and y:=:2 = x:=:1 or y:=:2
    x<5 = x\le 5 | -x<5 = x<-5 | x+y:=:1 = x+y<1 | x+y<1 = -x-y<-1
    x^2:=:4 = x:=:2 | x^2+y^2:=:1 = x^2+y^2:=:2 | 0<x<1 = 0<x<2 | x>3 = x\geq3
    y:=:2x+1 = y:=:2x-1 | x:=:0 = x:=:x""",
  "expressions": r"""
    x^2-1 = (x-1)(x+2) | \sqrt{x^2} = x | |x| = x | f(x) = f(y) | 3 = 3x
    3 = 3\pi | 5 = 5 + | 5 = 5) | 5 = 5 @ | 5 = 5\foo | 5 = 5^{2} | 7 = 7!
    4 = 4i | 4 = 4e | 4 = 4e5 | 4 = 4_2 | 4 = 4' | 3+4i = 3-4i | 4 = 4\cdot
    f^{-1}(2) = \frac{1}{f(2)} | \sin 30 = \sin 30^\circ
    2^T = 2 | 100\cdot 2^{T} = 200 | x^H = x | 2^{x}_1 = 2^{x}
    2\begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}2\\5\end{pmatrix}
    \frac{a}{b} = \frac{b}{a} | x_1 = x_2 | a_n = a_m | 1010_2 = 10
    1011_2 = 1011 | 11_2 = 11_3 | \infty = -\infty | x^{2} = x2 | x = X
    \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}2\\1\end{pmatrix}
    \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}1&2\end{pmatrix}""",
  "words": r"""
    B = C | B = b | no = on | AB = BA | abs = bas | even = neev | cat = act
    yes = no | \textbf{(B) }12 = 12 | ?! = ?! | { = { | \frac{1}{2 = \frac{1}{2
    """,
}


def pairs(text):
  for pair in (x for line in text.split("\n") for x in line.split(" | ")):
    if pair.strip():
      a, b = (side.replace(":=:", "=") for side in pair.strip().split(" = "))
      yield a, b


@pytest.mark.parametrize("kind", SAME)
def test_same(kind):
  for a, b in pairs(SAME[kind]):
    assert equal(a, b) and equal(b, a), f"{a} = {b}"
    assert equal(a, a) and equal(b, b), f"{a} = {b}"


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different(kind):
  for a, b in pairs(DIFFERENT[kind]):
    assert not equal(a, b) and not equal(b, a), f"{a} = {b}"


ATOMS = [*"0123456789.,+-*/^_=<>()[]{}|!%$'\"xyei \\"]
ATOMS += ["\\frac{", "\\sqrt{", "\\pi ", "\\pm ", "\\cup ", "\\text{", "and"]
ATOMS += ["\\left(", "\\infty ", "\n", "\u2212", "\ud800", "٣"]
ONE = st.lists(st.sampled_from(ATOMS), max_size=7).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(ATOMS), max_size=12).map("".join))
@example("\\frac{1}{2")
def test_an_answer_equals_itself_if_anything_does(text):
  assert equal(text, text) == readable(text)
  assert not equal(text, "") and not equal(None, text)


@settings(max_examples=60, deadline=None)
@given(ONE, ONE)
def test_comparison_is_symmetric(a, b):
  assert equal(a, b) == equal(b, a)


@settings(max_examples=60, deadline=None)
@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
def test_fractions_are_exact(x, y):
  def latex_of(q):
    return rf"\frac{{{q.numerator * 3}}}{{{q.denominator * 3}}}"

  assert number(latex_of(x)) == x
  assert equal(f"{x.numerator}/{x.denominator}", latex_of(x))
  assert equal(latex_of(x), str(y)) == (x == y)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=3), st.integers(1, 5))
def test_products_equal_their_expansion(roots, bump):
  coefficients = [1]
  for r in roots:  # times (x - r), by hand
    longer = [*coefficients, 0]
    for i, c in enumerate(coefficients):
      longer[i + 1] -= r * c
    coefficients = longer
  product = "".join(f"(x-({r}))" for r in roots)

  def expanded(values):
    n = len(values) - 1
    return "+".join(f"({c})x^{{{n - i}}}" for i, c in enumerate(values))

  assert equal(product, expanded(coefficients))
  coefficients[-1] += bump
  assert not equal(product, expanded(coefficients))


N = 900
HOSTILE = [
  *("{" * 400 + "}" * 400, "(" * N, "\\frac" * 150, "\\frac1" * 140),
  *("^(" * 200 + ")" * 200, "9^" * 400, "\\pm " * 180, "1," * 60 + "x"),
  *("x=" * 400, "\\text{" * 140 + "}" * 140, "\\cup" * 180 + "1", "'" * N),
  *("\\" * N + "1", "1 " * 400, "and " * 200 + "1", "x=(y)" * 150, "1:" * 300),
  *("\\sqrt(" * 20 + "x" + ")" * 20, "9^{9^{9^{9}}}", "9**9**9**9", "a" * N),
  *(
    "\\frac{" + "9" * 400 + "}{7}",
    "1e999",
    "9999999999!",
    "(9^{9999})^{9999}",
  ),
  *("__import__('os').system('touch PWNED')", "[open('PWNED','w')]"),
  *("\\text{__import__('os').system('touch PWNED')}", "lambda: 1", "\x00" * N),
]


def test_hostile_text_is_met_quickly_and_not_evaluated(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  expressions.load()
  assert not equal("x", "x+1")  # the reader is warm
  start = time.process_time()
  for text in [*HOSTILE, "1" * 10**6, "{" * 10**6, "\\frac{1}{" * 10**5]:
    for reference in ("7", "x+1", "1, x", "[0,1)"):
      assert not equal(text, reference) and not equal(reference, text)
  assert time.process_time() - start < 10
  assert not list(tmp_path.iterdir())


def test_unreadable_references():
  for text in (None, "", " ", "?!", "{", "}{", r"\frac{1}{2", "x" * 1001):
    assert not readable(text)
  for text in (r"\text{Monday}", "7", r"\emptyset", "(1,2)", r"\frac{63}{400}"):
    assert readable(text)
