"""Metrics and rollouts: no line lost, none doubled, none half."""

import json
import math
import os
import subprocess

import numpy as np
import pytest

from grpo_jax.disk import save_json
from grpo_jax.errors import UserError
from grpo_jax.records import Records, read_metrics, read_rollouts


def _events(workdir):
  """(step, tag -> value, is a restart) of every event, by file name."""
  from tensorboardX.proto import event_pb2

  events = []
  for path in sorted((workdir / "tensorboard").iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      values = {v.tag: v.simple_value for v in event.summary.value}
      events.append((event.step, values, event.session_log.status == 1))
      data = data[16 + size :]
  return events


def test_metrics_round_trip_with_non_finite_numbers(tmp_path):
  written = {
    "phase": "warmup",
    "loss": np.float32(0.5),
    "n": 3,
    "a": math.inf,
    "b": -math.inf,
    "c": np.float32("nan"),
  }
  with Records(tmp_path / "new/run") as r:
    r.write_metrics(0, written)
    with pytest.raises(TypeError, match="metric loss is a list"):
      r.write_metrics(1, {"loss": [1, 2]})

  def refuse(name):
    raise AssertionError(f"{name} is no JSON")

  text = (tmp_path / "new/run/metrics.jsonl").read_text()
  json.loads(text, parse_constant=refuse)
  (line,) = read_metrics(tmp_path / "new/run")
  assert math.isnan(line.pop("c"))
  del written["c"]
  assert line == {"step": 0, **written}
  (point,) = [e for e in _events(tmp_path / "new/run") if e[1]]
  assert point[1]["loss"] == 0.5 and "phase" not in point[1]


def test_restore_drops_what_came_after(tmp_path):
  with Records(tmp_path) as r:
    for step in range(6):
      r.write_metrics(step, {"x": step})
      r.write_rollouts(step, [{"ids": np.arange(step)}])
    r.write_metrics(3, {"eval/sampled": 0.5})
    r.sync()
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 3, "x"')  # the kill came here
  (tmp_path / "rollouts/00000002.jsonl.gz.part").write_bytes(b"half")
  assert len(read_metrics(tmp_path)) == 7  # tolerates the partial line
  with Records(tmp_path) as r:
    r.restore(3)
    for step in (4, 5):
      r.write_metrics(step, {"x": step})
  lines = read_metrics(tmp_path)
  assert [line["step"] for line in lines] == [0, 1, 2, 3, 3, 4, 5]
  names = sorted(p.name for p in (tmp_path / "rollouts").iterdir())
  assert names == [f"0000000{i}.jsonl.gz" for i in range(4)]
  restarts = [step for step, _, restart in _events(tmp_path) if restart]
  assert restarts == [4]  # TensorBoard hides its points from step 4 on
  with Records(tmp_path) as r:
    r.restore(-1)
  assert read_metrics(tmp_path) == []


def test_outcomes_outlive_a_restore_but_not_a_new_run(tmp_path):
  rows = [{"step": 7, "phase": "rl", "error": "no é"}, {"step": 9, "g": 1}]
  with Records(tmp_path, tensorboard=False) as r:
    assert r.read_outcomes() == []
    r.write_outcomes([])
    assert not (tmp_path / "outcomes.jsonl").exists()
    for row in rows:
      r.write_outcomes([row])
  with open(tmp_path / "outcomes.jsonl", "a") as file:
    file.write('{"step": 10, "g"')  # the kill came here
  with Records(tmp_path, tensorboard=False) as r:
    r.restore(3)
    r.write_outcomes([{"step": 10}])
    assert r.read_outcomes() == [*rows, {"step": 10}]
    r.restore(-1)
    assert r.read_outcomes() == []


def test_rollouts_round_trip(tmp_path):
  groups = [
    {"prompt": "nan", "logprobs": np.array([[-0.5, -np.inf]]), "g": [1, 2]},
    {"prompt": "é\n", "logprobs": np.float64(np.nan), "g": []},
  ]
  with Records(tmp_path, tensorboard=False) as r:
    r.write_rollouts(123, groups)
    path = tmp_path / "rollouts/00000123.jsonl.gz"
    before = path.read_bytes()
    r.write_rollouts(123, groups)  # a replayed step
    assert path.read_bytes() == before
  got = read_rollouts(tmp_path, 123)
  assert [g["prompt"] for g in got] == ["nan", "é\n"]
  np.testing.assert_array_equal(
    np.asarray(got[0]["logprobs"], float), [[-0.5, -np.inf]]
  )
  assert np.isnan(float(got[1]["logprobs"]))
  with pytest.raises(UserError, match="no rollouts of step 4: it has 123"):
    read_rollouts(tmp_path, 4)
  assert not (tmp_path / "tensorboard").exists()


def test_unusable_workdir(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"could not use workdir .*file stands"):
    Records(tmp_path / "file/run")
  with pytest.raises(UserError, match="no metrics in"):
    read_metrics(tmp_path / "none")
  if os.getuid():
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="permission denied"):
      Records(tmp_path / "run")


def test_full_device_is_one_line(tmp_path):
  if not os.path.exists("/dev/full"):
    pytest.skip("no /dev/full here")
  (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
  with (
    Records(tmp_path) as r,
    pytest.raises(UserError, match=r"metrics\.jsonl: no space left") as caught,
  ):
    r.write_metrics(0, {"x": 1})
  assert "\n" not in str(caught.value)


def test_full_disk_leaves_whole_lines(tmp_path):
  disk = tmp_path / "disk"
  disk.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
  try:
    mounted = not subprocess.run(mount, capture_output=True).returncode
  except FileNotFoundError:
    mounted = False
  if not mounted:
    pytest.skip("mounting a small file system needs root")
  try:
    with Records(disk, tensorboard=False) as r:
      noise = np.random.default_rng(0).normal(size=100_000)
      with pytest.raises(UserError, match=r"rollouts/00000001\S*: no space"):
        r.write_rollouts(1, [{"x": noise}])
      assert not list((disk / "rollouts").iterdir())
      with pytest.raises(UserError, match="no space left"):
        for step in range(1000):
          r.write_metrics(step, {f"name{i}": i for i in range(100)})
    text = (disk / "metrics.jsonl").read_text()
    assert text.endswith("}\n")
    assert len(read_metrics(disk)) == text.count("\n") > 10
  finally:
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_save_json_is_whole_or_absent(tmp_path):
  path = tmp_path / "config.json"
  save_json(path, {"a": [1, None]})
  with pytest.raises(ValueError, match="not JSON compliant"):
    save_json(path, {"a": math.nan})
  assert json.loads(path.read_text()) == {"a": [1, None]}
  with pytest.raises(FileNotFoundError):
    save_json(tmp_path / "none/config.json", {})
  assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
