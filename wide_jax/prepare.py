"""Everything a run needs before its first step: model, text, channel order."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh

from wide_jax import (
  atomic,
  calibration,
  data,
  fingerprint,
  flops,
  modules,
  ops,
  rope,
  sharding,
  text_sources,
  weights,
)
from wide_jax.config import Method, RunConfig
from wide_jax.evaluate import Evaluator, window_batches
from wide_jax.model_config import ModelConfig
from wide_jax.modules import Decoder
from wide_jax.tokenizers import Tokenizer, load_tokenizer

# More documents than this in one row, and a row is masked instead of split:
# the packed attention path makes room for so many sequences in every row.
MOST_SEGMENTS = 32

# In the work directory: the channel order that this run settled on.
ORDER = "channel_order.npy"


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A loaded model and tokenised text, placed on the mesh.

  Attributes:
    run: the configuration.
    workdir: where the run writes.
    mesh: devices.
    model: the model's shape.
    params: frozen backbone, channels in `channel_order`.
    channel_order: int32 [L, F], or None where channels were left alone.
    static: router tree of `static_width` with scores measured on activations;
      None for everything else.
    batches: training batches by step.
    calibration: two lists of batches: to set thresholds, to check them.
    texts: window length -> batches of the evaluation text.
    max_segments: most segments in a training row, 0 for too many to split.
    inputs: fingerprint of everything that a resumed run must find unchanged.
    notes: what was found, one sentence each.
  """

  run: RunConfig
  workdir: pathlib.Path
  mesh: Mesh
  model: ModelConfig
  params: Any
  channel_order: np.ndarray | None
  static: Any
  batches: data.Batches
  calibration: tuple[list, list]
  texts: dict[int, list]
  max_segments: int
  inputs: dict[str, str]
  notes: tuple[str, ...]

  def decoder(self, route, lora) -> Decoder:
    """The decoder of this run with these routers and adapters."""
    source = self.run.model
    return Decoder(
      self.model,
      route=route,
      lora=lora,
      dtype=jnp.dtype(source.dtype),
      remat=source.remat,
      attention=source.attention,
      max_segments=self.max_segments,
      spread=sharding.activation_spec(self.mesh),
    )

  def macs(self, route, length: int) -> flops.LayerMacs:
    return flops.layer_macs(self.model, route, length)

  def evaluator(self, route, lora, length: int) -> Evaluator:
    """An evaluator for windows of `length` tokens."""
    macs = self.macs(route or self.run.route, length)
    return Evaluator(self.decoder(route, lora), self.place, macs)

  def place(self, batch: dict) -> dict:
    """A host batch on the mesh, rows spread over data and fsdp."""
    shape = next(iter(batch.values())).shape
    return sharding.put(batch, sharding.batch_spec(self.mesh, shape))

  def shard(self, tree, route):
    """Places collections by the table of sharding.py."""
    groups = (route or self.run.route).groups(self.model)
    places, _ = sharding.specs(tree, self.model, groups, self.mesh)
    return sharding.put(tree, places)


def model_config(run: RunConfig) -> ModelConfig:
  """The model's shape: headers are read, no weights.

  Raises:
    ValueError, FileNotFoundError: naming the file or key that is wrong.
  """
  if run.model.path == "random":
    model = ModelConfig.from_hf(dict(run.model.shape))
  else:
    source = weights.resolve(run.model.path)
    if source.export is not None:
      raise ValueError(
        f"model.path={run.model.path!r} is an export of a run; training starts"
        f" from a base model, such as the one it names: {source.path}."
      )
    model = weights.read_config(run.model.path)
  run.route.check_against(model)
  if run.route.method is not Method.DENSE:
    # Every method is compared with random masks over the groups of `wide`.
    dataclasses.replace(run.route, method=Method.RANDOM).check_against(model)
  return model


def check_devices(run: RunConfig) -> tuple[ModelConfig, Mesh]:
  """The model's shape and the mesh, where the run fits both.

  Raises:
    ValueError, FileNotFoundError: the model cannot be read, or the mesh, the
      batch, a length or the attention path does not fit.
  """
  model = model_config(run)
  mesh = sharding.make_mesh(run.mesh)
  sharding.batch_spec(mesh, (run.data.batch_size, run.data.seq_len))
  for length in (run.data.seq_len, *run.eval.windows):
    rope.check_length(model, length)
    attention_path(run, model, length)
  return model, mesh


def attention_path(
  run: RunConfig, model: ModelConfig, length: int, max_segments: int = 1
) -> tuple[str, dict[str, str]]:
  """`ops.pick_attention` for rows of `length` tokens of this run.

  Raises:
    ValueError: `model.attention` names a path that cannot run here.
  """
  return ops.pick_attention(
    run.model.attention,
    platform=jax.default_backend(),
    dtype=jnp.dtype(run.model.dtype),
    length=length,
    head_dim=model.head_dim,
    window=model.windows[0] if len(set(model.windows)) == 1 else None,
    max_segments=max_segments,
    devices=jax.device_count(),
  )


def check(run: RunConfig) -> None:
  """Refuses in seconds what would stop `run` later; writes nothing.

  Raises:
    ValueError, FileNotFoundError: as `check_devices`; or the tokenizer or a
      text is missing.
  """
  model, _ = check_devices(run)
  _tokenizer(run, model)
  for part, names in (
    ("train", run.data.train),
    ("calibration", run.data.calibration),
    ("evaluation", (run.eval.text,)),
  ):
    text_sources.resolve_sources(names, part=part)


def _tokenizer(run: RunConfig, model: ModelConfig) -> Tokenizer:
  tokenizer = load_tokenizer(run.model.tokenizer or run.model.path)
  if tokenizer.vocab > model.vocab:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab} ids, the model only {model.vocab}."
    )
  return tokenizer


def prepare(run: RunConfig, workdir: pathlib.Path) -> Prepared:
  """Loads the model and tokenises the text; see `Prepared`.

  The small texts come first: what is wrong with them is told before a large
  corpus is tokenised.
  """
  model, mesh = check_devices(run)
  tokenizer = _tokenizer(run, model)
  cache = pathlib.Path(run.data.cache_dir or workdir / "cache")
  row_ways = mesh.shape["data"] * mesh.shape["fsdp"]
  halves = _calibration(run, tokenizer, cache, row_ways)
  texts = _texts(run, tokenizer, row_ways)
  training = data.load_tokens(
    run.data.train,
    tokenizer,
    cache_dir=cache,
    text_key=run.data.text_key,
    chat=run.data.chat,
    max_tokens=run.data.max_tokens,
  )
  rows = data.Rows(training, run.data.seq_len, run.data.packing)

  order_file = workdir / ORDER
  order = _read_order(order_file) if order_file.exists() else None
  known = order is not None
  model, params, order, note = _load(run, model, mesh, order)
  notes = [note]
  if known:
    notes.append(f"channel order read from {order_file}")
  notes.append(f"training text: {data.describe(training, rows)}")
  notes.append(_describe_texts(run, halves, texts))
  segments = max(rows.max_segments, *(_segments(h) for h in halves))
  prepared = Prepared(
    run=run,
    workdir=workdir,
    mesh=mesh,
    model=model,
    params=params,
    channel_order=order,
    static=None,
    batches=data.Batches(rows, run.data.batch_size, run.seed),
    calibration=halves,
    texts=texts,
    max_segments=segments if segments <= MOST_SEGMENTS else 0,
    inputs={
      "weights": fingerprint.of_params(params),
      "training text": fingerprint.of_tokens(training),
      "calibration text": fingerprint.of_batches(sum(halves, [])),
      "evaluation text": fingerprint.of_batches(sum(texts.values(), [])),
    },
    notes=(),
  )
  if order is None and _regroups(run, model):
    if any((workdir / "checkpoints").glob("*/[0-9]*")):
      raise ValueError(
        f"{order_file} is missing, and the checkpoints beside it were trained"
        " in its channel order. Put it back, or use another --workdir."
      )
    prepared = _regroup(prepared, rows, order_file)
    groups = f"{run.route.groups(model)['ffn']} groups of {run.route.ffn_group}"
    notes.append(f"FFN channels regrouped: {groups} in each layer")
  if (
    run.route.method is Method.STATIC_WIDTH
    and run.route.static_scores == "activation"
  ):
    batch = _first_tokens(rows, run.regroup.tokens, run.seed)
    static = calibration.static_logits(
      prepared.decoder(None, None), prepared.params, batch, run.route
    )
    prepared = dataclasses.replace(prepared, static=static)
  notes += [_attention_note(prepared), *_mesh_notes(prepared)]
  return dataclasses.replace(prepared, notes=tuple(notes))


def _describe_texts(run: RunConfig, halves, texts) -> str:
  """One sentence about the held-out texts."""
  first, second = (
    sum(int((b["segments"] > 0).sum()) for b in half) for half in halves
  )
  window = run.eval.windows[0]
  scored = sum(int(b["weights"].sum()) for b in texts[window])
  return (
    f"held-out text: {first:,} tokens set thresholds, {second:,} check them;"
    f" {scored:,} tokens scored in windows of {window}"
  )


def _attention_note(prepared: Prepared) -> str:
  """Which attention path trains, and why not the faster ones."""
  run = prepared.run
  path, reasons = attention_path(
    run, prepared.model, run.data.seq_len, prepared.max_segments
  )
  others = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
  return f"attention: {path}" + (f" ({others})" if others else "")


def _mesh_notes(prepared: Prepared) -> list[str]:
  """What the mesh is, and what it could not split."""
  mesh, run = prepared.mesh, prepared.run
  if jax.device_count() == 1:
    return []
  sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
  note = f"mesh: {sizes}; {mesh.size} of {jax.device_count()} devices"
  variables = modules.abstract(prepared.decoder(run.route, run.lora))
  groups = run.route.groups(prepared.model)
  return [
    note,
    *sharding.specs(variables, prepared.model, groups, mesh)[1],
    *_cache_notes(mesh),
  ]


def _cache_notes(mesh: Mesh) -> list[str]:
  """Why a run on several CPU devices may end in the middle of a step.

  XLA's CPU client loads a program without the order of its collectives; with
  more devices than cores they then wait for each other until XLA gives up.
  """
  cached = jax.config.values["jax_compilation_cache_dir"]
  if jax.default_backend() != "cpu" or mesh.size == 1 or not cached:
    return []
  return [
    f"mesh: the compilation cache {cached} is set; programs for several CPU"
    " devices that are loaded from it may hang, so better unset it"
  ]


def _read_order(file: pathlib.Path) -> np.ndarray:
  try:
    return np.load(file)
  except (EOFError, ValueError) as e:
    raise ValueError(
      f"{file} is damaged ({e}), and what was trained here depends on it."
    ) from e


def _regroups(run: RunConfig, model: ModelConfig) -> bool:
  """Whether groups of channels exist and are to be chosen."""
  groups = run.route.groups(model)["ffn"]
  return run.regroup.enabled and groups > 1


def _regroup(prepared: Prepared, rows: data.Rows, file) -> Prepared:
  run = prepared.run
  batch = _first_tokens(rows, run.regroup.tokens, run.seed)
  bar = functools.partial(
    tqdm.tqdm,
    total=prepared.model.n_layers,
    desc="regrouping channels",
    disable=None,  # on a terminal only
  )
  order = calibration.channel_order(
    prepared.decoder(None, None),
    prepared.params,
    batch,
    run.route.ffn_group,
    run.regroup,
    run.seed,
    bar,
  )
  with atomic.replacing(file) as temporary:
    with open(temporary, "wb") as f:
      np.save(f, order)
  params = weights.permute_channels(prepared.params, order)
  return dataclasses.replace(
    prepared,
    params=prepared.shard({"params": params}, None)["params"],
    channel_order=order,
  )


def _first_tokens(rows: data.Rows, tokens: int, seed: int) -> dict:
  """Some rows drawn by the seed, `tokens` tokens or a little more."""
  count = min(len(rows), -(-tokens // rows.seq_len))
  chosen = np.random.default_rng([seed, 1]).permutation(len(rows))[:count]
  parts = [rows.row(int(i)) for i in sorted(chosen)]
  return {k: np.stack([p[k] for p in parts]) for k in parts[0]}


def _calibration(run, tokenizer: Tokenizer, cache, ways: int):
  """Held-out rows in two halves, drawn at random by the seed."""
  held_out = data.load_tokens(
    run.data.calibration,
    tokenizer,
    cache_dir=cache,
    text_key=run.data.text_key,
    chat=run.data.chat,
    part="calibration",
  )
  rows = data.Rows(held_out, run.data.seq_len, run.data.packing)
  count = len(rows)
  if run.eval.calibration_tokens:
    count = min(count, -(-run.eval.calibration_tokens // run.data.seq_len))
  if count < 2:
    raise ValueError(
      f"calibration text {list(run.data.calibration)} gives {count} row of"
      f" {run.data.seq_len} tokens; want at least 2, one for each half."
    )
  chosen = np.random.default_rng([run.seed, 2]).permutation(len(rows))[:count]
  size = _rows_a_batch(run.eval.batch_size, ways)
  halves = []
  for part in (chosen[: count // 2], chosen[count // 2 :]):
    drawn = [rows.row(int(i)) for i in part]
    arrays = {k: np.stack([d[k] for d in drawn]) for k in drawn[0]}
    halves.append(window_batches(arrays, size))
  return tuple(halves)


def _texts(run, tokenizer: Tokenizer, ways: int) -> dict[int, list]:
  """Windows of the evaluation text, by window length."""
  ids = data.text_ids(
    [run.eval.text],
    tokenizer,
    part="evaluation",
    max_tokens=run.eval.max_tokens,
  )
  size = _rows_a_batch(run.eval.batch_size, ways)
  return {
    w: window_batches(data.eval_windows(ids, w), size) for w in run.eval.windows
  }


def _rows_a_batch(wanted: int, ways: int) -> int:
  """Rows of an evaluation batch, a multiple of the ways they are spread."""
  return -(-wanted // ways) * ways


def _segments(batches: list) -> int:
  return max(int(b["segments"].max()) for b in batches)


def _load(run: RunConfig, model: ModelConfig, mesh, order):
  """(model, params on the mesh, their channel order, one sentence).

  The order is the one given, or that of an export directory, or None.
  """
  groups = run.route.groups(model)
  dtype = run.model.dtype

  def place_of(tree):
    return sharding.specs({"params": tree}, model, groups, mesh)[0]["params"]

  if run.model.path == "random":
    decoder = Decoder(model, dtype=jnp.dtype(dtype))
    shapes = modules.abstract(decoder)["params"]
    params = modules.init(
      decoder, run.seed, ("params",), {"params": place_of(shapes)}
    )["params"]
    if order is not None:
      params = weights.permute_channels(params, order)
      params = sharding.put(params, place_of(params))
    count = flops.count_params(params)
    return model, params, order, f"random weights, {count:,} parameters"

  def put(name, array):
    leaf = weights.unflatten({name: array})
    return jax.tree.leaves(sharding.put(leaf, place_of(leaf)))[0]

  loaded = weights.load_params(
    run.model.path, dtype=dtype, put=put, channel_order=order
  )
  note = f"model {run.model.path}: {loaded.report}"
  return loaded.config, loaded.params, loaded.channel_order, note
