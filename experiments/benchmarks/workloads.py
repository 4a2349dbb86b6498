"""Fixed amounts of work, the same for every trainer that is measured.

W1 to W3 and W5 are those that other trainers were timed on: prompts of exactly
so many tokens, completions forced to their length, so that no policy and no
luck is in a figure. W4 is ragged.
"""

import dataclasses
import random
import re

import numpy as np

from experiments import base, smollm2
from experiments.benchmarks import random_models
from grpo_jax.errors import UserError
from grpo_jax.hf_tokenizer import HFTokenizer
from grpo_jax.tasks.base import (
  Example,
  Reward,
  Task,
  no_demonstration,
  question_id,
)

WORDS = (
  "the of and to in is was for on that with as it by at from his an are were"
  " which this be had not or have one new first also after two they more other"
  " their some when time only into"
)


@dataclasses.dataclass(frozen=True)
class Workload:
  """One rollout batch and its update.

  Attributes:
    prompts: in a step.
    group: completions of each.
    prompt: tokens of a prompt, or the bounds of a uniform draw.
    completion: tokens of a completion, or the cap of a log-normal draw.
    model: 'smollm2', or one of `random_models.MODELS`.
    micro: prompts in a gradient computation; 0: all.
  """

  prompts: int
  group: int
  prompt: int | tuple[int, int]
  completion: int
  model: str = "smollm2"
  micro: int = 0
  mean: float = 0.0  # of the log-normal draw; 0: all of full length
  sigma: float = 0.0

  def lengths(self) -> np.ndarray:
    """Tokens of every completion, [prompts, group]."""
    shape = (self.prompts, self.group)
    if not self.mean:
      return np.full(shape, self.completion, np.int32)
    rng = np.random.default_rng(0)
    center = np.log(self.mean) - self.sigma**2 / 2
    drawn = rng.lognormal(center, self.sigma, shape)
    return np.clip(np.round(drawn), 1, self.completion).astype(np.int32)


WORKLOADS = {
  "W1": Workload(4, 8, 64, 64),
  "W2": Workload(4, 8, 64, 256, micro=1),
  "W3": Workload(32, 8, 16, 32, model="tiny"),
  "W4": Workload(8, 8, (16, 256), 256, micro=2, mean=64.0, sigma=0.75),
  "W5": Workload(4, 16, 256, 16),
}


def named(name: str) -> Workload:
  """A workload of the table, or tiny:BxGxPxT of any size.

  Raises:
    UserError: neither.
  """
  if name in WORKLOADS:
    return WORKLOADS[name]
  found = re.fullmatch(r"tiny:(\d+)x(\d+)x(\d+)x(\d+)", name)
  if not found:
    raise UserError(
      f"unknown workload {name!r}; known are {', '.join(WORKLOADS)} and"
      " tiny:BxGxPxT (prompts, group, prompt tokens, completion tokens)"
    )
  return Workload(*map(int, found.groups()), model="tiny")


def prompts(name: str, tokenizer: HFTokenizer, count: int) -> list[str]:
  """Distinct texts of exactly as many tokens as a workload asks for."""
  w = named(name)
  rng, sizes = random.Random(0), np.random.default_rng(1)
  words = (
    [f"w{i}" for i in range(4, 500)] if w.model == "tiny" else WORDS.split()
  )
  out: list[str] = []
  while len(out) < count:
    n = w.prompt
    if isinstance(n, tuple):
      n = int(sizes.integers(n[0], n[1] + 1))
    text = " ".join(rng.choice(words) for _ in range(n))
    while len(tokenizer.encode(text)) != n or text in out:
      text = " ".join(rng.choice(words) for _ in range(n))
    out.append(text)
  return out


def task(dataset: str) -> Task:
  """The prompts of a workload, with a reward that is cheap and not constant."""
  w = named(dataset)
  texts = prompts(dataset, HFTokenizer(path_of(w.model)), 16 * w.prompts)
  examples = [Example(question_id(x), x, "") for x in texts]

  def reward(example: Example, completion: object) -> Reward:
    total = sum(map(ord, completion.text[:200])) % 97 / 97
    return Reward(total)

  return Task(
    name=dataset,
    splits={
      "train": examples[2:],
      "tuning": examples[:1],
      "heldout": examples[1:2],
    },
    reward=reward,
    demonstration=no_demonstration,
  )


def get_config(name: str, dtype: str = "float32"):
  """A workload as an experiment: AdamW at 1e-6, clip 1, KL to a reference."""
  w, c = named(name), base.get_config()
  c.task.name = "experiments.benchmarks.workloads:task"
  c.task.dataset = name
  c.model.path = path_of(w.model)
  c.model.dtype = dtype
  c.mesh.data = 1
  c.batch.prompts_per_step = w.prompts
  c.batch.micro_batch_prompts = w.micro
  if w.mean:
    c.batch.slabs, c.batch.slab_lengths = 2, 8
    c.sampling.compact = 5
  c.sampling.group_size, c.sampling.max_tokens = w.group, w.completion
  c.algorithm.name, c.algorithm.beta = "grpo", 0.04
  c.optimizer.learning_rate, c.optimizer.warmup_steps = 1e-6, 0
  c.optimizer.decay = "constant"
  c.eval.every = 0
  return c


def path_of(name: str) -> str:
  """Where a workload's model lies: a package's file, or one made here."""
  if name == "smollm2":
    return smollm2.model_path()
  return str(random_models.make(name))
