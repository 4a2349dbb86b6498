"""Does a run lie inside a reference band?

    python -m grpo_jax.check_run --workdir=RUN --band=experiments/bands/x.json

prints each check with the run's value and the band. Exit code 0: all inside;
1: one is outside, or its step is not reached; 2: a mistake to mend, such as a
metric that the run does not log. `grpo_jax.bands` has the file's form.

A band from one's own runs, of one configuration and two seeds or more:

    python -m grpo_jax.check_run --band=FILE --runs=R0,R1,R2 \\
      --metrics=eval/sampled,eval/greedy --step=last --measured='me, a laptop'

Each check is then the interval in which one more seed falls 95 times of 100.
"""

import json
import os
from typing import Any

from absl import flags

from grpo_jax import bands, cli, config
from grpo_jax.bands import Band, Check, Verdict
from grpo_jax.console import Console
from grpo_jax.disk import explained, replacing
from grpo_jax.errors import UserError
from grpo_jax.policy import stored_config
from grpo_jax.records import read_metrics


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("workdir", None, "the run to check")
  flags.DEFINE_string("band", None, "the band's file")
  flags.DEFINE_list("runs", None, "write a band from these runs: R0,R1,R2")
  flags.DEFINE_list("metrics", None, "of such a band")
  flags.DEFINE_string("step", "last", "of such a band: a number, last or max")
  flags.DEFINE_integer("smooth", 1, "values averaged, of such a band", 1)
  flags.DEFINE_string("measured", "", "of such a band: by whom, on what")


def last_step(c: dict[str, Any]) -> int:
  """The step at which a run of a stored configuration ends."""
  return c["steps"] + (0 if c["init_from"] else c["warmup"]["steps"])


def check(workdir: str, band: Band) -> list[Verdict]:
  """What a run says to a band.

  Raises:
    UserError: no run there, or it does not log what the band asks for.
  """
  c = stored_config(workdir)
  return bands.judge(band, read_metrics(workdir), last_step(c))


def show(console: Console, band: Band, verdicts: list[Verdict]) -> None:
  """Prints the checks and, in the last line, the verdict of all."""
  rows = []
  for v in verdicts:
    value = "" if v.value is None else f"{v.value:.4f}"
    if v.stderr is not None:
      value += f" ± {v.stderr:.4f}"
    low, high = (
      "" if x is None else f"{x:.4f}" for x in (v.check.low, v.check.high)
    )
    step = str(v.check.step)
    if v.step is not None and step != str(v.step):
      step += f" ({v.step})"
    rows.append((v.check.name, step, value, f"{low} to {high}", v.text))
  columns = ("metric", "step", "value ± its error", "band", "")
  console.table(f"band: {band.source}", columns, rows)
  console.say(f"the band was measured: {band.measured}")
  outside = sum(not v.inside for v in verdicts)
  n = len(verdicts)
  console.say(
    f"outside: {outside} of {n}" if outside else f"inside: {n} of {n}"
  )


def make(
  runs: list[str], names: list[str], step: str, smooth: int, measured: str
) -> dict[str, Any]:
  """A band file's content, from finished runs that differ in their seed alone.

  Raises:
    UserError: fewer than two runs, runs of several configurations, a seed that
      comes twice, a run that has not reached the step, or no spread.
  """
  if len(runs) < 2:
    raise UserError(f"--runs has {len(runs)}; a spread needs two seeds or more")
  if not names or not measured:
    raise UserError(
      "a band needs --metrics=NAME,NAME and --measured='by whom, on what'"
    )
  configs = [stored_config(run) for run in runs]
  seeds = [c["seed"] for c in configs]
  if len(set(seeds)) < len(seeds):
    raise UserError(f"the seeds of these runs are {seeds}; each must be new")
  for run, c in zip(runs, configs):
    if other := config.differences({**configs[0], "seed": c["seed"]}, c):
      raise UserError(
        f"{run} has another configuration than {runs[0]} ({'; '.join(other)})"
      )
  where = int(step) if step.isdecimal() else step
  checks = []
  for name in names:
    one = Band("", measured, (Check(name, where, smooth=smooth),))
    found = [check(run, one)[0] for run in runs]
    for run, v in zip(runs, found):
      if v.value is None or not v.inside:
        raise UserError(f"{name} of {run}: {v.text}")
    values = [v.value for v in found]
    if len(set(values)) == 1:
      raise UserError(f"{name} is {values[0]} in all runs: no spread, no band")
    low, high = bands.from_seeds(values)
    checks.append(
      {"metric": name, "step": where}
      | ({"smooth": smooth} if smooth > 1 else {})
      | {"low": round(low, 6), "high": round(high, 6), "values": values}
    )
  n = len(runs)
  source = (
    f"{n} runs of one configuration, seeds"
    f" {', '.join(map(str, sorted(seeds)))}: mean ± t(0.975, {n - 1}) s sqrt(1"
    f" + 1/{n}), in which one more seed falls 95 times of 100"
  )
  return {"source": source, "measured": measured, "checks": checks}


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  if not f.band:
    raise UserError("--band=FILE is missing")
  if bool(f.workdir) == bool(f.runs):
    raise UserError(
      "one of --workdir=RUN (to check) and --runs=R0,R1,R2 (to write the band)"
      " is needed"
    )
  console = Console()
  if f.workdir:
    band = bands.read(f.band)
    verdicts = check(f.workdir, band)
    show(console, band, verdicts)
    return cli.OK if all(v.inside for v in verdicts) else cli.FAILED
  if os.path.exists(f.band):
    raise UserError(f"--band={f.band} exists; remove it, or name another")
  if not (f.step.isdecimal() or f.step in ("last", "max")):
    raise UserError(f"--step={f.step} must be a whole number, last or max")
  made = make(f.runs, f.metrics, f.step, f.smooth, f.measured)
  text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
  why = f"could not write {f.band}", "choose another --band"
  with explained(*why), replacing(f.band) as file:
    file.write(text.encode())
  bands.read(f.band)  # what is written can be read
  console.say(f"wrote {f.band}")
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
