"""What a finished run does about files that were deleted afterwards."""

import shutil

import pytest
import tiny_runs

from wide_jax import cli, export, train

FEW = ("routers.steps=2", "recover.steps=2", "dense_lora.steps=0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("lost")
  assert cli.run(train.main, tiny_runs.argv(workdir, *FEW)) == 0
  return workdir


def test_a_lost_export_is_written_again(finished):
  folder = finished / "export" / "recover"
  before = export.load_export(folder)
  shutil.rmtree(folder)
  assert cli.run(train.main, tiny_runs.argv(finished, *FEW)) == 0
  after = export.load_export(folder)
  assert after.lora_config == before.lora_config
  for kind in ("attn", "ffn"):
    assert (after.thresholds[kind] == before.thresholds[kind]).all()
  leaf = ("layers", "attn", "q", "b")
  a, b = after.variables["lora"], before.variables["lora"]
  for name in leaf:
    a, b = a[name], b[name]
  assert (a == b).all() and abs(a).max() > 0


def test_a_lost_channel_order_is_refused(finished, capsys):
  (finished / "channel_order.npy").unlink()
  assert cli.run(train.main, tiny_runs.argv(finished, *FEW)) == 2
  assert "channel_order.npy is missing" in capsys.readouterr().err
