"""What the TPU kernels share: the call, dots, limits of the hardware."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.problem import Problem

LANES = 128
# Fewest rows of a tile in memory: 8 of 32 bits, 16 of 16 bits.
SUBLANES = {"float32": 8, "bfloat16": 16}
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# v5p has 64 MiB of vector memory a core, v5e and v6e 128. Mosaic keeps values
# of its own there, so tiles are chosen to fill no more than VMEM_FILL.
VMEM_LIMIT = 60 << 20
VMEM_FILL = 40 << 20
# Scalar memory is 1 MiB a core; a list of steps may take half.
MAX_STEPS = 1 << 17


def cdiv(a: int, b: int) -> int:
  """a / b, rounded up."""
  return -(-a // b)


def round_up(a: int, b: int) -> int:
  """The smallest multiple of b that is at least a."""
  return cdiv(a, b) * b


def call(
  kernel: Any,
  scalars: Sequence[Array],
  arrays: Sequence[Array],
  *,
  grid: tuple[Array | int, ...],
  in_specs: Sequence[pl.BlockSpec],
  out_spec: pl.BlockSpec,
  out_shape: jax.ShapeDtypeStruct,
  scratch: Sequence[Any] = (),
  aliases: dict[int, int] | None = None,
  interpret: bool,
  name: str,
) -> Array:
  """Runs a kernel with `scalars` prefetched; a grid bound may be traced."""
  return pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=grid,
      in_specs=in_specs,
      out_specs=out_spec,
      scratch_shapes=scratch,
    ),
    out_shape=out_shape,
    input_output_aliases=aliases or {},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary",) * len(grid),
      vmem_limit_bytes=VMEM_LIMIT,
    ),
    # It fills memory that nobody wrote with NaN, and refuses reads past the
    # end of an array.
    interpret=pltpu.InterpretParams() if interpret else False,
    name=name,
  )(*scalars, *arrays)


def stacks(
  layers: int, layer: Array, arrays: Sequence[Array]
) -> tuple[list[Array], Array]:
  """(arrays with a leading axis of layers, int32 [1]: which layer to read).

  Stacks are read in place. Only where rows are no multiple of 128 long is one
  layer sliced out first: XLA then stores the rows across (it pads less so) and
  copies what a kernel reads, which had better be one layer than all.
  """
  if not layers:
    return [a[None] for a in arrays], layer.reshape(1)
  if all(a.shape[-1] % LANES == 0 for a in arrays):
    return list(arrays), layer.reshape(1)
  sliced = [jax.lax.dynamic_index_in_dim(a, layer, 0) for a in arrays]
  return sliced, jnp.zeros((1,), jnp.int32)


def dot(a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
  """a . b over one axis of each, in float32; float32 keeps its 24 bits."""
  high = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=high,
    preferred_element_type=jnp.float32,
  )


def select(keep: Array, x: Array) -> Array:
  """x where the float `keep` (1 or 0, broadcastable) is 1, else 0.

  A select and no product: what is dropped may be NaN. In float32, since v5e
  has no 16-bit select.
  """
  wide = jnp.broadcast_to(keep, x.shape) > 0.5
  return jnp.where(wide, x.astype(jnp.float32), 0.0).astype(x.dtype)


def dtype_why_not(problem: Problem) -> str | None:
  """Why the element type cannot run, or None."""
  if problem.dtype in ITEM_BYTES:
    return None
  return f"a TPU multiplies bfloat16 and float32, not {problem.dtype}."
