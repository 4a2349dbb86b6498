"""Reference bands: read strictly, judged by metrics, made from runs."""

import json
import math
import pathlib

import pytest
from scipy import stats
from train_runs import assert_one_line, run

from grpo_jax import bands, check_run
from grpo_jax.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
CHECK = {"metric": "eval/greedy", "step": 4, "low": 0.4, "high": 0.6}
GOOD = {"source": "a paper", "measured": "its authors", "checks": [CHECK]}


def written(tmp_path, band):
  path = tmp_path / "band.json"
  path.write_text(band if isinstance(band, str) else json.dumps(band))
  return str(path)


def judged(values, total=None, every=2, **check):
  """The verdict on a run whose eval/greedy had these values."""
  lines = []
  for i, value in enumerate(values):
    lines += [{"step": s, "loss": 0.0} for s in range(i * every - 1, i * every)]
    error = {} if check.get("bare") else {"eval/greedy_stderr": 0.05}
    lines.append({"step": i * every, "eval/greedy": value, **error})
  check.pop("bare", None)
  lines = [x for x in lines if x["step"] >= 0]
  one = bands.Check(**{**CHECK, **check})
  band = bands.Band("a", "b", (one,))
  end = lines[-1]["step"] if total is None else total
  return bands.judge(band, lines, end)[0]


def test_inside_and_outside():
  v = judged([0.1, 0.2, 0.5])
  assert (v.inside, v.text, v.value, v.step) == (True, "inside", 0.5, 4)
  assert v.stderr == 0.05
  assert (
    judged([0, 0, 0.4]).inside and judged([0, 0, 0.6]).inside
  )  # ends are in
  v = judged([0.5, 0.5, 0.39])
  assert not v.inside and v.text == "below by 0.01"
  assert judged([0.5, 0.5, 0.75]).text == "above by 0.15"
  assert not judged([0.5, 0.5, math.nan]).inside
  assert judged([0.5, 0.5, math.nan]).text == "not finite"
  assert judged([0.5, 0.5, math.inf], high=None).text == "not finite"


def test_one_end_is_enough():
  assert judged([0, 0, 9.0], high=None).inside
  assert judged([0, 0, -9.0], low=None).inside
  assert not judged([0, 0, 0.3], high=None).inside


def test_the_own_error_is_shown_and_does_not_decide():
  v = judged([0, 0, 0.39])  # 0.01 below, which is a fifth of its error
  assert v.stderr == 0.05 and not v.inside
  assert judged([0, 0, 0.5], bare=True).stderr is None


def test_last_and_max_are_of_a_whole_run():
  assert judged([0.1, 0.9, 0.5], step="last").step == 4
  v = judged([0.1, 0.9, 0.5], step="max")
  assert (v.step, v.value) == (2, 0.9)
  assert not judged([0.5, math.nan, 0.5], step="max").inside
  for step in ("last", "max"):
    v = judged([0.5, 0.5], total=10, step=step)
    assert not v.inside and v.value is None
    assert v.text == "not reached: the run is at step 2 of 10"


def test_a_step_that_is_not_reached_is_outside():
  v = judged([0.5, 0.5], total=100, step=4)
  assert not v.inside and v.text.endswith("the run is at step 2 of 100")
  v = judged([0.5, 0.5], step=4)  # it ends before
  assert not v.inside and v.text.endswith("the run is at step 2 of 2")


def test_smooth_is_a_mean_of_the_last_values_up_to_the_step():
  v = judged([0.9, 0.4, 0.6, 5.0], smooth=2)
  assert v.inside and v.value == pytest.approx(0.5)
  assert v.stderr is None  # of one value, not of the mean
  v = judged([0.1, 0.2, 0.9, 0.6], smooth=2, step="max")
  assert (v.value, v.step) == (pytest.approx(0.75), 6)
  v = judged([0.5, 0.5, 0.5], smooth=4)
  assert not v.inside and "4 values are averaged, there are 3" in v.text


def test_a_metric_that_is_not_there():
  with pytest.raises(UserError, match=r"'eval/gredy'.*mean eval/greedy"):
    judged([0.5] * 3, metric="eval/gredy")
  with pytest.raises(UserError, match="no metric 'eval/maj_at_4'"):
    judged([0.5] * 3, metric="eval/maj_at_4")  # known, and the run is over
  v = judged([0.5], total=9, metric="eval/maj_at_4")  # it may come yet
  assert not v.inside and "not reached" in v.text
  with pytest.raises(UserError, match="'eval/maj'"):
    judged([0.5], total=9, metric="eval/maj")
  with pytest.raises(UserError, match=r"at step 3; nearest are 2, 4;"):
    judged([0.5] * 4, step=3)
  with pytest.raises(UserError, match="is a text"):
    judged(["rl"] * 3)


def test_a_run_that_has_just_begun():
  band = bands.Band("a", "b", (bands.Check(**CHECK),))
  v = bands.judge(band, [], 10)[0]
  assert v.text == "not reached: the run is at step 0 of 10"


@pytest.mark.parametrize(
  ("change", "why"),
  [
    ("{", "cannot be read"),
    ("[1]", "must be a JSON object"),
    ({**GOOD, "x": 1}, "unknown key 'x'"),
    ({**GOOD, "sorce": "a"}, "'sorce' (did you mean source?)"),
    ({**GOOD, "source": " "}, "source must be a text"),
    ({**GOOD, "measured": None}, "measured must be a text"),
    ({**GOOD, "checks": []}, "one or more"),
    ({**GOOD, "checks": [1]}, "check 0 must be a JSON object"),
    ({**GOOD, "checks": [{**CHECK, "hi": 1}]}, "unknown key 'hi'"),
    ({**GOOD, "checks": [{**CHECK, "metric": ""}]}, "must be a name"),
    ({**GOOD, "checks": [{**CHECK, "step": "best"}]}, "'best' must be"),
    ({**GOOD, "checks": [{**CHECK, "step": -1}]}, "-1 must be"),
    ({**GOOD, "checks": [{**CHECK, "step": True}]}, "True must be"),
    ({**GOOD, "checks": [{**CHECK, "smooth": 0}]}, "smooth 0"),
    ({**GOOD, "checks": [{"metric": "a", "step": 1}]}, "low, high, or both"),
    ({**GOOD, "checks": [{**CHECK, "low": "1"}]}, "low '1' must be a number"),
    ({**GOOD, "checks": [{**CHECK, "low": 0.7}]}, "low 0.7 is above high 0.6"),
    (json.dumps(GOOD).replace("0.4", "NaN"), "NaN is no number of JSON"),
  ],
)
def test_a_band_is_read_strictly(tmp_path, change, why):
  with pytest.raises(UserError) as error:
    bands.read(written(tmp_path, change))
  assert why in str(error.value)


def test_the_bands_of_the_repository_are_read():
  paths = sorted((ROOT / "experiments" / "bands").glob("*.json"))
  assert [p.stem for p in paths] == ["gsm8k_qwen3_1p7b", "quickstart"]
  for path in paths:
    for check in bands.read(str(path)).checks:
      assert check.low < check.high


def test_the_interval_of_one_more_seed_holds_it_95_times_of_100():
  rng = stats.norm(0.8, 0.01)
  rows = rng.rvs((4000, 4), random_state=1)
  held = 0
  for *seen, new in rows:
    low, high = bands.from_seeds(seen)
    held += low <= new <= high
  assert held / len(rows) == pytest.approx(0.95, abs=0.01)


def make_run(path, seed, values, **config):
  """A run's directory as far as this command reads it."""
  path.mkdir()
  c = {"seed": seed, "steps": 4, "init_from": "", "warmup": {"steps": 0}}
  (path / "config.json").write_text(json.dumps({"config": {**c, **config}}))
  lines = [
    {"step": 2 * i, "eval/greedy": x, "eval/greedy_stderr": 0.02}
    for i, x in enumerate(values)
  ]
  text = "".join(json.dumps(x) + "\n" for x in lines)
  (path / "metrics.jsonl").write_text(text)
  return str(path)


def test_the_command_says_it_by_its_exit_code(tmp_path):
  band = "--band=" + written(tmp_path, GOOD)
  good = make_run(tmp_path / "good", 0, [0.1, 0.3, 0.5])
  result = run("check_run", f"--workdir={good}", band)
  assert result["code"] == 0, result["err"]
  for word in ("a paper", "its authors", "0.5000 ± 0.0200", "inside: 1 of 1"):
    assert word in result["out"], word
  bad = make_run(tmp_path / "bad", 0, [0.1, 0.3, 0.7])
  result = run("check_run", f"--workdir={bad}", band)
  assert result["code"] == 1 and result["err"] == ""
  assert "above by 0.1" in result["out"] and "outside: 1 of 1" in result["out"]
  short = make_run(tmp_path / "short", 0, [0.5])
  result = run("check_run", f"--workdir={short}", band)
  assert result["code"] == 1 and "step 0 of 4" in result["out"]


def test_a_warm_up_counts_unless_the_run_began_from_another():
  c = {"steps": 4, "init_from": "", "warmup": {"steps": 3}}
  assert check_run.last_step(c) == 7
  assert check_run.last_step({**c, "init_from": "runs/a"}) == 4


def test_a_band_from_runs(tmp_path):
  runs = [
    make_run(tmp_path / f"r{i}", i, [0.0, 0.1, x])
    for i, x in enumerate((0.5, 0.52, 0.54))
  ]
  path = tmp_path / "new.json"
  how = (f"--band={path}", "--metrics=eval/greedy", "--measured=us, here")
  result = run("check_run", f"--runs={','.join(runs)}", *how)
  assert result["code"] == 0, result["err"]
  band = bands.read(str(path))
  check = band.checks[0]
  width = stats.t(2).ppf(0.975) * 0.02 * math.sqrt(4 / 3)
  assert (check.low, check.high) == pytest.approx(
    (0.52 - width, 0.52 + width), abs=1e-6
  )
  stored = json.loads(path.read_text())["checks"][0]
  assert stored["values"] == [0.5, 0.52, 0.54]
  assert "seeds 0, 1, 2" in band.source and band.measured == "us, here"
  assert run("check_run", f"--workdir={runs[1]}", how[0])["code"] == 0
  again = run("check_run", f"--runs={','.join(runs)}", *how)
  assert_one_line(again, 2, "exists")


def test_runs_that_make_no_band(tmp_path):
  a = make_run(tmp_path / "a", 0, [0.1, 0.3, 0.5])
  same = make_run(tmp_path / "same", 1, [0.1, 0.3, 0.5])
  twin = make_run(tmp_path / "twin", 0, [0.1, 0.3, 0.6])
  other = make_run(tmp_path / "other", 2, [0.1, 0.3, 0.6], steps=5)
  short = make_run(tmp_path / "short", 3, [0.1, 0.3])

  def refused(runs, why, names=("eval/greedy",), measured="us"):
    with pytest.raises(UserError, match=why):
      check_run.make(runs, list(names), "last", 1, measured)

  refused([a], "two seeds or more")
  refused([a, twin], r"seeds of these runs are \[0, 0\]")
  refused([a, other], "steps: 4 -> 5")
  refused([a, same], "no spread")
  refused([a, short], "not reached: the run is at step 2 of 4")
  refused([a, same], "--metrics", names=())
  refused([a, same], "--measured", measured="")


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ([], ["--band=FILE"]),
    (["--band=x"], ["--workdir=RUN", "--runs"]),
    (["--band=x", "--workdir=y", "--runs=z"], ["one of"]),
    (["--band=/no/such", "--workdir=y"], ["/no/such cannot be read"]),
    (["--band=BAND", "--workdir=/no/run"], ["no run at /no/run"]),
    (["--band=/no/x", "--runs=a,b", "--step=best"], ["--step=best"]),
  ],
)
def test_mistakes_are_one_line(tmp_path, argv, words):
  argv = [x.replace("BAND", written(tmp_path, GOOD)) for x in argv]
  assert_one_line(run("check_run", *argv), 2, *words)
