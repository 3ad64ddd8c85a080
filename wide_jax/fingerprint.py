"""Short hashes of what a run depends on, so that a resumed run can tell.

A checkpoint says how many steps were done, not on what: another text or other
weights under the old path would be trained on without a word.
"""

import hashlib
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from wide_jax.axes import Tree
from wide_jax.token_cache import TokenSet

_SAMPLE = 1 << 20  # tokens looked at, spread over the whole text
_ROWS = 16  # slices of each leaf


def of_tokens(tokens: TokenSet) -> str:
  """Of a token set: its size, its documents and a million of its tokens."""
  stride = max(len(tokens.tokens) // _SAMPLE, 1)
  parts = [tokens.tokens[::stride].astype(np.uint32), tokens.offsets]
  return _hash(np.asarray(p) for p in parts)


def of_batches(batches: Iterable[Mapping[str, np.ndarray]]) -> str:
  """Of evaluation batches, all of them."""
  return _hash(b[k] for b in batches for k in sorted(b))


def of_params(params: Tree) -> str:
  """Of weights: a few slices of every leaf, in its own dtype, bit by bit.

  FFN leaves are left out: their channels may stand in any order.
  """
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  used = [
    leaf for path, leaf in leaves if "'ffn'" not in jax.tree_util.keystr(path)
  ]
  return _hash(
    np.asarray(leaf[tuple(slice(0, _ROWS) for _ in leaf.shape)])
    for leaf in used
  )


def _hash(arrays: Iterable[np.ndarray]) -> str:
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()[:16]
