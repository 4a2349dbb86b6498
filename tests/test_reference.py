"""Two donated updates of the built programs on one rollout (faults A19, A35).

The reference must be another set of buffers than the policy's, or the first
donated update writes over it; and the second pass must see moved weights.
"""

import re

import jax
import numpy as np
import pytest
import toys

from experiments import base
from grpo_jax import build, config, sharding
from grpo_jax.compile import Programs
from grpo_jax.preemption import Guard
from grpo_jax.types import Scores

B, G, T = 4, 4, 5


def settings():
  """One layer, two passes over a rollout, one token's logits at a time."""
  c = base.get_config()
  c.task.name = "words"
  c.model.layers, c.model.embed, c.model.ffn = 1, 8, 12
  c.model.heads = c.model.kv_heads = 2
  c.model.head_dim = 4
  c.model.logit_elements = 1
  c.batch.prompts_per_step, c.batch.epochs = B, 2
  c.sampling.group_size, c.sampling.max_tokens = G, T
  c.algorithm.name, c.algorithm.beta = "grpo", 0.1
  c.optimizer.learning_rate, c.optimizer.warmup_steps = 0.05, 0
  c.eval.every = c.warmup.steps = 0
  return config.resolve(c)


@pytest.fixture(scope="module")
def history():
  """What two updates did; compiled without XLA's expensive passes."""
  devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  mesh = jax.sharding.Mesh(devices, sharding.AXES)
  e = settings()
  built = build.build(e, Programs(mesh, Guard(), lambda line: None))
  jax.config.update("jax_disable_most_optimizations", True)
  yield follow(e, built)
  jax.config.update("jax_disable_most_optimizations", False)


def pointers(tree):
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}


def follow(e, built):
  assert e.needs_old_scores
  [plan] = e.batching.slabs
  params = jax.device_put(
    toys.draw_params(e.model.arch),
    jax.tree.map(lambda x: x.sharding, built.params_target()),
  )
  key = jax.device_put(jax.random.key(0), built.replicated())
  out = {"params": jax.tree.map(np.array, params)}  # they are donated
  state = built.begin["rl"](params, key, built.put_scalar(0))
  out["shared"] = pointers(state.ref) & pointers(state.trainable)
  out["reference"] = [jax.tree.map(np.array, state.ref)]
  rollout = toys.some_rollout(toys.some_prompts(lengths=(3, 1, 2, 3)), G, T)
  rollout = built.to_device(rollout)
  batch = built.advantage(
    built.to_device(toys.give(np.eye(B, G, dtype=np.float32))),
    rollout,
    Scores(
      logprobs=built.score[plan](state.params, rollout),
      ref_logprobs=built.score[plan](state.ref, rollout),
    ),
    None,
  )
  out["seen"], out["policy"], out["deleted"] = [], [], []
  for last in (0, 1):
    out["policy"].append(jax.tree.map(np.array, state.trainable))
    given = state
    state, seen = built.update[plan](state, batch, built.put_scalar(last))
    out["seen"].append(jax.device_get(seen))
    out["reference"].append(jax.tree.map(np.array, state.ref))
    out["deleted"].append(
      all(x.is_deleted() for x in jax.tree.leaves(given.trainable))
    )
  out["step"] = int(state.step)
  [executable] = built.update[plan].compiled.values()
  out["text"] = executable.as_text()
  out["vocab"] = e.model.arch.vocab
  return out


def test_the_reference_is_a_copy_that_donation_cannot_reach(history):
  assert not history["shared"]
  assert history["deleted"] == [True, True]
  first = history["reference"][0]
  for later in (*history["reference"][1:], history["params"]):
    jax.tree.map(np.testing.assert_array_equal, first, later)
  jax.tree.map(np.testing.assert_array_equal, first, history["policy"][0])
  moved = np.abs(history["policy"][1]["head"] - first["head"]).max()
  assert moved > 0.01


def test_the_second_pass_sees_moved_weights(history):
  one, two = history["seen"]
  assert abs(one["ratio/max"] - 1) < 1e-5 and abs(one["ratio/mean"] - 1) < 1e-5
  assert abs(one["kl/ref"]) < 1e-6 < 1e-3 < two["kl/ref"]
  assert two["ratio/max"] > 1.01
  assert one["ratio/clip_frac_low"] == one["ratio/clip_frac_high"] == 0
  assert two["sampler/logprob_gap_mean"] == one["sampler/logprob_gap_mean"]
  assert history["step"] == 1


def test_no_array_of_every_tokens_logits_is_ever_made(history):
  whole = B * G * T * history["vocab"]
  sizes = [
    np.prod([int(n) for n in shape.split(",")])
    for shape in re.findall(
      r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", history["text"]
    )
  ]
  assert B * G * history["vocab"] in sizes  # one token's: the chunks
  assert max(sizes) < whole, max(sizes)
