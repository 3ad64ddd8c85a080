"""Who runs a call: a backend and its tiles, or dense.

`auto` reads the measured table of the device (table.py) and takes the fastest
of what it measured on this problem, as long as that beat the masked dense twin
(the dense op, then the mask) by `MARGIN_EXACT`. What the table does not hold:

* another density: times are taken to be linear in it, between the two measured
  densities around it; a lower one than any measured counts as the lowest; a
  higher one runs dense.
* other tokens, keys, heads or widths: all measured problems of the same op,
  dtype, group size and layout within a factor of two in each of these numbers
  are asked; a backend must beat dense by `MARGIN_NEAR` in every one of them,
  and lends the tiles of the nearest.
* gate and up as two arrays where only one joined array was measured, or the
  other way round: as if it were near.
* nothing that near: dense.

On a CPU everything runs on the reference. A backend asked for by name never
falls back.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax

from pallas_kernels import device, table
from pallas_kernels import plan as plans
from pallas_kernels.device import use_device as use_device
from pallas_kernels.errors import Unsupported
from pallas_kernels.problem import Op, Problem
from pallas_kernels.table import Row, Table

DTYPES = ("bfloat16", "float16", "float32")
# A module of this package each, with OPS: {name: Op}, and perhaps plan_parts.
BACKENDS = tuple(table.VERSIONS)
# Where a backend's kernels run compiled. In interpret mode they run anywhere,
# so a backend asked for by name is not refused for this.
_PLATFORMS = {"triton": "gpu", "mosaic_gpu": "gpu", "mosaic_tpu": "tpu"}
# Gains below these are within what repeated measurements differ by.
MARGIN_EXACT, MARGIN_NEAR = 1.02, 1.1
_NEAR_OCTAVES = 1.0
_SAME_DENSITY = 1 / 16


@dataclasses.dataclass(frozen=True)
class Choice:
  """What runs a problem.

  Attributes:
    backend: `reference` or one of BACKENDS.
    tiles: the backend's tiles; None where it has none.
    why: one sentence.
  """

  backend: str
  tiles: Any = None
  why: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What would run a problem, why, and what each other backend said.

  Attributes:
    problem: the call.
    choice: what `auto` picks.
    device: slug of the device that it is picked for.
    source: the table that was asked, or that there is none.
    said: backend -> why it cannot run this, or what was measured of it.
  """

  problem: Problem
  choice: Choice
  device: str
  source: str
  said: Mapping[str, str]

  def __str__(self) -> str:
    p, c = self.problem, self.choice
    lines = [
      f"{p.op} on {self.device}: {c.backend}"
      + (f" with {c.tiles}" if c.tiles is not None else ""),
      f"  because: {c.why}",
      f"  problem: {p.tokens} tokens, {p.groups} groups of {p.group_size}, "
      f"{p.dtype}, expected density {p.density:.2f}",
      f"  table: {self.source}",
    ]
    lines += [f"  {name}: {text}" for name, text in self.said.items()]
    return "\n".join(lines)


@functools.cache
def backend(name: str) -> Any:
  """The module of a backend, imported when first asked for."""
  if name not in BACKENDS:
    raise ValueError(
      f"backend {name!r} is not known; there are auto, reference and "
      f"{', '.join(BACKENDS)}."
    )
  full = f"pallas_kernels.{name}"
  try:
    return importlib.import_module(full)
  except ImportError as e:
    # Missing as a whole, or built on a part of jax that this jax lacks.
    if e.name != full and (e.name or "").startswith("pallas_kernels"):
      raise
    raise Unsupported(f"{name} cannot be imported here: {e}") from e


def op_of(name: str, op: str) -> Op:
  """One op of one backend; Unsupported if it has none."""
  ops: Mapping[str, Op] = backend(name).OPS
  if op not in ops:
    raise Unsupported(f"{name} has no {op}.")
  return ops[op]


def why_not(name: str, problem: Problem) -> str | None:
  """Why a backend cannot run a problem compiled for this device, or None."""
  only = _PLATFORMS.get(name, device.platform())
  if only != device.platform():
    return f"its kernels are for a {only.upper()}, and this is {device.name()}"
  try:
    return op_of(name, problem.op).why_not(problem)
  except Unsupported as e:
    return str(e)


def legal_tiles(name: str, problem: Problem) -> list[Any]:
  """The backend's default for a problem, then its other candidates."""
  op = op_of(name, problem.op)
  default = op.default(problem)
  return [default, *(t for t in op.candidates(problem) if t != default)]


# --- choosing ----------------------------------------------------------------

_SEEN: contextvars.ContextVar[list[Problem] | None] = contextvars.ContextVar(
  "pallas_kernels_seen", default=None
)


def choose(problem: Problem, want: str = "auto", tiles: Any = None) -> Choice:
  """Picks the backend and tiles of a call; fast, since called at each trace.

  Args:
    problem: the call.
    want: `auto`, `reference`, or a backend, which then never falls back.
    tiles: of that backend; None takes measured ones, or its default.

  Raises:
    ValueError: an unknown backend, or tiles without one.
    Unsupported: the backend named cannot run this.
  """
  seen = _SEEN.get()
  if seen is not None:
    seen.append(problem)
  if tiles is not None and want in ("auto", "reference"):
    raise ValueError(f"tiles are of a backend; name one beside {tiles}.")
  if want == "reference":
    return Choice("reference", why="asked for")
  attends = problem.op.startswith("attention")
  if 0 in (problem.tokens, problem.keys if attends else problem.k):
    if want != "auto":
      backend(want)  # an unknown name is refused all the same
    return Choice("reference", why="there is nothing to compute")
  measured = table.load(device.name())
  if want == "auto":
    return _auto(problem, device.platform(), measured)
  return _named(problem, want, tiles, measured, device.platform())


@functools.lru_cache(maxsize=4096)
def _named(
  problem: Problem, want: str, tiles: Any, measured: Table, platform: str
) -> Choice:
  del platform  # why_not may look at it: it belongs to the key
  op = op_of(want, problem.op)
  reason = op.why_not(problem)
  if reason is not None:
    raise Unsupported(f"{want} cannot run {problem.op}: {reason}")
  if tiles is not None:
    return Choice(want, tiles, "asked for")
  found, tiles = _measured_tiles(problem, want, _near(problem, measured))
  if found:
    return Choice(want, tiles, "asked for, with measured tiles")
  return Choice(want, op.default(problem), "asked for, with default tiles")


@functools.lru_cache(maxsize=4096)
def _auto(problem: Problem, platform: str, measured: Table) -> Choice:
  if platform == "cpu":
    return Choice("reference", why="kernels are for accelerators")
  near = _near(problem, measured)
  found, dense = _measured_tiles(problem, "dense", near)
  if not found:
    dense = op_of("dense", problem.op).default(problem)

  def run_dense(why: str) -> Choice:
    return Choice("dense", dense, why)

  if not near:
    return run_dense("nothing near this problem was measured on this device")
  best, best_gain = None, 0.0
  for name in BACKENDS:
    if name == "dense" or why_not(name, problem) is not None:
      continue
    gain = _gain(problem, name, near)
    if gain is not None and gain > best_gain:
      best, best_gain = name, gain
  exact = _is_exact(problem, near)
  margin = MARGIN_EXACT if exact else MARGIN_NEAR
  where = "here" if exact else "on every problem measured near this one"
  if best is None:
    return run_dense("no kernel that can run this was measured " + where)
  if best_gain < margin:
    return run_dense(
      f"{best}, the best kernel, was {best_gain:.2f}x as fast as the masked "
      f"dense op {where}; {margin}x is asked for"
    )
  found, tiles = _measured_tiles(problem, best, near)
  if not found:
    return run_dense(f"the measured tiles of {best} do not fit this problem")
  return Choice(
    best, tiles, f"{best_gain:.2f}x as fast as the masked dense op {where}"
  )


def explain(what: Problem | Callable[..., Any], *args, **kwargs) -> Explanation:
  """What `auto` would run, why, and what each other backend said.

  Args:
    what: a Problem, or an op of this package with its arguments behind it, as
      in `explain(matmul_n_sparse, x, w, plan)`; nothing is computed.

  Raises:
    ValueError: the arguments do not fit the op, or it is no op that a backend
      is picked for.
  """
  if isinstance(what, Problem):
    problem = what
  else:
    op = what
    with _recorded() as seen:
      jax.eval_shape(lambda *a: op(*a, **kwargs), *args)
    if not seen:
      name = getattr(op, "__name__", op)
      raise ValueError(f"{name} picks no backend for these arguments.")
    problem = seen[0]
  measured = table.load(device.name())
  choice = choose(problem)
  near = _near(problem, measured)
  said = {}
  for name in BACKENDS:
    reason = why_not(name, problem)
    if reason is not None:
      said[name] = f"cannot run this: {reason}"
    else:
      said[name] = _said(problem, name, near)
  source = f"{measured.path}, {len(measured.rows)} rows"
  if not measured.path:
    source = f"none for {device.name()}"
  elif near:
    rows = [row for point in near for row in point]
    versions = sorted({row.jax for row in rows})
    source += f", measured with jax {', '.join(versions)}; near: " + ", ".join(
      sorted({row.name or "unnamed" for row in rows})
    )
  return Explanation(problem, choice, device.name(), source, said)


@contextlib.contextmanager
def _recorded() -> Generator[list[Problem]]:
  seen: list[Problem] = []
  token = _SEEN.set(seen)
  try:
    yield seen
  finally:
    _SEEN.reset(token)


def _said(problem: Problem, name: str, near) -> str:
  gain = _gain(problem, name, near)
  if gain is not None:
    times = [
      f"{r.us:.4g} us at density {row.problem.density:.2f}"
      for row in near[0]
      for r in row.results
      if r.backend == name
    ]
    return f"{gain:.2f}x of masked dense ({', '.join(times)})"
  for row in near[0] if near else ():
    reason = dict(row.refused).get(name)
    if reason:
      return f"not measured: {reason}"
  return "can run this; nothing near was measured"


# --- what the table says -----------------------------------------------------
# A point is all rows that differ in density alone; `near` is a tuple of points,
# the nearest first.


def _layout(p: Problem) -> tuple:
  """What must agree for a measurement to say anything."""
  per_kv = p.heads // max(p.kv_heads, 1)
  return (
    p.op,
    p.dtype,
    p.group_size,
    p.transposed and p.op != "matmul_k_sparse",
    p.shared and p.tokens > 1,
    p.joined,
    p.dim,
    per_kv,
    p.window is not None,
    p.padded,  # dense attention takes other paths for these two
    p.shifted,
    p.groups if p.op in ("route", "route_folded") else 0,
  )


def _axes(p: Problem) -> tuple[int, ...]:
  """What a measurement may differ in, by up to a factor of two each."""
  if p.op == "attention_prefill":
    return (p.rows, p.length, p.keys, p.heads)
  if p.op == "attention_decode":
    return (p.rows, p.keys, p.heads)
  return (p.tokens, p.k, p.n)


def _octaves(a: tuple[int, ...], b: tuple[int, ...]) -> float:
  return max(
    abs(math.log2(max(x, 1) / max(y, 1))) for x, y in zip(a, b, strict=True)
  )


@functools.lru_cache(maxsize=8)
def _index(measured: Table) -> Mapping[tuple, Mapping[tuple, list[Row]]]:
  index: dict[tuple, dict[tuple, list[Row]]] = {}
  for row in measured.rows:
    points = index.setdefault(_layout(row.problem), {})
    points.setdefault(_axes(row.problem), []).append(row)
  for points in index.values():
    for rows in points.values():
      rows.sort(key=lambda row: row.problem.density)
  return index


def _near(problem: Problem, measured: Table) -> tuple[tuple[Row, ...], ...]:
  index = _index(measured)
  points = index.get(_layout(problem), {})
  if not points and problem.op in ("gated_ffn", "routed_ffn"):
    other = dataclasses.replace(problem, joined=not problem.joined)
    points = index.get(_layout(other), {})
  axes = _axes(problem)
  if axes in points:
    return (tuple(points[axes]),)
  by_distance = sorted((_octaves(axes, other), other) for other in points)
  return tuple(
    tuple(points[other])
    for distance, other in by_distance
    if distance <= _NEAR_OCTAVES + 1e-9
  )


def _around(
  problem: Problem, point: tuple[Row, ...]
) -> list[tuple[float, Row]] | None:
  """Rows whose weighted times stand for the density; None if above them all."""
  d = problem.density
  close = min(point, key=lambda row: abs(row.problem.density - d))
  if abs(close.problem.density - d) <= _SAME_DENSITY:
    return [(1.0, close)]
  if d < point[0].problem.density:
    return [(1.0, point[0])]
  if d > point[-1].problem.density:
    return None
  high = next(i for i, row in enumerate(point) if row.problem.density > d)
  a, b = point[high - 1], point[high]
  share = (d - a.problem.density) / (b.problem.density - a.problem.density)
  return [(1 - share, a), (share, b)]


def _is_exact(problem: Problem, near) -> bool:
  measured = near[0][0].problem
  same = _axes(measured) == _axes(problem)
  if not same or measured.joined != problem.joined:
    return False
  rows = _around(problem, near[0])
  return rows is not None and len(rows) == 1


def _of(row: Row, name: str):
  return next((r for r in row.results if r.backend == name), None)


def _gain(problem: Problem, name: str, near) -> float | None:
  """Masked dense time over a backend's, the least over all near points."""
  gains = []
  for point in near:
    rows = _around(problem, point)
    if rows is None or any(_of(row, name) is None for _, row in rows):
      return None
    if len(rows) == 1:  # the paired ratio, rather than that of two medians
      gains.append(_of(rows[0][1], name).ratio)
      continue
    # A row's twin and result were measured side by side: keep them paired.
    twin = sum(share * row.twin_us for share, row in rows)
    own = sum(share * row.twin_us / _of(row, name).ratio for share, row in rows)
    gains.append(twin / own)
  return min(gains, default=None)


def _measured_tiles(problem: Problem, name: str, near) -> tuple[bool, Any]:
  """(found, tiles) from the nearest row whose tiles the backend offers here."""
  if not near or why_not(name, problem) is not None:
    return False, None
  legal = legal_tiles(name, problem)
  for point in near:
    nearest = sorted(
      point, key=lambda row: abs(row.problem.density - problem.density)
    )
    for row in nearest:
      result = _of(row, name)
      if result is not None:
        found, tiles = table.tiles_from_json(result.tiles, legal)
        if found:
          return True, tiles
  return False, None


# --- plans -------------------------------------------------------------------


def plan_maker(want: str) -> Callable[..., tuple]:
  """Who works out the parts of a plan: see plan.make_plan."""
  if want == "auto":
    modern = (device.capability() or (8, 0)) >= (8, 0)
    gpu = device.platform() == "gpu" and modern
    want = "triton" if gpu else "reference"
  if want == "reference":
    return plans.reference_parts
  module = backend(want)
  if not hasattr(module, "plan_parts"):
    raise Unsupported(f"{want} makes no plans.")
  return module.plan_parts
