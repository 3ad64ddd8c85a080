"""A tiny decoder with random weights, and one jitted way to run it.

9 query and 3 kv heads, a width that is no power of two, norms near 1 but not
1 and routers whose logits spread around 0, so that masks are mixed and what is
dropped, swapped or ignored shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from wide_jax import modules, routing
from wide_jax.config import LoraConfig, RouteConfig
from wide_jax.model_config import ModelConfig
from wide_jax.modules import Decoder
from wide_jax.routing import Gate

VOCAB = 53
# Most of these tests' time is XLA's: leave out LLVM's optimisations.
jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)

SHAPE = dict(
  vocab=VOCAB,
  d_model=24,
  n_layers=2,
  n_heads=9,
  n_kv_heads=3,
  head_dim=8,
  d_ff=96,
  max_positions=64,
  tied=True,
)
MODEL = ModelConfig(**SHAPE)
ROUTE = RouteConfig(attn_group=1, ffn_group=16, rank=5, logit_init=0.0)
WIDE = Decoder(MODEL, ROUTE)
METHODS = ("wide", "token_depth", "layer_skip", "static_width", "random")


def model(**changes) -> ModelConfig:
  return ModelConfig(**(SHAPE | changes))


def route(method: str, **changes) -> RouteConfig:
  shape = dict(attn_group=1, ffn_group=16, rank=5, logit_init=0.0)
  return RouteConfig(method=method, **(shape | changes))


def lora(**changes) -> LoraConfig:
  return LoraConfig(**(dict(rank=3, alpha=6.0, dropout=0.0) | changes))


def _fill(path, leaf, rng):
  """Random values of a useful size for one leaf, by its name."""
  name = jax.tree_util.keystr(path, simple=True, separator="/")
  noise = rng.standard_normal(leaf.shape)
  if name.endswith("scale"):
    noise = 1 + 0.2 * noise
  elif name.startswith("router"):
    # Two maps of a residual of size about 1: logits of about 1.5.
    size = {"down": 0.3, "up": 0.6}.get(name.split("/")[-1], 1.0)
    noise = size * noise
  elif name.startswith("lora"):
    noise = 0.1 * noise
  elif name.endswith("bias"):
    noise = 0.3 * noise
  elif name.endswith("table") or name.startswith("params/head"):
    noise = noise * 0.7
  else:
    fan_in = np.prod(leaf.shape[1:-1]) if "/o/" in name else leaf.shape[1]
    noise = noise / np.sqrt(fan_in)
  return jnp.asarray(noise.astype(np.float32), leaf.dtype)


def variables(decoder: Decoder, seed: int = 0) -> dict:
  """Random values for every collection that the decoder has."""
  rng = np.random.default_rng(seed)
  shapes = {k: v for k, v in modules.abstract(decoder).items() if v}
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: _fill(path, leaf, rng), shapes
  )


@functools.partial(jit, static_argnums=0)
def _forward(decoder, variables, ids, positions, segments, gate, drop_key):
  hidden, aux = decoder.apply(
    variables, ids, positions, segments, gate, drop_key
  )
  table = modules.head_table(variables["params"])
  return jnp.einsum("BTD,VD->BTV", hidden, table), hidden, aux


def forward(
  decoder, variables, ids, gate=Gate(), segments=None, positions=None, drop=None
):
  """(logits [B,T,V], aux with masks and logits) as numpy, in one jit."""
  decoder = decoder.copy(capture=("masks", "logits"))
  ids = jnp.asarray(ids, jnp.int32)
  if segments is None:
    segments = np.ones(ids.shape)
  segments = jnp.asarray(segments, jnp.int32)
  if positions is None:
    real = np.asarray(segments) != 0
    positions = np.maximum(np.cumsum(real, 1) - 1, 0)
  positions = jnp.asarray(positions, jnp.int32)
  out, _, aux = _forward(
    decoder, variables, ids, positions, segments, gate, drop
  )
  return np.asarray(out), jax.tree.map(np.asarray, aux)


def dense_logits(config, params, ids) -> np.ndarray:
  return forward(Decoder(config), {"params": params}, ids)[0]


def thresholds(value: float, layers: int = 2) -> Gate:
  """The inference gate with one threshold for everything."""
  both = {k: np.full(layers, value, np.float32) for k in routing.KINDS}
  return routing.threshold_gate(both)


def shift_logits(router: dict, by: float) -> dict:
  """The same routers with `by` added to every keep score."""

  def one(path, leaf):
    name = path[-1].key
    return leaf + by if name in ("up_bias", "logits") else leaf

  return jax.tree_util.tree_map_with_path(one, router)


def token_ids(batch: int, length: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, VOCAB, (batch, length)).astype(np.int32)


def same(a, b) -> None:
  """Two trees equal to the bit."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)
