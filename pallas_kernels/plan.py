"""RoutePlan: what a keep mask means for the kernels, worked out once.

A mask [B, T, G] (True = compute) becomes, over the M = B * T tokens:

* per group, the tokens that keep it, in order, then the others (`group_order`);
* per span of `span` neighbouring groups, the tokens sorted by which of these
  groups they keep, an integer code of `span` bits, along a Gray code, so that
  neighbours differ in few bits (`class_order`, `class_code`): a tile of sorted
  tokens runs only the groups in the union of its codes (`class_union`). The
  Gray code is a monotone one, from all kept to none, so that tiles with much
  work come first and the last ones to finish are short.

Decode reads the mask alone. One plan serves all ops of a decision. Under jit,
what no op reads is not computed.

Letters: B batch, T tokens of a row, M = B * T, G groups, S spans.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.errors import Unsupported

MAX_SPAN = 8  # a class code is counted in 2**span bins
TILE = 128  # tokens whose codes make one union


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutePlan:
  """A keep mask in the forms that kernels read.

  Attributes:
    keep_MG: bool [M, G], the mask itself; token m is row m // T, place m % T.
    group_order_GM: int32 [G, M], a permutation of the tokens for every group:
      those that keep it, ascending, then the others, ascending.
    group_start_GB: int32 [G, B + 1], how many tokens before row b keep the
      group; the last column is how many keep it at all.
    class_order_SM: int32 [S, M], a permutation of the tokens for every span of
      groups, by the place of their code in `class_sequence`, then ascending.
    class_code_SM: int32 [S, M], codes in that order; bit j stands for group
      s * span + j.
    class_union_SU: int32 [S, ceil(M / TILE)], the bitwise or of each TILE of
      sorted codes.
    batch, length: B and T.
    span: neighbouring groups in a class code.
    density: share of the mask that is expected to be True; dispatch picks by
      it, and results never depend on it.
    shared: the tokens are expected to keep the same groups; for dispatch too.
  """

  keep_MG: Array
  group_order_GM: Array
  group_start_GB: Array
  class_order_SM: Array
  class_code_SM: Array
  class_union_SU: Array
  batch: int = dataclasses.field(metadata={"static": True})
  length: int = dataclasses.field(metadata={"static": True})
  span: int = dataclasses.field(metadata={"static": True})
  density: float = dataclasses.field(metadata={"static": True})
  shared: bool = dataclasses.field(default=False, metadata={"static": True})

  @property
  def tokens(self) -> int:
    """M = B * T."""
    return self.batch * self.length

  @property
  def groups(self) -> int:
    """G."""
    return self.keep_MG.shape[-1]

  @property
  def spans(self) -> int:
    """S = ceil(G / span)."""
    return -(-self.groups // self.span)


@jax.custom_jvp
def _decide(mask: Array) -> Array:
  """mask != 0; a gradient for the mask is refused, not silently zero."""
  return mask != 0


@_decide.defjvp
def _decide_jvp(primals, tangents):
  del primals, tangents
  raise Unsupported(
    "a gradient for the mask: kernels skip the product that a dropped group's "
    "gradient needs; differentiate pallas_kernels.reference with a float mask, "
    "or put jax.lax.stop_gradient around the mask."
  )


def decisions(mask: Array) -> Array:
  """bool [B, T, G] of a mask of any type (True or non-zero = compute).

  Raises:
    ValueError: not three axes.
    Unsupported: when differentiated with respect to a float mask.
  """
  if mask.ndim != 3:
    raise ValueError(f"a mask is [B, T, G], not {mask.shape}.")
  return mask if mask.dtype == jnp.bool_ else _decide(mask)


def default_span(tokens: int, groups: int) -> int:
  """Groups in a class code, from what there is to sort.

  More groups to a code mean fewer partial outputs, but classes that are smaller
  than a tile of 128 tokens. Partial outputs weigh more where groups are narrow,
  that is, where there are many. From measurements at F 14,336; see BUILD_NOTES.
  """
  tiles = max(tokens // 128, 1).bit_length() - 1
  if groups <= 16:
    most, extra = 5, 0
  elif groups <= 64:
    most, extra = 7, 0 if groups <= 32 else 2
  else:
    most, extra = MAX_SPAN, 3
  return max(1, min(groups, most, tiles + extra))


@functools.cache
def class_sequence(bits: int) -> tuple[int, ...]:
  """All codes of `bits` bits, from many ones to none, one bit a step.

  A monotone Gray code (Savage and Winkler, 1995): it visits the codes with k
  or k + 1 ones before any with k - 1. The paths between two neighbouring
  levels are built from those of one bit less and then joined.
  """

  @functools.cache
  def path(n: int, level: int) -> tuple[tuple[int, ...], ...]:
    """The codes that lead from `level` ones to `level` + 1, bits as tuples."""
    if level < 0 or level >= n:
      return ()
    if n == 1:
      return ((0,), (1,))
    turn = turns(n - 1)
    lifted = tuple(
      (1, *(code[turn[i]] for i in range(n - 1)))
      for code in path(n - 1, level - 1)
    )
    return lifted + tuple((0, *code) for code in path(n - 1, level))

  @functools.cache
  def turns(n: int) -> tuple[int, ...]:
    """The permutation of bits that makes two paths meet."""
    if n < 2:
      return tuple(range(n))
    below = turns(n - 1)
    return (n - 1, *(below[below[i]] for i in range(n - 1)))

  codes: list[int] = []
  for level in range(bits):
    step = path(bits, level)
    step = step if level % 2 == 0 else step[::-1]
    codes += [sum(bit << i for i, bit in enumerate(code)) for code in step]
  return tuple(codes[::-1])


def class_rank(bits: int) -> np.ndarray:
  """int32 [2**bits]: place of each code in `class_sequence`."""
  rank = np.empty(1 << bits, np.int32)
  rank[list(class_sequence(bits))] = np.arange(1 << bits)
  return rank


def class_codes(keep_MG: Array, span: int) -> Array:
  """int32 [S, M]: bit j of entry [s, m] says if m keeps group s * span + j."""
  tokens, groups = keep_MG.shape
  spans = -(-groups // span)
  pad = spans * span - groups
  bits = jnp.pad(keep_MG, ((0, 0), (0, pad))).reshape(tokens, spans, span)
  weights = (1 << jnp.arange(span, dtype=jnp.int32))[None, None]
  return jnp.where(bits, weights, 0).sum(-1).astype(jnp.int32).T


def sorted_groups(keep_MG: Array, batch: int) -> tuple[Array, Array]:
  """(group_order_GM, group_start_GB) in plain jnp; see RoutePlan."""
  keep_GM = keep_MG.T
  order = jnp.argsort(~keep_GM, axis=-1, stable=True).astype(jnp.int32)
  groups, tokens = keep_GM.shape
  length = tokens // max(batch, 1)
  counts_GB = keep_GM.reshape(groups, batch, length).sum(-1)
  start = jnp.pad(jnp.cumsum(counts_GB, axis=-1), ((0, 0), (1, 0)))
  return order, start.astype(jnp.int32)


def sorted_classes(keep_MG: Array, span: int) -> tuple[Array, Array]:
  """(class_order_SM, class_code_SM) in plain jnp; see RoutePlan."""
  codes = class_codes(keep_MG, span)
  rank = jnp.asarray(class_rank(span))[codes]
  order = jnp.argsort(rank, axis=-1, stable=True).astype(jnp.int32)
  return order, jnp.take_along_axis(codes, order, axis=-1)


def class_unions(class_code_SM: Array) -> Array:
  """class_union_SU of RoutePlan."""
  spans, tokens = class_code_SM.shape
  codes = jnp.pad(class_code_SM, ((0, 0), (0, -tokens % TILE)))
  codes = codes.reshape(spans, codes.shape[1] // TILE, TILE)
  return jax.lax.reduce(codes, jnp.int32(0), jax.lax.bitwise_or, (2,))


def check_hints(span: int, density: float) -> None:
  """ValueError for a span or a density out of range."""
  if not 1 <= span <= MAX_SPAN:
    raise ValueError(f"span={span} must be 1 to {MAX_SPAN}.")
  if not 0 <= density <= 1:
    raise ValueError(f"density={density} must be 0 to 1.")


def make_plan(
  mask: Array,
  *,
  span: int | None = None,
  density: float = 0.5,
  shared: bool = False,
  backend: str = "auto",
  interpret: bool = False,
) -> RoutePlan:
  """Works out what kernels need to know about a keep mask.

  Args:
    mask: [B, T, G], bool, integer or float; True or non-zero = compute. Left
      padding is a token that keeps nothing.
    span: groups in a class code, 1 to 8; None picks it from the shape.
    density: expected share of True, for dispatch.
    shared: all tokens are expected to keep the same groups, for dispatch.
    backend: `reference` (XLA's sort), `triton`, or `auto`.
    interpret: runs Pallas kernels in interpret mode, for tests on a CPU.

  Raises:
    ValueError: not three axes, or a span or density out of range.
    Unsupported: the backend named cannot run here, or a gradient for a float
      mask is asked for.
  """
  keep = decisions(jnp.asarray(mask))
  batch, length, groups = keep.shape
  if span is None:
    span = default_span(batch * length, groups)
  check_hints(span, density)
  from pallas_kernels import dispatch  # dispatch knows the backends

  make = dispatch.plan_maker(backend)
  if batch * length == 0 or groups == 0:
    make = reference_parts
  keep_MG = keep.reshape(batch * length, groups)
  if interpret and make is not reference_parts:
    make = functools.partial(make, interpret=True)
  group_order, group_start, class_order, class_code = make(
    keep_MG, batch=batch, span=span
  )
  return RoutePlan(
    keep_MG,
    group_order,
    group_start,
    class_order,
    class_code,
    class_unions(class_code),
    batch=batch,
    length=length,
    span=span,
    density=density,
    shared=shared,
  )


def reference_parts(keep_MG: Array, *, batch: int, span: int) -> tuple:
  """RoutePlan's sorts (without unions), in plain jnp."""
  return (*sorted_groups(keep_MG, batch), *sorted_classes(keep_MG, span))
