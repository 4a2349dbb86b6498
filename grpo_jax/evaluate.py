"""Evaluation on held-out prompts, in the loop and as a command.

    python -m grpo_jax.evaluate --workdir=runs/quickstart --samples=8
    python -m grpo_jax.evaluate --model=PATH --config=experiments/smollm2.py
    python -m grpo_jax.evaluate --workdir=RUN@20 --against=RUN@0 --format=table

prints one JSON object, or a table: success, pass@k and maj@k with standard
errors, completion length and truncation, sampled and greedy; with `--against`
the same of a second policy, and the differences, paired by prompt.
docs/evaluation.md has what each number is.
"""

import collections
import dataclasses
import gc
import json
import math
import sys
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from grpo_jax import (
  ahead,
  build,
  cli,
  config,
  estimates,
  memory,
  results,
  rollouts,
  sharding,
)
from grpo_jax.build import Built
from grpo_jax.compile import Programs, use_cache
from grpo_jax.console import Console
from grpo_jax.errors import UserError
from grpo_jax.estimates import Outcome
from grpo_jax.policy import compared_by, evaluated_by, is_run
from grpo_jax.preemption import Guard, Preempted, leave
from grpo_jax.results import Results
from grpo_jax.stored import load_parameters
from grpo_jax.tasks.base import Example
from grpo_jax.types import Array, Params


def evaluate(
  built: Built,
  params: Params,
  key: Array,
  how: str,
  examples: list[Example],
  step: int | None = None,
) -> Outcome:
  """Samples and scores every example once per sample.

  The key does not depend on the step, so two evaluations of a run draw the
  same uniform numbers and their difference is a paired one.

  Args:
    built: the programs.
    params: the policy.
    key: the run's root key.
    how: 'sampled' or 'greedy'.
    examples: N examples; the last batch is filled with repeats, which are
      dropped.
    step: of the run, where rewards that depended on time are to be reused
      when the evaluation is repeated.
  """
  e = built.experiment
  size = e.evaluation.prompts_per_batch
  zero = built.put_scalar(0)
  rows = []
  for start in range(0, len(examples), size):
    part = list(examples[start : start + size])
    real = len(part)
    part += [part[-1]] * (size - real)
    ordinals = np.arange(start, start + size, dtype=np.int32)
    prompts = built.prompts(part, ordinals)
    rollout = built.evaluators[how](params, prompts, key, zero)
    host = rollouts.fetch(built, rollout, part, ordinals)
    ids = None
    if step is not None:
      ids = [(f"eval/{how}", step, start + i) for i in range(real)]
    scores = built.runner.score(
      part[:real], host.completions[:real], built.programs.guard.check, ids
    )
    spoke = np.where(scores.scored[..., None], scores.parts, math.nan)
    rows.append(
      (
        scores.success,
        scores.scored,
        host.lengths[:real],
        host.truncated[:real],
        np.array(scores.extracted, object),
        spoke,
      )
    )
  *columns, parts = (np.concatenate(column) for column in zip(*rows))
  names = e.task.parts
  return Outcome(*columns, {x: parts[..., i] for i, x in enumerate(names)})


def majority(examples: list[Example]) -> float | None:
  """Success of one constant answer, the commonest reference, to all.

  None where no example has a reference answer.
  """
  answers = collections.Counter(x.answer for x in examples if x.answer)
  if not answers:
    return None
  return answers.most_common(1)[0][1] / len(examples)


def eval_metrics(sampled: Outcome, greedy: Outcome) -> dict[str, float]:
  """The names under which an evaluation is logged.

  pass@k and maj@k at k = n, where there are several samples; maj@k only where
  a completion had an answer. A standard error of one prompt is NaN.
  """
  out = {
    "eval/sampled": sampled.mean,
    "eval/sampled_stderr": sampled.stderr,
    "eval/greedy": greedy.mean,
    "eval/greedy_stderr": greedy.stderr,
    "eval/length": float(sampled.lengths.mean()),
    "eval/truncated_frac": float(sampled.truncated.mean()),
  }
  n = sampled.samples
  values = estimates.by_prompt(sampled, [n])
  more = {
    f"part/{name}": x[~np.isnan(x)]
    for name, x in values["parts"].items()
    if not np.isnan(x).all()
  }
  if n > 1:
    more[f"pass_at_{n}"] = values["pass_at_k"][str(n)]
    if sampled.voted:
      more[f"maj_at_{n}"] = values["maj_at_k"][str(n)]
  for name, x in more.items():
    mean, error = estimates.clustered(x)
    out |= {f"eval/{name}": mean, f"eval/{name}_stderr": error}
  return out


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("workdir", None, "the run, RUN@STEP or RUN@best")
  flags.DEFINE_string(
    "model", None, "in place of a run: a directory, GGUF file or hub id"
  )
  flags.DEFINE_string(
    "results", None, "in place of a policy: a file that --out wrote"
  )
  flags.DEFINE_string(
    "against",
    None,
    "a second policy on the same prompts: RUN, RUN@STEP, RUN@best, a model,"
    " or a file that --out wrote",
  )
  flags.DEFINE_string(
    "out", None, "keep the results, a line per prompt, in this file"
  )
  flags.DEFINE_enum("format", "json", ("json", "table"), "of what is printed")
  config_flags.DEFINE_config_file(
    "config", None, "the task, of a model; of a run: another task than its own"
  )
  flags.DEFINE_string("split", "heldout", "train, tuning or heldout")
  flags.DEFINE_integer(
    "prompts", 0, "prompts to evaluate; 0: all of the split", lower_bound=0
  )
  flags.DEFINE_integer(
    "samples",
    1,
    "per prompt",
    lower_bound=1,
    upper_bound=estimates.MOST_SAMPLES,
  )
  flags.DEFINE_float(
    "temperature", 1.0, "of the sampled completions", lower_bound=0.0
  )


def open_policy(
  c: dict[str, Any], run: str | None, guard: Guard
) -> tuple[Built, Params, Array, dict[str, Any]]:
  """Builds the programs of a configuration and loads the parameters.

  Args:
    c: the configuration, changed in place to what this machine can run.
    run: RUN, RUN@STEP or RUN@best; None: the model that `c` starts from.
    guard: for waits.

  Returns:
    programs, parameters, the root key, and where they came from.
  """
  cli.check_platform("")
  # The run's own mesh may not fit this machine; a batch is rounded up instead
  # of refused, because its rest is filled with repeats.
  mesh = sharding.make_mesh(-1, 1, 1)
  size = c["eval"]["prompts_per_batch"] or c["batch"]["prompts_per_step"]
  c["eval"]["prompts_per_batch"] = -(-size // mesh.size) * mesh.size
  e = config.resolve_plain(c)
  use_cache(c["compile_cache"])
  built = build.build(e, Programs(mesh, guard, Console(file=sys.stderr).say))
  key = jax.device_put(jax.random.key(c["seed"]), built.replicated())
  if run:
    params, lineage = load_parameters(built, run)
  else:
    params, lineage = built.first_parameters(key), {"model": c["model"]["path"]}
  return built, params, key, lineage


# Flags that say which policy is sampled, and how.
OF_A_POLICY = ("workdir", "model", "config", "out", "split", "prompts")
OF_A_POLICY += ("samples", "temperature")


def check_settings(f: Any) -> None:
  """Refuses flags that do not go together.

  Raises:
    UserError: which.
  """
  given = [name for name in OF_A_POLICY if f[name].present]
  if f.results and given:
    raise UserError(
      f"--results=FILE is sampled already: leave out --{', --'.join(given)}"
    )
  if f.results and not results.is_file(f.against or ""):
    raise UserError(
      "--results=FILE needs --against=FILE, another that --out wrote; to"
      " compare with a policy, evaluate that one --against=FILE"
    )
  if f.out:
    results.check_writable(f.out)


def measure(
  c: dict[str, Any],
  run: str | None,
  guard: Guard,
  prompts: int,
  other: Results | None = None,
) -> Results:
  """Evaluates one policy; nothing of it is left on the device.

  Args:
    c: the configuration, changed in place to what this machine can run.
    run: RUN, RUN@STEP or RUN@best; None: the model that `c` starts from.
    guard: for waits.
    prompts: how many of the split, 0 for all.
    other: what it is to be compared with.

  Raises:
    UserError: the split has fewer prompts, or `other` was asked others.
  """
  built, params, key, source = open_policy(c, run, guard)
  with built.runner:
    task, split = built.experiment.task, c["eval"]["split"]
    examples = list(task.split(split))
    if prompts > len(examples):
      raise UserError(
        f"--prompts {prompts} is more than the {len(examples)} examples of"
        f" the {split} split"
      )
    examples = examples[: prompts or len(examples)]
    found = Results(
      source={k: source[k] for k in ("run", "step", "model") if k in source},
      asked=asked(built, examples),
      majority_answer=majority(examples),
      ids=[x.id for x in examples],
      outcomes={},
    )
    if other is not None:
      results.check_same(found, other)
    built.programs.compile_all(ahead.eval_programs(built))
    with memory.explained(built):
      outcomes = {
        how: evaluate(built, params, key, how, examples)
        for how in ("sampled", "greedy")
      }
  return dataclasses.replace(found, outcomes=outcomes)


# Keys of a task that say what is right, where it has them.
GRADING = ("match", "extract", "grade", "success_from")


def asked(built: Built, examples: list[Example]) -> dict[str, Any]:
  """What must be equal where two policies are compared."""
  e = built.experiment
  how, task = e.evaluation.sampled, e.config["task"]
  return {
    "task": e.task.name,
    "split": e.evaluation.split,
    "prompts_hash": results.fingerprint(examples),
    "temperature": how.temperature,
    "top_k": how.top_k,
    "top_p": how.top_p,
    "max_tokens": how.max_tokens,
    "chat": e.config["data"]["chat"],
    "system": e.config["data"]["system"],
    "chat_options": e.config["data"]["chat_options"],
    "grading": {k: task[k] for k in GRADING if task.get(k) is not None},
  }


def measure_all(f: Any, guard: Guard) -> tuple[Results, Results | None]:
  """The policy that the flags name, and the second one where there is one."""
  second = None
  if f.against and results.is_file(f.against):
    second = results.read(f.against)
  if f.results:
    return results.read(f.results), second
  given = None if f.config is None else cli.loaded(f.config)
  c = evaluated_by(f.workdir, f.model, given)
  c["eval"] |= {
    "every": 1,
    "split": f.split,
    "samples": f.samples,
    "temperature": f.temperature,
    "prompts": 1,
  }
  run = f.workdir or (f.model if is_run(f.model) else None)
  other = None
  if f.against and second is None:
    other = compared_by(c, f.against, given is not None)
  first = measure(c, run, guard, f.prompts, second)
  if f.out:
    results.write(f.out, first)
  if other is not None:
    gc.collect()  # the first's programs and parameters, before the second's
    run = f.against if is_run(f.against) else None
    second = measure(other, run, guard, f.prompts, first)
  return first, second


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  check_settings(f)
  with Guard() as guard:
    try:
      first, second = measure_all(f, guard)
    except Preempted:
      leave(cli.PREEMPTED)
  differences = None
  if second is not None:
    differences = results.comparison(first, second)
  if f.format == "table":
    results.show(Console(), first, second, differences)
    return cli.OK
  out = first.report()
  if second is not None:
    out |= {"against": second.report(), "difference": differences}
  print(json.dumps(out, indent=2, allow_nan=False))
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
