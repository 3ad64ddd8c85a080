"""What the Triton kernels share: the call, whole-array operands, precision."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def call(
  kernel,
  out_shape: Any,
  grid: tuple[int, ...],
  *arrays: Array,
  num_warps: int,
  num_stages: int,
  interpret: bool,
  name: str,
):
  """Runs a kernel whose operands are whole arrays, indexed by the kernel.

  jax 0.11 and later warn at each call that Pallas Triton is deprecated; our
  users cannot act on it (BUILD_NOTES says what will follow), so it is silent.
  """
  whole = pl.BlockSpec()
  multiple = isinstance(out_shape, (tuple, list))
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*Pallas Triton.*")
    return pl.pallas_call(
      kernel,
      out_shape=out_shape,
      grid=grid,
      in_specs=[whole] * len(arrays),
      out_specs=[whole] * len(out_shape) if multiple else whole,
      compiler_params=plgpu.CompilerParams(
        num_warps=num_warps, num_stages=num_stages
      ),
      interpret=interpret,
      name=name,
    )(*arrays)


def dot(a: Array, b: Array) -> Array:
  """a @ b in float32; float32 operands keep their 24 bits."""
  high = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jnp.dot(a, b, precision=high, preferred_element_type=jnp.float32)


def cdiv(a: int, b: int) -> int:
  """a / b, rounded up."""
  return -(-a // b)


def next_power(n: int) -> int:
  """The smallest power of two that is at least n."""
  return 1 << max(n - 1, 0).bit_length()
