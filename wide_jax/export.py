"""Our export directory, and models and adapters as others read them.

An export holds what was trained and names its base:

  wide.json                  base, shapes, groups, thresholds, and `extra`
  routers.safetensors        routers (and the FFN channel order), float32
  adapter_model.safetensors  LoRA in PEFT's format, in the base's own order
  adapter_config.json

Directories are written beside their place and renamed, so that a reader sees
the old one or the new one, whole.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np

from wide_jax.adapters import lora_from_peft, lora_to_peft
from wide_jax.config import LoraConfig, RouteConfig, from_config_dict
from wide_jax.hf_directory import INDEX, SINGLE
from wide_jax.model_config import ModelConfig
from wide_jax.safetensors_io import (
  Item,
  SafetensorsFile,
  item,
  read_json,
  write_json,
  write_safetensors,
)
from wide_jax.tree_layout import flatten, layout, param_shapes, unflatten
from wide_jax.weights import (
  CHANNEL_ORDER,
  EXPORT,
  ROUTERS,
  check_channel_order,
)

FORMAT = 1
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"

_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "vocab.json",
  "merges.txt",
  "generation_config.json",
)
_ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}


@contextlib.contextmanager
def replace_directory(
  place: str | os.PathLike, marker: str
) -> Generator[pathlib.Path]:
  """`with replace_directory(place, marker) as tmp`: fill `tmp`, get `place`.

  Whatever was at `place` stays until everything is written. An exception
  inside leaves it untouched.

  Args:
    marker: as for `check_replaceable`.

  Raises:
    ValueError: as `check_replaceable`.
  """
  place = pathlib.Path(place).expanduser().absolute()
  old = place.with_name(f".{place.name}.replaced")
  recover_directory(place)
  check_replaceable(place, marker)
  place.parent.mkdir(parents=True, exist_ok=True)
  tmp = pathlib.Path(
    tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.writing-")
  )
  try:
    yield tmp
    umask = os.umask(0)  # mkdtemp makes it private; undo that
    os.umask(umask)
    os.chmod(tmp, 0o777 & ~umask)
    if old.exists():
      shutil.rmtree(old)
    if place.exists():
      os.rename(place, old)
    os.rename(tmp, place)
    shutil.rmtree(old, ignore_errors=True)
  finally:
    shutil.rmtree(tmp, ignore_errors=True)


def check_replaceable(place: str | os.PathLike, marker: str) -> None:
  """Refuses to write a directory over something else.

  Args:
    marker: a file that nobody else writes and that an existing directory must
      hold to be replaced, so that a mistyped path destroys nothing; "" where
      only a new or an empty directory will do.

  Raises:
    ValueError: `place` is a file, or a directory of something else.
  """
  place = pathlib.Path(place).expanduser().absolute()
  if place.exists() and not place.is_dir():
    raise ValueError(f"{place} is a file; want a directory to write to.")
  if place.is_dir() and any(place.iterdir()):
    if not marker or not (place / marker).is_file():
      lacks = f" and holds no {marker}" if marker else ""
      raise ValueError(f"{place} is not empty{lacks}; it is left alone.")


def recover_directory(place: str | os.PathLike) -> None:
  """Puts the old directory back where a crash hit between two renames."""
  place = pathlib.Path(place).expanduser().absolute()
  old = place.with_name(f".{place.name}.replaced")
  if old.is_dir() and not place.exists():
    os.rename(old, place)


# --- our export --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Export:
  """What an export directory holds.

  Attributes:
    base: the model it was trained on, as `weights.load_params` takes it.
    model: the base's shape.
    route: method, groups, ranks.
    lora_config: None without an adapter.
    variables: {"router": tree, "lora": tree}, float32, what is there of them;
      `lora` in the channel order of `channel_order`.
    thresholds: {"attn": float32 [L], "ffn": float32 [L]}, or None.
    channel_order: int32 [L, F], or None.
    extra: whatever else was given; a run gives sparsity, rate and seed.
  """

  base: str
  model: ModelConfig
  route: RouteConfig
  lora_config: LoraConfig | None
  variables: dict[str, Any]
  thresholds: dict[str, np.ndarray] | None
  channel_order: np.ndarray | None
  extra: dict[str, Any]


def save_export(
  folder: str | os.PathLike,
  *,
  base: str,
  model_config: ModelConfig,
  route: RouteConfig,
  lora_config: LoraConfig | None,
  variables: Mapping[str, Any],
  thresholds: Mapping[str, Any] | None = None,
  channel_order=None,
  extra: Mapping[str, Any] | None = None,
) -> pathlib.Path:
  """Writes an export directory, replacing an older one only when complete.

  Args:
    base: path, hub id, `pkg:...` or `embedded`; a local path is kept absolute.
    lora_config: of `variables["lora"]`; None where there is no adapter.
    variables: {"router": tree, "lora": tree}; other collections are ignored.
    thresholds: kind -> [L] or one number.
    channel_order: int [L, F] the FFN channels are in.
    extra: further JSON values to keep.
  """
  if os.path.exists(os.path.expanduser(base)):
    base = os.path.abspath(os.path.expanduser(base))
  router = {
    name: np.asarray(leaf)
    for name, leaf in flatten(variables.get("router") or {}).items()
  }
  tensors = dict(router)
  if channel_order is not None:
    tensors[CHANNEL_ORDER] = check_channel_order(
      channel_order, model_config.n_layers, model_config.d_ff
    )
  lora = variables.get("lora") or None
  if (lora is None) != (lora_config is None):
    raise ValueError("give lora_config and variables['lora'], or neither.")
  n_layers = model_config.n_layers
  about = {
    "format": FORMAT,
    "base": base,
    "model": dataclasses.asdict(model_config),
    "route": dataclasses.asdict(route) | {"method": str(route.method)},
    "groups": route.groups(model_config),
    "lora": None if lora_config is None else dataclasses.asdict(lora_config),
    "thresholds": None
    if thresholds is None
    else {k: _per_layer(k, v, n_layers) for k, v in thresholds.items()},
    "regrouped": channel_order is not None,
    "tensors": {
      name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()
    },
    "extra": dict(extra or {}),
  }
  with replace_directory(folder, EXPORT) as tmp:
    write_safetensors(tmp / ROUTERS, [item(*kv) for kv in tensors.items()])
    if lora is not None and lora_config is not None:
      save_adapter(
        tmp,
        lora,
        lora_config,
        model_config,
        channel_order=channel_order,
        base=base,
      )
    write_json(tmp / EXPORT, about)
  return pathlib.Path(folder)


def _per_layer(kind: str, value, n_layers: int) -> list[float]:
  array = np.asarray(value, np.float32)
  if array.shape not in ((), (n_layers,)):
    raise ValueError(
      f"thresholds[{kind!r}] has shape {array.shape}; want [{n_layers}]."
    )
  # A float32 survives the trip through a JSON double to the bit.
  return [float(x) for x in np.broadcast_to(array, (n_layers,))]


def load_export(folder: str | os.PathLike) -> Export:
  """Reads what `save_export` wrote; the base itself is not touched.

  Raises:
    FileNotFoundError, ValueError: naming the file, key or tensor.
  """
  folder = pathlib.Path(folder).expanduser()
  recover_directory(folder)
  about = read_json(folder / EXPORT)
  if about.get("format") != FORMAT:
    raise ValueError(
      f"{folder / EXPORT} has format {about.get('format')!r}; this version"
      f" reads {FORMAT}."
    )
  lacking = sorted({"base", "model", "route", "tensors"} - set(about))
  if lacking:
    raise ValueError(f"{folder / EXPORT} lacks {lacking}.")
  if not isinstance(about["tensors"], dict):
    raise ValueError(f"{folder / EXPORT} has tensors={about['tensors']!r}.")
  model = from_config_dict(ModelConfig, about["model"])
  file = SafetensorsFile(folder / ROUTERS)
  if set(file.entries) != set(about["tensors"]):
    odd = sorted(set(file.entries) ^ set(about["tensors"]))
    raise ValueError(f"{folder}: {ROUTERS} and {EXPORT} differ in {odd}.")
  tensors = {name: np.array(file.read(name)) for name in file.entries}
  for name, (dtype, shape) in about["tensors"].items():
    t = tensors[name]
    if [str(t.dtype), list(t.shape)] != [dtype, shape]:
      raise ValueError(
        f"{name} in {file.path} is {t.dtype} {t.shape}; {EXPORT} says {dtype}"
        f" {shape}."
      )
  order = tensors.pop(CHANNEL_ORDER, None)
  if (order is not None) != bool(about.get("regrouped")):
    raise ValueError(f"{folder}: regrouped, but no {CHANNEL_ORDER}, or both.")
  if order is not None:
    order = check_channel_order(order, model.n_layers, model.d_ff)
  variables = {"router": unflatten(tensors)} if tensors else {}
  lora_config = None
  if about.get("lora"):
    variables["lora"], lora_config = load_adapter(
      folder, model, channel_order=order
    )
    if lora_config != (want := from_config_dict(LoraConfig, about["lora"])):
      raise ValueError(
        f"{folder}: {ADAPTER_CONFIG} says {lora_config}, {EXPORT} {want}."
      )
  return Export(
    base=about["base"],
    model=model,
    route=from_config_dict(RouteConfig, about["route"]),
    lora_config=lora_config,
    variables=variables,
    thresholds=_thresholds(about.get("thresholds"), model, folder / EXPORT),
    channel_order=order,
    extra=about.get("extra") or {},
  )


def _thresholds(found, model: ModelConfig, place) -> dict | None:
  """{"attn": float32 [L], "ffn": float32 [L]}, or None without any."""
  if found is None:
    return None
  try:
    out = {k: np.asarray(found[k], np.float32) for k in ("attn", "ffn")}
  except (KeyError, TypeError, ValueError, IndexError) as e:
    raise ValueError(f"{place} has thresholds={found!r}.") from e
  for kind, value in out.items():
    if value.shape != (model.n_layers,) or np.isnan(value).any():
      raise ValueError(
        f"{place} has {kind} thresholds {found[kind]}; want"
        f" {model.n_layers} numbers."
      )
  return out


# --- PEFT directories --------------------------------------------------------


def save_adapter(
  folder: str | os.PathLike,
  lora: Mapping[str, Any],
  lora_config: LoraConfig,
  model_config: ModelConfig,
  *,
  channel_order=None,
  base: str = "",
) -> None:
  """Writes `adapter_model.safetensors` and `adapter_config.json`."""
  tensors, config = lora_to_peft(
    lora, lora_config, model_config, channel_order=channel_order, base=base
  )
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  write_safetensors(folder / ADAPTER, [item(*kv) for kv in tensors.items()])
  write_json(folder / ADAPTER_CONFIG, config)


def load_adapter(
  folder: str | os.PathLike, model_config: ModelConfig, *, channel_order=None
) -> tuple[dict[str, Any], LoraConfig]:
  """Reads a PEFT directory, ours or anybody's; see `lora_from_peft`."""
  folder = pathlib.Path(folder).expanduser()
  config = read_json(folder / ADAPTER_CONFIG)
  file = SafetensorsFile(folder / ADAPTER)
  tensors = {name: file.read(name) for name in file.entries}
  try:
    return lora_from_peft(
      tensors, config, model_config, channel_order=channel_order
    )
  except ValueError as e:
    raise ValueError(f"{folder}: {e}") from e


# --- plain Hugging Face models -----------------------------------------------


def write_hf(
  folder: str | os.PathLike,
  config: ModelConfig,
  params: Mapping[str, Any],
  *,
  tokenizer_dir: str | os.PathLike | None = None,
  channel_order=None,
  shard_bytes: int = 5_000_000_000,
  files: Mapping[str, str] | None = None,
  marker: str = "",
) -> pathlib.Path:
  """Writes a model that transformers loads, one tensor in memory at a time.

  Args:
    params: the tree, numpy or jax leaves, stored in their own dtype.
    tokenizer_dir: a Hugging Face directory; the tokenizer's files there are
      copied, and special token ids of its config.json kept.
    channel_order: int [L, F] the FFN channels are in; the file gets the
      original order.
    shard_bytes: a larger model is split and indexed.
    files: name -> text of further files for the directory.
    marker: which of `files` an older directory must hold to be replaced; by
      default none is. `config.json` would not do: runs and all models have one.

  Raises:
    ValueError: `folder` holds something else, a leaf of the wrong shape, or a
      model that no config.json can describe.
  """
  flat = flatten(params)
  want = param_shapes(config)
  if set(flat) != set(want):
    odd = sorted(set(flat) ^ set(want))
    raise ValueError(f"the parameters and their config differ in {odd}.")
  for path, shape in want.items():
    if tuple(flat[path].shape) != shape:
      raise ValueError(
        f"{path} has shape {tuple(flat[path].shape)}; its config wants {shape}."
      )
  inverse = None
  if channel_order is not None:
    order = check_channel_order(channel_order, config.n_layers, config.d_ff)
    inverse = np.argsort(order, axis=1)
  hf = _hf_config(config, flat, tokenizer_dir)
  with replace_directory(folder, marker) as tmp:
    _write_shards(tmp, _hf_items(config, flat, inverse), shard_bytes)
    if tokenizer_dir is not None:
      _copy_tokenizer(pathlib.Path(tokenizer_dir), tmp)
    for name, text in (files or {}).items():
      (tmp / name).write_text(text, encoding="utf-8")
    write_json(tmp / "config.json", hf)
  return pathlib.Path(folder)


def _copy_tokenizer(source: pathlib.Path, folder: pathlib.Path) -> None:
  for name in _TOKENIZER_FILES:
    if (source / name).is_file():
      shutil.copyfile(source / name, folder / name)


def _hf_config(config: ModelConfig, flat, tokenizer_dir) -> dict[str, Any]:
  hf = {
    "architectures": [_ARCHITECTURES[config.model_type]],
    **config.to_hf(),
    "dtype": str(flat["embed/table"].dtype),
  }
  if tokenizer_dir is not None:
    path = pathlib.Path(tokenizer_dir) / "config.json"
    if path.is_file():
      old = read_json(path)
      ids = ("bos_token_id", "eos_token_id", "pad_token_id")
      hf |= {key: old[key] for key in ids if key in old}
  return hf


def _hf_items(config: ModelConfig, flat, inverse) -> Iterator[Item]:
  for leaf in layout(config):
    value = flat[leaf.path]
    for i in range(config.n_layers if leaf.stacked else 1):

      def make(leaf=leaf, value=value, i=i):
        array = np.asarray(value[i] if leaf.stacked else value)
        if leaf.transposed:
          n_out, n_in = leaf.hf_shape
          array = array.reshape(n_in, n_out).T
        array = array.reshape(leaf.hf_shape)
        if leaf.channels is not None and inverse is not None:
          array = np.take(array, inverse[i], axis=leaf.channels)
        return array

      dtype = np.dtype(value.dtype)
      yield Item(leaf.hf.format(i), dtype, leaf.hf_shape, make)


def _write_shards(folder, items: Iterator[Item], shard_bytes: int) -> None:
  shards: list[list[Item]] = [[]]
  size = total = 0
  for it in items:
    if shards[-1] and size + it.n_bytes > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(it)
    size += it.n_bytes
    total += it.n_bytes
  if len(shards) == 1:
    write_safetensors(folder / SINGLE, shards[0])
    return
  table = {}
  for i, shard in enumerate(shards):
    name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
    write_safetensors(folder / name, shard)
    table |= {it.name: name for it in shard}
  write_json(
    folder / INDEX, {"metadata": {"total_size": total}, "weight_map": table}
  )
