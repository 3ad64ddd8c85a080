"""Files -> our tree: safetensors and GGUF, streamed leaf by leaf.

One table (`tree_layout.py`) says for every leaf of the tree which tensor of the
file it comes from and what shape both have. Loading walks that table: one
preallocated array a stacked leaf, filled layer by layer from the file's mmap
in small blocks, handed to `put` and forgotten. So what is held in anonymous
memory is the loaded arrays and little else (experiments/loading_memory).

`python -m wide_jax.weights check|merge` is in `weights_cli.py`.
"""

import dataclasses
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from wide_jax.gguf_reader import GgufFile
from wide_jax.hf_directory import IGNORABLE, HfDirectory
from wide_jax.model_config import ModelConfig
from wide_jax.paths import resolve_model_path
from wide_jax.safetensors_io import SafetensorsFile, blocks, read_json
from wide_jax.tree_layout import (
  EMBED,
  HEAD,
  Leaf,
  flatten,
  layout,
  param_shapes,
  unflatten,
)

EXPORT = "wide.json"
ROUTERS = "routers.safetensors"
CHANNEL_ORDER = "channel_order"

_DTYPES = {
  "float32": np.dtype(np.float32),
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
  "float16": np.dtype(np.float16),
}

# --- where a model lies ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
  """A resolved model path.

  Attributes:
    name: what the caller wrote.
    kind: `hf` (a Hugging Face directory) or `gguf`.
    path: the directory or the file; a tokenizer is looked for here too.
    export: the export directory that named this base, if one did.
  """

  name: str
  kind: str
  path: pathlib.Path
  export: pathlib.Path | None = None


def resolve(path: str | os.PathLike) -> Source:
  """Finds the model that `path` names.

  `path` is what `paths.resolve_model_path` takes, or one of our export
  directories, which names its base.

  Raises:
    ValueError: nothing there, by name.
  """
  name = os.fspath(path)
  local = resolve_model_path(name)
  if local.is_file():
    if local.suffix == ".gguf":
      return Source(name, "gguf", local)
    raise ValueError(
      f"{local} is a file, but not a .gguf one; want a model directory or a"
      " .gguf file."
    )
  if (local / EXPORT).is_file():
    return _base_of_export(name, local)
  return Source(name, "hf", local)


def _base_of_export(name: str, folder: pathlib.Path) -> Source:
  base = read_json(folder / EXPORT).get("base")
  if not isinstance(base, str) or not base:
    raise ValueError(f"{folder / EXPORT} names no base model.")
  beside = folder / base
  if not pathlib.Path(base).exists() and beside.exists():
    base = os.fspath(beside)
  source = resolve(base)
  if source.export is not None:
    raise ValueError(f"the base {base!r} of {folder} is itself an export.")
  return dataclasses.replace(source, name=name, export=folder)


# --- loading -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoadReport:
  """What was read. `tensors == used + ignored` always holds.

  Attributes:
    tensors: tensors in the file or files.
    used: of these, how many the tree (or the config) was built from.
    ignored: names of known buffers that were left alone, and of a second copy
      of a tied head.
    file_bytes: bytes of the used tensors as stored.
    array_bytes: bytes of the loaded arrays.
    notes: sentences worth showing.
  """

  tensors: int
  used: int
  ignored: tuple[str, ...]
  file_bytes: int
  array_bytes: int
  notes: tuple[str, ...] = ()

  def __str__(self) -> str:
    text = (
      f"{self.used} of {self.tensors} tensors used,"
      f" {self.file_bytes / 1e6:.1f} MB read,"
      f" {self.array_bytes / 1e6:.1f} MB loaded"
    )
    if self.ignored:
      text += f"; left alone: {', '.join(self.ignored)}"
    return "; ".join((text, *self.notes))


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A model read from disk.

  Attributes:
    config: its shape; `tied` says what the weights are, not what the file's
      config claimed.
    params: the tree of BUILD_NOTES.md, plain dicts.
    report: what was read.
    source: where from.
    channel_order: int32 [L, F] by which the FFN channels were reordered, or
      None; `channel_order[l, new] = old`.
  """

  config: ModelConfig
  params: dict[str, Any]
  report: LoadReport
  source: Source
  channel_order: np.ndarray | None = None


def open_source(source: Source) -> HfDirectory | GgufFile:
  """Opens a resolved path and reads its config and headers, no tensor."""
  if source.kind == "gguf":
    return GgufFile(source.path)
  return HfDirectory(source.path)


def read_config(path: str | os.PathLike) -> ModelConfig:
  """The config that `load_params` will give, without loading the weights.

  Tensors are read only where a tied head has to be compared.
  """
  return _settle_head(open_source(resolve(path)), warn=False)[0]


def load_params(
  path: str | os.PathLike,
  *,
  dtype: Any = "float32",
  like: Mapping[str, Any] | None = None,
  put: Callable[[str, np.ndarray], Any] | None = None,
  channel_order: np.ndarray | None = None,
) -> Loaded:
  """Reads a model into the tree of BUILD_NOTES.md.

  Args:
    path: see `resolve`.
    dtype: float32, bfloat16 or float16; every leaf is held in it.
    like: a tree whose leaves have `.shape` and `.dtype`, the loaded leaves
      must agree with it; its dtypes win over `dtype`.
    put: `put(leaf_path, array) -> array`, called once a leaf, for example to
      place it on devices; the numpy array is not used afterwards.
    channel_order: int [L, F], `channel_order[l, new] = old`; an export
      directory brings its own.

  Raises:
    FileNotFoundError: a file of the model is missing.
    ValueError: no such model; a tensor that is missing, unknown or of the
      wrong shape, a truncated file, a config that is not supported; each by
      name.
  """
  source = resolve(path)
  file = open_source(source)
  if source.export is not None:
    if channel_order is not None:
      raise ValueError(
        f"channel_order was given, but {source.export} has its own."
      )
    channel_order = read_channel_order(source.export)
  config, ignored, notes = _settle_head(file)
  leaves = layout(config)
  used = _check_tensors(file, config, leaves, ignored)
  if channel_order is not None:
    channel_order = check_channel_order(
      channel_order, config.n_layers, config.d_ff
    )
  dtypes = _leaf_dtypes(leaves, config, dtype, like)

  flat, array_bytes = {}, 0
  for leaf in leaves:
    array = _read_leaf(file, leaf, config, dtypes[leaf.path], channel_order)
    array_bytes += array.nbytes
    if put is not None:
      array = put(leaf.path, array)
      if hasattr(array, "block_until_ready"):
        array.block_until_ready()  # so that the host copy goes before the next
    flat[leaf.path] = array
  report = LoadReport(
    tensors=file.n_tensors,
    used=len(used) + len(file.used),
    ignored=tuple(sorted(ignored)),
    file_bytes=sum(file.n_bytes(name) for name in used),
    array_bytes=array_bytes,
    notes=notes,
  )
  return Loaded(config, unflatten(flat), report, source, channel_order)


def _settle_head(
  file, warn: bool = True
) -> tuple[ModelConfig, set[str], tuple[str, ...]]:
  """Decides about the output head from the config and the file together.

  The rule is that of transformers 5: tied and no head in the file, or an
  equal copy: one array. Tied, but the file holds another head: the file is
  right, they are not tied. (transformers would also take the head for a lost
  embedding; that is a damaged file, and refused.)
  """
  config = file.config
  ignored = {n for n in file.shapes if IGNORABLE.fullmatch(n)}
  if not config.tied or HEAD not in file.shapes:
    return config, ignored, ()
  if EMBED not in file.shapes:
    raise ValueError(f"{file.path} lacks {EMBED}.")
  if file.shapes[HEAD] == file.shapes[EMBED] and _same(file, HEAD, EMBED):
    return config, ignored | {HEAD}, (f"{HEAD} equals the embedding",)
  note = (
    f"tie_word_embeddings is set, but {HEAD} differs from the embedding; the"
    " two are kept apart, as transformers does"
  )
  if warn:
    warnings.warn(f"{file.path}: {note}.", stacklevel=3)
  return dataclasses.replace(config, tied=False), ignored, (note,)


def _same(file, a: str, b: str) -> bool:
  n_rows, n_cols = file.shapes[a]
  return all(
    np.array_equal(file.rows(a, rows), file.rows(b, rows))
    for rows in blocks(n_rows, n_cols)
  )


def _check_tensors(file, config, leaves, ignored) -> list[str]:
  """Names of the tensors the tree needs; refuses any other set of them."""
  want = {}
  for leaf in leaves:
    for i in range(config.n_layers if leaf.stacked else 1):
      want[leaf.hf.format(i)] = leaf.hf_shape
  missing = sorted(set(want) - set(file.shapes))
  if missing:
    raise ValueError(f"{file.path} lacks {_some(missing)}.")
  extra = sorted(set(file.shapes) - set(want) - ignored)
  if extra:
    raise ValueError(
      f"{file.path} holds {_some(extra)}, which its config has no place for."
    )
  for name, shape in want.items():
    if tuple(file.shapes[name]) != shape:
      raise ValueError(
        f"{name} in {file.path} has shape {tuple(file.shapes[name])}; its"
        f" config wants {shape}."
      )
  return list(want)


def _some(names: list[str], limit: int = 6) -> str:
  more = f" and {len(names) - limit} more" if len(names) > limit else ""
  return ", ".join(names[:limit]) + more


def _leaf_dtypes(leaves, config, dtype, like) -> dict[str, np.dtype]:
  try:
    name = np.dtype(dtype).name
  except TypeError:
    name = str(dtype)
  if name not in _DTYPES:
    raise ValueError(f"dtype={name!r} must be one of {sorted(_DTYPES)}.")
  if like is None:
    return {leaf.path: _DTYPES[name] for leaf in leaves}
  flat, shapes = flatten(like), param_shapes(config)
  if set(flat) != set(shapes):
    odd = sorted(set(flat) ^ set(shapes))
    raise ValueError(
      f"the tree asked for and the model differ in {_some(odd)}."
    )
  for path, shape in shapes.items():
    if tuple(flat[path].shape) != shape:
      raise ValueError(
        f"{path} should have shape {tuple(flat[path].shape)}; the model has"
        f" {shape}."
      )
  return {path: np.dtype(leaf.dtype) for path, leaf in flat.items()}


def _read_leaf(file, leaf: Leaf, config, dtype, channel_order) -> np.ndarray:
  n = config.n_layers if leaf.stacked else 1
  out = _aligned_empty((n, *leaf.shape), dtype)
  for i in range(n):
    order = None
    if leaf.channels is not None and channel_order is not None:
      order = channel_order[i]
    _fill(out[i], file, leaf, leaf.hf.format(i), order)
  return out if leaf.stacked else out[0]


def _fill(out: np.ndarray, file, leaf: Leaf, name: str, order) -> None:
  """Copies one tensor of the file into its place, block by block."""
  n_rows = leaf.hf_shape[0]
  n_cols = math.prod(leaf.hf_shape[1:])
  flat = out.reshape((n_cols, n_rows) if leaf.transposed else leaf.hf_shape)
  for rows in blocks(n_rows, n_cols):
    pick = order[rows] if leaf.channels == 0 and order is not None else rows
    block = file.rows(name, pick)
    if leaf.channels == 1 and order is not None:
      block = block[:, order]
    if leaf.transposed:
      _copy(flat[:, rows], block.T, name)
    else:
      _copy(flat[rows], block, name)


def _copy(out: np.ndarray, block: np.ndarray, name: str) -> None:
  if out.dtype == block.dtype:
    # numpy copies its own types much faster than bfloat16.
    bits = np.dtype(f"u{out.dtype.itemsize}")
    out.view(bits)[...] = block.view(bits)
    return
  if out.dtype == np.float16:
    largest = np.max(np.abs(block.astype(np.float32)), initial=0.0)
    if largest > np.finfo(np.float16).max:
      raise ValueError(f"{name} reaches {largest}, beyond float16's 65504.")
  out[...] = block


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """An empty array on a 64-byte boundary: jax on a CPU takes it as it is."""
  n = math.prod(shape) * dtype.itemsize
  raw = np.empty(n + 64, np.uint8)
  start = -raw.ctypes.data % 64
  return raw[start : start + n].view(dtype).reshape(shape)


# --- FFN channel order -------------------------------------------------------


def check_channel_order(order, n_layers: int, d_ff: int) -> np.ndarray:
  """int32 [L, F]; raises ValueError unless each row is a permutation."""
  order = np.asarray(order)
  if order.shape != (n_layers, d_ff) or order.dtype.kind not in "iu":
    raise ValueError(
      f"channel_order has shape {order.shape} and dtype {order.dtype}; want"
      f" integers [{n_layers}, {d_ff}]."
    )
  if not np.array_equal(
    np.sort(order, axis=1), np.broadcast_to(np.arange(d_ff), order.shape)
  ):
    raise ValueError("channel_order has a row that is not a permutation.")
  return order.astype(np.int32)


def read_channel_order(export_dir: str | os.PathLike) -> np.ndarray | None:
  """int32 [L, F] kept in an export directory, or None."""
  path = pathlib.Path(export_dir) / ROUTERS
  if not path.is_file():
    return None
  file = SafetensorsFile(path)
  if CHANNEL_ORDER not in file.entries:
    return None
  return np.array(file.read(CHANNEL_ORDER))


def inverse_order(order) -> np.ndarray:
  """int32 [L, F] that undoes `order`."""
  return np.argsort(np.asarray(order), axis=1).astype(np.int32)


# Leaf below layers/ffn -> its channel axis in the stacked array.
_CHANNEL_AXES = {
  "gate/kernel": 2,
  "gate/bias": 1,
  "up/kernel": 2,
  "up/bias": 1,
  "down/kernel": 1,
}
LORA_CHANNEL_AXES = {"gate/b": 2, "up/b": 2, "down/a": 1}


def permute_channels(params: dict[str, Any], channel_order) -> dict[str, Any]:
  """Reorders the FFN channels; the model computes the same function.

  Args:
    params: the tree, numpy or jax leaves.
    channel_order: int [L, F], `channel_order[l, new] = old`. Its
      `inverse_order` brings the channels back.

  Returns:
    A new tree; leaves without a channel axis are shared, not copied.
  """
  flat = flatten(params)
  n_layers, _, d_ff = flat["layers/ffn/gate/kernel"].shape
  order = check_channel_order(channel_order, n_layers, d_ff)
  return unflatten(permute_leaves(flat, order, _CHANNEL_AXES))


def permute_leaves(flat, order, axes) -> dict[str, Any]:
  """Reorders `layers/ffn/...` leaves of a flat tree along `axes`."""
  out = dict(flat)
  for name, axis in axes.items():
    path = "layers/ffn/" + name
    if path in flat:
      out[path] = _take(flat[path], order, axis)
  return out


def _take(leaf, order, axis: int):
  """leaf[i] reordered by order[i], layer by layer: no index of leaf's size."""
  if isinstance(leaf, np.ndarray):
    out = np.empty_like(leaf)
    for i, row in enumerate(order):
      np.take(leaf[i], row, axis=axis - 1, out=out[i], mode="clip")
    return out
  import jax  # a leaf that is not numpy's is jax's and stays on its devices

  def take(x, row):
    return jax.numpy.take(x, row, axis=axis - 1, mode="clip")

  return jax.vmap(take)(leaf, order)


def main() -> int:
  """`python -m wide_jax.weights check|merge`; see weights_cli.py."""
  from wide_jax import weights_cli  # above this module in the order of imports

  return weights_cli.main()


if __name__ == "__main__":
  raise SystemExit(main())
