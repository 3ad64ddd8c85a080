"""Which device calls are traced for: the one here, or one only compiled for."""

import contextlib
import contextvars
import functools
import re
from collections.abc import Generator

import jax

_OVERRIDE: contextvars.ContextVar[str | None] = contextvars.ContextVar(
  "pallas_kernels_device", default=None
)


def slug(kind: str) -> str:
  """A device kind as a file name: `NVIDIA H200` -> `nvidia_h200`."""
  return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


@functools.cache
def _here() -> tuple[str, str]:
  """(slug, platform) of jax's default device."""
  first = jax.devices()[0]
  return slug(first.device_kind), first.platform


@functools.cache
def _capability_here() -> tuple[int, int] | None:
  text = str(getattr(jax.devices()[0], "compute_capability", ""))
  match = re.fullmatch(r"(\d+)\.(\d+)", text)
  return (int(match[1]), int(match[2])) if match else None


def capability() -> tuple[int, int] | None:
  """CUDA compute capability, (9, 0) on Hopper; None where there is none.

  Nor is it known of a device that is only compiled for.
  """
  return _capability_here() if _OVERRIDE.get() is None else None


def name() -> str:
  """Slug of the device that calls are traced for."""
  return _OVERRIDE.get() or _here()[0]


def platform() -> str:
  """`gpu`, `tpu` or `cpu`, of the same device."""
  named = _OVERRIDE.get()
  if named is None:
    return _here()[1]
  if named.startswith(("nvidia", "amd")):
    return "gpu"
  return "tpu" if named.startswith("tpu") else "cpu"


@contextlib.contextmanager
def use_device(kind: str) -> Generator[None]:
  """Traces for a device that is not here, to compile only.

  What jax.jit has already traced for another device is not traced again.

  Args:
    kind: its name or slug, such as `NVIDIA H200`, `nvidia_h200` or `TPU v5e`.
  """
  token = _OVERRIDE.set(slug(kind))
  try:
    yield
  finally:
    _OVERRIDE.reset(token)
