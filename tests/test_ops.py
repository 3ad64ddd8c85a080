"""Attention against a float64 brute force, and how a path is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_fixtures import jit

from wide_jax import ops

PACKED = [[1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]]


def make(heads, kv, width, seed=0, batch=2, length=11):
  rng = np.random.default_rng(seed)

  def normal(n):
    x = rng.standard_normal((batch, length, n, width))
    return jnp.asarray(x, jnp.float32)

  return normal(heads), normal(kv), normal(kv)


def brute_mask(segments, window):
  """Token by token, in plain Python."""
  b, t = segments.shape
  mask = np.zeros((b, t, t), bool)
  for i in range(b):
    for q in range(t):
      for k in range(q + 1):
        near = not window or q - k < window
        mask[i, q, k] = near and segments[i, q] == segments[i, k]
  return mask


def brute_attention(q, k, v, segments, window):
  """float64; query head n reads kv head n // (N / K)."""
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  mask = brute_mask(segments, window)
  share = q.shape[2] // k.shape[2]
  out = np.zeros_like(q)
  for n in range(q.shape[2]):
    scores = np.einsum("BTH,BSH->BTS", q[:, :, n], k[:, :, n // share])
    scores = np.where(mask, scores / np.sqrt(q.shape[-1]), -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    out[:, :, n] = np.einsum("BTS,BSH->BTH", probs, v[:, :, n // share])
  return out


@pytest.mark.parametrize("window", [0, 1, 3, 64])
@pytest.mark.parametrize("heads,kv,width", [(9, 3, 8), (4, 4, 6), (6, 1, 10)])
def test_xla_equals_brute_force(heads, kv, width, window):
  q, k, v = make(heads, kv, width)
  segments = np.asarray(PACKED, np.int32)
  got = ops.attention(q, k, v, jnp.asarray(segments), window=window, path="xla")
  want = brute_attention(q, k, v, segments, window)
  # Values of about 1, sums of 11 float32 terms.
  np.testing.assert_allclose(got, want, atol=3e-6, rtol=0)


def test_a_traced_window_is_the_same():
  q, k, v = make(9, 3, 8)
  segments = np.asarray(PACKED, np.int32)
  run = jit(
    lambda window: ops.attention(q, k, v, jnp.asarray(segments), window=window)
  )
  for window in (0, 3):
    want = brute_attention(q, k, v, segments, window)
    np.testing.assert_allclose(run(window), want, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_scores_are_summed_in_float32(dtype):
  """Large scores: a softmax in 16 bits would be off by tens of percent."""
  q, k, v = (a.astype(dtype) for a in make(4, 2, 8))
  q, k = q * 4, k * 4
  segments = np.asarray(PACKED, np.int32)
  got = ops.attention(q, k, v, jnp.asarray(segments))
  assert got.dtype == jnp.dtype(dtype)
  want = brute_attention(q, k, v, segments, 0)
  # Probabilities and the result are rounded once each, values reach 4.
  eps = float(jnp.finfo(dtype).eps)
  np.testing.assert_allclose(np.float64(got), want, atol=2 * 4 * eps, rtol=0)


def test_padding_rows_are_finite_with_finite_gradients():
  q, k, v = make(2, 1, 4)
  segments = jnp.zeros((2, 11), jnp.int32)

  def total(q, k, v):
    return ops.attention(q, k, v, segments).sum()

  value, grads = jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)
  assert np.isfinite(value)
  assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("window", [0, 2])
def test_mask(window):
  segments = np.asarray(PACKED, np.int32)
  got = ops.attention_mask(jnp.asarray(segments), window)
  np.testing.assert_array_equal(got[:, 0], brute_mask(segments, window))
  assert np.asarray(got).any(-1).all()  # no empty softmax row


CASE = dict(
  platform="gpu",
  dtype=jnp.bfloat16,
  length=2048,
  head_dim=64,
  window=0,
  max_segments=8,
)


def pick(want="auto", **changes):
  return ops.pick_attention(want, **(CASE | changes))


def test_auto_takes_the_fastest_and_says_what_it_left_out():
  assert pick() == ("cudnn", {})
  path, reasons = pick(max_segments=0)
  assert path == "cudnn_mask" and "segments" in reasons["cudnn"]
  path, reasons = pick(window=128)
  assert path == "cudnn_mask" and "window" in reasons["cudnn"]
  path, reasons = pick(dtype=jnp.float32)
  assert path == "xla" and set(reasons) == {"cudnn", "cudnn_mask", "splash"}
  assert "float32" in reasons["cudnn"] and "TPU" in reasons["splash"]
  path, reasons = pick(head_dim=160)
  assert path == "xla" and "head_dim=160" in reasons["cudnn"]
  path, reasons = pick(window=None)
  assert path == "xla" and "windows differ" in reasons["cudnn_mask"]
  assert pick(platform="tpu")[0] == "splash"
  path, reasons = pick(platform="tpu", length=100)
  assert path == "xla" and "length 100" in reasons["splash"]
  path, reasons = pick(platform="tpu", devices=4)
  assert path == "xla" and "here are 4" in reasons["splash"]
  path, reasons = pick(platform="cpu")
  assert path == "xla" and "this is cpu" in reasons["cudnn"]


def test_gpus_before_ampere_have_no_flash_attention(monkeypatch):
  monkeypatch.setattr(ops, "_capability", lambda: (7, 5))  # a T4
  path, reasons = pick(dtype=jnp.float16)
  assert path == "xla" and "(7, 5)" in reasons["cudnn_mask"]
  monkeypatch.setattr(ops, "_capability", lambda: (8, 0))
  assert pick(dtype=jnp.float16)[0] == "cudnn"


@pytest.mark.parametrize(
  "want,changes,reason",
  [
    ("cudnn", dict(platform="cpu"), "needs an NVIDIA GPU, this is cpu"),
    ("cudnn", dict(max_segments=0), "number of segments"),
    ("cudnn", dict(window=5), "sliding window"),
    ("cudnn_mask", dict(dtype=jnp.float32), "not float32"),
    ("cudnn_mask", dict(head_dim=100), "head_dim=100"),
    ("triton", dict(window=5), "sliding window"),
    ("triton", dict(length=100), "length 100"),
    ("splash", {}, "needs a TPU, this is gpu"),
    ("splash", dict(platform="tpu", head_dim=80), "head_dim 80"),
    ("cudnn", dict(window=None), "windows differ"),
    ("flash", {}, "flash"),
  ],
)
def test_a_named_path_never_falls_back(want, changes, reason):
  with pytest.raises(ValueError, match=reason):
    pick(want, **changes)


def test_a_named_path_runs_where_it_can():
  for want in ("cudnn", "cudnn_mask", "triton", "xla"):
    assert pick(want) == (want, {})
  assert pick("splash", platform="tpu") == ("splash", {})
  assert pick("xla", platform="cpu", window=None) == ("xla", {})


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about CPUs")
def test_auto_here_says_xla():
  assert pick(platform=jax.default_backend())[0] == "xla"
  q, k, v = make(2, 1, 4)
  segments = jnp.ones((2, 11), jnp.int32)
  with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
    ops.attention(q, k, v, segments, path="cudnn")
