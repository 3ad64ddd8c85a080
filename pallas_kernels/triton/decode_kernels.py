"""The decode kernels: one block of output channels a program.

See triton/decode.py for what they compute, and for the letters.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton.common import cdiv, next_power

# A weight is read once: it should not push the activations out of the cache.
_STREAM = "evict_first"


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
    compact: the hidden is by place, not by channel.
    joined: gate and up are one array, [L, 2, ...].
    stacked: the weight has more than one layer to pick from.
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
  compact: bool = False
  joined: bool = False
  stacked: bool = False

  @property
  def shared(self) -> bool:
    """Whether tokens may keep different groups; one token keeps all active."""
    return self.tokens > 1

  @property
  def flat(self) -> bool:
    """Whether a block of the N-sparse side runs on across groups."""
    return self.transposed and self.size % self.block != 0

  @property
  def pieces(self) -> int:
    """Blocks of a group (N-sparse side), unless flat."""
    return cdiv(self.size, self.block)

  @property
  def steps(self) -> int:
    """Steps of a group (K-sparse dot)."""
    return cdiv(self.size, self.step)


def _iota(n: int) -> Array:
  return jnp.arange(n, dtype=jnp.int32)


def _both(a: Array | None, b: Array | None) -> Array | None:
  """a & b, where None is all True."""
  if a is None or b is None:
    return a if b is None else b
  return a & b


def _below(at: Array, end: int, exact: bool) -> Array | None:
  """at < end, or None where that is known."""
  return None if exact else at < end


def _rows(mask: Array | None) -> Array | None:
  return None if mask is None else mask[:, None]


def _cols(mask: Array | None) -> Array | None:
  return None if mask is None else mask[None, :]


def _load(view, mask: Array | None, policy: str | None = None) -> Array:
  """A load; 0 where the mask is False."""
  if mask is None:
    return plgpu.load(view, eviction_policy=policy)
  mask = jnp.broadcast_to(mask, view.shape)
  other = jnp.zeros((), view.dtype)
  return plgpu.load(view, mask=mask, other=other, eviction_policy=policy)


def _dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
  """Contracts one axis of a with one of b, in float32."""
  high = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(
    a,
    b,
    (((over[0],), (over[1],)), ((), ())),
    precision=high,
    preferred_element_type=jnp.float32,
  )


def _layer(layer_ref, cut: Cut):
  return layer_ref[0] if cut.stacked else jnp.int32(0)


# --- the N-sparse side: x @ w, or silu(x @ gate) * (x @ up) -------------------


def n_kernel(
  x_ref, keep_ref, active_ref, count_ref, layer_ref, *refs, cut: Cut, tile
):
  """One block of channels, of one group or (flat) running on across groups."""
  *w_refs, out_ref = refs
  count = count_ref[0]
  program = pl.program_id(0)
  if cut.flat:
    place = program * cut.block + _iota(cut.block)
    slot = lax.div(place, jnp.int32(cut.size))
    exists = _below(
      place, cut.groups * cut.size, cut.groups * cut.size % cut.block == 0
    )
    group = plgpu.load(active_ref.at[jnp.minimum(slot, cut.groups - 1)])
    if exists is not None:  # else two places would name one channel
      group = jnp.where(exists, group, cut.groups)
    channel = group * cut.size + lax.rem(place, jnp.int32(cut.size))
    reads = place < count * cut.size
    works = program * cut.block < count * cut.size
  else:
    slot = lax.div(program, jnp.int32(cut.pieces))
    first = lax.rem(program, jnp.int32(cut.pieces)) * cut.block
    group = active_ref[slot]
    place = slot * cut.size + first + _iota(cut.block)
    channel = group * cut.size + first + _iota(cut.block)
    reads = exists = _below(
      first + _iota(cut.block), cut.size, cut.size % cut.block == 0
    )
    works = slot < count
  goes_to = place if cut.compact else channel
  leads = [(_layer(layer_ref, cut),)] * len(w_refs)
  if cut.joined:
    w_refs, leads = w_refs * 2, [(*leads[0], jnp.int32(i)) for i in range(2)]
  loads = [
    functools.partial(_n_weight, ref, lead, channel, reads)
    for ref, lead in zip(w_refs, leads, strict=True)
  ]

  @pl.when(works)
  def _():
    tile(x_ref, loads, keep_ref, out_ref, group, reads, exists, goes_to, cut)

  if not cut.compact:  # nobody reads the hidden of an inactive group

    @pl.when(jnp.logical_not(works))
    def _():
      padded = next_power(cut.padded)
      token = _iota(padded)
      real = _below(token, cut.tokens, padded == cut.tokens)
      _store(
        out_ref.at[token[None, :], goes_to[:, None]],
        jnp.zeros((cut.block, padded), out_ref.dtype),
        _both(_cols(real), _rows(exists)),
      )


def _store(view, value: Array, mask: Array | None) -> None:
  if mask is not None:
    mask = jnp.broadcast_to(mask, value.shape)
  plgpu.store(view, value, mask=mask)


def _n_weight(ref, lead, channel, reads, k, k_mask, transposed: bool):
  """A weight tile: [block, step] if transposed, else [step, block]."""
  if transposed:
    view = ref.at[*lead, channel[:, None], k[None, :]]
    return _load(view, _both(_rows(reads), _cols(k_mask)), _STREAM)
  view = ref.at[*lead, k[:, None], channel[None, :]]
  return _load(view, _both(_cols(reads), _rows(k_mask)), _STREAM)


def _swiglu(outs: Sequence[Array]) -> Array:
  if len(outs) == 1:
    return outs[0]
  gate, up = outs
  return gate * jax.nn.sigmoid(gate) * up


def n_dot(
  x_ref, loads, keep_ref, out_ref, group, reads, exists, goes_to, cut: Cut
):
  token = _iota(cut.padded)
  real = _below(token, cut.tokens, cut.padded == cut.tokens)

  def body(i, accs):
    k = i * cut.step + _iota(cut.step)
    k_mask = _below(k, cut.dense, cut.dense % cut.step == 0)
    x = _load(
      x_ref.at[token[:, None], k[None, :]], _both(_rows(real), _cols(k_mask))
    )
    over = (1 if cut.transposed else 0, 1)
    return tuple(
      acc + _dot(load(k, k_mask, cut.transposed), x, over)
      for acc, load in zip(accs, loads, strict=True)
    )

  zero = jnp.zeros((cut.block, cut.padded), jnp.float32)
  steps = cdiv(cut.dense, cut.step)
  outs = lax.fori_loop(0, steps, body, (zero,) * len(loads))
  y = _swiglu(outs)
  keep = _rows(reads) if cut.flat else None
  if cut.shared:
    rows = group[:, None] if cut.flat else group
    view = keep_ref.at[token[None, :], rows]
    keep = _both(_load(view, _both(_cols(real), keep)), keep)
  if keep is not None:
    y = jnp.where(keep, y, 0.0)
  _store(
    out_ref.at[token[None, :], goes_to[:, None]],
    y.astype(out_ref.dtype),
    _both(_cols(real), _rows(exists)),
  )


def n_vector(
  x_ref, loads, keep_ref, out_ref, group, reads, exists, goes_to, cut: Cut
):
  axis = 1 if cut.transposed else 0
  spread = _cols if cut.transposed else _rows

  def body(i, accs):
    k = i * cut.step + _iota(cut.step)
    k_mask = _below(k, cut.dense, cut.dense % cut.step == 0)
    tiles = [load(k, k_mask, cut.transposed) for load in loads]
    out = []
    for m in range(cut.tokens):
      x = spread(_load(x_ref.at[jnp.int32(m), k], k_mask).astype(jnp.float32))
      out.append(
        tuple(
          acc + w.astype(jnp.float32) * x
          for acc, w in zip(accs[m], tiles, strict=True)
        )
      )
    return tuple(out)

  shape = (cut.block, cut.step) if cut.transposed else (cut.step, cut.block)
  zero = ((jnp.zeros(shape, jnp.float32),) * len(loads),) * cut.tokens
  steps = cdiv(cut.dense, cut.step)
  accs = body(0, zero) if steps == 1 else lax.fori_loop(0, steps, body, zero)
  for m in range(cut.tokens):
    y = _swiglu([acc.sum(axis) for acc in accs[m]])
    keep = reads if cut.flat else None
    if cut.shared:
      keep = _both(_load(keep_ref.at[jnp.int32(m), group], keep), keep)
    if keep is not None:
      y = jnp.where(keep, y, 0.0)
    _store(out_ref.at[jnp.int32(m), goes_to], y.astype(out_ref.dtype), exists)


# --- the K-sparse side -------------------------------------------------------


def _k_program(cut: Cut):
  """(split, first output channel) of this program."""
  blocks = cdiv(cut.dense, cut.block)
  program = pl.program_id(0)
  split = lax.div(program, jnp.int32(blocks))
  return split, lax.rem(program, jnp.int32(blocks)) * cut.block


def _even(total, split, splits: int):
  """The part of `total` steps that falls to a split."""
  lo = lax.div(total * split, jnp.int32(splits))
  return lo, lax.div(total * (split + 1), jnp.int32(splits))


def _slots_below(active_ref, count, bound, cut: Cut):
  """How many active groups have a number below `bound`."""
  padded = next_power(cut.groups)
  at = _iota(padded)
  exists = _below(at, cut.groups, padded == cut.groups)
  group = _load(active_ref.at[at], exists)
  hit = (at < count) & (group < bound)
  return jnp.sum(hit.astype(jnp.int32))


def _k_steps(active_ref, count_ref, split, cut: Cut):
  """(first, last + 1) step of a split of a dot.

  One token: the steps are shared out evenly. Several: a split is a fixed range
  of groups, so that a token's sum has the same order whatever its neighbours
  keep, and the same bits.
  """
  count = count_ref[0]
  if not cut.shared:
    return _even(count * cut.steps, split, cut.splits)
  lo, hi = _even(jnp.int32(cut.groups), split, cut.splits)
  return tuple(
    _slots_below(active_ref, count, bound, cut) * cut.steps
    for bound in (lo, hi)
  )


def k_dot(
  x_ref, w_ref, keep_ref, active_ref, count_ref, layer_ref, out_ref, *, cut
):
  """A block of output channels over this split's steps of active groups.

  The group of a step, and who keeps it, is read a step ahead and carried: read
  where it is used, it would halve how far ahead the weights are prefetched.
  """
  split, first = _k_program(cut)
  lo, hi = _k_steps(active_ref, count_ref, split, cut)
  layer = _layer(layer_ref, cut)
  col = first + _iota(cut.block)
  col_mask = _below(col, cut.dense, cut.dense % cut.block == 0)
  token = _iota(cut.padded)
  real = _below(token, cut.tokens, cut.padded == cut.tokens)
  masked = cut.shared and not cut.compact

  def look_up(i):
    slot = jnp.minimum(lax.div(i, jnp.int32(cut.steps)), cut.groups - 1)
    group = active_ref[slot]
    if not masked:
      return (group,)
    return group, _load(keep_ref.at[token, group], real)

  def body(i, carry):
    acc, group, *keep = carry
    slot = lax.div(i, jnp.int32(cut.steps))
    at = lax.rem(i, jnp.int32(cut.steps)) * cut.step + _iota(cut.step)
    inside = _below(at, cut.size, cut.size % cut.step == 0)
    row = group * cut.size + at
    w = _load(
      w_ref.at[layer, row[:, None], col[None, :]],
      _both(_rows(inside), _cols(col_mask)),
      _STREAM,
    )
    k = slot * cut.size + at if cut.compact else row
    x = _load(
      x_ref.at[token[:, None], k[None, :]],
      _both(_rows(keep[0] if masked else real), _cols(inside)),
    )
    acc += _dot(w, x, (0, 1))
    return acc, *look_up(i + 1)

  zero = jnp.zeros((cut.block, cut.padded), jnp.float32)
  acc, *_ = lax.fori_loop(lo, hi, body, (zero, *look_up(lo)))
  _store(
    out_ref.at[split, token[None, :], col[:, None]],
    acc.astype(out_ref.dtype),
    _both(_cols(real), _rows(col_mask)),
  )


def k_vector(
  x_ref, w_ref, keep_ref, active_ref, count_ref, layer_ref, out_ref, *, cut
):
  """One token; a step is `step` places, of as many groups as they touch."""
  del keep_ref  # one token keeps whatever is active
  split, first = _k_program(cut)
  places = count_ref[0] * cut.size
  steps = lax.div(places + cut.step - 1, jnp.int32(cut.step))
  lo, hi = _even(steps, split, cut.splits)
  layer = _layer(layer_ref, cut)
  col = first + _iota(cut.block)
  col_mask = _below(col, cut.dense, cut.dense % cut.block == 0)

  def look_up(i):
    place = i * cut.step + _iota(cut.step)
    slot = lax.div(place, jnp.int32(cut.size))
    return plgpu.load(active_ref.at[jnp.minimum(slot, cut.groups - 1)])

  def body(i, carry):
    acc, group = carry
    place = i * cut.step + _iota(cut.step)
    inside = place < places
    row = group * cut.size + lax.rem(place, jnp.int32(cut.size))
    view = w_ref.at[layer, row[:, None], col[None, :]]
    w = _load(view, _both(_rows(inside), _cols(col_mask)), _STREAM)
    x = _load(x_ref.at[jnp.int32(0), place if cut.compact else row], inside)
    acc = acc + w.astype(jnp.float32) * x.astype(jnp.float32)[:, None]
    return acc, look_up(i + 1)

  zero = jnp.zeros((cut.step, cut.block), jnp.float32)
  acc, _ = lax.fori_loop(lo, hi, body, (zero, look_up(lo)))
  view = out_ref.at[split, jnp.int32(0), col]
  _store(view, acc.sum(0).astype(out_ref.dtype), col_mask)
