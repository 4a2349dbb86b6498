"""What a run says before it starts."""

import dataclasses

from experiments import base
from grpo_jax import config, explain, sharding
from grpo_jax.console import Console


def test_what_a_task_left_out_is_said(capsys):
  e = config.resolve(base.get_config())
  task = dataclasses.replace(e.task, notes=("3 of 9 rows of train left out",))
  mesh = sharding.make_mesh(-1, 1, 1)
  explain.print_plan(Console(1), dataclasses.replace(e, task=task), mesh)
  assert "note: 3 of 9 rows of train left out" in capsys.readouterr().out
