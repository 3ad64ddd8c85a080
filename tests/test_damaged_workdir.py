"""Files of a work directory that somebody emptied, cut or edited."""

import json

import numpy as np
import pytest

from wide_jax import prepare, train
from wide_jax.config import RunConfig


@pytest.mark.parametrize("name", ["config.json", "results.json"])
@pytest.mark.parametrize("text", ["", "[]", "null", '{"stages": 3', "\0\0"])
def test_damaged_json_is_named(tmp_path, name, text):
  run = RunConfig()
  good = {"config.json": train._plain(run), "results.json": {"stages": {}}}
  for file, value in good.items():
    (tmp_path / file).write_text(json.dumps(value))
  assert train._open_results(run, tmp_path) == {"stages": {}}
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=name):
    train._open_results(run, tmp_path)


def test_results_without_stages_are_named(tmp_path):
  run = RunConfig()
  (tmp_path / "config.json").write_text(json.dumps(train._plain(run)))
  (tmp_path / "results.json").write_text("{}")
  with pytest.raises(ValueError, match=r"results\.json has stages=None"):
    train._open_results(run, tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200])
def test_a_damaged_channel_order_is_named(tmp_path, keep):
  file = tmp_path / prepare.ORDER
  order = np.tile(np.arange(64, dtype=np.int32), (2, 1))
  np.save(file, order)
  np.testing.assert_array_equal(prepare._read_order(file), order)
  file.write_bytes(file.read_bytes()[:keep])
  with pytest.raises(ValueError, match=r"channel_order\.npy is damaged"):
    prepare._read_order(file)
