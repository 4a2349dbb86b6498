"""Does a run on TPUs end where others' GPU runs end? Qwen3-1.7B on GSM8K.

    pip install -e '.[hf,data,tpu]'
    python -m grpo_jax.train --config=experiments/gsm8k_qwen3_1p7b.py \
        --config.mesh.fsdp=8 --workdir=DIR
    python -m grpo_jax.check_run --workdir=DIR \
        --band=experiments/bands/gsm8k_qwen3_1p7b.json

The public record is MaxText's pull request 4015: 100 steps of GRPO reach a mean
reward of 0.8077 ± 0.005 on TPU v6e (8 x 8 chips), inside the band of a GPU
trainer, 0.8042 to 0.8199. It is THEIR figure, of their reward functions; this
project has NOT RUN it. What the record says of the recipe is the model, the
data, 100 steps and answers in \\boxed{}; batch and learning rate below are this
project's own choice.

Hardware: a TPU v6e-8 or v5p-8 with `mesh.fsdp=8` (of v5p-8's four chips 4).
"""

from experiments import gsm8k

TEMPLATE = (
  "{question}\nReason step by step, and put the final answer in \\boxed{}.\n"
)


def get_config():
  """100 steps, answers in boxes, the model's thinking mode off."""
  c = gsm8k.get_config("Qwen/Qwen3-1.7B")
  c.task.template = TEMPLATE
  c.task.extract = "boxed"
  c.data.chat_options = '{"enable_thinking": false}'
  c.steps = 100
  c.sampling.max_tokens = 1024
  return c
