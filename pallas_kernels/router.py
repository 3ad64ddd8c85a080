"""The public op `route`: a router's decisions as a plan that kernels read."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import dispatch, exact, reference
from pallas_kernels import plan as plans
from pallas_kernels.plan import RoutePlan, make_plan
from pallas_kernels.problem import Problem

# Up to here a router is a decode step: one small kernel, where there is one.
DECODE_TOKENS = 64


def route(
  x: Array,
  down: Array,
  down_bias: Array,
  up: Array,
  up_bias: Array,
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
  """Plan of ((x @ down + down_bias) @ up + up_bias) > threshold, in float32.

  Up to 64 tokens a kernel computes the decisions; what else a plan holds is
  left to XLA, and costs nothing under jit if no op reads it. More tokens go
  through XLA's matmuls (exact.route), and then make_plan.

  No gradient flows through the decisions: they are bool.

  Args:
    x: [B, T, D], bfloat16, float16 or float32.
    down: float32 [D, R]; down_bias [R]; up [R, G]; up_bias [G]; all stacked
      [L, ...] with `layer`.
    threshold: a number or float32 [], or [G] a group. With `layer` an array of
      one or two axes is stacked: [L] or [L, G].
    layer: int32 [], which of the stacked weights.
    span, density, shared: as in make_plan.
    backend: as in ops; names who routes and who plans.
    tiles: of that backend; None takes measured ones, or a documented default.
    interpret: runs Pallas kernels in interpret mode, for tests on a CPU.

  Raises:
    ValueError: shapes or dtypes do not fit.
    Unsupported: the backend named cannot run this.
  """
  threshold = jnp.asarray(threshold, jnp.float32)
  weights = (down, down_bias, up, up_bias)
  _check(x, *weights, threshold, layer)
  x, threshold, *weights = jax.lax.stop_gradient((x, threshold, *weights))
  rows, length, depth = x.shape
  groups = up.shape[-1]
  if span is None:
    span = plans.default_span(rows * length, groups)
  problem = Problem(
    op="route",
    dtype=x.dtype.name,
    rows=rows,
    length=length,
    groups=groups,
    density=density,
    k=depth,
    n=down.shape[-1],
    layers=0 if layer is None else down.shape[0],
    span=span,
    shared=shared,
  )
  decode = problem.tokens <= DECODE_TOKENS and problem.groups > 0
  if tiles is not None and not decode:
    raise ValueError(
      f"tiles are for 1 to {DECODE_TOKENS} tokens, not {problem.tokens}."
    )
  if decode:
    choice = dispatch.choose(problem, backend, tiles)
  if not decode or choice.backend == "reference":
    as_specified = decode or backend == "reference"
    decide = reference.route if as_specified else exact.route
    keep = decide(x, *weights, threshold, layer=layer)
    return make_plan(
      keep,
      span=span,
      density=density,
      shared=shared,
      backend="reference" if backend == "dense" else backend,
      interpret=interpret,
    )
  op = dispatch.op_of(choice.backend, "route")
  layer = jnp.asarray(0 if layer is None else layer, jnp.int32)

  @jax.custom_batching.sequential_vmap
  def run(*arrays):
    return op.run(problem, choice.tiles, interpret, *arrays)

  keep_MG = run(x, *weights, threshold, layer)
  return make_plan(
    keep_MG.reshape(rows, length, groups),
    span=span,
    density=density,
    shared=shared,
    backend="reference",
  )


def _check(x, down, down_bias, up, up_bias, threshold, layer) -> None:
  if x.ndim != 3:
    raise ValueError(f"x is [B, T, D], not {x.shape}.")
  if x.dtype.name not in dispatch.DTYPES:
    raise ValueError(
      f"x is {x.dtype}; allowed are {', '.join(dispatch.DTYPES)}."
    )
  stack = () if layer is None else down.shape[:1]
  rank, groups = down.shape[-1:], up.shape[-1:]
  for name, array, want in (
    ("down", down, (*stack, x.shape[-1], *rank)),
    ("down_bias", down_bias, (*stack, *rank)),
    ("up", up, (*stack, *rank, *groups)),
    ("up_bias", up_bias, (*stack, *groups)),
  ):
    if array.shape != want:
      raise ValueError(f"{name} is {array.shape}; {want} fits the others.")
    if array.dtype != jnp.float32:
      raise ValueError(f"{name} is {array.dtype}; routers are float32.")
  allowed = [(), groups] if layer is None else [(), stack, (*stack, *groups)]
  if threshold.shape not in allowed:
    raise ValueError(
      f"threshold is {threshold.shape}; allowed are "
      f"{', '.join(map(str, allowed))}."
    )
