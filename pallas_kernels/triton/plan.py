"""The parts of a RoutePlan by counting sorts, without atomics.

Both sorts are stable sorts by a small integer: whether a token keeps a group,
and which place its class code has in the sequence of all codes. A program
counts the tokens that come before its own, ranks its own by a prefix sum, and
writes them to consecutive places. A column of the mask is one byte of every G,
so for many tokens the mask is first packed to one bit a group, tokens side by
side: words [ceil(G / width), M], 1/8 of the bytes, each read whole. No class
code straddles two words.

Every part is a call of its own, which jit drops if nobody reads it: one for the
groups, one for the classes, and the packing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.plan import class_rank, class_sequence
from pallas_kernels.triton import common

_INT = jnp.int32


@dataclasses.dataclass(frozen=True)
class PlanTiles:
  """How a plan is worked out.

  Attributes:
    packed: packs the mask first: a launch more, but each column is then read
      at full width.
    chunk: tokens that a sorting program takes at a time, a power of two.
    bins: class codes that one program places.
    group_warps, class_warps: warps of a sorting program.
    pack: tokens that a packing program reads, a power of two.
  """

  packed: bool
  chunk: int
  bins: int
  group_warps: int
  class_warps: int
  pack: int = 64


def default_tiles(tokens: int) -> PlanTiles:
  """What is used where nobody measured."""
  chunk = min(max(common.next_power(tokens), 16), 4096)
  warps = min(max(chunk // 256, 1), 8)
  packed = tokens > 1024
  return PlanTiles(packed, chunk, 1 if packed else 4, warps, warps)


def candidates(tokens: int, span: int) -> tuple[PlanTiles, ...]:
  """Tiles worth measuring."""
  top = max(common.next_power(tokens), 16)
  return tuple(
    PlanTiles(packed, chunk, bins, warps, warps)
    for packed in (False, True)
    for chunk in sorted({min(top, c) for c in (4096, 16384)})
    for bins in sorted({min(b, 2**span) for b in (1, 4, 16)})
    for warps in sorted({max(min(chunk // e, 16), 1) for e in (512, 1024)})
  )


def plan_parts(
  keep_MG: Array,
  *,
  batch: int,
  span: int,
  interpret: bool = False,
  tiles: PlanTiles | None = None,
) -> tuple[Array, ...]:
  """The fields of RoutePlan after `keep_MG`; see plan.reference_parts.

  Args:
    keep_MG: bool [M, G], neither of them 0.
    batch: B, which divides M.
    span: groups in a class code, 1 to 8.
    interpret: runs in interpret mode, for tests on a CPU.
    tiles: None takes default_tiles.

  Returns:
    (group_order_GM, group_start_GB, class_order_SM, class_code_SM).
  """
  tokens, groups = keep_MG.shape
  tiles = tiles or default_tiles(tokens)
  width = 32 // span * span if tiles.packed else 0
  source = keep_MG
  if tiles.packed:
    source = _pack(keep_MG, width, tiles.pack, interpret)
  read = functools.partial(_read_bits, width=width)
  return (
    *_sort_groups(source, read, groups, batch, tiles, interpret),
    *_sort_classes(source, read, groups, span, tiles, interpret),
  )


# --- packing -----------------------------------------------------------------


def _pack_kernel(keep_ref, word_ref, *, width, rows):
  """One word of `rows` tokens: bit j is group word * width + j."""
  tokens, groups = keep_ref.shape
  word = pl.program_id(1)
  at = pl.program_id(0) * rows + jnp.arange(rows, dtype=_INT)
  lane = jnp.arange(32, dtype=_INT)
  group = word * width + lane
  fits = (at < tokens)[:, None] & ((lane < width) & (group < groups))[None]
  keep = plgpu.load(
    keep_ref.at[at[:, None], group[None]], mask=fits, other=False
  )
  bits = jnp.where(keep, (jnp.ones_like(lane) << lane)[None], 0)
  plgpu.store(word_ref.at[word, at], bits.sum(1, dtype=_INT), mask=at < tokens)


def _pack(keep_MG, width, rows, interpret):
  tokens, groups = keep_MG.shape
  words = common.cdiv(groups, width)
  rows = min(rows, common.next_power(tokens))
  return common.call(
    functools.partial(_pack_kernel, width=width, rows=rows),
    jax.ShapeDtypeStruct((words, tokens), _INT),
    (common.cdiv(tokens, rows), words),
    keep_MG,
    num_warps=4 if rows >= 32 else 1,
    num_stages=1,
    interpret=interpret,
    name="plan_pack",
  )


def _read_bits(ref, at, first, count, *, width):
  """`count` bits a token, from group `first` on; 0 past the last token.

  `ref` holds words of `width` bits, or the mask itself if width is 0.
  """
  if width:
    words = plgpu.load(
      ref.at[jax.lax.div(first, width), at], mask=at < ref.shape[1], other=0
    )
    return (words >> jax.lax.rem(first, width)) & (2**count - 1)
  tokens, groups = ref.shape
  if count == 1:
    keep = plgpu.load(ref.at[at, first], mask=at < tokens, other=False)
    return keep.astype(_INT)
  lane = jnp.arange(common.next_power(count), dtype=_INT)
  fits = (lane < count) & (first + lane < groups)
  keep = plgpu.load(
    ref.at[at[:, None], (first + lane)[None]],
    mask=(at < tokens)[:, None] & fits[None],
    other=False,
  )
  bits = jnp.where(keep, (jnp.ones_like(lane) << lane)[None], 0)
  return bits.sum(1, dtype=_INT)


def _over_chunks(tokens, chunk, body, carry, load):
  """carry = body(at, load(at), carry) for every chunk of tokens in turn.

  A single chunk is loaded once, whoever asks for it.
  """
  lane = jnp.arange(chunk, dtype=_INT)

  def step(i, carry):
    at = i * chunk + lane
    return body(at, load(at), carry)

  if tokens <= chunk:
    return step(0, carry)
  return jax.lax.fori_loop(0, common.cdiv(tokens, chunk), step, carry)


def _loader(tokens, chunk, load):
  """`load`, or its one result if there is one chunk only."""
  if tokens > chunk:
    return load
  once = load(jnp.arange(chunk, dtype=_INT))
  return lambda at: once


# --- groups ------------------------------------------------------------------


def _group_kernel(source_ref, order_ref, start_ref, *, read, length, chunk):
  """Places the tokens of one group: those that keep it, then the others."""
  tokens = order_ref.shape[1]
  batch = start_ref.shape[1] - 1
  group = pl.program_id(0)
  keeps = _loader(tokens, chunk, lambda at: read(source_ref, at, group, 1))
  over = functools.partial(_over_chunks, tokens, chunk, load=keeps)

  counts = over(lambda at, keep, seen: seen + keep, jnp.zeros(chunk, _INT))
  total = counts.sum(dtype=_INT)

  def place(at, keep, before):
    upto = before + jnp.cumsum(keep, dtype=_INT)
    # A token that is dropped comes after all that keep the group, and after
    # the at - upto dropped before it. Past the last token this is past the end.
    to = jnp.where(keep == 1, upto - 1, total + at - upto)
    plgpu.store(order_ref.at[group, to], at, mask=at < tokens)
    if batch > 1:
      opens = (jax.lax.rem(at, length) == 0) & (at < tokens)
      row = jnp.where(opens, jax.lax.div(at, length), batch + 1)
      plgpu.store(start_ref.at[group, row], upto - keep, mask=opens)
    return before + keep.sum(dtype=_INT)

  over(place, jnp.zeros((), _INT))
  end = jnp.arange(2, dtype=_INT)
  plgpu.store(start_ref.at[group, end * batch], end * total)


def _sort_groups(source, read, groups, batch, tiles, interpret):
  tokens = source.shape[1 if tiles.packed else 0]
  kernel = functools.partial(
    _group_kernel, read=read, length=tokens // batch, chunk=tiles.chunk
  )
  return common.call(
    kernel,
    (
      jax.ShapeDtypeStruct((groups, tokens), _INT),
      jax.ShapeDtypeStruct((groups, batch + 1), _INT),
    ),
    (groups,),
    source,
    num_warps=tiles.group_warps,
    num_stages=1,
    interpret=interpret,
    name="plan_groups",
  )


# --- classes -----------------------------------------------------------------


def _class_kernel(
  source_ref,
  rank_ref,
  sequence_ref,
  order_ref,
  code_ref,
  *,
  read,
  span,
  bins,
  chunk,
):
  """Places the tokens of `bins` class codes of one span."""
  tokens = order_ref.shape[1]
  item = pl.program_id(0)
  first = pl.program_id(1) * bins

  def load(at):
    code = read(source_ref, at, item * span, span)
    rank = plgpu.load(rank_ref.at[code], mask=at < tokens, other=0)
    return jnp.where(at < tokens, rank, 2**span)

  ranks = _loader(tokens, chunk, load)
  over = functools.partial(_over_chunks, tokens, chunk, load=ranks)
  below = over(
    lambda at, rank, seen: seen + (rank < first).astype(_INT),
    jnp.zeros(chunk, _INT),
  ).sum(dtype=_INT)

  def one_bin(j, below):
    wanted = first + j
    code = jnp.full(chunk, sequence_ref[wanted], _INT)

    def place(at, rank, before):
      mine = rank == wanted
      count = mine.astype(_INT)
      to = before + jnp.cumsum(count, dtype=_INT) - 1
      # Interpret mode writes masked places back, so they must be nowhere.
      to = jnp.where(mine, to, tokens)
      plgpu.store(order_ref.at[item, to], at, mask=mine)
      plgpu.store(code_ref.at[item, to], code, mask=mine)
      return before + count.sum(dtype=_INT)

    return over(place, below)

  if bins == 1:
    one_bin(0, below)
  else:
    jax.lax.fori_loop(0, bins, one_bin, below)


def _sort_classes(source, read, groups, span, tiles, interpret):
  tokens = source.shape[1 if tiles.packed else 0]
  spans = common.cdiv(groups, span)
  bins = min(common.next_power(tiles.bins), 2**span)
  out = jax.ShapeDtypeStruct((spans, tokens), _INT)
  kernel = functools.partial(
    _class_kernel, read=read, span=span, bins=bins, chunk=tiles.chunk
  )
  return common.call(
    kernel,
    (out, out),
    (spans, 2**span // bins),
    source,
    jnp.asarray(class_rank(span)),
    jnp.asarray(class_sequence(span), _INT),
    num_warps=tiles.class_warps,
    num_stages=1,
    interpret=interpret,
    name="plan_classes",
  )
