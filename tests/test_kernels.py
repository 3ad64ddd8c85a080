"""One body for every op of every backend, through the public interface.

Error at most twice the reference's in the same dtype, against float64, and
exact zeros where the mask drops.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels import reference
from pallas_kernels.triton import matmul
from pallas_kernels.triton.decode_tiles import DecodeTiles

SMALL = matmul.Tiles(
  block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2, row_chunk=2
)
FEW = DecodeTiles(n_block=32, n_step=32, k_block=32, k_step=32, k_splits=3)
# Name: (backend, tiles by op); tiles None are the backend's default.
BACKENDS = {
  "reference": ("reference", {}),
  "dense": ("dense", {}),
  "ragged": ("ragged", {}),
  "triton_many": (
    "triton",
    {
      "matmul_n_sparse": SMALL,
      "matmul_k_sparse": SMALL,
      "gated_ffn": matmul.GatedTiles(up=SMALL, down=SMALL),
    },
  ),
  "triton_few": (
    "triton",
    dict.fromkeys(("matmul_n_sparse", "matmul_k_sparse", "gated_ffn"), FEW),
  ),
  "mosaic_tpu": ("mosaic_tpu", {}),
}
MATMULS = ("matmul_n_sparse", "matmul_k_sparse", "gated_ffn")
DENSE, SIZE, GROUPS = 40, 24, 5
WIDE = SIZE * GROUPS


def mask_of(kind: str, rows: int, length: int, groups: int = GROUPS):
  """bool [B, T, G] of a kind; `padded` drops the left of every row."""
  rng = np.random.default_rng(len(kind) + rows * length)
  keep = rng.random((rows, length, groups)) < 0.5
  if kind == "all":
    keep[:] = True
  elif kind == "none":
    keep[:] = False
  elif kind == "padded":
    pads = rng.integers(0, length, rows)
    keep &= np.arange(length)[None, :, None] >= pads[:, None, None]
  elif kind == "dead_group":
    keep[..., groups // 2] = False
  return keep


def arrays(op: str, rows: int, length: int, dtype: str, *, transposed=True):
  """x and weights in numpy, with results of size about 1."""
  rng = np.random.default_rng(7)
  n_shape = (WIDE, DENSE) if transposed else (DENSE, WIDE)
  shapes = {
    "matmul_n_sparse": [n_shape],
    "matmul_k_sparse": [(WIDE, DENSE)],
    "gated_ffn": [n_shape, n_shape, (WIDE, DENSE)],
  }[op]
  width = WIDE if op == "matmul_k_sparse" else DENSE
  x = rng.normal(size=(rows, length, width))
  weights = [rng.normal(size=s) / np.sqrt(width) for s in shapes]
  return [np.asarray(jnp.asarray(a, dtype)) for a in (x, *weights)]


@functools.cache
def jitted(op: str, backend: str, statics: tuple, span: int):
  name, tiles = BACKENDS[backend]

  def run(x, weights, mask, layer):
    kwargs = dict(statics)
    if layer is not None:
      kwargs["layer"] = layer
    plan = pk.make_plan(mask, span=span, backend="reference")
    return getattr(pk, op)(
      x,
      *weights,
      plan,
      backend=name,
      tiles=tiles.get(op),
      interpret=name not in ("reference", "dense", "ragged"),
      **kwargs,
    )

  return jax.jit(run)


def run(op, backend, x, weights, mask, *, layer=None, span=3, **statics):
  """The op's result in numpy; no backend refuses any of these cases."""
  if op != "matmul_k_sparse":
    statics.setdefault("transposed", True)
  weights = [None if w is None else jnp.asarray(w) for w in weights]
  call = jitted(op, backend, tuple(sorted(statics.items())), span)
  return np.asarray(call(jnp.asarray(x), weights, jnp.asarray(mask), layer))


def exact(op, x, weights, mask, transposed=True):
  """The op in float64."""
  x, *weights = (np.float64(a) for a in (x, *weights))
  keep = np.repeat(mask, SIZE, axis=-1)
  if op == "matmul_k_sparse":
    return np.where(keep, x, 0) @ weights[0]
  gate = x @ (weights[0].T if transposed else weights[0])
  if op == "matmul_n_sparse":
    return np.where(keep, gate, 0)
  up = x @ (weights[1].T if transposed else weights[1])
  return np.where(keep, gate / (1 + np.exp(-gate)) * up, 0) @ weights[2]


def check(op, backend, x, weights, mask, **kwargs):
  transposed = kwargs.get("transposed", True)
  got = run(op, backend, x, weights, mask, **kwargs)
  want = run(op, "reference", x, weights, mask, **kwargs)
  right = exact(op, x, weights, mask, transposed)
  assert got.shape == right.shape and got.dtype == x.dtype
  ours = np.linalg.norm(np.float64(got) - right)
  theirs = np.linalg.norm(np.float64(want) - right)
  # Float32's own rounding is free: the reference may be exact by luck.
  assert ours <= 2 * theirs + 2.0**-22 * np.linalg.norm(right), (ours, theirs)
  if op == "matmul_n_sparse":
    assert not got[~np.repeat(mask, SIZE, axis=-1)].any()
  return got


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", MATMULS)
class TestMatmuls:
  """Masks, shapes, dtypes and layouts of the three matmuls."""

  def test_masks(self, op, backend):
    x, *weights = arrays(op, 2, 19, "float32")
    for kind in ("some", "all", "none", "padded", "dead_group"):
      mask = mask_of(kind, 2, 19)
      got = check(op, backend, x, weights, mask)
      assert kind != "none" or not got.any()
      if kind == "padded":
        assert not got[~mask.any(-1)].any()

  @pytest.mark.parametrize("rows,length", [(1, 1), (3, 7), (1, 64)])
  def test_sizes_that_fill_no_tile(self, op, backend, rows, length):
    x, *weights = arrays(op, rows, length, "bfloat16")
    check(op, backend, x, weights, mask_of("some", rows, length))

  def test_stack_and_in_out_layout(self, op, backend):
    x, *weights = arrays(op, 1, 19, "float32", transposed=False)
    mask = mask_of("some", 1, 19)
    kwargs = {} if op == "matmul_k_sparse" else {"transposed": False}
    check(op, backend, x, weights, mask, **kwargs)
    want = run(op, backend, x, weights, mask, **kwargs)
    poison = [np.stack([np.full_like(w, np.nan), w]) for w in weights]
    got = run(op, backend, x, poison, mask, layer=jnp.int32(1), **kwargs)
    np.testing.assert_array_equal(got, want)

  def test_neighbours_change_nothing(self, op, backend):
    """Not to the last bit, whatever other rows hold and keep."""
    x, *weights = arrays(op, 3, 7, "float32")
    mask = mask_of("some", 3, 7)
    clean = run(op, backend, x, weights, mask)
    x, mask = x.copy(), mask.copy()
    x[1], mask[1] = 1e3, ~mask[1]
    got = run(op, backend, x, weights, mask)
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])

  def test_gradients_are_the_references(self, op, backend):
    x, *weights = (jnp.asarray(a) for a in arrays(op, 1, 19, "float32"))
    name, tiles = BACKENDS[backend]
    mask = jnp.asarray(mask_of("some", 1, 19))
    kwargs = {} if op == "matmul_k_sparse" else {"transposed": True}

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def kernel(x, weights):
      plan = pk.make_plan(mask, span=3, backend="reference")
      interpret = name not in ("reference", "dense", "ragged")
      y = getattr(pk, op)(
        x,
        *weights,
        plan,
        backend=name,
        tiles=tiles.get(op),
        interpret=interpret,
        **kwargs,
      )
      return jnp.sum(jnp.sin(y))

    @functools.partial(jax.grad, argnums=(0, 1))
    def spec(x, weights):
      y = getattr(reference, op)(x, *weights, mask, **kwargs)
      return jnp.sum(jnp.sin(y))

    got = kernel(x, weights)
    for ours, theirs in zip(
      jax.tree.leaves(got), jax.tree.leaves(spec(x, weights)), strict=True
    ):
      np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)

  def test_vmap(self, op, backend):
    x, *weights = arrays(op, 3, 7, "float32")
    mask = mask_of("some", 3, 7)
    name, tiles = BACKENDS[backend]
    kwargs = {} if op == "matmul_k_sparse" else {"transposed": True}

    def one(x, mask):
      plan = pk.make_plan(mask[None], span=3, backend="reference")
      interpret = name not in ("reference", "dense", "ragged")
      return getattr(pk, op)(
        x[None],
        *(jnp.asarray(w) for w in weights),
        plan,
        backend=name,
        tiles=tiles.get(op),
        interpret=interpret,
        **kwargs,
      )[0]

    got = jax.vmap(one)(jnp.asarray(x), jnp.asarray(mask))
    want = run(op, "reference", x, weights, mask)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_input_is_never_read(backend):
  """The K-sparse op may be handed memory that nobody wrote."""
  op = "matmul_k_sparse"
  x, *weights = arrays(op, 1, 19, "float32")
  mask = mask_of("some", 1, 19)
  clean = run(op, backend, x, weights, mask)
  x = np.where(np.repeat(mask, SIZE, axis=-1), x, np.nan).astype(np.float32)
  got = run(op, backend, x, weights, mask)
  np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transposed", [True, False])
def test_gate_and_up_in_one_array(backend, transposed):
  x, gate, up, down = arrays(
    "gated_ffn", 1, 19, "float32", transposed=transposed
  )
  mask = mask_of("some", 1, 19)
  joined = np.stack([gate, up])
  got = run(
    "gated_ffn",
    backend,
    x,
    [joined, None, down],
    mask,
    transposed=transposed,
  )
  want = exact("gated_ffn", x, [gate, up, down], mask, transposed)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("op", ["matmul_n_sparse", "matmul_k_sparse"])
def test_any_mask(op, data):
  """Hypothesis draws masks for one compiled shape; every span."""
  rows, length = 1, 37
  bits = data.draw(st.binary(min_size=24, max_size=24))
  keep = np.unpackbits(np.frombuffer(bits, np.uint8))[: length * GROUPS]
  mask = keep.reshape(rows, length, GROUPS).astype(bool)
  x, *weights = arrays(op, rows, length, "float32")
  for span in (1, 2, 5):
    check(op, "triton_many", x, weights, mask, span=span)


@settings(max_examples=4, deadline=None)
@given(
  length=st.integers(1, 90),
  groups=st.integers(1, 6),
  size=st.sampled_from([16, 20, 33]),
  dense=st.sampled_from([16, 30, 48]),
  seed=st.integers(0, 9),
)
def test_any_shape(length, groups, size, dense, seed):
  rng = np.random.default_rng(seed)
  mask = jnp.asarray(rng.random((1, length, groups)) < 0.5)
  x = jnp.asarray(rng.normal(size=(1, length, dense)), jnp.float32)
  gate = jnp.asarray(rng.normal(size=(2, groups * size, dense)), jnp.float32)
  down = jnp.asarray(rng.normal(size=(groups * size, dense)), jnp.float32)
  plan = pk.make_plan(mask, backend="reference")
  got = pk.gated_ffn(
    x,
    gate,
    None,
    down,
    plan,
    transposed=True,
    backend="triton",
    tiles=matmul.GatedTiles(up=SMALL, down=SMALL),
    interpret=True,
  )
  want = reference.gated_ffn(x, gate, None, down, mask, transposed=True)
  scale = float(jnp.abs(want).max()) + 1e-6
  np.testing.assert_allclose(got / scale, want / scale, atol=2e-6)


def test_a_dense_second_half_of_the_ffn():
  x, *weights = arrays("gated_ffn", 1, 70, "float32")
  mask = jnp.asarray(mask_of("some", 1, 70))
  got = pk.gated_ffn(
    *(jnp.asarray(a) for a in (x, *weights)),
    pk.make_plan(mask, backend="reference"),
    transposed=True,
    backend="triton",
    tiles=matmul.GatedTiles(up=SMALL, down=None),
    interpret=True,
  )
  want = exact("gated_ffn", x, weights, np.asarray(mask))
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_unions_of_full_tiles():
  """Tiles of 128 and 256 tokens take their unions from the plan."""
  op = "matmul_k_sparse"
  x, w = (jnp.asarray(a) for a in arrays(op, 1, 300, "float32"))
  mask = mask_of("some", 1, 300)
  mask[0, 40:] &= np.array([1, 0, 0, 0, 1], bool)  # most tiles skip groups
  plan = pk.make_plan(jnp.asarray(mask), span=3, backend="reference")
  want = exact(op, x, [w], mask)
  for rows in (128, 256):
    tiles = matmul.Tiles(block_m=rows, block_n=64, block_k=32)
    got = pk.matmul_k_sparse(
      x, w, plan, backend="triton", tiles=tiles, interpret=True
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["matmul_n_sparse", "matmul_k_sparse"])
def test_nothing_to_do(op):
  """No tokens, no rows: an empty result, and zero gradients."""
  for rows, length in ((1, 0), (0, 5)):
    x, *weights = (jnp.asarray(a) for a in arrays(op, 1, 1, "float32"))
    x = jnp.zeros((rows, length, x.shape[-1]))
    plan = pk.make_plan(jnp.zeros((rows, length, GROUPS), bool))
    kwargs = {} if op == "matmul_k_sparse" else {"transposed": True}

    def total(w, x=x, plan=plan, kwargs=kwargs):
      return getattr(pk, op)(x, w, plan, **kwargs).sum()

    value, grad = jax.value_and_grad(total)(weights[0])
    assert value == 0 and not grad.any()


def test_wrong_input_is_named():
  x = jnp.zeros((1, 4, 8))
  plan = pk.make_plan(jnp.ones((1, 4, 3), bool))
  with pytest.raises(ValueError, match="3 groups must divide 16 output"):
    pk.matmul_n_sparse(x, jnp.zeros((8, 16)), plan)
  with pytest.raises(ValueError, match=r"w \(9, 12\) does not fit x"):
    pk.matmul_n_sparse(x, jnp.zeros((9, 12)), plan)
  with pytest.raises(ValueError, match="float32; give one dtype|bfloat16"):
    pk.matmul_n_sparse(x, jnp.zeros((8, 12), jnp.bfloat16), plan)
  with pytest.raises(ValueError, match="1 x 4 tokens, x"):
    pk.matmul_n_sparse(jnp.zeros((2, 4, 8)), jnp.zeros((8, 12)), plan)
  with pytest.raises(ValueError, match="with a layer index has 3 axes"):
    pk.matmul_n_sparse(x, jnp.zeros((8, 12)), plan, layer=0)
  with pytest.raises(ValueError, match="int32; allowed are"):
    ints = jnp.zeros((1, 4, 8), jnp.int32)
    pk.matmul_n_sparse(ints, jnp.zeros((8, 12), jnp.int32), plan)
  with pytest.raises(ValueError, match="backend 'cuda' is not known"):
    pk.matmul_n_sparse(x, jnp.zeros((8, 12)), plan, backend="cuda")
  with pytest.raises(ValueError, match=r"gate and up, \[2, ...\]"):
    pk.gated_ffn(x, jnp.zeros((3, 8, 12)), None, jnp.zeros((12, 8)), plan)
  with pytest.raises(ValueError, match=r"a mask is \[B, T, G\]"):
    pk.make_plan(jnp.ones((4, 3)))
  with pytest.raises(ValueError, match="what make_plan returns, not a"):
    pk.matmul_n_sparse(x, jnp.zeros((8, 12)), jnp.ones((1, 4, 3), bool))
  with pytest.raises(ValueError, match="layer=2 must be 0 to 1"):
    pk.matmul_n_sparse(x, jnp.zeros((2, 8, 12)), plan, layer=2)
  with pytest.raises(ValueError, match="block_m=100 must be a power of two"):
    matmul.Tiles(block_m=100)


def test_wrong_attention_input_is_named():
  q, kv = jnp.zeros((2, 4, 6, 16)), jnp.zeros((2, 5, 3, 16))
  plan = pk.make_plan(jnp.ones((2, 4, 3), bool))
  with pytest.raises(ValueError, match=r"start is int32 \[2\], not int32 \(1,"):
    pk.attention_prefill(q, kv, kv, plan, start=jnp.zeros((1,), jnp.int32))
  with pytest.raises(ValueError, match="window=0 must be at least 1"):
    pk.attention_prefill(q, kv, kv, plan, window=0)
  keep, lengths = jnp.ones((2, 3), bool), jnp.ones((2,), jnp.int32)
  with pytest.raises(ValueError, match=r"lengths is int32 \[2\], not float32"):
    pk.attention_decode(q[:, 0], kv, kv, lengths.astype(float), keep)
  with pytest.raises(ValueError, match=r"keep is \[B, G\] with B 2"):
    pk.attention_decode(q[:, 0], kv, kv, lengths, keep[:, None])
  with pytest.raises(ValueError, match="density=50 must be 0 to 1"):
    pk.attention_decode(q[:, 0], kv, kv, lengths, keep, density=50)


def test_attention_over_no_keys_is_zero():
  q, kv = jnp.ones((2, 4, 6, 16)), jnp.zeros((2, 0, 3, 16))
  plan = pk.make_plan(jnp.ones((2, 4, 3), bool))
  assert not pk.attention_prefill(q, kv, kv, plan).any()
  keep, lengths = jnp.ones((2, 3), bool), jnp.zeros((2,), jnp.int32)
  assert not pk.attention_decode(q[:, 0], kv, kv, lengths, keep).any()


def test_explain_names_every_backend():
  x, w = jnp.zeros((1, 4, 8)), jnp.zeros((8, 12))
  plan = pk.make_plan(jnp.ones((1, 4, 3), bool))
  said = str(pk.explain(pk.matmul_n_sparse, x, w, plan))
  for name in ("dense", "ragged", "triton", "mosaic_gpu", "mosaic_tpu"):
    assert name in said


def test_a_mask_has_no_gradient_through_kernels():
  x, w = jnp.ones((1, 4, 8)), jnp.ones((8, 12))

  def total(mask):
    return pk.matmul_n_sparse(x, w, pk.make_plan(mask)).sum()

  with pytest.raises(pk.Unsupported, match="gradient for the mask"):
    jax.grad(total)(jnp.ones((1, 4, 3)))


def test_the_reference_gives_dropped_groups_their_gradient():
  """A float mask multiplies: the straight-through estimator needs this."""
  x, w = jnp.ones((1, 2, 8)), jnp.ones((8, 12))
  mask = jnp.asarray([[[1.0, 0, 1], [0, 0, 1]]])
  grad = jax.grad(lambda m: reference.matmul_n_sparse(x, w, m).sum())(mask)
  np.testing.assert_allclose(grad, np.full(mask.shape, 4 * 8.0))
