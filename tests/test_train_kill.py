"""Killed at any moment and started again: as if nothing had happened."""

import pytest
import train_runs

# (what stdout shows when the signal is sent, seconds to wait after that)
MOMENTS = {
  "before the first checkpoint": (r"compiled init", 0),
  "in the warm-up": (r"step +2  warmup", 0),
  "at the warm-up's end": (r"step +4  warmup", 0),
  "in the first evaluation's save": (r"step +4  heldout", 0),
  "before the reference is stored": (r"compiled optimizer +rl", 0),
  "in a step": (r"step +6  rl", 0),
  "in a save": (r"step +7  rl", 0.01),
  "in an evaluation": (r"step +8  rl", 0),
  "after the last step": (r"step +12  rl", 0),
  "before the end is said": (r"step +12  heldout", 0),
}


def kill_and_resume(workdir, moments):
  """Kills each start at one moment; the last start is left alone."""
  for moment in moments:
    pattern, delay = MOMENTS[moment]
    result = train_runs.train(workdir, kill=("SIGKILL", pattern, delay))
    assert result["code"] in (-9, 0), result["err"]
  result = train_runs.train(workdir)
  assert result["code"] == 0, result["err"]
  train_runs.assert_same_run(train_runs.baseline(), workdir)


def test_killed_three_times_in_a_row(tmp_path):
  chain = ("in the warm-up", "in a save", "in an evaluation")
  kill_and_resume(tmp_path / "run", chain)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_once(tmp_path, moment):
  kill_and_resume(tmp_path / "run", (moment,))
