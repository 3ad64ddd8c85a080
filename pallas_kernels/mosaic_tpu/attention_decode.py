"""Routed decode attention for TPU.

Letters: B rows, S keys, N query heads, K kv heads, H head dim, G gating groups,
C chunks of kv heads, J blocks of keys.

The cache is read as it lies, [S, K, H], in blocks of keys x 8 kv heads (or all,
where 8 does not divide K): a TPU keeps 8 neighbouring heads in one tile of
memory and cannot read fewer. Visited are only blocks with keys that the row
sees, of heads of which any is kept. With H a multiple of 128 nothing of the
cache is copied; XLA lays narrower heads out otherwise and copies one layer.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
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
  round_up,
  select,
  stacks,
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
from pallas_kernels.problem import Op, Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTiles:
  """Blocks of attention_decode.

  Attributes:
    keys: keys of a block, a multiple of 128; all where there are no more.
  """

  keys: int = 256


@dataclasses.dataclass(frozen=True)
class _Decode:
  """Tiles fitted to a problem."""

  keys: int
  blocks: int
  heads: int
  chunks: int


def _decode(problem: Problem, tiles: DecodeTiles) -> _Decode:
  keys = min(tiles.keys, problem.keys)
  heads = 8 if problem.kv_heads % 8 == 0 else problem.kv_heads
  return _Decode(
    keys, cdiv(problem.keys, keys), heads, problem.kv_heads // heads
  )


def _decode_kernel(
  steps,
  start,
  lengths,
  layer,
  q_ref,
  k_ref,
  v_ref,
  o_ref,
  max_ref,
  sum_ref,
  out_ref,
  *,
  shape,
  scale,
):
  del layer
  at, count = pl.program_id(0), pl.num_programs(0)
  pair = jax.lax.div(steps[at], shape.blocks)
  row = jax.lax.div(pair, shape.chunks)
  begin = jax.lax.rem(steps[at], shape.blocks) * shape.keys
  low, high = start[row], lengths[row]

  @pl.when(schedule.first_of(steps, shape.blocks, at))
  def _():
    begin_rows(max_ref, sum_ref, out_ref)

  j = jax.lax.broadcasted_iota(jnp.int32, (1, shape.keys, 1), 1) + begin
  v = select(((j >= low) & (j < high)).astype(jnp.float32), _by_head(v_ref))
  logits = _batched(q_ref[...], _by_head(k_ref), 2) * scale
  j = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) + begin
  sees = (j >= low) & (j < high)
  logits = jnp.where(sees, logits, LOWEST)
  multiply = functools.partial(_batched, axis=1)
  update(logits, sees, v, max_ref, sum_ref, out_ref, multiply)

  @pl.when(schedule.last_of(steps, shape.blocks, at, count))
  def _():
    o_ref[...] = result(sum_ref, out_ref).astype(o_ref.dtype)


def _by_head(ref) -> Array:
  """[S, K, H] -> [K, S, H]."""
  return jnp.swapaxes(ref[...], 0, 1)


def _batched(a: Array, b: Array, axis: int) -> Array:
  """Per head: a's last axis with b's `axis`, in float32."""
  high = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    a,
    b,
    (((2,), (axis,)), ((0,), (0,))),
    precision=high,
    preferred_element_type=jnp.float32,
  )


def active_keys(
  problem: Problem,
  tiles: DecodeTiles,
  keep_BG: Array,
  start_B: Array,
  lengths_B: Array,
) -> tuple[Array, Array]:
  """(steps, count): the (row, heads, block of keys) that a kernel visits.

  Returns:
    int32 [rows * chunks of heads * blocks], flat places in the first `count`
    entries; int32 [].
  """
  shape = _decode(problem, tiles)
  kept_BN = jnp.repeat(keep_BG, problem.heads // problem.groups, axis=1)
  kept_BC = kept_BN.reshape(problem.rows, shape.chunks, -1).any(-1)
  first_J = jnp.arange(shape.blocks, dtype=jnp.int32) * shape.keys
  has_BJ = (first_J[None] < lengths_B[:, None]) & (
    first_J[None] + shape.keys > start_B[:, None]
  )
  has_BJ &= (start_B < lengths_B)[:, None]
  return schedule.active_steps(kept_BC[:, :, None] & has_BJ[:, None])


def attention_decode(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  q: Array,
  k_cache: Array,
  v_cache: Array,
  keep: Array,
  layer: Array,
  start: Array,
  lengths: Array,
  scale: float | None = None,
) -> Array:
  """attention_decode: [B, N, H]; see pallas_kernels.attention_decode."""
  check(_decode_reason(problem, tiles), problem)
  shape = _decode(problem, tiles)
  rows, heads, dim = q.shape
  start = jnp.maximum(start.astype(jnp.int32), 0)
  lengths = jnp.minimum(lengths, problem.keys)
  steps, count = active_keys(problem, tiles, keep, start, lengths)
  per_kv = heads // problem.kv_heads
  (k_cache, v_cache), at_layer = stacks(
    problem.layers, layer, (k_cache, v_cache)
  )

  def q_map(i, s, first, end, at):
    del first, end, at
    pair = jax.lax.div(s[i], shape.blocks)
    return (
      jax.lax.div(pair, shape.chunks),
      jax.lax.rem(pair, shape.chunks),
      0,
      0,
    )

  def k_map(i, s, first, end, at):
    row, chunk, *_ = q_map(i, s, first, end, at)
    return at[0], row, jax.lax.rem(s[i], shape.blocks), chunk, 0

  q_spec = pl.BlockSpec((None, shape.heads, per_kv, dim), q_map)
  k_spec = pl.BlockSpec((None, None, shape.keys, shape.heads, dim), k_map)
  out = call(
    functools.partial(
      _decode_kernel,
      shape=shape,
      scale=1 / math.sqrt(dim) if scale is None else scale,
    ),
    (steps, start, lengths, at_layer),
    (q.reshape(rows, problem.kv_heads, per_kv, dim), k_cache, v_cache),
    grid=(count,),
    in_specs=[q_spec, k_spec, k_spec],
    out_spec=q_spec,
    out_shape=jax.ShapeDtypeStruct(
      (rows, problem.kv_heads, per_kv, dim), q.dtype
    ),
    scratch=[
      pltpu.VMEM((shape.heads, per_kv, 1), jnp.float32),
      pltpu.VMEM((shape.heads, per_kv, 1), jnp.float32),
      pltpu.VMEM((shape.heads, per_kv, dim), jnp.float32),
    ],
    interpret=interpret,
    name="attention_decode",
  )
  # What no program wrote is dropped here too: heads that nobody keeps, and
  # rows that see no key.
  keep &= (start < lengths)[:, None]
  out = out.reshape(rows, problem.groups, -1)
  return jnp.where(keep[..., None], out, jnp.zeros((), out.dtype)).reshape(
    q.shape
  )


def _decode_vmem(problem: Problem, tiles: DecodeTiles) -> int:
  shape = _decode(problem, tiles)
  item = ITEM_BYTES[problem.dtype]
  # A tile of memory holds at least SUBLANES heads x 128 lanes.
  heads = round_up(shape.heads, SUBLANES[problem.dtype])
  dim = round_up(problem.dim, LANES)
  block = shape.keys * heads * dim
  return 2 * 2 * item * block + 2 * (item + 4) * block


def _decode_reason(problem: Problem, tiles: DecodeTiles) -> str | None:
  shape = _decode(problem, tiles)
  if shape.blocks > 1 and shape.keys % LANES:
    return f"keys={tiles.keys} must be a multiple of {LANES}."
  steps = problem.rows * shape.chunks * shape.blocks
  return limits(steps, _decode_vmem(problem, tiles))


def decode_candidates(problem: Problem) -> list[DecodeTiles]:
  """Legal tiles, the default first."""
  found = []
  for keys in (256, 512, 1024, 128):
    tiles = DecodeTiles(keys=min(keys, problem.keys))
    if tiles not in found and _decode_reason(problem, tiles) is None:
      found.append(tiles)
  return found


DECODE = Op(
  attention_decode,
  functools.partial(
    why_not, decode_candidates, DecodeTiles(keys=128), _decode_reason
  ),
  functools.partial(default, decode_candidates),
  decode_candidates,
)
