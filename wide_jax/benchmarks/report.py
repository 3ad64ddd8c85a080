"""How the kernel benchmark is told: table, verdicts, figure."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.backends.backend_agg
import matplotlib.figure

from wide_jax import atomic, metrics

Result = Mapping[str, Any]

_REFERENCE_ONLY = (
  "These rows ran on a CPU, where every op runs on the reference: they show "
  "that the benchmark works, and no speed-up."
)


def _interval(row: Result, key: str) -> str | None:
  if row.get(key) is None:
    return None
  low, high = row[f"{key}_low"], row[f"{key}_high"]
  return f"{row[key]:.2f}x [{low:.2f}, {high:.2f}]"


def _percent(value: float | None) -> str | None:
  return None if value is None else f"{100 * value:.0f}%"


def _verdict(row: Result) -> str | None:
  if row.get("auto_ok") is None:
    return None
  return ("ok " if row["auto_ok"] else "FAIL ") + f"{row['auto_vs_twin']:.3f}"


def table(rows: Sequence[Result]) -> str:
  """The rows as aligned text; times in microseconds.

  `router us` and `plan us`, beyond 64 tokens: what the same op takes longer
  with the one, and the other, in front of it in the same program (paired
  differences, perhaps negative by noise). Up to 64 tokens, and for decode
  attention, there is no plan, and the router is timed as a program of its own,
  which the host's launches may bound.
  """
  out = []
  for row in rows:
    if "failed" in row:
      out.append({"row": row["name"], "auto": f"failed: {row['failed']}"})
      continue
    line: dict[str, Any] = {
      "row": row["name"],
      "kept": _percent(row["density"]),
      "dense us": row["dense_us"],
      "by": row["dense"],
      "auto us": row["auto_us"],
      "+-": row["contenders"].get("auto", {}).get("spread_us"),
      "auto": row["auto_backend"],
      "router us": row["router_us"],
      "plan us": row["plan_us"],
      "counted": _percent(row["counted_saving"]),
    }
    if row["measures"] == "kernels":
      line |= {
        "speedup": _interval(row, "speedup"),
        "with router, plan": _interval(
          row, "routed_speedup" if row.get("routed_us") else "speedup_included"
        ),
        "kernel": _interval(row, "kernel_speedup"),
        "library": _interval(row, "library_speedup"),
        "measured": _percent(row.get("measured_saving")),
        "auto/twin": _verdict(row),
        "roofline": _percent(row["roofline_fraction"]),
      }
    out.append(line)
  if not out:
    return "no rows"
  columns = list(dict.fromkeys(name for line in out for name in line))
  text = metrics.table(out, columns)
  reference = [r for r in rows if r.get("measures") == "reference"]
  return f"{text}\n{_REFERENCE_ONLY}" if reference else text


def failures(rows: Sequence[Result]) -> list[str]:
  """One sentence for each row that breaks a rule."""
  out = []
  for row in rows:
    if "failed" in row:
      out.append(f"{row['name']}: {row['failed']}")
      continue
    if row.get("auto_ok") is False:
      out.append(
        f"{row['name']}: auto ({row['auto_backend']}) is slower than the "
        f"masked dense op: {_interval(row, 'auto_vs_twin')}."
      )
    for name, contender in row["contenders"].items():
      failed = contender.get("failed", "")
      if failed.startswith("wrong") or (failed and name == "auto"):
        out.append(f"{row['name']}: {name} failed: {failed}.")
  return out


def emptier_is_faster(rows: Sequence[Result]) -> list[str]:
  """Trial D3: whether a kernel is faster with nothing kept than with all.

  One sentence for each pair of rows that differ in density alone and keep
  everything and nothing.
  """
  times: dict[tuple, dict[float, tuple[str, float]]] = {}
  for row in rows:
    if row.get("measures") != "kernels" or row.get("kernel_us") is None:
      continue
    key = (row["part"], row["tokens"], row["group_size"], str(row["shapes"]))
    here = times.setdefault(key, {})
    here[row["expected_density"]] = (row["name"], row["kernel_us"])
  out = []
  for here in times.values():
    if 0.0 in here and 1.0 in here:
      name, none = here[0.0]
      all_us = here[1.0][1]
      word = "faster" if none < all_us else "NOT faster"
      out.append(
        f"{name}: with nothing kept the kernel is {word} than with all "
        f"({none:.4g} us, {all_us:.4g} us)."
      )
  return out


def learned_against_random(rows: Sequence[Result]) -> list[str]:
  """How kernels do on learned masks beside random ones of their densities."""
  times = {r["name"]: r.get("kernel_us") for r in rows if "failed" not in r}
  out = []
  for name, own in times.items():
    twin = times.get(name.removesuffix("/learned") + "/matched")
    if name.endswith("/learned") and own and twin:
      out.append(
        f"{name}: {own:.4g} us; random masks of the same densities {twin:.4g} "
        f"us ({twin / own:.2f}x)."
      )
  return out


# --- figure ------------------------------------------------------------------

_PANELS = (
  ("n_sparse", "tokens", "N-sparse 4096 -> 14336"),
  ("k_sparse", "tokens", "K-sparse 14336 -> 4096"),
  ("ffn", "tokens", "gated FFN"),
  ("prefill", "tokens", "causal prefill attention"),
  ("decode", "cached", "decode attention"),
)


def _x(row: Result, axis: str) -> float:
  if axis == "cached":
    return row["tokens"] * row["shapes"]["keys"]
  return row["tokens"]


def _lines(rows: Sequence[Result], axis: str, kernels: bool):
  """label -> [(x, value)]: kernel speed-ups over dense, or times."""
  lines: dict[str, list[tuple[float, float]]] = {}
  for row in rows:
    label = f"C {row['group_size']}"
    if row["part"] in ("prefill", "decode"):
      label = f"keep {row['expected_density']:g}"
      if axis == "cached":
        label += f", batch {row['tokens']}"
    elif row["mask"] != "random":
      label += f", {row['mask']}"
    value = row.get("kernel_speedup") if kernels else row["auto_us"]
    if value is not None:
      lines.setdefault(label, []).append((_x(row, axis), value))
  return lines


def figure(rows: Sequence[Result], path: str | os.PathLike) -> None:
  """Speed-ups by size: the sparse kernels themselves, at half density.

  On a CPU, times of the reference, and the title says so.

  Raises:
    ValueError: there is nothing to draw.
  """
  good = [row for row in rows if "failed" not in row]
  if not good:
    raise ValueError("there is no measured row to draw.")
  kernels = all(row["measures"] == "kernels" for row in good)
  half = [
    row
    for row in good
    if row["part"] in ("prefill", "decode") or 0.3 < row["density"] < 0.7
  ]
  panels = []
  for part, axis, title in _PANELS:
    lines = _lines([r for r in half if r["part"] == part], axis, kernels)
    if lines:
      panels.append((axis, title, lines))
  fig = matplotlib.figure.Figure(
    figsize=(4.6 * max(len(panels), 1), 4.2), layout="constrained"
  )
  matplotlib.backends.backend_agg.FigureCanvasAgg(fig)
  axes = fig.subplots(1, max(len(panels), 1), squeeze=False)[0]
  for ax, (axis, title, lines) in zip(axes, panels, strict=False):
    for label, points in sorted(lines.items()):
      points.sort()
      ax.plot(*zip(*points, strict=True), marker="o", ms=3, label=label)
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel("batch x cached tokens" if axis == "cached" else "tokens")
    ax.set_xscale("log", base=2)
    if kernels:
      ax.axhline(1, color="#777777", linewidth=0.8)
    ax.grid(alpha=0.3)
    ax.legend(fontsize="x-small")
  if kernels:
    axes[0].set_ylabel("speed-up over the best dense op")
    where = f"{good[0]['device']}, jax {good[0]['jax']}, {good[0]['dtype']}"
    fig.suptitle(f"Kernels at half density ({where})", fontsize="medium")
  else:
    axes[0].set_ylabel("microseconds")
    fig.suptitle(
      "Times of the reference on a CPU: no speed-up", fontsize="medium"
    )
  with atomic.replacing(path) as temporary:
    fig.savefig(temporary, dpi=150, format="png")
