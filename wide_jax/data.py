"""Rows, batches and evaluation windows from token ids.

Everything here is a pure function: the batch of a step depends on (seed, step)
and on nothing that was drawn before, so resuming needs no state.

Every array that leaves this module has the same five names, `[B, T]`:

  ids        int32, the input tokens
  targets    int32, the token after each
  weights    float32, 1 where that token is to be predicted, else 0
  segments   int32, 1, 2, .. for the documents of a row; 0 is padding
  positions  int32, counted from 0 in every segment
"""

import functools
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from wide_jax import text_sources
from wide_jax.token_cache import TokenSet, load_tokens
from wide_jax.tokenizers import Tokenizer

__all__ = [
  "Batches",
  "Rows",
  "TokenSet",
  "describe",
  "eval_windows",
  "load_tokens",
  "prefetch",
  "read_text",
  "text_ids",
]

Batch = dict[str, np.ndarray]


class Rows:
  """A token set cut into rows of `seq_len` tokens.

  `packed`: the documents stand one after the other and are cut every `seq_len`
  tokens. Each document is a segment of its own; what continues from the row
  before is a new segment, which sees nothing of that row. `single`: one
  document a row, cut at `seq_len` and padded.

  A document's first token is nobody's target. Every other one is exactly once
  (where the set's `targets` marks it): the last place of a packed row has the
  first token of the next row for its target where both are of one document.
  In `single`, what lies more than one token beyond the row is left out.

  Rows without any target are left out. Arrays are those of the module's
  docstring, `[T]`; `pad_id` fills `ids` and `targets` where there is nothing.
  """

  def __init__(
    self,
    token_set: TokenSet,
    seq_len: int,
    packing: str = "packed",
    *,
    pad_id: int = 0,
  ):
    if seq_len < 2:
      raise ValueError(f"seq_len={seq_len} must be at least 2.")
    if packing not in ("packed", "single"):
      raise ValueError(f"packing={packing!r} must be 'packed' or 'single'.")
    self.seq_len, self.packing, self.pad_id = seq_len, packing, pad_id
    self._set = token_set
    offsets = token_set.offsets
    if packing == "packed":
      starts = np.arange(0, len(token_set.tokens), seq_len)
      ends = np.minimum(starts + seq_len + 1, len(token_set.tokens))
    else:
      starts = offsets[:-1]
      ends = np.minimum(offsets[1:], starts + seq_len + 1)
    counts = self._target_counts(starts, ends)
    used = counts > 0
    self._starts, self._ends = starts[used], ends[used]
    self.targets = int(counts.sum())
    self.without_targets = int((~used).sum())
    if not len(self._starts):
      raise ValueError(
        f"{token_set.documents} documents of {len(token_set.tokens)} tokens"
        f" leave no token to predict in rows of {seq_len}."
      )

  def _target_counts(self, starts, ends) -> np.ndarray:
    """Targets among tokens[start + 1 : end] of every row."""
    offsets, marks = self._set.offsets, self._set.targets
    if marks is None:
      firsts = np.searchsorted(offsets[:-1], [starts + 1, ends])
      return np.maximum(ends - starts - 1 - (firsts[1] - firsts[0]), 0)
    wanted = np.array(marks)
    wanted[offsets[:-1]] = False
    sums = np.concatenate([[0], np.cumsum(wanted, dtype=np.int64)])
    return sums[ends] - sums[np.minimum(starts + 1, ends)]

  def __len__(self) -> int:
    return len(self._starts)

  @property
  def max_segments(self) -> int:
    """Most documents that share one row."""
    last = np.minimum(self._ends, self._starts + self.seq_len) - 1
    offsets = self._set.offsets
    ranks = [np.searchsorted(offsets, x, "right") for x in (self._starts, last)]
    return int((ranks[1] - ranks[0]).max()) + 1

  def row(self, i: int) -> Batch:
    """Row i."""
    start, end = int(self._starts[i]), int(self._ends[i])
    offsets, seq_len = self._set.offsets, self.seq_len
    chunk = np.asarray(self._set.tokens[start:end], np.int32)
    n = min(len(chunk), seq_len)
    first = int(np.searchsorted(offsets, start, "right")) - 1
    last = int(np.searchsorted(offsets, start + len(chunk) - 1, "right")) - 1
    begins = np.maximum(offsets[first : last + 1] - start, 0)
    document = np.searchsorted(begins, np.arange(len(chunk)), "right") - 1
    real = document[1:] == document[:-1]
    if self._set.targets is not None:
      real = real & self._set.targets[start + 1 : end]
    out = self._blank()
    out["ids"][:n] = chunk[:n]
    out["segments"][:n] = document[:n] + 1
    out["positions"][:n] = np.arange(n) - begins[document[:n]]
    m = len(chunk) - 1
    out["targets"][:m] = np.where(real, chunk[1:], self.pad_id)
    out["weights"][:m] = real
    return out

  def _blank(self) -> Batch:
    t = self.seq_len
    return {
      "ids": np.full(t, self.pad_id, np.int32),
      "targets": np.full(t, self.pad_id, np.int32),
      "weights": np.zeros(t, np.float32),
      "segments": np.zeros(t, np.int32),
      "positions": np.zeros(t, np.int32),
    }


class Batches:
  """Batches of rows in an order that (seed, step) alone decides.

  Every epoch is a permutation of all rows; where the rows do not fill a batch
  it goes on with the next epoch's, so no row is padding only.
  """

  def __init__(self, rows: Rows, batch_size: int, seed: int):
    if batch_size < 1:
      raise ValueError(f"batch_size={batch_size} must be at least 1.")
    self.rows, self.batch_size, self.seed = rows, batch_size, seed
    self._permutation = functools.lru_cache(maxsize=4)(self._draw)

  def _draw(self, epoch: int) -> np.ndarray:
    rng = np.random.default_rng([self.seed, epoch])
    return rng.permutation(len(self.rows))

  def row_indices(self, step: int) -> list[int]:
    """Which rows make the batch of `step`."""
    if step < 0:
      raise ValueError(f"step={step} must not be negative.")
    first = step * self.batch_size
    out = []
    for k in range(first, first + self.batch_size):
      epoch, at = divmod(k, len(self.rows))
      out.append(int(self._permutation(epoch)[at]))
    return out

  def batch(self, step: int) -> Batch:
    """The batch of micro-step `step`, arrays [B, T]."""
    rows = [self.rows.row(i) for i in self.row_indices(step)]
    return {k: np.stack([r[k] for r in rows]) for k in rows[0]}

  def accumulated(self, step: int, n: int) -> Batch:
    """The n micro-batches of optimiser step `step`, arrays [n, B, T]."""
    parts = [self.batch(step * n + a) for a in range(n)]
    return {k: np.stack([p[k] for p in parts]) for k in parts[0]}

  def epoch(self, step: int) -> float:
    """Epochs seen before micro-step `step`."""
    return step * self.batch_size / len(self.rows)


# --- prefetching -------------------------------------------------------------


def prefetch(
  fn: Callable[[int], Any], first_step: int, last_step: int, size: int = 2
) -> Generator[tuple[int, Any]]:
  """Yields `(step, fn(step))` for first_step <= step < last_step.

  A thread works up to `size` steps ahead. What `fn` raises is raised here at
  its step; the thread ends with the iterator, whichever way that ends (use
  `contextlib.closing` to end it at once).
  """
  ready: queue.Queue = queue.Queue(maxsize=max(size, 1))
  stop = threading.Event()

  def put(item) -> None:
    while not stop.is_set():
      try:
        return ready.put(item, timeout=0.05)
      except queue.Full:
        continue

  def work() -> None:
    for step in range(first_step, last_step):
      if stop.is_set():
        return
      try:
        item = (step, fn(step), None)
      except BaseException as e:  # handed to the caller, who raises it
        return put((step, None, e))
      put(item)
    put(None)

  thread = threading.Thread(target=work, name="wide_jax-prefetch", daemon=True)
  thread.start()
  try:
    while (item := ready.get()) is not None:
      step, value, error = item
      if error is not None:
        raise error
      yield step, value
  finally:
    stop.set()
    thread.join()


# --- evaluation --------------------------------------------------------------


def eval_windows(ids: Sequence[int] | np.ndarray, window: int) -> Batch:
  """Cuts one tokenised text into windows for rolling perplexity.

  Windows of `window` tokens, stride = window; the first token of each is not
  scored, every other one once; average over `weights`, never over windows. The
  last window is padded (segment 0); one that could hold a single token, with
  nothing to score, is left out.

  Args:
    ids: the whole text, tokenised once, without a start token.
    window: tokens a window, at least 2.

  Returns:
    The arrays of the module's docstring, [windows, window].

  Raises:
    ValueError: fewer than two tokens, so that there is nothing to score.
  """
  if window < 2:
    raise ValueError(f"eval window={window} must be at least 2.")
  ids = np.asarray(ids, np.int32)
  if len(ids) < 2:
    raise ValueError(f"a text of {len(ids)} tokens has nothing to score.")
  n = -(-(len(ids) - 1) // window)
  ids = ids[: n * window]
  real = np.arange(n * window) < len(ids)
  padded = np.zeros(n * window, np.int32)
  padded[: len(ids)] = ids
  padded, real = padded.reshape(n, window), real.reshape(n, window)
  weights = np.zeros((n, window), np.float32)
  weights[:, :-1] = real[:, 1:]
  targets = np.zeros((n, window), np.int32)
  targets[:, :-1] = padded[:, 1:]
  positions = np.broadcast_to(np.arange(window, dtype=np.int32), real.shape)
  return {
    "ids": padded,
    "targets": targets,
    "weights": weights,
    "segments": real.astype(np.int32),
    "positions": np.where(real, positions, 0).astype(np.int32),
  }


def read_text(
  names: Sequence[str],
  *,
  data_dir: str = "",
  text_key: str = "text",
  part: str = "evaluation",
) -> str:
  """One text out of all documents of all sources, joined by empty lines.

  Raises:
    ValueError: a source that does not exist or has nothing usable, by name.
  """
  sources = text_sources.resolve_sources(names, data_dir=data_dir, part=part)
  report = text_sources.ReadReport()
  texts = list(text_sources.read_texts(sources, text_key, report))
  if not texts:
    raise ValueError(f"no usable text in {list(names)}: {report.summary()}.")
  return "\n\n".join(texts)


def text_ids(
  names: Sequence[str],
  tokenizer: Tokenizer,
  *,
  data_dir: str = "",
  text_key: str = "text",
  part: str = "evaluation",
  max_tokens: int = 0,
) -> np.ndarray:
  """`read_text` tokenised in one go, no start or end token: int32 [tokens]."""
  text = read_text(names, data_dir=data_dir, text_key=text_key, part=part)
  ids = np.asarray(tokenizer.encode(text), np.int32)
  return ids[:max_tokens] if max_tokens else ids


def describe(token_set: TokenSet, rows: Rows) -> str:
  """One line about what will be trained on."""
  return (
    f"{token_set.documents:,} documents, {len(token_set.tokens):,} tokens,"
    f" {len(rows):,} rows of {rows.seq_len} ({rows.packing}),"
    f" {rows.targets:,} targets; {token_set.report}"
  )
