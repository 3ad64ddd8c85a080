"""`wide_jax.load`: a model from disk, with the routers and LoRA it comes with.

    lm = wide_jax.load("runs/demo/export/recover")
    logits_BTV = lm.logits([lm.tokenizer.encode("To be, or not")])

Width is decided as in evaluation: `keep = logit > threshold`, no noise, at the
thresholds that were calibrated at the end of training. All of it runs through
the masked dense path: skipped groups are computed and set to zero, so what
`stats` reports is what a width-pruned kernel could leave out, not time saved.
"""

import dataclasses
import functools
import os
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from wide_jax import adapters, export, flops, modules, routing, weights
from wide_jax.config import LoraConfig, Method, RouteConfig
from wide_jax.model_config import ModelConfig
from wide_jax.modules import Decoder
from wide_jax.routing import Gate
from wide_jax.tokenizers import Tokenizer, load_tokenizer
from wide_jax.tree_layout import flatten


class LanguageModel:
  """A decoder with its weights; made by `load`.

  Attributes:
    config: the model's shape.
    route: how width is decided; None for the dense model.
    lora_config: of the adapter, None without one.
    merged: whether the adapter was added into the weights.
    thresholds: {"attn": float32 [L], "ffn": float32 [L]}, None when dense.
    dtype: what everything but routers, norms and softmax is computed in.
    report: what was read from the model's files.
  """

  def __init__(
    self,
    loaded: weights.Loaded,
    decoder: Decoder,
    variables: dict[str, Any],
    thresholds: dict[str, np.ndarray] | None,
    lora_config: LoraConfig | None,
    merged: bool,
  ):
    self.config: ModelConfig = decoder.model
    self.route: RouteConfig | None = decoder.route
    self.lora_config = lora_config
    self.merged = merged
    self.thresholds = thresholds
    self.dtype = jnp.dtype(decoder.dtype).name
    self.report = loaded.report
    self._source = loaded.source
    self._decoder = decoder
    self._variables = variables
    self._gate = Gate()
    if thresholds is not None:
      self._gate = routing.threshold_gate(thresholds)
    self._last: dict[str, Any] | None = None

  def __repr__(self) -> str:
    method = "dense" if self.route is None else str(self.route.method)
    return f"LanguageModel({self._source.name!r}, {method}, {self.dtype})"

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """The base model's tokenizer.

    Raises:
      ValueError: the model has none.
    """
    return load_tokenizer(self._source.path)

  def logits(self, ids, mask=None) -> Float[Array, "B T V"]:
    """Next-token logits at every position, float32.

    Args:
      ids: integers [B, T]: an array or nested lists. Padding needs valid ids
        too; their logits mean nothing.
      mask: [B, T], 1 for a token and 0 for padding, on either side; None where
        every row is full. Positions count from each row's first token.

    Compiles once a shape: pad to few lengths.

    Raises:
      ValueError: not two axes of integers, an id outside the vocabulary, a
        mask of another shape, or a row of padding alone.
    """
    ids_BT = _checked_ids(ids, self.config.vocab)
    mask_BT = _checked_mask(mask, ids_BT.shape)
    out_BTV, aux = modules.logits_and_aux(
      self._decoder,
      self._variables,
      jnp.asarray(ids_BT),
      jnp.asarray(mask_BT),
      self._gate,
    )
    self._last = {
      "kept": aux["kept"],
      "tokens": aux["tokens"],
      "lengths": mask_BT.sum(1),
    }
    return out_BTV

  def stats(self) -> dict[str, Any]:
    """What the last call of `logits` skipped, padding left out.

    Returns:
      `tokens`: tokens counted. `attention`, `ffn`: share of the (token, group)
      pairs skipped, averaged over the layers. `mean`: the average of the two,
      the published rate. `flops`: skipped share of all multiply-adds of the
      decoder layers at the call's lengths, K, V and routers included and the
      head left out. `by_layer`: {"attn": [L], "ffn": [L]}, lists of skip rates.

    Raises:
      ValueError: `logits` was not called yet.
    """
    if self._last is None:
      raise ValueError("stats() is about the last call of logits(); call it.")
    kept = {
      kind: np.asarray(value, np.float64)
      for kind, value in self._last["kept"].items()
    }
    tokens = float(self._last["tokens"])
    # In float64, by numpy: the share of a long text needs more than 24 bits.
    skips = {
      kind: 1.0 - value_LG.mean(-1) / tokens
      if value_LG.shape[-1]
      else np.zeros(self.config.n_layers)
      for kind, value_LG in kept.items()
    }
    route = self.route or RouteConfig(method=Method.DENSE)
    # A token sees half of its row on average, so the cost of a row grows with
    # the square of its length, and the mean length is weighted by tokens.
    n = self._last["lengths"].astype(np.float64)
    length = round(float((n * n).sum() / n.sum()))
    macs = flops.layer_macs(self.config, route, length)
    rates = routing.sparsity(skips, macs)
    return {
      "tokens": int(tokens),
      **{name: float(rate) for name, rate in rates.items()},
      "by_layer": {kind: value.tolist() for kind, value in skips.items()},
    }


def load(
  path: str | os.PathLike,
  *,
  routers: str | os.PathLike | None = None,
  lora: str | os.PathLike | None = None,
  dtype: str = "float32",
  merge: bool = False,
) -> LanguageModel:
  """Reads a model, on one device.

  Args:
    path: a Hugging Face directory or id, a `.gguf` file, `pkg:PACKAGE/FILE`,
      `embedded`, or an export directory of `wide_jax.train`, which names its
      base and brings routers, thresholds, channel order and adapter.
    routers: an export directory to take routers, thresholds and channel order
      from, instead of what `path` has.
    lora: a PEFT directory or an export directory to take an adapter from,
      instead of what `path` has.
    dtype: float32, bfloat16 or float16. Routers are float32 always.
    merge: add the adapter into the weights (summed in float32, rounded once
      to `dtype`), rather than compute it beside them.

  Raises:
    FileNotFoundError, ValueError: naming the file, tensor or key that is
      missing, unknown or does not fit the model.
  """
  source = weights.resolve(path)
  adapter_dir = None if lora is None else pathlib.Path(lora).expanduser()
  own = None if source.export is None else export.load_export(source.export)
  chosen = own if routers is None else _export_at(routers)
  if adapter_dir is None and own is not None and own.lora_config is not None:
    adapter_dir = source.export
  if chosen is not None and chosen is not own:
    _warn_of_adapter(chosen, routers, adapter_dir)
  order = None if chosen is None else chosen.channel_order
  # By the base's own path: the order is that of the routers.
  loaded = weights.load_params(
    source.path,
    dtype=dtype,
    channel_order=order,
    put=lambda _, array: jnp.asarray(array),
  )
  loaded = dataclasses.replace(
    loaded, source=dataclasses.replace(source, name=os.fspath(path))
  )
  model, params = loaded.config, loaded.params
  if own is not None:
    _check_same_model(own.model, model, source.export)
  if chosen is not None and chosen is not own:
    _check_same_model(chosen.model, model, routers)
  variables: dict[str, Any] = {"params": params}
  lora_config = None
  if adapter_dir is not None:
    adapter, lora_config = export.load_adapter(
      adapter_dir, model, channel_order=order
    )
    if merge:
      merged = adapters.merge_lora(params, adapter, lora_config)
      variables["params"] = merged.params
    else:
      variables["lora"] = jax.tree.map(jnp.asarray, adapter)
  elif merge:
    raise ValueError(f"merge=True, but {os.fspath(path)!r} brings no adapter.")
  route, thresholds = None, None
  if chosen is not None and chosen.route.method is not Method.DENSE:
    route = chosen.route
    route.check_against(model)
    thresholds = chosen.thresholds
    if thresholds is None:
      zeros = np.zeros(model.n_layers, np.float32)
      thresholds = {kind: zeros for kind in routing.KINDS}
    if "router" in chosen.variables:
      router = chosen.variables["router"]
      variables["router"] = jax.tree.map(jnp.asarray, router)
  decoder = Decoder(
    model,
    route=route,
    lora=lora_config if "lora" in variables else None,
    dtype=jnp.dtype(dtype),
  )
  _check_routers(decoder, variables)
  return LanguageModel(
    loaded, decoder, variables, thresholds, lora_config, merge
  )


# --- checks ------------------------------------------------------------------


def _export_at(place: str | os.PathLike) -> export.Export:
  folder = pathlib.Path(place).expanduser()
  if not (folder / weights.EXPORT).is_file():
    raise ValueError(
      f"routers={os.fspath(place)!r} is no export directory: it has no"
      f" {weights.EXPORT}."
    )
  return export.load_export(folder)


def _warn_of_adapter(chosen, routers, adapter_dir) -> None:
  """Routers trained beside an adapter are wrong without it."""
  if chosen.lora_config is not None and adapter_dir is None:
    warnings.warn(
      f"routers={os.fspath(routers)!r} were trained with an adapter, which is"
      " left out; add lora= with the same directory to have both.",
      stacklevel=3,
    )


def _check_same_model(made_for: ModelConfig, model: ModelConfig, place) -> None:
  odd = [
    f"{field.name} {getattr(made_for, field.name)} there,"
    f" {getattr(model, field.name)} here"
    for field in dataclasses.fields(ModelConfig)
    if getattr(made_for, field.name) != getattr(model, field.name)
  ]
  if odd:
    raise ValueError(f"{place} was made for another model: {'; '.join(odd)}.")


def _check_routers(decoder: Decoder, variables: dict[str, Any]) -> None:
  """Refuses routers that are not those of the route, by name."""
  want = flatten(modules.abstract(decoder).get("router") or {})
  have = flatten(variables.get("router") or {})
  shapes = {name: tuple(leaf.shape) for name, leaf in have.items()}
  for name in sorted(set(want) | set(have)):
    asked = tuple(want[name].shape) if name in want else None
    if shapes.get(name) != asked:
      raise ValueError(
        f"router leaf {name} has shape {shapes.get(name)}; the export's route"
        f" wants {asked}."
      )


def _checked_ids(ids, vocab: int) -> np.ndarray:
  try:
    ids_BT = np.asarray(ids)
  except ValueError as e:
    raise ValueError(
      "ids has rows of different lengths; pad them and give a mask."
    ) from e
  if ids_BT.ndim != 2 or not ids_BT.size or ids_BT.dtype.kind not in "iu":
    raise ValueError(
      f"ids has shape {ids_BT.shape} and dtype {ids_BT.dtype}; want integers"
      " [B, T], at least one of each."
    )
  low, high = int(ids_BT.min()), int(ids_BT.max())
  if low < 0 or high >= vocab:
    bad = low if low < 0 else high
    raise ValueError(f"token id {bad} is outside [0, {vocab}).")
  return ids_BT.astype(np.int32)


def _checked_mask(mask, shape: tuple[int, int]) -> np.ndarray:
  if mask is None:
    return np.ones(shape, np.int32)
  mask_BT = np.asarray(mask)
  if mask_BT.shape != shape:
    raise ValueError(f"mask has shape {mask_BT.shape}; ids has {shape}.")
  if mask_BT.dtype.kind not in "biuf" or (mask_BT != mask_BT).any():
    raise ValueError(f"mask has dtype {mask_BT.dtype}; want 0 and 1.")
  mask_BT = (mask_BT != 0).astype(np.int32)
  empty = np.flatnonzero(mask_BT.sum(1) == 0)
  if empty.size:
    raise ValueError(f"mask leaves no token in row {empty[0]}.")
  return mask_BT
