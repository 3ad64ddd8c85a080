"""What one would build from libraries: gather, grouped matmul, scatter back.

Each group's kept rows are gathered, multiplied by the group's weights, and
scattered. Under jit the number of rows must be known beforehand, so there is
room for a little more than the expected density (`ROOM`), and a mask that does
not fit runs dense: right at any mask, fast at the expected ones. Three ways:

* `ragged_dot`: all groups' rows in one list behind `jax.lax.ragged_dot`. Off
  TPU, XLA turns that into a dense product of every row with every group: G
  times the arithmetic and G copies of the rows.
* `batched`: as many rows for every group, and one batched matmul. Masks whose
  groups are kept unequally often do not fit.
* `megablox`: the list, behind jax's grouped matmul for TPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import dense, device
from pallas_kernels.plan import RoutePlan
from pallas_kernels.problem import Op, Problem

# Kept pairs beyond the expected density that there is room for: a share of all
# pairs. Random masks need a hundredth of it, learned ones differ by text.
ROOM = 1 / 16
MEMORY_BYTES = 16 * 2**30
# Off TPU `ragged_dot` does that many times the arithmetic; not worth a look.
_MOST_COPIES = 16
_ROWS_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Which grouped matmul.

  Attributes:
    how: `ragged_dot`, `batched` or `megablox`; see the module and GROUPED.
  """

  how: str = "batched"


def _padded(rows: float) -> int:
  return int(-(-rows // _ROWS_MULTIPLE) * _ROWS_MULTIPLE)


def capacity(problem: Problem, how: str) -> int:
  """Rows that there is room for: of each group if `batched`, else in all."""
  share = min(1.0, problem.density + ROOM)
  if how != "batched":
    return _padded(problem.tokens * problem.groups * share)
  # The fullest of G groups lies some deviations above the mean.
  deviation = np.sqrt(problem.tokens * problem.density * (1 - problem.density))
  rows = problem.tokens * share + 4 * deviation
  return int(min(problem.tokens, _padded(rows)))


def memory_bytes(problem: Problem, how: str) -> int:
  """Of the gathered rows and their products."""
  rows = capacity(problem, how) * (problem.groups if how == "batched" else 1)
  size = np.dtype("float32" if problem.dtype == "float32" else "float16")
  wide = problem.n if problem.op == "matmul_k_sparse" else problem.k
  copies = problem.groups if how == "ragged_dot" else 0
  if device.platform() == "tpu":
    copies = 0
  c = problem.group_size
  inputs = {"matmul_n_sparse": wide, "matmul_k_sparse": c}.get(
    problem.op, max(wide, c)
  )
  products = rows * (wide + c) * size.itemsize
  if problem.op != "matmul_n_sparse":
    products += rows * wide * 4  # summed in float32
  return products + copies * rows * inputs * size.itemsize


def _why_not(problem: Problem) -> str | None:
  if _ways(problem):
    return None
  need = memory_bytes(problem, "batched")
  return (
    f"gathered rows and products take {need / 2**30:.0f} GiB, more than "
    f"{MEMORY_BYTES / 2**30:.0f}"
  )


def _ways(problem: Problem) -> tuple[str, ...]:
  ways = ["batched"]
  if device.platform() == "tpu":
    ways = ["ragged_dot", "megablox", "batched"]
  elif problem.groups <= _MOST_COPIES:
    ways.append("ragged_dot")
  return tuple(w for w in ways if memory_bytes(problem, w) <= MEMORY_BYTES)


# --- rows --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
  """Kept (token, group) pairs in the order of groups, padded.

  Attributes:
    token, group: int32 [R] or, batched, [G, R]; padding has token M, which a
      scatter drops.
    sizes: int32 [G], kept rows of every group.
  """

  token: Array
  group: Array
  sizes: Array


def _list(plan: RoutePlan, rows: int) -> Rows:
  sizes = plan.group_start_GB[:, -1]
  ends = jnp.cumsum(sizes)
  at = jnp.arange(rows, dtype=jnp.int32)
  group = jnp.searchsorted(ends, at, side="right").astype(jnp.int32)
  real = group < plan.groups
  group = jnp.minimum(group, plan.groups - 1)
  inside = at - (ends - sizes)[group]
  inside = jnp.clip(inside, 0, plan.tokens - 1)
  token = plan.group_order_GM[group, inside]
  return Rows(jnp.where(real, token, plan.tokens), group, sizes)


def _batch(plan: RoutePlan, rows: int) -> Rows:
  sizes = plan.group_start_GB[:, -1]
  at = jnp.arange(rows, dtype=jnp.int32)[None]
  token = jnp.where(
    at < sizes[:, None], plan.group_order_GM[:, :rows], plan.tokens
  )
  group = jnp.arange(plan.groups, dtype=jnp.int32)[:, None]
  return Rows(token, jnp.broadcast_to(group, token.shape), sizes)


def _precision(rows: Array):
  return jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None


def _batched(rows: Array, w_GKN: Array, sizes: Array, out) -> Array:
  del sizes  # what lies behind a group's rows is 0 and scattered nowhere
  return jnp.matmul(
    rows, w_GKN, precision=_precision(rows), preferred_element_type=out
  )


def _ragged_dot(rows: Array, w_GKN: Array, sizes: Array, out) -> Array:
  return jax.lax.ragged_dot(
    rows, w_GKN, sizes, precision=_precision(rows), preferred_element_type=out
  )


def _megablox(rows: Array, w_GKN: Array, sizes: Array, out) -> Array:
  from jax.experimental.pallas.ops.tpu import megablox  # TPU only

  return megablox.gmm(rows, w_GKN, sizes, preferred_element_type=out)


# how -> f(rows, weights [G, K, N], rows of each group, dtype of the result).
# Rows are [R, K], all groups behind each other, or [G, R, K] for `batched`.
# A benchmark may add another library's.
GROUPED = {
  "batched": _batched,
  "ragged_dot": _ragged_dot,
  "megablox": _megablox,
}


def _grouped(rows: Array, w_GKN: Array, sizes: Array, how: str, out) -> Array:
  return GROUPED[how](rows, w_GKN, sizes, out)


def _taken(x_MK: Array, token: Array) -> Array:
  """x's rows, 0 for padding (whose product must be finite)."""
  return x_MK.at[token].get(mode="fill", fill_value=0)


def _run_n(problem, how, rows: Rows, x_MK, w_GKC) -> Array:
  """[M, G, C], zeros where nothing is kept."""
  y = _grouped(_taken(x_MK, rows.token), w_GKC, rows.sizes, how, x_MK.dtype)
  out = jnp.zeros((problem.tokens, problem.groups, y.shape[-1]), y.dtype)
  return out.at[rows.token, rows.group].set(y, mode="drop", unique_indices=True)


def _run_k(how, rows: Rows, x_rows, w_GCN, tokens: int) -> Array:
  """[M, N]: the sum over groups, in float32."""
  y = _grouped(x_rows, w_GCN, rows.sizes, how, jnp.float32)
  out = jnp.zeros((tokens, w_GCN.shape[-1]), jnp.float32)
  return out.at[rows.token].add(y, mode="drop").astype(x_rows.dtype)


def _selected(problem: Problem, w: Array, layer: Array) -> Array:
  if problem.layers:
    return jax.lax.dynamic_index_in_dim(w, layer, keepdims=False)
  return w


def _pair(problem: Problem, gate: Array, up: Array | None, layer: Array):
  """Gate and up of one layer, from one array or two."""
  gate = _selected(problem, gate, layer)
  return tuple(gate) if up is None else (gate, _selected(problem, up, layer))


def _by_group(problem: Problem, w: Array, transposed: bool) -> Array:
  """[G, K, C] of a weight whose output channels are grouped."""
  if transposed:
    return w.reshape(problem.groups, -1, w.shape[-1]).swapaxes(1, 2)
  return w.reshape(w.shape[0], problem.groups, -1).swapaxes(0, 1)


def _within(problem: Problem, tiles: Tiles, plan: RoutePlan, sparse, whole):
  """sparse(rows) if the mask fits the room, else whole()."""
  room = capacity(problem, tiles.how)
  sizes = plan.group_start_GB[:, -1]
  if tiles.how == "batched":
    make, full, fits = _batch, room >= problem.tokens, sizes.max() <= room
  else:
    full = room >= problem.tokens * problem.groups
    make, fits = _list, sizes.sum() <= room
  if full:
    return sparse(make(plan, room))
  return jax.lax.cond(fits, lambda: sparse(make(plan, room)), whole)


def _n_sparse(problem, tiles, interpret, x, w, plan, layer) -> Array:
  x_MK = x.reshape(problem.tokens, -1)

  def sparse(rows):
    w_GKC = _by_group(problem, _selected(problem, w, layer), problem.transposed)
    return _run_n(problem, tiles.how, rows, x_MK, w_GKC).reshape(
      *x.shape[:2], problem.n
    )

  def whole():
    op = dense.OPS["matmul_n_sparse"]
    return op.run(problem, None, interpret, x, w, plan, layer)

  return _within(problem, tiles, plan, sparse, whole)


def _k_sparse(problem, tiles, interpret, x, w, plan, layer) -> Array:
  x_MGC = x.reshape(problem.tokens, problem.groups, -1)

  def sparse(rows):
    w_GCN = _down_weight(problem, w, layer)
    x_rows = x_MGC.at[rows.token, rows.group].get(mode="fill", fill_value=0)
    out = _run_k(tiles.how, rows, x_rows, w_GCN, problem.tokens)
    return out.reshape(*x.shape[:2], -1)

  def whole():
    op = dense.OPS["matmul_k_sparse"]
    return op.run(problem, None, interpret, x, w, plan, layer)

  return _within(problem, tiles, plan, sparse, whole)


def _down_weight(problem, w, layer) -> Array:
  w = _selected(problem, w, layer)
  return w.reshape(problem.groups, -1, w.shape[-1])


def _gated_ffn(problem, tiles, interpret, x, gate, up, down, plan, layer):
  x_MD = x.reshape(problem.tokens, -1)

  def sparse(rows):
    # The rows stay in the order of groups between the products: no scatter.
    x_rows = _taken(x_MD, rows.token)
    a, b = (
      _grouped(
        x_rows,
        _by_group(problem, w, problem.transposed),
        rows.sizes,
        tiles.how,
        jnp.float32,
      )
      for w in _pair(problem, gate, up, layer)
    )
    hidden = (jax.nn.silu(a) * b).astype(x.dtype)
    w_GCD = _down_weight(problem, down, layer)
    out = _run_k(tiles.how, rows, hidden, w_GCD, problem.tokens)
    return out.reshape(x.shape)

  def whole():
    op = dense.OPS["gated_ffn"]
    tiles = op.default(problem)
    return op.run(problem, tiles, interpret, x, gate, up, down, plan, layer)

  return _within(problem, tiles, plan, sparse, whole)


def _op(run) -> Op:
  def candidates(problem: Problem) -> tuple[Tiles, ...]:
    return tuple(Tiles(how=how) for how in _ways(problem))

  return Op(
    run=run,
    why_not=_why_not,
    default=lambda problem: candidates(problem)[0],
    candidates=candidates,
  )


OPS = {
  "matmul_n_sparse": _op(_n_sparse),
  "matmul_k_sparse": _op(_k_sparse),
  "gated_ffn": _op(_gated_ffn),
}
