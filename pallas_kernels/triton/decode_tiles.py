"""Tiles of the decode kernels: what there is to choose, and what to measure.

See triton/decode.py for what the two schemes do.
"""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.problem import Problem
from pallas_kernels.triton.common import cdiv, next_power

MAX_TOKENS = 64
MAX_VECTOR_TOKENS = 4  # of the N-sparse side; of the K-sparse side 1
# A token's input is read by every program of a router fused with its matmul.
MAX_FUSED_TOKENS = 16
N_SPARSE = ("matmul_n_sparse", "routed_matmul_n_sparse")
ROUTED = ("routed_ffn", "routed_matmul_n_sparse")
_OPS = ("matmul_n_sparse", "matmul_k_sparse", "gated_ffn", *ROUTED)
_SCHEMES = ("dot", "vector")
# Too few programs leave multiprocessors idle, H200 has 132.
_MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTiles:
  """How the two sides of a decode matmul are cut.

  Attributes:
    n_scheme, k_scheme: `dot` or `vector`, for the N-sparse side (gate and up)
      and the K-sparse side (down).
    n_block, n_step: output channels of a program, input channels of a step.
    k_block, k_step: output channels of a program, input channels of a step;
      a dot's step is cut to the group.
    n_warps, k_warps, n_stages, k_stages: of the two kernels.
    n_pad, k_pad: a dot's tokens are padded to a power of two of at least this,
      8 or 16; with 8 the compiler takes another matrix instruction.
    k_splits: parts that the groups are shared out to; their float32 results
      are summed afterwards.
    n_ranked: programs of the N-sparse side are given active groups by rank, so
      that they are even; else every group has its programs, which know theirs
      at once.
    n_fused: with a router, its decisions are made by the programs of the
      N-sparse side, which saves a launch, for up to 16 tokens, not ranked. Else
      by a kernel of its own, with that kernel's default tiles.
  """

  n_scheme: str = "dot"
  n_block: int = 32
  n_step: int = 128
  n_warps: int = 4
  n_stages: int = 4
  n_pad: int = 16
  k_scheme: str = "dot"
  k_block: int = 128
  k_step: int = 64
  k_warps: int = 4
  k_stages: int = 4
  k_pad: int = 16
  k_splits: int = 8
  n_ranked: bool = True
  n_fused: bool = False

  def __post_init__(self):
    for name in ("n_scheme", "k_scheme"):
      if getattr(self, name) not in _SCHEMES:
        raise ValueError(
          f"{name}={getattr(self, name)!r} is not one of {_SCHEMES}."
        )
    for name in ("n_block", "n_step", "k_block", "k_step"):
      size = getattr(self, name)
      least = 16 if getattr(self, f"{name[0]}_scheme") == "dot" else 1
      if size < least or size != next_power(size):
        raise ValueError(
          f"{name}={size} must be a power of two of at least {least}."
        )
    for name in ("n_pad", "k_pad"):
      if getattr(self, name) not in (8, 16):
        raise ValueError(f"{name}={getattr(self, name)} must be 8 or 16.")
    if self.n_fused and self.n_ranked:
      raise ValueError("n_fused=True needs n_ranked=False: ranks come later.")
    if self.k_splits < 1:
      raise ValueError(f"k_splits={self.k_splits} must be at least 1.")


def why_not(problem: Problem) -> str | None:
  """Why these kernels cannot run a problem, or None."""
  if problem.op not in _OPS:
    return f"decode has no {problem.op}"
  if not 1 <= problem.tokens <= MAX_TOKENS:
    return f"{problem.tokens} tokens; decode takes 1 to {MAX_TOKENS}"
  return None


def default(problem: Problem) -> DecodeTiles:
  """Tiles where nothing was measured: the first of each side's list."""
  return candidates(problem)[0]


def candidates(problem: Problem) -> list[DecodeTiles]:
  """Tiles worth measuring, the default first.

  A gated FFN's two kernels do not depend on each other: its list varies one
  side at a time, in turn, then holds every other pair, so that `merge` of the
  best of each side is in it.
  """
  n_cuts, k_cuts = _n_cuts(problem), _k_cuts(problem)
  if problem.op in N_SPARSE:
    k_cuts = k_cuts[:1]
  if problem.op == "matmul_k_sparse":
    n_cuts = n_cuts[:1]
  pairs = []
  for i in range(max(len(n_cuts), len(k_cuts))):
    pairs += [(n, k_cuts[0]) for n in n_cuts[i : i + 1]]
    pairs += [(n_cuts[0], k) for k in k_cuts[i : i + 1]]
  pairs += [(n, k) for n in n_cuts for k in k_cuts]
  return list(dict.fromkeys(DecodeTiles(**n, **k) for n, k in pairs))


def merge(n_side: DecodeTiles, k_side: DecodeTiles) -> DecodeTiles:
  """The N-sparse side of one, the K-sparse side of the other."""
  changes = {
    field.name: getattr(k_side, field.name)
    for field in dataclasses.fields(k_side)
    if field.name.startswith("k_")
  }
  return dataclasses.replace(n_side, **changes)


# (block, step, warps, stages) of a dot, by bytes of a weight and whether the
# tokens fit 16. Some 64 KiB a multiprocessor should be on their way all the
# time. Each compiles for H200 without spills; float32 dots run on the float32
# units and need the registers. The order is of measurements there, of a gated
# FFN of Llama-3.1-8B's size, groups of 128.
_N_DOTS = {
  (2, True): [
    (64, 128, 4, 4),
    (64, 64, 4, 5),
    (32, 128, 2, 4),
    (32, 64, 2, 6),
    (32, 128, 4, 5),
    (32, 128, 4, 4),
    (32, 256, 4, 3),
    (64, 64, 4, 8),
  ],
  (2, False): [
    (64, 64, 4, 5),
    (64, 128, 4, 3),
    (64, 64, 8, 4),
    (128, 64, 8, 3),
    (32, 64, 4, 5),
    (128, 64, 4, 3),
  ],
  (4, True): [(32, 64, 4, 4), (64, 32, 4, 5), (32, 64, 2, 4), (64, 64, 4, 4)],
  (4, False): [(64, 32, 8, 4), (64, 32, 4, 5), (32, 32, 4, 5)],
}
# The same, and how many programs to make by splitting.
_K_DOTS = {
  (2, True): [
    (128, 64, 4, 4, 256),
    (128, 64, 4, 5, 512),
    (256, 64, 4, 4, 256),
    (256, 32, 4, 6, 256),
    (64, 128, 4, 4, 256),
    (128, 128, 4, 4, 128),
    (128, 32, 4, 6, 512),
    (256, 64, 8, 4, 256),
    (64, 128, 4, 6, 128),
    (32, 128, 2, 6, 256),
  ],
  (2, False): [
    (128, 64, 4, 4, 128),
    (128, 64, 4, 5, 256),
    (256, 32, 8, 5, 128),
    (64, 128, 4, 4, 128),
    (128, 128, 4, 3, 128),
    (256, 64, 8, 3, 128),
  ],
  (4, True): [
    (64, 32, 4, 5, 256),
    (128, 32, 8, 4, 256),
    (128, 16, 4, 6, 256),
  ],
  (4, False): [(64, 32, 8, 4, 128), (128, 16, 8, 5, 128), (64, 32, 4, 4, 128)],
}


def _both(likely: list, others: list) -> list:
  """Two schemes in one list, the first of each in front."""
  return likely[:1] + others[:1] + likely[1:] + others[1:]


def _n_cuts(problem: Problem) -> list[dict]:
  """The N-sparse side's fields of DecodeTiles, the likeliest first."""
  size = jnp.dtype(problem.dtype).itemsize
  dots = list(_N_DOTS[size, problem.tokens <= 16])
  if size == 2 and problem.tokens <= 16:
    if problem.group_size <= 32:  # which a block of 64 would be cut to
      dots.sort(key=lambda dot: dot[0] > 32)
    elif problem.tokens > 4:
      dots[:2] = dots[1::-1]
  cuts = [("dot", *dot) for dot in dots]
  if problem.tokens <= 8:
    cuts[3:3] = [(*cut, 8) for cut in (cuts[0], cuts[2])]
  few = problem.density * problem.n < 32 * _MULTIPROCESSORS
  if few and problem.tokens <= 16:
    cuts.insert(0, ("dot", 16, 256 // size, 2, 4))
  if problem.tokens <= MAX_VECTOR_TOKENS and problem.transposed:
    step = min(next_power(problem.k), 4096)
    # 16 KiB a weight for 4 warps: 8 loads of 16 bytes a thread.
    fit = max(1, 16384 // size // step)
    vectors = [
      ("vector", fit, step, 4, 1),
      ("vector", 2 * fit, step, 8, 1),
      ("vector", fit, step, 8, 1),
    ]
    if problem.tokens == 1:
      vectors.append(("vector", 2 * fit, max(1, step // 2), 4, 1))
    first = size == 4 and problem.tokens <= 2  # a dot pads them to 16
    cuts = _both(vectors, cuts) if first else _both(cuts, vectors)
  names = ("n_scheme", "n_block", "n_step", "n_warps", "n_stages", "n_pad")
  made = [dict(zip(names, cut, strict=False)) for cut in cuts]
  first, *others = _n_orders(problem)
  # The other orders for the likeliest cuts: right after the first, and behind.
  return [
    *({**made[0], **order} for order in (first, *others)),
    *({**cut, **first} for cut in made[1:]),
    *({**cut, **order} for cut in made[1:3] for order in others),
  ]


def _n_orders(problem: Problem) -> list[dict]:
  """Who runs which group, and where a router runs; the likeliest first."""
  ranked, direct = ({"n_ranked": order} for order in (True, False))
  few = problem.tokens <= 4
  if problem.op not in ROUTED or problem.tokens > MAX_FUSED_TOKENS:
    at_once = problem.op == "gated_ffn" and few
    return [direct, ranked] if at_once else [ranked, direct]
  fused = {"n_ranked": False, "n_fused": True}
  return [fused, direct, ranked] if few else [direct, fused, ranked]


def _k_cuts(problem: Problem) -> list[dict]:
  """As _n_cuts, for the K-sparse side; how many programs fixes the splits."""
  size = jnp.dtype(problem.dtype).itemsize
  width = problem.k if problem.op in ("gated_ffn", "routed_ffn") else problem.n
  cuts = [("dot", *dot) for dot in _K_DOTS[size, problem.tokens <= 16]]
  if problem.tokens <= 8:
    cuts[2:2] = [(*cuts[0], 8), (*cuts[1], 8)]
  if problem.tokens == 1 and size == 4:  # in bfloat16 a dot is far faster
    # 16 KiB a step of 4 warps, a float32 sum for each weight.
    vectors = [
      ("vector", 256, 16, 4, 1, 512),
      ("vector", 256, 32, 8, 1, 256),
      ("vector", 512, 8, 4, 1, 256),
      ("vector", 128, 32, 4, 1, 512),
    ]
    cuts = _both(vectors, cuts)
  out = []
  for scheme, block, step, warps, stages, programs, *pad in cuts:
    block = min(block, max(16, next_power(width)))
    steps = problem.density * cdiv(problem.group_size, step) * problem.groups
    splits = min(32, programs // cdiv(width, block), int(steps) // 2)
    out.append(
      {
        "k_scheme": scheme,
        "k_block": block,
        "k_step": step,
        "k_warps": warps,
        "k_stages": stages,
        "k_splits": max(1, splits),
        "k_pad": pad[0] if pad else 16,
      }
    )
  return out
