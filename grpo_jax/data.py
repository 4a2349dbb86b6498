"""The data stream: which example comes when, and its arrays. No JAX.

Every draw has a number, its ordinal, unique in a run. What is drawn is a pure
function of (seed, stream name, ordinal), so the position in the data is one
integer and a resumed run continues exactly where it stopped.
"""

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.tasks.base import SPLITS, Example, Task, selected
from grpo_jax.tokenizer import Tokenizer


def _generator(seed: int, name: str, index: int) -> np.random.Generator:
  """Philox by (seed, name, index): no draw depends on another one."""
  entropy = [seed, zlib.crc32(name.encode()), index]
  return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


class Stream:
  """An endless, seeded, shuffled order of examples.

  Each epoch is a permutation of its own, so no example comes twice within one.
  The order is kept per epoch; it is recomputed, not saved, after a resume.
  """

  def __init__(self, examples: Sequence[Example], seed: int, name: str):
    """Args:
      examples: N examples, always in the same order.
      seed: the run's seed, 0 or more.
      name: of the stream, so that two streams of one run differ.

    Raises:
      UserError: no examples, or a negative seed.
    """
    if not examples:
      raise UserError(f"the data stream {name!r} has no examples")
    if seed < 0:
      raise UserError(f"seed {seed} must be 0 or more")
    self.examples = examples
    self.seed = seed
    self.name = name
    self._orders: dict[int, np.ndarray] = {}

  def draw(self, ordinal: int) -> Example:
    """The example of one draw.

    Args:
      ordinal: 0 or more; epoch = ordinal // N.
    """
    if ordinal < 0:
      raise ValueError(f"ordinal {ordinal} is negative")
    epoch, place = divmod(int(ordinal), len(self.examples))
    return self.examples[self.order(epoch)[place]]

  def batch(
    self, step: int, size: int, chosen: Sequence[int] | None = None
  ) -> tuple[list[Example], np.ndarray]:
    """The draws of one step.

    Args:
      step: counts from 0.
      size: draws per step, the same in every step of a run: another size
        reads the same order, cut differently.
      chosen: `size` indices of `examples` from a curriculum; None: the order's.

    Returns:
      `size` examples and their ordinals [size] int32,
      ordinal = step * size + b.

    Raises:
      OverflowError: an ordinal is past int32.
    """
    ordinals = range(step * size, (step + 1) * size)
    if chosen is None:
      examples = [self.draw(i) for i in ordinals]
    else:
      examples = [self.examples[i] for i in chosen]
    return examples, np.array(list(ordinals), np.int32)

  def order(self, epoch: int) -> np.ndarray:
    """The permutation [N] of one epoch: places to indices of `examples`."""
    if epoch not in self._orders:
      # A batch spans few epochs; older ones can be had again.
      while len(self._orders) >= 2:
        del self._orders[next(iter(self._orders))]
      generator = _generator(self.seed, f"order/{self.name}", epoch)
      self._orders[epoch] = generator.permutation(len(self.examples))
    return self._orders[epoch]


def encode_prompts(
  examples: Sequence[Example],
  ordinals: np.ndarray,
  tokenizer: Tokenizer,
  width: int,
) -> dict[str, np.ndarray]:
  """Prompts as left-padded ids. The tokenizer adds nothing to the template.

  Args:
    examples: B examples.
    ordinals: [B] their numbers in the stream.
    tokenizer: encodes each prompt once.
    width: P, tokens per row.

  Returns:
    ids [B, P] int32, left-padded with `pad_id`; lengths [B] int32 of real
    tokens; ordinals [B] int32.

  Raises:
    UserError: a prompt is empty or longer than `width`.
  """
  ids = np.full((len(examples), width), tokenizer.pad_id, np.int32)
  lengths = np.zeros(len(examples), np.int32)
  for row, example in enumerate(examples):
    tokens = _encode_prompt(example, tokenizer)
    if len(tokens) > width:
      raise UserError(
        f"prompt {example.prompt[:60]!r} has {len(tokens)} tokens, more than "
        f"the {width} of data.max_prompt_tokens; raise it"
      )
    lengths[row] = len(tokens)
    ids[row, width - len(tokens) :] = tokens
  return {
    "ids": ids,
    "lengths": lengths,
    "ordinals": np.asarray(ordinals, np.int32),
  }


def _encode_prompt(example: Example, tokenizer: Tokenizer) -> list[int]:
  tokens = tokenizer.encode_prompt(example.prompt)
  if not tokens:
    raise UserError(
      f"a prompt (question id {example.id}) has 0 tokens; a completion needs "
      "at least one before it: change the template or the question"
    )
  return tokens


def fit_prompts(
  task: Task, tokenizer: Tokenizer, limit: int = 0, long: str = "refuse"
) -> tuple[Task, int, dict[str, int]]:
  """A task whose prompts fit, and the tokens of its longest one.

  Args:
    task: every prompt of it is encoded once.
    tokenizer: as in `encode_prompts`.
    limit: `data.max_prompt_tokens`; 0 sets none.
    long: what to do with prompts of more tokens: 'refuse' or 'drop'.

  Returns:
    the task, without them; P; how many each split lost.

  Raises:
    UserError: a prompt is empty, some are too long and not to be dropped, or a
      split loses all it has.
  """
  if long not in ("refuse", "drop"):
    raise UserError(f"data.long_prompts {long!r} must be refuse or drop")
  # Lengths alone are kept: a split may be larger than memory.
  lengths = {
    split: np.array(
      [len(_encode_prompt(x, tokenizer)) for x in task.splits[split]], int
    )
    for split in SPLITS
  }
  every = np.concatenate(list(lengths.values()))
  over = int((every > limit).sum()) if limit > 0 else 0
  if not over:
    return task, int(every.max()), {}
  if long == "refuse":
    longest = max(SPLITS, key=lambda split: lengths[split].max(initial=0))
    prompt = task.splits[longest][int(lengths[longest].argmax())].prompt
    raise UserError(
      f"{over} of {len(every)} prompts of task {task.name} have more than"
      f" data.max_prompt_tokens {limit} tokens; the longest has {every.max()}:"
      f" {prompt[:60]!r}; raise it, or set data.long_prompts=drop"
    )
  kept = {split: np.flatnonzero(n <= limit) for split, n in lengths.items()}
  for split, places in kept.items():
    if len(lengths[split]) and not len(places):
      raise UserError(
        f"all {len(lengths[split])} {split} prompts of task {task.name} have"
        f" more than data.max_prompt_tokens {limit} tokens"
      )
  lost = {split: len(lengths[split]) - len(kept[split]) for split in SPLITS}
  fewer = {k: selected(task.splits[k], places) for k, places in kept.items()}
  width = int(every[every <= limit].max())
  return dataclasses.replace(task, splits=fewer), width, lost


def encode_demonstrations(
  task: Task,
  examples: Sequence[Example],
  ordinals: np.ndarray,
  tokenizer: Tokenizer,
  seed: int,
  width: int,
) -> dict[str, np.ndarray]:
  """Completions to imitate, one per prompt: a group of one.

  The randomness of a demonstration is of (seed, ordinal): it does not depend
  on the batch it is in.

  Args:
    task: whose `demonstration` is asked.
    examples: B examples.
    ordinals: [B] their numbers in the stream.
    tokenizer: encodes each demonstration and gives the stop id after it.
    seed: the run's seed, 0 or more.
    width: T, tokens per row, the stop id included.

  Returns:
    ids [B, 1, T] int32, right-padded with `pad_id`; lengths [B, 1] int32, the
    stop id included.

  Raises:
    UserError: the task has no demonstrations, or one is longer than `width`.
  """
  ids = np.full((len(examples), 1, width), tokenizer.pad_id, np.int32)
  lengths = np.zeros((len(examples), 1), np.int32)
  for row, (example, ordinal) in enumerate(zip(examples, ordinals)):
    generator = _generator(seed, "demonstration", int(ordinal))
    text = task.demonstration(example, generator)
    if text is None:
      raise UserError(
        f"task {task.name} has no demonstrations to warm up on; set "
        "warmup.steps to 0 or start from a trained policy"
      )
    tokens = [*tokenizer.encode(text), tokenizer.stop_id]
    if len(tokens) > width:
      raise UserError(
        f"demonstration {text[:60]!r} has {len(tokens)} tokens with its stop "
        f"token, more than sampling.max_tokens {width}; raise it"
      )
    lengths[row] = len(tokens)
    ids[row, 0, : len(tokens)] = tokens
  return {"ids": ids, "lengths": lengths}
