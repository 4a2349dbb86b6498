"""How far does GRPO take a model of half a billion parameters on GSM8K?

    pip install -e '.[hf,data,tpu]'
    python -m grpo_jax.train --config=experiments/gsm8k_qwen2p5_0p5b.py \
        --config.mesh.fsdp=8 --workdir=DIR

`experiments/gsm8k_qwen2p5_0p5b.py:lora` trains adapters instead.

Hardware: a TPU v5e-8 (8 chips, 16 GB each) with `mesh.fsdp=8`, or one GPU of
80 GB without it. NOT RUN by this project, so no time is given. Others' figures
for this model, greedy accuracy on the 1,319 test problems, as the baselines
page of verl's documentation has them: 49.6 before, 56.7 after PPO, 54.3 after
GRPO with LoRA. Scorers differ by points; compare a run with its own step 0.
"""

from experiments import gsm8k


def get_config(form: str = "full"):
  """'full' or 'lora'."""
  return gsm8k.get_config("Qwen/Qwen2.5-0.5B-Instruct", form)
