"""Benchmarks: `python -m wide_jax.bench --suite kernels --json OUT.json`.

Every row times the op that `auto` picks, each sparse kernel, what libraries
offer, the masked dense op and the best dense op of jax, cuDNN and (where it is
installed) torch, interleaved in one process. Rows are written as they are done,
and a second call goes on where the first stopped. On a CPU a few small rows run
on the reference: that shows that the benchmark works, and no speed-up.

  --rows 'n_sparse/T4096/*,ffn/T1/*'    selects rows by name
  --budget-s 540                        stops in time, for a lease or a queue
  --data DIR                            has masks/*.npz, for learned masks

Exit code 0: done or out of time; 1: a row breaks a rule (auto slower than the
masked dense op, or a wrong result); 2: bad flags, one sentence says what.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from wide_jax import console

_FORMAT = 1
_LEAST_REPEATS = 5  # the rule about auto asks for five interleaved repeats


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise ValueError(f"{message}; see --help.")


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog="python -m wide_jax.bench",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--suite", required=True, choices=["kernels"])
  parser.add_argument("--json", required=True, help="file to write and resume")
  parser.add_argument("--figure", help="PNG to draw")
  parser.add_argument(
    "--device", default="auto", choices=["auto", "cpu", "gpu", "tpu"]
  )
  parser.add_argument("--rows", default="*", help="patterns, comma-separated")
  parser.add_argument("--data", help="directory with masks/*.npz")
  parser.add_argument("--repeats", type=int, default=7)
  parser.add_argument("--budget-s", type=float, default=float("inf"))
  parser.add_argument("--again", action="store_true", help="measured rows too")
  parser.add_argument("--no-torch", action="store_true")
  parser.add_argument(
    "--list", action="store_true", help="print the rows, measure nothing"
  )
  return parser


def _checked(args: argparse.Namespace) -> None:
  """Refuses bad flags before anything is imported or measured."""
  if args.repeats < _LEAST_REPEATS:
    raise ValueError(
      f"--repeats={args.repeats} must be at least {_LEAST_REPEATS}."
    )
  if not args.budget_s > 0:
    raise ValueError(f"--budget-s={args.budget_s} must be above 0.")
  if args.data is not None and not pathlib.Path(args.data).is_dir():
    raise ValueError(f"--data {args.data!r} is not a directory.")
  for flag, path in (("--json", args.json), ("--figure", args.figure)):
    if path is not None and pathlib.Path(path).is_dir():
      raise ValueError(f"{flag} {path!r} is a directory, not a file.")
  if args.figure and not args.figure.endswith(".png"):
    raise ValueError(f"--figure {args.figure!r} must end in .png.")


def read(path: str | os.PathLike) -> dict[str, Any]:
  """What a former call wrote, or an empty file's worth.

  Raises:
    ValueError: the file is something else; it is not overwritten.
  """
  empty = {"format": _FORMAT, "suite": "kernels", "rows": []}
  if not pathlib.Path(path).exists():
    return empty
  try:
    found = json.loads(pathlib.Path(path).read_text())
    fits = found["format"] == _FORMAT and found["suite"] == "kernels"
    names = [row["name"] for row in found["rows"]]
  except (ValueError, KeyError, TypeError) as e:
    raise ValueError(
      f"--json {path} exists and is no result of this benchmark; name another."
    ) from e
  if not fits or len(names) != len(set(names)):
    raise ValueError(
      f"--json {path} is of another suite or version; name another."
    )
  return found


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit code."""
  return console.run(_main, argv)


def _main(argv: list[str]) -> int:
  args = _parser().parse_args(argv)
  _checked(args)
  stored = read(args.json)
  # torch needs memory of its own: jax must not take it all beforehand.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  print(console.select_device(args.device, "--device"), flush=True)
  from pallas_kernels import suite  # late: they import jax
  from wide_jax.benchmarks import masks, measure, report

  here = measure.circumstances()
  small = here["measures"] == "reference"
  everything = suite.small_rows() if small else suite.rows()
  if small:
    print("a CPU: this measures the reference only, on small shapes")
  try:
    chosen = suite.select(everything, args.rows)
  except ValueError as e:
    raise ValueError(f"--rows: {e}") from e
  rows = measure.rows_for(chosen, args.data, print)
  if args.list:
    print("\n".join(row.name for row in rows))
    return 0
  if not rows:
    raise ValueError(f"--rows {args.rows!r} leaves nothing to measure.")
  masks.check(rows, args.data)
  settings = measure.Settings(
    repeats=args.repeats, data=args.data, torch=not args.no_torch
  )
  stored |= here
  _measure(rows, stored, settings, args)
  wanted = {row.name for row in rows}
  shown = [row for row in stored["rows"] if row["name"] in wanted]
  print(report.table(shown), flush=True)
  for tell in (report.emptier_is_faster, report.learned_against_random):
    for sentence in tell(shown):
      print(sentence)
  failed = report.failures(shown)
  for sentence in failed:
    print(f"FAIL {sentence}")
  if args.figure:
    report.figure(stored["rows"], args.figure)
  return 1 if failed else 0


def _done(row: dict[str, Any], here: dict[str, Any]) -> bool:
  """Whether a stored row need not run again."""
  same = all(row.get(k) == here[k] for k in ("device", "jax", "measures"))
  return same and "failed" not in row


def _measure(rows, stored: dict[str, Any], settings, args) -> None:
  """Measures what is missing, writing after each row."""
  from pallas_kernels import timing
  from wide_jax import metrics
  from wide_jax.benchmarks import measure

  start = time.monotonic()
  have = {row["name"]: row for row in stored["rows"]}
  todo = [
    row
    for row in rows
    if args.again or row.name not in have or not _done(have[row.name], stored)
  ]
  print(
    f"{len(todo)} rows to measure, {len(rows) - len(todo)} done", flush=True
  )
  if not todo:
    return
  small = stored["measures"] == "reference"
  sizes = {"size": 256, "mib": 4} if small else {}
  stored["ceilings"] = dict(timing.ceilings(**sizes))
  stored["roofline"] = measure.roofline(stored["ceilings"])
  print(
    "measured: {matmul_tflops:.4g} TFLOP/s bfloat16, {copy_tb_s:.3g} TB/s "
    "copied; ".format(**stored["ceilings"])
    + "roofline of {tflops:.4g} TFLOP/s and {tb_s:.3g} TB/s".format(
      **stored["roofline"]
    ),
    flush=True,
  )
  spent: list[float] = []
  routers: dict[tuple, dict[str, float]] = {}
  for i, row in enumerate(todo):
    each = sum(spent[-10:]) / max(len(spent[-10:]), 1)
    if time.monotonic() - start + each > args.budget_s:
      print(f"out of time after {i} of {len(todo)} rows", flush=True)
      break
    begun = time.monotonic()
    try:
      result = measure.measure(row, settings, stored["ceilings"], routers)
    except (RuntimeError, MemoryError) as e:  # out of memory, most likely
      reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
      result = {"name": row.name, "part": row.part, "failed": reason}
    spent.append(time.monotonic() - begun)
    have[row.name] = {**result, "seconds": round(spent[-1], 2)}
    stored["rows"] = list(have.values())
    metrics.write_json(args.json, stored)
    print(_progress(i + 1, len(todo), have[row.name], spent), flush=True)


def _progress(i: int, n: int, row: dict[str, Any], spent: list[float]) -> str:
  recent = spent[-10:]
  eta = sum(recent) / len(recent) * (n - i)
  tail = f"{spent[-1]:.1f} s, {eta:.0f} s to go"
  if "failed" in row:
    return f"{i}/{n} {row['name']}: failed: {row['failed']}; {tail}"
  what = f"dense {row['dense_us']:.4g} us ({row['dense']})"
  if row["auto_us"] is not None:
    what += f", auto {row['auto_us']:.4g} us ({row['auto_backend']})"
  if row.get("kernel_speedup") is not None:
    what += f", {row['kernel']} {row['kernel_speedup']:.2f}x"
  return f"{i}/{n} {row['name']}: {what}; {tail}"


if __name__ == "__main__":
  sys.exit(main())
