"""Mosaic TPU kernels in TPU interpret mode, through the public ops.

Interpret mode fills memory that nobody wrote with NaN and refuses reads past
the end of an array; it says nothing about races or speed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import pallas_kernels as pk
from pallas_kernels import reference
from pallas_kernels.mosaic_tpu import attention, attention_decode, matmul
from pallas_kernels.mosaic_tpu import matmul_tiles as tiling
from pallas_kernels.problem import Problem

ON = {"backend": "mosaic_tpu", "interpret": True}
MASKS = ("random", "all", "none", "rows")


def keeps(kind: str, shape, rng) -> np.ndarray:
  """A mask; `rows` has tokens that keep everything among ones that do not."""
  if kind == "rows":
    return np.broadcast_to(rng.random(shape[:-1])[..., None] < 0.3, shape)
  return rng.random(shape) < {"random": 0.4, "all": 2.0, "none": -1.0}[kind]


def normal(rng, *shape, dtype="float32"):
  return jnp.asarray(rng.normal(size=shape), dtype)


def error(got, exact) -> float:
  return float(np.linalg.norm(np.float64(got) - exact))


def assert_as_good(got, reference_out, exact, keep):
  """Exact zeros where dropped; else at most twice as wrong as the reference.

  One rounding in the last place of the largest value is always allowed: on a
  problem this small the reference may be right by luck.
  """
  got = np.asarray(got, np.float64)
  assert not np.isnan(got).any()
  if keep is not None:
    assert (got[~keep] == 0).all()
  ours = error(got, exact)
  theirs = error(np.asarray(reference_out, np.float64), exact)
  step = 2.0**-8 if reference_out.dtype == jnp.bfloat16 else 2.0**-24
  assert ours <= 2 * theirs + step * np.abs(exact).max(initial=0)


# --- matmuls -----------------------------------------------------------------

# rows, length, dense channels, groups, channels of a group, dtype, transposed,
# layers. Blocks are 128 wide: several groups in one (32), one (128), a part of
# one (256), parts of two (48, 192), and an edge (5 x 48, 3 x 192).
SHAPES = {
  "c32": (2, 19, 64, 8, 32, "float32", False, 0),
  "c48-edge": (1, 7, 96, 5, 48, "bfloat16", True, 2),
  "c128": (1, 33, 128, 3, 128, "bfloat16", True, 0),
  "c192-edge": (3, 11, 72, 3, 192, "float32", True, 0),
  "c256": (1, 1, 64, 2, 256, "float32", False, 3),
}
TILES = tiling.Tiles(tokens=16, channels=128, out=128)


def exact_matmul(op, x, weights, keep_BTF):
  """The op in float64."""
  x, *weights = (np.float64(a) for a in (x, *weights))
  if op == "matmul_n_sparse":
    return np.where(keep_BTF, x @ weights[0], 0)
  if op == "matmul_k_sparse":
    return np.where(keep_BTF, x, 0) @ weights[0]
  gate = x @ weights[0]
  hidden = gate / (1 + np.exp(-gate)) * (x @ weights[1])
  return np.where(keep_BTF, hidden, 0) @ weights[2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
  "op", ["matmul_n_sparse", "matmul_k_sparse", "gated_ffn"]
)
def test_matmuls(op, shape, rng_seed):
  rows, length, dense, groups, size, dtype, transposed, layers = SHAPES[shape]
  rng = np.random.default_rng(rng_seed)
  wide = groups * size
  scale = dense**-0.5
  into = normal(rng, max(layers, 1), dense, wide, dtype=dtype) * scale
  back = normal(rng, max(layers, 1), wide, dense, dtype=dtype) * wide**-0.5
  weights = {
    "matmul_n_sparse": [into],
    "matmul_k_sparse": [back],
    "gated_ffn": [into, into[..., ::-1], back],
  }[op]
  layer = layers - 1 if layers else None
  plain = [w[layer or 0] for w in weights]
  extra = {} if op == "matmul_k_sparse" else {"transposed": transposed}
  if transposed and op != "matmul_k_sparse":
    weights[:2] = [
      w.swapaxes(1, 2) if w is not back else w for w in weights[:2]
    ]
  if not layers:
    weights = [w[0] for w in weights]

  @jax.jit
  def run(x, mask):
    plan = pk.make_plan(mask, backend="reference")
    return getattr(pk, op)(
      x, *weights, plan, layer=layer, tiles=TILES, **extra, **ON
    )

  width = wide if op == "matmul_k_sparse" else dense
  x = normal(rng, rows, length, width, dtype=dtype)
  for kind in MASKS:
    keep = keeps(kind, (rows, length, groups), rng)
    keep_BTF = np.repeat(keep, size, -1)
    want = getattr(reference, op)(x, *plain, jnp.asarray(keep))
    exact = exact_matmul(op, x, plain, keep_BTF)
    given = x
    if op == "matmul_k_sparse":  # what is dropped is never read
      given = jnp.where(keep_BTF, x, jnp.nan)
    got = run(given, keep)
    assert got.dtype == want.dtype
    assert_as_good(
      got, want, exact, keep_BTF if op == "matmul_n_sparse" else None
    )
    if kind == "none":
      assert (np.asarray(got) == 0).all()


def test_unsorted_joined_ffn_equals_sorted(rng_seed):
  rng = np.random.default_rng(rng_seed)
  keep = keeps("random", (2, 17, 4), rng)
  x = normal(rng, 2, 17, 64)
  gates, down = normal(rng, 2, 64, 512), normal(rng, 512, 64)
  plan = pk.make_plan(keep, backend="reference")

  @functools.partial(jax.jit, static_argnums=0)
  def run(sort):
    tiles = tiling.Tiles(tokens=16, channels=256, sort=sort)
    return pk.gated_ffn(x, gates, None, down, plan, tiles=tiles, **ON)

  both = [run(False), run(True)]
  # A token's sum runs over the same blocks in the same order, or over blocks
  # that add 0: equal to the bit.
  np.testing.assert_array_equal(*both)
  np.testing.assert_allclose(
    both[0],
    reference.gated_ffn(x, gates[0], gates[1], down, jnp.asarray(keep)),
    rtol=1e-4,
    atol=1e-3,
  )


def test_blocks_that_nobody_keeps_are_not_visited(rng_seed):
  """Their weights are NaN: 0 * NaN would show."""
  rng = np.random.default_rng(rng_seed)
  keep = np.zeros((1, 40, 4), bool)
  keep[:, :20, 1] = keep[:, 20:, 3] = True
  x, w = normal(rng, 1, 40, 512), normal(rng, 512, 64)
  poisoned = w.at[:128].set(jnp.nan).at[256:384].set(jnp.nan)
  plan = pk.make_plan(keep, backend="reference")
  run = jax.jit(
    functools.partial(pk.matmul_k_sparse, plan=plan, tiles=TILES, **ON)
  )
  np.testing.assert_array_equal(run(x, poisoned), run(x, w))


@pytest.mark.parametrize(
  "op", ["matmul_n_sparse", "matmul_k_sparse", "gated_ffn"]
)
def test_grid_steps_grow_with_the_active_blocks(op, rng_seed):
  rng = np.random.default_rng(rng_seed)
  k, n = (1024, 64) if op == "matmul_k_sparse" else (64, 1024)
  problem = Problem(
    op=op, dtype="float32", rows=1, length=100, groups=16, k=k, n=n
  )
  uniform = rng.random((100, 16))
  found = []
  for density in (0.0, 0.002, 0.02, 0.1, 1.0):
    keep = uniform < density
    steps, count = matmul.active_blocks(problem, TILES, jnp.asarray(keep))
    padded = np.pad(keep, ((0, 12), (0, 0)))
    active = padded.reshape(7, 16, 8, 2).any((1, 3))  # two groups of 64 a block
    if op != "matmul_n_sparse":  # every tile is written
      active[~active.any(1), 0] = True
    wanted = np.flatnonzero(active)
    np.testing.assert_array_equal(steps[: wanted.size], wanted)
    assert int(count) == max(wanted.size, 1)
    found.append(int(count))
  assert found == sorted(found)
  assert found[0] <= 7 < found[-2] < found[-1] == 56


def grids(jaxpr) -> list[int]:
  """How many bounds of the grid of each pallas_call are traced."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "pallas_call":
      found.append(eqn.params["grid_mapping"].num_dynamic_grid_bounds)
      continue
    for inner in jaxprs_in_params(eqn.params):
      found += grids(inner)
  return found


# --- attention ---------------------------------------------------------------


def exact_attention(q, k, v, sees_BTS, scale):
  """softmax(q k^T) v in float64; 0 where nothing is seen."""
  q, k, v = (np.float64(a) for a in (q, k, v))
  per_kv = q.shape[2] // k.shape[2]
  k, v = (np.repeat(a, per_kv, 2) for a in (k, v))
  logits = np.einsum("btnh,bsnh->bnts", q, k) * scale
  sees = sees_BTS[:, None]
  top = np.where(sees, logits, -1e9).max(-1, keepdims=True)
  weights = np.where(sees, np.exp(np.minimum(logits - top, 0)), 0)
  total = weights.sum(-1, keepdims=True)
  weights /= np.where(total == 0, 1, total)
  return np.einsum("bnts,bsnh->btnh", weights, np.where(v == v, v, 0))


# rows, queries, keys, N, K, H, groups, dtype, start, offset, window, layers
PREFILL = {
  "padded": (2, 37, 150, 4, 2, 64, 2, "float32", (3, 130), None, None, 0),
  "window": (1, 50, 50, 6, 2, 128, 6, "bfloat16", None, None, 9, 0),
  "offset": (2, 7, 300, 9, 3, 64, 3, "float32", (0, 20), (290, 15), None, 2),
}


@pytest.mark.parametrize("case", PREFILL)
def test_prefill(case, rng_seed):
  rows, length, keys, heads, kv, dim, groups, dtype, *rest = PREFILL[case]
  start, offset, window, layers = rest
  rng = np.random.default_rng(rng_seed)
  q = normal(rng, rows, length, heads, dim, dtype=dtype)
  k, v = (
    normal(rng, max(layers, 1), rows, keys, kv, dim, dtype=dtype)
    for _ in range(2)
  )
  layer = layers - 1 if layers else None
  first = np.array(start or (0,) * rows)
  at = np.array(offset or (keys - length,) * rows)[:, None] + np.arange(length)
  j = np.arange(keys)[None, None]
  sees = (j <= at[..., None]) & (j >= first[:, None, None])
  if window is not None:
    sees &= j > at[..., None] - window
  # Keys that nobody sees may hold anything.
  unseen = ~sees.any(1)[:, :, None, None]
  k, v = (jnp.where(unseen, jnp.nan, a) for a in (k, v))
  kwargs = {
    "start": None if start is None else jnp.asarray(start, jnp.int32),
    "offset": None if offset is None else jnp.asarray(offset, jnp.int32),
    "window": window,
  }

  @jax.jit
  def run(mask):
    return pk.attention_prefill(
      q,
      *((k, v) if layers else (k[0], v[0])),
      pk.make_plan(mask, backend="reference"),
      layer=layer,
      tiles=attention.PrefillTiles(queries=16, keys=128),
      **kwargs,
      **ON,
    )

  plain = k[layer or 0], v[layer or 0]
  full = exact_attention(q, *plain, sees, dim**-0.5)
  for kind in MASKS[:3]:
    keep = keeps(kind, (rows, length, groups), rng)
    want = reference.attention_prefill(q, *plain, jnp.asarray(keep), **kwargs)
    keep_BTN = np.repeat(keep, heads // groups, -1)
    exact = np.where(keep_BTN[..., None], full, 0)
    assert_as_good(run(keep), want, exact, keep_BTN)


# rows, keys, N, K, H, groups, dtype, lengths, start, layers
DECODE = {
  "ragged": (
    4,
    300,
    9,
    3,
    64,
    3,
    "float32",
    (300, 1, 0, 130),
    (0, 0, 0, 129),
    0,
  ),
  "heads": (2, 256, 32, 16, 128, 4, "bfloat16", (200, 128), None, 2),
  "few": (1, 33, 8, 8, 64, 8, "float32", (20,), None, 3),
}


@pytest.mark.parametrize("case", DECODE)
def test_decode(case, rng_seed):
  rows, keys, heads, kv, dim, groups, dtype, lengths, start, layers = DECODE[
    case
  ]
  rng = np.random.default_rng(rng_seed)
  q = normal(rng, rows, heads, dim, dtype=dtype)
  first = np.array(start or (0,) * rows)
  j = np.arange(keys)[None]
  sees = (j < np.array(lengths)[:, None]) & (j >= first[:, None])
  # The cache past a row's end was never written.
  k, v = (
    jnp.where(
      sees[None, :, :, None, None],
      normal(rng, max(layers, 1), rows, keys, kv, dim, dtype=dtype),
      jnp.nan,
    ).astype(dtype)
    for _ in range(2)
  )
  layer = layers - 1 if layers else None
  lengths = jnp.asarray(lengths, jnp.int32)
  start = None if start is None else jnp.asarray(start, jnp.int32)

  @jax.jit
  def run(keep):
    return pk.attention_decode(
      q,
      *((k, v) if layers else (k[0], v[0])),
      lengths,
      keep,
      start=start,
      layer=layer,
      tiles=attention_decode.DecodeTiles(keys=128),
      **ON,
    )

  plain = k[layer or 0], v[layer or 0]
  full = exact_attention(q[:, None], *plain, sees[:, None], dim**-0.5)[:, 0]
  for kind in MASKS[:3]:
    keep = keeps(kind, (rows, groups), rng)
    want = reference.attention_decode(
      q, *plain, lengths, jnp.asarray(keep), start=start
    )
    keep_BN = np.repeat(keep, heads // groups, -1)
    exact = np.where(keep_BN[..., None], full, 0)
    assert_as_good(run(keep), want, exact, keep_BN)


def test_prefill_visits_kept_tiles_only():
  problem = Problem(
    op="attention_prefill",
    dtype="float32",
    rows=2,
    length=40,
    groups=2,
    keys=40,
    heads=8,
    kv_heads=4,
    dim=64,
  )
  tiles = attention.PrefillTiles(queries=16, keys=40)
  keep = np.zeros((2, 40, 2), bool)
  keep[0, 17, 1] = keep[1, 39, 0] = True
  steps, count = attention.active_tiles(
    problem, tiles, jnp.asarray(keep.reshape(80, 2))
  )
  # Units are the pairs of heads of one kv head: 4 a row, 3 tiles each.
  row0 = [(2 * 3) + 1, (3 * 3) + 1]
  row1 = [12 + 2, 12 + 3 + 2]
  assert int(count) == 4
  np.testing.assert_array_equal(steps[:4], row0 + row1)


def test_decode_visits_kept_heads_and_seen_keys_only():
  problem = Problem(
    op="attention_decode",
    dtype="float32",
    rows=3,
    length=1,
    groups=4,
    keys=512,
    heads=32,
    kv_heads=16,
    dim=128,
  )
  keep = jnp.asarray([[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
  steps, count = attention_decode.active_keys(
    problem,
    attention_decode.DecodeTiles(keys=128),
    keep,
    jnp.asarray([130, 0, 0], jnp.int32),
    jnp.asarray([300, 128, 512], jnp.int32),
  )
  # Row, chunk of 8 kv heads, block: row 0 sees blocks 1 and 2 of chunk 0, row 1
  # block 0 of both chunks.
  assert int(count) == 4
  np.testing.assert_array_equal(steps[:4], [1, 2, 8, 12])


# --- all ---------------------------------------------------------------------


def calls():
  """Each op on structs, for tracing."""
  x = jax.ShapeDtypeStruct((1, 64, 256), jnp.float32)
  w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
  mask = jax.ShapeDtypeStruct((1, 64, 2), jnp.bool_)
  q = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.float32)
  k = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float32)
  on = {"backend": "mosaic_tpu"}

  def plan(mask):
    return pk.make_plan(mask, backend="reference")

  return {
    "n": (
      lambda x, w, m: pk.matmul_n_sparse(x, w, plan(m), **on),
      (x, w, mask),
    ),
    "k": (
      lambda x, w, m: pk.matmul_k_sparse(x, w, plan(m), **on),
      (x, w, mask),
    ),
    "ffn": (
      lambda x, w, m: pk.gated_ffn(x, w, w, w, plan(m), **on),
      (x, w, mask),
    ),
    "prefill": (
      lambda q, k, m: pk.attention_prefill(q, k, k, plan(m), **on),
      (q, k, mask),
    ),
    "decode": (
      lambda q, k, m: pk.attention_decode(
        q[:, 0], k, k, jnp.full((1,), 9), m[:, 0], **on
      ),
      (q, k, mask),
    ),
  }


@pytest.mark.parametrize("name", ["n", "k", "ffn", "prefill", "decode"])
def test_the_grid_is_as_long_as_the_list(name):
  fn, structs = calls()[name]
  traced = grids(jax.make_jaxpr(fn)(*structs).jaxpr)
  assert len(traced) == 1 and traced[0] >= 1


def test_reasons():
  x = jnp.zeros((1, 16, 128), jnp.float16)
  plan = pk.make_plan(jnp.ones((1, 16, 2), bool), backend="reference")
  with pytest.raises(pk.Unsupported, match="bfloat16 and float32, not float16"):
    pk.matmul_n_sparse(x, jnp.zeros((128, 256), jnp.float16), plan, **ON)
  x, w = x.astype(jnp.float32), jnp.zeros((128, 256))
  with pytest.raises(pk.Unsupported, match="channels=100 .* multiple of 128"):
    pk.matmul_n_sparse(x, w, plan, tiles=tiling.Tiles(channels=100), **ON)
  with pytest.raises(pk.Unsupported, match="tokens=9 .* multiple of 8"):
    pk.matmul_n_sparse(x, w, plan, tiles=tiling.Tiles(tokens=9), **ON)
  wide = Problem(
    op="gated_ffn",
    dtype="float32",
    rows=1,
    length=64,
    groups=2,
    k=1 << 17,
    n=256,
  )
  assert "vector memory" in (tiling.why_not(wide) or "")


@pytest.mark.parametrize(
  "op", ["matmul_n_sparse", "matmul_k_sparse", "gated_ffn"]
)
@pytest.mark.parametrize("size", [16, 24, 32, 48, 64, 80, 128, 192, 1024])
def test_candidates_are_legal_and_differ(op, size):
  k, n = (size * 12, 576) if op == "matmul_k_sparse" else (576, size * 12)
  for tokens in (1, 17, 4096):
    problem = Problem(
      op=op, dtype="bfloat16", rows=1, length=tokens, groups=12, k=k, n=n
    )
    found = tiling.candidates(problem)
    assert found[0] == tiling.default(problem)
    assert len(set(found)) == len(found)
    assert all(tiling.reason_not(problem, tiles) is None for tiles in found)
