"""Matmuls for a few tokens (1 to 64): read the weights of active groups only.

With so few tokens the time is that of reading weights, so a group that no
token keeps is never read, and a token that drops a group others keep gets 0
from it. All that the kernels need to know is the mask: which groups are active
each program works out itself, and no plan is made. A token's result never
depends on its neighbours, not in the last bit.

Two schemes, measured against each other by tune:

* `dot`: the weight tile is the left operand of a tensor core's dot, tokens
  padded to 8, 16, 32 or 64 the right one: the compiler then prefetches weight
  tiles by asynchronous copies, `stages` deep.
* `vector`: each weight is multiplied and added by hand, tiles go straight to
  registers and many small programs a multiprocessor hide the latency; for up
  to 4 tokens on the N-sparse side and for one on the K-sparse side, where tune
  measures it in float32 only.

With a folded router the N-sparse side can make the decisions as well: every
program of a group computes the group's logits, the same bits each time, and
goes on or ends; one of them writes the decisions for the K-sparse side.

Letters: M tokens, K input channels, N output channels, G groups, C channels a
group. A group's *rank* is its place among the active ones.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.plan import RoutePlan
from pallas_kernels.problem import Problem
from pallas_kernels.triton import decode_route
from pallas_kernels.triton.common import call, cdiv, next_power
from pallas_kernels.triton.decode_cut import Cut
from pallas_kernels.triton.decode_k import k_dot, k_kernel, k_vector
from pallas_kernels.triton.decode_n import n_dot, n_kernel, n_vector
from pallas_kernels.triton.decode_tiles import (
  MAX_FUSED_TOKENS,
  MAX_VECTOR_TOKENS,
  DecodeTiles,
  candidates,
  default,
  why_not,
)

__all__ = [
  "DecodeTiles",
  "candidates",
  "default",
  "gated_ffn",
  "k_sparse",
  "n_sparse",
  "routed_ffn",
  "routed_n_sparse",
  "why_not",
]


def n_sparse(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  w: Array,
  plan: RoutePlan,
  layer: Array,
) -> Array:
  """x [B, T, K] @ w for kept groups of output channels; [B, T, N].

  w is [K, N], or [N, K] if problem.transposed, with a leading axis of layers
  if problem.layers.
  """
  out = _n_side(problem, tiles, interpret, x, (w,), (plan.keep_MG,), layer)
  return out[0].reshape(*x.shape[:2], problem.n)


def k_sparse(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  w: Array,
  plan: RoutePlan,
  layer: Array,
) -> Array:
  """x [B, T, K] @ w over the kept groups of input channels; [B, T, N].

  w is [K, N], with a leading axis of layers if problem.layers. What x holds in
  dropped groups is not read.
  """
  x_MK = x.reshape(problem.tokens, problem.k)
  y = _k_side(
    problem, tiles, interpret, x_MK, w, plan.keep_MG, layer, problem.n
  )
  return y.reshape(*x.shape[:2], problem.n)


def gated_ffn(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  w_gate: Array,
  w_up: Array | None,
  w_down: Array,
  plan: RoutePlan,
  layer: Array,
) -> Array:
  """SwiGLU FFN of kept groups, [B, T, D] -> [B, T, D], in two kernels.

  What the first leaves of inactive groups in the hidden is not read.
  """
  weights = [w for w in (w_gate, w_up) if w is not None]
  return _ffn(
    problem, tiles, interpret, x, weights, w_down, (plan.keep_MG,), layer
  )[0]


def routed_ffn(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  w_gate: Array,
  w_up: Array | None,
  w_down: Array,
  r: Array,
  v: Array,
  c: Array,
  threshold: Array,
  layer: Array,
) -> tuple[Array, Array]:
  """(gated_ffn of the groups with r . v + c > threshold, bool [B, T, G]).

  See ops and decode_route.route for the arguments.
  """
  weights = [w for w in (w_gate, w_up) if w is not None]
  router = _router(problem, tiles, interpret, r, v, c, threshold, layer)
  y, keep_MG = _ffn(
    problem, tiles, interpret, x, weights, w_down, router, layer
  )
  return y, keep_MG.reshape(*x.shape[:2], problem.groups)


def routed_n_sparse(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  w: Array,
  r: Array,
  v: Array,
  c: Array,
  threshold: Array,
  layer: Array,
) -> tuple[Array, Array]:
  """(n_sparse of the groups with r . v + c > threshold, bool [B, T, G])."""
  router = _router(problem, tiles, interpret, r, v, c, threshold, layer)
  y, *made = _n_side(problem, tiles, interpret, x, (w,), router, layer)
  keep_MG = made[0] if len(router) > 1 else router[0]
  shape = x.shape[:2]
  return y.reshape(*shape, -1), keep_MG.reshape(*shape, problem.groups)


# --- the two sides -----------------------------------------------------------


def _router(
  problem, tiles, interpret, r, v, c, threshold, layer
) -> tuple[Array, ...]:
  """What _n_side takes: (keep_MG,), or the router's arrays if it is fused."""
  if not tiles.n_fused:
    how = decode_route.default(problem)
    route = functools.partial(decode_route.route, problem, how, interpret)
    return (route(r, v, c, threshold, layer),)
  if problem.tokens > MAX_FUSED_TOKENS:
    raise ValueError(
      f"a fused router takes up to {MAX_FUSED_TOKENS} tokens, not "
      f"{problem.tokens}."
    )
  if not problem.layers:
    v, c = v[None], c[None]
  threshold = decode_route.two_axes(threshold, bool(problem.layers))
  return r.reshape(problem.tokens, -1), v, c, threshold


def _ffn(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  weights: Sequence[Array],
  w_down: Array,
  router: tuple[Array, ...],
  layer: Array,
) -> tuple[Array, Array]:
  """(y [B, T, D], keep_MG)."""
  hidden, *made = _n_side(problem, tiles, interpret, x, weights, router, layer)
  keep_MG = made[0] if len(router) > 1 else router[0]
  y = _k_side(
    problem,
    tiles,
    interpret,
    hidden,
    w_down,
    keep_MG,
    layer,
    problem.k,
    hidden=True,
  )
  return y.reshape(x.shape), keep_MG


def _n_side(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  weights: Sequence[Array],
  router: tuple[Array, ...],
  layer: Array,
) -> list[Array]:
  """[y [M, N], keep_MG if fused].

  `router` is (keep_MG,), or the arrays of a router to fuse; see _router.
  """
  scheme = tiles.n_scheme
  least = 16 if scheme == "dot" else 1
  cut = Cut(
    tokens=problem.tokens,
    padded=_pad(problem.tokens, scheme, tiles.n_pad, MAX_VECTOR_TOKENS),
    groups=problem.groups,
    size=problem.group_size,
    dense=problem.k,
    block=min(tiles.n_block, max(next_power(problem.group_size), least)),
    step=min(tiles.n_step, max(next_power(problem.k), least)),
    transposed=problem.transposed,
    hidden=problem.op in ("gated_ffn", "routed_ffn"),
    joined=problem.joined,
    stacked=problem.layers > 1,
    ranked=tiles.n_ranked,
    fused=len(router) > 1,
    warps=tiles.n_warps,
  )
  struct = jax.ShapeDtypeStruct
  out = [struct((problem.tokens, problem.n), x.dtype)]
  if cut.fused:
    out.append(struct((problem.tokens, problem.groups), jnp.bool_))
  return call(
    functools.partial(
      n_kernel, cut=cut, tile=n_dot if scheme == "dot" else n_vector
    ),
    out,
    (problem.groups * cut.pieces,),
    x.reshape(problem.tokens, problem.k),
    *router,
    layer.reshape(1),
    *(_stacked(w, problem) for w in weights),
    num_warps=tiles.n_warps,
    num_stages=tiles.n_stages,
    interpret=interpret,
    name="decode_gate_up" if cut.hidden else "decode_n_sparse",
  )


def _k_side(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x_MK: Array,
  w: Array,
  keep_MG: Array,
  layer: Array,
  width: int,
  *,
  hidden: bool = False,
) -> Array:
  """[M, width], x's dtype; x is the N-sparse side's output if `hidden`."""
  scheme = tiles.k_scheme
  least = 16 if scheme == "dot" else 1
  cut = Cut(
    tokens=problem.tokens,
    padded=_pad(problem.tokens, scheme, tiles.k_pad, 1),
    groups=problem.groups,
    size=problem.group_size,
    dense=width,
    block=min(tiles.k_block, max(next_power(width), least)),
    step=_k_step(tiles.k_step, problem.group_size, scheme),
    splits=tiles.k_splits,
    hidden=hidden,
    stacked=problem.layers > 1,
  )
  dtype = x_MK.dtype if cut.splits == 1 else jnp.float32
  parts = call(
    functools.partial(
      k_kernel, cut=cut, tile=k_dot if scheme == "dot" else k_vector
    ),
    jax.ShapeDtypeStruct((cut.splits, problem.tokens, width), dtype),
    (cdiv(width, cut.block) * cut.splits,),
    x_MK,
    _stacked(w, problem),
    keep_MG,
    layer.reshape(1),
    num_warps=tiles.k_warps,
    num_stages=tiles.k_stages,
    interpret=interpret,
    name="decode_down" if hidden else "decode_k_sparse",
  )
  # XLA sums, and fuses the sum with what comes next. A sum by the last program
  # to finish, with an atomic count, was no faster.
  return parts[0] if cut.splits == 1 else parts.sum(0).astype(x_MK.dtype)


def _k_step(step: int, size: int, scheme: str) -> int:
  """Whole steps a group, or one padded where that would need short ones."""
  least, whole = (32 if scheme == "dot" else 8), size & -size
  return min(step, whole if whole >= least else max(16, next_power(size)))


def _pad(tokens: int, scheme: str, least: int, most: int) -> int:
  if scheme == "vector":
    if tokens > most:
      raise ValueError(
        f"the vector scheme takes up to {most} tokens here, not {tokens}."
      )
    return tokens
  return max(least, next_power(tokens))


def _stacked(w: Array, problem: Problem) -> Array:
  return w if problem.layers else w[None]
