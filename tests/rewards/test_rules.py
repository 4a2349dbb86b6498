import time

import pytest

from grpo_jax.errors import UserError
from grpo_jax.rewards import rules

S1 = "<think>\na\nb\n</think>\n<answer>9</answer>"


def test_strict_format():
  # Faults A20, s1 to s7.
  texts = [
    S1,
    "<think>a</think>\n\n<answer>\n9\n</answer>",
    S1 + " thanks",
    S1 + "<answer>9</answer>",
    "<think>a <answer>9</answer>",
    "Sure! " + S1,
    "<answer>9</answer><think>a</think>",
  ]
  assert [rules.has_format(t) for t in texts] == [1, 1, 0, 0, 0, 0, 0]
  assert [rules.think_answer(t) for t in texts[:2]] == ["9", "9"]
  assert rules.think_answer("<think></think><answer> </answer>") is None
  assert not rules.has_format("<think><answer></think>9</answer>")


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    (r"First \boxed{5}. Wrong; the answer is \boxed{7}.", "7"),
    (r"I first thought \boxed{7}. But no, it is \boxed{", None),
    (r"\boxed{7} and \boxed{}", None),
    (r"\boxed{\frac{63}{400}}", r"\frac{63}{400}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    ("7", None),
    ("\\boxed{\\", None),
  ],
)
def test_last_boxed(text, answer):
  assert rules.last_boxed(text) == answer


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    ("...200,000 - 130,000. So the profit is $70,000.", "$70,000"),
    ("200,000 - 130,000", "130,000"),
    ("it is -5", "-5"),
    ("12-5", "5"),
    ("(3)-4", "4"),
    ("see 1.2.3 x2", "1.2"),
    ("1,2345", "2345"),
    ("1,2,3", "3"),
    ("so .5", ".5"),
    ("1e-3 km", "1e-3"),
    ("nothing", None),
    ("", None),
  ],
)
def test_last_number(text, answer):
  assert rules.last_number(text) == answer


def test_after_marker():
  extract = rules.make_extractor("after:####")
  assert extract("2+40=42\n#### 42\n + " + "prose " * 80) == "42"
  assert extract("#### 1\n#### 2") == "2"
  assert extract("#### \n2") is None and extract("42") is None


@pytest.mark.parametrize(
  ("answer", "reference", "equal"),
  [
    ("1,000", "1000", True),
    ("$29.00", "29", True),
    ("016", "16", True),
    ("-$5", "-5.0", True),
    ("\u22125.", "-5", True),
    ("1e3", "1000", True),
    ("0.1", "0.10000000001", True),
    ("0.1", "0.1001", False),
    ("1000000001", "1000000000", False),
    ("1000000001.", "1000000000", False),
    ("1e-98", "5e-99", False),
    ("0", "1e-30", False),
    ("10,00", "1000", False),
    ("1.0.0", "1", False),
    ("2^10", "8", False),
    ("28%", "28", False),
    ("1/2", "0.5", False),
    ("٣", "3", False),
    ("--5", "5", False),
    ("-$-5", "5", False),
    ("nan", "nan", False),
    ("", "", False),
    ("9" * 100_000, "9" * 100_000, False),
  ],
)
def test_number(answer, reference, equal):
  assert rules.number(answer, reference) is equal


def test_two_signs_are_no_number():
  assert rules.parse_number("--5") is rules.parse_number("-$-5") is None
  assert rules.parse_number("$-5") == rules.parse_number("-$5") == -5


def test_normalized():
  assert rules.normalized(' "The  Cat". ', "the cat")
  for a, b in [("5", "-5"), ("5", ".5"), ("28", "28%"), ("5", "5!"), ("", "")]:
    assert not rules.normalized(a, b)


def test_unreadable_reference_never_pays():
  # Faults A21.
  assert not rules.exact(r"\frac{64}{400}", r"\frac{63}{400}")
  for match, equal in rules.MATCHES.items():
    for reference in ("", " ", "\n"):
      assert not rules.readable(match, reference)
      assert not equal(reference, reference)
  assert not rules.readable("number", "?!")
  assert not rules.readable("normalized", "?!")
  assert rules.readable("exact", "?!")


def test_model_text_is_not_evaluated(tmp_path, monkeypatch):
  # Faults A22.
  monkeypatch.chdir(tmp_path)
  outputs = (
    r"\boxed{\pi+__import__('os').system('touch PWNED')}",
    r"\boxed{[[1,2],[open('PWNED','w'),3]]}",
    r"\boxed{7}",
    r"\boxed{9^{9^{9^{9}}}}",
  )
  for equal in rules.MATCHES.values():
    for output in outputs:
      assert not equal(rules.last_boxed(output), r"2\pi")
  assert not list(tmp_path.iterdir())


N = 100_000
HOSTILE = [
  "(" * N,
  "9" * N,
  "9^9^9^9",
  "9**" * N,
  "-" * N,
  "1," * N,
  "1,111" * N,
  "111," * N,
  "1." * N,
  ".1" * N,
  "1e" * N,
  "$" * N,
  "\\boxed{" * (N // 7),
  "\\boxed{" + "{" * N,
  "\\" * N,
  "<think>" * (N // 7),
  "<think>" + "</think> " * (N // 8),
  "#### " * N,
  " " * N,
  "\x00" * N,
  "\ud800" * N,
  "\u202e٣" * N,
]


def test_hostile_text_is_met_quickly():
  extractors = [*rules.EXTRACTORS.values(), rules.make_extractor("after:####")]
  start = time.process_time()
  for text in HOSTILE:
    for extract in extractors:
      found = extract(text)
      assert found is None or isinstance(found, str)
    for equal in rules.MATCHES.values():
      assert equal(text, "7") is False
  assert time.process_time() - start < 10


def test_make_extractor_refuses():
  for rule in ("box", "after:", ""):
    with pytest.raises(UserError, match="unknown extraction rule"):
      rules.make_extractor(rule)
