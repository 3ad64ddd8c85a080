"""What every test runs under.

Eight virtual CPU devices, no hub, no silent rank promotion, and the jaxtyping
annotations of `wide_jax` checked by beartype (in tests only).
"""

import os
import pathlib
import re
import tempfile

# jax reads these when it is first imported, so they come before it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count"
_XLA = re.sub(rf"{_FLAG}=\S*", "", os.environ.get("XLA_FLAGS", ""))
os.environ["XLA_FLAGS"] = f"{_XLA} {_FLAG}=8".strip()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="wide_jax_hf_"))

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# Never uninstalled: it has to be there before anything of wide_jax is imported.
# An int is a float here, as PEP 484 has it.
jaxtyping.install_import_hook(
  "wide_jax",
  "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


def pytest_collection_modifyitems(items):
  if jax.default_backend() != "cpu":
    return
  skip = pytest.mark.skip(reason="needs an accelerator; jax found only a CPU")
  for item in items:
    if "gpu" in item.keywords:
      item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def quick_kernels(request):
  """Interpreted kernels are compiled for longer than they run."""
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  if request.module.__name__.startswith("test_kernel"):
    jax.config.update(name, True)
  yield
  jax.config.update(name, before)


@pytest.fixture(scope="session")
def repo() -> pathlib.Path:
  """The root of the checkout."""
  return pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def rng_seed() -> int:
  """The seed tests share, so that a failure repeats."""
  return 17
