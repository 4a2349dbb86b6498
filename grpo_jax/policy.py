"""A trained policy as commands open it: a run of ours, or a model."""

import copy
import dataclasses
import json
import os
import pathlib
from typing import Any

import jax

from grpo_jax import config
from grpo_jax.checkpoint import open_run, parse_run
from grpo_jax.errors import UserError
from grpo_jax.models.architecture import Model
from grpo_jax.models.pretrained import open_model
from grpo_jax.stored import abstract_policy, read_policy
from grpo_jax.tokenizer import Tokenizer, make_tokenizer
from grpo_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Policy:
  """Parameters on the mesh, and what is needed to talk to them.

  Attributes:
    source: where it came from: run and step, or the model's path.
    base: the config.json of the model it started from, or {}.
    companions: directory with that model's other files, or None.
    base_path: where that model was found, as its user named it, or "".
    max_tokens: of a completion, as it was trained; None for a bare model.
  """

  model: Model
  params: Params
  tokenizer: Tokenizer
  source: dict[str, Any]
  base: dict[str, Any]
  companions: str | None
  max_tokens: int | None = None
  base_path: str = ""


def is_run(path: str) -> bool:
  """Whether a path, with or without @STEP, is a workdir of ours."""
  directory = pathlib.Path(parse_run(path)[0])
  return (directory / "checkpoints").is_dir()


def stored_config(run: str) -> dict[str, Any]:
  """The configuration a run was started with.

  Raises:
    UserError: there is no run.
  """
  path = pathlib.Path(run) / "config.json"
  try:
    return json.loads(path.read_text())["config"]
  except (FileNotFoundError, NotADirectoryError) as error:
    raise UserError(f"no run at {run}: {path} is missing") from error
  except (OSError, ValueError, KeyError) as error:
    raise UserError(f"{path} cannot be read: {error}") from error


# What a policy brings along when it is evaluated by another configuration.
# (`init_from` is where the weights under its adapters came from.)
POLICYS_OWN = ("model", "lora", "init_from", "tokenizer", "seed")


def evaluated_by(
  run: str | None, model: str | None, given: Any
) -> dict[str, Any]:
  """The configuration that a policy is evaluated by.

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


def compared_by(c: dict[str, Any], against: str, given: bool) -> dict[str, Any]:
  """The configuration of a second policy: the first's, with another model.

  So both are asked the same prompts, sampled alike, with the same random
  numbers.

  Args:
    c: the first's configuration.
    against: RUN, RUN@STEP, RUN@best, or a model.
    given: whether the task is another than the first's own.

  Raises:
    UserError: no such run or step, or a run that was trained on other prompts
      where no configuration says which both are asked.
  """
  c = copy.deepcopy(c)
  if not is_run(against):
    open_model(against)  # refuses what is none before the first is sampled
    c["model"]["path"] = against
    c["lora"] |= {"rank": 0, "path": ""}
    return c
  directory, which = parse_run(against)
  with open_run(directory) as checkpoints:
    checkpoints.find(which)
  stored = stored_config(directory)
  changed = [
    text
    for text in config.differences(c, stored)
    if text.startswith(("task.", "data."))
  ]
  if changed and not given:
    raise UserError(
      f"{against} has other prompts ({'; '.join(changed)}); --config=FILE"
      " says which both are asked"
    )
  own = ("model", "lora", "init_from", "tokenizer")
  return c | {key: stored[key] for key in own}


def open_policy(path: str, mesh: jax.sharding.Mesh, **chat: Any) -> Policy:
  """Opens RUN, RUN@STEP, RUN@best, a model directory, GGUF file or hub id.

  Args:
    path: which.
    mesh: where the parameters go.
    **chat: `chat` and `system` of the tokenizer; unset: as the run had them.

  Raises:
    UserError: there is no such thing, or it is broken.
  """
  if not is_run(path):
    opened = open_model(path)
    tokenizer = make_tokenizer("", opened.path, **chat)
    model = Model(opened.architecture(tokenizer.vocab_size))
    target = abstract_policy(model, mesh)
    where = jax.tree.map(lambda x: x.sharding, target)
    params = opened.load(model.arch, where)
    companions = opened.path if os.path.isdir(opened.path) else None
    base = dict(opened.config)
    return Policy(model, params, tokenizer, {"model": path}, base, companions)
  directory, which = parse_run(path)
  c = stored_config(directory)
  c["data"] |= chat
  e = config.resolve_plain(c)
  with open_run(directory) as checkpoints:
    step = checkpoints.find(which)
    params = read_policy(checkpoints, step, e.model, mesh)
  source = {"run": os.path.abspath(directory), "step": step}
  opened = e.pretrained
  base = dict(opened.config) if opened else {}
  companions = opened.path if opened and os.path.isdir(opened.path) else None
  size = e.sampling.max_tokens
  return Policy(
    model=e.model,
    params=params,
    tokenizer=e.tokenizer,
    source=source,
    base=base,
    companions=companions,
    max_tokens=size,
    base_path=c["model"]["path"],
  )
