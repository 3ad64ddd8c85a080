"""Measures which backend and tiles are fastest here, and writes them down.

  python -m pallas_kernels.tune [--rows 'n_sparse/*,ffn/T1/*'] [--budget-s 500]

For every row of the suite (suite.py): each backend's candidates that do not
refuse are compiled for this device; those that fail are dropped. What is left
is checked against the reference in float32 (poisoned where an op must not look)
and may be at most twice as wrong as the dense op.
Only then is it timed: by halves, the faster half twice as long, and the last
few interleaved with the masked dense twin. Each row is written as soon as it is
done, merged with what the file has; rows that it has are skipped, unless
--again.

Exit code 0: done, or out of time; 2: bad flags, or nothing to measure here.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import counts, device, dispatch, suite, table, timing
from pallas_kernels.errors import Unsupported
from pallas_kernels.problem import Problem
from pallas_kernels.suite import Row

_ROOFLINE_TFLOPS, _ROOFLINE_TB_S = 800.0, 4.0  # how often to repeat, no more
_FINALISTS = 3
_XLA_LOGITS_BYTES = 24 * 2**30


@dataclasses.dataclass
class Candidate:
  """One backend with one choice of tiles."""

  backend: str
  tiles: Any
  runner: timing.Runner
  dropped: str = ""
  error: float = 0.0


@dataclasses.dataclass(frozen=True)
class Options:
  """How hard to search.

  Attributes:
    repeats: interleaved samples of the finalists.
    most: candidates of a backend; what neighbours chose and the default come
      first.
    workers: compiling threads.
    backends: which to measure, dense aside.
  """

  repeats: int = 7
  most: int = 32
  workers: int = 8
  backends: tuple[str, ...] = dispatch.BACKENDS


# --- candidates --------------------------------------------------------------


def tile_candidates(
  problem: Problem, name: str, measured: table.Table, most: int
) -> list[Any]:
  """Tiles worth measuring: neighbours' winners, the default, the others."""
  legal = dispatch.legal_tiles(name, problem)
  if problem.density == 1.0 and name != "dense":
    most = min(most, 3)  # dense wins there; the row says by how much
  elsewhere = [
    result.tiles
    for row in measured.rows
    for result in row.results
    if result.backend == name
    and row.problem.op == problem.op
    and row.problem.group_size == problem.group_size
    and row.problem.dtype == problem.dtype
  ]
  known = [t for t in legal if table.tiles_to_json(t) in elsewhere]
  rest = [t for t in legal if t not in known]
  return [*known, *rest][:most]


def _too_large(problem: Problem, name: str, tiles: Any) -> str:
  """XLA's attention holds all logits: no need to see it fail."""
  if problem.op != "attention_prefill" or getattr(tiles, "how", "") != "xla":
    return ""
  size = 4.0 * problem.rows * problem.heads * problem.length * problem.keys
  if size > _XLA_LOGITS_BYTES:
    return f"{name}: logits of {size / 2**30:.0f} GiB"
  return ""


def candidates(
  row: Row,
  measured: table.Table,
  sets: Sequence[tuple],
  unroll: int,
  options: Options,
) -> tuple[list[Candidate], dict[str, str]]:
  """(candidates, backend -> why it has none); dense ones first."""
  found, refused = [], {}
  for name in dispatch.BACKENDS:
    if name != "dense" and name not in options.backends:
      refused[name] = table.NOT_ASKED
      continue
    reason = dispatch.why_not(name, row.problem)
    if reason is not None:
      refused[name] = reason
      continue
    for tiles in tile_candidates(row.problem, name, measured, options.most):
      reason = _too_large(row.problem, name, tiles)
      if reason:
        refused[name] = reason
        continue
      fn = suite.call(row.problem, name, tiles)
      label = f"{name} {len(found)}"
      runner = timing.Runner(label, fn, sets, unroll)
      found.append(Candidate(name, tiles, runner))
  found.sort(key=lambda c: c.backend != "dense")
  return found, refused


def _sentence(error: BaseException) -> str:
  lines = str(error).strip().splitlines()
  return (lines[0] if lines else type(error).__name__)[:200]


def compile_all(found: Sequence[Candidate], workers: int) -> None:
  """Compiles candidates, dense ones alone: XLA times kernels as it compiles."""
  waiting = []
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    for candidate in found:
      try:
        lowered = candidate.runner.lower()
      except Exception as e:  # whatever a backend raises means: not this one
        candidate.dropped = _sentence(e)
        continue
      if candidate.backend in ("dense", "ragged"):
        _compile(candidate, lowered)
      else:
        waiting.append(pool.submit(_compile, candidate, lowered))
    concurrent.futures.wait(waiting)


def _compile(candidate: Candidate, lowered: Any) -> None:
  try:
    candidate.runner.compile(lowered)
  except Exception as e:  # registers, shared memory, a compiler's bug
    candidate.dropped = _sentence(e)


# --- numbers, then times -----------------------------------------------------


def check_all(
  row: Row, found: Sequence[Candidate], args: tuple, mask: np.ndarray
) -> None:
  """Drops what is wrong, by the rule of `suite.wrong`."""
  problem = row.problem
  args = suite.poisoned(problem, args, mask)
  want = suite.exact(problem, args, mask)
  dense_error = None
  for candidate in found:
    if candidate.dropped:
      continue
    try:
      out = candidate.runner.run_on(args)
    except Exception as e:  # out of memory, or a launch that failed
      candidate.dropped = _sentence(e)
      continue
    got = suite.compared(problem, out)
    candidate.error = suite.relative_error(got, want)
    if candidate.backend == "dense" and np.isfinite(candidate.error):
      best = candidate.error if dense_error is None else dense_error
      # A dense path that is itself wrong must not set the measure.
      if candidate.error <= max(2 * best, 2e-2):
        dense_error = min(best, candidate.error)
    if dense_error is None:
      candidate.dropped = f"relative error {candidate.error:.2g}"
      continue
    reason = suite.wrong(problem, got, want, mask, dense_error)
    candidate.dropped = reason or ""


def halve(found: list[Candidate], keep: int) -> list[Candidate]:
  """Keeps the fastest few: each round twice as long, for half as many."""
  budget = 1e-3
  while len(found) > keep:
    times = {}
    for candidate in found:
      times[id(candidate)] = candidate.runner.sample(budget)
      candidate.runner.forget_length()
    found = sorted(found, key=lambda c: times[id(c)])
    # Anything over twice the best is out at once.
    best = times[id(found[0])]
    half = max(keep, len(found) // 2)
    found = [c for c in found[:half] if times[id(c)] <= 2 * best]
    budget = min(2 * budget, 8e-3)
  return found


def measure(
  row: Row, measured: table.Table, options: Options, seed: int = 0
) -> table.Row:
  """One row of the table.

  Raises:
    RuntimeError: no dense op ran: nothing to compare with.
  """
  problem = row.problem
  floor = counts.needed(problem)
  floor_s = max(
    floor.flops / (_ROOFLINE_TFLOPS * 1e12),
    floor.bytes / (_ROOFLINE_TB_S * 1e12),
  )
  number = timing.sets_for(floor.bytes)
  kind = "shared" if row.mask == "shared" else "random"
  masks = [suite.random_mask(problem, seed + i, kind) for i in range(number)]
  sets = [
    (*suite.arrays(problem, seed + i), suite.routed(problem, mask))
    for i, mask in enumerate(masks)
  ]
  unroll = timing.unroll_for(floor_s, number)
  found, refused = candidates(row, measured, sets, unroll, options)
  compile_all(found, options.workers)
  check_all(row, found, sets[0], masks[0])
  finalists: list[Candidate] = []
  for name in dict.fromkeys(c.backend for c in found):
    good = [c for c in found if c.backend == name and not c.dropped]
    if not good:
      first = next(c for c in found if c.backend == name)
      refused[name] = first.dropped
      continue
    finalists += halve(good, _FINALISTS)
  times = timing.interleave([c.runner for c in finalists], options.repeats)
  median = {c.runner.name: np.median(times[c.runner.name]) for c in finalists}
  dense = [c for c in finalists if c.backend == "dense"]
  if not dense:
    raise RuntimeError(f"{row.name}: no dense op ran ({refused['dense']}).")
  twin = min(dense, key=lambda c: median[c.runner.name])
  twin_times = times[twin.runner.name]
  results = []
  for name in dict.fromkeys(c.backend for c in finalists):
    own = [c for c in finalists if c.backend == name]
    best = min(own, key=lambda c: median[c.runner.name])
    ratio, low, high = timing.ratio_interval(
      twin_times, times[best.runner.name]
    )
    results.append(
      table.Result(
        backend=name,
        tiles=table.tiles_to_json(best.tiles),
        us=round(float(median[best.runner.name]) * 1e6, 3),
        ratio=round(ratio, 4),
        low=round(low, 4),
        high=round(high, 4),
        error=float(f"{best.error:.3g}"),
        version=table.VERSIONS[name],
      )
    )
  return table.Row(
    problem=problem,
    twin_us=round(float(np.median(twin_times)) * 1e6, 3),
    results=tuple(results),
    refused=tuple(sorted(refused.items())),
    jax=jax.__version__,
    name=row.name,
  )


# --- command line ------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog="python -m pallas_kernels.tune",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--device", default="auto", help="auto, or the name that must be here"
  )
  parser.add_argument("--rows", default="*", help="patterns, comma-separated")
  parser.add_argument("--out", help="default: tuned/<device>.json, packaged")
  parser.add_argument("--budget-s", type=float, default=float("inf"))
  parser.add_argument("--repeats", type=int, default=Options.repeats)
  parser.add_argument("--most", type=int, default=Options.most)
  parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
  parser.add_argument(
    "--backends", default=",".join(dispatch.BACKENDS), help="to measure"
  )
  parser.add_argument("--again", action="store_true", help="measured rows too")
  parser.add_argument(
    "--dry-run", action="store_true", help="list candidates, measure nothing"
  )
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit code."""
  try:
    args = _parser().parse_args(argv)
    return _run(args)
  except (ValueError, OSError) as e:
    if isinstance(e, ValueError) and not _is_ours(e):
      raise
    print(f"error: {e}", file=sys.stderr)
    return 2


def _is_ours(error: BaseException) -> bool:
  """Whether the user has something to mend: raised here or in the suite."""
  trace = error.__traceback__
  while trace is not None and trace.tb_next is not None:
    trace = trace.tb_next
  here = (__file__, suite.__file__)
  return trace is not None and trace.tb_frame.f_code.co_filename in here


def _run(args: argparse.Namespace) -> int:
  for name, value in (("--repeats", args.repeats), ("--most", args.most)):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1.")
  if args.workers < 1 or args.budget_s <= 0:
    raise ValueError("--workers and --budget-s must be above 0.")
  backends = tuple(filter(None, args.backends.split(",")))
  unknown = sorted(set(backends) - set(dispatch.BACKENDS))
  if unknown:
    raise ValueError(
      f"--backends: no {unknown}; there are {', '.join(dispatch.BACKENDS)}."
    )
  rows = suite.select(suite.rows(), args.rows)
  named = None if args.device == "auto" else device.slug(args.device)
  if args.dry_run:
    with device.use_device(named or device.name()):
      return _list(rows, args.most)
  here = device.name()
  if device.platform() == "cpu":
    raise ValueError(
      "nothing to measure: jax found only a CPU, where the reference runs; "
      "--dry-run lists candidates."
    )
  if named not in (None, here):
    raise ValueError(f"--device={args.device}, but jax computes on {here}.")
  out = pathlib.Path(args.out) if args.out else table.path_of(here)
  options = Options(
    repeats=args.repeats,
    most=args.most,
    workers=args.workers,
    backends=backends,
  )
  return _tune(rows, out, here, options, args.budget_s, args.again)


def _list(rows: Sequence[Row], most: int) -> int:
  empty = table.Table(device=device.name())
  for row in rows:
    print(row.name)
    for name in dispatch.BACKENDS:
      reason = dispatch.why_not(name, row.problem)
      if reason is not None:
        print(f"  {name}: {reason}")
        continue
      for tiles in tile_candidates(row.problem, name, empty, most):
        print(f"  {name}: {tiles}")
  return 0


def _tune(
  rows: Sequence[Row],
  out: pathlib.Path,
  here: str,
  options: Options,
  budget_s: float,
  again: bool,
) -> int:
  start = time.monotonic()
  try:
    measured = table.read(out, here)
  except ValueError as e:
    print(f"{out} is replaced: {e}", flush=True)
    measured = table.Table(device=here)
  done = {row.problem for row in measured.rows if _complete(row, options)}
  todo = [row for row in rows if again or row.problem not in done]
  # Learned rows and their twins are one problem.
  todo = list({row.problem: row for row in reversed(todo)}.values())[::-1]
  print(
    f"{len(todo)} rows to measure on {here}, {len(rows) - len(todo)} done or "
    f"doubled; writing {out}",
    flush=True,
  )
  spent: list[float] = []
  for i, row in enumerate(todo):
    used = time.monotonic() - start
    each = float(np.mean(spent[-10:])) if spent else 0.0
    if used + each > budget_s:
      print(f"out of time after {i} of {len(todo)} rows", flush=True)
      break
    begun = time.monotonic()
    try:
      result = measure(row, measured, options)
    except (RuntimeError, Unsupported) as e:
      print(f"{i + 1}/{len(todo)} {row.name}: {_sentence(e)}", flush=True)
      continue
    finally:
      spent.append(time.monotonic() - begun)
    measured = table.merge(out, here, [result])
    best = max(result.results, key=lambda r: r.ratio)
    eta = float(np.mean(spent[-10:])) * (len(todo) - i - 1)
    print(
      f"{i + 1}/{len(todo)} {row.name}: {best.backend} {best.us:.4g} us, "
      f"{best.ratio:.3f}x [{best.low:.3f}, {best.high:.3f}] of "
      f"{result.twin_us:.4g} us; {spent[-1]:.0f} s, {eta:.0f} s to go",
      flush=True,
    )
  table.forget()
  return 0


def _complete(row: table.Row, options: Options) -> bool:
  """Whether a row holds present results of every backend that can run it."""
  have = {
    r.backend for r in row.results if r.version == table.VERSIONS[r.backend]
  }
  able = {
    name
    for name in ("dense", *options.backends)
    if dispatch.why_not(name, row.problem) is None
  }
  # What failed under another jax may work under this one.
  failed = {name for name, reason in row.refused if reason != table.NOT_ASKED}
  if row.jax != jax.__version__:
    failed = set()
  return able <= have | failed


if __name__ == "__main__":
  sys.exit(main())
