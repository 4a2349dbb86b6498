"""Verdicts on a rollout's signal, at odd rewards and odd success rates."""

import numpy as np
import pytest

from grpo_jax import probe
from grpo_jax.rewards.runner import RewardBatch


def batch(total, success=None, scored=None):
  total = np.array(total, np.float32)
  scored = np.ones(total.shape, bool) if scored is None else np.array(scored)
  success = total if success is None else np.array(success, np.float32)
  texts = [[None] * total.shape[1] for _ in total]
  none = np.zeros((*total.shape, 0), np.float32)
  return RewardBatch(
    total=total,
    scored=scored,
    success=success,
    parts=none,
    extracted=texts,
    timed_out=np.zeros(total.shape, bool),
    errors=0,
    first_error="",
  )


def test_group_sizes_of_the_closed_form():
  sizes = [probe.useful_group_size(p) for p in (0.01, 0.05, 0.1, 0.5, 0.99)]
  assert sizes == [69, 14, 7, 2, 69]
  assert probe.useful_group_size(0.0) is None
  assert probe.useful_group_size(1.0) is None


@pytest.mark.parametrize("p", [1e-6, 1e-12, 1e-17, 1e-300, 1 - 1e-16])
def test_tiny_rates_end_at_once(p):
  group = probe.useful_group_size(p)
  assert group is None or group > 100_000


@pytest.mark.parametrize(
  ("rewards", "words"),
  [
    (batch([[1, 0], [0, 1]]), "signal: 100% of groups are mixed"),
    (batch([[0, 0], [0, 0]]), "no signal: 0%"),
    (batch([[1, 1], [1, 1]]), "make the task harder"),
    (batch([[-3, -5], [-4, -6]]), "signal: 100%"),
    (batch([[0.2, 0.4]], success=[[0, 0]]), "signal: 100%"),
    (batch([[0, 0]], scored=[[False, False]]), "no completion could be scored"),
    (batch([[0, 0]] * 9 + [[0, 1]]), "weak signal: 10%"),
  ],
)
def test_verdicts(rewards, words):
  assert str(probe.verdict(rewards)).startswith(words) or words in str(
    probe.verdict(rewards)
  )
