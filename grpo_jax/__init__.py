"""GRPO in JAX: four pure functions, from a laptop CPU to a TPU pod slice.

Open `grpo_jax/grpo.py` first: it is the whole algorithm in reading order.
"""

__version__ = "0.1.0"
