"""Decode matmuls (1 to 64 tokens) in interpret mode, against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.plan import make_plan
from pallas_kernels.problem import Problem
from pallas_kernels.triton import decode
from pallas_kernels.triton.decode_tiles import merge

OPS = ("matmul_n_sparse", "matmul_k_sparse", "gated_ffn")
RUN = {
  "matmul_n_sparse": decode.n_sparse,
  "matmul_k_sparse": decode.k_sparse,
  "gated_ffn": decode.gated_ffn,
}
DOT = decode.DecodeTiles(
  n_block=32, n_step=32, k_block=32, k_step=32, k_splits=3
)
# The other way to share out the work, too.
VECTOR = decode.DecodeTiles(
  n_ranked=False,
  n_scheme="vector",
  n_block=4,
  n_step=32,
  k_scheme="vector",
  k_block=32,
  k_step=16,
  k_splits=2,
)
# The vector scheme of the K-sparse side takes one token.
TILES = {"dot": DOT, "vector": merge(VECTOR, DOT)}


@functools.cache
def compiled(problem, tiles):
  return jax.jit(functools.partial(RUN[problem.op], problem, tiles, True))


@dataclasses.dataclass(frozen=True)
class Case:
  """One problem; D is the dense axis, the other has `groups` * `size`."""

  op: str
  tokens: int
  size: int
  groups: int = 5
  dense: int = 40
  dtype: str = "float32"
  transposed: bool = True
  layers: int = 0

  @property
  def problem(self):
    wide = self.groups * self.size
    k, n = self.dense, wide
    if self.op == "matmul_k_sparse":
      k, n = n, k
    return Problem(
      op=self.op,
      dtype=self.dtype,
      rows=1,
      length=self.tokens,
      groups=self.groups,
      k=k,
      n=n,
      transposed=self.transposed and self.op != "matmul_k_sparse",
      layers=self.layers,
    )

  @property
  def sides(self):
    """Of each weight, whether its groups are on the last axis."""
    n_side = not self.transposed
    return {
      "matmul_n_sparse": (n_side,),
      "matmul_k_sparse": (False,),
      "gated_ffn": (n_side, n_side, False),
    }[self.op]

  def arrays(self, seed=0):
    """x and the weights, in numpy; values of size about 1 throughout."""
    rng = np.random.default_rng(seed)
    wide = self.groups * self.size
    lead = (self.layers,) if self.layers else ()
    x = rng.normal(size=(1, self.tokens, self.problem.k))
    weights = [
      rng.normal(
        size=(*lead, *((self.dense, wide) if last else (wide, self.dense)))
      )
      * (self.problem.k if i < 2 else wide) ** -0.5
      for i, last in enumerate(self.sides)
    ]
    return [np.asarray(jnp.asarray(a, self.dtype)) for a in (x, *weights)]

  def poisoned(self, weights, groups):
    """The weights with NaN in some groups (and in all layers but the last)."""
    out = []
    for w, last in zip(weights, self.sides, strict=True):
      w = np.array(w if last else np.swapaxes(w, -1, -2))
      w.reshape(*w.shape[:-1], self.groups, self.size)[..., groups, :] = np.nan
      if self.layers:
        w[: self.layers - 1] = np.nan
      out.append(w if last else np.swapaxes(w, -1, -2))
    return out

  def run(self, tiles, x, weights, mask):
    plan = make_plan(jnp.asarray(mask), backend="reference")
    layer = jnp.asarray(max(self.layers - 1, 0), jnp.int32)
    arrays = [jnp.asarray(a) for a in (x, *weights)]
    return np.asarray(compiled(self.problem, tiles)(*arrays, plan, layer))

  def reference(self, x, weights, mask):
    kwargs = {"layer": self.layers - 1} if self.layers else {}
    if self.op != "matmul_k_sparse":
      kwargs["transposed"] = self.transposed
    arrays = [jnp.asarray(a) for a in (x, *weights)]
    out = getattr(reference, self.op)(*arrays, jnp.asarray(mask), **kwargs)
    return np.asarray(out)

  def exact(self, x, weights, mask):
    """The same in float64."""
    x, *weights = (np.float64(a) for a in (x, *weights))
    if self.layers:
      weights = [w[-1] for w in weights]
    first = [
      w if last or self.op == "matmul_k_sparse" else w.T
      for w, last in zip(weights, self.sides, strict=True)
    ]
    keep = np.repeat(mask, self.size, axis=-1)
    if self.op == "matmul_n_sparse":
      return np.where(keep, x @ first[0], 0)
    if self.op == "matmul_k_sparse":
      return np.where(keep, x, 0) @ first[0]
    gate = x @ first[0]
    hidden = gate / (1 + np.exp(-gate)) * (x @ first[1])
    return np.where(keep, hidden, 0) @ weights[2]

  def check(self, tiles, mask, seed=0):
    """At most twice as wrong as the reference, and 0 where it must be."""
    x, *weights = self.arrays(seed)
    got = self.run(tiles, x, weights, mask)
    exact = self.exact(x, weights, mask)
    assert got.shape == exact.shape and got.dtype == x.dtype
    ours = np.linalg.norm(np.float64(got) - exact)
    want = self.reference(x, weights, mask)
    theirs = np.linalg.norm(np.float64(want) - exact)
    # Float32's own rounding is free: the reference may be exact by luck.
    slack = 2.0**-22 * np.linalg.norm(exact)
    assert ours <= 2 * theirs + slack
    if self.op == "matmul_n_sparse":
      assert not got[~np.repeat(mask, self.size, axis=-1)].any()
    return got


def masks(tokens, groups, seed=3):
  rng = np.random.default_rng(seed)
  shape = (1, tokens, groups)
  one_set = np.broadcast_to(rng.random(groups) < 0.5, shape).copy()
  one_set[..., 0], one_set[..., -1] = False, True
  some = rng.random(shape) < 0.3
  some[..., 1] = False
  return {
    "all": np.ones(shape, bool),
    "none": np.zeros(shape, bool),
    "some": some,
    "one_set": one_set,
  }


@pytest.mark.parametrize("scheme", TILES)
@pytest.mark.parametrize("op", OPS)
def test_masks_of_every_kind(op, scheme):
  case = Case(op, 3, size=24)
  for name, mask in masks(case.tokens, case.groups).items():
    got = case.check(TILES[scheme], mask)
    assert name != "none" or not got.any()


@pytest.mark.parametrize(
  ("tokens", "dtype"),
  [
    (7, "bfloat16"),
    (16, "float16"),
    (33, "float32"),
    (64, "bfloat16"),
  ],
)
def test_numbers_of_tokens(tokens, dtype):
  case = Case("gated_ffn", tokens, size=16, dtype=dtype)
  case.check(DOT, masks(tokens, case.groups)["some"])


@pytest.mark.parametrize("scheme", TILES)
def test_one_token(scheme):
  tiles = {"dot": DOT, "vector": VECTOR}[scheme]
  case = Case("gated_ffn", 1, size=16, dtype="bfloat16")
  for mask in masks(1, case.groups).values():
    case.check(tiles, mask)


@pytest.mark.parametrize(
  "size, scheme", [(16, "dot"), (24, "vector"), (128, "dot")]
)
def test_in_out_layout(size, scheme):
  case = Case("gated_ffn", 2, size, groups=3, transposed=False)
  case.check(TILES[scheme], masks(2, 3)["some"])


def test_large_groups_take_many_blocks_and_steps():
  case = Case("gated_ffn", 2, size=128, groups=3, dense=64)
  one_split = dataclasses.replace(DOT, k_splits=1, n_pad=8, k_pad=8)
  case.check(one_split, masks(2, 3)["one_set"])


@pytest.mark.parametrize("scheme", TILES)
def test_dropped_input_is_never_read(scheme):
  case = Case("matmul_k_sparse", 3, size=24)
  mask = masks(3, case.groups)["some"]
  x, w = case.arrays()
  clean = case.run(TILES[scheme], x, [w], mask)
  x = np.where(np.repeat(mask, case.size, axis=-1), x, np.nan)
  poisoned = case.run(TILES[scheme], x.astype(np.float32), [w], mask)
  np.testing.assert_array_equal(poisoned, clean)


@pytest.mark.parametrize("scheme", TILES)
@pytest.mark.parametrize("op", OPS)
def test_weights_of_active_groups_only_are_read(op, scheme):
  """What is read is the union of the kept groups, no more and no less."""
  case = Case(op, 3, size=24)
  mask = masks(3, case.groups)["some"]
  active = mask.any((0, 1))
  assert 0 < active.sum() < case.groups
  x, *weights = case.arrays()
  clean = case.run(TILES[scheme], x, weights, mask)
  dropped = case.poisoned(weights, ~active)
  got = case.run(TILES[scheme], x, dropped, mask)
  np.testing.assert_array_equal(got, clean)
  for group in np.flatnonzero(active):
    bad = case.poisoned(weights, group)
    assert np.isnan(case.run(TILES[scheme], x, bad, mask)).any()


@pytest.mark.parametrize("scheme", TILES)
def test_one_layer_of_a_stack(scheme):
  case = Case("gated_ffn", 3, size=24, layers=3)
  mask = masks(3, case.groups)["some"]
  x, *weights = case.arrays()
  clean = case.check(TILES[scheme], mask)
  others = case.poisoned(weights, np.zeros(case.groups, bool))
  got = case.run(TILES[scheme], x, others, mask)
  np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("scheme", TILES)
def test_a_token_does_not_depend_on_others(scheme):
  """Neither on what they hold nor on what they keep, not in the last bit."""
  case = Case("gated_ffn", 3, size=24)
  mask = masks(3, case.groups)["some"]
  x, *weights = case.arrays()
  clean = case.run(TILES[scheme], x, weights, mask)
  x = x.copy()
  x[0, 1] = np.nan
  for kept in (mask[0, 1], ~mask[0, 1], True, False):
    mask[0, 1] = kept
    got = case.run(TILES[scheme], x, weights, mask)
    np.testing.assert_array_equal(got[0, [0, 2]], clean[0, [0, 2]])


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("scheme", TILES)
def test_gate_and_up_in_one_array(scheme, transposed):
  case = Case("gated_ffn", 3, size=24, layers=2, transposed=transposed)
  mask = masks(3, case.groups)["some"]
  x, gate, up, down = case.arrays()
  want = case.run(TILES[scheme], x, [gate, up, down], mask)
  problem = dataclasses.replace(case.problem, joined=True)
  got = compiled(problem, TILES[scheme])(
    jnp.asarray(x),
    jnp.stack([gate, up], axis=1),
    None,
    jnp.asarray(down),
    make_plan(jnp.asarray(mask), backend="reference"),
    jnp.int32(1),
  )
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("op", OPS)
def test_candidates(op, tokens, dtype):
  for dense, wide, groups in ((4096, 14336, 112), (576, 1536, 48)):
    case = Case(op, tokens, wide // groups, groups, dense, dtype)
    tiles = decode.candidates(case.problem)
    assert tiles[0] == decode.default(case.problem)
    assert len(set(tiles)) == len(tiles) > 1
    assert merge(tiles[1], tiles[-1]) in tiles
    n_schemes = {t.n_scheme for t in tiles}
    k_schemes = {t.k_scheme for t in tiles}
    assert "vector" not in n_schemes or tokens <= 4
    one = tokens == 1 and dtype == "float32"
    assert "vector" not in k_schemes or one


def test_refusals():
  problem = Case("gated_ffn", 64, size=16).problem
  assert decode.why_not(problem) is None
  many = dataclasses.replace(problem, length=65)
  assert "65 tokens" in decode.why_not(many)
  other = dataclasses.replace(problem, op="attention_decode")
  assert "attention_decode" in decode.why_not(other)
  with pytest.raises(ValueError, match="n_block=24"):
    decode.DecodeTiles(n_block=24)
  with pytest.raises(ValueError, match="k_step=8"):
    decode.DecodeTiles(k_step=8)
  with pytest.raises(ValueError, match="n_pad=4"):
    decode.DecodeTiles(n_pad=4)
  with pytest.raises(ValueError, match="k_splits=0"):
    decode.DecodeTiles(k_splits=0)
  with pytest.raises(ValueError, match="n_scheme='sum'"):
    decode.DecodeTiles(n_scheme="sum")
  for op, tokens in (("matmul_n_sparse", 5), ("matmul_k_sparse", 2)):
    case = Case(op, tokens, size=16)
    x, *weights = case.arrays()
    with pytest.raises(ValueError, match=f"{tokens - 1} tokens here, not"):
      case.run(VECTOR, x, weights, masks(tokens, 5)["all"])
