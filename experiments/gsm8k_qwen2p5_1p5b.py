"""GSM8K with Qwen2.5-1.5B-Instruct: the size most ablations are made with.

    pip install -e '.[hf,data,tpu]'
    python -m grpo_jax.train --config=experiments/gsm8k_qwen2p5_1p5b.py \
        --config.mesh.fsdp=8 --workdir=DIR

`experiments/gsm8k_qwen2p5_1p5b.py:lora` trains adapters instead.

Hardware: a TPU v5e-8 with `mesh.fsdp=8`, or one GPU of 80 GB without it. NOT
RUN by this project, so no time is given. Others' figures for this model on the
test problems: 77.9 after GRPO with LoRA (the baselines page of verl's
documentation); 78.4 at best and 77.8 at the end of ten epochs on eight A800
(AReaL, examples/math/README.md, another recipe: G = 4, learning rate 6e-6).
"""

from experiments import gsm8k


def get_config(form: str = "full"):
  """'full' or 'lora'."""
  return gsm8k.get_config("Qwen/Qwen2.5-1.5B-Instruct", form)
