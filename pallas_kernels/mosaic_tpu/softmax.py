"""What prefill and decode attention on TPU share: running softmax, limits."""

import jax.numpy as jnp

from pallas_kernels.errors import Unsupported
from pallas_kernels.mosaic_tpu.common import (
  MAX_STEPS,
  VMEM_FILL,
  dtype_why_not,
)
from pallas_kernels.problem import Problem

LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)


def update(logits, sees, v, max_ref, sum_ref, out_ref, multiply):
  """One step of the running softmax; sees None: all keys are seen."""
  top = jnp.maximum(max_ref[...], logits.max(-1, keepdims=True))
  weights = jnp.exp(logits - top)
  if sees is not None:
    weights = jnp.where(sees, weights, 0.0)
  shrink = jnp.exp(max_ref[...] - top)
  sum_ref[...] = shrink * sum_ref[...] + weights.sum(-1, keepdims=True)
  out_ref[...] = shrink * out_ref[...] + multiply(weights.astype(v.dtype), v)
  max_ref[...] = top


def begin_rows(max_ref, sum_ref, out_ref):
  """The state before the first key."""
  max_ref[...] = jnp.full_like(max_ref, LOWEST)
  sum_ref[...] = jnp.zeros_like(sum_ref)
  out_ref[...] = jnp.zeros_like(out_ref)


def result(sum_ref, out_ref):
  """The weighted mean; 0 where no key was seen."""
  total = sum_ref[...]
  return out_ref[...] / jnp.where(total == 0, 1.0, total)


def limits(steps: int, vmem: int) -> str | None:
  """Why a call of so many steps and bytes does not fit, or None."""
  if steps > MAX_STEPS:
    return (
      f"{steps} blocks are more than the {MAX_STEPS} steps that fit into "
      "scalar memory."
    )
  if vmem > VMEM_FILL:
    return f"{vmem} bytes of vector memory are needed, {VMEM_FILL} are allowed."
  return None


def check(reason: str | None, problem: Problem) -> None:
  """Raises Unsupported if there is a reason."""
  if reason is not None:
    raise Unsupported(f"mosaic_tpu cannot run {problem.op}: {reason}")


def why_not(candidates, smallest, reason, problem: Problem) -> str | None:
  """Why no tiles fit a problem, told for the smallest; or None."""
  found = dtype_why_not(problem)
  if found is None and not candidates(problem):
    found = reason(problem, smallest)
  return found


def default(candidates, problem: Problem):
  """The first candidate."""
  return candidates(problem)[0]
