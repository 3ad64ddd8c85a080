"""Tuning, timing, and the suite of problems they share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_fixtures import (
  H200,
  FakeTiles,
  inputs,
  problem,
  row,
  with_fake_triton,
  with_tuned,
)

from pallas_kernels import (
  counts,
  dispatch,
  suite,
  table,
  timing,
  tune,
)

fake_triton = pytest.fixture(with_fake_triton)
tuned = pytest.fixture(with_tuned)


# --- timing ------------------------------------------------------------------


class Clock:
  """A contender whose samples are given beforehand."""

  def __init__(self, name, log):
    self.name, self.log = name, log

  def sample(self):
    self.log.append(self.name)
    return float(len(self.log))


def test_turns_are_interleaved_and_rotate():
  log = []
  times = timing.interleave([Clock(n, log) for n in "abc"], 3)
  assert "".join(log) == "abc" + "abc" + "bca" + "cab"
  assert [len(v) for v in times.values()] == [3, 3, 3]


def test_ratios_are_paired():
  base = np.array([1.0, 2.0, 4.0, 8.0, 16.0])  # the clock drifts
  ratio, low, high = timing.ratio_interval(base, base / 2)
  np.testing.assert_allclose([ratio, low, high], 2.0)
  ratio, low, high = timing.ratio_interval(base, base * [1, 1.1, 0.9, 1, 1])
  assert low < ratio < high and low < 1 < high
  with pytest.raises(ValueError, match="cannot be paired"):
    timing.ratio_interval([1.0], [1.0, 2.0])


def test_a_program_runs_every_set_and_keeps_every_result():
  sets = [(jnp.full((4, 4), float(i)), jnp.eye(4)) for i in range(3)]
  runner = timing.Runner("matmul", jnp.matmul, sets, unroll=5).compile()
  out = runner.results()
  assert [float(y[0, 0]) for y in out] == [0, 1, 2, 0, 1]
  text = runner._compiled.as_text()
  # Repeats with equal arguments are not merged.
  assert text.count("dot(") + text.count("custom-call(") >= 5
  other = (jnp.full((4, 4), 9.0), jnp.eye(4))
  assert float(runner.run_on(other)[0, 0]) == 9
  assert runner.sample(1e-4) > 0


def test_sets_outgrow_the_cache_and_programs_the_dispatch():
  assert timing.sets_for(1e9) == 1
  assert timing.sets_for(100e6) == 2
  assert timing.sets_for(1) == 16
  assert timing.unroll_for(1.0, 3) == 3
  assert timing.unroll_for(30e-6, 1) == 5


# --- tuning ------------------------------------------------------------------


def test_wrong_candidates_are_dropped_before_they_are_timed():
  p, mask, _ = inputs("k_sparse", 9, "random", "float32")
  args = (*suite.arrays(p, 1), suite.routed(p, mask))
  right = suite.call(p, "dense")
  fns = {
    "right": right,
    "off": lambda *a: right(*a) * 1.01,
    "reads what it must not": lambda x, w, plan: x @ w,
    "raises": lambda *a: 1 / 0,
  }
  found = [
    tune.Candidate("dense" if name == "right" else "triton", None, runner)
    for name, fn in fns.items()
    for runner in [timing.Runner(name, fn, [args])]
  ]
  tune.compile_all(found, 2)
  tune.check_all(suite.Row(name="a", problem=p), found, args, mask)
  dropped = {c.runner.name: c.dropped for c in found}
  assert dropped["right"] == ""
  assert "relative error 0.01" in dropped["off"]
  assert "relative error inf" in dropped["reads what it must not"]
  assert "division" in dropped["raises"]


def test_a_row_is_measured_against_its_twin():
  small = suite.small_rows()[3]
  empty = table.Table(device="cpu")
  options = tune.Options(repeats=2, workers=1)
  measured = tune.measure(small, empty, options)
  assert measured.problem == small.problem
  assert {r.backend for r in measured.results} == {"dense", "ragged"}
  assert {"triton", "mosaic_gpu", "mosaic_tpu"} <= dict(measured.refused).keys()
  assert table.row_from_json(table.row_to_json(measured)) == measured


def test_known_winners_are_tried_first(fake_triton):
  measured = table.Table(device=H200, rows=(row(problem(64), 1.4, size=4),))
  with dispatch.use_device(H200):
    tiles = tune.tile_candidates(problem(), "triton", measured, 2)
    assert tiles == [FakeTiles(size=4), FakeTiles(size=1)]


def test_tuning_writes_each_row_resumes_and_stops_in_time(
  fake_triton, tuned, monkeypatch, capsys
):
  seen = []

  def measure(r, measured, options):
    seen.append(r.name)
    if r.name == "bad":
      raise RuntimeError("no dense op ran\nand more")
    result = row(r.problem, 1.2)
    dense_result = dataclasses.replace(
      result.results[0],
      backend="dense",
      tiles=None,
      ratio=1.0,
      version=table.VERSIONS["dense"],
    )
    # As the real one: every backend has a result or a reason.
    others = sorted(set(dispatch.BACKENDS) - {"dense", "triton"})
    return dataclasses.replace(
      result,
      results=(*result.results, dense_result),
      refused=tuple((name, "wrong") for name in others),
      jax=jax.__version__,
    )

  monkeypatch.setattr(tune, "measure", measure)
  rows = [
    suite.Row(name=name, problem=problem(tokens))
    for name, tokens in (("a", 16), ("bad", 64), ("b", 256), ("twin of b", 256))
  ]
  tune_rows = functools.partial(
    tune._tune, rows, tuned, H200, tune.Options(), again=False
  )
  with dispatch.use_device(H200):
    assert tune_rows(budget_s=1e9) == 0
    assert seen == ["a", "bad", "b"]
    assert len(table.read(tuned, H200).rows) == 2
    assert tune_rows(budget_s=1e9) == 0
    assert seen == ["a", "bad", "b", "bad"]
    assert tune_rows(budget_s=-1.0) == 0
    # What a backend refused under another jax is asked again.
    kept = table.read(tuned, H200).rows[0]
    assert tune._complete(kept, tune.Options())
    older = dataclasses.replace(kept, jax="0.9.0")
    assert not tune._complete(older, tune.Options())
  out = capsys.readouterr().out
  assert "no dense op ran" in out and "and more" not in out
  assert "out of time after 0 of 1 rows" in out


@pytest.mark.parametrize(
  "argv,says",
  [
    ([], "nothing to measure"),
    (["--rows", "nothing/like/it"], "no row fits"),
    (["--backends", "cuda"], "no ['cuda']"),
    (["--repeats", "0"], "must be at least 1"),
    (["--nonsense"], "unrecognized"),
  ],
)
def test_tune_refuses_in_one_sentence(argv, says, capsys):
  assert tune.main(argv) == 2
  err = capsys.readouterr().err
  assert says in err
  assert err.count("\n") == 1


def test_dry_run_lists_candidates_for_a_device_that_is_not_here(capsys):
  argv = ["--dry-run", "--device", "NVIDIA H200", "--rows", "ffn/T1/C128/d0.5"]
  assert tune.main(argv) == 0
  out = capsys.readouterr().out
  assert out.startswith("ffn/T1/C128/d0.5\n  dense: FfnTiles(")
  assert "triton" in out


# --- the suite ---------------------------------------------------------------


def test_rows_have_names_of_their_own_and_cover_the_issue():
  rows = suite.rows()
  assert len({r.name for r in rows}) == len(rows)
  names = {r.name for r in rows}
  for t in (1, 4, 16, 64, 256, 1024, 4096, 16384):
    for c in (32, 128, 256, 512, 1024):
      for d in ("1", "0.5", "0.25"):
        for part in ("n_sparse", "k_sparse", "ffn"):
          assert f"{part}/T{t}/C{c}/d{d}" in names
  assert {"ffn/T4/C128/d0.5/shared", "ffn/T16/C128/d0.5/shared"} <= names
  for r in rows:
    assert r.problem.group_size * r.problem.groups in (
      r.problem.n,
      r.problem.k,
      r.problem.heads,
      r.problem.groups,
    )


@pytest.mark.parametrize("part", ["n_sparse", "k_sparse", "ffn"])
def test_counts_of_matmuls(part):
  p, mask, _ = inputs(part, 9, "random", "bfloat16")
  pairs, active = int(mask.sum()), int(mask.any((0, 1)).sum())
  n = 3 if part == "ffn" else 1
  got = counts.needed(p, mask)
  assert got.flops == 2 * n * pairs * 24 * 40
  activations = {
    "n_sparse": 9 * 40 + 9 * 96,
    "k_sparse": pairs * 24 + 9 * 40,
    "ffn": 2 * 9 * 40,
  }[part]
  assert got.bytes == 2 * (n * active * 24 * 40 + activations)


def test_counts_of_attention():
  p = suite.prefill_problem(6, 0.5, heads=4, kv_heads=2, dim=8, groups=2)
  mask = suite.random_mask(p, 1)
  pairs = sum(2 * (t + 1) for t in range(6) for g in range(2) if mask[0, t, g])
  assert counts.needed(p, mask).flops == 4 * 8 * pairs
  p = suite.decode_problem(2, 6, 0.5, heads=4, kv_heads=2, dim=8, groups=2)
  mask = np.array([[[True, False]], [[False, False]]])
  got = counts.needed(p, mask)
  assert got.flops == 4 * 8 * 6 * 2
  # one kv head's keys and values, two query heads, all of the output
  assert got.bytes == 2 * (2 * 6 * 8 + 2 * 8 + 2 * 4 * 8)


def test_results_that_were_not_asked_for_stay(tuned):
  both = row(problem(), 1.5)
  table.merge(tuned, H200, [both])
  name = both.results[0].backend
  alone = dataclasses.replace(
    both,
    results=(),
    refused=((name, table.NOT_ASKED), ("mosaic_tpu", "another machine")),
  )
  (kept,) = table.merge(tuned, H200, [alone]).rows
  assert kept.results == both.results
  assert dict(kept.refused) == {"mosaic_tpu": "another machine"}
