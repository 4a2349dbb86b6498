"""Whether a step fits: predicted memory, and what to change where it does not.

Two figures, for two questions. Whether a compiled program fits is what XLA
says of it, against what the device has left. What takes the room, and which
settings would free it, is arithmetic over the records (`buffers`): good to a
factor of two, scaled to XLA's figure where there is one.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import jax

from grpo_jax.build import Built
from grpo_jax.compile import Program, exhausted
from grpo_jax.config import Batching, Experiment
from grpo_jax.errors import OutOfMemory
from grpo_jax.models import decoders, weight_table

GIB = 2**30
# What a layer keeps per token for its backward pass, in units of its widths.
KEPT_EMBED, KEPT_FFN = 6, 4


def buffers(e: Experiment, mesh: jax.sharding.Mesh, phase: str) -> dict:
  """Bytes a device holds in a phase, by what they are for, largest first.

  Args:
    e: the records.
    mesh: its axes divide the bytes.
    phase: a program's name: sample, score, update, gradients, apply, imitate,
      eval sampled, eval greedy.
  """
  arch, model = e.model.arch, e.model
  n = dict(mesh.shape)
  ways, split = n["data"] * n["fsdp"], n["fsdp"] * n["tensor"]
  item = model.compute_dtype.itemsize
  params = decoders.parameter_count(model)
  own = e.algorithm.critic is not None and not e.algorithm.critic.shared
  copies = 3 * (1 + own) + (e.algorithm.reference is not None)
  trained, frozen = params, 0
  if model.lora is not None:
    trained = weight_table.adapter_count(arch, model.lora)
    frozen = params * item
  held = copies * trained * 4 + frozen
  out = {"weights, moments and reference": held / split}
  prompts, group, tokens = _rows(e, phase)
  prompts /= ways
  width = e.prompt_width
  positions = prompts * (width + group * tokens)
  heads = arch.heads / n["tensor"]
  if phase == "sample" or phase.startswith("eval"):
    out["the sampler's weights"] = 2 * params * item / n["tensor"]
    kv = arch.layers * 2 * arch.kv_heads * arch.head_dim * item
    if not arch.kv_heads % n["tensor"]:
      kv /= n["tensor"]
    out["keys and values"] = positions * kv
    # Logits, their softmax and its running sum.
    out["logits of one token"] = 3 * prompts * group * arch.vocab * 4
    out["the prompts' attention"] = 2 * prompts * width**2 * heads * 4
    return _sorted(out)
  if phase == "apply":
    out["new weights and moments"] = 3 * trained * 4 / split
    out["gradients"] = trained * 4 / split
    return _sorted(out)
  chunk = min(
    model.logit_elements, prompts * group * tokens * arch.vocab / n["tensor"]
  )
  chunk = max(chunk, prompts * group * arch.vocab / n["tensor"])
  out["logits of a chunk"] = 3 * chunk * 4
  attention = prompts * heads * 4 * 2
  attention *= width**2 + group * tokens * (width + tokens)
  ffn = arch.ffn * (arch.experts_per_token or 1)
  wide = arch.heads * arch.head_dim + 2 * arch.kv_heads * arch.head_dim
  layer = (
    positions * (KEPT_EMBED * arch.embed + 2 * wide + KEPT_FFN * ffn) * item
  )
  if phase == "score":
    out["activations of a layer"] = layer + attention
    return _sorted(out)
  out["gradients"] = trained * 4 / split
  if phase == "gradients":
    out["gradients"] *= 2  # a micro-batch's beside their sum
  elif phase in ("update", "imitate"):
    out["new weights and moments"] = 3 * trained * 4 / split
  if model.remat:
    out["activations"] = arch.layers * positions * arch.embed * item
    out["activations"] += layer + attention
  else:
    out["activations"] = arch.layers * (layer + attention)
  return _sorted(out)


def _sorted(sizes: dict[str, float]) -> dict[str, float]:
  return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))


def _rows(e: Experiment, phase: str) -> tuple[float, int, int]:
  """Prompts, completions of each and tokens that one call of a phase holds."""
  b, s, v = e.batching, e.sampling, e.evaluation
  if phase.startswith("eval"):
    how = v.greedy if phase.endswith("greedy") else v.sampled
    return v.prompts_per_batch, how.group_size, how.max_tokens
  if phase == "imitate":
    return e.warmup_prompts, 1, s.max_tokens
  prompts = b.prompts_per_step
  if phase in ("update", "gradients"):
    prompts = b.micro_batch_prompts
  return prompts, s.group_size, s.max_tokens


def available(device: jax.Device) -> float | None:
  """Bytes a device can still give, or None where nobody knows.

  A CPU device can have what the system or the process's group has left.
  """
  stats = device.memory_stats()
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
  if device.platform != "cpu":
    return None
  found = [_meminfo(), _group()]
  found = [x for x in found if x is not None]
  return min(found) if found else None


def _meminfo() -> float | None:
  try:
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
  except OSError:
    return None
  for line in lines:
    if line.startswith("MemAvailable:"):
      return int(line.split()[1]) * 1024.0
  return None


def _group() -> float | None:
  """What a container's limit leaves (cgroup version 2, then 1)."""
  for limit, used in (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
  ):
    try:
      whole, taken = (
        int((pathlib.Path("/sys/fs/cgroup") / name).read_text())
        for name in (limit, used)
      )
    except (OSError, ValueError):  # 'max': no limit
      continue
    return float(max(whole - taken, 0))
  return None


def needed(program: Program, args: tuple) -> float | None:
  """Bytes a compiled program takes beyond its arguments, on one device."""
  stats = program.compile(*args).memory_analysis()
  if stats is None:
    return None
  extra = stats.temp_size_in_bytes + stats.output_size_in_bytes
  return max(0.0, extra - stats.alias_size_in_bytes)


def check(built: Built, jobs: list[tuple[Program, tuple]]) -> None:
  """Refuses a run whose largest program does not fit, before its first step.

  Args:
    built: the programs; the state is in memory already.
    jobs: compiled programs and their abstract arguments.

  Raises:
    OutOfMemory: the phase, its buffers, both figures and what would fit.
  """
  device = built.mesh.local_devices[0]
  room = available(device)
  if room is None:
    return
  # The CPU devices of a process share its memory.
  share = len(built.mesh.local_devices) if device.platform == "cpu" else 1
  for program, args in jobs:
    extra = needed(program, args)
    if extra is not None and extra * share > room:
      raise OutOfMemory(
        describe(built, program.name, predicted=extra, room=room / share)
      )


@contextlib.contextmanager
def explained(built: Built) -> Iterator[None]:
  """Turns an allocation that failed into one line that helps.

  Raises:
    OutOfMemory: in place of XLA's or the host's own error.
  """
  try:
    yield
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    if not exhausted(error):
      raise
    raise OutOfMemory(describe(built, built.programs.running)) from error


def describe(
  built: Built,
  phase: str,
  predicted: float | None = None,
  room: float | None = None,
) -> str:
  """One line: the phase, its largest buffers, both figures, what would fit.

  Args:
    built: the programs.
    phase: the name of the program that did not fit.
    predicted: bytes it takes beside the state, by XLA; None: estimated.
    room: bytes a device had left for it; None: what it has left now.
  """
  e, mesh = built.experiment, built.mesh
  parts = buffers(e, mesh, phase)
  extra = _extra(parts)
  predicted = extra if predicted is None else predicted
  room = available(mesh.local_devices[0]) if room is None else room
  largest = ", ".join(
    f"{name} {_gib(size)}" for name, size in list(parts.items())[:3]
  )
  text = f"out of memory in {phase}: beside the state it takes about"
  text += f" {_gib(predicted)}"
  if room is not None:
    text += f", a device has {_gib(room)} left"
  text += f"; largest: {largest}"
  scale = predicted / max(extra, 1.0)
  fits: dict[str, str] = {}  # by the settings' names: the least change of each
  for flags, changed in _cheaper(e, mesh, phase):
    size = scale * max(
      _extra(buffers(changed, mesh, name)) for name in _phases(changed, phase)
    )
    if room is None or size <= room:
      settings = " ".join(x.partition("=")[0] for x in flags.split())
      fits.setdefault(settings, f"{flags} ({_gib(size)})")
  if not fits:
    return f"{text}; no setting would fit: more devices or a smaller model"
  what = "smaller" if room is None else "would fit"
  return f"{text}; {what}, cheapest first: {'; '.join(list(fits.values())[:3])}"


def _phases(e: Experiment, phase: str) -> tuple[str, ...]:
  """A phase's programs: an update in parts is several."""
  if phase == "update" and e.batching.micro_batches > 1:
    return ("gradients", "apply")
  return (phase,)


def _extra(parts: dict[str, float]) -> float:
  return sum(parts.values()) - parts["weights, moments and reference"]


def _gib(size: float) -> str:
  return (
    f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
  )


def _cheaper(
  e: Experiment, mesh: jax.sharding.Mesh, phase: str
) -> Iterator[tuple[str, Experiment]]:
  """Settings that need less in a phase, and the records they make.

  Cheapest first: those that change nothing but time, then the layout, then
  those that change the experiment.
  """
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  if phase.startswith("eval"):
    size = e.evaluation.prompts_per_batch
    for n in _divisors(size, ways):
      less = dataclasses.replace(e.evaluation, prompts_per_batch=n)
      yield (
        f"--config.eval.prompts_per_batch={n}",
        dataclasses.replace(e, evaluation=less),
      )
    return
  if phase == "imitate":
    for n in _divisors(e.warmup_prompts, ways):
      yield (
        f"--config.warmup.prompts_per_step={n}",
        dataclasses.replace(e, warmup_prompts=n),
      )
    return
  b = e.batching
  if phase in ("update", "gradients"):
    yield from _cheaper_update(e, ways)
  for n in _divisors(b.prompts_per_step, ways):
    given = e.config["batch"]["prompts_per_update"]
    if given and n % given:
      continue  # the mini-batch would not divide it
    micro = min(n, b.micro_batch_prompts)
    less = dataclasses.replace(b, prompts_per_step=n, micro_batch_prompts=micro)
    yield (
      f"--config.batch.prompts_per_step={n}",
      dataclasses.replace(e, batching=less),
    )


def _cheaper_update(
  e: Experiment, ways: int
) -> Iterator[tuple[str, Experiment]]:
  b: Batching = e.batching
  small = max(e.model.logit_elements // 8, e.model.arch.vocab)
  chunks = dataclasses.replace(e.model, logit_elements=small)
  yield (
    f"--config.model.logit_elements={small}",
    dataclasses.replace(e, model=chunks),
  )
  for n in _divisors(b.micro_batch_prompts, ways):
    less = dataclasses.replace(b, micro_batch_prompts=n)
    yield (
      f"--config.batch.micro_batch_prompts={n}",
      dataclasses.replace(e, batching=less),
    )
  if not e.model.remat:
    model = dataclasses.replace(chunks, remat=True)
    for n in (b.micro_batch_prompts, *_divisors(b.micro_batch_prompts, ways)):
      less = dataclasses.replace(b, micro_batch_prompts=n)
      flags = "--config.model.remat=True"
      flags += f" --config.model.logit_elements={small}"
      if n != b.micro_batch_prompts:
        flags += f" --config.batch.micro_batch_prompts={n}"
      yield flags, dataclasses.replace(e, model=model, batching=less)


def _divisors(size: int, ways: int) -> list[int]:
  """Smaller batches that divide a batch and that the devices divide."""
  return [n for n in range(size - 1, 0, -1) if size % n == 0 and n % ways == 0]
