"""Pallas Mosaic GPU kernels, for Hopper (H100, H200), from jax 0.11 on.

Only what is asked for is imported: older versions of jax lack parts of it.
"""

import dataclasses
import re
from typing import Any

import jax

from pallas_kernels import device
from pallas_kernels.errors import Unsupported
from pallas_kernels.mosaic_gpu.tiles import (
  GatedTiles,
  Tiles,
  gated_candidates,
  n_candidates,
)
from pallas_kernels.problem import Op, Problem

_HOPPER = re.compile(r"_(g?h(100|200|800)|h20)(_|$)")
_SIZES = {"bfloat16": 2, "float16": 2}


def why_not(problem: Problem) -> str | None:
  """Why the kernels cannot run a problem, or None."""
  if jax.__version_info__ < (0, 11):
    return f"it needs jax 0.11 or later, and this is {jax.__version__}"
  if not _HOPPER.search(device.name()):
    return f"its kernels are for Hopper GPUs, and this is {device.name()}"
  if problem.dtype not in _SIZES:
    return f"dtype {problem.dtype}; it takes bfloat16 and float16"
  if problem.groups > 128:
    return f"{problem.groups} groups; it takes 128 at most"
  if problem.k % 64 or problem.k < 256:
    return f"{problem.k} input channels; it takes multiples of 64 from 256 on"
  multiple = 64 if problem.op == "gated_ffn" else 128
  if problem.group_size % multiple:
    return (
      f"groups of {problem.group_size} channels; it takes multiples of "
      f"{multiple}"
    )
  if problem.op == "gated_ffn" and not problem.transposed:
    return "gate and up must be stored [out, in]"
  return None


def _check_run(problem: Problem, tiles: Tiles, interpret: bool) -> None:
  if interpret:
    raise Unsupported("mosaic_gpu kernels have no interpret mode.")
  reason = why_not(problem)
  if reason is not None:
    raise Unsupported(f"mosaic_gpu cannot run {problem.op}: {reason}")
  width = problem.group_size * (2 if problem.op == "gated_ffn" else 1)
  if width % tiles.block_n:
    raise ValueError(
      f"tiles.block_n={tiles.block_n} must divide {width}, the columns of a "
      "group."
    )


def _stack(problem: Problem, w):
  return w if problem.layers else w[None]


def _n_sparse(problem: Problem, tiles: Tiles, interpret, x, w, plan, layer):
  """matmul_n_sparse; see pallas_kernels.ops."""
  from pallas_kernels.mosaic_gpu import matmul

  _check_run(problem, tiles, interpret)
  rows = x.reshape(problem.tokens, -1)
  weights = (_stack(problem, w),)
  y = matmul.rows_out(problem, tiles, rows, weights, plan, layer, fill=True)
  return y.reshape(*x.shape[:2], -1)


def _gated(
  problem: Problem,
  tiles: GatedTiles,
  interpret,
  x,
  w_gate,
  w_up,
  w_down,
  plan,
  layer,
):
  """gated_ffn; see pallas_kernels.ops. The down half is a Triton kernel."""
  from pallas_kernels.mosaic_gpu import matmul
  from pallas_kernels.triton import matmul as triton

  _check_run(problem, tiles.up, interpret)
  rows = x.reshape(problem.tokens, -1)
  weights = [_stack(problem, w) for w in (w_gate, w_up) if w is not None]
  hidden = matmul.rows_out(
    problem, tiles.up, rows, weights, plan, layer, fill=False
  )
  down = dataclasses.replace(
    problem, op="matmul_k_sparse", k=problem.n, n=problem.k, transposed=False
  )
  y = triton.k_sparse(
    down,
    tiles.down,
    interpret,
    hidden.reshape(*x.shape[:2], -1),
    w_down,
    plan,
    layer,
  )
  return y.reshape(x.shape)


def _op(run: Any, candidates: Any) -> Op:
  return Op(run, why_not, lambda problem: candidates(problem)[0], candidates)


OPS = {
  "matmul_n_sparse": _op(_n_sparse, n_candidates),
  "gated_ffn": _op(_gated, gated_candidates),
}

__all__ = ["OPS", "GatedTiles", "Tiles", "why_not"]
