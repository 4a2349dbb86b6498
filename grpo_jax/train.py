"""Trains a policy: flags -> config -> build -> restore -> loop.

    python -m grpo_jax.train --config=experiments/quickstart.py --workdir=DIR

Run the same command again to continue a run that was stopped or killed.
"""

from typing import Any

from absl import flags
from ml_collections import config_flags

from grpo_jax import (
  ahead,
  build,
  cli,
  config,
  data,
  evaluate,
  explain,
  memory,
  plots,
  preemption,
  probe,
  session,
  sharding,
  steps,
)
from grpo_jax.compile import Programs, use_cache
from grpo_jax.console import Console, interval
from grpo_jax.errors import OutOfMemory, UserError
from grpo_jax.profile import Tracer
from grpo_jax.records import read_metrics
from grpo_jax.rollouts import Clock, Position
from grpo_jax.session import Session
from grpo_jax.types import policy

NONFINITE_LIMIT = 5  # updates in a row that are not finite end a run
SILENT_STEPS = 10  # steps without a mixed group before a verdict is printed


def define_flags() -> None:
  """The command's flags."""
  config_flags.DEFINE_config_file(
    "config", None, "FILE or FILE:PRESET; change keys with --config.KEY=VALUE"
  )
  flags.DEFINE_string("workdir", None, "directory of the run")
  flags.DEFINE_bool("explain", False, "print what would run, and stop")
  flags.DEFINE_integer(
    "probe",
    0,
    "sample at least this many prompts before RL, judge the signal, and stop",
    lower_bound=0,
  )


def main(_: Any) -> int:
  """The command; returns its exit code."""
  f = flags.FLAGS
  # From here on a signal is answered, not obeyed: the run saves, then ends.
  with preemption.Guard() as guard:
    e = config.resolve(cli.loaded(f.config))
    cli.check_platform(e.config["platform"])
    use_cache(e.config["compile_cache"])
    size = e.config["mesh"]
    mesh = sharding.make_mesh(size["data"], size["fsdp"], size["tensor"])
    build.check_mesh(e, mesh)
    config.check_demonstrations(e)
    if not (f.workdir or f.explain):
      raise UserError("--workdir=DIR is missing: where the run is kept")
    console = Console(e.config["log"]["every"])
    explain.print_plan(console, e, mesh)
    if f.explain:
      return cli.OK
    built = build.build(e, Programs(mesh, guard, console.say))
    return run(built, f.workdir, console, f.probe)


def run(
  built: build.Built, workdir: str, console: Console, probe_prompts: int = 0
) -> int:
  """Opens the workdir, trains, and leaves it whole however that ends."""
  saved = "nothing to save yet"
  try:
    with session.open_session(built, workdir, console) as s:
      try:
        with memory.explained(built):
          return train(s, probe_prompts)
      except (Stopped, preemption.Preempted, OutOfMemory):
        if s.step and s.whole():  # what is before the first can be had again
          s.save()
          saved = f"saved step {s.step}"
        raise
  except Stopped as stop:
    console.stop()
    cli.fail(f"{stop}; {saved}", cli.FAILED)
  except OutOfMemory as error:
    console.stop()
    cli.fail(f"{error}; {saved}", cli.NO_MEMORY)
  except preemption.Preempted as stop:
    console.stop()
    console.say(f"{stop}; {saved}. Run the same command to go on")
    # Not a return: Python would first wait for the abandoned computation.
    preemption.leave(cli.PREEMPTED)
  finally:
    console.stop()


def train(s: Session, probe_prompts: int = 0) -> int:
  """The loop. Every turn begins at a safe point: the end of a step."""
  built, e, guard = s.built, s.built.experiment, s.built.programs.guard
  seed, warmup = e.config["seed"], e.warmup_steps
  examples = e.task.split("train")
  warmup_stream = data.Stream(examples, seed, "warmup")
  stream = data.Stream(examples, seed, "rl")
  if not probe_prompts:
    if s.step == e.total_steps and not eval_due(s):
      return finish(s, "this run is finished already")
    built.runner.check(guard.check)
    ahead.compile_all(built, s.phase)
  s.console.start(e.total_steps, s.step)
  tracer = Tracer(e.config["profile"], s.workdir)
  s.resources.callback(tracer.close)
  while True:
    guard.check()
    if probe_prompts and s.step >= warmup:
      return probe_signal(s, stream, probe_prompts)
    if eval_due(s):
      evaluate_now(s)
    if checkpoint_due(s):
      s.save()
    if s.step == warmup and s.phase == "warmup":
      s.begin_rl()
    if s.step == e.total_steps:
      return finish(s, "finished")
    tracer.before(s.step + 1)
    if s.phase == "warmup":
      result = steps.imitate_step(built, s.state, warmup_stream, s.step)
    else:
      at = Position(s.step + 1, s.totals.batches, s.curriculum)
      result = steps.reinforce_step(
        built, s.state, stream, at, first=s.step == warmup
      )
    record(s, result)
    watch(s, result)
    if where := tracer.after(s.step):
      s.console.say(f"trace of steps {e.config['profile']} in {where}")


def record(s: Session, result: steps.StepResult) -> None:
  """Takes a finished step over: state, counters, metrics, rollout, console."""
  s.state, s.step = result.state, s.step + 1
  m, t = dict(result.metrics), s.totals
  updates = 1
  if m["phase"] == "rl":
    updates = s.built.experiment.batching.updates_per_step
    t.tokens += int(m["tokens/sampled"])
    t.samples += result.samples
    t.batches += result.batches
    s.curriculum = result.curriculum
    t.without_mixed = 0 if m["group/frac_mixed"] else t.without_mixed + 1
    m["tokens/total"], m["samples/total"] = t.tokens, t.samples
  nonfinite = round(m["update/nonfinite"] * updates)
  t.nonfinite += nonfinite
  # A step with one finite update has not lost its way.
  lost = nonfinite == updates
  t.nonfinite_in_a_row = t.nonfinite_in_a_row + nonfinite if lost else 0
  t.dead += round(m["update/dead"] * updates)
  m["update/nonfinite_total"], m["update/dead_total"] = t.nonfinite, t.dead
  m |= s.built.programs.metrics()
  s.write_metrics(m)
  if s.built.experiment.config["log"]["rollouts"] and result.groups:
    s.records.write_rollouts(s.step, result.groups)
  s.console.step(s.step, m)


def watch(s: Session, result: steps.StepResult) -> None:
  """Says what a person should know of a step; ends a run that went wrong.

  Raises:
    Stopped: after `NONFINITE_LIMIT` updates in a row that are not finite.
  """
  if result.first_error and not s.reward_error_shown:
    s.reward_error_shown = True
    s.console.say(f"a reward could not be computed: {result.first_error}")
  if s.totals.without_mixed == SILENT_STEPS:
    s.console.say(
      f"{SILENT_STEPS} steps without a mixed group: {result.verdict}"
    )
  if not result.metrics["update/nonfinite"]:
    return
  path = session.save_batch(s.workdir, s.step, result.batch)
  s.console.say(
    f"step {s.step}: loss or gradient is not finite; the update was skipped"
    f" and its batch saved as {path}"
  )
  if s.totals.nonfinite_in_a_row >= NONFINITE_LIMIT:
    raise Stopped(
      f"{s.totals.nonfinite_in_a_row} updates in a row were not finite; their"
      f" batches are in {path.parent}; look for what overflows, or start a new"
      " run from an earlier checkpoint (--config.init_from) with a lower"
      " learning rate"
    )


class Stopped(RuntimeError):
  """A run that ended itself; the message says why."""


def eval_due(s: Session) -> bool:
  """At the first step of RL, every `eval.every`, and at the end; once."""
  e = s.built.experiment
  done = s.step - e.warmup_steps
  every = e.evaluation.every
  if not every or done < 0 or (done % every and s.step != e.total_steps):
    return False
  return not s.evaluated()


def evaluate_now(s: Session) -> None:
  """Evaluates the policy and logs it; success when sampled is its score."""
  e = s.built.experiment
  examples = list(e.task.split(e.evaluation.split))[: e.evaluation.prompts]
  clock = Clock()
  params = policy(s.state.params)
  sampled, greedy = (
    evaluate.evaluate(s.built, params, s.state.key, how, examples, s.step)
    for how in ("sampled", "greedy")
  )
  clock.lap("time/eval")
  m = evaluate.eval_metrics(sampled, greedy)
  s.write_metrics({**m, **clock.seconds})
  s.console.say(
    f"step {s.step:6d}  {e.evaluation.split}  sampled"
    f" {interval(sampled.mean, sampled.stderr)}  greedy"
    f" {interval(greedy.mean, greedy.stderr)}"
  )
  s.scored = s.step, sampled.mean


def checkpoint_due(s: Session) -> bool:
  """Every `checkpoint.every`, at an evaluation, and at a phase's end."""
  e = s.built.experiment
  done = s.step - e.warmup_steps
  every = e.config["checkpoint"]["every"]
  if done == 0 or s.step == e.total_steps:
    return True
  if done > 0 and e.evaluation.every and done % e.evaluation.every == 0:
    return True
  return bool(every) and s.step > 0 and done % every == 0


def probe_signal(s: Session, stream: data.Stream, prompts: int) -> int:
  """Samples before training and says whether there is anything to learn.

  A warm-up that was run for it is saved. A run that has not begun is not: its
  configuration may still change.
  """
  if s.step:
    s.save()
  host, rewards = steps.probe_step(s.built, s.state, stream, prompts)
  s.console.stop()
  probe.show(s.console, host.examples[:3], host.completions, rewards)
  s.console.say(str(probe.verdict(rewards)))
  return cli.OK


def finish(s: Session, how: str) -> int:
  """Waits for the last checkpoint; prints before and after; draws the curve."""
  s.checkpoints.wait()
  s.console.stop()
  lines = read_metrics(s.workdir)
  scored = [line for line in lines if "eval/sampled" in line]
  if scored:
    rows = []
    for name in ("sampled", "greedy"):
      first, last = (
        interval(x[f"eval/{name}"], x[f"eval/{name}_stderr"])
        for x in (scored[0], scored[-1])
      )
      rows.append((f"eval/{name}", first, last))
    e = s.built.experiment
    examples = list(e.task.split(e.evaluation.split))[: e.evaluation.prompts]
    title = f"{len(examples)} {e.evaluation.split} prompts, success with 95 %"
    title += " interval"
    if common := evaluate.majority(examples):
      title += f"; the commonest answer alone: {common:.3f}"
    columns = ("", f"step {scored[0]['step']}", f"step {scored[-1]['step']}")
    s.console.table(title, columns, rows)
  end = f"{how} at step {s.step}"
  if (best := s.checkpoints.best()) is not None:
    end += f"; best checkpoint {best}"
  if lines:
    end += f"; curve in {plots.curve(s.workdir)}"
  s.console.say(end)
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
