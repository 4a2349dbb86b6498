"""Runs other trainers and this one in turn on the same work; prints ratios.

    python -m experiments.benchmarks.compare --peers=DIR --workload=W1,W3

DIR holds `run_trl.sh` and `run_tunix.sh`, which print one JSON line each. A
ratio is the peer's seconds over ours, each side's best step. One line a side,
then a table; timings on a machine with other work are noise: look at `load1`
and `runq_wait_s`.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any

from absl import flags

from experiments.benchmarks import workloads
from grpo_jax import cli
from grpo_jax.console import Console
from grpo_jax.errors import UserError

PEERS = {"trl": "run_trl.sh", "tunix": "run_tunix.sh"}
# TRL's plain 'bf16' is mixed precision; the same work is bfloat16 weights.
THEIR_DTYPE = {("trl", "bf16"): "bf16w"}
SHOWN = ("step_s", "rollout_s", "score_s", "update_s", "rss_gib", "load1")


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("peers", None, "directory of the other trainers' scripts")
  flags.DEFINE_list("workload", "W1", "one or more of the workloads")
  flags.DEFINE_enum("dtype", "f32", ["f32", "bf16"], "of matrix products")
  flags.DEFINE_integer("steps", 3, "of ours, measured", lower_bound=1)
  flags.DEFINE_list("only", "trl,tunix", "peers to run")


def line_of(command: list[str], what: str) -> dict[str, Any]:
  """The last JSON line that a command prints.

  Raises:
    UserError: it printed none.
  """
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
  if done.returncode or not lines:
    raise UserError(
      f"{what} printed no result (exit code {done.returncode}):"
      f" {' '.join(command)}"
    )
  print(lines[-1], flush=True)
  return json.loads(lines[-1])


def ours(name: str, dtype: str, steps: int, first: str) -> dict[str, Any]:
  """This trainer, started as the others are."""
  own = [sys.executable, "-m", "experiments.benchmarks.step"]
  flags_ = [f"--workload={name}", f"--dtype={dtype}", f"--steps={steps}"]
  return line_of([first, *own, *flags_] if first else own + flags_, "grpo_jax")


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  if not f.peers or not pathlib.Path(f.peers).is_dir():
    raise UserError("--peers=DIR must hold run_trl.sh and run_tunix.sh")
  for name in f.workload:
    workloads.named(name)
  if unknown := set(f.only) - PEERS.keys():
    raise UserError(f"unknown: {', '.join(sorted(unknown))}")
  where = pathlib.Path(f.peers)
  priority = where / "prio.sh"
  first = str(priority) if priority.exists() else ""
  rows = []
  for name in f.workload:
    found = {"grpo_jax": ours(name, f.dtype, f.steps, first)}
    for peer in f.only:
      script = str(where / PEERS[peer])
      dtype = THEIR_DTYPE.get((peer, f.dtype), f.dtype)
      found[peer] = line_of(["bash", script, name, "--dtype", dtype], peer)
    base = found["grpo_jax"]["step_s"]
    rows += [
      (
        f"{name} {f.dtype}",
        peer,
        f"{x['step_s'] / base:.2f}x",
        *(f"{x[key]:.2f}" if key in x else "" for key in SHOWN),
      )
      for peer, x in found.items()
    ]
  Console().table("Steps", ("work", "trainer", "step ratio", *SHOWN), rows)
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
