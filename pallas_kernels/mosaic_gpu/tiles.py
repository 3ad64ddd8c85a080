"""Tiles of the Mosaic GPU kernels, and which are worth measuring."""

import dataclasses
from typing import Any

from pallas_kernels.problem import Problem
from pallas_kernels.triton import matmul as triton


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """How a matmul is cut up.

  Attributes:
    block_n: columns of a tile of w, 128 or 256; gate and up together.
    row_tiles: 64-row tiles of one consumer; row_tiles * block_n is 256 at most.
    stages: of the ring.
    cluster: blocks that share a tile of w, 1 or 2.
  """

  block_n: int = 256
  row_tiles: int = 1
  stages: int = 4
  cluster: int = 2

  def __post_init__(self):
    if self.block_n not in (128, 256) or self.block_n * self.row_tiles > 256:
      raise ValueError(
        f"block_n={self.block_n} must be 128 or 256, and times row_tiles="
        f"{self.row_tiles} at most 256."
      )
    if self.cluster not in (1, 2):
      raise ValueError(f"cluster={self.cluster} must be 1 or 2.")
    if not 2 <= self.stages <= 4:
      raise ValueError(f"stages={self.stages} must be 2 to 4.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedTiles:
  """Tiles of the two halves of a gated FFN.

  Attributes:
    up: gate and up.
    down: the K-sparse half, by Triton.
  """

  up: Tiles
  down: Any


# (block_n, row_tiles, stages, cluster), the likeliest first.
_CUTS = (
  (256, 1, 4, 2),
  (256, 1, 4, 1),
  (128, 2, 4, 2),
)


def _cut(width: int, gated: bool) -> list[Tiles]:
  """Tiles for groups of `width` channels."""
  names = [field.name for field in dataclasses.fields(Tiles)]
  found = [Tiles(**dict(zip(names, cut, strict=True))) for cut in _CUTS]
  own = width * (2 if gated else 1)
  return [tiles for tiles in found if own % tiles.block_n == 0]


def n_candidates(problem: Problem) -> list[Tiles]:
  """Of matmul_n_sparse, the default first."""
  return _cut(problem.group_size, False)


def gated_candidates(problem: Problem) -> list[GatedTiles]:
  """Of gated_ffn, the default first."""
  down = triton.k_default(problem)
  return [GatedTiles(up=up, down=down) for up in _cut(problem.group_size, True)]
