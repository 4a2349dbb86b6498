"""Checkpoints survive kills, damage, full disks and other meshes."""

import errno
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_jax import checkpoint, checkpoint_io
from grpo_jax.checkpoint import Checkpoints, Damaged, abstract
from grpo_jax.errors import UserError


def _trees(value=1.0):
  params = {"layers": {"w": jnp.full((4, 4), value), "b": jnp.zeros(3)}}
  opt = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params)
  meta = {"step": jnp.int32(7), "key": jax.random.key(11)}
  return {"trainable": params, "opt": opt, "meta": meta}


def _mesh(shape, names=("data", "tensor")):
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, names)


def _save(directory, *steps, **kwargs):
  with Checkpoints(directory, **kwargs) as c:
    for step in steps:
      c.save(step, {"trainable": {"w": jnp.full(2, step)}}, {"at": step})


def _equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert x.dtype == y.dtype
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(x, y)


def test_round_trip_with_keys_and_optimizer_state(tmp_path):
  trees, host = _trees(), {"data": [3, 4], "config": {"lr": 1e-6}}
  with Checkpoints(tmp_path / "c") as c:
    c.save(7, {**trees, "critic": {}}, host)
    host["data"].append(5)  # the caller goes on
    c.wait()
    got = c.restore(7, {**abstract(trees), "critic": {}})
    assert got.pop("critic") == {}
    _equal(got, trees)
    assert c.host(7) == {"data": [3, 4], "config": {"lr": 1e-6}}
    assert list(c.restore(7, {"meta": abstract(trees["meta"])})) == ["meta"]
    np.testing.assert_array_equal(
      jax.random.normal(got["meta"]["key"], (3,)),
      jax.random.normal(trees["meta"]["key"], (3,)),
    )


def test_donating_after_save_does_not_change_what_is_saved(tmp_path):
  x = jnp.ones((256, 1024))
  with Checkpoints(tmp_path) as c:
    c.save(1, {"trainable": [x]}, {})
    jax.jit(lambda x: x * 0, donate_argnums=0)(x).block_until_ready()
    c.wait()
    target = jax.ShapeDtypeStruct(
      (256, 1024), jnp.float32, sharding=jnp.ones(1).sharding
    )
    assert c.restore(1, {"trainable": [target]})["trainable"][0].min() == 1


def test_restores_onto_another_mesh(tmp_path):
  if jax.device_count() < 8:
    pytest.skip("needs 8 devices")
  x = jnp.arange(16, dtype=jnp.float32).reshape(4, 4)
  spec = P("data", "tensor")
  saved = jax.device_put(x, NamedSharding(_mesh((2, 2)), spec))
  with Checkpoints(tmp_path) as c:
    c.save(1, {"trainable": {"w": saved}}, {})
    c.wait()
    for sharding in (
      NamedSharding(_mesh((2, 1)), spec),
      NamedSharding(_mesh((4, 2)), spec),
      NamedSharding(_mesh((2, 2)), P("tensor", "data")),
      NamedSharding(_mesh((2, 2), ("tensor", "data")), spec),
    ):
      target = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=sharding)
      got = c.restore(1, {"trainable": {"w": target}})["trainable"]["w"]
      assert got.sharding == sharding
      np.testing.assert_array_equal(got, x)
    odd = NamedSharding(_mesh((8, 1)), spec)
    target = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=odd)
    with pytest.raises(UserError, match=r"trainable/w.*cannot be laid out"):
      c.restore(1, {"trainable": {"w": target}})


def test_what_does_not_fit_is_named(tmp_path):
  trees = _trees()
  with Checkpoints(tmp_path) as c:
    c.save(1, trees, {})
    c.wait()
    place = jnp.ones(1).sharding

    def restoring(w, item="trainable", **more):
      like = jax.ShapeDtypeStruct(*w, sharding=place)
      target = abstract(trees["trainable"])
      target["layers"] = {**target["layers"], "w": like, **more}
      c.restore(1, {item: target})

    with pytest.raises(
      UserError, match=r"trainable/layers/w: .*float32\[4,8\]"
    ):
      restoring(((4, 8), jnp.float32))
    with pytest.raises(UserError, match=r"asked for bfloat16.*stored float32"):
      restoring(((4, 4), jnp.bfloat16))
    extra = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=place)
    with pytest.raises(UserError, match=r"layers/new: .*stored nothing"):
      restoring(((4, 4), jnp.float32), new=extra)
    with pytest.raises(UserError, match="no item 'critic'; it has meta, opt"):
      restoring(((4, 4), jnp.float32), item="critic")
    rbg = abstract({"step": jnp.int32(0), "key": jax.random.key(0, impl="rbg")})
    with pytest.raises(UserError, match="meta/key"):
      c.restore(1, {"meta": rbg})
    bare = {**rbg, "key": abstract(jnp.zeros(2, jnp.uint32))}
    with pytest.raises(UserError, match="meta/key is stored as key"):
      c.restore(1, {"meta": bare})
    with pytest.raises(TypeError, match="trainable/n is a int"):
      c.save(2, {"trainable": {"n": 3}}, {})
  with pytest.raises(UserError, match=r"no checkpoint of step 3 .*it has 1$"):
    c.host(3)


def test_unknown_layout_is_refused_and_never_removed(tmp_path):
  _save(tmp_path, 1)
  file = tmp_path / "1/host/metadata"
  file.write_text(file.read_text().replace('version": 1', 'version": 99'))
  with Checkpoints(tmp_path, keep_last=1) as c:
    with pytest.raises(UserError, match="layout version 99"):
      c.restore(1, {})
    c.save(2, {"trainable": [jnp.ones(1)]}, {})
    c.save(3, {"trainable": [jnp.ones(1)]}, {})
    c.wait()
    assert c.steps() == [1, 3]


def test_a_score_is_added_once(tmp_path):
  def tree(value):
    return {"trainable": {"w": jnp.full(2, value)}}

  with Checkpoints(tmp_path / "c") as c:
    c.save(1, tree(1.0), {"at": 1}, score=0.5)
    c.save(2, tree(2.0), {"at": 2})
    c.save(2, tree(9.0), {"at": 9}, score=0.7)
    c.save(2, tree(9.0), {"at": 9}, score=0.1)
  with Checkpoints(tmp_path / "c") as c:
    assert c.best() == 2
    assert c.host(2) == {"at": 2}
    _equal(c.restore(2, abstract(tree(0.0))), tree(2.0))
    c.save(3, tree(3.0), {}, score=0.6)
  with Checkpoints(tmp_path / "c") as c:
    assert c.best() == 2  # 0.7, not 0.1


def test_retention_keeps_best_last_and_marked(tmp_path):
  scores = {0: None, 1: 0.2, 2: 0.9, 3: float("nan"), 4: 0.5, 5: None}
  with Checkpoints(tmp_path, keep_last=2) as c:
    assert c.latest() is None and c.best() is None
    for step, score in scores.items():
      c.save(step, {"w": [jnp.ones(1)]}, {}, score=score, keep=step == 1)
    c.wait()
    assert (c.steps(), c.best(), c.latest()) == ([1, 2, 4, 5], 2, 5)
    before = (tmp_path / "4").stat().st_mtime_ns
    c.save(4, {"w": [jnp.zeros(1)]}, {}, score=2.0)  # there, with its score
    c.wait()
    assert c.best() == 2 and (tmp_path / "4").stat().st_mtime_ns == before
  with Checkpoints(tmp_path, keep_last=1) as c:  # the books are on disk
    assert c.best() == 2
    c.save(6, {"w": [jnp.ones(1)]}, {}, score=0.95)
    c.wait()
    assert (c.steps(), c.best()) == ([1, 6], 6)


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "commit_success.txt"])
def test_unfinished_latest_is_skipped_and_saved_again(tmp_path, file):
  _save(tmp_path, 1800, 1820)
  (tmp_path / "1820" / file).unlink()
  (tmp_path / "1840.orbax-checkpoint-tmp-123/x").mkdir(parents=True)
  assert Checkpoints(tmp_path, read_only=True).latest() == 1800
  with Checkpoints(tmp_path) as c:
    assert c.latest() == 1800
    assert [step for step, _ in c.skipped()] == [1820, 1840]
    assert file in c.skipped()[0][1] and "interrupted" in c.skipped()[1][1]
  with Checkpoints(tmp_path) as c:
    assert c.skipped() == [] and c.latest() == 1800  # reported once
    c.save(1820, {"trainable": {"w": jnp.ones(2)}}, {"at": "again"})
    c.save(1840, {"trainable": {"w": jnp.ones(2)}}, {})
    c.wait()
    assert c.steps() == [1820, 1840] and c.host(1820) == {"at": "again"}


def test_damaged_arrays_fall_back_to_the_one_before(tmp_path):
  _save(tmp_path, 1, 2)
  for file in (tmp_path / "2/trainable").rglob("d/*"):
    file.write_bytes(file.read_bytes()[:-7])
  target = {"trainable": abstract({"w": jnp.zeros(2, jnp.int32)})}
  reader = Checkpoints(tmp_path, read_only=True)
  with pytest.raises(Damaged, match=r"checkpoint .*2, it is damaged"):
    reader.restore(2, target)
  assert reader.latest() == 1 and (tmp_path / "2").exists()
  with Checkpoints(tmp_path) as c:
    step, host, trees = c.restore_latest(target)
    assert (step, host, int(trees["trainable"]["w"][0])) == (1, {"at": 1}, 1)
    assert c.skipped()[0][0] == 2
    c.save(2, {"trainable": {"w": jnp.full(2, 2)}}, {"at": 2})
    c.wait()
    assert c.restore_latest(target)[0] == 2


_WRITER = """
import sys
import jax, jax.numpy as jnp
from grpo_jax.checkpoint import Checkpoints
c = Checkpoints(sys.argv[1], keep_last=1)
print("start", flush=True)
for step in range((c.latest() or 0) + 1, 1000):
  w = {str(i): jnp.full((300, 300), step) for i in range(5)}
  c.save_once("frozen", step, {"w": jnp.full(5, step)})
  c.save(step, {"trainable": w}, {"step": step}, score=float(-step))
  print(step, flush=True)
"""


def test_kill_at_any_moment_leaves_whole_checkpoints(tmp_path):
  directory = tmp_path / "c"
  environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
  target = {str(i): jnp.zeros((300, 300), jnp.int32) for i in range(5)}
  target = {"trainable": abstract(target)}
  latest = 0
  for delay in (0.0, 0.03, 0.09):
    process = subprocess.Popen(
      [sys.executable, "-c", _WRITER, directory],
      stdout=subprocess.PIPE,
      env=environment,
    )
    process.stdout.readline()
    while process.stdout.readline().strip() != b"%d" % (latest + 3):
      assert process.poll() is None
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with Checkpoints(directory, keep_last=1) as c:
      assert c.latest() >= latest + 2  # what was finished is not lost
      latest = c.latest()
      for step in c.steps():
        trees = c.restore(step, target)
        values = {int(x.sum()) for x in jax.tree.leaves(trees)}
        assert values == {300 * 300 * step} and c.host(step)["step"] == step
      frozen = c.restore_once(
        "frozen", latest, abstract({"w": jnp.zeros(5, jnp.int32)})
      )
      assert frozen["w"].tolist() == [latest] * 5
    names = {p.name for p in directory.iterdir()}
    assert names == {str(s) for s in c.steps()}


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 3 MB that really gets full."""
  disk = tmp_path / "disk"
  disk.mkdir()
  command = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)]
  try:
    done = subprocess.run(command, capture_output=True).returncode == 0
  except FileNotFoundError:
    done = False
  if not done:
    pytest.skip("mounting a small file system needs root")
  yield disk
  subprocess.run(["umount", "-l", str(disk)], check=True)


def test_full_disk_is_one_line_and_costs_nothing(small_disk):
  directory = small_disk / "c"
  small = {"w": jnp.ones(10)}
  with Checkpoints(directory) as c:
    c.save(1, {"trainable": small}, {})
    noise = np.random.default_rng(0).normal(size=(1000, 1000))
    c.save(2, {"trainable": {"w": jnp.asarray(noise, jnp.float32)}}, {})
    with pytest.raises(UserError, match=r"no space left.*checkpoint is 1") as e:
      c.save(3, {"trainable": small}, {})
    assert str(e.value).count("\n") == 0 and "checkpoint " in str(e.value)
    assert c.steps() == [1]
    c.save(3, {"trainable": small}, {})  # the disk was freed
    c.wait()
    assert c.steps() == [1, 3]
    _equal(
      c.restore(1, {"t": {}, "trainable": abstract(small)})["trainable"], small
    )


def test_failure_without_a_small_disk(tmp_path, monkeypatch):
  _save(tmp_path, 1)

  def fail(*_):
    raise OSError(errno.EROFS, "read-only")

  with Checkpoints(tmp_path) as c:
    monkeypatch.setattr(checkpoint_io, "start_save", fail)
    with pytest.raises(UserError, match=r"read-only file system.*is 1"):
      c.save(2, {"w": [jnp.ones(1)]}, {})
    monkeypatch.undo()
    c.save(2, {"w": [jnp.ones(1)]}, {})
    c.wait()
    assert c.steps() == [1, 2]


def test_unusable_directory(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"could not use .*file/c"):
    Checkpoints(tmp_path / "file/c")


def test_save_once(tmp_path):
  tree = {"w": jnp.arange(3.0)}
  with Checkpoints(tmp_path / "c") as c:
    c.save_once("ref", 5, tree)
    c.save_once("ref", 5, {"w": jnp.zeros(3)})  # is there already
    _equal(c.restore_once("ref", 5, abstract(tree)), tree)
    with pytest.raises(UserError, match="ref@6"):
      c.restore_once("ref", 6, abstract(tree))
    (tmp_path / "ref/5/_CHECKPOINT_METADATA").unlink()
    with pytest.raises(Damaged):
      c.restore_once("ref", 5, abstract(tree))
    c.save_once("ref", 5, tree)
    _equal(c.restore_once("ref", 5, abstract(tree)), tree)
    assert c.steps() == []


def test_parse_run_and_open_run(tmp_path):
  assert checkpoint.parse_run("runs/a@120") == ("runs/a", 120)
  assert checkpoint.parse_run("runs/a@best") == ("runs/a", "best")
  assert checkpoint.parse_run("runs/a") == ("runs/a", "latest")
  (tmp_path / "me@home").mkdir()
  at_home = str(tmp_path / "me@home")
  assert checkpoint.parse_run(at_home) == (at_home, "latest")
  assert checkpoint.parse_run(at_home + "@3") == (at_home, 3)
  with pytest.raises(UserError, match="RUN@STEP"):
    checkpoint.parse_run("runs/a@last")

  with pytest.raises(UserError, match="no such directory"):
    checkpoint.open_run(tmp_path / "none")
  with pytest.raises(UserError, match="no finished checkpoint"):
    checkpoint.open_run(tmp_path)
  _save(tmp_path / "run/checkpoints", 3, 4)
  tree = [(p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*")]
  with checkpoint.open_run(tmp_path / "run") as run:
    assert (run.find("latest"), run.find(3)) == (4, 3)
    with pytest.raises(UserError, match="it has 3, 4"):
      run.find(5)
    with pytest.raises(UserError, match="has a score"):
      run.find("best")
    target = abstract({"w": jnp.zeros(2, jnp.int32)})
    assert run.restore(3, {"trainable": target})["trainable"]["w"][1] == 3
    with pytest.raises(ValueError, match="read only"):
      run.save(5, {}, {})
  after = [(p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*")]
  assert tree == after


def test_host_is_json(tmp_path):
  with Checkpoints(tmp_path) as c, pytest.raises(TypeError):
    c.save(1, {"w": jnp.ones(1)}, {"x": object()})
