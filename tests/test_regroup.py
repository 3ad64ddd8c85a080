"""Channel regrouping: planted clusters, balance, determinism, odd input."""

import numpy as np
import pytest

from wide_jax import regroup


def planted(channels, clusters, tokens, seed=0, noise=0.5):
  """Importance with clusters hidden under a permutation, and the labels."""
  rng = np.random.default_rng(seed)
  labels = rng.permutation(np.repeat(np.arange(clusters), channels // clusters))
  signal = rng.normal(size=(tokens, clusters))
  x = signal[:, labels] + noise * rng.normal(size=(tokens, channels))
  # Scale and offset differ by channel and must not matter.
  x = x * rng.uniform(0.1, 10, channels) + rng.normal(size=channels)
  return x.astype(np.float32), labels


def is_order(order, channels):
  return order.dtype == np.int32 and sorted(order) == list(range(channels))


@pytest.mark.parametrize(
  "channels,clusters,tokens",
  [(64, 4, 256), (192, 6, 500), (640, 10, 700), (640, 5, 600)],
)
def test_planted_clusters_are_found(channels, clusters, tokens):
  x, labels = planted(channels, clusters, tokens)
  order = regroup.cluster_channels(x, channels // clusters, directions=16)
  assert is_order(order, channels)
  # 10 or fewer well separated clusters: each group holds one of them alone,
  # and keeps the old order inside.
  for group in order.reshape(clusters, -1):
    assert len(set(labels[group])) == 1
    assert (np.diff(group) > 0).all()
  firsts = order.reshape(clusters, -1)[:, 0]
  assert (np.diff(firsts) > 0).all()


def test_groups_smaller_than_the_clusters_stay_inside_them():
  x, labels = planted(256, 4, 400)
  order = regroup.cluster_channels(x, 16, directions=8)
  pure = [len(set(labels[g])) == 1 for g in order.reshape(-1, 16)]
  assert np.mean(pure) == 1.0


@pytest.mark.parametrize("channels", [192, 640])
def test_deterministic(channels):
  x, _ = planted(channels, 4, 700, noise=3.0)
  a = regroup.cluster_channels(x, 32, seed=5)
  b = regroup.cluster_channels(x.copy(), 32, seed=5)
  np.testing.assert_array_equal(a, b)
  assert is_order(a, channels)


def test_randomised_and_exact_projections_agree():
  # 640 channels take the sketch; the singular values it finds are the exact
  # ones to the accuracy of three power iterations.
  x, _ = planted(640, 10, 700, noise=2.0)
  x = regroup._standardise(x)
  got = regroup._project(x, 10, np.random.default_rng(0))
  exact = np.linalg.svd(x, compute_uv=False)[:10]
  np.testing.assert_allclose(np.linalg.norm(got, axis=0), exact, rtol=1e-3)
  small = x[:, :300]
  got = regroup._project(small, 10, np.random.default_rng(0))
  exact = np.linalg.svd(small, compute_uv=False)[:10]
  np.testing.assert_allclose(np.linalg.norm(got, axis=0), exact, rtol=1e-3)
  tall = x[:100]
  got = regroup._project(tall, 10, np.random.default_rng(0))
  exact = np.linalg.svd(tall, compute_uv=False)[:10]
  np.testing.assert_allclose(np.linalg.norm(got, axis=0), exact, rtol=1e-3)


def test_filling_is_the_greedy_walk_over_all_pairs():
  rng = np.random.default_rng(0)
  for channels, clusters in ((12, 3), (40, 5), (64, 16)):
    similarity = rng.normal(size=(channels, clusters)).astype(np.float32)
    capacity = channels // clusters
    want = np.full(channels, -1)
    for pair in np.argsort(-similarity, axis=None):
      channel, cluster = divmod(int(pair), clusters)
      if want[channel] < 0 and (want == cluster).sum() < capacity:
        want[channel] = cluster
    got = regroup._fill(similarity, capacity)
    np.testing.assert_array_equal(got, want)


def test_equal_channels_still_make_balanced_groups():
  x = np.tile(np.arange(50, dtype=np.float32)[:, None], (1, 64))
  assert is_order(regroup.cluster_channels(x, 16), 64)


def test_dead_channels():
  x, labels = planted(128, 4, 300)
  x[:, ::4] = 3.0  # no variance: nothing to go by
  order = regroup.cluster_channels(x, 32, directions=8)
  assert is_order(order, 128)
  alive = np.arange(128) % 4 != 0
  for group in order.reshape(4, 32):
    counts = np.bincount(labels[group][alive[group]], minlength=4)
    assert counts.max() == counts.sum()
  assert is_order(regroup.cluster_channels(np.ones((9, 64)), 16), 64)


def test_few_tokens_and_one_group():
  x, _ = planted(64, 4, 5)
  assert is_order(regroup.cluster_channels(x, 16, directions=48), 64)
  assert is_order(regroup.cluster_channels(x[:1], 16), 64)
  np.testing.assert_array_equal(regroup.cluster_channels(x, 64), np.arange(64))
  assert is_order(regroup.cluster_channels(x, 1), 64)


def test_permuting_channels_leaves_the_ffn_unchanged():
  rng = np.random.default_rng(0)
  x, gate, up = (rng.normal(size=s) for s in ((9, 8), (8, 64), (8, 64)))
  down = rng.normal(size=(64, 8))

  def ffn(gate, up, down):
    g = x @ gate
    h = g / (1 + np.exp(-g)) * (x @ up)
    return h, h @ down

  h, y = ffn(gate, up, down)
  order = regroup.cluster_channels(regroup.importance(h, down), 16)
  _, again = ffn(gate[:, order], up[:, order], down[order])
  np.testing.assert_allclose(again, y, rtol=1e-12, atol=1e-12)


def test_importance_and_scores_by_hand():
  h = np.asarray([[1.0, -4.0], [3.0, 0.0]])
  down = np.asarray([[3.0, 4.0], [0.0, 1.0]])  # norms 5 and 1
  got = regroup.importance(h, down)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, np.sqrt([[5, 4], [15, 0]]), rtol=1e-6)
  scores = regroup.activation_scores(h, down)
  np.testing.assert_allclose(scores, [5 * np.sqrt(5), np.sqrt(8)], rtol=1e-6)
  groups = regroup.group_scores(scores, 2)
  np.testing.assert_allclose(groups, [np.sqrt(125 + 8)], rtol=1e-6)


def test_head_scores_are_what_heads_add():
  rng = np.random.default_rng(0)
  a, w = rng.normal(size=(50, 3, 4)), rng.normal(size=(3, 4, 7))
  a[:, 2] = 0
  added = np.einsum("tnh,nhd->tnd", a, w)
  want = np.sqrt(np.square(added).sum(-1).mean(0))
  np.testing.assert_allclose(regroup.head_scores(a, w), want, rtol=1e-5)


def test_half_precision_input():
  h = np.ones((4, 32), np.float16) * 3e4  # its square overflows float16
  down = np.ones((32, 8), np.float16) * 100
  assert np.isfinite(regroup.activation_scores(h, down)).all()
  assert np.isfinite(regroup.importance(h, down)).all()


def test_nonsense_is_refused():
  x = np.ones((4, 64), np.float32)
  with pytest.raises(ValueError, match="group=24 must divide 64"):
    regroup.cluster_channels(x, 24)
  with pytest.raises(ValueError, match=r"shape \(0, 64\)"):
    regroup.cluster_channels(x[:0], 16)
  with pytest.raises(ValueError, match="directions=0"):
    regroup.cluster_channels(x, 16, directions=0)
  x[0, 0] = np.nan
  with pytest.raises(ValueError, match="importance: 1 are not finite"):
    regroup.cluster_channels(x, 16)
  with pytest.raises(ValueError, match=r"\(4, 64\) do not fit .*\(32, 8\)"):
    regroup.importance(x, np.ones((32, 8)))
  with pytest.raises(ValueError, match=r"heads \(4, 2, 8\)"):
    regroup.head_scores(np.ones((4, 2, 8)), np.ones((3, 8, 8)))
  with pytest.raises(ValueError, match="group=3 must divide 8"):
    regroup.group_scores(np.ones(8), 3)
