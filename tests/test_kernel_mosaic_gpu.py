"""Mosaic GPU kernels where there is no Hopper: the schedule, and every address.

The kernels have no interpret mode. Their device code is Python that calls one
function of ptx.py per instruction; here it runs with a ptx.py whose values are
numpy arrays, one entry per thread, and whose memory is numpy too. What is not
seen: wgmma, TMA, barriers and the order of things between warps.
"""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import device, dispatch, mosaic_gpu
from pallas_kernels.problem import Problem

needs_jax = pytest.mark.skipif(
  jax.__version_info__ < (0, 11), reason="the kernels need jax 0.11"
)


# --- a machine of numpy ------------------------------------------------------


@dataclasses.dataclass
class Pointer:
  """Bytes of one array, and an offset for every thread."""

  memory: np.ndarray
  at: np.ndarray


class Machine:
  """What device code sees as ptx; all threads take each step together."""

  CLUSTER_AXIS = 0

  def __init__(self, threads: int):
    self.me = np.arange(threads, dtype=np.int64)
    self.active = np.ones(threads, bool)

  def _wide(self, value) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, np.int64), self.me.shape)

  def scalar(self, value):
    return self._wide(value)

  const = index = give = scalar

  def give_each(self, values):
    return EachThread([self._wide(v) for v in values])

  def take_each(self, array):
    return array.values

  def thread(self):
    return self.me

  def add(self, a, b):
    return self._wide(a) + self._wide(b)

  def sub(self, a, b):
    return self._wide(a) - self._wide(b)

  def mul(self, a, b):
    return self._wide(a) * self._wide(b)

  def div(self, a, b):
    assert (self._wide(a)[self.active] >= 0).all(), "divides as unsigned"
    return self._wide(a) // b

  def rem(self, a, b):
    assert (self._wide(a)[self.active] >= 0).all(), "divides as unsigned"
    return self._wide(a) % b

  def xor(self, a, b):
    return self._wide(a) ^ self._wide(b)

  def less(self, a, b):
    return self._wide(a) < self._wide(b)

  def equal(self, a, b):
    return self._wide(a) == self._wide(b)

  def both(self, a, b):
    return a & b

  def select(self, cond, a, b):
    return np.where(cond, self._wide(a), self._wide(b))

  def elected(self):
    return self.me % 32 == 0

  @contextlib.contextmanager
  def when(self, cond):
    before = self.active
    self.active = before & cond
    yield
    self.active = before

  def loop(self, count, body):
    before = self.active
    for i in range(int(self._wide(count)[before].max(initial=0))):
      self.active = before & (i < self._wide(count))
      body(self._wide(i))
    self.active = before

  def pointer(self, memory):
    return Pointer(memory, self._wide(0))

  def offset(self, pointer, count, unit):
    assert (self._wide(count)[self.active] >= 0).all(), "widened as unsigned"
    return Pointer(pointer.memory, pointer.at + self._wide(count) * unit)

  row_offset = offset

  def _elements(self, pointer, size: int) -> np.ndarray:
    """Where in its array each active thread points; in bounds, aligned."""
    flat = pointer.memory.reshape(-1)
    at = pointer.at[self.active]
    assert (at % size == 0).all()
    assert (at >= 0).all() and (at + size <= flat.nbytes).all()
    return at // flat.itemsize

  def load(self, pointer):
    value = np.zeros(self.me.shape, np.int64)
    flat = pointer.memory.reshape(-1)
    value[self.active] = flat[self._elements(pointer, 4)]
    return value

  def store(self, value, pointer):
    flat = pointer.memory.reshape(-1)
    flat[self._elements(pointer, 4)] = self._wide(value)[self.active]

  def store16(self, words, pointer):
    """Four words, each of two halves: a pair of 16-bit values a thread."""
    flat = pointer.memory.reshape(-1)
    at = self._elements(pointer, 16)
    assert len(np.unique(at)) == len(at)
    for i, word in enumerate(words):
      pair = np.broadcast_to(np.asarray(word), (2, *self.me.shape))
      for half in range(2):
        assert np.isnan(flat[at + 2 * i + half]).all(), "written twice"
        flat[at + 2 * i + half] = pair[half][self.active]

  def copy16(self, to, source, size):
    target, origin = to.memory.reshape(-1), source.memory.reshape(-1)
    place = self._elements(to, 16)
    assert len(np.unique(place)) == len(place)
    real = self._wide(size)[self.active] == 16
    at = np.where(real, source.at[self.active], 0)
    assert (at % 16 == 0).all() and (at + 16 <= origin.nbytes).all()
    for i in range(8):
      value = origin[at // 2 + i]
      target[place + i] = np.where(real, value, 0)

  def _lanes(self, value, other):
    value = np.asarray(value)
    return value[..., self.me // 32 * 32 + other]

  def shuffle_up(self, value, distance):
    lane = self.me % 32
    return self._lanes(value, np.where(lane < distance, lane, lane - distance))

  def shuffle_xor(self, value, distance):
    return self._lanes(value, self.me % 32 ^ distance)

  def shuffle(self, value, lane):
    return self._lanes(value, self._wide(lane) % 32)

  def votes(self, predicate):
    return predicate.reshape(-1, 32).sum(1).repeat(32)

  class Barriers:
    def __init__(self, base):
      pass

    def __getattr__(self, name):
      return lambda *args: None

  def __getattr__(self, name):
    """Barriers, fences and waits: nothing to see."""
    nothing = ("sync_", "fence_")
    assert name.startswith(nothing), name
    return lambda *args: None


class EachThread:
  """What give_each makes."""

  def __init__(self, values):
    self.values = values
    self.shape = (128 * len(values),)


def _inline(*, arg_types=(), return_type=None, context=None):
  """plgpu.inline_mgpu: calls the device code at once."""
  del arg_types

  def decorate(f):
    def call(*args):
      out = f(context, *args)
      if return_type is not None and getattr(return_type, "shape", None) == ():
        return jnp.int32(out[0])  # known to all threads; thread 0 speaks
      return out

    return call

  return decorate


class Copies:
  """The launch context: does what TMA would, for one block of a cluster."""

  def __init__(self):
    self.tiles = []

  def async_copy(self, *, src_ref, dst_ref, gmem_slice, **kwargs):
    self.tiles.append((src_ref, dst_ref, gmem_slice))


def _swizzled(stage: np.ndarray) -> np.ndarray:
  """[rows, 64] as wgmma reads a stage of 128-byte rows."""
  rows = stage.shape[0]
  chunks = stage.reshape(rows, 8, 8)
  row, chunk = np.indices((rows, 8))
  return chunks[row, chunk ^ row % 8].reshape(rows, 64)


@pytest.fixture
def parts(monkeypatch):
  """(schedule, matmul, epilogue) on a Machine of one warpgroup."""
  from pallas_kernels.mosaic_gpu import epilogue, matmul, schedule

  machine = Machine(384)
  copies = Copies()
  for module in (epilogue, matmul, schedule):
    monkeypatch.setattr(module, "ptx", machine)
    monkeypatch.setattr(
      module.plgpu, "inline_mgpu", lambda **kw: _inline(**kw, context=copies)
    )
  monkeypatch.setattr(matmul.mgpu, "ds", lambda base, size: (base[0], size))
  monkeypatch.setattr(
    matmul.mgpu, "TileTransform", lambda tiling: None, raising=False
  )
  monkeypatch.setattr(matmul.mgpu, "memref_slice", lambda ref, cut: ref[cut])
  return machine, copies, schedule, matmul, epilogue


# --- the schedule ------------------------------------------------------------


@needs_jax
def test_every_tile_is_computed_once():
  from pallas_kernels.mosaic_gpu import schedule

  clusters = 7
  who = jnp.arange(clusters)
  split = jax.jit(
    jax.vmap(lambda *a: schedule.split(*a, clusters), (None, None, 0))
  )
  pick = jax.jit(
    jax.vmap(
      lambda i, c, *rest: schedule.pick(i, c, clusters, *rest),
      (None, 0, 0, 0, None),
    )
  )
  for full, odd in itertools.product((0, 1, 3, 6, 7, 20, 27), range(0, 25, 3)):
    rounds, rest, extra = split(full, odd, who)
    items = np.asarray(rounds + extra)
    seen_full, seen_odd = np.zeros((full, 2), int), np.zeros(odd, int)
    for i in range(items.max()):
      chosen = map(np.asarray, pick(i, who, rounds, rest, odd))
      for c, (is_odd, place, half, units) in enumerate(
        zip(*chosen, strict=True)
      ):
        if i >= items[c]:
          continue
        if is_odd:
          seen_odd[place] += units
        else:
          seen_full[place, half : half + units] += 1
    assert (seen_full == 1).all() and (seen_odd == 1).all(), (full, odd)


# --- the whole kernel --------------------------------------------------------


def _w_tile(copies, shape, size: int) -> np.ndarray:
  """[block_n, 64] of the copies since the last call, once for each thread."""
  parts = []
  for source, _, (matrix, (n0, n), (k0, k)) in copies.tiles:
    assert k == 64
    parts.append(source[int(matrix[0]), n0 : n0 + n, k0 : k0 + k])
  copies.tiles.clear()
  tile = np.concatenate(parts)
  assert tile.shape == (size, 64)
  return tile


def _run(parts, shape, x, w, order, start, out):
  """The kernel, block by block."""
  machine, copies, schedule, matmul, epilogue = parts
  table = np.zeros(schedule.WORDS, np.int32)
  bars = np.zeros(64, np.int32)
  matmul._prepare(shape, bars, table, start)
  tiles = shape.tiles
  for cluster, block in itertools.product(
    range(shape.clusters), range(tiles.cluster)
  ):
    plan = schedule.Schedule.make(
      table,
      jnp.int32(cluster),
      groups=shape.groups,
      clusters=shape.clusters,
      unit=shape.unit,
      columns=shape.columns,
    )
    if shape.fill:
      machine.me = np.arange(128, dtype=np.int64)
      machine.active = np.ones(128, bool)
      epilogue.zeros(shape, order, table, out, cluster * tiles.cluster + block)
    for i in range(int(plan.items)):
      machine.me = np.arange(128, dtype=np.int64)
      machine.active = machine.me < shape.gatherers
      item = plan.item(jnp.int32(i))
      sources = matmul._sources(shape, order, item, block)
      acc = 0.0
      for k in range(shape.steps):
        stage = np.full((tiles.stages, shape.rows, 64), np.nan, np.float16)
        w_stage = np.zeros((tiles.stages, tiles.block_n // 8, 1, 8, 64))
        matmul._fetch(
          shape,
          (x, [w], AtSlot(stage), AtSlot(w_stage), bars),
          item,
          jnp.int32(0),
          sources,
          jnp.int32(k),
          jnp.int32(k),
        )
        a = _swizzled(stage[k % tiles.stages]).astype(np.float32)
        acc = acc + a @ _w_tile(copies, shape, tiles.block_n).T
      assert np.isfinite(acc).all()
      machine.active = np.ones(128, bool)
      _, count = matmul._first_row(shape, item, block)
      rows = 64 * tiles.row_tiles
      for consumer in range(2):
        if consumer * rows >= int(count):
          continue
        first = matmul._first_row(shape, item, block)[0] + consumer * rows
        places = epilogue.places(shape, order, item, first)
        mine = acc[consumer * rows : (consumer + 1) * rows]
        epilogue.write(shape, out, item, places, Accumulator(mine))


class AtSlot:
  """A ring of stages: .at[slot] is one of them."""

  def __init__(self, stages):
    self.at = Indexed(stages)


class Indexed:
  def __init__(self, stages):
    self.stages = stages

  def __getitem__(self, slot):
    return self.stages[int(slot)]


class Accumulator:
  """[rows, width] as the threads of a warpgroup hold the result of wgmma."""

  def __init__(self, value):
    rows, width = self.shape = value.shape
    me = np.arange(128)
    pairs = np.empty((rows // 64, width // 8, 2), object)
    for tile, column, half in np.ndindex(pairs.shape):
      row = 64 * tile + me // 32 * 16 + me % 32 // 4 + 8 * half
      col = 8 * column + me % 4 * 2
      pairs[tile, column, half] = np.stack(
        [value[row, col + i] for i in (0, 1)]
      )
    self.registers = pairs


def _words(pairs, half_type, gated):
  """epilogue._words, whose words are pairs of numbers here."""
  del half_type
  pairs = list(pairs)
  if gated:
    middle = len(pairs) // 2
    pairs = [
      g / (1 + np.exp(-g)) * u
      for g, u in zip(pairs[:middle], pairs[middle:], strict=True)
    ]
  return pairs


@needs_jax
@pytest.mark.parametrize(
  "groups, channels, gated, tiles",
  [
    (3, 256, False, {}),
    (2, 512, False, {"cluster": 1}),
    (5, 128, False, {"block_n": 128, "row_tiles": 2}),
    (3, 256, True, {}),
    (3, 64, True, {"block_n": 128, "row_tiles": 2}),
  ],
)
def test_addresses(parts, monkeypatch, groups, channels, gated, tiles):
  *_, matmul, epilogue = parts
  monkeypatch.setattr(epilogue, "_words", _words)
  monkeypatch.setattr(epilogue.ir, "MemRefType", lambda ty: ty, raising=False)
  monkeypatch.setattr(Machine, "select", _select_pairs)
  rng = np.random.default_rng(0)
  tokens, k, n = 700, 256, groups * channels
  keep = rng.random((tokens, groups)) < np.linspace(0.1, 1.1, groups)
  keep[:, 0] &= np.arange(tokens) > tokens // 2
  plan = pk.make_plan(keep[None], backend="reference")
  x = rng.standard_normal((tokens, k)).astype(np.float16)
  w = rng.standard_normal((1 + gated, n, k)).astype(np.float16) / 16
  shape = matmul._Shape(
    tiles=mosaic_gpu.Tiles(**tiles),
    groups=groups,
    tokens=tokens,
    k=k,
    n=n,
    column=1,
    transposed=True,
    gated=gated,
    joined=gated,
    fill=not gated,
    clusters=3,
  )
  out = Output(np.full((tokens, n), np.nan, np.float16))
  order = np.asarray(plan.group_order_GM)
  start = np.asarray(plan.group_start_GB)
  _run(parts, shape, x, w, order, start, out)
  want = x.astype(np.float32) @ w.astype(np.float32).swapaxes(1, 2)
  want = _words([want[0], want[1]], None, True)[0] if gated else want[0]
  kept = np.repeat(keep, channels, axis=1)
  got = out.astype(np.float32)
  np.testing.assert_allclose(got[kept], want[kept], atol=2e-2, rtol=2e-3)
  dropped = got[~kept]
  assert np.isnan(dropped).all() if gated else (dropped == 0).all()


class Output(np.ndarray):
  """An array with the type that the epilogue asks for."""

  type = dataclasses.make_dataclass("Type", ["element_type"])(None)

  def __new__(cls, array):
    return array.view(cls)


def _select_pairs(self, cond, a, b):
  """Machine.select, for pairs of numbers too."""
  if isinstance(a, np.ndarray) and a.ndim == 2:
    return np.where(cond, a, b)
  return np.where(cond, self._wide(a), self._wide(b))


# --- what it takes -----------------------------------------------------------


def _problem(**changes) -> Problem:
  base = Problem(
    op="matmul_n_sparse",
    dtype="bfloat16",
    rows=1,
    length=4096,
    groups=28,
    k=4096,
    n=14336,
    transposed=True,
  )
  return dataclasses.replace(base, **changes)


@needs_jax
@pytest.mark.parametrize(
  "changes, word",
  [
    ({"dtype": "float32"}, "float32"),
    ({"groups": 224}, "224 groups"),
    ({"k": 4128}, "4128"),
    ({"k": 128}, "128 input"),
    ({"n": 28 * 96}, "96 channels"),
    ({"op": "gated_ffn", "transposed": False}, "out, in"),
  ],
)
def test_refuses(changes, word):
  with device.use_device("NVIDIA H200"):
    assert word in mosaic_gpu.why_not(_problem(**changes))


@needs_jax
def test_only_on_hopper():
  with device.use_device("NVIDIA H200"):
    assert mosaic_gpu.why_not(_problem()) is None
  for other in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200", "cpu"):
    with device.use_device(other):
      assert "Hopper" in mosaic_gpu.why_not(_problem())


def test_old_jax_is_told(monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
  with device.use_device("NVIDIA H200"):
    assert "jax 0.11" in mosaic_gpu.why_not(_problem())


@needs_jax
def test_no_interpret_mode():
  x = jnp.zeros((1, 8, 256), jnp.bfloat16)
  w = jnp.zeros((256, 256), jnp.bfloat16)
  plan = pk.make_plan(jnp.ones((1, 8, 2), bool), backend="reference")
  with (
    device.use_device("NVIDIA H200"),
    pytest.raises(pk.Unsupported, match="interpret"),
  ):
    pk.matmul_n_sparse(
      x, w, plan, transposed=True, backend="mosaic_gpu", interpret=True
    )


@needs_jax
@pytest.mark.parametrize("groups", [14, 28, 112])
@pytest.mark.parametrize("op", ["matmul_n_sparse", "gated_ffn"])
def test_tiles_fit(op, groups):
  problem = _problem(op=op, groups=groups)
  with device.use_device("NVIDIA H200"):
    found = dispatch.legal_tiles("mosaic_gpu", problem)
  assert found
  for tiles in found:
    cut = tiles.up if op == "gated_ffn" else tiles
    assert cut.block_n * cut.row_tiles <= 256
