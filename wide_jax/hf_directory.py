"""A Hugging Face model directory: its files and the tensors in them."""

import pathlib
import re

import numpy as np

from wide_jax.model_config import ModelConfig
from wide_jax.safetensors_io import SafetensorsFile, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = ("F64", "F32", "F16", "BF16")

# Buffers that older exporters wrote; both are computed from the config.
IGNORABLE = re.compile(
  r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
)


class HfDirectory:
  """A Hugging Face directory as a source of tensors.

  Follows the index both ways: every tensor it lists must be in the file it
  names, every tensor of those files must be listed, and no other file is
  opened. File sizes are checked against headers before anything is read.
  """

  def __init__(self, folder: pathlib.Path):
    self.path = folder
    self.config = ModelConfig.from_hf(read_json(folder / "config.json"))
    self._files = _open_files(folder)
    self._where = {name: file for file in self._files for name in file.entries}
    self.shapes = {
      name: file.entries[name].shape for name, file in self._where.items()
    }
    for name, file in self._where.items():
      dtype = file.entries[name].dtype
      if dtype not in _DTYPES and not IGNORABLE.fullmatch(name):
        raise ValueError(
          f"{name} in {file.path} has dtype {dtype}; supported are"
          f" {', '.join(_DTYPES)}."
        )
    self.used: tuple[str, ...] = ()

  @property
  def n_tensors(self) -> int:
    return len(self._where)

  @property
  def dtype(self) -> str:
    """The dtype most of the file's bytes are in: what to write it back as."""
    sizes: dict[str, int] = {}
    for name, file in self._where.items():
      entry = file.entries[name]
      sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.n_bytes
    most = max(sizes, key=sizes.__getitem__)
    return {"BF16": "bfloat16", "F16": "float16"}.get(most, "float32")

  def rows(self, name: str, index: slice | np.ndarray) -> np.ndarray:
    return self._where[name].read(name)[index]

  def n_bytes(self, name: str) -> int:
    return self._where[name].entries[name].n_bytes


def _open_files(folder: pathlib.Path) -> list[SafetensorsFile]:
  index, single = folder / INDEX, folder / SINGLE
  if not index.is_file():
    if single.is_file():
      return [SafetensorsFile(single)]
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    torch = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
    hint = f"; it has {(others or torch)[:4]}" if others or torch else ""
    raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}.")
  table = read_json(index).get("weight_map")
  if not isinstance(table, dict) or not table:
    raise ValueError(f"{index} has no weight_map.")
  names = sorted(set(map(str, table.values())))
  strange = [n for n in names if pathlib.PurePath(n).name != n]
  if strange:
    raise ValueError(f"{index} names files outside its directory: {strange}.")
  if single.is_file() and SINGLE not in names:
    # transformers would read the one, a reader of the index the other.
    raise ValueError(
      f"{folder} has both {SINGLE} and an {INDEX} that does not list it;"
      " remove one of them."
    )
  files = {name: SafetensorsFile(folder / name) for name in names}
  for tensor, name in table.items():
    if tensor not in files[name].entries:
      raise ValueError(f"{index} puts {tensor} into {name}, which lacks it.")
  for name, file in files.items():
    for tensor in file.entries:
      if table.get(tensor) != name:
        raise ValueError(
          f"{file.path} holds {tensor}, which {INDEX} does not list there."
        )
  return list(files.values())
