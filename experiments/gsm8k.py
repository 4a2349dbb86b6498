"""What the GSM8K experiments share: the task, the prompt, the batch.

64 prompts and 8 answers each a step, 117 steps an epoch; rewards are 1 for the
right number after ####, so part of an early gain is the format: `lenient`
success, which reads any last number, is reported beside it.
"""

from experiments import base
from grpo_jax.errors import UserError

FORMS = ("full", "lora")


def get_config(model: str, form: str = "full"):
  """GSM8K for an instruction-tuned model.

  Args:
    model: a hub id.
    form: 'full' fine-tuning, or 'lora': adapters of rank 32 on every
      projection, at ten times the learning rate.
  """
  if form not in FORMS:
    raise UserError(f"unknown form {form!r}; forms are {', '.join(FORMS)}")
  c = base.get_config()
  c.model.path = model
  c.model.dtype = "bfloat16"
  c.model.remat = True
  c.task.name = "gsm8k"
  c.data.chat = True
  c.data.max_prompt_tokens = 256
  c.data.long_prompts = "drop"
  c.steps = 117
  c.batch.prompts_per_step = 64
  c.batch.micro_batch_prompts = 8
  c.sampling.group_size = 8
  c.sampling.max_tokens = 512
  c.algorithm.name = "grpo"
  c.algorithm.beta = 0.001
  c.optimizer.learning_rate = 1e-6
  c.optimizer.warmup_steps = 5
  c.optimizer.decay = "constant"
  c.eval.every = 20
  c.eval.prompts = 1319
  c.eval.prompts_per_batch = 64
  c.checkpoint.every = 20
  c.log.every = 1
  if form == "lora":
    c.lora.rank, c.lora.alpha = 32, 64.0
    c.optimizer.learning_rate = 1e-5
  return c
