"""A run of seconds: the experiment of the tests that start processes."""

import dataclasses
import itertools
import os
import time

import jax

from experiments import base
from grpo_jax import memory, steps
from grpo_jax.tasks.base import Reward
from grpo_jax.tasks.words import words


def even(tuning: int = 16, heldout: int = 64):
  """Reward 1 for an even sum of characters: a random policy earns some."""
  return _words(tuning, heldout, lambda n: float(n % 2 == 0))


def constant(tuning: int = 16, heldout: int = 64):
  """Reward 1 for everything: no group has a signal."""
  return _words(tuning, heldout, lambda n: 1.0)


def flaky(tuning: int = 16, heldout: int = 64):
  """A reward that raises on every third completion or so."""
  return _words(tuning, heldout, lambda n: 1 / (n % 3))


def mute(tuning: int = 16, heldout: int = 64):
  """Nothing to imitate."""
  task = even(tuning, heldout)
  return dataclasses.replace(task, demonstration=lambda example, rng: None)


def stepwise(tuning: int = 16, heldout: int = 64):
  """A reward for each character: 1 where it is a letter."""
  task = even(tuning, heldout)

  def reward(example, completion):
    steps = [(i + 1, float(c.isalpha())) for i, c in enumerate(completion.text)]
    total = sum(x for _, x in steps)
    return Reward(total, None, {"text": total}, completion.text, steps=steps)

  return dataclasses.replace(task, reward=reward)


def forgetful(tuning: int = 16, heldout: int = 64):
  """A device whose memory has `TINY_ROOM` bytes, or ends in step 7's update."""
  if "TINY_ROOM" in os.environ:
    memory.available = lambda device: float(os.environ["TINY_ROOM"])
    return even(tuning, heldout)
  real, calls = steps.update_all, itertools.count(5)  # four of warm-up first

  def update_all(built, *args):
    if next(calls) == 7:
      built.programs.running = "update"
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 GiB wanted")
    return real(built, *args)

  steps.update_all = update_all
  return even(tuning, heldout)


def _words(tuning, heldout, score):
  def reward(example, completion):
    time.sleep(float(os.environ.get("TINY_SLEEP", "0")))
    total = score(sum(map(ord, completion.text)))
    return Reward(total, None, {"text": total}, completion.text)

  task = words(min_letters=3, max_letters=3, tuning=tuning, heldout=heldout)
  return dataclasses.replace(task, reward=reward, parts=("text",))


def get_config(preset: str = "grpo_sequence"):
  """Words of three letters, one layer, four steps of warm-up, eight of RL."""
  c = base.get_config()
  c.compile_cache = os.environ["TINY_CACHE"]
  c.algorithm.name = preset
  c.steps = 8
  c.mesh.data = 1
  c.task.name = "tiny_config:even"
  c.model.layers = 1
  c.model.embed = 16
  c.model.heads = 2
  c.model.kv_heads = 2
  c.model.head_dim = 8
  c.model.ffn = 32
  c.batch.prompts_per_step = 4
  c.sampling.group_size = 4
  c.sampling.max_tokens = 4
  c.warmup.steps = 4
  c.warmup.prompts_per_step = 8
  c.eval.every = 4
  c.eval.prompts = 16
  c.checkpoint.every = 3
  c.log.every = 1
  return c
