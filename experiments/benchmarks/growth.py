"""How a step's seconds and memory grow with G, T, P and B; a picture.

    python -m experiments.benchmarks.growth --out=growth.json --plot=growth.png

A model of 0.85 M parameters on two CPU cores; each point is a process of its
own (about 20 seconds). Beside the measurement: the positions that a prompt
computed once for its group costs, B P + B G T, and those of rows that each
carry their prompt, B G (P + T), both scaled to the middle point.
"""

import json
import pathlib
from typing import Any

from absl import flags

from experiments.benchmarks import compare
from grpo_jax import cli
from grpo_jax.errors import UserError

MIDDLE = {"B": 8, "G": 8, "P": 128, "T": 32}
VARIED = {
  "G": (1, 4, 16, 32, 64),
  "T": (8, 16, 64, 128),
  "P": (16, 64, 256, 512),
  "B": (2, 4, 16, 32),
}


def shared(n: dict[str, int]) -> int:
  """Positions where a prompt is computed once for its group."""
  return n["B"] * n["P"] + n["B"] * n["G"] * n["T"]


def flat(n: dict[str, int]) -> int:
  """Positions where every row carries its prompt."""
  return n["B"] * n["G"] * (n["P"] + n["T"])


def measure(n: dict[str, int]) -> dict[str, Any]:
  """One point: a benchmark step of this size."""
  name = "tiny:" + "x".join(str(n[key]) for key in "BGPT")
  found = compare.ours(name, "f32", 5, "")
  keys = ("step_s", "step_med", "rollout_s", "score_s", "update_s", "rss_gib")
  return {**n, **{key: found[key] for key in keys}}


def points() -> list[dict[str, int]]:
  """The middle, then each number alone."""
  out = [MIDDLE]
  for name, values in VARIED.items():
    out += [MIDDLE | {name: value} for value in values]
  return out


def draw(rows: list[dict[str, Any]], path: str) -> None:
  """Seconds and memory against each number, beside both counts."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  middle = rows[0]
  figure, axes = pyplot.subplots(2, 4, figsize=(13, 6), sharex="col")
  for column, name in enumerate(VARIED):
    others = [key for key in MIDDLE if key != name]
    own = [r for r in rows if all(r[k] == MIDDLE[k] for k in others)]
    own.sort(key=lambda r: r[name])
    x, top, low = [r[name] for r in own], axes[0, column], axes[1, column]
    for count, label, style in (
      (flat, "B G (P + T)", ":"),
      (shared, "B P + B G T", "--"),
    ):
      scale = middle["step_s"] / count(middle)
      top.plot(
        x, [scale * count(r) for r in own], style, color="gray", label=label
      )
    top.plot(x, [r["step_s"] for r in own], "o-", label="measured")
    low.plot(x, [r["rss_gib"] for r in own], "o-")
    for axis in (top, low):
      axis.set_xscale("log", base=2)
      axis.set_xticks(x, map(str, x))
      axis.grid(alpha=0.3)
    top.set_yscale("log")
    low.set_ylim(bottom=0)
    low.set_xlabel(name)
  axes[0, 0].set_ylabel("seconds of a step")
  axes[1, 0].set_ylabel("peak memory, GiB")
  axes[0, 0].legend(frameon=False)
  sizes = ", ".join(f"{k} = {v}" for k, v in MIDDLE.items())
  figure.suptitle(f"Growth around {sizes}")
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("out", None, "JSON file of the points; read if it exists")
  flags.DEFINE_string("plot", None, "picture to draw")


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  if not f.out:
    raise UserError("--out=FILE is missing")
  path = pathlib.Path(f.out)
  rows = json.loads(path.read_text()) if path.exists() else []
  done = [{key: row[key] for key in MIDDLE} for row in rows]
  for n in points():
    if n not in done:
      rows.append(measure(n))
      path.write_text(json.dumps(rows, indent=1))
  if f.plot:
    draw(rows, f.plot)
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
