"""Pallas Triton kernels, for NVIDIA GPUs from Ampere on.

jax 0.11 deprecated Pallas Triton and will remove it; it works through 0.12.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels import device
from pallas_kernels.problem import Op, Problem
from pallas_kernels.triton import (
  attention,
  attention_decode,
  decode,
  decode_route,
  matmul,
  router,
)
from pallas_kernels.triton.decode_tiles import MAX_TOKENS
from pallas_kernels.triton.plan import plan_parts

_MANY = {
  "matmul_n_sparse": matmul.n_sparse,
  "matmul_k_sparse": matmul.k_sparse,
  "gated_ffn": matmul.gated_ffn,
}
_FEW = {
  "matmul_n_sparse": decode.n_sparse,
  "matmul_k_sparse": decode.k_sparse,
  "gated_ffn": decode.gated_ffn,
}


def _default(problem: Problem) -> Any:
  few = problem.tokens <= MAX_TOKENS
  return (decode if few else matmul).default(problem)


def _candidates(problem: Problem) -> list:
  """Between 17 and 64 tokens either kind may win."""
  few = decode.candidates(problem) if problem.tokens <= MAX_TOKENS else []
  many = matmul.candidates(problem) if problem.tokens > 16 else []
  return [*few, *many]


def _matmul_op(name: str) -> Op:
  def run(problem: Problem, tiles: Any, interpret: bool, *arrays):
    few = isinstance(tiles, decode.DecodeTiles)
    kernel = (_FEW if few else _MANY)[name]
    return kernel(problem, tiles, interpret, *arrays)

  return Op(run, matmul.why_not, _default, _candidates)


def _routed_op(run: Callable[..., Any]) -> Op:
  return Op(run, decode.why_not, decode.default, decode.candidates)


def _from_ampere(op: Op) -> Op:
  """The op, refused on GPUs that lack bfloat16 and asynchronous copies."""

  def why_not(problem: Problem) -> str | None:
    have = device.capability()
    if have is not None and have < (8, 0):
      return (
        "its kernels are for compute capability 8.0 and later, and this GPU "
        f"has {have[0]}.{have[1]}"
      )
    return op.why_not(problem)

  return dataclasses.replace(op, why_not=why_not)


_OPS = {
  **{name: _matmul_op(name) for name in _MANY},
  "attention_prefill": attention.PREFILL,
  "attention_decode": attention_decode.DECODE,
  "route": router.ROUTE,
  "route_folded": decode_route.ROUTE_FOLDED,
  "routed_ffn": _routed_op(decode.routed_ffn),
  "routed_matmul_n_sparse": _routed_op(decode.routed_n_sparse),
}
OPS = {name: _from_ampere(op) for name, op in _OPS.items()}

__all__ = ["OPS", "plan_parts"]
