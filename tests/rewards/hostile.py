"""Reward functions that go wrong in every way; workers import this module.

What a function does is the completion's text.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time

from grpo_jax.tasks.base import Reward


def sleep():
  time.sleep(1000)


def spin():
  while True:
    pass


def spin_and_swallow():
  while True:
    with contextlib.suppress(BaseException):
      time.sleep(0.01)


def regex():
  re.match(r"(a+)+$", "a" * 60 + "b")


def own_alarm():
  signal.alarm(0)
  signal.setitimer(signal.ITIMER_REAL, 0)
  spin()


def allocate():
  kept = []
  while True:
    kept.append(bytearray(2**24))


def fork():
  if os.fork() == 0:
    time.sleep(1000)
  return 1.0


def fork_and_return():
  os.fork()
  return 1.0


def child_then_hang():
  subprocess.Popen(["sleep", "1000"])
  spin()


def talk():
  for _ in range(20_000):
    print("x" * 100)
    print("y" * 100, file=sys.stderr)
  return 1.0


def segfault():
  ctypes.string_at(0)


class Unprintable(Exception):
  def __str__(self):
    raise ValueError


def unprintable():
  raise Unprintable


HANGS = ("sleep", "spin", "spin_and_swallow", "regex", "own_alarm")
DIES = {
  "segfault": segfault,
  "os_exit": lambda: os._exit(3),
  "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
  "allocate": allocate,
  "closes all": lambda: os.closerange(3, 100),
}
FAILS = {
  "none": lambda: None,
  "nan": lambda: float("nan"),
  "inf": lambda: Reward(float("inf")),
  "string": lambda: "1",
  "list": lambda: [1.0, 2.0],
  "raises": lambda: 1 / 0,
  "exits": lambda: sys.exit(0),
  "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or "interrupted",
  "keyboard": lambda: exec("raise KeyboardInterrupt"),
  "unprintable": unprintable,
  "recursion": lambda: FAILS["recursion"](),
}
WORKS = {
  "fork": fork,
  "fork and return": fork_and_return,
  "talk": talk,
  "term": lambda: os.kill(os.getpid(), signal.SIGTERM) or 1.0,
}


def act(example, completion):
  """A number for a digit; else what the text says."""
  text = completion.text
  if text.isdigit():
    return Reward(float(text))
  if text in HANGS or text == "child_then_hang":
    return globals()[text]()
  return {**DIES, **FAILS, **WORKS}[text]()


def who(example, completion):
  return Reward(float(os.getpid()))


def modules(example, completion):
  return Reward(float("jax" in sys.modules))


def half(example, completion):
  return {"a": 1, "b": None, "c": 0, "d": None}[completion.text]


def other_half(example, completion):
  return {"a": None, "b": 1, "c": 0, "d": None}[completion.text]
