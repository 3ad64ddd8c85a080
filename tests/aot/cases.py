"""What is compiled, for which targets: one table, CASES.

A case calls a public op with a backend named, at shapes of a real model. To add
one, add a line to CASES.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk

TPUS = ("v5e", "v5p", "v6e")
TARGETS = {"mosaic_tpu": TPUS, "triton": ("h200",)}
# What a kernel is called in compiled HLO.
CUSTOM_CALL = {
  "mosaic_tpu": "tpu_custom_call",
  "triton": "__gpu$xla.gpu.triton",
}


@dataclasses.dataclass(frozen=True)
class Model:
  """Sizes of a model: D, F, N, K, H."""

  width: int
  hidden: int
  heads: int
  kv_heads: int
  dim: int


LLAMA = Model(4096, 14336, 32, 8, 128)
SMOLLM2 = Model(576, 1536, 9, 3, 64)


@dataclasses.dataclass(frozen=True)
class Case:
  """One call to compile.

  Attributes:
    name: of the test.
    backend: who runs it.
    make: backend -> (function, structs of its arguments).
    kernels: names of Pallas kernels that the compiled program must call.
  """

  name: str
  backend: str
  make: Callable[[str], tuple[Callable, tuple]]
  kernels: tuple[str, ...]

  @property
  def targets(self) -> tuple[str, ...]:
    return TARGETS[self.backend]


def _struct(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


_INT = _struct(dtype=jnp.int32)
_LAYERS = 2


def _plan(mask, backend: str) -> pk.RoutePlan:
  """The plan of the backend itself, if it has one."""
  return pk.make_plan(
    mask, backend="triton" if backend == "triton" else "reference"
  )


def matmul(
  op: str,
  tokens: int,
  k: int,
  n: int,
  groups: int,
  *,
  dtype: Any = jnp.bfloat16,
  transposed: bool = False,
) -> Callable:
  """A matmul op over stacked weights; `groups` of n (N-sparse) or k."""

  def make(backend: str):
    extra = {"transposed": transposed} if op == "matmul_n_sparse" else {}

    def fn(x, w, mask, layer):
      return getattr(pk, op)(
        x, w, _plan(mask, backend), layer=layer, backend=backend, **extra
      )

    shape = (n, k) if transposed else (k, n)
    return fn, (
      _struct(1, tokens, k, dtype=dtype),
      _struct(_LAYERS, *shape, dtype=dtype),
      _struct(1, tokens, groups, dtype=jnp.bool_),
      _INT,
    )

  return make


def ffn(
  model: Model,
  tokens: int,
  group: int,
  *,
  dtype: Any = jnp.bfloat16,
  transposed: bool = True,
  joined: bool = False,
) -> Callable:
  """gated_ffn over stacked weights, `group` channels in a group."""

  def make(backend: str):
    def fn(x, w_gate, w_up, w_down, mask, layer):
      return pk.gated_ffn(
        x,
        w_gate,
        w_up,
        w_down,
        _plan(mask, backend),
        layer=layer,
        transposed=transposed,
        backend=backend,
      )

    d, f = model.width, model.hidden
    shape = (f, d) if transposed else (d, f)
    half = (2, *shape) if joined else shape
    into = _struct(_LAYERS, *half, dtype=dtype)
    return fn, (
      _struct(1, tokens, d, dtype=dtype),
      into,
      None if joined else into,
      _struct(_LAYERS, f, d, dtype=dtype),
      _struct(1, tokens, f // group, dtype=jnp.bool_),
      _INT,
    )

  return make


def prefill(
  model: Model,
  rows: int,
  length: int,
  keys: int,
  groups: int,
  *,
  window: int | None = None,
  dtype: Any = jnp.bfloat16,
) -> Callable:
  """attention_prefill with left padding over stacked keys and values."""

  def make(backend: str):
    def fn(q, k, v, mask, start, layer):
      return pk.attention_prefill(
        q,
        k,
        v,
        _plan(mask, backend),
        start=start,
        window=window,
        layer=layer,
        backend=backend,
      )

    cache = _struct(_LAYERS, rows, keys, model.kv_heads, model.dim, dtype=dtype)
    return fn, (
      _struct(rows, length, model.heads, model.dim, dtype=dtype),
      cache,
      cache,
      _struct(rows, length, groups, dtype=jnp.bool_),
      _struct(rows, dtype=jnp.int32),
      _INT,
    )

  return make


def decode(
  model: Model, rows: int, keys: int, groups: int, *, dtype: Any = jnp.bfloat16
) -> Callable:
  """attention_decode over a stacked cache with ragged lengths."""

  def make(backend: str):
    def fn(q, k, v, lengths, keep, start, layer):
      return pk.attention_decode(
        q, k, v, lengths, keep, start=start, layer=layer, backend=backend
      )

    cache = _struct(_LAYERS, rows, keys, model.kv_heads, model.dim, dtype=dtype)
    return fn, (
      _struct(rows, model.heads, model.dim, dtype=dtype),
      cache,
      cache,
      _struct(rows, dtype=jnp.int32),
      _struct(rows, groups, dtype=jnp.bool_),
      _struct(rows, dtype=jnp.int32),
      _INT,
    )

  return make


def plan(tokens: int, groups: int) -> Callable:
  """make_plan, everything in it wanted."""

  def make(backend: str):
    return (
      lambda mask: pk.make_plan(mask, backend=backend),
      (_struct(1, tokens, groups, dtype=jnp.bool_),),
    )

  return make


def routed_ffn(
  model: Model, tokens: int, group: int, *, dtype: Any = jnp.bfloat16
) -> Callable:
  """A folded router in front of gated_ffn, over stacked weights."""

  def make(backend: str):
    def fn(r, x, v, c, threshold, w_gate, w_down, layer):
      return pk.routed_ffn(
        r,
        v,
        c,
        threshold,
        x,
        w_gate,
        None,
        w_down,
        layer=layer,
        transposed=True,
        backend=backend,
      )

    d, f, groups = model.width, model.hidden, model.hidden // group
    f32 = jnp.float32
    return fn, (
      _struct(tokens, 1, d, dtype=dtype),
      _struct(tokens, 1, d, dtype=dtype),
      _struct(_LAYERS, groups, d, dtype=f32),
      _struct(_LAYERS, groups, dtype=f32),
      _struct(_LAYERS, dtype=f32),
      _struct(_LAYERS, 2, f, d, dtype=dtype),
      _struct(_LAYERS, f, d, dtype=dtype),
      _INT,
    )

  return make


def router(
  width: int, rank: int, groups: int, tokens: int, *, dtype: Any = jnp.bfloat16
) -> Callable:
  """route: two small matmuls, threshold and plan."""

  def make(backend: str):
    from pallas_kernels.router import route

    def fn(x, down, down_bias, up, up_bias, threshold):
      return route(
        x, down, down_bias, up, up_bias, threshold, layer=0, backend=backend
      )

    f32 = jnp.float32
    return fn, (
      _struct(tokens, 1, width, dtype=dtype),
      _struct(_LAYERS, width, rank, dtype=f32),
      _struct(_LAYERS, rank, dtype=f32),
      _struct(_LAYERS, rank, groups, dtype=f32),
      _struct(_LAYERS, groups, dtype=f32),
      _struct(_LAYERS, dtype=f32),
    )

  return make


_F32 = jnp.float32
_N, _K = "matmul_n_sparse", "matmul_k_sparse"
_FFN, _PREFILL, _DECODE = "gated_ffn", "attention_prefill", "attention_decode"
_HEADS_32 = Model(0, 0, 32, 32, 128)


def _tpu(name: str, kernel: str, make: Callable) -> Case:
  return Case(name, "mosaic_tpu", make, (kernel,))


def _gpu(name: str, make: Callable, *kernels: str) -> Case:
  return Case(name, "triton", make, kernels)


CASES = (
  _tpu("n-llama", _N, matmul(_N, 1024, 4096, 14336, 112, transposed=True)),
  _tpu("n-llama-q", _N, matmul(_N, 512, 4096, 4096, 8)),
  _tpu("n-smollm2-q", _N, matmul(_N, 300, 576, 576, 3, dtype=_F32)),
  _tpu("n-llama-1", _N, matmul(_N, 1, 4096, 14336, 56)),
  _tpu("k-llama", _K, matmul(_K, 1024, 14336, 4096, 112)),
  _tpu("k-llama-c32", _K, matmul(_K, 64, 14336, 4096, 448)),
  _tpu("k-smollm2-o", _K, matmul(_K, 300, 576, 576, 3, dtype=_F32)),
  _tpu("k-smollm2-c48-17", _K, matmul(_K, 17, 1536, 576, 32)),
  _tpu("ffn-llama", _FFN, ffn(LLAMA, 1024, 128)),
  _tpu("ffn-llama-c512-16", _FFN, ffn(LLAMA, 16, 512, joined=True)),
  _tpu("ffn-llama-1", _FFN, ffn(LLAMA, 1, 128, transposed=False)),
  _tpu("ffn-smollm2", _FFN, ffn(SMOLLM2, 300, 32, dtype=_F32)),
  _tpu("ffn-smollm2-7", _FFN, ffn(SMOLLM2, 7, 128)),
  _tpu("prefill-llama", _PREFILL, prefill(LLAMA, 1, 2048, 2048, 8)),
  _tpu(
    "prefill-smollm2", _PREFILL, prefill(SMOLLM2, 2, 500, 700, 3, window=99)
  ),
  _tpu(
    "prefill-smollm2-7", _PREFILL, prefill(SMOLLM2, 1, 7, 33, 9, dtype=_F32)
  ),
  _tpu("decode-llama", _DECODE, decode(LLAMA, 4, 8192, 8)),
  _tpu("decode-32-heads", _DECODE, decode(_HEADS_32, 2, 2048, 16)),
  _tpu("decode-smollm2", _DECODE, decode(SMOLLM2, 4, 1000, 3, dtype=_F32)),
  _gpu(
    "n-llama",
    matmul(_N, 4096, 4096, 14336, 28, transposed=True),
    "plan_groups",
    "wide_n_sparse",
  ),
  _gpu("n-smollm2-q", matmul(_N, 300, 576, 576, 3), "wide_n_sparse"),
  _gpu(
    "n-llama-1",
    matmul(_N, 1, 4096, 4096, 8, transposed=True),
    "decode_n_sparse",
  ),
  _gpu(
    "k-llama",
    matmul(_K, 4096, 14336, 4096, 28),
    "plan_classes",
    "wide_k_sparse",
  ),
  _gpu(
    "k-smollm2-c48",
    matmul(_K, 300, 1536, 576, 32, dtype=_F32),
    "wide_k_sparse",
  ),
  _gpu("k-llama-1", matmul(_K, 1, 4096, 4096, 8), "decode_k_sparse"),
  _gpu("ffn-llama", ffn(LLAMA, 4096, 128), "wide_gate_up"),
  _gpu("ffn-llama-c512", ffn(LLAMA, 4096, 512, joined=True), "wide_gate_up"),
  _gpu(
    "ffn-llama-1",
    ffn(LLAMA, 1, 128),
    "decode_gate_up",
    "decode_down",
  ),
  _gpu("ffn-llama-16", ffn(LLAMA, 16, 128), "decode_gate_up", "decode_down"),
  _gpu(
    "routed-ffn-llama-1",
    routed_ffn(LLAMA, 1, 128),
    "decode_gate_up",
    "decode_down",
  ),
  _gpu(
    "routed-ffn-llama-16",
    routed_ffn(LLAMA, 16, 128),
    "route_folded",
    "decode_gate_up",
    "decode_down",
  ),
  _gpu(
    "ffn-smollm2-7",
    ffn(SMOLLM2, 7, 128, dtype=_F32),
    "decode_gate_up",
    "decode_down",
  ),
  _gpu("prefill-llama", prefill(LLAMA, 1, 4096, 4096, 8), _PREFILL),
  _gpu(
    "prefill-smollm2", prefill(SMOLLM2, 2, 500, 700, 3, window=99), _PREFILL
  ),
  _gpu(
    "decode-llama",
    decode(LLAMA, 4, 16384, 8),
    _DECODE,
    "attention_decode_combine",
  ),
  _gpu("decode-smollm2", decode(SMOLLM2, 3, 1000, 9, dtype=_F32), _DECODE),
  _gpu("plan-llama", plan(4096, 112), "plan_groups", "plan_classes"),
  _gpu("plan-smollm2", plan(300, 12), "plan_groups", "plan_classes"),
  _gpu(
    "route-llama-1", router(4096, 128, 112, 1), "route_down", "route_decide"
  ),
  _gpu("route-smollm2-16", router(576, 32, 12, 16), "route"),
)
