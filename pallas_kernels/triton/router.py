"""The decode router: two small matmuls and a threshold, for M <= 64 tokens.

A launch costs about as much as reading 200 KB through one multiprocessor, so
there are two ways, and tiles pick: one program does it all, or `splits`
programs share the first matmul's D and a second launch does the rest.

Everything is float32. One token is multiplied and summed; more go through the
tensor cores as three TF32 products, which keep 21 bits or more of each factor.

Letters: M tokens, D model width, R rank, G groups.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.problem import Op, Problem
from pallas_kernels.triton import common

MAX_TOKENS = 64
MAX_GROUPS = 1024
MAX_RANK = 256
_INT = jnp.int32
# Weights of the second matrix that are held at a time: all, up to 64 KB, else
# blocks of 32 KB, of which a loop keeps several. And logits, in registers.
_HELD_ALL, _HELD_BLOCK, _HELD_LOGITS = 16384, 8192, 8192


@dataclasses.dataclass(frozen=True)
class RouterTiles:
  """How a router runs.

  Attributes:
    splits: 1 for a single program and launch; more share the first matmul, and
      a second launch does the rest.
    block_d: channels of x that a step takes, a power of two, at least 16.
    num_warps, num_stages: of the first matmul's programs.
    tail_warps: of the second launch's program.
  """

  splits: int
  block_d: int
  num_warps: int = 8
  num_stages: int = 4
  tail_warps: int = 8


@dataclasses.dataclass(frozen=True)
class _Shape:
  """What the kernels know statically, with padded sides where they differ.

  `rows` is 1 for one token, which takes the path without tensor cores; `part`
  are the channels of one split, `block_g` the groups decided at a time.
  """

  tokens: int
  depth: int
  rank: int
  groups: int
  rows: int
  rank_pad: int
  group_pad: int
  block_g: int
  splits: int
  part: int
  block_d: int
  interpret: bool


def why_not(problem: Problem) -> str | None:
  """Why this router cannot run a problem, or None."""
  for what, value, most in (
    ("tokens", problem.tokens, MAX_TOKENS),
    ("groups", problem.groups, MAX_GROUPS),
    ("router rank", problem.n, MAX_RANK),
  ):
    if value > most:
      return f"{what} {value} exceed {most}."
  return None


def default(problem: Problem) -> RouterTiles:
  """Tiles where nothing was measured: one program for small matrices."""
  if problem.k * problem.n <= 1 << 16:
    return RouterTiles(1, 256 if problem.tokens == 1 else _step(problem, 2048))
  # Every split leaves a [M, R] for the second launch to read.
  most = 32 if problem.tokens <= 16 else 16
  splits = min(max(common.next_power(problem.k) // 128, 2), most)
  return RouterTiles(
    splits, _step(problem, 4096), num_warps=_warps(problem), num_stages=3
  )


def _warps(problem: Problem) -> int:
  """Warps of a split; wide ranks and many tokens need their registers."""
  return 8 if problem.n > 128 and problem.tokens > 16 else 4


def _step(problem: Problem, floats: int) -> int:
  """Channels of x in a step that reads about `floats` weights; 16 to 128."""
  return min(max(floats // max(common.next_power(problem.n), 16), 16), 128)


def candidates(problem: Problem) -> tuple[RouterTiles, ...]:
  """Tiles worth measuring, in both designs."""
  one = problem.tokens == 1
  rank = max(common.next_power(problem.n), 16)
  out = []
  # 64 tokens at rank 256 leave a single program too few registers.
  for floats in (8192, 16384) if one else (2048, 4096):
    for warps in (8, 16) if one else (8,):
      if one or rank * problem.tokens <= _HELD_LOGITS:
        out.append(RouterTiles(1, max(floats // rank, 16), num_warps=warps))
  for splits in (8, 16, 32, 64):
    for floats in (2048, 4096):
      for tail in (4, 8):
        out.append(
          RouterTiles(splits, _step(problem, floats), _warps(problem), 3, tail)
        )
  return tuple(dict.fromkeys(out))


def route(
  problem: Problem,
  tiles: RouterTiles,
  interpret: bool,
  x: Array,
  down: Array,
  down_bias: Array,
  up: Array,
  up_bias: Array,
  threshold: Array,
  layer: Array,
) -> Array:
  """Decisions of at most 64 tokens, bool [M, G].

  Args:
    problem: its k is D, its n is R; layers is 0 if nothing is stacked.
    tiles: see RouterTiles.
    interpret: runs in interpret mode.
    x: [B, T, D].
    down, down_bias, up, up_bias: float32 [D, R], [R], [R, G], [G], with a
      leading axis if problem.layers.
    threshold: float32 [] or [G]; with problem.layers [], [L] or [L, G].
    layer: int32 [].
  """
  shape = _shape(problem, tiles, interpret)
  x = x.reshape(shape.tokens, shape.depth)
  if shape.rows == 1:
    x = x[0]
  if not problem.layers:
    down, down_bias, up, up_bias = (
      a[None] for a in (down, down_bias, up, up_bias)
    )
  threshold = _two_axes(threshold, bool(problem.layers))
  layer = layer.reshape(1)
  rest = (down_bias, up, up_bias, threshold, layer)
  out = jax.ShapeDtypeStruct((shape.tokens, shape.groups), jnp.bool_)
  launch = functools.partial(common.call, interpret=interpret)
  first: dict[str, Any] = {
    "num_warps": tiles.num_warps,
    "num_stages": tiles.num_stages,
  }
  if shape.splits == 1:
    kernel = functools.partial(_single_kernel, shape=shape)
    return launch(kernel, out, (1,), x, down, *rest, **first, name="route")
  low = launch(
    functools.partial(_down_kernel, shape=shape),
    jax.ShapeDtypeStruct((shape.splits, shape.tokens, shape.rank), jnp.float32),
    (shape.splits,),
    x,
    down,
    layer,
    **first,
    name="route_down",
  )
  return launch(
    functools.partial(_tail_kernel, shape=shape),
    out,
    (1,),
    low,
    *rest,
    num_warps=tiles.tail_warps,
    num_stages=2,
    name="route_decide",
  )


def _shape(problem: Problem, tiles: RouterTiles, interpret: bool) -> _Shape:
  tokens, depth = problem.tokens, problem.k
  one = tokens == 1
  pad = 1 if one else 16  # tensor cores take no side below 16
  rank_pad = max(common.next_power(problem.n), pad)
  group_pad = max(common.next_power(problem.groups), pad)
  rows = max(common.next_power(tokens), pad)
  block_g = group_pad
  if rank_pad * group_pad > _HELD_ALL or rows * group_pad > _HELD_LOGITS:
    block_g = min(group_pad, _HELD_BLOCK // rank_pad, _HELD_LOGITS // rows)
  steps = common.cdiv(common.cdiv(depth, tiles.splits), tiles.block_d)
  return _Shape(
    tokens=tokens,
    depth=depth,
    rank=problem.n,
    groups=problem.groups,
    rows=rows,
    rank_pad=rank_pad,
    group_pad=group_pad,
    block_g=block_g,
    splits=tiles.splits,
    part=steps * tiles.block_d,
    block_d=tiles.block_d,
    interpret=interpret,
  )


def _two_axes(threshold: Array, stacked: bool) -> Array:
  """[layers or 1, groups or 1], by reshaping alone."""
  if threshold.ndim == 2:
    return threshold
  return threshold.reshape((-1, 1) if stacked else (1, -1))


def _row(ref, layer):
  """Which row of a stack to read: `layer`, or 0 if there is one row only."""
  return layer if ref.shape[0] > 1 else jnp.zeros((), _INT)


def _load(view, *masks):
  """Loads a view, 0 where a mask says no; None is a mask that is all True."""
  masks = [mask for mask in masks if mask is not None]
  if not masks:
    return plgpu.load(view)
  return plgpu.load(
    view, mask=functools.reduce(jnp.logical_and, masks), other=0.0
  )


def _below(index, end: int, reach: int):
  """index < end, or None if no index reaches the end."""
  return None if reach <= end else index < end


def _each(mask, axis: int):
  """A mask of one axis as [n, 1] or [1, n]."""
  return None if mask is None else jnp.expand_dims(mask, 1 - axis)


def _dot(a, b, interpret: bool):
  high = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
  return jnp.dot(
    a,
    b,
    # The preset is not there on a CPU.
    precision=jax.lax.Precision.HIGHEST if interpret else high,
    preferred_element_type=jnp.float32,
  )


# --- kernels -----------------------------------------------------------------


def _low(x_ref, down_ref, layer, split, s: _Shape):
  """x @ down over one split's channels: float32 [rows, rank], or [rank]."""
  lane = jnp.arange(s.block_d, dtype=_INT)
  rank = jnp.arange(s.rank_pad, dtype=_INT)
  token = jnp.arange(s.rows, dtype=_INT)
  real_token = _each(_below(token, s.tokens, s.rows), 0)
  real_rank = _each(_below(rank, s.rank, s.rank_pad), 1)
  row = _row(down_ref, layer)

  def step(i, acc):
    at = split * s.part + i * s.block_d + lane
    real = _below(at, s.depth, s.splits * s.part)
    w = _load(
      down_ref.at[row, at[:, None], rank[None]], _each(real, 0), real_rank
    )
    if s.rows == 1:
      x = _load(x_ref.at[at], real)
      return acc + x.astype(jnp.float32)[:, None] * w
    x = _load(x_ref.at[token[:, None], at[None]], _each(real, 1), real_token)
    return acc + _dot(x.astype(jnp.float32), w, s.interpret)

  sums = s.block_d if s.rows == 1 else s.rows
  acc = jnp.zeros((sums, s.rank_pad), jnp.float32)
  acc = jax.lax.fori_loop(0, s.part // s.block_d, step, acc)
  return acc.sum(0) if s.rows == 1 else acc


def _load_up(up_ref, layer, first, s: _Shape):
  """[rank, block_g] of the second matrix, from group `first` on."""
  rank = jnp.arange(s.rank_pad, dtype=_INT)
  group = first + jnp.arange(s.block_g, dtype=_INT)
  return _load(
    up_ref.at[_row(up_ref, layer), rank[:, None], group[None]],
    _each(_below(rank, s.rank, s.rank_pad), 0),
    _each(_below(group, s.groups, s.group_pad), 1),
  )


def _load_bias(ref, layer, s: _Shape):
  """[rank] of the first bias."""
  rank = jnp.arange(s.rank_pad, dtype=_INT)
  return _load(ref.at[_row(ref, layer), rank], _below(rank, s.rank, s.rank_pad))


def _decide(low, loaded, refs, keep_ref, layer, s: _Shape) -> None:
  """Writes the decisions from low [rows, rank], or [rank].

  `loaded` is the second matrix if it is one block, else None.
  """
  up_ref, up_bias_ref, threshold_ref = refs
  lane = jnp.arange(s.block_g, dtype=_INT)
  token = jnp.arange(s.rows, dtype=_INT)[:, None]

  def block(first):
    """Decides block_g groups."""
    up = _load_up(up_ref, layer, first, s) if loaded is None else loaded
    group = first + lane
    real = group < s.groups
    bias = plgpu.load(
      up_bias_ref.at[_row(up_bias_ref, layer), group], mask=real, other=0.0
    )
    column = group if threshold_ref.shape[1] > 1 else jnp.zeros_like(group)
    threshold = plgpu.load(
      threshold_ref.at[_row(threshold_ref, layer), column],
      mask=real,
      other=0.0,
    )
    if s.rows == 1:
      logits = (low[:, None] * up).sum(0)[None]
    else:
      logits = _dot(low, up, s.interpret)
    real = real[None] & (token < s.tokens)
    keep = logits + bias[None] > threshold[None]
    plgpu.store(keep_ref.at[token, group[None]], keep, mask=real)

  blocks = s.group_pad // s.block_g
  if blocks == 1:
    block(jnp.zeros((), _INT))
  else:
    jax.lax.fori_loop(0, blocks, lambda i, _: block(i * s.block_g), None)


def _ahead(up_ref, layer, s: _Shape):
  """The second matrix, asked for before the first product needs the time."""
  if s.block_g < s.group_pad:
    return None
  return _load_up(up_ref, layer, jnp.zeros((), _INT), s)


def _single_kernel(x_ref, down_ref, bias_ref, *rest, shape: _Shape) -> None:
  *refs, layer_ref, keep_ref = rest
  layer = layer_ref[0]
  up = _ahead(refs[0], layer, shape)
  bias = _load_bias(bias_ref, layer, shape)
  low = _low(x_ref, down_ref, layer, jnp.zeros((), _INT), shape)
  low += bias if shape.rows == 1 else bias[None]
  _decide(low, up, refs, keep_ref, layer, shape)


def _down_kernel(x_ref, down_ref, layer_ref, low_ref, *, shape: _Shape):
  split = pl.program_id(0)
  low = _low(x_ref, down_ref, layer_ref[0], split, shape)
  low = low.reshape(shape.rows, shape.rank_pad)
  token = jnp.arange(shape.rows, dtype=_INT)[:, None]
  rank = jnp.arange(shape.rank_pad, dtype=_INT)[None]
  plgpu.store(
    low_ref.at[split, token, rank],
    low,
    mask=(token < shape.tokens) & (rank < shape.rank),
  )


def _tail_kernel(low_ref, bias_ref, *rest, shape: _Shape) -> None:
  s = shape
  *refs, layer_ref, keep_ref = rest
  layer = layer_ref[0]
  up = _ahead(refs[0], layer, s)
  bias = _load_bias(bias_ref, layer, s)
  # As many splits at a time as fit about 32 registers of 256 threads.
  some = min(common.next_power(s.splits), max(8192 // (s.rows * s.rank_pad), 1))
  split = jnp.arange(some, dtype=_INT)[:, None, None]
  token = jnp.arange(s.rows, dtype=_INT)[None, :, None]
  rank = jnp.arange(s.rank_pad, dtype=_INT)[None, None]

  def add(i, low):
    at = i * some + split
    real = (at < s.splits) & (token < s.tokens) & (rank < s.rank)
    return low + plgpu.load(low_ref.at[at, token, rank], mask=real, other=0.0)

  low = jnp.zeros((some, s.rows, s.rank_pad), jnp.float32)
  low = jax.lax.fori_loop(0, common.cdiv(s.splits, some), add, low).sum(0)
  low += bias[None]
  if s.rows == 1:
    low = low.reshape(s.rank_pad)
  _decide(low, up, refs, keep_ref, layer, s)


ROUTE = Op(run=route, why_not=why_not, default=default, candidates=candidates)
