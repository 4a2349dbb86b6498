"""The curve is drawn from whatever metrics a run has."""

import time

import pytest

from grpo_jax import plots
from grpo_jax.errors import UserError
from grpo_jax.records import Records


def _panels(monkeypatch):
  """The titles of the panels of the next picture that is saved."""
  titles = []
  draw = plots.figure.Figure.savefig

  def savefig(self, *args, **kwargs):
    titles[:] = [t for a in self.axes if (t := a.get_title(loc="left"))]
    return draw(self, *args, **kwargs)

  monkeypatch.setattr(plots.figure.Figure, "savefig", savefig)
  return titles


def test_curve_of_a_whole_run(tmp_path, monkeypatch):
  titles = _panels(monkeypatch)
  with Records(tmp_path, tensorboard=False) as r:
    for step in range(20):
      r.write_metrics(step, {"phase": "warmup", "loss": 3.0 / (step + 1)})
    for step in range(20, 300):
      metrics = {"reward/mean": step / 300, "kl/ref": 0.1, "entropy": 1.0}
      metrics |= {"group/frac_all_right": 0.2, "group/frac_all_wrong": 0.1}
      metrics |= {"completion/length_mean": float("nan") if step == 50 else 8.0}
      if step % 50 == 0:
        metrics |= {"eval/sampled": 0.5, "eval/sampled_stderr": 0.02}
        metrics |= {"eval/greedy": 0.6}
      r.write_metrics(step, metrics)
  start = time.perf_counter()
  path = plots.curve(tmp_path)
  assert time.perf_counter() - start < 5  # 0.5 s on an idle core
  assert path.read_bytes()[:4] == b"\x89PNG" and len(titles) == 4
  assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
  ("metrics", "count"),
  [
    ({"reward/mean": 0.5}, 1),
    ({"eval/greedy": 0.5, "completion/length_mean": 3}, 2),
    ({"phase": "warmup", "loss": 1.0}, 1),
    ({"entropy": 1.0, "unknown": 1.0}, 2),
  ],
)
def test_missing_metrics_are_left_out(tmp_path, monkeypatch, metrics, count):
  titles = _panels(monkeypatch)
  with Records(tmp_path, tensorboard=False) as r:
    r.write_metrics(0, metrics)
  plots.curve(tmp_path)
  assert len(titles) == count


def test_nothing_to_draw(tmp_path):
  Records(tmp_path, tensorboard=False).close()
  with pytest.raises(UserError, match="nothing to draw"):
    plots.curve(tmp_path)


def test_smoothing_keeps_a_line_and_its_length():
  values = [float(i) for i in range(200)]
  smooth = plots._smooth(values)
  assert len(smooth) == 200
  assert abs(smooth[3:-3] - values[3:-3]).max() < 1e-9
