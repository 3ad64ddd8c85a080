"""The baseline: an interpolated bigram model, smoothed as well as it can be.

    P(w | v) = (c(v, w) - d) / c(v) + freed(v) * P(w)

where d depends on the count c(v, w) and freed(v) is the mass the discounts
free. P(w) counts either occurrences (absolute discounting; Ney, Essen and
Kneser 1994) or different predecessors (Kneser and Ney 1995); counts of 1, 2,
and 3 or more have discounts of their own (Chen and Goodman 1998). What is used
is chosen on calibration text.
"""

import itertools
from typing import Any

import numpy as np

LOWER = ("continuation", "occurrence")
ADDED = (0.01, 0.1, 1.0)
RISES = (0.0, 0.2, 0.4)
DISCOUNTS = tuple(
  (low, low + rise, low + rise + more)
  for low in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
  for rise in RISES
  for more in RISES
)


class Bigram:
  """Counts of one token stream, and probabilities smoothed in any of the ways.

  Args:
    stream: int [n], the training tokens in order.
    vocab: number of ids.
  """

  def __init__(self, stream: np.ndarray, vocab: int):
    self._pairs = np.zeros((vocab, vocab), np.int64)
    np.add.at(self._pairs, (stream[:-1], stream[1:]), 1)
    self._total = self._pairs.sum(1)
    levels = np.minimum(self._pairs, 3)
    # [3, V]: how many followers of v were seen once, twice, more often.
    self._followers = np.stack([(levels == i).sum(1) for i in (1, 2, 3)])
    self._lower = {
      "continuation": (self._pairs > 0).sum(0),
      "occurrence": np.bincount(stream, minlength=vocab),
    }

  def log_probs(
    self,
    v: np.ndarray,
    w: np.ndarray,
    lower: str,
    added: float,
    discounts: tuple[float, float, float],
  ) -> np.ndarray:
    """ln P(w | v), elementwise, float64.

    Args:
      v, w: int arrays of one shape.
      lower: what P(w) counts, one of `LOWER`.
      added: added to each of these counts.
      discounts: taken from counts of 1, 2, and 3 or more; the i-th is at most
        i, so that no count becomes negative.
    """
    low = self._lower[lower] + added
    low = low / low.sum()
    d = np.array([0.0, *discounts])
    # A token never seen in front of another leaves all the mass to P(w).
    total = np.maximum(self._total, 1)
    freed = np.where(self._total > 0, d[1:] @ self._followers / total, 1.0)
    c = self._pairs[v, w]
    return np.log((c - d[np.minimum(c, 3)]) / total[v] + freed[v] * low[w])

  def nll(self, windows: dict[str, np.ndarray], settings: dict[str, Any]):
    """Mean nats a scored token of `wide_jax.data.eval_windows`."""
    scored = windows["weights"] > 0
    v, w = windows["ids"][scored], windows["targets"][scored]
    return float(-self.log_probs(v, w, **settings).mean())

  def best_settings(self, windows: dict[str, np.ndarray]) -> dict[str, Any]:
    """The settings with the lowest `nll` on these windows."""
    grid = [
      {"lower": lower, "added": added, "discounts": discounts}
      for lower, added, discounts in itertools.product(LOWER, ADDED, DISCOUNTS)
    ]
    return min(grid, key=lambda settings: self.nll(windows, settings))
