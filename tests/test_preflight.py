"""What a first rollout's checks must see, each fault put in by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import base
from grpo_jax import build, config, data, preflight, rollouts, sharding, steps
from grpo_jax.compile import Programs
from grpo_jax.errors import UserError
from grpo_jax.logprobs import cover
from grpo_jax.preemption import Guard
from grpo_jax.rollouts import Clock, Position
from grpo_jax.types import policy

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def run():
  """The first half of a step: everything that the checks look at."""
  c = base.get_config()
  c.task.name = "test_learns:letter"
  c.algorithm.name, c.algorithm.beta = "grpo", 0.1
  c.model.embed, c.model.ffn, c.model.layers = 16, 16, 1
  c.model.heads = c.model.kv_heads = 1
  c.batch.prompts_per_step, c.sampling.group_size = 4, 4
  c.batch.micro_batch_prompts = 2
  c.sampling.max_tokens, c.eval.every = 3, 0
  e = config.resolve(c)
  said = []
  with Guard() as guard:
    built = build.build(
      e, Programs(sharding.one_device(), guard, say=said.append)
    )
    key = jax.device_put(jax.random.key(0), built.replicated())
    state = built.begin["rl"](built.init(key), key, built.put_scalar(0))
    # Away from the start, so that the reference is another policy.
    moved = jax.tree.map(lambda x: x * 1.05, state.trainable)
    state = state.replace(trainable=moved)
    stream = data.Stream(e.task.split("train"), 0, "rl")
    sampled = rollouts.sample_and_reward(
      built, state, stream, Position(1, 0), Clock()
    )
    plan = cover(sampled.host.lengths, e.batching.slabs)
    rewards = rollouts.device_rewards(built, sampled)
    batch = steps.make_batch(built, state, sampled.rollout, rewards, plan)
    yield built, state, sampled, batch, plan, said


def test_a_sound_run_passes(run):
  built, state, sampled, batch, plan, said = run
  compiled = built.programs.count
  preflight.check(built, state, sampled, batch, plan)
  names = [x.split()[1] for x in said[compiled:] if x.startswith("compiled")]
  # The update's own programs, which a run has compiled before.
  assert set(names) <= {"take", "zeros", "gradients"}
  assert not [x for x in said if "random" in x]


def host_change(sampled, **change):
  return dataclasses.replace(
    sampled, host=dataclasses.replace(sampled.host, **change)
  )


def test_a_sampler_that_says_something_else(run):
  built, state, sampled, batch, plan, _ = run
  logprobs = sampled.host.logprobs.copy()
  logprobs[2, 1, 0] += 0.5
  with pytest.raises(UserError, match=r"completion 1 of prompt 2 .*token 0"):
    preflight.check(
      built, state, host_change(sampled, logprobs=logprobs), batch, plan
    )


def test_a_scorer_that_reads_padding_or_places(run, monkeypatch):
  built, state, sampled, _batch, plan, _ = run
  real = built.score[plan]
  calls = []

  def leaky(params, rollout):
    calls.append(0)
    out = real(params, rollout)
    return out if len(calls) == 1 else out.at[0, 3].add(0.1)

  broken = dataclasses.replace(built, score={plan: leaky})
  with pytest.raises(UserError, match=r"completion 3 of prompt 3.*other pad"):
    preflight.check_scorer(broken, state, sampled, plan)


def test_a_stop_token_that_is_not_trained_on(run):
  built, _state, sampled, batch, _plan, _ = run
  if sampled.host.truncated.all():  # make one that stopped
    truncated = sampled.host.truncated.copy()
    truncated[1, 2] = False
    ids = sampled.host.ids.copy()
    ids[1, 2, sampled.host.lengths[1, 2] - 1] = (
      built.experiment.sampling.stop_ids[0]
    )
    sampled = host_change(sampled, truncated=truncated, ids=ids)
  preflight.check_stops(built, sampled, batch)
  b, g = np.argwhere(~sampled.host.truncated)[0]
  weights = np.array(batch.weights)
  weights[b, g, sampled.host.lengths[b, g] - 1] = 0
  with pytest.raises(UserError, match="stop token is not trained on"):
    preflight.check_stops(built, sampled, batch.replace(weights=weights))
  weights = np.array(batch.weights) + 1.0
  if (sampled.host.lengths < weights.shape[-1]).any():
    with pytest.raises(UserError, match="padding is trained on"):
      preflight.check_stops(built, sampled, batch.replace(weights=weights))


def test_a_reference_that_does_not_act(run):
  built, state, _sampled, batch, plan, _ = run
  deaf = dataclasses.replace(built, accumulate={plan: lambda *args: args[-1]})
  with pytest.raises(UserError, match="does not move with the reference"):
    preflight.check_reference(deaf, state, batch)


def test_rewards_that_change_are_said(run, monkeypatch):
  built, _state, sampled, _batch, _plan, said = run
  total = sampled.rewards.total.copy()
  total[0, 1] += 1
  rewards = dataclasses.replace(sampled.rewards, total=total)
  other = dataclasses.replace(sampled, rewards=rewards)
  preflight.check_rewards(built, other)
  assert "completion 1 of prompt 0" in said[-1] and "random" in said[-1]


def test_the_gap_of_a_run_without_a_scorer(run):
  built, *_ = run
  preflight.check_gap(built, {"sampler/logprob_gap_max": 1e-5})
  preflight.check_gap(built, {"sampler/logprob_gap_max": float("nan")})
  with pytest.raises(UserError, match="not 1 on fresh samples"):
    preflight.check_gap(built, {"sampler/logprob_gap_max": 0.1})


def test_policy_leaves_a_critic_out():
  assert policy({"embed": 1, "critic": {"value": 2}}) == {"embed": 1}
