"""Evaluation on held-out prompts, in the loop and as a command.

    python -m grpo_jax.evaluate --workdir=runs/quickstart --samples=8
    python -m grpo_jax.evaluate --model=PATH --config=experiments/smollm2.py

prints one JSON object: success with its standard error, unbiased pass@k,
completion length and truncation, sampled and greedy.
"""

import collections
import dataclasses
import json
import math
import sys
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from grpo_jax import ahead, build, cli, config, memory, rollouts, sharding
from grpo_jax.build import Built
from grpo_jax.checkpoint import parse_run
from grpo_jax.compile import Programs, use_cache
from grpo_jax.console import Console
from grpo_jax.errors import UserError
from grpo_jax.policy import is_run, stored_config
from grpo_jax.preemption import Guard, Preempted, leave
from grpo_jax.stored import load_parameters
from grpo_jax.tasks.base import Example
from grpo_jax.types import Array, Params


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Completions of N prompts, n each.

  Attributes:
    success: [N, n], 0 where not scored: an answer nobody could score is no
      success, and the count is reported beside it.
    scored: [N, n] bool.
    lengths: [N, n] tokens.
    truncated: [N, n] bool.
  """

  success: np.ndarray
  scored: np.ndarray
  lengths: np.ndarray
  truncated: np.ndarray

  @property
  def mean(self) -> float:
    """Mean success over all completions."""
    return float(self.success.mean())

  @property
  def stderr(self) -> float:
    """Standard error of the mean, clustered by prompt (samples share one)."""
    per_prompt = self.success.mean(axis=1)
    if len(per_prompt) < 2:
      return float("nan")
    return float(per_prompt.std(ddof=1) / math.sqrt(len(per_prompt)))


def pass_at_k(samples: int, correct: int, k: int) -> float:
  """1 - C(n-c, k)/C(n, k): unbiased for the chance that one of k succeeds.

  Args:
    samples: n, at least k.
    correct: c of them succeeded.
    k: draws.
  """
  if samples - correct < k:
    return 1.0
  terms = np.arange(samples - correct + 1, samples + 1)
  return float(1.0 - np.prod(1.0 - k / terms))


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
    rows.append(
      (
        scores.success,
        scores.scored,
        host.lengths[:real],
        host.truncated[:real],
      )
    )
  return Outcome(*(np.concatenate(column) for column in zip(*rows)))


def majority(examples: list[Example]) -> float | None:
  """Success of one constant answer, the commonest reference, to all.

  None where no example has a reference answer.
  """
  answers = collections.Counter(x.answer for x in examples if x.answer)
  if not answers:
    return None
  return answers.most_common(1)[0][1] / len(examples)


def eval_metrics(sampled: Outcome, greedy: Outcome) -> dict[str, float]:
  """The names under which an evaluation is logged."""
  return {
    "eval/sampled": sampled.mean,
    "eval/sampled_stderr": sampled.stderr,
    "eval/greedy": greedy.mean,
    "eval/greedy_stderr": greedy.stderr,
    "eval/length": float(sampled.lengths.mean()),
    "eval/truncated_frac": float(sampled.truncated.mean()),
  }


def summary(outcome: Outcome) -> dict[str, Any]:
  """What the command prints of one way of sampling."""
  n = outcome.success.shape[1]
  correct = (outcome.success >= 1).sum(axis=1)
  ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k <= n]
  return {
    "mean": outcome.mean,
    # One prompt has no spread, and JSON no NaN.
    "stderr": None if math.isnan(outcome.stderr) else outcome.stderr,
    "pass_at_k": {
      str(k): float(np.mean([pass_at_k(n, int(c), k) for c in correct]))
      for k in ks
    },
    "prompts": outcome.success.shape[0],
    "samples": n,
    "unscored": int((~outcome.scored).sum()),
    "length_mean": float(outcome.lengths.mean()),
    "truncated_frac": float(outcome.truncated.mean()),
  }


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("workdir", None, "the run, RUN@STEP or RUN@best")
  flags.DEFINE_string(
    "model", None, "in place of a run: a directory, GGUF file or hub id"
  )
  config_flags.DEFINE_config_file(
    "config", None, "the task, of a model; of a run: another task than its own"
  )
  flags.DEFINE_string("split", "heldout", "train, tuning or heldout")
  flags.DEFINE_integer(
    "prompts", 0, "prompts to evaluate; 0: all of the split", lower_bound=0
  )
  flags.DEFINE_integer("samples", 1, "per prompt", lower_bound=1)
  flags.DEFINE_float(
    "temperature", 1.0, "of the sampled completions", lower_bound=0.0
  )


# What a policy brings along when it is evaluated by another configuration.
POLICYS_OWN = ("model", "lora", "tokenizer", "seed")


def configuration(
  run: str | None, model: str | None, given: Any
) -> dict[str, Any]:
  """The configuration to evaluate by.

  Args:
    run: RUN, RUN@STEP, RUN@best or None.
    model: a model to evaluate instead, or None.
    given: a ConfigDict or None, the run's own.

  Raises:
    UserError: not one of run and model, or a model without a configuration.
  """
  if bool(run) == bool(model):
    raise UserError(
      "one of --workdir=RUN (RUN@STEP, RUN@best) and --model=PATH is needed"
    )
  if model and is_run(model):
    run, model = model, None
  plain = None if given is None else config.plain(given)
  if model:
    if plain is None:
      raise UserError(
        "--model needs --config=FILE, which says the task; e.g."
        " --config=experiments/smollm2.py"
      )
    plain["model"]["path"] = model
    return plain
  stored = stored_config(parse_run(run)[0])
  if plain is None:
    return stored
  return plain | {key: stored[key] for key in POLICYS_OWN}


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


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  given = None if f.config is None else cli.loaded(f.config)
  c = configuration(f.workdir, f.model, given)
  run = f.workdir or (f.model if is_run(f.model) else None)
  c["eval"] |= {
    "every": 1,
    "split": f.split,
    "samples": f.samples,
    "temperature": f.temperature,
    "prompts": 1,
  }
  with Guard() as guard:
    try:
      built, params, key, lineage = open_policy(c, run, guard)
      examples = list(built.experiment.task.split(f.split))
      if f.prompts > len(examples):
        raise UserError(
          f"--prompts {f.prompts} is more than the {len(examples)} examples of"
          f" the {f.split} split"
        )
      examples = examples[: f.prompts or len(examples)]
      built.programs.compile_all(ahead.eval_programs(built))
      with memory.explained(built):
        outcomes = {
          how: summary(evaluate(built, params, key, how, examples))
          for how in ("sampled", "greedy")
        }
    except Preempted:
      leave(cli.PREEMPTED)
  out = {
    **{k: lineage[k] for k in ("run", "step", "model") if k in lineage},
    "task": built.experiment.task.name,
    "split": f.split,
    "temperature": f.temperature,
    "majority_answer": majority(examples),
    **outcomes,
  }
  print(json.dumps(out, indent=2, allow_nan=False))
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
