"""What the decode kernels share: static sizes, loads, and the active groups.

See triton/decode.py for what they compute, and for the letters.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton.common import cdiv, next_power

# A weight is read once: it should not push the activations out of the cache.
STREAM = "evict_first"
_HELD = 8192  # decisions that are read at a time


@dataclasses.dataclass(frozen=True)
class Cut:
  """What is static about one kernel: sizes, and how they are cut.

  Attributes:
    tokens, padded: M, and M rounded up to a tile's side.
    groups, size: G and C.
    dense: channels of the axis without groups: K of the N-sparse side, N of
      the K-sparse side.
    block, step: as in DecodeTiles, fitted to the shape.
    splits: of the K-sparse side.
    transposed: the N-sparse weight is [N, K].
    hidden: the N-sparse side's output, or the K-sparse side's input, is the
      hidden of an FFN: nobody reads an inactive group of it, and dropped tokens
      of an active one are 0.
    joined: gate and up are one array, [L, 2, ...].
    stacked: the weight has more than one layer to pick from.
    ranked: programs of the N-sparse side belong to the active groups by rank;
      else to all groups, and those of inactive ones end at once.
    fused: the N-sparse side decides for itself, and writes the decisions.
    warps: of a program.
  """

  tokens: int
  padded: int
  groups: int
  size: int
  dense: int
  block: int
  step: int
  splits: int = 1
  transposed: bool = False
  hidden: bool = False
  joined: bool = False
  stacked: bool = False
  ranked: bool = False
  fused: bool = False
  warps: int = 4

  @property
  def shared(self) -> bool:
    """Whether tokens may keep different groups; one token keeps all active."""
    return self.tokens > 1

  @property
  def pieces(self) -> int:
    """Blocks of a group (N-sparse side)."""
    return cdiv(self.size, self.block)

  @property
  def steps(self) -> int:
    """Steps of a group (K-sparse side)."""
    return cdiv(self.size, self.step)


def iota(n: int) -> Array:
  return jnp.arange(n, dtype=jnp.int32)


def both(a: Array | None, b: Array | None) -> Array | None:
  """a & b, where None is all True."""
  if a is None or b is None:
    return a if b is None else b
  return a & b


def below(at: Array, end: int, exact: bool) -> Array | None:
  """at < end, or None where that is known."""
  return None if exact else at < end


def rows(mask: Array | None) -> Array | None:
  return None if mask is None else mask[:, None]


def cols(mask: Array | None) -> Array | None:
  return None if mask is None else mask[None, :]


def load(view, mask: Array | None, policy: str | None = None) -> Array:
  """A load; 0 where the mask is False."""
  if mask is None:
    return plgpu.load(view, eviction_policy=policy)
  mask = jnp.broadcast_to(mask, view.shape)
  other = jnp.zeros((), view.dtype)
  return plgpu.load(view, mask=mask, other=other, eviction_policy=policy)


def store(view, value: Array, mask: Array | None) -> None:
  if mask is not None:
    mask = jnp.broadcast_to(mask, value.shape)
  plgpu.store(view, value, mask=mask)


def dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
  """Contracts one axis of a with one of b, in float32."""
  high = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(
    a,
    b,
    (((over[0],), (over[1],)), ((), ())),
    precision=high,
    preferred_element_type=jnp.float32,
  )


def layer_of(layer_ref, cut: Cut):
  return layer_ref[0] if cut.stacked else jnp.int32(0)


# --- active groups -----------------------------------------------------------


def _active(keep_ref, cut: Cut) -> Array:
  """int32 [groups, padded]: 1 where any token keeps the group."""
  width = next_power(cut.groups)
  group = iota(width)
  exists = below(group, cut.groups, width == cut.groups)
  if cut.tokens == 1:
    return load(keep_ref.at[jnp.int32(0), group], exists).astype(jnp.int32)
  lanes = min(next_power(cut.tokens), max(_HELD // width, 1))

  def some(i, seen):
    token = i * lanes + iota(lanes)
    real = below(token, cut.tokens, cut.tokens % lanes == 0)
    view = keep_ref.at[token[:, None], group[None, :]]
    keep = load(view, both(rows(real), cols(exists)))
    return jnp.maximum(seen, keep.astype(jnp.int32))

  seen = jnp.zeros((lanes, width), jnp.int32)
  times = cdiv(cut.tokens, lanes)
  seen = some(0, seen) if times == 1 else lax.fori_loop(0, times, some, seen)
  return seen.max(0)


class ActiveGroups:
  """The groups that any token keeps, from the mask alone.

  Every program works this out for itself, in registers: a scan, then a sum for
  each question. It costs less than another launch would.
  """

  def __init__(self, keep_ref, cut: Cut):
    self._active = _active(keep_ref, cut)
    self._upto = jnp.cumsum(self._active, dtype=jnp.int32)
    self.count = jnp.sum(self._active)

  def at(self, rank: Array) -> Array:
    """The active group of this rank; past the last, some group past the last.

    A group comes before that of a rank if at most `rank` are active up to it.
    """
    return jnp.sum((self._upto <= rank).astype(jnp.int32))

  def at_or_idle(self, rank: Array) -> Array:
    """The same, with the inactive groups, ascending, after the active ones."""
    idle_upto = iota(self._upto.shape[0]) + 1 - self._upto
    idle = jnp.sum((idle_upto <= rank - self.count).astype(jnp.int32))
    return jnp.where(rank < self.count, self.at(rank), idle)

  def below(self, bound: Array) -> Array:
    """How many active groups have a number below `bound`."""
    group = iota(self._active.shape[0])
    return jnp.sum(jnp.where(group < bound, self._active, 0))


def keepers(keep_ref, group, cut: Cut, padded: int) -> Array:
  """bool [padded]: which tokens keep a group."""
  token = iota(padded)
  real = below(token, cut.tokens, padded == cut.tokens)
  return load(keep_ref.at[token, group], real)


def any_of(mask: Array) -> jax.Array:
  return jnp.max(mask.astype(jnp.int32)) > 0
