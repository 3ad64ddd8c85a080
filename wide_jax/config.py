"""Frozen, validated configuration of a model and of a run.

Configuration enters once, as an `ml_collections.ConfigDict` or as the
`config.json` of a Hugging Face model, and is turned here into dataclasses that
refuse nonsense. Inner code never sees a ConfigDict.
"""

import dataclasses
import enum
import math
import typing
from collections.abc import Mapping
from typing import Any

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "divisors")
_REMAT = ("none", "dots", "full")
_DTYPES = ("float32", "bfloat16", "float16")


def _check(ok: bool, message: str) -> None:
  if not ok:
    raise ValueError(message)


def _one_of(name: str, value: Any, allowed) -> None:
  _check(value in allowed, f"{name}={value!r} must be one of {tuple(allowed)}.")


def _at_least(name: str, value: float, low: float) -> None:
  _check(value >= low, f"{name}={value} must be at least {low}.")


def _within(name: str, value: float, low: float, high: float) -> None:
  _check(low <= value <= high, f"{name}={value} must lie in [{low}, {high}].")


def from_config_dict(cls, cfg: Mapping[str, Any]):
  """Builds dataclass `cls` from a mapping, using every key of it.

  Nested dataclass fields are built from nested mappings; lists become tuples.

  Raises:
    ValueError: naming the unknown keys and the known ones.
  """
  fields = {f.name: f for f in dataclasses.fields(cls)}
  unknown = sorted(set(cfg) - set(fields))
  if unknown:
    raise ValueError(
      f"{cls.__name__} has no {unknown}; it has {sorted(fields)}."
    )
  values = {}
  for name, value in cfg.items():
    kind = _dataclass_of(fields[name].type)
    if kind is not None and isinstance(value, Mapping):
      value = from_config_dict(kind, value)
    elif isinstance(value, list):
      value = tuple(value)
    values[name] = value
  return cls(**values)


def _dataclass_of(annotation):
  """The dataclass in an annotation such as `Lora | None`, or None."""
  for kind in (annotation, *typing.get_args(annotation)):
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
      return kind
  return None


# --- the model ---------------------------------------------------------------


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
    _one_of("rope_type", self.kind, _ROPE_KINDS)
    _check(self.theta > 0, f"rope_theta={self.theta} must be positive.")
    _at_least("rope factor", self.factor, 1.0)
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
    scaling = dict(cfg.get("rope_scaling") or cfg.get("rope_parameters") or {})
    kind = scaling.pop("rope_type", None)
    alias = scaling.pop("type", None)
    kind = kind or alias or "default"
    _one_of("rope_type", kind, _ROPE_KINDS[:-1])
    theta = scaling.pop("rope_theta", None) or cfg.get("rope_theta") or 10000.0
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
    _check(partial == 1.0, f"partial_rotary_factor={partial} is not supported.")
    names = {f.name for f in dataclasses.fields(cls)} - {"divisors"}
    unknown = sorted(set(scaling) - names)
    _check(not unknown, f"rope_scaling has unknown keys {unknown}.")
    values = {k: v for k, v in scaling.items() if v is not None}
    if kind == "yarn":
      values.setdefault("factor", longest / original)
    missing = sorted(set(_ROPE_NEEDS.get(kind, ())) - set(values))
    _check(not missing, f"rope_type={kind!r} lacks {missing}.")
    odd = {
      k: v
      for k, v in values.items()
      if isinstance(v, bool) != (k == "truncate")
      or not isinstance(v, int | float)
    }
    _check(not odd, f"rope_scaling has {odd}; want numbers.")
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
      _at_least(name, getattr(self, name), 1)
    if self.n_heads % self.n_kv_heads:
      raise ValueError(
        f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}."
      )
    _check(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even.")
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
    _check(
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
    _one_of("model_type", kind, tuple(_HF_DEFAULTS))
    quantised = cfg.get("quantization_config")
    _check(not quantised, f"quantization_config={quantised} is not supported.")
    needed = (
      "vocab_size",
      "hidden_size",
      "num_hidden_layers",
      "num_attention_heads",
      "intermediate_size",
    )
    missing = sorted(set(needed) - set(cfg))
    _check(not missing, f"config.json lacks {missing}.")
    for name in (*needed, *_HF_DEFAULTS[kind], "head_dim"):
      value = cfg.get(name)
      whole = isinstance(value, int) and not isinstance(value, bool)
      if not whole and (value is not None or name in needed):
        raise ValueError(f"config.json has {name}={value!r}; want an integer.")
    act = cfg.get("hidden_act", "silu")
    _one_of("hidden_act", act, ("silu", "swish"))
    tp = cfg.get("pretraining_tp", 1) or 1
    _check(tp == 1, f"pretraining_tp={tp} is not supported; want 1.")
    n_heads = cfg["num_attention_heads"]
    d_model = cfg["hidden_size"]
    head_dim = cfg.get("head_dim")
    if not head_dim and kind == "qwen3":
      head_dim = 128
    if not head_dim:
      _check(
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
      norm_eps=cfg.get("rms_norm_eps", 1e-6),
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
  _check(not odd, f"layer_types holds {odd}; want {_SLIDING} or {_FULL}.")
  _check(
    len(types) == n, f"{len(types)} layer_types for num_hidden_layers={n}."
  )
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


# --- routing and adapters ----------------------------------------------------


class Method(enum.StrEnum):
  """What decides the width; all are configurations of the same code."""

  WIDE = "wide"  # per token: head groups and channel groups (arXiv 2607.28418)
  TOKEN_DEPTH = "token_depth"  # per token: a whole sublayer (SkipGPT-like)
  LAYER_SKIP = "layer_skip"  # per token: a whole layer, one decision
  STATIC_WIDTH = "static_width"  # the same groups for every token
  RANDOM = "random"  # wide groups, drawn at random per token
  DENSE = "dense"  # everything


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteConfig:
  """How width is decided.

  Attributes:
    method: see `Method`.
    attn_group: query heads a group.
    ffn_group: FFN channels a group, a power of two from 16 up.
    rank: R, the width between a router's two linear maps.
    router_input: `residual` (before the sublayer's norm) or `normed` (after).
    logit_init: initial router logit; P(keep) = sigmoid(logit_init).
    static_scores: how `static_width` ranks groups: `activation` (measured
      once on calibration text) or `learned` (stage 1 trains them).
  """

  method: Method | str = Method.WIDE
  attn_group: int = 1
  ffn_group: int = 32
  rank: int = 32
  router_input: str = "residual"
  logit_init: float = 2.0
  static_scores: str = "activation"

  def __post_init__(self):
    _one_of("method", self.method, [m.value for m in Method])
    object.__setattr__(self, "method", Method(self.method))
    _at_least("attn_group", self.attn_group, 1)
    c = self.ffn_group
    if c < 16 or c & (c - 1):
      raise ValueError(f"ffn_group={c} must be a power of two from 16 up.")
    _at_least("rank", self.rank, 1)
    _one_of("router_input", self.router_input, ("residual", "normed"))
    _one_of("static_scores", self.static_scores, ("activation", "learned"))
    _check(
      math.isfinite(self.logit_init),
      f"logit_init={self.logit_init} is not finite.",
    )

  def check_against(self, model: ModelConfig) -> None:
    """Raises ValueError where the groups do not fit the model."""
    if self.method in (Method.DENSE, Method.TOKEN_DEPTH, Method.LAYER_SKIP):
      return
    if model.d_ff % self.ffn_group:
      raise ValueError(
        f"ffn_group={self.ffn_group} must divide d_ff={model.d_ff}."
      )
    if model.n_heads % self.attn_group:
      raise ValueError(
        f"attn_group={self.attn_group} must divide n_heads={model.n_heads}."
      )
    share = model.n_heads // model.n_kv_heads
    if self.attn_group % share and share % self.attn_group:
      raise ValueError(
        f"attn_group={self.attn_group} must divide, or be a multiple of, the"
        f" {share} query heads that share a kv head."
      )

  def groups(self, model: ModelConfig) -> dict[str, int]:
    """Number of groups of each kind: {"attn": Ga, "ffn": Gf}."""
    if self.method in (Method.TOKEN_DEPTH, Method.LAYER_SKIP):
      return {"attn": 1, "ffn": 1}
    if self.method is Method.DENSE:
      return {"attn": 0, "ffn": 0}
    return {
      "attn": model.n_heads // self.attn_group,
      "ffn": model.d_ff // self.ffn_group,
    }


LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

  rank: int = 16
  alpha: float = 32.0
  dropout: float = 0.1
  rank_stabilised: bool = False
  targets: tuple[str, ...] = LORA_TARGETS

  def __post_init__(self):
    _at_least("lora rank", self.rank, 1)
    _check(
      0 <= self.dropout < 1, f"lora dropout={self.dropout} must lie in [0, 1)."
    )
    unknown = sorted(set(self.targets) - set(LORA_TARGETS))
    _check(not unknown, f"lora targets {unknown} must be among {LORA_TARGETS}.")

  @property
  def scale(self) -> float:
    """alpha / r, or alpha / sqrt(r) where rank-stabilised."""
    root = math.sqrt(self.rank) if self.rank_stabilised else self.rank
    return self.alpha / root


# --- the run -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
  """Which model to start from and how to hold it.

  `path` is what `wide_jax.load` takes, or `random` for random weights in the
  shape of the Hugging Face keys in `shape`; `tokenizer` defaults to the
  model's own.
  """

  path: str = "embedded"
  tokenizer: str = ""
  dtype: str = "bfloat16"
  remat: str = "none"
  attention: str = "auto"
  shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    _one_of("model.dtype", self.dtype, _DTYPES)
    _one_of("model.remat", self.remat, _REMAT)
    _one_of(
      "model.attention",
      self.attention,
      ("auto", "xla", "cudnn", "cudnn_mask", "triton", "splash"),
    )
    if (self.path == "random") != bool(self.shape):
      raise ValueError(
        "model.shape goes with model.path='random', and only there."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """Where text comes from and how it becomes rows of `seq_len` tokens.

  Relative paths are taken from the directory given by `--data`.

  Attributes:
    train: files, globs, directories, hub ids (`hf:NAME[:CONFIG][:SPLIT]`) or
      `embedded`.
    calibration: held-out text for thresholds; one half sets them, the other
      checks them.
    text_key: JSON / parquet column that holds the text.
    chat: rows are chats (`messages`); only replies are targets.
    packing: `packed` (documents share rows, attention kept apart) or `single`
      (one document a row, padded).
    cache_dir: where tokens are kept; empty for `WORKDIR/cache`.
  """

  train: tuple[str, ...] = ("embedded",)
  calibration: tuple[str, ...] = ("embedded",)
  text_key: str = "text"
  chat: bool = False
  packing: str = "packed"
  seq_len: int = 1024
  batch_size: int = 16
  cache_dir: str = ""
  max_tokens: int = 0

  def __post_init__(self):
    for name in ("train", "calibration"):
      value = getattr(self, name)
      if isinstance(value, str):
        object.__setattr__(self, name, (value,))
      _check(bool(getattr(self, name)), f"data.{name} names no text.")
    _one_of("data.packing", self.packing, ("packed", "single"))
    _at_least("data.seq_len", self.seq_len, 2)
    _at_least("data.batch_size", self.batch_size, 1)
    _at_least("data.max_tokens", self.max_tokens, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
  """Rolling token perplexity on one text, and threshold calibration.

  Attributes:
    text: a text file or `embedded`.
    windows: window lengths in tokens; stride = window; the first is the one
      that `summary.json` calls `ppl`.
    max_tokens: evaluate at most so many tokens; 0 for all.
    batch_size: windows a batch.
    every: steps between evaluations inside a stage; 0 for only at its end.
    calibration_tokens: tokens of the held-out text used by calibration, both
      halves together; 0 for all.
  """

  text: str = "embedded"
  windows: tuple[int, ...] = (2048,)
  max_tokens: int = 0
  batch_size: int = 8
  every: int = 0
  calibration_tokens: int = 65536

  def __post_init__(self):
    _check(bool(self.windows), "eval.windows is empty.")
    for w in self.windows:
      _at_least("eval window", w, 2)
    for name in ("max_tokens", "every", "calibration_tokens"):
      _at_least(f"eval.{name}", getattr(self, name), 0)
    _at_least("eval.batch_size", self.batch_size, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetConfig:
  """The sparsity target and how it is enforced.

  Attributes:
    target: share to skip, of `rate`.
    rate: `mean` (average of the two skip rates, as published) or `flops`
      (skipped share of all decoder-layer multiply-adds).
    attn_target, ffn_target: separate targets; both or neither.
    alpha: weight of |target - rate|.
    thresholds: `global` (one), `per_kind` (attention and FFN) or `per_layer`.
  """

  target: float = 0.5
  rate: str = "mean"
  attn_target: float | None = None
  ffn_target: float | None = None
  alpha: float = 20.0
  thresholds: str = "global"

  def __post_init__(self):
    _within("budget.target", self.target, 0.0, 1.0)
    _one_of("budget.rate", self.rate, ("mean", "flops"))
    _one_of(
      "budget.thresholds", self.thresholds, ("global", "per_kind", "per_layer")
    )
    _at_least("budget.alpha", self.alpha, 0.0)
    if (self.attn_target is None) != (self.ffn_target is None):
      raise ValueError(
        f"budget.attn_target={self.attn_target} and budget.ffn_target="
        f"{self.ffn_target}: give both or neither."
      )
    for name in ("attn_target", "ffn_target"):
      if getattr(self, name) is not None:
        _within(f"budget.{name}", getattr(self, name), 0.0, 1.0)
        if self.thresholds == "global":
          raise ValueError(
            "separate targets need budget.thresholds='per_kind'."
          )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegroupConfig:
  """Channel regrouping before the routers are trained (`regroup.py`)."""

  enabled: bool = True
  tokens: int = 4096
  directions: int = 48
  iterations: int = 20

  def __post_init__(self):
    for name in ("tokens", "directions", "iterations"):
      _at_least(f"regroup.{name}", getattr(self, name), 1)


class Phase(enum.StrEnum):
  ROUTERS = "routers"  # backbone frozen, routers calibrated
  RECOVER = "recover"  # LoRA and (unless frozen) routers tuned together
  DENSE_LORA = "dense_lora"  # the same LoRA on the dense model, to compare


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
  """One training stage. `steps` counts optimiser steps; 0 leaves it out.

  Attributes:
    lr, end_lr: peak and final learning rate; warm-up is linear from 0 over
      `warmup` (a share of the steps), then cosine. Step 0 uses rate 0 where
      there is a warm-up.
    weight_decay: AdamW decay of LoRA leaves; `router_weight_decay` of routers.
    accumulate: micro-batches an optimiser step.
    tau: temperature at the first and the last step, linear between.
    kl: weight of KL(dense || pruned) added to the language-model loss.
    train_routers: recover stage only; False freezes them.
  """

  steps: int = 0
  lr: float = 2e-3
  end_lr: float = 0.0
  warmup: float = 0.1
  weight_decay: float = 0.01
  router_weight_decay: float = 0.0
  clip: float = 1.0
  accumulate: int = 1
  tau: tuple[float, float] = (5.0, 0.5)
  kl: float = 0.0
  train_routers: bool = True

  def __post_init__(self):
    _at_least("steps", self.steps, 0)
    _at_least("lr", self.lr, 0.0)
    _at_least("end_lr", self.end_lr, 0.0)
    _within("warmup", self.warmup, 0.0, 1.0)
    _at_least("weight_decay", self.weight_decay, 0.0)
    _at_least("router_weight_decay", self.router_weight_decay, 0.0)
    _check(self.clip > 0, f"clip={self.clip} must be positive.")
    _at_least("accumulate", self.accumulate, 1)
    _at_least("kl", self.kl, 0.0)
    _check(
      len(self.tau) == 2 and min(self.tau) > 0,
      f"tau={self.tau} must be two positive numbers.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Devices along each axis; -1 once for "what is left"."""

  data: int = -1
  fsdp: int = 1
  tensor: int = 1

  def __post_init__(self):
    sizes = (self.data, self.fsdp, self.tensor)
    bad = [s for s in sizes if s != -1 and s < 1]
    _check(
      not bad and sizes.count(-1) <= 1,
      f"mesh {sizes} must hold positive sizes and at most one -1.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """Steps between checkpoints, and how many to keep a stage."""

  every: int = 100
  keep: int = 2

  def __post_init__(self):
    _at_least("checkpoint.every", self.every, 1)
    _at_least("checkpoint.keep", self.keep, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Everything `wide_jax.train` does, in one validated object."""

  seed: int = 17
  device: str = "auto"
  model: ModelSource = ModelSource()
  route: RouteConfig = RouteConfig()
  lora: LoraConfig = LoraConfig()
  budget: BudgetConfig = BudgetConfig()
  regroup: RegroupConfig = RegroupConfig()
  data: DataConfig = DataConfig()
  eval: EvalConfig = EvalConfig()
  routers: StageConfig = StageConfig(steps=1000)
  recover: StageConfig = StageConfig(steps=1000, lr=2e-4)
  dense_lora: StageConfig = StageConfig(steps=0, lr=2e-4)
  mesh: MeshConfig = MeshConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  log_every: int = 10

  def __post_init__(self):
    _one_of("device", self.device, ("auto", "cpu", "gpu", "tpu"))
    _at_least("log_every", self.log_every, 1)
    if self.route.method is Method.LAYER_SKIP:
      targets = self.budget.attn_target, self.budget.ffn_target
      if targets[0] != targets[1]:
        raise ValueError(
          f"layer_skip makes one decision a layer: budget.attn_target="
          f"{targets[0]} and budget.ffn_target={targets[1]} must be equal."
        )

  def stage(self, phase: Phase) -> StageConfig:
    return getattr(self, phase.value)
