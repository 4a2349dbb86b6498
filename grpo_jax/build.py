"""From records to compiled programs: what a process needs to run steps.

Everything that touches a device is bound here once. The programs close over
records only; arrays are their arguments.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import data, sharding, traced
from grpo_jax.compile import Program, Programs
from grpo_jax.config import Experiment
from grpo_jax.errors import UserError
from grpo_jax.logprobs import Slabs
from grpo_jax.models import peft
from grpo_jax.models.decoders import decoder
from grpo_jax.rewards.runner import Runner
from grpo_jax.types import (
  Array,
  Params,
  Prompts,
  TrainState,
  merge,
  policy,
)


@dataclasses.dataclass(frozen=True)
class Built:
  """The programs of one experiment on one mesh.

  Attributes:
    experiment: the records they were made from.
    runner: calls the task's reward functions.
    programs: counts and announces compilations; holds mesh and guard.
    shapes: (state before the update of each phase): 'warmup' and 'rl', the
      abstract train states with their shardings.
    init: key -> parameters, born sharded.
    adapt: params, key -> them with fresh adapters, where there are any.
    begin: {phase: params, key, step -> state} with a fresh optimizer; params
      are donated.
    imitate: state, prompts, ids, lengths -> state, metrics.
    sample: params, prompts, key, step -> rollout.
    baseline: params, prompts, key, step -> the likeliest completion of each.
    score: {slabs: params, rollout -> log-probs}.
    value: params, rollout -> a critic's values.
    pick: two rollouts, index -> chosen groups of them.
    advantage: rewards, rollout, scores, multiple of the KL -> batch.
    minibatch: batch, index -> batch.
    select: params, mini-batch -> it, with the tokens a part singles out.
    update: {slabs: state, batch, ends_step -> state, metrics}.
    zeros: parameters, reference, micro-batch -> gradients and sums of none.
    take: mini-batch, prompts to keep -> micro-batch, weights untouched.
    cut: mini-batch, i -> its i-th micro-batch; no row leaves its device.
    accumulate: {slabs: parameters, reference, micro-batch, total -> total}.
    apply: state, total, ends_step -> state, metrics.
    evaluators: {'sampled' | 'greedy': params, prompts, key -> rollout}.
  """

  experiment: Experiment
  runner: Runner
  programs: Programs
  shapes: dict[str, TrainState]
  init: Program
  adapt: Program
  begin: dict[str, Program]
  imitate: Program
  sample: Program
  baseline: Program
  score: dict[Slabs, Program]
  value: Program
  pick: Program
  advantage: Program
  minibatch: Program
  select: Program
  update: dict[Slabs, Program]
  zeros: Program
  take: Program
  cut: Program
  accumulate: dict[Slabs, Program]
  apply: Program
  evaluators: dict[str, Program]

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh of every program."""
    return self.programs.mesh

  def to_device(self, tree: Any) -> Any:
    """Host arrays of a batch, split by prompts over the mesh."""
    return sharding.to_device(tree, self.mesh)

  def prompts(self, examples: list, ordinals: np.ndarray) -> Prompts:
    """Encodes examples and puts them on the mesh."""
    e = self.experiment
    arrays = data.encode_prompts(
      examples, ordinals, e.tokenizer, e.prompt_width
    )
    return self.to_device(Prompts(**arrays))

  def first_parameters(self, key: Array) -> Params:
    """Those of the model a run starts from, or drawn from the key."""
    e = self.experiment
    if e.pretrained is None:
      params = self.init(key)
    else:
      where = jax.tree.map(lambda x: x.sharding, self.params_target())
      params = e.pretrained.load(e.model.arch, where)
    return self.adapted(params, key)

  def adapted(self, params: Params, key: Array) -> Params:
    """A network's parameters with the adapters that a run begins with."""
    e = self.experiment
    if e.model.lora is None:
      return params
    params = self.adapt(params, key)
    if not e.config["lora"]["path"]:
      return params
    where = jax.tree.map(lambda x: x.sharding, self.params_target())
    return merge(params, peft.load(e.config["lora"]["path"], e.model, where))

  def params_target(self) -> Params:
    """Abstract parameters of the policy with their shardings."""
    return policy(self.shapes["rl"].params)

  @property
  def ways(self) -> int:
    """Devices that prompts are split over."""
    return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

  def replicated(self) -> jax.sharding.NamedSharding:
    """The sharding of what every device holds."""
    return jax.sharding.NamedSharding(self.mesh, jax.P())

  def put_scalar(self, value: int) -> Array:
    """An int32 that every device holds."""
    return self.to_device(np.int32(value))


def check_mesh(e: Experiment, mesh: jax.sharding.Mesh) -> None:
  """Refuses a mesh that does not divide the batches or the model.

  Raises:
    UserError: the first that does not, with both numbers.
  """
  sizes = dict(mesh.shape)
  ways = sizes["data"] * sizes["fsdp"]
  b = e.batching
  counts = {
    "batch.prompts_per_step": b.prompts_per_step,
    "batch.prompts_per_update": b.prompts_per_update,
    "batch.micro_batch_prompts": b.micro_batch_prompts,
  }
  if e.warmup_steps:
    counts["warmup.prompts_per_step"] = e.warmup_prompts
  if e.evaluation.every:
    counts["eval.prompts_per_batch"] = e.evaluation.prompts_per_batch
  for key, count in counts.items():
    if count % ways:
      raise UserError(
        f"{key} {count} is not divisible by the {ways} ways that prompts are"
        f" split (data {sizes['data']} x fsdp {sizes['fsdp']})"
      )
  if e.model.decoder is None:
    _check_tensor(e, sizes)


def _check_tensor(e: Experiment, sizes: dict[str, int]) -> None:
  """The part of `check_mesh` about the model's own sizes."""
  arch, tensor = e.model.arch, sizes["tensor"]
  for key in ("heads", "experts" if arch.experts else "ffn"):
    if getattr(arch, key) % tensor:
      raise UserError(
        f"model.{key} {getattr(arch, key)} is not divisible by mesh.tensor"
        f" {tensor}"
      )
  if arch.embed % sizes["fsdp"]:
    raise UserError(
      f"model.embed {arch.embed} is not divisible by mesh.fsdp {sizes['fsdp']}"
    )
  if arch.vocab % tensor:
    raise UserError(
      f"the {arch.vocab} rows of the vocabulary are not divisible by"
      f" mesh.tensor {tensor}"
    )
  if arch.kv_heads % tensor and not e.config["mesh"]["replicate_kv"]:
    raise UserError(
      f"model.kv_heads {arch.kv_heads} is not divisible by mesh.tensor"
      f" {tensor}; set mesh.replicate_kv to keep them whole on each device"
    )


def build(e: Experiment, programs: Programs) -> Built:
  """Binds every program; compiles nothing yet."""
  mesh, model = programs.mesh, e.model
  weight_axes = decoder(model).axes(model)

  def shardings(abstract: Any) -> Any:
    return sharding.state_sharding(mesh, abstract, weight_axes)

  def first(abstract: tuple) -> tuple:
    return shardings(abstract[0]), shardings(abstract[1])

  begins = {
    "warmup": traced.begin(e.warmup_optimizer, e.warmup_algorithm),
    "rl": traced.begin(e.optimizer, e.algorithm),
  }
  init, adapt = traced.init(e), traced.adapt(e)
  b, s = e.batching, e.sampling
  size = f"B={b.prompts_per_step} G={s.group_size} P={e.prompt_width}"
  size += f" T={s.max_tokens}"
  micro = size.replace(f"={b.prompts_per_step} ", f"={b.micro_batch_prompts} ")
  return Built(
    experiment=e,
    runner=Runner(e.task, e.scoring.time_limit, e.scoring.workers),
    programs=programs,
    shapes={
      phase: _state(fn, lambda key: adapt(init(key), key), shardings)
      for phase, fn in begins.items()
    },
    init=programs.bind("init", init, out=shardings),
    # Donated where the dtype stays, so that no second copy is made.
    adapt=programs.bind(
      "adapters",
      adapt,
      donate=(0,) if model.dtype == "float32" else (),
      out=shardings,
    ),
    begin={
      phase: programs.bind(
        "optimizer", fn, shapes=phase, donate=(0,), out=shardings
      )
      for phase, fn in begins.items()
    },
    imitate=programs.bind(
      "imitate",
      traced.imitate(e),
      shapes=f"B={e.warmup_prompts} P={e.prompt_width} T={s.max_tokens}",
      donate=(0,),
      out=first,
    ),
    sample=programs.bind("sample", traced.sample(e, s, "sample"), shapes=size),
    baseline=programs.bind(
      "baseline", traced.sample(e, s.likeliest(), "sample"), shapes=size
    ),
    score={
      plan: programs.bind(
        "score", traced.score(e, plan), shapes=f"{size} {_words(plan)}"
      )
      for plan in b.slabs
    },
    value=programs.bind("value", traced.value(e), shapes=size),
    pick=programs.bind("pick", traced.pick, shapes=size),
    advantage=programs.bind("advantage", traced.advantage(e), shapes=size),
    minibatch=programs.bind("minibatch", traced.minibatch(e), shapes=size),
    select=programs.bind("select", traced.select(e), shapes=size),
    update={
      plan: programs.bind(
        "update",
        traced.update(e, plan),
        shapes=f"{size} {_words(plan)}",
        donate=(0,),
        out=first,
      )
      for plan in b.slabs
    },
    zeros=programs.bind("zeros", traced.zeros(e), out=shardings),
    take=programs.bind("take", traced.take, shapes=micro),
    cut=programs.bind("cut", traced.cut(e), shapes=micro),
    accumulate={
      plan: programs.bind(
        "gradients",
        traced.accumulate(e, plan),
        shapes=f"{micro} {_words(plan)}",
        donate=(4,),
        out=shardings,
      )
      for plan in b.slabs
    },
    apply=programs.bind("apply", traced.apply(e), donate=(0,), out=first),
    evaluators={
      name: programs.bind(
        f"eval {name}",
        traced.sample(e, how, "eval"),
        shapes=f"B={e.evaluation.prompts_per_batch} G={how.group_size}"
        f" P={e.prompt_width} T={how.max_tokens}",
      )
      for name, how in (
        ("sampled", e.evaluation.sampled),
        ("greedy", e.evaluation.greedy),
      )
    },
  )


def _state(begin: Any, init: Any, shardings: Any) -> TrainState:
  """A phase's first state, as abstract arrays with their shardings."""
  key, step = jax.eval_shape(lambda: (jax.random.key(0), jnp.int32(0)))
  shapes = jax.eval_shape(begin, jax.eval_shape(init, key), key, step)
  return sharding.placed(shapes, shardings(shapes))


def _words(plan: Slabs) -> str:
  return "+".join(f"{rows}x{tokens}" for rows, tokens in plan)
