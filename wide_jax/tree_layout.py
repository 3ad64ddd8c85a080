"""The tree of `params`: every leaf, and the tensor of a file it stands for.

One table serves loading, export and adapters, so that they cannot disagree.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from wide_jax.model_config import ModelConfig

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One leaf of the tree and where it comes from.

  Attributes:
    path: its path, `layers/attn/q/kernel`.
    hf: the tensor's name; `{}` stands for the layer.
    shape: our shape, without the layer axis.
    hf_shape: the file's shape.
    transposed: the file holds `[out, in]`, we `[in, out...]`.
    channels: which axis of the file's tensor runs over FFN channels.
  """

  path: str
  hf: str
  shape: tuple[int, ...]
  hf_shape: tuple[int, ...]
  transposed: bool = False
  channels: int | None = None

  @property
  def stacked(self) -> bool:
    return "{}" in self.hf


def layout(config: ModelConfig) -> tuple[Leaf, ...]:
  """Every leaf of `params` for one model, in the order it is loaded."""
  d, n, k = config.d_model, config.n_heads, config.n_kv_heads
  h, f, v = config.head_dim, config.d_ff, config.vocab
  leaves = [Leaf("embed/table", EMBED, (v, d), (v, d))]

  def norm(path, hf, size):
    leaves.append(Leaf(path, hf, (size,), (size,)))

  def linear(path, hf, ins, outs, bias, channels=None):
    n_in, n_out = math.prod(ins), math.prod(outs)
    leaves.append(
      Leaf(
        f"{path}/kernel",
        f"{hf}.weight",
        (*ins, *outs),
        (n_out, n_in),
        transposed=True,
        channels=channels,
      )
    )
    if bias:
      leaves.append(
        Leaf(
          f"{path}/bias",
          f"{hf}.bias",
          tuple(outs),
          (n_out,),
          channels=0 if channels == 0 else None,
        )
      )

  block, own = "layers/", "model.layers.{}."
  norm(block + "attn_norm/scale", own + "input_layernorm.weight", d)
  norm(block + "ffn_norm/scale", own + "post_attention_layernorm.weight", d)
  attn, hf = block + "attn/", own + "self_attn."
  linear(attn + "q", hf + "q_proj", (d,), (n, h), config.qkv_bias)
  linear(attn + "k", hf + "k_proj", (d,), (k, h), config.qkv_bias)
  linear(attn + "v", hf + "v_proj", (d,), (k, h), config.qkv_bias)
  linear(attn + "o", hf + "o_proj", (n, h), (d,), config.o_bias)
  if config.qk_norm:
    norm(attn + "q_norm/scale", hf + "q_norm.weight", h)
    norm(attn + "k_norm/scale", hf + "k_norm.weight", h)
  ffn, hf = block + "ffn/", own + "mlp."
  linear(ffn + "gate", hf + "gate_proj", (d,), (f,), config.mlp_bias, 0)
  linear(ffn + "up", hf + "up_proj", (d,), (f,), config.mlp_bias, 0)
  linear(ffn + "down", hf + "down_proj", (f,), (d,), config.mlp_bias, 1)
  norm("final_norm/scale", "model.norm.weight", d)
  if not config.tied:
    leaves.append(Leaf("head/kernel", HEAD, (v, d), (v, d)))
  return tuple(leaves)


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Leaf path -> full shape, layers stacked: what `load_params` returns."""
  return {
    leaf.path: ((config.n_layers,) if leaf.stacked else ()) + leaf.shape
    for leaf in layout(config)
  }


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dicts -> {`a/b/c`: leaf}."""
  flat = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      flat |= flatten(value, f"{prefix}{key}/")
    else:
      flat[prefix + key] = value
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """{`a/b/c`: leaf} -> nested plain dicts."""
  tree: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, last = path.split("/")
    node = tree
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = value
  return tree
