"""GSM8K with Llama 3.2 1B: a model without much mathematics in its training.

    pip install -e '.[hf,data,tpu]' && hf auth login
    python -m grpo_jax.train --config=experiments/gsm8k_llama3p2_1b.py \
        --config.mesh.fsdp=8 --workdir=DIR

The weights are gated: accept Meta's terms on the hub first.

Hardware: a TPU v5e-8 with `mesh.fsdp=8`, or one GPU of 80 GB without it. NOT
RUN by this project; no time is given. Meta's model card has 44.4 for this model
on GSM8K, from eight examples and a chain of thought.
"""

from experiments import gsm8k


def get_config():
  """The shared settings as they are."""
  return gsm8k.get_config("meta-llama/Llama-3.2-1B-Instruct")
