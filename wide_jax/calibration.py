"""One dense pass over calibration text: channel order and static scores."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from wide_jax import modules, regroup
from wide_jax.axes import Tree
from wide_jax.config import RegroupConfig, RouteConfig
from wide_jax.modules import Decoder


def _walk(decoder: Decoder, params: Tree, batch: Mapping):
  """Yields (layer, activations of the real tokens as numpy)."""
  real_BT = np.asarray(batch["segments"]) > 0
  inputs = [jnp.asarray(batch[k]) for k in ("ids", "segments", "positions")]
  for i, inner in enumerate(modules.layer_walk(decoder, params, *inputs)):
    yield i, {k: np.asarray(v, np.float32)[real_BT] for k, v in inner.items()}


def channel_order(
  decoder: Decoder,
  params: Tree,
  batch: Mapping,
  group: int,
  config: RegroupConfig,
  seed: int,
  progress=lambda layers: layers,
) -> np.ndarray:
  """Order of the FFN channels, int32 [L, F]: order[l, new] = old.

  Args:
    batch: calibration rows, arrays [B, T] (see data.py); its real tokens
      count.
    group: channels a group.
    progress: wraps the iteration over layers (tqdm).
  """
  orders = []
  for i, inner in progress(_walk(decoder, params, batch)):
    down_FD = np.asarray(params["layers"]["ffn"]["down"]["kernel"][i])
    weight_TF = regroup.importance(inner["channels"], down_FD)
    orders.append(
      regroup.cluster_channels(
        weight_TF, group, config.directions, config.iterations, seed
      )
    )
  return np.stack(orders)


def static_logits(
  decoder: Decoder, params: Tree, batch: Mapping, route: RouteConfig
) -> dict:
  """Router tree of `static_width`: groups scored by their activations.

  Scores are standardised over all layers, kind by kind, so that one threshold
  ranks the groups of the whole model.
  """
  scores: dict[str, list] = {"attn": [], "ffn": []}
  layers = params["layers"]
  for i, inner in _walk(decoder, params, batch):
    out_NHD = np.asarray(layers["attn"]["o"]["kernel"][i])
    down_FD = np.asarray(layers["ffn"]["down"]["kernel"][i])
    heads_N = regroup.head_scores(inner["heads"], out_NHD)
    channels_F = regroup.activation_scores(inner["channels"], down_FD)
    scores["attn"].append(regroup.group_scores(heads_N, route.attn_group))
    scores["ffn"].append(regroup.group_scores(channels_F, route.ffn_group))
  tree = {}
  for kind, rows in scores.items():
    log_LG = np.log(np.maximum(np.stack(rows), 1e-12))
    spread = max(float(log_LG.std()), 1e-6)
    tree[f"{kind}_router"] = {
      "logits": ((log_LG - log_LG.mean()) / spread).astype(np.float32)
    }
  return {"layers": tree}
