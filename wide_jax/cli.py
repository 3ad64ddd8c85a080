"""The edge between a command line and the frozen configuration.

`parse` turns `--config NAME[:variant] --config.a.b=c --workdir DIR` into a
`RunConfig`; `run` turns a user's mistake into one sentence and exit code 2.
"""

import ast
import contextlib
import dataclasses
import difflib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from wide_jax import versions
from wide_jax.config import RunConfig, from_config_dict

_HERE = pathlib.Path(__file__).resolve().parent
_OVERRIDE = re.compile(r"--?config\.([^=]+)")


class Usage(Exception):
  """`--help` was asked for; holds the text to print."""


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
      raise ValueError(_one_line(e)) from e
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
    raise ValueError(f"{pathlib.Path(path).name}: {_one_line(e)}") from e


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


# --- the device --------------------------------------------------------------

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def select_device(device: str) -> str:
  """Makes jax use `device`, or refuses; to be called before arrays are made.

  Args:
    device: `auto`, `cpu`, `gpu` or `tpu`.

  Returns:
    One line that says what jax got, such as `device: 1 x NVIDIA H200 (gpu)`.

  Raises:
    ValueError: that device is not here; the message has the remedy.
  """
  import jax  # here, so that --help and mistakes answer at once

  if device == "cpu":
    jax.config.update("jax_platforms", "cpu")
  elif device != "auto":
    try:
      found = jax.devices(device)
    except RuntimeError as e:
      raise ValueError(_no_device(device, jax.__version__)) from e
    jax.config.update("jax_default_device", None)
    if jax.default_backend() != found[0].platform:
      raise ValueError(
        f"device={device!r}, but jax computes on {jax.default_backend()!r}:"
        " JAX_PLATFORMS puts it first."
      )
  devices = jax.devices()
  if device == "cpu" and devices[0].platform != "cpu":
    raise ValueError(
      "device='cpu' came too late: jax already runs on"
      f" {devices[0].platform!r}."
    )
  kind = devices[0].device_kind
  return f"device: {len(devices)} x {kind} ({devices[0].platform})"


def _no_device(device: str, jax_version: str) -> str:
  start = f"device={device!r}, but jax {jax_version} finds none: "
  auto = ", or take --config.device=auto."
  if device == "tpu":
    return start + "pip install 'wide_jax[tpu]' on a TPU machine" + auto
  have = {}
  for name in _PLUGINS:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      have[name] = importlib.metadata.version(name)
  if not have:
    return start + "pip install 'wide_jax[gpu]'" + auto
  wrong = [
    f"{name} {version}"
    for name, version in have.items()
    if versions.numbers(version)[:3] != versions.numbers(jax_version)[:3]
  ]
  if len(wrong) == len(have):
    return start + (
      f"{', '.join(wrong)} does not belong to it; pip install --upgrade"
      f" 'jax[cuda13]=={jax_version}'{auto}"
    )
  return start + (
    "the plugin is installed, so look at the driver (nvidia-smi) and at"
    f" JAX_PLATFORMS{auto}"
  )


# --- running a script --------------------------------------------------------


def run(
  main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None
) -> int:
  """Calls `main(argv)` and says what a user did wrong in one line.

  Returns the exit code: what `main` returned (None is 0), 2 for a user's
  mistake (a `ValueError` or, for a diverged run, a `FloatingPointError` raised
  by our own code, or a file that cannot be read or written), 130 for Ctrl-C.
  Anything else is a bug and keeps its trace.
  """
  args = list(sys.argv[1:] if argv is None else argv)
  try:
    versions.check()
    return main(args) or 0
  except Usage as e:
    print(e)
    return 0
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130
  except (ValueError, FloatingPointError, OSError) as e:
    if not is_user_error(e):
      raise
    print(f"error: {_one_line(e)}", file=sys.stderr)
    return 2


def is_user_error(error: BaseException) -> bool:
  """Whether the user, rather than the program, has something to mend.

  Our code raises ValueError for wrong input; one raised inside jax or numpy is
  a bug of ours that slipped through, and its trace is wanted.
  """
  if isinstance(error, OSError):
    return True
  frames = traceback.extract_tb(error.__traceback__)
  ours = isinstance(error, ValueError | FloatingPointError)
  if not ours or not frames:
    return False
  return _HERE in pathlib.Path(frames[-1].filename).resolve().parents


def _one_line(error: BaseException) -> str:
  if isinstance(error, OSError) and error.strerror:
    name = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{name}"
  text: Any = str(error) or type(error).__name__
  return re.sub(r"\s*\n\s*", " ", text.strip())
