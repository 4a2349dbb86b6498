"""Package and extras. Tool settings live in pyproject.toml."""

import re

import setuptools

with open("grpo_jax/__init__.py") as f:
  VERSION = re.search(r'__version__ = "([^"]+)"', f.read()).group(1)
with open("README.md") as f:
  README = f.read()

# Tokenizers, chat templates and weights of other people's models.
HF = ["transformers>=5.0", "safetensors>=0.5", "gguf>=0.17", "jinja2>=3.1"]
# Reads mathematical answers; it pins the reader that it was written for.
MATH = ["math-verify>=0.9,<0.10"]
DATA = ["datasets>=5.0,<6"]  # 270 MB, most of it pyarrow and pandas
TEST = ["pytest>=8.0", "hypothesis>=6.100", "ruff>=0.6", *HF, *MATH, *DATA]

setuptools.setup(
  name="grpo_jax",
  version=VERSION,
  description="Group Relative Policy Optimization in JAX: four pure functions",
  long_description=README,
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["grpo_jax*", "experiments*"]),
  install_requires=[
    "jax>=0.10.2",
    "flax>=0.12.8",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "ml_collections>=1.1.0",
    "absl-py>=2.1",
    "numpy>=2.0",
    "scipy>=1.13",  # jax has it too; here for the t distribution
    "reasoning-gym>=0.1.19",  # the word list and the procedural tasks
    "tensorboardX>=2.6",
    "rich>=13.0",
    "matplotlib>=3.8",
  ],
  extras_require={
    "test": TEST,
    "hf": HF,
    "math": MATH,
    "data": DATA,
    # PyTorch for parity checks; a plain `torch` pulls gigabytes of CUDA.
    "parity": [*HF, "torch==2.13.0", "accelerate>=1.0", "peft>=0.17"],
    "gcs": ["gcsfs>=2025.1"],  # models in gs://
    "tpu": ["jax[tpu]>=0.10.2"],
    "cuda": ["jax[cuda13]>=0.10.2"],
  },
)
