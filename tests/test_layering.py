"""Holds the one-way order of imports (BUILD_NOTES.md, "who calls whom")."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = ("wide_jax", "pallas_kernels")

# A file imports from lower ranks, or from its own where that makes no circle.
RANKS = (
  {
    "atomic",
    "axes",
    "checks",
    "config",
    "console",
    "model_config",
    "paths",
    "versions",
  },
  {"rope", "flops"},
  {"routing", "ops"},
  {"modules"},
  # What works on trees, text and files.
  {
    "adapters",
    "chat",
    "checkpoint",
    "cli",
    "data",
    "export",
    "figures",
    "fingerprint",
    "gguf_reader",
    "gguf_tokenizer",
    "hf_directory",
    "loss",
    "metrics",
    "regroup",
    "safetensors_io",
    "sharding",
    "text_sources",
    "token_cache",
    "tokenizers",
    "tree_layout",
    "weights",
  },
  {"step"},
  {"calibration", "evaluate", "language_model"},
  {"dry_run", "prepare", "stages"},
  {"benchmarks", "train"},
  {"bench"},
)
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
# Command lines on top of a module (`weights_cli.py`) may use everything.
TOP = len(RANKS)


def files(package: str) -> list[pathlib.Path]:
  return sorted((ROOT / package).rglob("*.py"))


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def short(module: str) -> str:
  """`wide_jax.routing` -> `routing`; the package itself -> empty."""
  return module.partition(".")[2].split(".")[0]


def rank(module: str) -> int:
  name = short(module)
  if name.endswith("_cli") or not name:
    return TOP
  return RANK[name]


def imports(path: pathlib.Path) -> list[str]:
  """Modules that a file imports, wherever in it but for exempt places.

  A command line may import late what it needs only then: functions of
  `*_cli.py` are left out, and so are `main` and the script part of
  `weights.py`, which hand over to `weights_cli.py`.
  """
  found: list[str] = []

  def exempt(node: ast.AST) -> bool:
    if path.stem.endswith("_cli"):
      return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if path.stem != "weights":
      return False
    if isinstance(node, ast.If):
      return ast.unparse(node.test) == "__name__ == '__main__'"
    return isinstance(node, ast.FunctionDef) and node.name == "main"

  def visit(node: ast.AST) -> None:
    if exempt(node):
      return
    if isinstance(node, ast.Import):
      found.extend(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parent = module_name(path).split(".")
        if path.name != "__init__.py":
          parent = parent[:-1]
        parent = parent[: len(parent) - node.level + 1]
        base = ".".join([*parent, *filter(None, [base])])
      for alias in node.names:
        inner = ROOT.joinpath(*f"{base}.{alias.name}".split("."))
        is_module = inner.with_suffix(".py").exists() or inner.is_dir()
        found.append(f"{base}.{alias.name}" if is_module else base)
    for child in ast.iter_child_nodes(node):
      visit(child)

  visit(ast.parse(path.read_text()))
  return found


def ours(path: pathlib.Path) -> list[str]:
  return [m for m in imports(path) if m.split(".")[0] == "wide_jax"]


def test_every_file_has_a_rank():
  unknown = [
    path.name
    for path in files("wide_jax")
    if short(module_name(path)) not in RANK and rank_free(path)
  ]
  assert not unknown, f"give {unknown} a rank in {pathlib.Path(__file__).name}"


def rank_free(path: pathlib.Path) -> bool:
  return path.name != "__init__.py" and not path.stem.endswith("_cli")


@pytest.mark.parametrize("path", files("wide_jax"), ids=lambda p: p.name)
def test_imports_go_down(path):
  if path.name == "__init__.py":
    return
  mine = rank(module_name(path))
  up = [m for m in ours(path) if short(m) and rank(m) > mine]
  assert not up, f"{path.name} imports {up}, which lie above it"
  assert "wide_jax" not in ours(path), f"{path.name} imports the package itself"


def test_no_circles():
  graph = {
    module_name(path): set(ours(path)) - {module_name(path)}
    for path in files("wide_jax")
    if path.name != "__init__.py"
  }
  done: set[str] = set()

  def walk(module: str, trail: tuple[str, ...]) -> None:
    assert module not in trail, f"circle: {' -> '.join((*trail, module))}"
    if module in done:
      return
    for other in sorted(graph.get(module, ())):
      walk(other, (*trail, module))
    done.add(module)

  for module in sorted(graph):
    walk(module, ())


def test_lowest_rank_imports_nothing_of_ours_but_itself():
  allowed = {
    "axes": set(),
    "checks": set(),
    "model_config": {"checks"},
    "config": {"checks", "model_config"},
  }
  for name, own in allowed.items():
    found = ours(ROOT / "wide_jax" / f"{name}.py")
    assert {short(module) for module in found} - {""} <= own


def test_kernels_stand_alone():
  import sys

  allowed = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
  for path in files("pallas_kernels"):
    own = set(allowed)
    # Mosaic GPU's inline_mgpu wants MLIR, whose bindings jaxlib alone has: it
    # is jax's other half, installed with it and of its version.
    if path.is_relative_to(ROOT / "pallas_kernels" / "mosaic_gpu"):
      own.add("jaxlib")
    foreign = {m.split(".")[0] for m in imports(path)} - own
    assert not foreign, f"{path} imports {sorted(foreign)}"


def test_only_ops_reaches_the_kernels():
  """The model goes through ops; benchmarks time the library itself."""
  reaching = {
    short(module_name(path))
    for path in files("wide_jax")
    if any(m.split(".")[0] == "pallas_kernels" for m in imports(path))
  }
  assert reaching <= {"ops", "bench", "benchmarks"}


def test_flax_stays_in_modules():
  using = {
    path.name
    for path in files("wide_jax")
    if any(m.split(".")[0] == "flax" for m in imports(path))
  }
  assert using <= {"modules.py"}


def test_the_parser_sees_what_it_should(tmp_path):
  """Guards the guard: late, aliased and grouped imports are all found."""
  path = tmp_path / "x.py"
  path.write_text(
    "import jax.numpy as jnp, numpy\n"
    "from wide_jax import config, routing as r\n"
    "from wide_jax.loss import something\n"
    "def f():\n  from flax import linen\n"
  )
  assert imports(path) == [
    "jax.numpy",
    "numpy",
    "wide_jax.config",
    "wide_jax.routing",
    "wide_jax.loss",
    "flax",
  ]
  late = tmp_path / "x_cli.py"
  late.write_text("def f():\n  from wide_jax import train\n")
  assert imports(late) == []
