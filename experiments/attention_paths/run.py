"""Times the attention paths of wide_jax.ops on packed rows; see README.md."""

import argparse
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from wide_jax import ops

ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 16, 2048, 9, 3, 64


def segments(documents: int, seed: int = 0):
  """Rows cut into `documents` pieces at random places, int32 [B, T]."""
  rng = np.random.default_rng(seed)
  out = np.ones((ROWS, LENGTH), np.int32)
  for row in out:
    cuts = rng.choice(np.arange(1, LENGTH), documents - 1, replace=False)
    row += np.searchsorted(np.sort(cuts), np.arange(LENGTH), side="right")
  return jnp.asarray(out)


def unsegmented(q, k, v, segments_BT, window, max_segments):
  """cuDNN's causal attention as it comes: what segments may cost."""
  return jax.nn.dot_product_attention(
    q, k, v, is_causal=True, implementation="cudnn"
  )


def times_ms(fn, *args, repeats: int = 15) -> list[float]:
  run = jax.jit(fn)
  for _ in range(2):
    jax.block_until_ready(run(*args))
  out = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(run(*args))
    out.append(1e3 * (time.perf_counter() - began))
  return out


def relative(got, want) -> float:
  got = np.asarray(got, np.float64)
  want = np.asarray(want, np.float64)
  return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def measure(name: str, documents: int, slots: int) -> dict:
  key = jax.random.key(0)
  shapes = [(ROWS, LENGTH, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
  q, k, v = (
    jax.random.normal(jax.random.fold_in(key, i), s, jnp.bfloat16)
    for i, s in enumerate(shapes)
  )
  grad = jax.random.normal(jax.random.fold_in(key, 3), q.shape, jnp.bfloat16)
  ids = segments(documents)
  path = unsegmented if name == "no_segments" else ops._PATHS[name]

  def forward(q, k, v):
    return path(q, k, v, ids, 0, slots)

  def both(q, k, v, grad):
    out, vjp = jax.vjp(forward, q, k, v)
    return out, *vjp(grad)

  row = {"path": name, "documents_a_row": documents, "slots": slots}
  try:
    got = jax.jit(both)(q, k, v, grad)
    f32 = [x[:1].astype(jnp.float32) for x in (q, k, v, grad)]
    with jax.default_matmul_precision("highest"):
      out, vjp = jax.vjp(
        lambda *a: ops._PATHS["xla"](*a, ids[:1], 0, 0), *f32[:3]
      )
      want = (out, *vjp(f32[3]))
    row["relative_error"] = {
      n: relative(g[:1], w)
      for n, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    }
    row["forward_ms"] = times_ms(forward, q, k, v)
    row["forward_backward_ms"] = times_ms(both, q, k, v, grad)
    medians = {
      f"{n}_median": float(np.median(row[n]))
      for n in ("forward_ms", "forward_backward_ms")
    }
    row |= medians
    print(name, documents, slots, medians, flush=True)
  except Exception as e:  # a path that cannot run is a result too
    row["error"] = f"{type(e).__name__}: {str(e)[:300]}"
    print(name, documents, slots, row["error"], flush=True)
  return row


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json", required=True)
  args = parser.parse_args()
  rows = [measure("no_segments", 1, 0)]
  rows += [measure("cudnn", 4, slots) for slots in (4, 16, 64, 128)]
  rows += [measure("cudnn", 64, 64)]
  rows += [measure(n, 4, 0) for n in ("cudnn_mask", "triton", "xla")]
  result = {
    "shape": [ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM],
    "dtype": "bfloat16",
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "date": time.strftime("%Y-%m-%d"),
    "rows": rows,
  }
  temporary = f"{args.json}.tmp"
  with open(temporary, "w") as f:
    json.dump(result, f, indent=1)
  os.replace(temporary, args.json)


if __name__ == "__main__":
  main()
