"""Runs of `tiny:smoke`, in this process or in another one.

Most of such a run is compiling, so all share a persistent compilation cache
(what one has compiled, the others, a resumed process above all, only load), and
XLA is told to optimise little, which is 2.5 times faster to compile and twice
as slow to run.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from wide_jax import cli, metrics, stages, train
from wide_jax.config import RunConfig

REPO = pathlib.Path(__file__).resolve().parent.parent
# Neither in the number of devices (conftest.py makes 8) nor in the text that
# is tokenised is anything to be found here.
QUICK = ("mesh.data=1", "data.max_tokens=30000", "dense_lora.steps=0")


def argv(workdir, *overrides: str, config: str = "tiny:smoke") -> list[str]:
  """The command line of a quick run; later overrides win."""
  fields = dict(o.split("=", 1) for o in (*QUICK, *overrides))
  flags = [f"--config.{k}={v}" for k, v in fields.items()]
  return ["--config", config, "--workdir", str(workdir), *flags]


def config(*overrides: str, config: str = "tiny:smoke") -> RunConfig:
  """The configuration that `argv` stands for."""
  return cli.parse(argv("unused", *overrides, config=config))[0]


@dataclasses.dataclass
class Finished:
  """A run that ended in this process.

  Attributes:
    workdir: its directory.
    summary: what summary.json holds.
    stages: the `Stage` objects of the run, by name.
  """

  workdir: pathlib.Path
  summary: dict[str, Any]
  stages: dict[str, stages.Stage]

  def lines(self, kind: str = "train", stage: str | None = None) -> list[dict]:
    return read_lines(self.workdir, kind, stage)


def run(
  workdir,
  *overrides: str,
  config: str = "tiny:smoke",
  stage: type[stages.Stage] = stages.Stage,
) -> Finished:
  """Runs in this process; a user's mistake is raised as it is.

  `stage` stands in for `Stage`, so that a test can watch its steps.
  """
  seen = {}

  class Recorded(stage):
    def __init__(self, prepared, phase, before, log):
      super().__init__(prepared, phase, before, log)
      seen[phase.value] = self

  original, stages.Stage = stages.Stage, Recorded
  try:
    assert train.main(argv(workdir, *overrides, config=config)) == 0
  finally:
    stages.Stage = original
  return Finished(pathlib.Path(workdir), read_summary(workdir), seen)


def read_summary(workdir) -> dict[str, Any]:
  return json.loads((pathlib.Path(workdir) / "summary.json").read_text())


def read_lines(workdir, kind: str, stage: str | None = None) -> list[dict]:
  """Lines of metrics.jsonl without what depends on the clock."""
  rows = metrics.read_metrics(pathlib.Path(workdir) / "metrics.jsonl")
  return [
    {k: v for k, v in row.items() if k not in ("tokens_per_s", "mfu")}
    for row in rows
    if row["kind"] == kind and stage in (None, row["stage"])
  ]


@contextlib.contextmanager
def quick_compiling(tmp_path_factory, share: bool = True):
  """Shares programs within one test session; yields their directory.

  Not to be shared are programs for several devices: XLA's CPU client loads
  them without the order of their collectives, and with more devices than cores
  such a program now and then waits for itself until XLA ends the process.
  """
  base = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    base = base.parent
  folder = base / "programs"
  settings = {
    "jax_disable_most_optimizations": True,
    "jax_compilation_cache_dir": str(folder) if share else None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: jax.config.values[name] for name in settings}
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # it looks at the settings only once
  try:
    yield folder
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


def start(arguments: list[str], programs) -> subprocess.Popen:
  """`python -m wide_jax.train` in a process of its own."""
  env = dict(
    os.environ,
    PYTHONPATH=str(REPO),
    JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    JAX_COMPILATION_CACHE_DIR=str(programs),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
  )
  return subprocess.Popen(
    [sys.executable, "-m", "wide_jax.train", *arguments],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
