"""GSM8K and MATH: word problems and competition problems, with solutions."""

import re
from collections.abc import Sequence

from grpo_jax.tasks import hf_datasets, questions
from grpo_jax.tasks.answers import AnswerReward
from grpo_jax.tasks.base import Task

# GSM8K marks its sums for a calculator: 48/2 = <<48/2=24>>24.
_CALCULATOR = re.compile(r"<<[^<>]*>>")

GSM8K_TEMPLATE = (
  "{question}\nReason step by step. End with a line of #### and the answer, a"
  " number.\n"
)
MATH_TEMPLATE = (
  "{question}\nReason step by step, and put the final answer in \\boxed{}.\n"
)


def gsm8k(
  path: str = "openai/gsm8k",
  configuration: str = "main",
  tuning_fraction: float = 0.05,
  template: str = GSM8K_TEMPLATE,
  shots: int = 0,
  shots_seed: int = 0,
  extract: str = "after:####",
  match: str = "number",
  grade: str = "strict",
  unfit: str = "refuse",
  stop: str | Sequence[str] = (),
) -> Task:
  """Grade-school word problems (Cobbe et al., arXiv 2110.14168).

  7,473 problems to train on, of which a share is cut for tuning, and the 1,319
  of the test split held out. Columns `question` and `answer`: a solution, then
  a line `#### 1,000`. Shots show the solution without the calculator's marks.

  Args:
    path: of the hub, or a local copy: of that repository, or any directory
      with `train` and `test` files of these columns (then `configuration=''`).
    configuration: 'main', or 'socratic' with questions in the solutions.
    tuning_fraction: share of the training problems cut for tuning.
    template: text with `{question}`.
    shots: as for `hf_datasets.from_datasets`, and so all that follow.
    shots_seed: chooses them.
    extract: rule that reads the answer from a completion.
    match: 'number' or 'math'.
    grade: 'strict' or 'lenient'.
    unfit: 'refuse' or 'drop'.
    stop: strings, one token each, that end a completion.

  Raises:
    UserError: as `hf_datasets.from_datasets`.
  """
  return hf_datasets.build(
    "gsm8k",
    hf_datasets.Source(path, configuration, "train", "", "test"),
    questions.Reader("question", "answer", "after:####", match),
    AnswerReward(extract, match, grade),
    hf_datasets.Prompting(template, shots, shots_seed, _without_marks),
    tuning_fraction=tuning_fraction,
    heldout_fraction=0.0,
    unfit=unfit,
    stop=stop,
  )


def math(
  path: str = "nlile/hendrycks-MATH-benchmark",
  configuration: str = "",
  tuning_fraction: float = 0.05,
  template: str = MATH_TEMPLATE,
  shots: int = 0,
  shots_seed: int = 0,
  extract: str = "boxed",
  match: str = "math",
  grade: str = "strict",
  unfit: str = "drop",
  stop: str | Sequence[str] = (),
) -> Task:
  r"""Competition problems (Hendrycks et al., arXiv 2103.03874).

  The default set has 12,000 problems in its training split and the 500 of
  MATH-500 (Lightman et al., arXiv 2305.20050) in its test split, which is held
  out. Columns `problem` and `solution`; the reference answer is in the
  solution's last `\boxed{…}`. The few rows without one are left out, which the
  run says; `unfit='refuse'` names the first.

  Args:
    path: of the hub, or a local copy, or another set of these columns:
      'EleutherAI/hendrycks_math' has the original 7,500 and 5,000 in seven
      configurations.
    configuration: more than one, joined by commas, are put together.
    tuning_fraction: share of the training problems cut for tuning.
    template: text with `{question}`.
    shots: as for `hf_datasets.from_datasets`, and so all that follow.
    shots_seed: chooses them.
    extract: rule that reads the answer from a completion.
    match: 'math'.
    grade: 'strict' or 'lenient'.
    unfit: 'refuse' or 'drop'.
    stop: strings, one token each, that end a completion.

  Raises:
    UserError: as `hf_datasets.from_datasets`.
  """
  return hf_datasets.build(
    "math",
    hf_datasets.Source(path, configuration, "train", "", "test"),
    questions.Reader("problem", "solution", "boxed", match),
    AnswerReward(extract, match, grade),
    hf_datasets.Prompting(template, shots, shots_seed),
    tuning_fraction=tuning_fraction,
    heldout_fraction=0.0,
    unfit=unfit,
    stop=stop,
  )


def _without_marks(solution: str) -> str:
  return _CALCULATOR.sub("", solution)
