"""A network of one's own for `--config.model.module`, and some that are not."""

import jax.numpy as jnp
from flax import nnx

from grpo_jax.models import flax_module


class Averages(nnx.Module):
  """Logits of the mean of what was read so far."""

  def __init__(self, vocab, rngs):
    self.table = nnx.Embed(vocab, 16, rngs=rngs)
    self.out = nnx.Linear(16, vocab, rngs=rngs)

  def __call__(self, ids):
    count = jnp.arange(1, ids.shape[1] + 1, dtype=jnp.float32)
    return self.out(jnp.cumsum(self.table(ids), axis=1) / count[None, :, None])


def make(vocab):
  return flax_module.nnx(lambda rngs: Averages(vocab, rngs))


def narrow(vocab):
  return flax_module.nnx(lambda rngs: Averages(vocab - 1, rngs))


def raises(vocab):
  raise KeyError("width")


def nothing(vocab):
  return None
