"""What a run will do, in words and numbers, before it does it."""

import inspect

import jax

from grpo_jax import __version__, describe, validate
from grpo_jax.algorithm import Algorithm
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.config import Experiment
from grpo_jax.console import Console
from grpo_jax.models import decoders, weight_table


def preset(e: Experiment) -> Algorithm | None:
  """The named row as its paper has it; None for one of the user's own."""
  constructor = ALGORITHMS.get(e.config["algorithm"]["name"])
  if constructor is None:
    return None
  given = e.config["algorithm"]
  needed = {
    k: given[k]
    for k, p in inspect.signature(constructor).parameters.items()
    if p.default is p.empty
  }
  return constructor(**needed)


def plan(e: Experiment, mesh: jax.sharding.Mesh) -> list[tuple[str, str]]:
  """The resolved run as (what, how) rows."""
  b, s, arch = e.batching, e.sampling, e.model.arch
  rows = b.prompts_per_step * s.group_size
  params = decoders.parameter_count(e.model)
  # Policy, two moments, reference.
  copies = 3 + (e.algorithm.reference is not None)
  size, what = copies * params * 4, f"{params:,} parameters"
  if e.model.lora is not None:
    lora = e.model.lora
    trained = weight_table.adapter_count(arch, lora)
    frozen = params * e.model.compute_dtype.itemsize
    size = copies * trained * 4 + frozen
    what += (
      f", {trained:,} more trained: adapters of rank {lora.rank}, alpha"
      f" {lora.alpha:g}, on {', '.join(lora.targets)}"
    )
  shape = f"{arch.layers} layers of {arch.embed}"
  if e.model.decoder is not None:
    shape = e.config["model"]["module"]
  if arch.experts:
    idle = arch.experts - arch.experts_per_token
    idle *= 3 * arch.layers * arch.embed * arch.ffn
    what += (
      f", {params - idle:,} of them active in a token:"
      f" {arch.experts_per_token} of {arch.experts} experts"
    )
  phases = f"{e.config['steps']} of {e.algorithm.name}"
  if e.warmup_steps:
    phases = f"{e.warmup_steps} of imitation, then {phases}"
  if e.config["init_from"]:
    phases += f", from {e.config['init_from']} (no warm-up)"
  splits = ", ".join(f"{len(v):,} {k}" for k, v in e.task.splits.items())
  if any(e.dropped.values()):
    lost = ", ".join(f"{n:,} {k}" for k, n in e.dropped.items())
    limit = e.config["data"]["max_prompt_tokens"]
    splits += f"; left out as longer than {limit} tokens: {lost}"
  axes = " x ".join(f"{k} {n}" for k, n in mesh.shape.items())
  how = f"temperature {s.temperature}"
  for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
    if getattr(s, name) != off:
      how += f", {name} {getattr(s, name)}"
  return [
    ("grpo_jax", f"{__version__}, jax {jax.__version__}"),
    (
      "devices",
      f"{jax.device_count()} {jax.devices()[0].device_kind}: {axes}",
    ),
    (
      "model",
      f"{what}; {shape};"
      f" {e.model.dtype} products, float32 weights;"
      f" {size / 2**20:,.1f} MiB of weights and moments",
    ),
    ("task", f"{e.task.name}: {splits}"),
    ("steps", phases),
    *curriculum_rows(e),
    *describe.rows(e.algorithm, preset(e)),
    (
      "rollout batch",
      f"{b.prompts_per_step} prompts x {s.group_size} = {rows} completions,"
      f" at most {rows * s.max_tokens:,} tokens a step; {how}",
    ),
    (
      "mini-batch",
      f"{b.prompts_per_update} prompts an optimizer step;"
      f" {b.updates_per_step} a rollout ({b.minibatches} mini-batches x"
      f" {b.epochs} epochs)",
    ),
    (
      "micro-batch",
      f"{b.micro_batch_prompts} prompts a gradient; {b.micro_batches} an"
      " optimizer step",
    ),
    (
      "shapes",
      f"P = {e.prompt_width}, T = {s.max_tokens}; {len(b.slabs)} slab"
      f" plan{'s' if len(b.slabs) > 1 else ''}",
    ),
  ]


def curriculum_rows(e: Experiment) -> list[tuple[str, str]]:
  """What the curriculum will do, in one row; none without one."""
  rule = e.curriculum
  if rule is None:
    return []
  draws = e.config["steps"] * e.batching.prompts_per_step
  most = (rule.group - 1) / (rule.group + 1)
  *first, last = (f"{x:.3g}" for x in rule.gaps(8))
  return [
    (
      "curriculum",
      f"pass_rate: a question rests while its next group of {rule.group} is"
      f" mixed with a chance below {rule.rest_below:g} (never asked:"
      f" {most:.2g}); one solved always or never is asked again after"
      f" {', '.join(first[:3])}, at last every {last} epochs of"
      f" {rule.questions:,} draws; evidence halves in {rule.half_life:g}. The"
      f" run has {draws / rule.questions:.3g} epochs",
    )
  ]


def print_plan(
  console: Console, e: Experiment, mesh: jax.sharding.Mesh
) -> None:
  """Prints the plan as a table."""
  console.table("This run", ("", ""), plan(e, mesh))
  rule, draws = e.curriculum, e.config["steps"] * e.batching.prompts_per_step
  if rule is not None and draws < 2 * rule.questions:
    console.say(
      f"note: {draws:,} draws of {rule.questions:,} questions: few are asked"
      " twice, so the curriculum has little to go by"
    )
  updates = e.batching.updates_per_step
  group = e.sampling.group_size
  warnings = validate.warnings(e.algorithm, updates=updates, group=group)
  for text in (*e.task.notes, *warnings):
    console.say(f"note: {text}")
