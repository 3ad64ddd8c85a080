"""The edge between a command line and the frozen configuration.

`parse` turns `--config NAME[:variant] --config.a.b=c --workdir DIR` into a
`RunConfig`. What command lines without a config need too is in console.py.
"""

import ast
import contextlib
import dataclasses
import difflib
import importlib
import importlib.machinery
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Callable, Generator, Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

from wide_jax.config import RunConfig, from_config_dict
from wide_jax.console import Usage as Usage
from wide_jax.console import is_user_error as is_user_error
from wide_jax.console import one_line
from wide_jax.console import run as run
from wide_jax.console import select_device as select_device

_HERE = pathlib.Path(__file__).resolve().parent
_OVERRIDE = re.compile(r"--?config\.([^=]+)")


# --- where configs are -------------------------------------------------------


def configs_dir() -> pathlib.Path:
  """`configs/`: inside the installed package, or beside it in a checkout."""
  installed = _HERE / "configs"
  return installed if installed.is_dir() else _HERE.parent / "configs"


def _register_configs() -> None:
  """Makes `wide_jax.configs` importable from a bare checkout."""
  name = "wide_jax.configs"
  if name in sys.modules or importlib.util.find_spec(name) is not None:
    return
  spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
  spec.submodule_search_locations = [str(configs_dir())]
  sys.modules[name] = importlib.util.module_from_spec(spec)


def config_names() -> list[str]:
  """The configs that ship with the package, by name."""
  hidden = {"__init__", "base"}
  return sorted(
    p.stem for p in configs_dir().glob("*.py") if p.stem not in hidden
  )


def resolve_config(spec: str) -> str:
  """Turns `NAME[:variant]` or `PATH.py[:variant]` into `PATH.py[:variant]`.

  Raises:
    ValueError: no such config; the message lists those there are.
  """
  place, colon, arg = spec.partition(":")
  if re.fullmatch(r"\w+", place):
    path = configs_dir() / f"{place}.py"
    if path.is_file():
      return f"{path}{colon}{arg}"
  elif place.endswith(".py"):
    path = pathlib.Path(place).expanduser()
    if path.is_file():
      return f"{path}{colon}{arg}"
    # `configs/tiny.py` works after `pip install` too.
    shipped = configs_dir() / path.name
    if path.parent == pathlib.Path("configs") and shipped.is_file():
      return f"{shipped}{colon}{arg}"
  near = difflib.get_close_matches(place, config_names(), 1)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  raise ValueError(
    f"--config {spec!r}: no such config.{hint} Known: {config_names()}, or the"
    " path of a .py file."
  )


# --- parsing -----------------------------------------------------------------


def parse(
  argv: Sequence[str],
  *,
  about: str = "",
  define: Callable[[flags.FlagValues], None] | None = None,
) -> tuple[RunConfig, types.SimpleNamespace]:
  """Reads a command line.

  Args:
    argv: the arguments, without the program's name.
    about: first lines of `--help`.
    define: adds further absl flags to the values it is given.

  Returns:
    The configuration, with relative paths of text resolved against `--data`,
    and the other flags: `workdir`, `data`, `dry_run`, `config` (the resolved
    path) and what `define` added.

  Raises:
    ValueError: an unknown flag or field, a value of the wrong type, or a
      configuration that contradicts itself.
    Usage: `--help` was asked for.
  """
  argv, source = _normalise(argv)
  values = flags.FlagValues()
  flags.DEFINE_string(
    "workdir", None, "Directory the run writes to.", flag_values=values
  )
  flags.DEFINE_string(
    "data",
    "",
    "Directory that relative text paths in the config start from.",
    flag_values=values,
  )
  flags.DEFINE_bool(
    "dry_run",
    False,
    "Print memory, FLOPs and hours, and start nothing.",
    flag_values=values,
  )
  flags.DEFINE_bool("help", False, "Print this.", flag_values=values)
  if define is not None:
    define(values)
  if any(a in ("-h", "-help", "--help") for a in argv):
    raise Usage(_help(about, values))
  if not source:
    raise ValueError(f"--config is missing; known configs: {config_names()}.")
  loaded = _load(source)
  _check_overrides(argv, loaded)
  argv = _quoted(argv, loaded)
  with _as_sys_argv(argv):
    try:
      # DEFINE_config_file would run the file once more, through an API that
      # Python is about to remove.
      config_flags.DEFINE_config_dict(
        "config", loaded, lock_config=True, flag_values=values
      )
      rest = values(["wide_jax", *argv])
    except flags.Error as e:
      raise ValueError(one_line(e)) from e
  if rest[1:]:
    raise ValueError(f"unexpected argument {rest[1]!r}; flags start with '--'.")
  if not values.workdir and not values.dry_run:
    raise ValueError("--workdir is missing: where should the run write?")
  config = from_config_dict(RunConfig, values.config.to_dict())
  given = {
    name: values[name].value
    for name in values
    if name != "help" and not name.startswith("config")
  }
  given["config"] = source
  return with_data_dir(config, values.data), types.SimpleNamespace(**given)


def load_config(spec: str) -> RunConfig:
  """The configuration that `--config spec` stands for, without overrides."""
  return from_config_dict(RunConfig, _load(resolve_config(spec)).to_dict())


def _load(source: str) -> ml_collections.ConfigDict:
  """Runs `get_config` of a resolved config."""
  path, _, arg = source.rpartition(".py")
  path, arg = f"{path}.py", arg.removeprefix(":")
  _register_configs()
  spec = importlib.util.spec_from_file_location("wide_jax_run_config", path)
  if spec is None or spec.loader is None:
    raise ValueError(f"{path} cannot be read as Python.")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ValueError(f"{path} has no function get_config(arg).")
  try:
    return module.get_config(arg)
  except ValueError as e:
    raise ValueError(f"{pathlib.Path(path).name}: {one_line(e)}") from e


def _normalise(argv: Sequence[str]) -> tuple[list[str], str]:
  """`--dry-run` -> `--dry_run`; takes `--config` out and resolves it."""
  out, source, pending = [], "", False
  for arg in argv:
    name, equals, value = arg.partition("=")
    if pending:
      source, pending = resolve_config(arg), False
    elif name in ("--config", "-config"):
      pending = not equals
      source = resolve_config(value) if equals else source
    elif name.startswith("--") and not _OVERRIDE.match(name):
      out.append("--" + name[2:].replace("-", "_") + equals + value)
    else:
      out.append(arg)
  if pending:
    raise ValueError(
      f"--config needs a value; known configs: {config_names()}."
    )
  return out, source


def _check_overrides(
  argv: Sequence[str], config: ml_collections.ConfigDict
) -> None:
  """Refuses `--config.a.b` where the config has no such field."""
  for arg in argv:
    found = _OVERRIDE.match(arg)
    if not found:
      continue
    node, seen = config, "config"
    for key in found.group(1).split("."):
      known = list(node) if isinstance(node, ml_collections.ConfigDict) else []
      if key not in known:
        near = difflib.get_close_matches(key, known, 1)
        hint = (
          f"did you mean --{seen}.{near[0]}?"
          if near
          else f"{seen} has {sorted(known)}."
        )
        raise ValueError(f"--{seen}.{key}: no such field; {hint}")
      node, seen = node[key], f"{seen}.{key}"


def _quoted(
  argv: Sequence[str], config: ml_collections.ConfigDict
) -> list[str]:
  """Makes `--config.data.train=my text.txt` mean one path with a space.

  config_flags takes a bare value with a space or a comma for a broken tuple.
  """
  out = list(argv)
  for i, arg in enumerate(out):
    name, equals, value = arg.partition("=")
    found = _OVERRIDE.match(name)
    if not found:
      continue
    at = i
    if not equals and i + 1 < len(out):
      at, value = i + 1, out[i + 1]
    node = config
    for key in found.group(1).split("."):
      node = node[key]
    if isinstance(node, tuple) and node and isinstance(node[0], str):
      try:
        ast.literal_eval(value)
      except (SyntaxError, ValueError):
        if not value.startswith(("(", "[", "'", '"')):
          out[at] = f"{name}={value!r}" if equals else repr(value)
  return out


@contextlib.contextmanager
def _as_sys_argv(argv: Sequence[str]) -> Generator[None]:
  """config_flags looks for its overrides in sys.argv, whatever it is given."""
  before = sys.argv
  sys.argv = ["wide_jax", *argv]
  try:
    yield
  finally:
    sys.argv = before


def _help(about: str, values: flags.FlagValues) -> str:
  lines = [about.strip(), ""] if about.strip() else []
  lines += [
    f"  --{'config':<12} NAME[:variant] or PATH.py[:variant].",
    f"  --{'config.a.b=c':<12} Sets field b of section a of the config to c.",
  ]
  for name in sorted(values):
    shown = name.replace("_", "-")
    lines.append(f"  --{shown:<12} {values[name].help}")
  return "\n".join([*lines, "", f"configs: {', '.join(config_names())}"])


# --- paths of text -----------------------------------------------------------


def with_data_dir(config: RunConfig, directory: str) -> RunConfig:
  """Takes relative paths of text from `directory`, if one is given.

  Left alone: `embedded`, `embedded:PART`, hub ids (`hf:...`), absolute paths.

  Raises:
    ValueError: `directory` is not a directory.
  """
  if not directory:
    return config
  root = pathlib.Path(directory).expanduser()
  if not root.is_dir():
    raise ValueError(f"--data {directory!r} is not a directory.")

  def place(name: str) -> str:
    if name == "embedded" or name.startswith(("embedded:", "hf:")):
      return name
    return str(root / pathlib.Path(name).expanduser())

  data = dataclasses.replace(
    config.data,
    train=tuple(map(place, config.data.train)),
    calibration=tuple(map(place, config.data.calibration)),
  )
  text = dataclasses.replace(config.eval, text=place(config.eval.text))
  return dataclasses.replace(config, data=data, eval=text)
