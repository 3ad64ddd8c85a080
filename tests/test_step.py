"""One optimiser step: schedule, accumulation, what is frozen, what is skipped.

Trials E1 to E4. Few programs, each compiled once for the whole file.
"""

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_fixtures import (
  MODEL,
  ROUTE,
  forward,
  jit,
  lora,
  route,
  same,
  token_ids,
  variables,
)

from wide_jax import flops, loss, step
from wide_jax.config import (
  BudgetConfig,
  Method,
  Phase,
  RunConfig,
  StageConfig,
)
from wide_jax.modules import Decoder
from wide_jax.routing import KINDS, Gate

MACS = flops.layer_macs(MODEL, ROUTE, 8)
FIXED = {k: jnp.full((2,), 0.2, jnp.float32) for k in KINDS}


def make_spec(phase, decoder, gate_mode, alpha=20.0, **stage):
  run = RunConfig(
    route=decoder.route or ROUTE,
    budget=BudgetConfig(target=0.5, alpha=alpha),
    **{phase: StageConfig(**(dict(steps=10, warmup=0.0) | stage))},
  )
  return step.StepSpec(decoder, run, Phase(phase), MACS, gate_mode)


def make_batch(count=1, rows=3, length=8, seed=0, targets=None):
  """[A, B, T] with unequal numbers of targets and some padding."""
  ids = token_ids(count * rows, length + 1, seed)
  weights = np.random.default_rng(seed).integers(0, 2, ids[:, 1:].shape)
  if targets is not None:
    weights = np.arange(length)[None] < np.asarray(targets)[:, None]
  segments = np.ones_like(ids[:, 1:])
  segments[-1, -2:] = 0
  weights = weights * segments
  out = {
    "ids": ids[:, :-1],
    "targets": ids[:, 1:],
    "weights": weights.astype(np.float32),
    "segments": segments,
    "positions": np.broadcast_to(
      np.arange(length, dtype=np.int32), ids[:, 1:].shape
    ),
  }
  return {
    k: jnp.asarray(v.reshape(count, rows, length)) for k, v in out.items()
  }


class Trainer:
  """A spec with its split tree and its compiled step."""

  def __init__(self, spec, names, held):
    self.spec, self.held = spec, held
    self.trainable, self.frozen = step.split(held, names)
    self._step = jit(functools.partial(step.train_step, spec))

  def fresh(self):
    return step.init_state(self.trainable, self.spec.stage)

  def __call__(self, state, batch, frozen=None):
    frozen = self.frozen if frozen is None else frozen
    return self._step(state, frozen, batch, FIXED)

  def run(self, steps, start=None):
    state, out = start or self.fresh(), []
    for i in range(steps):
      state, metrics = self(state, make_batch(seed=int(state["step"]) + i))
      out.append(jax.tree.map(np.asarray, metrics))
    return state, out


@pytest.fixture(scope="module")
def routers():
  """Stage 1 with everything on: noise, budget, KL, decay of LoRA leaves."""
  decoder = Decoder(MODEL, ROUTE)
  spec = make_spec("routers", decoder, "train", kl=0.5, weight_decay=0.1)
  return Trainer(spec, ("router",), variables(decoder))


@pytest.fixture(scope="module")
def adapters():
  """Recovery with frozen routers: hard gates, so nothing is drawn."""
  decoder = Decoder(MODEL, ROUTE, lora())
  spec = make_spec(
    "recover", decoder, "threshold", weight_decay=0.1, clip=1e9, lr=1e-2
  )
  names = step.trainable_collections(
    Phase.RECOVER, ROUTE, dataclasses.replace(spec.stage, train_routers=False)
  )
  assert names == ("lora",)
  return Trainer(spec, names, variables(decoder))


@pytest.fixture(scope="module")
def bfloat16():
  """Recovery of routers and adapters in the compute dtype that ships."""
  decoder = Decoder(MODEL, ROUTE, lora(dropout=0.1), jnp.bfloat16)
  spec = make_spec("recover", decoder, "train", lr=1e-5)
  return Trainer(spec, ("router", "lora"), variables(decoder))


# --- the schedule (E4) -------------------------------------------------------


def test_schedule_in_optimiser_steps():
  stage = StageConfig(steps=100, lr=1e-3, end_lr=1e-5, warmup=0.1, accumulate=4)
  rate = step.schedule(stage)
  for at, want in ((0, 0), (1, 1e-4), (10, 1e-3), (55, 5.05e-4), (100, 1e-5)):
    np.testing.assert_allclose(rate(at), want, rtol=1e-5, atol=1e-12)
  traced = jax.jit(rate)(jnp.arange(101))
  assert (np.diff(traced[:11]) > 0).all() and (np.diff(traced[10:]) < 0).all()


@pytest.mark.parametrize("warmup,first,last", [(0.0, 1e-3, 0), (1.0, 0, 1e-3)])
def test_schedule_at_its_edges(warmup, first, last):
  stage = StageConfig(steps=50, lr=1e-3, warmup=warmup)
  rates = np.asarray(step.schedule(stage)(jnp.arange(51)))
  assert np.isfinite(rates).all()
  np.testing.assert_allclose(rates[[0, -1]], [first, last], atol=1e-9)
  one = step.schedule(StageConfig(steps=1, lr=1e-3, warmup=warmup))
  assert np.isfinite(one(0)) and np.isfinite(one(1))


# --- what is trained (E2) ----------------------------------------------------


def test_collections_by_phase():
  stage = StageConfig()
  frozen = StageConfig(train_routers=False)
  cases = [
    ("wide", {}, ("router",), ("router", "lora")),
    ("token_depth", {}, ("router",), ("router", "lora")),
    ("random", {}, (), ("lora",)),
    ("dense", {}, (), ("lora",)),
    ("static_width", {}, (), ("lora",)),
    (
      "static_width",
      {"static_scores": "learned"},
      ("router",),
      ("router", "lora"),
    ),
  ]
  for method, changes, first, second in cases:
    own = route(method, **changes)
    assert step.trainable_collections(Phase.ROUTERS, own, stage) == first
    assert step.trainable_collections(Phase.RECOVER, own, stage) == second
    assert step.trainable_collections(Phase.RECOVER, own, frozen) == ("lora",)
    assert step.trainable_collections(Phase.DENSE_LORA, own, stage) == ("lora",)
  assert Method("wide") is Method.WIDE


def test_split_refuses_what_is_not_there(routers):
  for tree in ({"params": {}}, {"params": {}, "lora": {}}):
    with pytest.raises(ValueError, match="nothing to train in 'lora'"):
      step.split(tree, ("lora",))
  with pytest.raises(ValueError, match="'routers'.*router"):
    step.split(routers.held, ("routers",))
  own, rest = step.split(routers.held, ("router",))
  assert set(own) == {"router"} and set(rest) == {"params"}


def digest(tree) -> str:
  out = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    out.update(str(path).encode() + np.asarray(leaf).tobytes())
  return out.hexdigest()


@pytest.mark.parametrize("name", ["routers", "adapters", "bfloat16"])
def test_frozen_bytes_never_change_and_the_state_is_small(name, request):
  trainer = request.getfixturevalue(name)
  before = digest(trainer.frozen)
  state, _ = trainer.run(5)
  assert digest(trainer.frozen) == before
  assert set(state["trainable"]) == set(trainer.trainable)
  assert {"router", "params", "lora"} >= set(trainer.frozen)
  moved = jax.tree.map(
    lambda a, b: (np.asarray(a) != np.asarray(b)).any(),
    state["trainable"],
    trainer.trainable,
  )
  assert all(jax.tree.leaves(moved))
  count = flops.count_params(state["trainable"])
  extra = flops.count_bytes(state["opt_state"]) - 8 * count
  assert 0 <= extra <= 64  # a counter or two


def test_routers_do_not_decay_unless_asked():
  tree = {
    "router": {"up": jnp.full((3,), 2.0)},
    "lora": {"a": jnp.full((3,), 2.0)},
  }
  zero = jax.tree.map(jnp.zeros_like, tree)
  for changes, want in (
    (dict(weight_decay=0.1), (0.0, 0.2)),
    (dict(weight_decay=0.1, router_weight_decay=0.3), (0.6, 0.2)),
    ({}, (0.0, 0.02)),
  ):
    tx = step.optimizer(StageConfig(**changes))
    updates, _ = tx.update(zero, tx.init(tree), tree)
    got = (updates["router"]["up"][0], updates["lora"]["a"][0])
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_clip_is_by_the_norm_of_all_trainables():
  tree = {"router": {"up": jnp.zeros(2)}, "lora": {"a": jnp.zeros(2)}}
  grads = {"router": {"up": jnp.full(2, 3.0)}, "lora": {"a": jnp.full(2, 4.0)}}
  tx = step.optimizer(StageConfig(clip=1.0))
  _, state = tx.update(grads, tx.init(tree), tree)
  norm = np.sqrt(2 * 9 + 2 * 16)
  moments = jax.tree.leaves(adam(state).mu)
  got = sorted(float(m[0]) for m in moments)
  np.testing.assert_allclose(got, [0.3 / norm, 0.4 / norm], rtol=1e-5)


def adam(opt_state):
  return next(s for s in opt_state if hasattr(s, "mu"))


# --- nothing to learn from (E1) ----------------------------------------------


@pytest.mark.parametrize("name", ["routers", "adapters"])
def test_a_step_without_targets_changes_nothing(name, request):
  trainer = request.getfixturevalue(name)
  state, _ = trainer.run(1)
  empty = make_batch(targets=[0, 0, 0])
  after, metrics = trainer(state, empty)
  same(after["trainable"], state["trainable"])
  same(after["opt_state"], state["opt_state"])
  assert after["step"] == 2 and after["skipped"] == 1
  assert metrics["skipped"] == 1 and metrics["tokens"] == 0
  assert all(np.isfinite(m).all() for m in jax.tree.leaves(metrics))
  later, metrics = trainer(after, make_batch(seed=9))
  assert later["skipped"] == 1 and metrics["lr"] == pytest.approx(
    float(step.schedule(trainer.spec.stage)(2))
  )


def test_a_step_that_is_not_finite_changes_nothing(routers):
  state, _ = routers.run(1)
  broken = jax.tree.map(lambda a: a, routers.frozen)
  norm = broken["params"]["final_norm"]
  norm["scale"] = norm["scale"].at[3].set(jnp.nan)
  after, metrics = routers(state, make_batch(seed=3), broken)
  assert not np.isfinite(metrics["loss"])
  same(after["trainable"], state["trainable"])
  same(after["opt_state"], state["opt_state"])
  assert after["step"] == 2 and after["skipped"] == 1


def gradient(state):
  """First moments after one step: a tenth of the (unclipped) gradient."""
  return jax.tree.map(lambda m: 10 * np.asarray(m), adam(state["opt_state"]).mu)


def close_trees(a, b, rel=1e-5):
  """Within `rel` of each leaf's largest entry."""
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.abs(y).max() > 0
    np.testing.assert_allclose(x, y, rtol=0, atol=rel * np.abs(y).max())


def test_a_row_without_targets_leaves_the_gradient_alone(adapters):
  good = make_batch(targets=[5, 0, 6], seed=4)
  other = make_batch(targets=[5, 0, 6], seed=5)
  swapped = {k: v.at[:, 1].set(other[k][:, 1]) for k, v in good.items()}
  padded = {k: v.at[:, 1].set(0) for k, v in good.items()}
  states = [adapters(adapters.fresh(), b)[0] for b in (good, swapped, padded)]
  for state in states[1:]:
    close_trees(gradient(state), gradient(states[0]))
  without = {k: v[:, jnp.array([0, 2])] for k, v in good.items()}
  state, _ = adapters(adapters.fresh(), without)
  close_trees(gradient(state), gradient(states[0]))


# --- accumulation ------------------------------------------------------------


def test_micro_batches_equal_one_large_batch(adapters):
  """Token-weighted: rows of 7, 1 and 3 targets, and one of none."""
  large = make_batch(1, 4, targets=[7, 1, 3, 0], seed=2)
  small = {k: v.reshape(4, 1, -1) for k, v in large.items()}
  one, metrics = adapters(adapters.fresh(), large)
  many, metrics_many = adapters(adapters.fresh(), small)
  assert metrics["tokens"] == metrics_many["tokens"] == 11
  close_trees(gradient(many), gradient(one))
  for name in ("loss", "lm_loss", "grad_norm"):
    np.testing.assert_allclose(metrics_many[name], metrics[name], rtol=1e-5)
  logits, _ = forward(
    adapters.spec.decoder,
    adapters.held,
    large["ids"][0],
    Gate("threshold", thresholds=FIXED),
    large["segments"][0],
  )
  logits = np.float64(logits)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  picked = np.take_along_axis(
    log_p, np.asarray(large["targets"])[0][..., None], -1
  )
  weights = np.asarray(large["weights"])[0]
  want = -(picked[..., 0] * weights).sum() / weights.sum()
  np.testing.assert_allclose(metrics["lm_loss"], want, rtol=1e-5)


# --- replay of decisions -----------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_is_replayed_with_its_decisions(count):
  """Same metrics and gradient by its own masks; a turned token moves it."""
  decoder = Decoder(MODEL, ROUTE, capture=("masks",))
  trainer = Trainer(
    make_spec("routers", decoder, "train"), ("router",), variables(decoder)
  )
  batch = make_batch(count)
  state, metrics = trainer(trainer.fresh(), batch)
  masks = metrics["masks"]
  groups = ROUTE.groups(MODEL)
  for kind in KINDS:
    shape = (count, MODEL.n_layers, *batch["ids"].shape[1:], groups[kind])
    assert masks[kind].shape == shape and masks[kind].dtype == bool
    assert 0 < masks[kind].mean() < 1
  again, repeated = trainer(trainer.fresh(), {**batch, "masks": masks})
  same(repeated.pop("masks"), masks)
  close_trees(gradient(again), gradient(state))
  for name in ("loss", "lm_loss", "grad_norm", "budget"):
    np.testing.assert_allclose(repeated[name], metrics[name], rtol=1e-6)
  turned = masks["ffn"].at[-1, 0, 0, 0].apply(jnp.logical_not)
  other = {**masks, "ffn": turned}
  _, moved = trainer(trainer.fresh(), {**batch, "masks": other})
  same(moved["masks"], other)
  assert abs(moved["lm_loss"] - metrics["lm_loss"]) > 1e-5


# --- precision (E3) ----------------------------------------------------------


def test_trainables_and_moments_are_float32_under_bfloat16(bfloat16):
  assert bfloat16.spec.decoder.dtype == jnp.bfloat16
  state, metrics = bfloat16.run(2)
  leaves = jax.tree.leaves((state["trainable"], adam(state["opt_state"])[1:]))
  assert {a.dtype.name for a in leaves} == {"float32"}
  assert all(np.isfinite(m["loss"]) for m in metrics)
  half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), bfloat16.trainable)
  again = step.init_state(half, bfloat16.spec.stage)
  dtypes = {a.dtype.name for a in jax.tree.leaves(again["trainable"])}
  assert dtypes == {"float32"}


def test_small_updates_are_not_lost(bfloat16):
  """Adam's first step is the rate, 1e-5; bfloat16 near 1 has steps of 4e-3."""
  trainable = jax.tree.map(lambda a: a, bfloat16.trainable)
  bias = trainable["router"]["layers"]["ffn_router"]
  bias["up_bias"] = jnp.ones_like(bias["up_bias"])
  state = step.init_state(trainable, bfloat16.spec.stage)
  after, _ = bfloat16(state, make_batch(seed=1))
  moved = np.abs(
    np.asarray(after["trainable"]["router"]["layers"]["ffn_router"]["up_bias"])
    - 1
  )
  # float32 near 1 has steps of 1.2e-7 (6e-8 below it).
  np.testing.assert_allclose(moved, 1e-5, atol=1.3e-7)


# --- determinism and metrics -------------------------------------------------


@pytest.mark.parametrize("name", ["routers", "bfloat16"])
def test_same_seed_same_metrics_and_resume_goes_on(name, request):
  """Noise, temperature and dropout come from (seed, step) alone."""
  trainer = request.getfixturevalue(name)
  batch = make_batch(seed=7)
  states, metrics = [trainer.fresh()], []
  for _ in range(3):
    state, out = trainer(states[-1], batch)
    states.append(state)
    metrics.append(jax.tree.map(np.asarray, out))
  again, out = trainer(trainer.fresh(), batch)
  same(again, states[1])
  same(jax.tree.map(np.asarray, out), metrics[0])
  # From the state on disk at step 2, as bytes.
  saved = jax.tree.map(lambda a: jnp.asarray(np.array(a)), states[2])
  again, out = trainer(saved, batch)
  same(again, states[3])
  same(jax.tree.map(np.asarray, out), metrics[2])
  # Another step draws other noise on the same parameters.
  moved = {**trainer.fresh(), "step": jnp.int32(1)}
  _, out = trainer(moved, batch)
  assert out["lm_loss"] != metrics[0]["lm_loss"]


def test_metrics_add_up(routers):
  _, (first, *_) = routers.run(1)
  total = first["lm_loss"] + first["budget"] + 0.5 * first["kl"]
  np.testing.assert_allclose(first["loss"], total, rtol=1e-5)
  np.testing.assert_allclose(
    first["budget"], 20 * abs(0.5 - first["sparsity"]["mean"]), rtol=1e-4
  )
  for name, kind in (("attention", "attn"), ("ffn", "ffn")):
    layers = first["skip_by_layer"][kind]
    assert layers.shape == (2,)
    np.testing.assert_allclose(
      first["sparsity"][name], layers.mean(), rtol=1e-5
    )
  assert first["tau"] == 5.0 and first["kl"] > 0 and first["grad_norm"] > 0
  assert first["lr"] == pytest.approx(2e-3)


def test_loss_is_that_of_the_noisy_model_and_pads_are_left_out(routers):
  """The step's numbers again, from the decoder, its key and the losses."""
  batch = make_batch(seed=0)
  _, (got, *_) = routers.run(1)
  run, phase = routers.spec.run, routers.spec.phase
  key = jax.random.fold_in(jax.random.key(run.seed), 0)
  key = jax.random.fold_in(key, list(Phase).index(phase))
  gate_key, _ = jax.random.split(jax.random.fold_in(key, 0))
  inputs = [batch[k][0] for k in ("ids", "positions", "segments")]
  gate = Gate("train", gate_key, jnp.float32(5.0))
  decoder = routers.spec.decoder
  hidden, aux = jit(decoder.copy(capture=("masks",)).apply)(
    routers.held, *inputs, gate
  )
  dense, _ = jit(decoder.apply)(routers.held, *inputs)
  table = routers.held["params"]["embed"]["table"]
  weights, targets = batch["weights"][0], batch["targets"][0]
  nll = loss.next_token_loss(hidden, table, targets, weights)
  np.testing.assert_allclose(got["lm_loss"], nll / weights.sum(), rtol=1e-5)
  kl = loss.kl_to_dense(hidden, dense, table, weights)
  np.testing.assert_allclose(got["kl"], kl / weights.sum(), rtol=1e-4)
  real = np.asarray(inputs[2]) > 0
  assert 0 < (~real).sum()
  for name, kind in (("attention", "attn"), ("ffn", "ffn")):
    skipped = 1 - np.asarray(aux["masks"][kind])[:, real].mean()
    np.testing.assert_allclose(got["sparsity"][name], skipped, atol=1e-6)


def test_stage_1_reaches_its_target(routers):
  """Sixty steps with the budget alone nearly close the gap to 0.5."""
  spec = routers.spec
  stage = dataclasses.replace(spec.stage, steps=60, lr=3e-2, kl=0.0)
  trainer = Trainer(
    dataclasses.replace(spec, run=dataclasses.replace(spec.run, routers=stage)),
    ("router",),
    {**routers.held, "router": _open(routers.held["router"])},
  )
  _, metrics = trainer.run(60)
  rates = [m["sparsity"]["mean"] for m in metrics]
  assert rates[0] < 0.3
  # 264 and 176 draws a layer: a standard deviation of 2.4% each step.
  assert abs(np.mean(rates[-10:]) - 0.5) < 0.05


def _open(router):
  """Routers that keep nearly everything, as they start."""
  return jax.tree_util.tree_map_with_path(
    lambda path, a: jnp.full_like(a, 2.0) if path[-1].key == "up_bias" else a,
    router,
  )


def test_the_dense_model_takes_adapters_too():
  decoder = Decoder(MODEL, None, lora())
  trainer = Trainer(
    make_spec("dense_lora", decoder, "open"), ("lora",), variables(decoder)
  )
  state, (metrics,) = trainer.run(1)
  assert set(state["trainable"]) == {"lora"} and "tau" not in metrics
  assert all(float(v) == 0 for v in metrics["sparsity"].values())
