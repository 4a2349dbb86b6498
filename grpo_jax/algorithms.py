"""An algorithm is a record of parts, and a named algorithm a few lines.

A constructor's signature is its configuration: `config.algorithm.beta=0.04`
becomes `grpo(beta=0.04)`, and a key it lacks is refused. The defaults are the
constants of the paper named in the docstring. A variant of one's own needs no
registry: `dataclasses.replace(grpo(), ratio=my_ratio)`.
"""

import dataclasses
import functools
from collections.abc import Callable

from jax import Array

from grpo_jax import advantages, losses


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """The parts that `grpo.advantage` and `grpo.update` compose.

  Attributes:
    name: for logs alone; nothing branches on it.
    advantage: (rewards [B, G], scored [B, G]) -> [B, G].
    weights: mask [B, G, T] -> token weights [B, G, T], over a mini-batch.
    ratio: (logprobs, old_logprobs, mask) -> [B, G, T].
    surrogate: (ratio, advantages) -> objective, clipped low, clipped high.
    kl: the KL term in the loss; None: no reference policy exists.
  """

  name: str
  advantage: Callable[[Array, Array], Array]
  weights: Callable[[Array], Array]
  ratio: Callable[[Array, Array, Array], Array]
  surrogate: losses.Surrogate
  kl: losses.KL | None = None


def _kl(
  beta: float | Array, estimator: Callable[[Array], Array], **how: bool
) -> losses.KL | None:
  """A KL part, or None at β = 0: an absent part costs nothing."""
  if isinstance(beta, (int, float)) and beta == 0:
    return None
  return losses.KL(estimator, beta, **how)


def grpo_sequence(beta: float | Array = 0.01) -> Algorithm:
  """The objective of "An In-Depth Look at GRPO", exactly.

    L(θ) = E[ ρ_i Â_i ] - β KL(π_θ‖π_ref),   ρ_i = π_θ(o_i|q)/π_old(o_i|q),
    Â_i = R_i - mean(R)

  No clip and no standard deviation. The KL is carried by the sequence ratio,
  ρ·k3 of the sequence, whose value and gradient are exact in expectation on
  and off policy. In expectation the first term is (G-1)/G times the policy
  improvement J(θ) - J(π_old), and so is its gradient.

  Args:
    beta: β. The article gives no value; 0 drops the term and the reference.
  """
  return Algorithm(
    name="grpo_sequence",
    advantage=advantages.group_mean,
    weights=losses.sequence_mean,
    ratio=losses.sequence_ratio,
    surrogate=losses.unclipped,
    kl=_kl(beta, losses.k3, sequence=True, ratio_weighted=True),
  )


def grpo(
  beta: float | Array = 0.04,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  ddof: int = 1,
  epsilon: float = 1e-6,
) -> Algorithm:
  """GRPO with outcome supervision, DeepSeekMath (2402.03300) eq. 3.

    1/G Σ_i 1/|o_i| Σ_t [ min(r Â, clip(r, 1-ε, 1+ε) Â) - β k3 ],
    Â = (R - mean(R)) / std(R)

  Args:
    beta: β = 0.04 in the paper; 0 drops the term and the reference.
    clip_low: ε below. The paper gives no ε; 0.2 is PPO's.
    clip_high: ε above.
    ddof: of the standard deviation; the paper does not say. TRL and verl take
      1, EasyDeL and open-instruct 0.
    epsilon: added to it; not in the paper. verl 1e-6, TRL 1e-4, Dr. GRPO's
      code 1e-8. Groups of equal rewards get exactly 0 whatever it is.
  """
  return Algorithm(
    name="grpo",
    advantage=functools.partial(
      advantages.group_normalized, ddof=ddof, epsilon=epsilon
    ),
    weights=losses.sequence_mean,
    ratio=losses.token_ratio,
    surrogate=losses.Clipped(clip_low, clip_high),
    kl=_kl(beta, losses.k3),
  )


def imitation() -> Algorithm:
  """Maximum likelihood of given completions: the warm-up phase.

    max 1/N Σ_i 1/|o_i| Σ_t log π_θ(o_{i,t})

  Supervised fine-tuning is the case G = 1, Â = 1, log π in the ratio's place.
  """
  return Algorithm(
    name="imitation",
    advantage=advantages.ones,
    weights=losses.sequence_mean,
    ratio=losses.log_policy,
    surrogate=losses.unclipped,
  )


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
  "grpo_sequence": grpo_sequence,
  "grpo": grpo,
}
