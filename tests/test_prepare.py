"""What a run refuses before it starts, and what it says it would do."""

import json

import pytest

from wide_jax import plan, prepare
from wide_jax.config import (
  DataConfig,
  EvalConfig,
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
  row = plan.describe(run).splitlines()[3].split()
  assert row[:5] == ["routers", "nothing", "0", "0", "0s"]
