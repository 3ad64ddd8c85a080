"""Routed prefill attention: only the kept (token, head group) pairs.

A tile is `block_q` rows of one row of the batch, a row of a tile being one kept
token with one of `heads` neighbouring query heads that read the same kv head
and belong to the same group. They share their keys, and packing them makes the
tokens of a tile lie closer together, so that fewer blocks of keys straddle the
causal edge and need masking. The tokens come from the plan, in ascending order;
the longest tiles start first. What the mask drops is written as 0 by the tiles
after the kept ones.

Blocks of keys start at the first key that the tile needs, not at a multiple of
`block_k`: left padding then costs no masked block.
"""

import dataclasses
import functools
import math
import struct
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.plan import RoutePlan
from pallas_kernels.problem import Op, Problem
from pallas_kernels.triton.common import call, cdiv, next_power

MAX_DIM = 256  # of a head: two blocks of 16 keys of twice that fill an SM
_MAX_WINDOW = 2**30  # larger windows see everything, and fit an int32


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
  """How a prefill is cut up.

  Attributes:
    block_q: rows of a tile (token x head), a power of two from 16.
    block_k: keys of a block, a power of two from 16.
    heads: query heads of a tile; divides both the heads of a group and the
      query heads of a kv head.
    num_warps, num_stages: of the kernel; stages of the pipeline of K and V.
    by_head: programs in order of heads, then tiles (the keys of one kv head
      stay in the cache); else tiles, then heads (the longest tiles of all heads
      start first, which balances better).
  """

  block_q: int
  block_k: int
  heads: int = 1
  num_warps: int = 4
  num_stages: int = 2
  by_head: bool = False


def shared_heads(problem: Problem) -> int:
  """Neighbouring query heads with one kv head and one group in common."""
  return math.gcd(problem.group_size, problem.heads // problem.kv_heads)


def fold_scale(scale: float | None, dim: int) -> tuple[float, int]:
  """(factor >= 0 that turns logits into exponents of 2, sign for q)."""
  scale = 1 / math.sqrt(dim) if scale is None else float(scale)
  if scale == 0:
    return 1.0, 0  # q times 0: every key weighs the same
  return abs(scale) * math.log2(math.e), 1 if scale > 0 else -1


def hidden_logit(factor: float) -> float:
  """A logit below any that a key has.

  A power of two, so that its product with `factor` is exact: a row that sees
  no key of its first block has this as its largest logit, and a rounding error
  of a huge product, turned into an exponent by exp2_scaled, would be infinite.
  """
  return -(2.0 ** (100 - max(0, math.frexp(factor)[1])))


def dot(a: Array, b: Array, interpret: bool) -> Array:
  """a @ b in float32.

  float32 operands go through the tensor cores in three products of their
  halves, which keeps 22 bits: without them these kernels spill.
  """
  precision = None
  if a.dtype == jnp.float32:
    precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    if interpret:  # which a CPU has not
      precision = lax.Precision.HIGHEST
  return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def exp2_scaled(s: Array, factor: float, top: Array, interpret: bool) -> Array:
  """2^(s * factor - top[:, None]), float32.

  On a GPU in two instructions: left to the compiler it is a product, a
  difference and an exp2 that spends three more on subnormal results, which
  are 0 here.
  """
  if interpret:
    return jnp.exp2(s * factor - top[:, None])
  (bits,) = struct.unpack("<I", struct.pack("<f", factor))
  [p] = plgpu.elementwise_inline_asm(
    f"{{ .reg .f32 x; fma.rn.f32 x, $1, 0f{bits:08X}, $2; "
    "ex2.approx.ftz.f32 $0, x; }",
    args=[s, jnp.broadcast_to(-top[:, None], s.shape)],
    constraints="=f,f,f",
    pack=1,
    result_shape_dtypes=[jax.ShapeDtypeStruct(s.shape, jnp.float32)],
  )
  return p


def softmax_step(carry, s, v, factor: float, interpret: bool):
  """One block of keys: (acc, top, total) after logits s and values v.

  `top` is the largest exponent of 2 so far, `total` the sum of 2^(x - top),
  `acc` the values weighted with them, all float32.
  """
  acc, top, total = carry
  new_top = jnp.maximum(top, jnp.max(s, axis=1) * factor)
  p = exp2_scaled(s, factor, new_top, interpret)
  shrink = jnp.exp2(top - new_top)
  total = total * shrink + jnp.sum(p, axis=1)
  acc = acc * shrink[:, None] + dot(p.astype(v.dtype), v, interpret)
  return acc, new_top, total


@dataclasses.dataclass(frozen=True)
class _Static:
  """What the kernel is specialised on; see PrefillTiles and Problem."""

  length: int
  keys: int
  dim: int
  rows: int
  heads: int
  per_group: int
  per_kv: int
  window: int | None
  factor: float
  sign: int
  tiles: PrefillTiles
  interpret: bool


def _kernel(
  q_ref,  # [M, N, H]
  k_ref,  # [L, B, S, K, H]
  v_ref,
  order_ref,  # int32 [G, M], plan.group_order_GM
  begin_ref,  # int32 [G, B + 1], plan.group_start_GB
  layer_ref,  # int32 [1]
  start_ref,  # int32 [B]
  offset_ref,  # int32 [B]
  out_ref,  # [M, N, H]
  *,
  s: _Static,
):
  t = s.tiles
  row, bundle, tile = _place(s)
  head0 = bundle * t.heads
  group = lax.div(head0, s.per_group)
  begin = begin_ref[group, row]
  kept = begin_ref[group, row + 1] - begin
  kept_tiles = _tiles_of(kept, t)
  r = jnp.arange(t.block_q, dtype=jnp.int32)
  cols = jnp.arange(max(next_power(s.dim), 16), dtype=jnp.int32)

  def pick(first, count, tile):
    """Tokens, heads and validity of the rows of one tile of a list."""
    at = tile * t.block_q + r
    valid = at < count * t.heads
    at = jnp.minimum(at, jnp.maximum(count * t.heads - 1, 0))
    index = first + lax.div(at, jnp.full_like(at, t.heads))
    # Past the end: no token. Masked stores to one that exists would, in
    # interpret mode, put back what was there before.
    none = s.rows * s.length
    tokens = plgpu.load(order_ref.at[group, index], mask=valid, other=none)
    head = head0 + lax.rem(at, jnp.full_like(at, t.heads))
    return tokens, head, valid

  def address(tokens, head, valid):
    ref_at = (tokens[:, None], head[:, None], cols[None, :])
    return ref_at, valid[:, None] & (cols < s.dim)[None, :]

  @pl.when(tile < kept_tiles)
  def _attend():
    this = kept_tiles - 1 - tile  # the longest first
    tokens, head, valid = pick(begin, kept, this)
    # Tokens ascend, so that the ends of a tile are its extreme positions.
    end = jnp.minimum((this + 1) * t.block_q, kept * t.heads) - 1
    base = offset_ref[row] - row * s.length
    low = order_ref[group, begin + lax.div(this * t.block_q, t.heads)] + base
    high = order_ref[group, begin + lax.div(end, t.heads)] + base
    place, mask = address(tokens, head, valid)
    q = plgpu.load(q_ref.at[place], mask=mask, other=0)
    if s.sign != 1:
      q = q * jnp.asarray(s.sign, q.dtype)
    out = _rows(
      q,
      jnp.where(valid, tokens + base, high),
      low,
      high,
      k_ref,
      v_ref,
      layer_ref[0],
      row,
      lax.div(head0, s.per_kv),
      start_ref[row],
      cols,
      s,
    )
    plgpu.store(out_ref.at[place], out.astype(out_ref.dtype), mask=mask)

  @pl.when(tile >= kept_tiles)
  def _zero():
    # After the kept tokens of all rows come the dropped ones, row by row.
    first = begin_ref[group, s.rows] + row * s.length - begin
    picked = pick(first, s.length - kept, tile - kept_tiles)
    place, mask = address(*picked)
    zero = jnp.zeros((t.block_q, cols.shape[0]), out_ref.dtype)
    plgpu.store(out_ref.at[place], zero, mask=mask)


def _rows(q, at, low, high, k_ref, v_ref, layer, row, kv, start, cols, s):
  """softmax(q k^T) v of the rows of a tile, float32 [block_q, H].

  at: positions of the rows; low, high: the smallest and the largest of them.
  """
  block = s.tiles.block_k
  last_R = jnp.minimum(at, s.keys - 1)  # the last key that a row sees
  first = jnp.maximum(start, 0)
  if s.window is not None:
    first_R = at - (s.window - 1)
    first = jnp.maximum(first, low - (s.window - 1))
  stop = jnp.minimum(high + 1, s.keys)
  blocks = lax.div(jnp.maximum(stop - first, 0) + block - 1, block)
  # Up to here every row sees every key of a block.
  common = jnp.minimum(low + 1, s.keys)
  plain = lax.div(jnp.maximum(common - first, 0), block)
  step_K = jnp.arange(block, dtype=jnp.int32)
  padded = cols.shape[0] != s.dim
  in_dim = (cols < s.dim)[None, :]

  def body(masked, i, carry):
    j = first + i * block + step_K
    extra: dict[str, Any] = {}
    if masked:
      extra = {"mask": (j < stop)[:, None] & in_dim, "other": 0}
    elif padded:
      extra = {"mask": in_dim & (j >= 0)[:, None], "other": 0}
    place = (layer, row, j[:, None], kv, cols[None, :])
    k = plgpu.load(k_ref.at[place], **extra)
    logits = dot(q, k.T, s.interpret)
    if masked:
      sees = j[None, :] <= last_R[:, None]
      if s.window is not None:
        sees &= j[None, :] >= first_R[:, None]
      logits = jnp.where(sees, logits, hidden_logit(s.factor))
    v = plgpu.load(v_ref.at[place], **extra)
    return softmax_step(carry, logits, v, s.factor, s.interpret)

  rows = q.shape[0]
  carry = (
    jnp.zeros((rows, cols.shape[0]), jnp.float32),
    jnp.full((rows,), -jnp.inf, jnp.float32),
    jnp.zeros((rows,), jnp.float32),
  )
  begin = jnp.int32(0)
  if s.window is not None:
    begin = jnp.maximum(high - (s.window - 1) - first, 0)
    begin = jnp.minimum(lax.div(begin + block - 1, block), blocks)
    plain = jnp.maximum(plain, begin)
    carry = lax.fori_loop(0, begin, functools.partial(body, True), carry)
  carry = lax.fori_loop(begin, plain, functools.partial(body, False), carry)
  carry = lax.fori_loop(plain, blocks, functools.partial(body, True), carry)
  acc, _, total = carry
  sees_any = last_R >= first
  if s.window is not None:
    sees_any = last_R >= jnp.maximum(start, first_R)
  share = jnp.where(sees_any, 1 / total, 0.0)
  return jnp.where(sees_any[:, None], acc * share[:, None], 0.0)


def _tiles_of(count, tiles: PrefillTiles):
  """How many tiles `count` tokens take."""
  return lax.div(count * tiles.heads + tiles.block_q - 1, tiles.block_q)


def _place(s: _Static):
  """(row, bundle of heads, tile) of this program."""
  outer, inner = (0, 1) if s.tiles.by_head else (1, 0)
  tile, pair = pl.program_id(outer), pl.program_id(inner)
  bundles = s.heads // s.tiles.heads
  return lax.div(pair, bundles), lax.rem(pair, bundles), tile


def run(
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
  """reference.attention_prefill for kept pairs; q [B, T, N, H] -> same.

  Raises:
    ValueError: tiles that do not fit the problem.
  """
  check_tiles(problem, tiles)
  if not problem.layers:
    k, v = k[None], v[None]
  factor, sign = fold_scale(scale, problem.dim)
  window = problem.window
  static = _Static(
    length=problem.length,
    keys=problem.keys,
    dim=problem.dim,
    rows=problem.rows,
    heads=problem.heads,
    per_group=problem.group_size,
    per_kv=problem.heads // problem.kv_heads,
    window=None if window is None else min(window, _MAX_WINDOW),
    factor=factor,
    sign=sign,
    tiles=tiles,
    interpret=interpret,
  )
  pairs = problem.rows * (problem.heads // tiles.heads)
  # Kept and dropped tokens fill tiles of their own: one more than all together.
  count = cdiv(problem.length * tiles.heads, tiles.block_q) + 1
  flat = (problem.tokens, problem.heads, problem.dim)
  out = call(
    functools.partial(_kernel, s=static),
    jax.ShapeDtypeStruct(flat, q.dtype),
    (count, pairs) if tiles.by_head else (pairs, count),
    q.reshape(flat),
    k,
    v,
    plan.group_order_GM,
    plan.group_start_GB,
    layer.reshape(1),
    start.astype(jnp.int32),
    offset.astype(jnp.int32),
    num_warps=tiles.num_warps,
    num_stages=tiles.num_stages,
    interpret=interpret,
    name="attention_prefill",
  )
  return out.reshape(q.shape)


def check_tiles(problem: Problem, tiles: PrefillTiles) -> None:
  shared = shared_heads(problem)
  if tiles.heads < 1 or shared % tiles.heads:
    raise ValueError(
      f"tiles.heads={tiles.heads} must divide {shared}, the query heads with "
      "one kv head and one group in common."
    )
  for name in ("block_q", "block_k"):
    check_block(name, getattr(tiles, name))


def check_block(name: str, size: int) -> None:
  """ValueError unless a dot takes a block of this size."""
  if size < 16 or size & (size - 1):
    raise ValueError(f"tiles.{name}={size} must be a power of two from 16.")


def why_not(problem: Problem) -> str | None:
  """Why this backend cannot run a problem, or None."""
  if problem.dim > MAX_DIM:
    return f"a head of {problem.dim} channels; at most {MAX_DIM} are supported"
  if not problem.keys:
    return "there are no keys"
  return None


def default(problem: Problem) -> PrefillTiles:
  """Tiles where nothing was measured."""
  heads = shared_heads(problem)
  rows = max(16, next_power(problem.length * heads))
  if problem.dtype == "float32" or problem.dim > 128:
    block_k = 16 if problem.dtype == "float32" and problem.dim > 128 else 32
    return PrefillTiles(min(rows, 64), block_k, heads, 4, 2)
  if rows <= 64:
    return PrefillTiles(rows, 64, heads, 4, 2)
  return PrefillTiles(128, 64, heads, 8, 4)


# (block_q, block_k, num_warps, num_stages), and on an SM of Hopper: two
# programs of 128 rows; one of two warp groups; two or three of 64 rows.
_WIDE = (
  (128, 64, 4, 2),
  (128, 32, 4, 3),
  (128, 32, 4, 4),
  (128, 32, 8, 3),
  (128, 64, 8, 3),
  (128, 64, 8, 4),
  (128, 64, 8, 5),
  (128, 128, 8, 2),
  (128, 128, 8, 3),
  (64, 64, 4, 2),
  (64, 64, 4, 3),
  (64, 32, 4, 3),
)
_NARROW = (
  (64, 32, 4, 2),
  (64, 16, 4, 2),
  (64, 16, 4, 3),
  (64, 32, 8, 2),
  (128, 32, 8, 2),
  (128, 16, 8, 2),
)
# A head of 64 leaves registers for more keys.
_SHORT = ((64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3))


def candidates(problem: Problem) -> list[PrefillTiles]:
  """Tiles worth measuring."""
  heads = shared_heads(problem)
  rows = max(16, next_power(problem.length * heads))
  first = default(problem)
  found = [first, dataclasses.replace(first, by_head=True)]
  if heads > 1:
    found.append(dataclasses.replace(first, heads=1))
  wide = problem.dtype != "float32" and problem.dim <= 128
  shapes = _WIDE if wide else _NARROW
  if wide and problem.dim <= 64:
    shapes += _SHORT
  for block_q, block_k, warps, stages in shapes:
    if block_q <= max(rows, 64):
      found.append(PrefillTiles(block_q, block_k, heads, warps, stages))
  return list(dict.fromkeys(found))


PREFILL = Op(run=run, why_not=why_not, default=default, candidates=candidates)
