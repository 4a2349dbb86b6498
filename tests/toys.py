"""Tiny policies whose numbers are known, shared by the tests of the core.

A compiled program costs seconds, its run nothing, so programs are made by
`jit` below (XLA's expensive passes off) and kept per process.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np

from grpo_jax import grpo, logprobs, sampling
from grpo_jax.models import weight_table
from grpo_jax.models.architecture import Architecture, Model
from grpo_jax.types import Prompts, Rewards, Rollout

QUICK = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}

if jax.__version_info__ < (0, 11):  # later ones do not have the option
  QUICK["xla_cpu_use_fusion_emitters"] = False

ARCH = Architecture(
  vocab=16,
  real_vocab=13,
  layers=2,
  embed=8,
  heads=4,
  kv_heads=2,
  head_dim=4,
  ffn=12,
)
MODEL = Model(ARCH)


def jit(fn, **options):
  """jax.jit that compiles quickly and runs slowly."""
  return jax.jit(fn, compiler_options=QUICK, **options)


def draw_params(arch, seed=0, scale=1.0):
  """Parameters from numpy: no compilation, and distributions far from flat."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda w: (
      (1 if w.std is None else 0)
      + scale * rng.normal(size=w.shape) * (w.std or 0.1)
    ).astype(np.float32),
    weight_table.weights(arch),
    is_leaf=lambda x: isinstance(x, weight_table.Weight),
  )


def bigram(table):
  """A policy with logits(next | last) = table[last, next], exactly.

  One-hot embeddings, layers that add nothing, and a head that undoes the
  final norm's scale.
  """
  table = np.asarray(table, np.float64)
  n = len(table)
  arch = Architecture(n, n, 1, n, 1, 1, 2, 2)
  params = jax.tree.map(lambda x: x * 0, draw_params(arch))
  params["embed"] = np.eye(n, dtype=np.float32)
  params["final_norm"] = np.ones(n, np.float32)
  gain = 1 / np.sqrt(1 / n + arch.norm_eps)
  params["head"] = (table.T / gain).astype(np.float32)
  return Model(arch), params


def scripted(follow, vocab):
  """A policy that is all but certain: `follow[token]` is the next one."""
  table = np.zeros((vocab, vocab))
  for last, token in follow.items():
    table[last, token] = 200.0
  return bigram(table)


def pack_prompts(rows, width=None, pad=0):
  """Lists of ids -> left-padded Prompts."""
  width = width or max(map(len, rows))
  ids = np.full((len(rows), width), pad, np.int32)
  for i, row in enumerate(rows):
    ids[i, width - len(row) :] = row
  lengths = np.array([len(row) for row in rows], np.int32)
  return Prompts(ids, lengths, np.arange(len(rows), dtype=np.int32))


def pack_rollout(prompts, groups, size=None, pad=0, temperature=1.0):
  """Prompts and nested lists of completions [B][G][n] -> Rollout."""
  size = size or max(len(row) for group in groups for row in group)
  ids = np.full((len(groups), len(groups[0]), size), pad, np.int32)
  for b, g in np.ndindex(ids.shape[:2]):
    ids[b, g, : len(groups[b][g])] = groups[b][g]
  lengths = np.array([[len(r) for r in group] for group in groups], np.int32)
  return Rollout(
    prompts=prompts,
    ids=ids,
    lengths=lengths,
    truncated=np.zeros(lengths.shape, bool),
    mask=np.arange(size) < lengths[..., None],
    sampler_logprobs=np.zeros(ids.shape, np.float32),
    support=None,
    temperature=np.float32(temperature),
    policy_step=np.int32(0),
  )


def some_prompts(seed=0, lengths=(5, 1, 3), width=None, pad=0):
  """Ragged prompts of ARCH's real ids."""
  rng = np.random.default_rng(seed)
  return pack_prompts([rng.integers(1, 13, n) for n in lengths], width, pad)


def some_rollout(prompts, group=4, size=5, seed=0, **how):
  """Ragged completions of ARCH's real ids."""
  rng = np.random.default_rng(seed + 100)
  rows = [
    [rng.integers(0, 13, rng.integers(1, size + 1)) for _ in range(group)]
    for _ in prompts.lengths
  ]
  rows[0][0] = rng.integers(0, 13, size)
  return pack_rollout(prompts, rows, size, **how)


def give(total, scored=None):
  """Rewards from a nested list; not scored where NaN."""
  total = np.asarray(total)
  scored = ~np.isnan(total) if scored is None else np.asarray(scored)
  return Rewards(total, scored, total, total[..., None][..., :0])


def tree_of(vocab, size, stop=0):
  """Every completion of at most `size` tokens that ends at `stop`."""
  return [
    row[: row.index(stop) + 1] if stop in row else row
    for row in dict.fromkeys(
      r[: r.index(stop) + 1] if stop in r else r
      for r in itertools.product(range(vocab), repeat=size)
    )
  ]


def exact(batch, probability):
  """Weights under which the loss is an expectation over its rows of groups.

  The loss is linear in the weights of a row of groups: what it gives is the
  sum of probability x the loss of that group alone.
  """
  share = probability * len(probability)
  return batch.replace(weights=batch.weights * share[:, None, None])


def array_source(params, rollout, *, model, slabs=None, ref=None):
  """Stands in for `rollout_logprobs`: the parameters are the log-probs."""
  del model, slabs, ref
  return params["logprobs"], params["logprobs"] * 0


@functools.cache
def scorer(model=MODEL, slabs=None):
  """params, rollout -> log-probs and entropies."""
  return jit(
    functools.partial(logprobs.rollout_logprobs, model=model, slabs=slabs)
  )


@functools.cache
def sampler(how, model=MODEL):
  """params, prompts, key, budgets -> rollout."""

  def fn(params, prompts, key, budgets=None):
    return grpo.sample(
      params, prompts, key, model=model, sampling=how, budgets=budgets
    )

  return jit(fn)


def settings(**changes):
  """Sampling settings: three completions of six tokens, stop id 1, pad 0."""
  how = sampling.Sampling(3, 6, (1,), 0)
  return dataclasses.replace(how, **changes)


def close(a, b, tolerance):
  """Asserts two trees equal within an absolute tolerance."""
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), a, b
  )


def use_source(monkeypatch, source):
  """Lets `grpo` take log-probs from a function in place of a network."""
  monkeypatch.setattr(grpo, "rollout_logprobs", source)
  monkeypatch.setattr(
    grpo, "rollout_scores", lambda *args, **named: (source(*args, **named), {})
  )
