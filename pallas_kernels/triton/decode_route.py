"""The folded router: logits x . v[g] + c[g], for a few tokens.

The two maps of a router of low rank, folded into one at load time, cost no
second launch: a program decides its own groups (`route`), or the group whose
channels it then computes (see decode_n.py). Everything is float32: activations
are converted exactly, products added by hand, or, for many tokens, three TF32
products on the tensor cores, which keep 21 bits or more of each factor.

Letters: M tokens, D model width, G groups.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.problem import Op, Problem
from pallas_kernels.triton.common import call, cdiv, next_power
from pallas_kernels.triton.decode_cut import (
  below,
  both,
  cols,
  iota,
  load,
  rows,
  store,
)

MAX_TOKENS = 64
_UNROLLED = 8
_REGISTERS = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedTiles:
  """How a folded router is cut.

  Attributes:
    scheme: `vector` multiplies and adds by hand; `dot` takes 16 tokens and up
      to 16 groups a program to the tensor cores.
    block: groups of a program, a power of two; a dot pads them to 16.
    lanes: tokens of a program.
    num_warps, num_stages: Triton's.
  """

  scheme: str = "vector"
  block: int = 1
  lanes: int = 1
  num_warps: int = 4
  num_stages: int = 1

  def __post_init__(self):
    if self.scheme not in ("vector", "dot"):
      raise ValueError(f"scheme={self.scheme!r} is not vector or dot.")
    if self.block not in (1, 2, 4, 8, 16):
      raise ValueError(f"block={self.block} must be 1, 2, 4, 8 or 16.")
    if not 1 <= self.lanes <= 16 or (self.scheme == "dot" and self.lanes < 16):
      raise ValueError(f"lanes={self.lanes} must be 1 to 16, and 16 for a dot.")


def why_not(problem: Problem) -> str | None:
  """Why this router cannot run a problem, or None."""
  if problem.tokens > MAX_TOKENS:
    return f"{problem.tokens} tokens exceed {MAX_TOKENS}."
  return None


def default(problem: Problem) -> FoldedTiles:
  """Tiles where nothing was measured."""
  return candidates(problem)[0]


def candidates(problem: Problem) -> tuple[FoldedTiles, ...]:
  """Tiles worth measuring, the default first."""
  tokens = problem.tokens
  if tokens <= 4:
    cuts = [(1, tokens, 4), (2, tokens, 8), (1, tokens, 8), (1, tokens, 2)]
    if tokens > 1:
      cuts.append((1, 1, 4))
  else:
    most = min(tokens, 16)
    cuts = [(1, 4, 4), (1, most, 8), (4, 8, 8), (2, most, 8), (1, most, 16)]
  vectors = [
    FoldedTiles(block=block, lanes=min(lanes, tokens), num_warps=warps)
    for block, lanes, warps in cuts
  ]
  if tokens <= 16:  # for so few a dot takes twice as long or more
    return tuple(vectors)
  dots = [
    FoldedTiles(scheme="dot", block=block, lanes=16, num_stages=stages)
    for block in (8, 16)
    for stages in (3, 5)
  ]
  return tuple(vectors + dots)


def two_axes(threshold: Array, stacked: bool) -> Array:
  """[layers or 1, groups or 1], by reshaping alone."""
  if threshold.ndim == 2:
    return threshold
  return threshold.reshape((-1, 1) if stacked else (1, -1))


def route(
  problem: Problem,
  tiles: FoldedTiles,
  interpret: bool,
  x: Array,
  v: Array,
  c: Array,
  threshold: Array,
  layer: Array,
) -> Array:
  """bool [M, G]: x . v + c > threshold, in one launch.

  Args:
    problem: its k is D; layers is 0 if nothing is stacked.
    tiles: see FoldedTiles.
    interpret: runs in interpret mode.
    x: [B, T, D].
    v, c: float32 [G, D], [G], with a leading axis if problem.layers.
    threshold: float32 [] or [G]; with problem.layers [], [L] or [L, G].
    layer: int32 [].
  """
  tokens, groups = problem.tokens, problem.groups
  if not problem.layers:
    v, c = v[None], c[None]
  kernel = _dot_kernel if tiles.scheme == "dot" else _vector_kernel
  parts = cdiv(tokens, tiles.lanes)
  return call(
    functools.partial(kernel, tiles=tiles, parts=parts, interpret=interpret),
    jax.ShapeDtypeStruct((tokens, groups), jnp.bool_),
    (cdiv(groups, tiles.block) * parts,),
    x.reshape(tokens, problem.k),
    v,
    c,
    two_axes(threshold, bool(problem.layers)),
    layer.reshape(1),
    num_warps=tiles.num_warps,
    num_stages=tiles.num_stages,
    interpret=interpret,
    name="route_folded",
  )


def _row(ref, layer):
  """Which row of a stack to read: `layer`, or 0 if there is one row only."""
  return layer if ref.shape[0] > 1 else jnp.int32(0)


def _read(view, mask: Array | None) -> Array:
  """A load that stays where it is; 0 where the mask is False."""
  if mask is None:
    return plgpu.load(view, volatile=True)
  other = jnp.zeros((), view.dtype)
  return plgpu.load(view, mask=mask, other=other, volatile=True)


def group_logits(
  x_ref,
  v_ref,
  layer,
  tokens: Sequence[Array],
  groups: Sequence[Array],
  warps: int,
) -> list[list[Array]]:
  """Scalars x . v, a list for each group. Tokens and groups must exist.

  A token's sum has one order, whoever its neighbours are. Each thread takes 4
  channels at a time: with as many of x as of v, of which 4 fill 16 bytes, no
  layout needs another, which would put barriers between the loads. The compiler
  would put loads behind products that wait for others, to save registers:
  volatile loads keep their order, and the last is what is needed first.
  """
  depth = x_ref.shape[1]
  chunk = min(128 * warps, next_power(depth))
  times = cdiv(depth, chunk)
  unroll = min(times, _UNROLLED)
  exact = depth % (chunk * unroll) == 0
  row = _row(v_ref, layer)
  # Registers of the sums and of a chunk's loads, and chunks read at once.
  held = 4 * len(tokens) * len(groups)
  size = 4 * len(groups) + x_ref.dtype.itemsize * len(tokens)
  batch = min(max((_REGISTERS - held) // size, 1), unroll)

  def read(i):
    at = i * chunk + iota(chunk)
    inside = below(at, depth, exact)
    vs = [_read(v_ref.at[row, group, at], inside) for group in groups]
    return vs, [_read(x_ref.at[token, at], inside) for token in tokens]

  def several(i, sums):
    starts = range(0, unroll, batch)

    def reads(start):
      stop = min(start + batch, unroll)
      return [read(i * unroll + j) for j in range(start, stop)]

    ahead = reads(0)
    for start in starts:
      now, ahead = ahead, []
      if start + batch < unroll:
        ahead = reads(start + batch)
      for vs, xs in reversed(now):
        wide = [x.astype(jnp.float32) for x in xs]
        products = [v * x for v in vs for x in wide]
        sums = tuple(s + p for s, p in zip(sums, products, strict=True))
    return sums

  sums = (jnp.zeros((chunk,), jnp.float32),) * (len(tokens) * len(groups))
  if unroll == times:
    sums = several(0, sums)
  else:
    sums = lax.fori_loop(0, cdiv(times, unroll), several, sums)
  each = len(tokens)
  return [
    [jnp.sum(total) for total in sums[i * each : (i + 1) * each]]
    for i in range(len(groups))
  ]


def bias_and_limit(c_ref, threshold_ref, layer, group) -> tuple[Array, Array]:
  """c and threshold of one group; read before the logits need the time."""
  column = group if threshold_ref.shape[1] > 1 else jnp.int32(0)
  bias = c_ref[_row(c_ref, layer), group]
  return bias, threshold_ref[_row(threshold_ref, layer), column]


def _vector_kernel(
  x_ref,
  v_ref,
  c_ref,
  threshold_ref,
  layer_ref,
  keep_ref,
  *,
  tiles: FoldedTiles,
  parts: int,
  interpret: bool,
):
  del interpret
  tokens, groups = keep_ref.shape
  layer = layer_ref[0]
  program = pl.program_id(0)
  first = lax.div(program, jnp.int32(parts)) * tiles.block
  at = lax.rem(program, jnp.int32(parts)) * tiles.lanes
  # Spare groups and tokens repeat the last: the same bits, written twice.
  own = [jnp.minimum(first + i, groups - 1) for i in range(tiles.block)]
  token = [jnp.minimum(at + i, tokens - 1) for i in range(tiles.lanes)]
  bounds = [bias_and_limit(c_ref, threshold_ref, layer, g) for g in own]
  logits = group_logits(x_ref, v_ref, layer, token, own, tiles.num_warps)
  for group, of_group, (bias, limit) in zip(own, logits, bounds, strict=True):
    for m, logit in zip(token, of_group, strict=True):
      plgpu.store(keep_ref.at[m, group], logit + bias > limit)


def _dot_kernel(
  x_ref,
  v_ref,
  c_ref,
  threshold_ref,
  layer_ref,
  keep_ref,
  *,
  tiles: FoldedTiles,
  parts: int,
  interpret: bool,
):
  tokens, groups = keep_ref.shape
  depth = x_ref.shape[1]
  layer = layer_ref[0]
  program = pl.program_id(0)
  token = lax.rem(program, jnp.int32(parts)) * 16 + iota(16)
  real = below(token, tokens, tokens % 16 == 0)
  lane = iota(16)
  group = lax.div(program, jnp.int32(parts)) * tiles.block + lane
  own = both(
    below(lane, tiles.block, tiles.block == 16),
    below(group, groups, groups % 16 == 0 and tiles.block == 16),
  )
  step = min(128, max(next_power(depth), 16))
  row = _row(v_ref, layer)

  def add(i, total):
    at = i * step + iota(step)
    inside = below(at, depth, depth % step == 0)
    v = load(
      v_ref.at[row, group[:, None], at[None, :]], both(rows(own), cols(inside))
    )
    view = x_ref.at[token[:, None], at[None, :]]
    x = load(view, both(rows(real), cols(inside))).astype(jnp.float32)
    high = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return total + lax.dot_general(
      v,
      x,
      (((1,), (1,)), ((), ())),
      # The preset is not there on a CPU.
      precision=lax.Precision.HIGHEST if interpret else high,
      preferred_element_type=jnp.float32,
    )

  total = jnp.zeros((16, 16), jnp.float32)
  total = lax.fori_loop(0, cdiv(depth, step), add, total)
  readable = jnp.minimum(group, groups - 1)
  column = readable if threshold_ref.shape[1] > 1 else readable * 0
  bias = load(c_ref.at[_row(c_ref, layer), readable], None)
  limit = load(threshold_ref.at[_row(threshold_ref, layer), column], None)
  store(
    keep_ref.at[token[None, :], group[:, None]],
    total + bias[:, None] > limit[:, None],
    both(rows(own), cols(real)),
  )


ROUTE_FOLDED = Op(
  run=route, why_not=why_not, default=default, candidates=candidates
)
