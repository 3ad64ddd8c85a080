"""Multiply-adds of a decoder layer, what pruning skips, and memory to expect.

One MAC is one multiply and one add, two FLOPs. Counted are matmuls, attention
over the keys that a causal (and windowed) query really sees, and routers;
norms, rotations, SwiGLU's pointwise part and the embedding are not.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wide_jax.config import LoraConfig, Method, RouteConfig
from wide_jax.model_config import ModelConfig

# Dense peaks in FLOP/s by a part of `device_kind`; the first hit counts.
# Vendors' data sheets, without structured sparsity.
_PEAKS = (
  ("h200", {"bfloat16": 989e12, "float16": 989e12}),
  ("h100 pcie", {"bfloat16": 756e12, "float16": 756e12}),
  ("h100", {"bfloat16": 989e12, "float16": 989e12}),
  ("a100", {"bfloat16": 312e12, "float16": 312e12}),
  ("t4", {"float16": 65e12}),  # no bfloat16 units
  ("v6 lite", {"bfloat16": 918e12}),
  ("v6e", {"bfloat16": 918e12}),
  ("v5 lite", {"bfloat16": 197e12}),
  ("v5litepod", {"bfloat16": 197e12}),
  ("v5e", {"bfloat16": 197e12}),
  ("v5p", {"bfloat16": 459e12}),
  ("tpu v5", {"bfloat16": 459e12}),  # how jax names a v5p
)


@dataclasses.dataclass(frozen=True)
class LayerMacs:
  """MACs a token, one entry a layer (layers differ in their window).

  Attributes:
    attn: what attention's width groups cost together: Q and O projections,
      scores, weighted values.
    ffn: what the FFN's groups cost together: gate, up, down.
    kv: K and V projections, computed for every token.
    router: the routers, computed for every token.
  """

  attn: tuple[float, ...]
  ffn: tuple[float, ...]
  kv: tuple[float, ...]
  router: tuple[float, ...]

  @property
  def layers(self) -> int:
    return len(self.attn)

  @property
  def total(self) -> float:
    """All decoder layers, K, V and routers included, head excluded."""
    return sum(map(sum, (self.attn, self.ffn, self.kv, self.router)))


def mean_keys(seq_len: int, window: int = 0) -> float:
  """Keys a causal query sees, averaged over a sequence of `seq_len`.

  (T + 1) / 2 without a window; with one, query t sees min(t, window).
  """
  if not window or window >= seq_len:
    return (seq_len + 1) / 2
  return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def layer_macs(
  model: ModelConfig, route: RouteConfig, seq_len: int
) -> LayerMacs:
  """MACs a token of every layer, for one causal sequence of `seq_len` tokens.

  Raises:
    ValueError: seq_len below 1.
  """
  if seq_len < 1:
    raise ValueError(f"seq_len={seq_len} must be at least 1.")
  d, heads = model.d_model, model.n_heads * model.head_dim
  router = _router_macs(model, route)
  layers = model.n_layers
  attn = [
    2.0 * d * heads + 2.0 * heads * mean_keys(seq_len, window)
    for window in model.windows
  ]
  return LayerMacs(
    attn=tuple(attn),
    ffn=(3.0 * d * model.d_ff,) * layers,
    kv=(2.0 * d * model.n_kv_heads * model.head_dim,) * layers,
    router=(router,) * layers,
  )


def _router_macs(model: ModelConfig, route: RouteConfig) -> float:
  """One layer's routers; masks that read no token cost nothing."""
  if route.method in (Method.DENSE, Method.RANDOM, Method.STATIC_WIDTH):
    return 0.0
  kinds = route.groups(model).values()
  if route.method is Method.LAYER_SKIP:
    kinds = (1,)
  return float(sum(route.rank * (model.d_model + g) for g in kinds))


def skipped_share(attn_skip_L, ffn_skip_L, macs: LayerMacs):
  """Skipped MACs over all MACs of the decoder layers.

  K, V and routers count in the denominator and are never skipped; the head is
  left out. Works on numpy and jax arrays and is differentiable.

  Args:
    attn_skip_L: share of attention groups skipped, by layer.
    ffn_skip_L: share of FFN groups skipped, by layer.
    macs: from `layer_macs`.

  Raises:
    ValueError: another number of layers.
  """
  for name, skip in (("attn", attn_skip_L), ("ffn", ffn_skip_L)):
    if skip.shape != (macs.layers,):
      raise ValueError(
        f"{name} skip rates have shape {skip.shape}; want ({macs.layers},)."
      )
  attn_L = np.asarray(macs.attn) / macs.total
  ffn_L = np.asarray(macs.ffn) / macs.total
  return (attn_skip_L * attn_L).sum() + (ffn_skip_L * ffn_L).sum()


def _lora_params(model: ModelConfig, lora: LoraConfig) -> int:
  """Adapter parameters of one layer, which are also its MACs a token."""
  d, f = model.d_model, model.d_ff
  heads = model.n_heads * model.head_dim
  kv = model.n_kv_heads * model.head_dim
  ends = {
    "q": d + heads,
    "k": d + kv,
    "v": d + kv,
    "o": heads + d,
    "gate": d + f,
    "up": d + f,
    "down": f + d,
  }
  return sum(lora.rank * ends[t] for t in lora.targets)


def train_flops_per_token(
  model: ModelConfig,
  route: RouteConfig,
  seq_len: int,
  trainable: tuple[str, ...],
  lora: LoraConfig | None = None,
  kl: bool = False,
) -> float:
  """FLOPs a token of one training step, the head included.

  forward + activation gradients + weight gradients of what is trained;
  recomputation is not counted. Nothing is skipped: training computes dropped
  groups too, since their gates' gradients need them. The gradient is counted
  through every layer, the first one's inputs included.

  Args:
    model, route: the model and its routers.
    seq_len: tokens a sequence.
    trainable: collections that are trained: `router`, `lora`, `params`.
    lora: adapters that run, trained or not; None for none.
    kl: also a forward pass of the dense model (KL in the loss), with a head.

  Raises:
    ValueError: an unknown collection, or `lora` trained without a LoraConfig.
  """
  unknown = sorted(set(trainable) - {"router", "lora", "params"})
  if unknown:
    raise ValueError(
      f"trainable collections {unknown} must be among router, lora, params."
    )
  if "lora" in trainable and lora is None:
    raise ValueError("trainable names 'lora', but there are no adapters.")
  macs = layer_macs(model, route, seq_len)
  heads = model.n_heads * model.head_dim
  router = sum(macs.router)
  adapters = 0 if lora is None else model.n_layers * _lora_params(model, lora)
  head = model.vocab * model.d_model
  # Scores and weighted values: two products forward, four backward.
  core = sum(2.0 * heads * mean_keys(seq_len, w) for w in model.windows)
  linear = sum(macs.attn) + sum(macs.ffn) + sum(macs.kv) - core
  forward = linear + core + router + adapters + head
  backward = forward + core
  weights = {"router": router, "lora": adapters, "params": linear + head}
  backward += sum(weights[name] for name in set(trainable))
  teacher = linear + core + head if kl else 0.0
  return 2.0 * (forward + backward + teacher)


def peak_flops(device_kind: str, dtype: str) -> float | None:
  """Dense matmul peak of one device in FLOP/s; None where it is not known.

  Args:
    device_kind: `jax.Device.device_kind`, such as "NVIDIA H200" or
      "TPU v5 lite".
    dtype: compute dtype by name.
  """
  kind = device_kind.lower()
  for part, peaks in _PEAKS:
    if part in kind:
      return peaks.get(jnp.dtype(dtype).name)
  return None


def mfu(
  flops_per_token: float,
  tokens_per_s: float,
  peak: float | None,
  devices: int = 1,
) -> float | None:
  """Model FLOPs utilisation, 0 to 1; None where the peak is not known."""
  if peak is None:
    return None
  return flops_per_token * tokens_per_s / (peak * devices)


def count_params(tree) -> int:
  """Elements of all leaves (arrays or ShapeDtypeStructs)."""
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(tree))


def count_bytes(tree) -> int:
  """Bytes of all leaves (arrays or ShapeDtypeStructs)."""
  return sum(
    int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize
    for x in jax.tree.leaves(tree)
  )


def memory_estimate(
  variables: dict[str, Any],
  model: ModelConfig,
  trainable: tuple[str, ...],
  *,
  rows: int,
  seq_len: int,
  dtype: str,
  remat: str,
  materialised_scores: bool = False,
  chunk_logits: int = 1 << 28,
  fsdp: int = 1,
  tensor: int = 1,
) -> dict[str, int]:
  """Bytes on one device during a training step; an estimate, for `--dry-run`.

  Weights split fsdp * tensor ways, as if every leaf divided. `optimiser` holds
  Adam's two float32 moments (8 bytes a trainable parameter) and `gradients`
  one float32. `activations`, with c bytes in the compute dtype and every
  number a token and a layer, is what the backward pass finds stored:

  - none: c * (6 D + (2 N + 2 K) H + 4 F), the inputs of matmuls and pointwise
    parts; 16 D for the float32 halves of two norms; and, where scores are
    written out (the plain XLA path), (4 + c) N T;
  - dots: c * (3 D + (N + 2 K) H + 2 F), the layer's input and matmul results;
  - full: c * D, the layer's input.

  Rematerialising adds one layer's `none` as working space. `logits` is one
  chunk of the loss in float32 with its gradient.

  Args:
    variables: collections `params`, `router`, `lora` (any), shapes suffice.
    model: the model's shape.
    trainable: collections that are trained.
    rows: sequences a micro-batch on this device.
    seq_len: T.
    dtype: compute dtype by name.
    remat: `none`, `dots` or `full`.
    materialised_scores: attention runs on the path that stores its scores.
    chunk_logits: logits the loss holds at once (`loss.CHUNK_LOGITS`).
    fsdp, tensor: mesh sizes.

  Returns:
    {"backbone", "routers", "lora", "optimiser", "gradients", "activations",
    "logits", "total"}.

  Raises:
    ValueError: an unknown `remat`.
  """
  if remat not in ("none", "dots", "full"):
    raise ValueError(f"remat={remat!r} must be none, dots or full.")
  ways, c = fsdp * tensor, np.dtype(jnp.dtype(dtype)).itemsize
  trained = {k: v for k, v in variables.items() if k in trainable}
  trained_params = count_params(trained)
  d, f = model.d_model, model.d_ff / tensor
  n, k = (
    x * model.head_dim / tensor for x in (model.n_heads, model.n_kv_heads)
  )
  whole = c * (6 * d + 2 * n + 2 * k + 4 * f) + 16 * d
  if materialised_scores:
    whole += (4 + c) * model.n_heads / tensor * seq_len
  stored = {
    "none": model.n_layers * whole,
    "dots": model.n_layers * c * (3 * d + n + 2 * k + 2 * f) + whole,
    "full": model.n_layers * c * d + whole,
  }[remat]
  logits = min(rows * seq_len * model.vocab, chunk_logits) / tensor
  parts = {
    "backbone": count_bytes(variables.get("params", {})) / ways,
    "routers": count_bytes(variables.get("router", {})) / ways,
    "lora": count_bytes(variables.get("lora", {})) / ways,
    "optimiser": 8 * trained_params / ways,
    "gradients": 4 * trained_params / ways,
    "activations": rows * seq_len * stored,
    "logits": 2 * 4 * logits,
  }
  parts = {name: round(value) for name, value in parts.items()}
  return {**parts, "total": sum(parts.values())}
