"""The shape of a LLaMA-family model, read from a Hugging Face config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from wide_jax.checks import at_least, check, one_of

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "divisors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding; `rope.py` turns it into frequencies.

  `kind` is a Hugging Face `rope_type`, or `divisors` for the explicit
  per-frequency divisors that GGUF files carry in `rope_freqs.weight`.
  """

  theta: float = 10000.0
  kind: str = "default"
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_positions: int | None = None
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True
  divisors: tuple[float, ...] = ()

  def __post_init__(self):
    one_of("rope_type", self.kind, _ROPE_KINDS)
    check(self.theta > 0, f"rope_theta={self.theta} must be positive.")
    at_least("rope factor", self.factor, 1.0)
    if self.kind in ("llama3", "yarn") and not self.original_max_positions:
      raise ValueError(
        f"rope_type={self.kind!r} needs original_max_position_embeddings."
      )
    if self.kind == "divisors" and not self.divisors:
      raise ValueError("rope_type='divisors' needs the divisors.")

  @classmethod
  def from_hf(cls, cfg: Mapping[str, Any]) -> "RopeConfig":
    """Reads `rope_scaling` with `rope_theta`, or transformers 5's
    `rope_parameters`, by the rules of transformers 5.

    Raises:
      ValueError: an unknown rope type or key, or one that the type needs.
    """
    scaling = cfg.get("rope_scaling") or cfg.get("rope_parameters") or {}
    check(
      isinstance(scaling, Mapping),
      f"rope_scaling={scaling!r} must be an object.",
    )
    scaling = dict(scaling)
    kind = scaling.pop("rope_type", None)
    alias = scaling.pop("type", None)
    kind = kind or alias or "default"
    one_of("rope_type", kind, _ROPE_KINDS[:-1])
    theta = scaling.pop("rope_theta", None) or cfg.get("rope_theta") or 10000.0
    number = isinstance(theta, int | float) and not isinstance(theta, bool)
    check(number and theta > 0, f"rope_theta={theta!r} must be positive.")
    longest = cfg.get("max_position_embeddings") or _hf_default(
      cfg.get("model_type", "llama"), "max_position_embeddings"
    )
    original = scaling.pop("original_max_position_embeddings", None)
    if kind == "dynamic":
      original = longest  # the only length that transformers looks at
    elif kind in ("yarn", "llama3"):
      outer = cfg.get("original_max_position_embeddings")
      original = outer or original or longest
    partial = scaling.pop("partial_rotary_factor", None)
    partial = partial or cfg.get("partial_rotary_factor") or 1.0
    check(partial == 1.0, f"partial_rotary_factor={partial} is not supported.")
    names = {f.name for f in dataclasses.fields(cls)} - {"divisors"}
    unknown = sorted(set(scaling) - names)
    check(not unknown, f"rope_scaling has unknown keys {unknown}.")
    values = {k: v for k, v in scaling.items() if v is not None}
    if kind == "yarn":
      values.setdefault("factor", longest / original)
    missing = sorted(set(_ROPE_NEEDS.get(kind, ())) - set(values))
    check(not missing, f"rope_type={kind!r} lacks {missing}.")
    odd = {
      k: v
      for k, v in values.items()
      if isinstance(v, bool) != (k == "truncate")
      or not isinstance(v, int | float)
    }
    check(not odd, f"rope_scaling has {odd}; want numbers.")
    return cls(
      theta=float(theta),
      kind=kind,
      original_max_positions=original,
      **values,
    )

  def to_hf(self) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which transformers 4 and 5 read.

    Raises:
      ValueError: explicit divisors, which Hugging Face has no name for.
    """
    if self.kind == "divisors":
      raise ValueError(
        "a config.json cannot hold explicit rope divisors (rope_freqs.weight)."
      )
    scaling: dict[str, Any] = {"rope_type": self.kind}
    if self.kind != "default":
      scaling["factor"] = self.factor
    if self.kind in ("llama3", "yarn"):
      scaling["original_max_position_embeddings"] = self.original_max_positions
    if self.kind == "llama3":
      scaling["low_freq_factor"] = self.low_freq_factor
      scaling["high_freq_factor"] = self.high_freq_factor
    if self.kind == "yarn":
      for name in (
        "beta_fast beta_slow attention_factor mscale mscale_all_dim truncate"
      ).split():
        if getattr(self, name) is not None:
          scaling[name] = getattr(self, name)
    return {
      "rope_theta": self.theta,
      "rope_scaling": None if self.kind == "default" else scaling,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Shape of one LLaMA-family decoder.

  `windows` holds one sliding-window length a layer, 0 for full attention.
  """

  model_type: str = "llama"
  vocab: int
  d_model: int
  n_layers: int
  n_heads: int
  n_kv_heads: int
  head_dim: int
  d_ff: int
  max_positions: int = 2048
  norm_eps: float = 1e-5
  rope: RopeConfig = RopeConfig()
  tied: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  windows: tuple[int, ...] = ()

  def __post_init__(self):
    for name in (
      "vocab d_model n_layers n_heads n_kv_heads head_dim d_ff max_positions"
    ).split():
      at_least(name, getattr(self, name), 1)
    if self.n_heads % self.n_kv_heads:
      raise ValueError(
        f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}."
      )
    check(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even.")
    if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
      raise ValueError(
        f"{len(self.rope.divisors)} rope divisors for head_dim={self.head_dim};"
        f" want {self.head_dim // 2}."
      )
    if not self.windows:
      object.__setattr__(self, "windows", (0,) * self.n_layers)
    if len(self.windows) != self.n_layers:
      raise ValueError(
        f"{len(self.windows)} windows for n_layers={self.n_layers}."
      )
    check(
      min(self.windows) >= 0, f"windows={self.windows} must not be negative."
    )

  @classmethod
  def from_hf(cls, cfg: Mapping[str, Any]) -> "ModelConfig":
    """Reads a Hugging Face `config.json` mapping.

    Raises:
      ValueError: a model type, activation or key that is not supported, by
        name and value.
    """
    kind: Any = cfg.get("model_type")
    one_of("model_type", kind, tuple(_HF_DEFAULTS))
    quantised = cfg.get("quantization_config")
    check(not quantised, f"quantization_config={quantised} is not supported.")
    needed = (
      "vocab_size",
      "hidden_size",
      "num_hidden_layers",
      "num_attention_heads",
      "intermediate_size",
    )
    missing = sorted(set(needed) - set(cfg))
    check(not missing, f"config.json lacks {missing}.")
    for name in (*needed, *_HF_DEFAULTS[kind], "head_dim"):
      value = cfg.get(name)
      whole = isinstance(value, int) and not isinstance(value, bool)
      if not whole and (value is not None or name in needed):
        raise ValueError(f"config.json has {name}={value!r}; want an integer.")
    if cfg.get("max_position_embeddings", 1) is None:
      raise ValueError("config.json has max_position_embeddings=None.")
    eps = cfg.get("rms_norm_eps", 1e-6)
    number = isinstance(eps, int | float) and not isinstance(eps, bool)
    check(number and 0 <= eps < 1, f"rms_norm_eps={eps!r} must lie in [0, 1).")
    act = cfg.get("hidden_act", "silu")
    one_of("hidden_act", act, ("silu", "swish"))
    tp = cfg.get("pretraining_tp", 1) or 1
    check(tp == 1, f"pretraining_tp={tp} is not supported; want 1.")
    n_heads = cfg["num_attention_heads"]
    d_model = cfg["hidden_size"]
    head_dim = cfg.get("head_dim")
    if not head_dim and kind == "qwen3":
      head_dim = 128
    if not head_dim:
      check(
        d_model % n_heads == 0,
        f"num_attention_heads={n_heads} must divide hidden_size={d_model}.",
      )
      head_dim = d_model // n_heads
    bias = bool(cfg.get("attention_bias", False))
    return cls(
      model_type=kind,
      vocab=cfg["vocab_size"],
      d_model=d_model,
      n_layers=cfg["num_hidden_layers"],
      n_heads=n_heads,
      # null means "as many as query heads"; absent, the class's default.
      n_kv_heads=_hf_value(kind, cfg, "num_key_value_heads") or n_heads,
      head_dim=head_dim,
      d_ff=cfg["intermediate_size"],
      max_positions=_hf_value(kind, cfg, "max_position_embeddings"),
      norm_eps=eps,
      rope=RopeConfig.from_hf(cfg),
      tied=bool(cfg.get("tie_word_embeddings", False)),
      qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3") and bias),
      o_bias=kind in ("llama", "qwen3") and bias,
      mlp_bias=kind == "llama" and bool(cfg.get("mlp_bias", False)),
      qk_norm=kind == "qwen3",
      windows=_windows(kind, cfg),
    )

  def to_hf(self) -> dict[str, Any]:
    """The keys of `config.json` that describe this model.

    Raises:
      ValueError: something that no config of this `model_type` can say.
    """
    kind = self.model_type
    attn_bias = {
      "llama": self.qkv_bias,
      "qwen3": self.qkv_bias,
      "qwen2": False,  # its q, k, v always have one
      "mistral": False,
    }[kind]
    said = (
      self.qkv_bias == (attn_bias or kind == "qwen2"),
      self.o_bias == attn_bias,
      not self.mlp_bias or kind == "llama",
      self.qk_norm == (kind == "qwen3"),
    )
    if not all(said):
      raise ValueError(
        f"a {kind} config.json cannot say qkv_bias={self.qkv_bias},"
        f" o_bias={self.o_bias}, mlp_bias={self.mlp_bias},"
        f" qk_norm={self.qk_norm}."
      )
    return {
      "model_type": kind,
      "vocab_size": self.vocab,
      "hidden_size": self.d_model,
      "num_hidden_layers": self.n_layers,
      "num_attention_heads": self.n_heads,
      "num_key_value_heads": self.n_kv_heads,
      "head_dim": self.head_dim,
      "intermediate_size": self.d_ff,
      "max_position_embeddings": self.max_positions,
      "rms_norm_eps": self.norm_eps,
      "tie_word_embeddings": self.tied,
      "attention_bias": attn_bias,
      "mlp_bias": self.mlp_bias,
      "hidden_act": "silu",
      **self.rope.to_hf(),
      **_windows_to_hf(kind, self.windows),
    }


# Where config.json leaves a key out, the class in transformers decides.
_HF_DEFAULTS = {
  "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
  "mistral": {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
  },
  "qwen2": {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
  },
}
_HF_DEFAULTS["qwen3"] = _HF_DEFAULTS["qwen2"]

_ROPE_NEEDS = {
  "linear": ("factor",),
  "dynamic": ("factor",),
  "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _hf_default(kind: str, key: str) -> Any:
  return _HF_DEFAULTS.get(kind, _HF_DEFAULTS["llama"])[key]


def _hf_value(kind: str, cfg: Mapping[str, Any], key: str) -> Any:
  return cfg[key] if key in cfg else _hf_default(kind, key)


def _windows(kind: str, cfg: Mapping[str, Any]) -> tuple[int, ...]:
  """One window a layer, as transformers decides it; 0 is full attention."""
  n = cfg["num_hidden_layers"]
  if kind == "llama":
    return (0,) * n
  window = _hf_value(kind, cfg, "sliding_window") or 0
  if kind == "mistral":
    return (window,) * n
  if not window or not cfg.get("use_sliding_window", False):
    return (0,) * n
  types = cfg.get("layer_types")
  if types is None:
    first = _hf_value(kind, cfg, "max_window_layers")
    types = [_SLIDING if i >= first else _FULL for i in range(n)]
  odd = sorted(set(types) - {_SLIDING, _FULL})
  check(not odd, f"layer_types holds {odd}; want {_SLIDING} or {_FULL}.")
  check(len(types) == n, f"{len(types)} layer_types for num_hidden_layers={n}.")
  return tuple(window if t == _SLIDING else 0 for t in types)


_SLIDING, _FULL = "sliding_attention", "full_attention"


def _windows_to_hf(kind: str, windows: tuple[int, ...]) -> dict[str, Any]:
  sizes = sorted(set(windows) - {0})
  if kind == "llama" and not sizes:
    return {}
  mixed = len(set(windows)) > 1
  if kind == "llama" or len(sizes) > 1 or (kind == "mistral" and mixed):
    raise ValueError(f"a {kind} config.json cannot say windows={windows}.")
  window = sizes[0] if sizes else None
  if kind == "mistral":
    return {"sliding_window": window}
  return {
    "use_sliding_window": bool(sizes),
    "sliding_window": window,
    "layer_types": [_SLIDING if w else _FULL for w in windows],
  }
