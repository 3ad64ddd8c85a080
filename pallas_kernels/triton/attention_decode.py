"""One token's attention over a cache, kept query heads only.

A program is (row, kv head, share of the keys): it reads that kv head's keys
once for all of its query heads, padded to 16 rows for the dot, and leaves a
partial result; a second kernel adds the shares up. A kv head without a kept
query head reads nothing. How a row's keys are shared out depends on its own
length alone, so that its result does not depend on its neighbours.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.problem import Op, Problem
from pallas_kernels.triton import attention
from pallas_kernels.triton.common import call, cdiv, next_power

_PROGRAMS = 792  # working programs to aim for: 132 SMs, 3 on each, twice over
_MAX_SPLITS = 128


@dataclasses.dataclass(frozen=True)
class CacheTiles:
  """How a cache is cut up.

  Attributes:
    block_k: keys of a block, a power of two from 16.
    splits: shares of a row's keys; with 1 there is no second kernel.
    num_warps, num_stages: of the first kernel.
  """

  block_k: int = 64
  splits: int = 1
  num_warps: int = 4
  num_stages: int = 3


@dataclasses.dataclass(frozen=True)
class _Static:
  """What the kernels are specialised on; see CacheTiles and Problem."""

  keys: int
  dim: int
  per_group: int
  per_kv: int
  factor: float
  sign: int
  tiles: CacheTiles
  interpret: bool

  @property
  def cols(self) -> int:
    """Channels of a head, padded to what a dot takes."""
    return max(next_power(self.dim), 16)


def _share(row, start_ref, lengths_ref, s: _Static):
  """(first key, end of keys, blocks, blocks of a share) of a row."""
  first = jnp.maximum(start_ref[row], 0)
  stop = jnp.minimum(lengths_ref[row], s.keys)
  block, splits = s.tiles.block_k, s.tiles.splits
  blocks = lax.div(jnp.maximum(stop - first, 0) + block - 1, block)
  return first, stop, blocks, lax.div(blocks + splits - 1, splits)


def _kernel(
  q_ref,  # [B, N, H]
  k_ref,  # [L, B, S, K, H]
  v_ref,
  keep_ref,  # bool [B, G]
  layer_ref,  # int32 [1]
  start_ref,  # int32 [B]
  lengths_ref,  # int32 [B]
  out_ref,  # [B, N, H], or float32 [B, N, splits, H]
  *lse_ref,  # float32 [B, N, splits] if there are splits
  s: _Static,
):
  kv, split, row = (pl.program_id(i) for i in range(3))
  r = jnp.arange(max(16, next_power(s.per_kv)), dtype=jnp.int32)
  cols = jnp.arange(s.cols, dtype=jnp.int32)
  head = kv * s.per_kv + r
  mine = r < s.per_kv
  group = lax.div(head, jnp.full_like(head, s.per_group))
  keep = plgpu.load(keep_ref.at[row, group], mask=mine, other=False)
  any_kept = jnp.max(keep.astype(jnp.int32)) > 0
  first, stop, blocks, each = _share(row, start_ref, lengths_ref, s)
  begin = split * each
  end = jnp.where(any_kept, jnp.minimum(begin + each, blocks), 0)

  def attend():
    wide = (cols < s.dim)[None, :]
    at = (row, head[:, None], cols[None, :])
    q = plgpu.load(q_ref.at[at], mask=keep[:, None] & wide, other=0)
    if s.sign != 1:
      q = q * jnp.asarray(s.sign, q.dtype)
    step = jnp.arange(s.tiles.block_k, dtype=jnp.int32)

    def body(i, carry):
      j = first + i * s.tiles.block_k + step
      mask = (j < stop)[:, None] & wide
      place = (layer_ref[0], row, j[:, None], kv, cols[None, :])
      k = plgpu.load(k_ref.at[place], mask=mask, other=0)
      logits = attention.dot(q, k.T, s.interpret)
      hidden = attention.hidden_logit(s.factor)
      logits = jnp.where((j < stop)[None, :], logits, hidden)
      v = plgpu.load(v_ref.at[place], mask=mask, other=0)
      return attention.softmax_step(carry, logits, v, s.factor, s.interpret)

    carry = (
      jnp.zeros((r.shape[0], s.cols), jnp.float32),
      jnp.full((r.shape[0],), -jnp.inf, jnp.float32),
      jnp.zeros((r.shape[0],), jnp.float32),
    )
    acc, top, total = lax.fori_loop(begin, end, body, carry)
    share = jnp.where(keep & (total > 0), 1 / total, 0.0)
    out = jnp.where(share[:, None] > 0, acc * share[:, None], 0.0)
    return out.astype(out_ref.dtype), top + jnp.log2(total)

  inside = mine[:, None] & (cols < s.dim)[None, :]
  if not lse_ref:
    out, _ = attend()
    at = (row, head[:, None], cols[None, :])
    plgpu.store(out_ref.at[at], out, mask=inside)
    return

  @pl.when(begin < end)
  def _():
    out, lse = attend()
    at = (row, head[:, None], split, cols[None, :])
    plgpu.store(out_ref.at[at], out, mask=inside & keep[:, None])
    plgpu.store(lse_ref[0].at[row, head, split], lse, mask=mine & keep)


def _combine(
  part_ref,  # float32 [B, N, splits, H]
  lse_ref,  # float32 [B, N, splits]
  keep_ref,  # bool [B, G]
  start_ref,  # int32 [B]
  lengths_ref,  # int32 [B]
  out_ref,  # [B, N, H]
  *,
  s: _Static,
):
  head, row = pl.program_id(0), pl.program_id(1)
  _, _, blocks, each = _share(row, start_ref, lengths_ref, s)
  used = lax.div(blocks + each - 1, jnp.maximum(each, 1))
  keep = keep_ref[row, lax.div(head, s.per_group)].astype(jnp.int32)
  used = used * keep
  splits = jnp.arange(next_power(s.tiles.splits), dtype=jnp.int32)
  cols = jnp.arange(s.cols, dtype=jnp.int32)
  there = splits < used
  wide = (cols < s.dim)[None, :]
  lse = plgpu.load(lse_ref.at[row, head, splits], mask=there, other=-jnp.inf)
  top = jnp.where(used > 0, jnp.max(lse), 0.0)
  weight = jnp.exp2(lse - top)
  part = plgpu.load(
    part_ref.at[row, head, splits[:, None], cols[None, :]],
    mask=there[:, None] & wide,
    other=0,
  )
  total = jnp.sum(weight)
  share = jnp.where(used > 0, 1 / total, 0.0)
  out = jnp.sum(weight[:, None] * part, axis=0) * share
  out = jnp.where(used > 0, out, 0.0).astype(out_ref.dtype)
  plgpu.store(out_ref.at[row, head, cols], out, mask=cols < s.dim)


def run(
  problem: Problem,
  tiles: CacheTiles,
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
  """reference.attention_decode for kept heads; q [B, N, H] -> same.

  Raises:
    ValueError: tiles out of range.
  """
  attention.check_block("block_k", tiles.block_k)
  if not 1 <= tiles.splits <= _MAX_SPLITS:
    raise ValueError(f"tiles.splits={tiles.splits} must be 1 to {_MAX_SPLITS}.")
  if not problem.layers:
    k_cache, v_cache = k_cache[None], v_cache[None]
  factor, sign = attention.fold_scale(scale, problem.dim)
  static = _Static(
    keys=problem.keys,
    dim=problem.dim,
    per_group=problem.group_size,
    per_kv=problem.heads // problem.kv_heads,
    factor=factor,
    sign=sign,
    tiles=tiles,
    interpret=interpret,
  )
  rows, heads, splits = problem.rows, problem.heads, tiles.splits
  start, lengths = start.astype(jnp.int32), lengths.astype(jnp.int32)
  out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
  parts = [
    jax.ShapeDtypeStruct((rows, heads, splits, problem.dim), jnp.float32),
    jax.ShapeDtypeStruct((rows, heads, splits), jnp.float32),
  ]
  out = call(
    functools.partial(_kernel, s=static),
    out_shape if splits == 1 else parts,
    # Neighbours in time read neighbours in memory, and where few heads are
    # kept, those at work spread over the multiprocessors.
    (problem.kv_heads, splits, rows),
    q,
    k_cache,
    v_cache,
    keep,
    layer.reshape(1),
    start,
    lengths,
    num_warps=tiles.num_warps,
    num_stages=tiles.num_stages,
    interpret=interpret,
    name="attention_decode",
  )
  if splits == 1:
    return out
  return call(
    functools.partial(_combine, s=static),
    out_shape,
    (heads, rows),
    *out,
    keep,
    start,
    lengths,
    num_warps=4,
    num_stages=1,
    interpret=interpret,
    name="attention_decode_combine",
  )


def _splits(problem: Problem, keys: int, programs: int) -> int:
  """Shares so that about `programs` work, on `keys` keys each or more.

  A share of few keys costs more to write and add up than it saves: with 4 query
  heads of 128 to a kv head, the parts of 256 keys in bfloat16 are 3% of what
  was read.
  """
  per_kv = problem.heads // problem.kv_heads
  groups = max(cdiv(per_kv, problem.group_size), 1)
  busy = 1 - (1 - problem.density) ** groups
  pairs = max(problem.rows * problem.kv_heads * busy, 1)
  most = max(problem.keys // keys, 1)
  wanted = next_power(max(int(programs / pairs), 1))
  return min(wanted, 1 << (most.bit_length() - 1), _MAX_SPLITS)


def default(problem: Problem) -> CacheTiles:
  """Tiles where nothing was measured."""
  block = 32 if problem.dim > 128 or problem.dtype == "float32" else 64
  return CacheTiles(block, _splits(problem, 256, _PROGRAMS))


def candidates(problem: Problem) -> list[CacheTiles]:
  """Tiles worth measuring."""
  found = [default(problem)]
  if problem.dim > 128 or problem.dtype == "float32":
    shapes = ((32, 4, 2), (32, 4, 3), (16, 2, 3))
  else:
    shapes = ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3), (32, 2, 4))
  for block, warps, stages in shapes:
    for keys, share in ((512, 0.17), (256, 1), (128, 2)):
      programs = int(_PROGRAMS * share)
      splits = _splits(problem, max(keys, block), programs)
      found.append(CacheTiles(block, splits, warps, stages))
  return list(dict.fromkeys(found))


DECODE = Op(
  run=run,
  why_not=attention.why_not,
  default=default,
  candidates=candidates,
)
