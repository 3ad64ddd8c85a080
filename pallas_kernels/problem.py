"""What is static about one call of an op: what dispatch and tuning key on."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

OPS = (
  "matmul_n_sparse",
  "matmul_k_sparse",
  "gated_ffn",
  "attention_prefill",
  "attention_decode",
  "route",
  "route_folded",
  "routed_ffn",
  "routed_matmul_n_sparse",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """Shapes, dtype and expected density of one call.

  Attributes:
    op: one of OPS.
    dtype: of the activations and weights, such as `bfloat16`.
    rows, length: B and T; tokens are their product.
    groups: G.
    density: expected share of kept (token, group) pairs.
    k, n: matmuls: input and output channels. Gated FFNs: D and F. route: D and
      router rank R. route_folded: D and G.
    transposed: weights of the N-sparse side are stored [out, in].
    joined: gate and up come as one array [2, ...].
    layers: stacked layers, 0 without a layer axis.
    keys, heads, kv_heads, dim: attention: S, N, K, H.
    window: attention: keys that a query sees, or None.
    span: groups in a class code of the plan.
    shared: the tokens are expected to keep the same groups, so that the groups
      any of them keeps are as few as those that one keeps.
    padded: attention: `start` is given, so rows may be padded on the left.
    shifted: prefill: `offset` is given, rather than the last query at the last
      key.
  """

  op: str
  dtype: str
  rows: int
  length: int
  groups: int
  density: float = 0.5
  k: int = 0
  n: int = 0
  transposed: bool = False
  joined: bool = False
  layers: int = 0
  keys: int = 0
  heads: int = 0
  kv_heads: int = 0
  dim: int = 0
  window: int | None = None
  span: int = 1
  shared: bool = False
  padded: bool = False
  shifted: bool = False

  @property
  def tokens(self) -> int:
    """M = B * T."""
    return self.rows * self.length

  @property
  def group_size(self) -> int:
    """C: channels (heads for attention) in a group."""
    width = {"matmul_k_sparse": self.k, "route": self.groups}.get(
      self.op, self.heads or self.n
    )
    return width // max(self.groups, 1)


@dataclasses.dataclass(frozen=True)
class Op:
  """One op of one backend.

  Attributes:
    run: run(problem, tiles, interpret, *arrays) -> Array; see each backend.
    why_not: problem -> why this backend cannot run it, or None.
    default: problem -> tiles to use where nothing was measured.
    candidates: problem -> tiles worth measuring.
  """

  run: Callable[..., Any]
  why_not: Callable[[Problem], str | None]
  default: Callable[[Problem], Any]
  candidates: Callable[[Problem], Sequence[Any]]
