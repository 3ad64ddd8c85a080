"""The decoder: masks, independence, packing, scan, remat, adapters.

Trials D1 (without a cache), D2, D4, G1, and section 2 of the design.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_fixtures import (
  METHODS,
  MODEL,
  ROUTE,
  VOCAB,
  WIDE,
  dense_logits,
  forward,
  jit,
  lora,
  model,
  route,
  same,
  shift_logits,
  thresholds,
  token_ids,
  variables,
)

from wide_jax import loss, modules, routing
from wide_jax.modules import Decoder
from wide_jax.routing import Gate

IDS = token_ids(2, 8)
# Two float32 programs of the same sums: some hundred roundings (2^-24) of
# logits that reach about 10.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def wide():
  return variables(WIDE)


@pytest.fixture(scope="module")
def dense(wide):
  return dense_logits(MODEL, wide["params"], IDS)


def forced(decoder, value, batch, length) -> Gate:
  groups = decoder.route.groups(decoder.model)
  layers = decoder.model.n_layers
  return Gate(
    mode="forced",
    masks={
      k: jnp.full((layers, batch, length, g), value) for k, g in groups.items()
    },
  )


# --- what a gate does (D2) ---------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_kept_is_dense_and_dropped_is_the_embedding(method, wide, dense):
  decoder = Decoder(MODEL, route(method))
  held = {**variables(decoder, 1), "params": wide["params"]}
  everything, aux = forward(decoder, held, IDS, thresholds(-np.inf))
  np.testing.assert_allclose(everything, dense, atol=CLOSE, rtol=0)
  assert all(m.all() for m in aux["masks"].values())
  all_true = forward(decoder, held, IDS, forced(decoder, True, *IDS.shape))[0]
  np.testing.assert_allclose(all_true, dense, atol=CLOSE, rtol=0)
  opened, aux = forward(decoder, held, IDS)
  np.testing.assert_allclose(opened, dense, atol=CLOSE, rtol=0)
  assert all((k == aux["tokens"]).all() for k in aux["kept"].values())

  nothing, aux = forward(decoder, held, IDS, thresholds(np.inf))
  assert not any(m.any() for m in aux["masks"].values())
  np.testing.assert_allclose(
    nothing, embeddings_only(held["params"], IDS), atol=CLOSE, rtol=0
  )
  if "router" in held:
    for by, want in ((10.0, everything), (-10.0, nothing)):
      moved = {**held, "router": shift_logits(held["router"], by)}
      got, aux = forward(decoder, moved, IDS, thresholds(0.0))
      assert all(m.all() == (by > 0) for m in aux["masks"].values())
      assert all(m.any() == (by > 0) for m in aux["masks"].values())
      np.testing.assert_allclose(got, want, atol=CLOSE, rtol=0)


def embeddings_only(params, ids):
  """Final norm and head on the embeddings, in float64."""
  table = np.float64(params["embed"]["table"])
  x = table[ids]
  x = x / np.sqrt((x * x).mean(-1, keepdims=True) + MODEL.norm_eps)
  return x * np.float64(params["final_norm"]["scale"]) @ table.T


@pytest.mark.parametrize("method", METHODS)
def test_masks_are_mixed_and_match_their_logits(method):
  decoder = Decoder(MODEL, route(method))
  _, aux = forward(decoder, variables(decoder, 1), IDS, thresholds(0.25))
  for kind, keep in aux["masks"].items():
    assert 0 < keep.mean() < 1
    np.testing.assert_array_equal(keep, aux["logits"][kind] > 0.25)
    np.testing.assert_array_equal(keep.sum((1, 2)), aux["kept"][kind])
  per_token = method != "static_width"
  assert (aux["masks"]["ffn"].std((1, 2)) > 0).any() == per_token
  if method == "layer_skip":
    same(aux["masks"]["attn"], aux["masks"]["ffn"])


def test_a_score_at_the_threshold_is_dropped(wide):
  router = jax.tree.map(jnp.zeros_like, wide["router"])
  held = {**wide, "router": shift_logits(router, 0.5)}
  _, aux = forward(WIDE, held, IDS, thresholds(0.5))
  assert not any(m.any() for m in aux["masks"].values())
  below = float(np.nextafter(np.float32(0.5), np.float32(0)))
  _, aux = forward(WIDE, held, IDS, thresholds(below))
  assert all(m.all() for m in aux["masks"].values())


def test_noise_only_in_training(wide):
  gates = [
    Gate("threshold", key, None, thresholds(0.0).thresholds)
    for key in (jax.random.key(0), jax.random.key(1), None)
  ]
  first, second, third = (forward(WIDE, wide, IDS, g) for g in gates)
  same(first, second)
  same(first[1]["masks"], third[1]["masks"])
  # The key is not used: without one it is another program of the same sums.
  np.testing.assert_allclose(first[0], third[0], atol=CLOSE, rtol=0)

  def train(seed):
    gate = Gate("train", jax.random.key(seed), jnp.float32(1.0))
    return forward(WIDE, wide, IDS, gate)

  same(train(0), train(0))
  masks = [train(seed)[1]["masks"] for seed in (0, 1)]
  for kind in routing.KINDS:
    assert (masks[0][kind] != masks[1][kind]).mean() > 0.1


def test_layers_kinds_and_tokens_draw_apart():
  """Equal scores everywhere, so that only the noise can tell them apart."""
  decoder = Decoder(MODEL, route("token_depth"))
  held = variables(decoder)
  held["router"] = jax.tree.map(jnp.zeros_like, held["router"])
  gate = Gate("train", jax.random.key(0), jnp.float32(1.0))
  masks = forward(decoder, held, IDS, gate)[1]["masks"]
  draws = [masks[kind][layer].ravel() for kind in masks for layer in (0, 1)]
  assert len({d.tobytes() for d in draws}) == 4
  assert all(d.any() and not d.all() for d in draws)


def test_training_keeps_as_often_as_its_probability():
  """P(keep) = sigmoid(logit), whatever tau: within 5%, for four logits."""
  decoder = Decoder(MODEL, route("static_width"))
  held = variables(decoder)
  levels = np.asarray([-1.0, 0.0, 0.7, 2.0], np.float32)
  router = {
    "layers": {
      "attn_router": {"logits": jnp.asarray(np.resize(levels, (2, 9)))},
      "ffn_router": {"logits": jnp.asarray(np.resize(levels, (2, 6)))},
    }
  }

  def kept(key):
    gate = Gate("train", key, jnp.float32(3.0))
    one = jnp.ones((1, 1), jnp.int32)
    _, aux = decoder.apply({**held, "router": router}, one, one - 1, one, gate)
    return aux["kept"]

  draws = 6000
  keys = jax.random.split(jax.random.key(3), draws)
  counts = jit(lambda keys: jax.lax.map(kept, keys, batch_size=500))(keys)
  counts = jax.tree.map(lambda k: np.asarray(k).sum(0), counts)
  for kind, width in (("attn", 9), ("ffn", 6)):
    p = 1 / (1 + np.exp(-np.resize(levels, (2, width))))
    # 5% of 0.27 is 2.4 standard deviations of a share of 6,000 draws; shares
    # of equal logits are averaged, five groups or more, which makes it 5.
    for level in levels:
      at = np.resize(levels, (2, width)) == level
      want = p[at][0]
      got = counts[kind][at].mean() / draws
      assert abs(got - want) <= 0.05 * want, (kind, level, got)


# --- the straight-through gradient -------------------------------------------


def surrogate_of(logits0, hard0, tau):
  """Hard decisions at the starting point, soft moves around it."""

  def gate(logits, noise, *_):
    groups = logits.shape[-1]
    soft = jax.nn.sigmoid((logits + noise) / tau)
    soft0 = jax.nn.sigmoid((logits0[groups] + noise) / tau)
    return hard0[groups] + (soft - soft0)

  return gate


@pytest.mark.parametrize("method", ["static_width", "wide"])
def test_router_gradient_is_that_of_the_soft_gate(method, monkeypatch):
  """Of dropped groups too: finite differences of hard0 + soft - soft0.

  One layer, so that the starting point can be held fixed; attention has 9
  groups and the FFN 6, by which the surrogate tells them apart.
  """
  decoder = Decoder(model(n_layers=1), route(method), capture=())
  held = variables(decoder, 4)
  ids = jnp.asarray(IDS)
  positions, segments = modules.positions_and_segments(jnp.ones_like(ids))
  tau = 1.5
  gate = Gate("train", jax.random.key(5), jnp.float32(tau))
  targets = jnp.roll(ids, -1, 1)

  def value(router):
    hidden, _ = decoder.apply(
      {**held, "router": router}, ids, positions, segments, gate
    )
    table = held["params"]["embed"]["table"]
    return loss.token_losses(hidden, table, targets).mean()

  _, aux = forward(decoder, held, IDS, gate)
  grads = jit(jax.grad(value))(held["router"])
  logits0 = {a.shape[-1]: jnp.asarray(a[0]) for a in aux["logits"].values()}
  hard0 = {a.shape[-1]: a[0].astype(np.float32) for a in aux["masks"].values()}
  monkeypatch.setattr(
    routing, "straight_through", surrogate_of(logits0, hard0, tau)
  )
  soft_value = jit(value)

  def slope(direction, h=0.02):
    """Central difference of fourth order along a unit direction."""

    def at(x):
      return float(
        soft_value(
          jax.tree.map(lambda p, d: p + x * d, held["router"], direction)
        )
      )

    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)

  # A value of about 4 is known to 2^-22; 18 of that over 12 h is 2e-5.
  noise = 2e-5
  if method == "static_width":
    for kind in routing.KINDS:
      kept = aux["masks"][kind][0, 0, 0]
      assert not kept.all() and kept.any()
      for group, keep in enumerate(kept):
        zero = jax.tree.map(jnp.zeros_like, held["router"])
        leaf = zero["layers"][f"{kind}_router"]
        leaf["logits"] = leaf["logits"].at[0, group].set(1.0)
        got = float(grads["layers"][f"{kind}_router"]["logits"][0, group])
        assert keep or got != 0
        assert abs(got - slope(zero)) <= noise + 0.01 * abs(got), (kind, group)
  else:
    size = np.sqrt(sum(float((g * g).sum()) for g in jax.tree.leaves(grads)))
    got = slope(jax.tree.map(lambda g: g / size, grads))
    assert size > 0.01 and abs(got - size) <= noise + 0.01 * size


# --- independence ------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_later_tokens_and_neighbours_change_nothing(method):
  decoder = Decoder(MODEL, route(method))
  held = variables(decoder, 1)
  gate = thresholds(0.0)
  base, aux = forward(decoder, held, IDS, gate)
  later = IDS.copy()
  later[:, 5:] = (later[:, 5:] + 7) % VOCAB
  got, aux_later = forward(decoder, held, later, gate)
  np.testing.assert_array_equal(got[:, :5], base[:, :5])
  assert (got[:, 5:] != base[:, 5:]).any()
  other = IDS.copy()
  other[1] = (other[1] + 11) % VOCAB
  got, aux_other = forward(decoder, held, other, gate)
  np.testing.assert_array_equal(got[0], base[0])
  for kind in routing.KINDS:
    np.testing.assert_array_equal(
      aux_later["masks"][kind][:, :, :5], aux["masks"][kind][:, :, :5]
    )
    np.testing.assert_array_equal(
      aux_other["masks"][kind][:, 0], aux["masks"][kind][:, 0]
    )


@pytest.mark.parametrize("method", ["wide", "random"])
@pytest.mark.parametrize("left", [0, 4])
def test_padding_changes_nothing(method, left):
  decoder = Decoder(MODEL, route(method))
  held = variables(decoder, 1)
  gate = thresholds(0.0)
  base, aux = forward(decoder, held, IDS, gate)
  right = 4 - left
  pad = ((0, 0), (left, right))
  ids = np.pad(IDS, pad, constant_values=3)
  segments = np.pad(np.ones_like(IDS), pad)
  got, padded = forward(decoder, held, ids, gate, segments)
  assert np.isfinite(got).all()
  real = slice(left, left + IDS.shape[1])
  np.testing.assert_allclose(got[:, real], base, atol=1e-4, rtol=0)
  for kind in routing.KINDS:
    np.testing.assert_array_equal(
      padded["masks"][kind][:, :, real], aux["masks"][kind]
    )
    # Pads count nowhere.
    np.testing.assert_array_equal(padded["kept"][kind], aux["kept"][kind])
  assert padded["tokens"] == aux["tokens"] == IDS.size


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.1])
def test_prefixes_decide_alike(keep, wide):
  """D1 without a cache: 24 tokens against prefixes of 1, 5 and 23."""
  ids = token_ids(1, 24, 3)
  _, aux = forward(WIDE, wide, ids)
  spread = np.concatenate([a.ravel() for a in aux["logits"].values()])
  gate = thresholds(
    -np.inf if keep == 1 else float(np.quantile(spread, 1 - keep))
  )
  base, aux = forward(WIDE, wide, ids, gate)
  for n in (1, 5, 23):
    got, part = forward(WIDE, wide, ids[:, :n], gate)
    np.testing.assert_allclose(got, base[:, :n], atol=1e-4, rtol=0)
    for kind in routing.KINDS:
      np.testing.assert_array_equal(
        part["masks"][kind], aux["masks"][kind][:, :, :n]
      )


# --- heads and kv heads (D4) -------------------------------------------------


@pytest.mark.parametrize(
  "dropped", [(0, 1), (0, 1, 2), tuple(range(8)), (2, 3, 7)]
)
def test_dropped_heads_are_zero_columns_of_o(dropped, wide):
  masks = {
    "attn": jnp.ones((2, *IDS.shape, 9), bool)
    .at[..., list(dropped)]
    .set(False),
    "ffn": jnp.ones((2, *IDS.shape, 6), bool),
  }
  got, aux = forward(WIDE, wide, IDS, Gate("forced", masks=masks))
  assert (aux["kept"]["attn"][:, list(dropped)] == 0).all()
  params = jax.tree.map(lambda a: a, wide["params"])
  o = params["layers"]["attn"]["o"]
  o["kernel"] = o["kernel"].at[:, list(dropped)].set(0)
  want = dense_logits(MODEL, params, IDS)
  np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_dropped_channels_are_zero_rows_of_down(wide):
  masks = {
    "attn": jnp.ones((2, *IDS.shape, 9), bool),
    "ffn": jnp.ones((2, *IDS.shape, 6), bool).at[..., 4].set(False),
  }
  got, _ = forward(WIDE, wide, IDS, Gate("forced", masks=masks))
  params = jax.tree.map(lambda a: a, wide["params"])
  down = params["layers"]["ffn"]["down"]
  down["kernel"] = down["kernel"].at[:, 64:80].set(0)
  want = dense_logits(MODEL, params, IDS)
  np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_groups_that_split_a_kv_head_unevenly_are_refused():
  twelve = model(n_heads=12, n_kv_heads=4)  # 3 query heads a kv head
  for good in (1, 3, 6, 12):
    route("wide", attn_group=good).check_against(twelve)
  for bad in (2, 4):
    with pytest.raises(ValueError, match=rf"attn_group={bad} .* 3 query heads"):
      route("wide", attn_group=bad).check_against(twelve)
  with pytest.raises(ValueError, match="attn_group=5 must divide n_heads=12"):
    route("wide", attn_group=5).check_against(twelve)
  with pytest.raises(ValueError, match="ffn_group=64 must divide d_ff=96"):
    route("wide", ffn_group=64).check_against(MODEL)


# --- packed documents (G1) ---------------------------------------------------


def packed(first, second, length=16):
  """Two documents in one row: ids, segments, positions."""
  a, b = len(first), len(second)
  ids, segments, positions = np.zeros((3, 1, length), np.int32)
  ids[0, : a + b] = [*first, *second]
  segments[0, : a + b] = [1] * a + [2] * b
  positions[0, : a + b] = [*range(a), *range(b)]
  return ids, segments, positions


@pytest.mark.parametrize("method", ["wide", "random"])
def test_packed_documents_do_not_see_each_other(method):
  decoder = Decoder(MODEL, route(method))
  held = variables(decoder, 1)
  gate = thresholds(0.0)
  one, two = token_ids(1, 5, 5)[0], token_ids(1, 6, 6)[0]
  ids, segments, positions = packed(one, two)
  got, aux = forward(decoder, held, ids, gate, segments, positions)
  alone, aux_alone = forward(decoder, held, two[None], gate)
  np.testing.assert_allclose(got[:, 5:11], alone, atol=1e-5, rtol=0)
  ids, segments, positions = packed((one + 9) % VOCAB, two)
  changed, aux_changed = forward(decoder, held, ids, gate, segments, positions)
  np.testing.assert_array_equal(changed[:, 5:11], got[:, 5:11])
  assert (changed[:, :5] != got[:, :5]).any()
  for kind in routing.KINDS:
    second = aux["masks"][kind][:, :, 5:11]
    np.testing.assert_array_equal(second, aux_alone["masks"][kind])
    np.testing.assert_array_equal(
      second, aux_changed["masks"][kind][:, :, 5:11]
    )


def test_packed_loss_is_the_token_mean_over_both_documents(wide):
  one, two = token_ids(1, 5, 5)[0], token_ids(1, 6, 6)[0]
  ids, segments, positions = packed(one, two)
  logits, _ = forward(WIDE, wide, ids, thresholds(0.0), segments, positions)

  def nll(logits, document):
    log_p = logits - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    return [-log_p[t, document[t + 1]] for t in range(len(document) - 1)]

  apart = []
  for document in (one, two):
    alone, _ = forward(WIDE, wide, document[None], thresholds(0.0))
    apart += nll(alone[0], document)
  weights = np.zeros((1, 16), np.float32)
  weights[0, [*range(4), *range(5, 10)]] = 1  # no document's first token
  decoder = WIDE.copy(capture=())
  hidden, _ = jit(decoder.apply)(
    wide,
    jnp.asarray(ids),
    jnp.asarray(positions),
    jnp.asarray(segments),
    thresholds(0.0),
  )
  table = wide["params"]["embed"]["table"]
  got = loss.next_token_loss(
    hidden, table, jnp.roll(jnp.asarray(ids), -1, 1), jnp.asarray(weights)
  )
  np.testing.assert_allclose(got / weights.sum(), np.mean(apart), rtol=1e-5)


# --- scan, remat, windows ----------------------------------------------------


MIXED = model(n_layers=3, windows=(0, 3, 5), tied=False, qkv_bias=True)


@functools.partial(jit, static_argnums=0)
def per_layer_logits(decoder, held, ids, gate):
  """The same decoder, block after block in Python."""
  positions, segments = modules.positions_and_segments(jnp.ones_like(ids))
  shared = decoder.shared(ids, positions, segments, gate, None)
  x = held["params"]["embed"]["table"][ids]
  stacked = decoder.per_layer(gate)
  for i in range(decoder.model.n_layers):
    block = modules.Block(**decoder._block(gate.mode, decoder.model.windows[i]))
    own = {k: v["layers"] for k, v in held.items()}
    own = jax.tree.map(lambda a, i=i: a[i], own)
    mine = jax.tree.map(lambda a, i=i: a[i], stacked)
    x, _ = block.apply(own, x, mine, shared)
  norm = modules.RmsNorm(decoder.model.norm_eps, decoder.dtype)
  hidden = norm.apply({"params": held["params"]["final_norm"]}, x)
  return hidden @ modules.head_table(held["params"]).T


@pytest.mark.parametrize("config", [MODEL, MIXED], ids=["uniform", "mixed"])
def test_scanned_equals_layer_by_layer(config):
  decoder = Decoder(config, ROUTE, lora())
  held = variables(decoder, 2)
  gate = thresholds(0.0, config.n_layers)
  got, _ = forward(decoder, held, IDS, gate)
  want = per_layer_logits(decoder, held, jnp.asarray(IDS), gate)
  np.testing.assert_allclose(got, want, atol=CLOSE, rtol=0)


def test_windows_are_counted_by_layer():
  """A window of 3 in the only layer: a token sees itself and two before."""
  ids = token_ids(1, 10, 8)
  moved = ids.copy()
  moved[0, 2] = (moved[0, 2] + 1) % VOCAB
  one = Decoder(model(n_layers=1, windows=(3,)))
  held = variables(one)
  a, b = (forward(one, held, x)[0] for x in (ids, moved))
  assert list(np.flatnonzero((a != b).any((0, 2)))) == [2, 3, 4]
  # Windows of 2 and 4 after one another reach 1 + 3 tokens further.
  two = Decoder(model(windows=(2, 4)))
  held = variables(two)
  a, b = (forward(two, held, x)[0] for x in (ids, moved))
  assert list(np.flatnonzero((a != b).any((0, 2)))) == [2, 3, 4, 5, 6]


def test_layer_walk_reproduces_the_dense_residual():
  decoder = Decoder(MIXED, ROUTE)
  held = variables(decoder, 2)
  params = held["params"]
  ids = jnp.asarray(IDS)
  positions, segments = modules.positions_and_segments(jnp.ones_like(ids))
  x = params["embed"]["table"][ids]
  inner = list(modules.layer_walk(decoder, params, ids, segments, positions))
  assert len(inner) == 3
  for i, layer in enumerate(inner):
    assert layer["heads"].shape == (2, 8, 9, 8)
    assert layer["channels"].shape == (2, 8, 96)
    own = jax.tree.map(lambda a, i=i: a[i], params["layers"])
    x += jnp.einsum("BTNH,NHD->BTD", layer["heads"], own["attn"]["o"]["kernel"])
    x += layer["channels"] @ own["ffn"]["down"]["kernel"]
  norm = modules.RmsNorm(MIXED.norm_eps, jnp.float32)
  hidden = norm.apply({"params": params["final_norm"]}, x)
  got = hidden @ params["head"]["kernel"].T
  want = dense_logits(MIXED, params, IDS)
  np.testing.assert_allclose(got, want, atol=CLOSE, rtol=0)


@pytest.fixture(scope="module")
def adapted():
  """Routers, adapters with dropout, and the loss and gradients of both."""
  decoder = Decoder(MODEL, ROUTE, lora(dropout=0.3))
  held = variables(decoder, 2)
  ids = jnp.asarray(IDS)
  positions, segments = modules.positions_and_segments(jnp.ones_like(ids))
  gate = Gate("train", jax.random.key(1), jnp.float32(1.0))

  def run(remat):
    def value(own):
      hidden, aux = decoder.copy(remat=remat).apply(
        {**held, **own}, ids, positions, segments, gate, jax.random.key(2)
      )
      nll = loss.token_losses(
        hidden, held["params"]["embed"]["table"], jnp.roll(ids, -1, 1)
      )
      return nll.mean() + aux["kept"]["ffn"].mean()

    own = {k: held[k] for k in ("router", "lora")}
    return jit(jax.value_and_grad(value))(own)

  return run, run("none")


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_neither_loss_nor_gradient(remat, adapted):
  run, (value, grads) = adapted
  again, grads_again = run(remat)
  np.testing.assert_allclose(again, value, rtol=1e-6)
  for a, b in zip(
    jax.tree.leaves(grads), jax.tree.leaves(grads_again), strict=True
  ):
    # The same noise and dropout; only the order of sums may differ.
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(a).max())
    assert np.abs(a).max() > 0


# --- adapters ----------------------------------------------------------------


def test_lora_starts_at_the_base_model():
  decoder = Decoder(MODEL, None, lora())
  made = modules.init(decoder, 3, ("params", "lora"))
  leaves = jax.tree_util.tree_leaves_with_path(made["lora"])
  assert len(leaves) == 14
  for path, leaf in leaves:
    assert leaf.dtype == jnp.float32
    assert (np.asarray(leaf) == 0).all() == (path[-1].key == "b")
  got, _ = forward(decoder, made, IDS)
  want = dense_logits(MODEL, made["params"], IDS)
  np.testing.assert_allclose(got, want, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("stabilised", [False, True])
def test_lora_adds_scaled_a_b(stabilised):
  config = lora(rank_stabilised=stabilised)
  assert config.scale == pytest.approx(6 / 3**0.5 if stabilised else 2.0)
  decoder = Decoder(MODEL, None, config)
  held = variables(decoder, 2)
  merged = jax.tree.map(lambda a: a, held["params"])
  for sub, adapters in held["lora"]["layers"].items():
    for name, ab in adapters.items():
      axes = {"o": "LNHr,LrD->LNHD"}.get(name)
      if axes is None:
        axes = "LDr,LrNH->LDNH" if sub == "attn" else "LDr,LrF->LDF"
      delta = jnp.einsum(axes, ab["a"], ab["b"]) * config.scale
      leaf = merged["layers"][sub][name]
      leaf["kernel"] = leaf["kernel"] + delta
  got, _ = forward(decoder, held, IDS)
  np.testing.assert_allclose(
    got, dense_logits(MODEL, merged, IDS), atol=1e-4, rtol=0
  )
  assert np.abs(got - dense_logits(MODEL, held["params"], IDS)).max() > 0.1


def test_lora_targets_choose_the_projections():
  config = lora(targets=("q", "down"))
  shapes = modules.abstract(Decoder(MODEL, None, config))["lora"]["layers"]
  assert {k: set(v) for k, v in shapes.items()} == {
    "attn": {"q"},
    "ffn": {"down"},
  }


def test_lora_dropout_is_for_training_only():
  decoder = Decoder(MODEL, None, lora(dropout=0.5))
  held = variables(decoder, 2)
  plain = forward(Decoder(MODEL, None, lora()), held, IDS)[0]
  np.testing.assert_array_equal(forward(decoder, held, IDS)[0], plain)
  a, b = (
    forward(decoder, held, IDS, drop=jax.random.key(s))[0] for s in (0, 1)
  )
  assert np.abs(a - plain).max() > 1e-3 and np.abs(a - b).max() > 1e-3


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("width", [8, 7])
def test_dropout_is_unbiased(rate, width):
  n = 1 << 15
  x = jnp.ones((n, width))
  got = np.asarray(modules.dropout(x, jax.random.key(0), rate))
  kept = got != 0
  # Five standard deviations of a share of n * width draws.
  limit = 5 * np.sqrt(rate * (1 - rate) / (n * width))
  assert abs(kept.mean() - (1 - rate)) <= limit
  assert abs(got.mean() - 1) <= limit / (1 - rate)
  by_column = kept.mean(0)
  assert np.abs(by_column - (1 - rate)).max() <= limit * np.sqrt(width)
  # The two halves of a word are not the same draw.
  pairs = np.corrcoef(kept.T)[np.triu_indices(width, 1)]
  assert np.abs(pairs).max() < 5 / np.sqrt(n)


# --- dtypes, router input, ids -----------------------------------------------


def test_routers_and_adapters_are_float32_under_bfloat16():
  decoder = Decoder(MODEL, ROUTE, lora(), jnp.bfloat16)
  shapes = modules.abstract(decoder)
  for name, want in (
    ("params", "bfloat16"),
    ("router", "float32"),
    ("lora", "float32"),
  ):
    assert {a.dtype.name for a in jax.tree.leaves(shapes[name])} == {want}
  held = variables(decoder)
  logits, aux = forward(decoder, held, IDS, thresholds(0.0))
  assert np.isfinite(np.float32(logits)).all()
  assert {a.dtype for a in aux["logits"].values()} == {np.dtype("float32")}


def test_router_input_is_the_residual_or_the_normed():
  """At layer 0 the attention router reads the embeddings."""
  ids = IDS
  for name in ("residual", "normed"):
    decoder = Decoder(MODEL, route("wide", router_input=name))
    held = variables(decoder)
    _, aux = forward(decoder, held, ids)
    r = np.float64(held["params"]["embed"]["table"])[ids]
    layers = held["params"]["layers"]
    if name == "normed":
      r = r / np.sqrt((r * r).mean(-1, keepdims=True) + MODEL.norm_eps)
      r = r * np.float64(layers["attn_norm"]["scale"][0])
    own = {
      k: np.float64(v[0])
      for k, v in held["router"]["layers"]["attn_router"].items()
    }
    low = r @ own["down"] + own["down_bias"]
    want = low @ own["up"] + own["up_bias"]
    # Two float32 products of 24 and 5 terms, results of about 3.
    np.testing.assert_allclose(
      aux["logits"]["attn"][0], want, atol=1e-5, rtol=0
    )


def test_ids_outside_the_vocabulary_are_refused(wide):
  for bad in (VOCAB, -1):
    ids = jnp.asarray([[1, bad, 2]])
    with pytest.raises(ValueError, match=f"token id {bad} is outside"):
      modules.logits(MODEL, wide["params"], ids)


def test_positions_are_counted_by_the_mask():
  mask = jnp.asarray([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
  positions, segments = modules.positions_and_segments(mask)
  np.testing.assert_array_equal(positions[0, 2:], [0, 1, 2])
  np.testing.assert_array_equal(positions[1, :3], [0, 1, 2])
  np.testing.assert_array_equal(segments, mask)
  assert positions.min() >= 0
