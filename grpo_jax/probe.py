"""Is there anything to learn from? A look at rewards before training.

A group whose rewards are all equal has no advantage and teaches nothing. At
success rate p a group of G is useless with probability p^G + (1-p)^G.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from grpo_jax import metrics
from grpo_jax.console import Console
from grpo_jax.rewards.runner import RewardBatch
from grpo_jax.tasks.base import Completion, Example


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a rollout says of its signal.

  Attributes:
    mixed: share of groups with unequal rewards.
    success: estimated success rate of one completion.
    group_size: G of the rollout.
    half_useful: the G that would make half the groups useful at that rate;
      None at a rate of 0 or 1.
    scored: whether any completion could be scored.
  """

  mixed: float
  success: float
  group_size: int
  half_useful: int | None
  scored: bool

  def __str__(self) -> str:
    text = f"{self.mixed:.0%} of groups are mixed at G={self.group_size}"
    if not self.scored:
      return "no signal: no completion could be scored; look at the reward"
    if 0 <= self.success <= 1:
      text += f"; success rate about {self.success:.3f}"
    wish = ""
    if self.half_useful is not None and self.half_useful > self.group_size:
      wish = f". G={self.half_useful} would make half the groups useful"
    if self.mixed == 0:
      mend = "make the task easier, or start from a better policy"
      if self.success >= 1:
        mend = "make the task harder"
      return f"no signal: {text}{wish}; {mend}"
    return f"{'weak ' if self.mixed < 0.5 and wish else ''}signal: {text}{wish}"


def useful_group_size(p: float) -> int | None:
  """Smallest G at which p^G + (1-p)^G <= 1/2; None at p = 0 or 1.

  For small p this is ln ½ / ln(1-p): 69 at 1 %, 14 at 5 %, 7 at 10 %.
  """
  if not 0 < p < 1:
    return None
  p = min(p, 1 - p)
  if p < 1e-6:  # p^G is nothing, and counting up would not end
    return math.ceil(math.log(0.5) / math.log1p(-p)) if p else None
  group = max(2, math.floor(math.log(0.5) / math.log1p(-p)) - 1)
  while p**group + (1 - p) ** group > 0.5 + 1e-12:
    group += 1
  return group


def verdict(rewards: RewardBatch) -> Verdict:
  """Judges one rollout by its rewards [B, G]."""
  scored = rewards.scored
  rows = max(int(scored.sum()), 1)
  success = float(np.where(scored, rewards.success, 0).sum() / rows)
  mixed = float(metrics.mixed_groups(rewards.total, scored).mean())
  return Verdict(
    mixed,
    success,
    scored.shape[1],
    useful_group_size(success),
    bool(scored.any()),
  )


def show(
  console: Console,
  examples: Sequence[Example],
  completions: Sequence[Sequence[Completion]],
  rewards: RewardBatch,
) -> None:
  """Prints groups: each completion, its extracted answer and its reward."""
  for b, example in enumerate(examples):
    rows = []
    for g, completion in enumerate(completions[b]):
      scored = rewards.scored[b, g]
      rows.append(
        (
          repr(completion.text[:60]),
          repr(rewards.extracted[b][g]),
          f"{rewards.total[b, g]:.2f}" if scored else "unscored",
          f"{completion.tokens}{' cut' if completion.truncated else ''}",
        )
      )
    title = f"prompt {example.prompt[-60:]!r}, answer {example.answer[:40]!r}"
    console.table(title, ("completion", "extracted", "reward", "tokens"), rows)
