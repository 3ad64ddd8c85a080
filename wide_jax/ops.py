"""Picks a path for each op of the model.

Training attention: `cudnn` (packed rows), `cudnn_mask`, `triton`, `splash`
(TPU) or `xla` (everywhere, the specification). All honour segment ids, so that
packed documents never see each other; padding has segment 0. Measured on one
H200 (experiments/attention_paths), forward and backward, 16 x 2,048 tokens, 9
query and 3 kv heads of 64: cudnn 1.37 ms with segments (1.64 ms without any),
cudnn_mask 2.22 ms, triton 3.04 ms, xla 18.3 ms.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from wide_jax.axes import Keys, Queries, Segments

_NEG = -1e30


def attention_mask(segments_BT: Segments, window: int | Array) -> Array:
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


def _attention_xla(q_BTNH, k_BSKH, v_BSKH, segments_BT, window, max_segments):
  """float32 scores and softmax; kv heads are never repeated in memory.

  The R query heads of one kv head are stacked along the query axis, so that
  both products are plain batched matmuls: on a CPU five times faster than the
  same einsum with the heads in the middle.
  """
  del max_segments
  b, t, n, h = q_BTNH.shape
  kv = k_BSKH.shape[2]
  r = n // kv
  q_BKRTH = q_BTNH.reshape(b, t, kv, r, h).transpose(0, 2, 3, 1, 4)
  q_BKMH = q_BKRTH.reshape(b, kv, r * t, h)
  k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
  scores = jnp.einsum(
    "BKMH,BKSH->BKMS", q_BKMH, k_BKSH, preferred_element_type=jnp.float32
  ).reshape(b, kv, r, t, t) * (h**-0.5)
  mask_B1TS = attention_mask(segments_BT, window)
  scores = jnp.where(mask_B1TS[:, :, None], scores, _NEG)
  probs = jax.nn.softmax(scores, axis=-1).astype(v_BSKH.dtype)
  out_BKMH = jnp.einsum(
    "BKMS,BKSH->BKMH", probs.reshape(b, kv, r * t, t), v_BKSH
  )
  out_BKRTH = out_BKMH.reshape(b, kv, r, t, h)
  return out_BKRTH.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def _packed_attention():
  """cuDNN attention over packed sequences, or None where jax moved it.

  jax.nn.dot_product_attention does not expose sequence offsets; the function
  below it does, in every version that we support. It is the one private name
  that we use, and `auto` goes on without it.
  """
  try:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    return fused.dot_product_attention, fused.MaskType.PADDING_CAUSAL
  except (ImportError, AttributeError):
    return None


def _attention_cudnn(q_BTNH, k_BSKH, v_BSKH, segments_BT, window, max_segments):
  """cuDNN flash attention; each segment is a sequence of its own.

  Padding is one more segment, so that every output is written.
  """
  del window
  fused, mask_type = _packed_attention()
  b, t = segments_BT.shape
  slots = max_segments + 1
  # Rank of each token's run of equal ids, 0 for the first: segments are
  # contiguous, and padding may lie on either side.
  new_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
  run_BT = jnp.pad(jnp.cumsum(new_BT.astype(jnp.int32), 1), ((0, 0), (1, 0)))
  slot_BTM = run_BT[..., None] == jnp.arange(slots)[None, None]
  length_BM = slot_BTM.sum(1, dtype=jnp.int32)
  start_BM = jnp.cumsum(length_BM, 1) - length_BM
  used_BM = length_BM > 0
  length_BM = jnp.where(used_BM, length_BM, -1)
  start_BM = jnp.where(used_BM, start_BM, -1)
  start_BM = jnp.pad(start_BM, ((0, 0), (0, 1)), constant_values=-1)
  return fused(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    None,
    None,
    length_BM,
    length_BM,
    start_BM,
    start_BM,
    scale=q_BTNH.shape[-1] ** -0.5,
    mask_type=mask_type,
  )


def _attention_cudnn_mask(
  q_BTNH, k_BSKH, v_BSKH, segments_BT, window, max_segments
):
  """cuDNN flash attention; the segments travel as an additive bias."""
  del max_segments
  if window:
    mask, causal = attention_mask(segments_BT, window), False
  else:  # cuDNN skips the upper triangle by itself
    mask = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    causal = True
  return jax.nn.dot_product_attention(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    mask=mask,
    is_causal=causal,
    implementation="cudnn",
  )


def _attention_triton(
  q_BTNH, k_BSKH, v_BSKH, segments_BT, window, max_segments
):
  """The Pallas Triton flash attention that JAX ships, with segment ids."""
  from jax.experimental.pallas.ops.gpu import attention as pallas_attention

  del window, max_segments  # `pick_attention` refuses windows here
  share = q_BTNH.shape[2] // k_BSKH.shape[2]
  return pallas_attention.mha(
    q_BTNH,
    jnp.repeat(k_BSKH, share, axis=2),
    jnp.repeat(v_BSKH, share, axis=2),
    segment_ids=segments_BT,
    sm_scale=q_BTNH.shape[-1] ** -0.5,
    causal=True,
  )


def _attention_splash(
  q_BTNH, k_BSKH, v_BSKH, segments_BT, window, max_segments
):
  """The TPU splash attention that JAX ships, with segment ids."""
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  del max_segments
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
  "cudnn_mask": _attention_cudnn_mask,
  "triton": _attention_triton,
  "splash": _attention_splash,
}


def _capability() -> tuple[int, ...]:
  """Compute capability of the first device, () where it tells none."""
  text = getattr(jax.devices()[0], "compute_capability", "")
  return tuple(int(n) for n in re.findall(r"\d+", str(text)))


def _why_not(
  path, platform, dtype, length, head_dim, window, max_segments, devices
) -> str | None:
  """The reason why `path` cannot run this case, or None."""
  uniform = isinstance(window, int)
  if path == "xla":
    return None
  if not uniform:
    return "windows differ between layers"
  if path in ("cudnn", "cudnn_mask", "triton") and platform not in (
    "gpu",
    "cuda",
  ):
    return f"needs an NVIDIA GPU, this is {platform}"
  if path == "splash" and platform != "tpu":
    return f"needs a TPU, this is {platform}"
  if path == "splash" and devices > 1:
    # A Mosaic kernel is not partitioned by itself; it would need shard_map.
    return f"is for one device, here are {devices}"
  if path in ("cudnn", "cudnn_mask") and () < _capability() < (8,):
    return f"needs compute capability 8.0, this is {_capability()}"
  if path == "cudnn":
    if _packed_attention() is None:
      return "this jax has no packed cuDNN attention"
    if max_segments < 1:
      return "the number of segments a row is not known"
    if window:
      return "has no sliding window over packed rows"
  if path in ("cudnn", "cudnn_mask"):
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
  want: str,
  *,
  platform: str,
  dtype,
  length: int,
  head_dim: int,
  window,
  max_segments: int = 0,
  devices: int = 1,
) -> tuple[str, dict[str, str]]:
  """Chooses the attention path; a path asked for by name never falls back.

  Args:
    want: `auto` or the name of a path.
    platform: `jax.default_backend()`.
    dtype, length, head_dim: of the queries [B, T, N, H].
    window: keys a query sees, 0 for all; None where layers differ.
    max_segments: most segments in a row, 0 where that is not known.
    devices: how many the program may be spread over.

  Returns:
    (path, {rejected path: reason}).

  Raises:
    ValueError: `want` is named and cannot run this case.
  """
  case = (platform, dtype, length, head_dim, window, max_segments, devices)
  if want != "auto":
    if want not in _PATHS:
      names = ("auto", *_PATHS)
      raise ValueError(f"model.attention={want!r} must be one of {names}.")
    if reason := _why_not(want, *case):
      raise ValueError(f"model.attention={want!r} cannot run here: {reason}.")
    return want, {}
  reasons = {}
  for path in ("cudnn", "cudnn_mask", "splash", "xla"):
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
  max_segments: int = 0,
  path: str = "auto",
) -> Float[Array, "B T N H"]:
  """Causal grouped-query attention over packed rows, S = T.

  Args:
    q_BTNH, k_BSKH, v_BSKH: one dtype; N a multiple of K.
    segments_BT: int32; a token attends to earlier tokens of its own segment.
    window: keys a query sees, itself included; 0 for all.
    max_segments: most segments in a row (padding not counted); 0 where that
      is not known.
    path: `auto` or one of xla, cudnn, cudnn_mask, triton, splash.

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
    max_segments=max_segments,
    devices=jax.device_count(),  # the mesh is not known inside a jit
  )
  run = _PATHS[chosen]
  return run(q_BTNH, k_BSKH, v_BSKH, segments_BT, window, max_segments)
