"""Does a reward of 0 or 1 overturn a mistake that imitation taught?

A policy of 123,200 parameters, trained from nothing, learns to spell real
English words of three to five letters backwards, byte by byte. Its teacher is
synthetic: it is right 30 % of the time and otherwise makes one mistake, the
first two letters swapped. Imitation therefore learns the mistake as its
likeliest answer. GRPO with reward 1 for the exact word, else 0, overturns it.
(Clean demonstrations alone would also solve this task: it is a demonstration
of the machinery at the size of a laptop.)

    python -m grpo_jax.train --config=experiments/quickstart.py --workdir=DIR
    python -m grpo_jax.train --config=experiments/quickstart.py:grpo ...

Two CPU cores, 71 to 85 seconds with compilation. Expect, over five seeds, 0.31
to 0.35 of 512 held-out words sampled right before and 0.96 to 1.00 after; of
likeliest answers 0.08 to 0.20 before and 0.98 to 1.00 after.
"""

from experiments import base


def get_config(preset: str = "grpo_sequence"):
  """The quickstart under a named algorithm."""
  c = base.get_config()
  c.algorithm.name = preset
  c.steps = 240
  c.task.name = "words"
  c.task.kind = "reverse"
  c.task.min_letters = 3
  c.task.max_letters = 5
  c.task.teacher_accuracy = 0.3
  c.model.rope_theta = 100.0  # words are short: no slow rotations
  c.batch.prompts_per_step = 32
  c.sampling.group_size = 8
  c.sampling.max_tokens = 6  # five letters and the stop token
  c.warmup.steps = 300
  c.warmup.learning_rate = 4e-3
  c.optimizer.learning_rate = 1e-3
  c.eval.every = 40
  c.eval.prompts = 512
  c.eval.prompts_per_batch = 128
  return c
