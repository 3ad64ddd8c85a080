"""Saving, being killed while saving, and restoring (trials F1, F2, F3)."""

import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from wide_jax import sharding
from wide_jax.checkpoint import Checkpoints
from wide_jax.config import MeshConfig

META = {"phase": "routers", "seed": 17, "data": {"position": 3}}


def mesh_of(data=1, fsdp=1, tensor=1):
  config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
  return sharding.make_mesh(config, jax.devices()[: data * fsdp * tensor])


def optimiser():
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.multi_transform(
      {"a": optax.adamw(1e-2), "b": optax.sgd(1e-2)},
      {"lora": "a", "router": "b"},
    ),
  )


def fresh(mesh, scale=1.0):
  """A state as training holds it, on a mesh; and its shardings."""
  rng = np.random.default_rng(0)
  trainable = {
    "router": {"up": (scale * rng.normal(size=(8, 16))).astype(np.float32)},
    "lora": {
      "a": (scale * rng.normal(size=(16, 8))).astype(np.float32),
      "b": np.asarray(rng.normal(size=(8, 8)), jnp.bfloat16),
    },
  }
  place = NamedSharding(mesh, P("fsdp", "tensor"))
  places = jax.tree.map(lambda _: place, trainable)
  trainable = sharding.put(trainable, places)
  tx = optimiser()
  shapes = jax.eval_shape(tx.init, trainable)
  opt_places = sharding.optimiser_specs(shapes, trainable, places)
  opt_state = jax.jit(tx.init, out_shardings=opt_places)(trainable)
  everywhere = sharding.replicated(mesh)
  step = sharding.put(np.int32(0), everywhere)
  state = {"trainable": trainable, "opt_state": opt_state, "step": step}
  all_places = {
    "trainable": places,
    "opt_state": opt_places,
    "step": everywhere,
  }
  return state, all_places


def train_step(state):
  tx = optimiser()
  grads = jax.tree.map(lambda x: x * 0.5 + 1, state["trainable"])
  updates, opt_state = tx.update(grads, state["opt_state"], state["trainable"])
  trainable = optax.apply_updates(state["trainable"], updates)
  return {
    "trainable": trainable,
    "opt_state": opt_state,
    "step": state["step"] + 1,
  }


def like(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def host(tree):
  return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)

  def one(x, y):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)

  jax.tree.map(one, a, b)


def test_round_trip_keeps_containers_dtypes_placement_and_bits(tmp_path):
  state, places = fresh(mesh_of(2, 2, 2))
  step = jax.jit(train_step, donate_argnums=0, out_shardings=places)
  state = step(state)
  with Checkpoints(tmp_path, keep=2, every=10) as saved:
    assert saved.latest() is None and saved.steps() == []
    want = host(state)
    assert not saved.save(7, state, META)
    assert saved.save(10, state, META)
    # Donated at once: the copy that is being written must not change.
    compilations = step._cache_size()
    for _ in range(5):
      state = step(state)
    saved.wait()
    assert saved.latest() == 10
    assert saved.metadata(10) == META
    back = saved.restore(10, like(state))
    equal(host(back), want)
    assert isinstance(back["opt_state"], tuple)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(lambda x, p: _same(x.sharding, p), back, places)
    # The first step after restoring compiles nothing and equals the straight
    # run's, bit for bit.
    for _ in range(5):
      back = step(back)
    assert step._cache_size() == compilations
    equal(host(back), host(state))


def _same(a, b):
  assert a == b


def test_keeps_the_newest_and_does_not_overwrite(tmp_path):
  state, _ = fresh(mesh_of())
  with Checkpoints(tmp_path, keep=2) as saved:
    for step in (1, 2, 3):
      assert saved.save(step, state, META)
    saved.wait()
    assert saved.steps() == [2, 3]
    assert not saved.save(3, state, {"other": 1}, force=True)
    assert saved.metadata(3) == META
  with Checkpoints(tmp_path, keep=2) as saved:  # a second resume
    assert saved.steps() == [2, 3]
    assert saved.save(4, state, META)
  with Checkpoints(tmp_path, keep=2) as saved:  # a third
    assert saved.steps() == [3, 4]
    equal(host(saved.restore(4, like(state))), host(state))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 2, 4), (1, 8, 1)])
def test_restore_on_other_meshes(tmp_path, shape):
  state, _ = fresh(mesh_of(2, 2, 2))
  with Checkpoints(tmp_path) as saved:
    saved.save(10, state, META)
  other, _ = fresh(mesh_of(*shape), scale=0.0)
  with Checkpoints(tmp_path) as saved:
    back = saved.restore(10, like(other))
  equal(host(back), host(state))
  jax.tree.map(lambda x, y: _same(x.sharding, y.sharding), back, other)


def run(code, devices=1, **kw):
  """Runs Python in a process of its own, with so many virtual devices."""
  flag = f"--xla_force_host_platform_device_count={devices}"
  root = pathlib.Path(__file__).resolve().parent.parent
  path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code)],
    env={**env, "PYTHONPATH": path},
    capture_output=True,
    text=True,
    timeout=120,
    **kw,
  )


def test_contents_and_restore_where_there_is_one_device(tmp_path):
  state, _ = fresh(mesh_of(2, 2, 2))
  with Checkpoints(tmp_path) as saved:
    saved.save(10, state, META)
    saved.wait()
    here = saved.contents(10)
  assert here["trainable/router/up"].shape == (8, 16)
  assert here["trainable/lora/b"].dtype == jnp.bfloat16
  assert "step" in here and any(k.endswith("mu/lora/a") for k in here)
  done = run(f"""
    import jax, numpy as np
    from wide_jax.checkpoint import Checkpoints
    assert jax.device_count() == 1
    with Checkpoints({str(tmp_path)!r}, read_only=True) as saved:
      found = saved.contents(10)
      print(sorted((k, v.shape, str(v.dtype)) for k, v in found.items()))
      back = saved.restore(10, {{"trainable": {{"router": {{
        "up": found["trainable/router/up"]}}}}}}, subset=True)
      print(float(np.sum(np.float64(back["trainable"]["router"]["up"]))))
  """)
  assert done.returncode == 0, done.stderr
  listing, total = done.stdout.strip().splitlines()
  want = sorted((k, v.shape, str(v.dtype)) for k, v in here.items())
  assert listing == str(want)
  up = np.float64(state["trainable"]["router"]["up"])
  assert float(total) == np.sum(up)


def test_mismatches_list_paths(tmp_path):
  state, _ = fresh(mesh_of())
  with Checkpoints(tmp_path) as saved:
    saved.save(10, state, META)
    saved.wait()
    want = like(state)
    a = want["trainable"]["lora"]["a"]
    want["trainable"]["lora"] = {
      "a": jax.ShapeDtypeStruct((16, 4), a.dtype),
      "b": jax.ShapeDtypeStruct((8, 8), jnp.float32),
      "c": a,
    }
    want["trainable"]["router"] = {"renamed": a}
    with pytest.raises(ValueError) as error:
      saved.restore(10, want)
    text = str(error.value)
    assert "missing: trainable/lora/c, trainable/router/renamed;" in text
    assert "extra: trainable/router/up;" in text
    assert (
      "trainable/lora/a (saved float32[16, 8], want float32[16, 4])" in text
    )
    assert "trainable/lora/b (saved bfloat16[8, 8], want float32[8, 8])" in text
    with pytest.raises(ValueError, match=r"step 11 .*there are \[10\]"):
      saved.restore(11, want)


def test_part_of_a_checkpoint(tmp_path):
  # Stage 1 into stage 2: routers carried over, the rest fresh.
  state, _ = fresh(mesh_of(1, 2, 2))
  part = {"trainable": {"router": state["trainable"]["router"]}}
  with Checkpoints(tmp_path) as saved:
    saved.save(10, state, META)
    saved.wait()
    back = saved.restore(10, like(part), subset=True)
    equal(host(back), host(part))
    with pytest.raises(ValueError, match="extra: opt_state/"):
      saved.restore(10, like(part))


def test_half_written_steps_are_never_listed_and_are_removed(tmp_path):
  state, _ = fresh(mesh_of())
  with Checkpoints(tmp_path) as saved:
    saved.save(10, state, META)
  (tmp_path / "20").mkdir()
  (tmp_path / "30" / "state").mkdir(parents=True)
  (tmp_path / "40.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
  (tmp_path / "notes").mkdir()
  reader = Checkpoints(tmp_path, read_only=True)
  assert reader.latest() == 10 and (tmp_path / "20").exists()
  with pytest.raises(ValueError, match="reading only"):
    reader.save(11, state, META)
  reader.close()
  with pytest.warns(UserWarning) as caught:
    saved = Checkpoints(tmp_path)
  assert len(caught) == 1
  assert "['20', '30', '40.orbax-checkpoint-tmp']" in str(caught[0].message)
  assert "newest complete one is 10" in str(caught[0].message)
  left = sorted(p.name for p in tmp_path.iterdir())
  assert left == ["10", "notes"]
  assert saved.save(20, state, META)
  saved.close()
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    with Checkpoints(tmp_path) as saved:
      assert saved.steps() == [10, 20]
      equal(host(saved.restore(20, like(state))), host(state))


KILLED = """
  import os, pathlib, signal, threading
  import jax.numpy as jnp, numpy as np
  from wide_jax.checkpoint import Checkpoints

  place = pathlib.Path({place!r})
  big = jnp.asarray(np.random.default_rng(0).normal(size={size}), jnp.float32)
  saved = Checkpoints(place, keep=1)
  saved.save(10, {{"x": big}}, {{"step": 10}})
  saved.wait()

  def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

  if {moment!r} == "before the rename":
    os.rename = os.replace = die
  else:
    def watch():
      while not any(p.is_file() for p in place.glob("20*/**/*")):
        pass
      die()
    threading.Thread(target=watch, daemon=True).start()
  saved.save(20, {{"x": big + 1}}, {{"step": 20}})
  saved.wait()
  import time
  time.sleep(30)
"""


@pytest.mark.parametrize("moment", ["before the rename", "at the first file"])
def test_kill_nine_while_saving(tmp_path, moment):
  size = 4_000_000  # 16 MB: the first file is there long before the last
  done = run(KILLED.format(place=str(tmp_path), moment=moment, size=size))
  assert done.returncode == -signal.SIGKILL, done.stderr
  leftovers = [p.name for p in tmp_path.iterdir() if p.name != "10"]
  assert leftovers, "killed too late: nothing half-written"
  with pytest.warns(UserWarning, match="half-written") as caught:
    saved = Checkpoints(tmp_path, keep=1)
  assert len(caught) == 1
  assert saved.latest() == 10 and saved.metadata(10) == {"step": 10}
  target = {"x": jax.ShapeDtypeStruct((size,), jnp.float32)}
  back = saved.restore(10, target)
  want = np.random.default_rng(0).normal(size=size).astype(np.float32)
  np.testing.assert_array_equal(back["x"], want)
  assert saved.save(20, back, {"step": 20})
  saved.wait()
  assert saved.steps() == [20] and saved.metadata(20) == {"step": 20}
  np.testing.assert_array_equal(saved.restore(20, target)["x"], want)
  saved.close()


def test_disk_full(tmp_path):
  # A file-size limit stands in for the full disk: writing fails just so.
  rng = np.random.default_rng(0)
  state = {"x": jnp.asarray(rng.normal(size=1_000_000), jnp.float32)}
  saved = Checkpoints(tmp_path, keep=1)
  saved.save(10, state, META)
  saved.wait()
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
  try:
    with pytest.raises(OSError) as error:
      saved.save(20, state, META)
      saved.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  text = str(error.value)
  assert "step 20" in text and str(tmp_path) in text
  assert "newest complete checkpoint: 10" in text and "\n" not in text
  assert [p.name for p in tmp_path.iterdir()] == ["10"]
  equal(host(saved.restore(10, like(state))), host(state))
  saved.wait()  # the error was told once
  assert saved.save(20, state, META)
  saved.wait()
  assert saved.steps() == [20]
  equal(host(saved.restore(20, like(state))), host(state))
  saved.close()


def test_disk_full_before_the_first_byte(tmp_path, monkeypatch):
  state = {"x": jnp.arange(4.0)}
  saved = Checkpoints(tmp_path)
  saved.save(10, state, META)
  saved.wait()

  def full(*args, **kwargs):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(saved._manager, "save", full)
  with pytest.raises(OSError, match="step 20 .*No space left on device"):
    saved.save(20, state, META)
  assert saved.save(20, state, META)
  saved.close()
  assert saved.steps() == [10, 20]


def test_a_reader_makes_nothing(tmp_path):
  with Checkpoints(tmp_path / "none" / "yet", read_only=True) as reader:
    assert reader.latest() is None
    with pytest.raises(ValueError, match=r"step 1 .*there are \[\]"):
      reader.metadata(1)
  assert list(tmp_path.iterdir()) == []


def test_nonsense_is_refused(tmp_path):
  with pytest.raises(ValueError, match="keep=0 must be at least 1"):
    Checkpoints(tmp_path, keep=0)
  with pytest.raises(ValueError, match="gs://bucket/run.*file system path"):
    Checkpoints("gs://bucket/run")
  with Checkpoints(tmp_path) as saved:
    with pytest.raises(ValueError, match="step 1 is not JSON.*set"):
      saved.save(1, {"x": jnp.zeros(2)}, {"bad": {1, 2}})
    with pytest.raises(ValueError, match="2 leaves have 1 different"):
      saved.save(1, {"a": {"b": 1}, "a/b": 2}, META)
    assert saved.latest() is None
