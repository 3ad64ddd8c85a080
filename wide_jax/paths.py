"""Turns what a user names as a model into a place on this disk."""

import importlib.util
import pathlib
import re

ASSETS = pathlib.Path(__file__).resolve().parent / "assets"
EMBEDDED_MODEL = ASSETS / "tiny_llama"
EMBEDDED_TEXT = ASSETS / "shakespeare.txt"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model_path(path: str) -> pathlib.Path:
  """The local file or directory that `path` stands for.

  Args:
    path: `embedded` (the small model that ships with this package),
      `pkg:PACKAGE/FILE` (a file inside an installed Python package), an
      existing file or directory, or a hub id `org/name`, which alone may
      reach the network.

  Raises:
    ValueError: nothing is there; the message names what was looked for.
  """
  path = str(path)
  if path == "embedded":
    return _existing(EMBEDDED_MODEL, "embedded")
  if path.startswith("pkg:"):
    return _package_file(path)
  local = pathlib.Path(path).expanduser()
  if local.exists():
    return local
  if _HUB_ID.fullmatch(path) and not path.endswith((".gguf", ".json")):
    return _from_hub(path)
  raise ValueError(
    f"no model at {path!r}: want an existing directory or .gguf file,"
    " 'embedded', 'pkg:PACKAGE/FILE' or a hub id 'org/name'."
  )


def _existing(place: pathlib.Path, asked: str) -> pathlib.Path:
  if not place.exists():
    raise ValueError(f"{asked!r} stands for {place}, which does not exist.")
  return place


def _package_file(path: str) -> pathlib.Path:
  """Finds the file without importing the package, which may run code."""
  package, _, name = path.removeprefix("pkg:").partition("/")
  if not package or not name:
    raise ValueError(f"{path!r} must read 'pkg:PACKAGE/FILE'.")
  try:
    spec = importlib.util.find_spec(package)
  except (ImportError, ValueError):
    spec = None
  if spec is None or not spec.submodule_search_locations:
    raise ValueError(f"{path!r}: no Python package {package!r} is installed.")
  roots = [pathlib.Path(p).resolve() for p in spec.submodule_search_locations]
  for root in roots:
    place = (root / name).resolve()
    if place.is_relative_to(root) and place.exists():
      return place
  held = sorted(p.name for root in roots for p in root.glob("*.gguf"))
  raise ValueError(
    f"{path!r}: package {package!r} has no {name!r}; its .gguf files: {held}."
  )


def _from_hub(path: str) -> pathlib.Path:
  try:
    import huggingface_hub
  except ImportError as e:
    raise ValueError(
      f"{path!r} is not on this disk, and fetching it needs huggingface_hub."
    ) from e
  try:
    place = huggingface_hub.snapshot_download(
      path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]
    )
  except Exception as e:  # the hub raises many unrelated types
    reason = str(e).strip().split("\n")[0]
    raise ValueError(
      f"{path!r} is neither on this disk nor fetched: {reason}"
    ) from e
  return pathlib.Path(place)
