"""Rolling token perplexity with realised sparsity, and threshold calibration.

Perplexity: the whole text is tokenised once, no start token is added, windows
do not overlap, the first token of a window is not scored, and the mean is over
tokens, never over windows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wide_jax import data, flops, routing, step, weights
from wide_jax.axes import Tree
from wide_jax.config import BudgetConfig, Method, RouteConfig
from wide_jax.modules import Decoder
from wide_jax.tokenizers import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Score:
  """Perplexity on one text and the sparsity realised on it.

  Attributes:
    nll: mean negative log-likelihood of a token, nats.
    tokens: scored tokens.
    sparsity: {"mean", "attention", "ffn", "flops"}, empty when dense.
    keep: {"attn": f64[L,Ga], "ffn": f64[L,Gf]} share of tokens that kept each
      group, empty when dense.
  """

  nll: float
  tokens: int
  sparsity: dict[str, float]
  keep: dict[str, np.ndarray]

  @property
  def ppl(self) -> float:
    return math.exp(min(self.nll, 700.0))

  def to_json(self) -> dict[str, Any]:
    out: dict[str, Any] = {
      "ppl": self.ppl,
      "nll": self.nll,
      "tokens": self.tokens,
    }
    if self.sparsity:
      out["sparsity"] = dict(self.sparsity)
    return out


def window_batches(windows: dict, rows: int) -> list[dict]:
  """Cuts [n, W] arrays into batches of `rows`; the last is padded.

  Padding rows have segment 0 and weight 0: they count nowhere.
  """
  n = len(windows["ids"])
  if not n:
    raise ValueError("there is no window to evaluate.")
  out = []
  for start in range(0, n, rows):
    part = {k: v[start : start + rows] for k, v in windows.items()}
    lack = rows - len(part["ids"])
    if lack:
      part = {
        k: np.concatenate([v, np.zeros((lack, *v.shape[1:]), v.dtype)])
        for k, v in part.items()
      }
    out.append(part)
  return out


class Evaluator:
  """Compiled evaluation of one decoder; variables are arguments.

  Args:
    decoder: with its route and adapters.
    place: host batch -> device batch (sharding is the caller's).
    macs: flops.LayerMacs at the window length.
  """

  def __init__(self, decoder: Decoder, place: Callable, macs):
    self.decoder, self.macs = decoder, macs
    self._place = place
    self._score = jax.jit(functools.partial(step.eval_step, decoder))
    curves = decoder.copy(capture=("curves",))
    self._curves = jax.jit(functools.partial(step.eval_step, curves))

  def _sums(self, fn, variables, thresholds, batches: Iterable[dict]):
    """Adds up one pass on the host in float64."""
    total = None
    pending = None
    for batch in batches:
      ready = pending
      pending = fn(variables, self._place(batch), thresholds)  # runs ahead
      if ready is not None:
        total = _add(total, ready)
    return _add(total, pending)

  def score(self, variables: Tree, thresholds, batches) -> Score:
    """One pass over `batches` at fixed thresholds (None: all gates open)."""
    if thresholds is not None:
      thresholds = {
        k: jnp.asarray(v, jnp.float32) for k, v in thresholds.items()
      }
    sums = self._sums(self._score, variables, thresholds, batches)
    sparsity, keep = {}, {}
    if thresholds is not None:
      skips = routing.skip_rates(sums["kept"], sums["tokens"])
      sparsity = {
        k: float(v) for k, v in routing.sparsity(skips, self.macs).items()
      }
      keep = {
        k: np.asarray(v) / sums["tokens"] for k, v in sums["kept"].items()
      }
    targets = float(sums["targets"])
    if targets == 0:
      raise ValueError("the text has no token to score.")
    return Score(float(sums["nll"]) / targets, int(targets), sparsity, keep)

  def calibrate(self, variables: Tree, batches, budget: BudgetConfig):
    """Thresholds that realise the target on `batches`.

    Starts from 0 whatever happened before, so that a resumed run finds the
    same thresholds as a straight one.

    Returns:
      (thresholds {"attn": f32[L], "ffn": f32[L]}, remaining gap).
    """
    layers = self.decoder.model.n_layers
    start = {k: np.zeros(layers, np.float32) for k in routing.KINDS}
    groups = self.decoder.route.groups(self.decoder.model)

    def measure(thresholds):
      given = {k: jnp.asarray(v) for k, v in thresholds.items()}
      sums = self._sums(self._curves, variables, given, batches)
      curves = {
        k: 1.0 - np.asarray(v) / (groups[k] * sums["tokens"])
        for k, v in sums["curves"].items()
      }
      skips = routing.skip_rates(sums["kept"], sums["tokens"])
      return routing.Measurement(
        {k: np.asarray(v) for k, v in skips.items()}, curves
      )

    return routing.calibrate(measure, start, budget, self.macs)


def _add(total, part):
  part = jax.tree.map(lambda a: np.asarray(a, np.float64), part)
  if total is None:
    return part
  return jax.tree.map(np.add, total, part)


def perplexity_of_path(
  path: str,
  text: str,
  window: int = 2048,
  dtype: str = "float32",
  max_tokens: int = 0,
) -> float:
  """Rolling token perplexity of a dense model on disk.

  Args:
    path: what `weights.load_params` takes.
    text: a text file, or `embedded`.
    window: tokens a window; stride = window.
    dtype: compute dtype.
    max_tokens: of the text; 0 for all.
  """
  loaded = weights.load_params(path, dtype=dtype)
  ids = data.text_ids([text], load_tokenizer(path), max_tokens=max_tokens)
  batches = window_batches(data.eval_windows(ids, window), 1)
  decoder = Decoder(loaded.config, dtype=jnp.dtype(dtype))
  macs = flops.layer_macs(
    loaded.config, RouteConfig(method=Method.DENSE), window
  )
  place = functools.partial(jax.tree.map, jnp.asarray)
  evaluator = Evaluator(decoder, place, macs)
  return evaluator.score({"params": loaded.params}, None, batches).ppl
