"""What a run writes while it runs: metrics.jsonl, TensorBoard, a live bar.

`metrics.jsonl` holds one JSON object a line:
`{"stage": "routers", "step": 10, "kind": "train", "loss": ..., ...}`.
"""

import io
import json
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import numpy as np
import tqdm

from wide_jax import atomic
from wide_jax.config import Phase

STAGES = tuple(phase.value for phase in Phase)

# --- files -------------------------------------------------------------------


def write_json(path: str | os.PathLike, obj: Any) -> None:
  """Writes `obj` as indented JSON in one step; see `to_plain`."""
  text = json.dumps(to_plain(obj), indent=2, allow_nan=False) + "\n"
  with atomic.replacing(path) as temporary:
    temporary.write_text(text)


def to_plain(obj: Any) -> Any:
  """Arrays and scalars of numpy and jax as Python's; nan and inf as None."""
  if isinstance(obj, Mapping):
    return {str(k): to_plain(v) for k, v in obj.items()}
  if isinstance(obj, list | tuple):
    return [to_plain(v) for v in obj]
  if hasattr(obj, "tolist"):  # numpy and jax arrays, numpy scalars
    return to_plain(np.asarray(obj).tolist())
  if isinstance(obj, float):
    return obj if math.isfinite(obj) else None
  if isinstance(obj, str):
    return str(obj)  # an enum member as its value
  if isinstance(obj, os.PathLike):
    return os.fspath(obj)
  return obj


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The lines of a metrics.jsonl; a torn last line is left out.

  Raises:
    ValueError: a line other than the last is no JSON object of a run.
  """
  lines = pathlib.Path(path).read_text(errors="replace").split("\n")
  *whole, torn = lines  # what follows the last newline was never finished
  del torn
  out = []
  for number, line in enumerate(whole, 1):
    try:
      row = json.loads(line)
      if not isinstance(row, dict):
        raise ValueError("not an object")
      if not isinstance(row.get("step"), int) or not (
        isinstance(row.get("stage"), str) and isinstance(row.get("kind"), str)
      ):
        raise ValueError("it lacks a stage, a step or a kind")
    except ValueError as e:
      if number == len(whole):
        break
      raise ValueError(
        f"{path}, line {number}, is no JSON object of a run: {e}"
      ) from e
    out.append(row)
  return out


class MetricsLog:
  """Appends to `WORKDIR/metrics.jsonl` and to TensorBoard events.

  A resumed run repeats the steps after its checkpoint, so their lines are
  dropped when the log is opened. Used as a context manager, or closed by
  `close()`.

  Attributes:
    path: the metrics.jsonl.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    resume: tuple[str, int] | None = None,
    stages: Sequence[str] = STAGES,
    tensorboard: bool = True,
  ):
    """Opens the log.

    Args:
      workdir: directory of the run; made if it is not there.
      resume: stage and last finished step of the checkpoint gone on from; None
        starts afresh and forgets what an earlier run left there.
      stages: the stages in their order. Lines of other stages, such as `dense`,
        precede them all and are kept.
      tensorboard: also write events, one directory a stage below `tensorboard`.

    Raises:
      ValueError: the stage of `resume` is not in `stages`.
    """
    self._root = pathlib.Path(workdir)
    self._root.mkdir(parents=True, exist_ok=True)
    self.path = self._root / "metrics.jsonl"
    self._stages = tuple(stages)
    self._resume = resume
    self._events = self._root / "tensorboard"
    self._tensorboard = _summary_writer() if tensorboard else None
    self._writers: dict[str, Any] = {}
    if resume is not None and resume[0] not in self._stages:
      raise ValueError(f"stage {resume[0]!r} must be one of {self._stages}.")
    kept = self._drop_repeated()
    # A line at the very step resumed from may be written once more.
    self._seen = {_key(row) for row in kept} if resume else set()
    self._file = open(self.path, "a")

  def _drop_repeated(self) -> list[dict[str, Any]]:
    rows = read_metrics(self.path) if self.path.exists() else []
    kept = [row for row in rows if self._survives(row["stage"], row["step"])]
    with atomic.replacing(self.path) as temporary:
      temporary.write_text("".join(_dump(row) for row in kept))
    for old in self._events.glob("*"):
      if not self._survives(old.name, 0):
        shutil.rmtree(old)
    return kept

  def _survives(self, stage: str, step: int) -> bool:
    if self._resume is None:
      return False
    if stage not in self._stages:
      return True
    at = self._stages.index(stage), step
    return at <= (self._stages.index(self._resume[0]), self._resume[1])

  def write(self, stage: str, step: int, kind: str, **values: Any) -> None:
    """Appends one line and flushes it; a line already there is left as it is.

    Numbers go to TensorBoard as `KIND/NAME` at `step`, per-layer arrays and
    text to the file alone. nan and inf become null.
    """
    row = to_plain({"stage": stage, "step": int(step), "kind": kind, **values})
    if _key(row) in self._seen:
      return
    self._file.write(_dump(row))
    self._file.flush()
    if self._tensorboard is None:
      return
    for name, value in row.items():
      if name != "step" and _is_number(value):
        self._writer(stage, self._tensorboard).add_scalar(
          f"{kind}/{name}", value, row["step"]
        )

  def _writer(self, stage: str, make: Any) -> Any:
    if stage not in self._writers:
      purge = None
      if self._resume is not None and stage == self._resume[0]:
        purge = self._resume[1] + 1
      self._writers[stage] = make(
        str(self._events / stage),
        purge_step=purge,
        # names hold seconds; a quick restart must not overwrite
        filename_suffix=f".{purge or 0}.{os.getpid()}",
      )
    return self._writers[stage]

  def close(self) -> None:
    self._file.close()
    for writer in self._writers.values():
      writer.close()
    self._writers.clear()

  def __enter__(self) -> "MetricsLog":
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


def _key(row: Mapping[str, Any]) -> tuple[str, int, str]:
  return row["stage"], row["step"], row["kind"]


def _dump(row: Mapping[str, Any]) -> str:
  return json.dumps(row, allow_nan=False) + "\n"


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _summary_writer() -> Any:
  """tensorboardX's class, or None and one line where it is not installed."""
  try:
    from tensorboardX import SummaryWriter
  except ImportError:
    print("tensorboardX is not installed: no TensorBoard events are written.")
    return None
  return SummaryWriter


# --- the live bar ------------------------------------------------------------


class Bar:
  """Progress of one stage: loss, sparsity, tokens/s, time left.

  A moving bar on a terminal; elsewhere a plain line now and then, so that a
  log file stays readable. Speed is that of this process, without its first
  step, which compiles.
  """

  def __init__(
    self,
    name: str,
    total: int,
    *,
    start: int = 0,
    target: float | None = None,
    stream: io.TextIOBase | TextIO | None = None,
    every_s: float = 10.0,
  ):
    """Shows nothing yet.

    Args:
      name: of the stage.
      total: optimiser steps of the stage.
      start: steps already done, where the run was resumed.
      target: sparsity aimed at, shown beside the realised one.
      stream: where to; standard output by default.
      every_s: seconds between plain lines.
    """
    self._name, self._total, self._step = name, total, start
    self._target = target
    self._stream = sys.stdout if stream is None else stream
    self._every_s = every_s
    self._tokens = self._steps = 0
    self._began: float | None = None
    self._shown = -math.inf
    self._tqdm = None
    if self._stream.isatty():
      self._tqdm = tqdm.tqdm(
        total=total,
        initial=start,
        desc=name,
        file=self._stream,
        dynamic_ncols=True,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n}/{total} {postfix}",
      )

  def update(
    self,
    step: int,
    tokens: int,
    *,
    loss: float | None = None,
    realised: float | None = None,
  ) -> None:
    """Says that `step` steps are done.

    Args:
      step: steps done in all.
      tokens: tokens processed since the last call.
      loss: of the last step.
      realised: sparsity of the last step.
    """
    now = time.monotonic()
    if self._began is None:
      self._began = now
    else:
      self._tokens += tokens
      self._steps += step - self._step
    self._step = step
    text = self._describe(now, loss, realised)
    if self._tqdm is not None:
      self._tqdm.n = step
      self._tqdm.set_postfix_str(text)
    elif now - self._shown >= self._every_s or step >= self._total:
      self._shown = now
      print(f"{self._name} {step}/{self._total}  {text}", file=self._stream)
      self._stream.flush()

  @property
  def tokens_per_s(self) -> float | None:
    """Mean speed after the first step; None before the second."""
    if self._began is None or not self._steps:
      return None
    return self._tokens / max(time.monotonic() - self._began, 1e-9)

  def _describe(
    self, now: float, loss: float | None, realised: float | None
  ) -> str:
    parts = []
    if loss is not None:
      parts.append(f"loss {loss:.4f}")
    if realised is not None:
      aim = "" if self._target is None else f" of {100 * self._target:.1f}%"
      parts.append(f"sparsity {100 * realised:.1f}%{aim}")
    if self._steps and self._began is not None:
      per_step = (now - self._began) / self._steps
      left = per_step * max(self._total - self._step, 0)
      speed = self._tokens / max(now - self._began, 1e-9)
      parts += [f"{speed:,.0f} tokens/s", f"ETA {duration(left)}"]
    return "  ".join(parts)

  def close(self) -> None:
    if self._tqdm is not None:
      self._tqdm.close()

  def __enter__(self) -> "Bar":
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


def duration(seconds: float) -> str:
  """`75` -> `1m15s`, `7500` -> `2h05m`."""
  s = round(seconds)
  if s >= 3600:
    return f"{s // 3600}h{s % 3600 // 60:02d}m"
  return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


# --- tables ------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
  """Rows as aligned text: the first column to the left, numbers to the right.

  A key that a row lacks, and None, are shown as `-`.
  """
  cells = [[_cell(row.get(c)) for c in columns] for row in rows]
  lines = [list(columns), *cells]
  widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

  def draw(line: Sequence[str]) -> str:
    first = line[0].ljust(widths[0])
    rest = (c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))
    return "  ".join([first, *rest]).rstrip()

  rule = "  ".join("-" * w for w in widths)
  return "\n".join([draw(columns), rule, *map(draw, cells)])


def print_table(
  rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> None:
  """Prints `table(rows, columns)`."""
  print(table(rows, columns), flush=True)


def _cell(value: Any) -> str:
  value = to_plain(value)
  if value is None:
    return "-"
  if isinstance(value, float):
    size = abs(value)
    if size >= 10000:
      return f"{value:,.0f}"
    return f"{value:.2f}" if size >= 100 else f"{value:.4g}"
  if isinstance(value, int) and not isinstance(value, bool):
    return f"{value:,}"
  return str(value)
