"""Frozen, validated configuration of routing and of a run.

Configuration enters once, as an `ml_collections.ConfigDict`, and is turned here
into dataclasses that refuse nonsense. Inner code never sees a ConfigDict.
"""

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from wide_jax.checks import at_least, check, one_of, within
from wide_jax.model_config import ModelConfig

_REMAT = ("none", "dots", "full")
_DTYPES = ("float32", "bfloat16", "float16")


def from_config_dict(cls, cfg: Any):
  """Builds dataclass `cls` from a mapping, using every key of it.

  Nested dataclass fields are built from nested mappings; lists become tuples.

  Raises:
    ValueError: naming the unknown keys and the known ones, those that are
      missing, or a value of another type than its field's.
  """
  check(isinstance(cfg, Mapping), f"{cls.__name__}: {cfg!r} has no fields.")
  fields = {f.name: f for f in dataclasses.fields(cls)}
  missing = [
    name
    for name, field in fields.items()
    if name not in cfg
    and field.default is field.default_factory is dataclasses.MISSING
  ]
  check(not missing, f"{cls.__name__} lacks {missing}.")
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
    else:
      value = tuple(value) if isinstance(value, list) else value
      kind = fields[name].type
      if not _fits(value, kind):
        shown = kind.__name__ if isinstance(kind, type) else kind
        raise ValueError(
          f"{cls.__name__}.{name}={value!r} must be of type {shown}, and no"
          " number without end."
        )
    values[name] = value
  return cls(**values)


def _fits(value: Any, kind: Any) -> bool:
  """Whether `value` is what the annotation `kind` of a field says."""
  args = typing.get_args(kind)
  if kind is Any:
    return True
  if typing.get_origin(kind) is tuple:
    if args[-1] is ...:
      return isinstance(value, tuple) and all(_fits(v, args[0]) for v in value)
    return (
      isinstance(value, tuple)
      and len(value) == len(args)
      and all(map(_fits, value, args))
    )
  if typing.get_origin(kind) in (typing.Union, types.UnionType):
    return any(_fits(value, k) for k in args)
  if kind is float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
  if kind is int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and abs(value) < 2**63  # what an array can hold
  return isinstance(value, typing.get_origin(kind) or kind)


def _dataclass_of(annotation):
  """The dataclass in an annotation such as `Lora | None`, or None."""
  for kind in (annotation, *typing.get_args(annotation)):
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
      return kind
  return None


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
    one_of("method", self.method, [m.value for m in Method])
    object.__setattr__(self, "method", Method(self.method))
    at_least("attn_group", self.attn_group, 1)
    c = self.ffn_group
    if c < 16 or c & (c - 1):
      raise ValueError(f"ffn_group={c} must be a power of two from 16 up.")
    at_least("rank", self.rank, 1)
    one_of("router_input", self.router_input, ("residual", "normed"))
    one_of("static_scores", self.static_scores, ("activation", "learned"))
    check(
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
    at_least("lora rank", self.rank, 1)
    check(
      0 <= self.dropout < 1, f"lora dropout={self.dropout} must lie in [0, 1)."
    )
    unknown = sorted(set(self.targets) - set(LORA_TARGETS))
    check(not unknown, f"lora targets {unknown} must be among {LORA_TARGETS}.")

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
    one_of("model.dtype", self.dtype, _DTYPES)
    one_of("model.remat", self.remat, _REMAT)
    one_of(
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
      check(bool(getattr(self, name)), f"data.{name} names no text.")
    one_of("data.packing", self.packing, ("packed", "single"))
    at_least("data.seq_len", self.seq_len, 2)
    at_least("data.batch_size", self.batch_size, 1)
    at_least("data.max_tokens", self.max_tokens, 0)


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
    check(bool(self.windows), "eval.windows is empty.")
    for w in self.windows:
      at_least("eval window", w, 2)
    for name in ("max_tokens", "every", "calibration_tokens"):
      at_least(f"eval.{name}", getattr(self, name), 0)
    at_least("eval.batch_size", self.batch_size, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetConfig:
  """The sparsity target and how it is enforced.

  Attributes:
    target: share to skip, of `rate`; not used where there are separate targets.
    rate: `mean` (average of the two skip rates, as published) or `flops`
      (skipped share of all decoder-layer multiply-adds).
    attn_target, ffn_target: separate targets; both or neither.
    alpha: weight of |target - rate|.
    thresholds: what calibration moves. `global`: one threshold, so that kinds
      and layers keep the shares that the routers learnt. `per_kind` and
      `per_layer` hold each kind, or each kind in each layer, to the target by
      itself, whatever the routers learnt.
  """

  target: float = 0.5
  rate: str = "mean"
  attn_target: float | None = None
  ffn_target: float | None = None
  alpha: float = 20.0
  thresholds: str = "global"

  def __post_init__(self):
    within("budget.target", self.target, 0.0, 1.0)
    one_of("budget.rate", self.rate, ("mean", "flops"))
    one_of(
      "budget.thresholds", self.thresholds, ("global", "per_kind", "per_layer")
    )
    at_least("budget.alpha", self.alpha, 0.0)
    if (self.attn_target is None) != (self.ffn_target is None):
      raise ValueError(
        f"budget.attn_target={self.attn_target} and budget.ffn_target="
        f"{self.ffn_target}: give both or neither."
      )
    for name in ("attn_target", "ffn_target"):
      if getattr(self, name) is not None:
        within(f"budget.{name}", getattr(self, name), 0.0, 1.0)
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
      at_least(f"regroup.{name}", getattr(self, name), 1)


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
    at_least("steps", self.steps, 0)
    at_least("lr", self.lr, 0.0)
    at_least("end_lr", self.end_lr, 0.0)
    within("warmup", self.warmup, 0.0, 1.0)
    at_least("weight_decay", self.weight_decay, 0.0)
    at_least("router_weight_decay", self.router_weight_decay, 0.0)
    check(self.clip > 0, f"clip={self.clip} must be positive.")
    at_least("accumulate", self.accumulate, 1)
    at_least("kl", self.kl, 0.0)
    check(
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
    check(
      not bad and sizes.count(-1) <= 1,
      f"mesh {sizes} must hold positive sizes and at most one -1.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """Steps between checkpoints, and how many to keep a stage."""

  every: int = 100
  keep: int = 2

  def __post_init__(self):
    at_least("checkpoint.every", self.every, 1)
    at_least("checkpoint.keep", self.keep, 1)


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
    within("seed", self.seed, 0, 2**32 - 1)  # what jax tells apart
    one_of("device", self.device, ("auto", "cpu", "gpu", "tpu"))
    at_least("log_every", self.log_every, 1)
    if self.route.method is Method.LAYER_SKIP:
      targets = self.budget.attn_target, self.budget.ffn_target
      if targets[0] != targets[1]:
        raise ValueError(
          f"layer_skip makes one decision a layer: budget.attn_target="
          f"{targets[0]} and budget.ffn_target={targets[1]} must be equal."
        )

  def stage(self, phase: Phase) -> StageConfig:
    return getattr(self, phase.value)
