"""The K-sparse side of decode: x @ w over the active groups' input channels.

One block of output channels of one split a program. See triton/decode.py for
the letters.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.common import cdiv
from pallas_kernels.triton.decode_cut import (
  STREAM,
  ActiveGroups,
  Cut,
  below,
  both,
  cols,
  dot,
  iota,
  keepers,
  layer_of,
  load,
  rows,
  store,
)


def k_kernel(x_ref, w_ref, keep_ref, layer_ref, parts_ref, *, cut: Cut, tile):
  """A block of output channels over this split's steps of active groups.

  Gives parts [splits, M, N].
  """
  blocks = cdiv(cut.dense, cut.block)
  program = pl.program_id(0)
  split = lax.div(program, jnp.int32(blocks))
  block = lax.rem(program, jnp.int32(blocks))
  col = block * cut.block + iota(cut.block)
  col_mask = below(col, cut.dense, cut.dense % cut.block == 0)
  layer = layer_of(layer_ref, cut)
  active = ActiveGroups(keep_ref, cut)
  lo, hi = _steps(active, split, cut)

  def weight(group, at, inside):
    view = w_ref.at[layer, (group * cut.size + at)[:, None], col[None, :]]
    return load(view, both(rows(inside), cols(col_mask)), STREAM)

  acc = tile(x_ref, weight, keep_ref, active, lo, hi, cut)
  token = iota(acc.shape[1])
  real = below(token, cut.tokens, acc.shape[1] == cut.tokens)
  mask = both(cols(real), rows(col_mask))
  view = parts_ref.at[split, token[None, :], col[:, None]]
  store(view, acc.astype(parts_ref.dtype), mask)


def _even(total, split, splits: int):
  """The part of `total` that falls to a split."""
  lo = lax.div(total * split, jnp.int32(splits))
  return lo, lax.div(total * (split + 1), jnp.int32(splits))


def _steps(active: ActiveGroups, split, cut: Cut):
  """(first, last + 1) step of a split.

  One token: the steps are shared out evenly. Several: a split is a fixed range
  of groups, so that a token's sum has the same order whatever its neighbours
  keep, and the same bits.
  """
  if not cut.shared:
    return _even(active.count * cut.steps, split, cut.splits)
  if cut.splits == 1:
    return jnp.int32(0), active.count * cut.steps
  lo, hi = _even(jnp.int32(cut.groups), split, cut.splits)
  return active.below(lo) * cut.steps, active.below(hi) * cut.steps


def _rows_of(i, cut: Cut):
  """(channels of the group in step i, which of them exist)."""
  at = lax.rem(i, jnp.int32(cut.steps)) * cut.step + iota(cut.step)
  return at, below(at, cut.size, cut.size % cut.step == 0)


def k_dot(x_ref, weight, keep_ref, active: ActiveGroups, lo, hi, cut: Cut):
  """float32 [block, padded].

  The group of a step, and who keeps it, is worked out a step ahead and
  carried: where it is used, it would stand before the weights' prefetch.
  """
  token = iota(cut.padded)
  real = below(token, cut.tokens, cut.padded == cut.tokens)
  masked = cut.shared and not cut.hidden

  def look_up(i):
    group = active.at(lax.div(i, jnp.int32(cut.steps)))
    if not masked:
      return (group,)
    readable = jnp.minimum(group, cut.groups - 1)
    return group, keepers(keep_ref, readable, cut, cut.padded)

  def body(i, carry):
    acc, group, *keep = carry
    at, inside = _rows_of(i, cut)
    w = weight(group, at, inside)
    x = load(
      x_ref.at[token[:, None], (group * cut.size + at)[None, :]],
      both(rows(keep[0] if masked else real), cols(inside)),
    )
    return acc + dot(w, x, (0, 1)), *look_up(i + 1)

  zero = jnp.zeros((cut.block, cut.padded), jnp.float32)
  return lax.fori_loop(lo, hi, body, (zero, *look_up(lo)))[0]


def k_vector(x_ref, weight, keep_ref, active: ActiveGroups, lo, hi, cut: Cut):
  """float32 [block, 1], of one token, which keeps whatever is active."""
  del keep_ref

  def body(i, carry):
    acc, group = carry
    at, inside = _rows_of(i, cut)
    w = weight(group, at, inside).astype(jnp.float32)
    x = load(x_ref.at[jnp.int32(0), group * cut.size + at], inside)
    acc = acc + w * x.astype(jnp.float32)[:, None]
    return acc, active.at(lax.div(i + 1, jnp.int32(cut.steps)))

  zero = jnp.zeros((cut.step, cut.block), jnp.float32)
  first = active.at(lax.div(lo, jnp.int32(cut.steps)))
  acc, _ = lax.fori_loop(lo, hi, body, (zero, first))
  return acc.sum(0)[:, None]
