"""`wide_jax.load`: what it computes, what it reports, what it refuses."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wide_jax
from wide_jax import adapters, export, flops, modules, routing, weights
from wide_jax.config import LoraConfig, Method, RouteConfig
from wide_jax.routing import Gate

ROUTE = RouteConfig(attn_group=2, ffn_group=64, rank=4)
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q", "o", "gate", "down"))
# What two float32 orders of summation may differ by in logits of up to 20.
SAME = 1e-4


@pytest.fixture(scope="module")
def base():
  return weights.load_params("embedded")


def ids_of(batch: int, length: int, vocab: int = 384) -> np.ndarray:
  rng = np.random.default_rng(17)
  return rng.integers(0, vocab, (batch, length)).astype(np.int32)


def random_tree(tree, scale: float, seed: int):
  rng = np.random.default_rng(seed)

  def draw(leaf):
    noise = rng.standard_normal(leaf.shape) * scale
    return noise.astype(np.float32)

  return jax.tree.map(draw, tree)


def write_export(folder, base, *, route=ROUTE, lora=None, threshold=0.1):
  """Random routers (and adapter), a random channel order, real thresholds."""
  config = base.config
  shapes = modules.abstract(modules.Decoder(config, route, lora))
  rng = np.random.default_rng(5)
  order = np.stack(
    [rng.permutation(config.d_ff) for _ in range(config.n_layers)]
  ).astype(np.int32)
  variables = {}
  if "router" in shapes:
    variables["router"] = random_tree(shapes["router"], 0.3, 1)
  if lora is not None:
    variables["lora"] = random_tree(shapes["lora"], 0.2, 2)
  layers = np.arange(config.n_layers, dtype=np.float32)
  export.save_export(
    folder,
    base="embedded",
    model_config=config,
    route=route,
    lora_config=lora,
    variables=variables,
    thresholds={"attn": threshold + 0.01 * layers, "ffn": threshold - layers},
    channel_order=order,
  )
  return folder


def direct(base, folder, ids, gate=None, capture=()):
  """Logits and captures straight from the modules, by the export's files."""
  held = export.load_export(folder)
  params = weights.permute_channels(base.params, held.channel_order)
  variables = {"params": params, **held.variables}
  decoder = modules.Decoder(
    base.config, held.route, held.lora_config, capture=capture
  )
  variables = jax.tree.map(jnp.asarray, variables)
  if gate is None:
    gate = routing.threshold_gate(held.thresholds)
  mask = jnp.ones(ids.shape, jnp.int32)
  return modules.logits_and_aux(
    decoder, variables, jnp.asarray(ids), mask, gate
  )


def test_dense_equals_the_plain_model(base):
  lm = wide_jax.load("embedded")
  ids = ids_of(2, 9)
  want = modules.logits(base.config, base.params, jnp.asarray(ids))
  got = lm.logits(ids)
  assert got.dtype == jnp.float32 and got.shape == (2, 9, lm.config.vocab)
  np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(lm.logits(ids.tolist()), want)
  stats = lm.stats()
  assert stats["tokens"] == 18
  assert {stats[k] for k in ("mean", "attention", "ffn", "flops")} == {0.0}
  assert lm.config == base.config and lm.route is None
  assert lm.tokenizer.decode(lm.tokenizer.encode("To be")) == "To be"


def test_half_precision_stays_float32_at_the_end(base):
  lm = wide_jax.load("embedded", dtype="bfloat16")
  ids = ids_of(1, 8)
  got = lm.logits(ids)
  assert got.dtype == jnp.float32 and lm.dtype == "bfloat16"
  want = wide_jax.load("embedded").logits(ids)
  # 2^-9 a rounding, some dozens of them, relative to the largest logit.
  limit = 64 * 2.0**-9 * float(jnp.abs(want).max())
  np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def test_export_brings_masks_thresholds_order_and_adapter(base, tmp_path):
  folder = write_export(tmp_path / "export", base, lora=LORA)
  ids = ids_of(2, 12)
  want, aux = direct(base, folder, ids, capture=("masks",))
  lm = wide_jax.load(folder)
  np.testing.assert_allclose(lm.logits(ids), want, rtol=0, atol=SAME)
  stats = lm.stats()
  for kind in routing.KINDS:
    skipped = 1 - np.asarray(aux["masks"][kind]).mean((1, 2, 3))
    assert 0.05 < skipped.mean() < 0.95  # the masks do mask something
    np.testing.assert_allclose(
      stats["by_layer"][kind], skipped, rtol=0, atol=1e-6
    )
  # Forcing those masks gives the same: nothing but the masks was decided.
  forced = Gate(mode="forced", masks=aux["masks"])
  again, _ = direct(base, folder, ids, gate=forced)
  np.testing.assert_allclose(lm.logits(ids), again, rtol=0, atol=SAME)


def test_stats_add_up(base, tmp_path):
  lm = wide_jax.load(write_export(tmp_path / "export", base))
  lm.logits(ids_of(2, 12))
  stats = lm.stats()
  by_layer = {k: np.asarray(v) for k, v in stats["by_layer"].items()}
  assert stats["attention"] == pytest.approx(by_layer["attn"].mean())
  assert stats["ffn"] == pytest.approx(by_layer["ffn"].mean())
  both = stats["attention"] + stats["ffn"]
  assert stats["mean"] == pytest.approx(both / 2)
  macs = flops.layer_macs(lm.config, ROUTE, 12)
  share = flops.skipped_share(by_layer["attn"], by_layer["ffn"], macs)
  assert stats["flops"] == pytest.approx(float(share))
  assert 0 < stats["flops"] < max(stats["attention"], stats["ffn"])
  json.dumps(stats)


def test_thresholds_of_the_export_are_what_decides(base, tmp_path):
  ids = ids_of(1, 10)
  dense = wide_jax.load("embedded").logits(ids)
  keep_all = write_export(tmp_path / "all", base, threshold=-1e6)
  np.testing.assert_allclose(
    wide_jax.load(keep_all).logits(ids), dense, rtol=0, atol=SAME
  )
  drop_all = wide_jax.load(write_export(tmp_path / "no", base, threshold=1e6))
  got = drop_all.logits(ids)
  assert drop_all.stats()["mean"] == 1.0
  # Every block dropped: final norm and head on the embeddings.
  table = jnp.asarray(base.params["embed"]["table"])
  x = table[ids[0]]
  scale = base.params["final_norm"]["scale"]
  norm = jnp.sqrt((x * x).mean(-1, keepdims=True) + base.config.norm_eps)
  np.testing.assert_allclose(
    got[0], (x / norm * scale[None]) @ table.T, rtol=0, atol=SAME
  )


def test_routers_and_lora_by_themselves(base, tmp_path):
  folder = write_export(tmp_path / "export", base, lora=LORA)
  ids = ids_of(1, 10)
  whole = wide_jax.load(folder).logits(ids)
  both = wide_jax.load("embedded", routers=folder, lora=folder)
  np.testing.assert_array_equal(both.logits(ids), whole)
  with pytest.warns(UserWarning, match="trained with an adapter"):
    alone = wide_jax.load("embedded", routers=folder)
  assert alone.lora_config is None and alone.route == ROUTE
  adapter = wide_jax.load("embedded", lora=folder)
  assert adapter.route is None and adapter.lora_config == LORA
  lora, _ = export.load_adapter(folder, base.config)  # the base's own order
  merged = adapters.merge_lora(base.params, lora, LORA)
  want = modules.logits(base.config, merged.params, jnp.asarray(ids))
  np.testing.assert_allclose(adapter.logits(ids), want, rtol=0, atol=SAME)
  other = write_export(tmp_path / "other", base, threshold=0.4)
  swapped = wide_jax.load(folder, routers=other)
  assert swapped.lora_config == LORA
  assert swapped.thresholds["attn"][0] == np.float32(0.4)


def test_merged_equals_unmerged(base, tmp_path):
  folder = write_export(tmp_path / "export", base, lora=LORA, threshold=-1e6)
  ids = ids_of(1, 10)
  beside = wide_jax.load(folder)
  merged = wide_jax.load(folder, merge=True)
  assert merged.merged and not beside.merged
  np.testing.assert_allclose(
    merged.logits(ids), beside.logits(ids), rtol=0, atol=SAME
  )


def test_methods_without_routers(base, tmp_path):
  random = dataclasses.replace(ROUTE, method=Method.RANDOM)
  folder = write_export(tmp_path / "random", base, route=random, threshold=0.0)
  lm = wide_jax.load(folder)
  first = lm.logits(ids_of(2, 64))
  # Coins: 128 tokens x 4 groups of the first layer, five deviations.
  rate = lm.stats()["by_layer"]["attn"][0]
  assert abs(rate - 0.5) < 5 * 0.5 / 512**0.5
  np.testing.assert_array_equal(lm.logits(ids_of(2, 64)), first)
  dense = dataclasses.replace(ROUTE, method=Method.DENSE)
  folder = write_export(tmp_path / "dense", base, route=dense, lora=LORA)
  lm = wide_jax.load(folder)
  assert lm.route is None and lm.lora_config == LORA


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(base, tmp_path, side):
  folder = write_export(tmp_path / "export", base)
  lm = wide_jax.load(folder)
  long, short = ids_of(1, 9)[0], ids_of(1, 4)[0]
  alone = [lm.logits(row[None])[0] for row in (long, short)]
  lm.logits(long[None])
  kept_long = np.asarray(lm.stats()["by_layer"]["ffn"])
  lm.logits(short[None])
  kept_short = np.asarray(lm.stats()["by_layer"]["ffn"])
  pad, ones = np.zeros(5, np.int32), np.ones(4, np.int32)
  halves = (pad, short), (pad, ones)
  if side == "right":
    halves = (short, pad), (ones, pad)
  ids = np.stack([long, np.concatenate(halves[0])])
  mask = np.stack([np.ones(9, np.int32), np.concatenate(halves[1])])
  got = np.asarray(lm.logits(ids, mask))
  assert np.isfinite(got).all()
  np.testing.assert_allclose(got[0], alone[0], rtol=0, atol=SAME)
  np.testing.assert_allclose(got[1][mask[1] > 0], alone[1], rtol=0, atol=SAME)
  stats = lm.stats()
  assert stats["tokens"] == 13
  want = (9 * kept_long + 4 * kept_short) / 13
  np.testing.assert_allclose(stats["by_layer"]["ffn"], want, rtol=0, atol=1e-6)
  # What padding holds, and a mask of booleans, make no difference to the bit.
  ids[mask == 0] = 7
  again = np.asarray(lm.logits(ids, mask.astype(bool)))
  np.testing.assert_array_equal(again[mask > 0], got[mask > 0])


@pytest.mark.parametrize(
  "ids,message",
  [
    ([[3, -1]], r"token id -1 is outside \[0, 384\)"),
    ([[3, 384]], r"token id 384 is outside \[0, 384\)"),
    (np.array([[2**32 + 5]]), "token id 4294967301 is outside"),
    ([3, 4], r"shape \(2,\)"),
    ([[]], "at least one of each"),
    ([[0.5]], "want integers"),
    ([[1, 2], [3]], "different lengths"),
  ],
)
def test_bad_ids_are_refused(ids, message):
  lm = wide_jax.load("embedded")
  with pytest.raises(ValueError, match=message):
    lm.logits(ids)
  with pytest.raises(ValueError, match="call"):
    lm.stats()


def test_bad_masks_are_refused():
  lm = wide_jax.load("embedded")
  with pytest.raises(ValueError, match=r"mask has shape \(1, 3\); ids has"):
    lm.logits([[1, 2]], [[1, 1, 1]])
  with pytest.raises(ValueError, match="no token in row 1"):
    lm.logits([[1, 2], [1, 2]], [[1, 1], [0, 0]])
  for odd in ([["a", "b"]], [[None, 1]], [[float("nan"), 1]]):
    with pytest.raises(ValueError, match="want 0 and 1"):
      lm.logits([[1, 2]], odd)


def test_what_does_not_fit_is_refused(base, tmp_path):
  folder = write_export(tmp_path / "export", base)
  with pytest.raises(ValueError, match="is no export directory"):
    wide_jax.load("embedded", routers=tmp_path)
  with pytest.raises(ValueError, match="brings no adapter"):
    wide_jax.load(folder, merge=True)
  with pytest.raises(FileNotFoundError, match="adapter_config.json"):
    wide_jax.load("embedded", lora=folder)
  with pytest.raises(ValueError, match="dtype='int8'"):
    wide_jax.load("embedded", dtype="int8")
  with pytest.raises(ValueError, match="dtype='abc'"):
    wide_jax.load("embedded", dtype="abc")
  about = json.loads((folder / "wide.json").read_text())
  about["model"]["norm_eps"] = 0.5
  (folder / "wide.json").write_text(json.dumps(about))
  with pytest.raises(ValueError, match="another model: norm_eps 0.5 there"):
    wide_jax.load(folder)
  about["model"]["norm_eps"] = base.config.norm_eps
  about["route"]["ffn_group"] = 32
  (folder / "wide.json").write_text(json.dumps(about))
  with pytest.raises(ValueError, match="layers/ffn_router/up"):
    wide_jax.load(folder)


def test_public_names_are_lazy():
  assert {"load", "LanguageModel", "ModelConfig", "RouteConfig"} <= set(
    dir(wide_jax)
  )
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    _ = wide_jax.nothing
  code = (
    "import sys, wide_jax\n"
    "assert 'jax' not in sys.modules\n"
    "assert wide_jax.RouteConfig(rank=4).rank == 4\n"
    "assert 'jax' not in sys.modules\n"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
