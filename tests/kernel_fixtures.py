"""A backend with tiles to choose from, tables, and small inputs.

`with_...` are the bodies of fixtures: a test file makes them its own.
"""

import dataclasses
import types

import numpy as np

from pallas_kernels import (
  dense,
  dispatch,
  suite,
  table,
)
from pallas_kernels.problem import Op, Problem

H200 = "nvidia_h200"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeTiles:
  size: int = 1
  inner: "FakeTiles | None" = None


def with_fake_triton(monkeypatch):
  """A backend that computes with the reference and has tiles to choose."""

  def run(problem, tiles, interpret, x, w, plan, layer):
    return dense.OPS["matmul_n_sparse"].run(
      problem, None, interpret, x, w, plan, layer
    )

  op = Op(
    run=run,
    why_not=lambda p: "float16 is not for me" if p.dtype == "float16" else None,
    default=lambda p: FakeTiles(),
    candidates=lambda p: [FakeTiles(size=s) for s in (1, 2, 4)],
  )
  real = dispatch.backend

  def backend(name):
    if name == "triton":
      return types.SimpleNamespace(OPS={"matmul_n_sparse": op})
    return real(name)

  monkeypatch.setattr(dispatch, "backend", backend)
  clear()
  yield
  clear()


def clear():
  table.forget()
  dispatch._auto.cache_clear()
  dispatch._named.cache_clear()


def with_tuned(monkeypatch, tmp_path):
  """A directory of tables that comes before the packaged ones."""
  monkeypatch.setenv(table.DIRECTORY_VARIABLE, str(tmp_path))
  clear()
  yield tmp_path / f"{H200}.json"
  clear()


def problem(tokens=1024, density=0.5, **changes) -> Problem:
  base = suite.matmul_problem("n_sparse", tokens, 128, density, d=512, f=1024)
  return dataclasses.replace(base, **changes)


def row(of: Problem, ratio: float, size: int = 2, **changes) -> table.Row:
  result = table.Result(
    backend="triton",
    tiles=table.tiles_to_json(FakeTiles(size=size)),
    us=100 / ratio,
    ratio=ratio,
    low=ratio * 0.99,
    high=ratio * 1.01,
    error=1e-3,
    version=changes.pop("version", table.VERSIONS["triton"]),
  )
  return table.Row(problem=of, twin_us=100.0, results=(result,), jax="0.11.2")


def chosen(of: Problem) -> dispatch.Choice:
  with dispatch.use_device("NVIDIA H200"):
    return dispatch.choose(of)


def inputs(part: str, tokens: int, keep: str, dtype: str, groups: int = 4):
  c = 24  # no power of two
  p = suite.matmul_problem(
    part, tokens, c, 0.5, d=40, f=groups * c, dtype=dtype
  )
  mask = {
    "random": suite.random_mask(p, 3),
    "all": np.ones((1, tokens, groups), bool),
    "none": np.zeros((1, tokens, groups), bool),
  }[keep]
  args = (*suite.arrays(p, 1), suite.routed(p, mask))
  return p, mask, suite.poisoned(p, args, mask)
