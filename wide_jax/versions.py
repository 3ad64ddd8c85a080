"""The versions of jax that wide_jax is tested with, and a check of them."""

import importlib.metadata
import re

# The same range stands in pyproject.toml; a test compares the two.
JAX_LOWEST = (0, 10, 2)
JAX_BELOW = (0, 13)


def numbers(version: str) -> tuple[int, ...]:
  """The leading release numbers: `0.12.0.1.dev3` -> (0, 12, 0, 1)."""
  found = re.match(r"\d+(\.\d+)*", version)
  return tuple(int(n) for n in found.group().split(".")) if found else ()


def check(jax_version: str | None = None) -> None:
  """Refuses a jax outside the supported range.

  Args:
    jax_version: what to judge; by default the jax that is installed.

  Raises:
    ValueError: naming both versions and the remedy.
  """
  if jax_version is None:
    jax_version = importlib.metadata.version("jax")
  if not JAX_LOWEST <= numbers(jax_version) < JAX_BELOW:
    low = ".".join(map(str, JAX_LOWEST))
    high = ".".join(map(str, JAX_BELOW))
    raise ValueError(
      f"jax {jax_version} is not supported: wide_jax needs jax >= {low} and"
      f" < {high} (pip install 'jax>={low},<{high}')."
    )
