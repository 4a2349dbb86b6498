"""A run's curve, drawn from its metrics file alone."""

import math
import pathlib

import numpy as np
from matplotlib import figure, ticker
from matplotlib.backends import backend_agg

from grpo_jax.disk import explained, replacing
from grpo_jax.errors import UserError
from grpo_jax.records import read_metrics

_INK = "#1f2430"
_FAINT = "#8a919e"
_BLUE, _ORANGE, _GREEN = "#2563a8", "#d9722e", "#3a8f5c"
_RED, _VIOLET, _TEAL = "#b8434e", "#7a5aa6", "#2a8c94"
_SHADE = "#f1ece1"

# Small panels: a title, then each metric with its label and colour. A second
# metric gets an axis of its own on the right where the units differ.
_PANELS = (
  (
    "KL to reference, entropy (nats)",
    (("kl/ref", "KL", _VIOLET), ("entropy", "entropy", _TEAL)),
    True,
  ),
  (
    "share of groups without signal",
    (
      ("group/frac_all_right", "all right", _GREEN),
      ("group/frac_all_wrong", "all wrong", _RED),
    ),
    False,
  ),
  (
    "completion length (tokens)",
    (("completion/length_mean", "", _INK),),
    False,
  ),
)
_OTHER_NAMES = {"entropy": ("entropy/mean",)}


def curve(workdir):
  """Draws `curve.png` from a run's `metrics.jsonl`.

  On top the reward of each step with its running mean and the held-out
  evaluations; below, in small panels, KL and entropy, the share of groups that
  teach nothing, and length. The warm-up phase is shaded and shows its loss.
  Metrics that the run does not have are left out. The file is replaced whole.

  Args:
    workdir: a run's directory; the run may be alive.

  Returns:
    The path of the picture.

  Raises:
    UserError: no metrics to draw, or the picture cannot be written.
  """
  lines = read_metrics(workdir)
  if not lines:
    raise UserError(f"nothing to draw: {workdir}/metrics.jsonl has no lines")
  panels = [
    p for p in _PANELS if any(len(_series(lines, m[0])[0]) for m in p[1])
  ]
  page = figure.Figure(figsize=(9, 6 if panels else 4), layout="constrained")
  backend_agg.FigureCanvasAgg(page)
  grid = page.add_gridspec(2 if panels else 1, max(len(panels), 1))
  if panels:
    grid.set_height_ratios((2.1, 1))
  axes = [page.add_subplot(grid[0, :])]
  axes += [page.add_subplot(grid[1, i]) for i in range(len(panels))]
  _draw_reward(axes[0], lines, pathlib.Path(workdir).resolve().name)
  for axis, (title, metrics, twin) in zip(axes[1:], panels):
    _draw_panel(axis, lines, title, metrics, twin)
  for axis in axes:
    _shade_warmup(axis, lines)
    axis.set_xlim(*_step_range(lines))
    axis.set_xlabel("step", color=_FAINT, fontsize=8)
  path = pathlib.Path(workdir) / "curve.png"
  with explained(f"could not write {path}"), replacing(path) as file:
    page.savefig(file, format="png", dpi=130)
  return path


def _draw_reward(axis, lines, name):
  """Reward per step, the evaluations, and the warm-up's loss."""
  _style(axis, f"{name}: reward")
  rl = [line for line in lines if line.get("phase") != "warmup"]
  steps, reward = _series(rl, "reward/mean")
  axis.plot(steps, reward, color=_BLUE, lw=0.7, alpha=0.35)
  axis.plot(
    steps, _smooth(reward), color=_BLUE, lw=2, label="reward (training)"
  )
  for metric, label, color, marker in (
    ("eval/sampled", "held-out, sampled", _ORANGE, "o"),
    ("eval/greedy", "held-out, greedy", _GREEN, "D"),
  ):
    steps, value = _series(lines, metric)
    if not len(steps):
      continue
    errors = dict(zip(*_series(lines, f"{metric}_stderr")))
    bars = [1.96 * errors.get(step, math.nan) for step in steps]
    axis.errorbar(
      steps,
      value,
      yerr=None if np.isnan(bars).all() else np.nan_to_num(bars),
      color=color,
      marker=marker,
      ms=4.5,
      mfc="white",
      mew=1.4,
      lw=1.2,
      elinewidth=1,
      capsize=2,
      label=label,
    )
  warm = [line for line in lines if line.get("phase") == "warmup"]
  steps, loss = _series(warm, "loss")
  if len(steps):
    right = _right_axis(axis, _FAINT)
    right.plot(steps, loss, color=_FAINT, lw=1.1)
    right.set_ylim(bottom=min(0.0, *loss))
    right.set_ylabel("warm-up loss", color=_FAINT, fontsize=8)
    axis.text(
      steps[0],
      0.02,
      " warm-up",
      color=_FAINT,
      fontsize=8,
      transform=axis.get_xaxis_transform(),
    )
  if axis.get_legend_handles_labels()[0]:
    axis.legend(frameon=False, fontsize=8, loc="best", labelcolor=_INK)


def _draw_panel(axis, lines, title, metrics, twin):
  """One small panel: a line or two, each named in its own colour."""
  _style(axis, title)
  here = axis
  for metric, label, color in metrics:
    steps, value = _series(lines, metric)
    if not len(steps):
      continue
    if twin and here is axis and axis.lines:
      here = _right_axis(axis, color)
    here.plot(steps, value, color=color, lw=0.6, alpha=0.35)
    here.plot(steps, _smooth(value), color=color, lw=1.5, label=label)
    if twin:
      here.tick_params(axis="y", labelcolor=color)
      here.set_ylabel(label, color=color, fontsize=8, labelpad=2)
  if not twin and len(axis.get_legend_handles_labels()[0]) > 1:
    axis.legend(frameon=False, fontsize=8, loc="best", labelcolor="linecolor")


def _style(axis, title):
  axis.set_title(title, loc="left", fontsize=9.5, color=_INK)
  axis.grid(axis="y", color="#e6e8ec", lw=0.7)
  axis.set_axisbelow(True)
  axis.spines[["top", "right"]].set_visible(False)
  axis.spines[["left", "bottom"]].set_color("#c5cad3")
  axis.tick_params(labelsize=8, labelcolor=_INK, color="#c5cad3")
  axis.yaxis.set_major_locator(ticker.MaxNLocator(5))
  axis.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))


def _right_axis(axis, color):
  right = axis.twinx()
  right.spines[["top", "left", "right", "bottom"]].set_visible(False)
  right.tick_params(labelsize=8, labelcolor=color, color="#c5cad3")
  right.yaxis.set_major_locator(ticker.MaxNLocator(4))
  return right


def _shade_warmup(axis, lines):
  steps = [x["step"] for x in lines if x.get("phase") == "warmup"]
  if steps:
    axis.axvspan(min(steps), max(steps), color=_SHADE, lw=0, zorder=0)


def _step_range(lines):
  steps = [line["step"] for line in lines]
  spare = max(max(steps) - min(steps), 1) * 0.015
  return min(steps) - spare, max(steps) + spare


def _series(lines, metric):
  """The steps and finite values of a metric, as two arrays."""
  names = (metric, *_OTHER_NAMES.get(metric, ()))
  points = [
    (line["step"], line[name])
    for line in lines
    for name in names
    if isinstance(line.get(name), (int, float)) and math.isfinite(line[name])
  ]
  array = np.array(points, float).reshape(-1, 2)
  return array[:, 0], array[:, 1]


def _smooth(values):
  """A centred mean over a thirtieth of the curve, narrower at its ends."""
  half = len(values) // 60
  sums = np.concatenate([[0.0], np.cumsum(values)])
  index = np.arange(len(values))
  low = np.maximum(index - half, 0)
  high = np.minimum(index + half + 1, len(values))
  return (sums[high] - sums[low]) / (high - low)
