"""Pure maths of width decisions: gates, budget, statistics, calibration.

Source: WIDE, token-level dynamic width pruning, arXiv 2607.28418. A gate is
`keep = logits > threshold` at inference (a logit equal to its threshold is
dropped) and a Gumbel-sigmoid with a hard straight-through decision in
training.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from wide_jax import flops
from wide_jax.config import BudgetConfig

KINDS = ("attn", "ffn")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
  """How the decoder decides, for all layers.

  Attributes:
    mode: `open` (keep everything), `train` (noisy, straight-through),
      `threshold` (inference) or `forced` (masks are given).
    key: PRNG key, `train` only.
    tau: temperature, float32 [], `train` only.
    thresholds: {"attn": f32[L], "ffn": f32[L]}, `threshold` only.
    masks: {"attn": bool[L,B,T,Ga], "ffn": bool[L,B,T,Gf]}. `forced` keeps
      these; `train` takes them for its hard decisions where they are given,
      with the gradient of its own soft ones.
  """

  mode: str = dataclasses.field(metadata={"static": True}, default="open")
  key: Any = None
  tau: Any = None
  thresholds: Any = None
  masks: Any = None


def threshold_gate(thresholds) -> Gate:
  """The inference gate; thresholds is {"attn": [L], "ffn": [L]}."""
  return Gate(
    mode="threshold",
    thresholds={k: jnp.asarray(thresholds[k], jnp.float32) for k in KINDS},
  )


def straight_through(
  logits: Float[Array, "*shape"],
  noise: Float[Array, "*noise"],
  tau,
  hard: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*shape"]:
  """Hard 0/1 decision forward, gradient of the soft one backward.

  soft = sigmoid((logits + noise) / tau); keep = hard(soft > 1/2) +
  soft - stop_gradient(soft). The difference is taken first, so that the
  forward value is exactly 0 or 1. `hard` replays given decisions: forward they
  replace the own ones, backward nothing changes.
  """
  soft = jax.nn.sigmoid((logits + noise) / tau)
  if hard is None:
    hard = logits + noise > 0
  return hard.astype(logits.dtype) + (soft - jax.lax.stop_gradient(soft))


def temperature(step, steps: int, tau: tuple[float, float]):
  """tau at `step` of `steps`: linear, tau[0] at step 0, tau[1] at the last."""
  share = step / max(steps - 1, 1)
  return tau[0] + (tau[1] - tau[0]) * jnp.clip(share, 0.0, 1.0)


def hash_uniform(*parts) -> Array:
  """Uniform float32 in (0, 1) from integer arrays that broadcast together.

  A fixed integer mix (multiply, xor-shift, as in MurmurHash3's finaliser): a
  value depends on its own integers alone, never on shape, batch or device.
  """
  h = jnp.uint32(0x9E3779B9)
  for part in parts:
    h = h ^ jnp.asarray(part).astype(jnp.uint32)
    h = h * jnp.uint32(0x85EBCA6B)
    h = h ^ (h >> 13)
    h = h * jnp.uint32(0xC2B2AE35)
    h = h ^ (h >> 16)
  # 23 bits and a half: with one bit more, the largest would round to 1.
  return ((h >> 9).astype(jnp.float32) + 0.5) * (1.0 / (1 << 23))


# --- rates -------------------------------------------------------------------


def skip_rates(kept: dict, tokens) -> dict:
  """Per-layer skip rates from kept counts.

  Args:
    kept: {"attn": f32[L,Ga], "ffn": f32[L,Gf]}, tokens that kept each group.
    tokens: number of tokens counted (pads excluded).

  Returns:
    {"attn": f32[L], "ffn": f32[L]}; all zeros where there are no groups.
  """
  out = {}
  for kind in KINDS:
    k_LG = kept[kind]
    if k_LG.shape[-1]:
      out[kind] = 1.0 - k_LG.mean(-1) / jnp.maximum(tokens, 1.0)
    else:
      out[kind] = jnp.zeros(k_LG.shape[:1], jnp.float32)
  return out


def sparsity(skips: dict, macs) -> dict:
  """Scalars {"mean", "attention", "ffn", "flops"} from per-layer skip rates.

  `mean` is the published rate: the average of the two layer means. `flops` is
  the skipped share of all decoder-layer multiply-adds (see flops.py).
  """
  attn, ffn = skips["attn"].mean(), skips["ffn"].mean()
  return {
    "mean": 0.5 * (attn + ffn),
    "attention": attn,
    "ffn": ffn,
    "flops": flops.skipped_share(skips["attn"], skips["ffn"], macs),
  }


def target_rate(budget: BudgetConfig, macs) -> float:
  """What `budget.rate` should become, also where targets are separate."""
  if budget.attn_target is None or budget.ffn_target is None:
    return budget.target
  ones = np.ones(macs.layers)
  skips = {"attn": budget.attn_target * ones, "ffn": budget.ffn_target * ones}
  return float(sparsity(skips, macs)[budget.rate])


def budget_loss(rates: dict, budget: BudgetConfig):
  """alpha * |target - rate|, or the mean of two such terms for two targets."""
  if budget.attn_target is not None:
    gap = 0.5 * (
      jnp.abs(budget.attn_target - rates["attention"])
      + jnp.abs(budget.ffn_target - rates["ffn"])
    )
  else:
    gap = jnp.abs(budget.target - rates[budget.rate])
  return budget.alpha * gap


# --- threshold calibration ---------------------------------------------------

# Candidate offsets around the present thresholds: dense near 0, reaching +-40.
OFFSETS = np.sinh(np.linspace(-7.0, 7.0, 141)).astype(np.float32) * np.float32(
  40.0 / np.sinh(7.0)
)


def candidate_counts(
  logits_BTG: Float[Array, "B T G"], weights_BT: Float[Array, "B T"], threshold
) -> Float[Array, " O"]:
  """Weighted number of kept (token, group) pairs at threshold + OFFSETS."""

  def one(offset):
    keep_BTG = logits_BTG > threshold + offset
    return jnp.einsum("BTG,BT->", keep_BTG.astype(jnp.float32), weights_BT)

  return jax.lax.map(one, jnp.asarray(OFFSETS))


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One pass over calibration text with fixed thresholds.

  Attributes:
    skips: {"attn": f64[L], "ffn": f64[L]}, realised.
    curves: {"attn": f64[L,O], "ffn": f64[L,O]}, skip rate of each layer at
      its threshold + OFFSETS, with the residuals of this pass.
  """

  skips: dict
  curves: dict


def calibrate(
  measure: Callable[[dict], Measurement],
  start: dict,
  budget: BudgetConfig,
  macs,
  *,
  tolerance: float = 5e-4,
  passes: int = 12,
) -> tuple[dict, float]:
  """Finds thresholds whose realised rate equals the target.

  Dropping a group changes every later residual, so the rate at a new threshold
  is known only after a pass with it: each pass moves the thresholds by the
  offset at which its own curve meets the target, until the realised rate does.

  Args:
    measure: thresholds -> Measurement, one pass over the calibration text.
    start: {"attn": f32[L], "ffn": f32[L]}.
    budget: target, rate and the kind of threshold (one, per kind, per layer).
    macs: flops.LayerMacs for the flops-weighted rate.
    tolerance: stop when within this of the target.
    passes: give up improving after so many passes; the best is returned.

  Returns:
    (thresholds {"attn": f32[L], "ffn": f32[L]}, largest remaining gap).
  """
  thresholds = {k: np.asarray(start[k], np.float32) for k in KINDS}
  best, best_gap = thresholds, np.inf
  damping = 1.0
  for _ in range(passes):
    seen = measure(thresholds)
    gap = _gap(seen.skips, budget, macs)
    if gap < best_gap:
      best, best_gap = thresholds, gap
    else:
      damping = max(0.5 * damping, 0.1)  # overshoot: smaller moves
    if gap <= tolerance:
      break
    move = _offsets(seen.curves, budget, macs)
    thresholds = {
      k: thresholds[k] + np.float32(damping) * move[k].astype(np.float32)
      for k in KINDS
    }
  return best, float(best_gap)


def _kind_targets(budget: BudgetConfig, macs) -> dict:
  """Skip rate wanted of each kind where kinds or layers are set apart."""
  if budget.attn_target is not None and budget.ffn_target is not None:
    return {"attn": budget.attn_target, "ffn": budget.ffn_target}
  if budget.rate == "flops":
    return _flops_targets(budget.target, macs)
  return {k: budget.target for k in KINDS}


def _gap(skips: dict, budget: BudgetConfig, macs) -> float:
  """Distance from the target; the largest where several are set.

  `per_kind` and `per_layer` ask every kind, or every layer, for its rate: a
  mean that happens to be right is not enough.
  """
  gaps = []
  if budget.attn_target is None:
    rates = sparsity(skips, macs)
    gaps.append(abs(float(rates[budget.rate]) - budget.target))
  if budget.thresholds != "global":
    for kind, want in _kind_targets(budget, macs).items():
      rate_L = np.asarray(skips[kind], np.float64)
      if budget.thresholds == "per_kind":
        rate_L = rate_L.mean(keepdims=True)
      gaps.append(float(np.abs(rate_L - want).max()))
  return max(gaps)


def _offsets(curves: dict, budget: BudgetConfig, macs) -> dict:
  """Per-layer threshold moves at which the curves meet the target."""
  layers = curves["attn"].shape[0]
  if budget.thresholds == "global":
    at = [
      sparsity({k: curves[k][:, i] for k in KINDS}, macs)[budget.rate]
      for i in range(len(OFFSETS))
    ]
    move = _crossing(np.asarray(at, np.float64), budget.target)
    return {k: np.full(layers, move) for k in KINDS}
  want = _kind_targets(budget, macs)
  if budget.thresholds == "per_kind":
    return {
      k: np.full(layers, _crossing(curves[k].mean(0), want[k])) for k in KINDS
    }
  return {
    k: np.asarray([_crossing(curve, want[k]) for curve in curves[k]])
    for k in KINDS
  }


def _flops_targets(target: float, macs) -> dict:
  """Equal skip rates for both kinds that together skip `target` of the MACs."""
  ones = np.ones(macs.layers)
  most = float(flops.skipped_share(ones, ones, macs))
  return {k: min(target / max(most, 1e-9), 1.0) for k in KINDS}


def _crossing(rates: np.ndarray, target: float) -> float:
  """Offset at which a non-decreasing curve over OFFSETS reaches `target`.

  Where no decision lies near (a plateau), the middle of the gap is taken.
  """
  rates = np.maximum.accumulate(rates)
  low = np.searchsorted(rates, target - 1e-9, side="left")
  high = np.searchsorted(rates, target + 1e-9, side="right")
  if high > low:  # the curve is flat at the target
    return float(0.5 * (OFFSETS[low] + OFFSETS[high - 1]))
  if low == 0:
    return float(OFFSETS[0])
  if low == len(OFFSETS):
    return float(OFFSETS[-1])
  a, b = rates[low - 1], rates[low]
  share = (target - a) / (b - a)
  return float(OFFSETS[low - 1] + share * (OFFSETS[low] - OFFSETS[low - 1]))
