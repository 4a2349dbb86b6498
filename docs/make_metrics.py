"""Writes docs/metrics.md from the table in grpo_jax/metrics.py.

python docs/make_metrics.py
"""

import pathlib

from grpo_jax import metrics

HEAD = """# Metrics

Every name a run may write to `metrics.jsonl` and TensorBoard. Made from
`grpo_jax/metrics.py` by `python docs/make_metrics.py`; edit it there.

Means are over real tokens or scored rows, never over padding. A line is
written for each step, and one more for each evaluation, with the number of
finished steps as `step`. `time/`, `memory/` and `compile/` may differ between
a run and the same run killed and resumed; nothing else may.

| name | meaning |
|---|---|
"""


def page() -> str:
  """The page's text."""
  rows = [f"| `{name}` | {text} |\n" for name, text in metrics.TABLE.items()]
  return HEAD + "".join(rows).replace("||", "\\|\\|")


if __name__ == "__main__":
  path = pathlib.Path(__file__).with_name("metrics.md")
  path.write_text(page())
