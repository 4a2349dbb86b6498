"""From a configuration to records: strict, complete, before any expense.

`resolve` reads every key once and turns the configuration into the records
that the rest takes. Library code has no defaults of its own: a key that is
missing here is an error that names it.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax import (
  adjust,
  curriculum,
  data,
  logprobs,
  model_config,
  named,
  optimizer,
  profile,
  ranges,
  validate,
)
from grpo_jax.algorithm import Algorithm
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.baselines import imitation
from grpo_jax.errors import UserError
from grpo_jax.models.architecture import Model
from grpo_jax.models.pretrained import Pretrained, open_model
from grpo_jax.named import suggest
from grpo_jax.optimizer import OPTIMIZERS, Optimizer
from grpo_jax.sampling import Sampling
from grpo_jax.tasks import TASKS
from grpo_jax.tasks.base import SPLITS, Task
from grpo_jax.tokenizer import Tokenizer, make_tokenizer

# Keys that may change between a run and its resumption: they say where and
# how it is computed or shown, not what.
FREE = (
  "platform",
  "compile_cache",
  "mesh",
  "checkpoint",
  "log",
  "profile",
  "reward.workers",
)


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
class Scoring:
  """How reward functions are run.

  Attributes:
    time_limit: seconds for one completion, where a function has no limit.
    workers: most processes for cpu_bound functions; 0: one a core.
  """

  time_limit: float
  workers: int


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A resolved configuration: records only, nothing built on a device."""

  config: Mapping[str, Any]  # plain nested dict, for storing and comparing
  task: Task
  scoring: Scoring
  tokenizer: Tokenizer
  prompt_width: int  # P
  dropped: Mapping[str, int]  # prompts too long, by split
  pretrained: Pretrained | None  # the model a run starts from
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
  curriculum: curriculum.Rule | None  # what chooses the prompts of RL

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
  return resolve_plain(plain(config))


def plain(config: Any) -> dict[str, Any]:
  """A ConfigDict as it is stored: a nested dict of JSON's own types."""
  return json.loads(json.dumps(config.to_dict()))


def resolve_plain(config: dict[str, Any]) -> Experiment:
  """`resolve`, of a stored configuration: a plain nested dict."""
  try:
    e = _resolve(config)
    check_algorithm(e)
    return e
  except KeyError as error:
    raise UserError(
      f"the configuration lacks the key {error}; start from"
      " experiments.base.get_config()"
    ) from error


def _resolve(c: dict[str, Any]) -> Experiment:
  ranges.check_numbers(flatten(c))
  profile.window(c["profile"])
  warmup_steps = 0 if c["init_from"] else c["warmup"]["steps"]
  task = named.make("task", TASKS, c["task"])
  path = c["model"]["path"]
  pretrained = open_model(path) if path else None
  tokenizer = make_tokenizer(
    c["tokenizer"],
    pretrained.path if pretrained else "",
    chat=c["data"]["chat"],
    system=c["data"]["system"],
    options=c["data"]["chat_options"],
  )
  stop_ids = tokenizer.stop_ids(task.stop)
  task, width, dropped = data.fit_prompts(
    task,
    tokenizer,
    c["data"]["max_prompt_tokens"],
    c["data"]["long_prompts"],
  )
  model, c["lora"] = model_config.make_model(c, pretrained, tokenizer)
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
    scoring=Scoring(**c["reward"]),
    tokenizer=tokenizer,
    prompt_width=width,
    dropped=dropped,
    pretrained=pretrained,
    model=model,
    sampling=sampling,
    batching=make_batching(c["batch"], sampling),
    algorithm=make_algorithm(c["algorithm"], sampling),
    optimizer=made,
    warmup_steps=warmup_steps,
    warmup_prompts=w["prompts_per_step"],
    warmup_algorithm=imitation(),
    warmup_optimizer=optimizer.adamw(warmup_rate),
    evaluation=make_evaluation(c, task, sampling),
    curriculum=make_curriculum(
      c["data"], len(task.split("train")), sampling.group_size
    ),
  )


def make_algorithm(c: Mapping[str, Any], sampling: Sampling) -> Algorithm:
  """The row that `config.algorithm` names, and what is put around it."""
  constructor = named.find("algorithm", c["name"], ALGORITHMS)
  arguments = tuple(inspect.signature(constructor).parameters)
  own, around = adjust.split(c, arguments)
  row = named.make("algorithm", ALGORITHMS, own)
  if not isinstance(row, Algorithm):
    raise UserError(
      f"algorithm {c['name']!r} gives {type(row).__name__}, not an Algorithm"
    )
  return adjust.adjust(row, **around, max_tokens=sampling.max_tokens)


def check_algorithm(e: Experiment) -> None:
  """Refuses an algorithm that means nothing with this task and these sizes."""
  critic = e.algorithm.critic
  if critic is not None and e.model.decoder is not None:
    raise UserError(
      f"{e.algorithm.name} has a critic, which a network of model.module has"
      " not; choose an algorithm without one"
    )
  if e.model.lora is not None and critic is not None and not critic.shared:
    raise UserError(
      "lora with a critic of its own would train a second network; set"
      " algorithm.shared=True"
    )
  validate.check(
    e.algorithm,
    group=e.sampling.group_size,
    prompts=e.batching.prompts_per_step,
    task_parts=len(e.task.parts),
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


def make_curriculum(
  c: Mapping[str, Any], questions: int, group: int
) -> curriculum.Rule | None:
  """The rule of `data.curriculum`, which chooses the prompts of RL."""
  if c["curriculum"] not in ("none", "pass_rate"):
    raise UserError(
      f"data.curriculum {c['curriculum']!r} must be none or pass_rate"
    )
  if c["curriculum"] == "none":
    return None
  return curriculum.Rule(questions, group, c["rest_below"], c["half_life"])


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
        f" {e['split']} split; lower it or make the split larger"
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
    if not {key, key.split(".")[0]} & {*FREE} and a.get(key) != b.get(key)
  ]
