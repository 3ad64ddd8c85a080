"""One training stage: loop, checkpoints, resume, evaluation, export."""

import contextlib
import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from wide_jax import (
  checkpoint,
  data,
  export,
  flops,
  metrics,
  modules,
  routing,
  sharding,
)
from wide_jax import step as steps
from wide_jax.config import Method, Phase, RouteConfig
from wide_jax.evaluate import Score
from wide_jax.prepare import Prepared
from wide_jax.step import StepSpec


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one phase trains, with what.

  Attributes:
    phase: which.
    route: its routers; None for the dense model.
    names: collections that are trained.
  """

  phase: Phase
  route: RouteConfig | None
  names: tuple[str, ...]

  @property
  def learns(self) -> bool:
    """Whether gates are noisy and straight-through, not hard."""
    return "router" in self.names

  @property
  def has_lora(self) -> bool:
    return self.phase is not Phase.ROUTERS

  @property
  def gate_mode(self) -> str:
    if self.route is None:
      return "open"
    return "train" if self.learns else "threshold"


def plan_of(phase: Phase, run) -> Plan:
  """The plan of a phase; the dense comparison has no routers."""
  dense = phase is Phase.DENSE_LORA or run.route.method is Method.DENSE
  names = steps.trainable_collections(phase, run.route, run.stage(phase))
  return Plan(phase, None if dense else run.route, names)


class Stage:
  """Runs one phase on a prepared model.

  Args:
    prepared: model, text, mesh.
    phase: which.
    before: {"router": tree} from the stage before, or {}.
    log: where metrics go.
  """

  def __init__(self, prepared: Prepared, phase: Phase, before: dict, log):
    self.p, self.log = prepared, log
    self.run = prepared.run
    self.plan = plan_of(phase, self.run)
    self.config = self.run.stage(phase)
    lora = self.run.lora if self.plan.has_lora else None
    self.decoder = prepared.decoder(self.plan.route, lora)
    self.lora = lora
    self.macs = prepared.macs(
      self.plan.route or self.run.route, self.run.data.seq_len
    )
    self.variables = self._initial(before)
    self._evaluators: dict[int, Any] = {}

  # --- state -----------------------------------------------------------------

  def _initial(self, before: dict) -> dict:
    """All collections of this stage, placed on the mesh."""
    fresh = [n for n in ("router", "lora") if n not in before]
    made = modules.init(self.decoder, self.run.seed, tuple(fresh))
    out = {**made, **{k: v for k, v in before.items() if v}}
    if self.p.static is not None and "router" not in before:
      out["router"] = self.p.static
    keep = {"router"} if self.plan.route is not None else set()
    keep |= {"lora"} if self.plan.has_lora else set()
    out = {k: v for k, v in out.items() if k in keep and jax.tree.leaves(v)}
    return self.p.shard(out, self.plan.route) | {"params": self.p.params}

  def _fresh_state(self, trainable) -> tuple[dict, Any]:
    """(initial state, its shardings), moments beside their parameters."""
    groups = (self.plan.route or self.run.route).groups(self.p.model)
    mesh = self.p.mesh
    places, _ = sharding.specs(trainable, self.p.model, groups, mesh)
    make = functools.partial(steps.init_state, stage=self.config)
    shapes = jax.eval_shape(make, trainable)
    everywhere = sharding.replicated(mesh)
    state_places = {
      "trainable": places,
      "opt_state": sharding.optimiser_specs(
        shapes["opt_state"], trainable, places
      ),
      "step": everywhere,
      "skipped": everywhere,
    }
    return jax.jit(make, out_shardings=state_places)(trainable), state_places

  # --- the loop --------------------------------------------------------------

  def checkpoints(self) -> checkpoint.Checkpoints:
    folder = self.p.workdir / "checkpoints" / self.plan.phase.value
    every, keep = self.run.checkpoint.every, self.run.checkpoint.keep
    return checkpoint.Checkpoints(folder, keep=keep, every=every)

  def train(self) -> dict:
    """Trains to the last step, from the newest checkpoint if there is one.

    Returns:
      {"tokens_per_s", "mfu", "peak_memory_bytes"} of this process (None where
      nothing was left to do). The trained collections are in `variables`.
    """
    if not self.plan.names or not self.config.steps:
      return dict.fromkeys(("tokens_per_s", "mfu", "peak_memory_bytes"))
    trainable, frozen = steps.split(self.variables, self.plan.names)
    state, places = self._fresh_state(trainable)
    thresholds = self._fixed_thresholds()
    spec = StepSpec(
      self.decoder, self.run, self.plan.phase, self.macs, self.plan.gate_mode
    )
    everywhere = sharding.replicated(self.p.mesh)
    step_fn = jax.jit(
      functools.partial(steps.train_step, spec),
      donate_argnums=0,
      out_shardings=(places, everywhere),
    )
    with self.checkpoints() as store:
      start = store.latest() or 0
      print(self._headline(trainable, start), flush=True)
      if start:
        state = store.restore(start, sharding.abstract(state, places))
      with contextlib.closing(
        data.prefetch(self._host_batch, start, self.config.steps)
      ) as stream:
        speed = self._loop(
          step_fn, state, frozen, thresholds, stream, start, store
        )
        state = speed.pop("state")
    self.variables = {**frozen, **state["trainable"]}
    return speed

  @property
  def _tokens_per_step(self) -> int:
    rows = self.run.data.batch_size * self.config.accumulate
    return rows * self.run.data.seq_len

  def _headline(self, trainable, start: int) -> str:
    name, last = self.plan.phase.value, self.config.steps
    if start == last:
      return f"{name}: trained already, read from its checkpoint"
    text = (
      f"{name}: trains {' + '.join(self.plan.names)}"
      f" ({flops.count_params(trainable):,} parameters) in {last:,} steps of"
      f" {self._tokens_per_step:,} tokens"
    )
    return f"{text}, going on from step {start:,}" if start else text

  def _host_batch(self, step: int) -> dict:
    return self.p.batches.accumulated(step, self.config.accumulate)

  def _loop(self, step_fn, state, frozen, thresholds, stream, start, store):
    run, phase = self.run, self.plan.phase.value
    last = self.config.steps
    per_step, target = self._tokens_per_step, None
    if self.plan.route is not None:
      target = routing.target_rate(run.budget, self.macs)
    clock, told = _Clock(), start
    with metrics.Bar(phase, last, start=start, target=target) as bar:
      for step, batch in stream:
        done = step + 1
        state, out = step_fn(state, frozen, self.p.place(batch), thresholds)
        if done == start + 1:
          jax.block_until_ready(out)
          clock.start()  # the first step compiles
        else:
          clock.add(per_step)
        if done % run.log_every == 0 or done == last:
          loss, rate = self._write(done, jax.device_get(out), clock, target)
          tokens, told = (done - told) * per_step, done
          bar.update(done, tokens, loss=loss, realised=rate)
        every = run.eval.every
        if every and done % every == 0 and done < last:
          with clock.paused(state):
            self._evaluate_inside(done, {**frozen, **state["trainable"]})
        # Last, since a run that goes on from here repeats nothing above.
        if store.should_save(done) or done == last:
          store.save(done, state, self._meta(done), force=True)
    clock.stop(state)
    return {"state": state, **self._speed(clock)}

  def _write(self, step, out, clock, target) -> tuple[float, float | None]:
    """One line of metrics; returns the loss and the realised rate."""
    loss = float(out["loss"])
    sparsity = out.pop("sparsity")
    if self.plan.route is not None:
      rate = float(sparsity[self.run.budget.rate])
      layers = {k: np.round(v, 5) for k, v in out.pop("skip_by_layer").items()}
      extra = {
        "target": target,
        "realised": rate,
        **{f"sparsity_{k}": v for k, v in sparsity.items()},
        "skip_by_layer": layers,
      }
    else:
      rate, extra = None, {}
      out.pop("skip_by_layer")
    self.log.write(
      self.plan.phase.value,
      step,
      "train",
      **out,
      **extra,
      tokens_per_s=clock.rate,
    )
    if int(out["skipped"]) and int(out["skipped"]) >= max(step // 2, 10):
      raise FloatingPointError(
        f"{int(out['skipped'])} of {step} steps had a loss or gradient that is"
        " not finite; nothing was learnt in them. Try a lower lr."
      )
    return loss, rate

  def _meta(self, step: int) -> dict:
    """What a checkpoint says beside its arrays."""
    count = step * self.config.accumulate * self.run.data.batch_size
    return {
      "phase": self.plan.phase.value,
      "seed": self.run.seed,
      "next_row": count,
      "config": metrics.to_plain(dataclasses.asdict(self.run)),
    }

  def _logged_rate(self) -> float | None:
    """Speed by the last line of this stage, written by an earlier process."""
    rates = [
      row.get("tokens_per_s")
      for row in metrics.read_metrics(self.log.path)
      if row["stage"] == self.plan.phase.value and row["kind"] == "train"
    ]
    return rates[-1] if rates else None

  def _speed(self, clock: "_Clock") -> dict:
    rate = clock.rate or self._logged_rate()
    if rate is None:
      return {"tokens_per_s": None, "mfu": None, "peak_memory_bytes": None}
    per_token = flops.train_flops_per_token(
      self.p.model,
      self.plan.route or RouteConfig(method=Method.DENSE),
      self.run.data.seq_len,
      self.plan.names,
      self.lora,
      kl=self.config.kl > 0,
    )
    devices = self.p.mesh.devices
    peak = flops.peak_flops(devices.flat[0].device_kind, self.run.model.dtype)
    memory = devices.flat[0].memory_stats() or {}  # None on a CPU
    return {
      "tokens_per_s": rate,
      "mfu": flops.mfu(per_token, rate, peak, devices.size),
      "peak_memory_bytes": memory.get("peak_bytes_in_use"),
    }

  # --- evaluation ------------------------------------------------------------

  def _fixed_thresholds(self):
    """Thresholds a stage trains at where its gates are not noisy."""
    layers = self.p.model.n_layers
    zero = {k: np.zeros(layers, np.float32) for k in ("attn", "ffn")}
    if self.plan.gate_mode != "threshold":
      return sharding.put(zero, sharding.replicated(self.p.mesh))
    return sharding.put(
      self._calibrate(self.variables)[0], sharding.replicated(self.p.mesh)
    )

  def evaluator(self, length: int):
    if length not in self._evaluators:
      self._evaluators[length] = self.p.evaluator(
        self.plan.route, self.lora, length
      )
    return self._evaluators[length]

  def _calibrate(self, variables):
    return self.evaluator(self.run.data.seq_len).calibrate(
      variables, self.p.calibration[0], self.run.budget
    )

  def _evaluate_inside(self, step: int, variables) -> None:
    """Perplexity at calibrated thresholds in the middle of a stage."""
    window = self.run.eval.windows[0]
    thresholds = None
    if self.plan.route is not None:
      thresholds, _ = self._calibrate(variables)
    score = self.evaluator(window).score(
      variables, thresholds, self.p.texts[window]
    )
    self.log.write(self.plan.phase.value, step, "eval", **score.to_json())
    print(f"{self.plan.phase.value} {step}: {describe(score)}", flush=True)

  def evaluate(self) -> dict:
    """Calibrates, checks on the other half, scores the text; see `Prepared`.

    Returns:
      A JSON-able result; `thresholds` and `keep` are in it.
    """
    variables = self.variables
    thresholds, out = None, {"name": self.plan.phase.value}
    if self.plan.route is not None:
      thresholds, gap = self._calibrate(variables)
      held_out = self.evaluator(self.run.data.seq_len).score(
        variables, thresholds, self.p.calibration[1]
      )
      out["sparsity"] = sparsity_report(self.run, held_out, self.macs)
      out["calibration_gap"] = gap
      out["thresholds"] = thresholds
    else:
      kinds = ("target", "realised", "mean", "attention", "ffn", "flops")
      out["sparsity"] = dict.fromkeys(kinds, 0.0)
    scores = {
      w: self.evaluator(w).score(variables, thresholds, batches)
      for w, batches in self.p.texts.items()
    }
    first = scores[self.run.eval.windows[0]]
    out["ppl"], out["nll"] = first.ppl, first.nll
    out["windows"] = {w: s.to_json() for w, s in scores.items()}
    out["keep"] = first.keep
    return metrics.to_plain(out)

  @property
  def export_file(self):
    """What an export directory of this stage is known by."""
    return self._export_folder / export.EXPORT

  @property
  def _export_folder(self):
    return self.p.workdir / "export" / self.plan.phase.value

  def save(self, result: dict) -> None:
    """Writes the export directory of this stage."""
    kept = {
      k: jax.device_get(self.variables[k])
      for k in ("router", "lora")
      if k in self.variables
    }
    export.save_export(
      self._export_folder,
      base=self.run.model.path,
      model_config=self.p.model,
      route=self.plan.route or RouteConfig(method=Method.DENSE),
      lora_config=self.lora,
      variables=kept,
      thresholds=result.get("thresholds"),
      channel_order=self.p.channel_order,
      extra={
        "sparsity": result.get("sparsity"),
        "rate": self.run.budget.rate,
        "seed": self.run.seed,
      },
    )


def sparsity_report(run, score: Score, macs) -> dict:
  """The `sparsity` object of summary.json, from a score on held-out text."""
  return {
    "target": routing.target_rate(run.budget, macs),
    "rate": run.budget.rate,
    "realised": score.sparsity[run.budget.rate],
    **score.sparsity,
    "tokens": score.tokens,
  }


def describe(score: Score) -> str:
  """`ppl 12.3, skipped 50.1% (attention 60.0%, FFN 40.2%, FLOPs 45.0%)`."""
  text = f"ppl {score.ppl:.4g}"
  if score.sparsity:
    s = {k: f"{100 * v:.1f}%" for k, v in score.sparsity.items()}
    text += (
      f", skipped {s['mean']} (attention {s['attention']}, FFN {s['ffn']},"
      f" FLOPs {s['flops']})"
    )
  return text


class _Clock:
  """Tokens a second over the steps after the first, pauses left out."""

  def __init__(self):
    self._began = None
    self._tokens = 0
    self._ended = None

  def start(self) -> None:
    self._began = time.monotonic()

  def add(self, tokens: int) -> None:
    self._tokens += tokens

  @contextlib.contextmanager
  def paused(self, pending):
    """Leaves out the time spent inside, once `pending` is computed."""
    jax.block_until_ready(pending)
    before = time.monotonic()
    yield
    if self._began is not None:
      self._began += time.monotonic() - before

  def stop(self, pending) -> None:
    jax.block_until_ready(pending)
    self._ended = time.monotonic()

  @property
  def rate(self) -> float | None:
    if self._began is None or not self._tokens:
      return None
    now = self._ended or time.monotonic()
    return self._tokens / max(now - self._began, 1e-9)
