"""Advantages that differ from token to token, or read more than the outcome.

Each is `(rewards, rollout, scores) -> [B, G, T]` (or [B, G, 1]). A token's
reward is what its step earned, what was shaped in, and at the last token the
total; a return is what follows it, itself included.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from grpo_jax.advantages import (
  group_mean,
  group_normalized,
  informative,
  with_penalty,
)
from grpo_jax.types import Rewards, Rollout, Scores


def last_token(rollout: Rollout) -> Array:
  """[B, G, T] bool: the final token of each completion."""
  position = jnp.arange(rollout.ids.shape[-1])
  return position[None, None] == (rollout.lengths - 1)[..., None]


def token_rewards(rewards: Rewards, rollout: Rollout) -> Array:
  """[B, G, T]: total at the last token, steps and penalties where they are."""
  out = jnp.where(last_token(rollout), rewards.total[..., None], 0.0)
  for part in (rewards.per_token, rewards.penalty):
    if part is not None:
      out = out + part
  use = rollout.mask & rewards.scored[..., None]
  return jnp.where(use, out, 0.0)


def reward_to_go(rewards: Array, gamma: float | Array) -> Array:
  """Σ_{l>=t} γ^{l-t} r_l at each token: [..., T] -> [..., T].

  Args:
    rewards: [..., T].
    gamma: [], or one for each row, [...].
  """

  def back(following: Array, reward: Array) -> tuple[Array, Array]:
    total = reward + gamma * following
    return total, total

  moved = jnp.moveaxis(rewards, -1, 0)
  _, out = jax.lax.scan(back, jnp.zeros_like(moved[0]), moved, reverse=True)
  return jnp.moveaxis(out, 0, -1)


@dataclasses.dataclass(frozen=True)
class Discounted:
  """The return to go from each token, less its mean over the group there.

  The article's J = E[Σ γ^t r_t] without a critic: the gradient weighs token t
  by γ^t times what follows. With γ = 1 and a reward at the end alone, it is
  `group_mean`.

  Attributes:
    gamma: γ.
    baseline: take the mean over rows that have a token there; False takes
      none.
  """

  gamma: float | Array = 1.0
  baseline: bool = True

  def __call__(
    self, rewards: Rewards, rollout: Rollout, scores: Scores
  ) -> Array:
    del scores
    use = rollout.mask & rewards.scored[..., None]
    returns = reward_to_go(token_rewards(rewards, rollout), self.gamma)
    # γ^t of the token's own time: without it the objective is another one.
    time = jnp.arange(returns.shape[-1], dtype=returns.dtype)
    returns = returns * jnp.power(self.gamma, time)[None, None]
    if self.baseline:
      # A finished completion's return is what it has: 0 from its end on.
      scored = rewards.scored[..., None]
      count = jnp.maximum(jnp.sum(scored, axis=1, keepdims=True), 1)
      mean = jnp.sum(jnp.where(scored, returns, 0.0), axis=1, keepdims=True)
      returns = returns - mean / count
    return jnp.where(use, returns, 0.0)


@dataclasses.dataclass(frozen=True)
class ProcessSupervision:
  """Σ of the normalised rewards of the steps that end at or after the token.

  DeepSeekMath (2402.03300) §4.1.3: r̃ = (r - mean(R)) / std(R), with R all step
  rewards of all completions of the group.

  Attributes:
    ddof: of the standard deviation.
    epsilon: added to it.
  """

  ddof: int = 0
  epsilon: float = 1e-6

  def __call__(
    self, rewards: Rewards, rollout: Rollout, scores: Scores
  ) -> Array:
    del scores
    steps = rewards.steps & rollout.mask & rewards.scored[..., None]
    flat = (steps.shape[0], -1)
    normal = group_normalized(
      rewards.per_token.reshape(flat),
      steps.reshape(flat),
      ddof=self.ddof,
      epsilon=self.epsilon,
    )
    return reward_to_go(normal.reshape(steps.shape), 1.0)


@dataclasses.dataclass(frozen=True)
class Whitened:
  """Returns to go, standardised over all tokens of the batch: REINFORCE++.

  2501.03262: A_t = R - β Σ_{i>=t} KL_i, then (A - mean) / std over the tokens
  of the whole batch. The baseline form subtracts the group's mean first.

  Attributes:
    centre: subtract each group's mean reward first.
    epsilon: added to the variance, inside the root, as in the authors' code.
  """

  centre: bool = False
  epsilon: float = 1e-8

  def __call__(
    self, rewards: Rewards, rollout: Rollout, scores: Scores
  ) -> Array:
    del scores
    total = rewards.total
    if self.centre:
      total = group_mean(total, rewards.scored)
    returns = reward_to_go(
      token_rewards(rewards.replace(total=total), rollout), 1.0
    )
    return whiten(
      returns, rollout.mask & rewards.scored[..., None], self.epsilon
    )


def whiten(x: Array, mask: Array, epsilon: float) -> Array:
  """(x - mean) / sqrt(var + ε) over masked tokens; 0 where all are equal."""
  count = jnp.sum(mask)
  mean = jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(count, 1)
  centred = jnp.where(mask, x - mean, 0.0)
  variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1, 1)
  size = jnp.max(jnp.where(mask, jnp.abs(x), 0.0))
  # Rounding of equal numbers is no spread (see advantages.RELATIVE_SPREAD).
  flat = jnp.max(jnp.abs(centred)) <= 1e-6 * size
  return jnp.where(flat, 0.0, centred / jnp.sqrt(variance + epsilon))


@dataclasses.dataclass(frozen=True)
class PartwiseNormalized:
  """Each part of the reward against its group, summed, then against the batch.

  GDPO (2601.05242). A part that abstains on a row is left out there.

  Attributes:
    weights: of the parts, in the task's order; None: 1 each.
    ddof: of the standard deviations.
    epsilon: added to them; the authors' code 1e-4.
  """

  weights: tuple[float, ...] | None = None
  ddof: int = 1
  epsilon: float = 1e-4

  def __call__(
    self, rewards: Rewards, rollout: Rollout, scores: Scores
  ) -> Array:
    del scores
    parts = rewards.parts
    weights = self.weights or (1.0,) * parts.shape[-1]
    total = jnp.zeros_like(rewards.total)
    for i, weight in enumerate(weights):
      spoke = rewards.scored & ~jnp.isnan(parts[..., i])
      part = jnp.where(spoke, parts[..., i], 0.0)
      total += weight * group_normalized(
        part, spoke, ddof=self.ddof, epsilon=self.epsilon
      )
    scored = rewards.scored
    out = whiten(total, scored, self.epsilon)
    return jnp.where(scored, out, 0.0)[..., None]


def length_weighted_baseline(
  rewards: Rewards, rollout: Rollout, scores: Scores
) -> Array:
  """R_i - Σ l R / Σ l over the group: OPO (2505.23585), exactly on-policy.

  So Σ_i l_i Â_i = 0 in every group.
  """
  del scores
  total, scored = with_penalty(rewards), rewards.scored
  lengths = jnp.where(scored, rollout.lengths, 0).astype(total.dtype)
  weighted = jnp.sum(
    jnp.where(scored, total * lengths, 0.0), axis=1, keepdims=True
  )
  mean = weighted / jnp.maximum(jnp.sum(lengths, axis=1, keepdims=True), 1)
  use = scored & informative(total, scored)
  return jnp.where(use, total - mean, 0.0)[..., None]


def greedy_baseline(
  rewards: Rewards, rollout: Rollout, scores: Scores
) -> Array:
  """R_i - R of the likeliest completion: ReMax (2310.10505)."""
  del rollout, scores
  use = rewards.scored & ~jnp.isnan(rewards.baseline)[:, None]
  baseline = jnp.nan_to_num(rewards.baseline)[:, None]
  return jnp.where(use, with_penalty(rewards) - baseline, 0.0)[..., None]


@dataclasses.dataclass(frozen=True)
class GAE:
  """Generalised advantage estimation (1506.02438) with a critic's values.

    δ_t = r_t + γ V_{t+1} - V_t,   A_t = Σ_l (γλ)^l δ_{t+l}

  λ = 0 is the article's PPO advantage R_t + γ V(s_{t+1}) - V(s_t); λ = 1 the
  return less the value. V past the end is 0; a completion cut by its length
  limit is treated as ended, unless `bootstrap`.

  Attributes:
    gamma: γ.
    lam: λ of the policy's advantage.
    length_adaptive: α of VAPO's λ = 1 - 1/(α l), with l the completion's
      length; 0: `lam` for all.
    whiten: standardise over the batch's tokens.
    bootstrap: V after the last token of a truncated completion counts.
  """

  gamma: float | Array = 1.0
  lam: float | Array = 0.95
  length_adaptive: float = 0.0
  whiten: bool = True
  bootstrap: bool = False

  def __call__(
    self, rewards: Rewards, rollout: Rollout, scores: Scores
  ) -> Array:
    lam = jnp.asarray(self.lam, scores.values.dtype)
    if self.length_adaptive:
      length = jnp.maximum(rollout.lengths, 1).astype(lam.dtype)
      lam = jnp.maximum(1 - 1 / (self.length_adaptive * length), 0.0)
    out = self.estimate(rewards, rollout, scores.values, lam)
    use = rollout.mask & rewards.scored[..., None]
    return whiten(out, use, 1e-8) if self.whiten else out

  def estimate(
    self, rewards: Rewards, rollout: Rollout, values: Array, lam: Array
  ) -> Array:
    """A_t, before standardisation.

    Args:
      rewards: the rewards.
      rollout: lengths.
      values: [B, G, T+1].
      lam: [] or [B, G].
    """
    use = rollout.mask & rewards.scored[..., None]
    reward = token_rewards(rewards, rollout)
    following = values[..., 1:]
    last = last_token(rollout)
    cut = rollout.truncated[..., None] & self.bootstrap
    following = jnp.where(last & ~cut, 0.0, following)
    delta = jnp.where(
      use, reward + self.gamma * following - values[..., :-1], 0
    )
    return jnp.where(use, reward_to_go(delta, self.gamma * lam), 0.0)
