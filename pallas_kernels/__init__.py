"""Kernels that turn token-wise width masks into skipped work.

Stands alone: imports jax and numpy only.
"""

from pallas_kernels.dispatch import explain
from pallas_kernels.errors import Unsupported
from pallas_kernels.ops import (
  attention_decode,
  attention_prefill,
  gated_ffn,
  matmul_k_sparse,
  matmul_n_sparse,
)
from pallas_kernels.plan import RoutePlan, make_plan
from pallas_kernels.routed import (
  fold_router,
  route_folded,
  routed_ffn,
  routed_matmul_n_sparse,
)
from pallas_kernels.router import route

__all__ = [
  "RoutePlan",
  "Unsupported",
  "attention_decode",
  "attention_prefill",
  "explain",
  "fold_router",
  "gated_ffn",
  "make_plan",
  "matmul_k_sparse",
  "matmul_n_sparse",
  "route",
  "route_folded",
  "routed_ffn",
  "routed_matmul_n_sparse",
]
