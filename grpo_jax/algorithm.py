"""The Algorithm record: the parts that the four functions compose.

A variant is `dataclasses.replace(row, part=other)`. Nothing reads the name.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from grpo_jax import advantages, losses
from grpo_jax.advantages import Advantage, Outcome
from grpo_jax.critic import Critic
from grpo_jax.errors import UserError
from grpo_jax.kl import KL, Adaptive, KLInReward, Reference, k1, k3
from grpo_jax.selection import Select
from grpo_jax.types import Rewards, Rollout, Tokens


def uncorrected(tokens: Tokens) -> Array:
  """No correction: 1 on every token."""
  return jnp.ones_like(tokens.logprobs)


def no_bonus(tokens: Tokens) -> Array:
  """Nothing beside surrogate and KL."""
  return jnp.zeros_like(tokens.logprobs)


@dataclasses.dataclass(frozen=True)
class EntropyBonus:
  """coefficient · H of the policy at each token, in nats."""

  coefficient: float | Array

  def __call__(self, tokens: Tokens) -> Array:
    return self.coefficient * tokens.entropy


def all_rows(rewards: Rewards, rollout: Rollout) -> Array:
  """Every scored row trains: [B, G] bool."""
  del rollout
  return rewards.scored


def complete_rows(rewards: Rewards, rollout: Rollout) -> Array:
  """Rows cut by the length limit train nothing (DAPO, overlong filtering).

  They still count in their group's statistics, as in the authors' code.
  """
  return rewards.scored & ~rollout.truncated


@dataclasses.dataclass(frozen=True)
class SoftOverlong:
  """A reward that falls over the last tokens before the limit: DAPO eq. 13.

  0 up to L_max - L_cache tokens, then a line down to -1 at L_max.

  Attributes:
    limit: L_max in tokens.
    cache: L_cache in tokens.
    factor: of the penalty.
  """

  limit: int
  cache: int
  factor: float = 1.0

  def __call__(self, lengths: Array) -> Array:
    """[B, G] tokens -> [B, G], between -factor and 0."""
    over = lengths - (self.limit - self.cache)
    return -self.factor * jnp.clip(over / self.cache, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
  """Sample until B groups are useful: the metric is not equal in all rows.

  DAPO (2503.14476). Groups come in stream order; the first B train, what is
  left over is dropped and counted.

  Attributes:
    rounds: rollout batches at most; then the step trains on what there is,
      with groups of no use in the places that are left.
  """

  rounds: int = 4


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """The parts that `grpo.advantage` and `grpo.update` compose.

  Attributes:
    name: for logs alone; nothing branches on it.
    source: where it comes from, an arXiv number or a title.
    advantage: (rewards, rollout, scores) -> [B, G, T] or [B, G, 1].
    weights: mask [B, G, T] -> token weights [B, G, T], over a mini-batch.
    ratio: (logprobs, anchor, mask) -> [B, G, T].
    surrogate: (ratio, advantages, tokens) -> objective, clipped low and high.
    anchor: tokens -> the log-probs that the ratio is taken against.
    correction: tokens -> a factor on each token's objective, not
      differentiated.
    keep: (rewards, rollout) -> [B, G] rows that may train.
    kl: a KL term in the loss.
    kl_in_reward: a KL penalty in the reward.
    adaptive: how the KL coefficient follows the KL; None: it does not.
    reference: how the reference moves; None: there is no reference policy.
    bonus: tokens -> what is added to the objective, such as entropy.
    select: singles out tokens of a mini-batch at the current weights; costs
      one score pass.
    length_penalty: lengths -> a reward to add.
    critic: a value function; None: none.
    steps: the advantage reads rewards of steps, which the task must give.
    baseline_rollout: sample the likeliest completion too, as the baseline.
    offline: complete with the reference policy, not the one being trained.
    resample: sample until enough groups are useful.
  """

  name: str
  advantage: Advantage
  weights: Callable[[Array], Array]
  ratio: Callable[[Array, Array, Array], Array]
  surrogate: losses.Surrogate
  source: str = ""
  anchor: Callable[[Tokens], Array] = losses.old_policy
  correction: Callable[[Tokens], Array] = uncorrected
  keep: Callable[[Rewards, Rollout], Array] = all_rows
  kl: KL | None = None
  kl_in_reward: KLInReward | None = None
  adaptive: Adaptive | None = None
  reference: Reference | None = None
  bonus: Callable[[Tokens], Array] = no_bonus
  select: Select | None = None
  length_penalty: Callable[[Array], Array] | None = None
  critic: Critic | None = None
  steps: bool = False
  baseline_rollout: bool = False
  offline: bool = False
  resample: DynamicSampling | None = None

  @property
  def moves_without_advantage(self) -> bool:
    """Whether the loss has a gradient where every advantage is 0."""
    return (
      self.kl is not None
      or self.critic is not None
      or self.select is not None
      or self.bonus is not no_bonus
    )

  @property
  def exact_kl(self) -> bool:
    """Whether the loss needs the reference's whole distributions."""
    return self.kl is not None and self.kl.estimator is None


# --- parts that many rows share ---------------------------------------------

GROUP_MEAN = Outcome(advantages.group_mean)


def normalized(ddof: int = 1, epsilon: float = 1e-6) -> Outcome:
  """(R - mean) / (std + ε) of the group, as an algorithm's part.

  ddof: TRL and verl take 1, EasyDeL and open-instruct 0. epsilon: verl 1e-6,
  TRL 1e-4, Dr. GRPO's code 1e-8.
  """
  return Outcome(
    functools.partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon)
  )


def choice(key: str, value: str, choices: dict[str, Any]) -> Any:
  """What a name stands for.

  Raises:
    UserError: it is none of the choices.
  """
  if value not in choices:
    raise UserError(
      f"algorithm.{key} {value!r} must be one of {', '.join(choices)}"
    )
  return choices[value]


def absent(beta: float | Array) -> bool:
  """Whether a coefficient is 0, so that its part costs nothing."""
  return isinstance(beta, int | float) and beta == 0


def kl_loss(
  beta: float | Array,
  estimator: Callable[[Array], Array] | None = k3,
  refresh_every: int = 0,
  **how: bool,
) -> dict:
  """The fields of a KL in the loss, or none at β = 0."""
  if absent(beta):
    return {}
  return {
    "kl": KL(estimator, beta, **how),
    "reference": Reference(refresh_every),
  }


def kl_reward(beta: float | Array) -> dict:
  """The fields of a k1 in the reward, or none at β = 0."""
  if absent(beta):
    return {}
  return {"kl_in_reward": KLInReward(k1, beta), "reference": Reference()}
