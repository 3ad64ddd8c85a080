"""Plans and the decode router: definitions, kernels against them, refusals.

The kernels run in interpret mode; tests of what was compiled for an H200 are
elsewhere. Routers are tested with small integers, which float32 adds exactly in
any order, so that decisions must agree to the last one, ties included.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Unsupported, make_plan, reference
from pallas_kernels.plan import TILE, class_sequence, reference_parts
from pallas_kernels.problem import Problem
from pallas_kernels.router import route
from pallas_kernels.triton import plan as triton_plan
from pallas_kernels.triton import router as triton_router
from pallas_kernels.triton.plan import PlanTiles
from pallas_kernels.triton.router import RouterTiles

PARTS = (
  "group_order_GM",
  "group_start_GB",
  "class_order_SM",
  "class_code_SM",
)


def same_parts(got, want) -> None:
  for name, a, b in zip(PARTS, got, want, strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype, name
    np.testing.assert_array_equal(a, b, err_msg=name)


# --- the specification -------------------------------------------------------


def stated_parts(keep: np.ndarray, batch: int, span: int) -> list[np.ndarray]:
  """RoutePlan's docstring, in Python."""
  tokens, groups = keep.shape
  order, start, classes, codes = [], [], [], []
  for g in range(groups):
    kept = [m for m in range(tokens) if keep[m, g]]
    order.append(kept + [m for m in range(tokens) if not keep[m, g]])
    row = tokens // batch
    start.append([sum(m < b * row for m in kept) for b in range(batch + 1)])
  place = {code: i for i, code in enumerate(class_sequence(span))}
  for first in range(0, groups, span):
    code = [
      sum(2**j for j, kept in enumerate(bits) if kept)
      for bits in keep[:, first : first + span]
    ]
    classes.append(sorted(range(tokens), key=lambda m, c=code: place[c[m]]))
    codes.append([code[m] for m in classes[-1]])
  parts = (order, start, classes, codes)
  return [np.asarray(part, np.int32) for part in parts]


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_sequence_of_classes_is_a_monotone_gray_code(bits):
  codes = class_sequence(bits)
  assert sorted(codes) == list(range(2**bits))
  # From all or all but one to none.
  assert codes[0].bit_count() >= bits - 1 and codes[-1] == 0
  assert all((a ^ b).bit_count() == 1 for a, b in itertools.pairwise(codes))
  ones = [code.bit_count() for code in codes]
  for i, count in enumerate(ones):
    assert max(ones[i:]) <= count + 1


# Few shapes, since each is compiled; masks are drawn freely.
SHAPES = ((1, 1, 1, 1), (7, 5, 1, 4), (12, 9, 3, 5), (33, 11, 1, 8))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_reference_parts_are_what_they_are_said_to_be(data):
  tokens, groups, batch, span = data.draw(st.sampled_from(SHAPES))
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  share = rng.choice([0.0, 0.1, 0.5, 1.0], size=groups)
  keep = rng.random((tokens, groups)) < share
  got = reference_parts(jnp.asarray(keep), batch=batch, span=span)
  same_parts(got, stated_parts(keep, batch, span))


# --- the kernels -------------------------------------------------------------

CASES = (
  # tokens, groups, batch, span, tiles
  (1, 9, 1, 1, None),
  (7, 12, 1, 4, PlanTiles(True, 16, 4, 1, 1, pack=4)),
  (17, 33, 1, 5, None),
  (33, 12, 3, 4, PlanTiles(True, 16, 2, 1, 1)),
  (130, 10, 1, 8, PlanTiles(True, 256, 64, 1, 1)),
  (130, 3, 2, 5, PlanTiles(False, 32, 32, 1, 1)),
  (1000, 7, 1, 5, None),
  (1000, 40, 4, 5, PlanTiles(True, 256, 1, 1, 1)),
)


@pytest.mark.parametrize("tokens,groups,batch,span,tiles", CASES)
def test_triton_parts_equal_the_reference(
  tokens, groups, batch, span, tiles, rng_seed
):
  rng = np.random.default_rng(rng_seed)
  masks = np.stack(
    [
      rng.random((tokens, groups)) < 0.5,
      rng.random((tokens, groups)) < rng.random(groups) ** 4,
      np.zeros((tokens, groups), bool),
      np.ones((tokens, groups), bool),
    ]
  )
  parts = jax.jit(
    functools.partial(
      triton_plan.plan_parts,
      batch=batch,
      span=span,
      interpret=True,
      tiles=tiles,
    )
  )
  for keep in jnp.asarray(masks):
    same_parts(parts(keep), reference_parts(keep, batch=batch, span=span))


def test_more_tiles_are_legal():
  for tokens, span in ((1, 1), (1000, 5), (16384, 8)):
    for tiles in (
      triton_plan.default_tiles(tokens),
      *triton_plan.candidates(tokens, span),
    ):
      for size in (tiles.chunk, tiles.bins, tiles.class_warps, tiles.pack):
        assert size > 0 and size & (size - 1) == 0, tiles


def test_a_plan_under_vmap():
  rng = np.random.default_rng(0)
  keep = jnp.asarray(rng.random((2, 9, 6)) < 0.5)
  parts = functools.partial(
    triton_plan.plan_parts, batch=1, span=3, interpret=True
  )
  got = jax.jit(jax.vmap(parts))(keep)
  for i in range(2):
    want = reference_parts(keep[i], batch=1, span=3)
    same_parts([part[i] for part in got], want)


def test_what_nobody_reads_is_not_computed():
  def compiled(wanted):
    def some(keep):
      parts = triton_plan.plan_parts(keep, batch=1, span=2, interpret=True)
      return [parts[i] for i in wanted]

    keep = jax.ShapeDtypeStruct((16, 6), jnp.bool_)
    return jax.jit(some).lower(keep).compile().as_text()

  everything = compiled(range(4))
  for name in ("plan_groups", "plan_classes"):
    assert name in everything
  groups_only = compiled([0])
  assert "plan_groups" in groups_only
  assert "plan_classes" not in groups_only
  assert "plan_groups" not in compiled([2, 3])


# --- masks through make_plan -------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "float32"])
def test_a_mask_of_any_type(dtype):
  keep = np.random.default_rng(0).random((2, 5, 6)) < 0.5
  got = make_plan(jnp.asarray(keep).astype(dtype), span=3, backend="reference")
  want = stated_parts(keep.reshape(10, 6), 2, 3)
  same_parts([getattr(got, name) for name in PARTS], want)


def test_unions_are_of_whole_tiles():
  tokens = 2 * TILE + 5
  keep = np.random.default_rng(0).random((1, tokens, 7)) < 0.3
  plan = make_plan(jnp.asarray(keep), span=4, backend="reference")
  codes = np.asarray(plan.class_code_SM)
  want = [
    [np.bitwise_or.reduce(row[i : i + TILE]) for i in range(0, tokens, TILE)]
    for row in codes
  ]
  np.testing.assert_array_equal(plan.class_union_SU, want)


def test_triton_plans_a_float_mask():
  mask = np.random.default_rng(0).integers(0, 3, (2, 5, 6)) * 0.5
  got = make_plan(
    jnp.asarray(mask, jnp.float32), span=3, backend="triton", interpret=True
  )
  want = stated_parts(mask.reshape(10, 6) > 0, 2, 3)
  same_parts([getattr(got, name) for name in PARTS], want)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_no_gradient_for_a_mask(wrap, backend):
  def loss(mask, cut):
    mask = jax.lax.stop_gradient(mask) if cut else mask
    plan = make_plan(mask, span=2, backend=backend, interpret=True)
    return plan.keep_MG.astype(jnp.float32).sum() + mask.sum()

  mask = jnp.ones((3, 1, 4, 2))
  mask = mask if wrap is jax.vmap else mask[0]
  grad = functools.partial(jax.grad, argnums=0)
  with pytest.raises(Unsupported, match="gradient for the mask"):
    wrap(grad(functools.partial(loss, cut=False)))(mask)
  got = jax.eval_shape(wrap(grad(functools.partial(loss, cut=True))), mask)
  assert got.shape == mask.shape


@pytest.mark.parametrize(
  "shape,kwargs",
  [((4, 2), {}), ((1, 4, 2), {"span": 9}), ((1, 4, 2), {"density": 1.5})],
)
def test_plans_that_make_no_sense(shape, kwargs):
  with pytest.raises(ValueError):
    make_plan(jnp.ones(shape, bool), backend="reference", **kwargs)


# --- the router --------------------------------------------------------------


def integer_router(rng, batch, length, depth, rank, groups, layers, dtype):
  """x and weights of integers whose logits are exact and often tie."""

  def draw(*shape, share=1.0):
    drawn = rng.integers(-2, 3, shape) * (rng.random(shape) < share)
    return jnp.asarray(drawn, jnp.float32)

  stack = (layers,) if layers else ()
  return (
    draw(batch, length, depth).astype(dtype),
    draw(*stack, depth, rank, share=4 / depth),
    draw(*stack, rank),
    draw(*stack, rank, groups, share=4 / rank),
    draw(*stack, groups),
  )


ROUTERS = (
  # batch, length, depth, rank, groups, layers, dtype, threshold, tiles
  (1, 1, 96, 24, 12, 0, "bfloat16", (), RouterTiles(1, 32)),
  (1, 1, 100, 200, 500, 3, "float32", (3,), RouterTiles(4, 16)),
  (5, 1, 80, 24, 12, 3, "bfloat16", (3, 12), RouterTiles(1, 32)),
  (3, 7, 100, 32, 33, 0, "float16", (33,), RouterTiles(3, 16)),
  (64, 1, 48, 70, 400, 2, "bfloat16", (), RouterTiles(2, 16)),
)


@pytest.mark.parametrize(
  "batch,length,depth,rank,groups,layers,dtype,cut,tiles", ROUTERS
)
def test_the_decode_router_decides_as_the_reference(
  batch, length, depth, rank, groups, layers, dtype, cut, tiles, rng_seed
):
  rng = np.random.default_rng(rng_seed)
  arrays = integer_router(
    rng, batch, length, depth, rank, groups, layers, dtype
  )
  threshold = jnp.asarray(rng.integers(-1, 2, cut), jnp.float32)
  layer = layers - 1 if layers else None
  got = route(
    *arrays,
    threshold,
    layer=layer,
    span=4,
    backend="triton",
    tiles=tiles,
    interpret=True,
  )
  keep = reference.route(*arrays, threshold, layer=layer)
  # There are ties, and both ways of breaking them would show.
  nearby = reference.route(*arrays, threshold - 0.5, layer=layer)
  assert (keep != nearby).any() and keep.any() and not keep.all()
  tokens = batch * length
  np.testing.assert_array_equal(got.keep_MG, keep.reshape(tokens, groups))
  want = reference_parts(got.keep_MG, batch=batch, span=4)
  same_parts([getattr(got, name) for name in PARTS], want)


@pytest.mark.parametrize("tokens", [1, 20])
def test_the_decode_router_in_float32(tokens, rng_seed):
  rng = np.random.default_rng(rng_seed)
  depth, rank, groups = 256, 32, 100
  x = rng.normal(size=(1, tokens, depth))
  down = rng.normal(size=(depth, rank)) / depth**0.5
  up = rng.normal(size=(rank, groups)) / rank**0.5
  down_bias, up_bias = rng.normal(size=rank), rng.normal(size=groups)
  arrays = [jnp.asarray(a, jnp.float32) for a in (x, down, down_bias, up)]
  bias = jnp.asarray(up_bias, jnp.float32)
  got = route(*arrays, bias, 0.3, backend="triton", interpret=True)
  x, down, down_bias, up, bias = (
    np.asarray(a, np.float64) for a in (*arrays, bias)
  )
  logits = ((x @ down + down_bias) @ up + bias)[0]
  clear = np.abs(logits - np.float32(0.3)) > 1e-5 * 0.3
  np.testing.assert_array_equal(
    np.asarray(got.keep_MG)[clear], (logits > 0.3)[clear]
  )


def test_nobody_is_kept():
  arrays = integer_router(
    np.random.default_rng(0), 2, 1, 16, 16, 5, 0, "float32"
  )
  got = route(*arrays, 1e6, backend="triton", interpret=True)
  assert not got.keep_MG.any()


def test_a_prefill_router_plans_with_the_backend_named():
  arrays = integer_router(
    np.random.default_rng(0), 3, 22, 16, 16, 6, 0, "float32"
  )
  got = route(*arrays, 0.0, span=3, backend="triton", interpret=True)
  keep = reference.route(*arrays, 0.0)
  want = make_plan(keep, span=3, backend="reference")
  np.testing.assert_array_equal(got.keep_MG, want.keep_MG)
  same_parts(*([getattr(p, name) for name in PARTS] for p in (got, want)))
  assert (got.batch, got.length, got.span) == (3, 22, 3)


@pytest.mark.parametrize("length", [1, 70])
def test_no_gradient_flows_through_a_router(length):
  x, *rest = integer_router(
    np.random.default_rng(0), 1, length, 16, 16, 5, 0, "float32"
  )

  def loss(x, backend):
    plan = route(x, *rest, 0.0, span=2, backend=backend, interpret=True)
    return (x.sum(-1).reshape(-1, 1) * plan.keep_MG).sum()

  got = jax.grad(loss)(x, "reference")
  kept = route(x, *rest, 0.0, backend="reference").keep_MG.sum(-1)
  want = jnp.broadcast_to(kept.reshape(1, length, 1), x.shape)
  np.testing.assert_array_equal(got, want)
  shaped = jax.eval_shape(
    jax.grad(functools.partial(loss, backend="triton")), x
  )
  assert shaped.shape == x.shape


@pytest.mark.parametrize(
  "change",
  [
    {"x": (1, 4)},
    {"down": (15, 8)},
    {"down_bias": (9,)},
    {"up": (9, 5)},
    {"up_bias": (4,)},
    {"threshold": (4,)},
    {"threshold": (2,), "layer": 0},
  ],
)
def test_routers_whose_shapes_do_not_fit(change):
  shapes = {
    "x": (1, 1, 16),
    "down": (16, 8),
    "down_bias": (8,),
    "up": (8, 5),
    "up_bias": (5,),
    "threshold": (),
  }
  layer = change.pop("layer", None)
  arrays = [jnp.ones(change.get(name, shapes[name])) for name in shapes]
  with pytest.raises(ValueError):
    route(*arrays, layer=layer, backend="reference")


def test_routers_refuse_what_they_cannot_run():
  def problem(**kwargs):
    sizes = dict(length=1, groups=112, k=4096, n=32) | kwargs
    return Problem(op="route", dtype="bfloat16", rows=1, **sizes)

  for p in (problem(length=65), problem(groups=1025), problem(n=257)):
    assert "exceed" in triton_router.why_not(p)
  for p in (problem(), problem(length=64, groups=448, n=128)):
    assert triton_router.why_not(p) is None
    for tiles in (triton_router.default(p), *triton_router.candidates(p)):
      assert tiles.splits > 0
      assert tiles.block_d >= 16 and tiles.block_d & (tiles.block_d - 1) == 0
