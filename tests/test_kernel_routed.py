"""Folded routers, and the decode ops that decide as they go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import reference, suite
from pallas_kernels.triton import decode, decode_route
from pallas_kernels.triton.decode_route import FoldedTiles
from pallas_kernels.triton.decode_tiles import DecodeTiles

BASE = DecodeTiles(
  n_block=16, n_step=32, k_block=32, k_step=16, k_splits=3, n_ranked=False
)
VECTOR = dataclasses.replace(
  BASE, n_scheme="vector", n_block=8, n_stages=1, n_warps=1
)
TILES = {
  "fused": dataclasses.replace(BASE, n_fused=True),
  "fused_vector": dataclasses.replace(VECTOR, n_fused=True),
  "apart": dataclasses.replace(BASE, n_ranked=True),
}
D, G, C = 40, 5, 24
F = G * C


def arrays(tokens, *, layers=0, dtype="float32", seed=0):
  """(r, v, c, x, w_gate, w_up, w_down), weights [out, in]."""
  rng = np.random.default_rng(seed)
  lead = (layers,) if layers else ()

  def normal(*shape, scale=1.0, to=dtype):
    return jnp.asarray(rng.normal(size=shape) * scale, to)

  return (
    normal(1, tokens, D),
    normal(*lead, G, D, scale=D**-0.5, to="float32"),
    normal(*lead, G, scale=0.1, to="float32"),
    normal(1, tokens, D),
    normal(*lead, F, D, scale=D**-0.5),
    normal(*lead, F, D, scale=D**-0.5),
    normal(*lead, F, D, scale=F**-0.5),
  )


@functools.partial(jax.jit, static_argnames=("tiles",))
def ffn(*args, tiles, threshold=0.0, layer=None):
  r, v, c, *rest = args
  return pk.routed_ffn(
    r,
    v,
    c,
    threshold,
    *rest,
    layer=layer,
    transposed=True,
    backend="triton",
    tiles=tiles,
    interpret=True,
  )


def expected(*args, threshold=0.0, layer=None):
  r, v, c, *rest = args
  keep = reference.route_folded(r, v, c, threshold, layer=layer)
  return reference.gated_ffn(*rest, keep, layer=layer, transposed=True), keep


def check(got, want, tolerance=1e-5):
  np.testing.assert_array_equal(got[1], want[1])
  y, exact = (np.asarray(a[0], np.float64) for a in (got, want))
  assert np.linalg.norm(y - exact) <= tolerance * np.linalg.norm(exact)


# --- folding -----------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_folded_router_decides_as_the_router_does(lead):
  rng = np.random.default_rng(0)
  shapes = ((64, 8), (8,), (8, G), (G,))
  router = [
    jnp.asarray(rng.normal(size=(*lead, *s)), jnp.float32) for s in shapes
  ]
  x = jnp.asarray(rng.normal(size=(3, 5, 64)), jnp.float32)
  layer = jnp.int32(1) if lead else None
  folded = pk.fold_router(*router)
  want = reference.route(x, *router, 0.0, layer=layer)
  assert 0 < want.sum() < want.size
  for v, c in (folded, jax.jit(pk.fold_router)(*router)):
    assert v.shape == (*lead, G, 64) and c.shape == (*lead, G)
    assert v.dtype == c.dtype == jnp.float32
    got = reference.route_folded(x, v, c, 0.0, layer=layer)
    np.testing.assert_array_equal(got, want)
  one = [np.float64(a[-1] if lead else a) for a in router]
  exact = (one[0] @ one[2]).T
  np.testing.assert_array_equal(
    folded[0][-1] if lead else folded[0], exact.astype(np.float32)
  )


def test_folding_says_what_does_not_fit():
  good = [jnp.zeros(s, jnp.float32) for s in ((8, 2), (2,), (2, 4), (4,))]
  for i in range(4):
    bad = [jnp.zeros((3,)) if i == j else a for j, a in enumerate(good)]
    with pytest.raises(ValueError, match="a router is"):
      pk.fold_router(*bad)


# --- the router alone --------------------------------------------------------

ROUTES = (
  FoldedTiles(),
  FoldedTiles(block=2, lanes=3, num_warps=1),
  FoldedTiles(scheme="dot", block=16, lanes=16),
  FoldedTiles(scheme="dot", block=2, lanes=16),
)


@pytest.mark.parametrize(
  "which, tokens, dtype",
  [
    (0, 1, "bfloat16"),
    (1, 7, "float32"),
    (1, 17, "bfloat16"),
    (2, 17, "bfloat16"),
    (3, 3, "float32"),
  ],
)
def test_route_folded(which, tokens, dtype):
  tiles = ROUTES[which]
  r, v, c, *_ = arrays(tokens, dtype=dtype)
  plan = pk.route_folded(
    r, v, c, 0.1, backend="triton", tiles=tiles, interpret=True
  )
  want = reference.route_folded(r, v, c, 0.1)
  np.testing.assert_array_equal(plan.keep_MG, want[0])


def test_route_folded_over_many_channels():
  """More chunks than are unrolled, and a last one that is not full."""
  rng = np.random.default_rng(1)
  r = jnp.asarray(rng.normal(size=(1, 2, 1500)), jnp.float32)
  v = jnp.asarray(rng.normal(size=(3, 1500)), jnp.float32)
  tiles = FoldedTiles(num_warps=1, lanes=2)
  plan = pk.route_folded(
    r, v, jnp.zeros(3), 0.0, backend="triton", tiles=tiles, interpret=True
  )
  want = np.float64(r[0]) @ np.float64(v).T > 0
  np.testing.assert_array_equal(plan.keep_MG, want)


def test_thresholds_of_layers_and_groups():
  r, v, c, *_ = arrays(2, layers=3)
  for threshold in (
    jnp.float32(0.2),
    jnp.asarray([9.0, -9.0, 0.3]),
    jnp.asarray(np.random.default_rng(2).normal(size=(3, G)), jnp.float32),
  ):
    plan = pk.route_folded(
      r, v, c, threshold, layer=jnp.int32(2), backend="triton", interpret=True
    )
    want = reference.route_folded(r, v, c, threshold, layer=2)
    np.testing.assert_array_equal(plan.keep_MG, want[0])


# --- router and FFN ----------------------------------------------------------


@pytest.mark.parametrize(
  "name, tokens", [("fused", 1), *((name, 3) for name in TILES)]
)
def test_routed_ffn(name, tokens):
  args = arrays(tokens)
  for threshold in (0.1, -1e9, 1e9):
    got = ffn(*args, tiles=TILES[name], threshold=threshold)
    check(got, expected(*args, threshold=threshold))
    if threshold == 1e9:
      assert not got[0].any() and not got[1].any()


def test_sixteen_tokens_in_bfloat16():
  args = arrays(16, dtype="bfloat16")
  check(ffn(*args, tiles=TILES["fused"]), expected(*args), 1e-2)


@pytest.mark.parametrize("name", ["fused", "apart"])
def test_a_logit_at_its_threshold_is_dropped(name):
  r, v, c, *rest = arrays(3)
  args = (r, jnp.zeros_like(v), jnp.full_like(c, 0.25), *rest)
  _, keep = ffn(*args, tiles=TILES[name], threshold=0.25)
  assert not keep.any()
  below = np.nextafter(np.float32(0.25), np.float32(0))
  _, keep = ffn(*args, tiles=TILES[name], threshold=below)
  assert keep.all()


@pytest.mark.parametrize("name", TILES)
def test_weights_of_active_groups_only_are_read(name):
  r, v, c, x, *weights = arrays(3)
  c = c.at[1].set(-1e6).at[2].set(1e6)
  clean = ffn(r, v, c, x, *weights, tiles=TILES[name])
  assert not clean[1][..., 1].any() and clean[1][..., 2].all()

  def poisoned(group):
    return [w.at[group * C : (group + 1) * C].set(jnp.nan) for w in weights]

  got = ffn(r, v, c, x, *poisoned(1), tiles=TILES[name])
  np.testing.assert_array_equal(got[0], clean[0])
  got = ffn(r, v, c, x, *poisoned(2), tiles=TILES[name])
  assert np.isnan(got[0]).all()


@pytest.mark.parametrize("name", TILES)
def test_a_token_does_not_depend_on_others(name):
  args = arrays(3)
  clean = ffn(*args, tiles=TILES[name])
  for other in (jnp.nan, 3.0, -3.0):
    r, v, c, x, *weights = args
    r, x = r.at[0, 1].set(other), x.at[0, 1].set(other)
    got = ffn(r, v, c, x, *weights, tiles=TILES[name])
    for a, b in zip(got, clean, strict=True):
      np.testing.assert_array_equal(a[0, [0, 2]], b[0, [0, 2]])


@pytest.mark.parametrize("name", ["fused"])
def test_a_layer_of_a_stack_with_gate_and_up_joined(name):
  r, v, c, x, gate, up, down = arrays(2, layers=3)
  want = ffn(r, v, c, x, gate, up, down, tiles=TILES[name], layer=2)
  check(want, expected(r, v, c, x, gate, up, down, layer=2))
  # The other layers are not looked at, router and all.
  v, c, gate, up, down = (a.at[:2].set(jnp.nan) for a in (v, c, gate, up, down))
  both = jnp.stack([gate, up], axis=1)
  got = ffn(r, v, c, x, both, None, down, tiles=TILES[name], layer=2)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["fused_vector", "apart"])
def test_routed_matmul_n_sparse(name):
  r, v, c, x, w, *_ = arrays(3)
  y, keep = pk.routed_matmul_n_sparse(
    r,
    v,
    c,
    0.1,
    x,
    w,
    transposed=True,
    backend="triton",
    tiles=TILES[name],
    interpret=True,
  )
  want = reference.route_folded(r, v, c, 0.1)
  check(
    (y, keep), (reference.matmul_n_sparse(x, w, want, transposed=True), want)
  )
  assert not y[~np.repeat(want, C, axis=-1)].any()


# --- the ops around the kernels ----------------------------------------------


def test_backends_agree():
  args = arrays(3)
  want = expected(*args)
  for backend in ("auto", "dense", "reference"):
    r, v, c, *rest = args
    got = pk.routed_ffn(r, v, c, 0.0, *rest, transposed=True, backend=backend)
    check(got, want)


def test_many_tokens_take_a_plan():
  args = arrays(65)
  r, v, c, *rest = args
  for backend in ("auto", "dense"):
    got = pk.routed_ffn(r, v, c, 0.0, *rest, transposed=True, backend=backend)
    check(got, expected(*args))
  x, w = rest[:2]
  y, keep = pk.routed_matmul_n_sparse(r, v, c, 0.0, x, w, transposed=True)
  want = reference.route_folded(r, v, c, 0.0)
  check(
    (y, keep), (reference.matmul_n_sparse(x, w, want, transposed=True), want)
  )


def test_gradients_are_those_of_the_ffn_alone():
  args = arrays(2)
  r, v, c, x, *weights = args
  keep = reference.route_folded(r, v, c, 0.0)

  def loss(r, x, gate, up, down):
    y, _ = ffn(r, v, c, x, gate, up, down, tiles=TILES["fused"])
    return (y**2).sum()

  def plain(x, gate, up, down):
    y = reference.gated_ffn(x, gate, up, down, keep, transposed=True)
    return (y**2).sum()

  router, *got = jax.grad(loss, argnums=range(5))(r, x, *weights)
  want = jax.grad(plain, argnums=range(4))(x, *weights)
  assert not router.any()
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_mapped_instances_are_those_alone():
  r, v, c, x, *weights = arrays(3)
  rs, xs = jnp.stack([r, -r]), jnp.stack([x, x + 1])
  run = functools.partial(ffn, tiles=TILES["fused"])
  got = jax.vmap(lambda r, x: run(r, v, c, x, *weights))(rs, xs)
  for i in range(2):
    want = run(rs[i], v, c, xs[i], *weights)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(a[i], b)


def test_refusals():
  r, v, c, x, *weights = arrays(17)
  with pytest.raises(ValueError, match="16 tokens, not 17"):
    ffn(r, v, c, x, *weights, tiles=TILES["fused"])
  call = functools.partial(pk.routed_ffn, transposed=True)
  with pytest.raises(ValueError, match="must be alike"):
    call(r[:, :3], v, c, 0.0, x, *weights)
  with pytest.raises(ValueError, match="v is"):
    call(r, v[:, :3], c, 0.0, x, *weights)
  with pytest.raises(ValueError, match="c is"):
    call(r, v, c[:3], 0.0, x, *weights)
  with pytest.raises(ValueError, match="threshold is"):
    call(r, v, c, jnp.zeros(3), x, *weights)
  with pytest.raises(ValueError, match="groups must divide"):
    call(r, jnp.zeros((7, D)), jnp.zeros(7), 0.0, x, *weights)
  with pytest.raises(ValueError, match="n_fused=True"):
    DecodeTiles(n_fused=True)
  with pytest.raises(ValueError, match="lanes=8"):
    FoldedTiles(scheme="dot", lanes=8)
  many = arrays(65)[:3]
  with pytest.raises(ValueError, match="64 tokens, not 65"):
    pk.route_folded(*many, 0.0, backend="triton", tiles=FoldedTiles())


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_candidates(tokens):
  problem = suite.matmul_problem("routed_ffn", tokens, 128, 0.5)
  tiles = decode.candidates(problem)
  assert tiles[0] == decode.default(problem)
  assert len(set(tiles)) == len(tiles)
  assert any(t.n_fused for t in tiles) == (tokens <= 16)
  alone = suite.route_problem(tokens, 112, 0.5, rank=0)
  routes = decode_route.candidates(alone)
  assert len(set(routes)) == len(routes) > 1
  assert decode_route.why_not(alone) is None
  assert "65 tokens" in decode_route.why_not(
    dataclasses.replace(alone, rows=65)
  )
