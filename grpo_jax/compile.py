"""Every jit goes through here: shardings, donation, and saying what it cost.

A `Program` is one function compiled ahead of its first run for each set of
argument shapes. Compilation happens off the main thread, so a signal is
answered while XLA works, and each one is announced with its seconds: a
program that compiles in the middle of a run is a fault one should see.
"""

import dataclasses
import os
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
    seconds: time spent in them.
  """

  mesh: jax.sharding.Mesh
  guard: Guard
  say: Say = print
  count: int = 0
  seconds: float = 0.0

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
    return self.compile(*args)(*args)

  def compile(self, *args: Any) -> Any:
    """The executable for arguments of these shapes (arrays or abstract)."""
    leaves, treedef = jax.tree.flatten(args)
    key = treedef, tuple((x.shape, x.dtype) for x in leaves)
    if key not in self.compiled:
      start = time.perf_counter()
      self.compiled[key] = self.programs.guard.run(self._compile, args)
      seconds = time.perf_counter() - start
      self.programs.count += 1
      self.programs.seconds += seconds
      self.programs.say(
        f"compiled {self.name:<10} {self.shapes:<36} {seconds:6.1f} s"
      )
    return self.compiled[key]

  def _compile(self, args: tuple) -> Any:
    mesh = self.programs.mesh
    with jax.set_mesh(mesh):
      abstract = jax.eval_shape(self.fn, *args)
      if self.out is None:
        out = sharding.prompts_sharding(mesh, abstract)
      else:
        out = self.out(abstract)
      jitted = jax.jit(self.fn, donate_argnums=self.donate, out_shardings=out)
      return jitted.lower(*args).compile()


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
