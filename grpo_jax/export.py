"""Writes a trained policy as a directory that transformers loads.

    python -m grpo_jax.export --workdir=RUN[@STEP|@best] --out=DIR [--adapters]

Weights are the policy's, in float32; tokenizer, chat template and generation
config are those of the model it started from. Adapters are merged into the
weights, or with --adapters written alone, in PEFT's format.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from absl import flags

from grpo_jax import cli, sharding
from grpo_jax.disk import explained
from grpo_jax.errors import UserError
from grpo_jax.hf_tokenizer import HFTokenizer
from grpo_jax.models import hf, lora, peft
from grpo_jax.policy import Policy, is_run, open_policy


def export(policy: Policy, directory: str) -> None:
  """Writes weights, config, tokenizer and generation config.

  A policy from scratch has the byte tokenizer, which transformers does not:
  then the weights and the config are all there is.

  Raises:
    UserError: the directory holds a model already, or cannot be written.
  """
  base, arch = policy.base, policy.model.arch
  if policy.model.decoder is not None:
    raise UserError(
      "a network of model.module is no model that transformers knows; its"
      " checkpoints are its export"
    )
  params = lora.merged(policy.params, policy.model)
  if not base:
    # Rows that no token has are masked here; another reader would sample them.
    base = {"model_type": "llama"}
    rows = arch.real_vocab
    tables = {k: params[k][:rows] for k in ("embed", "head") if k in params}
    params = {**params, **tables}
    arch = dataclasses.replace(arch, vocab=rows)
  with explained(f"could not write {directory}"):
    hf.export(params, arch, base, directory)
  out = pathlib.Path(directory)
  tokenizer = policy.tokenizer
  if isinstance(tokenizer, HFTokenizer):
    tokenizer.raw.save_pretrained(directory)
  generation = {}
  if policy.companions:
    found = pathlib.Path(policy.companions) / "generation_config.json"
    if found.exists():
      generation = json.loads(found.read_text())
  stops = list(tokenizer.stop_ids())
  generation |= {
    "eos_token_id": stops if len(stops) > 1 else stops[0],
    "pad_token_id": tokenizer.pad_id,
  }
  text = json.dumps(generation, indent=2)
  (out / "generation_config.json").write_text(text)


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("workdir", None, "the run, RUN@STEP or RUN@best")
  flags.DEFINE_string("out", None, "directory to write")
  flags.DEFINE_bool("adapters", False, "only the adapters, in PEFT's format")


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  if not f.workdir or not f.out:
    raise UserError("--workdir=RUN and --out=DIR are needed")
  if not is_run(f.workdir) and not os.path.exists(f.workdir):
    raise UserError(f"no run at {f.workdir}")
  cli.check_platform("")
  policy = open_policy(f.workdir, sharding.make_mesh(-1, 1, 1))
  if f.adapters:
    with explained(f"could not write {f.out}"):
      base = policy.base_path or policy.source["run"]
      peft.export(policy.params, policy.model, base, f.out)
  else:
    export(policy, f.out)
  print(f"wrote {f.out}: {policy.source}")
  return cli.OK


if __name__ == "__main__":
  cli.run(main, define_flags)
