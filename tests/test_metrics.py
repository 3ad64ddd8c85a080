"""metrics.jsonl, its resume, TensorBoard, the bar, tables, atomic files."""

import io
import json
import os
import stat
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from wide_jax import atomic, metrics


def fill(log, stage, steps, kind="train"):
  for step in steps:
    log.write(stage, step, kind, loss=float(step))


def steps(path):
  return [
    (r["stage"], r["step"], r["kind"]) for r in metrics.read_metrics(path)
  ]


def test_lines_are_flushed_and_plain(tmp_path):
  with metrics.MetricsLog(tmp_path) as log:
    log.write(
      "routers",
      1,
      "train",
      loss=jnp.float32(1.5),
      bad=float("nan"),
      layers=np.array([0.25, np.inf], np.float32),
      note="x",
    )
    (row,) = metrics.read_metrics(log.path)  # before close
  assert row == {
    "stage": "routers",
    "step": 1,
    "kind": "train",
    "loss": 1.5,
    "bad": None,
    "layers": [0.25, None],
    "note": "x",
  }


def test_a_fresh_run_forgets_an_earlier_one(tmp_path):
  with metrics.MetricsLog(tmp_path) as log:
    fill(log, "routers", [1, 2])
  with metrics.MetricsLog(tmp_path) as log:
    pass
  assert steps(log.path) == []
  assert not list((tmp_path / "tensorboard").glob("*/*"))


def test_resume_drops_what_will_be_repeated(tmp_path):
  with metrics.MetricsLog(tmp_path) as log:
    log.write("dense", 0, "eval", ppl=3.0)
    fill(log, "routers", [1, 2, 3])
    fill(log, "recover", [1, 2, 3])
    fill(log, "dense_lora", [1])
  with metrics.MetricsLog(tmp_path, resume=("recover", 2)) as log:
    pass
  kept = [("dense", 0, "eval")]
  kept += [("routers", s, "train") for s in (1, 2, 3)]
  kept += [("recover", s, "train") for s in (1, 2)]
  assert steps(log.path) == kept


def test_resumed_lines_equal_the_straight_run(tmp_path):
  def rest(log, start):
    for step in range(start + 1, 7):
      log.write("routers", step, "train", loss=1.0 / step)
      if step % 2 == 0:
        log.write("routers", step, "eval", ppl=2.0 / step)

  with metrics.MetricsLog(tmp_path / "straight") as log:
    rest(log, 0)
  with metrics.MetricsLog(tmp_path / "cut") as log:
    rest(log, 0)
  with metrics.MetricsLog(tmp_path / "cut", resume=("routers", 4)) as log:
    # the evaluation belonging to the checkpoint is made again
    log.write("routers", 4, "eval", ppl=2.0 / 4)
    rest(log, 4)
  straight = (tmp_path / "straight" / "metrics.jsonl").read_bytes()
  assert log.path.read_bytes() == straight


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_torn_last_line(tmp_path, cut):
  """kill -9 in the middle of a write leaves part of a line."""
  with metrics.MetricsLog(tmp_path) as log:
    fill(log, "routers", [1, 2])
  whole = log.path.read_bytes()
  log.path.write_bytes(whole + whole[:cut])
  assert [s for _, s, _ in steps(log.path)] == [1, 2]
  with metrics.MetricsLog(tmp_path, resume=("routers", 2)) as log:
    fill(log, "routers", [3])
  assert [s for _, s, _ in steps(log.path)] == [1, 2, 3]


def test_rubbish_in_the_middle_is_refused(tmp_path):
  path = tmp_path / "metrics.jsonl"
  good = '{"stage": "routers", "step": 1, "kind": "train"}\n'
  for bad in ("nonsense", "[]", '{"a": 1}', good.strip().replace("1", '"x"')):
    path.write_text(f"{good}{bad}\n{good}")
    with pytest.raises(ValueError, match="line 2"):
      metrics.read_metrics(path)


def test_killed_process_leaves_readable_lines(tmp_path):
  code = (
    "import os, signal, sys\n"
    "from wide_jax import metrics\n"
    "log = metrics.MetricsLog(sys.argv[1], tensorboard=False)\n"
    "for step in range(50): log.write('routers', step, 'train', loss=1.0)\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
  )
  done = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
  assert done.returncode == -9
  assert len(steps(tmp_path / "metrics.jsonl")) == 50


def test_unknown_stage(tmp_path):
  with pytest.raises(ValueError, match="'router' must be one of"):
    metrics.MetricsLog(tmp_path, resume=("router", 1))


def test_tensorboard_events(tmp_path):
  with metrics.MetricsLog(tmp_path) as log:
    fill(log, "routers", [1, 2])
    fill(log, "recover", [1])
  events = tmp_path / "tensorboard"
  assert sorted(p.name for p in events.iterdir()) == ["recover", "routers"]
  with metrics.MetricsLog(tmp_path, resume=("routers", 1)) as log:
    fill(log, "routers", [2])
  assert sorted(p.name for p in events.iterdir()) == ["routers"]
  assert len(list((events / "routers").iterdir())) == 2


def test_without_tensorboardx(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  with metrics.MetricsLog(tmp_path) as log:
    fill(log, "routers", [1])
  assert "tensorboardX is not installed" in capsys.readouterr().out
  assert steps(log.path) == [("routers", 1, "train")]
  assert not (tmp_path / "tensorboard").exists()


class Terminal(io.StringIO):
  def isatty(self):
    return True


def clock(monkeypatch, seconds):
  """Each call of the bar's clock takes the next of `seconds`."""
  ticks = iter(seconds)
  monkeypatch.setattr(metrics.time, "monotonic", lambda: next(ticks))


def test_bar_prints_lines_to_a_file(monkeypatch):
  out = io.StringIO()
  clock(monkeypatch, [100.0, 102.0, 104.0])
  with metrics.Bar("routers", 30, target=0.5, stream=out, every_s=0) as bar:
    bar.update(10, 1000, loss=3.25, realised=0.1)
    bar.update(20, 1000, loss=3.0, realised=0.456)
    bar.update(30, 1000, loss=2.5, realised=0.5)
  # 10 steps and 1,000 tokens in 2 s after the first call
  assert out.getvalue().splitlines() == [
    "routers 10/30  loss 3.2500  sparsity 10.0% of 50.0%",
    "routers 20/30  loss 3.0000  sparsity 45.6% of 50.0%  500 tokens/s  ETA 2s",
    "routers 30/30  loss 2.5000  sparsity 50.0% of 50.0%  500 tokens/s  ETA 0s",
  ]


def test_bar_keeps_a_log_file_short(monkeypatch):
  out = io.StringIO()
  clock(monkeypatch, [float(s) for s in range(100)])
  bar = metrics.Bar("routers", 100, stream=out, every_s=10.0)
  for step in range(1, 101):
    bar.update(step, 1)
  # at 0, 10, ... 90 seconds, and the last step
  assert len(out.getvalue().splitlines()) == 11


def test_bar_on_a_terminal():
  out = Terminal()
  with metrics.Bar("routers", 4, start=1, target=0.5, stream=out) as bar:
    for step in (2, 3, 4):
      bar.update(step, 10, loss=1.0, realised=0.5)
    speed = bar.tokens_per_s
  assert "\r" in out.getvalue()
  assert "4/4" in out.getvalue()
  assert speed > 0


@pytest.mark.parametrize(
  "seconds,text", [(0, "0s"), (75, "1m15s"), (3599.6, "1h00m"), (7500, "2h05m")]
)
def test_duration(seconds, text):
  assert metrics.duration(seconds) == text


def test_table():
  rows = [
    {"name": "dense", "ppl": np.float32(18.25), "steps": 1000},
    {"name": "random", "ppl": 31234.5, "realised": None},
  ]
  assert metrics.table(rows, ["name", "ppl", "realised", "steps"]) == (
    "name       ppl  realised  steps\n"
    "------  ------  --------  -----\n"
    "dense    18.25         -  1,000\n"
    "random  31,234         -      -"
  )


def test_write_json_replaces_in_one_step(tmp_path):
  path = tmp_path / "sub" / "summary.json"
  metrics.write_json(path, {"ppl": jnp.float32(2.0), "nan": np.nan, "t": (1,)})
  assert json.loads(path.read_text()) == {"ppl": 2.0, "nan": None, "t": [1]}
  plain = tmp_path / "plain"
  plain.touch()
  assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
  with pytest.raises(TypeError):
    metrics.write_json(path, {"x": object()})
  assert json.loads(path.read_text())["ppl"] == 2.0
  assert os.listdir(path.parent) == ["summary.json"]


def test_replacing_leaves_nothing_behind_on_failure(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("old")
  with pytest.raises(RuntimeError), atomic.replacing(path) as temporary:
    temporary.write_text("half")
    raise RuntimeError
  assert path.read_text() == "old"
  assert os.listdir(tmp_path) == ["a.txt"]
