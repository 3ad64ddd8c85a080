"""Float32 matmuls of bfloat16 activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import exact, reference
from pallas_kernels.routed import fold_router, route_folded
from pallas_kernels.router import route


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


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_prefill_routers_decide_as_specified(dtype, layer):
  """Wherever a logit is further from its threshold than float32 rounds."""
  depth, rank, groups, tokens = 512, 16, 20, 70
  stack = () if layer is None else (2,)
  keys = jax.random.split(jax.random.key(2), 5)
  x = (3 * jax.random.normal(keys[0], (2, tokens, depth))).astype(dtype)
  down = jax.random.normal(keys[1], (*stack, depth, rank)) / depth**0.5
  down_bias = jax.random.normal(keys[2], (*stack, rank))
  up = jax.random.normal(keys[3], (*stack, rank, groups)) / rank**0.5
  up_bias = jax.random.normal(keys[4], (*stack, groups))
  weights = (down, down_bias, up, up_bias)
  own = [np.float64(w if layer is None else w[layer]) for w in weights]
  right = (np.float64(x) @ own[0] + own[1]) @ own[2] + own[3]
  # Sums of `depth` and then `rank` products, each rounded.
  sizes = (np.abs(x).astype(np.float64) @ np.abs(own[0])) @ np.abs(own[2])
  clear = np.abs(right - 0.25) > 2.0**-23 * depth**0.5 * sizes
  assert clear.mean() > 0.99
  folded = fold_router(*weights)
  for got, specified in (
    (
      route(x, *weights, 0.25, layer=layer),
      reference.route(x, *weights, 0.25, layer=layer),
    ),
    (
      route_folded(x, *folded, 0.25, layer=layer),
      reference.route_folded(x, *folded, 0.25, layer=layer),
    ),
  ):
    keep = np.asarray(got.keep_MG).reshape(right.shape)
    np.testing.assert_array_equal(keep[clear], (right > 0.25)[clear])
    np.testing.assert_array_equal(keep[clear], np.asarray(specified)[clear])


def test_a_router_asked_for_the_reference_gets_it(monkeypatch):
  def refuse(*args, **how):
    raise AssertionError("not the specification")

  monkeypatch.setattr(exact, "route", refuse)
  monkeypatch.setattr(exact, "route_folded", refuse)
  x = jnp.ones((1, 70, 16), jnp.bfloat16)
  weights = (jnp.ones((16, 4)), jnp.zeros(4), jnp.ones((4, 6)), jnp.zeros(6))
  assert route(x, *weights, 0.0, backend="reference").keep_MG.all()
  folded = fold_router(*weights)
  assert route_folded(x, *folded, 0.0, backend="reference").keep_MG.all()
  with pytest.raises(AssertionError, match="specification"):
    route(x, *weights, 0.0)
