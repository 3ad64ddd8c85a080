"""GGUF files: metadata -> ModelConfig, tensors -> rows under HF names.

Parsing and dequantising are the `gguf` package's (numpy, no torch). Three
things differ from a Hugging Face file: quantised rows, the order of the q and
k rows of Llama files (llama.cpp rotates neighbouring pairs, Hugging Face the
two halves of a head), and rope scaling, which may be held as explicit
per-frequency divisors in `rope_freqs.weight`.
"""

import os
import pathlib
import re
from typing import Any

import numpy as np

from wide_jax.model_config import ModelConfig, RopeConfig

_QUANTS = (
  "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K"
).split()

_TOP = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_LAYER = {
  "attn_norm": "input_layernorm",
  "ffn_norm": "post_attention_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"

# Keys below `ARCH.` that say nothing about the computation.
_INERT = {"tensor_data_layout", "rope.scaling.finetuned"}
_KNOWN = {
  "vocab_size",
  "context_length",
  "embedding_length",
  "block_count",
  "feed_forward_length",
  "attention.head_count",
  "attention.head_count_kv",
  "attention.key_length",
  "attention.value_length",
  "attention.layer_norm_rms_epsilon",
  "attention.causal",
  "rope.dimension_count",
  "rope.freq_base",
  "rope.scaling.type",
  "rope.scaling.factor",
  "rope.scaling.original_context_length",
  "rope.scaling.attn_factor",
  "rope.scaling.yarn_beta_fast",
  "rope.scaling.yarn_beta_slow",
  "rope.scale_linear",
  "expert_count",
  "expert_used_count",
}
# These must have the neutral value where they are present.
_NEUTRAL = {
  "attention.causal": True,
  "expert_count": 0,
  "expert_used_count": 0,
  "rope.scaling.attn_factor": 1.0,
}


class GgufFile:
  """One GGUF file as a source of tensors under Hugging Face names.

  Attributes:
    path: the file.
    config: the model it describes.
    shapes: Hugging Face tensor name -> shape `[out, in]`.
    used: names of tensors used for the config alone (`rope_freqs.weight`).

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: damaged file; architecture, metadata key, tensor or
      quantisation that is not supported, by name.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(f"{self.path} does not exist.")
    import gguf  # only GGUF users need the package

    try:
      reader = gguf.GGUFReader(self.path)
    # The package has no error type of its own; on a damaged file it fails
    # wherever the bytes stop making sense.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as e:
      raise ValueError(f"{self.path} is not a whole GGUF file: {e}.") from e
    self._dequantize = gguf.dequantize
    self._tensors = {t.name: t for t in reader.tensors}
    for name, tensor in self._tensors.items():
      if tensor.tensor_type.name not in _QUANTS:
        raise ValueError(
          f"{name} in {self.path} is stored as {tensor.tensor_type.name};"
          f" supported are {', '.join(_QUANTS)}."
        )
    meta = _metadata(reader)
    self._arch = meta.get("general.architecture")
    if self._arch not in ("llama", "qwen2", "qwen3"):
      raise ValueError(
        f"{self.path} has architecture {self._arch!r}; supported are llama"
        " (with Mistral), qwen2 and qwen3."
      )
    self._names = self._map_names()
    self.shapes = {hf: self._shape(name) for hf, name in self._names.items()}
    divisors = ()
    self.used: tuple[str, ...] = ()
    if _ROPE_FREQS in self._tensors:
      values = self._values(_ROPE_FREQS, slice(None))
      divisors = tuple(float(x) for x in values.reshape(-1))
      self.used = (_ROPE_FREQS,)
    self.config = _config(self._arch, meta, set(self.shapes), divisors, self)

  @property
  def dtype(self) -> str:
    """What to hold it in without loss: quantised blocks need float32."""
    kinds = {t.tensor_type.name for t in self._tensors.values()} - {"F32"}
    return {"BF16": "bfloat16", "F16": "float16"}.get("".join(kinds), "float32")

  @property
  def n_tensors(self) -> int:
    return len(self._tensors)

  def rows(self, name: str, index: slice | np.ndarray) -> np.ndarray:
    """Rows of a tensor, in Hugging Face's order, float32 unless 16 bits.

    `index` picks along the first axis.
    """
    if self._arch == "llama" and re.search(r"\.(q|k)_proj\.", name):
      n = self.shapes[name][0]
      index = _unpaired_rows(n, self.config.head_dim)[index]
    return self._values(self._names[name], index)

  def n_bytes(self, name: str) -> int:
    return int(self._tensors[self._names[name]].n_bytes)

  def _shape(self, name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(self._tensors[name].shape))

  def _values(self, name: str, index: slice | np.ndarray) -> np.ndarray:
    tensor = self._tensors[name]
    # A fancy index copies; the reader's arrays are views of the mmap.
    data = np.asarray(tensor.data)[index]
    if data.dtype in (np.float32, np.float16):
      return data
    return self._dequantize(data, tensor.tensor_type)

  def _map_names(self) -> dict[str, str]:
    names, unknown = {}, []
    for name in self._tensors:
      match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
      if name in _TOP:
        names[_TOP[name]] = name
      elif match and match[2] in _LAYER:
        hf = f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
        names[hf] = name
      elif name != _ROPE_FREQS:
        unknown.append(name)
    if unknown:
      raise ValueError(f"{self.path} holds unknown tensors {sorted(unknown)}.")
    return names


def _unpaired_rows(n_rows: int, head_dim: int) -> np.ndarray:
  """Row `i` of the Hugging Face order is row `result[i]` of the file."""
  rows = np.arange(n_rows).reshape(-1, head_dim // 2, 2)
  return rows.swapaxes(1, 2).reshape(-1)


def _metadata(reader) -> dict[str, Any]:
  """Scalars and strings of the file; arrays (the vocabulary) are left out."""
  found = {}
  for name, field in reader.fields.items():
    if len(field.types) == 1:
      found[name] = field.contents()
    elif not name.startswith("tokenizer."):
      found[name] = list(field.contents() or [])
  return found


def _config(
  arch: str,
  meta: dict[str, Any],
  names: set[str],
  divisors: tuple[float, ...],
  file: GgufFile,
) -> ModelConfig:
  own = {
    key[len(arch) + 1 :]: value
    for key, value in meta.items()
    if key.startswith(arch + ".")
  }
  unknown = sorted(f"{arch}.{k}" for k in set(own) - _KNOWN - _INERT)
  if unknown:
    raise ValueError(f"{file.path} has unknown metadata {unknown}.")
  for key, neutral in _NEUTRAL.items():
    if own.get(key, neutral) != neutral:
      raise ValueError(
        f"{file.path} has {arch}.{key}={own[key]}; only {neutral} is supported."
      )

  def need(key: str):
    if key not in own:
      raise ValueError(f"{file.path} lacks {arch}.{key}.")
    return own[key]

  for name in ("model.embed_tokens.weight", "model.norm.weight"):
    if name not in names:
      raise ValueError(f"{file.path} lacks {file_name(name)}.")
  d_model, n_heads = need("embedding_length"), need("attention.head_count")
  n_kv = own.get("attention.head_count_kv", n_heads)
  for key, value in (("head_count", n_heads), ("head_count_kv", n_kv)):
    if not isinstance(value, int):
      raise ValueError(
        f"{file.path} has {arch}.attention.{key}={value}; only one number for"
        " all layers is supported."
      )
  n_rotated = own.get("rope.dimension_count")
  head_dim = own.get("attention.key_length") or n_rotated or d_model // n_heads
  for key in ("attention.value_length", "rope.dimension_count"):
    if own.get(key, head_dim) != head_dim:
      raise ValueError(
        f"{file.path} has {arch}.{key}={own[key]}, but head_dim={head_dim};"
        " they must be equal."
      )
  vocab = file.shapes["model.embed_tokens.weight"][0]
  if own.get("vocab_size", vocab) != vocab:
    raise ValueError(
      f"{file.path} has {arch}.vocab_size={own['vocab_size']}, but"
      f" {vocab} rows in token_embd.weight."
    )
  context = need("context_length")
  first = "model.layers.0."
  return ModelConfig(
    model_type=arch,
    vocab=vocab,
    d_model=d_model,
    n_layers=need("block_count"),
    n_heads=n_heads,
    n_kv_heads=n_kv,
    head_dim=head_dim,
    d_ff=need("feed_forward_length"),
    max_positions=context,
    norm_eps=need("attention.layer_norm_rms_epsilon"),
    rope=_rope(arch, own, divisors, context, file.path),
    tied="lm_head.weight" not in names,
    qkv_bias=first + "self_attn.q_proj.bias" in names,
    o_bias=first + "self_attn.o_proj.bias" in names,
    mlp_bias=first + "mlp.gate_proj.bias" in names,
    qk_norm=arch == "qwen3",
  )


def _rope(arch, own, divisors, context, path) -> RopeConfig:
  theta = float(own.get("rope.freq_base", 10000.0))
  kind = own.get("rope.scaling.type", "none")
  factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
  if "rope.scaling.type" not in own and factor not in (0.0, 1.0):
    kind = "linear"  # files older than rope.scaling.type
  if divisors:
    if kind != "none":
      raise ValueError(
        f"{path} has both {_ROPE_FREQS} and {arch}.rope.scaling.type={kind!r};"
        " only one of them is supported."
      )
    return RopeConfig(theta=theta, kind="divisors", divisors=divisors)
  if kind == "none":
    return RopeConfig(theta=theta)
  if kind == "linear":
    return RopeConfig(theta=theta, kind="linear", factor=float(factor))
  if kind == "yarn":
    return RopeConfig(
      theta=theta,
      kind="yarn",
      factor=float(factor),
      original_max_positions=own.get(
        "rope.scaling.original_context_length", context
      ),
      beta_fast=float(own.get("rope.scaling.yarn_beta_fast", 32.0)),
      beta_slow=float(own.get("rope.scaling.yarn_beta_slow", 1.0)),
    )
  raise ValueError(
    f"{path} has {arch}.rope.scaling.type={kind!r}; supported are none,"
    " linear and yarn."
  )


def file_name(hf_name: str) -> str:
  """The GGUF spelling of a Hugging Face tensor name, for messages."""
  for ours, hf in _TOP.items():
    if hf == hf_name:
      return ours
  return hf_name
