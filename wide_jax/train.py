"""Trains width routers, then routers and LoRA, on a pretrained model.

  python -m wide_jax.train --config NAME --workdir DIR [--data DIR]
      [--config.a.b=c ...] [--dry-run]

Writes to the work directory: metrics.jsonl, checkpoints/, tensorboard/,
export/<stage>/, figures/ and summary.json. The same command goes on where a
killed run stopped. A first run that needs no data: --config tiny.
"""

import contextlib
import dataclasses
import fcntl
import logging
import pathlib
import shutil
import sys
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from wide_jax import cli, dry_run, figures, metrics, prepare, sharding, stages
from wide_jax.checkpoint import Checkpoints
from wide_jax.config import Method, Phase, RunConfig
from wide_jax.prepare import Prepared
from wide_jax.safetensors_io import read_json

# A realised rate further than this from its target is said aloud.
WORTH_SAYING = 0.01

# What may differ between a run and the run that goes on from it.
_MAY_CHANGE = ("mesh", "device", "log_every", "checkpoint")
_CONFIG = "config.json"
_SHOWN = ("target", "realised", "attention", "ffn", "flops")


def main(argv: list[str]) -> int:
  run, flags = cli.parse(argv, about=__doc__)
  print(cli.select_device(run.device), flush=True)
  if flags.dry_run:
    print(dry_run.describe(run))
    return 0
  workdir = pathlib.Path(flags.workdir).expanduser().absolute()
  if workdir.exists() and not workdir.is_dir():
    raise ValueError(f"--workdir {str(workdir)!r} is not a directory.")
  with _notes_printed_once():
    prepare.check(run)  # mistakes are refused before anything is made
    with _only_run_in(workdir):
      train(run, workdir)
  return 0


def train(run: RunConfig, workdir: pathlib.Path) -> dict:
  """Runs all stages of `run` in `workdir`, going on from what is there.

  Returns:
    What summary.json holds.
  """
  results = _open_results(run, workdir)
  prepared = prepare.prepare(run, workdir)
  _check_inputs(results, prepared)
  # From here on the directory belongs to this configuration.
  metrics.write_json(workdir / _CONFIG, _plain(run))
  for note in prepared.notes:
    print(note)
  todo = [p for p in Phase if run.stage(p).steps]
  with metrics.MetricsLog(
    workdir, resume=_resume_point(run, workdir, results, todo)
  ) as log:
    _baselines(prepared, results, log)
    carried: dict[str, Any] = {}
    for phase in todo:
      carried = _stage(prepared, phase, carried, results, log)
  summary = _summary(run, results)
  metrics.write_json(workdir / "summary.json", summary)
  _figures(workdir, summary, results)
  metrics.print_table(*_table(summary))
  print(f"wrote {workdir / 'summary.json'} and {workdir / 'figures'}")
  return summary


# --- what is there already ---------------------------------------------------


@contextlib.contextmanager
def _only_run_in(workdir: pathlib.Path) -> Generator[None]:
  """Refuses a second run in one directory; the lock dies with its process.

  A run that is refused before its first result takes the directory with it, if
  it made it.
  """
  made = not workdir.exists()
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / ".lock", "w") as f:
    try:
      fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      raise ValueError(f"another run is at work in {str(workdir)!r}.") from e
    try:
      yield
    except Exception:
      if made and not (workdir / _CONFIG).exists():
        shutil.rmtree(workdir, ignore_errors=True)
      raise


@contextlib.contextmanager
def _notes_printed_once() -> Generator[None]:
  """The run prints what was replicated; the log need not say it as well."""
  log = logging.getLogger(sharding.__name__)
  before = log.level
  log.setLevel(logging.ERROR)
  try:
    yield
  finally:
    log.setLevel(before)


def _open_results(run: RunConfig, workdir: pathlib.Path) -> dict:
  """Results of an earlier, unfinished run here, or a fresh record.

  Raises:
    ValueError: the earlier run had another configuration, whose fields are
      named, or one of its files is damaged.
  """
  file = workdir / _CONFIG
  if not file.exists():
    if (workdir / "checkpoints").exists():
      raise ValueError(
        f"{str(workdir)!r} has checkpoints/ but no {_CONFIG} to say of what."
        " Use another --workdir."
      )
    # Of a run that ended before it had written its configuration.
    (workdir / prepare.ORDER).unlink(missing_ok=True)
    return {"stages": {}}
  before = read_json(file)
  changed = _differences(before, _plain(run))
  if changed:
    raise ValueError(
      f"{str(workdir)!r} holds a run with another configuration:"
      f" {'; '.join(changed)}. Use another --workdir."
    )
  results = workdir / "results.json"
  if results.exists():
    found = read_json(results)
    if not isinstance(found.get("stages"), dict):
      raise ValueError(f"{results} has stages={found.get('stages')!r}.")
    return found
  return {"stages": {}}


def _plain(run: RunConfig) -> dict:
  return metrics.to_plain(dataclasses.asdict(run))


def _check_inputs(results: dict, prepared: Prepared) -> None:
  """Refuses to go on with other weights or another text than before.

  The batch size of evaluation follows the mesh, so texts are compared where the
  mesh is the same.
  """
  now = prepared.inputs | {"mesh": str(dict(prepared.mesh.shape))}
  before = results.setdefault("inputs", now)
  same_mesh = before.get("mesh") == now["mesh"]
  names = ["weights", "training text"]
  names += ["calibration text", "evaluation text"] if same_mesh else []
  changed = [name for name in names if before.get(name) != now[name]]
  if changed:
    raise ValueError(
      f"{str(prepared.workdir)!r} was begun with another"
      f" {' and another '.join(changed)}. Use another --workdir."
    )


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
  """`lr: 0.1 then, 0.2 now` for every field that differs."""
  if isinstance(before, dict) and isinstance(now, dict):
    out = []
    for key in sorted(set(before) | set(now)):
      if name or key not in _MAY_CHANGE:
        inner = f"{name}.{key}" if name else key
        out += _differences(before.get(key), now.get(key), inner)
    return out
  return [] if before == now else [f"{name}: {before} then, {now} now"]


def _resume_point(run, workdir, results, todo) -> tuple[str, int] | None:
  """(stage, step) of the newest state on disk, None for a fresh start."""
  point = None
  for phase in todo:
    if phase.value in results["stages"]:
      point = phase.value, run.stage(phase).steps
      continue
    folder = workdir / "checkpoints" / phase.value
    with Checkpoints(folder, read_only=True) as store:
      step = store.latest()
    return point if step is None else (phase.value, step)
  return point


# --- the parts of a run ------------------------------------------------------


def _baselines(prepared: Prepared, results: dict, log) -> None:
  """Scores the dense model and random masks at the target rate."""
  run, texts = prepared.run, prepared.texts
  if "dense" not in results:
    scores = {
      w: prepared.evaluator(None, None, w).score(
        {"params": prepared.params}, None, batches
      )
      for w, batches in texts.items()
    }
    results["dense"] = _scores(run, scores)
    _keep(prepared.workdir, results)
  log.write("dense", 0, "eval", ppl=results["dense"]["ppl"])
  print(f"dense: ppl {results['dense']['ppl']:.4g}", flush=True)
  if run.route.method is Method.DENSE:
    return
  if "random" not in results:
    route = dataclasses.replace(run.route, method=Method.RANDOM)
    variables = {"params": prepared.params}
    length = run.data.seq_len
    evaluator = prepared.evaluator(route, None, length)
    thresholds, _ = evaluator.calibrate(
      variables, prepared.calibration[0], run.budget
    )
    held_out = evaluator.score(variables, thresholds, prepared.calibration[1])
    scores = {
      w: prepared.evaluator(route, None, w).score(
        variables, thresholds, batches
      )
      for w, batches in texts.items()
    }
    sparsity = stages.sparsity_report(run, held_out, evaluator.macs)
    results["random"] = {**_scores(run, scores), "sparsity": sparsity}
    _keep(prepared.workdir, results)
  log.write("random", 0, "eval", ppl=results["random"]["ppl"])
  print(f"random masks: ppl {results['random']['ppl']:.4g}", flush=True)


def _scores(run: RunConfig, scores: dict) -> dict:
  first = scores[run.eval.windows[0]].to_json()
  windows = {str(w): s.to_json() for w, s in scores.items()}
  return {**first, "windows": windows}


def _stage(prepared, phase: Phase, carried: dict, results: dict, log) -> dict:
  """Trains, evaluates and exports one phase; returns its collections."""
  name = phase.value
  stage = stages.Stage(prepared, phase, _inherited(phase, carried), log)
  done = name in results["stages"]
  exported = stage.export_file.is_file()
  if not done or not exported or phase is Phase.ROUTERS:
    speed = stage.train()  # a finished stage is only restored
  if not done:
    result = stage.evaluate()
    result |= speed
    result["steps"] = stage.config.steps if stage.plan.names else 0
    stage.save(result)
    log.write(name, stage.config.steps, "final", **_numbers(result))
    results["stages"][name] = result
    _keep(prepared.workdir, results)
  result = results["stages"][name]
  if done and not exported:
    print(f"{name}: its export was missing and is written again")
    stage.save(result)
  print(_describe(name, result, stage.plan.route is not None), flush=True)
  return {
    **carried,
    **{k: v for k, v in stage.variables.items() if k != "params"},
  }


def _describe(name: str, result: dict, routed: bool) -> str:
  """`routers: ppl 20.2, 49.9% skipped on held-out text (target 50.0%), ..`."""
  line = f"{name}: ppl {result['ppl']:.4g}"
  if routed:
    found = {k: f"{100 * result['sparsity'][k]:.2f}%" for k in _SHOWN}
    line += (
      f", {found['realised']} skipped on held-out text (target"
      f" {found['target']}; attention {found['attention']}, FFN"
      f" {found['ffn']}, FLOPs {found['flops']})"
    )
    gap = abs(result["sparsity"]["realised"] - result["sparsity"]["target"])
    if gap > WORTH_SAYING:
      line += f"; THE TARGET IS MISSED by {100 * gap:.2f} points"
  if result["tokens_per_s"] is not None:
    line += f", {result['tokens_per_s']:,.0f} tokens/s"
  if result["mfu"] is not None:
    line += f", MFU {100 * result['mfu']:.1f}%"
  return line


def _inherited(phase: Phase, carried: dict) -> dict:
  """What a phase takes over: routers go on, adapters always start afresh."""
  if phase is Phase.RECOVER and "router" in carried:
    return {"router": carried["router"]}
  return {}


def _numbers(result: dict) -> dict:
  return {k: v for k, v in result.items() if k not in ("name", "keep")}


def _keep(workdir: pathlib.Path, results: dict) -> None:
  metrics.write_json(workdir / "results.json", results)


# --- the end -----------------------------------------------------------------


def _summary(run: RunConfig, results: dict) -> dict:
  """summary.json: perplexities, sparsity and speed, without the arrays."""
  rows = [
    {k: v for k, v in r.items() if k not in ("keep", "thresholds")}
    for name, r in results["stages"].items()
    if name != Phase.DENSE_LORA.value
  ]
  out = {
    "method": str(run.route.method),
    "dense": results["dense"],
    "random": results.get("random"),
    "stages": rows,
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "seed": run.seed,
  }
  if Phase.DENSE_LORA.value in results["stages"]:
    result = results["stages"][Phase.DENSE_LORA.value]
    out["dense_lora"] = {k: v for k, v in result.items() if k != "keep"}
  return metrics.to_plain(out)


def _table(summary: dict) -> tuple[list[dict], list[str]]:
  """Rows and columns of the table printed at the end."""
  dense = summary["dense"]["nll"]
  columns = ["model", "perplexity", "d log-ppl", "target", "realised"]
  columns += ["attention", "FFN", "FLOPs", "tokens/s"]

  def percent(x):
    return None if x is None else f"{100 * x:.2f}%"

  def row(name, result, sparsity):
    sparsity = sparsity or {}
    speed = result.get("tokens_per_s")
    return {
      "model": name,
      "perplexity": result["ppl"],
      "d log-ppl": f"{result['nll'] - dense:+.4f}",
      "target": percent(sparsity.get("target")),
      "realised": percent(sparsity.get("realised")),
      "attention": percent(sparsity.get("attention")),
      "FFN": percent(sparsity.get("ffn")),
      "FLOPs": percent(sparsity.get("flops")),
      "tokens/s": None if speed is None else round(speed),
    }

  rows = [row("dense", summary["dense"], None)]
  if summary["random"]:
    rows.append(
      row("random mask", summary["random"], summary["random"].get("sparsity"))
    )
  names = {"routers": "stage 1: routers", "recover": "stage 2: + LoRA"}
  for result in summary["stages"]:
    name = names[result["name"]]
    rows.append(row(name, result, result.get("sparsity")))
  if "dense_lora" in summary:
    rows.append(row("dense + LoRA", summary["dense_lora"], None))
  return rows, columns


def _figures(workdir: pathlib.Path, summary: dict, results: dict) -> None:
  folder = workdir / "figures"
  log = workdir / "metrics.jsonl"
  if any(row["kind"] == "train" for row in metrics.read_metrics(log)):
    figures.training_curves(log, folder / "curves.png")
  figures.perplexity_bars(summary, folder / "perplexity.png")
  for name, result in results["stages"].items():
    keep = result.get("keep") or {}
    if keep:
      figures.keep_rate_heatmap(
        np.asarray(keep["attn"]),
        np.asarray(keep["ffn"]),
        folder / f"keep_rates_{name}.png",
        f"{name}: share of tokens that keep each group",
      )


if __name__ == "__main__":
  sys.exit(cli.run(main))
