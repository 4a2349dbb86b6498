"""A user's mistake is one line on stderr and code 2, before any compilation."""

import subprocess
import sys

import pytest
import train_runs
from train_runs import CONFIG, assert_one_line, baseline, run

BASE = "--config=experiments/base.py"

# what is wrong -> (arguments, words of the message)
TRAIN = {
  "no config": ([], ["--config=FILE"]),
  "no workdir": ([CONFIG], ["--workdir=DIR"]),
  "no such file": (["--config=nope.py"], ["nope.py"]),
  "a directory": (["--config=tests"], ["directory", "tests"]),
  "unknown flag": (["--confg=x"], ["confg", "config"]),
  "positional": ([CONFIG, "train"], ["'train' is not a flag"]),
  "unknown key": ([CONFIG, "--config.sede=1"], ["'sede'"]),
  "unknown inner key": (
    [CONFIG, "--config.optimizer.lerning_rate=1"],
    ["'optimizer.lerning_rate' (did you mean learning_rate?)"],
  ),
  "wrong type": ([CONFIG, "--config.steps=abc"], ["--config.steps=abc"]),
  "unknown preset": (
    ["--config=experiments/quickstart.py:grop"],
    ["'grop' (did you mean grpo?)"],
  ),
  "preset of a file without": ([f"{BASE}:grop"], ["base.py:grop", "argument"]),
  "unknown task": (
    [CONFIG, "--config.task.name=wrods"],
    ["'wrods' (did you mean words?)"],
  ),
  "unknown module": ([CONFIG, "--config.task.name=no_such:f"], ["no_such"]),
  "unknown algorithm": (
    [CONFIG, "--config.algorithm.name=pppo"],
    ["'pppo'", "did you mean ppo"],
  ),
  "unknown optimizer": ([CONFIG, "--config.optimizer.name=adam"], ["adamw"]),
  "unknown dataset": (
    [BASE, "--config.task.name=reasoning_gym", "--config.task.dataset=leg"],
    ["'leg'"],
  ),
  "a key the algorithm lacks": (
    [CONFIG, "--config.algorithm.clip_low=0.1"],
    ["grpo_sequence", "'clip_low'", "beta"],
  ),
  "a value out of range": (
    [CONFIG, "--config.algorithm.beta=-1"],
    ["algorithm.beta -1"],
  ),
  "batch does not divide": (
    [CONFIG, "--config.batch.micro_batch_prompts=3"],
    ["micro_batch_prompts 3", "4"],
  ),
  "mesh of other devices": (
    [CONFIG, "--config.mesh.data=2"],
    ["2", "there are 1"],
  ),
  "group of one": (
    [CONFIG, "--config.sampling.group_size=1"],
    ["group_size 1"],
  ),
  "no temperature": (
    [CONFIG, "--config.sampling.temperature=0"],
    ["temperature"],
  ),
  "long demonstrations": (
    [CONFIG, "--config.sampling.max_tokens=3"],
    ["sampling.max_tokens 3"],
  ),
  "no demonstrations": (
    [CONFIG, "--config.task.name=tiny_config:mute"],
    ["no demonstrations", "warmup.steps"],
  ),
  "too few held-out": ([CONFIG, "--config.eval.prompts=65"], ["65", "64"]),
  "unknown platform": ([CONFIG, "--config.platform=vax"], ["'vax'"]),
  "negative probe": ([CONFIG, "--probe=-1"], ["-1"]),
  "workdir is a file": ([CONFIG, f"--workdir={__file__}"], ["a file stands"]),
  "workdir below a file": ([CONFIG, f"--workdir={__file__}/x"], ["a file"]),
  "workdir not writable": ([CONFIG, "--workdir=/proc/x"], ["/proc/x"]),
}
NEEDS_NO_WORKDIR = ("no config", "no workdir", "positional")

FILES = {
  "syntax error": ("def get_config(:\n", ["SyntaxError", "bad.py, line 1"]),
  "raises": (
    "def get_config():\n  raise RuntimeError('oh\\nno')\n",
    ["RuntimeError: oh (", "bad.py, line 2"],
  ),
  "no get_config": ("x = 1\n", ["get_config"]),
  "returns nothing": ("def get_config():\n  pass\n", ["get_config"]),
  "missing import": ("import no_such_thing\n", ["no_such_thing"]),
  "unknown key set": (
    "from experiments import base\ndef get_config():\n"
    "  c = base.get_config()\n  c.optimizer.lerning_rate = 1\n  return c\n",
    ["'lerning_rate' (did you mean learning_rate?)", "bad.py, line 4"],
  ),
  "not from base": (
    "from ml_collections import config_dict\ndef get_config():\n"
    "  return config_dict.ConfigDict()\n",
    ["'seed'", "base.get_config()"],
  ),
}

EVALUATE = {
  "no workdir": ([], ["--workdir=RUN"]),
  "nothing there": (["--workdir=/no/such"], ["/no/such"]),
  "a file": ([f"--workdir={__file__}"], ["no run"]),
  "not a step": (["--workdir=BASE@"], ["RUN@STEP"]),
  "no such step": (["--workdir=BASE@7"], ["step 7"]),
  "unknown split": (["--workdir=BASE", "--split=test"], ["'test'"]),
  "too many prompts": (["--workdir=BASE", "--prompts=65"], ["65", "64"]),
  "no samples": (["--workdir=BASE", "--samples=0"], ["--samples=0"]),
  "positional": (["--workdir=BASE", "x"], ["'x' is not a flag"]),
}


@pytest.mark.parametrize("name", TRAIN)
def test_train(tmp_path, name):
  argv, words = TRAIN[name]
  if name not in NEEDS_NO_WORKDIR and "--workdir" not in argv[-1]:
    argv = [*argv, f"--workdir={tmp_path / 'run'}"]
  assert_one_line(run("train", *argv), 2, *words)


@pytest.mark.parametrize("name", FILES)
def test_config_file(tmp_path, name):
  text, words = FILES[name]
  (tmp_path / "bad.py").write_text(text)
  config = f"--config={tmp_path / 'bad.py'}"
  assert_one_line(run("train", config, "--workdir=w"), 2, *words)


@pytest.mark.parametrize("name", EVALUATE)
def test_evaluate(name):
  argv, words = EVALUATE[name]
  argv = [a.replace("BASE", str(baseline())) for a in argv]
  result = run("evaluate", *argv)
  assert_one_line(result, 2, *words)
  assert result["out"] == ""


def test_wrong_platform_has_its_own_code(tmp_path):
  workdir = f"--workdir={tmp_path / 'run'}"
  result = run("train", CONFIG, workdir, "--config.platform=tpu")
  assert_one_line(result, 3, "platform is cpu", "grpo_jax[tpu]")
  result = run("train", CONFIG, workdir, JAX_PLATFORMS="tpu")
  assert_one_line(result, 3, "no devices")


def test_two_processes_on_one_workdir(tmp_path):
  # Another process holds the lock: this one's own sleep.
  workdir = tmp_path / "run"
  workdir.mkdir()
  hold = (
    "import fcntl, sys; f = open(sys.argv[1], 'w');"
    " fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True);"
    " sys.stdin.read()"
  )
  with subprocess.Popen(
    [sys.executable, "-c", hold, str(workdir / ".lock")],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as holder:
    holder.stdout.readline()
    result = train_runs.train(workdir)
    holder.communicate()
  assert_one_line(result, 2, "another process", str(workdir))


def test_help_of_the_module_itself():
  done = subprocess.run(
    [sys.executable, "-m", "grpo_jax.train", "--help"],
    cwd=train_runs.ROOT,
    env=train_runs.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode in (0, 1)
  assert "--workdir" in done.stdout
  assert done.stderr == ""
