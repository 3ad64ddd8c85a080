"""Operations and bytes that an op needs at least, for rooflines."""

import dataclasses

import numpy as np

from pallas_kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Counts:
  """Floating-point operations and bytes that a problem needs at least."""

  flops: float
  bytes: float


def needed(problem: Problem, mask: np.ndarray | None = None) -> Counts:
  """What must be computed and moved for a mask; for None, the dense op.

  Every input that is needed is read once and every output written once,
  zeros included.

  Args:
    problem: shapes and dtype.
    mask: bool [B, T, G].
  """
  p = problem
  if mask is None:
    mask = np.ones((1, 1, 1), bool)
    mask = np.broadcast_to(mask, (p.rows, p.length, p.groups))
  size = 4 if p.dtype == "float32" else 2
  c = p.group_size
  pairs, active = float(mask.sum()), float(mask.any((0, 1)).sum())
  if p.op in ("matmul_n_sparse", "matmul_k_sparse", "gated_ffn"):
    other = p.n if p.op == "matmul_k_sparse" else p.k
    copies = 3 if p.op == "gated_ffn" else 1
    flops = 2 * pairs * c * other * copies
    moved = copies * active * c * other
    if p.op == "gated_ffn":
      moved += 2 * p.tokens * p.k
    elif p.op == "matmul_n_sparse":
      moved += p.tokens * (p.k + p.n)
    else:
      moved += pairs * c + p.tokens * p.n
    return Counts(flops, moved * size)
  if p.op in ("routed_ffn", "routed_matmul_n_sparse"):
    name = {"routed_ffn": "gated_ffn"}.get(p.op, "matmul_n_sparse")
    rest = needed(dataclasses.replace(p, op=name), mask)
    weights = p.k * p.groups
    return Counts(
      rest.flops + 2.0 * p.tokens * weights,
      rest.bytes + 4.0 * weights + p.tokens * (p.k * size + p.groups),
    )
  if p.op == "route_folded":
    moved = p.tokens * p.k * size + 4 * p.k * p.groups + p.tokens * p.groups
    return Counts(2.0 * p.tokens * p.k * p.groups, float(moved))
  if p.op == "route":
    weights = p.n * (p.k + p.groups)
    moved = p.tokens * p.k * size + 4 * weights + p.tokens * p.groups
    return Counts(2.0 * p.tokens * weights, float(moved))
  queries = pairs * c * p.dim + p.tokens * p.heads * p.dim
  if p.op == "attention_decode":
    per_kv = p.heads // p.kv_heads
    heads = np.repeat(mask[:, 0], c, axis=-1)
    read = heads.reshape(p.rows, p.kv_heads, per_kv).any(-1).sum()
    return Counts(
      4.0 * pairs * c * p.keys * p.dim,
      (2.0 * float(read) * p.keys * p.dim + queries) * size,
    )
  seen = np.arange(1, p.length + 1) + (p.keys - p.length)
  if p.window is not None:
    seen = np.minimum(seen, p.window)
  work = float((mask.sum((0, 2)) * seen).sum())
  cache = 2.0 * p.rows * p.keys * p.kv_heads * p.dim
  return Counts(4 * work * c * p.dim, (cache + queries) * size)
