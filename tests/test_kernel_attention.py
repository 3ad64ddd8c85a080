"""Triton attention against the specification; interpreted on a CPU.

Shapes are few, since each compiles; masks, lengths and paddings are many, since
they do not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import dispatch, plan, reference
from pallas_kernels.problem import Problem
from pallas_kernels.triton import attention
from pallas_kernels.triton.attention import PREFILL, PrefillTiles
from pallas_kernels.triton.attention_decode import DECODE, CacheTiles

NONE = jnp.int32(0)
ON_CPU = jax.default_backend() == "cpu"


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of one prefill; `layers` 0 is an unstacked cache."""

  B: int
  T: int
  S: int
  N: int
  K: int
  H: int
  G: int
  tiles: PrefillTiles
  window: int | None = None
  scale: float | None = None
  layers: int = 0

  def problem(self, dtype: str) -> Problem:
    return Problem(
      op="attention_prefill",
      dtype=dtype,
      rows=self.B,
      length=self.T,
      groups=self.G,
      layers=self.layers,
      keys=self.S,
      heads=self.N,
      kv_heads=self.K,
      dim=self.H,
      window=self.window,
    )


ONE = Shape(3, 1, 9, 2, 1, 16, 2, PrefillTiles(16, 16))
SEVEN = Shape(1, 7, 7, 6, 2, 24, 2, PrefillTiles(16, 16, 3))
SMALL = Shape(3, 17, 17, 4, 2, 16, 2, PrefillTiles(16, 16, 2))
CHUNK = Shape(2, 33, 70, 8, 2, 80, 4, PrefillTiles(32, 16, 2), scale=-0.2)
WINDOW = Shape(2, 33, 40, 4, 4, 16, 4, PrefillTiles(16, 16), window=6)
LONG = Shape(
  1, 100, 100, 8, 4, 16, 2, PrefillTiles(64, 32, 2, by_head=True), layers=2
)


@functools.cache
def compiled(shape: Shape, dtype: str):
  """(kernel, reference) of a shape, jitted; both take the same arguments."""
  problem = shape.problem(dtype)

  @jax.jit
  def kernel(q, k, v, mask, start, offset, layer):
    made = plan.make_plan(mask, backend="reference")
    args = (q, k, v, made, layer, start, offset)
    return PREFILL.run(problem, shape.tiles, ON_CPU, *args, scale=shape.scale)

  @jax.jit
  def spec(q, k, v, mask, start, offset, layer):
    return reference.attention_prefill(
      q,
      k,
      v,
      mask,
      start=start,
      offset=offset,
      window=shape.window,
      scale=shape.scale,
      layer=layer if shape.layers else None,
    )

  return kernel, spec


def arrays(shape: Shape, dtype: str, seed: int = 17):
  rng = np.random.default_rng(seed)
  lead = (shape.layers,) if shape.layers else ()
  kv = (*lead, shape.B, shape.S, shape.K, shape.H)
  q = rng.normal(size=(shape.B, shape.T, shape.N, shape.H))
  return [
    jnp.asarray(a, dtype) for a in (q, rng.normal(size=kv), rng.normal(size=kv))
  ]


def exact(shape, q, k, v, mask, start, offset, layer):
  """The specification once more, in float64 numpy, a query at a time."""
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  if shape.layers:
    k, v = k[int(layer)], v[int(layer)]
  scale = shape.H**-0.5 if shape.scale is None else shape.scale
  out = np.zeros(q.shape)
  for b, t, n in np.ndindex(q.shape[:3]):
    if not mask[b, t, n * shape.G // shape.N]:
      continue
    at = int(offset[b]) + t
    low = max(int(start[b]), 0)
    if shape.window is not None:
      low = max(low, at - shape.window + 1)
    seen = slice(low, max(min(at + 1, shape.S), low))
    kv = n * shape.K // shape.N
    logits = k[b, seen, kv] @ q[b, t, n] * scale
    if logits.size:
      weights = np.exp(logits - logits.max())
      out[b, t, n] = weights @ v[b, seen, kv] / weights.sum()
  return out


def rel_err(got, want):
  got = np.asarray(got, np.float64)
  return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def masks(shape: Shape):
  rng = np.random.default_rng(3)
  size = (shape.B, shape.T, shape.G)
  one_token = np.zeros(size, bool)
  one_token[-1, -1, 0] = True
  return {
    "random": rng.random(size) < 0.5,
    "all": np.ones(size, bool),
    "none": np.zeros(size, bool),
    "one token": one_token,
  }


def at(shape: Shape, kind: str):
  """(start, offset): rows end at the last key, or ragged with left padding."""
  room = shape.S - shape.T
  if kind == "plain":
    return np.zeros(shape.B, np.int32), np.full(shape.B, room, np.int32)
  rows = np.arange(shape.B)
  return np.int32(rows * 4 + 3), np.int32(room - rows % (room + 1))


def check(shape, dtype, mask, start, offset, layer=0):
  kernel, spec = compiled(shape, dtype)
  q, k, v = arrays(shape, dtype)
  args = (q, k, v, jnp.asarray(mask), jnp.asarray(start), jnp.asarray(offset))
  got = kernel(*args, jnp.int32(layer))
  want = exact(shape, q, k, v, mask, start, offset, layer)
  assert got.dtype == q.dtype and got.shape == q.shape
  keep = np.repeat(mask, shape.N // shape.G, axis=-1)
  assert not np.any(np.asarray(got, np.float32)[~keep])
  ours, theirs = rel_err(got, want), rel_err(spec(*args, layer), want)
  # 1e-7 is float32's rounding, where the reference happens to be exact.
  assert ours <= 2 * theirs + 1e-7, (ours, theirs)


@pytest.mark.parametrize(
  "shape", [ONE, SEVEN, SMALL, CHUNK, WINDOW, LONG], ids=lambda s: f"T{s.T}"
)
def test_prefill_is_as_accurate_as_xla(shape):
  for mask in masks(shape).values():
    for kind in ("plain", "ragged"):
      layer = 1 if shape.layers and kind == "ragged" else 0
      check(shape, "float32", mask, *at(shape, kind), layer)


def test_prefill_is_as_accurate_as_xla_in_bfloat16():
  for mask in masks(CHUNK).values():
    check(CHUNK, "bfloat16", mask, *at(CHUNK, "ragged"))


def test_prefill_queries_outside_the_keys():
  """Queries before `start` see nothing; those past the end see all keys."""
  mask = masks(SMALL)["all"]
  start = np.array([0, 17, 5], np.int32)
  check(SMALL, "float32", mask, start, np.array([9, 0, -4], np.int32))


def test_prefill_reads_nothing_it_should_not():
  """NaN before start, after the last query and in dropped pairs stays there."""
  shape, mask = CHUNK, masks(CHUNK)["random"]
  start = jnp.array([3, 20], jnp.int32)
  offset = jnp.array([10, 30], jnp.int32)
  q, k, v = arrays(shape, "float32")
  kernel, _ = compiled(shape, "float32")
  want = kernel(q, k, v, mask, start, offset, NONE)
  j = jnp.arange(shape.S)[None]
  dead = (j < start[:, None]) | (j >= offset[:, None] + shape.T)
  k, v = (jnp.where(dead[..., None, None], jnp.nan, a) for a in (k, v))
  keep = jnp.repeat(jnp.asarray(mask), shape.N // shape.G, axis=-1)
  q = jnp.where(keep[..., None], q, jnp.nan)
  got = kernel(q, k, v, mask, start, offset, NONE)
  np.testing.assert_array_equal(got, want)


def test_prefill_row_does_not_depend_on_its_neighbours():
  """To the bit: contents, masks and padding of the other rows change."""
  shape = SMALL
  kernel, _ = compiled(shape, "float32")
  start, offset = at(shape, "ragged")
  mask = masks(shape)["random"]
  first = arrays(shape, "float32")
  other = arrays(shape, "float32", seed=5)
  mixed = [b.at[1].set(a[1]) for a, b in zip(first, other, strict=True)]
  other_mask = ~mask
  other_mask[1] = mask[1]
  other_start = np.array([0, start[1], 11], np.int32)
  want = kernel(*first, mask, start, offset, NONE)[1]
  got = kernel(*mixed, other_mask, other_start, offset, NONE)[1]
  np.testing.assert_array_equal(got, want)


@pytest.fixture
def ops(monkeypatch):
  """Our two ops behind the public ones, whatever else the backend has."""
  table = {"attention_prefill": PREFILL, "attention_decode": DECODE}
  monkeypatch.setattr(dispatch, "op_of", lambda backend, op: table[op])
  return pallas_kernels


def test_prefill_through_the_public_op(ops):
  """With its gradient, which is the reference's."""
  shape = SMALL
  mask = jnp.asarray(masks(shape)["random"])
  made = plan.make_plan(mask, backend="reference")
  start = jnp.array([0, 2, 5], jnp.int32)
  qkv = arrays(shape, "float32")

  def loss(backend, q, k, v):
    tiles = shape.tiles if backend == "triton" else None
    out = ops.attention_prefill(
      q, k, v, made, start=start, backend=backend, tiles=tiles, interpret=ON_CPU
    )
    return jnp.sum(jnp.sin(out)), out

  grad = jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True)
  (_, out), got = jax.jit(functools.partial(grad, "triton"))(*qkv)
  (_, want_out), want = grad("reference", *qkv)
  np.testing.assert_allclose(out, want_out, atol=2e-6)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_prefill_defaults_and_candidates_fit():
  """Every candidate passes the checks that `run` makes."""
  for shape in (ONE, SEVEN, CHUNK, LONG):
    for dtype in dispatch.DTYPES:
      problem = shape.problem(dtype)
      assert PREFILL.why_not(problem) is None
      tiles = PREFILL.candidates(problem)
      assert tiles[0] == PREFILL.default(problem)
      for one in tiles:
        attention.check_tiles(problem, one)


@pytest.mark.parametrize(
  "tiles", [PrefillTiles(48, 16), PrefillTiles(16, 8), PrefillTiles(16, 16, 3)]
)
def test_prefill_refuses_tiles_that_do_not_fit(tiles):
  with pytest.raises(ValueError, match="tiles"):
    attention.check_tiles(SMALL.problem("float32"), tiles)


def test_a_hidden_logit_times_the_factor_is_exact():
  """As a fused multiply-add needs it; a CPU has none in interpret mode."""
  for scale in (1e-3, 64**-0.5, 80**-0.5, 96**-0.5, 128**-0.5, 0.3, 1.0, 1e20):
    factor, _ = attention.fold_scale(scale, 64)
    hidden = np.float32(attention.hidden_logit(factor))
    product = hidden * np.float32(factor)
    assert float(product) == float(hidden) * float(np.float32(factor))
    assert -np.inf < product < -1e27 * min(factor, 1)


# --- decode ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cache:
  """Sizes of one decode."""

  B: int
  S: int
  N: int
  K: int
  H: int
  G: int
  tiles: CacheTiles
  layers: int = 0
  scale: float | None = None

  def problem(self, dtype: str) -> Problem:
    return Problem(
      op="attention_decode",
      dtype=dtype,
      rows=self.B,
      length=1,
      groups=self.G,
      layers=self.layers,
      keys=self.S,
      heads=self.N,
      kv_heads=self.K,
      dim=self.H,
    )


SPLIT = Cache(4, 100, 8, 2, 16, 4, CacheTiles(16, 3))
WHOLE = Cache(4, 70, 12, 4, 80, 2, CacheTiles(32, 1), scale=0.3)
STRADDLE = Cache(2, 60, 12, 4, 24, 6, CacheTiles(16, 4), layers=2)
MANY = Cache(1, 33, 18, 1, 16, 3, CacheTiles(16, 2))


@functools.cache
def compiled_decode(shape: Cache, dtype: str):
  problem = shape.problem(dtype)

  @jax.jit
  def kernel(q, k, v, keep, start, lengths, layer):
    args = (q, k, v, keep, layer, start, lengths)
    return DECODE.run(problem, shape.tiles, ON_CPU, *args, scale=shape.scale)

  @jax.jit
  def spec(q, k, v, keep, start, lengths, layer):
    return reference.attention_decode(
      q,
      k,
      v,
      lengths,
      keep,
      start=start,
      scale=shape.scale,
      layer=layer if shape.layers else None,
    )

  return kernel, spec


def decode_arrays(shape: Cache, dtype: str, seed: int = 17):
  rng = np.random.default_rng(seed)
  lead = (shape.layers,) if shape.layers else ()
  kv = (*lead, shape.B, shape.S, shape.K, shape.H)
  sizes = ((shape.B, shape.N, shape.H), kv, kv)
  return [jnp.asarray(rng.normal(size=s), dtype) for s in sizes]


def keeps(shape: Cache):
  rng = np.random.default_rng(5)
  size = (shape.B, shape.G)
  return rng.random(size) < 0.5, np.ones(size, bool), np.zeros(size, bool)


def lengths_of(shape: Cache):
  """(start, lengths): full rows, then 0, 1, some and S with a start."""
  full = np.full(shape.B, shape.S, np.int32)
  ragged = np.array([0, 1, shape.S // 2, shape.S], np.int32)[-shape.B :]
  start = np.array([0, 0, 5, 19], np.int32)[-shape.B :]
  past = np.array([3, 0, 9, 40], np.int32)[-shape.B :]
  return (0 * full, full), (start, ragged), (past, np.roll(ragged, 1))


def check_decode(shape: Cache, dtype: str):
  kernel, spec = compiled_decode(shape, dtype)
  q, k, v = decode_arrays(shape, dtype)
  layer = max(shape.layers - 1, 0)
  twin = Shape(shape.B, 1, shape.S, shape.N, shape.K, shape.H, shape.G, None)
  twin = dataclasses.replace(twin, layers=shape.layers, scale=shape.scale)
  for keep in keeps(shape):
    for start, lengths in lengths_of(shape):
      got = kernel(q, k, v, keep, start, lengths, jnp.int32(layer))
      args = (q[:, None], k, v, keep[:, None], start, lengths - 1, layer)
      want = exact(twin, *args)[:, 0]
      xla = spec(q, k, v, keep, start, lengths, jnp.int32(layer))
      dropped = ~np.repeat(keep, shape.N // shape.G, axis=-1)
      assert not np.any(np.asarray(got, np.float32)[dropped])
      ours, theirs = rel_err(got, want), rel_err(xla, want)
      assert ours <= 2 * theirs + 1e-7, (ours, theirs, lengths)


@pytest.mark.parametrize(
  "shape", [SPLIT, WHOLE, STRADDLE, MANY], ids=lambda s: f"S{s.S}"
)
def test_decode_is_as_accurate_as_xla(shape):
  check_decode(shape, "float32")


def test_decode_is_as_accurate_as_xla_in_bfloat16():
  check_decode(SPLIT, "bfloat16")


def test_decode_reads_nothing_it_should_not():
  """NaN outside start .. length, in kv heads nobody keeps, in dropped q."""
  shape = SPLIT
  kernel, _ = compiled_decode(shape, "float32")
  q, k, v = decode_arrays(shape, "float32")
  start = jnp.array([0, 3, 17, 40], jnp.int32)
  lengths = jnp.array([5, 20, 64, 99], jnp.int32)
  keep = jnp.array(
    [[1, 0, 0, 0], [0, 0, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]], bool
  )
  want = kernel(q, k, v, keep, start, lengths, NONE)
  j = jnp.arange(shape.S)[None]
  dead = (j < start[:, None]) | (j >= lengths[:, None])
  unread = ~keep.reshape(shape.B, shape.K, -1).any(-1)
  dead = dead[..., None] | unread[:, None]
  k, v = (jnp.where(dead[..., None], jnp.nan, a) for a in (k, v))
  heads = jnp.repeat(keep, shape.N // shape.G, axis=-1)
  q = jnp.where(heads[..., None], q, jnp.nan)
  got = kernel(q, k, v, keep, start, lengths, NONE)
  np.testing.assert_array_equal(got, want)


def test_decode_row_does_not_depend_on_its_neighbours():
  """To the bit, although the rows share a grid."""
  shape = SPLIT
  kernel, _ = compiled_decode(shape, "float32")
  keep = keeps(shape)[1]
  start = np.array([0, 2, 0, 1], np.int32)
  first = decode_arrays(shape, "float32")
  other = decode_arrays(shape, "float32", seed=5)
  mixed = [b.at[1].set(a[1]) for a, b in zip(first, other, strict=True)]
  few = keep.copy()
  few[2:] = False
  lengths = np.array([100, 71, 3, 50], np.int32)
  changed = np.array([7, 71, 100, 0], np.int32)
  want = kernel(*first, keep, start, lengths, NONE)[1]
  got = kernel(*mixed, few, start, changed, NONE)[1]
  np.testing.assert_array_equal(got, want)


def test_decode_through_the_public_op(ops):
  shape = SPLIT
  q, k, v = decode_arrays(shape, "float32")
  start, lengths = lengths_of(shape)[1]
  keep = jnp.asarray(keeps(shape)[0])

  def loss(backend, *qkv):
    tiles = shape.tiles if backend == "triton" else None
    out = ops.attention_decode(
      *qkv,
      jnp.asarray(lengths),
      keep,
      start=jnp.asarray(start),
      backend=backend,
      tiles=tiles,
      interpret=ON_CPU,
    )
    return jnp.sum(jnp.sin(out)), out

  grad = jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True)
  (_, out), got = jax.jit(functools.partial(grad, "triton"))(q, k, v)
  (_, want_out), want = grad("reference", q, k, v)
  np.testing.assert_allclose(out, want_out, atol=2e-6)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_decode_candidates_are_legal():
  for shape in (SPLIT, WHOLE, MANY):
    for dtype in dispatch.DTYPES:
      problem = shape.problem(dtype)
      tiles = DECODE.candidates(problem)
      assert tiles[0] == DECODE.default(problem)
      assert all(1 <= one.splits <= problem.keys for one in tiles)


def test_decode_refuses_tiles_that_do_not_fit():
  args = (*decode_arrays(SPLIT, "float32"), keeps(SPLIT)[0], NONE)
  rows = jnp.zeros((SPLIT.B,), jnp.int32)
  for tiles in (CacheTiles(24), CacheTiles(16, 0), CacheTiles(16, 1000)):
    with pytest.raises(ValueError, match="tiles"):
      DECODE.run(SPLIT.problem("float32"), tiles, ON_CPU, *args, rows, rows)
