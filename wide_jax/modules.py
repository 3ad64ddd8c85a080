"""The LLaMA-family decoder with width routers and LoRA, in flax.linen.

Three collections: `params` (frozen backbone, compute dtype), `router` and
`lora` (float32). Layers are stacked on axis 0 and scanned; `layer_walk` visits
them one by one. Axis letters: axes.py.
"""

import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from wide_jax import ops, rope, routing
from wide_jax.axes import Hidden, Ids, Positions, Segments, Tree
from wide_jax.config import LoraConfig, Method, RouteConfig
from wide_jax.model_config import ModelConfig
from wide_jax.routing import Gate

# Which dropout mask a projection's adapter sees: one mask per input tensor, so
# that q, k, v (and gate, up) share theirs.
_DROP = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 2, "up": 2, "down": 3}
_KIND = {"attn": 0, "ffn": 1}


class RmsNorm(nn.Module):
  """Root-mean-square norm, statistics in float32 (arXiv 1910.07467)."""

  eps: float
  dtype: Any

  @nn.compact
  def __call__(self, x):
    scale = self.param(
      "scale", nn.initializers.ones, (x.shape[-1],), self.dtype
    )
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
    # One product, rounded once: transformers rounds y before it scales.
    scale = jnp.broadcast_to(scale.astype(jnp.float32), y.shape)
    return (y * scale).astype(self.dtype)


class Linear(nn.Module):
  """A linear map of the trailing `inputs` axes, with an optional adapter.

  y = x W + b + scale * dropout(x) A B, with A, B in the `lora` collection.
  """

  target: str
  out_shape: tuple[int, ...]
  inputs: int = 1
  bias: bool = False
  lora: LoraConfig | None = None
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x, drop_key=None):
    in_shape = x.shape[x.ndim - self.inputs :]
    init = nn.initializers.lecun_normal(
      in_axis=tuple(range(self.inputs)),
      out_axis=tuple(range(self.inputs, self.inputs + len(self.out_shape))),
    )
    w = self.param("kernel", init, (*in_shape, *self.out_shape), self.dtype)
    y = jnp.tensordot(x, w, self.inputs)
    if self.bias:
      b = self.param("bias", nn.initializers.zeros, self.out_shape, self.dtype)
      y = y + jnp.broadcast_to(b, y.shape)
    if self.lora is not None and self.target in self.lora.targets:
      y = y + self._adapter(x, in_shape, drop_key)
    return y

  def _adapter(self, x, in_shape, drop_key):
    rank = self.lora.rank
    # He-uniform A, zero B, so that training starts at the base model.
    init = nn.initializers.variance_scaling(
      1.0 / 3.0, "fan_in", "uniform", in_axis=tuple(range(len(in_shape)))
    )
    a = self.variable(
      "lora",
      "a",
      lambda: init(self.make_rng("lora"), (*in_shape, rank), jnp.float32),
    ).value
    b = self.variable(
      "lora", "b", jnp.zeros, (rank, *self.out_shape), jnp.float32
    ).value
    if drop_key is not None and self.lora.dropout > 0:
      key = jax.random.fold_in(drop_key, _DROP[self.target])
      x = dropout(x, key, self.lora.dropout)
    low = jnp.tensordot(x, a.astype(self.dtype), self.inputs)
    y = jnp.tensordot(low, b.astype(self.dtype), 1)
    return y * jnp.asarray(self.lora.scale, self.dtype)


def dropout(x: Array, key: Array, rate: float) -> Array:
  """Inverted dropout from 16 random bits an element.

  The kept share is round((1 - rate) * 2^16) / 2^16 and the scale is its exact
  inverse, so the mean is unbiased at any rate; one 32-bit draw serves two
  elements.
  """
  keep = round((1.0 - rate) * 65536)
  half = -(-x.shape[-1] // 2)
  words = jax.random.bits(key, (*x.shape[:-1], half), jnp.uint32)
  bits = jnp.concatenate([words & 0xFFFF, words >> 16], -1)[..., : x.shape[-1]]
  scale = jnp.asarray(65536.0 / keep, x.dtype)
  return jnp.where(bits < keep, x * scale, jnp.zeros((), x.dtype))


class Router(nn.Module):
  """Scores the width groups of one sublayer for every token, in float32.

  logits = (r W_down + b_down) W_up + b_up, r the residual stream before the
  sublayer's norm (or after it, by option). b_up starts at `logit_init`, so
  that training starts near "keep everything".
  """

  groups: int
  route: RouteConfig

  @nn.compact
  def __call__(self, r_BTD):
    groups, rank, d = self.groups, self.route.rank, r_BTD.shape[-1]
    init = nn.initializers.lecun_normal()
    if self.route.method is Method.STATIC_WIDTH:
      logits_G = self.variable(
        "router",
        "logits",
        lambda: jnp.full((groups,), self.route.logit_init, jnp.float32),
      ).value
      return jnp.broadcast_to(logits_G, (*r_BTD.shape[:2], groups))

    def leaf(name, make):
      return self.variable("router", name, make).value

    down_DR = leaf(
      "down", lambda: init(self.make_rng("router"), (d, rank), jnp.float32)
    )
    down_bias_R = leaf("down_bias", lambda: jnp.zeros((rank,), jnp.float32))
    up_RG = leaf("up", lambda: jnp.zeros((rank, groups), jnp.float32))
    up_bias_G = leaf(
      "up_bias",
      lambda: jnp.full((groups,), self.route.logit_init, jnp.float32),
    )
    highest = jax.lax.Precision.HIGHEST  # a TF32 logit moves decisions
    low_BTR = jnp.einsum(
      "BTD,DR->BTR", r_BTD.astype(jnp.float32), down_DR, precision=highest
    )
    low_BTR = low_BTR + down_bias_R[None, None]
    logits_BTG = jnp.einsum("BTR,RG->BTG", low_BTR, up_RG, precision=highest)
    return logits_BTG + up_bias_G[None, None]


class Block(nn.Module):
  """One decoder layer: routed attention, then a routed FFN.

  `per_layer` holds this layer's index, window, thresholds and forced masks;
  `shared` holds positions, segments, ids, cos/sin and the gate's key and tau.
  """

  model: ModelConfig
  route: RouteConfig | None
  lora: LoraConfig | None
  dtype: Any
  attention: str
  max_segments: int
  gate_mode: str
  window: int | None
  capture: tuple[str, ...] = ()
  spread: jax.sharding.Sharding | None = None

  def setup(self):
    m = self.model
    self.attn_norm = RmsNorm(m.norm_eps, self.dtype)
    self.ffn_norm = RmsNorm(m.norm_eps, self.dtype)
    self.attn = Attention(
      m,
      self.lora,
      self.dtype,
      self.attention,
      self.max_segments,
      self.window,
    )
    self.ffn = Ffn(m, self.lora, self.dtype)
    routed = self.route is not None and self.route.method not in (
      Method.DENSE,
      Method.RANDOM,
    )
    if routed:
      groups = self.route.groups(m)
      if self.route.method is Method.LAYER_SKIP:
        self.layer_router = Router(1, self.route)
      else:
        self.attn_router = Router(groups["attn"], self.route)
        self.ffn_router = Router(groups["ffn"], self.route)

  def __call__(self, x_BTD, per_layer, shared):
    drop = None  # dropout is for training with a key, never for inference
    if shared.get("drop_key") is not None:
      drop = jax.random.fold_in(shared["drop_key"], per_layer["index"])
    h_BTD = self.attn_norm(x_BTD)
    aux: dict[str, Any] = {}
    keep_attn, logits = self._decide(
      "attn", x_BTD, h_BTD, per_layer, shared, aux
    )
    out = self.attn(h_BTD, keep_attn, drop, per_layer, shared)
    if "inner" in self.capture:
      aux["heads"] = out[1]
    x_BTD = _spread(x_BTD + out[0], self.spread)
    h_BTD = self.ffn_norm(x_BTD)
    if self.route is not None and self.route.method is Method.LAYER_SKIP:
      keep_ffn = keep_attn  # one decision for the whole layer
      self._record("ffn", keep_attn, logits, shared, aux, per_layer)
    else:
      keep_ffn, _ = self._decide("ffn", x_BTD, h_BTD, per_layer, shared, aux)
    out = self.ffn(h_BTD, keep_ffn, drop)
    if "inner" in self.capture:
      aux["channels"] = out[1]
    return _spread(x_BTD + out[0], self.spread), aux

  def _decide(self, kind, x_BTD, h_BTD, per_layer, shared, aux):
    """Keep decisions of one sublayer and their logits, float32 [B, T, G].

    Either is None where it does not exist (everything is kept).
    """
    if self.route is None or self.route.method is Method.DENSE:
      self._record(kind, None, None, shared, aux)
      return None, None
    method, mode = self.route.method, self.gate_mode
    groups = self.route.groups(self.model)[kind]
    layer = per_layer["index"]
    if method is Method.RANDOM:
      u_BTG = routing.hash_uniform(
        shared["ids"][..., None],
        shared["positions"][..., None],
        layer * 2 + _KIND[kind],
        jnp.arange(groups)[None, None],
      )
      logits_BTG = jnp.log(u_BTG) - jnp.log1p(-u_BTG)
    else:
      name = "layer" if method is Method.LAYER_SKIP else kind
      r_BTD = x_BTD if self.route.router_input == "residual" else h_BTD
      logits_BTG = getattr(self, f"{name}_router")(r_BTD)
    if mode == "open":
      keep_BTG = None
    elif mode == "forced":
      keep_BTG = per_layer["masks"][kind].astype(jnp.float32)
    elif mode == "threshold":
      keep_BTG = (logits_BTG > per_layer["thresholds"][kind]).astype(
        jnp.float32
      )
    else:
      key = jax.random.fold_in(shared["key"], 2 * layer + _KIND[kind])
      static = method is Method.STATIC_WIDTH
      shape = (1, 1, groups) if static else logits_BTG.shape
      noise = jnp.broadcast_to(
        jax.random.logistic(key, shape, jnp.float32), logits_BTG.shape
      )
      hard_BTG = per_layer["masks"][kind] if "masks" in per_layer else None
      keep_BTG = routing.straight_through(
        logits_BTG, noise, shared["tau"], hard_BTG
      )
    self._record(kind, keep_BTG, logits_BTG, shared, aux, per_layer)
    return keep_BTG, logits_BTG

  def _record(self, kind, keep_BTG, logits_BTG, shared, aux, per_layer=None):
    """Adds counts (and what is captured) of one decision to `aux`."""
    valid_BT = shared["valid"]
    groups = 0
    if self.route is not None:
      groups = self.route.groups(self.model)[kind]
    if keep_BTG is None:
      kept_G = jnp.broadcast_to(valid_BT.sum(), (groups,))
    else:
      kept_G = jnp.einsum("BTG,BT->G", keep_BTG, valid_BT)
    aux.setdefault("kept", {})[kind] = kept_G
    if "masks" in self.capture and groups:
      shape = (*valid_BT.shape, groups)
      keep = jnp.ones(shape) if keep_BTG is None else keep_BTG
      aux.setdefault("masks", {})[kind] = keep > 0
    if "logits" in self.capture and logits_BTG is not None:
      aux.setdefault("logits", {})[kind] = logits_BTG
    if "curves" in self.capture and logits_BTG is not None:
      aux.setdefault("curves", {})[kind] = routing.candidate_counts(
        logits_BTG, valid_BT, per_layer["thresholds"][kind]
      )


def _spread(x_BTD, spread):
  """Keeps the rows of a batch where they are; see `Decoder.spread`."""
  if spread is None:
    return x_BTD
  return jax.lax.with_sharding_constraint(x_BTD, spread)


def _mask_groups(x, keep_BTG):
  """Multiplies contiguous groups of axis 2 of x by their keep decisions."""
  if keep_BTG is None:
    return x
  groups = keep_BTG.shape[-1]
  b, t, width = x.shape[:3]
  grouped = x.reshape(b, t, groups, width // groups, *x.shape[3:])
  keep = keep_BTG.astype(x.dtype)
  keep = keep.reshape(b, t, groups, *(1,) * (grouped.ndim - 3))
  return (grouped * keep).reshape(x.shape)


class Attention(nn.Module):
  """Grouped-query attention; heads are masked before the output projection.

  K and V are computed for every token, whatever the decision. Returns the
  output [B, T, D] and the unmasked heads [B, T, N, H].
  """

  model: ModelConfig
  lora: LoraConfig | None
  dtype: Any
  attention: str
  max_segments: int
  window: int | None

  @nn.compact
  def __call__(self, h_BTD, keep_BTG, drop, per_layer, shared):
    m = self.model
    heads, kv = (m.n_heads, m.head_dim), (m.n_kv_heads, m.head_dim)

    def linear(name, shape, bias, inputs=1):
      return Linear(name, shape, inputs, bias, self.lora, self.dtype, name=name)

    q_BTNH = linear("q", heads, m.qkv_bias)(h_BTD, drop)
    k_BSKH = linear("k", kv, m.qkv_bias)(h_BTD, drop)
    v_BSKH = linear("v", kv, m.qkv_bias)(h_BTD, drop)
    if m.qk_norm:
      q_BTNH = RmsNorm(m.norm_eps, self.dtype, name="q_norm")(q_BTNH)
      k_BSKH = RmsNorm(m.norm_eps, self.dtype, name="k_norm")(k_BSKH)
    q_BTNH = rope.apply_rope(q_BTNH, shared["cos"], shared["sin"])
    k_BSKH = rope.apply_rope(k_BSKH, shared["cos"], shared["sin"])
    window = per_layer["window"] if self.window is None else self.window
    a_BTNH = ops.attention(
      q_BTNH,
      k_BSKH,
      v_BSKH,
      shared["segments"],
      window=window,
      max_segments=self.max_segments,
      path=self.attention,
    )
    o = linear("o", (m.d_model,), m.o_bias, inputs=2)
    return o(_mask_groups(a_BTNH, keep_BTG), drop), a_BTNH


class Ffn(nn.Module):
  """SwiGLU (arXiv 2002.05202); channels are masked before `down`.

  Returns the output [B, T, D] and the unmasked channels [B, T, F].
  """

  model: ModelConfig
  lora: LoraConfig | None
  dtype: Any

  @nn.compact
  def __call__(self, h_BTD, keep_BTG, drop):
    m = self.model

    def linear(name, width):
      return Linear(
        name, (width,), 1, m.mlp_bias, self.lora, self.dtype, name=name
      )

    gate_BTF = linear("gate", m.d_ff)(h_BTD, drop)
    up_BTF = linear("up", m.d_ff)(h_BTD, drop)
    h_BTF = nn.silu(gate_BTF) * up_BTF
    return linear("down", m.d_model)(_mask_groups(h_BTF, keep_BTG), drop), h_BTF


def _remat(block, remat: str):
  if remat == "none":
    return block
  policy = None
  if remat == "dots":
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  # Under scan the loop itself keeps the recomputation from being merged.
  return nn.remat(block, prevent_cse=False, policy=policy)


class Decoder(nn.Module):
  """Embedding, scanned blocks and the final norm; see `head_table` for logits.

  Attributes:
    model, route, lora: shapes; None leaves routers or adapters out.
    dtype: compute dtype of everything but routers, softmax and norms.
    remat: `none`, `dots` (matmul results kept) or `full`.
    attention, max_segments: see ops.attention.
    capture: extra per-layer outputs: `masks`, `logits`, `curves`, `inner`.
    spread: sharding of [B, T, D] between sublayers; None leaves it to XLA.
      With weights split along D, XLA by itself gathers the activations and
      all-reduces the logits of the whole batch instead of gathering weights.
  """

  model: ModelConfig
  route: RouteConfig | None = None
  lora: LoraConfig | None = None
  dtype: Any = jnp.float32
  remat: str = "none"
  attention: str = "auto"
  max_segments: int = 0
  capture: tuple[str, ...] = ()
  spread: jax.sharding.Sharding | None = None

  def _block(self, gate_mode: str, window: int | None) -> dict[str, Any]:
    return dict(
      model=self.model,
      route=self.route,
      lora=self.lora,
      dtype=self.dtype,
      attention=self.attention,
      max_segments=self.max_segments,
      gate_mode=gate_mode,
      window=window,
      capture=self.capture,
      spread=self.spread,
    )

  def shared(self, ids_BT, positions_BT, segments_BT, gate: Gate, drop_key):
    """What every layer sees alike."""
    rope.check_length(self.model, ids_BT.shape[1])
    cos, sin = rope.cos_sin(positions_BT, self.model.rope, self.model.head_dim)
    return {
      "ids": ids_BT,
      "positions": positions_BT,
      "segments": segments_BT,
      "valid": (segments_BT > 0).astype(jnp.float32),
      "cos": cos,
      "sin": sin,
      "key": gate.key,
      "tau": gate.tau,
      "drop_key": drop_key,
    }

  def per_layer(self, gate: Gate) -> dict[str, Any]:
    """What differs between layers, stacked on axis 0."""
    out: dict[str, Any] = {"index": jnp.arange(self.model.n_layers)}
    if len(set(self.model.windows)) > 1:
      out["window"] = jnp.asarray(self.model.windows, jnp.int32)
    if gate.thresholds is not None:
      out["thresholds"] = dict(gate.thresholds)
    if gate.masks is not None:
      out["masks"] = dict(gate.masks)
    return out

  @nn.compact
  def __call__(
    self,
    ids_BT: Ids,
    positions_BT: Positions,
    segments_BT: Segments,
    gate: Gate = Gate(),
    drop_key: Array | None = None,
  ) -> tuple[Hidden, dict]:
    """Runs the decoder.

    Args:
      ids_BT, positions_BT, segments_BT: int32 [B, T]; segment 0 is padding.
      gate: how width is decided.
      drop_key: PRNG key of LoRA dropout; None for no dropout.

    Returns:
      (hidden [B, T, D] after the final norm, aux); aux["kept"][kind] is
      float32 [L, G], tokens that kept each group, aux["tokens"] their number;
      captures are stacked on a leading L axis.
    """
    m = self.model
    table_VD = Embed(m.vocab, m.d_model, self.dtype, name="embed")()
    x_BTD = jnp.take(table_VD, ids_BT, axis=0, mode="clip")
    x_BTD = _spread(x_BTD, self.spread)
    uniform = len(set(m.windows)) == 1
    window = m.windows[0] if uniform else None
    layers = nn.scan(
      _remat(Block, self.remat),
      variable_axes={"params": 0, "router": 0, "lora": 0},
      split_rngs={"params": True, "router": True, "lora": True},
      in_axes=(0, nn.broadcast),
      length=m.n_layers,
    )(**self._block(gate.mode, window), name="layers")
    shared = self.shared(ids_BT, positions_BT, segments_BT, gate, drop_key)
    x_BTD, aux = layers(x_BTD, self.per_layer(gate), shared)
    hidden_BTD = RmsNorm(m.norm_eps, self.dtype, name="final_norm")(x_BTD)
    if not m.tied:
      Embed(m.vocab, m.d_model, self.dtype, name="head", leaf="kernel")()
    return _spread(hidden_BTD, self.spread), {
      **aux,
      "tokens": shared["valid"].sum(),
    }


class Embed(nn.Module):
  """Declares a [V, D] table: the embedding, or an untied output head."""

  vocab: int
  width: int
  dtype: Any
  leaf: str = "table"

  @nn.compact
  def __call__(self):
    init = nn.initializers.normal(self.width**-0.5)
    return self.param(self.leaf, init, (self.vocab, self.width), self.dtype)


def head_table(params: Tree) -> Float[Array, "V D"]:
  """The output head: its own table, or the embedding where tied."""
  if "head" in params:
    return params["head"]["kernel"]
  return params["embed"]["table"]


def init(
  decoder: Decoder,
  seed: int,
  collections: tuple[str, ...],
  shardings: Tree | None = None,
) -> dict:
  """Initial values of the named collections, as plain dicts.

  Under jit: what is not asked for is never computed. `shardings`, a tree like
  the result, places every leaf as it is made.
  """

  def make(key):
    rngs = {
      name: jax.random.fold_in(key, i)
      for i, name in enumerate(("params", "router", "lora"))
    }
    one = jnp.zeros((1, 2), jnp.int32)
    variables = decoder.copy(attention="xla", capture=(), spread=None).init(
      rngs, one, one, one + 1
    )
    return {name: variables.get(name, {}) for name in collections}

  return jax.jit(make, out_shardings=shardings)(jax.random.key(seed))


def abstract(decoder: Decoder) -> dict:
  """Shapes and dtypes of all collections, nothing allocated."""
  names = ("params", "router", "lora")
  return jax.eval_shape(lambda: init(decoder, 0, names))


def positions_and_segments(mask_BT: Array) -> tuple[Array, Array]:
  """Positions and segments of rows padded on either side.

  Args:
    mask_BT: 1 for a token, 0 for padding.

  Returns:
    int32 positions that start at 0 with each row's first token, and segments.
  """
  segments = (mask_BT != 0).astype(jnp.int32)
  positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
  return positions, segments


@functools.partial(jax.jit, static_argnums=0)
def logits_and_aux(
  decoder: Decoder, variables: Tree, ids_BT: Ids, mask_BT: Array, gate: Gate
) -> tuple[Float[Array, "B T V"], dict]:
  """Logits, float32, and the `aux` of `Decoder`, of rows padded on either side.

  Args:
    mask_BT: 1 for a token, 0 for padding.
  """
  positions, segments = positions_and_segments(mask_BT)
  hidden, aux = decoder.apply(variables, ids_BT, positions, segments, gate)
  table = head_table(variables["params"])
  out = jnp.einsum(
    "BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32
  )
  return out, dict(aux)


def logits(
  config: ModelConfig,
  params: Tree,
  ids: Ids,
  mask: Array | None = None,
  dtype: str = "float32",
) -> Float[Array, "B T V"]:
  """Dense logits, float32.

  Raises:
    ValueError: an id outside the vocabulary.
  """
  low, high = int(ids.min()), int(ids.max())
  if low < 0 or high >= config.vocab:
    bad = low if low < 0 else high
    raise ValueError(f"token id {bad} is outside [0, {config.vocab}).")
  mask = jnp.ones_like(ids) if mask is None else jnp.asarray(mask)
  decoder = Decoder(config, dtype=jnp.dtype(dtype))
  return logits_and_aux(
    decoder, {"params": params}, jnp.asarray(ids), mask, Gate()
  )[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _walk_step(block, capture, layer_params, x_BTD, per_layer, shared):
  x_BTD, aux = block.apply({"params": layer_params}, x_BTD, per_layer, shared)
  return x_BTD, {k: aux[k] for k in capture}


def layer_walk(
  decoder: Decoder,
  params: Tree,
  ids_BT: Ids,
  segments_BT: Segments,
  positions_BT: Positions,
) -> Iterator[dict[str, Array]]:
  """Visits the dense layers one by one, for calibration on activations.

  Yields:
    {"heads": [B, T, N, H] before the output projection, "channels": [B, T, F]
    after SwiGLU} of each layer; only one layer's are alive at a time.
  """
  m = decoder.model
  # Calibration rows come as they are, in any number: they are not spread.
  dense = decoder.copy(route=None, lora=None, capture=("inner",), spread=None)
  shared = dense.shared(ids_BT, positions_BT, segments_BT, Gate(), None)
  x_BTD = jnp.take(params["embed"]["table"], ids_BT, axis=0, mode="clip")
  for i in range(m.n_layers):
    block = Block(**dense._block("open", m.windows[i]))
    layer_params = jax.tree.map(lambda a, i=i: a[i], params["layers"])
    x_BTD, inner = _walk_step(
      block, ("heads", "channels"), layer_params, x_BTD, {"index": i}, shared
    )
    yield inner
