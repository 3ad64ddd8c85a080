"""Prints the wheels that compile-only devices need beside the installed jax.

  python tests/aot/wheels.py FOLDER

prints pip requirements, or nothing if FOLDER holds all of them already.
"""

import importlib.metadata as metadata
import pathlib
import re
import sys


def requirements() -> dict[str, str]:
  """Package -> version (perhaps `1.2.*`), of what the installed jax wants."""
  version = metadata.version("jax")
  found = {"jax-cuda13-plugin": version, "jax-cuda13-pjrt": version}
  for line in metadata.requires("jax") or ():
    if tpu := re.match(r"libtpu\s*==\s*([\w.*]+)", line):
      found["libtpu"] = tpu[1]
  if "libtpu" not in found:
    raise ValueError(f"jax {version} does not say which libtpu it wants.")
  return found


def missing(folder: pathlib.Path) -> list[str]:
  """The requirements that `folder` does not hold."""
  return [
    f"{name}=={version}"
    for name, version in requirements().items()
    if not any(folder.glob(f"{name.replace('-', '_')}-{version}.dist-info"))
  ]


if __name__ == "__main__":
  if missing(pathlib.Path(sys.argv[1])):
    print(*(f"{name}=={version}" for name, version in requirements().items()))
