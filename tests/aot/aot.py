"""Compile-only devices: real compilers for accelerators that are not here.

What compiles for such a device has passed the accelerator's own compiler, with
its registers, shared or vector memory and tilings; it has not been run.

The devices come out of wheels (jax-cuda13-plugin, jax-cuda13-pjrt, libtpu) that
`make test` puts into a folder of their own, VENV/aot: beside jax they would
make every import look for a GPU and a TPU. Mosaic GPU kernels also need
`ptxas`, which the wheel nvidia-cuda-nvcc has.

Importing this module keeps jax on the CPU: use it in a process of its own.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# libtpu would ask a cloud's metadata server what machine this is.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# It lets one process in at a time, for the sake of a chip; there is none.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import (  # noqa: E402
  AbstractDevice,
  AbstractMesh,
  SingleDeviceSharding,
)

# One host's worth of chips: the smallest topology that libtpu names.
TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TARGETS = ("h200", *TPUS)
_H200 = pathlib.Path(__file__).with_name("h200_target_config.txt")


def device(target: str) -> Any:
  """One compile-only device; `target` is one of TARGETS."""
  if target in TPUS:
    found = topologies.get_topology_desc(TPUS[target], "tpu")
  elif target == "h200":
    found = topologies.get_topology_desc(
      "h200", "cuda", target_config=_H200.read_text(), topology="1x1x1"
    )
  else:
    raise ValueError(f"target {target!r} must be one of {', '.join(TARGETS)}.")
  return found.devices[0]


def _described(target: str) -> contextlib.AbstractContextManager:
  """Pallas asks which GPU it lowers for; a TPU is told by its platform."""
  if target != "h200":
    return contextlib.nullcontext()
  chip = AbstractDevice("NVIDIA H200", 132, "cuda")
  return jax.sharding.use_abstract_mesh(
    AbstractMesh((1,), ("x",), abstract_device=chip)
  )


def compile_for(target: str, fn: Callable, *args: Any) -> jax.stages.Compiled:
  """jit(fn) compiled for `target`; args: trees of arrays or their structs."""
  place = SingleDeviceSharding(device(target))
  structs = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args
  )
  with _described(target):
    return jax.jit(fn).lower(*structs).compile()
