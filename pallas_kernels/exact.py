"""Float32 matmuls of bfloat16 activations, at the speed of bfloat16.

A router computes in float32 whatever the dtype of the model, and most of its
work is x @ down with x in bfloat16: converting x would write it out twice as
wide and leave the matrix units. A float32 weight is the sum of three bfloat16
numbers to 24 bits, so three bfloat16 products, which float32 accumulators take
exactly, give the float32 result: one matmul three times as wide as `down`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import reference


def split_bfloat16(w: Array) -> tuple[Array, ...]:
  """Three bfloat16 arrays whose sum is a float32 one, largest first.

  What is below bfloat16's range is lost, as it would be in any product that
  matters: |w| * 2**-24 of the first where that is a normal number.
  """
  parts = []
  for _ in range(3):
    # Not astype: XLA may drop a round trip through bfloat16.
    part = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
    parts.append(part.astype(jnp.bfloat16))
    w = w - part
  return parts[0], parts[1], parts[2]


def matmul_float32(x: Array, w: Array) -> Array:
  """x [..., K] @ w [K, N], float32 [..., N], rounded as float32 is.

  Args:
    x: any float dtype; bfloat16 takes the fast path.
    w: float32 [K, N].
  """
  if x.dtype != jnp.bfloat16:
    high = jax.lax.Precision.HIGHEST
    return jnp.matmul(x.astype(jnp.float32), w, precision=high)
  wide = jnp.concatenate(split_bfloat16(w), axis=-1)
  parts = jnp.matmul(x, wide, preferred_element_type=jnp.float32)
  first, second, third = jnp.split(parts, 3, axis=-1)
  return first + (second + third)


# The specification's routers, with the only matmul of theirs that reads x done
# so: about one read of x. Decisions differ from the specification's only where
# a logit is within float32's rounding of its threshold.
route = functools.partial(reference.route, matmul=matmul_float32)
route_folded = functools.partial(reference.route_folded, matmul=matmul_float32)
