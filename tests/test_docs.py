"""Pages that are made from the code are current."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parent.parent


def test_metrics_page_is_current():
  spec = importlib.util.spec_from_file_location(
    "make_metrics", ROOT / "docs" / "make_metrics.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  stored = (ROOT / "docs" / "metrics.md").read_text()
  assert stored == module.page(), "run python docs/make_metrics.py"
