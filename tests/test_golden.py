"""22 losses and their gradients against numpy, which owes the package nothing.

`golden/losses.json` is one fixed ragged batch (3 prompts x 4 completions of at
most 6 tokens, one group of equal rewards, 9 of 43 tokens clipped), and the loss
and its gradient in the policy's log-probs for each row, off- and on-policy:
float64, gradients by central differences. A row's name says which parts it
combines; they need not be a preset's.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import toys

from grpo_jax import (
  advantages,
  algorithms,
  baselines,
  corrections,
  grpo,
  token_weights,
  variants,
)
from grpo_jax.advantages import Outcome
from grpo_jax.algorithm import normalized
from grpo_jax.kl import KL, k1, k3
from grpo_jax.types import Scores

GOLDEN = json.loads(
  pathlib.Path(__file__).with_name("golden").joinpath("losses.json").read_text()
)
SHAPE = (3, 4, 6)

grpo_std = algorithms.grpo(beta=0.0)
batch_token = dataclasses.replace(grpo_std, weights=token_weights.token_mean)
article = algorithms.grpo_sequence(beta=0.04)
replace = dataclasses.replace

ROWS = {
  "blog_seqprod_unclipped_k3seq_b0.04": replace(
    article, kl=KL(k3, 0.04, sequence=True)
  ),
  "article_seqprod_unclipped_rho_k1seq_b0.04": replace(
    article, kl=KL(k1, 0.04, sequence=True, ratio_weighted=True)
  ),
  "article_seqprod_unclipped_rho_k3seq_b0.04": article,
  "grpo_std1_k3_b0.04_eps0.2": algorithms.grpo(),
  "grpo_std0_nokl": algorithms.grpo(beta=0.0, ddof=0),
  "dr_grpo_L8": variants.dr_grpo(tokens=8),
  "dapo_prompt_tok_std1": variants.dapo(),
  "dapo_batch_tok_std1": variants.dapo(average="batch"),
  "gspo_std1_eps.03_.04": variants.gspo(0.03, 0.04),
  "gspo_token_std1_eps.03_.04": variants.gspo_token(0.03, 0.04),
  "rloo_onpolicy_logp": algorithms.rloo(beta=0.0),
  "reinforcepp_baseline_tokwhiten": variants.reinforce_pp_baseline(beta=0.0),
  "cispo_std1_max1.2_prompt_tok": variants.cispo(clip_high=0.2),
  "sapo_std1": variants.sapo(),
  "lite_ppo_batchstd1_batch_tok": variants.lite_ppo(),
  "grpo_tis_C1.05_batch_tok": replace(
    batch_token, correction=corrections.Truncated(1.05)
  ),
  "grpo_icepop_.95_1.05_batch_tok": replace(
    batch_token, correction=corrections.Banded(0.95, 1.05)
  ),
  "dppo_tv.05_mean_L8": variants.dppo(tokens=8, bound=0.05),
  "v32_unbiased_kl_b0.04_mean": replace(
    algorithms.deepseek_v32(beta=0.04),
    correction=grpo_std.correction,  # the row has no off-policy mask
  ),
  "gmpo_std1_e.4": variants.gmpo(),
  "maxrl_onpolicy_logp_seqsum": variants.maxrl(),
  "opo_onpolicy_logp_seqsum": variants.opo(),
}


def array(name):
  return np.array(GOLDEN[name]).reshape(SHAPE)


def rollout_of():
  lengths = np.array(GOLDEN["lengths"]).reshape(SHAPE[:2])
  prompts = toys.pack_prompts([[1]] * SHAPE[0])
  return toys.pack_rollout(prompts, [[[0] * n for n in row] for row in lengths])


@pytest.fixture(scope="module")
def computed():
  """Every loss and gradient by the package, in one program."""
  rewards = toys.give(np.array(GOLDEN["rewards"]).reshape(SHAPE[:2]))
  rollout = rollout_of()

  def run(policies, old, ref, sampler):
    out = {}
    for name, algorithm in ROWS.items():
      for where, policy in policies.items():
        # On policy no old log-probs are needed: the policy is its own.
        scores = Scores(old if where == "offpolicy" else None, ref)
        batch = grpo.advantage(
          rewards,
          rollout.replace(sampler_logprobs=sampler),
          scores,
          algorithm=algorithm,
        )
        out[name, where] = jax.value_and_grad(grpo.loss, has_aux=True)(
          {"logprobs": policy}, {}, batch, model=None, algorithm=algorithm
        )
    return out

  with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
    toys.use_source(patch, toys.array_source)
    new, old = array("logp_new"), array("logp_old")
    policies = {"offpolicy": new, "onpolicy": old}
    out = toys.jit(run)(policies, old, array("logp_ref"), array("logp_rollout"))
    return jax.device_get(out)


def test_every_row_is_there():
  assert ROWS.keys() == GOLDEN["offpolicy"].keys() == GOLDEN["onpolicy"].keys()


@pytest.mark.parametrize("where", ["offpolicy", "onpolicy"])
@pytest.mark.parametrize("name", ROWS)
def test_loss_and_gradient(computed, name, where):
  (loss, _), gradient = computed[name, where]
  want = GOLDEN[where][name]
  assert abs(loss - want["loss"]) < 1e-9
  np.testing.assert_allclose(
    gradient["logprobs"],
    np.array(want["grad"]).reshape(SHAPE),
    rtol=0,
    atol=1e-7,
  )


def test_the_clip_counts_the_tokens_it_binds_on(computed):
  for where, count in (("offpolicy", 9), ("onpolicy", 0)):
    (_, sums), _ = computed["grpo_std1_k3_b0.04_eps0.2", where]
    assert sums["clip_high"] + sums["clip_low"] == count
  ratio = np.exp(array("logp_new") - array("logp_old"))
  rewards = np.array(GOLDEN["rewards"]).reshape(SHAPE[:2])
  sign = np.sign(rewards - rewards.mean(1, keepdims=True))[..., None]
  (_, sums), _ = computed["grpo_std1_k3_b0.04_eps0.2", "offpolicy"]
  assert sums["clip_high"] == np.sum((sign > 0) & (ratio > 1.2))
  assert sums["clip_low"] == np.sum((sign < 0) & (ratio < 0.8))


ADVANTAGES = {
  "mean": advantages.group_mean,
  "loo": advantages.leave_one_out,
  "std0": normalized(ddof=0).fn,
  "std1": normalized(ddof=1).fn,
  "batchstd1": functools.partial(
    advantages.group_mean_batch_std, ddof=1, epsilon=1e-6
  ),
  "maxrl": advantages.success_normalized,
}


@pytest.mark.parametrize("name", [*ADVANTAGES, "opo"])
def test_advantages(name):
  part = variants.opo().advantage
  if name in ADVANTAGES:
    part = Outcome(ADVANTAGES[name])
  rewards = np.array(GOLDEN["rewards"]).reshape(SHAPE[:2])
  with jax.enable_x64(True):
    got = part(toys.give(rewards), rollout_of(), Scores())[..., 0]
  want = np.array(GOLDEN["advantages"][name]).reshape(SHAPE[:2])
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


def test_the_gradient_coefficients_of_the_unified_paradigm():
  """2402.03300 §5.2: on fresh samples each row is GC · ∇log π / |o|."""
  rollout = rollout_of()
  rewards = toys.give(np.array(GOLDEN["rewards"]).reshape(SHAPE[:2]))
  old, ref = array("logp_old"), array("logp_ref")
  rows = 12 * rollout.lengths[..., None]
  std = np.array(GOLDEN["advantages"]["std1"]).reshape(*SHAPE[:2], 1)
  correct = rewards.total[..., None]
  gain = ((old - ref) * rollout.mask).sum(-1)

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  # Pairs: rows 0 and 1 of the first two prompts' groups.
  pairs = slice(0, 2)
  sign = np.sign(
    rewards.total[:2, pairs] - rewards.total[:2, pairs].mean(1)[:, None]
  )
  margin = 0.1 * (sign * gain[:2, pairs]).sum(1, keepdims=True)
  coefficients = {
    baselines.imitation(): np.ones_like(std),
    baselines.rft(): correct,
    baselines.online_rft(): correct,
    algorithms.grpo(): std + 0.04 * (np.exp(ref - old) - 1),
  }
  with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
    toys.use_source(patch, toys.array_source)
    for algorithm, coefficient in coefficients.items():
      batch = grpo.advantage(
        rewards, rollout, Scores(None, ref), algorithm=algorithm
      )
      _, gradient = jax.value_and_grad(grpo.loss, has_aux=True)(
        {"logprobs": old}, {}, batch, model=None, algorithm=algorithm
      )
      want = np.where(rollout.mask, -coefficient / rows, 0)
      np.testing.assert_allclose(gradient["logprobs"], want, atol=1e-9)
    # DPO by its own formula: -β σ(-margin) on each token, signed, over pairs.
    dpo = baselines.dpo()
    two = jax.tree.map(
      lambda x: x[:2, pairs] if x.ndim > 1 else x, rollout.replace(prompts=None)
    ).replace(prompts=toys.pack_prompts([[1]] * 2))
    batch = grpo.advantage(
      toys.give(rewards.total[:2, pairs]),
      two,
      Scores(None, ref[:2, pairs]),
      algorithm=dpo,
    )
    (value, _), gradient = jax.value_and_grad(grpo.loss, has_aux=True)(
      {"logprobs": old[:2, pairs]}, {}, batch, model=None, algorithm=dpo
    )
    used = (sign != 0).any(1)
    loss = np.where(used[:, None], -np.log(sigmoid(margin)), 0).mean()
    want = -0.1 * sigmoid(-margin)[..., None] * sign[..., None] / 2
    want = np.where(two.mask & used[:, None, None], want, 0)
    np.testing.assert_allclose(value, loss, atol=1e-9)
    np.testing.assert_allclose(gradient["logprobs"], want, atol=1e-9)
