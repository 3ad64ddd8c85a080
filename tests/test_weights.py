"""Reading Hugging Face directories: what is taken, and what is refused.

These need no torch: the checkpoints are written by our own writer, whose files
test_export has transformers read.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from wide_jax import export, hf_directory, weights
from wide_jax.model_config import ModelConfig
from wide_jax.safetensors_io import (
  SafetensorsFile,
  item,
  read_json,
  write_json,
  write_safetensors,
)

TL = ModelConfig(
  model_type="llama",
  vocab=101,
  d_model=72,
  n_layers=2,
  n_heads=9,
  n_kv_heads=3,
  head_dim=8,
  d_ff=200,
  tied=True,
)
TQ2 = ModelConfig(
  model_type="qwen2",
  vocab=101,
  d_model=56,
  n_layers=2,
  n_heads=14,
  n_kv_heads=2,
  head_dim=4,
  d_ff=120,
  qkv_bias=True,
)
TQ3 = ModelConfig(
  model_type="qwen3",
  vocab=101,
  d_model=40,
  n_layers=2,
  n_heads=4,
  n_kv_heads=2,
  head_dim=16,
  d_ff=120,
  qk_norm=True,
)


def random_params(config, seed=0, dtype=np.float32):
  rng = np.random.default_rng(seed)
  return weights.unflatten(
    {
      path: rng.standard_normal(shape).astype(dtype)
      for path, shape in weights.param_shapes(config).items()
    }
  )


def make(folder, config=TL, **kwargs):
  """Writes a random checkpoint; returns (folder, params)."""
  params = random_params(config)
  export.write_hf(folder, config, params, **kwargs)
  return folder, params


def assert_same_tree(a, b):
  a, b = weights.flatten(a), weights.flatten(b)
  assert set(a) == set(b)
  for path in a:
    assert a[path].dtype == b[path].dtype, path
    np.testing.assert_array_equal(
      np.asarray(a[path], np.float32), np.asarray(b[path], np.float32), path
    )


def edit_tensors(folder, change, name=hf_directory.SINGLE):
  """Rewrites one file with `change(dict of arrays)` applied."""
  file = SafetensorsFile(folder / name)
  tensors = {k: np.array(file.read(k)) for k in file.entries}
  del file
  change(tensors)
  write_safetensors(folder / name, [item(*kv) for kv in tensors.items()])


@pytest.mark.parametrize("config", [TL, TQ2, TQ3], ids=["TL", "TQ2", "TQ3"])
def test_reads_back_every_leaf_to_the_bit(tmp_path, config):
  folder, params = make(tmp_path / "m", config)
  loaded = weights.load_params(folder)
  assert loaded.config == config
  assert_same_tree(loaded.params, params)
  report = loaded.report
  assert report.tensors == report.used and not report.ignored
  n_bytes = sum(a.nbytes for a in weights.flatten(params).values())
  assert report.array_bytes == report.file_bytes == n_bytes
  assert f"{report.used} of {report.tensors} tensors used" in str(report)


def test_layout_has_heads_split_and_layers_first():
  shapes = weights.param_shapes(TQ2)
  assert shapes["layers/attn/q/kernel"] == (2, 56, 14, 4)
  assert shapes["layers/attn/q/bias"] == (2, 14, 4)
  assert shapes["layers/attn/k/kernel"] == (2, 56, 2, 4)
  assert shapes["layers/attn/o/kernel"] == (2, 14, 4, 56)
  assert shapes["layers/ffn/down/kernel"] == (2, 120, 56)
  assert shapes["head/kernel"] == (101, 56)
  assert "layers/attn/o/bias" not in shapes
  assert "head/kernel" not in weights.param_shapes(TL)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(tmp_path, dtype):
  folder, params = make(tmp_path / "m")
  loaded = weights.load_params(folder, dtype=dtype)
  for path, leaf in weights.flatten(loaded.params).items():
    want = weights.flatten(params)[path].astype(jnp.dtype(dtype))
    assert leaf.dtype == want.dtype
    np.testing.assert_array_equal(leaf.view("u1"), want.view("u1"))


def test_bfloat16_file_loads_to_the_same_bits(tmp_path):
  params = random_params(TL, dtype=ml_dtypes.bfloat16)
  export.write_hf(tmp_path / "m", TL, params)
  loaded = weights.load_params(tmp_path / "m", dtype=jnp.bfloat16)
  assert_same_tree(loaded.params, params)
  assert loaded.report.file_bytes == loaded.report.array_bytes


def test_float16_refuses_what_it_cannot_hold(tmp_path):
  folder, _ = make(tmp_path / "m")

  def grow(tensors):
    tensors["model.norm.weight"][3] = 70_000.0

  edit_tensors(folder, grow)
  with pytest.raises(ValueError, match=r"model\.norm\.weight.*70000.*65504"):
    weights.load_params(folder, dtype="float16")
  with pytest.raises(ValueError, match="int32"):
    weights.load_params(folder, dtype="int32")


def test_put_is_called_once_a_leaf_and_places_it(tmp_path):
  folder, params = make(tmp_path / "m")
  devices = jax.devices()
  seen = []

  def put(path, array):
    seen.append(path)
    return jax.device_put(array, devices[-1])

  loaded = weights.load_params(folder, put=put)
  assert seen == list(weights.param_shapes(TL))
  for leaf in jax.tree.leaves(loaded.params):
    assert leaf.devices() == {devices[-1]}
  assert_same_tree(loaded.params, params)


def test_like_gives_dtypes_and_refuses_other_shapes(tmp_path):
  folder, _ = make(tmp_path / "m")
  like = weights.unflatten(
    {
      path: jax.ShapeDtypeStruct(
        shape, jnp.float32 if "norm" in path else jnp.bfloat16
      )
      for path, shape in weights.param_shapes(TL).items()
    }
  )
  loaded = weights.load_params(folder, like=like)
  assert loaded.params["final_norm"]["scale"].dtype == jnp.float32
  assert loaded.params["embed"]["table"].dtype == jnp.bfloat16
  like["embed"]["table"] = jax.ShapeDtypeStruct((102, 72), jnp.float32)
  with pytest.raises(ValueError, match=r"embed/table.*102, 72.*101, 72"):
    weights.load_params(folder, like=like)
  del like["embed"]
  with pytest.raises(ValueError, match="embed/table"):
    weights.load_params(folder, like=like)


# --- A4: the tied head -------------------------------------------------------


def test_a4_equal_copy_is_held_once(tmp_path):
  folder, params = make(tmp_path / "m")
  bare = weights.load_params(folder)
  edit_tensors(
    folder, lambda t: t.update({weights.HEAD: t[weights.EMBED].copy()})
  )
  loaded = weights.load_params(folder)
  assert loaded.config.tied
  assert_same_tree(loaded.params, bare.params)
  report = loaded.report
  assert report.ignored == (weights.HEAD,)
  assert report.tensors == report.used + 1
  assert report.array_bytes == bare.report.array_bytes


def test_a4_contradicting_copy_is_followed_with_a_warning(tmp_path):
  folder, params = make(tmp_path / "m")
  head = np.float32(2) * params["embed"]["table"]
  edit_tensors(folder, lambda t: t.update({weights.HEAD: head}))
  with pytest.warns(UserWarning, match="tie_word_embeddings is set, but"):
    loaded = weights.load_params(folder)
  assert not loaded.config.tied
  assert weights.read_config(folder) == loaded.config
  np.testing.assert_array_equal(loaded.params["head"]["kernel"], head)
  assert "kept apart" in str(loaded.report)


def test_a4_untied_without_a_head_is_refused(tmp_path):
  folder, _ = make(tmp_path / "m", TQ2)
  edit_tensors(folder, lambda t: t.pop(weights.HEAD))
  with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
    weights.load_params(folder)


# --- A5: the right set of files ----------------------------------------------


@pytest.fixture
def sharded(tmp_path):
  folder, params = make(tmp_path / "m", shard_bytes=150_000)
  shards = sorted(folder.glob("model-*.safetensors"))
  assert len(shards) >= 3
  assert_same_tree(weights.load_params(folder).params, params)
  return folder, shards, params


def test_a5_missing_shard(sharded):
  folder, shards, _ = sharded
  shards[1].unlink()
  with pytest.raises(FileNotFoundError, match=shards[1].name):
    weights.load_params(folder)


@pytest.mark.parametrize("keep", [-100, 20, 4, 0])
def test_a5_truncated_shard_is_refused_before_anything_is_read(
  sharded, monkeypatch, keep
):
  folder, shards, _ = sharded
  data = shards[1].read_bytes()
  shards[1].write_bytes(data[:keep])

  def no_reading(self, name):
    raise AssertionError("a tensor was read")

  monkeypatch.setattr(SafetensorsFile, "read", no_reading)
  with pytest.raises(ValueError, match=shards[1].name):
    weights.load_params(folder)


def test_a5_stray_file_is_not_opened(sharded, monkeypatch):
  folder, _, params = sharded
  write_safetensors(
    folder / "consolidated.safetensors", [item("other", np.ones(3))]
  )
  opened, real = [], SafetensorsFile.__init__

  def spy(self, path):
    opened.append(pathlib.Path(path).name)
    real(self, path)

  monkeypatch.setattr(SafetensorsFile, "__init__", spy)
  assert_same_tree(weights.load_params(folder).params, params)
  assert "consolidated.safetensors" not in opened


def test_a5_shards_may_have_any_name(sharded):
  folder, shards, params = sharded
  index = read_json(folder / hf_directory.INDEX)
  name = "model.safetensors-00001-of-00003.safetensors"
  shards[0].rename(folder / name)
  index["weight_map"] = {
    k: name if v == shards[0].name else v
    for k, v in index["weight_map"].items()
  }
  write_json(folder / hf_directory.INDEX, index)
  assert_same_tree(weights.load_params(folder).params, params)


def edit_index(folder, change):
  index = read_json(folder / hf_directory.INDEX)
  change(index["weight_map"])
  write_json(folder / hf_directory.INDEX, index)


def test_index_is_followed_both_ways(sharded):
  folder, shards, _ = sharded
  whole = read_json(folder / hf_directory.INDEX)["weight_map"]
  name = "model.norm.weight"

  edit_index(folder, lambda t: t.pop(name))
  with pytest.raises(ValueError, match=f"holds {name}, which"):
    weights.load_params(folder)
  wrong = next(s.name for s in shards if s.name != whole[name])
  edit_index(folder, lambda t: t.update({name: wrong}))
  with pytest.raises(ValueError, match=f"{name} into {wrong}, which lacks"):
    weights.load_params(folder)
  edit_index(folder, lambda t: t.update({name: "../x.safetensors"}))
  with pytest.raises(ValueError, match="outside its directory"):
    weights.load_params(folder)


def test_an_index_and_a_single_file_contradict_each_other(sharded):
  folder, shards, _ = sharded
  shutil.copy(shards[0], folder / hf_directory.SINGLE)
  with pytest.raises(ValueError, match=r"both model\.safetensors and"):
    weights.load_params(folder)


def test_no_weights_at_all(tmp_path):
  folder, _ = make(tmp_path / "m")
  (folder / hf_directory.SINGLE).rename(folder / "other.safetensors")
  with pytest.raises(FileNotFoundError, match=r"neither.*other\.safetensors"):
    weights.load_params(folder)


# --- missing, extra, wrongly shaped ------------------------------------------

_K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda t: t.pop(_K), f"lacks {_K}"),
    (lambda t: t.update(odd=np.ones(3, "f4")), "holds odd"),
    (
      lambda t: t.update(
        {_K.replace("layers.1", "layers.2"): np.ones((24, 72), "f4")}
      ),
      r"holds model\.layers\.2",
    ),
    (
      lambda t: t.update({_K: t[_K].T.copy()}),
      rf"{_K}.*\(72, 24\).*\(24, 72\)",
    ),
    (
      lambda t: t.update({_K: t[_K].astype(np.int8)}),
      f"{_K}.*I8",
    ),
  ],
  ids=["missing", "extra", "extra layer", "transposed", "integers"],
)
def test_wrong_tensors_are_refused_by_name(tmp_path, change, message):
  folder, _ = make(tmp_path / "m")
  edit_tensors(folder, change)
  with pytest.raises(ValueError, match=message):
    weights.load_params(folder)


def test_known_buffers_are_left_alone(tmp_path):
  folder, params = make(tmp_path / "m")
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  edit_tensors(folder, lambda t: t.update({name: np.ones(4, "f4")}))
  loaded = weights.load_params(folder)
  assert loaded.report.ignored == (name,)
  assert_same_tree(loaded.params, params)


@pytest.mark.parametrize(
  "text, message",
  [
    (None, "config.json does not exist"),
    ('{"model_type": "ll', "not valid JSON"),
    ("[1, 2]", "want an object"),
    ('{"model_type": "gpt2"}', "gpt2"),
    ("{}", "model_type=None"),
  ],
)
def test_bad_config_json(tmp_path, text, message):
  folder, _ = make(tmp_path / "m")
  (folder / "config.json").unlink()
  if text is not None:
    (folder / "config.json").write_text(text)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    weights.load_params(folder)


@pytest.mark.parametrize(
  "key, value",
  [
    ("rms_norm_eps", None),
    ("rms_norm_eps", "x"),
    ("rms_norm_eps", -1),
    ("max_position_embeddings", None),
    ("rope_theta", [1]),
    ("rope_scaling", [1]),
    ("rope_scaling", 2.0),
  ],
)
def test_wrong_types_in_config_json(tmp_path, key, value):
  folder, _ = make(tmp_path / "m")
  about = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps({**about, key: value}))
  with pytest.raises(ValueError, match=re.escape(f"{key}={value!r}")):
    weights.load_params(folder)


def test_damaged_header(tmp_path):
  folder, _ = make(tmp_path / "m")
  path = folder / hf_directory.SINGLE
  data = bytearray(path.read_bytes())
  data[9:12] = b"\xff\xff\xff"
  path.write_bytes(data)
  with pytest.raises(ValueError, match=r"model\.safetensors.*damaged"):
    weights.load_params(folder)
  path.write_bytes(path.read_bytes() + b"1234")
  with pytest.raises(ValueError, match=r"model\.safetensors"):
    weights.load_params(folder)


# --- where a model lies ------------------------------------------------------


def test_paths_that_are_no_model(tmp_path):
  with pytest.raises(ValueError, match="nowhere"):
    weights.load_params(tmp_path / "nowhere")
  path = tmp_path / "x.bin"
  path.write_bytes(b"1")
  with pytest.raises(ValueError, match=r"x\.bin"):
    weights.load_params(path)


# --- channel order -----------------------------------------------------------


def random_order(config, seed=5):
  rng = np.random.default_rng(seed)
  return np.stack([rng.permutation(config.d_ff) for _ in range(2)])


def test_channel_order_at_load_equals_a_permutation_afterwards(tmp_path):
  config = ModelConfig(
    **(vars(TL) | {"mlp_bias": True, "qkv_bias": True, "o_bias": True})
  )
  folder, params = make(tmp_path / "m", config)
  order = random_order(config)
  loaded = weights.load_params(folder, channel_order=order)
  permuted = weights.permute_channels(params, order)
  assert_same_tree(loaded.params, permuted)
  ffn, old = permuted["layers"]["ffn"], params["layers"]["ffn"]
  for layer, new in ((0, 0), (1, 7), (1, 199)):
    was = order[layer, new]
    for name, at in (("kernel", np.s_[layer, :, new]), ("bias", (layer, new))):
      was_at = (*at[:-1], was)
      np.testing.assert_array_equal(
        ffn["up"][name][at], old["up"][name][was_at]
      )
    np.testing.assert_array_equal(
      ffn["down"]["kernel"][layer, new], old["down"]["kernel"][layer, was]
    )
  np.testing.assert_array_equal(ffn["down"]["bias"], old["down"]["bias"])
  back = weights.permute_channels(permuted, weights.inverse_order(order))
  assert_same_tree(back, params)


def test_channel_order_on_jax_arrays():
  params = random_params(TL)
  order = random_order(TL)
  ours = weights.permute_channels(jax.tree.map(jnp.asarray, params), order)
  assert isinstance(ours["layers"]["ffn"]["up"]["kernel"], jax.Array)
  assert_same_tree(ours, weights.permute_channels(params, order))


@pytest.mark.parametrize(
  "order, message",
  [
    (np.zeros((2, 200), int), "not a permutation"),
    (np.zeros((2, 199), int), r"\(2, 199\).*\[2, 200\]"),
    (np.zeros((2, 200)), "float64"),
  ],
)
def test_bad_channel_order(tmp_path, order, message):
  with pytest.raises(ValueError, match=message):
    weights.permute_channels(random_params(TL), order)


# --- the writer --------------------------------------------------------------


def test_writer_leaves_the_old_file_when_it_fails(tmp_path):
  path = tmp_path / "x.safetensors"
  write_safetensors(path, [item("a", np.arange(3.0))])
  before = path.read_bytes()

  def fail():
    raise OSError("disk full")

  bad = item("a", np.arange(4.0))._replace(make=fail)
  with pytest.raises(OSError, match="disk full"):
    write_safetensors(path, [bad])
  assert path.read_bytes() == before
  assert [p.name for p in tmp_path.iterdir()] == [path.name]
  with pytest.raises(ValueError, match="unique"):
    write_safetensors(path, [item("a", np.ones(1)), item("a", np.ones(1))])
  with pytest.raises(ValueError, match="complex128"):
    write_safetensors(path, [item("a", np.ones(1, complex))])


def test_the_reference_library_reads_our_files(tmp_path):
  safetensors = pytest.importorskip("safetensors.numpy")
  tensors = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.float16(2.5) * np.ones((1, 4), np.float16),
    "scalar": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.float32),
  }
  path = tmp_path / "x.safetensors"
  write_safetensors(path, [item(*kv) for kv in tensors.items()])
  theirs = safetensors.load_file(path)
  ours = SafetensorsFile(path)
  for name, value in tensors.items():
    np.testing.assert_array_equal(theirs[name], value)
    np.testing.assert_array_equal(ours.read(name), value)
    assert ours.read(name).shape == value.shape
  safetensors.save_file(tensors, tmp_path / "y.safetensors")
  ours = SafetensorsFile(tmp_path / "y.safetensors")
  for name, value in tensors.items():
    np.testing.assert_array_equal(ours.read(name), value)
  assert json.loads(json.dumps(ours.metadata)) == ours.metadata


# --- memory ------------------------------------------------------------------


@pytest.mark.skipif(
  not pathlib.Path("/proc/self/status").exists(), reason="needs Linux's /proc"
)
def test_loading_makes_no_second_copy(tmp_path, repo):
  """The measurement of experiments/loading_memory, on a smaller file."""
  config = ModelConfig(
    vocab=2000,
    d_model=1024,
    n_layers=8,
    n_heads=16,
    n_kv_heads=4,
    head_dim=64,
    d_ff=2048,
    tied=True,
  )
  params = weights.unflatten(
    {
      path: np.zeros(shape, ml_dtypes.bfloat16)
      for path, shape in weights.param_shapes(config).items()
    }
  )
  export.write_hf(tmp_path / "m", config, params, shard_bytes=40_000_000)
  script = repo / "experiments" / "loading_memory" / "run.py"
  out = subprocess.run(
    [sys.executable, script, "--case=numpy", f"--checkpoint={tmp_path / 'm'}"],
    check=True,
    capture_output=True,
    text=True,
  )
  row = json.loads(out.stdout.splitlines()[-1])
  assert row["array_bytes"] > 100e6
  # A block in float32 and what Python allocates meanwhile: well below 20 MB.
  assert row["peak_anonymous_bytes"] < row["array_bytes"] + 20e6
