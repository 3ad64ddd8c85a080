"""Keep masks of rows: random, shared, learned, and random twins of those."""

import os
import pathlib
import zipfile
from collections.abc import Sequence

import numpy as np

from pallas_kernels import suite
from pallas_kernels.suite import Row

# Layers of a learned mask, spread over depth; 0 and 1 keep everything.
LAYERS = (3, 8, 13, 18, 23, 28)
_BLOCK = 1024  # tokens of one row of a learned mask


def load(directory: str | os.PathLike, row: Row) -> list[np.ndarray]:
  """The learned masks of a row, one of each of LAYERS.

  Args:
    directory: holds masks/<source>.npz, packed as `np.packbits(axis=-1)` of
      bool [layers, 8, 1024, groups], or is that `masks` directory itself.
    row: with mask `learned` or `matched`.

  Returns:
    bool [B, T, G] each, B * T tokens as 1,024-token rows.

  Raises:
    ValueError: no such file, or other shapes than the row's.
  """
  root = pathlib.Path(directory)
  path = root / "masks" / f"{row.source}.npz"
  if not path.is_file():
    path = root / f"{row.source}.npz"
  if not path.is_file():
    raise ValueError(
      f"--data {directory} has no masks/{row.source}.npz, needed by {row.name}."
    )
  problem = row.problem
  kind = "attn" if problem.heads else "ffn"
  try:
    with open(path, "rb") as f, np.load(f) as stored:
      groups = int(stored["wt2_na" if problem.heads else "wt2_nf"])
      bits = np.unpackbits(stored[f"wt2_{kind}"], axis=-1)[..., :groups]
  except (KeyError, ValueError, TypeError, zipfile.BadZipFile) as e:
    raise ValueError(f"{path} holds no packed masks ({e}).") from e
  rows, length = problem.rows, problem.length
  fits = bits.ndim == 4 and bits.shape[0] > max(LAYERS)
  if not fits or groups != problem.groups or bits.shape[1] < rows:
    raise ValueError(
      f"{path}: masks {bits.shape} do not fit {row.name}, which has {rows} "
      f"rows of {problem.groups} groups."
    )
  if length > bits.shape[2]:
    raise ValueError(
      f"{path} has rows of {bits.shape[2]} tokens; {row.name} needs {length}."
    )
  return [bits[layer, :rows, :length].astype(bool) for layer in LAYERS]


def check(rows: Sequence[Row], data: str | os.PathLike | None) -> None:
  """Refuses before any work what `of` would refuse in the middle of it.

  Raises:
    ValueError: see `of`.
  """
  for row in rows:
    if row.mask in ("learned", "matched"):
      of(row, 1, data)


def of(
  row: Row, number: int, data: str | os.PathLike | None, seed: int = 0
) -> list[np.ndarray]:
  """Masks that a row's repeats rotate through.

  Learned rows and their twins take one mask of each of LAYERS, the twins
  random ones of that layer's density; others take `number` random ones.

  Raises:
    ValueError: learned masks without --data, or see `load`.
  """
  if row.mask not in ("learned", "matched"):
    return [
      suite.random_mask(row.problem, seed + i, row.mask) for i in range(number)
    ]
  if data is None:
    raise ValueError(
      f"{row.name} needs --data DIR with masks/{row.source}.npz."
    )
  learned = load(data, row)
  if row.mask == "learned":
    return learned
  rng = np.random.default_rng(seed)
  return [rng.random(m.shape, np.float32) < m.mean() for m in learned]
