"""Eight CPU devices, rank-promotion errors, the tiny model of all tests."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

from grpo_jax.models import weight_table  # noqa: E402
from grpo_jax.models.architecture import Architecture, Model  # noqa: E402


@pytest.fixture(scope="session")
def arch():
  """Two layers, grouped heads, an untied head, three padded ids."""
  return Architecture(
    vocab=16,
    real_vocab=13,
    layers=2,
    embed=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=24,
  )


@pytest.fixture(scope="session")
def model(arch):
  return Model(arch)


@pytest.fixture(scope="session")
def params(arch):
  return jax.jit(weight_table.init, static_argnums=1)(jax.random.key(0), arch)


@pytest.fixture(scope="module")
def quick_compilation():
  """For modules whose programs cost nothing to run and much to compile."""
  name = "jax_disable_most_optimizations"
  jax.config.update(name, True)
  yield
  jax.config.update(name, False)
