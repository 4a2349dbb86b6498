"""Pages that are made from the code are current."""

import importlib.util
import pathlib
import re

import pytest

from grpo_jax.algorithms import ALGORITHMS

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["metrics", "algorithms"])
def test_a_page_is_current(name):
  spec = importlib.util.spec_from_file_location(
    f"make_{name}", DOCS / f"make_{name}.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  stored = (DOCS / f"{name}.md").read_text()
  assert stored == module.page(), f"run python docs/make_{name}.py"


def test_every_paper_has_its_entry():
  known = set(
    re.findall(r"eprint = {([\d.]+)}", (DOCS / "references.bib").read_text())
  )
  for name, constructor in ALGORITHMS.items():
    cited = set(re.findall(r"\b\d{4}\.\d{5}\b", constructor.__doc__))
    assert cited <= known, name


def test_the_readme_names_every_algorithm():
  text = (DOCS.parent / "README.md").read_text()
  for name in ALGORITHMS:
    assert f"`{name}`" in text, name
