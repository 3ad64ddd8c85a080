"""The versions wide_jax is tested with, and a check of what is installed.

Reads metadata only: nothing is imported that takes time.
"""

import importlib.metadata
import re

# The same range stands in pyproject.toml; a test compares the two.
JAX_LOWEST = (0, 10, 2)
JAX_BELOW = (0, 13)

# Package -> (lowest, first that is too new): those that break at versions that
# do not look as if they would.
RANGES = {
  "jax": (JAX_LOWEST, JAX_BELOW),
  "flax": ((0, 12, 8), (0, 13)),
  "optax": ((0, 2, 8), (0, 3)),
  "orbax-checkpoint": ((0, 12), (0, 13)),
}


def numbers(version: str) -> tuple[int, ...]:
  """The leading release numbers: `0.12.0.1.dev3` -> (0, 12, 0, 1)."""
  found = re.match(r"\d+(\.\d+)*", version)
  return tuple(int(n) for n in found.group().split(".")) if found else ()


def requirement(name: str) -> str:
  """What pyproject.toml asks of a package in `RANGES`: `jax>=0.10.2,<0.13`."""
  low, below = (".".join(map(str, v)) for v in RANGES[name])
  return f"{name}>={low},<{below}"


def problem(name: str, version: str | None) -> str | None:
  """Why this version of a package in `RANGES` will not do, or None.

  Args:
    name: the package.
    version: as installed; None where it is not.
  """
  wanted = requirement(name)
  if version is None:
    return f"{name} is not installed: pip install '{wanted}'."
  low, below = RANGES[name]
  if low <= numbers(version) < below:
    return None
  bounds = (
    wanted.removeprefix(name).replace(">=", ">= ").replace(",<", " and < ")
  )
  return (
    f"{name} {version} is not supported: wide_jax needs {name} {bounds}"
    f" (pip install '{wanted}')."
  )


def problems() -> list[str]:
  """One sentence for each package in `RANGES` that is absent or unsupported."""
  found = (problem(name, _installed(name)) for name in RANGES)
  return [sentence for sentence in found if sentence]


def check(jax_version: str | None = None) -> None:
  """Refuses versions outside the supported ranges.

  Args:
    jax_version: judge this version of jax, and nothing else; by default
      everything in `RANGES`, as installed.

  Raises:
    ValueError: naming both versions and the remedy.
  """
  if jax_version is None:
    found = problems()
  else:
    found = list(filter(None, [problem("jax", jax_version)]))
  if found:
    raise ValueError(" ".join(found))


def _installed(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None
