"""A train state as checkpoints hold it, and how it is read back."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from grpo_jax import config, curriculum, model_config, sharding
from grpo_jax.build import Built
from grpo_jax.checkpoint import Checkpoints, open_run, parse_run
from grpo_jax.config import Experiment
from grpo_jax.errors import UserError
from grpo_jax.models import lora
from grpo_jax.models.architecture import Model
from grpo_jax.models.decoders import decoder
from grpo_jax.types import Array, Params, TrainState, merge, policy

# Within a workdir, stored once:
REFERENCE = "reference"  # the reference policy
FROZEN = "frozen"  # the weights under adapters


def stored_items(state: TrainState, e: Experiment) -> dict[str, Any]:
  """What a checkpoint holds of a state, or abstract what it is to hold.

  The critic apart, so that a policy is read without it; the reference where it
  moves, else it is stored once.
  """
  items = {"trainable": policy(state.trainable), "opt": state.opt}
  if "critic" in state.trainable:
    items["critic"] = state.trainable["critic"]
  if state.ref is not None and e.algorithm.reference.moves:
    items["ref"] = state.ref
  return items


def restore_state(
  built: Built,
  checkpoints: Checkpoints,
  step: int,
  shapes: TrainState,
  host: dict[str, Any],
) -> TrainState:
  """The state that a checkpoint holds.

  Args:
    built: the programs.
    checkpoints: where from.
    step: which.
    shapes: the abstract state of its phase.
    host: its record.
  """
  e = built.experiment
  trees = checkpoints.restore(step, stored_items(shapes, e))
  trainable, ref = trees["trainable"], trees.get("ref")
  if "critic" in trees:
    trainable = {**trainable, "critic": trees["critic"]}
  frozen = {}
  if shapes.frozen:
    frozen = checkpoints.restore_once(FROZEN, 0, shapes.frozen)
  if shapes.ref is not None and ref is None:
    ref = restore_reference(checkpoints, e.warmup_steps, shapes.ref)
  return TrainState(
    trainable=trainable,
    frozen=frozen,
    ref=ref,
    opt=trees["opt"],
    controllers={
      name: built.to_device(np.asarray(host["controllers"][name], x.dtype))
      for name, x in shapes.controllers.items()
    },
    step=built.put_scalar(step),
    key=root_key(built),
  )


def restore_curriculum(
  built: Built, checkpoints: Checkpoints, step: int, rule: curriculum.Rule
) -> curriculum.Curriculum:
  """The curriculum that a checkpoint holds.

  Raises:
    UserError: it is one of another number of questions.
  """
  where = built.replicated()
  target = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    for name, x in curriculum.begin(rule).arrays().items()
  }
  found = checkpoints.restore(step, {"curriculum": target})["curriculum"]
  return curriculum.restored(rule, jax.device_get(found))


def root_key(built: Built) -> Array:
  """The key that every stream of a run is folded into."""
  key = jax.random.key(built.experiment.config["seed"])
  return jax.device_put(key, built.replicated())


def restore_reference(
  checkpoints: Checkpoints, begin: int, shapes: Params
) -> Params:
  """The reference policy, or what it is a copy of: the policy RL began with."""
  try:
    return checkpoints.restore_once(REFERENCE, begin, shapes)
  except UserError:
    if begin not in checkpoints.steps():
      raise
  return checkpoints.restore(begin, {"trainable": shapes})["trainable"]


def abstract_policy(model: Model, mesh: jax.sharding.Mesh) -> Params:
  """A policy's parameters, adapters too, as abstract arrays on a mesh."""
  net = decoder(model)
  abstract = jax.eval_shape(
    lambda key: lora.adapt(net.init(key, model), key, model), jax.random.key(0)
  )
  where = sharding.state_sharding(mesh, abstract, net.axes(model))
  return sharding.placed(abstract, where)


def read_policy(
  checkpoints: Checkpoints, step: int, model: Model, mesh: jax.sharding.Mesh
) -> Params:
  """A checkpoint's policy: of an adapted one the frozen weights as well.

  Args:
    checkpoints: of a run.
    step: which.
    model: the run's own record.
    mesh: where the parameters go.
  """
  trainable, frozen = lora.split(abstract_policy(model, mesh))
  found = checkpoints.restore(step, {"trainable": trainable})["trainable"]
  if frozen:
    found = merge(checkpoints.restore_once(FROZEN, 0, frozen), found)
  return found


def load_parameters(built: Built, run: str) -> tuple[Params, dict[str, Any]]:
  """Another run's parameters, and where they came from.

  Args:
    built: whose shapes and shardings are asked for.
    run: RUN, RUN@STEP or RUN@best.

  Raises:
    UserError: no such run or step, or parameters of another shape.
  """
  directory, which = parse_run(run)
  e = built.experiment
  with open_run(directory) as other:
    step = other.find(which)
    host = other.host(step)
    same_model(host["config"], e.config)
    theirs = dataclasses.replace(
      e.model,
      dtype=host["config"]["model"]["dtype"],
      lora=model_config.make_lora(host["config"]["lora"], e.model.arch),
    )
    path = e.config["lora"]["path"]
    if theirs.lora and path not in ("", host["config"]["lora"]["path"]):
      raise UserError(
        f"init_from {run} has adapters of its own; lora.path cannot give others"
      )
    params = read_policy(other, step, theirs, built.mesh)
  if theirs.lora != e.model.lora or theirs.dtype != e.model.dtype:
    # Adapters of another shape become part of the weights.
    params = lora.merged(params, theirs)
    params = built.adapted(params, root_key(built))
  lineage = {
    "run": os.path.abspath(directory),
    "step": step,
    "parent": host.get("lineage"),
  }
  return params, lineage


def same_model(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
  """Refuses parameters of a model that is computed in another way.

  Shapes alone do not tell: rotary base, norm and tokenizer have none.

  Raises:
    UserError: naming the keys that differ.
  """
  free = ("model.dtype", "model.remat", "model.logit_elements")
  changed = [
    text
    for text in config.differences(theirs, ours)
    if text.startswith(("model.", "tokenizer:")) and not text.startswith(free)
  ]
  if changed:
    raise UserError(
      f"that run's model is another ({'; '.join(changed)}); take its values"
    )
