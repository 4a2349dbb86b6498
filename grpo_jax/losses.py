"""The parts of a policy objective: ratios and surrogates.

Every function is over completion-aligned arrays [B, G, T] and knows nothing of
the others. A quantity of a whole sequence is broadcast over its tokens, so the
loss is `-(weights * objective).sum()` at either level.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from grpo_jax.types import Tokens

# exp is continued by its tangent above this log-ratio, so that value and
# gradient stay finite and keep their sign however far two policies part.
MAX_LOG_RATIO = 20.0


def bounded_exp(x: Array) -> Array:
  """exp(x) for x <= 20, and its tangent there above: finite, monotone, C¹."""
  low = jnp.minimum(x, MAX_LOG_RATIO)
  return jnp.exp(low) * (1 + (x - low))


def sequence_sum(x: Array, mask: Array) -> Array:
  """Sum over a row's tokens, broadcast back over them: [B, G, T]."""
  total = jnp.sum(jnp.where(mask, x, 0.0), axis=-1, keepdims=True)
  return jnp.broadcast_to(total, x.shape)


def row_mean(x: Array, mask: Array) -> Array:
  """Mean over a row's tokens, broadcast back over them: [B, G, T]."""
  count = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
  return sequence_sum(x, mask) / count


# --- what a ratio is taken against: Tokens -> log-probs [B, G, T] -----------


def old_policy(tokens: Tokens) -> Array:
  """The policy before the step, scored by the trainer."""
  return tokens.old


def sampler_policy(tokens: Tokens) -> Array:
  """The sampler, as it said itself when it drew."""
  return tokens.sampler


# --- ratio: (logprobs, old_logprobs, mask) -> [B, G, T] ---------------------


def token_ratio(logprobs: Array, old: Array, mask: Array) -> Array:
  """r_{i,t} = π_θ(o_{i,t}) / π_old(o_{i,t}), PPO (1707.06347)."""
  return bounded_exp(jnp.where(mask, logprobs - old, 0.0))


def sequence_ratio(logprobs: Array, old: Array, mask: Array) -> Array:
  """ρ_i = π_θ(o_i|q) / π_old(o_i|q), the product over tokens.

  Not length-normalised: the only ratio whose gradient is unbiased when the
  sampling policy is old. The price is the variance of a product.
  """
  return bounded_exp(sequence_sum(logprobs - old, mask))


def geometric_ratio(logprobs: Array, old: Array, mask: Array) -> Array:
  """s_i = ρ_i^{1/|o_i|}, GSPO (2507.18071) eq. 7."""
  return bounded_exp(row_mean(logprobs - old, mask))


def geometric_token_ratio(logprobs: Array, old: Array, mask: Array) -> Array:
  """s_{i,t} = sg[s_i] · π_θ/sg[π_θ] at the token, GSPO-token (eq. 14).

  Value and clip are GSPO's; the advantage may differ from token to token.
  """
  still = jax.lax.stop_gradient(logprobs)
  own = jnp.where(mask, logprobs - still, 0.0)
  return geometric_ratio(still, old, mask) * jnp.exp(own)


def log_policy(logprobs: Array, old: Array, mask: Array) -> Array:
  """log π_θ itself, in a ratio's place: REINFORCE, and imitation at Â = 1."""
  del old
  return jnp.where(mask, logprobs, 0.0)


# --- surrogate: (ratio, advantages, tokens) -> objective, clipped low, high --

Clipping = tuple[Array, Array, Array]
Surrogate = Callable[[Array, Array, Tokens], Clipping]


def _never(ratio: Array) -> Array:
  return jnp.zeros(ratio.shape, bool)


def unclipped(
  ratio: Array, advantages: Array, tokens: Tokens | None = None
) -> Clipping:
  """r Â."""
  del tokens
  return ratio * advantages, _never(ratio), _never(ratio)


@dataclasses.dataclass(frozen=True)
class Clipped:
  """min(r Â, clip(r, 1-low, 1+high) Â), PPO eq. 7.

  The clip binds on one side only: above for Â > 0, below for Â < 0. The two
  flags mark exactly the tokens whose gradient it removes.

  Attributes:
    low: ε below.
    high: ε above.
    dual: for Â < 0 the objective is at least `dual` Â: dual clip, off by
      default. INTELLECT-2 takes 4, verl 3 unless told otherwise.
  """

  low: float
  high: float
  dual: float = float("inf")

  def __call__(
    self, ratio: Array, advantages: Array, tokens: Tokens | None = None
  ) -> Clipping:
    del tokens
    clipped = jnp.clip(ratio, 1 - self.low, 1 + self.high)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    low = (advantages < 0) & (ratio < 1 - self.low)
    high = (advantages > 0) & (ratio > 1 + self.high)
    far = (advantages < 0) & (ratio > self.dual)
    bound = min(self.dual, 1e30)  # infinity times 0 would be NaN
    objective = jnp.where(far, bound * advantages, objective)
    return objective, low, high | far


@dataclasses.dataclass(frozen=True)
class WeightedLogPolicy:
  """sg[min(r, 1+high)] Â log π_θ: CISPO (2506.13585) eq. 4.

  No token loses its gradient; a large ratio is bounded instead. On fresh
  samples the gradient is REINFORCE's; the value is Â log π_θ.

  Attributes:
    high: a difference, as in the paper and verl; TRL's is 1 + high.
    low: the ratio is at least 1 - low; 1 (0 at least) never binds.
  """

  high: float
  low: float = 1.0

  def __call__(
    self, ratio: Array, advantages: Array, tokens: Tokens
  ) -> Clipping:
    weight = jnp.clip(ratio, 1 - self.low, 1 + self.high)
    weight = jax.lax.stop_gradient(weight)
    logprobs = jnp.where(tokens.mask, tokens.logprobs, 0.0)
    below, above = ratio < 1 - self.low, ratio > 1 + self.high
    return weight * advantages * logprobs, below, above


@dataclasses.dataclass(frozen=True)
class Soft:
  """4/τ σ(τ(r-1)) Â: SAPO (2511.20347), a gate in the clip's place.

  At r = 1 the value is 2/τ Â and the gradient REINFORCE's.

  Attributes:
    positive: τ where Â > 0.
    negative: τ where Â <= 0; larger fades sooner.
  """

  positive: float = 1.0
  negative: float = 1.05

  def __call__(
    self, ratio: Array, advantages: Array, tokens: Tokens | None = None
  ) -> Clipping:
    del tokens
    tau = jnp.where(advantages > 0, self.positive, self.negative)
    gate = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1))
    return gate * advantages, _never(ratio), _never(ratio)


@dataclasses.dataclass(frozen=True)
class GeometricClipped:
  """(∏_t clipped r_t)^{1/|o|} Â, each clipped against Â: GMPO (2507.20673).

  Attributes:
    bound: of |log r_t|; the paper's clip range is (e^-0.4, e^0.4).
  """

  bound: float = 0.4

  def __call__(
    self, ratio: Array, advantages: Array, tokens: Tokens
  ) -> Clipping:
    sign = jnp.sign(advantages)
    log_ratio = jnp.log(ratio)
    against = jnp.clip(log_ratio, -self.bound, self.bound)
    kept = jnp.minimum(sign * log_ratio, sign * against) * sign
    objective = jnp.exp(row_mean(kept, tokens.mask)) * advantages
    low = (advantages < 0) & (log_ratio < -self.bound)
    high = (advantages > 0) & (log_ratio > self.bound)
    return objective, low, high


@dataclasses.dataclass(frozen=True)
class DivergenceMasked:
  """r Â, 0 where the policy has moved too far already: DPPO (2602.04879).

  A token is left out where π_θ has gone more than `bound` from the sampler's μ
  in the direction that Â asks for. Total variation: |π_θ - μ| of the token.

  Attributes:
    bound: 0.15 in the paper.
  """

  bound: float = 0.15

  def __call__(
    self, ratio: Array, advantages: Array, tokens: Tokens
  ) -> Clipping:
    moved = jnp.exp(tokens.logprobs) - jnp.exp(tokens.sampler)
    moved = jax.lax.stop_gradient(jnp.where(tokens.mask, moved, 0.0))
    low = (advantages < 0) & (moved < -self.bound)
    high = (advantages > 0) & (moved > self.bound)
    objective = jnp.where(low | high, 0.0, ratio * advantages)
    return objective, low, high


@dataclasses.dataclass(frozen=True)
class WithoutSelected:
  """Another surrogate, 0 on the selected tokens: Clip-Cov (2505.22617)."""

  surrogate: Surrogate

  def __call__(
    self, ratio: Array, advantages: Array, tokens: Tokens
  ) -> Clipping:
    objective, low, high = self.surrogate(ratio, advantages, tokens)
    return jnp.where(tokens.selected, 0.0, objective), low, high


@dataclasses.dataclass(frozen=True)
class SelectedHeld:
  """Another surrogate, less `coefficient`·|log r| on the selected: KL-Cov."""

  surrogate: Surrogate
  coefficient: float = 1.0

  def __call__(
    self, ratio: Array, advantages: Array, tokens: Tokens
  ) -> Clipping:
    objective, low, high = self.surrogate(ratio, advantages, tokens)
    moved = jnp.abs(jnp.where(tokens.mask, tokens.logprobs - tokens.old, 0.0))
    held = jnp.where(tokens.selected, self.coefficient * moved, 0.0)
    return objective - held, low, high


@dataclasses.dataclass(frozen=True)
class Preference:
  """log σ(β [Δlog π_θ - Δlog π_ref]) of a pair: DPO (2305.18290) eq. 7.

  A group of two is a pair; the sign of the advantage says which row is
  preferred. Log-probs are sums over the sequence. A pair of equal rewards (and
  so of advantage 0) gives nothing. Weights that are a mean over rows then make
  the loss the mean over pairs.

  Attributes:
    beta: 0.1 in the paper.
  """

  beta: float = 0.1

  def __call__(
    self, ratio: Array, advantages: Array, tokens: Tokens
  ) -> Clipping:
    gain = sequence_sum(tokens.logprobs - tokens.ref, tokens.mask)[..., :1]
    sign = jnp.sign(jnp.sum(advantages, axis=-1, keepdims=True))
    margin = jnp.sum(sign * gain, axis=1, keepdims=True)
    value = jax.nn.log_sigmoid(self.beta * margin)
    # A pair of which one row may not train is no pair.
    value = jnp.where(jnp.all(sign != 0, axis=1, keepdims=True), value, 0.0)
    return jnp.broadcast_to(value, ratio.shape), _never(ratio), _never(ratio)
