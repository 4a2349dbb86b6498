"""A run's state between steps: opened, restored, saved.

A safe point is the end of a step. What a checkpoint holds is what the next
step reads: parameters, optimizer state, and host numbers. The reference policy
is stored once; keys, data order and demonstrations are functions of the seed
and the step.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from grpo_jax import __version__, config, curriculum
from grpo_jax.build import Built
from grpo_jax.checkpoint import DIRECTORY, Checkpoints, Damaged
from grpo_jax.console import Console
from grpo_jax.disk import explained, replacing, save_json
from grpo_jax.errors import UserError
from grpo_jax.models import peft
from grpo_jax.policy import stored_config
from grpo_jax.records import Records, read_metrics
from grpo_jax.stored import (
  FROZEN,
  REFERENCE,
  load_parameters,
  restore_curriculum,
  restore_state,
  root_key,
  stored_items,
)
from grpo_jax.types import TrainState, policy


@dataclasses.dataclass
class Totals:
  """Host counters since the start of the run, checkpointed."""

  tokens: int = 0  # completion tokens sampled
  samples: int = 0  # completions sampled
  batches: int = 0  # of prompts that RL has drawn from its stream
  nonfinite: int = 0  # updates skipped for a loss that is not finite
  nonfinite_in_a_row: int = 0
  dead: int = 0  # updates skipped because no group carried a signal
  without_mixed: int = 0  # steps in a row without a group of unequal rewards


@dataclasses.dataclass
class Session:
  """Everything a loop reads and writes.

  Attributes:
    state: of the last finished step.
    phase: whose optimizer `state` holds, 'warmup' or 'rl'.
    step: finished steps, the host's copy of `state.step`.
    scored: the last evaluation, its step and what ranks its checkpoint.
    curriculum: what chooses the prompts, as of the last finished step.
  """

  built: Built
  workdir: pathlib.Path
  console: Console
  records: Records
  checkpoints: Checkpoints
  state: TrainState
  phase: str
  step: int
  totals: Totals
  lineage: dict[str, Any] | None  # where the first parameters came from
  curriculum: curriculum.Curriculum | None
  scored: tuple[int, float] | None
  resources: contextlib.ExitStack  # the open files, the workdir's lock
  reward_error_shown: bool = False

  def evaluated(self) -> bool:
    """Whether this step has been evaluated."""
    return self.scored is not None and self.scored[0] == self.step

  def whole(self) -> bool:
    """Whether the state is there: no failed update took its buffers."""
    leaves = jax.tree.leaves((self.state.trainable, self.state.opt))
    return not any(x.is_deleted() for x in leaves)

  def save(self) -> None:
    """Saves the last safe point, with its score where it has one.

    A step that is saved already gains its score at most. Metrics up to this
    step are on disk before the checkpoint commits.
    """
    self.records.sync()
    e = self.built.experiment
    host = {
      "config": e.config,
      "phase": self.phase,
      "totals": dataclasses.asdict(self.totals),
      "lineage": self.lineage,
      "version": __version__,
      "controllers": {k: float(v) for k, v in self.state.controllers.items()},
    }
    items = stored_items(self.state, e)
    if self.curriculum is not None:
      items["curriculum"] = self.curriculum.arrays()
    self.checkpoints.save(
      self.step,
      items,
      host,
      score=self.scored[1] if self.evaluated() else None,
      keep=self.step == e.warmup_steps,
    )
    if e.config["checkpoint"]["wait"]:
      self.checkpoints.wait()

  def begin_rl(self) -> None:
    """The policy as it is becomes the reference; the optimizer starts anew."""
    built = self.built
    self.state = built.begin["rl"](
      policy(self.state.params), self.state.key, self.state.step
    )
    self.phase = "rl"
    self.save_reference()

  def save_frozen(self) -> None:
    """Stores the weights under adapters once: checkpoints leave them out."""
    if self.state.frozen:
      self.checkpoints.save_once(FROZEN, 0, self.state.frozen)

  def save_reference(self) -> None:
    """Stores the reference policy once, where the algorithm has one."""
    e = self.built.experiment
    if self.state.ref is not None and not e.algorithm.reference.moves:
      self.checkpoints.save_once(REFERENCE, e.warmup_steps, self.state.ref)

  def write_metrics(self, metrics: dict[str, Any]) -> None:
    """Writes this step's numbers, after the outcomes they depend on."""
    self.records.write_outcomes(self.built.runner.take_fresh())
    self.records.write_metrics(self.step, metrics)

  def close(self) -> None:
    """Waits for the save in flight; raises its error."""
    self.built.runner.close()
    self.resources.close()

  def __enter__(self):
    return self

  def __exit__(self, kind: type | None, *_):
    try:
      self.close()
    except UserError:
      if kind is None:  # else the first failure says more than the last
        raise


def phase_of(step: int, warmup_steps: int) -> str:
  """Whose optimizer a checkpoint of `step` holds.

  The last step of the warm-up is saved before the next phase begins.
  """
  return "warmup" if warmup_steps and step <= warmup_steps else "rl"


def open_session(built: Built, workdir: str, console: Console) -> Session:
  """Opens a workdir: a new run, or one to be continued.

  Raises:
    UserError: the workdir cannot be used, another process uses it, its run has
      another configuration, or `init_from` names no checkpoint.
  """
  e = built.experiment
  path = pathlib.Path(workdir)
  with contextlib.ExitStack() as resources:
    records = resources.enter_context(
      Records(path, tensorboard=e.config["log"]["tensorboard"])
    )
    resources.callback(os.close, _lock(path))
    keep_last = e.config["checkpoint"]["keep_last"]
    checkpoints = resources.enter_context(
      Checkpoints(path / DIRECTORY, keep_last=keep_last)
    )
    found = _restore(built, checkpoints)
    for step, why in checkpoints.skipped():
      console.say(f"skipped checkpoint {step}: {why}")
    if found:
      console.say(f"resumed at step {found['step']} of {e.total_steps}")
      records.restore(found["step"])
      built.runner.remember(records.read_outcomes())
    else:
      if read_metrics(path) and (path / "config.json").exists():
        refuse_changes(stored_config(str(path)), e.config)
      # What a run left that never reached a checkpoint is not ours.
      shutil.rmtree(path / REFERENCE, ignore_errors=True)
      shutil.rmtree(path / FROZEN, ignore_errors=True)
      found = _begin(built)
      records.restore(-1)
    s = Session(
      built=built,
      workdir=path,
      console=console,
      records=records,
      checkpoints=checkpoints,
      scored=_last_score(path),
      resources=resources.pop_all(),
      **found,
    )
    stored = {"config": e.config, "lineage": s.lineage, "version": __version__}
    save_json(path / "config.json", stored)
    s.save_frozen()
    if s.phase == "rl":
      s.save_reference()
    return s


def _begin(built: Built) -> dict[str, Any]:
  """The first safe point of a new run."""
  e = built.experiment
  phase = "warmup" if e.warmup_steps else "rl"
  key, lineage = root_key(built), None
  if e.config["lora"]["path"]:
    peft.check(e.config["lora"]["path"], e.model)
  if e.config["init_from"]:
    params, lineage = load_parameters(built, e.config["init_from"])
  else:
    params = built.first_parameters(key)
  return {
    "state": built.begin[phase](params, key, built.put_scalar(0)),
    "phase": phase,
    "step": 0,
    "totals": Totals(),
    "lineage": lineage,
    "curriculum": e.curriculum and curriculum.begin(e.curriculum),
  }


def refuse_changes(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
  """Refuses to go on with a run under another configuration, naming keys."""
  changed = config.differences(theirs, ours)
  if changed:
    raise UserError(
      f"this workdir's run has another configuration ({'; '.join(changed)});"
      " use the same, another --workdir, or --config.init_from to start a"
      " new run from its parameters"
    )


def _restore(built: Built, checkpoints: Checkpoints) -> dict[str, Any] | None:
  """The newest safe point that can be read, or None."""
  e = built.experiment
  unreadable = []
  while (step := checkpoints.latest()) is not None and step not in unreadable:
    host = checkpoints.host(step)
    refuse_changes(host["config"], e.config)
    shapes = built.shapes[phase_of(step, e.warmup_steps)]
    try:
      state = restore_state(built, checkpoints, step, shapes, host)
      chooser = e.curriculum and restore_curriculum(
        built, checkpoints, step, e.curriculum
      )
    except Damaged:
      unreadable.append(step)
      continue
    return {
      "state": state,
      "phase": host["phase"],
      "step": step,
      "totals": Totals(**host["totals"]),
      "lineage": host["lineage"],
      "curriculum": chooser,
    }
  if unreadable:  # starting anew would throw away what may be saved yet
    raise UserError(
      f"no checkpoint can be read; tried {', '.join(map(str, unreadable))}:"
      " mend the disk, or choose another --workdir"
    )
  return None


def _last_score(workdir: pathlib.Path) -> tuple[int, float] | None:
  """The last evaluation on record, as `Session.scored`."""
  for line in reversed(read_metrics(workdir)):
    if "eval/sampled" in line:
      return line["step"], line["eval/sampled"]
  return None


def _lock(workdir: pathlib.Path) -> int:
  """Holds the workdir for this process; the system frees it at any death."""
  with explained(f"could not use workdir {workdir}"):
    lock = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    os.close(lock)
    raise UserError(
      f"another process is running in workdir {workdir}; wait for it, stop it,"
      " or choose another --workdir"
    ) from error
  return lock


def save_batch(workdir: pathlib.Path, step: int, batch: Any) -> pathlib.Path:
  """Writes a batch that gave a non-finite update, for inspection.

  Returns:
    Path of an .npz file; its names are the fields' paths.
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(batch)
  arrays = {
    jax.tree_util.keystr(path).strip("."): np.asarray(x) for path, x in flat
  }
  path = workdir / "nonfinite" / f"{step:08d}.npz"
  with explained(f"could not write {path}"):
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
      np.savez_compressed(file, **arrays)
  return path
