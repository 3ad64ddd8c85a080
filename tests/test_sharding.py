"""The mesh, the table of leaves, where arrays and optimiser state lie."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from wide_jax import flops, modules, sharding
from wide_jax import step as steps
from wide_jax.config import (
  DataConfig,
  MeshConfig,
  Phase,
  RouteConfig,
  RunConfig,
)
from wide_jax.model_config import ModelConfig

R, RANK = 3, 5  # router rank, LoRA rank


def model(**kw):
  values = dict(
    vocab=32,
    d_model=8,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    head_dim=4,
    d_ff=64,
  )
  return ModelConfig(**{**values, **kw})


def full_tree(m, attn_groups=4, ffn_groups=4):
  """Every leaf that BUILD_NOTES.md lists, in shape only."""
  n, k, h, f = m.n_heads, m.n_kv_heads, m.head_dim, m.d_ff
  d, v, layers = m.d_model, m.vocab, m.n_layers

  def s(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def linear(kernel, bias):
    return {"kernel": s(layers, *kernel), "bias": s(layers, *bias)}

  def router(groups):
    return {
      "down": s(layers, d, R),
      "down_bias": s(layers, R),
      "up": s(layers, R, groups),
      "up_bias": s(layers, groups),
      "logits": s(layers, groups),
    }

  def lora(into, out):
    return {"a": s(layers, *into, RANK), "b": s(layers, RANK, *out)}

  layer_router = router(1)
  del layer_router["logits"]
  return {
    "params": {
      "embed": {"table": s(v, d)},
      "head": {"kernel": s(v, d)},
      "final_norm": {"scale": s(d)},
      "layers": {
        "attn_norm": {"scale": s(layers, d)},
        "ffn_norm": {"scale": s(layers, d)},
        "attn": {
          "q": linear((d, n, h), (n, h)),
          "k": linear((d, k, h), (k, h)),
          "v": linear((d, k, h), (k, h)),
          "o": linear((n, h, d), (d,)),
          "q_norm": {"scale": s(layers, h)},
          "k_norm": {"scale": s(layers, h)},
        },
        "ffn": {
          "gate": linear((d, f), (f,)),
          "up": linear((d, f), (f,)),
          "down": linear((f, d), (d,)),
        },
      },
    },
    "router": {
      "layers": {
        "attn_router": router(attn_groups),
        "ffn_router": router(ffn_groups),
        "layer_router": layer_router,
      }
    },
    "lora": {
      "layers": {
        "attn": {
          "q": lora((d,), (n, h)),
          "k": lora((d,), (k, h)),
          "v": lora((d,), (k, h)),
          "o": lora((n, h), (d,)),
        },
        "ffn": {
          "gate": lora((d,), (f,)),
          "up": lora((d,), (f,)),
          "down": lora((f,), (d,)),
        },
      }
    },
  }


def mesh_of(data=1, fsdp=1, tensor=1):
  count = data * fsdp * tensor
  config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
  return sharding.make_mesh(config, jax.devices()[:count])


def by_name(tree):
  return {
    sharding.leaf_name(path): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def test_mesh_fills_in_and_says_auto():
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
  assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
  assert mesh.axis_types == (AxisType.Auto,) * 3


def test_mesh_of_fewer_devices_is_logged(caplog):
  sharding._logged.clear()
  with caplog.at_level(logging.WARNING, "wide_jax.sharding"):
    mesh = sharding.make_mesh(MeshConfig(data=2))
  assert mesh.size == 2
  assert "uses 2 of 8 devices" in caplog.text


def test_mesh_that_does_not_divide_is_refused():
  with pytest.raises(ValueError, match="multiple of 3 devices; there are 8"):
    sharding.make_mesh(MeshConfig(tensor=3))
  with pytest.raises(ValueError, match="multiple of 16 devices; there are 8"):
    sharding.make_mesh(MeshConfig(data=4, fsdp=2, tensor=2))


def test_every_leaf_has_its_place():
  m, mesh = model(), mesh_of(2, 2, 2)
  shardings, notes = sharding.specs(
    full_tree(m), m, {"attn": 4, "ffn": 4}, mesh
  )
  assert notes == []
  got = {k: s.spec for k, s in by_name(shardings).items()}
  want = {
    "params/embed/table": P("tensor", "fsdp"),
    "params/head/kernel": P("tensor", "fsdp"),
    "params/final_norm/scale": P(None),
    "params/layers/attn/q/kernel": P(None, "fsdp", "tensor", None),
    "params/layers/attn/v/kernel": P(None, "fsdp", "tensor", None),
    "params/layers/attn/o/kernel": P(None, "tensor", None, "fsdp"),
    "params/layers/attn/o/bias": P(None, None),
    "params/layers/ffn/up/kernel": P(None, "fsdp", "tensor"),
    "params/layers/ffn/down/kernel": P(None, "tensor", "fsdp"),
    "params/layers/ffn/gate/bias": P(None, "tensor"),
    "router/layers/ffn_router/down": P(None, "fsdp", None),
    "router/layers/ffn_router/up": P(None, None, "tensor"),
    "router/layers/attn_router/logits": P(None, "tensor"),
    "router/layers/layer_router/up": P(None, None, None),
    "lora/layers/attn/q/b": P(None, None, "tensor", None),
    "lora/layers/attn/o/a": P(None, "tensor", None, None),
    "lora/layers/attn/o/b": P(None, None, "fsdp"),
    "lora/layers/ffn/down/a": P(None, "tensor", None),
    "lora/layers/ffn/down/b": P(None, None, "fsdp"),
  }
  assert {k: got[k] for k in want} == want


def test_every_rule_is_used_once():
  # A line that no leaf of the tree matches is a line nobody checks.
  import re

  names = list(by_name(full_tree(model())))
  for rule, _ in sharding.RULES:
    assert any(re.fullmatch(rule, name) for name in names), rule


def test_unknown_leaf_and_wrong_rank_are_refused():
  m, mesh = model(), mesh_of()
  groups = {"attn": 4, "ffn": 4}
  leaf = jax.ShapeDtypeStruct((2, 8), jnp.float32)
  with pytest.raises(ValueError, match="params/layers/attn/z .*matches 0"):
    tree = {"params": {"layers": {"attn": {"z": leaf}}}}
    sharding.specs(tree, m, groups, mesh)
  with pytest.raises(ValueError, match="attn/q/kernel.*wants 4 axes"):
    tree = {"params": {"layers": {"attn": {"q": {"kernel": leaf}}}}}
    sharding.specs(tree, m, groups, mesh)


def test_two_matches_are_refused(monkeypatch):
  twice = (*sharding.RULES, (r"params/embed/.*", "V D"))
  monkeypatch.setattr(sharding, "RULES", twice)
  tree = {"params": {"embed": {"table": jnp.zeros((32, 8))}}}
  with pytest.raises(ValueError, match="params/embed/table .*matches 2"):
    sharding.specs(tree, model(), {"attn": 0, "ffn": 0}, mesh_of())


def test_a_shard_never_splits_a_group():
  # 8 heads in 2 groups and 64 channels in 2 groups on 4 devices: heads and
  # channels would divide, groups do not.
  m, mesh = model(), mesh_of(tensor=4)
  groups = {"attn": 2, "ffn": 2}
  sharding._logged.clear()
  shardings, notes = sharding.specs(full_tree(m, 2, 2), m, groups, mesh)
  got = {k: s.spec for k, s in by_name(shardings).items()}
  assert got["params/layers/attn/q/kernel"] == P(None, None, None, None)
  assert got["params/layers/ffn/down/kernel"] == P(None, None, None)
  assert got["lora/layers/ffn/gate/b"] == P(None, None, None)
  assert got["router/layers/attn_router/up"] == P(None, None, None)
  assert got["params/layers/attn/k/kernel"] == P(None, None, "tensor", None)
  text = "\n".join(notes)
  assert "8 query heads in 2 groups do not divide by tensor=4" in text
  assert "64 FFN channels in 2 groups do not divide by tensor=4" in text
  assert "params/layers/attn/q/kernel" in text
  assert len(notes) == 4  # heads, channels, both routers' groups


def test_what_does_not_divide_is_replicated_and_said_once(caplog):
  m = model(n_heads=9, n_kv_heads=3, vocab=101, d_model=9)
  mesh = mesh_of(fsdp=2, tensor=2)
  groups = {"attn": 9, "ffn": 4}
  sharding._logged.clear()
  with caplog.at_level(logging.WARNING, "wide_jax.sharding"):
    shardings, notes = sharding.specs(full_tree(m, 9), m, groups, mesh)
    again = sharding.specs(full_tree(m, 9), m, groups, mesh)[1]
  got = {k: s.spec for k, s in by_name(shardings).items()}
  assert got["params/embed/table"] == P(None, None)
  assert got["params/layers/attn/k/kernel"] == P(None, None, None, None)
  assert got["params/layers/ffn/up/kernel"] == P(None, None, "tensor")
  text = "\n".join(notes)
  assert "9 query heads do not divide by tensor=2" in text
  assert "3 kv heads do not divide by tensor=2" in text
  assert "101 vocabulary do not divide by tensor=2" in text
  assert "9 model width do not divide by fsdp=2" in text
  assert again == notes and len(caplog.records) == len(notes)


def test_sharded_queries_with_replicated_keys():
  m, mesh = model(n_kv_heads=1), mesh_of(tensor=2)
  shardings, notes = sharding.specs(
    full_tree(m), m, {"attn": 4, "ffn": 4}, mesh
  )
  got = {k: s.spec for k, s in by_name(shardings).items()}
  assert got["params/layers/attn/q/kernel"] == P(None, None, "tensor", None)
  assert got["params/layers/attn/k/kernel"] == P(None, None, None, None)
  assert notes == []  # one kv head: there is nothing to split


@pytest.mark.parametrize("groups", [0, 1])
def test_methods_without_width_groups_split_as_they_come(groups):
  m, mesh = model(), mesh_of(tensor=4)
  tree = {"params": full_tree(m)["params"]}
  shardings, notes = sharding.specs(
    tree, m, {"attn": groups, "ffn": groups}, mesh
  )
  got = {k: s.spec for k, s in by_name(shardings).items()}
  assert got["params/layers/ffn/up/kernel"] == P(None, None, "tensor")
  assert got["params/layers/attn/q/kernel"] == P(None, None, "tensor", None)
  assert notes == []


def test_put_places_shards_and_keeps_values():
  m, mesh = model(), mesh_of(2, 2, 2)
  rng = np.random.default_rng(0)
  tree = jax.tree.map(
    lambda s: rng.normal(size=s.shape).astype(np.float32), full_tree(m)
  )
  shardings, _ = sharding.specs(tree, m, {"attn": 4, "ffn": 4}, mesh)
  placed = sharding.put(tree, shardings)
  jax.tree.map(np.testing.assert_array_equal, placed, tree)
  assert jax.tree.all(
    jax.tree.map(lambda x, s: x.sharding == s, placed, shardings)
  )
  kernel = placed["params"]["layers"]["ffn"]["up"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (2, 4, 32)
  count = sharding.put(np.int32(3), sharding.replicated(mesh))
  assert count.shape == () and count.dtype == jnp.int32 and count == 3
  moved = sharding.put(placed, sharding.replicated(mesh))
  jax.tree.map(np.testing.assert_array_equal, moved, tree)


def adamw():
  decay = {"router": 0.0, "lora": 0.1}
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.multi_transform(
      {
        k: optax.adamw(optax.linear_schedule(0, 1e-3, 10), weight_decay=w)
        for k, w in decay.items()
      },
      {"router": "router", "lora": "lora"},
    ),
  )


def test_optimiser_state_lives_with_its_parameters():
  m, mesh = model(), mesh_of(2, 2, 2)
  tree = full_tree(m)
  trainable = {k: tree[k] for k in ("router", "lora")}
  shardings, _ = sharding.specs(trainable, m, {"attn": 4, "ffn": 4}, mesh)
  for tx in (adamw(), optax.adamw(1e-3), optax.sgd(1e-2, momentum=0.9)):
    state = jax.eval_shape(tx.init, trainable)
    places = sharding.optimiser_specs(state, trainable, shardings)
    assert jax.tree.structure(places) == jax.tree.structure(state)
    params = by_name(shardings)
    moments = 0
    for name, place in by_name(places).items():
      owners = [p for p in params if name.endswith("/" + p)]
      if owners:
        moments += 1
        assert place == params[owners[0]], name
      else:
        assert place.spec == P(), name
    assert moments in (len(params), 2 * len(params))


def test_init_under_jit_with_the_shardings():
  m, mesh = model(), mesh_of(2, 2, 2)
  shapes = {"lora": full_tree(m)["lora"]}
  shardings, _ = sharding.specs(shapes, m, {"attn": 4, "ffn": 4}, mesh)
  trainable = sharding.put(
    jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes), shardings
  )
  tx = optax.adam(1e-3)
  state = jax.eval_shape(tx.init, trainable)
  places = sharding.optimiser_specs(state, trainable, shardings)
  state = jax.jit(tx.init, out_shardings=places)(trainable)
  kernel = state[0].mu["lora"]["layers"]["ffn"]["up"]["b"]
  assert kernel.addressable_shards[0].data.shape == (2, RANK, 32)
  like = sharding.abstract(state, places)
  assert jax.tree.structure(like) == jax.tree.structure(state)
  assert like[0].count.sharding.spec == P()


def test_optimiser_without_parameters_is_refused():
  with pytest.raises(ValueError, match="no trainable leaf"):
    sharding.optimiser_specs((), {}, {})


def test_batches():
  mesh = mesh_of(2, 2, 2)
  assert sharding.batch_spec(mesh, (8, 5)).spec == P(("data", "fsdp"), None)
  spec = sharding.batch_spec(mesh, (3, 8, 5)).spec
  assert spec == P(None, ("data", "fsdp"), None)
  ids = np.arange(40, dtype=np.int32).reshape(8, 5)
  placed = sharding.put(ids, sharding.batch_spec(mesh, ids.shape))
  assert placed.addressable_shards[0].data.shape == (2, 5)
  np.testing.assert_array_equal(placed, ids)
  with pytest.raises(ValueError, match=r"batch_size=6 .*2 \* 2 = 4"):
    sharding.batch_spec(mesh, (6, 5))
  with pytest.raises(ValueError, match=r"\[B, T\].*\(8,\)"):
    sharding.batch_spec(mesh, (8,))


def test_fsdp_moves_weights_and_never_the_batch():
  """No collective carries rows of the whole batch, in a router step.

  Without `Decoder.spread` XLA all-gathers the FFN's activations and all-reduces
  the logits of all 8 rows.
  """
  rows, length = 8, 16
  m, mesh = model(), sharding.make_mesh(MeshConfig(data=1, fsdp=4))
  run = RunConfig(
    route=RouteConfig(ffn_group=16),
    data=DataConfig(seq_len=length, batch_size=rows),
  )
  decoder = modules.Decoder(
    m, run.route, attention="xla", spread=sharding.activation_spec(mesh)
  )

  def places(tree):
    return sharding.specs(tree, m, run.route.groups(m), mesh)[0]

  tree = {k: v for k, v in modules.abstract(decoder).items() if v}
  tree = sharding.abstract(tree, places(tree))
  router, frozen = steps.split(tree, ("router",))
  state = jax.eval_shape(
    functools.partial(steps.init_state, stage=run.routers), router
  )
  batch = {
    name: jax.ShapeDtypeStruct(
      (1, rows, length),
      jnp.float32 if name == "weights" else jnp.int32,
      sharding=sharding.batch_spec(mesh, (1, rows, length)),
    )
    for name in ("ids", "targets", "segments", "positions", "weights")
  }
  macs = flops.layer_macs(m, run.route, length)
  spec = steps.StepSpec(decoder, run, Phase.ROUTERS, macs, "train")
  step = jax.jit(functools.partial(steps.train_step, spec))
  text = step.lower(state, frozen, batch, None).compile().as_text()
  moved = re.findall(
    r"(\w+\[[\d,]*\])\S* (all-gather|all-reduce|all-to-all)\(", text
  )
  assert any(kind == "all-gather" for _, kind in moved), moved
  # Token ids may travel (to rows of a split embedding); activations not.
  assert not [x for x in moved if f"f32[{rows},{length}," in x[0]], moved
