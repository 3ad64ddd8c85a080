"""Gates, rates, the budget and threshold calibration, without a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_fixtures import MODEL, ROUTE, jit, token_ids

from wide_jax import flops, routing
from wide_jax.config import BudgetConfig
from wide_jax.routing import KINDS, OFFSETS, Measurement

MACS = flops.layer_macs(MODEL, ROUTE, 16)


# --- the gate ----------------------------------------------------------------


@pytest.mark.parametrize("tau", [5.0, 0.5, 0.01])
def test_straight_through_is_hard_forward_and_soft_backward(tau):
  rng = np.random.default_rng(0)
  logits = jnp.asarray(2 * rng.standard_normal((5, 7)), jnp.float32)
  noise = jnp.asarray(rng.logistic(size=(5, 7)), jnp.float32)
  logits = logits.at[0, 0].set(-noise[0, 0])  # soft is 1/2: dropped

  def hard(logits):
    return routing.straight_through(logits, noise, tau)

  for run in (hard, jax.jit(hard)):
    got = np.asarray(run(logits))
    assert set(np.unique(got)) == {0.0, 1.0}
    np.testing.assert_array_equal(got, np.asarray(logits + noise) > 0)
    assert got[0, 0] == 0
  weights = jnp.asarray(rng.standard_normal((5, 7)), jnp.float32)
  got = jax.grad(lambda x: (hard(x) * weights).sum())(logits)
  z = np.float64(logits + noise) / tau
  soft = 1 / (1 + np.exp(-z))
  want = np.asarray(weights) * soft * (1 - soft) / tau
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6 / tau)


def test_given_decisions_replace_the_hard_ones_alone():
  """A replayed decision is what it was; its gradient stays the soft one's."""
  rng = np.random.default_rng(1)
  logits, noise, weights = (
    jnp.asarray(rng.standard_normal((6, 8)), jnp.float32) for _ in range(3)
  )
  given = jnp.asarray(rng.random((6, 8)) < 0.5)
  own = logits + noise > 0
  assert (given != own).any() and (given == own).any()

  def value(logits, hard):
    keep = routing.straight_through(logits, noise, 0.7, hard)
    return (keep * weights).sum(), keep

  grad = jax.jit(jax.grad(value, has_aux=True))
  slope, keep = grad(logits, given)
  np.testing.assert_array_equal(keep, np.asarray(given, np.float32))
  free_slope, free = grad(logits, None)
  np.testing.assert_array_equal(free, np.asarray(own, np.float32))
  np.testing.assert_array_equal(slope, free_slope)


def test_temperature_is_linear():
  tau = (5.0, 0.5)
  assert routing.temperature(0, 10, tau) == 5.0
  assert routing.temperature(9, 10, tau) == 0.5
  np.testing.assert_allclose(routing.temperature(3, 10, tau), 3.5, rtol=1e-6)
  assert routing.temperature(20, 10, tau) == 0.5  # never past the end
  assert routing.temperature(0, 1, tau) == 5.0
  traced = jax.jit(lambda s: routing.temperature(s, 10, tau))(jnp.int32(3))
  np.testing.assert_allclose(traced, 3.5, rtol=1e-6)


# --- the hash ----------------------------------------------------------------


def test_hash_is_uniform():
  """Chi-square over 64 cells, and no ties between layers, groups, tokens."""
  u = np.asarray(
    routing.hash_uniform(
      jnp.asarray(token_ids(4, 32))[..., None],
      jnp.arange(32)[None, :, None],
      jnp.int32(6),
      jnp.arange(96)[None, None],
    )
  )
  assert u.shape == (4, 32, 96) and u.dtype == np.float32
  assert u.min() > 0 and u.max() < 1
  counts = np.bincount((u * 64).astype(int).ravel(), minlength=64)
  mean = u.size / 64
  chi = ((counts - mean) ** 2 / mean).sum()
  # Mean 63, standard deviation sqrt(126): within five of them.
  assert abs(chi - 63) <= 5 * np.sqrt(126)
  flat = u.reshape(-1, 96)
  limit = 5 / np.sqrt(len(flat))
  between = np.corrcoef(flat[:, :12].T)[np.triu_indices(12, 1)]
  assert np.abs(between).max() <= limit
  other = np.asarray(
    routing.hash_uniform(
      jnp.asarray(token_ids(4, 32))[..., None],
      jnp.arange(32)[None, :, None],
      jnp.int32(7),
      jnp.arange(96)[None, None],
    )
  )
  corr = np.corrcoef(u.ravel(), other.ravel())[0, 1]
  assert abs(corr) <= 5 / np.sqrt(u.size)


def test_hash_depends_on_its_integers_alone():
  ids = jnp.asarray(token_ids(3, 8))
  both = routing.hash_uniform(ids[..., None], jnp.arange(5)[None, None])
  one = routing.hash_uniform(ids[1:2, 3:6, None], jnp.arange(5)[None, None])
  np.testing.assert_array_equal(one, both[1:2, 3:6])
  again = jax.jit(routing.hash_uniform)(
    ids[..., None], jnp.arange(5)[None, None]
  )
  np.testing.assert_array_equal(again, both)


def preimage(hashed: int) -> int:
  """The integer whose last state is `hashed`: the mix run backwards."""
  full = 0xFFFFFFFF
  h = hashed ^ (hashed >> 16)
  h = h * pow(0xC2B2AE35, -1, 1 << 32) & full
  h = h ^ (h >> 13) ^ (h >> 26)
  h = h * pow(0x85EBCA6B, -1, 1 << 32) & full
  return h ^ 0x9E3779B9


def test_the_extremes_of_the_hash_lie_inside_0_1():
  """1 would be an infinite logit, kept at any threshold."""
  for hashed in (0, 0xFFFFFFFF):
    u = routing.hash_uniform(jnp.uint32(preimage(hashed)))
    assert 0 < u < 1
    assert abs(u - (hashed > 0)) < 2.0**-22
    assert np.isfinite(jnp.log(u) - jnp.log1p(-u))


# --- rates and the budget ----------------------------------------------------


def test_rates_by_hand():
  """Two layers, 10 tokens, 9 head groups and 6 channel groups."""
  kept = {"attn": np.full((2, 9), 10.0), "ffn": np.full((2, 6), 10.0)}
  kept["attn"][0, :3] = 1.0  # 27 of 90 skipped
  kept["ffn"][1] = [0, 0, 0, 10, 10, 10]
  kept = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), kept)
  skips = routing.skip_rates(kept, jnp.float32(10.0))
  np.testing.assert_allclose(skips["attn"], [0.3, 0.0], atol=1e-6)
  np.testing.assert_allclose(skips["ffn"], [0.0, 0.5], atol=1e-6)
  got = routing.sparsity(skips, MACS)
  assert got["attention"] == pytest.approx(0.15, abs=1e-6)
  assert got["ffn"] == pytest.approx(0.25, abs=1e-6)
  assert got["mean"] == pytest.approx(0.2, abs=1e-6)
  # D 24, N H 72, K H 24, F 96, R 5, T 16: multiply-adds a token and layer.
  attn = 2 * 24 * 72 + 2 * 72 * 17 / 2
  ffn, kv, router = 3 * 24 * 96, 2 * 24 * 24, 5 * (24 + 9) + 5 * (24 + 6)
  share = (0.3 * attn + 0.5 * ffn) / (2 * (attn + ffn + kv + router))
  assert got["flops"] == pytest.approx(share, abs=1e-6)


def test_rates_without_groups_or_tokens_are_finite():
  nothing = {"attn": jnp.zeros((2, 0)), "ffn": jnp.zeros((2, 6))}
  skips = routing.skip_rates(nothing, jnp.float32(0.0))
  np.testing.assert_array_equal(skips["attn"], [0, 0])
  assert np.isfinite(skips["ffn"]).all()


def test_budget_by_hand():
  rates = {"mean": 0.2, "attention": 0.15, "ffn": 0.25, "flops": 0.1}
  cases = [
    (dict(target=0.5, alpha=20.0), 6.0),
    (dict(target=0.1, alpha=20.0), 2.0),
    (dict(target=0.5, alpha=0.0), 0.0),
    (dict(target=0.5, alpha=10.0, rate="flops"), 4.0),
    (
      dict(
        attn_target=0.65,
        ffn_target=0.15,
        alpha=10.0,
        thresholds="per_kind",
      ),
      10 * 0.5 * (0.5 + 0.1),
    ),
  ]
  for changes, want in cases:
    got = routing.budget_loss(rates, BudgetConfig(**changes))
    assert got == pytest.approx(want), changes


def test_budget_gradient_pushes_towards_the_target():
  def value(rate, target):
    rates = {"mean": rate}
    return routing.budget_loss(rates, BudgetConfig(target=target, alpha=20.0))

  assert jax.grad(value)(0.2, 0.5) == -20.0
  assert jax.grad(value)(0.7, 0.5) == 20.0


def test_candidate_counts():
  rng = np.random.default_rng(0)
  logits = jnp.asarray(3 * rng.standard_normal((2, 5, 7)), jnp.float32)
  weights = jnp.asarray(rng.integers(0, 2, (2, 5)), jnp.float32)
  got = jit(routing.candidate_counts)(logits, weights, jnp.float32(0.3))
  at = np.float32(0.3) + OFFSETS
  kept = np.asarray(logits)[..., None] > at
  want = (kept * np.asarray(weights)[..., None, None]).sum((0, 1, 2))
  np.testing.assert_array_equal(got, want)


def test_offsets_are_sorted_around_0_and_reach_far():
  assert (np.diff(OFFSETS) > 0).all() and len(OFFSETS) == 141
  assert OFFSETS[70] == 0
  np.testing.assert_allclose(OFFSETS[[0, -1]], [-40, 40], rtol=1e-5)


# --- calibration -------------------------------------------------------------


class Synthetic:
  """A text whose logits fall where more was skipped in the layers before.

  `feedback` is how far a fully skipped layer moves all later logits: the rate
  at a new threshold is not the one that the old pass's curve promised.
  """

  def __init__(self, layers=2, feedback=1.5, tokens=4000, seed=0):
    rng = np.random.default_rng(seed)
    self.feedback, self.passes = feedback, 0
    self.base = {
      "attn": rng.normal(1.0, 2.0, (layers, tokens)),
      "ffn": rng.normal(-0.5, 0.7, (layers, tokens)),
    }
    for kind in KINDS:  # layers differ too
      self.base[kind] += np.linspace(-1, 2, layers)[:, None]

  def __call__(self, thresholds) -> Measurement:
    self.passes += 1
    layers = len(self.base["attn"])
    skips = {k: np.zeros(layers) for k in KINDS}
    curves = {k: np.zeros((layers, len(OFFSETS))) for k in KINDS}
    moved = 0.0
    for i in range(layers):
      for kind in KINDS:
        logits = np.sort(self.base[kind][i] - moved)
        at = thresholds[kind][i] + OFFSETS
        curves[kind][i] = np.searchsorted(logits, at, "right") / len(logits)
        skip = np.searchsorted(logits, thresholds[kind][i], "right")
        skips[kind][i] = skip / len(logits)
        moved += self.feedback * skips[kind][i] / layers
    return Measurement(skips, curves)


def start(layers=2):
  return {k: np.zeros(layers, np.float32) for k in KINDS}


TOLERANCE = 5e-4


def find(budget, text=None, macs=MACS):
  text = text or Synthetic()
  got, gap = routing.calibrate(text, start(), budget, macs)
  assert all(got[k].dtype == np.float32 for k in KINDS)
  return got, gap, text(got).skips


@pytest.mark.parametrize("target", [0.1, 0.5, 0.85])
@pytest.mark.parametrize("rate", ["mean", "flops"])
@pytest.mark.parametrize("thresholds", ["global", "per_kind", "per_layer"])
def test_calibration_meets_the_target(thresholds, rate, target):
  if rate == "flops":
    target *= 0.8  # K, V and routers are never skipped
  budget = BudgetConfig(target=target, rate=rate, thresholds=thresholds)
  got, gap, skips = find(budget)
  assert gap <= TOLERANCE
  realised = float(routing.sparsity(skips, MACS)[rate])
  assert abs(realised - target) <= TOLERANCE + 1e-6
  if thresholds == "global":
    assert len({*got["attn"], *got["ffn"]}) == 1
  else:
    # Every kind, or every layer, has the rate that was asked for.
    want = skips["attn"].mean()
    rates = {
      "per_kind": [skips[k].mean() for k in KINDS],
      "per_layer": np.concatenate([skips[k] for k in KINDS]),
    }[thresholds]
    np.testing.assert_allclose(rates, want, atol=2 * TOLERANCE)
    if rate == "mean":
      np.testing.assert_allclose(rates, target, atol=TOLERANCE + 1e-6)
  if thresholds == "per_kind":
    assert all(len({*got[k]}) == 1 for k in KINDS)


@pytest.mark.parametrize("thresholds", ["per_kind", "per_layer"])
def test_separate_targets(thresholds):
  budget = BudgetConfig(attn_target=0.7, ffn_target=0.25, thresholds=thresholds)
  _, gap, skips = find(budget)
  assert gap <= TOLERANCE
  for kind, want in (("attn", 0.7), ("ffn", 0.25)):
    atol = TOLERANCE + 1e-6
    np.testing.assert_allclose(skips[kind].mean(), want, atol=atol)
    if thresholds == "per_layer":
      np.testing.assert_allclose(skips[kind], want, atol=atol)


@pytest.mark.parametrize("thresholds", ["global", "per_kind", "per_layer"])
@pytest.mark.parametrize("target", [0.0, 1.0])
def test_nothing_and_everything(target, thresholds):
  budget = BudgetConfig(target=target, thresholds=thresholds)
  got, gap, skips = find(budget)
  assert gap == 0 and all((skips[k] == target).all() for k in KINDS)
  assert all(np.isfinite(got[k]).all() for k in KINDS)


def test_a_mean_that_is_right_by_chance_is_not_enough():
  """Thresholds 0 skip 0.5 on average, but 0.9 and 0.1 by kind."""
  text = Synthetic(feedback=0.0)
  spread = np.linspace(-1, 1, 4001)[:-1] + 1e-9
  text.base = {
    "attn": np.stack([spread - 0.8] * 2),
    "ffn": np.stack([spread + 0.8] * 2),
  }
  budget = BudgetConfig(target=0.5, thresholds="per_kind")
  _, gap, skips = find(budget, text)
  assert gap <= TOLERANCE
  np.testing.assert_allclose(skips["attn"], 0.5, atol=TOLERANCE + 1e-6)
  np.testing.assert_allclose(skips["ffn"], 0.5, atol=TOLERANCE + 1e-6)


def test_strong_feedback_still_ends_and_the_best_is_returned():
  text = Synthetic(feedback=6.0)
  _, gap, skips = find(BudgetConfig(target=0.5), text)
  assert text.passes <= 13  # twelve, and this test's own
  realised = 0.5 * sum(skips[k].mean() for k in KINDS)
  assert abs(abs(realised - 0.5) - gap) < 1e-6
  assert gap <= 0.005  # the project's promise: half a point


def test_a_gap_between_scores_is_met_in_its_middle():
  """Static scores: half at -1, half at 1; any threshold between is right."""
  text = Synthetic(feedback=0.0)
  text.base = {k: np.asarray([[-1.0, 1.0]] * 2) for k in KINDS}
  got, gap, _ = find(BudgetConfig(target=0.5), text)
  assert gap == 0 and np.abs(got["attn"]).max() < 0.9
