"""Killed at any moment, a run goes on and ends where the straight run ends."""

import contextlib
import pathlib
import resource
import signal
import time

import numpy as np
import pytest
import tiny_runs

from wide_jax import cli, train
from wide_jax.stages import Stage

STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
  with tiny_runs.quick_compiling(tmp_path_factory) as folder:
    yield folder


@pytest.fixture(scope="module")
def straight(programs, tmp_path_factory) -> tiny_runs.Finished:
  return tiny_runs.run(tmp_path_factory.mktemp("straight"))


def numbers(value) -> list[float]:
  """All numbers in a JSON value, in the order of the keys."""
  if isinstance(value, dict):
    return [x for k in sorted(value) for x in numbers(value[k])]
  if isinstance(value, list):
    return [x for v in value for x in numbers(v)]
  return [float(value)] if isinstance(value, int | float) else []


def keys(rows: list[dict]) -> list[tuple]:
  return [(r["stage"], r["step"], r["kind"]) for r in rows]


def assert_same_run(workdir, straight, tolerance: float) -> None:
  """The same lines, each once, and the same results."""
  for kind in ("train", "eval", "final"):
    want, got = straight.lines(kind), tiny_runs.read_lines(workdir, kind)
    assert keys(got) == keys(want), kind
    for a, b in zip(got, want, strict=True):
      assert a.keys() == b.keys()
      np.testing.assert_allclose(
        numbers(a), numbers(b), rtol=tolerance, atol=tolerance, err_msg=str(b)
      )
  summary = tiny_runs.read_summary(workdir)
  for part in ("dense", "random"):
    np.testing.assert_allclose(
      numbers(summary[part]), numbers(straight.summary[part]), rtol=tolerance
    )
  for a, b in zip(summary["stages"], straight.summary["stages"], strict=True):
    for name in ("ppl", "nll", "sparsity", "windows", "steps"):
      np.testing.assert_allclose(
        numbers(a[name]), numbers(b[name]), rtol=tolerance, err_msg=name
      )
    assert a["tokens_per_s"] > 0


def message(capsys) -> str:
  """The one line that a refused run leaves on standard error."""
  lines = capsys.readouterr().err.strip().splitlines()
  errors = [line for line in lines if line.startswith("error: ")]
  assert len(errors) == 1, lines
  return errors[0]


# --- kill -9 -----------------------------------------------------------------


class Killed:
  """A run in its own process that is to be killed at a moment."""

  def __init__(self, arguments, programs, workdir: pathlib.Path):
    self.workdir = workdir
    self.process = tiny_runs.start(arguments, programs)

  def wait_for(self, reached) -> None:
    while not reached(self.workdir):
      if self.process.poll() is not None:
        out, err = self.process.communicate()
        pytest.fail(f"ended before it could be killed:\n{out}\n{err}")
      time.sleep(0.002)

  def kill(self) -> None:
    self.process.send_signal(signal.SIGKILL)
    self.process.communicate()
    assert self.process.returncode == -signal.SIGKILL


def trained(stage: str, step: int):
  """Whether the line of this step is written."""

  def reached(workdir) -> bool:
    if not (workdir / "metrics.jsonl").exists():
      return False
    rows = tiny_runs.read_lines(workdir, "train", stage)
    return bool(rows) and rows[-1]["step"] >= step

  return reached


def writing_a_checkpoint(workdir) -> bool:
  return any(workdir.glob("checkpoints/recover/*orbax-checkpoint-tmp*"))


def test_killed_again_and_again(straight, programs, tmp_path, capsys):
  """In stage 1, between the stages, in stage 2 and while saving (F2)."""
  rng = np.random.default_rng(17)
  workdir = tmp_path / "run"
  arguments = tiny_runs.argv(workdir)
  moments = (
    (trained("routers", int(rng.integers(3, 12))), 0.1),
    (trained("routers", STEPS), 1.5),  # evaluation, export, start of stage 2
    (trained("recover", int(rng.integers(2, 10))), 0.2),
    (writing_a_checkpoint, 0.0),
  )
  for i, (reached, longest_s) in enumerate(moments):
    killed = Killed(arguments, programs, workdir)
    if i == 0:  # nobody else may work here meanwhile
      killed.wait_for(lambda w: (w / "config.json").exists())
      assert cli.run(train.main, arguments) == 2
      assert "another run is at work" in message(capsys)
    killed.wait_for(reached)
    time.sleep(longest_s * rng.random())
    killed.kill()
    assert not (workdir / "summary.json").exists()
  last = tiny_runs.start(arguments, programs)
  out, err = last.communicate()
  assert last.returncode == 0, err
  assert "going on from step" in out
  for noise in ("read only", "read_only", "absl", "Traceback"):
    assert noise not in out + err
  assert_same_run(workdir, straight, 1e-6)

  # A finished run started again changes nothing.
  before = (workdir / "metrics.jsonl").read_bytes()
  assert cli.run(train.main, arguments) == 0
  assert (workdir / "metrics.jsonl").read_bytes() == before
  assert_same_run(workdir, straight, 1e-6)


# --- what may change on the way, and what not --------------------------------


class Crash(Exception):
  """Stands for a power cut, inside this process."""


@contextlib.contextmanager
def crash_at(method: str, when):
  """Stage.`method` raises `Crash` where `when(stage, *args)` says so."""
  original = getattr(Stage, method)

  def crashing(self, *args, **kw):
    if when(self, *args):
      raise Crash
    return original(self, *args, **kw)

  setattr(Stage, method, crashing)
  try:
    with pytest.raises(Crash):
      yield
  finally:
    setattr(Stage, method, original)


def test_goes_on_on_another_mesh(straight, tmp_path):
  """One device until step 8 of stage 2, then four (F1)."""

  def when(stage, step, *_):
    return stage.plan.phase.value == "recover" and step == 8

  with crash_at("_write", when):
    tiny_runs.run(tmp_path)
  tiny_runs.run(tmp_path, "mesh.data=4", "log_every=1", "checkpoint.keep=1")
  assert_same_run(tmp_path, straight, 1e-5)


def test_an_evaluation_inside_a_stage_is_not_lost(tmp_path):
  """Killed in the evaluation of a step that also has a checkpoint."""
  few = ("eval.every=4", "checkpoint.every=4", "recover.steps=0")
  with crash_at("_evaluate_inside", lambda stage, step, *_: step == 8):
    tiny_runs.run(tmp_path, *few)
  tiny_runs.run(tmp_path, *few)
  rows = tiny_runs.read_lines(tmp_path, "eval", "routers")
  assert [r["step"] for r in rows] == [4, 8, 12, 16]
  steps = [r["step"] for r in tiny_runs.read_lines(tmp_path, "train")]
  assert steps == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
  "field, value",
  [
    ("routers.lr", "0.1"),
    ("seed", "18"),
    ("route.ffn_group", "64"),
    ("data.seq_len", "32"),
    ("eval.max_tokens", "512"),
  ],
)
def test_another_configuration_is_refused(straight, field, value, capsys):
  before = sorted(straight.workdir.rglob("*"))
  arguments = tiny_runs.argv(straight.workdir, f"{field}={value}")
  assert cli.run(train.main, arguments) == 2
  error = message(capsys)
  assert field in error and value in error
  assert sorted(straight.workdir.rglob("*")) == before


def test_checkpoints_of_nobody_knows_what_are_refused(tmp_path, capsys):
  (tmp_path / "checkpoints" / "routers" / "5").mkdir(parents=True)
  assert cli.run(train.main, tiny_runs.argv(tmp_path)) == 2
  assert "config.json" in message(capsys)


# --- a full disk -------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size: int):
  """Processes started inside cannot write past `size` bytes of a file."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk(straight, programs, tmp_path):
  """A checkpoint that does not fit is told, and the rerun goes on (F2)."""
  arguments = tiny_runs.argv(tmp_path)
  # Adapters and moments take 3 MB, routers with theirs 0.6 MB. In a process of
  # its own: Orbax drops the errors of further files, which pytest would find.
  with largest_file(1_000_000):
    full = tiny_runs.start(arguments, programs)
  err = full.communicate()[1]
  assert full.returncode == 2, err
  errors = [s for s in err.splitlines() if s.startswith("error: ")]
  # TensorStore may print, past any logger, that its loop is closed; nothing of
  # ours or of Orbax's log may stand there.
  assert len(errors) == 1 and "/wide_jax/" not in err and "absl" not in err, err
  assert "checkpoint of step 5" in errors[0]
  assert "checkpoints/recover" in errors[0]
  assert cli.run(train.main, arguments) == 0
  assert_same_run(tmp_path, straight, 1e-6)
