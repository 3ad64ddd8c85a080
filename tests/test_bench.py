"""The kernel benchmark: masks, rules, table, command line."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, suite, table, timing
from wide_jax import bench
from wide_jax.benchmarks import contenders, masks, measure, report

ROW = "k_sparse/small/T1/random"
H200 = "nvidia_h200"


def learned_row(part="n_sparse", kind="learned", t=2048):
  names = {r.name: r for r in suite.rows()}
  return names[f"{part}/smol/T{t}/C128/{kind}"]


@pytest.fixture
def data(tmp_path) -> pathlib.Path:
  """A directory with masks of two of thirty layers' densities."""
  rng = np.random.default_rng(0)
  keep = rng.random((30, 8, 1024, 12), np.float32) < 0.5
  keep[3], keep[8] = True, rng.random((8, 1024, 12)) < 0.1
  attn = rng.random((30, 8, 1024, 3), np.float32) < 0.5
  (tmp_path / "masks").mkdir()
  np.savez(
    tmp_path / "masks" / "g128_regrouped.npz",
    wt2_ffn=np.packbits(keep, axis=-1),
    wt2_attn=np.packbits(attn, axis=-1),
    wt2_nf=12,
    wt2_na=3,
  )
  return tmp_path


# --- masks -------------------------------------------------------------------


def test_learned_masks_and_their_random_twins(data):
  row = learned_row()
  learned = masks.of(row, 1, data)
  assert len(learned) == len(masks.LAYERS)
  assert learned[0].shape == (2, 1024, 12) and learned[0].all()
  assert abs(learned[1].mean() - 0.1) < 0.01
  twins = masks.of(learned_row(kind="matched"), 1, data)
  for a, b in zip(learned, twins, strict=True):
    assert abs(a.mean() - b.mean()) < 0.01
  assert (learned[1] != twins[1]).any()
  # the directory of masks itself will do
  assert len(masks.of(row, 1, data / "masks")) == len(masks.LAYERS)


def test_masks_that_do_not_fit_are_refused(data):
  with pytest.raises(ValueError, match="needs --data"):
    masks.of(learned_row(), 1, None)
  with pytest.raises(ValueError, match="has no masks/g128_regrouped.npz"):
    masks.of(learned_row(), 1, data / "nowhere")
  path = data / "masks" / "g128_regrouped.npz"
  np.savez(path, wt2_ffn=np.zeros((30, 8, 1024, 1), np.uint8), wt2_nf=7)
  with pytest.raises(ValueError, match="do not fit"):
    masks.of(learned_row(), 1, data)
  path.write_bytes(b"PK\x03\x04 cut off")
  with pytest.raises(ValueError, match="no packed masks"):
    masks.check([learned_row()], data)


def test_random_masks():
  p = suite.matmul_problem("ffn", 4096, 128, 0.25)
  assert abs(suite.random_mask(p, 0).mean() - 0.25) < 0.01
  shared = suite.random_mask(p, 0, "shared")
  assert (shared == shared[:, :1]).all() and shared.mean() == 0.25
  one = suite.matmul_problem("ffn", 1, 128, 0.5)
  assert suite.random_mask(one, 3).sum() == 56


# --- contenders --------------------------------------------------------------


def test_everybody_the_issue_names_takes_part():
  names = {row.name: row.problem for row in suite.rows()}
  with dispatch.use_device(H200):

    def who(name):
      return {(c.name, c.role) for c in contenders.of(names[name])}

    matmul = who("n_sparse/T4096/C512/d0.5")
    assert {("xla", "dense"), ("twin", "twin"), ("auto", "auto")} <= matmul
    assert {("triton", "kernel"), ("triton_at_1", "dense")} <= matmul
    assert ("ragged_batched", "library") in matmul
    prefill = who("prefill/S16384/d0.5")
    assert ("cudnn", "dense") in prefill
    assert ("xla", "dense") not in prefill  # 32 GiB of logits
    decode = who("decode/B16/S65536/d0.5")
    assert {("cudnn_packed", "dense"), ("twin_cudnn", "twin")} <= decode


@pytest.mark.parametrize("index", (1, 8, 9, 10))
def test_dense_contenders_agree(index):
  """Packed decode and turned weights compute the same as the reference."""
  row = suite.small_rows()[index]
  p = row.problem
  everything = np.ones((p.rows, p.length, p.groups), bool)
  args = (*suite.arrays(p, 0), suite.routed(p, everything))
  want = suite.exact(p, args, everything)
  dense = [c for c in contenders.of(p) if c.role == "dense"]
  if p.op == "attention_decode":
    assert {c.name for c in dense} == {"xla", "xla_packed"}
  for contender in dense:
    out = jax.jit(contender.fn)(*contender.inputs(args))
    error = suite.relative_error(suite.compared(p, out), want)
    assert error < 1e-5, contender.name


def test_torch_computes_the_same():
  pytest.importorskip("torch")
  from wide_jax.benchmarks import torch_runners

  for row in suite.small_rows()[2::3]:
    p = row.problem
    everything = np.ones((p.rows, p.length, p.groups), bool)
    args = (*suite.arrays(p, 0), suite.routed(p, everything))
    want = suite.exact(p, args, everything)
    for name, (fn, _) in torch_runners.ops(p).items():
      out = fn(*torch_runners.tensors(args[:-1]))
      got = suite.compared(p, jnp.asarray(out.contiguous().numpy()))
      assert suite.relative_error(got, want) < 1e-5, (row.name, name)


def test_the_routers_decisions_are_the_rows_masks():
  p = suite.matmul_problem(
    "ffn", 4, 32, 0.5, d=64, f=128, shared=True, dtype="float32"
  )
  assert contenders.has_routed(p)
  mask = suite.random_mask(p, 0, "shared")
  args = (*suite.arrays(p, 0), suite.routed(p, mask))
  routed = contenders.routed_ffn(p)
  got = routed.fn(*routed.inputs(args))
  np.testing.assert_allclose(got, suite.call(p)(*args), atol=1e-5)


def in_line_problems():
  sizes: dict[str, Any] = {"d": 64, "f": 128}
  return [
    *(
      suite.matmul_problem(part, 70, 32, 0.5, **sizes)
      for part in ("n_sparse", "k_sparse", "ffn")
    ),
    suite.prefill_problem(70, 0.5, heads=4, kv_heads=2, dim=16, groups=2),
  ]


@pytest.mark.parametrize("p", in_line_problems(), ids=lambda p: p.op)
def test_programs_in_line_do_what_auto_does(p):
  """The router's own decisions change no mask."""
  mask = suite.random_mask(p, 0)
  args = (*suite.arrays(p, 0), suite.routed(p, mask))
  args = suite.poisoned(p, args, mask)
  want = jax.jit(suite.call(p))(*args)
  found = contenders.in_line(p)
  assert [c.role for c in found] == ["planned", "routed"]
  for contender in found:
    got = jax.jit(contender.fn)(*contender.inputs(args))
    np.testing.assert_array_equal(got, want, err_msg=contender.name)


def test_decode_has_nothing_in_line():
  assert not contenders.in_line(suite.matmul_problem("ffn", 64, 128, 0.5))
  assert not contenders.in_line(suite.decode_problem(16, 64, 0.5))


def test_every_run_in_line_makes_its_own_plan(monkeypatch):
  """Runs on the same masks and router would otherwise share them."""

  def op(x, w, made):
    return x + made.class_order_SM.sum()

  monkeypatch.setattr(suite, "call", lambda problem: op)
  p = in_line_problems()[0]
  args = (*suite.arrays(p, 0), suite.routed(p, suite.random_mask(p, 0)))
  for contender in contenders.in_line(p):
    inputs = contender.inputs(args)
    text = [
      jax.jit(timing.program(contender.fn))
      .lower(*[inputs] * runs)
      .compile()
      .as_text()
      for runs in (1, 3)
    ]
    one, three = (t.count(" sort(") for t in text)
    assert one and three == 3 * one


# --- what may be said --------------------------------------------------------


class Named:
  def __init__(self, name):
    self.name = name


def entries(**roles):
  return [measure._Entry(None, Named(n), role) for n, role in roles.items()]


def compared(monkeypatch, times, backend="triton", measures="kernels"):
  choice = dispatch.Choice(backend, why="because")
  monkeypatch.setattr(measure.dispatch, "choose", lambda p: choice)
  who = entries(xla="dense", twin="twin", auto="auto", triton="kernel")
  out = {
    "measures": measures,
    "router_us": 1e6,
    "plan_us": 2e6,
    "router_and_plan_share": 1 / 3,
  }
  return measure._compared(
    suite.small_rows()[0], who, {k: np.array(v) for k, v in times.items()}, out
  )


TIMES = {
  "xla": [4.0, 4.4, 4.0, 4.0, 4.0],
  "twin": [4.2] * 5,
  "auto": [2.0, 2.2, 2.0, 2.0, 2.0],
  "triton": [2.0] * 5,
}


def test_ratios_are_over_the_best_dense_and_the_twin(monkeypatch):
  got = compared(monkeypatch, TIMES)
  assert got["dense"] == "xla" and got["twin"] == "twin"
  np.testing.assert_allclose(got["speedup"], 2)
  np.testing.assert_allclose(got["measured_saving"], 0.5)
  # A third of three seconds on top: 4 / 3.
  np.testing.assert_allclose(got["speedup_included"], 4 / 3, rtol=0.01)
  assert got["speedup_low"] <= got["speedup"] <= got["speedup_high"]
  assert got["auto_ok"]


IN_LINE = TIMES | {
  "planned": [2.1, 2.4, 2.1, 2.1, 2.0],
  "routed": [2.4, 2.5, 2.5, 2.4, 2.4],
}


def in_line_row(monkeypatch, part, times, backend="triton"):
  choice = dispatch.Choice(backend, why="because")
  monkeypatch.setattr(measure.dispatch, "choose", lambda p: choice)
  roles = {"xla": "dense", "triton": "kernel"}
  who = entries(**{name: roles.get(name, name) for name in times})
  p = suite.matmul_problem(part, 4096, 128, 0.5)
  row = suite.Row(name=f"{part}/T4096", problem=p)
  out = {"measures": "kernels"}
  out |= measure._router_and_plan(row, who, times, measure.Settings(), {})
  return out | measure._compared(row, who, times, out)


def test_router_and_plan_are_paired_differences(monkeypatch):
  got = in_line_row(monkeypatch, "n_sparse", IN_LINE)
  # Of differences, not of medians; and what is negative stays so.
  np.testing.assert_allclose(got["plan_us"], 0.1e6)
  np.testing.assert_allclose(got["router_us"], 0.3e6)
  shorter = IN_LINE | {"planned": [1.9] * 5}
  assert in_line_row(monkeypatch, "n_sparse", shorter)["plan_us"] < 0
  # A third of what the routed program takes longer.
  own = np.array(IN_LINE["auto"])
  own = own + (np.array(IN_LINE["routed"]) - own) / 3
  want = np.exp(np.log(np.array(IN_LINE["xla"]) / own).mean())
  np.testing.assert_allclose(got["speedup_included"], want)
  np.testing.assert_allclose(got["kernel_speedup_included"], want, rtol=0.02)
  assert got["routed_us"] is None and "routed_speedup" not in got


def test_a_gated_ffn_with_its_router_is_measured_as_one(monkeypatch):
  got = in_line_row(monkeypatch, "ffn", IN_LINE)
  ratios = np.array(IN_LINE["xla"]) / np.array(IN_LINE["routed"])
  want = np.exp(np.log(ratios).mean())
  np.testing.assert_allclose(got["routed_speedup"], want)
  np.testing.assert_allclose(got["speedup_included"], want)
  np.testing.assert_allclose(got["routed_us"], 2.4e6)


def test_a_plan_of_another_backend_says_nothing_of_a_kernel(monkeypatch):
  got = in_line_row(monkeypatch, "ffn", IN_LINE, backend="dense")
  assert "kernel_speedup" in got and "kernel_speedup_included" not in got
  assert "speedup_included" not in got and "routed_speedup" not in got


def test_without_a_routed_program_nothing_is_included(monkeypatch):
  times = {k: v for k, v in IN_LINE.items() if k != "routed"}
  got = in_line_row(monkeypatch, "n_sparse", times)
  assert got["router_us"] is None and got["plan_us"] is not None
  assert "speedup" in got and "speedup_included" not in got


def test_a_masked_path_has_no_speedup(monkeypatch):
  got = compared(monkeypatch, TIMES, backend="dense")
  assert "speedup" not in got and "measured_saving" not in got
  assert "auto_vs_twin" in got and "kernel_speedup" in got


def test_a_cpu_or_interpreted_run_has_no_ratio_at_all(monkeypatch):
  got = compared(monkeypatch, TIMES, measures="reference")
  assert not [k for k in got if "speedup" in k or "vs" in k or "saving" in k]


def test_auto_fails_when_its_whole_interval_is_below(monkeypatch):
  slow = TIMES | {"auto": [4.4, 4.5, 4.4, 4.5, 4.4]}
  assert not compared(monkeypatch, slow)["auto_ok"]
  unsure = TIMES | {"auto": [4.0, 4.6, 4.0, 4.6, 4.6]}
  assert compared(monkeypatch, unsure)["auto_ok"]


def told(**changes):
  base = {
    "name": "n_sparse/T4096/C128/d0.5",
    "part": "n_sparse",
    "mask": "random",
    "tokens": 4096,
    "group_size": 128,
    "shapes": {},
    "density": 0.5,
    "expected_density": 0.5,
    "measures": "kernels",
    "device": "NVIDIA H200",
    "jax": "0.11.2",
    "dtype": "bfloat16",
    "dense": "xla",
    "dense_us": 640.0,
    "auto_us": 400.0,
    "auto_backend": "triton",
    "kernel_us": 400.0,
    "router_us": 10.0,
    "plan_us": 5.0,
    "counted_saving": 0.5,
    "measured_saving": 0.375,
    "roofline_fraction": 0.6,
    "contenders": {"auto": {"us": 400.0}},
  }
  for key, value in (("speedup", 1.6), ("auto_vs_twin", 1.65)):
    base |= {key: value, f"{key}_low": value - 0.1, f"{key}_high": value + 0.1}
  base["kernel_speedup"] = base["kernel_speedup_low"] = 1.6
  base["kernel_speedup_high"] = 1.6
  return base | {"auto_ok": True} | changes


def test_the_table_states_both_savings_and_the_verdict():
  text = report.table([told(), told(name="b", auto_ok=False)])
  assert "1.60x [1.50, 1.70]" in text
  assert "50%" in text and "38%" in text  # counted, measured
  assert "ok 1.650" in text and "FAIL 1.650" in text
  assert "failed: oom" in report.table([{"name": "c", "failed": "oom"}])


def test_failures_are_named():
  wrong = {"auto": {"us": 1.0}, "triton": {"failed": "wrong: 0.3"}}
  refused = {"auto": {"us": 1.0}, "xla": {"failed": "out of memory"}}
  rows = [
    told(name="a"),
    told(name="b", auto_ok=False),
    told(name="c", contenders=wrong),
    told(name="d", contenders=refused),
    {"name": "e", "failed": "out of memory"},
  ]
  got = report.failures(rows)
  assert [text.split(":")[0] for text in got] == ["b", "c", "e"]


def test_whether_emptier_is_faster_is_said():
  rows = [
    told(name=f"d{d}", expected_density=d, kernel_us=us)
    for d, us in ((0.0, 50.0), (0.5, 400.0), (1.0, 700.0))
  ]
  assert report.emptier_is_faster(rows) == [
    "d0.0: with nothing kept the kernel is faster than with all "
    "(50 us, 700 us)."
  ]
  rows[0]["kernel_us"] = 800.0
  assert "NOT faster" in report.emptier_is_faster(rows)[0]


def test_learned_rows_stand_beside_their_twins():
  rows = [
    told(name="ffn/wide/T1024/C256/learned", kernel_us=50.0),
    told(name="ffn/wide/T1024/C256/matched", kernel_us=60.0),
    told(name="ffn/wide/T2048/C256/learned", kernel_us=None),
  ]
  (text,) = report.learned_against_random(rows)
  assert "50 us" in text and "60 us" in text and "1.20x" in text


def test_figures(tmp_path):
  path = tmp_path / "a.png"
  report.figure([told(tokens=t) for t in (256, 4096)], path)
  assert path.read_bytes().startswith(b"\x89PNG")
  report.figure([told(measures="reference")], path)
  with pytest.raises(ValueError, match="no measured row"):
    report.figure([{"name": "e", "failed": "x"}], path)


# --- the command line --------------------------------------------------------


def test_a_cpu_measures_the_reference_only_and_resumes(tmp_path, capsys):
  out = tmp_path / "out.json"
  argv = ["--suite", "kernels", "--json", str(out), "--rows", ROW]
  argv += ["--repeats", "5", "--figure", str(tmp_path / "out.png")]
  assert bench.main(argv) == 0
  text = capsys.readouterr().out
  assert "measures the reference only" in text and "no speed-up" in text
  assert "1 rows to measure" in text
  stored = json.loads(out.read_text())
  (row,) = stored["rows"]
  assert row["measures"] == "reference" and row["auto_backend"] == "reference"
  assert row["jax"] and row["device"] == "cpu" and row["mask"] == "random"
  assert not [k for k in row if "speedup" in k or "measured_saving" in k]
  assert row["contenders"]["auto"]["us"] > 0
  assert (tmp_path / "out.png").stat().st_size > 1000
  # The second call measures nothing and changes nothing.
  before = out.read_bytes()
  assert bench.main(argv) == 0
  assert "0 rows to measure, 1 done" in capsys.readouterr().out
  assert out.read_bytes() == before


@pytest.mark.parametrize(
  "argv,says",
  [
    (["--suite", "e2e", "--json", "x"], "invalid choice"),
    (["--suite", "kernels"], "--json"),
    (["--suite", "kernels", "--json", "x", "--rows", "zzz"], "no row fits"),
    (["--suite", "kernels", "--json", "x", "--repeats", "4"], "at least 5"),
    (["--suite", "kernels", "--json", "x", "--budget-s", "0"], "above 0"),
    (["--suite", "kernels", "--json", "x", "--data", "no/dir"], "no/dir"),
    (["--suite", "kernels", "--json", "x", "--figure", "a.pdf"], ".png"),
    (["--suite", "kernels", "--json", "x", "--device", "gpu"], "finds none"),
    (["--suite", "kernels", "--json", "x", "--jason", "y"], "unrecognized"),
  ],
)
def test_bad_flags_are_one_sentence(argv, says, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert bench.main(argv) == 2
  err = capsys.readouterr().err
  assert says in err and err.count("\n") == 1
  assert not list(tmp_path.iterdir())


def test_another_file_is_not_overwritten(tmp_path, capsys):
  path = tmp_path / "notes.json"
  for text in ("my notes", '{"rows": 3}', "[]"):
    path.write_text(text)
    assert bench.main(["--suite", "kernels", "--json", str(path)]) == 2
    assert "name another" in capsys.readouterr().err
    assert path.read_text() == text


def test_a_failed_row_is_kept_and_tried_again(tmp_path, monkeypatch, capsys):
  def broken(*args):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\ntrace")

  monkeypatch.setattr(measure, "measure", broken)
  monkeypatch.setattr(
    "pallas_kernels.timing.ceilings",
    lambda **_: {"matmul_tflops": 1.0, "copy_tb_s": 1.0},
  )
  out = tmp_path / "out.json"
  argv = ["--suite", "kernels", "--json", str(out), "--rows", ROW]
  for _ in range(2):
    assert bench.main(argv) == 1
    text = capsys.readouterr().out
    assert "1 rows to measure" in text and "FAIL" in text
    assert "out of memory" in text and "trace" not in text
  assert bench.main([*argv, "--budget-s", "1e-9"]) == 1
  assert "out of time after 0 of 1 rows" in capsys.readouterr().out


def test_neither_absl_nor_ml_collections_is_needed(repo):
  code = (
    "import sys\n"
    "for name in ('absl', 'ml_collections', 'torch', 'flax'):\n"
    "  sys.modules[name] = None\n"
    "from wide_jax import bench\n"
    "from pallas_kernels import tune\n"
    "argv = ['--suite', 'kernels', '--json', 'x', '--list']\n"
    "raise SystemExit(bench.main(argv))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    cwd=repo,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert ROW in done.stdout


def test_the_roofline_takes_the_larger_peak(monkeypatch):
  measured = {"matmul_tflops": 711.0, "copy_tb_s": 4.3}
  assert measure.roofline(measured) == {"tflops": 711.0, "tb_s": 4.3}
  with dispatch.use_device("NVIDIA H200"):
    assert measure.roofline(measured) == {"tflops": 989.0, "tb_s": 4.8}
  assert table.FORMAT == 1
