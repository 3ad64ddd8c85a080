"""Compiles all cases of one target and prints one JSON line for each.

  PYTHONPATH=tests:VENV/aot python -m aot.compile_cases TARGET [NAME ...]

A line holds target, name, ok, kernels (the names of the Pallas kernels whose
custom calls are in the compiled HLO), error (its type and first lines) and
seconds.
"""

import json
import re
import sys
import time

from aot import aot, cases

# An op's name ends in KERNEL/pallas_call.
_CALL = re.compile(
  r'custom_call_target="([^"]+)".*?op_name="(?:[^"]*/)?(\w+)/pallas_call'
)


def kernels(hlo: str, custom_call: str) -> list[str]:
  """Names of the kernels that compiled HLO calls, in its order."""
  return [name for target, name in _CALL.findall(hlo) if target == custom_call]


def compile_case(target: str, case: cases.Case) -> dict:
  """What became of one case; never raises."""
  began = time.monotonic()
  line = {"target": target, "name": case.name, "ok": False, "kernels": []}
  try:
    fn, structs = case.make(case.backend)
    hlo = aot.compile_for(target, fn, *structs).as_text() or ""
    line["kernels"] = kernels(hlo, cases.CUSTOM_CALL[case.backend])
    line["ok"] = True
  except Exception as e:  # compilers raise whatever they like
    line["error"] = f"{type(e).__name__}: {e}"[:2000]
  line["seconds"] = round(time.monotonic() - began, 2)
  return line


def main(argv: list[str]) -> None:
  target, *names = argv
  for case in cases.CASES:
    if target in case.targets and (not names or case.name in names):
      print(json.dumps(compile_case(target, case)), flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
