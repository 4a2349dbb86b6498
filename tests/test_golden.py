"""Losses and gradients against the numpy numbers of golden/make_losses.py."""

import json
import pathlib

import jax
import numpy as np
import pytest
import toys

from grpo_jax import algorithms, grpo
from grpo_jax.types import Scores

GOLDEN = json.loads(
  pathlib.Path(__file__).with_name("golden").joinpath("losses.json").read_text()
)
ALGORITHMS = {
  "article_rho_k3_b0.04": algorithms.grpo_sequence(beta=0.04),
  "grpo_std1_k3_b0.04_eps0.2": algorithms.grpo(),
  "grpo_std0_nokl": algorithms.grpo(beta=0.0, ddof=0),
}


@pytest.fixture(scope="module")
def computed():
  """Every loss and gradient by the package, in one program."""
  lengths = np.array(GOLDEN["lengths"])
  prompts = toys.pack_prompts([[1]] * len(lengths))
  rollout = toys.pack_rollout(
    prompts, [[[0] * n for n in row] for row in lengths]
  )
  rewards = toys.give(GOLDEN["rewards"])

  def run(policies, old, ref):
    out = {}
    for name, algorithm in ALGORITHMS.items():
      for where, policy in policies.items():
        # On policy no old log-probs are needed: the policy is its own.
        scores = Scores(old if where == "offpolicy" else None, ref)
        batch = grpo.advantage(rewards, rollout, scores, algorithm=algorithm)
        out[name, where] = jax.value_and_grad(grpo.loss, has_aux=True)(
          {"logprobs": policy}, {}, batch, model=None, algorithm=algorithm
        )
    return out

  with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
    patch.setattr(grpo, "rollout_logprobs", toys.array_source)
    arrays = jax.tree.map(
      np.array,
      tuple(GOLDEN[k] for k in ("logprobs", "old_logprobs", "ref_logprobs")),
      is_leaf=lambda x: isinstance(x, list),
    )
    return jax.device_get(toys.jit(run)(*arrays))


@pytest.mark.parametrize("where", ["offpolicy", "onpolicy"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient(computed, name, where):
  (loss, sums), gradient = computed[name, where]
  want = GOLDEN["losses"][name][where]
  assert abs(loss - want["loss"]) < 1e-9
  np.testing.assert_allclose(
    gradient["logprobs"], want["gradient"], rtol=0, atol=1e-7
  )
  if name != "article_rho_k3_b0.04":
    policy, old = (np.array(GOLDEN["logprobs"][where]), GOLDEN["old_logprobs"])
    ratio = np.exp(policy - old)
    rewards = np.array(GOLDEN["rewards"])
    sign = np.sign(rewards - rewards.mean(1, keepdims=True))[..., None]
    assert sums["clip_high"] == np.sum((sign > 0) & (ratio > 1.2))
    assert sums["clip_low"] == np.sum((sign < 0) & (ratio < 0.8))
    assert sums["clip_high"] + sums["clip_low"] == (
      9 if where == "offpolicy" else 0
    )
