"""Width-pruned matmuls and the gated FFN for TPU.

A block is a tile of tokens x a block of the sparse channels. Blocks in which
no token keeps a group are not visited; inside a visited block tokens that
drop a group are selected away, on store (N-sparse) or on load (K-sparse,
hidden of the FFN). Tokens are first sorted, once for the op, so that those
with like masks share tiles.

Blocks of channels are multiples of 128 whatever the group size: a block may
hold several groups, part of one, or parts of two.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import schedule
from pallas_kernels.mosaic_tpu.common import (
  LANES,
  call,
  cdiv,
  dot,
  round_up,
  select,
  stacks,
)
from pallas_kernels.mosaic_tpu.matmul_tiles import (
  Blocks,
  Tiles,
  candidates,
  checked,
  default,
  fit,
  why_not,
)
from pallas_kernels.plan import RoutePlan
from pallas_kernels.problem import Op, Problem

# --- in the kernels ----------------------------------------------------------


def _keep_channels(keep_ref, blocks: Blocks, col: Array) -> Array:
  """float32 [tokens, width] or [tokens, 1]: 1 where a token keeps a channel.

  `keep_ref` [tokens, lanes] holds one chunk of groups. Several groups are
  spread over their channels by a product with 0s and 1s; channels past the
  last group belong to none.
  """
  keep = keep_ref[...]
  lanes, size = keep.shape[1], blocks.group_size
  first = col * blocks.width - blocks.chunk(col) * lanes * size
  if size % blocks.width == 0:
    lane = jax.lax.broadcasted_iota(jnp.int32, keep.shape, 1)
    mine = lane == jax.lax.div(first, size)
    return jnp.where(mine, keep, 0.0).sum(1, keepdims=True)
  shape = (lanes, blocks.width)
  start = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * size
  channel = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + first
  spread = (channel >= start) & (channel < start + size)
  one = jnp.bfloat16  # 0 and 1 are exact in it
  return dot(keep.astype(one), spread.astype(jnp.float32).astype(one))


def _rows_below(w: Array, limit: Array) -> Array:
  """w with rows from `limit` on, which lie past the array's end, 0."""
  row = jax.lax.broadcasted_iota(jnp.int32, w.shape, 0)
  return select((row < limit).astype(jnp.float32), w)


def _n_kernel(
  steps, layer, x_ref, w_ref, keep_ref, zeros_ref, y_ref, *, blocks, contract
):
  del layer, zeros_ref  # the index map's; and the output's initial value
  col = jax.lax.rem(steps[pl.program_id(0)], blocks.cols)
  y = dot(x_ref[...], w_ref[...], contract)
  keep = _keep_channels(keep_ref, blocks, col)
  y_ref[...] = select(keep, y).astype(y_ref.dtype)


def _k_kernel(
  steps, layer, x_ref, w_ref, keep_ref, y_ref, sum_ref, *, blocks, k
):
  del layer
  at, count = pl.program_id(1), pl.num_programs(1)
  col = jax.lax.rem(steps[at], blocks.cols)

  @pl.when(schedule.first_of(steps, blocks.cols, at))
  def _():
    sum_ref[...] = jnp.zeros_like(sum_ref)

  x = select(_keep_channels(keep_ref, blocks, col), x_ref[...])
  w = w_ref[...]
  if k % blocks.width:
    w = _rows_below(w, k - col * blocks.width)
  sum_ref[...] += dot(x, w)

  @pl.when(schedule.last_of(steps, blocks.cols, at, count))
  def _():
    y_ref[...] = sum_ref[...].astype(y_ref.dtype)


def _ffn_kernel(
  steps,
  layer,
  x_ref,
  gate_ref,
  up_ref,
  down_ref,
  keep_ref,
  y_ref,
  sum_ref,
  *,
  blocks,
  contract,
  n,
):
  del layer
  at, count = pl.program_id(0), pl.num_programs(0)
  col = jax.lax.rem(steps[at], blocks.cols)

  @pl.when(schedule.first_of(steps, blocks.cols, at))
  def _():
    sum_ref[...] = jnp.zeros_like(sum_ref)

  x = x_ref[...]
  gate = dot(x, gate_ref[...], contract)
  up = dot(x, up_ref[...], contract)
  hidden = select(
    _keep_channels(keep_ref, blocks, col), gate * jax.nn.sigmoid(gate) * up
  ).astype(x.dtype)
  down = down_ref[...]
  if n % blocks.width:
    down = _rows_below(down, n - col * blocks.width)
  sum_ref[...] += dot(hidden, down)

  @pl.when(schedule.last_of(steps, blocks.cols, at, count))
  def _():
    y_ref[...] = sum_ref[...].astype(y_ref.dtype)


# --- around them -------------------------------------------------------------


def _in_order(
  problem: Problem, tiles: Tiles, blocks: Blocks, x: Array, plan: RoutePlan
) -> tuple[Array, Array, Array | None]:
  """(x [M, K], keep [M, G]) sorted if asked for, and how to undo it."""
  x = x.reshape(problem.tokens, x.shape[-1])
  if not tiles.sort or blocks.tiles == 1:
    return x, plan.keep_MG, None
  order = schedule.token_order(plan.keep_MG)
  return x[order], plan.keep_MG[order], schedule.inverse(order)


def _finish(problem: Problem, y: Array, undo: Array | None) -> Array:
  y = y if undo is None else y[undo]
  return y.reshape(problem.rows, problem.length, y.shape[-1])


def active_blocks(
  problem: Problem, tiles: Tiles, keep_MG: Array
) -> tuple[Array, Array]:
  """(steps, count): the blocks that a kernel visits, tile by tile.

  Args:
    problem, tiles: of the call.
    keep_MG: bool [M, G], in the order of the tiles.

  Returns:
    int32 [tiles * blocks of channels], tile * blocks + block in the first
    `count` places; int32 [].
  """
  blocks = fit(problem, tiles)
  active = schedule.tile_blocks(
    keep_MG, blocks.tokens, blocks.group_size, blocks.width
  )
  if problem.op != "matmul_n_sparse":
    active = schedule.every_tile(active)
  return schedule.active_steps(active)


def _lanes_of(keep_MG: Array) -> Array:
  """float32 [M, G rounded up to 128]."""
  pad = round_up(keep_MG.shape[1], LANES) - keep_MG.shape[1]
  return jnp.pad(keep_MG.astype(jnp.float32), ((0, 0), (0, pad)))


def n_sparse(
  problem: Problem,
  tiles: Tiles,
  interpret: bool,
  x: Array,
  w: Array,
  plan: RoutePlan,
  layer: Array,
) -> Array:
  """matmul_n_sparse: [B, T, K] -> [B, T, N]."""
  blocks = checked(problem, tiles)
  x, keep_MG, undo = _in_order(problem, tiles, blocks, x, plan)
  steps, count = active_blocks(problem, tiles, keep_MG)
  (w,), at_layer = stacks(problem.layers, layer, (w,))
  tile = functools.partial(_tile, cols=blocks.cols)
  col = functools.partial(_col, cols=blocks.cols)
  if problem.transposed:
    w_spec = pl.BlockSpec(
      (None, blocks.width, problem.k), lambda i, s, at: (at[0], col(s, i), 0)
    )
  else:
    w_spec = pl.BlockSpec(
      (None, problem.k, blocks.width), lambda i, s, at: (at[0], 0, col(s, i))
    )
  # Whole blocks: TPU interpret mode refuses an aliased output with edges.
  shape = (blocks.tiles * blocks.tokens, blocks.cols * blocks.width)
  y = call(
    functools.partial(
      _n_kernel, blocks=blocks, contract=(1, 1 if problem.transposed else 0)
    ),
    (steps, at_layer),
    (x, w, _lanes_of(keep_MG), jnp.zeros(shape, x.dtype)),
    grid=(count,),
    in_specs=[
      pl.BlockSpec(
        (blocks.tokens, problem.k), lambda i, s, at: (tile(s, i), 0)
      ),
      w_spec,
      pl.BlockSpec(
        (blocks.tokens, blocks.lanes),
        lambda i, s, at: (tile(s, i), blocks.chunk(col(s, i))),
      ),
      pl.BlockSpec(memory_space=pl.ANY),
    ],
    out_spec=pl.BlockSpec(
      (blocks.tokens, blocks.width), lambda i, s, at: (tile(s, i), col(s, i))
    ),
    out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
    aliases={5: 0},  # blocks that are not visited stay 0
    interpret=interpret,
    name="matmul_n_sparse",
  )
  return _finish(problem, y[: problem.tokens, : problem.n], undo)


def k_sparse(
  problem: Problem,
  tiles: Tiles,
  interpret: bool,
  x: Array,
  w: Array,
  plan: RoutePlan,
  layer: Array,
) -> Array:
  """matmul_k_sparse: [B, T, K] -> [B, T, N]."""
  blocks = checked(problem, tiles)
  x, keep_MG, undo = _in_order(problem, tiles, blocks, x, plan)
  steps, count = active_blocks(problem, tiles, keep_MG)
  (w,), at_layer = stacks(problem.layers, layer, (w,))
  tile = functools.partial(_tile, cols=blocks.cols)
  col = functools.partial(_col, cols=blocks.cols)
  out = min(tiles.out, problem.n)
  y = call(
    functools.partial(_k_kernel, blocks=blocks, k=problem.k),
    (steps, at_layer),
    (x, w, _lanes_of(keep_MG)),
    grid=(cdiv(problem.n, out), count),
    in_specs=[
      pl.BlockSpec(
        (blocks.tokens, blocks.width),
        lambda n, i, s, at: (tile(s, i), col(s, i)),
      ),
      pl.BlockSpec(
        (None, blocks.width, out), lambda n, i, s, at: (at[0], col(s, i), n)
      ),
      pl.BlockSpec(
        (blocks.tokens, blocks.lanes),
        lambda n, i, s, at: (tile(s, i), blocks.chunk(col(s, i))),
      ),
    ],
    out_spec=pl.BlockSpec(
      (blocks.tokens, out), lambda n, i, s, at: (tile(s, i), n)
    ),
    out_shape=jax.ShapeDtypeStruct((problem.tokens, problem.n), x.dtype),
    scratch=[pltpu.VMEM((blocks.tokens, out), jnp.float32)],
    interpret=interpret,
    name="matmul_k_sparse",
  )
  return _finish(problem, y, undo)


def gated_ffn(
  problem: Problem,
  tiles: Tiles,
  interpret: bool,
  x: Array,
  w_gate: Array,
  w_up: Array | None,
  w_down: Array,
  plan: RoutePlan,
  layer: Array,
) -> Array:
  """gated_ffn: [B, T, D] -> [B, T, D]; the hidden never leaves the chip.

  Without w_up, w_gate holds both, [..., 2, in, out].
  """
  blocks = checked(problem, tiles)
  x, keep_MG, undo = _in_order(problem, tiles, blocks, x, plan)
  steps, count = active_blocks(problem, tiles, keep_MG)
  tile = functools.partial(_tile, cols=blocks.cols)
  col = functools.partial(_col, cols=blocks.cols)
  halves = 2 if w_up is None else 1
  weights = [w for w in (w_gate, w_up, w_down) if w is not None]
  (*into_hidden, w_down), at_layer = stacks(problem.layers, layer, weights)
  if halves == 1:
    into_hidden = [w[:, None] for w in into_hidden]
  w_gate, w_up = into_hidden[0], into_hidden[-1]

  def into(half: int) -> pl.BlockSpec:
    if problem.transposed:
      return pl.BlockSpec(
        (None, None, blocks.width, problem.k),
        lambda i, s, at: (at[0], half, col(s, i), 0),
      )
    return pl.BlockSpec(
      (None, None, problem.k, blocks.width),
      lambda i, s, at: (at[0], half, 0, col(s, i)),
    )

  whole = pl.BlockSpec(
    (blocks.tokens, problem.k), lambda i, s, at: (tile(s, i), 0)
  )
  y = call(
    functools.partial(
      _ffn_kernel,
      blocks=blocks,
      contract=(1, 1 if problem.transposed else 0),
      n=problem.n,
    ),
    (steps, at_layer),
    (x, w_gate, w_up, w_down, _lanes_of(keep_MG)),
    grid=(count,),
    in_specs=[
      whole,
      into(0),
      into(halves - 1),
      pl.BlockSpec(
        (None, blocks.width, problem.k), lambda i, s, at: (at[0], col(s, i), 0)
      ),
      pl.BlockSpec(
        (blocks.tokens, blocks.lanes),
        lambda i, s, at: (tile(s, i), blocks.chunk(col(s, i))),
      ),
    ],
    out_spec=whole,
    out_shape=jax.ShapeDtypeStruct((problem.tokens, problem.k), x.dtype),
    scratch=[pltpu.VMEM((blocks.tokens, problem.k), jnp.float32)],
    interpret=interpret,
    name="gated_ffn",
  )
  return _finish(problem, y, undo)


def _tile(steps, at: Array, *, cols: int) -> Array:
  return jax.lax.div(steps[at], cols)


def _col(steps, at: Array, *, cols: int) -> Array:
  return jax.lax.rem(steps[at], cols)


N_SPARSE = Op(n_sparse, why_not, default, candidates)
K_SPARSE = Op(k_sparse, why_not, default, candidates)
GATED_FFN = Op(gated_ffn, why_not, default, candidates)
