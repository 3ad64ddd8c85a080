"""Every kernel, compiled for real by the compilers of H200 and TPU.

Needs no accelerator: see aot/aot.py. Each target's cases compile in one
process of its own, since the wheels behind it must not be seen by ours.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest
from aot import cases, wheels

TESTS = pathlib.Path(__file__).resolve().parent
WHEELS = pathlib.Path(
  os.environ.get("WIDE_JAX_AOT", pathlib.Path(sys.prefix) / "aot")
)


def environment() -> dict[str, str]:
  """Ours, with the wheels and ptxas in reach and without flags for our CPU."""
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  paths = [TESTS, TESTS.parent, WHEELS]
  env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
  ptxas = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
  env["PATH"] = os.pathsep.join([env.get("PATH", ""), str(ptxas)])
  return env


@functools.cache
def compiled(target: str) -> tuple[dict[str, dict], str]:
  """({name: line of compile_cases}, what the process had to complain of)."""
  done = subprocess.run(
    [sys.executable, "-m", "aot.compile_cases", target],
    env=environment(),
    capture_output=True,
    text=True,
    timeout=900,
  )
  lines = [json.loads(x) for x in done.stdout.splitlines() if x[:1] == "{"]
  return {line["name"]: line for line in lines}, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
  "target, case",
  [
    pytest.param(target, case, id=f"{target}-{case.name}")
    for target in ("h200", *cases.TPUS)
    for case in cases.CASES
    if target in case.targets
  ],
)
def test_compiles(target, case):
  if absent := wheels.missing(WHEELS):
    pytest.skip(
      f"no {', '.join(absent)} in VENV/aot; `make test` puts them there"
    )
  lines, stderr = compiled(target)
  assert case.name in lines, f"the process ended before this case:\n{stderr}"
  line = lines[case.name]
  assert line["ok"], line["error"]
  assert set(case.kernels) <= set(line["kernels"])


def test_names_are_used_once():
  for target in ("h200", *cases.TPUS):
    names = [case.name for case in cases.CASES if target in case.targets]
    assert len(set(names)) == len(names)
