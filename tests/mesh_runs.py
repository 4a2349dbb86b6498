"""One small experiment on several meshes, and what XLA made of its programs.

The real thing: `build`, `Programs`, `steps`. Only the sizes are small, many
tokens end a completion, so that lengths differ, and plain gradient descent
stands in for Adam, which would blow rounding noise up to the size of a step.
"""

import contextlib
import dataclasses
import math
import os
import re
import tempfile

import jax
import numpy as np

from experiments import base
from grpo_jax import algorithms, build, config, data, sharding, steps
from grpo_jax.compile import Programs
from grpo_jax.preemption import Guard
from grpo_jax.rollouts import Position

ONE = (1, 1, 1)
MESHES = ((8, 1, 1), (2, 2, 2), (1, 2, 4))
WARNING = "nvoluntary full rematerialization"
WHOLE, SHORT = ((4, 6),), ((2, 6), (2, 4))  # slabs of a group of four


def resolve(**changes):
  """32 prompts in two mini-batches of two micro-batches; G = 4, T = 6.

  Args:
    **changes: other keys, `__` for a dot.
  """
  c = base.get_config()
  c.compile_cache = ""
  c.task.name = "tiny_config:even"
  c.model.embed, c.model.ffn, c.model.head_dim = 32, 64, 8
  c.batch.prompts_per_step = 32
  c.batch.prompts_per_update = 16
  c.batch.micro_batch_prompts = 8
  c.sampling.group_size, c.sampling.max_tokens = 4, 6
  c.algorithm.name, c.algorithm.beta = "grpo", 0.05
  c.optimizer.name, c.optimizer.momentum = "sgd", 0.9
  c.optimizer.learning_rate, c.optimizer.warmup_steps = 0.3, 0
  c.warmup.steps, c.warmup.prompts_per_step = 1, 16
  c.eval.every = 0
  c.log.tensorboard = c.log.rollouts = False
  for key, value in changes.items():
    c.update_from_flattened_dict({key.replace("__", "."): value})
  e = config.resolve(c)
  return dataclasses.replace(
    e,
    sampling=dataclasses.replace(e.sampling, stop_ids=tuple(range(150))),
    batching=dataclasses.replace(e.batching, slabs=(WHOLE,)),
  )


def mesh_of(sizes):
  """A mesh over the first of the eight devices."""
  devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
  return jax.sharding.Mesh(devices, sharding.AXES)


def build_on(sizes, e):
  """The programs of an experiment on a mesh; nothing compiled."""
  mesh = mesh_of(sizes)
  build.check_mesh(e, mesh)
  return build.build(e, Programs(mesh, Guard(), say=lambda line: None))


def put_key(built):
  key = jax.random.key(built.experiment.config["seed"])
  return jax.device_put(key, built.replicated())


def start(built, phase):
  """A fresh train state."""
  key = put_key(built)
  return built.begin[phase](built.init(key), key, built.put_scalar(0))


def stream(built):
  return data.Stream(built.experiment.task.split("train"), 0, "rl")


def draw(built, params):
  """The rollout that every check of log-probs scores."""
  examples, ordinals = stream(built).batch(0, 32)
  prompts = built.prompts(examples, ordinals)
  return built.sample(params, prompts, put_key(built), built.put_scalar(0))


@contextlib.contextmanager
def stderr_into(lines):
  """Collects what C++ writes to standard error, which Python does not see."""
  saved = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(saved, 2)
      os.close(saved)
      file.seek(0)
      lines.extend(file.read().decode(errors="replace").splitlines())


class Run:
  """Two steps of GRPO on one mesh, recorded.

  Attributes:
    built: the programs.
    results: of the two steps.
    before: the state that was donated to the first.
    state: after the second.
    rollout: drawn from the first parameters.
    first: its log-probs under the first parameters, [B, G, T].
    logprobs: the same under the last.
    stderr: lines that the compilations wrote.
  """

  def __init__(self, sizes, e):
    self.built = built = build_on(sizes, e)
    self.stderr, self.results = [], []
    with stderr_into(self.stderr):
      self.before = self.state = start(built, "rl")
      self.rollout = draw(built, self.state.params)
      score = built.score[WHOLE]
      self.first = np.asarray(score(self.state.params, self.rollout))
      for index in range(2):
        at = Position(index + 1, index)
        result = steps.reinforce_step(built, self.state, stream(built), at)
        self.state = result.state
        self.results.append(result)
    self.logprobs = np.asarray(score(self.state.params, self.rollout))

  def text(self, name):
    """The compiled program as XLA prints it."""
    program = getattr(self.built, name)
    if isinstance(program, dict):
      (program,) = program.values()
    (executable,) = program.compiled.values()
    return executable.as_text()

  def prompt_stream(self, prompts):
    """The shape of the prompts' hidden states on a device."""
    e = self.built.experiment
    return (prompts, 1, e.prompt_width - 1, e.model.arch.embed)

  def with_sequence_ratios(self):
    """One step of `grpo_sequence`, sharing the programs it has in common."""
    e = dataclasses.replace(
      self.built.experiment, algorithm=algorithms.grpo_sequence(beta=0.05)
    )
    own = build.build(e, self.built.programs)
    shared = ("init", "begin", "sample", "score", "minibatch")
    built = dataclasses.replace(
      own, **{name: getattr(self.built, name) for name in shared}
    )
    at = Position(1, 0)
    return steps.reinforce_step(built, start(built, "rl"), stream(built), at)


def host(tree):
  """A pytree of arrays as {path: numpy array}; keys are left out."""
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path): np.asarray(x)
    for path, x in flat
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  }


_COLLECTIVE = re.compile(
  r"= (.*?) (all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all"
  r"|collective-permute|collective-broadcast)(?:-start)?\("
)


def collectives(text):
  """Every collective of a program: [(operation, dtype, shape)], tuples cut."""
  found = []
  for line in text.splitlines():
    if match := _COLLECTIVE.search(line):
      for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
        shape = tuple(int(n) for n in dims.split(",") if n)
        found.append((match[2], dtype, shape))
  return found
