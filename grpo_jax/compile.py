"""Every jit goes through here: shardings, donation, and saying what it cost.

A `Program` is one function compiled ahead of its first run for each set of
argument shapes. Compilation happens off the main thread, so a signal is
answered while XLA works, and each one is announced with its seconds: a
program that compiles in the middle of a run is a fault one should see.
"""

import concurrent.futures
import dataclasses
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import jax

from grpo_jax import sharding
from grpo_jax.preemption import Guard

Say = Callable[[str], None]


@dataclasses.dataclass
class Programs:
  """The compiled programs of a process, and what compiling them cost.

  Attributes:
    mesh: where they run.
    guard: lets a signal end the wait for a compilation.
    say: prints a line.
    count: compilations so far.
    seconds: wall-clock time spent in them.
    running: the program that was called last, to name it if it fails.
  """

  mesh: jax.sharding.Mesh
  guard: Guard
  say: Say = print
  count: int = 0
  seconds: float = 0.0
  running: str = "start"

  def metrics(self) -> dict[str, float]:
    """Compilations so far, and peak memory."""
    stats = self.mesh.local_devices[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    if peak is None:  # a CPU device does not tell; Linux counts in KiB
      peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
      "compile/count": float(self.count),
      "compile/seconds": self.seconds,
      "memory/peak_gib": peak / 2**30,
    }

  def bind(
    self,
    name: str,
    fn: Callable,
    *,
    shapes: str = "",
    donate: tuple[int, ...] = (),
    out: Callable[[Any], Any] | None = None,
  ) -> "Program":
    """Makes a program of a pure function.

    Args:
      name: for the announcement.
      fn: the function; all its arguments are traced.
      shapes: what it is compiled for, in words.
      donate: positions of arguments whose buffers the results may take.
      out: abstract result -> shardings; None splits batch arrays by prompts
        and leaves scalars whole.
    """
    return Program(self, name, fn, shapes, donate, out)

  def compile_all(self, jobs: list[tuple["Program", tuple]]) -> None:
    """Compiles several programs at once, on as many threads as cores.

    Args:
      jobs: programs and the arguments (arrays or abstract) to compile for.
    """
    start = time.perf_counter()
    todo = [
      (program, args)
      for program, args in jobs
      if _signature(args) not in program.compiled
    ]
    workers = min(len(todo), os.cpu_count() or 1)
    if not workers:
      return

    def compile_them() -> None:
      with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda job: job[0].build(job[1]), todo))

    self.guard.run(compile_them)
    self.seconds += time.perf_counter() - start


@dataclasses.dataclass
class Program:
  """One function, compiled for each set of argument shapes it meets."""

  programs: Programs
  name: str
  fn: Callable
  shapes: str
  donate: tuple[int, ...]
  out: Callable[[Any], Any] | None
  compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)

  def __call__(self, *args: Any) -> Any:
    """Runs the program; compiles it first if these shapes are new.

    The call returns before the result is computed (wait with the guard).
    """
    self.programs.running = self.name
    return self.compile(*args)(*args)

  def compile(self, *args: Any) -> Any:
    """The executable for arguments of these shapes (arrays or abstract)."""
    key = _signature(args)
    if key not in self.compiled:
      self.programs.compile_all([(self, args)])
    return self.compiled[key]

  def abstract(self, *args: Any) -> Any:
    """What the program returns, as abstract arrays with their shardings."""
    with jax.set_mesh(self.programs.mesh):
      shapes = jax.eval_shape(self.fn, *args)
    return sharding.placed(shapes, self._out(shapes))

  def _out(self, shapes: Any) -> Any:
    if self.out is None:
      return sharding.prompts_sharding(self.programs.mesh, shapes)
    return self.out(shapes)

  def build(self, args: tuple) -> None:
    """Compiles for these arguments on the calling thread."""
    start = time.perf_counter()
    with jax.set_mesh(self.programs.mesh):
      out = self._out(jax.eval_shape(self.fn, *args))
      jitted = jax.jit(self.fn, donate_argnums=self.donate, out_shardings=out)
      lowered = jitted.lower(*args)
      try:
        self.compiled[_signature(args)] = lowered.compile()
      except jax.errors.JaxRuntimeError:
        self.programs.running = self.name  # it may have been too large
        raise
    seconds = time.perf_counter() - start
    self.programs.count += 1
    self.programs.say(
      f"compiled {self.name:<14} {self.shapes:<32} {seconds:5.1f} s"
    )


def exhausted(error: BaseException) -> bool:
  """Whether an error says that memory ran out: XLA's own, or the host's."""
  words = ("RESOURCE_EXHAUSTED", "Out of memory")
  return isinstance(error, MemoryError) or (
    isinstance(error, jax.errors.JaxRuntimeError)
    and any(word in str(error) for word in words)
  )


def _signature(args: tuple) -> Any:
  leaves, treedef = jax.tree.flatten(args)
  return treedef, tuple((x.shape, x.dtype) for x in leaves)


def use_cache(directory: str) -> None:
  """Keeps compiled programs on disk between runs; '' keeps none.

  Args:
    directory: made if missing; `~` is the home directory. A directory that
      cannot be written is left alone: the cache is a convenience.
  """
  if not directory:
    return
  directory = os.path.expanduser(directory)
  try:
    os.makedirs(directory, exist_ok=True)
  except OSError:
    return
  if os.access(directory, os.W_OK):
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
