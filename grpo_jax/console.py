"""What a person sees: lines, a progress bar, tables. No decisions here."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import rich.console
import rich.markup
import rich.progress
import rich.table


@dataclasses.dataclass
class Console:
  """Prints for a terminal, or one line every `every` steps for a file.

  Attributes:
    every: steps between lines where there is no terminal.
    file: where to print.
  """

  every: int = 10
  file: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)

  def __post_init__(self):
    self._rich = rich.console.Console(file=self.file, highlight=False)
    if not self._rich.is_terminal:  # a log has no screen edge to wrap at
      self._rich = rich.console.Console(
        file=self.file, highlight=False, width=140
      )
    self._bar: rich.progress.Progress | None = None
    self._task: Any = None

  def say(self, text: str) -> None:
    """Prints a line; above the progress bar where there is one."""
    self._print(text, markup=False, soft_wrap=True)

  def table(
    self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
  ) -> None:
    """Prints a table."""
    table = rich.table.Table(*columns, title=title, title_justify="left")
    for row in rows:
      table.add_row(*(rich.markup.escape(str(x)) for x in row))
    self._print(table)

  def _print(self, what: Any, **how: Any) -> None:
    try:
      self._rich.print(what, **how)
    except (OSError, SystemExit):  # rich leaves the process for a broken pipe
      # Nobody reads, or the log's disk is full: a run outlives its output.
      # Python's own flush at exit must not fail either.
      os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
      self._rich.quiet = True

  def start(self, total: int, done: int) -> None:
    """Begins the progress bar, on a terminal."""
    if not self._rich.is_terminal:
      return
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn("{task.description}"),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeElapsedColumn(),
      rich.progress.TimeRemainingColumn(),
      rich.progress.TextColumn("{task.fields[numbers]}"),
      console=self._rich,
    )
    self._bar.start()
    self._task = self._bar.add_task(
      "steps", total=total, completed=done, numbers=""
    )

  def step(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows a finished step."""
    numbers = summary(metrics)
    if self._bar:
      self._bar.update(
        self._task,
        completed=step,
        numbers=numbers,
        description=str(metrics["phase"]),
      )
    elif step % self.every == 0:
      self.say(f"step {step:6d}  {metrics['phase']:<6}  {numbers}")

  def stop(self) -> None:
    """Ends the progress bar."""
    if self._bar:
      self._bar.stop()
      self._bar = None


def summary(metrics: Mapping[str, Any]) -> str:
  """A step in one line: reward, KL, entropy, seconds, tokens per second."""
  shown = (
    ("reward/mean", "reward {:.3f}"),
    ("loss", "loss {:.3f}"),
    ("kl/ref", "kl {:.4f}"),
    ("entropy", "entropy {:.3f}"),
    ("time/step", "{:.3f} s"),
    ("time/tokens_per_second", "{:,.0f} tok/s"),
  )
  if "reward/mean" in metrics:  # its loss near 0 would only mislead
    shown = tuple(x for x in shown if x[0] != "loss")
  return "  ".join(
    form.format(metrics[key]) for key, form in shown if key in metrics
  )


def interval(mean: float, stderr: float) -> str:
  """'0.953 ± 0.018': a mean with its 95 % interval."""
  return f"{mean:.3f} ± {1.96 * stderr:.3f}"
