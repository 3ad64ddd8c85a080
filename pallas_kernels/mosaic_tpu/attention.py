"""Routed prefill attention for TPU.

Letters: B rows, T queries, S keys, N query heads, K kv heads, H head dim, G
gating groups, I tiles of queries, U units.

A unit is neighbouring query heads with one kv head and one gating group. A
program is (row, unit, tile of queries) x blocks of keys; tiles whose queries
all drop the unit's group are not visited, and of the key blocks only those
between the first real key (or the window's start) and the last query are read.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import schedule
from pallas_kernels.mosaic_tpu.common import (
  ITEM_BYTES,
  LANES,
  SUBLANES,
  call,
  cdiv,
  dot,
  round_up,
  select,
)
from pallas_kernels.mosaic_tpu.softmax import (
  LOWEST,
  begin_rows,
  check,
  default,
  limits,
  result,
  update,
  why_not,
)
from pallas_kernels.plan import RoutePlan
from pallas_kernels.problem import Op, Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTiles:
  """Blocks of attention_prefill.

  Attributes:
    queries: tokens of a tile, a multiple of 16.
    keys: keys of a block, a multiple of 128; all where there are no more.
  """

  queries: int = 256
  keys: int = 512


@dataclasses.dataclass(frozen=True)
class _Prefill:
  """Tiles fitted to a problem."""

  length: int
  queries: int
  tiles: int
  keys: int
  blocks: int
  heads: int
  units: int
  unit_group: tuple[int, ...]
  unit_kv: tuple[int, ...]


def _prefill(problem: Problem, tiles: PrefillTiles) -> _Prefill:
  group = problem.heads // problem.groups
  per_kv = problem.heads // problem.kv_heads
  heads = math.gcd(group, per_kv)
  units = problem.heads // heads
  rows = SUBLANES["bfloat16"]
  queries = min(tiles.queries, round_up(problem.length, rows))
  keys = min(tiles.keys, problem.keys)
  return _Prefill(
    problem.length,
    queries,
    cdiv(problem.length, queries),
    keys,
    cdiv(problem.keys, keys),
    heads,
    units,
    tuple(u * heads // group for u in range(units)),
    tuple(u * heads // per_kv for u in range(units)),
  )


def _place(step: Array, shape: _Prefill) -> tuple[Array, Array, Array]:
  """(row, unit, tile) of a step."""
  tile = jax.lax.rem(step, shape.tiles)
  pair = jax.lax.div(step, shape.tiles)
  return jax.lax.div(pair, shape.units), jax.lax.rem(pair, shape.units), tile


def _key_range(
  first, offset, tile, window: int | None, shape: _Prefill, keys: int
):
  """(lowest, highest) key that a tile of queries sees.

  The highest is below the lowest if it sees none. Queries that fill up the
  last tile do not count: a key past the last real query may hold anything.
  """
  begin = tile * shape.queries
  last = jnp.minimum(begin + shape.queries, shape.length) - 1
  high = jnp.minimum(offset + last, keys - 1)
  low = jnp.maximum(first, 0)
  if window is not None:
    low = jnp.maximum(low, offset + begin - window + 1)
  return low, high


def _prefill_kernel(
  steps,
  start,
  offset,
  q_ref,
  k_ref,
  v_ref,
  o_ref,
  max_ref,
  sum_ref,
  out_ref,
  *,
  shape,
  keys,
  window,
  scale,
):
  row, _, tile = _place(steps[pl.program_id(0)], shape)
  block = pl.program_id(1)
  first = start[row]
  at = offset[row] + tile * shape.queries
  low, high = _key_range(first, offset[row], tile, window, shape, keys)
  begin = block * shape.keys
  end = begin + shape.keys - 1

  @pl.when(block == 0)
  def _():
    begin_rows(max_ref, sum_ref, out_ref)

  def step(masked: bool):
    q = q_ref[...].reshape(shape.heads * shape.queries, q_ref.shape[-1])
    v = v_ref[...]
    logits = dot(q, k_ref[...], (1, 1)) * scale
    sees = None
    if masked:
      # The same for every head of the unit.
      area = (shape.heads, shape.queries, shape.keys)
      j = jax.lax.broadcasted_iota(jnp.int32, area, 2) + begin
      t = jax.lax.broadcasted_iota(jnp.int32, area, 1) + at
      sees = (j <= t) & (j >= low) & (j < keys)
      if window is not None:
        sees &= j > t - window
      sees = sees.reshape(logits.shape)
      logits = jnp.where(sees, logits, LOWEST)
      # Keys that nobody sees may hold anything: 0 * NaN is NaN.
      key = jax.lax.broadcasted_iota(jnp.int32, (shape.keys, 1), 0) + begin
      seen = (key >= low) & (key <= high)
      v = select(seen.astype(jnp.float32), v)
    update(logits, sees, v, max_ref, sum_ref, out_ref, dot)

  touched = (begin <= high) & (end >= low)
  inside = (end <= jnp.minimum(at, keys - 1)) & (begin >= first)
  if window is not None:
    inside &= begin > at + shape.queries - 1 - window

  @pl.when(touched & inside)
  def _():
    step(masked=False)

  @pl.when(touched & ~inside)
  def _():
    step(masked=True)

  @pl.when(block == pl.num_programs(1) - 1)
  def _():
    out = result(sum_ref, out_ref)
    o_ref[...] = out.reshape(o_ref.shape).astype(o_ref.dtype)


def active_tiles(
  problem: Problem, tiles: PrefillTiles, keep_MG: Array
) -> tuple[Array, Array]:
  """(steps, count): the (row, unit, tile of queries) that a kernel visits.

  Returns:
    int32 [rows * units * tiles], flat places in the first `count` entries;
    int32 [].
  """
  shape = _prefill(problem, tiles)
  keep = keep_MG.reshape(problem.rows, problem.length, problem.groups)
  any_BIG = jax.vmap(lambda k: schedule.tile_any(k, shape.queries))(keep)
  active_BUI = any_BIG[:, :, np.array(shape.unit_group)].swapaxes(1, 2)
  return schedule.active_steps(active_BUI)


def attention_prefill(
  problem: Problem,
  tiles: PrefillTiles,
  interpret: bool,
  q: Array,
  k: Array,
  v: Array,
  plan: RoutePlan,
  layer: Array,
  start: Array,
  offset: Array,
  scale: float | None = None,
) -> Array:
  """attention_prefill: [B, T, N, H]; see pallas_kernels.attention_prefill."""
  check(_prefill_reason(problem, tiles), problem)
  shape = _prefill(problem, tiles)
  rows, length, heads, dim = q.shape
  if problem.layers:
    k, v = (jax.lax.dynamic_index_in_dim(a, layer, 0, False) for a in (k, v))
  # Head-major: a block of one head is then a legal tile. XLA copies one layer's
  # k and v for it, small against the attention itself.
  k, v = (jnp.transpose(a, (0, 2, 1, 3)) for a in (k, v))
  padded = shape.tiles * shape.queries
  q = jnp.pad(q, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
  q = q.reshape(rows, padded, shape.units, shape.heads, dim)
  q = q.transpose(0, 2, 3, 1, 4)
  steps, count = active_tiles(problem, tiles, plan.keep_MG)
  per_kv = heads // problem.kv_heads
  last = jnp.clip(offset.max() + length, 1, problem.keys)

  def q_map(i, j, s, first, at):
    del j, first, at
    row, unit, tile = _place(s[i], shape)
    return row, unit, 0, tile, 0

  def k_map(i, j, s, first, at):
    row, unit, tile = _place(s[i], shape)
    low, high = _key_range(
      first[row], at[row], tile, problem.window, shape, problem.keys
    )
    # Blocks out of range repeat one in range, which is not read again.
    low = jnp.clip(low, 0, problem.keys - 1)
    high = jnp.maximum(high, low)
    block = jnp.clip(
      j, jax.lax.div(low, shape.keys), jax.lax.div(high, shape.keys)
    )
    return row, jax.lax.div(unit * shape.heads, per_kv), block, 0

  q_spec = pl.BlockSpec((None, None, shape.heads, shape.queries, dim), q_map)
  k_spec = pl.BlockSpec((None, None, shape.keys, dim), k_map)
  lines = shape.heads * shape.queries
  out = call(
    functools.partial(
      _prefill_kernel,
      shape=shape,
      keys=problem.keys,
      window=problem.window,
      scale=1 / math.sqrt(dim) if scale is None else scale,
    ),
    (steps, start.astype(jnp.int32), offset),
    (q, k, v),
    grid=(count, (last + shape.keys - 1) // shape.keys),
    in_specs=[q_spec, k_spec, k_spec],
    out_spec=q_spec,
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    scratch=[
      pltpu.VMEM((lines, 1), jnp.float32),
      pltpu.VMEM((lines, 1), jnp.float32),
      pltpu.VMEM((lines, dim), jnp.float32),
    ],
    interpret=interpret,
    name="attention_prefill",
  )
  out = out.transpose(0, 3, 1, 2, 4)[:, :length]
  out = out.reshape(rows, length, problem.groups, -1)
  keep = plan.keep_MG.reshape(rows, length, problem.groups, 1)
  # Also what no program wrote.
  return jnp.where(keep, out, jnp.zeros((), out.dtype)).reshape(
    rows, length, heads, dim
  )


def _prefill_vmem(problem: Problem, tiles: PrefillTiles) -> int:
  shape = _prefill(problem, tiles)
  item = ITEM_BYTES[problem.dtype]
  dim = round_up(problem.dim, LANES)
  lines = shape.heads * shape.queries
  keys = round_up(shape.keys, LANES)
  held = 2 * item * (2 * lines * dim + 2 * keys * dim)
  sums = 4 * lines * (dim + 2 * LANES)
  return held + sums + 12 * lines * keys


def _prefill_reason(problem: Problem, tiles: PrefillTiles) -> str | None:
  shape = _prefill(problem, tiles)
  if shape.queries % SUBLANES["bfloat16"]:
    return f"queries={tiles.queries} must be a multiple of 16."
  if shape.blocks > 1 and shape.keys % LANES:
    return f"keys={tiles.keys} must be a multiple of {LANES}."
  return limits(
    problem.rows * shape.units * shape.tiles, _prefill_vmem(problem, tiles)
  )


def prefill_candidates(problem: Problem) -> list[PrefillTiles]:
  """Legal tiles, the default first: about 512 lines (queries x heads)."""
  heads = _prefill(problem, PrefillTiles()).heads
  sizes = sorted(
    (64, 128, 256, 512), key=lambda size: abs(math.log2(size * heads / 512))
  )
  found = []
  for queries in sizes:
    for keys in (512, 1024, 256, 128):
      tiles = PrefillTiles(
        queries=min(queries, round_up(problem.length, 16)),
        keys=min(keys, problem.keys),
      )
      if tiles not in found and _prefill_reason(problem, tiles) is None:
        found.append(tiles)
  return found


PREFILL = Op(
  attention_prefill,
  functools.partial(
    why_not,
    prefill_candidates,
    PrefillTiles(queries=64, keys=128),
    _prefill_reason,
  ),
  functools.partial(default, prefill_candidates),
  prefill_candidates,
)
