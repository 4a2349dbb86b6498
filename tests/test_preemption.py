"""Signals are answered within milliseconds, in every kind of wait."""

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.checkpoint import Checkpoints
from grpo_jax.preemption import Guard, Preempted

_ITERATIONS = 20_000


def _long(iterations):
  """A computation of 1 s or so, that no signal handler can enter."""

  def body(carry):
    i, x = carry
    return i + 1, jnp.cos(x @ x * 1e-3)

  start = (0, jnp.ones((128, 128)))
  return jax.lax.while_loop(lambda c: c[0] < iterations, body, start)[1]


_run = jax.jit(_long)


def _kill_after(seconds, number=signal.SIGTERM):
  sent = []

  def kill():
    time.sleep(seconds)
    sent.append(time.perf_counter())
    os.kill(os.getpid(), number)

  threading.Thread(target=kill).start()
  return sent


def test_wait_is_interrupted_within_milliseconds():
  _run(1).block_until_ready()
  with Guard() as guard:
    start = time.perf_counter()
    y = _run(_ITERATIONS)
    dispatched = time.perf_counter() - start
    sent = _kill_after(0.1)
    with pytest.raises(Preempted, match="SIGTERM"):
      guard.wait({"y": y, "n": 3})
    late = time.perf_counter() - sent[0]
    assert not y.is_ready(), "the computation was over too soon to tell"
    assert guard.signal == signal.SIGTERM and guard.requested
    assert late < 0.25  # 20 ms and what a busy machine adds
    assert dispatched < 0.1
    with pytest.raises(Preempted):
      guard.check()
  y.block_until_ready()


def test_run_is_interrupted_and_passes_results_and_errors():
  with Guard() as guard:
    assert guard.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
      guard.run(divmod, 1, 0)
    sent = _kill_after(0.1)
    released = threading.Event()
    with pytest.raises(Preempted):
      guard.run(released.wait, 30)
    assert time.perf_counter() - sent[0] < 0.25
    released.set()
    with pytest.raises(Preempted):  # nothing long is begun any more
      guard.run(pytest.fail, "was called")


def test_shield_lets_a_step_finish():
  with Guard() as guard:
    with guard.shielded():
      guard.request()
      with guard.shielded():
        guard.check()
      assert float(guard.wait(_run(10)).sum()) > 0
      assert guard.run(lambda: 5) == 5
      assert guard.requested
    with pytest.raises(Preempted, match="a request"):
      guard.check()


def test_second_interrupt_aborts():
  # A shell's background job begins with SIGINT ignored.
  inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    _interrupt_twice()
  finally:
    signal.signal(signal.SIGINT, inherited)


def _interrupt_twice():
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  with Guard() as guard:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Preempted, match="SIGINT"):
      guard.check()
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(1)
  after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  assert after == before


def test_works_off_the_main_thread():
  outcome = []

  def work():
    with Guard() as guard:
      outcome.append(float(guard.wait(jnp.ones(2)).sum()))
      guard.request()
      with pytest.raises(Preempted):
        guard.wait(jnp.ones(2))
      outcome.append("stopped")

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert outcome == [2.0, "stopped"]


def test_wait_skips_donated_arrays_and_costs_little():
  x = jnp.ones(4)
  x.delete()
  guard = Guard()
  guard.wait([x, None, "text"])
  _run(300).block_until_ready()

  def measure(wait):
    times = []
    for _ in range(7):
      start = time.perf_counter()
      wait(_run(300))
      times.append(time.perf_counter() - start)
    return min(times)

  bare = measure(lambda y: y.block_until_ready())
  guarded = measure(guard.wait)
  assert guarded < bare * 1.5 + 0.005, (bare, guarded)


def test_preempted_is_not_swallowed_by_forgiving_code():
  guard = Guard()
  guard.request()
  with pytest.raises(Preempted):
    try:
      guard.check()
    except Exception:
      pytest.fail("an `except Exception` caught it")


_STOPPED = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp
from grpo_jax.checkpoint import Checkpoints
from grpo_jax.checkpoint import Checkpoints
from grpo_jax.preemption import Guard, Preempted, leave

@jax.jit
def endless(x):
  body = lambda c: (c[0] + 1, jnp.cos(c[1] @ c[1] * 1e-3))
  return jax.lax.while_loop(lambda c: c[0] < 10**9, body, (0, x))[1]

state = {"w": jnp.ones((128, 128))}
with Checkpoints(sys.argv[1]) as checkpoints, Guard() as guard:
  threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
  try:
    guard.wait(endless(state["w"]))
  except Preempted:
    began = time.perf_counter()
    checkpoints.save(3, {"trainable": state}, {})
    checkpoints.wait()
    print(time.perf_counter() - began)
    leave(75)
"""


def test_stopped_run_saves_and_leaves_while_xla_still_computes(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", _STOPPED, tmp_path],
    capture_output=True,
    text=True,
    timeout=60,
    env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
  )
  assert done.returncode == 75, done.stderr
  assert float(done.stdout) < 10
  assert Checkpoints(tmp_path, read_only=True).steps() == [3]
