"""Figures of a run: training curves, keep rates by layer, perplexities."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from wide_jax import atomic, metrics

_DPI = 150
_BLUE, _ORANGE, _GREY = "#1f6fb4", "#d9791b", "#777777"


def _figure(width: float, height: float) -> matplotlib.figure.Figure:
  """An empty figure, sizes in inches, without window or pyplot state."""
  figure = matplotlib.figure.Figure(
    figsize=(width, height), layout="constrained"
  )
  matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
  return figure


def _save(figure: matplotlib.figure.Figure, path: str | os.PathLike) -> None:
  with atomic.replacing(path) as temporary:
    figure.savefig(temporary, dpi=_DPI, format="png")


def training_curves(
  metrics_path: str | os.PathLike, out_png: str | os.PathLike
) -> None:
  """Loss, realised sparsity against its target, and learning rate by stage.

  Reads lines of kind `train` with `loss`, `realised`, `target` and `lr`; what
  a stage did not log is left out.

  Raises:
    ValueError: there is no line of kind `train`.
  """
  rows = [r for r in metrics.read_metrics(metrics_path) if r["kind"] == "train"]
  if not rows:
    raise ValueError(f"{metrics_path} has no line of kind 'train'.")
  stages = list(dict.fromkeys(row["stage"] for row in rows))
  figure = _figure(max(4.2 * len(stages), 6.4), 7.2)
  axes = figure.subplots(3, len(stages), squeeze=False, sharex="col")
  for i, stage in enumerate(stages):
    here = [row for row in rows if row["stage"] == stage]
    loss, sparsity, rate = axes[:, i]
    loss.set_title(stage)
    _line(loss, here, "loss", _BLUE)
    _line(sparsity, here, "realised", _BLUE, percent=True)
    _line(sparsity, here, "target", _GREY, percent=True, linestyle="--")
    _line(rate, here, "lr", _ORANGE)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    rate.set_xlabel("optimiser step")
    for ax in axes[:, i]:
      ax.grid(alpha=0.3)
      if not ax.lines:
        ax.text(0.5, 0.5, "not logged", ha="center", transform=ax.transAxes)
        ax.set_yticks([])
    if sparsity.lines:
      sparsity.set_ylim(-3, 103)
      sparsity.legend(loc="lower right", fontsize="small")
  axes[0, 0].set_ylabel("loss (nats a token)")
  axes[1, 0].set_ylabel("sparsity (%)")
  axes[2, 0].set_ylabel("learning rate")
  _save(figure, out_png)


def _line(
  ax: Any,
  rows: Sequence[Mapping[str, Any]],
  name: str,
  color: str,
  *,
  percent: bool = False,
  linestyle: str = "-",
) -> None:
  steps = [row["step"] for row in rows if name in row]
  if not steps:
    return
  # null (nan in the run) leaves a gap
  values = np.array([row[name] for row in rows if name in row], dtype=float)
  ax.plot(
    steps,
    values * (100 if percent else 1),
    linestyle,
    color=color,
    label=name,
    linewidth=1.4,
    marker="o" if len(steps) < 3 else None,
  )


def keep_rate_heatmap(
  attn_LG: Any, ffn_LG: Any, out_png: str | os.PathLike, title: str = ""
) -> None:
  """How often each layer keeps each group, for both routers.

  Args:
    attn_LG: `[L, Ga]` keep rates in [0, 1] of the head groups.
    ffn_LG: `[L, Gf]` keep rates of the channel groups.
    out_png: file to write.
    title: above both panels.

  A router without groups (`[L, 0]`) has no panel; a column at the right of each
  panel holds the mean of the layer.

  Raises:
    ValueError: a rate outside [0, 1], other shapes, or no group at all.
  """
  panels = []
  for name, rates in (("head groups", attn_LG), ("channel groups", ffn_LG)):
    rates_LG = np.asarray(rates, dtype=np.float64)
    if rates_LG.ndim != 2:
      raise ValueError(
        f"keep rates of {name} are {rates_LG.shape}; want [L, G]."
      )
    if rates_LG.size and not (0 <= rates_LG.min() <= rates_LG.max() <= 1):
      raise ValueError(
        f"keep rates of {name} lie in [{rates_LG.min():.3g},"
        f" {rates_LG.max():.3g}]; want [0, 1]."
      )
    if rates_LG.size:
      panels.append((name, rates_LG))
  if not panels:
    raise ValueError("there is no group of heads or channels to draw.")
  layers = max(len(rates_LG) for _, rates_LG in panels)
  shares = [min(max(r.shape[1], 6), 48) for _, r in panels]
  figure = _figure(3.2 + 0.16 * sum(shares), max(3.2, 1.6 + 0.17 * layers))
  ratios = [x for share in shares for x in (share, 1.5)]
  axes = figure.subplots(
    1, len(ratios), squeeze=False, gridspec_kw={"width_ratios": ratios}
  )[0]
  for i, (name, rates_LG) in enumerate(panels):
    mean_L = rates_LG.mean(axis=1)
    groups, means = axes[2 * i], axes[2 * i + 1]
    _heat(groups, rates_LG)
    groups.set_title(f"{name}\n{100 * mean_L.mean():.1f}% kept", fontsize=10)
    groups.set_xlabel("group")
    _count_ticks(groups.xaxis, rates_LG.shape[1])
    _heat(means, mean_L[:, None])
    means.set_xticks([0], ["mean"], rotation=90, fontsize=8)
    means.set_yticks([])
    if i:
      groups.set_yticks([])
  axes[0].set_ylabel("layer")
  _count_ticks(axes[0].yaxis, layers)
  bar = figure.colorbar(axes[0].images[0], ax=list(axes), pad=0.02)
  bar.set_label("share of tokens that keep it")
  if title:
    figure.suptitle(title, fontsize=11)
  _save(figure, out_png)


def _count_ticks(axis: Any, n: int) -> None:
  """Ticks 0 to n - 1: all of a few, some of many."""
  if n <= 4:
    axis.set_ticks(range(n))
  else:
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def _heat(ax: Any, rates_LG: np.ndarray) -> Any:
  return ax.imshow(
    rates_LG,
    aspect="auto",
    interpolation="nearest",
    cmap="viridis",
    vmin=0.0,
    vmax=1.0,
  )


def perplexity_bars(
  summary: Mapping[str, Any], out_png: str | os.PathLike
) -> None:
  """Perplexity of the dense model, of random masks and after every stage.

  Args:
    summary: as in summary.json: `dense.ppl`, `random.ppl`, `dense_lora.ppl`
      (these two may be missing) and `stages[i]` with `name`, `ppl` and
      `sparsity.realised`.
    out_png: file to write.

  Raises:
    ValueError: no perplexity is finite and positive.
  """
  bars = [
    (name, summary[name].get("ppl"), summary[name].get("sparsity"))
    for name in ("dense", "random")
    if summary.get(name)
  ]
  bars += [
    (stage["name"], stage.get("ppl"), stage.get("sparsity"))
    for stage in summary.get("stages", ())
  ]
  lora = summary.get("dense_lora")
  if lora:
    bars.append(("dense + LoRA", lora.get("ppl"), None))
  bars = [b for b in bars if b[1] is not None and 0 < b[1] < np.inf]
  if not bars:
    raise ValueError("the summary holds no finite perplexity.")
  names = [
    name if not s else f"{name}\n{100 * s['realised']:.1f}% skipped"
    for name, _, s in bars
  ]
  values = [float(ppl) for _, ppl, _ in bars]
  figure = _figure(max(4.8, 1.5 * len(bars) + 1), 3.8)
  ax = figure.subplots()
  colors = [
    _GREY if n.startswith("dense") else _ORANGE if n == "random" else _BLUE
    for n, _, _ in bars
  ]
  drawn = ax.bar(range(len(bars)), values, color=colors, width=0.65)
  ax.bar_label(drawn, labels=[f"{v:.4g}" for v in values], padding=2)
  ax.set_xticks(range(len(bars)), names, fontsize=9)
  if max(values) > 10 * min(values):
    ax.set_yscale("log")
    # a bar on a log axis has no zero to start from
    ax.set_ylim(0.6 * min(values), 2.0 * max(values))
    ax.set_ylabel("perplexity (log scale)")
  else:
    ax.set_ylim(0, 1.15 * max(values))
    ax.set_ylabel("perplexity")
  ax.grid(axis="y", alpha=0.3)
  ax.set_axisbelow(True)
  _save(figure, out_png)
