"""GSM8K with Gemma 3 1B: windows, two rotary bases, a vocabulary of 262k.

    pip install -e '.[hf,data,tpu]' && hf auth login
    python -m grpo_jax.train --config=experiments/gsm8k_gemma3_1b.py \
        --config.mesh.fsdp=8 --workdir=DIR

The weights are gated: accept Google's terms on the hub first.

Hardware: a TPU v5e-8 with `mesh.fsdp=8`, or one GPU of 80 GB without it. NOT
RUN by this project; no time and no figure are given. Gemma 3's
report has 62.8 for this model on GSM8K.
"""

from experiments import gsm8k


def get_config():
  """Room for the logits of 262,144 ids."""
  c = gsm8k.get_config("google/gemma-3-1b-it")
  c.model.logit_elements = 2**26
  return c
