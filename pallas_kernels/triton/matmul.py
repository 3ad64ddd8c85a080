"""Width-pruned matmuls for many tokens (prefill) in Pallas Triton.

N-sparse: for every group the plan lists the tokens that keep it first. A
program multiplies one tile of that list, its rows of x gathered by index, with
one tile of the group's weights, and writes the rows back to their places; tiles
of tokens that drop the group only write zeros.

K-sparse: sorting tokens per group would make every group write its whole
output. Tokens are sorted instead by which of `span` neighbouring groups they
keep; a tile of sorted tokens runs the groups in the union of its codes and
writes once per span. The spans' partial outputs are summed at the end.

Letters: M tokens, K input and N output channels, G groups of C channels, S
spans.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.plan import TILE, RoutePlan
from pallas_kernels.problem import Problem
from pallas_kernels.triton import common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """How a matmul is cut up.

  Attributes:
    block_m: tokens of a program.
    block_n: output channels of a program.
    block_k: input channels of a step.
    num_warps, num_stages: Triton's.
    row_chunk: row tiles that are walked through all columns before the next
      ones, so that their rows of x stay in the cache.
  """

  block_m: int = 128
  block_n: int = 128
  block_k: int = 64
  num_warps: int = 8
  num_stages: int = 3
  row_chunk: int = 16

  def __post_init__(self):
    for name in ("block_m", "block_n", "block_k"):
      size = getattr(self, name)
      if size < 16 or size & (size - 1):
        raise ValueError(f"{name}={size} must be a power of two from 16.")
    if self.num_stages < 1 or self.row_chunk < 1:
      raise ValueError(
        f"num_stages={self.num_stages} and row_chunk={self.row_chunk} must be "
        "at least 1."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedTiles:
  """Tiles of the two halves of a gated FFN.

  Attributes:
    up: gate and up; block_n counts channels of each.
    down: the K-sparse half, or None for a dense matmul over zeroed channels.
  """

  up: Tiles
  down: Tiles | None


def _place(pid, rows: int, cols: int, chunk: int):
  """(row tile, column tile) of a program; see Tiles.row_chunk."""
  chunk = min(chunk, rows)
  area = chunk * cols
  first = pid // area * chunk
  size = jnp.minimum(rows - first, chunk)
  rest = pid % area
  return first + rest % size, rest // size


def _load_rows(x_ref, rows, start, block_k: int):
  """x[rows, start : start + block_k]; 0 past the last channel."""
  cols = start + jnp.arange(block_k)
  at = x_ref.at[rows[:, None], cols[None, :]]
  if x_ref.shape[1] % block_k == 0:
    return plgpu.load(at)
  inside = (cols < x_ref.shape[1])[None, :]
  mask = jnp.broadcast_to(inside, (rows.shape[0], block_k))
  return plgpu.load(at, mask=mask, other=0.0)


def _load_weight(w_ref, lead, k0, ns, tiles, k_end, inside_n, transposed):
  """w[*lead] at channels k0 + [block_k] and ns, [block_k, len(ns)].

  k_end: inputs from there on count as 0; None: all are there. inside_n: which
  of ns are there; None: all. lead: indices of the axes before the matrix, one
  of which may be an array like ns.
  """
  ks = k0 + jnp.arange(tiles.block_k)
  mask = None
  if k_end is not None:
    mask = (ks < k_end)[:, None]
  if inside_n is not None:
    mask = inside_n[None, :] if mask is None else mask & inside_n[None, :]
  if mask is not None:
    mask = jnp.broadcast_to(mask, (tiles.block_k, ns.shape[0]))
  if transposed:
    lead = [a[:, None] if a.ndim else a for a in lead]
    at = w_ref.at[*lead, ns[:, None], ks[None, :]]
    mask = None if mask is None else mask.T
  else:
    lead = [a[None, :] if a.ndim else a for a in lead]
    at = w_ref.at[*lead, ks[:, None], ns[None, :]]
  if mask is None:
    tile = plgpu.load(at)
  else:
    tile = plgpu.load(at, mask=mask, other=0.0)
  return tile.T if transposed else tile


# --- N-sparse, and gate and up -----------------------------------------------


def _silu_product(gate, up):
  """silu(gate) * up."""
  return gate * (1 / (1 + jnp.exp(-gate))) * up


def _n_sparse_kernel(
  x_ref, *refs, tiles, groups, row_tiles, transposed, fill, joined
):
  """One tile of one group; with two weights their gated product.

  `joined`: gate and up are one array [L, 2, ...], so that one wide dot does for
  both (10% faster than two: the tile of x is read from shared memory once).
  """
  *w_refs, order_ref, start_ref, layer_ref, out_ref = refs
  tokens, k_width = x_ref.shape
  n_width = out_ref.shape[1]
  channels = n_width // groups
  parts = common.cdiv(channels, tiles.block_n)
  row, col = _place(
    pl.program_id(0), row_tiles, groups * parts, tiles.row_chunk
  )
  group, part = col // parts, col % parts
  count = start_ref[group, start_ref.shape[1] - 1]
  layer = layer_ref[0]
  at = row * tiles.block_m + jnp.arange(tiles.block_m)
  n0 = group * channels + part * tiles.block_n
  ns = n0 + jnp.arange(tiles.block_n)
  ragged = channels % tiles.block_n != 0
  n_end = (group + 1) * channels

  def rows_at(limit):
    # Past the limit a row that is no row: interpret mode writes a masked
    # store's old value back, which must not hit a row somebody wrote.
    return plgpu.load(order_ref.at[group, at], mask=at < limit, other=tokens)

  def write(rows, value, limit):
    mask = (at < limit)[:, None]
    if ragged:
      mask = mask & (ns < n_end)[None, :]
    plgpu.store(
      out_ref.at[rows[:, None], ns[None, :]],
      value.astype(out_ref.dtype),
      mask=jnp.broadcast_to(mask, value.shape),
    )

  @pl.when(row * tiles.block_m < count)
  def _():
    limit = tokens if fill else count
    rows = rows_at(limit)
    readable = jnp.minimum(rows, tokens - 1)
    k_end = k_width if k_width % tiles.block_k else None
    columns, lead = ns, [layer]
    if joined:
      wide = jnp.arange(2 * tiles.block_n)
      columns, lead = n0 + wide % tiles.block_n, [layer, wide // tiles.block_n]
    inside = (columns < n_end) if ragged else None

    def step(i, accs):
      k0 = i * tiles.block_k
      x = _load_rows(x_ref, readable, k0, tiles.block_k)
      return tuple(
        acc
        + common.dot(
          x,
          _load_weight(w, lead, k0, columns, tiles, k_end, inside, transposed),
        )
        for acc, w in zip(accs, w_refs, strict=True)
      )

    zero = jnp.zeros((tiles.block_m, columns.shape[0]), jnp.float32)
    steps = common.cdiv(k_width, tiles.block_k)
    accs = jax.lax.fori_loop(0, steps, step, (zero,) * len(w_refs))
    if joined:
      # Both halves lie in the same thread: the sums move nothing.
      both = accs[0].reshape(tiles.block_m, 2, tiles.block_n)
      is_gate = jax.lax.broadcasted_iota(jnp.int32, both.shape, 1) == 0
      gate = jnp.sum(jnp.where(is_gate, both, 0.0), axis=1)
      up = jnp.sum(jnp.where(is_gate, 0.0, both), axis=1)
      value = _silu_product(gate, up)
    elif len(accs) == 2:
      value = _silu_product(*accs)
    else:
      (value,) = accs
    if fill:
      value = jnp.where((at < count)[:, None], value, 0.0)
    write(rows, value, limit)

  if fill:

    @pl.when(row * tiles.block_m >= count)
    def _():
      zero = jnp.zeros((tiles.block_m, tiles.block_n), out_ref.dtype)
      write(rows_at(tokens), zero, tokens)


def _rows_out(
  problem: Problem, tiles: Tiles, interpret, x, weights, plan, layer, *, fill
):
  """[M, N] of the N-sparse kernel; unwritten where dropped unless `fill`."""
  tokens = x.shape[0]
  row_tiles = common.cdiv(tokens, tiles.block_m)
  channels = problem.n // problem.groups
  cols = problem.groups * common.cdiv(channels, tiles.block_n)
  kernel = functools.partial(
    _n_sparse_kernel,
    tiles=tiles,
    groups=problem.groups,
    row_tiles=row_tiles,
    transposed=problem.transposed,
    fill=fill,
    joined=problem.joined,
  )
  return common.call(
    kernel,
    jax.ShapeDtypeStruct((tokens, problem.n), x.dtype),
    (row_tiles * cols,),
    x,
    *weights,
    plan.group_order_GM,
    plan.group_start_GB,
    layer[None],
    num_warps=tiles.num_warps,
    num_stages=tiles.num_stages,
    interpret=interpret,
    name="wide_gate_up" if problem.op == "gated_ffn" else "wide_n_sparse",
  )


def n_sparse(
  problem: Problem, tiles: Tiles, interpret: bool, x, w, plan, layer
) -> Array:
  """matmul_n_sparse; see pallas_kernels.ops."""
  y = _rows_out(
    problem,
    tiles,
    interpret,
    x.reshape(problem.tokens, -1),
    (_stack(problem, w),),
    plan,
    layer,
    fill=True,
  )
  return y.reshape(*x.shape[:2], -1)


# --- K-sparse ----------------------------------------------------------------


def _k_sparse_kernel(
  x_ref,
  w_ref,
  order_ref,
  code_ref,
  union_ref,
  layer_ref,
  out_ref,
  *,
  tiles,
  groups,
  span,
):
  """One tile of tokens of one span: the groups in the union of their codes."""
  tokens, k_width = x_ref.shape
  n_width = out_ref.shape[2]
  channels = k_width // groups
  row_tiles = common.cdiv(tokens, tiles.block_m)
  cols = common.cdiv(n_width, tiles.block_n)
  pid = pl.program_id(0)
  s = pid // (row_tiles * cols)
  row, col = _place(pid % (row_tiles * cols), row_tiles, cols, tiles.row_chunk)
  layer = layer_ref[0]
  at = row * tiles.block_m + jnp.arange(tiles.block_m)
  inside = at < tokens
  rows = plgpu.load(order_ref.at[s, at], mask=inside, other=tokens)
  readable = jnp.minimum(rows, tokens - 1)
  codes = plgpu.load(code_ref.at[s, at], mask=inside, other=0)
  if tiles.block_m % TILE:
    union = jnp.int32(0)
    for j in range(span):
      union = union | (jnp.max((codes >> j) & 1) << j)
  else:
    # Known beforehand: a reduction here costs 5% (H200, T 4096, C 1024).
    each = tiles.block_m // TILE
    union = union_ref[s, row * each]
    for u in range(1, each):
      at_u = jnp.minimum(row * each + u, union_ref.shape[1] - 1)
      union = union | union_ref[s, at_u]
  count = jax.lax.population_count(union)
  ns = col * tiles.block_n + jnp.arange(tiles.block_n)
  inside_n = (ns < n_width) if n_width % tiles.block_n else None
  pieces = common.cdiv(channels, tiles.block_k)
  ragged = channels % tiles.block_k != 0

  def step(_, carry):
    acc, left, piece = carry
    # The lowest group that is left, from its bit.
    j = jax.lax.population_count((left & -left) - 1)
    group = s * span + j
    k0 = group * channels + piece * tiles.block_k
    k_end = (group + 1) * channels
    keep = ((codes >> j) & 1) != 0
    mask = keep[:, None]
    ks = k0 + jnp.arange(tiles.block_k)
    if ragged:
      mask = mask & (ks < k_end)[None, :]
    x = plgpu.load(
      x_ref.at[readable[:, None], ks[None, :]],
      mask=jnp.broadcast_to(mask, (tiles.block_m, tiles.block_k)),
      other=0.0,
    )
    w = _load_weight(
      w_ref, [layer], k0, ns, tiles, k_end if ragged else None, inside_n, False
    )
    acc = acc + common.dot(x, w)
    done = piece + 1 == pieces
    left = jnp.where(done, left & (left - 1), left)
    return acc, left, jnp.where(done, 0, piece + 1)

  zero = jnp.zeros((tiles.block_m, tiles.block_n), jnp.float32)
  acc, _, _ = jax.lax.fori_loop(
    0, count * pieces, step, (zero, union, jnp.int32(0))
  )
  mask = inside[:, None]
  if inside_n is not None:
    mask = mask & inside_n[None, :]
  plgpu.store(
    out_ref.at[s, rows[:, None], ns[None, :]],
    acc.astype(out_ref.dtype),
    mask=jnp.broadcast_to(mask, acc.shape),
  )


def _partial_dtype(dtype, spans: int):
  """Of the partial outputs.

  bfloat16 partials are as large as 1 / sqrt(S) of the sum, so that rounding S
  of them costs what rounding the sum does once more; float16 could overflow.
  """
  return dtype if spans == 1 or dtype == jnp.bfloat16 else jnp.float32


def _contract(problem: Problem, tiles, interpret, x, w, plan, layer) -> Array:
  """[M, N] of the K-sparse kernel and the sum over spans."""
  tokens, n_width = x.shape[0], w.shape[2]
  partial = jax.ShapeDtypeStruct(
    (plan.spans, tokens, n_width), _partial_dtype(x.dtype, plan.spans)
  )
  grid = (
    plan.spans
    * common.cdiv(tokens, tiles.block_m)
    * common.cdiv(n_width, tiles.block_n)
  )
  kernel = functools.partial(
    _k_sparse_kernel, tiles=tiles, groups=plan.groups, span=plan.span
  )
  parts = common.call(
    kernel,
    partial,
    (grid,),
    x,
    w,
    plan.class_order_SM,
    plan.class_code_SM,
    plan.class_union_SU,
    layer[None],
    num_warps=tiles.num_warps,
    num_stages=tiles.num_stages,
    interpret=interpret,
    name="wide_k_sparse",
  )
  if plan.spans == 1:
    return parts[0]
  return _total(parts, x.dtype, interpret)


def _total_kernel(parts_ref, out_ref, *, block: int):
  """Sums the spans of `block` outputs."""
  spans, size = parts_ref.shape
  at = pl.program_id(0) * block + jnp.arange(block)
  inside = at < size
  total = jnp.zeros((block,), jnp.float32)
  for s in range(spans):
    part = plgpu.load(parts_ref.at[s, at], mask=inside, other=0.0)
    total = total + part.astype(jnp.float32)
  plgpu.store(out_ref.at[at], total.astype(out_ref.dtype), mask=inside)


def _total(parts: Array, dtype, interpret: bool, block: int = 2048) -> Array:
  """[S, M, N] summed over S in float32; XLA's sum takes 13 to 23% longer."""
  spans, tokens, width = parts.shape
  total = common.call(
    functools.partial(_total_kernel, block=block),
    jax.ShapeDtypeStruct((tokens * width,), dtype),
    (common.cdiv(tokens * width, block),),
    parts.reshape(spans, -1),
    num_warps=4,
    num_stages=1,
    interpret=interpret,
    name="wide_total",
  )
  return total.reshape(tokens, width)


def k_sparse(
  problem: Problem, tiles: Tiles, interpret: bool, x, w, plan, layer
) -> Array:
  """matmul_k_sparse; see pallas_kernels.ops."""
  x_MK = x.reshape(problem.tokens, -1)
  w = _stack(problem, w)
  y = _contract(problem, tiles, interpret, x_MK, w, plan, layer)
  return y.reshape(*x.shape[:2], -1)


# --- gated FFN ---------------------------------------------------------------


def gated_ffn(
  problem: Problem,
  tiles: GatedTiles,
  interpret: bool,
  x,
  w_gate,
  w_up,
  w_down,
  plan: RoutePlan,
  layer,
) -> Array:
  """gated_ffn; see pallas_kernels.ops.

  The K-sparse half never reads dropped channels of the hidden, so the first
  half leaves them unwritten; a dense second half needs them 0.
  """
  weights = [_stack(problem, w) for w in (w_gate, w_up) if w is not None]
  w_down = _stack(problem, w_down)
  hidden = _rows_out(
    problem,
    tiles.up,
    interpret,
    x.reshape(problem.tokens, -1),
    weights,
    plan,
    layer,
    fill=tiles.down is None,
  )
  if tiles.down is None:
    w = jax.lax.dynamic_index_in_dim(w_down, layer, keepdims=False)
    y = common.dot(hidden, w).astype(x.dtype)
  else:
    y = _contract(problem, tiles.down, interpret, hidden, w_down, plan, layer)
  return y.reshape(x.shape)


def _stack(problem: Problem, w: Array) -> Array:
  """Weights with a layer axis, whether they came with one or not."""
  return w if problem.layers else w[None]


# --- what fits, and tiles ----------------------------------------------------


def why_not(problem: Problem) -> str | None:
  """Always runs: sizes that fill no tile are masked."""
  return None


def _shrink(problem: Problem, tiles: Tiles) -> Tiles:
  """Tiles no larger than the problem; float32 ones, without wgmma, smaller."""
  rows = max(16, min(tiles.block_m, common.next_power(problem.tokens)))
  if problem.dtype != "float32":
    return dataclasses.replace(tiles, block_m=rows)
  return dataclasses.replace(
    tiles,
    block_m=min(rows, 64),
    block_n=min(tiles.block_n, 128),
    block_k=max(16, tiles.block_k // 2),
  )


# (block_m, block_n, block_k, num_warps, num_stages, row_chunk), the likeliest
# first. Two programs of 128 x 128 and 3 stages share one of Hopper's
# multiprocessors.
_N_CUTS = (
  (128, 256, 64, 8, 3, 32),
  (128, 256, 64, 8, 4, 16),
  (128, 256, 64, 8, 4, 32),
  (128, 256, 64, 8, 3, 16),
  (128, 128, 64, 8, 3, 8),
  (128, 128, 64, 8, 3, 16),
  (128, 128, 64, 8, 4, 16),
  (64, 256, 64, 8, 4, 16),
  (128, 64, 64, 4, 4, 16),
  (64, 128, 64, 4, 4, 16),
  (64, 64, 64, 4, 4, 16),
  (128, 32, 64, 4, 4, 16),
  (64, 32, 64, 4, 4, 16),
)
_K_CUTS = (
  (128, 256, 64, 8, 3, 16),
  (128, 256, 64, 8, 4, 16),
  (128, 256, 64, 8, 3, 32),
  (128, 128, 64, 8, 3, 16),
  (64, 256, 64, 8, 4, 16),
  (64, 128, 64, 4, 4, 16),
)


def _tiles(cut: tuple[int, ...]) -> Tiles:
  names = [field.name for field in dataclasses.fields(Tiles)]
  return Tiles(**dict(zip(names, cut, strict=True)))


def _n_candidates(problem: Problem) -> list[Tiles]:
  channels = problem.n // problem.groups
  most = 128 if problem.op == "gated_ffn" else 256
  wide = min(most, max(32, common.next_power(channels)))
  found = [_shrink(problem, _tiles(cut)) for cut in _N_CUTS if cut[1] <= wide]
  if problem.tokens > 1024:  # a tile as wide as the group, or half of it
    found = [t for t in found if t.block_n * 2 >= wide]
  return list(dict.fromkeys(found))


def n_default(problem: Problem) -> Tiles:
  """What measured best at Llama-3.1-8B shapes; see BUILD_NOTES."""
  return _n_candidates(problem)[0]


def _k_candidates(problem: Problem) -> list[Tiles]:
  width = problem.k if problem.op == "matmul_k_sparse" else problem.n
  depth = max(16, min(64, common.next_power(width // problem.groups)))
  found = []
  for cut in _K_CUTS:
    tiles = dataclasses.replace(_tiles(cut), block_k=depth)
    found.append(_shrink(problem, tiles))
  return list(dict.fromkeys(found))


def k_default(problem: Problem) -> Tiles:
  """What measured best at Llama-3.1-8B shapes; see BUILD_NOTES."""
  return _k_candidates(problem)[0]


def gated_default(problem: Problem) -> GatedTiles:
  """Both halves by default tiles."""
  return GatedTiles(up=n_default(problem), down=k_default(problem))


def candidates(problem: Problem) -> list:
  """Tiles worth measuring, for any of the three ops."""
  if problem.op == "matmul_n_sparse":
    return _n_candidates(problem)
  if problem.op == "matmul_k_sparse":
    return _k_candidates(problem)
  down = k_default(problem)
  pairs = [(up, down) for up in _n_candidates(problem)]
  pairs += [(pairs[0][0], d) for d in (*_k_candidates(problem)[1:3], None)]
  pairs += [(up, None) for up, _ in pairs[1:4]]
  return [GatedTiles(up=up, down=d) for up, d in dict.fromkeys(pairs)]


def default(problem: Problem) -> Tiles | GatedTiles:
  """Tiles where nothing was measured."""
  makers = {
    "matmul_n_sparse": n_default,
    "matmul_k_sparse": k_default,
    "gated_ffn": gated_default,
  }
  return makers[problem.op](problem)
