"""Sequence ratios on routed experts: Qwen3-30B-A3B with GSPO on MATH.

    pip install -e '.[hf,data,math,tpu]'
    python -m grpo_jax.train --config=experiments/qwen3_30b_a3b_gspo.py \
        --workdir=gs://BUCKET/RUN

Token ratios of a mixture of experts jump when an update changes a token's
experts; the sequence's ratio (Zheng et al. 2025, arXiv 2507.18071) does not
follow one token. Four mini-batches a rollout and clips of 3e-4 and 4e-4, as in
that paper; its rewards and curves are of other data and are not repeated here.

Hardware: a TPU v5p-128 (64 chips, 95 GB each): fsdp 16 x tensor 4, a quarter of
the 128 experts on a chip. NOT RUN by this project.
"""

from experiments import base


def get_config():
  """MATH, four updates a rollout, no KL term."""
  c = base.get_config()
  c.model.path = "Qwen/Qwen3-30B-A3B-Instruct-2507"
  c.model.dtype = "bfloat16"
  c.model.remat = True
  c.mesh.fsdp, c.mesh.tensor = 16, 4
  c.task.name = "math"
  c.data.chat = True
  c.data.max_prompt_tokens = 512
  c.data.long_prompts = "drop"
  c.steps = 200
  c.batch.prompts_per_step = 256
  c.batch.prompts_per_update = 64
  c.batch.micro_batch_prompts = 16
  c.sampling.group_size = 8
  c.sampling.max_tokens = 2048
  c.algorithm.name = "gspo"
  c.optimizer.learning_rate = 1e-6
  c.optimizer.warmup_steps = 10
  c.optimizer.decay = "constant"
  c.eval.every = 20
  c.eval.prompts = 500
  c.eval.prompts_per_batch = 128
  c.checkpoint.every = 10
  c.log.every = 1
  return c
