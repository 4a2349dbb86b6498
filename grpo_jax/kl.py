"""KL to the reference: estimators, and where they act: in loss or reward."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from grpo_jax.losses import bounded_exp, sequence_sum


def k1(log_ratio: Array) -> Array:
  """-log ρ, with ρ = π_ref/π_θ: unbiased, high variance."""
  return -log_ratio


def k2(log_ratio: Array) -> Array:
  """½ (log ρ)²: its gradient per token is that of KL(π_θ‖π_ref)."""
  return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: Array) -> Array:
  """ρ - 1 - log ρ: unbiased, never negative, low variance.

  `log_ratio` is log π_ref - log π_θ, of samples from π_θ (Schulman 2020). As a
  loss its gradient is that of the forward KL(π_ref‖π_θ). Above 20 the
  exponential goes on as its tangent (see `losses.bounded_exp`).
  """
  return bounded_exp(log_ratio) - 1 - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@dataclasses.dataclass(frozen=True)
class KL:
  """A KL(π_θ‖π_ref) term in the loss.

  Attributes:
    estimator: k1, k2 or k3, of log π_ref - log π_θ; None: the exact KL of each
      token's distribution, over the whole vocabulary (prefixes are sampled:
      their own part of the gradient is not in it).
    coefficient: β.
    sequence: estimate from the whole sequence's log-ratio, not per token.
    ratio_weighted: multiply by the algorithm's ratio. With a sequence ratio
      and a sequence estimator, value and gradient are then those of the exact
      KL in expectation, also when the sampling policy is old.
  """

  estimator: Callable[[Array], Array] | None
  coefficient: float | Array
  sequence: bool = False
  ratio_weighted: bool = False

  def __call__(
    self,
    logprobs: Array,
    ref: Array,
    ratio: Array,
    mask: Array,
    exact: Array | None = None,
  ) -> Array:
    """The estimate at each token, [B, G, T], without the coefficient."""
    if self.estimator is None:
      value = jnp.where(mask, exact, 0.0)
    else:
      log_ratio = jnp.where(mask, jax.lax.stop_gradient(ref) - logprobs, 0.0)
      if self.sequence:
        log_ratio = sequence_sum(log_ratio, mask)
      value = self.estimator(log_ratio)
    return ratio * value if self.ratio_weighted else value


@dataclasses.dataclass(frozen=True)
class KLInReward:
  """-β·estimate at each token of the reward, of the policy that sampled.

  k1 with its reward-to-go has the gradient of KL(π_θ‖π_ref) exactly on fresh
  samples (2203.02155); k3 in the reward does not (papers: "Comedy of
  estimators").
  """

  estimator: Callable[[Array], Array]
  coefficient: float | Array

  def __call__(self, logprobs: Array, ref: Array, mask: Array) -> Array:
    """The penalty at each token, [B, G, T], never positive for k2 and k3."""
    log_ratio = jnp.where(mask, ref - logprobs, 0.0)
    return -self.coefficient * self.estimator(log_ratio)


@dataclasses.dataclass(frozen=True)
class Adaptive:
  """β doubles where the KL is over 1.5 targets, halves under 1/1.5 (PPO §4).

  Attributes:
    target: of the KL per token, in nats.
    bound: β stays within this factor of what it began with.
  """

  target: float
  bound: float = 1024.0

  def __call__(self, scale: Array, measured: Array) -> Array:
    """The next multiple of β, [] -> []."""
    scale = jnp.where(measured > 1.5 * self.target, scale * 2, scale)
    scale = jnp.where(measured < self.target / 1.5, scale / 2, scale)
    return jnp.clip(scale, 1 / self.bound, self.bound)


@dataclasses.dataclass(frozen=True)
class Reference:
  """How the reference policy moves. It begins as the policy RL begins with.

  Attributes:
    refresh_every: steps of RL after which it becomes the policy as it is; 0:
      never (iterative GRPO, 2402.03300 algorithm 1; R1-Zero: 400).
    decay: of an exponential average, taken at each step; 1: none.
  """

  refresh_every: int = 0
  decay: float = 1.0

  @property
  def moves(self) -> bool:
    """Whether it ever differs from what it began as."""
    return bool(self.refresh_every) or self.decay < 1

  def __call__(self, ref: Array, policy: Array, step: Array) -> Array:
    """The reference after a step; arrays are trees of parameters."""
    ref = jax.tree.map(
      lambda r, p: self.decay * r + (1 - self.decay) * p, ref, policy
    )
    if not self.refresh_every:
      return ref
    now = step % self.refresh_every == 0
    return jax.tree.map(lambda r, p: jnp.where(now, p, r), ref, policy)
