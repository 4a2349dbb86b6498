"""The error types that a user is meant to read."""


class UserError(ValueError):
  """A mistake its reader can mend: bad key, missing file, indivisible batch.

  The message is one line that names the thing, the number and the mend. A
  command prints it and exits with code 2; it never shows a stack trace.
  """


class OutOfMemory(RuntimeError):
  """Something does not fit: one line with the phase, the bytes and the mend.

  A command prints it and exits with code 4.
  """
