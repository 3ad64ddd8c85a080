"""LoRA adapters: PEFT's format in and out, merge and unmerge.

In memory an adapter is the `lora` collection of BUILD_NOTES.md: `a` maps the
input to r, `b` maps r to the output, layers stacked, FFN channels in the order
the model holds them. PEFT keeps `[r, in]` and `[out, r]` a layer and knows
nothing of a reordering, so both directions undo it.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from wide_jax.config import LORA_TARGETS, LoraConfig
from wide_jax.model_config import ModelConfig
from wide_jax.tree_layout import Leaf, flatten, layout, unflatten
from wide_jax.weights import (
  LORA_CHANNEL_AXES,
  check_channel_order,
  inverse_order,
  permute_leaves,
)

_PREFIX = "base_model.model."

# What a PEFT config may say beside what we read, and the value that is fine.
_PLAIN = {
  "peft_type": "LORA",
  "bias": "none",
  "fan_in_fan_out": False,
  "modules_to_save": None,
  "use_dora": False,
  "lora_bias": False,
  "rank_pattern": {},
  "alpha_pattern": {},
  "layers_to_transform": None,
  "layers_pattern": None,
  "layer_replication": None,
  "target_parameters": None,
  "trainable_token_indices": None,
  "exclude_modules": None,
}


def _target_of(leaf: Leaf) -> str | None:
  """`q` for layers/attn/q/kernel, None for leaves LoRA does not touch."""
  match = re.fullmatch(r"layers/(?:attn|ffn)/(\w+)/kernel", leaf.path)
  return match[1] if match and match[1] in LORA_TARGETS else None


def _targets(model: ModelConfig, names) -> dict[str, Leaf]:
  """Target -> leaf of its kernel, in the order of `LORA_TARGETS`."""
  leaves = {_target_of(leaf): leaf for leaf in layout(model)}
  return {t: leaves[t] for t in LORA_TARGETS if t in names}


def _module(leaf: Leaf, layer: int) -> str:
  return leaf.hf.format(layer).removesuffix(".weight")


def _split(leaf: Leaf) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The leaf's shape as (input axes, output axes)."""
  n_in, ins = leaf.hf_shape[1], 1
  while math.prod(leaf.shape[:ins]) < n_in:
    ins += 1
  return leaf.shape[:ins], leaf.shape[ins:]


def lora_shapes(
  model: ModelConfig, lora_config: LoraConfig
) -> dict[str, tuple[int, ...]]:
  """Flat path -> shape of every leaf of the `lora` collection."""
  shapes, n, r = {}, model.n_layers, lora_config.rank
  for leaf in _targets(model, lora_config.targets).values():
    base, (ins, outs) = leaf.path.removesuffix("kernel"), _split(leaf)
    shapes[base + "a"] = (n, *ins, r)
    shapes[base + "b"] = (n, r, *outs)
  return shapes


def check_lora(
  lora: Mapping[str, Any], lora_config: LoraConfig, model: ModelConfig
) -> dict[str, Any]:
  """The flat adapter; raises ValueError, by leaf, where a shape is wrong."""
  flat, want = flatten(lora), lora_shapes(model, lora_config)
  if set(flat) != set(want):
    odd = sorted(set(flat) ^ set(want))
    raise ValueError(f"the adapter and its config differ in {odd}.")
  for path, shape in want.items():
    if tuple(flat[path].shape) != shape:
      raise ValueError(
        f"adapter leaf {path} has shape {tuple(flat[path].shape)}; want"
        f" {shape}."
      )
  return flat


def lora_to_peft(
  lora: Mapping[str, Any],
  lora_config: LoraConfig,
  model: ModelConfig,
  *,
  channel_order=None,
  base: str = "",
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Our adapter as PEFT's tensors and `adapter_config.json`.

  Args:
    lora: the `lora` collection.
    channel_order: int [L, F] the model's FFN channels are in; the result is in
      the base's original order.
    base: what the config names as its base model.

  Returns:
    ({tensor name: float32 array}, the config).
  """
  flat = check_lora(lora, lora_config, model)
  if channel_order is not None:
    order = check_channel_order(channel_order, model.n_layers, model.d_ff)
    flat = permute_leaves(flat, inverse_order(order), LORA_CHANNEL_AXES)
  tensors, r = {}, lora_config.rank
  targets = _targets(model, lora_config.targets)
  for leaf in targets.values():
    path = leaf.path.removesuffix("kernel")
    n_out, n_in = leaf.hf_shape
    a = np.asarray(flat[path + "a"], np.float32).reshape(-1, n_in, r)
    b = np.asarray(flat[path + "b"], np.float32).reshape(-1, r, n_out)
    for i in range(model.n_layers):
      name = f"{_PREFIX}{_module(leaf, i)}.lora_"
      tensors[name + "A.weight"] = np.ascontiguousarray(a[i].T)
      tensors[name + "B.weight"] = np.ascontiguousarray(b[i].T)
  alpha = lora_config.alpha
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": r,
    "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
    "lora_dropout": lora_config.dropout,
    "use_rslora": lora_config.rank_stabilised,
    "target_modules": [_module(t, 0).split(".")[-1] for t in targets.values()],
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "modules_to_save": None,
  }
  return tensors, config


def lora_from_peft(
  tensors: Mapping[str, np.ndarray],
  config: Mapping[str, Any],
  model: ModelConfig,
  *,
  channel_order=None,
) -> tuple[dict[str, Any], LoraConfig]:
  """PEFT's tensors and config as our adapter, float32.

  Raises:
    ValueError: an option we do not have, a module outside our targets or the
      model, a module that misses one of its two tensors, a wrong shape; each
      by name.
  """
  for key, fine in _PLAIN.items():
    value = config.get(key)
    if value and value != fine:
      raise ValueError(f"adapter_config.json has {key}={value!r}; want {fine}.")
  if not isinstance(config.get("r"), int):
    raise ValueError(f"adapter_config.json has r={config.get('r')!r}.")
  for key in ("lora_alpha", "lora_dropout"):
    value = config.get(key, 0)
    if value is None and key == "lora_dropout":
      continue
    if not isinstance(value, int | float):
      raise ValueError(f"adapter_config.json has {key}={value!r}.")
  # No name in `tensors` can be reached from a module that we do not have.
  modules = {
    f"{_PREFIX}{_module(leaf, i)}": (target, i)
    for target, leaf in _targets(model, LORA_TARGETS).items()
    for i in range(model.n_layers)
  }
  targets = _present_targets(tensors, config, modules)
  lora_config = LoraConfig(
    rank=config["r"],
    alpha=float(config.get("lora_alpha", 8)),  # 8 is PEFT's default
    dropout=float(config.get("lora_dropout") or 0.0),
    rank_stabilised=bool(config.get("use_rslora", False)),
    targets=targets,
  )
  flat = {
    path: np.empty(shape, np.float32)
    for path, shape in lora_shapes(model, lora_config).items()
  }
  r, leaves = lora_config.rank, _targets(model, targets)
  for module, (target, i) in modules.items():
    if target not in leaves:
      continue
    n_out, n_in = leaves[target].hf_shape
    path = leaves[target].path.removesuffix("kernel")
    for letter, shape in (("A", (r, n_in)), ("B", (n_out, r))):
      name = f"{module}.lora_{letter}.weight"
      if name not in tensors:
        raise ValueError(f"the adapter lacks {name}.")
      value = tensors[name]
      if tuple(value.shape) != shape:
        raise ValueError(
          f"{name} has shape {tuple(value.shape)}; r={r} and the model want"
          f" {shape}."
        )
      out = flat[path + letter.lower()][i]
      out[...] = np.asarray(value, np.float32).T.reshape(out.shape)
  if channel_order is not None:
    order = check_channel_order(channel_order, model.n_layers, model.d_ff)
    flat = permute_leaves(flat, order, LORA_CHANNEL_AXES)
  return unflatten(flat), lora_config


def _present_targets(tensors, config, modules) -> tuple[str, ...]:
  """Targets the file holds, which must be those its config asks for."""
  found = set()
  for name in tensors:
    match = re.fullmatch(r"(.+)\.lora_[AB]\.weight", name)
    if match is None or match[1] not in modules:
      raise ValueError(
        f"the adapter holds {name}, which is none of {LORA_TARGETS} in this"
        " model's layers."
      )
    found.add(modules[match[1]][0])
  asked = config.get("target_modules")
  if isinstance(asked, list | tuple | set):
    short = {m.split(".")[-1]: t for m, (t, _) in modules.items()}
    ends = {str(m).split(".")[-1] for m in asked}
    odd = sorted(ends - set(short))
    if odd:
      raise ValueError(
        f"adapter_config.json targets {odd}; supported are {sorted(short)}."
      )
    lost = sorted({short[e] for e in ends} - found)
    if lost:
      raise ValueError(f"the adapter has no tensors for its targets {lost}.")
  return tuple(t for t in LORA_TARGETS if t in found)


# --- merge -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Merged:
  """Parameters with an adapter added in, and what they replaced.

  Attributes:
    params: the merged tree; leaves the adapter does not touch are shared.
    originals: flat path -> kernel as it was, so that `unmerge` restores bits.
  """

  params: dict[str, Any]
  originals: dict[str, Any]


def merge_lora(
  params: dict[str, Any] | Merged,
  lora: Mapping[str, Any],
  lora_config: LoraConfig,
) -> Merged:
  """W + scale * A B, summed in float32, rounded once to the kernel's dtype.

  Raises:
    ValueError: `params` is merged already, or the adapter does not fit.
  """
  if isinstance(params, Merged):
    raise ValueError("these parameters are merged already; unmerge them first.")
  flat, adapter = flatten(params), flatten(lora)
  originals = {}
  for path in adapter:
    base, letter = path.rsplit("/", 1)
    if letter != "a":
      continue
    name = base + "/kernel"
    if name not in flat or base + "/b" not in adapter:
      raise ValueError(f"adapter leaf {path} has no kernel or no b beside it.")
    a, b = adapter[path], adapter[base + "/b"]
    originals[name] = flat[name]
    flat[name] = _add(flat[name], a, b, lora_config, name)
  if not originals:
    raise ValueError("the adapter is empty; there is nothing to merge.")
  return Merged(unflatten(flat), originals)


def _add(kernel, a, b, lora_config: LoraConfig, name: str):
  n, r = kernel.shape[0], lora_config.rank
  if a.shape[-1] != r or b.shape[1] != r:
    raise ValueError(
      f"the adapter of {name} has rank {a.shape[-1]}; its config says {r}."
    )
  if a.shape[:-1] + b.shape[2:] != kernel.shape or b.shape[0] != n:
    raise ValueError(
      f"an adapter of shapes {a.shape} and {b.shape} does not fit {name} of"
      f" shape {kernel.shape}."
    )
  out = np.empty(kernel.shape, np.dtype(kernel.dtype))
  for i in range(n):  # a float32 copy of one layer, not of the stack
    a_i = np.asarray(a[i], np.float32).reshape(-1, r)
    b_i = np.asarray(b[i], np.float32).reshape(r, -1)
    delta = (a_i @ b_i) * np.float32(lora_config.scale)
    w = np.asarray(kernel[i]).astype(np.float32)
    out[i] = (w + delta.reshape(w.shape)).astype(out.dtype)
  if isinstance(kernel, np.ndarray):
    return out
  import jax  # a kernel that is not numpy's is jax's

  return jax.device_put(out, kernel.sharding)


def unmerge_lora(merged: Merged) -> dict[str, Any]:
  """The parameters as they were, to the bit."""
  return unflatten(flatten(merged.params) | merged.originals)
