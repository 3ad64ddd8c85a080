"""Times of jax programs, without what is not theirs.

An op runs `unroll` times in one compiled program, each time on arrays of its
own (`sets`, which rotate, so that together they are larger than the cache) and
each time after the one before (an optimization barrier ties its first input to
the last result: no copy, no arithmetic). Every result is returned, so nothing
is dead; no two repeats share all inputs, so nothing is common; the order is
fixed, so nothing overlaps. The program is called several times without
waiting; a sample is the slope between one call and many, which leaves out the
first dispatch and the last wait. Compiling is timed apart.

Contenders are sampled in turn (`interleave`), so that a drift of the clocks
meets all of them, and their ratios are taken within each turn.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

_SAMPLE_S = 8e-3  # of device time in a sample, about
_MOST_CALLS = 400


class Sampler(Protocol):
  """Something that can be timed: a Runner here, or another framework's."""

  name: str

  def sample(self) -> float:
    """Seconds of one run of the op."""


def program(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
  """A function of argument sets that runs fn on each of them, one by one."""
  inner = jax.jit(fn)  # one trace and one computation for all repeats

  def run(*sets):
    results = []
    for args in sets:
      if results:
        leaves, tree = jax.tree.flatten(args)
        first, _ = jax.lax.optimization_barrier((leaves[0], results[-1]))
        args = jax.tree.unflatten(tree, [first, *leaves[1:]])
      results.append(inner(*args))
    return results

  return run


class Runner:
  """One op, compiled, on sets of arguments that rotate.

  Args:
    name: what it is called in results.
    fn: the op; the first leaf of its arguments must be an array.
    sets: tuples of arguments; more than one where they would fit the cache.
    unroll: runs in one program; at least the number of sets.
  """

  def __init__(
    self,
    name: str,
    fn: Callable[..., Any],
    sets: Sequence[tuple],
    unroll: int = 1,
  ):
    self.name = name
    self.fn = fn
    self.unroll = max(unroll, len(sets))
    self.sets = [sets[i % len(sets)] for i in range(self.unroll)]
    self.compile_s = 0.0
    self._compiled: Any = None
    self._calls = 0

  def lower(self) -> Any:
    """Traces the program; needs Python's lock, unlike compiling."""
    return jax.jit(program(self.fn)).lower(*self.sets)

  def compile(self, lowered: Any = None, options: Any = None) -> "Runner":
    """Compiles the program; safe in a thread of its own."""
    start = time.perf_counter()
    lowered = self.lower() if lowered is None else lowered
    self._compiled = lowered.compile(compiler_options=options)
    self.compile_s = time.perf_counter() - start
    return self

  def results(self) -> list[Any]:
    """The result of every repeat; also warms up."""
    if self._compiled is None:
      self.compile()
    return jax.block_until_ready(self._compiled(*self.sets))

  def run_on(self, args: tuple) -> Any:
    """The op's result on other arguments of the same shapes."""
    if self._compiled is None:
      self.compile()
    sets = [args, *self.sets[1:]]
    return jax.block_until_ready(self._compiled(*sets)[0])

  def forget_length(self) -> None:
    """Finds anew how many calls a sample takes, for another budget."""
    self._calls = 0

  def _timed(self, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
      out = self._compiled(*self.sets)
    jax.block_until_ready(out)
    return time.perf_counter() - start

  def sample(self, budget_s: float = _SAMPLE_S) -> float:
    """Seconds of one run of the op, from about `budget_s` of device time."""
    if not self._calls:
      self.results()
      once = min(self._timed(1), self._timed(1))
      self._calls = int(min(max(math.ceil(budget_s / once), 2), _MOST_CALLS))
    one = self._timed(1)
    many = self._timed(1 + self._calls)
    slope = (many - one) / (self._calls * self.unroll)
    # A wait that the system stretched would make the slope negative.
    return slope if slope > 0 else many / ((1 + self._calls) * self.unroll)


def unroll_for(floor_s: float, sets: int, target_s: float = 150e-6) -> int:
  """Repeats in a program, so that the host stays ahead of the device."""
  return int(min(max(sets, math.ceil(target_s / max(floor_s, 1e-9))), 24))


def sets_for(
  set_bytes: float, cache_bytes: float = 60e6, most: int = 16
) -> int:
  """Argument sets that together hold three caches, so that none is found in it.

  The default is the L2 of an H100 or H200, the largest in use.
  """
  return int(min(max(math.ceil(3 * cache_bytes / max(set_bytes, 1)), 1), most))


def interleave(
  samplers: Sequence[Sampler], repeats: int
) -> dict[str, list[float]]:
  """Samples each in turn, `repeats` times; every turn starts one further on."""
  for sampler in samplers:
    sampler.sample()  # warm, and not counted
  times: dict[str, list[float]] = {sampler.name: [] for sampler in samplers}
  for turn in range(repeats):
    at = turn % len(samplers) if samplers else 0
    for sampler in (*samplers[at:], *samplers[:at]):
      times[sampler.name].append(sampler.sample())
  return times


# --- statistics --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
  """Microseconds: the median, and half the distance of the quartiles."""

  median_us: float
  spread_us: float


def summary(samples_s: Sequence[float]) -> Summary:
  """Median and spread of seconds."""
  low, median, high = np.percentile(np.asarray(samples_s) * 1e6, (25, 50, 75))
  return Summary(float(median), float((high - low) / 2))


def ratio_interval(
  base_s: Sequence[float], own_s: Sequence[float], draws: int = 4000
) -> tuple[float, float, float]:
  """(ratio, low, high) of base / own, paired by turn.

  The ratio is the geometric mean of the turns' ratios; the 95% interval is
  that of a bootstrap over turns, with a fixed seed.

  Raises:
    ValueError: different numbers of turns, or none.
  """
  if len(base_s) != len(own_s) or not len(own_s):
    raise ValueError(
      f"{len(base_s)} and {len(own_s)} samples cannot be paired."
    )
  logs = np.log(np.asarray(base_s)) - np.log(np.asarray(own_s))
  rng = np.random.default_rng(0)
  drawn = rng.integers(0, len(logs), (draws, len(logs)))
  low, high = np.percentile(logs[drawn].mean(-1), (2.5, 97.5))
  return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


# --- ceilings ----------------------------------------------------------------


def ceilings(repeats: int = 5, size: int = 8192, mib: int = 1024) -> Mapping:
  """What the device can do at best, measured.

  Args:
    repeats: samples of each; the best counts.
    size: of the square bfloat16 matmul.
    mib: of the array that is copied.

  Returns:
    `matmul_tflops`, and `copy_tb_s` counting bytes read and written.
  """
  keys = jax.random.split(jax.random.key(0), 2)
  a, b = (jax.random.normal(k, (size, size), jnp.bfloat16) for k in keys)
  matmul = Runner("matmul", jnp.matmul, [(a, b)])
  flat = jnp.ones((mib * 2**19,), jnp.bfloat16)
  copy = Runner("copy", jnp.negative, [(flat,)])
  times = interleave([matmul, copy], repeats)
  return {
    "matmul_tflops": 2 * size**3 / min(times["matmul"]) / 1e12,
    "copy_tb_s": 2 * flat.nbytes / min(times["copy"]) / 1e12,
  }
