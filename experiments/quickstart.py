"""Does a reward of 0 or 1 overturn a mistake that imitation taught?"""

from experiments import base


def get_config(preset: str = "grpo_sequence"):
  """The quickstart under a named algorithm."""
  c = base.get_config()
  c.algorithm.name = preset
  c.steps = 160
  c.batch.prompts_per_step = 16
  c.sampling.group_size = 16
  c.sampling.max_tokens = 6
  c.warmup.steps = 200
  c.eval.prompts = 512
  c.eval.prompts_per_batch = 128
  return c
