"""What a run refuses before it starts, and what it says it would do."""

import json

import jax
import pytest

from wide_jax import dry_run, prepare, sharding
from wide_jax.config import (
  DataConfig,
  EvalConfig,
  MeshConfig,
  Method,
  ModelSource,
  RouteConfig,
  RunConfig,
  StageConfig,
)


def test_an_export_is_no_base(tmp_path):
  """Its adapter would be dropped in silence, and no run could load ours."""
  (tmp_path / "wide.json").write_text(json.dumps({"base": "embedded"}))
  run = RunConfig(model=ModelSource(path=str(tmp_path)))
  with pytest.raises(ValueError, match="is an export of a run.*tiny_llama"):
    prepare.model_config(run)


def test_a_stage_that_trains_nothing_takes_no_time():
  run = RunConfig(
    route=RouteConfig(method=Method.RANDOM),
    data=DataConfig(seq_len=64),
    eval=EvalConfig(windows=(64,)),
    routers=StageConfig(steps=5),
    recover=StageConfig(steps=0),
  )
  row = dry_run.describe(run).splitlines()[3].split()
  assert row[:5] == ["routers", "nothing", "0", "0", "0s"]


def test_a_compilation_cache_is_told_of_on_several_cpu_devices(tmp_path):
  """A program loaded from it may hang there."""
  if jax.default_backend() != "cpu":
    pytest.skip("other backends keep the order of collectives")
  one, two = (sharding.make_mesh(MeshConfig(data=n)) for n in (1, 2))
  before = jax.config.values["jax_compilation_cache_dir"]
  try:
    jax.config.update("jax_compilation_cache_dir", None)
    assert prepare._cache_notes(two) == []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert prepare._cache_notes(one) == []
    (note,) = prepare._cache_notes(two)
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
  assert str(tmp_path) in note and "may hang" in note
