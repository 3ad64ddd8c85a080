"""`--dry-run`: memory, FLOPs and hours of a run, without starting it."""

import time

import jax
import jax.numpy as jnp

from wide_jax import flops, loss, metrics, modules, prepare
from wide_jax import step as steps
from wide_jax.config import Method, Phase, RouteConfig, RunConfig
from wide_jax.modules import Decoder

# Assumed share of the peak, for hours only: that of stage 2 of SmolLM2-135M on
# one H200 (experiments/smollm2_h200; stage 1: 0.20). Larger models reach more,
# 0.48 at 8B shapes (experiments/llama8b_shapes).
ASSUMED_MFU = 0.14


def describe(run: RunConfig) -> str:
  """A table a stage: FLOPs, memory on one device, expected hours."""
  model, mesh = prepare.check_devices(run)
  devices = list(mesh.devices.flat)
  peak = flops.peak_flops(devices[0].device_kind, run.model.dtype)
  assumed = f"{100 * ASSUMED_MFU:.0f}% of the device's peak"
  rate = None if peak is None else peak * ASSUMED_MFU * len(devices)
  if rate is None:
    rate = _measured_rate(run.model.dtype)
    assumed = "the speed of one large matmul here, just measured"
  path, _ = prepare.attention_path(run, model, run.data.seq_len)
  lines = [f"attention path: {path}"]
  rows = []
  for phase in Phase:
    stage = run.stage(phase)
    if not stage.steps:
      continue
    dense = phase is Phase.DENSE_LORA
    route = RouteConfig(method=Method.DENSE) if dense else run.route
    lora = None if phase is Phase.ROUTERS else run.lora
    names = steps.trainable_collections(phase, run.route, stage)
    variables = modules.abstract(
      Decoder(model, route, lora, jnp.dtype(run.model.dtype))
    )
    memory = flops.memory_estimate(
      variables,
      model,
      names,
      rows=run.data.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"]),
      seq_len=run.data.seq_len,
      dtype=run.model.dtype,
      remat=run.model.remat,
      materialised_scores=path == "xla",
      chunk_logits=loss.CHUNK_LOGITS,
      fsdp=mesh.shape["fsdp"],
      tensor=mesh.shape["tensor"],
    )
    per_token = flops.train_flops_per_token(
      model, route, run.data.seq_len, names, lora, kl=stage.kl > 0
    )
    rows_a_step = stage.accumulate * run.data.batch_size
    # What has nothing to train is evaluated only.
    tokens = stage.steps * rows_a_step * run.data.seq_len if names else 0
    rows.append(
      {
        "stage": phase.value,
        "trains": "+".join(names) or "nothing",
        "tokens": tokens,
        "PFLOPs": per_token * tokens / 1e15,
        "time": metrics.duration(per_token * tokens / rate),
        **{k: f"{v / 2**30:.3f}" for k, v in memory.items()},
      }
    )
  if rows:
    lines.append(metrics.table(rows, list(rows[0])))
  lines.append(
    f"memory in GiB a device, {len(devices)} in the mesh; time at {assumed}."
    " Nothing was started."
  )
  return "\n".join(lines)


def _measured_rate(dtype: str) -> float:
  """FLOP/s of a 1,024-wide matmul on this device, best of three."""
  n = 1024
  x = jnp.ones((n, n), jnp.dtype(dtype))
  multiply = jax.jit(lambda a: a @ a)
  multiply(x).block_until_ready()
  best = float("inf")
  for _ in range(3):
    began = time.perf_counter()
    multiply(x).block_until_ready()
    best = min(best, time.perf_counter() - began)
  return 2 * n**3 / best
