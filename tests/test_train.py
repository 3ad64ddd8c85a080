"""Whole runs: every method and option, exports, repeatability, mistakes."""

import functools
import pathlib

import jax
import numpy as np
import pytest
import tiny_runs

from wide_jax import cli, evaluate, export, train, weights
from wide_jax.checkpoint import Checkpoints
from wide_jax.modules import Decoder

# A program is compiled for every number of steps: all tests take these.
FEW = (
  "routers.steps=3",
  "recover.steps=3",
  "checkpoint.every=3",
  "eval.max_tokens=256",
  "eval.calibration_tokens=512",
)
# Less of what takes time and is tried in the other runs.
SMALL = (
  *FEW,
  "lora.dropout=0.0",
  "lora.targets=('q', 'down')",
  "regroup.enabled=False",
)


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
  with tiny_runs.quick_compiling(tmp_path_factory) as folder:
    yield folder


@pytest.fixture(scope="module")
def wide(programs, tmp_path_factory) -> tiny_runs.Finished:
  return tiny_runs.run(tmp_path_factory.mktemp("wide"), *FEW)


def close(a, b, tolerance=1e-6) -> bool:
  return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance))


# --- what a run leaves -------------------------------------------------------


def test_files_and_fields(wide):
  """What design.md, section 3, names."""
  for name in ("metrics.jsonl", "checkpoints", "tensorboard", "export"):
    assert (wide.workdir / name).exists()
  for name in ("curves", "perplexity", "keep_rates_routers"):
    assert (wide.workdir / "figures" / f"{name}.png").stat().st_size > 10_000
  summary = wide.summary
  assert 1 < summary["dense"]["ppl"] < summary["random"]["ppl"]
  assert abs(summary["random"]["sparsity"]["mean"] - 0.5) < 0.02
  assert [s["name"] for s in summary["stages"]] == ["routers", "recover"]
  for stage in summary["stages"]:
    assert stage["ppl"] == pytest.approx(np.exp(stage["nll"]))
    assert stage["tokens_per_s"] > 0
    assert stage["steps"] == 3
    sparsity = stage["sparsity"]
    assert sparsity["target"] == 0.5
    assert sparsity["realised"] == sparsity["mean"]
    for name in ("attention", "ffn", "flops"):
      assert 0 <= sparsity[name] <= 1
  for row in wide.lines():
    assert np.isfinite([row["loss"], row["lm_loss"], row["grad_norm"]]).all()
    assert row["target"] == 0.5 and row["skipped"] == 0


def test_frozen_leaves_keep_their_bytes(wide):
  """Also: Adam's state is two float32 numbers a trainable parameter."""
  for name, stage in wide.stages.items():
    order = np.load(wide.workdir / "channel_order.npy")
    fresh = weights.load_params("embedded", channel_order=order).params
    now = stage.variables["params"]
    assert jax.tree.structure(now) == jax.tree.structure(fresh)
    for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(fresh), strict=True):
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    with Checkpoints(wide.workdir / "checkpoints" / name) as store:
      saved = store.contents(3)
    size = {"trainable": 0, "opt_state": 0}
    for path, leaf in saved.items():
      kind = path.split("/")[0]
      if kind in size:
        size[kind] += int(np.prod(leaf.shape)) * leaf.dtype.itemsize
    # Two moments of 4 bytes beside parameters of 4, and one counter.
    assert size["opt_state"] == 2 * size["trainable"] + 4


PRINTED = (
  "device: 8 x cpu",
  "model embedded: 38 of 38 tensors used",
  "training text: 8 documents, 30,000 tokens",
  "held-out text: 256 tokens set thresholds, 256 check them",
  "FFN channels regrouped: 16 groups of 32",
  "mesh: data 1, fsdp 1, tensor 1; 1 of 8 devices",
  "dense: ppl",
  "random masks: ppl",
  "routers: trains router (52,576 parameters) in 3 steps of 256 tokens",
  "recover: trains router + lora (286,048 parameters)",
  "% skipped on held-out text (target 50.00%; attention",
  "stage 2: + LoRA",
  "summary.json",
)


def test_same_seed_same_run_another_seed_another(wide, tmp_path, capsys):
  same = tiny_runs.run(tmp_path / "same", *FEW)
  out = capsys.readouterr().out
  for part in PRINTED:
    assert part in out, part
  assert same.lines() == wide.lines()
  for a, b in zip(same.summary["stages"], wide.summary["stages"], strict=True):
    assert (a["ppl"], a["sparsity"]) == (b["ppl"], b["sparsity"])
  other = tiny_runs.run(tmp_path / "other", *FEW, "seed=18", "recover.steps=0")
  ours, theirs = (r.lines(stage="routers")[0] for r in (wide, other))
  assert abs(ours["loss"] - theirs["loss"]) > 1e-3


@pytest.mark.parametrize("name", ["routers", "recover"])
def test_export_gives_the_same_figures(wide, name):
  """From disk alone: base, routers, adapters, thresholds, channel order."""
  found = export.load_export(wide.workdir / "export" / name)
  base = weights.load_params(found.base, channel_order=found.channel_order)
  assert base.config == found.model
  stage = wide.stages[name]
  decoder = Decoder(base.config, found.route, found.lora_config)
  window = stage.run.eval.windows[0]
  evaluator = evaluate.Evaluator(
    decoder,
    functools.partial(jax.tree.map, jax.numpy.asarray),
    stage.p.macs(found.route, window),
  )
  variables = {"params": base.params, **found.variables}
  text = evaluator.score(variables, found.thresholds, stage.p.texts[window])
  held_out = evaluator.score(
    variables, found.thresholds, stage.p.calibration[1]
  )
  told = {s["name"]: s for s in wide.summary["stages"]}[name]
  assert close(text.nll, told["nll"])
  for kind, value in text.sparsity.items():
    assert close(value, told["windows"][str(window)]["sparsity"][kind])
    assert close(held_out.sparsity[kind], told["sparsity"][kind])
  assert found.extra["sparsity"] == told["sparsity"]


# --- methods and options -----------------------------------------------------


@pytest.mark.parametrize(
  "method, overrides, trained",
  [
    ("token_depth", (), ("router", "router+lora")),
    ("layer_skip", (), ("router", "router+lora")),
    ("static_width", ("route.static_scores=activation",), ("", "lora")),
    (
      "static_width",
      ("route.static_scores=learned",),
      ("router", "router+lora"),
    ),
    ("random", (), ("", "lora")),
    ("dense", (), ("", "lora")),
  ],
)
def test_methods(method, overrides, trained, tmp_path):
  run = tiny_runs.run(tmp_path, *SMALL, f"route.method={method}", *overrides)
  summary = run.summary
  assert summary["method"] == method
  assert (summary["random"] is None) == (method == "dense")
  names = [s["name"] for s in summary["stages"]]
  assert names == ["routers", "recover"]
  for stage, names in zip(summary["stages"], trained, strict=True):
    plan = run.stages[stage["name"]].plan
    assert "+".join(plan.names) == names
    assert len(run.lines(stage=stage["name"])) == (3 if names else 0)
    assert stage["steps"] == (3 if names else 0)
    assert (stage["tokens_per_s"] is not None) == bool(names)
    assert np.isfinite(stage["ppl"])
    assert set(stage["sparsity"]) >= {
      "target",
      "realised",
      "attention",
      "ffn",
      "flops",
    }
  last = summary["stages"][-1]["sparsity"]
  if method == "dense":
    assert last["realised"] == last["flops"] == last["target"] == 0
    # Nothing is trained in the first stage, and LoRA on everything after it.
    assert summary["stages"][0]["ppl"] == summary["dense"]["ppl"]
  if method == "layer_skip":
    assert last["attention"] == last["ffn"]
  if method == "random":
    assert abs(last["realised"] - 0.5) < 0.05
  if method == "static_width":
    keep = run.stages["recover"].evaluate()["keep"]
    assert set(
      np.unique(np.concatenate([np.ravel(v) for v in keep.values()]))
    ) <= {0.0, 1.0}


def test_kl_flops_rate_and_full_remat(tmp_path):
  run = tiny_runs.run(
    tmp_path,
    *SMALL,
    "routers.kl=0.5",
    "recover.kl=0.5",
    "budget.rate=flops",
    "budget.target=0.4",
    "route.router_input=normed",
    "model.remat=full",
    "routers.accumulate=2",
    "recover.accumulate=2",
    "data.packing=single",
    "eval.every=1",
  )
  for stage in run.summary["stages"]:
    sparsity = stage["sparsity"]
    assert sparsity["target"] == 0.4
    assert sparsity["realised"] == sparsity["flops"]
    # Three steps teach little; calibration meets the rate whatever they taught.
    assert stage["calibration_gap"] < 0.02
  for row in run.lines():
    assert row["kl"] > 0
    assert row["realised"] == row["sparsity_flops"]
    parts = row["lm_loss"] + row["budget"] + 0.5 * row["kl"]
    assert close(row["loss"], parts, 1e-5)
    # Two micro-batches of 4 documents, cut at 64 tokens.
    assert 256 < row["tokens"] <= 512
  for name in ("routers", "recover"):
    inside = run.lines("eval", name)
    assert [r["step"] for r in inside] == [1, 2]
    assert all(abs(r["sparsity"]["flops"] - 0.4) < 0.1 for r in inside)


def test_two_targets_frozen_routers_no_regrouping(tmp_path):
  run = tiny_runs.run(
    tmp_path,
    *SMALL,
    "budget.thresholds=per_kind",
    "budget.attn_target=0.6",
    "budget.ffn_target=0.3",
    "model.remat=dots",
    "recover.train_routers=False",
    "data.max_tokens=5000",
  )
  assert not (run.workdir / "channel_order.npy").exists()
  for name in ("routers", "recover"):
    found = export.load_export(run.workdir / "export" / name)
    assert found.channel_order is None
    for kind in ("attn", "ffn"):  # one threshold for all layers
      assert len(set(found.thresholds[kind].tolist())) == 1
  for stage in run.summary["stages"]:
    assert stage["sparsity"]["target"] == pytest.approx(0.45)
    assert stage["calibration_gap"] < 0.03
  first, second = (run.stages[n].variables for n in ("routers", "recover"))
  for a, b in zip(
    jax.tree.leaves(first["router"]),
    jax.tree.leaves(second["router"]),
    strict=True,
  ):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  moved = jax.tree.leaves(second["lora"]["layers"]["attn"]["q"]["b"])
  assert any(np.any(np.asarray(leaf)) for leaf in moved)
  assert run.stages["routers"].p.batches.rows.targets < 5000


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "recover"), [("llama32_1b", 2), ("qwen3_4b", 0), ("llama31_8b", 0)]
)
def test_smoke_of_large_models(name, recover, tmp_path):
  """Two layers of the real width run on this CPU.

  The second stage of the larger two takes another minute and shows nothing
  that the first model's does not.
  """
  arguments = ["--config", f"{name}:smoke", "--workdir", str(tmp_path)]
  arguments += ["--config.mesh.data=1", f"--config.recover.steps={recover}"]
  assert train.main(arguments) == 0
  stages = tiny_runs.read_summary(tmp_path)["stages"]
  assert [s["steps"] for s in stages] == [2, 2][: 2 if recover else 1]
  assert all(np.isfinite(s["ppl"]) for s in stages)


# --- mistakes ----------------------------------------------------------------


def test_dry_run_starts_nothing(tmp_path, capsys):
  arguments = [*tiny_runs.argv(tmp_path / "run"), "--dry-run"]
  assert cli.run(train.main, arguments) == 0
  out = capsys.readouterr().out
  for part in ("routers", "recover", "PFLOPs", "optimiser", "total", "time"):
    assert part in out
  assert not (tmp_path / "run").exists()


MISTAKES = [
  ("--config.data.train=('no/such.jsonl',)", "no/such.jsonl"),
  ("--config.data.calibration=('no/such.txt',)", "no/such.txt"),
  ("--config.eval.text=no/such.txt", "no/such.txt"),
  ("--config.model.path=no/such/model", "no/such/model"),
  ("--config.model.tokenizer=no/such/model", "no/such/model"),
  ("--config.model.attention=cudnn", "cudnn"),
  ("--config.route.ffn_group=1024", "d_ff=512"),
  ("--config.route.ffn_group=48", "power of two"),
  ("--config.route.attn_group=3", "n_heads=8"),
  ("--config.mesh.data=8", "batch_size=4"),
  ("--config.mesh.tensor=3", "8"),
  ("--config.routers.step=3", "routers.steps"),
  ("--config.routers.steps=many", "routers.steps"),
  ("--config.budget.target=1.5", "budget.target=1.5"),
  ("--config.eval.calibration_tokens=64", "calibration text"),
  ("--cofnig=tiny", "cofnig"),
  ("extra", "extra"),
]


@pytest.mark.parametrize("argument, told", MISTAKES)
def test_mistakes_leave_nothing(argument, told, tmp_path, capsys):
  arguments = [*tiny_runs.argv(tmp_path / "run"), argument]
  assert cli.run(train.main, arguments) == 2
  lines = capsys.readouterr().err.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: ")
  assert told in lines[0], lines[0]
  assert not (tmp_path / "run").exists()


def test_a_mended_mistake_runs_in_the_same_directory(tmp_path, capsys):
  """A directory that was there stays, and belongs to nobody yet."""
  (tmp_path / "mine.txt").write_text("kept")
  few = tiny_runs.argv(tmp_path, *SMALL, "routers.steps=0", "recover.steps=0")
  wrong = [*few, "--config.eval.calibration_tokens=64"]
  assert cli.run(train.main, wrong) == 2
  assert not (tmp_path / "config.json").exists()
  assert cli.run(train.main, few) == 0
  assert (tmp_path / "mine.txt").read_text() == "kept"
  assert tiny_runs.read_summary(tmp_path)["stages"] == []


@pytest.mark.parametrize("below", [False, True])
def test_workdir_that_is_a_file(below, tmp_path, capsys):
  file = tmp_path / "file"
  file.write_text("kept")
  workdir: pathlib.Path = file / "run" if below else file
  assert cli.run(train.main, tiny_runs.argv(workdir)) == 2
  assert str(file) in capsys.readouterr().err
  assert file.read_text() == "kept"
