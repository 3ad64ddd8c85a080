"""The N-sparse side of decode: x @ w, or silu(x @ gate) * (x @ up).

One block of one group's output channels a program. See triton/decode.py for
the letters.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton.common import cdiv, next_power
from pallas_kernels.triton.decode_cut import (
  STREAM,
  ActiveGroups,
  Cut,
  any_of,
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
from pallas_kernels.triton.decode_route import bias_and_limit, group_logits


def n_kernel(*refs, cut: Cut, tile):
  """One block of channels of one group.

  Takes x, (keep or, fused, the router's input, v, c and threshold), layer and
  the weights; gives the output, then the decisions if fused.
  """
  x_ref, *refs = refs
  if cut.fused:
    router, refs = refs[:4], refs[4:]
  else:
    keep_ref, *refs = refs
  layer_ref, *refs = refs
  number = 1 if cut.joined or not cut.hidden else 2
  w_refs, outs = refs[:number], refs[number:]
  out_ref, *outs = outs
  program = pl.program_id(0)
  part = lax.div(program, jnp.int32(cut.pieces))
  first = lax.rem(program, jnp.int32(cut.pieces)) * cut.block
  layer = layer_of(layer_ref, cut)
  group = part
  if cut.fused:
    decided = _decide(router, layer, group, cut)
    works = functools.reduce(jnp.logical_or, decided)
    own = functools.partial(_vector_of, decided)

    @pl.when(first == 0)
    def _():
      for m, keep in enumerate(decided):
        plgpu.store(outs[0].at[jnp.int32(m), group], keep)

  else:
    if cut.ranked:
      active = ActiveGroups(keep_ref, cut)
      works = part < active.count
      group = (active.at if cut.hidden else active.at_or_idle)(part)
    else:
      works = any_of(keepers(keep_ref, group, cut, next_power(cut.tokens)))
    own = functools.partial(keepers, keep_ref, group, cut)
  channel = group * cut.size + first + iota(cut.block)
  exists = below(first + iota(cut.block), cut.size, cut.size % cut.block == 0)
  leads = [(layer,)] * len(w_refs)
  if cut.joined:
    w_refs, leads = w_refs * 2, [(layer, jnp.int32(i)) for i in range(2)]
  loads = [
    functools.partial(_weight, ref, lead, channel, exists)
    for ref, lead in zip(w_refs, leads, strict=True)
  ]

  @pl.when(works)
  def _():
    tile(x_ref, loads, own, out_ref, exists, channel, cut)

  if not cut.hidden:  # nobody reads the hidden of an inactive group

    @pl.when(jnp.logical_not(works))
    def _():
      padded = next_power(cut.padded)
      token = iota(padded)
      real = below(token, cut.tokens, padded == cut.tokens)
      store(
        out_ref.at[token[None, :], channel[:, None]],
        jnp.zeros((cut.block, padded), out_ref.dtype),
        both(cols(real), rows(exists)),
      )


def _decide(router, layer, group, cut: Cut) -> list[Array]:
  """Whether each token keeps a group."""
  x_ref, v_ref, c_ref, threshold_ref = router
  tokens = [jnp.int32(m) for m in range(cut.tokens)]
  bias, limit = bias_and_limit(c_ref, threshold_ref, layer, group)
  (logits,) = group_logits(x_ref, v_ref, layer, tokens, [group], cut.warps)
  return [logit + bias > limit for logit in logits]


def _vector_of(decided: Sequence[Array], padded: int) -> Array:
  """bool [padded] of scalars, False behind them."""
  out = jnp.zeros((padded,), jnp.bool_)
  for m, keep in enumerate(decided):
    out = jnp.where(iota(padded) == m, keep, out)
  return out


def _weight(ref, lead, channel, exists, k, k_mask, transposed: bool):
  """A weight tile: [block, step] if transposed, else [step, block]."""
  if transposed:
    view = ref.at[*lead, channel[:, None], k[None, :]]
    return load(view, both(rows(exists), cols(k_mask)), STREAM)
  view = ref.at[*lead, k[:, None], channel[None, :]]
  return load(view, both(cols(exists), rows(k_mask)), STREAM)


def _swiglu(outs: Sequence[Array]) -> Array:
  if len(outs) == 1:
    return outs[0]
  gate, up = outs
  return gate * jax.nn.sigmoid(gate) * up


def n_dot(x_ref, loads, own, out_ref, exists, channel, cut: Cut):
  """The weight tile is the left operand of a dot, the tokens the right."""
  token = iota(cut.padded)
  real = below(token, cut.tokens, cut.padded == cut.tokens)

  def body(i, accs):
    k = i * cut.step + iota(cut.step)
    k_mask = below(k, cut.dense, cut.dense % cut.step == 0)
    x = load(
      x_ref.at[token[:, None], k[None, :]], both(rows(real), cols(k_mask))
    )
    over = (1 if cut.transposed else 0, 1)
    return tuple(
      acc + dot(weight(k, k_mask, cut.transposed), x, over)
      for acc, weight in zip(accs, loads, strict=True)
    )

  zero = jnp.zeros((cut.block, cut.padded), jnp.float32)
  steps = cdiv(cut.dense, cut.step)
  y = _swiglu(lax.fori_loop(0, steps, body, (zero,) * len(loads)))
  if cut.shared:
    y = jnp.where(own(cut.padded)[None, :], y, 0.0)
  store(
    out_ref.at[token[None, :], channel[:, None]],
    y.astype(out_ref.dtype),
    both(cols(real), rows(exists)),
  )


def n_vector(x_ref, loads, own, out_ref, exists, channel, cut: Cut):
  """Each weight is multiplied and added by hand, a token at a time."""
  axis = 1 if cut.transposed else 0
  spread = cols if cut.transposed else rows

  def body(i, accs):
    k = i * cut.step + iota(cut.step)
    k_mask = below(k, cut.dense, cut.dense % cut.step == 0)
    tiles = [weight(k, k_mask, cut.transposed) for weight in loads]
    out = []
    for m in range(cut.tokens):
      x = spread(load(x_ref.at[jnp.int32(m), k], k_mask).astype(jnp.float32))
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
  width = next_power(cut.tokens)
  keep = own(width) if cut.shared else None
  for m in range(cut.tokens):
    y = _swiglu([acc.sum(axis) for acc in accs[m]])
    if keep is not None:
      y = jnp.where(any_of(keep & (iota(width) == m)), y, 0.0)
    store(out_ref.at[jnp.int32(m), channel], y.astype(out_ref.dtype), exists)
