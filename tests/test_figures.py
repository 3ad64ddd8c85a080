"""Figures are written, hold what they should, and refuse nonsense."""

import os

import matplotlib.image
import numpy as np
import pytest

from wide_jax import figures, metrics


@pytest.fixture
def drawn(monkeypatch):
  """The figures that were saved, beside the files."""
  kept = []
  save = figures._save

  def keep(figure, path):
    kept.append(figure)
    save(figure, path)

  monkeypatch.setattr(figures, "_save", keep)
  return kept


def assert_picture(path):
  image = matplotlib.image.imread(path)
  assert min(image.shape[:2]) > 300
  assert image[..., :3].std() > 0.01  # something is on it
  # the temporary file is gone
  assert [p for p in os.listdir(path.parent) if p.startswith(".")] == []


def test_training_curves(tmp_path, drawn):
  with metrics.MetricsLog(tmp_path, tensorboard=False) as log:
    for step in (1, 2, 3):
      nan = float("nan")
      log.write(
        "routers",
        step,
        "train",
        loss=nan if step == 2 else 1.0 / step,
        lr=1e-3,
        realised=0.1 * step,
        target=0.5,
      )
    log.write("routers", 3, "eval", ppl=2.0)
    log.write("dense_lora", 1, "train", loss=1.0, lr=1e-4)
  figures.training_curves(log.path, tmp_path / "curves.png")
  assert_picture(tmp_path / "curves.png")
  (figure,) = drawn
  loss, loss_b, sparsity, sparsity_b, _, _ = figure.axes
  assert (loss.get_title(), loss_b.get_title()) == ("routers", "dense_lora")
  np.testing.assert_allclose(loss.lines[0].get_ydata(), [1.0, np.nan, 1 / 3])
  np.testing.assert_allclose(sparsity.lines[0].get_ydata(), [10, 20, 30])
  np.testing.assert_allclose(sparsity.lines[1].get_ydata(), [50, 50, 50])
  assert not sparsity_b.lines
  assert sparsity_b.texts[0].get_text() == "not logged"


def test_training_curves_of_nothing(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"stage": "routers", "step": 1, "kind": "eval"}\n')
  with pytest.raises(ValueError, match="no line of kind 'train'"):
    figures.training_curves(path, tmp_path / "x.png")


@pytest.mark.parametrize(
  "shape", [(4, 4, 16), (30, 3, 12), (4, 1, 1), (3, 2, 0)]
)
def test_keep_rates(tmp_path, drawn, shape):
  layers, n_attn, n_ffn = shape
  rng = np.random.default_rng(0)
  attn_LG, ffn_LG = rng.random((layers, n_attn)), rng.random((layers, n_ffn))
  figures.keep_rate_heatmap(attn_LG, ffn_LG, tmp_path / "k.png", "a title")
  assert_picture(tmp_path / "k.png")
  (figure,) = drawn
  images = [np.asarray(ax.images[0].get_array()) for ax in figure.axes[:-1]]
  np.testing.assert_allclose(images[0], attn_LG)
  np.testing.assert_allclose(images[1][:, 0], attn_LG.mean(1))
  assert len(images) == (4 if n_ffn else 2)
  if n_ffn:
    np.testing.assert_allclose(images[2], ffn_LG)


@pytest.mark.parametrize(
  "attn,ffn,message",
  [
    (np.full((2, 2), 1.5), np.zeros((2, 2)), "want \\[0, 1\\]"),
    (np.zeros(2), np.zeros((2, 2)), "want \\[L, G\\]"),
    (np.full((2, 2), np.nan), np.zeros((2, 2)), "want \\[0, 1\\]"),
    (np.zeros((2, 0)), np.zeros((2, 0)), "no group"),
  ],
)
def test_keep_rates_refused(tmp_path, attn, ffn, message):
  with pytest.raises(ValueError, match=message):
    figures.keep_rate_heatmap(attn, ffn, tmp_path / "k.png")
  assert os.listdir(tmp_path) == []


def test_perplexity_bars(tmp_path, drawn):
  summary = {
    "dense": {"ppl": 18.2},
    "random": {"ppl": 940.3},
    "stages": [
      {"name": "routers", "ppl": 31.2, "sparsity": {"realised": 0.4991}},
      {"name": "dense_lora", "ppl": 17.6},
      {"name": "recover", "ppl": None, "sparsity": {"realised": 0.5}},
    ],
  }
  figures.perplexity_bars(summary, tmp_path / "b.png")
  assert_picture(tmp_path / "b.png")
  (ax,) = drawn[0].axes
  assert [p.get_height() for p in ax.patches] == [18.2, 940.3, 31.2, 17.6]
  assert ax.get_yscale() == "log"
  labels = [t.get_text() for t in ax.get_xticklabels()]
  assert labels == ["dense", "random", "routers\n49.9% skipped", "dense_lora"]


def test_perplexity_bars_of_nothing(tmp_path):
  with pytest.raises(ValueError, match="no finite perplexity"):
    figures.perplexity_bars({"dense": {"ppl": None}}, tmp_path / "b.png")
