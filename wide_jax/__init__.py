"""wide_jax: token-level dynamic width pruning of LLaMA-family models in JAX.

Public names, imported when they are first used, so that `--help` is fast.
"""

import importlib
import warnings
from typing import TYPE_CHECKING

from wide_jax import versions

if TYPE_CHECKING:
  from wide_jax.config import RouteConfig as RouteConfig
  from wide_jax.language_model import LanguageModel as LanguageModel
  from wide_jax.language_model import load as load
  from wide_jax.model_config import ModelConfig as ModelConfig

_HOMES = {
  "LanguageModel": "language_model",
  "ModelConfig": "model_config",
  "RouteConfig": "config",
  "load": "language_model",
}

__all__ = ["LanguageModel", "ModelConfig", "RouteConfig", "load"]

# Named here, from the installed packages' metadata, before anything of them is
# imported and fails in a way that says nothing. A command line refuses.
for _message in versions.problems():
  warnings.warn(_message, RuntimeWarning, stacklevel=2)


def __getattr__(name: str):
  if name not in _HOMES:
    raise AttributeError(f"module 'wide_jax' has no attribute {name!r}")
  home = importlib.import_module(f"wide_jax.{_HOMES[name]}")
  value = globals()[name] = getattr(home, name)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *_HOMES})
