"""Tables of measured choices: `tuned/<device>.json`, read and written here.

A table is data, written by `python -m pallas_kernels.tune` and never at import
or during training. One that cannot be trusted (cut off, another format, another
device) is ignored as a whole; results of a backend whose kernels changed since
are ignored alone. Either way there is one warning, and what runs is right.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import tempfile
import warnings
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from pallas_kernels.problem import OPS, Problem

FORMAT = 1
# A module of this package each, and its version: raise it when its kernels
# change their speed or its tiles their meaning; tables of older ones are stale.
VERSIONS = {
  "dense": 1,
  "ragged": 1,
  "triton": 2,
  "mosaic_gpu": 1,
  "mosaic_tpu": 1,
}
DIRECTORY_VARIABLE = "PALLAS_KERNELS_TUNED"
NOT_ASKED = "not asked for"  # why a row has nothing of a backend
_PACKAGED = pathlib.Path(__file__).resolve().parent / "tuned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The fastest right tiles of one backend on one problem.

  Attributes:
    backend: its name.
    tiles: as `tiles_to_json` gives them.
    us: median microseconds.
    ratio: time of the masked dense twin over this one's, paired.
    low, high: 95% interval of the ratio.
    error: relative to the reference in float32.
    version: of the backend, see VERSIONS.
  """

  backend: str
  tiles: Any
  us: float
  ratio: float
  low: float
  high: float
  error: float
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """What was measured of one problem.

  Attributes:
    problem: of the mask density that was measured.
    twin_us: the masked dense twin: the best dense op, then the mask.
    results: one for each backend that ran and was right.
    refused: backend -> why it has no result.
    jax: version it was measured with.
    name: of the row in the suite.
  """

  problem: Problem
  twin_us: float
  results: tuple[Result, ...]
  refused: tuple[tuple[str, str], ...] = ()
  jax: str = ""
  name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Table:
  """All rows of one device; equal to itself alone, so that caches are fast."""

  device: str
  rows: tuple[Row, ...] = ()
  path: str = ""


# --- tiles -------------------------------------------------------------------


def tiles_to_json(tiles: Any) -> Any:
  """{"type": ..., fields}, nested; None as it is."""
  if dataclasses.is_dataclass(tiles):
    fields = {
      f.name: tiles_to_json(getattr(tiles, f.name))
      for f in dataclasses.fields(tiles)
    }
    return {"type": type(tiles).__name__, **fields}
  return tiles


def tiles_from_json(stored: Any, legal: Iterable[Any]) -> tuple[bool, Any]:
  """(found, tiles): the tiles of `legal` that `stored` describes.

  Only what a backend offers for the problem at hand can come out, so that a
  wrong or old entry is never run.
  """
  for tiles in legal:
    if tiles_to_json(tiles) == stored:
      return True, tiles
  return False, None


# --- rows as JSON ------------------------------------------------------------


def row_to_json(row: Row) -> dict[str, Any]:
  """A row as plain JSON."""
  out = dataclasses.asdict(row)
  out["refused"] = dict(row.refused)
  return out


def _positive(value: Any, what: str) -> float:
  fits = isinstance(value, int | float) and not isinstance(value, bool)
  if not fits or not math.isfinite(value) or value <= 0:
    raise ValueError(f"{what} is {value!r}, not a positive number")
  return float(value)


def _problem(stored: Mapping[str, Any]) -> Problem:
  kinds = {f.name: f.type for f in dataclasses.fields(Problem)}
  unknown = set(stored) - set(kinds)
  if unknown:
    raise ValueError(f"problem has unknown fields {sorted(unknown)}")
  for name, value in stored.items():
    kind = kinds[name]
    fits = isinstance(value, kind)  # ty: ignore[invalid-argument-type]
    if kind is float and isinstance(value, int):
      fits = True
    if not fits or (isinstance(value, bool) and kind is not bool):
      raise ValueError(f"problem.{name} is {value!r}")
  problem = Problem(**stored)
  if problem.op not in OPS:
    raise ValueError(f"unknown op {problem.op!r}")
  return problem


def row_from_json(stored: Mapping[str, Any]) -> Row:
  """The reverse of row_to_json.

  Raises:
    ValueError, TypeError, KeyError, AttributeError: it is no such row.
  """
  results = []
  for r in stored["results"]:
    if r["backend"] not in VERSIONS:
      raise ValueError(f"unknown backend {r['backend']!r}")
    numbers = {
      name: _positive(r[name], name) for name in ("us", "ratio", "low", "high")
    }
    results.append(
      Result(
        backend=r["backend"],
        tiles=r["tiles"],
        error=float(r["error"]),
        version=int(r["version"]),
        **numbers,
      )
    )
  return Row(
    problem=_problem(stored["problem"]),
    twin_us=_positive(stored["twin_us"], "twin_us"),
    results=tuple(results),
    refused=tuple(sorted(stored.get("refused", {}).items())),
    jax=str(stored.get("jax", "")),
    name=str(stored.get("name", "")),
  )


# --- files -------------------------------------------------------------------


def path_of(device: str) -> pathlib.Path:
  """Where the table of a device is: your directory, else the packaged one.

  The environment variable PALLAS_KERNELS_TUNED names a directory of tables
  that come before the packaged ones.
  """
  own = os.environ.get(DIRECTORY_VARIABLE)
  if own and (pathlib.Path(own) / f"{device}.json").is_file():
    return pathlib.Path(own) / f"{device}.json"
  return _PACKAGED / f"{device}.json"


def parse(text: str, device: str, path: str = "") -> Table:
  """A table from its text.

  Raises:
    ValueError: it is cut off, of another format, or of another device.
  """
  try:
    stored = json.loads(text)
    if stored["format"] != FORMAT:
      raise ValueError(f"format {stored['format']!r}, not {FORMAT}")
    if stored["device"] != device:
      raise ValueError(f"measured on {stored['device']!r}, not {device!r}")
    rows = tuple(row_from_json(row) for row in stored["rows"])
  except (KeyError, TypeError, AttributeError) as e:
    raise ValueError(f"not a table of this format ({e!r})") from e
  return Table(device=device, rows=rows, path=path)


def read(path: pathlib.Path, device: str) -> Table:
  """The table at `path`; an empty one where there is none.

  Raises:
    ValueError: it cannot be used.
  """
  if not path.is_file():
    return Table(device=device)
  return parse(path.read_text(encoding="utf-8"), device, str(path))


@functools.cache
def _trusted(path: pathlib.Path, device: str) -> Table:
  """`read`, but a table that cannot be used is empty, with one warning."""
  try:
    table = read(path, device)
  except (ValueError, OSError) as e:
    warnings.warn(
      f"{path} is ignored: {e}. Without it `auto` runs dense; write it anew "
      "with `python -m pallas_kernels.tune`.",
      RuntimeWarning,
      stacklevel=2,
    )
    return Table(device=device)
  rows = tuple(
    dataclasses.replace(row, results=tuple(filter(_present, row.results)))
    for row in table.rows
  )
  stale = sum(len(row.results) for row in table.rows)
  stale -= sum(len(row.results) for row in rows)
  if stale:
    warnings.warn(
      f"{path}: {stale} results of other kernel versions are ignored; measure "
      "again with `python -m pallas_kernels.tune`.",
      RuntimeWarning,
      stacklevel=2,
    )
  return dataclasses.replace(table, rows=rows)


def _present(result: Result) -> bool:
  return result.version == VERSIONS[result.backend]


def load(device: str) -> Table:
  """The table of a device, read once a process; empty if none can be used."""
  return _trusted(path_of(device), device)


def forget() -> None:
  """Reads tables anew at the next call; for tests and after tuning."""
  _trusted.cache_clear()


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Generator[None]:
  """Keeps two writers apart where the system can lock files."""
  try:
    import fcntl
  except ImportError:  # Windows: the rename alone keeps the file whole
    yield
    return
  # Not beside the table: that is where packages and repositories are.
  name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
  place = pathlib.Path(tempfile.gettempdir(), f"pallas_kernels_{name}.lock")
  with open(place, "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def _keeping(row: Row, old: Row | None) -> Row:
  """A new row with the old results of backends that it was not to measure."""
  if old is None:
    return row
  skipped = {name for name, reason in row.refused if reason == NOT_ASKED}
  kept = tuple(r for r in old.results if r.backend in skipped)
  names = {r.backend for r in kept}
  return dataclasses.replace(
    row,
    results=(*row.results, *kept),
    refused=tuple(pair for pair in row.refused if pair[0] not in names),
  )


def merge(path: pathlib.Path, device: str, rows: Iterable[Row]) -> Table:
  """Puts rows into a table on disk, in place of older ones of their problem.

  Safe with several writers and when killed: read, merge and rename happen
  under a lock. What was there and cannot be read is replaced.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with _locked(path):
    try:
      old = read(path, device)
    except ValueError:
      old = Table(device=device)
    merged = {row.problem: row for row in old.rows}
    for row in rows:
      merged[row.problem] = _keeping(row, merged.get(row.problem))
    ordered = sorted(
      merged.values(),
      key=lambda r: json.dumps(dataclasses.asdict(r.problem), sort_keys=True),
    )
    lines = [
      json.dumps(row_to_json(row), allow_nan=False, sort_keys=True)
      for row in ordered
    ]
    body = ",\n".join(lines)
    head = f'{{"format": {FORMAT}, "device": {json.dumps(device)}, "rows": ['
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".json")
    try:
      with os.fdopen(handle, "w", encoding="utf-8") as f:
        f.write(f"{head}\n{body}\n]}}\n")
        f.flush()
        os.fsync(f.fileno())
      os.chmod(name, 0o644)
      os.replace(name, path)
    finally:
      pathlib.Path(name).unlink(missing_ok=True)
  return Table(device=device, rows=tuple(ordered), path=str(path))
