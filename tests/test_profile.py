"""A trace of a window of steps, readable by the names in the code."""

import gzip
import json

import pytest
from train_runs import assert_one_line, train

from grpo_jax import profile
from grpo_jax.errors import UserError


def test_windows():
  assert profile.window("") is None
  assert profile.window("3") == (3, 3)
  assert profile.window("3-5") == (3, 5)
  for text in ("5-3", "0-2", "a", "1-2-3", "-1"):
    with pytest.raises(UserError, match="FIRST-LAST"):
      profile.window(text)


def test_a_run_writes_a_trace(tmp_path):
  result = train(tmp_path / "run", "--config.profile=6-7")
  assert result["code"] == 0, result["err"]
  assert "trace of steps 6-7 in" in result["out"]
  (path,) = (tmp_path / "run").rglob("*.trace.json.gz")
  events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
  assert len(events) > 100
  assert_one_line(
    train(tmp_path / "run", "--config.profile=7-6"), 2, "profile", "FIRST-LAST"
  )
