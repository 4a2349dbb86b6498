"""Running out of memory: said before it happens, and said well when it does."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import train_runs

from experiments import base
from grpo_jax import ahead, build, config, memory, sharding
from grpo_jax.compile import Programs
from grpo_jax.errors import OutOfMemory
from grpo_jax.preemption import Guard

pytestmark = pytest.mark.usefixtures("quick_compilation")


def made(**changes):
  """Programs of a model whose logits and activations both weigh."""
  c = base.get_config()
  c.task.name = "test_learns:letter"
  c.algorithm.name, c.algorithm.beta = "grpo", 0.0
  c.model.embed, c.model.ffn, c.model.layers = 64, 128, 4
  c.batch.prompts_per_step, c.sampling.group_size = 16, 16
  c.sampling.max_tokens = 64
  c.eval.every = 0
  for key, value in changes.items():
    group, name = key.split("__")
    c[group][name] = value
  e = config.resolve(c)
  guard = Guard()
  return build.build(e, Programs(sharding.one_device(), guard, lambda _: None))


def program(built, name):
  job = next(j for j in ahead.rl_programs(built) if j[0].name == name)
  return memory.needed(*job)


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("sample", {}),
    ("update", {}),
    ("update", {"model__remat": True}),
    ("update", {"model__logit_elements": 2**16}),
    ("gradients", {"batch__micro_batch_prompts": 2}),
    ("apply", {"batch__micro_batch_prompts": 2, "model__embed": 256}),
  ],
)
def test_the_arithmetic_is_xlas_to_a_factor(name, changes):
  built = made(**changes)
  parts = memory.buffers(built.experiment, built.mesh, name)
  extra = sum(parts.values()) - parts["weights, moments and reference"]
  found = program(built, name)
  assert found / 3 < extra < found * 3, (found / 2**20, parts)


def test_what_would_fit_does():
  built = made()
  whole = program(built, "update")
  room = whole / 3
  text = memory.describe(built, "update", predicted=whole, room=room)
  assert text.startswith("out of memory in update: beside the state it takes")
  assert "activations" in text and "logits of a chunk" in text
  flags = text.partition("cheapest first: ")[2].split("; ")[0].split(" (")[0]
  changes = {
    key.replace(".", "__"): {"True": True}.get(value) or int(value)
    for key, value in re.findall(r"--config\.([\w.]+)=(\w+)", flags)
  }
  smaller = made(**changes)
  name = "update" if smaller.experiment.batching.micro_batches == 1 else ""
  assert program(smaller, name or "gradients") < room * 1.5


def test_a_smaller_rollout_is_offered_where_its_mini_batches_divide_it():
  for update, offered in ((0, "=8 "), (8, "=8 "), (16, "")):
    built = made(batch__prompts_per_update=update)
    parts = memory.buffers(built.experiment, built.mesh, "sample")
    extra = sum(parts.values()) - parts["weights, moments and reference"]
    text = memory.describe(built, "sample", predicted=extra, room=extra * 0.8)
    found = f"--config.batch.prompts_per_step{offered}" in text
    assert found == bool(offered), (update, text)


def test_a_run_that_does_not_fit_ends_before_its_first_step(tmp_path):
  # The state was taken already; a program needs this much more.
  out = train_runs.train(
    tmp_path / "run",
    "--config.task.name=tiny_config:forgetful",
    TINY_ROOM="40000",
  )
  assert out["code"] == 4, out["err"]
  (line,) = out["err"].strip().splitlines()
  assert re.match(r"error: out of memory in \w+: beside the state", line)
  assert "a device has 0.0 MiB left" in line
  assert "nothing to save yet" in line
  assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_memory_that_ends_in_a_step_costs_that_step(tmp_path):
  workdir = tmp_path / "run"
  flag = "--config.task.name=tiny_config:forgetful"
  out = train_runs.train(workdir, flag)
  assert out["code"] == 4, out["err"]
  assert "out of memory in update" in out["err"]
  assert "saved step 6" in out["err"]


def test_without_figures_the_check_is_silent(monkeypatch):
  monkeypatch.setattr(memory, "available", lambda device: None)
  memory.check(made(), [])


def test_this_machine_has_figures():
  room = memory.available(jax.local_devices()[0])
  assert room is None or room > 2**20


def test_devices_of_one_process_share_its_memory(monkeypatch):
  built = made(batch__prompts_per_step=4, sampling__max_tokens=4)
  jobs = [j for j in ahead.rl_programs(built) if j[0].name == "update"]
  need = memory.needed(*jobs[0])
  monkeypatch.setattr(memory, "available", lambda device: need * 1.5)
  memory.check(built, jobs)
  two = jax.sharding.Mesh(
    np.array(jax.devices()[:2]).reshape(2, 1, 1), built.mesh.axis_names
  )
  programs = dataclasses.replace(built.programs, mesh=two)
  shared = dataclasses.replace(built, programs=programs)
  with pytest.raises(OutOfMemory):
    memory.check(shared, jobs)
