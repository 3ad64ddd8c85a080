"""The masked dense twin: the best dense op there is, then the mask.

Matmuls are XLA's. Attention is cuDNN's where it computes exactly what is asked
for (bfloat16 or float16, head widths it knows, queries and keys aligned), else
the reference. Rows padded on the left are moved to the left edge first, so that
cuDNN's causal mask and lengths describe them; that costs a copy of q, k and v.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import device, reference
from pallas_kernels.errors import Unsupported
from pallas_kernels.plan import RoutePlan
from pallas_kernels.problem import Op, Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTiles:
  """How dense attention is computed.

  Attributes:
    how: `cudnn`; `cudnn_packed` (decode: the query heads of one kv head as
      rows of one tile, so that the cache is read once); `xla` (the
      reference); `auto`: a prefill by cuDNN where it takes the call, else XLA.
  """

  how: str = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FfnTiles:
  """How a dense gated FFN is computed.

  Attributes:
    rounded: gate and up are rounded to the dtype before SwiGLU, as frameworks
      do; else they stay float32, which writes twice the bytes.
  """

  rounded: bool = True


def _matmul(x: Array, w: Array) -> Array:
  """x @ w in x's dtype; accelerators add up in float32."""
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.matmul(x, w, precision=precision)


def _stacked(problem: Problem, layer: Array) -> Array | None:
  return layer if problem.layers else None


def _mask(plan: RoutePlan) -> Array:
  return plan.keep_MG.reshape(plan.batch, plan.length, plan.groups)


def _n_sparse(problem, tiles, interpret, x, w, plan, layer) -> Array:
  del tiles, interpret
  w = reference.select(w, _stacked(problem, layer), problem.transposed)
  return reference.mask_groups(_matmul(x, w), _mask(plan))


def _k_sparse(problem, tiles, interpret, x, w, plan, layer) -> Array:
  del tiles, interpret
  w = reference.select(w, _stacked(problem, layer))
  return _matmul(reference.mask_groups(x, _mask(plan)), w)


def _gated_ffn(problem, tiles, interpret, x, gate, up, down, plan, layer):
  del interpret
  return _masked_ffn(problem, tiles, x, gate, up, down, _mask(plan), layer)


def _masked_ffn(problem, tiles, x, gate, up, down, mask, layer):
  at = _stacked(problem, layer)
  if not tiles.rounded:
    return reference.gated_ffn(
      x, gate, up, down, mask, layer=at, transposed=problem.transposed
    )
  if problem.joined and problem.transposed:  # one wide matmul
    both = reference.select(gate, at)
    wide = _matmul(x, both.reshape(-1, both.shape[-1]).T)
    gate, up = jnp.split(wide, 2, axis=-1)
  else:
    pair = reference.select(gate, at)
    if not problem.joined:
      pair = (pair, reference.select(up, at))
    gate, up = (_matmul(x, w.T if problem.transposed else w) for w in pair)
  hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
  hidden = reference.mask_groups(hidden.astype(x.dtype), mask)
  return _matmul(hidden, reference.select(down, at))


# --- attention ---------------------------------------------------------------


def _no_cudnn(problem: Problem) -> str | None:
  """Why cuDNN does not compute exactly this, or None."""
  if not device.name().startswith("nvidia"):
    return "cuDNN is for NVIDIA GPUs"
  if problem.dtype not in ("bfloat16", "float16"):
    return f"cuDNN's attention takes no {problem.dtype}"
  if problem.dim % 8 or problem.dim > 128:
    return f"head width {problem.dim} is not a multiple of 8 up to 128"
  if problem.op == "attention_decode":
    return "cuDNN skips no keys on the left" if problem.padded else None
  if problem.shifted or problem.length != problem.keys:
    return "cuDNN's causal mask puts query 0 at key 0"
  return None


def _how(problem: Problem, tiles: AttentionTiles) -> tuple[str, ...]:
  """What to try, in order."""
  reason = _no_cudnn(problem)
  if tiles.how == "auto":
    # Whether cuDNN keeps what lies behind a cache's end (NaN, say) out of the
    # result is not documented: decode takes it only where it is asked for, or
    # where a table says that it was measured and right.
    no = reason or problem.op == "attention_decode"
    return ("xla",) if no else ("cudnn", "xla")
  if tiles.how != "xla" and reason:
    raise Unsupported(f"dense {tiles.how}: {reason}.")
  return (tiles.how,)


def _first(problem: Problem, tiles: AttentionTiles, paths) -> Array:
  ways = _how(problem, tiles)
  for way in ways[:-1]:
    try:
      return paths[way]()
    except (RuntimeError, NotImplementedError, ValueError):
      continue  # no cuDNN here, or one too old for this: said while tracing
  return paths[ways[-1]]()


def _prefill(
  problem, tiles, interpret, q, k, v, plan, layer, start, offset, scale=None
) -> Array:
  del interpret
  at = _stacked(problem, layer)

  def xla():
    return reference.attention_prefill(
      q,
      k,
      v,
      _mask(plan),
      start=start if problem.padded else None,
      offset=offset,
      window=problem.window,
      scale=scale,
      layer=at,
    )

  def cudnn():
    args = (q, reference.select(k, at), reference.select(v, at))
    window = problem.window
    causal = functools.partial(
      jax.nn.dot_product_attention,
      is_causal=True,
      scale=scale,
      local_window_size=None if window is None else (window - 1, 0),
      implementation="cudnn",
    )
    if problem.padded:
      out = _unpadded(causal, start, *args)
    else:
      out = causal(*args)
    flat = out.reshape(*out.shape[:2], -1)
    return reference.mask_groups(flat, _mask(plan)).reshape(out.shape)

  return _first(problem, tiles, {"xla": xla, "cudnn": cudnn})


def _unpadded(attend, start: Array, *args: Array) -> Array:
  """attend on rows moved left by start[b]; 0 for the queries before it."""
  length = args[0].shape[1]
  start = jnp.clip(start, 0, length)
  place = jnp.arange(length, dtype=jnp.int32)[None]
  args = [_moved(a, place + start[:, None]) for a in args]
  real = length - start
  # A row of padding alone has no keys: it gets one, of zeros, and is dropped.
  real = jnp.maximum(real, 1)
  out = attend(*args, query_seq_lengths=real, key_value_seq_lengths=real)
  return _moved(out, place - start[:, None])


def _moved(a_BTNH: Array, source_BT: Array) -> Array:
  """Rows taken from `source`, 0 where that is outside."""
  inside = (source_BT >= 0) & (source_BT < a_BTNH.shape[1])
  index = jnp.where(inside, source_BT, 0)[:, :, None, None]
  taken = jnp.take_along_axis(a_BTNH, index, axis=1)
  return jnp.where(inside[:, :, None, None], taken, jnp.zeros((), taken.dtype))


def _decode(
  problem, tiles, interpret, q, k, v, keep, layer, start, lengths, scale=None
) -> Array:
  del interpret
  at = _stacked(problem, layer)
  rows, heads, dim = q.shape

  def masked(out):
    out = jnp.where((lengths > 0)[:, None, None], out.reshape(q.shape), 0)
    flat = out.astype(q.dtype).reshape(rows, 1, -1)
    return reference.mask_groups(flat, keep[:, None]).reshape(q.shape)

  def attend(q_BTNH):
    return jax.nn.dot_product_attention(
      q_BTNH,
      reference.select(k, at),
      reference.select(v, at),
      scale=scale,
      key_value_seq_lengths=jnp.maximum(lengths, 1),
      implementation="cudnn",
    )

  def xla():
    first = start if problem.padded else None
    return reference.attention_decode(
      q, k, v, lengths, keep, start=first, scale=scale, layer=at
    )

  def packed():
    per_kv = heads // problem.kv_heads
    q_BTKH = q.reshape(rows, problem.kv_heads, per_kv, dim).swapaxes(1, 2)
    return masked(attend(q_BTKH).swapaxes(1, 2))

  paths = {
    "xla": xla,
    "cudnn": lambda: masked(attend(q[:, None])),
    "cudnn_packed": packed,
  }
  return _first(problem, tiles, paths)


def _attention_candidates(problem: Problem) -> tuple[AttentionTiles, ...]:
  if _no_cudnn(problem):
    return (AttentionTiles(how="xla"),)
  ways = ("cudnn", "xla")
  if problem.op == "attention_decode":
    ways = ("cudnn", "cudnn_packed", "xla")
  return tuple(AttentionTiles(how=way) for way in ways)


def _plain_op(run) -> Op:
  return Op(
    run=run,
    why_not=lambda problem: None,
    default=lambda problem: None,
    candidates=lambda problem: (None,),
  )


def _attention_op(run) -> Op:
  return Op(
    run=run,
    why_not=lambda problem: None,
    default=lambda problem: AttentionTiles(),
    candidates=_attention_candidates,
  )


def _route(
  problem, tiles, interpret, x, down, down_bias, up, up_bias, threshold, layer
) -> Array:
  del tiles, interpret
  keep = reference.route(
    x, down, down_bias, up, up_bias, threshold, layer=_stacked(problem, layer)
  )
  return keep.reshape(problem.tokens, problem.groups)


def _route_folded(
  problem, tiles, interpret, x, v, c, threshold, layer
) -> Array:
  del tiles, interpret
  keep = reference.route_folded(
    x, v, c, threshold, layer=_stacked(problem, layer)
  )
  return keep.reshape(problem.tokens, problem.groups)


def _routed_ffn(
  problem, tiles, interpret, x, gate, up, down, r, v, c, threshold, layer
):
  del interpret
  at = _stacked(problem, layer)
  keep = reference.route_folded(r, v, c, threshold, layer=at)
  return _masked_ffn(problem, tiles, x, gate, up, down, keep, layer), keep


def _routed_n_sparse(
  problem, tiles, interpret, x, w, r, v, c, threshold, layer
):
  del tiles, interpret
  at = _stacked(problem, layer)
  keep = reference.route_folded(r, v, c, threshold, layer=at)
  y = _matmul(x, reference.select(w, at, problem.transposed))
  return reference.mask_groups(y, keep), keep


def _ffn_op(run) -> Op:
  return Op(
    run=run,
    why_not=lambda problem: None,
    default=lambda problem: FfnTiles(),
    candidates=lambda problem: (FfnTiles(), FfnTiles(rounded=False)),
  )


OPS = {
  "matmul_n_sparse": _plain_op(_n_sparse),
  "matmul_k_sparse": _plain_op(_k_sparse),
  "gated_ffn": _ffn_op(_gated_ffn),
  "attention_prefill": _attention_op(_prefill),
  "attention_decode": _attention_op(_decode),
  "route": _plain_op(_route),
  "route_folded": _plain_op(_route_folded),
  "routed_ffn": _ffn_op(_routed_ffn),
  "routed_matmul_n_sparse": _plain_op(_routed_n_sparse),
}
