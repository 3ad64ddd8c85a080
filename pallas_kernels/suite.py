"""The problems that are tuned and benchmarked, and inputs for them.

Shapes are Llama-3.1-8B's unless said: D 4096, F 14,336, 32 query and 8 kv heads
of 128, 4 heads a group. Weights of N-sparse sides are stored group-major
([out, in]), one layout for prefill and decode.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import device, ops, plan, reference, router
from pallas_kernels import routed as routed_ops
from pallas_kernels.problem import Problem

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
GROUP_SIZES = (32, 128, 256, 512, 1024)
DENSITIES = (1.0, 0.5, 0.25)
PREFILL_KEYS = (1024, 2048, 4096, 8192, 16384, 32768)
DECODE_KEYS = (8192, 16384, 32768, 65536)
DECODE_ROWS = (1, 2, 4, 8, 16)
ROUTE_TOKENS = (1, 4, 16, 64)
ROUTE_RANK = 32
ROUTED_TOKENS = (1, 4, 16)
LEARNED_TOKENS = (1024, 2048, 4096, 8192)
_D, _F, _HEADS, _KV_HEADS, _DIM, _HEAD_GROUPS = 4096, 14336, 32, 8, 128, 8
_WIDE_F = 12288  # 12 or 48 groups, as learned masks have them
_SMOL_D, _SMOL_F = 576, 1536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
  """Masks of a trained router: what the suite must know without the data.

  Attributes:
    groups: FFN groups; attention has 3 everywhere.
    ffn, attention: mean keep rates.
  """

  groups: int
  ffn: float
  attention: float


LEARNED = {
  "g128_regrouped": Learned(groups=12, ffn=0.6, attention=0.41),
  "g32_contiguous": Learned(groups=48, ffn=0.63, attention=0.39),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One row of the suite.

  Attributes:
    name: part/sizes, as in `n_sparse/T4096/C128/d0.5`.
    problem: what runs.
    mask: `random` (every pair for itself), `shared` (one set of groups for all
      tokens), or `learned` or `matched` (random with the learned masks' density
      in each layer) of `source`.
    source: which of LEARNED.
  """

  name: str
  problem: Problem
  mask: str = "random"
  source: str = ""

  @property
  def part(self) -> str:
    """Its first word: `n_sparse`, `k_sparse`, `ffn`, `prefill`, ..."""
    return self.name.split("/")[0]


_OP = {
  "n_sparse": "matmul_n_sparse",
  "q_proj": "matmul_n_sparse",
  "k_sparse": "matmul_k_sparse",
  "o_proj": "matmul_k_sparse",
  "ffn": "gated_ffn",
  "routed_ffn": "routed_ffn",
  "routed_q": "routed_matmul_n_sparse",
}
ROUTED = ("routed_ffn", "routed_matmul_n_sparse")
_FFNS = ("gated_ffn", "routed_ffn")


def matmul_problem(
  part: str,
  tokens: int,
  c: int,
  density: float,
  *,
  d: int = _D,
  f: int = _F,
  rows: int = 1,
  shared: bool = False,
  joined: bool = True,
  dtype: str = "bfloat16",
) -> Problem:
  """A matmul or FFN between width `d` and `f` channels in groups of `c`.

  `joined`: an FFN's gate and up are one array.
  """
  op = _OP[part]
  down = op == "matmul_k_sparse"
  groups = f // c
  return Problem(
    op=op,
    dtype=dtype,
    rows=rows,
    length=tokens // rows,
    groups=groups,
    density=density,
    k=f if down else d,
    n=d if down else f,
    transposed=not down,
    span=plan.default_span(tokens, groups),
    shared=shared,
    joined=joined and op in _FFNS,
  )


def prefill_problem(
  keys: int,
  density: float,
  *,
  rows: int = 1,
  heads: int = _HEADS,
  kv_heads: int = _KV_HEADS,
  dim: int = _DIM,
  groups: int = _HEAD_GROUPS,
  dtype: str = "bfloat16",
) -> Problem:
  """Causal attention of `rows` sequences of `keys` tokens."""
  return Problem(
    op="attention_prefill",
    dtype=dtype,
    rows=rows,
    length=keys,
    groups=groups,
    density=density,
    keys=keys,
    heads=heads,
    kv_heads=kv_heads,
    dim=dim,
    span=plan.default_span(rows * keys, groups),
  )


def decode_problem(
  rows: int,
  keys: int,
  density: float,
  *,
  heads: int = _HEADS,
  kv_heads: int = _KV_HEADS,
  dim: int = _DIM,
  groups: int = _HEAD_GROUPS,
  dtype: str = "bfloat16",
) -> Problem:
  """One token of `rows` sequences over a cache of `keys` each."""
  return Problem(
    op="attention_decode",
    dtype=dtype,
    rows=rows,
    length=1,
    groups=groups,
    density=density,
    keys=keys,
    heads=heads,
    kv_heads=kv_heads,
    dim=dim,
  )


def _matmul_rows() -> Iterable[Row]:
  for part in ("n_sparse", "k_sparse", "ffn"):
    for t in TOKENS:
      for c in GROUP_SIZES:
        densities = (*DENSITIES, 0.0) if t == 4096 else DENSITIES
        for d in densities:
          yield Row(
            name=f"{part}/T{t}/C{c}/d{d:g}",
            problem=matmul_problem(part, t, c, d),
          )
  for t in (4, 16):
    for c in GROUP_SIZES:
      yield Row(
        name=f"ffn/T{t}/C{c}/d0.5/shared",
        problem=matmul_problem("ffn", t, c, 0.5, shared=True),
        mask="shared",
      )
  for part in ("q_proj", "o_proj"):
    for t in TOKENS:
      c = _HEADS * _DIM // _HEAD_GROUPS
      yield Row(
        name=f"{part}/T{t}/C{c}/d0.5",
        problem=matmul_problem(part, t, c, 0.5, f=_HEADS * _DIM),
      )


def _attention_rows() -> Iterable[Row]:
  for keys in PREFILL_KEYS:
    for d in (*DENSITIES, 0.0) if keys == 4096 else DENSITIES:
      yield Row(
        name=f"prefill/S{keys}/d{d:g}", problem=prefill_problem(keys, d)
      )
  for rows in DECODE_ROWS:
    for keys in DECODE_KEYS:
      for d in DENSITIES:
        yield Row(
          name=f"decode/B{rows}/S{keys}/d{d:g}",
          problem=decode_problem(rows, keys, d),
        )


def route_problem(
  tokens: int,
  groups: int,
  density: float,
  *,
  d: int = _D,
  rank: int = ROUTE_RANK,
  dtype: str = "bfloat16",
) -> Problem:
  """A router of one decode step; folded if `rank` is 0."""
  return Problem(
    op="route" if rank else "route_folded",
    dtype=dtype,
    rows=tokens,
    length=1,
    groups=groups,
    density=density,
    k=d,
    n=rank or groups,
    span=plan.default_span(tokens, groups),
  )


def _route_rows() -> Iterable[Row]:
  for t in ROUTE_TOKENS:
    for groups in (_HEAD_GROUPS, *(_F // c for c in GROUP_SIZES)):
      yield Row(
        name=f"route/T{t}/G{groups}", problem=route_problem(t, groups, 0.5)
      )
      yield Row(
        name=f"route_folded/T{t}/G{groups}",
        problem=route_problem(t, groups, 0.5, rank=0),
      )


def _routed_rows() -> Iterable[Row]:
  """Decode steps with their routers: one set of groups for all tokens."""
  for t in ROUTED_TOKENS:
    kind = "random" if t == 1 else "shared"
    for c in GROUP_SIZES:
      for d in DENSITIES if t == 1 else (0.5,):
        problem = matmul_problem("routed_ffn", t, c, d, shared=t > 1)
        name = f"routed_ffn/T{t}/C{c}/d{d:g}"
        yield Row(name=name, problem=problem, mask=kind)
    width = _HEADS * _DIM
    c = width // _HEAD_GROUPS
    problem = matmul_problem("routed_q", t, c, 0.5, f=width, shared=t > 1)
    yield Row(name=f"routed_q/T{t}/C{c}/d0.5", problem=problem, mask=kind)


def _learned_rows() -> Iterable[Row]:
  shapes = (("smol", _SMOL_D, _SMOL_F), ("wide", _D, _WIDE_F))
  for source, learned in LEARNED.items():
    for t in LEARNED_TOKENS:
      for kind in ("learned", "matched"):
        for shape, d, f in shapes:
          c = f // learned.groups
          for part in ("n_sparse", "k_sparse", "ffn"):
            yield Row(
              name=f"{part}/{shape}/T{t}/C{c}/{kind}",
              problem=matmul_problem(
                part, t, c, learned.ffn, d=d, f=f, rows=t // 1024
              ),
              mask=kind,
              source=source,
            )
        yield Row(
          name=f"prefill/smol/T{t}/{source}/{kind}",
          problem=prefill_problem(
            1024,
            learned.attention,
            rows=t // 1024,
            heads=9,
            kv_heads=3,
            dim=64,
            groups=3,
          ),
          mask=kind,
          source=source,
        )


@functools.cache
def rows() -> tuple[Row, ...]:
  """Every row of the suite."""
  return (
    *_matmul_rows(),
    *_attention_rows(),
    *_route_rows(),
    *_routed_rows(),
    *_learned_rows(),
  )


def small_rows() -> tuple[Row, ...]:
  """A few rows that a CPU runs in seconds: they exercise code, not speed."""
  out = []
  for part in ("n_sparse", "k_sparse", "ffn"):
    for t, kind in ((1, "random"), (4, "shared"), (33, "random")):
      problem = matmul_problem(
        part, t, 32, 0.5, d=64, f=128, shared=kind == "shared", dtype="float32"
      )
      out.append(
        Row(name=f"{part}/small/T{t}/{kind}", problem=problem, mask=kind)
      )
  sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 16, "groups": 2}
  sizes["dtype"] = "float32"
  out.append(
    Row(name="prefill/small/S64", problem=prefill_problem(64, 0.5, **sizes))
  )
  out.append(
    Row(name="decode/small/S64", problem=decode_problem(2, 64, 0.5, **sizes))
  )
  many = matmul_problem("ffn", 80, 32, 0.5, d=64, f=128, dtype="float32")
  out.append(Row(name="ffn/small/T80/random", problem=many))
  return tuple(out)


def select(all_rows: Sequence[Row], patterns: str) -> list[Row]:
  """Rows whose name fits any of the comma-separated patterns (`*`, `?`).

  Raises:
    ValueError: a pattern that no row fits.
  """
  wanted = [p.strip() for p in patterns.split(",") if p.strip()] or ["*"]
  for pattern in wanted:
    if not any(fnmatch.fnmatchcase(row.name, pattern) for row in all_rows):
      raise ValueError(
        f"no row fits {pattern!r}; names look like {all_rows[0].name!r}, "
        f"{all_rows[-1].name!r}."
      )
  return [
    row
    for row in all_rows
    if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in wanted)
  ]


# --- inputs ------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: Array, shape: tuple[int, ...], dtype: str, scale: float):
  return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)


def arrays(problem: Problem, seed: int) -> tuple[Array, ...]:
  """Random arrays of an op, products of about unit size.

  Returns:
    (x, w), (x, w_gate, w_up, w_down) or, joined, (x, w_both, w_down),
    (q, k, v), for decode (q, k_cache, v_cache, lengths) with full lengths, for
    route (x, down, down_bias, up, up_bias) or, folded, (x, v, c), with half of
    the logits above 0. With a router in front, r, v and those of the matmul.
  """
  p = problem
  keys = jax.random.split(jax.random.key(seed), 4)

  def normal(i, *shape, scale=1.0):
    return _normal(keys[i], shape, p.dtype, scale)

  if p.op == "attention_decode":
    cache = (p.rows, p.keys, p.kv_heads, p.dim)
    lengths = jnp.full((p.rows,), p.keys, jnp.int32)
    q = normal(0, p.rows, p.heads, p.dim)
    return q, normal(1, *cache), normal(2, *cache), lengths
  if p.op == "attention_prefill":
    cache = (p.rows, p.keys, p.kv_heads, p.dim)
    q = normal(0, p.rows, p.length, p.heads, p.dim)
    return q, normal(1, *cache), normal(2, *cache)
  x = normal(0, p.rows, p.length, p.k)
  if p.op == "route":
    down = _normal(keys[1], (p.k, p.n), "float32", p.k**-0.5)
    up = _normal(keys[2], (p.n, p.groups), "float32", p.n**-0.5)
    zeros = (jnp.zeros(p.n, jnp.float32), jnp.zeros(p.groups, jnp.float32))
    return x, down, zeros[0], up, zeros[1]
  if p.op == "route_folded":
    v = _normal(keys[1], (p.groups, p.k), "float32", p.k**-0.5)
    return x, v, jnp.zeros(p.groups, jnp.float32)
  if p.op in ROUTED:
    r = _normal(jax.random.key(seed + 1), x.shape, p.dtype, 1.0)
    v = _normal(keys[2], (p.groups, p.k), "float32", p.k**-0.5)
    plain = "gated_ffn" if p.op == "routed_ffn" else "matmul_n_sparse"
    return r, v, *arrays(dataclasses.replace(p, op=plain), seed)
  shape = (p.n, p.k) if p.transposed else (p.k, p.n)
  w = normal(1, *shape, scale=p.k**-0.5)
  if p.op != "gated_ffn":
    return x, w
  down = normal(3, p.n, p.k, scale=p.n**-0.5)
  if p.joined:
    return x, normal(1, 2, *shape, scale=p.k**-0.5), down
  return x, w, normal(2, *shape, scale=p.k**-0.5), down


def random_mask(
  problem: Problem, seed: int, kind: str = "random"
) -> np.ndarray:
  """bool [B, T, G] of the problem's density; see Row.mask.

  `shared` keeps exactly round(density * G) groups, the same for all tokens.
  """
  rng = np.random.default_rng(seed)
  shape = (problem.rows, problem.length, problem.groups)
  if kind == "shared" or problem.tokens == 1:
    kept = round(problem.density * problem.groups)
    some = np.zeros(problem.groups, bool)
    some[rng.permutation(problem.groups)[:kept]] = True
    return np.broadcast_to(some, shape).copy()
  return rng.random(shape, np.float32) < problem.density


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _planned(mask, span: int, density: float, shared: bool, traced_for: str):
  del traced_for  # decides who makes the plan, so it belongs to the key
  return plan.make_plan(mask, span=span, density=density, shared=shared)


def routed(problem: Problem, mask: np.ndarray) -> Any:
  """What the op takes for a mask: a plan, or the mask itself for decode.

  A router alone takes a threshold. One in front of a matmul takes biases that
  make every token keep the groups of the first.
  """
  if problem.op in ("route", "route_folded"):
    return jnp.zeros((), jnp.float32)  # the threshold
  if problem.op in ROUTED:
    return jnp.where(jnp.asarray(mask[0, 0]), 1e6, -1e6).astype(jnp.float32)
  if problem.op == "attention_decode":
    return jnp.asarray(mask[:, 0])
  hints = (problem.span, problem.density, problem.shared)
  return _planned(jnp.asarray(mask), *hints, device.name())


def call(
  problem: Problem, backend: str = "auto", tiles: Any = None
) -> Callable[..., Array]:
  """The public op as a function of `(*arrays, plan or keep)`.

  Of a router: the decisions, all that decode reads.
  """
  how: dict[str, Any] = {"backend": backend, "tiles": tiles}
  if problem.op == "route":
    how["density"] = problem.density
    return lambda *args: router.route(*args, **how).keep_MG
  if problem.op == "route_folded":
    how["density"] = problem.density
    return lambda *args: routed_ops.route_folded(*args, **how).keep_MG
  if problem.op in ROUTED:
    return _routed_call(problem, how)
  if problem.op == "attention_decode":
    return lambda q, k, v, lengths, keep: ops.attention_decode(
      q, k, v, lengths, keep, density=problem.density, **how
    )
  op = getattr(ops, problem.op)
  if problem.transposed:
    how["transposed"] = True
  if problem.joined:
    return lambda x, both, down, made: op(x, both, None, down, made, **how)
  return lambda *args: op(*args, **how)


def _routed_call(problem: Problem, how: dict[str, Any]):
  """The op of (r, v, *arrays, c); threshold 0."""
  how = {
    "transposed": problem.transposed,
    "density": problem.density,
    "shared": problem.shared,
    **how,
  }
  op = getattr(routed_ops, problem.op)

  def run(r, v, x, w, *rest):
    *down, c = rest
    weights = (w, None, *down) if problem.joined else (w, *down)
    return op(r, v, c, 0.0, x, *weights, **how)

  return run


# --- numbers before times ----------------------------------------------------

REFERENCE_ERROR = 2e-6  # sums of up to 16,384 float32 products
_CHECKED_QUERIES = 128  # at each end: all of them would need T x S logits


def poisoned(problem: Problem, args: tuple, mask: np.ndarray) -> tuple:
  """The same arguments with NaN wherever an op must not look."""
  if problem.op == "matmul_k_sparse":
    keep = np.repeat(mask, problem.k // problem.groups, axis=-1)
    return (jnp.where(keep, args[0], jnp.nan), *args[1:])
  if problem.op == "attention_decode":
    q, k, v, _, keep = args
    lengths = jnp.asarray(
      [max(problem.keys - 1 - 37 * i, 1) for i in range(problem.rows)],
      jnp.int32,
    )
    inside = (jnp.arange(problem.keys)[None] < lengths[:, None])[
      :, :, None, None
    ]
    k, v = (jnp.where(inside, a, jnp.nan).astype(a.dtype) for a in (k, v))
    return q, k, v, lengths, keep
  return args


def exact(problem: Problem, args: tuple, mask: np.ndarray) -> Array:
  """The reference in float32 on the same numbers; see `compared`."""
  wide = [
    a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a
    for a in args[:-1]
  ]
  if problem.op == "attention_prefill":
    q, k, v = wide
    run = jax.jit(reference.attention_prefill)
    parts = [
      run(q[:, at], k, v, jnp.asarray(mask[:, at]), offset=at.start)
      for at in _checked(problem)
    ]
    return jnp.concatenate(parts, axis=1)
  wide_problem = dataclasses.replace(problem, dtype="float32")
  out = jax.jit(call(wide_problem, "reference"))(*wide, args[-1])
  return compared(wide_problem, out)


def _checked(problem: Problem) -> list[slice]:
  few = min(_CHECKED_QUERIES, problem.length)
  last = slice(problem.length - few, problem.length)
  return [last] if last.start < few else [slice(0, few), last]


def compared(problem: Problem, out: Any) -> Array:
  """The part of an output that `exact` gives, in float32."""
  if problem.op in ROUTED:
    out = out[0]
  if problem.op == "attention_prefill":
    out = jnp.concatenate([out[:, at] for at in _checked(problem)], axis=1)
  return jnp.asarray(out, jnp.float32)


@jax.jit
def _distance(out: Array, want: Array) -> tuple[Array, Array, Array]:
  finite = jnp.isfinite(out).all()
  return (
    jnp.linalg.norm((out - want).ravel()),
    jnp.linalg.norm(want.ravel()),
    finite,
  )


def relative_error(out: Array, want: Array) -> float:
  """|out - want| / |want|; infinite for NaN or another shape."""
  if out.shape != want.shape:
    return math.inf
  off, size, finite = map(float, _distance(out, want))
  if not finite:
    return math.inf
  return off / size if size else (0.0 if off == 0 else math.inf)


@jax.jit
def _any_left(out: Array, mask: Array) -> Array:
  flat = out.reshape(*mask.shape, -1)
  return (jnp.any(flat != 0, axis=-1) & ~mask).any()


def zero_where_dropped(
  problem: Problem, compared_out: Array, mask: np.ndarray
) -> bool:
  """Whether `compared(problem, out)` is exactly 0 in dropped groups."""
  if problem.op == "attention_prefill":
    mask = np.concatenate([mask[:, at] for at in _checked(problem)], axis=1)
  elif problem.op not in (
    "matmul_n_sparse",
    "routed_matmul_n_sparse",
    "attention_decode",
  ):
    return True  # its output has no groups
  return not bool(_any_left(compared_out, jnp.asarray(mask)))


def wrong(
  problem: Problem,
  compared_out: Array,
  want: Array,
  mask: np.ndarray,
  dense_error: float,
) -> str | None:
  """Why `compared(problem, out)` is not acceptable, or None.

  It may be at most twice as far from `exact` as the dense op in the same
  dtype (plus what `exact`, in float32, is itself off by), and what the mask
  drops must be exactly 0.
  """
  error = relative_error(compared_out, want)
  if not error <= 2 * dense_error + REFERENCE_ERROR:
    return f"relative error {error:.2g}, dense has {dense_error:.2g}"
  if not zero_where_dropped(problem, compared_out, mask):
    return "what the mask drops is not 0"
  return None
