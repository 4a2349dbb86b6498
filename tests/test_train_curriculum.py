"""A curriculum in a whole run: killed and resumed, it draws the same."""

import itertools

import numpy as np
import pytest
import train_runs

from grpo_jax.records import read_metrics, read_rollouts

# A handful of questions, each met several times in eight steps, and more than
# one rollout batch in most of them.
ARGS = (
  "--config.task.tuning=1013",
  "--config.data.curriculum=pass_rate",
  "--config.data.rest_below=0.55",
  "--config.algorithm.dynamic_rounds=3",
)


def asked(workdir):
  """Step -> ids of the questions that were trained on."""
  return {
    step: [group["id"] for group in read_rollouts(workdir, step)]
    for step in range(5, 13)
  }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  path = tmp_path_factory.mktemp("curriculum") / "run"
  result = train_runs.train(path, *ARGS)
  assert result["code"] == 0, result["err"]
  return path


def test_killed_and_resumed_it_is_the_same_run(uninterrupted, tmp_path):
  for pattern, delay in ((r"step +6  rl", 0), (r"step +10  rl", 0.01)):
    kill = ("SIGKILL", pattern, delay)
    result = train_runs.train(tmp_path / "run", *ARGS, kill=kill)
    assert result["code"] == -9, result["err"]
  result = train_runs.train(tmp_path / "run", *ARGS)
  assert result["code"] == 0, result["err"]
  assert "resumed at step" in result["out"]
  train_runs.assert_same_run(uninterrupted, tmp_path / "run")
  runs = uninterrupted, tmp_path / "run"
  a, b = (train_runs.arrays(run, 12, "curriculum") for run in runs)
  assert len(a) == len(b) == 5
  for x, y in zip(a, b):
    np.testing.assert_array_equal(x, y)


def test_it_rests_questions_and_counts_all_that_was_sampled(uninterrupted):
  lines = [x for x in read_metrics(uninterrupted) if x.get("phase") == "rl"]
  rested = [x["data/rested_frac"] for x in lines]
  assert max(rested) > 0
  assert max(x["group/rounds"] for x in lines) > 1
  batches = np.cumsum([x["group/rounds"] for x in lines])
  epochs = np.array([x["data/epoch"] for x in lines])
  questions = epochs[0] ** -1 * 4 * batches[0]
  np.testing.assert_allclose(epochs, 4 * batches / questions)
  ordinals = [
    {group["ordinal"] for group in read_rollouts(uninterrupted, step)}
    for step in range(5, 13)
  ]
  assert all(len(x) == 4 for x in ordinals)
  assert all(max(a) < min(b) for a, b in itertools.pairwise(ordinals))


def test_another_curriculum_does_not_go_on_with_the_run(uninterrupted):
  result = train_runs.train(uninterrupted, *ARGS[:1], *ARGS[3:])
  train_runs.assert_one_line(result, 2, "data.curriculum", "'pass_rate'")
