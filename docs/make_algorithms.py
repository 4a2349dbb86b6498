"""Makes docs/algorithms.md from the code: `python docs/make_algorithms.py`."""

import inspect
import pathlib

from grpo_jax import describe
from grpo_jax.algorithms import ALGORITHMS

HERE = pathlib.Path(__file__).parent
HEAD = """# Algorithms

Made from the code by `python docs/make_algorithms.py`; a test keeps it current.

Every row is a record of parts ([`algorithm.py`](../grpo_jax/algorithm.py)), and
its constructor's arguments are its configuration: `--config.algorithm.name=dapo
--config.algorithm.clip_high=0.3`. Constants are the papers' where they give
them; the constructor's docstring says where they do not, and where well-known
implementations differ. Any row takes the keys of
[`adjust.py`](../grpo_jax/adjust.py): another KL, corrections from sampler to
trainer, an entropy bonus, dual clip, overlong handling, dynamic sampling.

A part is a function or a record in
[`advantages.py`](../grpo_jax/advantages.py),
[`returns.py`](../grpo_jax/returns.py), [`losses.py`](../grpo_jax/losses.py),
[`token_weights.py`](../grpo_jax/token_weights.py),
[`kl.py`](../grpo_jax/kl.py), [`corrections.py`](../grpo_jax/corrections.py) or
[`selection.py`](../grpo_jax/selection.py).

| name | source | advantage | ratio | surrogate | average | KL | beside |
|---|---|---|---|---|---|---|---|
"""


def made(constructor):
  """The row with its defaults; a length in tokens where one is needed."""
  needed = {
    k: 1024
    for k, p in inspect.signature(constructor).parameters.items()
    if p.default is p.empty
  }
  return constructor(**needed)


def source(text):
  """A link to arXiv where it is a number."""
  if text.replace(".", "").isdigit():
    return f"[{text}](https://arxiv.org/abs/{text})"
  return text


def line(name, a):
  """A row of the table."""
  kl = describe.name(a.kl) or describe.name(a.kl_in_reward)
  beside = [
    describe.name(getattr(a, field))
    for field in ("select", "length_penalty", "resample", "critic")
    if getattr(a, field) is not None
  ]
  for field in ("anchor", "correction", "keep"):
    part = getattr(a, field)
    if part is not type(a).__dataclass_fields__[field].default:
      beside.append(describe.name(part))
  if a.reference is not None and a.reference.moves:
    beside.append(describe.name(a.reference))
  beside += [
    text
    for field, text in (
      ("steps", "rewards of steps"),
      ("baseline_rollout", "one greedy rollout more"),
      ("offline", "sampled by the first policy"),
    )
    if getattr(a, field)
  ]
  cells = [
    f"`{name}`",
    source(a.source),
    describe.name(a.advantage),
    describe.name(a.ratio),
    describe.name(a.surrogate),
    describe.name(a.weights),
    kl,
    "; ".join(beside),
  ]
  return "| " + " | ".join(x.replace("|", "\\|") for x in cells) + " |\n"


def page():
  """The page's text."""
  text = HEAD
  for name, constructor in ALGORITHMS.items():
    text += line(name, made(constructor))
  text += "\n## BibTeX\n\n```bibtex\n"
  text += (HERE / "references.bib").read_text()
  return text + "```\n"


if __name__ == "__main__":
  (HERE / "algorithms.md").write_text(page())
