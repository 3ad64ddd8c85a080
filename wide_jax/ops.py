"""Picks a path for each op of the model.

Training attention: `cudnn` (Hopper, Ampere), `triton`, `splash` (TPU) or `xla`
(everywhere, the specification). All honour segment ids, so that packed
documents never see each other; padding has segment 0.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from wide_jax.axes import Keys, Queries, Segments

_NEG = -1e30


def attention_mask(
  segments_BT: Segments, window: int | Array
) -> Array:
  """Boolean mask [B, 1, T, S]: causal, same segment, inside the window.

  A token always sees itself, so no softmax row is empty. `window` is a number
  of keys, itself included; 0 is full attention; it may be traced.
  """
  length = segments_BT.shape[1]
  ahead_TS = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
  window = jnp.where(jnp.asarray(window) > 0, window, length)
  near_TS = (ahead_TS >= 0) & (ahead_TS < window)
  same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
  return (same_BTS & near_TS[None])[:, None]


def _attention_xla(q_BTNH, k_BSKH, v_BSKH, segments_BT, window):
  """float32 scores and softmax; grouped heads are never repeated in memory."""
  b, t, n, h = q_BTNH.shape
  kv = k_BSKH.shape[2]
  q_BTKRH = q_BTNH.reshape(b, t, kv, n // kv, h)
  scores = jnp.einsum(
    "BTKRH,BSKH->BKRTS", q_BTKRH, k_BSKH, preferred_element_type=jnp.float32
  ) * (h**-0.5)
  mask_B1TS = attention_mask(segments_BT, window)
  scores = jnp.where(mask_B1TS[:, :, None], scores, _NEG)
  probs = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
  out = jnp.einsum("BKRTS,BSKH->BTKRH", probs, v_BSKH)
  return out.reshape(b, t, n, h)


def _attention_cudnn(q_BTNH, k_BSKH, v_BSKH, segments_BT, window):
  """cuDNN flash attention; the segments travel as an additive bias."""
  return jax.nn.dot_product_attention(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    mask=attention_mask(segments_BT, window),
    implementation="cudnn",
  )


def _attention_triton(q_BTNH, k_BSKH, v_BSKH, segments_BT, window):
  """The Pallas Triton flash attention that JAX ships, with segment ids."""
  from jax.experimental.pallas.ops.gpu import attention as pallas_attention

  del window  # `pick_attention` refuses windows here
  share = q_BTNH.shape[2] // k_BSKH.shape[2]
  return pallas_attention.mha(
    q_BTNH,
    jnp.repeat(k_BSKH, share, axis=2),
    jnp.repeat(v_BSKH, share, axis=2),
    segment_ids=segments_BT,
    sm_scale=q_BTNH.shape[-1] ** -0.5,
    causal=True,
  )


def _attention_splash(q_BTNH, k_BSKH, v_BSKH, segments_BT, window):
  """The TPU splash attention that JAX ships, with segment ids."""
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  t, n = q_BTNH.shape[1:3]
  shape = (t, t)
  one = (
    splash.LocalMask(shape, (window - 1, 0), 0)
    if window
    else splash.CausalMask(shape)
  )
  kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([one] * n))
  share = n // k_BSKH.shape[2]

  def row(q_TNH, k_SKH, v_SKH, segments_T):
    heads_first = functools.partial(jnp.swapaxes, axis1=0, axis2=1)
    out = kernel(
      heads_first(q_TNH * q_TNH.shape[-1] ** -0.5),
      heads_first(jnp.repeat(k_SKH, share, axis=1)),
      heads_first(jnp.repeat(v_SKH, share, axis=1)),
      segment_ids=splash.SegmentIds(segments_T, segments_T),
    )
    return heads_first(out)

  return jax.vmap(row)(q_BTNH, k_BSKH, v_BSKH, segments_BT)


_PATHS = {
  "xla": _attention_xla,
  "cudnn": _attention_cudnn,
  "triton": _attention_triton,
  "splash": _attention_splash,
}


def _why_not(path: str, platform: str, dtype, length: int, head_dim: int, window):
  """The reason why `path` cannot run this case, or None."""
  uniform = isinstance(window, int)
  if path == "xla":
    return None
  if not uniform:
    return "windows differ between layers"
  if path in ("cudnn", "triton") and platform not in ("gpu", "cuda"):
    return f"needs an NVIDIA GPU, this is {platform}"
  if path == "splash" and platform != "tpu":
    return f"needs a TPU, this is {platform}"
  if path == "cudnn":
    if dtype not in (jnp.bfloat16, jnp.float16):
      return f"takes bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if head_dim > 128 or head_dim % 8:
      return f"head_dim={head_dim} is not a multiple of 8 up to 128"
  if path == "triton":
    if window:
      return "has no sliding window"
    if length % 128 or head_dim & (head_dim - 1):
      return f"length {length}, head_dim {head_dim}: want 128s, a power of two"
  if path == "splash" and (length % 128 or head_dim % 64):
    return f"length {length}, head_dim {head_dim}: want multiples of 128, 64"
  return None


def pick_attention(
  want: str, *, platform: str, dtype, length: int, head_dim: int, window
) -> tuple[str, dict[str, str]]:
  """Chooses the attention path; a path asked for by name never falls back.

  Returns:
    (path, {rejected path: reason}).

  Raises:
    ValueError: `want` is named and cannot run this case.
  """
  case = (platform, dtype, length, head_dim, window)
  if want != "auto":
    if reason := _why_not(want, *case):
      raise ValueError(f"model.attention={want!r} cannot run here: {reason}.")
    return want, {}
  reasons = {}
  for path in ("cudnn", "splash", "xla"):
    reason = _why_not(path, *case)
    if reason is None:
      return path, reasons
    reasons[path] = reason
  raise AssertionError("xla runs everything")


def attention(
  q_BTNH: Queries,
  k_BSKH: Keys,
  v_BSKH: Keys,
  segments_BT: Segments,
  *,
  window: int | Array = 0,
  path: str = "auto",
) -> Float[Array, "B T N H"]:
  """Causal grouped-query attention over packed rows, S = T.

  Args:
    q_BTNH, k_BSKH, v_BSKH: one dtype; N a multiple of K.
    segments_BT: int32; a token attends to earlier tokens of its own segment.
    window: keys a query sees, itself included; 0 for all.
    path: `auto` or one of xla, cudnn, triton, splash.

  Returns:
    [B, T, N, H] in the dtype of q.

  Raises:
    ValueError: the named path cannot run this case.
  """
  chosen, _ = pick_attention(
    path,
    platform=jax.default_backend(),
    dtype=q_BTNH.dtype,
    length=q_BTNH.shape[1],
    head_dim=q_BTNH.shape[-1],
    window=window,
  )
  return _PATHS[chosen](q_BTNH, k_BSKH, v_BSKH, segments_BT, window)
