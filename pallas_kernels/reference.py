"""Every op in plain jnp, accumulating in float32: the specification.

Masks [B, T, G] say which groups a token computes. A bool mask selects, so that
what is dropped is exactly 0 and never read; a float mask multiplies, so that
the gradient of a dropped group is there for a straight-through estimator.

Letters: B batch, T query tokens, S key tokens, N query heads, K kv heads or
input channels, H head dim, D model width, F hidden channels, G groups, C
channels or heads a group.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)


def _spread(mask: Array, width: int) -> Array:
  """[B, T, G] -> [B, T, width]: each group's decision for its channels."""
  return jnp.repeat(mask, width // mask.shape[-1], axis=-1)


def mask_groups(x: Array, mask: Array) -> Array:
  """x [B, T, G * C] with dropped groups 0; x's dtype."""
  keep = _spread(mask, x.shape[-1])
  if keep.dtype == jnp.bool_:
    return jnp.where(keep, x, jnp.zeros((), x.dtype))
  return (x * keep).astype(x.dtype)


def _matmul(x: Array, w: Array) -> Array:
  """[B, T, K] @ [K, N] in x's dtype, accumulated in float32."""
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  y = jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32)
  return y.astype(x.dtype)


def select(w: Array, layer: Array | None, transposed: bool = False) -> Array:
  """One layer's weight as [in, out], from a stack if `layer` is given."""
  if layer is not None:
    w = jax.lax.dynamic_index_in_dim(w, layer, keepdims=False)
  return w.T if transposed else w


def matmul_n_sparse(x, w, mask, *, layer=None, transposed=False) -> Array:
  """y = x @ w with dropped groups of output channels 0.

  Args:
    x: [B, T, K].
    w: [K, N], or [N, K] if `transposed`; with a leading axis of layers if
      `layer` (int32 []) is given.
    mask: [B, T, G] with G dividing N.

  Returns:
    [B, T, N], x's dtype.
  """
  return mask_groups(_matmul(x, select(w, layer, transposed)), mask)


def matmul_k_sparse(x, w, mask, *, layer=None) -> Array:
  """y = x @ w over the kept groups of input channels only.

  Args:
    x: [B, T, K]; what it holds in dropped groups does not matter.
    w: [K, N], or [L, K, N] with `layer`.
    mask: [B, T, G] with G dividing K.

  Returns:
    [B, T, N], x's dtype.
  """
  return _matmul(mask_groups(x, mask), select(w, layer))


def gated_ffn(
  x, w_gate, w_up, w_down, mask, *, layer=None, transposed=False
) -> Array:
  """SwiGLU FFN: (silu(x @ w_gate) * (x @ w_up)) @ w_down, kept groups only.

  Args:
    x: [B, T, D].
    w_gate, w_up: [D, F], or [F, D] if `transposed`; or w_gate holds both,
      [2, ...], and w_up is None.
    w_down: [F, D]. All of them stacked [L, ...] with `layer`.
    mask: [B, T, G] with G dividing F.

  Returns:
    [B, T, D], x's dtype. The hidden [B, T, F] is rounded to it once.
  """
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  if w_up is None:
    pair = tuple(select(w_gate, layer))
  else:
    pair = (select(w_gate, layer), select(w_up, layer))
  gate, up = (
    jnp.matmul(
      x,
      w.T if transposed else w,
      precision=precision,
      preferred_element_type=jnp.float32,
    )
    for w in pair
  )
  hidden = mask_groups((jax.nn.silu(gate) * up).astype(x.dtype), mask)
  return _matmul(hidden, select(w_down, layer))


def attention_prefill(
  q, k, v, mask, *, start=None, offset=None, window=None, scale=None, layer=None
) -> Array:
  """Causal attention of the kept (token, head group) pairs.

  Query t of row b stands at key position offset[b] + t and sees keys j with
  start[b] <= j <= its position, and j > position - window with a window. A
  query that sees no key gives 0.

  Args:
    q: [B, T, N, H].
    k, v: [B, S, K, H] with K dividing N; [L, B, S, K, H] with `layer`.
    mask: [B, T, G] with G dividing N: neighbouring heads form a group.
    start: int32 [B], the first real key of a row (left padding); 0 if None.
    offset: int32 [B] or []; S - T if None, so that the last query is at the
      last key.
    window: keys that a query sees, itself included; None is all.
    scale: of the logits; 1 / sqrt(H) if None.

  Returns:
    [B, T, N, H], q's dtype; 0 where the mask drops.
  """
  k, v = (select(a, layer) for a in (k, v))
  rows, length, heads, dim = q.shape
  keys, kv_heads = k.shape[1:3]
  if not keys:
    return jnp.zeros_like(q)
  scale = 1 / math.sqrt(dim) if scale is None else scale
  offset = keys - length if offset is None else offset
  offset = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), (rows,))
  at_BT = offset[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
  j_S = jnp.arange(keys, dtype=jnp.int32)
  sees = j_S[None, None] <= at_BT[..., None]
  if start is not None:
    sees &= j_S[None, None] >= start[:, None, None]
  if window is not None:
    sees &= j_S[None, None] > at_BT[..., None] - window
  out = _attend(q, k, v, sees, scale, heads // kv_heads)
  return mask_groups(out.reshape(rows, length, -1), mask).reshape(q.shape)


def attention_decode(
  q, k_cache, v_cache, lengths, mask, *, start=None, scale=None, layer=None
) -> Array:
  """One token's attention over a cache, kept head groups only.

  Args:
    q: [B, N, H].
    k_cache, v_cache: [B, S, K, H], or [L, B, S, K, H] with `layer`.
    lengths: int32 [B]; keys start[b] <= j < lengths[b] are seen. None seen
      gives 0.
    mask: [B, G] with G dividing N.
    start: int32 [B], the first real key of a row; 0 if None.

  Returns:
    [B, N, H], q's dtype; 0 where the mask drops.
  """
  k, v = (select(a, layer) for a in (k_cache, v_cache))
  rows, heads, dim = q.shape
  keys, kv_heads = k.shape[1:3]
  if not keys:
    return jnp.zeros_like(q)
  scale = 1 / math.sqrt(dim) if scale is None else scale
  j_S = jnp.arange(keys, dtype=jnp.int32)[None]
  sees = j_S < lengths[:, None]
  if start is not None:
    sees &= j_S >= start[:, None]
  out = _attend(q[:, None], k, v, sees[:, None], scale, heads // kv_heads)
  out = mask_groups(out.reshape(rows, 1, -1), mask[:, None])
  return out.reshape(q.shape)


def _attend(q, k, v, sees_BTS, scale, per_kv):
  """softmax(q k^T) v over what is seen, in float32; [B, T, N, H]."""
  rows, length, heads, dim = q.shape
  precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
  q = q.reshape(rows, length, heads // per_kv, per_kv, dim)
  logits = jnp.einsum(
    "btknh,bskh->bknts",
    q,
    k,
    precision=precision,
    preferred_element_type=jnp.float32,
  )
  sees = sees_BTS[:, None, None]
  logits = jnp.where(sees, logits * scale, _LOWEST)
  top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
  weights = jnp.where(sees, jnp.exp(logits - top), 0.0)
  total = weights.sum(-1, keepdims=True)
  weights = weights / jnp.where(total == 0, 1.0, total)
  # Keys that nobody sees may hold anything, NaN too: 0 * NaN is NaN.
  seen = sees_BTS.any(1)[:, :, None, None]
  v = jnp.where(seen, v, jnp.zeros((), v.dtype))
  out = jnp.einsum(
    "bknts,bskh->btknh",
    weights.astype(v.dtype),
    v,
    precision=precision,
    preferred_element_type=jnp.float32,
  )
  return out.reshape(rows, length, heads, dim).astype(q.dtype)


def _matmul_float32(x: Array, w: Array) -> Array:
  """[B, T, K] @ float32 [K, N] in float32."""
  high = jax.lax.Precision.HIGHEST
  return jnp.matmul(x.astype(jnp.float32), w, precision=high)


def route_folded(
  x, v, c, threshold, *, layer=None, matmul=_matmul_float32
) -> Array:
  """A router folded into one map: x . v[g] + c[g] > threshold.

  Args:
    x: [B, T, D], any float dtype; computed in float32.
    v, c: float32 [G, D], [G]; stacked [L, ...] with `layer`.
    threshold: as in `route`.
    matmul: as in `route`.

  Returns:
    bool [B, T, G].
  """
  threshold = jnp.asarray(threshold)
  if layer is not None:
    v, c = select(v, layer), select(c, layer)
    threshold = select(threshold, layer) if threshold.ndim else threshold
  logits = matmul(x, v.T) + c[None, None]
  return logits > jnp.broadcast_to(threshold, logits.shape)


def route(
  x,
  down,
  down_bias,
  up,
  up_bias,
  threshold,
  *,
  layer=None,
  matmul=_matmul_float32,
) -> Array:
  """Router of one decision: ((x @ down + b) @ up + b) > threshold.

  Args:
    x: [B, T, D], any float dtype; computed in float32.
    down: float32 [D, R]; down_bias [R]; up [R, G]; up_bias [G]; stacked
      [L, ...] with `layer`.
    threshold: float32 [], [G], or stacked [L] or [L, G].
    matmul: of x, another way to the same numbers (exact.py).

  Returns:
    bool [B, T, G].
  """
  threshold = jnp.asarray(threshold)
  if layer is not None:
    down, down_bias, up, up_bias = (
      select(a, layer) for a in (down, down_bias, up, up_bias)
    )
    threshold = select(threshold, layer) if threshold.ndim else threshold
  low = matmul(x, down) + down_bias[None, None]
  logits = _matmul_float32(low, up) + up_bias[None, None]
  return logits > jnp.broadcast_to(threshold, logits.shape)
