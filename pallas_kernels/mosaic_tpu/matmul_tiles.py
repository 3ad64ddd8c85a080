"""How the TPU matmuls are cut up, and which cuts are legal."""

import dataclasses
import math

import jax

from pallas_kernels.errors import Unsupported
from pallas_kernels.mosaic_tpu.common import (
  ITEM_BYTES,
  LANES,
  MAX_STEPS,
  SUBLANES,
  VMEM_FILL,
  cdiv,
  dtype_why_not,
  round_up,
)
from pallas_kernels.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Blocks of a matmul or gated FFN.

  Attributes:
    tokens: rows of a tile; all tokens where there are no more.
    channels: width of a block of sparse channels (output channels of N-sparse,
      input channels of K-sparse, hidden channels of the FFN).
    out: K-sparse: output channels of a block, kept in float32 in vector
      memory; the input is read once for each.
    sort: tokens are sorted by what they keep before they are cut into tiles.
  """

  tokens: int = 256
  channels: int = 256
  out: int = 0
  sort: bool = True


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Tiles fitted to a problem."""

  tokens: int
  tiles: int
  width: int
  cols: int
  groups: int
  group_size: int

  @property
  def lanes(self) -> int:
    """Lanes of keep that a block reads: one chunk of 128 if that has all."""
    per = self.width // self.group_size
    inside = self.group_size % self.width == 0
    whole = per * self.group_size == self.width and LANES % max(per, 1) == 0
    return LANES if inside or whole else round_up(self.groups, LANES)

  def chunk(self, col):
    """Which chunk of lanes block `col` reads."""
    group = jax.lax.div(col * self.width, self.group_size)
    return jax.lax.div(group, self.lanes)


def sparse_width(problem: Problem) -> int:
  """How many channels the mask's groups share out."""
  return problem.k if problem.op == "matmul_k_sparse" else problem.n


def fit(problem: Problem, tiles: Tiles) -> Blocks:
  """The blocks that tiles make of a problem."""
  wide = sparse_width(problem)
  tokens = min(tiles.tokens, problem.tokens)
  width = min(tiles.channels, wide)
  return Blocks(
    tokens,
    cdiv(problem.tokens, tokens),
    width,
    cdiv(wide, width),
    problem.groups,
    wide // problem.groups,
  )


def vmem_bytes(problem: Problem, tiles: Tiles) -> int:
  """Vector memory of a call: blocks twice (they are prefetched), and sums."""
  blocks = fit(problem, tiles)
  item = ITEM_BYTES[problem.dtype]
  m, c, k = (
    round_up(size, LANES) for size in (blocks.tokens, blocks.width, problem.k)
  )
  keep = 8 * m * blocks.lanes
  if problem.op == "matmul_n_sparse":
    return 2 * item * (m * k + k * c + m * c) + 8 * m * c + keep
  if problem.op == "matmul_k_sparse":
    out = round_up(min(tiles.out, problem.n), LANES)
    return 2 * item * (m * c + c * out + m * out) + 8 * m * out + keep
  return 2 * item * (2 * m * k + 3 * c * k) + 8 * m * k + 12 * m * c + keep


def reason_not(problem: Problem, tiles: Tiles) -> str | None:
  """Why a problem cannot run with some tiles."""
  blocks = fit(problem, tiles)
  rows = SUBLANES[problem.dtype]
  if blocks.tiles > 1 and blocks.tokens % rows:
    return f"tokens={tiles.tokens} must be a multiple of {rows}."
  if blocks.cols > 1 and blocks.width % LANES:
    return f"channels={tiles.channels} must be a multiple of {LANES}."
  if problem.op == "matmul_k_sparse":
    if tiles.out < 1 or (tiles.out < problem.n and tiles.out % LANES):
      return f"out={tiles.out} must be a multiple of {LANES}."
  if blocks.tiles * blocks.cols > MAX_STEPS:
    return (
      f"{blocks.tiles} tiles x {blocks.cols} blocks of channels are more than "
      f"the {MAX_STEPS} steps that fit into scalar memory."
    )
  need = vmem_bytes(problem, tiles)
  if need > VMEM_FILL:
    return f"{need} bytes of vector memory are needed, {VMEM_FILL} are allowed."
  return None


def _widths(problem: Problem) -> list[int]:
  """Widths of a block of sparse channels, the best guess first.

  Groups narrower than 128, or no multiple of it, go together until their
  channels are a multiple of 128; a wide group is cut into even parts. Where
  the group size allows neither, blocks of 128 cut through groups.
  """
  size = sparse_width(problem) // problem.groups
  even = [w for w in range(LANES, 513, LANES) if size % w == 0]
  together = math.lcm(size, LANES)
  if even:
    found = even[::-1]
  elif together <= 512:
    found = [together]
  else:
    found = [LANES]
  return found + [w for w in (found[0] * 2, found[0] * 4) if w <= 1024]


def _out(problem: Problem, most: int) -> int:
  if problem.op != "matmul_k_sparse":
    return 0
  n = problem.n
  if n <= most:
    return n
  even = [w for w in range(LANES, most + 1, LANES) if n % w == 0]
  return even[-1] if even and even[-1] >= most // 4 else most


def candidates(problem: Problem) -> list[Tiles]:
  """Legal tiles, the default first."""
  found: list[Tiles] = []
  for tokens in (256, 512, 1024, 128, 64):
    for width in _widths(problem):
      for out in (1024, 2048, 512):
        for sort in (True, False):
          tiles = Tiles(
            tokens=min(tokens, problem.tokens),
            channels=min(width, sparse_width(problem)),
            out=_out(problem, out),
            sort=sort and problem.tokens > tokens,
          )
          if tiles not in found and reason_not(problem, tiles) is None:
            found.append(tiles)
  return found


def default(problem: Problem) -> Tiles:
  """The first candidate: 256 tokens x a group of 128 to 512 channels.

  Chosen by arithmetic intensity (256 tokens give 256 operations a byte of
  bfloat16 weights; v5e needs 240), not by measurement.
  """
  return candidates(problem)[0]


def why_not(problem: Problem) -> str | None:
  """Why this backend cannot run a problem, or None."""
  reason = dtype_why_not(problem)
  if reason is None and not candidates(problem):
    widths = [w for w in _widths(problem) if w <= sparse_width(problem)]
    smallest = Tiles(
      tokens=min(64, problem.tokens),
      channels=min(widths, default=sparse_width(problem)),
      out=_out(problem, 512),
    )
    reason = reason_not(problem, smallest)
  return reason


def checked(problem: Problem, tiles: Tiles) -> Blocks:
  """The blocks; Unsupported where they are not legal."""
  reason = reason_not(problem, tiles)
  if reason is not None:
    raise Unsupported(f"mosaic_tpu cannot run {problem.op}: {reason}")
  return fit(problem, tiles)
