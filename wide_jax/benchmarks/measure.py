"""One row of the kernel benchmark: inputs, checks, times, ratios."""

import concurrent.futures
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import counts, dispatch, suite, timing
from pallas_kernels.suite import Row
from pallas_kernels.timing import Runner
from wide_jax.benchmarks import contenders, masks
from wide_jax.benchmarks.contenders import Contender

# A row fails if auto is slower than the masked dense twin beyond this.
TWIN_BOUND = 0.98
# What the chip is sold with; the roofline takes the larger peak of this and
# the measured one (design, "Benchmarks").
SOLD = {"nvidia_h200": {"tflops": 989.0, "tb_s": 4.8}}
# One decision serves gate, up and down, or Q, attention and O.
_SHARE = {"ffn": 1.0}
_DEFAULT_SHARE = 1 / 3
_ROUTERS = ("route", "route_folded", *suite.ROUTED)
# bfloat16 is off by 2e-3 to 1e-2; dense itself must not be wrong.
_MOST_ERROR = 5e-2


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a row is measured.

  Attributes:
    repeats: interleaved samples of each contender, 5 at least.
    data: directory with learned masks, or None.
    torch: whether torch takes part where it is installed.
    workers: compiling threads.
  """

  repeats: int = 7
  data: str | None = None
  torch: bool = True
  workers: int = os.cpu_count() or 1


def has_torch() -> bool:
  """Whether torch can time on this machine's GPU."""
  if importlib.util.find_spec("torch") is None:
    return False
  import torch

  return torch.cuda.is_available()


def circumstances() -> dict[str, Any]:
  """Device and versions, for every row."""

  def version(name: str) -> str | None:
    try:
      return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      return None

  device = jax.devices()[0]
  return {
    "device": device.device_kind,
    "platform": device.platform,
    "jax": jax.__version__,
    "jaxlib": version("jaxlib"),
    "torch": version("torch"),
    # On a CPU, auto is the reference: nothing here says how fast kernels are.
    "measures": "reference" if device.platform == "cpu" else "kernels",
  }


def roofline(ceilings: Mapping[str, float]) -> dict[str, float]:
  """FLOP/s and bytes/s that a fraction of the roofline is taken of."""
  sold = SOLD.get(dispatch.device.name(), {"tflops": 0.0, "tb_s": 0.0})
  return {
    "tflops": max(sold["tflops"], ceilings["matmul_tflops"]),
    "tb_s": max(sold["tb_s"], ceilings["copy_tb_s"]),
  }


# --- one row -----------------------------------------------------------------


@dataclasses.dataclass
class _Entry:
  contender: Contender | None
  runner: Any
  role: str
  problem: str = ""
  error: float | None = None


def _floor_s(work: counts.Counts, peak: Mapping[str, float]) -> float:
  flops, moved = peak["tflops"] * 1e12, peak["tb_s"] * 1e12
  return max(work.flops / flops, work.bytes / moved)


def _sentence(error: BaseException) -> str:
  lines = str(error).strip().splitlines()
  return (lines[0] if lines else type(error).__name__)[:200]


def measure(
  row: Row,
  settings: Settings,
  ceilings: Mapping[str, float],
  routers: dict[tuple, dict[str, float]],
) -> dict[str, Any]:
  """Times everyone of a row; times are microseconds.

  Args:
    row: of the suite.
    settings: how.
    ceilings: of timing.ceilings.
    routers: router and plan times so far, by shape; added to.

  Raises:
    ValueError: learned masks that are not there.
  """
  problem = row.problem
  whole = counts.needed(problem)
  peak = roofline(ceilings)
  reference_only = dispatch.device.platform() == "cpu"
  number = 1 if reference_only else timing.sets_for(whole.bytes)
  keeps = masks.of(row, number, settings.data)
  sets = [
    (*suite.arrays(problem, i), suite.routed(problem, keep))
    for i, keep in enumerate(keeps)
  ]
  unroll = timing.unroll_for(_floor_s(whole, peak), len(sets))
  if reference_only:
    unroll = len(sets)  # nothing here is worth a long compilation
  entries = _entries(row, sets, unroll)
  if settings.torch and problem.op != "route" and has_torch():
    entries += _torch_entries(problem, sets, unroll)
  _compile(entries, settings.workers)
  _check(row, entries, sets[0], keeps[0])
  alive = [e for e in entries if not e.problem]
  times = timing.interleave([e.runner for e in alive], settings.repeats)
  counted = [counts.needed(problem, keep) for keep in keeps]
  needed = counts.Counts(
    float(np.mean([c.flops for c in counted])),
    float(np.mean([c.bytes for c in counted])),
  )
  out = _described(row, keeps, unroll, len(sets), settings)
  out["contenders"] = {e.runner.name: _numbers(e, times) for e in entries}
  for entry in entries:
    if hasattr(entry.runner, "close"):
      entry.runner.close()
  out |= _router_and_plan(row, alive, times, settings, routers)
  out |= _compared(row, alive, times, out)
  out["counted_saving"] = 1 - needed.flops / whole.flops
  out["roofline_us"] = _floor_s(needed, peak) * 1e6
  out["roofline_dense_us"] = _floor_s(whole, peak) * 1e6
  auto, dense = out["auto_us"], out["dense_us"]
  out["roofline_fraction"] = out["roofline_us"] / auto if auto else None
  out["roofline_fraction_dense"] = (
    out["roofline_dense_us"] / dense if dense else None
  )
  return out


def _entries(row: Row, sets: Sequence[tuple], unroll: int) -> list[_Entry]:
  who = contenders.of(row.problem) + contenders.in_line(row.problem)
  if contenders.has_routed(row.problem):
    who.append(contenders.routed_ffn(row.problem))
  entries = []
  # Views that are the same object need not be made again: sets are large.
  views: dict[Any, list[tuple]] = {}
  for contender in who:
    key = contender.inputs
    if key not in views:
      views[key] = contenders.sets_of(contender, sets)
    runner = Runner(contender.name, contender.fn, views[key], unroll)
    entries.append(_Entry(contender, runner, contender.role))
  return entries


def _torch_entries(problem, sets, unroll) -> list[_Entry]:
  from wide_jax.benchmarks import torch_runners

  plain = [args[:-1] for args in sets]
  made = torch_runners.runners(problem, plain, unroll)
  return [_Entry(None, runner, "dense") for runner in made]


def _compile(entries: Sequence[_Entry], workers: int) -> None:
  """XLA's own ops alone (it times kernels as it compiles), then the others."""
  waiting = []

  def build(entry: _Entry, lowered: Any) -> None:
    try:
      entry.runner.compile(lowered) if lowered else entry.runner.compile()
    except Exception as e:  # a contender that cannot run is told, not fatal
      entry.problem = _sentence(e)

  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    for entry in entries:
      if entry.contender is None:
        build(entry, None)
        continue
      try:
        lowered = entry.runner.lower()
      except Exception as e:
        entry.problem = _sentence(e)
        continue
      if entry.role in ("dense", "twin", "library", "routed"):
        build(entry, lowered)
      else:
        waiting.append(pool.submit(build, entry, lowered))
    concurrent.futures.wait(waiting)


def _check(
  row: Row, entries: Sequence[_Entry], args: tuple, keep: np.ndarray
) -> None:
  """Whoever is wrong is not timed."""
  problem = row.problem
  everything = np.ones_like(keep)
  poisoned = suite.poisoned(problem, args, keep)
  wants = {
    True: suite.exact(
      problem, (*args[:-1], suite.routed(problem, everything)), everything
    ),
    False: suite.exact(problem, poisoned, keep),
  }
  errors, zero = {True: math.inf, False: math.inf}, {}
  for entry in entries:
    if entry.problem:
      continue
    whole = entry.role == "dense"
    try:
      got = suite.compared(problem, _result(entry, args, poisoned))
    except Exception as e:  # out of memory, or a launch that failed
      entry.problem = _sentence(e)
      continue
    entry.error = suite.relative_error(got, wants[whole])
    zero[entry.runner.name] = whole or suite.zero_where_dropped(
      problem, got, keep
    )
    if entry.role in ("dense", "twin"):
      errors[whole] = min(errors[whole], entry.error)
  for entry in entries:
    if entry.problem or entry.error is None:
      continue
    limit = 2 * errors[entry.role == "dense"] + suite.REFERENCE_ERROR
    if not (entry.error <= limit and limit < _MOST_ERROR):
      entry.problem = f"wrong: relative error {entry.error:.2g}"
    elif not zero[entry.runner.name]:
      entry.problem = "wrong: what the mask drops is not 0"


def _result(entry: _Entry, args: tuple, poisoned: tuple) -> Any:
  """A dense op's on the inputs; of the others on inputs with NaN beside them.

  The dense ops compute everything, so there is nothing they must not read.
  """
  if entry.contender is None:
    return jax.dlpack.from_dlpack(entry.runner.result().contiguous()).copy()
  own = args if entry.role == "dense" else poisoned
  return entry.runner.run_on(tuple(entry.contender.inputs(own)))


def _numbers(entry: _Entry, times: Mapping[str, list[float]]) -> dict[str, Any]:
  out: dict[str, Any] = {
    "role": entry.role,
    "compile_s": round(entry.runner.compile_s, 3),
    "error": entry.error,
  }
  if entry.problem:
    return out | {"failed": entry.problem}
  stats = timing.summary(times[entry.runner.name])
  return out | {"us": stats.median_us, "spread_us": stats.spread_us}


def _described(row, keeps, unroll, number, settings) -> dict[str, Any]:
  p = row.problem
  return {
    "name": row.name,
    "part": row.part,
    **circumstances(),
    "op": p.op,
    "dtype": p.dtype,
    "tokens": p.tokens,
    "groups": p.groups,
    "group_size": p.group_size,
    "shapes": {
      name: getattr(p, name)
      for name in (
        "rows",
        "length",
        "k",
        "n",
        "keys",
        "heads",
        "kv_heads",
        "dim",
      )
      if getattr(p, name)
    },
    "mask": row.mask,
    "source": row.source or None,
    "expected_density": p.density,
    "density": float(np.mean([k.mean() for k in keeps])),
    "active_share": float(np.mean([k.any((0, 1)).mean() for k in keeps])),
    "repeats": settings.repeats,
    "runs_a_program": unroll,
    "input_sets": number,
  }


# --- router and plan ---------------------------------------------------------


def _router_and_plan(
  row: Row,
  alive: Sequence[_Entry],
  times: Mapping[str, Sequence[float]],
  settings: Settings,
  known: dict[tuple, dict[str, float]],
) -> dict[str, Any]:
  """`router_us`, `plan_us`, and the share that this op bears of them.

  Beyond decode they are measured in line: medians over the turns of what the
  op takes longer with the router in front of the plan, and with the plan in
  front of the op. Noise may make them negative. None where one of these
  programs failed.

  Decode rows have no plan, and their `router_us` is a folded router alone, a
  program of its own, which the host's launches may bound. FFN rows state
  `routed` beside it, which has the router inside.
  """
  problem = row.problem
  share = {"router_and_plan_share": _SHARE.get(row.part, _DEFAULT_SHARE)}
  names = {e.runner.name for e in alive}
  if contenders.is_in_line(problem):

    def more(after: str, before: str) -> float | None:
      if not {after, before} <= names:
        return None
      return float(np.median(_more_s(times, after, before))) * 1e6

    router_us, plan_us = more("routed", "planned"), more("planned", "auto")
    return {"router_us": router_us, "plan_us": plan_us, **share}
  width = contenders.router_width(problem)
  key = (problem.tokens, problem.groups, width, problem.dtype)
  if key not in known:
    alike = suite.route_problem(
      problem.tokens,
      problem.groups,
      problem.density,
      d=width,
      rank=0,
      dtype=problem.dtype,
    )
    x, *weights = suite.arrays(alike, 3)
    x = x.reshape(problem.rows, problem.length, width)
    args = (x, *weights, jax.numpy.float32(0))
    runner = Runner("router", suite.call(alike), [args], 16)
    samples = timing.interleave([runner], settings.repeats)["router"]
    # Decode needs the decisions alone, of a folded router.
    known[key] = {
      "router_us": timing.summary(samples).median_us,
      "plan_us": 0.0,
    }
  return {**known[key], **share}


def _more_s(
  times: Mapping[str, Sequence[float]], after: str, before: str
) -> np.ndarray:
  """What one program takes longer than another, turn by turn."""
  return np.asarray(times[after]) - np.asarray(times[before])


# --- ratios ------------------------------------------------------------------


def _best(entries: Sequence[_Entry], times, *roles: str) -> str | None:
  names = [e.runner.name for e in entries if e.role in roles]
  return min(names, key=lambda n: float(np.median(times[n])), default=None)


def _compared(row: Row, alive, times, out: Mapping[str, Any]) -> dict[str, Any]:
  """Who is best, and the ratios that may be stated.

  No speed-up is stated on a CPU, nor where `auto` runs the masked dense op.
  """
  choice = dispatch.choose(row.problem)
  names = {e.runner.name for e in alive}
  dense = _best(alive, times, "dense")
  twin = _best(alive, times, "twin")
  kernel = _best(alive, times, "kernel")
  library = _best(alive, times, "library")
  auto = "auto" if "auto" in names else None
  beyond_decode = contenders.is_in_line(row.problem)
  extra_s: Any = None
  if not beyond_decode:
    extra_s = (out["router_us"] + out["plan_us"]) * 1e-6
  elif {"auto", "routed"} <= names:
    extra_s = _more_s(times, "routed", "auto")
  if extra_s is not None:
    extra_s = extra_s * out["router_and_plan_share"]
  # The whole op with its router, which other ops bear a share of.
  whole = "routed" in names and row.problem.op == "gated_ffn"

  def median(name):
    return float(np.median(times[name])) * 1e6 if name else None

  result: dict[str, Any] = {
    "auto_backend": choice.backend,
    "auto_tiles": str(choice.tiles) if choice.tiles is not None else None,
    "auto_why": choice.why,
    "dense": dense,
    "twin": twin,
    "kernel": kernel,
    "library": library,
    **{
      f"{role}_us": median(name)
      for role, name in (
        ("dense", dense),
        ("twin", twin),
        ("auto", auto),
        ("kernel", kernel),
        ("library", library),
        ("routed", "routed" if whole else None),
      )
    },
  }
  if out["measures"] != "kernels":
    return result

  def ratio(key, base, own, more_s: Any = 0.0):
    if base is None or own is None or more_s is None:
      return
    own_s = np.asarray(times[own]) + more_s
    value, low, high = timing.ratio_interval(times[base], own_s)
    result.update({key: value, f"{key}_low": low, f"{key}_high": high})

  ratio("auto_vs_twin", twin, auto)
  if "auto_vs_twin" in result:
    result["auto_ok"] = result["auto_vs_twin_high"] >= TWIN_BOUND
  # A masked path is named as such and never called a speed-up.
  if choice.backend not in ("dense", "reference"):
    ratio("speedup", dense, auto)
    ratio("speedup_included", dense, auto, extra_s)
    if "speedup" in result:
      result["measured_saving"] = 1 - 1 / result["speedup"]
  if whole:
    chosen = choice
    if not beyond_decode:
      chosen = dispatch.choose(contenders.with_router(row.problem))
    if chosen.backend not in ("dense", "reference"):
      ratio("routed_speedup", dense, "routed")
  ratio("kernel_speedup", dense, kernel)
  # In line, the plan is what `auto` reads of it: another backend's is another.
  if not beyond_decode or kernel == choice.backend:
    ratio("kernel_speedup_included", dense, kernel, extra_s)
  ratio("library_speedup", dense, library)
  return result


def rows_for(
  rows: Sequence[Row], data: str | None, warn: Callable[[str], None]
) -> list[Row]:
  """Rows that can be run: learned masks need --data, routers are columns."""
  able = [row for row in rows if row.problem.op not in _ROUTERS]
  if data is None:
    without = [r for r in able if r.mask not in ("learned", "matched")]
    if len(without) < len(able):
      warn(
        f"{len(able) - len(without)} rows with learned masks are left out: "
        "--data DIR names the directory that has them."
      )
    able = without
  return able
