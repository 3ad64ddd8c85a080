"""Channel order and static scores from a pass over text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_fixtures import MODEL, ROUTE, dense_logits, token_ids, variables

from wide_jax import calibration, data, flops, paths, weights
from wide_jax.config import RegroupConfig, RouteConfig
from wide_jax.evaluate import Evaluator, window_batches
from wide_jax.modules import Decoder
from wide_jax.tokenizers import load_tokenizer

REGROUP = RegroupConfig(tokens=256, directions=8, iterations=5)


@pytest.fixture(scope="module")
def loaded():
  return weights.load_params("embedded", dtype="float32")


@pytest.fixture(scope="module")
def windows():
  """Eight windows of 64 tokens of the embedded text."""
  text = paths.EMBEDDED_TEXT.read_text("utf-8")[20000:22000]
  ids = np.asarray(load_tokenizer("embedded").encode(text), np.int32)
  return data.eval_windows(ids[:512], 64)


def cut(windows, rows):
  return {k: v[rows] for k, v in windows.items()}


def test_channel_order_leaves_the_dense_model_alone(loaded, windows):
  decoder = Decoder(loaded.config)
  batch = cut(windows, slice(0, 4))
  seen = []

  def watch(layers):
    for item in layers:
      seen.append(item[0])
      yield item

  order = calibration.channel_order(
    decoder, loaded.params, batch, 32, REGROUP, seed=17, progress=watch
  )
  assert seen == [0, 1, 2, 3]
  layers, width = loaded.config.n_layers, loaded.config.d_ff
  assert order.shape == (layers, width) and order.dtype == np.int32
  for row in order:
    np.testing.assert_array_equal(np.sort(row), np.arange(width))
    assert (row != np.arange(width)).any()
  moved = weights.permute_channels(loaded.params, order)
  ids = windows["ids"][4:6]
  want = dense_logits(loaded.config, loaded.params, ids)
  got = dense_logits(loaded.config, moved, ids)
  np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
  # Channels of one group now act together more than those of any 32.
  assert together(decoder, moved, batch) > together(
    decoder, loaded.params, batch
  )


def together(decoder, params, batch) -> float:
  """Share of the variance of channels' importance that lies between groups."""
  shares = []
  for i, inner in calibration._walk(decoder, params, batch):
    norms = np.linalg.norm(
      np.asarray(params["layers"]["ffn"]["down"]["kernel"][i]), axis=-1
    )
    x = np.sqrt(np.abs(inner["channels"]) * norms)
    x = (x - x.mean(0)) / x.std(0)
    shares.append(x.reshape(len(x), -1, 32).mean(-1).var(0).mean())
  return float(np.mean(shares))


def test_static_scores_have_the_shapes_of_a_router():
  decoder = Decoder(MODEL, RouteConfig(method="static_width", ffn_group=16))
  held = variables(decoder)
  batch = data.eval_windows(token_ids(1, 64)[0], 16)
  tree = calibration.static_logits(
    decoder, held["params"], batch, decoder.route
  )
  want = held["router"]
  assert jax.tree.structure(tree) == jax.tree.structure(want)
  for ours, theirs in zip(
    jax.tree.leaves(tree), jax.tree.leaves(want), strict=True
  ):
    assert ours.shape == theirs.shape and ours.dtype == np.float32
    # Standardised over all layers.
    np.testing.assert_allclose(ours.mean(), 0, atol=1e-5)
    np.testing.assert_allclose(ours.std(), 1, rtol=1e-4)


def test_only_real_tokens_count():
  decoder = Decoder(MODEL, ROUTE)
  params = variables(decoder)["params"]
  batch = data.eval_windows(token_ids(1, 64)[0], 16)
  padded = {k: np.concatenate([v, 0 * v[:2]]) for k, v in batch.items()}
  padded["ids"][-2:] = 7  # what stands in a pad does not matter
  for ours, theirs in zip(
    *(
      jax.tree.leaves(calibration.static_logits(decoder, params, b, ROUTE))
      for b in (batch, padded)
    ),
    strict=True,
  ):
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_dead_group_scores_lowest():
  """Rows of `down`, and of `o`, that are 0 add nothing to any token."""
  params = variables(Decoder(MODEL))["params"]
  layers = params["layers"]
  down, o = layers["ffn"]["down"], layers["attn"]["o"]
  down["kernel"] = down["kernel"].at[1, 32:48].set(0)
  o["kernel"] = o["kernel"].at[0, 5].set(0)
  batch = data.eval_windows(token_ids(1, 64)[0], 16)
  tree = calibration.static_logits(Decoder(MODEL), params, batch, ROUTE)
  logits = {k: v["logits"] for k, v in tree["layers"].items()}
  where = {k: np.unravel_index(v.argmin(), v.shape) for k, v in logits.items()}
  assert where["ffn_router"] == (1, 2) and where["attn_router"] == (0, 5)
  assert all(np.isfinite(v).all() for v in logits.values())


def test_dropping_low_scores_hurts_less_than_dropping_high_ones(
  loaded, windows
):
  route = RouteConfig(method="static_width", attn_group=1, ffn_group=32)
  decoder = Decoder(loaded.config, route)
  tree = calibration.static_logits(
    decoder, loaded.params, cut(windows, slice(0, 4)), route
  )
  macs = flops.layer_macs(loaded.config, route, 64)
  evaluator = Evaluator(
    decoder, lambda b: {k: jnp.asarray(v) for k, v in b.items()}, macs
  )
  batches = window_batches(cut(windows, slice(4, 8)), 4)
  logits = {k: tree["layers"][f"{k}_router"]["logits"] for k in ("attn", "ffn")}
  layers = loaded.config.n_layers

  def nll(kind, sign):
    """Drops the quarter of `kind` with the lowest sign * score."""
    at = {k: np.full(layers, -np.inf) for k in logits}
    at[kind] = np.full(layers, np.quantile(sign * logits[kind], 0.25))
    router = jax.tree.map(lambda a: sign * a, tree)
    held = {"params": loaded.params, "router": router}
    score = evaluator.score(held, at, batches)
    name = {"attn": "attention", "ffn": "ffn"}[kind]
    assert score.sparsity[name] == pytest.approx(0.25, abs=0.04)
    return score.nll

  for kind in logits:
    assert nll(kind, 1) + 0.1 < nll(kind, -1), kind
