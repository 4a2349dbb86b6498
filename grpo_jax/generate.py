"""Text from a policy: one prompt, a file of prompts, or a chat.

python -m grpo_jax.generate --model=RUN_OR_PATH --prompt='12 + 30 ='
python -m grpo_jax.generate --model=RUN_OR_PATH --file=prompts.txt
python -m grpo_jax.generate --model=RUN_OR_PATH --chat
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from grpo_jax import cli, grpo, sharding
from grpo_jax.compile import Programs, use_cache
from grpo_jax.draws import Sampling, choose
from grpo_jax.errors import UserError
from grpo_jax.hf_tokenizer import HFTokenizer
from grpo_jax.models.decoders import decoder
from grpo_jax.policy import Policy, open_policy
from grpo_jax.preemption import Guard, Preempted, leave
from grpo_jax.types import Array, Params, Prompts

WIDTH = 64  # prompts are padded to a multiple: few shapes are compiled


def encode(policy: Policy, texts: Sequence[str]) -> Prompts:
  """Prompts as left-padded ids, on the host: [B] texts -> [B, P]."""
  rows = [policy.tokenizer.encode_prompt(text) for text in texts]
  if any(not row for row in rows):
    raise UserError("a prompt is empty; a completion needs a token before it")
  width = -(-max(map(len, rows)) // WIDTH) * WIDTH
  ids = np.full((len(rows), width), policy.tokenizer.pad_id, np.int32)
  for i, row in enumerate(rows):
    ids[i, width - len(row) :] = row
  return Prompts(
    ids=ids,
    lengths=np.array([len(row) for row in rows], np.int32),
    ordinals=np.arange(len(rows), dtype=np.int32),
  )


class Streamer:
  """Decodes one prompt token by token, printing as it goes."""

  def __init__(self, policy: Policy, programs: Programs, sampling: Sampling):
    """Binds the programs, and lays the weights out for decoding once."""
    self._policy, self._sampling = policy, sampling
    self._guard = programs.guard
    model, net = policy.model, decoder(policy.model)

    def prepare(params: Params) -> Params:
      return net.unstack(net.prepare(params, model), model)

    def start(params: Params, prompts: Prompts) -> tuple:
      params = net.prepare(params, model)
      kept, _ = net.prefill(params, prompts, model=model)
      return kept, net.empty_cache(1, 1, sampling.max_tokens, model)

    def turn(
      params: Params,
      token: Array,
      kept: Any,
      cache: Any,
      length: Array,
      t: Array,
      key: Array,
    ) -> tuple[Array, Any]:
      hidden, cache, _ = net.extend(
        params,
        token,
        kept,
        cache,
        lengths=length,
        start=t,
        model=model,
      )
      logits = net.logits(params, hidden[:, :, 0], model=model)
      u = jax.random.uniform(jax.random.fold_in(key, t), (1, 1))
      return choose(logits, u, sampling)[0], cache

    replicated = jax.sharding.NamedSharding(programs.mesh, jax.P())

    def whole(shapes: Any) -> Any:  # one prompt cannot be split
      return jax.tree.map(lambda x: replicated, shapes)

    self._start = programs.bind("prompt", start, out=whole)
    self._turn = programs.bind("token", turn, donate=(3,), out=whole)
    self._params = programs.bind("prepare", prepare, out=whole)(policy.params)

  def stream(self, text: str, key: Array) -> Iterator[str]:
    """Pieces of the completion's text, as soon as they are whole.

    Args:
      text: the prompt.
      key: of the random draws.
    """
    prompts = jax.tree.map(jnp.asarray, encode(self._policy, [text]))
    kept, cache = self._start(self._policy.params, prompts)
    token, ids, shown = prompts.ids[:, None, -1:], [], ""
    for t in range(self._sampling.max_tokens):
      token, cache = self._turn(
        self._params,
        token,
        kept,
        cache,
        prompts.lengths,
        jnp.int32(t),
        key,
      )
      self._guard.wait(token)
      ids.append(int(token[0, 0]))
      token = token[..., None]
      done = ids[-1] in self._sampling.stop_ids
      now = self._policy.tokenizer.decode(ids)
      # A character may be several tokens: show it when it is whole.
      if done or not now.endswith("\ufffd"):
        yield now[len(shown) :]
        shown = now
      if done:
        return


def complete_file(
  policy: Policy, programs: Programs, sampling: Sampling, lines: Sequence[str]
) -> Iterator[dict[str, Any]]:
  """Completions of many prompts at once, one record a prompt."""

  def fn(params: Params, prompts: Prompts, key: Array) -> Any:
    return grpo.sample(
      params, prompts, key, model=policy.model, sampling=sampling
    )

  program = programs.bind("sample", fn)
  prompts = jax.tree.map(jnp.asarray, encode(policy, lines))
  rollout = program(policy.params, prompts, jax.random.key(flags.FLAGS.seed))
  programs.guard.wait(rollout)
  ids, lengths = np.asarray(rollout.ids), np.asarray(rollout.lengths)
  for b, line in enumerate(lines):
    texts = [
      policy.tokenizer.decode(row[:n].tolist())
      for row, n in zip(ids[b], lengths[b])
    ]
    yield {"prompt": line, "completions": texts}


def chat(policy: Policy, streamer: Streamer) -> None:
  """Reads turns from the terminal until its end, keeping the conversation."""
  tokenizer = policy.tokenizer
  if not isinstance(tokenizer, HFTokenizer) or not tokenizer.raw.chat_template:
    raise UserError("this model has no chat template; use --prompt")
  messages: list[dict[str, str]] = []
  print("Write a message; an empty one ends the chat.", file=sys.stderr)
  for turn in range(10_000):
    try:
      text = input("> ")
    except EOFError:
      print()
      return
    if not text:
      return
    messages.append({"role": "user", "content": text})
    key = jax.random.fold_in(jax.random.key(flags.FLAGS.seed), turn)
    rendered = tokenizer.render(messages)
    answer = ""
    for piece in streamer.stream(rendered, key):
      print(piece, end="", flush=True)
      answer += piece
    print()
    messages.append({"role": "assistant", "content": answer})


def define_flags() -> None:
  """The command's flags."""
  flags.DEFINE_string("model", None, "RUN[@STEP], a directory, GGUF or hub id")
  flags.DEFINE_string("prompt", None, "one prompt")
  flags.DEFINE_string("file", None, "a file of prompts, one a line")
  flags.DEFINE_bool("chat", False, "talk to it, through its chat template")
  flags.DEFINE_string("system", "", "the chat's system message")
  flags.DEFINE_string(
    "stop", None, r"text whose token ends a completion; \n is a newline"
  )
  flags.DEFINE_integer("samples", 1, "completions a prompt", lower_bound=1)
  flags.DEFINE_integer(
    "max_tokens", 0, "at most; 0: as trained, or 256", lower_bound=0
  )
  flags.DEFINE_float("temperature", 0.0, "0: the likeliest", lower_bound=0.0)
  flags.DEFINE_float("top_p", 1.0, "nucleus", lower_bound=0.0)
  flags.DEFINE_integer("seed", 0, "of the draws", lower_bound=0)


def main(_: Any) -> int:
  """The command."""
  f = flags.FLAGS
  if not f.model:
    raise UserError("--model=RUN_OR_PATH is missing")
  chosen = [f.prompt is not None, bool(f.file), f.chat]
  if sum(chosen) != 1:
    raise UserError(
      f"one of --prompt, --file and --chat is needed, not {sum(chosen)}"
    )
  if not (math.isfinite(f.temperature) and 0 < f.top_p <= 1):
    raise UserError(
      f"--temperature={f.temperature} must be finite and --top_p={f.top_p}"
      " above 0, at most 1"
    )
  cli.check_platform("")
  use_cache("~/.cache/grpo_jax")
  mesh = sharding.one_device()
  how = {"system": f.system} if f.system else {}
  if f.chat:  # the whole conversation is rendered here
    how["chat"] = False
  policy = open_policy(f.model, mesh, **how)
  sampling = Sampling(
    group_size=f.samples,
    max_tokens=f.max_tokens or policy.max_tokens or 256,
    stop_ids=policy.tokenizer.stop_ids(
      [f.stop.replace("\\n", "\n")] if f.stop else []
    ),
    pad_id=policy.tokenizer.pad_id,
    temperature=f.temperature,
    top_p=f.top_p,
  )
  with Guard() as guard:
    programs = Programs(mesh, guard, say=lambda text: None)
    try:
      if f.file:
        lines = read_lines(f.file)
        for record in complete_file(policy, programs, sampling, lines):
          print(json.dumps(record, ensure_ascii=False), flush=True)
        return cli.OK
      one = dataclasses.replace(sampling, group_size=1)
      streamer = Streamer(policy, programs, one)
      if f.chat:
        chat(policy, streamer)
        return cli.OK
      for i in range(f.samples):
        key = jax.random.fold_in(jax.random.key(f.seed), i)
        for piece in streamer.stream(f.prompt, key):
          print(piece, end="", flush=True)
        print()
    except Preempted:
      leave(cli.PREEMPTED)
  return cli.OK


def read_lines(path: str) -> list[str]:
  """Prompts of a file, empty lines left out.

  Raises:
    UserError: it cannot be read, or has none.
  """
  try:
    text = pathlib.Path(path).read_text()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"{path} cannot be read: {error}") from error
  lines = [line for line in text.splitlines() if line.strip()]
  if not lines:
    raise UserError(f"{path} has no prompt")
  return lines


if __name__ == "__main__":
  cli.run(main, define_flags)
