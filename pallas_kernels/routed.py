"""Ops that decide as they go: a folded router and the matmul that it gates.

A router of low rank, (x @ down + b) @ up + b', is one linear map of x a group.
Folded once at load time, a program of a kernel can decide its own group, and at
decode no launch is left for the router or for a plan.

The folded logits are the same numbers to float32's rounding, so a decision
differs from the unfolded router's only where a logit is that close to its
threshold. A logit equal to its threshold is dropped, in both.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from pallas_kernels import dispatch, exact, ops, reference
from pallas_kernels import plan as plans
from pallas_kernels.plan import RoutePlan, make_plan
from pallas_kernels.problem import Problem
from pallas_kernels.router import DECODE_TOKENS


def fold_router(
  down: Array, down_bias: Array, up: Array, up_bias: Array
) -> tuple[Array, Array]:
  """(v [G, D], c [G]) with (x @ down + down_bias) @ up + up_bias = v x + c.

  Computed in float64 on the host, or, under jit, in float32 at the highest
  precision; once, when weights are loaded. v takes G * D * 4 bytes a layer.

  Args:
    down, down_bias, up, up_bias: float32 [D, R], [R], [R, G], [G]; all may be
      stacked [L, ...], and then so is what comes out.

  Raises:
    ValueError: shapes do not fit.
  """
  arrays = (down, down_bias, up, up_bias)
  fits = (
    down.ndim in (2, 3)
    and up.shape[:-1] == (*down.shape[:-2], down.shape[-1])
    and down_bias.shape == up.shape[:-1]
    and up_bias.shape == (*up.shape[:-2], up.shape[-1])
  )
  if not fits:
    raise ValueError(
      "a router is [D, R], [R], [R, G], [G], perhaps all stacked, not "
      f"{', '.join(str(a.shape) for a in arrays)}."
    )
  if any(isinstance(a, Tracer) for a in arrays):
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  else:
    product = np.matmul
    arrays = tuple(np.asarray(a, np.float64) for a in arrays)
  down, down_bias, up, up_bias = arrays
  v = product(up.swapaxes(-1, -2), down.swapaxes(-1, -2))
  c = product(down_bias[..., None, :], up)[..., 0, :] + up_bias
  return jnp.asarray(v, jnp.float32), jnp.asarray(c, jnp.float32)


def route_folded(
  x: Array,
  v: Array,
  c: Array,
  threshold: Array | float,
  *,
  layer: Array | int | None = None,
  span: int | None = None,
  density: float = 0.5,
  shared: bool = False,
  backend: str = "auto",
  tiles: Any = None,
  interpret: bool = False,
) -> RoutePlan:
  """Plan of x . v[g] + c[g] > threshold, in float32: `route`, but folded.

  Up to 64 tokens one kernel computes the decisions. What else a plan holds is
  left to XLA, and costs nothing under jit if no op reads it.

  Args:
    x: [B, T, D], bfloat16, float16 or float32.
    v, c: float32 [G, D], [G] of fold_router; stacked [L, ...] with `layer`.
    threshold, layer, span, density, shared, backend, tiles, interpret: as in
      `route`.

  Raises:
    ValueError: shapes or dtypes do not fit.
    Unsupported: the backend named cannot run this.
  """
  router = _router(x, v, c, threshold, layer)
  rows, length = x.shape[:2]
  groups = v.shape[-2]
  if span is None:
    span = plans.default_span(rows * length, groups)
  hints: dict[str, Any] = {"span": span, "density": density, "shared": shared}
  problem = Problem(
    op="route_folded",
    dtype=x.dtype.name,
    rows=rows,
    length=length,
    groups=groups,
    k=x.shape[-1],
    n=groups,
    layers=0 if layer is None else v.shape[0],
    **hints,
  )
  if not (0 < problem.tokens <= DECODE_TOKENS and groups):
    if tiles is not None:
      raise ValueError(
        f"tiles are for 1 to {DECODE_TOKENS} tokens, not {problem.tokens}."
      )
    as_specified = backend == "reference" or problem.tokens <= DECODE_TOKENS
    decide = reference.route_folded if as_specified else exact.route_folded
    keep = decide(*router, layer=layer)
    backend = "reference" if backend == "dense" else backend
    return make_plan(keep, backend=backend, interpret=interpret, **hints)
  choice = dispatch.choose(problem, backend, tiles)
  if choice.backend == "reference":
    keep = reference.route_folded(*router, layer=layer)
  else:
    op = dispatch.op_of(choice.backend, "route_folded")

    @jax.custom_batching.sequential_vmap
    def run(*arrays):
      return op.run(problem, choice.tiles, interpret, *arrays)

    keep = run(*router, ops._layer(layer)).reshape(rows, length, groups)
  return make_plan(keep, backend="reference", **hints)


def routed_ffn(
  r: Array,
  v: Array,
  c: Array,
  threshold: Array | float,
  x: Array,
  w_gate: Array,
  w_up: Array | None,
  w_down: Array,
  *,
  layer: Array | int | None = None,
  transposed: bool = False,
  density: float = 0.5,
  shared: bool = False,
  backend: str = "auto",
  tiles: Any = None,
  interpret: bool = False,
) -> tuple[Array, Array]:
  """gated_ffn of x over the groups g with r . v[g] + c[g] > threshold.

  For decode: up to 64 tokens, router and FFN are two or three launches and no
  plan is made. More tokens go through route_folded and gated_ffn.

  No gradient flows through the decisions, so r, v, c and threshold have none.

  Args:
    r: [B, T, D], what the router sees (a residual stream before its norm).
    v, c: float32 [G, D], [G] of fold_router; stacked [L, ...] with `layer`.
    threshold: a number or float32 [], or [G] a group. With `layer` an array of
      one or two axes is stacked: [L] or [L, G].
    x: [B, T, D], what the FFN sees, r's dtype.
    w_gate, w_up, w_down, layer, transposed, backend, tiles, interpret: as in
      gated_ffn.
    density, shared: as in make_plan.

  Returns:
    (y [B, T, D] in x's dtype, keep: bool [B, T, G]).

  Raises:
    ValueError, Unsupported: as gated_ffn.
  """
  width, joined = ops._check_ffn(x, w_gate, w_up, w_down, layer, transposed)
  router = _router(r, v, c, threshold, layer)
  problem = _problem(
    "routed_ffn", r, v, x, width, layer, transposed, density, shared
  )
  if problem.tokens > DECODE_TOKENS:
    how: dict[str, Any] = {"layer": layer, "interpret": interpret}
    hints: dict[str, Any] = {"density": density, "shared": shared, **how}
    planner = _planner(backend)
    plan = route_folded(r, v, c, threshold, backend=planner, **hints)
    how["backend"] = backend
    y = ops.gated_ffn(
      x,
      w_gate,
      w_up,
      w_down,
      plan,
      transposed=transposed,
      tiles=tiles,
      **how,
    )
    return y, plan.keep_MG.reshape(*x.shape[:2], problem.groups)
  problem = dataclasses.replace(problem, joined=joined)
  static = ops._static(problem, backend, tiles, interpret)
  return _run(static, (x, w_gate, w_up, w_down), (*router, ops._layer(layer)))


def routed_matmul_n_sparse(
  r: Array,
  v: Array,
  c: Array,
  threshold: Array | float,
  x: Array,
  w: Array,
  *,
  layer: Array | int | None = None,
  transposed: bool = False,
  density: float = 0.5,
  shared: bool = False,
  backend: str = "auto",
  tiles: Any = None,
  interpret: bool = False,
) -> tuple[Array, Array]:
  """matmul_n_sparse of x over the groups g with r . v[g] + c[g] > threshold.

  As routed_ffn; for the query projection before attention_decode, which takes
  the decisions.

  Args:
    r, v, c, threshold, layer, density, shared: as in routed_ffn.
    x, w, transposed, backend, tiles, interpret: as in matmul_n_sparse.

  Returns:
    (y [B, T, N] in x's dtype, keep: bool [B, T, G]).

  Raises:
    ValueError, Unsupported: as matmul_n_sparse.
  """
  width = ops._check_n_sparse(x, w, layer, transposed)
  router = _router(r, v, c, threshold, layer)
  name = "routed_matmul_n_sparse"
  problem = _problem(name, r, v, x, width, layer, transposed, density, shared)
  if problem.tokens > DECODE_TOKENS:
    how: dict[str, Any] = {"layer": layer, "interpret": interpret}
    hints: dict[str, Any] = {"density": density, "shared": shared, **how}
    planner = _planner(backend)
    plan = route_folded(r, v, c, threshold, backend=planner, **hints)
    how["backend"] = backend
    y = ops.matmul_n_sparse(
      x, w, plan, transposed=transposed, tiles=tiles, **how
    )
    return y, plan.keep_MG.reshape(*x.shape[:2], problem.groups)
  static = ops._static(problem, backend, tiles, interpret)
  return _run(static, (x, w), (*router, ops._layer(layer)))


def _planner(backend: str) -> str:
  """Who makes the plan of many tokens: a backend that makes plans."""
  return backend if backend in ("auto", "triton") else "reference"


# --- running -----------------------------------------------------------------


def _run(static, arrays: tuple, rest: tuple) -> tuple[Array, Array]:
  if static.choice.backend != "reference":
    return _kernel(static, arrays, rest)
  *router, layer = rest
  layer = layer if static.problem.layers else None
  keep = reference.route_folded(*router, layer=layer)
  return _reference(static, arrays, keep, layer), keep


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(static, arrays: tuple, rest: tuple) -> tuple[Array, Array]:
  op = dispatch.op_of(static.choice.backend, static.problem.op)

  @jax.custom_batching.sequential_vmap
  def run(arrays, rest):
    return op.run(
      static.problem, static.choice.tiles, static.interpret, *arrays, *rest
    )

  return run(arrays, rest)


def _kernel_fwd(static, arrays, rest):
  y, keep = _kernel(static, arrays, rest)
  return (y, keep), (arrays, keep, rest[-1])


def _kernel_bwd(static, saved, cotangents):
  arrays, keep, layer = saved
  layer = layer if static.problem.layers else None
  _, pull = jax.vjp(lambda *a: _reference(static, a, keep, layer), *arrays)
  return pull(cotangents[0]), None


_kernel.defvjp(_kernel_fwd, _kernel_bwd)


def _reference(static, arrays: tuple, keep: Array, layer) -> Array:
  name = {
    "routed_ffn": "gated_ffn",
    "routed_matmul_n_sparse": "matmul_n_sparse",
  }[static.problem.op]
  transposed = static.problem.transposed
  return getattr(reference, name)(
    *arrays, keep, layer=layer, transposed=transposed
  )


# --- checks ------------------------------------------------------------------


def _router(x, v, c, threshold, layer) -> tuple[Array, ...]:
  """(x, v, c, threshold), checked, without gradients."""
  if x.ndim != 3:
    raise ValueError(f"a router's input is [B, T, D], not {x.shape}.")
  if x.dtype.name not in dispatch.DTYPES:
    raise ValueError(
      f"a router's input is {x.dtype}; allowed are "
      f"{', '.join(dispatch.DTYPES)}."
    )
  stack = () if layer is None else v.shape[:1]
  groups = v.shape[-2:-1]
  for name, array, want in (
    ("v", v, (*stack, *groups, x.shape[-1])),
    ("c", c, (*stack, *groups)),
  ):
    if array.shape != want:
      raise ValueError(f"{name} is {array.shape}; {want} fits the others.")
    if array.dtype != jnp.float32:
      raise ValueError(f"{name} is {array.dtype}; routers are float32.")
  threshold = jnp.asarray(threshold, jnp.float32)
  allowed = [(), groups] if layer is None else [(), stack, (*stack, *groups)]
  if threshold.shape not in allowed:
    raise ValueError(
      f"threshold is {threshold.shape}; allowed are "
      f"{', '.join(map(str, allowed))}."
    )
  return jax.lax.stop_gradient((x, v, c, threshold))


def _problem(op, r, v, x, width, layer, transposed, density, shared) -> Problem:
  if r.shape != x.shape or r.dtype != x.dtype:
    raise ValueError(
      f"r is {r.dtype} {r.shape} and x {x.dtype} {x.shape}; they must be alike."
    )
  groups = v.shape[-2]
  if groups == 0 or width % groups:
    raise ValueError(f"{groups} groups must divide {width} output channels.")
  plans.check_hints(1, density)
  return Problem(
    op=op,
    dtype=x.dtype.name,
    rows=x.shape[0],
    length=x.shape[1],
    groups=groups,
    density=density,
    k=x.shape[2],
    n=width,
    transposed=transposed,
    layers=0 if layer is None else v.shape[0],
    span=plans.default_span(x.shape[0] * x.shape[1], groups),
    shared=shared,
  )
