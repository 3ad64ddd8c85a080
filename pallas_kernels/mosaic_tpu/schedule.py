"""Which blocks a kernel visits: lists of active blocks, and an order of tokens.

Letters: M tokens, I tiles of tokens, G groups, J blocks of channels.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.mosaic_tpu.common import cdiv

_CODE_BITS = 30


def gray_rank(code: Array, bits: int) -> Array:
  """Place of a code in the Gray sequence r -> r ^ (r >> 1)."""
  shift = 1
  while shift < bits:
    code = code ^ (code >> shift)
    shift *= 2
  return code


def active_steps(active: Array) -> tuple[Array, Array]:
  """(steps int32 [active.size], count int32 []) of a bool array.

  `steps[:count]` are the flat places of True, ascending, so that all steps of
  one leading index come one after the other; the rest is 0. An array without
  any True gives one step, at 0: a grid of no steps would leave a kernel's
  output unwritten.
  """
  flat = active.reshape(-1)
  (steps,) = jnp.nonzero(flat, size=flat.size, fill_value=0)
  count = jnp.maximum(flat.sum(dtype=jnp.int32), 1)
  return steps.astype(jnp.int32), count


def overlap(groups: int, group_size: int, width: int) -> np.ndarray:
  """bool [G, J]: whether group g has channels in block j, `width` wide."""
  blocks = cdiv(groups * group_size, width)
  first_G = np.arange(groups)[:, None] * group_size
  first_J = np.arange(blocks)[None] * width
  return (first_G < first_J + width) & (first_J < first_G + group_size)


def tile_blocks(
  keep_MG: Array, tokens: int, group_size: int, width: int
) -> Array:
  """bool [I, J]: whether any token of tile i keeps a group in block j."""
  keep_IG = tile_any(keep_MG, tokens)
  shared_GJ = overlap(keep_MG.shape[1], group_size, width)
  hits = jnp.dot(
    keep_IG.astype(jnp.float32), jnp.asarray(shared_GJ, jnp.float32)
  )
  return hits > 0.5


def tile_any(keep_MG: Array, tokens: int) -> Array:
  """bool [I, G]: whether any token of a tile of `tokens` keeps a group."""
  count, groups = keep_MG.shape
  tiles = cdiv(count, tokens)
  padded = jnp.pad(keep_MG, ((0, tiles * tokens - count), (0, 0)))
  return padded.reshape(tiles, tokens, groups).any(1)


def every_tile(active_IJ: Array) -> Array:
  """The same with block 0 for tiles that have none, so that all are written."""
  none_I = ~active_IJ.any(1)
  first_J = jnp.arange(active_IJ.shape[1]) == 0
  return active_IJ | (none_I[:, None] & first_J[None])


def token_order(keep_MG: Array) -> Array:
  """int32 [M]: tokens by Gray rank of what they keep, so that like are near.

  The code's bits are the groups whose keep rate is nearest one half, the
  nearest first, at most 30: they tell tokens apart best, and M tokens fill no
  more than log2(M) of them anyway.
  """
  doubt_G = jnp.abs(keep_MG.mean(0, dtype=jnp.float32) - 0.5)
  bits = min(keep_MG.shape[1], _CODE_BITS)
  chosen = jnp.argsort(doubt_G, stable=True)[:bits]
  weights = 1 << jnp.arange(bits - 1, -1, -1, dtype=jnp.int32)
  code_M = jnp.where(keep_MG[:, chosen], weights[None], 0).sum(-1)
  rank_M = gray_rank(code_M.astype(jnp.int32), bits)
  return jnp.argsort(rank_M, stable=True).astype(jnp.int32)


def inverse(order: Array) -> Array:
  """The permutation that undoes `order`."""
  places = jnp.arange(order.size, dtype=order.dtype)
  return jnp.zeros_like(order).at[order].set(places, unique_indices=True)


def first_of(steps, per: int, at: Array) -> Array:
  """In a kernel: whether step `at` is the first of its steps[at] // per."""
  before = steps[jnp.maximum(at - 1, 0)]
  mine = jax.lax.div(steps[at], per)
  return (at == 0) | (jax.lax.div(before, per) != mine)


def last_of(steps, per: int, at: Array, count: Array | int) -> Array:
  """In a kernel: whether step `at` is the last of its steps[at] // per."""
  after = steps[jnp.minimum(at + 1, count - 1)]
  mine = jax.lax.div(steps[at], per)
  return (at == count - 1) | (jax.lax.div(after, per) != mine)
