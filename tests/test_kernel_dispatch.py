"""Dispatch, its tables, the XLA backends, tuning and timing."""

import concurrent.futures
import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_fixtures import (
  H200,
  FakeTiles,
  chosen,
  clear,
  inputs,
  problem,
  row,
  with_fake_triton,
  with_tuned,
)

import pallas_kernels
from pallas_kernels import (
  dense,
  device,
  dispatch,
  ops,
  reference,
  suite,
  table,
)
from pallas_kernels.errors import Unsupported
from pallas_kernels.plan import reference_parts
from pallas_kernels.problem import Problem

fake_triton = pytest.fixture(with_fake_triton)
tuned = pytest.fixture(with_tuned)


# --- choosing ----------------------------------------------------------------


def test_a_cpu_runs_the_reference_and_a_gpu_without_a_table_dense(tuned):
  assert dispatch.choose(problem()).backend == "reference"
  assert device.platform() == "cpu"
  choice = chosen(problem())
  assert choice.backend == "dense"
  assert "nothing near" in choice.why


def test_measured_gain_is_taken_and_measured_loss_is_not(fake_triton, tuned):
  rows = [row(problem(), 1.4), row(problem(64), 0.9), row(problem(16), 1.01)]
  table.merge(tuned, H200, rows)
  assert chosen(problem()) == dispatch.Choice(
    "triton", FakeTiles(size=2), "1.40x as fast as the masked dense op here"
  )
  assert chosen(problem(64)).backend == "dense"
  assert chosen(problem(16)).backend == "dense"  # within the noise


@pytest.mark.parametrize(
  "changes", [{"dtype": "float32"}, {"groups": 16}, {"transposed": False}]
)
def test_another_dtype_group_or_layout_is_not_near(fake_triton, tuned, changes):
  table.merge(tuned, H200, [row(problem(), 1.4)])
  assert chosen(problem(**changes)).backend == "dense"


def test_shared_and_separate_masks_are_told_apart(fake_triton, tuned):
  table.merge(tuned, H200, [row(problem(4, shared=True), 1.6)])
  assert chosen(problem(4, shared=True)).backend == "triton"
  assert chosen(problem(4)).backend == "dense"


def test_joined_weights_stand_for_separate_ones(fake_triton, tuned):
  def ffn(joined):
    return suite.matmul_problem(
      "ffn", 256, 128, 0.5, d=512, f=1024, joined=joined
    )

  with dispatch.use_device(H200):
    table.merge(tuned, H200, [row(ffn(True), 1.2)])
    near = dispatch._near(ffn(False), table.load(H200))
    assert dispatch._gain(ffn(False), "triton", near) == 1.2
    assert not dispatch._is_exact(ffn(False), near)
    assert dispatch._is_exact(ffn(True), near)


def test_neighbours_must_all_agree(fake_triton, tuned):
  table.merge(
    tuned, H200, [row(problem(1024), 1.4), row(problem(4096), 1.2, 4)]
  )
  assert chosen(problem(2048)).backend == "triton"
  assert chosen(problem(1500)).tiles == FakeTiles(size=2)
  assert chosen(problem(3000)).tiles == FakeTiles(size=4)
  assert chosen(problem(500)).backend == "dense"  # 1024 is over an octave off
  table.merge(tuned, H200, [row(problem(4096), 1.03)])
  clear()
  assert chosen(problem(4096)).backend == "triton"  # measured: 1.03 counts
  assert chosen(problem(2048)).backend == "dense"  # estimated: it does not


def test_density_is_interpolated_in_time_and_never_beyond(fake_triton, tuned):
  table.merge(
    tuned,
    H200,
    [row(problem(density=0.5), 2.0), row(problem(density=1.0), 0.8)],
  )
  # Times 50 and 125: at 0.6 65 (1.54x), at 0.9 110 (dense).
  assert chosen(problem(density=0.6)).backend == "triton"
  assert chosen(problem(density=0.9)).backend == "dense"
  assert chosen(problem(density=0.1)).backend == "triton"
  table.merge(
    tuned.with_name("nvidia_x.json"), "nvidia_x", [row(problem(), 2.0)]
  )
  with dispatch.use_device("nvidia_x"):
    assert dispatch.choose(problem(density=0.9)).backend == "dense"


def test_a_refusing_backend_is_passed_over_or_refuses(fake_triton, tuned):
  table.merge(tuned, H200, [row(problem(dtype="float16"), 3.0)])
  assert chosen(problem(dtype="float16")).backend == "dense"
  with pytest.raises(Unsupported, match="float16 is not for me"):
    dispatch.choose(problem(dtype="float16"), "triton")
  with pytest.raises(ValueError, match="'cuda' is not known"):
    dispatch.choose(problem(), "cuda")
  with pytest.raises(ValueError, match="tiles are of a backend"):
    dispatch.choose(problem(), tiles=FakeTiles())
  with pytest.raises(Unsupported, match="mosaic_tpu|ragged has no"):
    dispatch.choose(suite.prefill_problem(64, 0.5), "ragged")


def test_named_backends_take_measured_tiles(fake_triton, tuned):
  table.merge(tuned, H200, [row(problem(), 0.5, size=4)])
  with dispatch.use_device(H200):
    assert dispatch.choose(problem(), "triton").tiles == FakeTiles(size=4)
    assert dispatch.choose(problem(16), "triton").tiles == FakeTiles()


# --- trial H5: tables that cannot be trusted ---------------------------------


def spoil(text: str, how: str) -> str:
  if how == "truncated":
    return text[: len(text) // 2]
  if how == "not json":
    return "\0\0"
  stored = json.loads(text)
  if how == "format":
    stored["format"] = 99
  elif how == "device":
    stored["device"] = "nvidia_t4"
  elif how == "field":
    stored["rows"][0]["problem"]["tokens_per_row"] = 3
  elif how == "type":
    stored["rows"][0]["problem"]["groups"] = "8"
  elif how == "negative":
    stored["rows"][0]["results"][0]["us"] = -1
  elif how == "backend":
    stored["rows"][0]["results"][0]["backend"] = "cuda"
  elif how == "list":
    stored = [stored]
  elif how == "version":
    stored["rows"][0]["results"][0]["version"] += 1
  return json.dumps(stored)


@pytest.mark.parametrize(
  "how",
  ["truncated", "not json", "format", "device", "field", "type"]
  + ["negative", "backend", "list", "version"],
)
def test_a_bad_table_is_ignored_with_one_warning(fake_triton, tuned, how):
  table.merge(tuned, H200, [row(problem(), 1.4)])
  tuned.write_text(spoil(tuned.read_text(), how))
  with pytest.warns(RuntimeWarning, match=H200) as seen:
    assert chosen(problem()).backend == "dense"
    assert chosen(problem(64)).backend == "dense"
  assert len(seen) == 1
  # Tuning goes on all the same.
  merged = table.merge(tuned, H200, [row(problem(64), 1.3)])
  clear()
  assert problem(64) in {r.problem for r in merged.rows}
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the stale row is still there
    assert chosen(problem(64)).backend == "triton"


def test_tiles_that_the_backend_does_not_offer_are_not_run(fake_triton, tuned):
  table.merge(tuned, H200, [row(problem(), 1.4, size=3)])
  choice = chosen(problem())
  assert choice.backend == "dense"
  assert "do not fit" in choice.why


def test_results_do_not_depend_on_the_table(fake_triton, tuned):
  p = problem(16, dtype="float32", density=0.5)
  mask = suite.random_mask(p, 0)
  args = (*suite.arrays(p, 0), suite.routed(p, mask))
  want = suite.exact(p, args, mask)
  for rows in ([], [row(p, 1.4)], [row(p, 0.7)]):
    table.merge(tuned, H200, rows)
    clear()
    with dispatch.use_device(H200):
      first = suite.call(p)(*args)
      second = suite.call(p)(*args)
    np.testing.assert_array_equal(first, second)
    assert suite.wrong(p, first, want, mask, 0.0) is None


def test_several_writers_lose_nothing(tuned):
  def write(i):
    table.merge(tuned, H200, [row(problem(8 + i), 1.5)])

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(write, range(24)))
  assert len(table.read(tuned, H200).rows) == 24
  assert list(tuned.parent.iterdir()) == [tuned]


def test_tiles_survive_the_file():
  tiles = FakeTiles(size=4, inner=FakeTiles(size=8))
  stored = json.loads(json.dumps(table.tiles_to_json(tiles)))
  assert stored["type"] == stored["inner"]["type"] == "FakeTiles"
  legal = [FakeTiles(), tiles, None]
  assert table.tiles_from_json(stored, legal) == (True, tiles)
  assert table.tiles_from_json(None, legal) == (True, None)
  assert table.tiles_from_json({"type": "FakeTiles"}, legal) == (False, None)


def test_rows_survive_the_file():
  for of in (problem(), suite.prefill_problem(64, 0.5), problem(shared=True)):
    stored = json.loads(json.dumps(table.row_to_json(row(of, 1.5))))
    assert table.row_from_json(stored) == row(of, 1.5)


def test_packaged_tables_can_be_read():
  for path in table._PACKAGED.glob("*.json"):
    measured = table.read(path, path.stem)
    assert measured.rows


# --- explaining --------------------------------------------------------------


def test_explain_says_what_why_and_what_the_others_said(fake_triton, tuned):
  table.merge(tuned, H200, [row(problem(), 1.4)])
  with dispatch.use_device(H200):
    told = dispatch.explain(problem())
  text = str(told)
  assert told.choice.backend == "triton"
  assert "size=2" in text and "1.40x" in text and str(tuned) in text
  assert "kernels are for a TPU" in told.said["mosaic_tpu"]
  assert set(told.said) == set(dispatch.BACKENDS)


def test_explain_takes_a_call():
  x, w = jnp.ones((1, 4, 8)), jnp.ones((8, 16))
  plan = pallas_kernels.make_plan(jnp.ones((1, 4, 2), bool), density=0.25)
  told = dispatch.explain(pallas_kernels.matmul_n_sparse, x, w, plan)
  assert told.choice.backend == "reference"
  assert (told.problem.tokens, told.problem.density) == (4, 0.25)
  with pytest.raises(ValueError, match="does not fit"):
    dispatch.explain(pallas_kernels.matmul_n_sparse, x, w.T, plan)


# --- dense and ragged --------------------------------------------------------


@pytest.mark.parametrize("part", ["n_sparse", "k_sparse", "ffn"])
@pytest.mark.parametrize(
  "tokens,keep,dtype",
  [(1, "random", "float32"), (33, "random", "bfloat16"), (17, "all", "float32")]
  + [(7, "none", "float32")],
)
def test_xla_backends_equal_the_reference(part, tokens, keep, dtype):
  p, mask, args = inputs(part, tokens, keep, dtype)
  want = suite.exact(p, args, mask)
  error = suite.relative_error(
    suite.compared(p, jax.jit(suite.call(p, "reference"))(*args)), want
  )
  ways = [("dense", t) for t in dispatch.legal_tiles("dense", p)]
  # All-kept overflows the room for half of the pairs: dense must step in.
  ways += [("ragged", t) for t in dispatch.legal_tiles("ragged", p)]
  assert len(ways) >= 3
  for name, tiles in ways:
    out = jax.jit(suite.call(p, name, tiles))(*args)
    assert out.dtype == dtype
    # Gate and up rounded before SwiGLU: two roundings more than the reference.
    limit = 1.5 * error if name == "dense" else error
    got = suite.compared(p, out)
    assert suite.wrong(p, got, want, mask, limit) is None, (name, tiles)


def test_ragged_refuses_what_does_not_fit_memory():
  p = suite.matmul_problem("n_sparse", 16384, 32, 1.0)
  with pytest.raises(Unsupported, match="GiB, more than 16"):
    dispatch.choose(p, "ragged")


def test_ragged_with_stacked_weights():
  p, mask, args = inputs("ffn", 5, "random", "float32")
  x, both, down, plan = args
  weights = (both[0], both[1], down)
  stack = [jnp.stack([jnp.full_like(w, jnp.nan), w]) for w in weights]
  out = {
    name: ops.gated_ffn(x, *stack, plan, layer=1, transposed=True, backend=name)
    for name in ("reference", "dense", "ragged")
  }
  for name in ("dense", "ragged"):
    np.testing.assert_allclose(out[name], out["reference"], atol=1e-5)
  joined = suite.call(p, "reference")(*args)
  np.testing.assert_allclose(joined, out["reference"], atol=1e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_moving_padded_rows_to_the_left_changes_nothing(window):
  """What cuDNN gets for left padding, with XLA in its place."""
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.normal(size=(4, 16, n, 8)), jnp.float32) for n in (4, 2, 2)
  )
  start = jnp.asarray([0, 3, 15, 16], jnp.int32)
  padding = (jnp.arange(16)[None] < start[:, None])[:, :, None, None]
  k, v = (jnp.where(padding, jnp.nan, a) for a in (k, v))
  attend = functools.partial(
    jax.nn.dot_product_attention,
    is_causal=True,
    implementation="xla",
    local_window_size=None if window is None else (window - 1, 0),
  )
  got = jax.jit(functools.partial(dense._unpadded, attend))(start, q, k, v)
  mask = jnp.ones((4, 16, 1), bool)
  want = jax.jit(functools.partial(reference.attention_prefill, window=window))(
    q, k, v, mask, start=start
  )
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_cudnn_is_offered_only_where_it_is_exact():
  p = suite.prefill_problem(128, 0.5)

  def ways(**changes):
    changed = dataclasses.replace(p, **changes)
    return {t.how for t in dispatch.legal_tiles("dense", changed)}

  assert ways() == {"auto", "xla"}  # on a CPU
  with dispatch.use_device(H200):
    assert ways() == ways(padded=True) == {"auto", "xla", "cudnn"}
    for changes in (
      {"shifted": True},
      {"keys": 256},
      {"dtype": "float32"},
      {"dim": 100},
    ):
      assert ways(**changes) == {"auto", "xla"}
    q, k, v = suite.arrays(p, 0)
    mask = suite.random_mask(p, 0)
    with pytest.raises(Unsupported, match="query 0 at key 0"):
      ops.attention_prefill(
        q,
        k,
        v,
        pallas_kernels.make_plan(mask, backend="reference"),
        offset=0,
        backend="dense",
        tiles=dense.AttentionTiles(how="cudnn"),
      )


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_dense_attention_equals_the_reference(op):
  make = {
    "prefill": suite.prefill_problem,
    "decode": lambda n, d, **k: suite.decode_problem(2, n, d, **k),
  }[op]
  p = make(33, 0.5, heads=4, kv_heads=2, dim=16, groups=2, dtype="float32")
  mask = suite.random_mask(p, 0)
  args = (*suite.arrays(p, 0), suite.routed(p, mask))
  args = suite.poisoned(p, args, mask)
  want = suite.exact(p, args, mask)
  got = suite.compared(p, jax.jit(suite.call(p, "dense"))(*args))
  assert suite.wrong(p, got, want, mask, 0.0) is None


def test_older_gpus_are_refused_by_name(monkeypatch):
  """A T4 has no bfloat16 and no asynchronous copies; `auto` runs dense."""
  p = Problem(
    op="matmul_n_sparse",
    dtype="float16",
    rows=1,
    length=64,
    groups=4,
    k=64,
    n=128,
  )
  assert "compute" not in str(dispatch.op_of("triton", p.op).why_not(p))
  monkeypatch.setattr(device, "capability", lambda: (7, 5))
  monkeypatch.setattr(device, "platform", lambda: "gpu")
  assert "8.0 and later, and this GPU has 7.5" in dispatch.why_not("triton", p)
  assert dispatch.plan_maker("auto") is reference_parts
