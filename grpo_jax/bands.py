"""Reference bands: between which values a run's metrics are expected.

    {"source": "where the numbers were published, or how they were made",
     "measured": "by whom, on what",
     "checks": [
       {"metric": "eval/greedy", "step": 100, "low": 0.80, "high": 0.82},
       {"metric": "reward/mean", "step": "last", "low": 0.9, "smooth": 10},
       {"metric": "kl/ref", "step": "max", "high": 0.5}]}

`metric` is a name of `metrics.jsonl`. `step` counts as there, warm-up steps
included; "last" is the run's last step, "max" the largest value of the whole
run. `low` and `high` belong to the band; one of them may be left out. With
`smooth` n, the mean of the last n values up to the step is looked at. `values`
may hold what the band was made from; it is not read.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scipy import special

from grpo_jax import metrics
from grpo_jax.errors import UserError
from grpo_jax.named import suggest


@dataclasses.dataclass(frozen=True)
class Check:
  """One metric at one step; the fields of a check in a band file."""

  metric: str
  step: int | str
  low: float | None = None
  high: float | None = None
  smooth: int = 1
  values: tuple[float, ...] = ()

  @property
  def name(self) -> str:
    """The metric, and over how many values it is averaged."""
    mean = f", mean of {self.smooth}" if self.smooth > 1 else ""
    return self.metric + mean


@dataclasses.dataclass(frozen=True)
class Band:
  """A band file."""

  source: str
  measured: str
  checks: tuple[Check, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a run says to one check.

  Attributes:
    inside: whether its value is in the band; False where there is none.
    text: 'inside', 'below by …', 'above by …', or why there is no value.
    step: where the value was found.
    value: None where the run has not reached the step.
    stderr: the run's own standard error there, where it logs one. It is for
      the reader: the verdict is by the band.
  """

  check: Check
  inside: bool
  text: str
  step: int | None = None
  value: float | None = None
  stderr: float | None = None


def read(path: str) -> Band:
  """Reads a band file.

  Raises:
    UserError: it cannot be read, or says something that it may not.
  """
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
    raw = json.loads(text, parse_constant=_refuse_constant)
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"band {path} cannot be read: {error}") from error
  _check_keys(f"band {path}", raw, ("source", "measured", "checks"))
  for key in ("source", "measured"):
    if not isinstance(raw.get(key), str) or not raw[key].strip():
      raise UserError(f"band {path}: {key} must be a text that says so")
  checks = raw.get("checks")
  if not isinstance(checks, list) or not checks:
    raise UserError(f"band {path}: checks must be a list of one or more")
  found = [_check(f"band {path}, check {i}", x) for i, x in enumerate(checks)]
  return Band(raw["source"], raw["measured"], tuple(found))


def _refuse_constant(text: str) -> None:
  raise ValueError(f"{text} is no number of JSON")


def _check_keys(where: str, raw: Any, known: Sequence[str]) -> None:
  if not isinstance(raw, dict):
    raise UserError(f"{where} must be a JSON object, not {_short(raw)}")
  for key in raw:
    if key not in known:
      raise UserError(
        f"{where} has an unknown key {key!r}{suggest(key, known)}; known are"
        f" {', '.join(known)}"
      )


def _check(where: str, raw: Any) -> Check:
  """One entry of `checks`, every value checked."""
  _check_keys(where, raw, [x.name for x in dataclasses.fields(Check)])
  metric, step = raw.get("metric"), raw.get("step")
  if not isinstance(metric, str) or not metric:
    raise UserError(f"{where}: metric {_short(metric)} must be a name")
  if step not in ("last", "max") and not _whole(step, 0):
    raise UserError(
      f'{where}: step {_short(step)} must be a whole number, "last" or "max"'
    )
  smooth = raw.get("smooth", 1)
  if not _whole(smooth, 1):
    raise UserError(f"{where}: smooth {_short(smooth)} must be 1 or more")
  ends = {key: raw.get(key) for key in ("low", "high") if key in raw}
  if not ends:
    raise UserError(f"{where} needs low, high, or both")
  for key, value in ends.items():
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise UserError(f"{where}: {key} {_short(value)} must be a number")
  if len(ends) == 2 and ends["low"] > ends["high"]:
    raise UserError(f"{where}: low {ends['low']} is above high {ends['high']}")
  return Check(metric, step, smooth=smooth, **ends)


def _whole(value: Any, low: int) -> bool:
  return type(value) is int and value >= low


def _short(value: Any) -> str:
  return "is missing" if value is None else repr(value)[:60]


def judge(
  band: Band, lines: Sequence[Mapping[str, Any]], total: int
) -> list[Verdict]:
  """What a run's metrics say to every check of a band.

  Args:
    band: the checks.
    lines: of `metrics.jsonl`, in order; the run may be alive.
    total: the step at which the run ends.

  Raises:
    UserError: a metric that the run does not log, or not at that step.
  """
  return [_judge(check, lines, total) for check in band.checks]


def _judge(
  check: Check, lines: Sequence[Mapping[str, Any]], total: int
) -> Verdict:
  points = _points(lines, check.metric)
  now = max((x["step"] for x in lines), default=0)
  goal = total if isinstance(check.step, str) else check.step
  if not points:
    _check_name(check.metric, lines, passed=now >= total or now > goal)
  elif isinstance(check.step, int) and now > goal:
    _check_measured(check, [step for step, _ in points])
  found = _smoothed(points, check.smooth)
  if isinstance(check.step, int):
    found = [x for x in found if x[0] == check.step]
  if now < goal or not found:
    why = f"the run is at step {now} of {total}"
    if now >= goal and points:
      why = f"{check.smooth} values are averaged, there are {len(points)}"
    return Verdict(check, False, f"not reached: {why}")
  step, value = found[-1]
  if check.step == "max":
    step, value = max(found, key=lambda x: _order(x[1]))
  error = None
  if check.smooth == 1:
    error = dict(_points(lines, f"{check.metric}_stderr")).get(step)
    error = error if error is not None and math.isfinite(error) else None
  text = _place(check, value)
  return Verdict(check, text == "inside", text, step, value, error)


def _check_name(
  metric: str, lines: Sequence[Mapping[str, Any]], passed: bool
) -> None:
  """Refuses a metric that no line has, unless it may come yet."""
  if passed or not metrics.documented(metric):
    names = {name for x in lines for name in x} - {"step"}
    raise UserError(
      f"the run has no metric {metric!r}"
      f"{suggest(metric, names | {*metrics.TABLE})}; docs/metrics.md has every"
      " name"
    )


def _check_measured(check: Check, steps: Sequence[int]) -> None:
  """Refuses a step that the run went by without measuring."""
  if check.step not in steps:
    near = sorted(steps, key=lambda x: abs(x - check.step))[:2]
    raise UserError(
      f"{check.metric} was not measured at step {check.step}; nearest are"
      f" {', '.join(map(str, sorted(near)))}; see config.eval.every"
    )


def _points(
  lines: Iterable[Mapping[str, Any]], metric: str
) -> list[tuple[int, float]]:
  """(step, value) of a metric; of lines of one step the last."""
  found = {x["step"]: x[metric] for x in lines if metric in x}
  if odd := [x for x in found.values() if isinstance(x, str)]:
    raise UserError(f"metric {metric!r} is a text ({odd[0]!r}), not a number")
  return sorted(found.items())


def _smoothed(
  points: Sequence[tuple[int, float]], n: int
) -> list[tuple[int, float]]:
  """Means of each n values in a row, at the step of the last of them."""
  values = [value for _, value in points]
  return [
    (points[i][0], statistics.fmean(values[i + 1 - n : i + 1]))
    for i in range(n - 1, len(points))
  ]


def _order(value: float) -> float:
  """A value that is not a number counts as the largest: it must be seen."""
  return math.inf if math.isnan(value) else value


def _place(check: Check, value: float) -> str:
  if not math.isfinite(value):
    return "not finite"
  if check.low is not None and value < check.low:
    return f"below by {check.low - value:.4g}"
  if check.high is not None and value > check.high:
    return f"above by {value - check.high:.4g}"
  return "inside"


def from_seeds(values: Sequence[float]) -> tuple[float, float]:
  """Where one more run falls, 95 times of 100, if runs are normal.

  The prediction interval: mean ± t(0.975, n-1) s sqrt(1 + 1/n), s the standard
  deviation of n runs (ddof 1). Wider than the interval of their mean, which
  narrows with n and says nothing of the next run.

  Args:
    values: n of them, two or more that are not all equal.
  """
  n = len(values)
  mean, spread = statistics.fmean(values), statistics.stdev(values)
  width = float(special.stdtrit(n - 1, 0.975)) * spread * math.sqrt(1 + 1 / n)
  return mean - width, mean + width
