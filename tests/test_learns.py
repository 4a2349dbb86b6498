"""A short run through the real programs must learn; a known step must stand."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from experiments import base
from grpo_jax import build, config, data, sharding, steps
from grpo_jax.compile import Programs
from grpo_jax.preemption import Guard
from grpo_jax.rollouts import Position
from grpo_jax.tasks.base import Example, Reward, Task, question_id


def letter() -> Task:
  """Reward 1 where the first byte is a lower-case letter: 1 in 10 at first."""
  examples = [Example(question_id(str(i)), f"{i:03d}", "") for i in range(200)]

  def reward(example, completion):
    right = float(completion.text[:1].islower())
    return Reward(total=right, extracted=completion.text[:1])

  return Task(
    name="letter",
    splits={
      "train": examples[:100],
      "tuning": examples[100:150],
      "heldout": examples[150:],
    },
    reward=reward,
  )


@pytest.fixture(scope="module")
def built():
  c = base.get_config()
  c.task.name = "test_learns:letter"
  c.model.embed, c.model.ffn, c.model.layers = 32, 32, 1
  c.model.heads = c.model.kv_heads = 2
  c.batch.prompts_per_step, c.sampling.group_size = 8, 8
  c.sampling.max_tokens = 2
  c.steps, c.eval.every = 40, 0
  c.optimizer.learning_rate, c.optimizer.decay = 1e-2, "constant"
  e = config.resolve(c)
  devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  mesh = Mesh(devices, sharding.AXES, axis_types=(AxisType.Auto,) * 3)
  with Guard() as guard:
    yield build.build(e, Programs(mesh, guard, say=lambda text: None))


@pytest.fixture
def state(built):
  key = jax.device_put(jax.random.key(0), built.replicated())
  return built.begin["rl"](built.init(key), key, built.put_scalar(0))


def test_a_short_run_learns(built, state):
  stream = data.Stream(built.experiment.task.split("train"), 0, "rl")
  rewards = []
  for index in range(40):
    result = steps.reinforce_step(
      built, state, stream, Position(index + 1, index)
    )
    state = result.state
    rewards.append(result.metrics["reward/mean"])
  assert np.mean(rewards[:5]) < 0.3
  assert np.mean(rewards[-5:]) > 0.9


GOLDEN = {
  "reward/mean": 0.125,
  "group/frac_mixed": 0.75,
  "tokens/trained": 127.0,
  "entropy": 5.0674586,
  "kl/ref": 0.0136746,
  "kl/ref_k1": 0.0037869,
  "loss/kl": 0.00030185,
  "ratio/mean": 1.0,
  "update/grad_norm": 1.1797441,
  "update/learning_rate": 0.004,
}
MESSAGE = (
  "a known training step gives another {name}: {got!r}, was {want!r}. If you"
  " changed the model, the sampler, an algorithm or the optimizer on purpose,"
  " check the new value by other means and put it in GOLDEN; if not, something"
  " moved that should not have."
)


def test_golden_step(built, state):
  # The second step: the first one's update is in it.
  stream = data.Stream(built.experiment.task.split("train"), 0, "rl")
  for index in range(2):
    result = steps.reinforce_step(
      built, state, stream, Position(index + 1, index)
    )
    state = result.state
  for name, want in GOLDEN.items():
    got = result.metrics[name]
    assert got == pytest.approx(want, rel=2e-3, abs=1e-6), MESSAGE.format(
      name=name, got=got, want=want
    )


def test_the_trainer_sees_the_sampled_ids(built, state):
  """Text is for rewards alone: a random policy's bytes are often not UTF-8."""
  stream = data.Stream(built.experiment.task.split("train"), 0, "rl")
  result = steps.reinforce_step(built, state, stream, Position(1, 0))
  tokenizer = built.experiment.tokenizer
  trained, again = np.asarray(result.batch.rollout.ids), []
  for b, group in enumerate(result.groups):
    for g, row in enumerate(group["completions"]):
      n = len(row["ids"])
      np.testing.assert_array_equal(trained[b, g, :n], row["ids"])
      assert len(row["logprobs"]) == n
      again.append(tokenizer.encode(row["text"]) == list(row["ids"]))
  assert not all(again), (
    "encoding the text anew would have been another rollout"
  )
