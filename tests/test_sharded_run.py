"""The same run on one device and on several gives the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from wide_jax import prepare, sharding, stages
from wide_jax.config import MeshConfig, ModelSource, RunConfig
from wide_jax.routing import KINDS, threshold_gate

MESHES = {
  "one": ("mesh.data=1",),
  "data4": ("mesh.data=4",),
  "fsdp4": ("mesh.data=1", "mesh.fsdp=4"),
  "fsdp2_tensor2": ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2"),
}
SPREAD = tuple(MESHES)[1:]
PHASES = ("routers", "recover")


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
  # Not shared: see quick_compiling.
  with tiny_runs.quick_compiling(tmp_path_factory, share=False) as folder:
    yield folder


class Steps:
  """A step function that hands out its decisions and follows a reference's.

  A step is run free. Where it decided otherwise than the reference did (a logit
  within rounding of its threshold), that is counted, and the step repeated from
  the state before it with the reference's decisions forced.

  Attributes:
    masks: {kind: bool [A, L, B, T, G]} of every free step.
    losses: of every free step.
    differing: decisions of every free step that were not the reference's.
    last: the arguments of the last step.
  """

  def __init__(self, step_fn, mesh, reference=()):
    self.step_fn, self.mesh, self.reference = step_fn, mesh, reference
    self.masks, self.losses, self.differing = [], [], []

  def __call__(self, state, frozen, batch, thresholds):
    self.last = (self.copied(state), frozen, batch, thresholds)
    state, out = self.step_fn(state, frozen, batch, thresholds)
    masks = jax.device_get(out.pop("masks"))
    self.masks.append(masks)
    self.losses.append(float(out["loss"]))
    if not self.reference:
      return state, out
    want = self.reference[len(self.masks) - 1]
    differing = sum(int((masks[k] != want[k]).sum()) for k in KINDS)
    self.differing.append(differing)
    return self.again(want) if differing else (state, out)

  def again(self, masks):
    """The last step once more, with these decisions."""
    state, frozen, batch, thresholds = self.last
    rows = NamedSharding(self.mesh, P(None, None, sharding.BATCH_AXES))
    batch = {**batch, "masks": sharding.put(masks, rows)}
    state, out = self.step_fn(self.copied(state), frozen, batch, thresholds)
    jax.tree.map(np.testing.assert_array_equal, out.pop("masks"), masks)
    return state, out

  @staticmethod
  def copied(state):
    """Since a step gives its state's memory away."""
    return jax.tree.map(jnp.copy, state)


def following(reference: dict[str, list]) -> type[stages.Stage]:
  """A stage that runs `Steps`; reference: masks of each step, by stage."""

  class Following(stages.Stage):
    def _loop(self, step_fn, *rest):
      steps = reference.get(self.plan.phase.value, ())
      self.steps = Steps(step_fn, self.p.mesh, steps)
      return super()._loop(self.steps, *rest)

    def train(self):
      self.decoder = self.decoder.copy(capture=("masks",))
      return super().train()

  return Following


@pytest.fixture(scope="module")
def run_on(programs, tmp_path_factory):
  @functools.cache
  def make(mesh: str) -> tiny_runs.Finished:
    reference = {}
    if mesh != "one":
      reference = {p: s.steps.masks for p, s in make("one").stages.items()}
    return tiny_runs.run(
      tmp_path_factory.mktemp(mesh), *MESHES[mesh], stage=following(reference)
    )

  return make


def masks(finished: tiny_runs.Finished, phase: str) -> np.ndarray:
  """Keep decisions on the evaluation text, at the calibrated thresholds."""
  stage = finished.stages[phase]
  decoder = stage.decoder.copy(capture=("masks",))
  gate = threshold_gate(stage.evaluate()["thresholds"])

  @jax.jit
  def decide(variables, ids, positions, segments, gate):
    aux = decoder.apply(variables, ids, positions, segments, gate)[1]
    return aux["masks"]

  out = []
  for batch in stage.p.texts[stage.run.eval.windows[0]]:
    placed = stage.p.place(batch)
    inputs = [placed[k] for k in ("ids", "positions", "segments")]
    kept = decide(stage.variables, *inputs, gate)
    out += [np.asarray(kept[k]).ravel() for k in KINDS]
  return np.concatenate(out)


@pytest.mark.parametrize("mesh", SPREAD)
@pytest.mark.parametrize("phase", PHASES)
def test_same_loss_at_every_step(run_on, mesh, phase):
  """Of free steps, but where one decided otherwise: there of the replay."""
  one = run_on("one").lines(stage=phase)
  many = run_on(mesh).lines(stage=phase)
  assert [r["step"] for r in many] == [r["step"] for r in one]
  assert len(one) == 20
  for name in ("loss", "lm_loss", "realised", "sparsity_flops"):
    np.testing.assert_allclose(
      [r[name] for r in many], [r[name] for r in one], rtol=1e-5, err_msg=name
    )


@pytest.mark.parametrize("mesh", SPREAD)
@pytest.mark.parametrize("phase", PHASES)
def test_same_decisions(run_on, mesh, phase):
  """All but 1e-5 of those of the free steps and of the evaluation text."""
  one, many = (masks(run_on(m), phase) for m in ("one", mesh))
  assert one.size == 2 * 4 * 1024 * 12  # 4 layers, 8 + 16 groups a token
  assert 0.3 < one.mean() < 0.7
  differing = run_on(mesh).stages[phase].steps.differing
  assert len(differing) == 20
  total = 20 * 4 * 256 * 24 + one.size
  assert sum(differing) + np.sum(one != many) <= 1e-5 * total


def test_a_flipped_decision_is_found_and_replayed(run_on):
  """The mesh against a reference of which one decision was turned."""
  one = run_on("one").stages["routers"].steps
  many = run_on("fsdp2_tensor2").stages["routers"].steps

  def loss_of(masks):
    return float(one.again(masks)[1]["loss"])

  assert loss_of(one.masks[-1]) == pytest.approx(one.losses[-1], rel=1e-6)
  flipped = jax.tree.map(np.copy, one.masks[-1])
  flipped["ffn"][0, 0, 1, 20, 3] ^= True
  want = loss_of(flipped)
  assert abs(want / one.losses[-1] - 1) > 1e-4

  follower = Steps(many.step_fn, many.mesh, [flipped])
  state, *rest = many.last
  _, out = follower(follower.copied(state), *rest)
  assert follower.differing == [many.differing[-1] + 1]
  assert follower.losses == [pytest.approx(one.losses[-1], rel=1e-5)]
  assert float(out["loss"]) == pytest.approx(want, rel=1e-5)


def shard_shapes(tree) -> dict[str, tuple[int, ...]]:
  """What one device holds of every leaf."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    sharding.leaf_name(path): leaf.addressable_shards[0].data.shape
    for path, leaf in leaves
  }


# 4 layers, D 192, 8 heads and 4 kv heads of 32, F 512, V 384; 8 head groups,
# 16 channel groups, router rank 32, LoRA rank 16.
WANT = {
  "fsdp4": {
    "params/embed/table": (384, 48),
    "params/layers/attn/q/kernel": (4, 48, 8, 32),
    "params/layers/attn/o/kernel": (4, 8, 32, 48),
    "params/layers/ffn/down/kernel": (4, 512, 48),
    "router/layers/attn_router/down": (4, 48, 32),
    "lora/layers/ffn/gate/a": (4, 48, 16),
  },
  "fsdp2_tensor2": {
    "params/embed/table": (192, 96),
    "params/layers/attn/q/kernel": (4, 96, 4, 32),
    "params/layers/attn/k/kernel": (4, 96, 2, 32),
    "params/layers/ffn/gate/kernel": (4, 96, 256),
    "params/layers/ffn/down/kernel": (4, 256, 96),
    "router/layers/attn_router/up": (4, 32, 4),
    "router/layers/ffn_router/up": (4, 32, 8),
    "lora/layers/attn/q/b": (4, 16, 4, 32),
    "lora/layers/ffn/down/a": (4, 256, 16),
  },
}


@pytest.mark.parametrize("mesh", WANT)
def test_leaves_are_really_spread(run_on, mesh):
  """After training as before it, and Adam's moments beside their leaves."""
  stage = run_on(mesh).stages["recover"]
  found = shard_shapes(stage.variables)
  assert {name: found[name] for name in WANT[mesh]} == WANT[mesh]
  trainable = {k: stage.variables[k] for k in ("router", "lora")}
  state, _ = stage._fresh_state(trainable)
  moments = shard_shapes(state["opt_state"])
  for name, shape in WANT[mesh].items():
    if not name.startswith("params/"):
      ours = [s for path, s in moments.items() if path.endswith(name)]
      assert ours == [shape, shape], name


def odd_run(**mesh) -> RunConfig:
  """6 heads, 3 kv heads, 6 groups of 16 channels: 4 divides none of them.

  It does divide the 96 channels, which would cut groups in two.
  """
  run = tiny_runs.config("route.ffn_group=16", "data.max_tokens=5000")
  shape = {
    "model_type": "llama",
    "vocab_size": 386,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
  }
  return dataclasses.replace(
    run,
    model=ModelSource(
      path="random", tokenizer="embedded", dtype="float32", shape=shape
    ),
    mesh=MeshConfig(**mesh),
  )


def test_what_does_not_divide_is_whole_and_said(tmp_path):
  """A shard never splits a group (acceptance 7)."""
  scores = {}
  for tensor in (1, 4, 2):  # the first settles the channel order for all
    run = odd_run(data=1, tensor=tensor)
    prepared = prepare.prepare(run, tmp_path)
    evaluator = prepared.evaluator(None, None, 64)
    variables = {"params": prepared.params}
    scores[tensor] = evaluator.score(variables, None, prepared.texts[64]).nll
    told = " ".join(prepared.notes)
    held = shard_shapes(variables)
    gate = held["params/layers/ffn/gate/kernel"]
    query = held["params/layers/attn/q/kernel"]
    value = held["params/layers/attn/v/kernel"]
    if tensor == 4:
      assert (gate, query, value) == ((2, 48, 96), (2, 48, 6, 8), (2, 48, 3, 8))
      for part in (
        "6 query heads do not divide by tensor=4",
        "96 FFN channels in 6 groups do not divide by tensor=4",
        "6 FFN groups of the routers do not divide by tensor=4",
        "386 vocabulary do not divide by tensor=4",
      ):
        assert part in told, told
      assert "router/layers/ffn_router/up" in told
    if tensor == 2:
      assert (gate, query, value) == ((2, 48, 48), (2, 48, 3, 8), (2, 48, 3, 8))
      assert "3 kv heads do not divide by tensor=2" in told
      assert "query heads" not in told and "FFN" not in told.split("mesh:")[1]
  np.testing.assert_allclose([scores[2], scores[4]], [scores[1]] * 2, rtol=1e-5)
