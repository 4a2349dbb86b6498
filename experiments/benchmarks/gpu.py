"""One GPU, under five minutes: a step at the shape of Qwen2.5-0.5B.

    python -m experiments.benchmarks.gpu

Random weights, 16 prompts of 256 tokens, G = 16, completions of 512 tokens, all
forced. Prints one JSON line: seconds of the step and its phases, the update's
model FLOP utilisation, and the decode loop's share of the memory bandwidth's
bound. `--size=tiny` runs the same code in seconds on a CPU, where the two
shares mean nothing. NOT RUN on a GPU by this project yet.

A model FLOP is 2 a parameter and token forwards, 4 backwards; attention adds 4
(times 3) a layer, head dimension and pair of positions. Positions are those
that are computed, a prompt's once for its group. The decode bound reads all
weights and the mean cache once a token.
"""

import json
from typing import Any

import jax
from absl import flags

from experiments.benchmarks import random_models, step, workloads
from grpo_jax import cli
from grpo_jax.models import families, weight_table
from grpo_jax.models.architecture import Architecture

# Peak dense bfloat16 FLOP/s and bytes/s of a device kind, vendors' figures.
PEAKS = {"NVIDIA H200": (989e12, 4.8e12), "NVIDIA H100": (989e12, 3.35e12)}
SIZES = {
  "qwen": (workloads.Workload(16, 16, 256, 512, "qwen", micro=2), "bf16"),
  "tiny": (workloads.Workload(2, 4, 16, 8, "tiny", micro=1), "f32"),
}


def flops(arch: Architecture, w: workloads.Workload) -> float:
  """Model FLOPs of one update."""
  b, g, p, t = w.prompts, w.group, w.prompt, w.completion
  tokens = b * (p + g * t)
  # The head reads completions alone; the input table is a lookup.
  table = arch.vocab * arch.embed
  body = weight_table.parameter_count(arch) - table * (1 if arch.tied else 2)
  products = 6 * (body * tokens + table * b * g * t)
  pairs = b * (p * p / 2 + g * t * (p + t / 2))
  return products + 12 * arch.layers * arch.heads * arch.head_dim * pairs


def decode_bytes(arch: Architecture, w: workloads.Workload, item: int) -> float:
  """Bytes that decoding has to read, all tokens of a step."""
  kv = 2 * arch.layers * arch.kv_heads * arch.head_dim * item
  weights = weight_table.parameter_count(arch) * item
  prompts = w.prompts * w.prompt  # a prompt's once for its group
  own = w.prompts * w.group * w.completion / 2
  return w.completion * (weights + kv * (prompts + own))


def shares(
  found: dict[str, Any], arch: Architecture, w: workloads.Workload, item: int
) -> dict[str, Any]:
  """Utilisation of the update and of the bandwidth, where peaks are known."""
  peak = next((v for k, v in PEAKS.items() if k in found["device"]), None)
  work, moved = flops(arch, w), decode_bytes(arch, w, item)
  out = {"update_flops": work, "decode_bytes": moved}
  if peak:
    out["update_mfu"] = work / found["update_s"] / peak[0]
    out["decode_bandwidth_frac"] = moved / peak[1] / found["rollout_s"]
  return out


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_enum("size", "qwen", list(SIZES), "of the model and the batch")
  flags.DEFINE_integer("steps", 3, "measured", lower_bound=1)


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  workload, dtype = SIZES[f.size]
  workloads.WORKLOADS["gpu"] = workload
  found = step.run("gpu", dtype, 1, f.steps)
  config = random_models.MODELS[workload.model]
  arch = families.read_config(config, random_models.WORDS)
  item = jax.numpy.dtype(step.DTYPES[dtype]).itemsize
  print(json.dumps(found | shares(found, arch, workload, item), default=float))
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
