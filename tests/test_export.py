"""Exports, adapters and merged models: ours, PEFT's and transformers'."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_fixtures import (
  SHAPES,
  assert_parity,
  hf_logits,
  make_dir,
  random_ids,
  read_hf,
  torch_and_transformers,
)

from wide_jax import (
  adapters,
  export,
  hf_directory,
  modules,
  weights,
  weights_cli,
)
from wide_jax.config import LoraConfig, RouteConfig
from wide_jax.model_config import ModelConfig
from wide_jax.safetensors_io import SafetensorsFile

TQ3 = ModelConfig(
  model_type="qwen3",
  vocab=101,
  d_model=40,
  n_layers=2,
  n_heads=4,
  n_kv_heads=2,
  head_dim=16,
  d_ff=128,
  qk_norm=True,
)


# peft 0.21 still asks transformers 5 for the old name of an attribute.
peft_warns = pytest.mark.filterwarnings(
  "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)


def random_tree(shapes, seed=0, scale=0.1):
  rng = np.random.default_rng(seed)
  return weights.unflatten(
    {
      path: (scale * rng.standard_normal(shape)).astype(np.float32)
      for path, shape in shapes.items()
    }
  )


def random_lora(model, config, seed=0):
  return random_tree(adapters.lora_shapes(model, config), seed)


def random_order(model, seed=5):
  rng = np.random.default_rng(seed)
  rows = [rng.permutation(model.d_ff) for _ in range(model.n_layers)]
  return np.stack(rows).astype(np.int32)


def router_shapes(model, route):
  groups, shapes = route.groups(model), {}
  for kind in ("attn", "ffn"):
    own = f"layers/{kind}_router/"
    n, d, r, g = model.n_layers, model.d_model, route.rank, groups[kind]
    shapes |= {
      own + "down": (n, d, r),
      own + "down_bias": (n, r),
      own + "up": (n, r, g),
      own + "up_bias": (n, g),
    }
  return shapes


def assert_same_tree(a, b):
  a, b = weights.flatten(a), weights.flatten(b)
  assert set(a) == set(b)
  for path in a:
    assert a[path].dtype == b[path].dtype, path
    same = np.asarray(a[path]).tobytes() == np.asarray(b[path]).tobytes()
    assert same, path


def our_logits(config, params, ids, lora=None, lora_config=None):
  variables = {"params": params}
  if lora is not None:
    variables["lora"] = jax.tree.map(jnp.asarray, lora)
  ids = jnp.asarray(ids)
  decoder = modules.Decoder(config, lora=lora_config, dtype=jnp.float32)
  with jax.default_matmul_precision("highest"):
    return np.asarray(
      modules.logits_and_aux(
        decoder, variables, ids, jnp.ones_like(ids), modules.Gate()
      )[0]
    )


# --- our export --------------------------------------------------------------


def save(folder, **changes):
  """A full export of TQ3; returns what was given to `save_export`."""
  lora_config = LoraConfig(rank=4, alpha=8.0, targets=("q", "up", "down"))
  route = RouteConfig(attn_group=2, ffn_group=32, rank=8)
  given = dict(
    base="embedded",
    model_config=TQ3,
    route=route,
    lora_config=lora_config,
    variables={
      "router": random_tree(router_shapes(TQ3, route), 1, scale=1.0),
      "lora": random_lora(TQ3, lora_config),
    },
    thresholds={"attn": np.float32(0.1), "ffn": np.float32([0.3, -1e-7])},
    channel_order=random_order(TQ3),
    extra={"dial": {"0.4": {"attn": [0.1, 0.2]}}},
  )
  given |= changes
  export.save_export(folder, **given)
  return given


def test_export_comes_back_to_the_bit(tmp_path):
  given = save(tmp_path / "e")
  got = export.load_export(tmp_path / "e")
  assert got.base == "embedded"
  assert got.model == TQ3
  assert got.route == given["route"]
  assert got.lora_config == given["lora_config"]
  assert_same_tree(got.variables, given["variables"])
  np.testing.assert_array_equal(got.channel_order, given["channel_order"])
  assert got.channel_order.dtype == np.int32
  assert got.thresholds["attn"].dtype == np.float32
  np.testing.assert_array_equal(got.thresholds["attn"], np.float32([0.1, 0.1]))
  np.testing.assert_array_equal(
    got.thresholds["ffn"], given["thresholds"]["ffn"]
  )
  assert got.extra == given["extra"]
  about = json.loads((tmp_path / "e" / "wide.json").read_text())
  assert about["groups"] == {"attn": 2, "ffn": 4}
  assert about["route"]["method"] == "wide"
  assert about["regrouped"] is True


def test_export_without_an_adapter_or_an_order(tmp_path):
  given = save(tmp_path / "e", channel_order=None, thresholds=None)
  variables = {"router": given["variables"]["router"]}
  save(
    tmp_path / "e",
    channel_order=None,
    thresholds=None,
    lora_config=None,
    variables=variables,
  )
  got = export.load_export(tmp_path / "e")
  assert got.channel_order is None and got.thresholds is None
  assert got.lora_config is None and set(got.variables) == {"router"}
  assert not (tmp_path / "e" / export.ADAPTER).exists()


def test_export_takes_jax_arrays(tmp_path):
  given = save(tmp_path / "a")
  on_device = jax.tree.map(jnp.asarray, given["variables"])
  save(tmp_path / "b", variables=on_device)
  for name in (export.ADAPTER, weights.ROUTERS, "wide.json"):
    one, two = (tmp_path / d / name for d in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_export_directory_names_its_base_and_order(tmp_path):
  params = random_tree(weights.param_shapes(TQ3))
  export.write_hf(tmp_path / "base", TQ3, params)
  given = save(tmp_path / "e", base=str(tmp_path / "base"))
  loaded = weights.load_params(tmp_path / "e")
  assert loaded.source.export == tmp_path / "e"
  assert loaded.source.path == tmp_path / "base"
  order = given["channel_order"]
  np.testing.assert_array_equal(loaded.channel_order, order)
  assert_same_tree(loaded.params, weights.permute_channels(params, order))
  with pytest.raises(ValueError, match="has its own"):
    weights.load_params(tmp_path / "e", channel_order=order)


def test_relative_base_is_kept_absolute(tmp_path, monkeypatch):
  export.write_hf(
    tmp_path / "base", TQ3, random_tree(weights.param_shapes(TQ3))
  )
  monkeypatch.chdir(tmp_path)
  save(tmp_path / "e", base="base")
  monkeypatch.chdir("/")
  assert weights.load_params(tmp_path / "e").config == TQ3


def test_failed_export_leaves_the_old_one(tmp_path, monkeypatch):
  given = save(tmp_path / "e")

  def fail(*args, **kwargs):
    raise OSError("disk full")

  monkeypatch.setattr(export, "write_json", fail)
  with pytest.raises(OSError, match="disk full"):
    save(tmp_path / "e", base="other")
  monkeypatch.undo()
  got = export.load_export(tmp_path / "e")
  assert got.base == "embedded"
  assert_same_tree(got.variables, given["variables"])
  assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path):
  save(tmp_path / "e")
  (tmp_path / "e").rename(tmp_path / ".e.replaced")
  assert export.load_export(tmp_path / "e").base == "embedded"
  assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_export_destroys_nothing_else(tmp_path):
  (tmp_path / "home").mkdir()
  (tmp_path / "home" / "thesis.txt").write_text("years of work")
  with pytest.raises(ValueError, match=r"home is not empty.*wide\.json"):
    save(tmp_path / "home")
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="file is a file"):
    save(tmp_path / "file")
  (tmp_path / "empty").mkdir()
  save(tmp_path / "empty")


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda a: a.update(format=99), "format 99"),
    (lambda a: a.pop("route"), "lacks.*route"),
    (lambda a: a["tensors"].pop("channel_order"), "differ in.*channel_order"),
    (lambda a: a["lora"].update(alpha=9.0), "alpha=9.0"),
    (lambda a: a["route"].update(ffn_group=33), "ffn_group=33"),
    (lambda a: a["route"].update(ffn_group="x"), "ffn_group='x'"),
    (lambda a: a.update(route=None), "None has no fields"),
    (lambda a: a.update(model={}), "ModelConfig lacks.*vocab"),
    (lambda a: a.update(lora=3), "3 has no fields"),
    (lambda a: a.update(tensors=None), "tensors=None"),
    (lambda a: a.update(thresholds=[1]), r"thresholds=\[1\]"),
    (lambda a: a.update(thresholds={}), "thresholds={}"),
    (lambda a: a["thresholds"].update(ffn=[0.0]), "want 2 numbers"),
    (lambda a: a["thresholds"].update(ffn=[None, 0.0]), "want 2 numbers"),
    (
      lambda a: a["tensors"].update(channel_order=["int32", [2, 64]]),
      r"channel_order in .*\[2, 64\]",
    ),
  ],
)
def test_tampered_export_is_refused(tmp_path, change, message):
  save(tmp_path / "e")
  path = tmp_path / "e" / "wide.json"
  about = json.loads(path.read_text())
  change(about)
  path.write_text(json.dumps(about))
  with pytest.raises(ValueError, match=message):
    export.load_export(tmp_path / "e")


def test_export_refuses_half_an_adapter(tmp_path):
  with pytest.raises(ValueError, match="or neither"):
    save(tmp_path / "e", lora_config=None)
  with pytest.raises(ValueError, match=r"thresholds\['ffn'\].*\(3,\)"):
    save(tmp_path / "e", thresholds={"ffn": np.zeros(3)})
  assert not (tmp_path / "e").exists()


# --- LoRA: scale, merge ------------------------------------------------------


@pytest.mark.parametrize(
  "rank, stabilised, scale",
  [(16, False, 1.0), (16, True, 4.0), (8, False, 2.0)],
)
def test_l1_scales(tmp_path, rank, stabilised, scale):
  config = LoraConfig(rank=rank, alpha=16.0, rank_stabilised=stabilised)
  assert config.scale == scale
  params = random_tree(weights.param_shapes(TQ3))
  lora = random_lora(TQ3, config)
  merged = adapters.merge_lora(params, lora, config).params
  at, flat = "layers/attn/o/kernel", weights.flatten(lora)
  got = weights.flatten(merged)[at] - weights.flatten(params)[at]
  a, b = flat["layers/attn/o/a"], flat["layers/attn/o/b"]
  want = scale * np.einsum("lnhr,lrd->lnhd", a, b)
  np.testing.assert_allclose(got, want, atol=1e-6)
  _, peft_config = adapters.lora_to_peft(lora, config, TQ3)
  assert peft_config["use_rslora"] is stabilised
  assert (peft_config["r"], peft_config["lora_alpha"]) == (rank, 16)


def test_l1_merge_twice_and_unmerge():
  config = LoraConfig(rank=4)
  params = random_tree(weights.param_shapes(TQ3))
  before = {k: v.copy() for k, v in weights.flatten(params).items()}
  merged = adapters.merge_lora(params, random_lora(TQ3, config), config)
  with pytest.raises(ValueError, match="merged already"):
    adapters.merge_lora(merged, random_lora(TQ3, config), config)
  assert set(merged.originals) == {
    f"layers/{part}/kernel"
    for part in ("attn/q attn/k attn/v attn/o ffn/gate ffn/up ffn/down".split())
  }
  assert_same_tree(adapters.unmerge_lora(merged), weights.unflatten(before))
  assert_same_tree(params, weights.unflatten(before))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_l1_merged_equals_unmerged(dtype, capsys):
  """float32: 1e-5. bfloat16: the kernel is rounded once, 2^-8 of its size."""
  config = LoraConfig(rank=8, alpha=16.0, dropout=0.0)
  params = random_tree(weights.param_shapes(TQ3), scale=0.2)
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  lora = random_lora(TQ3, config, seed=3)
  merged = adapters.merge_lora(params, lora, config).params
  as_float = lambda tree: jax.tree.map(lambda x: x.astype(np.float32), tree)  # noqa: E731
  ids = random_ids()
  two = our_logits(TQ3, as_float(params), ids, lora, config)
  one = our_logits(TQ3, as_float(merged), ids)
  difference = np.max(np.abs(one - two))
  print(f"merged and unmerged differ by {difference:.2e} in {dtype.__name__}")
  dense = our_logits(TQ3, as_float(params), ids)
  assert np.max(np.abs(one - dense)) > 0.05  # the adapter does something
  assert difference <= (1e-5 if dtype is np.float32 else 0.05)
  kernel = weights.flatten(merged)["layers/ffn/up/kernel"]
  assert kernel.dtype == dtype


def test_merge_keeps_jax_arrays_where_they_are():
  config = LoraConfig(rank=4)
  params = random_tree(weights.param_shapes(TQ3))
  lora = random_lora(TQ3, config)
  device = jax.devices()[-1]
  ours = adapters.merge_lora(
    jax.tree.map(lambda x: jax.device_put(x, device), params), lora, config
  ).params
  for leaf in jax.tree.leaves(ours):
    assert leaf.devices() == {device}
  want = adapters.merge_lora(params, lora, config).params
  assert_same_tree(ours, want)


def test_merge_refuses_what_does_not_fit():
  config = LoraConfig(rank=4)
  params = random_tree(weights.param_shapes(TQ3))
  with pytest.raises(ValueError, match="rank 4; its config says 8"):
    adapters.merge_lora(params, random_lora(TQ3, config), LoraConfig(rank=8))
  with pytest.raises(ValueError, match="empty"):
    adapters.merge_lora(params, {}, config)
  other = dataclasses.replace(TQ3, d_ff=96)
  with pytest.raises(ValueError, match="does not fit layers/ffn/gate/kernel"):
    adapters.merge_lora(params, random_lora(other, config), config)


# --- PEFT's format -----------------------------------------------------------


@pytest.mark.parametrize("regrouped", [False, True])
@pytest.mark.parametrize("targets", [("q", "v"), None])
def test_peft_round_trip_to_the_bit(regrouped, targets):
  config = LoraConfig(rank=4, alpha=6.0, rank_stabilised=True)
  if targets:
    config = dataclasses.replace(config, targets=targets)
  lora = random_lora(TQ3, config)
  order = random_order(TQ3) if regrouped else None
  tensors, peft = adapters.lora_to_peft(lora, config, TQ3, channel_order=order)
  assert len(tensors) == 2 * 2 * len(config.targets)
  back, config_back = adapters.lora_from_peft(
    tensors, json.loads(json.dumps(peft)), TQ3, channel_order=order
  )
  assert config_back == config
  assert_same_tree(back, lora)


_Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
  "tensor_change, config_change, message",
  [
    (lambda t: t.pop(_Q), {}, f"lacks {_Q}"),
    (
      lambda t: t.update({_Q.replace("q_proj", "c_proj"): t[_Q]}),
      {},
      "c_proj.*none of",
    ),
    (
      lambda t: t.update({_Q.replace("layers.1", "layers.2"): t[_Q]}),
      {},
      r"layers\.2",
    ),
    (lambda t: t.update({_Q: t[_Q][:, :-1]}), {}, r"\(4, 39\).*\(4, 40\)"),
    (lambda t: None, {"r": 8}, r"lora_A\.weight.*r=8"),
    (lambda t: None, {"r": None}, "r=None"),
    (lambda t: None, {"lora_alpha": None}, "lora_alpha=None"),
    (lambda t: None, {"lora_dropout": {"a": 1}}, "lora_dropout="),
    (lambda t: None, {"use_dora": True}, "use_dora=True"),
    (lambda t: None, {"bias": "all"}, "bias='all'"),
    (lambda t: None, {"modules_to_save": ["lm_head"]}, "lm_head"),
    (lambda t: None, {"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    (lambda t: None, {"peft_type": "IA3"}, "IA3"),
    (
      lambda t: None,
      {"target_modules": ["q_proj", "lm_head"]},
      r"targets \['lm_head'\]",
    ),
    (
      lambda t: None,
      {"target_modules": ["q_proj", "k_proj"]},
      r"no tensors for its targets \['k'\]",
    ),
  ],
)
def test_peft_that_is_refused(tensor_change, config_change, message):
  config = LoraConfig(rank=4, targets=("q", "up"))
  tensors, peft = adapters.lora_to_peft(random_lora(TQ3, config), config, TQ3)
  tensor_change(tensors)
  with pytest.raises(ValueError, match=message):
    adapters.lora_from_peft(tensors, peft | config_change, TQ3)


def test_adapter_must_fit_its_config():
  config = LoraConfig(rank=4, targets=("q",))
  lora = random_lora(TQ3, config)
  with pytest.raises(ValueError, match="layers/attn/k/a"):
    adapters.lora_to_peft(lora, LoraConfig(rank=4, targets=("q", "k")), TQ3)
  with pytest.raises(ValueError, match=r"layers/attn/q/a.*4\).*8\)"):
    adapters.lora_to_peft(lora, LoraConfig(rank=8, targets=("q",)), TQ3)


@pytest.fixture
def based(request, tmp_path):
  """(folder of the base, transformers model, our config and parameters)."""
  folder, model = make_dir(tmp_path / "base", getattr(request, "param", "TL"))
  loaded = weights.load_params(folder)
  return folder, model, loaded.config, loaded.params


@peft_warns
@pytest.mark.parametrize("stabilised", [False, True])
@pytest.mark.parametrize("regrouped", [False, True])
def test_peft_loads_our_adapter_on_the_untouched_base(
  based, tmp_path, regrouped, stabilised
):
  peft = pytest.importorskip("peft", reason="peft is not installed")
  folder, model, config, params = based
  lora_config = LoraConfig(rank=4, alpha=8.0, rank_stabilised=stabilised)
  lora = random_lora(config, lora_config, seed=2)
  order = random_order(config) if regrouped else None
  if regrouped:
    params = weights.permute_channels(params, order)
  export.save_adapter(
    tmp_path / "a",
    lora,
    lora_config,
    config,
    channel_order=order,
    base=str(folder),
  )
  theirs = peft.PeftModel.from_pretrained(model, tmp_path / "a").eval()
  ids = random_ids()
  ours = our_logits(config, params, ids, lora, lora_config)
  assert_parity(ours, hf_logits(theirs, ids))
  dense = our_logits(config, params, ids)
  assert np.max(np.abs(ours - dense)) > 0.05


@peft_warns
@pytest.mark.parametrize("based", sorted(SHAPES), indirect=True)
def test_we_load_an_adapter_that_peft_made(based, tmp_path):
  peft = pytest.importorskip("peft", reason="peft is not installed")
  torch, _ = torch_and_transformers()
  _, model, config, params = based
  settings = peft.LoraConfig(
    r=6,
    lora_alpha=9,
    lora_dropout=0.1,
    use_rslora=True,
    target_modules=["q_proj", "o_proj", "down_proj"],
    task_type="CAUSAL_LM",
  )
  theirs = peft.get_peft_model(model, settings).eval()
  torch.manual_seed(4)
  with torch.no_grad():
    for name, value in theirs.named_parameters():
      if "lora_" in name:
        value.copy_(0.2 * torch.randn_like(value))
  theirs.save_pretrained(tmp_path / "a")
  order = random_order(config)
  lora, lora_config = export.load_adapter(
    tmp_path / "a", config, channel_order=order
  )
  assert lora_config.targets == ("q", "o", "down")
  assert lora_config.rank_stabilised and lora_config.dropout == 0.1
  params = weights.permute_channels(params, order)
  ids = random_ids()
  ours = our_logits(config, params, ids, lora, lora_config)
  assert_parity(ours, hf_logits(theirs, ids))


# --- plain Hugging Face models -----------------------------------------------


@pytest.mark.parametrize("based", sorted(SHAPES), indirect=True)
def test_l1_hf_to_ours_to_hf(based, tmp_path):
  """Every tensor of the source is there, to the bit, under its name."""
  folder, model, config, params = based
  order = random_order(config)
  export.write_hf(
    tmp_path / "out",
    config,
    weights.permute_channels(params, order),
    channel_order=order,
  )
  old = SafetensorsFile(folder / hf_directory.SINGLE)
  new = SafetensorsFile(tmp_path / "out" / hf_directory.SINGLE)
  assert set(old.entries) == set(new.entries)
  for name in old.entries:
    np.testing.assert_array_equal(old.read(name), new.read(name), name)
  ids = random_ids()
  again = hf_logits(read_hf(tmp_path / "out"), ids)
  np.testing.assert_array_equal(again, hf_logits(model, ids))
  assert_parity(our_logits(config, params, ids), again)


def test_a4_tied_model_exports_one_matrix(based, tmp_path):
  _, _, config, params = based
  assert config.tied
  export.write_hf(tmp_path / "out", config, params)
  file = SafetensorsFile(tmp_path / "out" / hf_directory.SINGLE)
  assert weights.HEAD not in file.entries
  assert read_hf(tmp_path / "out").config.tie_word_embeddings


def test_a4_contradicting_head_is_what_transformers_uses(based):
  from wide_jax.safetensors_io import item, write_safetensors

  folder, _, _, _ = based
  file = SafetensorsFile(folder / hf_directory.SINGLE)
  tensors = {n: np.array(file.read(n)) for n in file.entries}
  rng = np.random.default_rng(0)
  shape = tensors[weights.EMBED].shape
  tensors[weights.HEAD] = rng.standard_normal(shape).astype(np.float32)
  write_safetensors(
    folder / hf_directory.SINGLE, [item(*kv) for kv in tensors.items()]
  )
  with pytest.warns(UserWarning, match="tie_word_embeddings"):
    loaded = weights.load_params(folder)
  ids = random_ids()
  ours = our_logits(loaded.config, loaded.params, ids)
  assert_parity(ours, hf_logits(read_hf(folder), ids))


def test_write_hf_shards_and_bfloat16(based, tmp_path):
  _, _, config, params = based
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
  export.write_hf(tmp_path / "out", config, params, shard_bytes=60_000)
  assert len(list((tmp_path / "out").glob("model-*"))) > 3
  about = json.loads((tmp_path / "out" / "config.json").read_text())
  assert about["dtype"] == "bfloat16"
  ids = random_ids()
  ours = our_logits(
    config, jax.tree.map(lambda x: x.astype(jnp.float32), params), ids
  )
  assert_parity(ours, hf_logits(read_hf(tmp_path / "out"), ids))


def test_write_hf_refuses_a_wrong_tree(tmp_path):
  params = random_tree(weights.param_shapes(TQ3))
  del params["head"]
  with pytest.raises(ValueError, match="head/kernel"):
    export.write_hf(tmp_path / "o", TQ3, params)
  params["head"] = {"kernel": np.zeros((101, 41), np.float32)}
  with pytest.raises(ValueError, match=r"head/kernel.*101, 41.*101, 40"):
    export.write_hf(tmp_path / "o", TQ3, params)
  assert not (tmp_path / "o").exists()


# --- the command line --------------------------------------------------------


def test_merge_command(based, tmp_path, capsys):
  folder, model, config, params = based
  (folder / "tokenizer.json").write_text("{}")
  lora_config = LoraConfig(rank=4, alpha=8.0)
  lora = random_lora(config, lora_config)
  route = RouteConfig(method="dense")
  order = random_order(config)
  export.save_export(
    tmp_path / "e",
    base=str(folder),
    model_config=config,
    route=route,
    lora_config=lora_config,
    variables={
      "lora": weights.unflatten(
        weights.permute_leaves(
          weights.flatten(lora), order, weights.LORA_CHANNEL_AXES
        )
      )
    },
    channel_order=order,
  )
  out = tmp_path / "out"
  words = ["merge", "--lora", str(tmp_path / "e"), "--out", str(out)]
  assert weights_cli.main([*words, "--model", str(folder)]) == 0
  said = capsys.readouterr().out
  assert "the dense recovered model in float32" in said
  assert "perplexity not measured" in said  # its tokenizer.json is no tokenizer
  ids = random_ids()
  ours = our_logits(config, params, ids, lora, lora_config)
  assert_parity(ours, hf_logits(read_hf(out), ids))
  assert (out / "tokenizer.json").read_text() == "{}"
  assert json.loads((out / "wide_merged.json").read_text())["rank"] == 4
  # A second merge would add the adapter twice.
  assert weights_cli.main([*words, "--model", str(out)]) == 2
  assert "merged already" in capsys.readouterr().err
  # It goes over an older merge, and over nothing else: a run and a model, the
  # base itself among them, have a config.json too.
  assert weights_cli.main([*words, "--model", str(folder)]) == 0
  assert json.loads((out / "wide_merged.json").read_text())["rank"] == 4
  other = tmp_path / "run"
  other.mkdir()
  (other / "config.json").write_text("{}")
  capsys.readouterr()
  for place in (other, folder, tmp_path / "e"):
    before = {p: p.read_bytes() for p in place.iterdir()}
    over = [*words[:-1], str(place), "--model", str(folder)]
    assert weights_cli.main(over) == 2
    assert "is left alone" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in place.iterdir()} == before
  # An export names its base; merging from it is the same.
  again = [*words[:-1], str(tmp_path / "two"), "--model", str(tmp_path / "e")]
  assert weights_cli.main(again) == 0
  name = hf_directory.SINGLE
  assert (tmp_path / "two" / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("based", ["TQ3"], indirect=True)
def test_check_command(based, capsys):
  folder, _, _, _ = based
  assert weights_cli.main(["check", str(folder), "--tokens", "50"]) == 0
  said = capsys.readouterr().out
  assert "50 tokens of random ids" in said
  assert "matmul precision highest" in said and "mean KL" in said
  assert "passed" in said


@pytest.mark.parametrize("based", ["TQ3"], indirect=True)
@pytest.mark.parametrize("precision", ["highest", "default"])
def test_j4_check_finds_a_planted_fault(based, capsys, monkeypatch, precision):
  folder, _, _, _ = based
  real = weights.load_params

  def faulty(*args, **kwargs):
    loaded = real(*args, **kwargs)
    loaded.params["layers"]["attn"]["k_norm"]["scale"] *= np.float32(1.02)
    return loaded

  monkeypatch.setattr(weights, "load_params", faulty)
  words = ["check", str(folder), "--tokens", "50", "--precision", precision]
  assert weights_cli.main(words) == 1
  assert "FAILED" in capsys.readouterr().out


def test_j4_the_loose_bound_finds_it_too(based):
  """What an accelerator's default precision is judged by."""
  folder, model, config, params = make_tq3(based[0])
  ids = random_ids(50, batch=1)
  params["layers"]["attn"]["k_norm"]["scale"] *= np.float32(1.02)
  found = weights_cli.compare(
    lambda row: our_logits(config, params, row[None])[0],
    lambda row: hf_logits(model, row[None])[0],
    [ids[0]],
  )
  assert found.max_abs > weights_cli.LOOSE_SHARE * found.largest
  assert found.mean_kl > weights_cli.LOOSE_KL


def make_tq3(beside: pathlib.Path):
  folder, model = make_dir(beside.parent / "tq3", "TQ3")
  loaded = weights.load_params(folder)
  return folder, model, loaded.config, loaded.params


@pytest.mark.parametrize(
  "words, message",
  [
    (["check", "nowhere"], "nowhere"),
    (["check", ".", "--tokens", "1"], "--tokens 1"),
    (["merge", "--model", "no", "--lora", "x", "--out", "y"], "'no'"),
  ],
)
def test_bad_input_exits_with_two(words, message, capsys):
  assert weights_cli.main(words) == 2
  assert message in capsys.readouterr().err


def test_nan_fails_the_comparison():
  row = np.arange(4)
  good = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
  bad = good.copy()
  bad[2, 3] = np.nan
  found = weights_cli.compare(lambda _: bad, lambda _: good, [row, row])
  assert not found.max_abs <= 1e9 and not found.mean_kl <= 1e9
  with pytest.raises(ValueError, match=r"\(4, 9\) and \(3, 9\)"):
    weights_cli.compare(lambda _: good, lambda _: good[:3], [row])


def test_merge_says_the_perplexity_of_what_it_wrote(tmp_path, capsys):
  """The dense recovered model is another model; a zero adapter is not."""
  from wide_jax import evaluate, paths

  base = weights.load_params("embedded")
  config = LoraConfig(rank=2)
  shapes = adapters.lora_shapes(base.config, config)
  lora = weights.unflatten(
    {k: np.zeros(v, np.float32) for k, v in weights.flatten(shapes).items()}
  )
  export.save_adapter(tmp_path / "a", lora, config, base.config)
  out = str(tmp_path / "out")
  words = ["merge", "--model", "embedded", "--lora", str(tmp_path / "a")]
  assert weights_cli.main([*words, "--out", out, "--window", "256"]) == 0
  said = capsys.readouterr().out.split("windows of 256: ")[1]
  want = evaluate.perplexity_of_path(
    str(paths.EMBEDDED_MODEL),
    "embedded",
    256,
    max_tokens=weights_cli.DEFAULT_TOKENS,
  )
  assert float(said) == pytest.approx(want, abs=1e-3)
