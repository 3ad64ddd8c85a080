"""What a run does about files that were deleted or changed meanwhile."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs

from wide_jax import cli, export, fingerprint, paths, train

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


def test_another_text_under_the_old_name_is_refused(tmp_path, capsys):
  text = tmp_path / "text.txt"
  text.write_text(paths.EMBEDDED_TEXT.read_text()[:30_000])
  run = tmp_path / "run"
  words = tiny_runs.argv(
    run, f"data.train={text}", "routers.steps=2", "recover.steps=0"
  )
  words.append("--config.dense_lora.steps=0")
  assert cli.run(train.main, words) == 0
  text.write_text(text.read_text().replace("the", "teh"))
  capsys.readouterr()
  assert cli.run(train.main, words) == 2
  assert "another training text" in capsys.readouterr().err


def test_fingerprints_see_a_change_and_no_reordered_channels():
  rng = np.random.default_rng(0)
  params = {
    "embed": {"table": jnp.asarray(rng.normal(size=(40, 8)), jnp.bfloat16)},
    "layers": {"ffn": {"up": {"kernel": jnp.asarray(rng.normal(size=(2, 8)))}}},
  }
  before = fingerprint.of_params(params)
  turned = {**params, "layers": {"ffn": {"up": {"kernel": jnp.ones((2, 8))}}}}
  assert fingerprint.of_params(turned) == before
  table = params["embed"]["table"]
  other = {**params, "embed": {"table": table.at[3, 3].add(1)}}
  assert fingerprint.of_params(other) != before
