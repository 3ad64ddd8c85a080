"""Float32 matmuls of bfloat16 activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import exact


def test_three_parts_hold_a_float32():
  scales = 10.0 ** jnp.arange(-4, 4)[None]
  w = jax.random.normal(jax.random.key(0), (64, 8)) * scales
  parts = jax.jit(exact.split_bfloat16)(w)
  assert all(p.dtype == jnp.bfloat16 for p in parts)
  total = sum(np.float64(p) for p in parts)
  np.testing.assert_allclose(total, np.float64(w), rtol=2.0**-24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_as_right_as_float32(dtype):
  keys = jax.random.split(jax.random.key(1))
  x = jax.random.normal(keys[0], (3, 5, 512), dtype)
  w = jax.random.normal(keys[1], (512, 24))
  got = jax.jit(exact.matmul_float32)(x, w)
  assert got.dtype == jnp.float32
  right = np.float64(x) @ np.float64(w)
  single = np.asarray(x, np.float32) @ np.asarray(w)
  ours, theirs = (np.abs(a - right).max() for a in (got, single))
  assert ours <= 2 * theirs + 1e-7 * np.abs(right).max()
