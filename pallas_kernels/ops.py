"""The public ops: shapes checked, a backend picked, gradients attached.

Every op has a VJP with respect to its arrays: the reference's, recomputed from
the inputs. Under `vmap` the mapped instances run one after the other, since a
plan describes one batch.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import dispatch, reference
from pallas_kernels.plan import RoutePlan, check_hints, decisions
from pallas_kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class _Static:
  """What one call fixes: the problem, who runs it, and how."""

  problem: Problem
  choice: dispatch.Choice
  interpret: bool
  scale: float | None = None


def matmul_n_sparse(
  x: Array,
  w: Array,
  plan: RoutePlan,
  *,
  layer: Array | int | None = None,
  transposed: bool = False,
  backend: str = "auto",
  tiles: Any = None,
  interpret: bool = False,
) -> Array:
  """x @ w for the kept groups of output channels; the others are 0.

  Args:
    x: [B, T, K], bfloat16, float16 or float32.
    w: [K, N], or [N, K] if `transposed` (a group's weights are then one block
      of memory), x's dtype; [L, ...] with `layer`, so that a scan over layers
      copies nothing.
    plan: of a mask [B, T, G], G dividing N.
    layer: int32 [], which of the stacked weights.
    backend: `auto`, `dense`, `reference`, `ragged`, `triton`, `mosaic_gpu` or
      `mosaic_tpu`; one named never falls back.
    tiles: of that backend; None takes measured ones, or a documented default.
    interpret: runs Pallas kernels in interpret mode, for tests on a CPU.

  Returns:
    [B, T, N], x's dtype.

  Raises:
    ValueError: shapes or dtypes do not fit.
    Unsupported: the backend named cannot run this.
  """
  width = _check_n_sparse(x, w, layer, transposed)
  problem = _matmul_problem(
    "matmul_n_sparse", x, plan, w, width, layer, transposed
  )
  _check_groups(plan, x, problem.n, "output channels")
  static = _static(problem, backend, tiles, interpret)
  return _run(static, (x, w), (plan, _layer(layer)))


def matmul_k_sparse(
  x: Array,
  w: Array,
  plan: RoutePlan,
  *,
  layer: Array | int | None = None,
  backend: str = "auto",
  tiles: Any = None,
  interpret: bool = False,
) -> Array:
  """x @ w over the kept groups of input channels.

  Args:
    x: [B, T, K]; dropped groups are never read, whatever they hold.
    w: [K, N], x's dtype; [L, K, N] with `layer`.
    plan: of a mask [B, T, G], G dividing K.
    layer, backend, tiles, interpret: as in matmul_n_sparse.

  Returns:
    [B, T, N], x's dtype.

  Raises:
    ValueError, Unsupported: as matmul_n_sparse.
  """
  _check_weight("w", w, x, layer)
  _check(w.shape[-2] == x.shape[-1], "w", w.shape, "x", x.shape)
  problem = _matmul_problem(
    "matmul_k_sparse", x, plan, w, w.shape[-1], layer, False
  )
  _check_groups(plan, x, problem.k, "input channels")
  static = _static(problem, backend, tiles, interpret)
  return _run(static, (x, w), (plan, _layer(layer)))


def gated_ffn(
  x: Array,
  w_gate: Array,
  w_up: Array | None,
  w_down: Array,
  plan: RoutePlan,
  *,
  layer: Array | int | None = None,
  transposed: bool = False,
  backend: str = "auto",
  tiles: Any = None,
  interpret: bool = False,
) -> Array:
  """(silu(x @ w_gate) * (x @ w_up)) @ w_down over the kept channel groups.

  Args:
    x: [B, T, D].
    w_gate, w_up: [D, F], or [F, D] if `transposed`; or w_gate holds both,
      [2, ...], and w_up is None, which is the fastest in prefill.
    w_down: [F, D]; all [L, ...] with `layer`.
    plan: of a mask [B, T, G], G dividing F.
    layer, backend, tiles, interpret: as in matmul_n_sparse.

  Returns:
    [B, T, D], x's dtype.

  Raises:
    ValueError, Unsupported: as matmul_n_sparse.
  """
  width, joined = _check_ffn(x, w_gate, w_up, w_down, layer, transposed)
  problem = dataclasses.replace(
    _matmul_problem("gated_ffn", x, plan, w_gate, width, layer, transposed),
    joined=joined,
  )
  _check_groups(plan, x, problem.n, "hidden channels")
  static = _static(problem, backend, tiles, interpret)
  return _run(static, (x, w_gate, w_up, w_down), (plan, _layer(layer)))


def attention_prefill(
  q: Array,
  k: Array,
  v: Array,
  plan: RoutePlan,
  *,
  start: Array | None = None,
  offset: Array | int | None = None,
  window: int | None = None,
  scale: float | None = None,
  layer: Array | int | None = None,
  backend: str = "auto",
  tiles: Any = None,
  interpret: bool = False,
) -> Array:
  """Causal attention of the kept (token, head group) pairs; others are 0.

  Args:
    q: [B, T, N, H].
    k, v: [B, S, K, H], K dividing N; [L, B, S, K, H] with `layer`.
    plan: of a mask [B, T, G], G dividing N; a group is neighbouring heads.
    start: int32 [B], first real key of a row (left padding).
    offset: int32 [] or [B], key position of query 0; S - T if None.
    window: keys that a query sees, itself included; None is all.
    scale: of the logits; 1 / sqrt(H) if None.
    layer, backend, tiles, interpret: as in matmul_n_sparse.

  Returns:
    [B, T, N, H], q's dtype.

  Raises:
    ValueError, Unsupported: as matmul_n_sparse.
  """
  _check_plan(plan)
  rows, length, heads, dim = _attention_shapes(q, k, v, layer, 4)
  if (plan.batch, plan.length) != (rows, length):
    raise ValueError(
      f"the plan is of {plan.batch} x {plan.length} tokens, q {q.shape}."
    )
  _check_heads(plan.groups, heads)
  keys, kv_heads = k.shape[-3:-1]
  problem = Problem(
    op="attention_prefill",
    dtype=q.dtype.name,
    rows=rows,
    length=length,
    groups=plan.groups,
    density=plan.density,
    layers=0 if layer is None else k.shape[0],
    keys=keys,
    heads=heads,
    kv_heads=kv_heads,
    dim=dim,
    window=window,
    span=plan.span,
    padded=start is not None,
    shifted=offset is not None,
  )
  if window is not None and window < 1:
    raise ValueError(f"window={window} must be at least 1, or None.")
  static = _static(problem, backend, tiles, interpret, scale)
  at = jnp.asarray(keys - length if offset is None else offset, jnp.int32)
  if at.ndim:
    at = _per_row("offset", at, rows)
  at = jnp.broadcast_to(at, (rows,))
  first = _per_row("start", 0 if start is None else start, rows)
  return _run(static, (q, k, v), (plan, _layer(layer), first, at))


def attention_decode(
  q: Array,
  k_cache: Array,
  v_cache: Array,
  lengths: Array,
  keep: Array,
  *,
  start: Array | None = None,
  scale: float | None = None,
  density: float = 0.5,
  layer: Array | int | None = None,
  backend: str = "auto",
  tiles: Any = None,
  interpret: bool = False,
) -> Array:
  """One token's attention over a cache, kept head groups only; others are 0.

  Args:
    q: [B, N, H].
    k_cache, v_cache: [B, S, K, H], K dividing N; [L, B, S, K, H] with `layer`.
    lengths: int32 [B]; keys start[b] <= j < lengths[b] are seen.
    keep: [B, G], any dtype, G dividing N.
    start: int32 [B], first real key of a row.
    scale: of the logits; 1 / sqrt(H) if None.
    density: expected share of True in `keep`, for dispatch.
    layer, backend, tiles, interpret: as in matmul_n_sparse.

  Returns:
    [B, N, H], q's dtype.

  Raises:
    ValueError, Unsupported: as matmul_n_sparse.
  """
  rows, heads, dim = _attention_shapes(q, k_cache, v_cache, layer, 3)
  if keep.ndim != 2 or keep.shape[0] != rows:
    raise ValueError(f"keep is [B, G] with B {rows}, not {keep.shape}.")
  keep = decisions(keep[:, None])[:, 0]
  check_hints(1, density)
  _check_heads(keep.shape[1], heads)
  keys, kv_heads = k_cache.shape[-3:-1]
  problem = Problem(
    op="attention_decode",
    dtype=q.dtype.name,
    rows=rows,
    length=1,
    groups=keep.shape[1],
    density=density,
    layers=0 if layer is None else k_cache.shape[0],
    keys=keys,
    heads=heads,
    kv_heads=kv_heads,
    dim=dim,
    padded=start is not None,
  )
  static = _static(problem, backend, tiles, interpret, scale)
  first = _per_row("start", 0 if start is None else start, rows)
  rest = (keep, _layer(layer), first, _per_row("lengths", lengths, rows))
  return _run(static, (q, k_cache, v_cache), rest)


# --- running -----------------------------------------------------------------


def _static(problem, backend, tiles, interpret, scale=None) -> _Static:
  choice = dispatch.choose(problem, backend, tiles)
  return _Static(problem, choice, interpret, scale)


def _run(static: _Static, arrays: tuple, rest: tuple) -> Array:
  if static.choice.backend == "reference":
    return _reference(static, arrays, rest)
  return _kernel(static, arrays, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(static: _Static, arrays: tuple, rest: tuple) -> Array:
  op = dispatch.op_of(static.choice.backend, static.problem.op)

  @jax.custom_batching.sequential_vmap
  def run(arrays, rest):
    extra = {} if static.scale is None else {"scale": static.scale}
    return op.run(
      static.problem,
      static.choice.tiles,
      static.interpret,
      *arrays,
      *rest,
      **extra,
    )

  return run(arrays, rest)


def _kernel_fwd(static, arrays, rest):
  return _kernel(static, arrays, rest), (arrays, rest)


def _kernel_bwd(static, saved, cotangent):
  arrays, rest = saved
  _, pull = jax.vjp(lambda *a: _reference(static, a, rest), *arrays)
  return pull(cotangent), None


_kernel.defvjp(_kernel_fwd, _kernel_bwd)


def _reference(static: _Static, arrays: tuple, rest: tuple) -> Array:
  problem = static.problem
  layer = rest[1] if problem.layers else None
  if problem.op == "attention_decode":
    keep, _, start, lengths = rest
    return reference.attention_decode(
      *arrays, lengths, keep, start=start, scale=static.scale, layer=layer
    )
  plan = rest[0]
  mask = plan.keep_MG.reshape(plan.batch, plan.length, plan.groups)
  if problem.op == "attention_prefill":
    return reference.attention_prefill(
      *arrays,
      mask,
      start=rest[2],
      offset=rest[3],
      window=problem.window,
      scale=static.scale,
      layer=layer,
    )
  kwargs = {"layer": layer}
  if problem.op != "matmul_k_sparse":
    kwargs["transposed"] = problem.transposed
  return getattr(reference, problem.op)(*arrays, mask, **kwargs)


# --- checks ------------------------------------------------------------------


def _per_row(name: str, value, rows: int) -> Array:
  """int32 [B]; a plain 0 stands for zeros."""
  if isinstance(value, int) and value == 0:
    return jnp.zeros((rows,), jnp.int32)
  value = jnp.asarray(value)
  if value.shape != (rows,) or not jnp.issubdtype(value.dtype, jnp.integer):
    raise ValueError(
      f"{name} is int32 [{rows}], not {value.dtype} {value.shape}."
    )
  return value.astype(jnp.int32)


def _check_layer(layer, stack: Array, stacked: bool) -> None:
  """A layer that is known must be in the stack; a traced one is trusted."""
  known = isinstance(layer, int | np.integer)
  if known and stacked and not 0 <= layer < stack.shape[0]:
    raise ValueError(f"layer={layer} must be 0 to {stack.shape[0] - 1}.")


def _layer(layer) -> Array:
  return jnp.asarray(0 if layer is None else layer, jnp.int32)


def _check_plan(plan: Any) -> None:
  if not isinstance(plan, RoutePlan):
    raise ValueError(
      f"plan is what make_plan returns, not a {type(plan).__name__}."
    )


def _matmul_problem(op, x, plan, w, n, layer, transposed) -> Problem:
  _check_plan(plan)
  return Problem(
    op=op,
    dtype=x.dtype.name,
    rows=x.shape[0],
    length=x.shape[1],
    groups=plan.groups,
    density=plan.density,
    k=x.shape[2],
    n=n,
    transposed=transposed,
    layers=0 if layer is None else w.shape[0],
    span=plan.span,
    shared=plan.shared,
  )


def _check(fits: bool, a: str, a_shape, b: str, b_shape) -> None:
  if not fits:
    raise ValueError(f"{a} {a_shape} does not fit {b} {b_shape}.")


def _check_weight(name: str, w: Array, x: Array, layer, axes: int = 2) -> None:
  if x.ndim != 3:
    raise ValueError(f"x is [B, T, channels], not {x.shape}.")
  axes += layer is not None
  _check_layer(layer, w, w.ndim == axes)
  if w.ndim != axes:
    stacked = "" if layer is None else " with a layer index"
    raise ValueError(f"{name}{stacked} has {axes} axes, not {w.shape}.")
  if w.dtype != x.dtype:
    raise ValueError(f"{name} is {w.dtype} and x {x.dtype}; give one dtype.")
  if x.dtype.name not in dispatch.DTYPES:
    raise ValueError(
      f"x is {x.dtype}; allowed are {', '.join(dispatch.DTYPES)}."
    )


def _check_n_sparse(x, w, layer, transposed: bool) -> int:
  """The output channels of an N-sparse matmul."""
  _check_weight("w", w, x, layer)
  n_axis, k_axis = (-2, -1) if transposed else (-1, -2)
  _check(w.shape[k_axis] == x.shape[-1], "w", w.shape, "x", x.shape)
  return w.shape[n_axis]


def _check_ffn(
  x, w_gate, w_up, w_down, layer, transposed: bool
) -> tuple[int, bool]:
  """(hidden channels, whether w_gate holds gate and up)."""
  joined = w_up is None
  _check_weight("w_gate", w_gate, x, layer, 3 if joined else 2)
  _check_weight("w_down", w_down, x, layer)
  n_axis, k_axis = (-2, -1) if transposed else (-1, -2)
  _check(
    w_gate.shape[k_axis] == x.shape[-1], "w_gate", w_gate.shape, "x", x.shape
  )
  if joined:
    if w_gate.shape[-3] != 2:
      raise ValueError(
        f"without w_up, w_gate holds gate and up, [2, ...], not {w_gate.shape}."
      )
  else:
    _check_weight("w_up", w_up, x, layer)
    _check(
      w_gate.shape == w_up.shape, "w_gate", w_gate.shape, "w_up", w_up.shape
    )
  lead = w_gate.shape[: 0 if layer is None else 1]
  want = (*lead, w_gate.shape[n_axis], x.shape[-1])
  _check(w_down.shape == want, "w_down", w_down.shape, "w_gate", w_gate.shape)
  return w_gate.shape[n_axis], joined


def _check_groups(plan: RoutePlan, x: Array, width: int, what: str) -> None:
  if (plan.batch, plan.length) != x.shape[:2]:
    raise ValueError(
      f"the plan is of {plan.batch} x {plan.length} tokens, x {x.shape}."
    )
  if plan.groups == 0 or width % plan.groups:
    raise ValueError(f"{plan.groups} groups must divide {width} {what}.")


def _check_heads(groups: int, heads: int) -> None:
  if groups == 0 or heads % groups:
    raise ValueError(f"{groups} groups must divide {heads} query heads.")


def _attention_shapes(q, k, v, layer, axes: int) -> tuple[int, ...]:
  if q.ndim != axes:
    raise ValueError(f"q has {axes} axes here, not {q.shape}.")
  _check(k.shape == v.shape, "k", k.shape, "v", v.shape)
  if k.ndim != (4 if layer is None else 5):
    raise ValueError(
      "k is [B, S, K, H], or [L, B, S, K, H] with a layer index, not "
      f"{k.shape}."
    )
  _check_layer(layer, k, True)
  fits = k.shape[-4] == q.shape[0] and k.shape[-1] == q.shape[-1]
  _check(fits, "k", k.shape, "q", q.shape)
  if q.shape[-2] % k.shape[-2]:
    raise ValueError(
      f"{k.shape[-2]} kv heads must divide {q.shape[-2]} query heads."
    )
  if not q.dtype == k.dtype == v.dtype:
    raise ValueError(
      f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; give one dtype."
    )
  if q.dtype.name not in dispatch.DTYPES:
    raise ValueError(
      f"q is {q.dtype}; allowed are {', '.join(dispatch.DTYPES)}."
    )
  return q.shape
