"""What every command line needs: exit codes, one-line errors, the device.

Imports nothing but the standard library and versions.py, so that a machine
without the packages of training can run benchmarks.
"""

import contextlib
import importlib.metadata
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from wide_jax import versions

_HERE = pathlib.Path(__file__).resolve().parent


class Usage(Exception):
  """`--help` was asked for; holds the text to print."""


# --- the device --------------------------------------------------------------

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def select_device(device: str, flag: str = "--config.device") -> str:
  """Makes jax use `device`, or refuses; to be called before arrays are made.

  Args:
    device: `auto`, `cpu`, `gpu` or `tpu`.
    flag: what the remedy calls it.

  Returns:
    One line that says what jax got, such as `device: 1 x NVIDIA H200 (gpu)`.

  Raises:
    ValueError: that device is not here; the message has the remedy.
  """
  import jax  # here, so that --help and mistakes answer at once

  if device == "cpu":
    jax.config.update("jax_platforms", "cpu")
  elif device != "auto":
    try:
      found = jax.devices(device)
    except RuntimeError as e:
      raise ValueError(no_device(device, jax.__version__, flag)) from e
    jax.config.update("jax_default_device", None)
    if jax.default_backend() != found[0].platform:
      raise ValueError(
        f"device={device!r}, but jax computes on {jax.default_backend()!r}:"
        " JAX_PLATFORMS puts it first."
      )
  devices = jax.devices()
  if device == "cpu" and devices[0].platform != "cpu":
    raise ValueError(
      "device='cpu' came too late: jax already runs on"
      f" {devices[0].platform!r}."
    )
  kind = devices[0].device_kind
  return f"device: {len(devices)} x {kind} ({devices[0].platform})"


def no_device(
  device: str, jax_version: str, flag: str = "--config.device"
) -> str:
  """One sentence: why that device is not here, and the remedy."""
  start = f"device={device!r}, but jax {jax_version} finds none: "
  auto = f", or take {flag}=auto."
  if device == "tpu":
    return start + "pip install 'wide_jax[tpu]' on a TPU machine" + auto
  have = {}
  for name in _PLUGINS:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      have[name] = importlib.metadata.version(name)
  if not have:
    return start + "pip install 'wide_jax[gpu]'" + auto
  wrong = [
    f"{name} {version}"
    for name, version in have.items()
    if versions.numbers(version)[:3] != versions.numbers(jax_version)[:3]
  ]
  if len(wrong) == len(have):
    return start + (
      f"{', '.join(wrong)} does not belong to it; pip install --upgrade"
      f" 'jax[cuda13]=={jax_version}'{auto}"
    )
  return start + (
    "the plugin is installed, so look at the driver (nvidia-smi) and at"
    f" JAX_PLATFORMS{auto}"
  )


# --- running a script --------------------------------------------------------


def run(
  main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None
) -> int:
  """Calls `main(argv)` and says what a user did wrong in one line.

  Returns the exit code: what `main` returned (None is 0), 2 for a user's
  mistake (a `ValueError` or, for a diverged run, a `FloatingPointError` raised
  by our own code, or a file that cannot be read or written), 130 for Ctrl-C.
  Anything else is a bug and keeps its trace.
  """
  args = list(sys.argv[1:] if argv is None else argv)
  try:
    versions.check()
    return main(args) or 0
  except Usage as e:
    print(e)
    return 0
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130
  except (ValueError, FloatingPointError, OSError) as e:
    if not is_user_error(e):
      raise
    print(f"error: {one_line(e)}", file=sys.stderr)
    return 2


def is_user_error(error: BaseException) -> bool:
  """Whether the user, rather than the program, has something to mend.

  Our code raises ValueError for wrong input; one raised inside jax or numpy is
  a bug of ours that slipped through, and its trace is wanted.
  """
  if isinstance(error, OSError):
    return True
  frames = traceback.extract_tb(error.__traceback__)
  ours = isinstance(error, ValueError | FloatingPointError)
  if not ours or not frames:
    return False
  return _HERE in pathlib.Path(frames[-1].filename).resolve().parents


def one_line(error: BaseException) -> str:
  """What an error says, on one line."""
  if isinstance(error, OSError) and error.strerror:
    name = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{name}"
  text: Any = str(error) or type(error).__name__
  return re.sub(r"\s*\n\s*", " ", text.strip())
