"""Rolling perplexity, realised sparsity, thresholds on a model (trial I3)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_fixtures import (
  MODEL,
  VOCAB,
  WIDE,
  forward,
  lora,
  model,
  thresholds,
  token_ids,
  variables,
)

from wide_jax import data, evaluate, flops, paths
from wide_jax.config import BudgetConfig, Method, RouteConfig
from wide_jax.evaluate import Evaluator, Score, window_batches
from wide_jax.modules import Decoder
from wide_jax.routing import KINDS
from wide_jax.tokenizers import load_tokenizer

WINDOW = 8
TEXT = token_ids(1, 20, 2)[0]


def on_device(batch):
  return {k: jnp.asarray(v) for k, v in batch.items()}


def evaluator_of(decoder, window=WINDOW):
  route = decoder.route or RouteConfig(method=Method.DENSE)
  macs = flops.layer_macs(decoder.model, route, window)
  return Evaluator(decoder, on_device, macs)


def batches_of(ids, rows, window=WINDOW):
  return window_batches(data.eval_windows(ids, window), rows)


@pytest.fixture(scope="module")
def held():
  return variables(WIDE)


@pytest.fixture(scope="module")
def wide():
  return evaluator_of(WIDE)


def level(value):
  return {k: np.full(2, value, np.float32) for k in KINDS}


# --- perplexity --------------------------------------------------------------


def brute_nll(logits_of, ids, window):
  """One list entry a scored token; windows alone, first token not scored."""
  out = []
  for at in range(0, len(ids), window):
    part = ids[at : at + window]
    if len(part) < 2:
      continue
    logits = np.float64(logits_of(part[None]))[0]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    out.append([-log_p[t, part[t + 1]] for t in range(len(part) - 1)])
  return out


@pytest.mark.parametrize("length", [20, 17, 5])
def test_tokens_are_averaged_not_windows(length, wide, held):
  """20 tokens: windows of 7, 7 and 3 scored tokens; 17 leave one alone."""
  ids = TEXT[:length]
  windows = brute_nll(
    lambda part: forward(WIDE, held, part, thresholds(0.1))[0], ids, WINDOW
  )
  flat = np.concatenate(windows)
  score = wide.score(held, level(0.1), batches_of(ids, 2))
  assert score.tokens == len(flat) == {20: 17, 17: 14, 5: 4}[length]
  # float32 logarithms of about 4.
  np.testing.assert_allclose(score.nll, flat.mean(), rtol=1e-5)
  assert score.ppl == pytest.approx(math.exp(score.nll))
  if length == 20:
    means = np.mean([np.mean(w) for w in windows])
    assert abs(score.nll - means) > 1e-3  # what the faulty mean would say


def test_a_zero_head_gives_the_vocabulary(held):
  decoder = Decoder(model(tied=False))
  zero = variables(decoder)
  zero["params"]["head"]["kernel"] = jnp.zeros_like(
    zero["params"]["head"]["kernel"]
  )
  score = evaluator_of(decoder).score(zero, None, batches_of(TEXT, 2))
  assert score.tokens == 17
  # ln 53 in float32 is off by 2^-23 at most, and so is its exponential.
  assert score.ppl == pytest.approx(VOCAB, rel=4 * 2.0**-22)
  assert score.sparsity == {} and score.keep == {}
  assert set(score.to_json()) == {"ppl", "nll", "tokens"}


def test_padding_rows_and_tokens_count_nowhere(wide, held):
  """Three windows in batches of 1, 2 (one padded) and 5 (two padded)."""
  scores = [
    wide.score(held, level(0.1), batches_of(TEXT, rows)) for rows in (1, 2, 5)
  ]
  for score in scores[1:]:
    assert score.tokens == scores[0].tokens
    np.testing.assert_allclose(score.nll, scores[0].nll, rtol=1e-6)
    assert score.sparsity == pytest.approx(scores[0].sparsity, abs=1e-6)
    for kind in KINDS:
      np.testing.assert_allclose(
        score.keep[kind], scores[0].keep[kind], atol=1e-6
      )
  whole = batches_of(TEXT, 5)[0]
  assert whole["ids"].shape == (5, WINDOW)
  assert not whole["segments"][3:].any() and not whole["weights"][3:].any()


def test_realised_sparsity_is_that_of_the_masks(wide, held):
  batches = batches_of(TEXT, 3)
  score = wide.score(held, level(0.1), batches)
  real = batches[0]["segments"] > 0
  assert real.sum() == 20  # the last token is routed, though not scored
  _, aux = forward(
    WIDE,
    held,
    batches[0]["ids"],
    thresholds(0.1),
    batches[0]["segments"],
    batches[0]["positions"],
  )
  keep = {k: m[:, real].mean(1) for k, m in aux["masks"].items()}
  for kind, name in (("attn", "attention"), ("ffn", "ffn")):
    np.testing.assert_allclose(score.keep[kind], keep[kind], atol=1e-6)
    skip = 1 - keep[kind].mean()
    assert score.sparsity[name] == pytest.approx(skip, abs=1e-6)
  both = score.sparsity["attention"] + score.sparsity["ffn"]
  assert score.sparsity["mean"] == pytest.approx(both / 2, abs=1e-6)
  skips = {k: 1 - keep[k].mean(1) for k in KINDS}
  want = flops.skipped_share(skips["attn"], skips["ffn"], wide.macs)
  assert score.sparsity["flops"] == pytest.approx(float(want), abs=1e-6)
  assert score.to_json()["sparsity"] == score.sparsity


def test_no_thresholds_is_the_dense_model(wide, held):
  dense = evaluator_of(Decoder(MODEL))
  got = wide.score(held, None, batches_of(TEXT, 2))
  want = dense.score({"params": held["params"]}, None, batches_of(TEXT, 2))
  np.testing.assert_allclose(got.nll, want.nll, rtol=1e-6)
  assert got.sparsity == {}


def test_dropout_is_off(held):
  """The same score twice, and that of adapters without dropout."""
  decoder = Decoder(MODEL, None, lora(dropout=0.5))
  own = variables(decoder, 3)
  ours = evaluator_of(decoder)
  first, again = (ours.score(own, None, batches_of(TEXT, 2)) for _ in range(2))
  assert first.nll == again.nll
  plain = evaluator_of(Decoder(MODEL, None, lora()))
  assert plain.score(own, None, batches_of(TEXT, 2)).nll == first.nll


def test_nothing_to_score_is_refused(wide, held):
  with pytest.raises(ValueError, match="no window"):
    window_batches({"ids": np.zeros((0, 8), np.int32)}, 2)
  batches = batches_of(TEXT, 3)
  batches[0]["weights"] = np.zeros_like(batches[0]["weights"])
  with pytest.raises(ValueError, match="no token to score"):
    wide.score(held, level(0.1), batches)


def test_a_hopeless_model_still_has_a_finite_perplexity():
  assert math.isfinite(Score(1e6, 3, {}, {}).ppl)


# --- thresholds on the model -------------------------------------------------


@pytest.mark.parametrize(
  "budget",
  [
    dict(target=0.5),
    dict(target=0.3, rate="flops"),
    dict(target=0.6, thresholds="per_kind"),
    dict(target=0.4, thresholds="per_layer"),
    dict(attn_target=0.7, ffn_target=0.2, thresholds="per_kind"),
    dict(target=0.0),
    dict(target=1.0),
  ],
  ids=str,
)
def test_calibration_on_the_model(budget, wide, held):
  """The rate promised is the one that `score` then realises.

  256 tokens make 1 / 1,536 the smallest step of a layer's FFN rate, so that
  the project's half a point is asked for, not the search's own tolerance.
  """
  budget = BudgetConfig(**budget)
  batches = batches_of(token_ids(1, 256, 9)[0], 8)
  got, gap = wide.calibrate(held, batches, budget)
  assert gap <= 0.005
  score = wide.score(held, got, batches)
  if budget.attn_target is None:
    assert abs(score.sparsity[budget.rate] - budget.target) <= gap + 1e-6
    wants = {k: budget.target for k in KINDS}
  else:
    wants = {"attn": budget.attn_target, "ffn": budget.ffn_target}
  if budget.thresholds == "global":
    assert len({*got["attn"], *got["ffn"]}) == 1
    return
  for kind, want in wants.items():
    rates = 1 - score.keep[kind].mean(1)
    if budget.thresholds == "per_kind":
      rates = rates.mean()
    np.testing.assert_allclose(rates, want, atol=gap + 1e-6)


def test_calibration_does_not_depend_on_the_batch(wide, held):
  ids = token_ids(1, 128, 9)[0]
  found = [
    wide.calibrate(held, batches_of(ids, rows), BudgetConfig())[0]
    for rows in (8, 3)
  ]
  for kind in KINDS:
    # Counts are whole; only a logit within rounding of an offset may differ.
    np.testing.assert_allclose(found[0][kind], found[1][kind], atol=1e-4)


# --- the command's function --------------------------------------------------


def test_perplexity_of_the_embedded_model_is_transformers(tmp_path):
  torch = pytest.importorskip("torch", reason="torch is not installed")
  transformers = pytest.importorskip("transformers")
  text = paths.EMBEDDED_TEXT.read_text("utf-8")[5000:6800]
  file = tmp_path / "text.txt"
  file.write_text(text, "utf-8")
  window = 128
  got = evaluate.perplexity_of_path("embedded", str(file), window)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    paths.EMBEDDED_MODEL, dtype=torch.float32
  ).eval()
  ids = data.text_ids([str(file)], load_tokenizer("embedded"))
  assert len(ids) > 3 * window and len(ids) % window > 1

  def logits(part):
    with torch.no_grad():
      return theirs(torch.tensor(np.asarray(part))).logits.numpy()

  nll = np.concatenate(brute_nll(logits, ids, window))
  assert got == pytest.approx(math.exp(nll.mean()), rel=1e-3)
  assert got < 30  # it has learnt something: the vocabulary is 384


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_place_is_the_callers(held):
  """Eight rows over four devices score as on one."""
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("data",))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  macs = flops.layer_macs(MODEL, WIDE.route, WINDOW)
  sharded = Evaluator(WIDE, lambda b: jax.device_put(b, rows), macs)
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  ids = token_ids(1, 64, 4)[0]
  got = sharded.score(
    jax.device_put(held, everywhere), level(0.1), batches_of(ids, 8)
  )
  want = evaluator_of(WIDE).score(held, level(0.1), batches_of(ids, 8))
  assert got.tokens == want.tokens
  np.testing.assert_allclose(got.nll, want.nll, rtol=1e-6)
  assert got.sparsity == pytest.approx(want.sparsity, abs=1e-6)
