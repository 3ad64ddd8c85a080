"""Every config becomes a valid RunConfig, and every field has a reader."""

import ast
import dataclasses
import subprocess
import sys
import tomllib

import pytest

from wide_jax import cli, config, versions
from wide_jax.config import RunConfig
from wide_jax.model_config import ModelConfig

VARIANTS = {
  "tiny": ("", "smoke"),
  "smollm2_135m": ("", "published", "smoke", "published,smoke"),
  "llama32_1b": ("", "smoke"),
  "llama31_8b": ("", "published", "shapes", "smoke", "published,smoke"),
  "qwen3_4b": ("", "smoke"),
}
ALL = [(name, arg) for name, args in VARIANTS.items() for arg in args]


def test_every_shipped_config_is_listed():
  assert set(cli.config_names()) == set(VARIANTS)


@pytest.mark.parametrize("name,arg", ALL)
def test_converts(name, arg):
  loaded = cli.load_config(f"{name}:{arg}")
  assert isinstance(loaded, RunConfig)
  assert loaded.routers.steps > 0
  if loaded.model.shape:
    shape = ModelConfig.from_hf(loaded.model.shape)
    loaded.route.check_against(shape)
  # One row sets thresholds and one checks them, at least.
  assert loaded.eval.calibration_tokens > loaded.data.seq_len


@pytest.mark.parametrize("name", ["llama32_1b", "llama31_8b", "qwen3_4b"])
def test_smoke_keeps_the_routing_of_the_real_run(name):
  """`smoke` of a large model differs in size only."""
  full, smoke = cli.load_config(name), cli.load_config(f"{name}:smoke")
  assert smoke.route == full.route
  assert smoke.budget == full.budget
  assert smoke.lora == full.lora
  assert smoke.regroup.enabled == full.regroup.enabled
  assert smoke.model.path == "random"
  assert smoke.model.shape["num_hidden_layers"] == 2


def test_published_setting():
  published = cli.load_config("smollm2_135m:published")
  assert (published.route.ffn_group, published.regroup.enabled) == (32, False)
  default = cli.load_config("smollm2_135m")
  assert (default.route.ffn_group, default.regroup.enabled) == (128, True)
  assert published.route.attn_group == default.route.attn_group == 3


def test_base_holds_the_defaults_and_nothing_else():
  resolved = str(cli.configs_dir() / "base.py")
  assert cli.load_config(resolved) == RunConfig()


@pytest.mark.parametrize("name,arg", [("tiny", "smok"), ("tiny", "smoke,x")])
def test_unknown_variant_is_refused(name, arg):
  with pytest.raises(ValueError, match="variant .* must be one of"):
    cli.load_config(f"{name}:{arg}")


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_docstring_names_command_hardware_result(name):
  source = (cli.configs_dir() / f"{name}.py").read_text()
  doc = ast.get_docstring(ast.parse(source))
  assert f"python -m wide_jax.train --config {name}" in doc
  assert "Hardware:" in doc
  assert "Expected:" in doc
  for variant in VARIANTS[name]:
    for part in filter(None, variant.split(",")):
      assert part in doc


def test_every_field_is_read_outside_config(repo):
  """A field nobody reads is a bug: it can be set and does nothing."""
  read: set[str] = set()
  for path in (repo / "wide_jax").rglob("*.py"):
    if path.name != "config.py":
      tree = ast.parse(path.read_text())
      read |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
  # Read through what config.py computes from them, which is named here and
  # must itself be read.
  through = {
    ("RouteConfig", "attn_group"): "groups",
    ("RouteConfig", "ffn_group"): "groups",
    ("LoraConfig", "alpha"): "scale",
    ("LoraConfig", "rank_stabilised"): "scale",
    ("RunConfig", "routers"): "stage",
    ("RunConfig", "recover"): "stage",
    ("RunConfig", "dense_lora"): "stage",
  }
  unread = []
  for name, kind in vars(config).items():
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
      continue
    for field in dataclasses.fields(kind):
      if {field.name, through.get((name, field.name))}.isdisjoint(read):
        unread.append(f"{name}.{field.name}")
  assert not unread


def test_ranges_are_those_of_pyproject(repo):
  project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
  for name in versions.RANGES:
    assert versions.requirement(name) in project["dependencies"]


@pytest.mark.parametrize(
  "version,ok",
  [
    ("0.10.1", False),
    ("0.10.2", True),
    ("0.11.2", True),
    ("0.12.0.1", True),
    ("0.12.1.dev20260101", True),
    ("0.13.0", False),
    ("1.0", False),
  ],
)
def test_versions_check(version, ok):
  if ok:
    versions.check(version)
  else:
    with pytest.raises(ValueError, match=f"jax {version} is not supported"):
      versions.check(version)


def test_what_is_installed_is_supported():
  versions.check()


def test_absent_and_wrong_packages_are_named(monkeypatch):
  have = {"jax": "0.11.2", "flax": "0.12.7", "optax": "0.2.9"}
  monkeypatch.setattr(versions, "_installed", have.get)
  wrong, absent = versions.problems()
  assert wrong.startswith("flax 0.12.7 is not supported: wide_jax needs flax")
  assert absent.startswith("orbax-checkpoint is not installed: pip install")
  with pytest.raises(ValueError, match="flax 0.12.7.*orbax-checkpoint is not"):
    versions.check()


def test_wrong_versions_are_named_at_import(repo):
  """Trial J2, before jax is imported; a command line refuses in a line."""
  code = (
    "import importlib.metadata, sys, warnings\n"
    "real = importlib.metadata.version\n"
    "fake = lambda n: '0.9.1' if n == 'jax' else real(n)\n"
    "importlib.metadata.version = fake\n"
    "with warnings.catch_warnings(record=True) as seen:\n"
    "  warnings.simplefilter('always')\n"
    "  import wide_jax\n"
    "assert 'jax' not in sys.modules\n"
    "print(*[w.message for w in seen])\n"
    "from wide_jax import cli\n"
    "raise SystemExit(cli.run(lambda argv: 0, []))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=repo,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert done.stdout.startswith("jax 0.9.1 is not supported"), done.stdout
  assert done.stderr.startswith("error: jax 0.9.1 is not supported")
