"""Host metrics against loops, and the table that documents every name."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from grpo_jax import metrics

FEW = settings(max_examples=25, deadline=None, derandomize=True)
VALUES = st.sampled_from([0.0, 0.1, 1.0])


@FEW
@given(
  arrays.arrays(np.float64, (3, 4), elements=VALUES),
  arrays.arrays(np.bool_, (3, 4)),
)
def test_reward_metrics_against_loops(total, scored):
  success = (total == 1).astype(float)
  parts = np.stack((total * 2, np.full_like(total, np.nan)), -1)
  parts[..., 1] = np.where(scored, 3.0, np.nan)
  total = np.where(scored, total, np.nan)
  found = metrics.reward_metrics(total, scored, success, parts, ("a", "b"), 2)
  groups = [t[s] for t, s in zip(total, scored)]
  wins = [w[s] for w, s in zip(success, scored)]
  rows = total[scored]
  n = max(len(rows), 1)
  want = {
    "reward/mean": rows.sum() / n,
    "reward/std": rows.std() if len(rows) else 0.0,
    "reward/group_std": np.mean([g.std() if len(g) else 0.0 for g in groups]),
    "success": success[scored].sum() / n,
    "group/frac_mixed": np.mean([len(set(g)) > 1 for g in groups]),
    "group/frac_zero_std": np.mean([len(set(g)) <= 1 for g in groups]),
    "group/frac_all_right": np.mean([len(w) > 0 and min(w) == 1 for w in wins]),
    "group/frac_all_wrong": np.mean([len(w) > 0 and max(w) == 0 for w in wins]),
    "reward/unscored": (~scored).sum(),
    "reward/errors": 2,
    "reward/timed_out": 0,
  }
  if len(rows):  # a mean of nothing is not 0
    want |= {"reward/part/a": 2 * rows.sum() / n, "reward/part/b": 3.0}
  assert found.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_allclose(found[name], value, atol=1e-12, err_msg=name)
    assert metrics.documented(name), name


def test_length_metrics():
  found = metrics.length_metrics(
    np.array([[1, 3], [6, 6]]), np.array([[False, False], [True, False]])
  )
  assert found == {
    "completion/length_mean": 4,
    "completion/length_max": 6,
    "completion/length_min": 1,
    "completion/truncated_frac": 0.25,
    "tokens/sampled": 16,
  }
  assert all(map(metrics.documented, found))


def test_the_table_refuses_what_it_does_not_have():
  assert metrics.documented("reward/part/format")
  for name in ("reward/parts", "reward/mean2", "kl", "", "loss/"):
    assert not metrics.documented(name), name
  for name, meaning in metrics.TABLE.items():
    assert meaning and not meaning.endswith("."), name
