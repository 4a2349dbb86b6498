"""From a configuration to records: strict, complete, before any expense.

`resolve` reads every key once and turns the configuration into the records
that the rest takes. Library code has no defaults of its own: a key that is
missing here is an error that names it.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax import data, logprobs, named, optimizer
from grpo_jax.algorithms import ALGORITHMS, Algorithm, imitation
from grpo_jax.errors import UserError
from grpo_jax.models.architecture import Architecture, Model
from grpo_jax.named import suggest
from grpo_jax.optimizer import OPTIMIZERS, Optimizer
from grpo_jax.sampling import Sampling
from grpo_jax.tasks import TASKS
from grpo_jax.tasks.base import SPLITS, Task
from grpo_jax.tokenizer import Tokenizer, make_tokenizer

# Keys that may change between a run and its resumption: they say where and
# how it is computed or shown, not what.
FREE = ("platform", "compile_cache", "mesh", "checkpoint", "log")

# Rows of the embedding are rounded up, so that meshes divide them.
VOCAB_MULTIPLE = 64


@dataclasses.dataclass(frozen=True)
class Batching:
  """Rollout batch ⊇ mini-batch ⊇ micro-batch, each in whole prompts.

  Attributes:
    prompts_per_step: the rollout batch.
    prompts_per_update: a mini-batch, one optimizer step.
    micro_batch_prompts: one gradient computation.
    epochs: passes over a rollout.
    slabs: every slab plan that an update may use.
  """

  prompts_per_step: int
  prompts_per_update: int
  micro_batch_prompts: int
  epochs: int
  slabs: tuple[logprobs.Slabs, ...]

  @property
  def minibatches(self) -> int:
    """Mini-batches in a rollout batch."""
    return self.prompts_per_step // self.prompts_per_update

  @property
  def updates_per_step(self) -> int:
    """Optimizer steps per rollout."""
    return self.minibatches * self.epochs

  @property
  def micro_batches(self) -> int:
    """Gradient computations in an optimizer step."""
    return self.prompts_per_update // self.micro_batch_prompts


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What is evaluated, how often, and how it is sampled."""

  every: int
  split: str
  prompts: int
  prompts_per_batch: int
  sampled: Sampling
  greedy: Sampling


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A resolved configuration: records only, nothing built on a device."""

  config: Mapping[str, Any]  # plain nested dict, for storing and comparing
  task: Task
  tokenizer: Tokenizer
  prompt_width: int  # P
  model: Model
  sampling: Sampling
  batching: Batching
  algorithm: Algorithm
  optimizer: Optimizer
  warmup_steps: int
  warmup_prompts: int
  warmup_algorithm: Algorithm
  warmup_optimizer: Optimizer
  evaluation: Evaluation

  @property
  def needs_old_scores(self) -> bool:
    """Whether a rollout serves more than one update, so that the policy that
    sampled it must be scored before the first. Otherwise no pass is run."""
    return self.batching.updates_per_step > 1

  @property
  def total_steps(self) -> int:
    """Steps of both phases, one counter."""
    return self.warmup_steps + self.config["steps"]


def resolve(config: Any) -> Experiment:
  """Turns a ConfigDict into records, or says what is wrong with it.

  Args:
    config: as `experiments.base.get_config` declares it.

  Raises:
    UserError: one line naming the key, its value and the mend.
  """
  return resolve_plain(json.loads(json.dumps(config.to_dict())))


def resolve_plain(config: dict[str, Any]) -> Experiment:
  """`resolve`, of a stored configuration: a plain nested dict."""
  try:
    return _resolve(config)
  except KeyError as error:
    raise UserError(
      f"the configuration lacks the key {error}; start from"
      " experiments.base.get_config()"
    ) from error


def _resolve(c: dict[str, Any]) -> Experiment:
  check_numbers(c)
  warmup_steps = 0 if c["init_from"] else c["warmup"]["steps"]
  task = named.make("task", TASKS, c["task"])
  tokenizer = make_tokenizer(c["tokenizer"])
  stop_ids = tokenizer.stop_ids(task.stop)
  width = data.prompt_width(task, tokenizer, c["data"]["max_prompt_tokens"])
  model = make_model(c["model"], tokenizer.vocab_size)
  sampling = Sampling(
    stop_ids=stop_ids, pad_id=tokenizer.pad_id, **c["sampling"]
  )
  o, w = dict(c["optimizer"]), c["warmup"]
  name = o.pop("name")
  keys = ("learning_rate", "warmup_steps", "decay", "final_fraction")
  rate = _schedule(
    "optimizer", {k: o.pop(k) for k in keys}, warmup_steps, c["steps"]
  )
  warmup_rate = _schedule(
    "warmup", {k: w[k] for k in keys}, 0, max(w["steps"], 1)
  )
  made = named.make("optimizer", OPTIMIZERS, {"name": name, **o}, rate)
  return Experiment(
    config=c,
    task=task,
    tokenizer=tokenizer,
    prompt_width=width,
    model=model,
    sampling=sampling,
    batching=make_batching(c["batch"], sampling),
    algorithm=named.make("algorithm", ALGORITHMS, c["algorithm"]),
    optimizer=made,
    warmup_steps=warmup_steps,
    warmup_prompts=w["prompts_per_step"],
    warmup_algorithm=imitation(),
    warmup_optimizer=optimizer.adamw(warmup_rate),
    evaluation=make_evaluation(c, task, sampling),
  )


def check_demonstrations(e: Experiment) -> None:
  """Encodes the demonstrations of the warm-up's first pass over its examples.

  Raises:
    UserError: the task has none, or one is longer than a completion may be.
  """
  if not e.warmup_steps:
    return
  seed, size = e.config["seed"], e.warmup_prompts
  stream = data.Stream(e.task.split("train"), seed, "warmup")
  for step in range(min(e.warmup_steps, -(-len(stream.examples) // size))):
    batch = stream.batch(step, size)
    data.encode_demonstrations(
      e.task, *batch, e.tokenizer, seed, e.sampling.max_tokens
    )


def make_model(c: Mapping[str, Any], vocab: int) -> Model:
  """The model record of `config.model`, for a tokenizer's vocabulary."""
  c = dict(c)
  how = {k: c.pop(k) for k in ("dtype", "remat", "logit_elements")}
  if how["dtype"] not in ("float32", "bfloat16"):
    raise UserError(f"model.dtype {how['dtype']!r} must be float32 or bfloat16")
  if c["heads"] % c["kv_heads"]:
    raise UserError(
      f"model.kv_heads {c['kv_heads']} does not divide model.heads {c['heads']}"
    )
  if c["head_dim"] % 2:
    raise UserError(
      f"model.head_dim {c['head_dim']} must be even: rotary positions turn"
      " pairs"
    )
  rows = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
  return Model(Architecture(vocab=rows, real_vocab=vocab, **c), **how)


def make_batching(c: Mapping[str, Any], sampling: Sampling) -> Batching:
  """The batch arithmetic of `config.batch`; 0 takes the next larger batch."""
  step = c["prompts_per_step"]
  update = c["prompts_per_update"] or step
  micro = c["micro_batch_prompts"] or update
  _divides("batch.prompts_per_update", update, "batch.prompts_per_step", step)
  _divides(
    "batch.micro_batch_prompts", micro, "prompts of a mini-batch", update
  )
  g, t = sampling.group_size, sampling.max_tokens
  if c["slabs"] > g or c["slab_lengths"] > t:
    raise UserError(
      f"batch.slabs {c['slabs']} and batch.slab_lengths {c['slab_lengths']}"
      f" must not exceed sampling.group_size {g} and sampling.max_tokens {t}"
    )
  slabs = logprobs.plans(g, t, c["slabs"], c["slab_lengths"])
  return Batching(step, update, micro, c["epochs"], slabs)


def make_evaluation(
  c: Mapping[str, Any], task: Task, sampling: Sampling
) -> Evaluation:
  """Evaluation settings; its prompts must exist."""
  e = c["eval"]
  if e["split"] not in SPLITS:
    raise UserError(
      f"unknown eval.split {e['split']!r}{suggest(e['split'], SPLITS)};"
      f" splits are {', '.join(SPLITS)}"
    )
  if e["every"]:
    found = len(task.split(e["split"]))
    if e["prompts"] > found:
      raise UserError(
        f"eval.prompts {e['prompts']} is more than the {found} examples of the"
        f" {e['split']} split; lower it or raise task.{e['split']}"
      )
  sampled = dataclasses.replace(
    sampling,
    group_size=e["samples"],
    max_tokens=e["max_tokens"] or sampling.max_tokens,
    temperature=e["temperature"],
    top_k=e["top_k"],
    top_p=e["top_p"],
    min_p=0.0,
  )
  return Evaluation(
    every=e["every"],
    split=e["split"],
    prompts=e["prompts"],
    prompts_per_batch=e["prompts_per_batch"] or c["batch"]["prompts_per_step"],
    sampled=sampled,
    greedy=dataclasses.replace(sampled, group_size=1, temperature=0.0),
  )


def _schedule(
  group: str, c: Mapping[str, Any], start: int, steps: int
) -> Callable[[Any], Any]:
  if c["decay"] not in ("constant", "linear", "cosine"):
    raise UserError(
      f"{group}.decay {c['decay']!r} must be constant, linear or cosine"
    )
  peak = c["learning_rate"]
  rest = {k: v for k, v in c.items() if k != "learning_rate"}
  return optimizer.schedule(peak, start=start, steps=steps, **rest)


def _divides(name: str, part: int, of: str, whole: int) -> None:
  if whole % part:
    raise UserError(f"{name} {part} does not divide {of} {whole}")


# Key -> smallest value, for those that are set; fractions are checked against
# 1 as well.
_AT_LEAST = {
  "seed": 0,
  "steps": 0,
  "mesh.fsdp": 1,
  "mesh.tensor": 1,
  "data.max_prompt_tokens": 0,
  "model.layers": 1,
  "model.embed": 1,
  "model.heads": 1,
  "model.kv_heads": 1,
  "model.head_dim": 2,
  "model.ffn": 1,
  "model.logit_elements": 1,
  "batch.prompts_per_step": 1,
  "batch.prompts_per_update": 0,
  "batch.micro_batch_prompts": 0,
  "batch.epochs": 1,
  "batch.slabs": 1,
  "batch.slab_lengths": 1,
  "sampling.group_size": 2,
  "sampling.max_tokens": 1,
  "sampling.top_k": 0,
  "sampling.max_support": 1,
  "sampling.temperature": 0,
  "sampling.min_p": 0,
  "algorithm.beta": 0,
  "algorithm.clip_low": 0,
  "algorithm.clip_high": 0,
  "algorithm.ddof": 0,
  "algorithm.epsilon": 0,
  "optimizer.learning_rate": 0,
  "optimizer.eps": 0,
  "optimizer.weight_decay": 0,
  "optimizer.clip_norm": 0,
  "optimizer.warmup_steps": 0,
  "warmup.steps": 0,
  "warmup.prompts_per_step": 1,
  "warmup.learning_rate": 0,
  "warmup.warmup_steps": 0,
  "eval.every": 0,
  "eval.prompts": 1,
  "eval.samples": 1,
  "eval.prompts_per_batch": 0,
  "eval.temperature": 0,
  "eval.top_k": 0,
  "eval.max_tokens": 0,
  "checkpoint.every": 0,
  "checkpoint.keep_last": 1,
  "log.every": 1,
}
_FRACTIONS = (
  "sampling.top_p",
  "sampling.min_p",
  "eval.top_p",
  "optimizer.b1",
  "optimizer.b2",
  "optimizer.momentum",
  "optimizer.final_fraction",
  "warmup.final_fraction",
)


def check_numbers(c: Mapping[str, Any]) -> None:
  """Ranges of every number, by key.

  Raises:
    UserError: naming the key, its value and the bound.
  """
  flat = flatten(c)
  for key, value in flat.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise UserError(f"{key} {value} must be finite")
  for key, low in _AT_LEAST.items():
    if flat[key] is not None and flat[key] < low:
      raise UserError(f"{key} {flat[key]} must be at least {low}")
  for key in _FRACTIONS:
    if flat[key] is not None and not 0 <= flat[key] <= 1:
      raise UserError(f"{key} {flat[key]} must be between 0 and 1")
  for key in ("sampling.top_p", "eval.top_p"):
    if flat[key] == 0:
      raise UserError(f"{key} 0 keeps nothing; 1 keeps all")
  if flat["sampling.temperature"] == 0:
    raise UserError(
      "sampling.temperature 0 draws G equal completions, which train nothing;"
      " set it above 0"
    )
  if flat["seed"] >= 2**32:
    raise UserError(f"seed {flat['seed']} must be below {2**32}")


def flatten(c: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested keys joined by dots: {'a': {'b': 1}} -> {'a.b': 1}."""
  out = {}
  for key, value in c.items():
    if isinstance(value, Mapping):
      out.update(flatten(value, f"{prefix}{key}."))
    else:
      out[prefix + key] = value
  return out


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Keys that differ and may not, as 'key: old -> new'."""
  a, b = flatten(old), flatten(new)
  return [
    f"{key}: {a.get(key)!r} -> {b.get(key)!r}"
    for key in sorted({*a, *b})
    if key.split(".")[0] not in FREE and a.get(key) != b.get(key)
  ]
