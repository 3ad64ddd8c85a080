"""Matmuls for a few tokens (1 to 64): read the weights of active groups only.

With so few tokens the time is that of reading weights, so a group that no
token keeps is never read, and a token that drops a group others keep gets 0
from it. The plan lists the active groups first; programs of later ones end at
once. A token's result never depends on its neighbours, not in the last bit.

Two schemes, measured against each other by tune:

* `dot`: the weight tile is the left operand of a tensor core's dot, tokens
  padded to 8, 16, 32 or 64 the right one: the compiler then prefetches weight
  tiles by asynchronous copies, `stages` deep.
* `vector`: each weight is multiplied and added by hand, tiles go straight to
  registers and many small programs a multiprocessor hide the latency; for up
  to 4 tokens on the N-sparse side and for one on the K-sparse side.

Letters: M tokens, K input channels, N output channels, G groups, C channels a
group. A *slot* is a place in the list of active groups, and a *place* is
slot * C + channel of the group.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.plan import RoutePlan
from pallas_kernels.problem import Problem
from pallas_kernels.triton.common import call, cdiv, next_power
from pallas_kernels.triton.decode_kernels import (
  Cut,
  k_dot,
  k_vector,
  n_dot,
  n_kernel,
  n_vector,
)
from pallas_kernels.triton.decode_tiles import (
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
  y = _n_side(problem, tiles, interpret, x, (w,), plan, layer)
  return y.reshape(*x.shape[:2], problem.n)


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
    problem, tiles, interpret, x_MK, w, plan, layer, problem.n, compact=False
  )
  return y.reshape(*x.shape[:2], problem.n)


def gated_ffn(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  w_gate: Array,
  w_up: Array,
  w_down: Array,
  plan: RoutePlan,
  layer: Array,
) -> Array:
  """SwiGLU FFN of kept groups, [B, T, D] -> [B, T, D], in two kernels.

  The hidden is stored by place, so that the second kernel reads it in one
  piece; places of inactive groups are neither written nor read.
  """
  weights = [w for w in (w_gate, w_up) if w is not None]
  hidden = _n_side(problem, tiles, interpret, x, weights, plan, layer)
  y = _k_side(
    problem,
    tiles,
    interpret,
    hidden,
    w_down,
    plan,
    layer,
    problem.k,
    compact=True,
  )
  return y.reshape(x.shape)


# --- the two sides -----------------------------------------------------------


def _n_side(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x: Array,
  weights: Sequence[Array],
  plan: RoutePlan,
  layer: Array,
) -> Array:
  """[M, N]: by channel for one weight, by place (see top) for gate and up."""
  scheme, size = tiles.n_scheme, problem.group_size
  least = 16 if scheme == "dot" else 1
  block = tiles.n_block
  if not problem.transposed:
    block = min(block, max(next_power(size), least))
  cut = Cut(
    tokens=problem.tokens,
    padded=_pad(problem.tokens, scheme, tiles.n_pad, MAX_VECTOR_TOKENS),
    groups=problem.groups,
    size=size,
    dense=problem.k,
    block=block,
    step=min(tiles.n_step, max(next_power(problem.k), least)),
    transposed=problem.transposed,
    compact=problem.op == "gated_ffn",
    joined=problem.joined,
    stacked=problem.layers > 1,
  )
  if cut.flat:
    programs = cdiv(problem.n, block)
  else:
    programs = problem.groups * cut.pieces
  tile = n_dot if scheme == "dot" else n_vector
  return call(
    functools.partial(n_kernel, cut=cut, tile=tile),
    jax.ShapeDtypeStruct((problem.tokens, problem.n), x.dtype),
    (programs,),
    x.reshape(problem.tokens, problem.k),
    plan.keep_MG,
    plan.active_G,
    plan.active_count,
    layer.reshape(1),
    *(_stacked(w, problem) for w in weights),
    num_warps=tiles.n_warps,
    num_stages=tiles.n_stages,
    interpret=interpret,
    name="decode_gate_up" if cut.compact else "decode_n_sparse",
  )


def _k_side(
  problem: Problem,
  tiles: DecodeTiles,
  interpret: bool,
  x_MK: Array,
  w: Array,
  plan: RoutePlan,
  layer: Array,
  width: int,
  *,
  compact: bool,
) -> Array:
  """[M, width], x's dtype; x is by place if compact, else by channel."""
  scheme, size = tiles.k_scheme, problem.group_size
  least = 16 if scheme == "dot" else 1
  cut = Cut(
    tokens=problem.tokens,
    padded=_pad(problem.tokens, scheme, tiles.k_pad, 1),
    groups=problem.groups,
    size=size,
    dense=width,
    block=min(tiles.k_block, max(next_power(width), least)),
    step=_k_step(tiles.k_step, size) if scheme == "dot" else tiles.k_step,
    splits=tiles.k_splits,
    compact=compact,
    stacked=problem.layers > 1,
  )
  # A sum of parts is left to XLA, which fuses it with what comes next.
  dtype = x_MK.dtype if cut.splits == 1 else jnp.float32
  parts = call(
    functools.partial(k_dot if scheme == "dot" else k_vector, cut=cut),
    jax.ShapeDtypeStruct((cut.splits, problem.tokens, width), dtype),
    (cdiv(width, cut.block) * cut.splits,),
    x_MK,
    _stacked(w, problem),
    plan.keep_MG,
    plan.active_G,
    plan.active_count,
    layer.reshape(1),
    num_warps=tiles.k_warps,
    num_stages=tiles.k_stages,
    interpret=interpret,
    name="decode_down" if compact else "decode_k_sparse",
  )
  return parts[0] if cut.splits == 1 else parts.sum(0).astype(x_MK.dtype)


def _k_step(step: int, size: int) -> int:
  """A dot's step: whole steps a group, or one padded where that needs < 32."""
  whole = size & -size
  return min(step, whole if whole >= 32 else max(16, next_power(size)))


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
