"""How much anonymous memory loading a checkpoint takes, over its arrays.

Writes a synthetic sharded bfloat16 checkpoint in the shape of Llama-3.2-1B
(2.5 GB) into a temporary directory, loads it in a fresh process a case, and
deletes it. A thread of that process samples `RssAnon` of /proc/self/status:
pages of mapped files do not count there, copies do. Linux only.

  python experiments/loading_memory/run.py
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

CASES = ("numpy", "jax, 1 device", "jax, sharded over 4", "regrouped")
LIMIT = 1.3
PERIOD_S = 0.002


def rss_anon() -> int:
  """Bytes of anonymous memory that are resident in this process."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith("RssAnon:"):
      return int(line.split()[1]) * 1024
  raise ValueError("/proc/self/status has no RssAnon; this needs Linux.")


class Peak:
  """`with Peak() as peak`: the largest RssAnon meanwhile, in bytes."""

  def __enter__(self):
    self.bytes = rss_anon()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()
    return self

  def _watch(self):
    while not self._stop.wait(PERIOD_S):
      self.bytes = max(self.bytes, rss_anon())

  def __exit__(self, *_):
    self._stop.set()
    self._thread.join()
    self.bytes = max(self.bytes, rss_anon())


def write_checkpoint(folder: pathlib.Path) -> None:
  """A sharded checkpoint of random bfloat16, one tensor in memory at a time."""
  import ml_dtypes
  import numpy as np

  from wide_jax import hf_directory, safetensors_io, tree_layout
  from wide_jax.model_config import ModelConfig

  config = ModelConfig(
    vocab=128256,
    d_model=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    d_ff=8192,
    max_positions=131072,
    tied=True,
  )
  rng = np.random.default_rng(0)
  noise = rng.standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
  items = [
    safetensors_io.Item(
      leaf.hf.format(i),
      noise.dtype,
      leaf.hf_shape,
      lambda leaf=leaf: np.resize(noise, leaf.hf_shape),
    )
    for leaf in tree_layout.layout(config)
    for i in range(config.n_layers if leaf.stacked else 1)
  ]
  shards, table = 5, {}
  for n in range(shards):
    name = f"model-{n + 1:05}-of-{shards:05}.safetensors"
    safetensors_io.write_safetensors(folder / name, items[n::shards])
    table |= {item.name: name for item in items[n::shards]}
  safetensors_io.write_json(folder / hf_directory.INDEX, {"weight_map": table})
  safetensors_io.write_json(folder / "config.json", config.to_hf())


def measure(case: str, folder: str) -> dict:
  """Loads in this process; returns the row of the result."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from wide_jax import weights

  put, order = None, None
  if case == "jax, 1 device":
    jax.block_until_ready(jnp.ones(8))  # starts the backend

    def put(path, array):
      return jax.device_put(array, jax.devices()[0])

  if case == "jax, sharded over 4":
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))

    def put(path, array):
      axis = int(np.argmax(array.shape[-2:])) + max(array.ndim - 2, 0)
      spec = PartitionSpec(*[None] * axis, "fsdp")
      return jax.device_put(array, NamedSharding(mesh, spec))

  if case == "regrouped":
    rng = np.random.default_rng(1)
    order = np.stack([rng.permutation(8192) for _ in range(16)])
  before = rss_anon()
  start = time.perf_counter()
  with Peak() as peak:
    loaded = weights.load_params(
      folder, dtype="bfloat16", put=put, channel_order=order
    )
  seconds = time.perf_counter() - start
  arrays = loaded.report.array_bytes
  return {
    "case": case,
    "array_bytes": arrays,
    "peak_anonymous_bytes": peak.bytes - before,
    "ratio": round((peak.bytes - before) / arrays, 3),
    "seconds": round(seconds, 1),
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--case", help=argparse.SUPPRESS)
  parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
  parser.add_argument("--json", default=str(HERE / "result.json"))
  args = parser.parse_args()
  if args.case:
    print(json.dumps(measure(args.case, args.checkpoint)))
    return 0
  flag = "--xla_force_host_platform_device_count=4"
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    write_checkpoint(pathlib.Path(folder))
    for case in CASES:
      command = [sys.executable, __file__, "--case", case]
      out = subprocess.run(
        [*command, "--checkpoint", folder],
        env=env,
        check=True,
        capture_output=True,
        text=True,
      )
      rows.append(json.loads(out.stdout.splitlines()[-1]))
      print(rows[-1], flush=True)
  import jax
  import numpy as np

  result = {
    "limit": LIMIT,
    "rows": rows,
    "python": platform.python_version(),
    "jax": jax.__version__,
    "numpy": np.__version__,
    "cpus": os.cpu_count(),
  }
  temporary = pathlib.Path(args.json + ".tmp")
  temporary.write_text(json.dumps(result, indent=2) + "\n")
  os.replace(temporary, args.json)
  worst = max(row["ratio"] for row in rows)
  print(f"largest ratio {worst}, limit {LIMIT}")
  return 0 if worst < LIMIT else 1


if __name__ == "__main__":
  sys.exit(main())
