"""The device mesh, and where every leaf of the variable tree lives on it.

Mesh axes: `data` (batches), `fsdp` (batches, and weights split along D) and
`tensor` (heads, FFN channels, vocabulary and router groups). One table names
the axes of every leaf of the tree in BUILD_NOTES.md; each leaf matches exactly
one line of it.

A shard never splits a width group: heads and channels go on `tensor` only
where the number of their groups divides by it. What does not divide is
replicated on that axis, and said.
"""

import collections
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wide_jax.config import MeshConfig
from wide_jax.model_config import ModelConfig

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Letters of the legend, one a dimension; `.` is never split. Ga and Gf are the
# routers' groups. Norm scales and D-wide biases are too small to be worth a
# gather.
_MESH_AXIS = {
  "D": "fsdp",
  "V": "tensor",
  "N": "tensor",
  "K": "tensor",
  "F": "tensor",
  "Ga": "tensor",
  "Gf": "tensor",
}
RULES = (
  (r"params/embed/table", "V D"),
  (r"params/head/kernel", "V D"),
  (r"params/final_norm/scale", "."),
  (r"params/layers/(attn_norm|ffn_norm)/scale", ". ."),
  (r"params/layers/attn/(q_norm|k_norm)/scale", ". ."),
  (r"params/layers/attn/q/kernel", ". D N ."),
  (r"params/layers/attn/q/bias", ". N ."),
  (r"params/layers/attn/(k|v)/kernel", ". D K ."),
  (r"params/layers/attn/(k|v)/bias", ". K ."),
  (r"params/layers/attn/o/kernel", ". N . D"),
  (r"params/layers/attn/o/bias", ". ."),
  (r"params/layers/ffn/(gate|up)/kernel", ". D F"),
  (r"params/layers/ffn/(gate|up)/bias", ". F"),
  (r"params/layers/ffn/down/kernel", ". F D"),
  (r"params/layers/ffn/down/bias", ". ."),
  (r"router/layers/(attn|ffn|layer)_router/down", ". D ."),
  (r"router/layers/(attn|ffn|layer)_router/down_bias", ". ."),
  (r"router/layers/attn_router/up", ". . Ga"),
  (r"router/layers/attn_router/(up_bias|logits)", ". Ga"),
  (r"router/layers/ffn_router/up", ". . Gf"),
  (r"router/layers/ffn_router/(up_bias|logits)", ". Gf"),
  (r"router/layers/layer_router/up", ". . ."),
  (r"router/layers/layer_router/up_bias", ". ."),
  (r"lora/layers/attn/(q|k|v)/a", ". D ."),
  (r"lora/layers/attn/q/b", ". . N ."),
  (r"lora/layers/attn/(k|v)/b", ". . K ."),
  (r"lora/layers/attn/o/a", ". N . ."),
  (r"lora/layers/attn/o/b", ". . D"),
  (r"lora/layers/ffn/(gate|up)/a", ". D ."),
  (r"lora/layers/ffn/(gate|up)/b", ". . F"),
  (r"lora/layers/ffn/down/a", ". F ."),
  (r"lora/layers/ffn/down/b", ". . D"),
)
_MEANING = {
  "D": "model width",
  "V": "vocabulary",
  "N": "query heads",
  "K": "kv heads",
  "F": "FFN channels",
  "Ga": "attention groups of the routers",
  "Gf": "FFN groups of the routers",
}
_log = logging.getLogger(__name__)
_logged: set[str] = set()


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
  """A mesh with axes `data`, `fsdp`, `tensor`.

  Args:
    config: sizes; -1 takes what the others leave. Where the sizes need fewer
      devices than there are, the first ones are used and this is logged (one
      process only).
    devices: default `jax.devices()`.

  Raises:
    ValueError: the sizes do not divide the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = [config.data, config.fsdp, config.tensor]
  text = ", ".join(f"{a}={s}" for a, s in zip(AXES, sizes, strict=True))
  asked = math.prod(s for s in sizes if s != -1)
  if not devices or len(devices) % asked:
    raise ValueError(
      f"mesh {text} needs a multiple of {asked} devices; there are"
      f" {len(devices)}."
    )
  sizes = [len(devices) // asked if s == -1 else s for s in sizes]
  used = math.prod(sizes)
  if used < len(devices):
    if jax.process_count() > 1:
      raise ValueError(
        f"mesh {text} uses {used} of {len(devices)} devices; several processes"
        " need all of them."
      )
    _log_once(f"mesh {text} uses {used} of {len(devices)} devices.")
  # Auto said aloud: jax.make_mesh defaults to Explicit axes.
  return jax.make_mesh(
    tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:used]
  )


def specs(
  tree: Mapping[str, Any],
  model: ModelConfig,
  groups: Mapping[str, int],
  mesh: Mesh,
) -> tuple[Any, list[str]]:
  """Shardings of a variable tree.

  Args:
    tree: collections `params`, `router`, `lora` (any of them) of arrays or
      ShapeDtypeStructs.
    model: the model's shape.
    groups: `RouteConfig.groups(model)`: width groups of "attn" and "ffn". One
      group, or none, is the whole sublayer: nothing there is routed by parts,
      so heads and channels are split as they come.
    mesh: from `make_mesh`.

  Returns:
    The same tree of NamedSharding, and one sentence for each axis of the model
    that had to be replicated (also logged, once a process).

  Raises:
    ValueError: a leaf that matches no line of `RULES` or several, or whose
      number of axes is not the line's.
  """
  parts = {
    "D": model.d_model,
    "V": model.vocab,
    "N": groups["attn"] if groups["attn"] > 1 else model.n_heads,
    "K": model.n_kv_heads,
    "F": groups["ffn"] if groups["ffn"] > 1 else model.d_ff,
    "Ga": groups["attn"],
    "Gf": groups["ffn"],
  }
  replicated = collections.defaultdict(list)

  def axis(letter: str, size: int, name: str) -> str | None:
    mesh_axis = _MESH_AXIS.get(letter)
    if mesh_axis is None or mesh.shape[mesh_axis] == 1 or size == 1:
      return None
    ways = mesh.shape[mesh_axis]
    if parts[letter] % ways == 0 and size % ways == 0:
      return mesh_axis
    replicated[letter, size].append(name)
    return None

  def one(path, leaf):
    name = leaf_name(path)
    letters = _match(name, leaf.shape)
    axes = [axis(a, n, name) for a, n in zip(letters, leaf.shape, strict=True)]
    return NamedSharding(mesh, P(*axes))

  shardings = jax.tree_util.tree_map_with_path(one, tree)
  notes = []
  for (letter, size), names in replicated.items():
    mesh_axis = _MESH_AXIS[letter]
    count = f"{size} {_MEANING[letter]}"
    if parts[letter] != size:
      count += f" in {parts[letter]} groups"
    notes.append(
      f"{count} do not divide by {mesh_axis}={mesh.shape[mesh_axis]};"
      f" replicated on {mesh_axis}: {', '.join(names)}."
    )
  for note in notes:
    _log_once(note)
  return shardings, notes


def optimiser_specs(opt_state, trainable, shardings):
  """Shardings of an optax state: a moment lives where its parameter does.

  A state leaf belongs to the parameter whose path its own path ends in, if
  their shapes agree (optax keeps a tree of the parameters' structure under
  `mu`, `nu`, `trace`, wherever it is nested). All else, counts and factored
  moments, is replicated.

  Args:
    opt_state: the state, or its `jax.eval_shape`.
    trainable: the tree given to `tx.init`, arrays or ShapeDtypeStructs.
    shardings: NamedSharding of each of its leaves, at least one.

  Returns:
    A tree of NamedSharding with the structure of `opt_state`.
  """
  flat = jax.tree_util.tree_flatten_with_path(trainable)[0]
  places = jax.tree.leaves(shardings)
  known = {
    leaf_name(path): (leaf.shape, place)
    for (path, leaf), place in zip(flat, places, strict=True)
  }
  if not known:
    raise ValueError("the optimiser has no trainable leaf.")
  everywhere = NamedSharding(places[0].mesh, P())

  def one(path, leaf):
    keys = leaf_name(path).split("/")
    for start in range(len(keys)):  # the longest suffix first
      shape, place = known.get("/".join(keys[start:]), (None, None))
      if shape == leaf.shape:
        return place
    return everywhere

  return jax.tree_util.tree_map_with_path(one, opt_state)


def batch_spec(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
  """Sharding of `[B, T]` or of `[A, B, T]` micro-batches: B over data, fsdp.

  Raises:
    ValueError: another number of axes, or B does not divide by data * fsdp.
  """
  if len(shape) not in (2, 3):
    raise ValueError(f"a batch is [B, T] or [A, B, T]; got shape {shape}.")
  batch, ways = shape[-2], math.prod(mesh.shape[a] for a in BATCH_AXES)
  if batch % ways:
    raise ValueError(
      f"batch_size={batch} must divide by data * fsdp = {mesh.shape['data']} *"
      f" {mesh.shape['fsdp']} = {ways}."
    )
  lead = (None,) * (len(shape) - 2)
  return NamedSharding(mesh, P(*lead, BATCH_AXES, None))


def activation_spec(mesh: Mesh) -> NamedSharding:
  """Sharding of activations [B, T, ...]: B over data and fsdp, as batches."""
  return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of a value that every device holds whole."""
  return NamedSharding(mesh, P())


def put(tree, shardings):
  """Places a tree of arrays; each process hands over only its own shards.

  Args:
    tree: numpy arrays that every process holds whole (or can index, such as a
      memory map), or jax arrays, which are resharded.
    shardings: one sharding a leaf, or one for all.
  """

  def one(leaf, place):
    if isinstance(leaf, jax.Array):
      return jax.device_put(leaf, place)
    leaf = np.asanyarray(leaf)
    return jax.make_array_from_callback(
      leaf.shape, place, lambda index: np.asarray(leaf[index])
    )

  if isinstance(shardings, jax.sharding.Sharding):
    return jax.tree.map(lambda leaf: one(leaf, shardings), tree)
  return jax.tree.map(one, tree, shardings)


def abstract(tree, shardings):
  """ShapeDtypeStructs that carry shardings: what `checkpoint` restores into."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )


def leaf_name(path) -> str:
  """`params/layers/attn/q/kernel` from a jax key path."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _match(name: str, shape: tuple[int, ...]) -> list[str]:
  hits = [axes for rule, axes in RULES if re.fullmatch(rule, name)]
  if len(hits) != 1:
    raise ValueError(
      f"{name} {shape} matches {len(hits)} sharding rules; want exactly 1."
    )
  letters = hits[0].split()
  if len(letters) != len(shape):
    raise ValueError(
      f"{name} has shape {shape}; its sharding rule [{hits[0]}] wants"
      f" {len(letters)} axes."
    )
  return letters


def _log_once(message: str) -> None:
  if message not in _logged:
    _logged.add(message)
    _log.warning(message)
