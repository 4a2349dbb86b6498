"""How every command starts and ends: one line for a user's mistake.

Exit codes: 0 done; 1 a defect, or a run that stopped itself; 2 a mistake the
user can mend; 3 the wrong platform; 75 stopped by a signal and saved.
"""

import os
import sys
from collections.abc import Callable, Sequence

import jax
from absl import app, flags

from grpo_jax import preemption
from grpo_jax.errors import UserError

OK, FAILED, USAGE, WRONG_PLATFORM, PREEMPTED = 0, 1, 2, 3, 75
INTERRUPTED = 130  # what a shell says of a command ended by Ctrl-C

PLATFORMS = ("cpu", "gpu", "tpu")


def run(
  main: Callable[[Sequence[str]], int], define: Callable[[], None]
) -> None:
  """Defines and parses flags, runs `main`, and exits with its code.

  Flags are defined here and not on import, so that one command's module can
  use another's functions.

  A `UserError`, or a flag or configuration file that cannot be read, is one
  line on stderr and code 2, never a stack trace.
  """
  define()
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own chatter
  app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


def fail(text: object, code: int) -> None:
  """Prints one line on stderr and exits."""
  print("error: " + " ".join(str(text).split()), file=sys.stderr, flush=True)
  raise SystemExit(code)


def check_platform(wanted: str) -> None:
  """Ends the process unless the devices are those asked for.

  Args:
    wanted: cpu, gpu, tpu, or '' for whatever there is.

  Raises:
    UserError: no such platform.
  """
  if wanted and wanted not in PLATFORMS:
    raise UserError(f"platform {wanted!r} must be {', '.join(PLATFORMS)} or ''")
  try:
    found = jax.default_backend()
  except RuntimeError as error:  # what JAX_PLATFORMS names is not here
    fail(f"no devices: {str(error).splitlines()[0]}", WRONG_PLATFORM)
  if wanted in ("", found):
    return
  mend = "set JAX_PLATFORMS=cpu"
  if wanted != "cpu":
    extra = "tpu" if wanted == "tpu" else "cuda"
    mend = (
      f"install grpo_jax[{extra}], and see that no other process holds the"
      " device (sudo lsof -w /dev/accel* /dev/vfio/*)"
    )
  fail(
    f"platform is {found}, config.platform asks for {wanted}: {mend}",
    WRONG_PLATFORM,
  )


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise UserError(
        f"{rest[1]!r} is not a flag; write --flag=value, in quotes where the"
        " value has a space"
      )
    return rest
  except SystemExit:  # --help
    raise
  # A configuration file is the user's code and may raise anything.
  except Exception as error:
    fail(_describe(error), USAGE)


def _describe(error: Exception) -> str:
  """One line for what went wrong while flags and configuration were read."""
  text = str(error).split("\n")[0]
  if isinstance(error, UserError | flags.Error):
    return text
  where = ""
  frame = error.__traceback__
  while frame is not None:
    name = frame.tb_frame.f_code.co_filename
    if "site-packages" not in name and name.endswith(".py"):
      where = f" ({os.path.relpath(name)}, line {frame.tb_lineno})"
    frame = frame.tb_next
  if "experiments" not in where:
    where = ""
  return (
    f"could not read the configuration: {type(error).__name__}: {text}{where}"
  )


def _guarded(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
  try:
    return main(argv)
  except UserError as error:
    fail(error, USAGE)
  except KeyboardInterrupt:  # the second Ctrl-C: do not save, do not wait
    print("interrupted", file=sys.stderr)
    preemption.leave(INTERRUPTED)
