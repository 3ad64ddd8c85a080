"""Reads and writes safetensors files through numpy, one tensor at a time.

The format (github.com/huggingface/safetensors): eight bytes of little-endian
header length, a JSON header, then the tensors back to back. We read it by
mmap, so that the pages belong to the file and not to anonymous memory, and
write it as a stream, so that no second copy of the model is ever held. It
knows bfloat16, which plain numpy does not.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from wide_jax import atomic

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# The reference implementation refuses larger headers too.
_MAX_HEADER_BYTES = 100_000_000


class Entry(NamedTuple):
  """Where one tensor lies in its file; `start` counts from byte 0."""

  dtype: str
  shape: tuple[int, ...]
  start: int
  n_bytes: int


class SafetensorsFile:
  """One safetensors file, opened by mmap and checked as a whole.

  Attributes:
    path: the file.
    entries: tensor name -> `Entry`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a header that cannot be read, or a file shorter or longer than
      its header says; the message names the file.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(f"{self.path} does not exist.")
    self.entries, self.metadata = _read_header(self.path)
    self._bytes: np.ndarray | None = None

  def read(self, name: str) -> np.ndarray:
    """A read-only view of one tensor in the file's own dtype."""
    entry = self.entries[name]
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
      raise ValueError(
        f"{name} in {self.path} has dtype {entry.dtype}; known are"
        f" {sorted(_DTYPES)}."
      )
    if self._bytes is None:
      self._bytes = np.memmap(self.path, mode="r", dtype=np.uint8)
    raw = self._bytes[entry.start : entry.start + entry.n_bytes]
    return raw.view(dtype).reshape(entry.shape)


def _read_header(path: pathlib.Path) -> tuple[dict[str, Entry], dict[str, Any]]:
  size = path.stat().st_size
  with open(path, "rb") as f:
    prefix = f.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
      raise ValueError(
        f"{path} is not a whole safetensors file: {size} bytes, and a header"
        f" of {length}."
      )
    try:
      header = json.loads(f.read(length))
      metadata = header.pop("__metadata__", {})
      entries = {
        name: Entry(
          str(info["dtype"]),
          tuple(int(n) for n in info["shape"]),
          8 + length + int(info["data_offsets"][0]),
          int(info["data_offsets"][1]) - int(info["data_offsets"][0]),
        )
        for name, info in header.items()
      }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
      raise ValueError(f"{path} has a damaged safetensors header: {e}.") from e
  end = 8 + length
  for name, entry in sorted(entries.items(), key=lambda kv: kv[1].start):
    dtype = _DTYPES.get(entry.dtype)
    want = None if dtype is None else dtype.itemsize * math.prod(entry.shape)
    if entry.start != end or (want is not None and want != entry.n_bytes):
      raise ValueError(
        f"{path} has a damaged safetensors header: {name} has"
        f" {entry.n_bytes} bytes at {entry.start}, shape {entry.shape}."
      )
    end += entry.n_bytes
  if end != size:
    word = "truncated" if size < end else "longer than its header says"
    raise ValueError(f"{path} is {word}: {size} bytes, its header needs {end}.")
  return entries, metadata


class Item(NamedTuple):
  """One tensor to write; `make` builds it when its turn comes."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  make: Callable[[], np.ndarray]

  @property
  def n_bytes(self) -> int:
    return np.dtype(self.dtype).itemsize * math.prod(self.shape)


def item(name: str, array: np.ndarray) -> Item:
  """An `Item` for an array that is already there."""
  array = np.asarray(array)
  return Item(name, array.dtype, array.shape, lambda: array)


def write_safetensors(
  path: str | os.PathLike,
  items: Iterable[Item],
  metadata: dict[str, str] | None = None,
) -> None:
  """Writes one safetensors file under a temporary name and renames it.

  Raises:
    ValueError: a dtype the format lacks, or a duplicate name.
  """
  items = list(items)
  header: dict[str, Any] = {"__metadata__": {"format": "pt"} | (metadata or {})}
  offset = 0
  for it in items:
    code = _NAMES.get(np.dtype(it.dtype))
    if code is None or it.name in header:
      raise ValueError(
        f"cannot write {it.name} of dtype {it.dtype}: names must be unique"
        f" and dtypes among {sorted(_DTYPES)}."
      )
    header[it.name] = {
      "dtype": code,
      "shape": list(it.shape),
      "data_offsets": [offset, offset + it.n_bytes],
    }
    offset += it.n_bytes
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8
  with atomic.replacing(path) as temporary, open(temporary, "wb") as f:
    f.write(len(text).to_bytes(8, "little"))
    f.write(text)
    for it in items:
      array = np.ascontiguousarray(it.make())
      if array.shape != it.shape or array.dtype != np.dtype(it.dtype):
        # 0-d arrays come back from ascontiguousarray with one axis.
        array = array.reshape(it.shape).astype(it.dtype, copy=False)
      f.write(array.reshape(-1).view(np.uint8).data)


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes indented JSON under a temporary name and renames it."""
  with atomic.replacing(path) as temporary:
    text = json.dumps(value, indent=2) + "\n"
    temporary.write_text(text, encoding="utf-8")


def read_json(path: str | os.PathLike) -> Any:
  """Reads a JSON object.

  Raises:
    FileNotFoundError, ValueError: naming the file.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist.")
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as e:
    raise ValueError(f"{path} is not valid JSON: {e}.") from e
  if not isinstance(value, dict):
    raise ValueError(
      f"{path} holds a JSON {type(value).__name__}, want an object."
    )
  return value


def blocks(
  n_rows: int, n_cols: int, elements: int = 1 << 20
) -> Iterator[slice]:
  """Row slices of at most about `elements` elements each."""
  step = max(1, elements // max(1, n_cols))
  for low in range(0, n_rows, step):
    yield slice(low, min(n_rows, low + step))
