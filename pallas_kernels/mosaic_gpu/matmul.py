"""Width-pruned matmuls for many tokens in Pallas Mosaic GPU, for Hopper.

N-sparse: a persistent kernel, two blocks to a cluster, three warpgroups to a
block:

* a producer, all four warps of one or two of them, brings tiles of x and w into
  a ring of shared memory. The rows of x that keep a group lie anywhere, which
  TMA cannot fetch here: each thread copies 16 bytes at a time (cp.async) to
  where 128-byte swizzling puts them. w comes by TMA, each block fetching half
  for both (multicast), so that a tile of w is read once for two tiles of rows;
* two consumers multiply (wgmma), each 64 or 128 rows, and write their rows to
  where they belong, straight from registers;
* where dropped groups must be 0, the other two warps of the producer write
  these zeros meanwhile. (A fourth warpgroup would leave a thread 128 registers
  when it starts, too few for the compiler.)

The consumers of both blocks must be done with a stage before either refills it.

Letters: M tokens, K input and N output channels, G groups of C channels, L
layers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import epilogue, ptx, schedule
from pallas_kernels.mosaic_gpu.tiles import Tiles
from pallas_kernels.problem import Problem

_SCALAR = plgpu.Layout.WG_SPLAT(())
_DEPTH = 64  # input channels of a stage: 128 bytes
_CHUNKS = 8  # of 16 bytes, in those
_THREADS = 384  # of a block
# Registers of a thread of a consumer and of the producer: a block starts with
# 168 for each of its threads, and the sum may not exceed that.
_REGISTERS = (208, 88)
_TRANSFORMS = (
  plgpu.TilingTransform((8, _DEPTH)),
  plgpu.SwizzleTransform(128),
)
_STAGE = plgpu.RefType(_TRANSFORMS)


@dataclasses.dataclass(frozen=True)
class _Shape:
  """What is static about a kernel.

  Attributes:
    tiles: see Tiles.
    groups, tokens, k, n: G, M, K, N.
    column: of the starts, where the count of a group is.
    transposed: w is [L, N, K], else [L, K, N].
    joined: L counts gate and up of a layer, one after the other.
    gated: the weights are gate and up.
    fill: dropped groups are 0, else unwritten.
    clusters: that run at a time.
  """

  tiles: Tiles
  groups: int
  tokens: int
  k: int
  n: int
  column: int
  transposed: bool
  gated: bool
  joined: bool
  fill: bool
  clusters: int

  @property
  def rows(self) -> int:
    """Of x in a stage."""
    return 128 * self.tiles.row_tiles

  @property
  def width(self) -> int:
    """Output channels of a tile."""
    return self.tiles.block_n // (2 if self.gated else 1)

  @property
  def columns(self) -> int:
    """Column tiles of a group."""
    return self.n // self.groups // self.width

  @property
  def unit(self) -> int:
    """Rows of a unit of the schedule: half of a tile of a cluster."""
    return self.rows // 2 * self.tiles.cluster

  @property
  def steps(self) -> int:
    return self.k // _DEPTH

  @property
  def gatherers(self) -> int:
    """Threads that copy rows of x."""
    return 64 if self.fill else 128

  @property
  def copies(self) -> int:
    """Of 16 bytes of x, by each of these in a stage."""
    return self.rows * _CHUNKS // self.gatherers

  @property
  def bars(self) -> tuple[int, int]:
    """Where the barriers of full and of empty stages start."""
    return 0, self.tiles.stages


def _prepare(shape: _Shape, bars, table, start_ref) -> None:
  """Barriers and the table of the schedule; by all threads of the block."""

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType())
  )
  def prepare(ctx, bars, table, start_ref):
    del ctx
    full, empty = shape.bars
    barriers = ptx.Barriers(ptx.pointer(bars))
    with ptx.when(ptx.equal(ptx.thread(), 0)):
      for i in range(shape.tiles.stages):
        barriers.init(full + i, 1 + shape.gatherers)
        barriers.init(empty + i, 2 * shape.tiles.cluster)
      ptx.fence_barrier_init()
    schedule.write_table(
      table,
      start_ref,
      groups=shape.groups,
      column=shape.column,
      unit=shape.unit,
      columns=shape.columns,
      threads=_THREADS,
    )
    if shape.tiles.cluster > 1:
      ptx.sync_cluster()

  prepare(bars, table, start_ref)


def _leave(shape: _Shape) -> None:
  """No block ends while another may still write to it or arrive at it."""
  if shape.tiles.cluster == 1:
    return

  @plgpu.inline_mgpu()
  def leave(ctx):
    del ctx
    ptx.sync_cluster()

  leave()


# --- the producer ------------------------------------------------------------


def _first_row(shape: _Shape, item: schedule.Item, block):
  """Where the tile of a block starts in the order of its group; its rows."""
  per_unit = shape.rows // 2
  rows = item.units * per_unit
  return item.unit * shape.unit + block * rows, rows


def _sources(shape: _Shape, order_ref, item: schedule.Item, block) -> Array:
  """Which 16 bytes of x each thread copies first, in units of that; -1: none.

  Thread t copies chunk t % 8 of rows t / 8, and so on by gatherers / 8.
  """
  first, rows = _first_row(shape, item, block)
  last = jnp.minimum(first + rows, item.count)
  copies = shape.copies

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR),
    return_type=plgpu.ShapeDtypeStruct(
      (128 * copies,),
      jnp.int32,
      layout=plgpu.Layout.WG_STRIDED((128 * copies,), vec_size=1),
    ),
  )
  def sources(ctx, order_ref, group, first, last):
    del ctx
    me = ptx.rem(ptx.thread(), 128)
    chunk, row = ptx.rem(me, _CHUNKS), ptx.div(me, _CHUNKS)
    start = ptx.mul(ptx.scalar(group), shape.tokens)
    order = ptx.offset(ptx.pointer(order_ref), start, 4)
    found = []
    for i in range(copies):
      at = ptx.add(
        ptx.add(ptx.scalar(first), row), shape.gatherers // _CHUNKS * i
      )
      inside = ptx.less(at, ptx.scalar(last))
      token = ptx.load(ptx.offset(order, ptx.select(inside, at, 0), 4))
      source = ptx.add(ptx.mul(token, shape.k // _CHUNKS), chunk)
      found.append(ptx.select(inside, source, -1))
    return ptx.give_each(found)

  return sources(order_ref, item.group, first, last)


def _fetch(shape: _Shape, refs, item, layer, sources, step, turn) -> None:
  """Starts the copies of one stage; `turn` counts stages since the start."""
  x_ref, w_refs, x_smem, w_smem, bars = refs
  tiles = shape.tiles
  slot = jax.lax.rem(turn, jnp.int32(tiles.stages))
  size = tiles.block_n * _DEPTH * 2
  begin = item.group * (shape.n // shape.groups) + item.column * shape.width
  collective = (ptx.CLUSTER_AXIS,) if tiles.cluster > 1 else ()

  @plgpu.inline_mgpu(
    arg_types=(
      (plgpu.RefType(), [plgpu.RefType()] * len(w_refs), _STAGE, _STAGE),
      plgpu.RefType(),
      plgpu.Layout.WG_STRIDED(sources.shape, vec_size=1),
      (_SCALAR,) * 5,
    )
  )
  def fetch(ctx, refs, bars, sources, scalars):
    x_ref, w_refs, x_smem, w_smem = refs
    layer, begin, step, slot, turn = map(ptx.scalar, scalars)
    full, empty = shape.bars
    barriers = ptx.Barriers(ptx.pointer(bars))
    me = ptx.rem(ptx.thread(), 128)

    phase = ptx.div(turn, tiles.stages)
    # The ring is empty at first: a fresh barrier takes the phase before its
    # first for complete.
    barriers.wait(ptx.add(slot, empty), ptx.rem(ptx.add(phase, 1), 2))

    first_warp = ptx.less(me, 32)
    alone = ptx.both(first_warp, ptx.elected())
    at = ptx.add(slot, full)
    with ptx.when(alone):
      barriers.arrive_expect(at, size)
    k0 = ptx.mul(step, _DEPTH)
    for part in range(2 if shape.gated else 1):
      w_ref = w_refs[part if len(w_refs) > 1 else 0]
      ns = mgpu.ds(ptx.index(begin), shape.width)
      ks = mgpu.ds(ptx.index(k0), _DEPTH)
      if shape.joined:
        matrix = ptx.add(ptx.mul(layer, 2), part)
      else:
        matrix = layer
      target = w_smem
      if shape.gated:
        # [tiles of rows, tiles of columns, 8, 64]
        axis = 0 if shape.transposed else 1
        count = shape.width // (8 if shape.transposed else _DEPTH)
        cut = [slice(None)] * 4
        cut[axis] = slice(part * count, (part + 1) * count)
        target = mgpu.memref_slice(w_smem, tuple(cut))
      ctx.async_copy(
        src_ref=w_ref,
        dst_ref=target,
        gmem_slice=(
          ptx.index(matrix),
          *((ns, ks) if shape.transposed else (ks, ns)),
        ),
        gmem_transform=mgpu.TileTransform((8, _DEPTH)),
        swizzle=128,
        barrier=barriers.at(at),
        arrive=False,
        collective=collective,
        predicate=alone,
      )

    chunk, row = ptx.rem(me, _CHUNKS), ptx.div(me, _CHUNKS)
    swizzled = ptx.xor(chunk, ptx.rem(row, 8))
    place = ptx.add(ptx.mul(row, 128), ptx.mul(swizzled, 16))
    to = ptx.offset(ptx.pointer(x_smem), place, 1)
    source_base = ptx.pointer(x_ref)
    ahead = ptx.mul(step, _CHUNKS)
    for i, source in enumerate(ptx.take_each(sources)):
      inside = ptx.less(-1, source)
      size_in = ptx.select(inside, 16, 0)
      source = ptx.add(ptx.select(inside, source, 0), ahead)
      ptx.copy16(
        ptx.offset(to, ptx.const(i * shape.gatherers // _CHUNKS * 128), 1),
        ptx.offset(source_base, source, 16),
        size_in,
      )
    barriers.arrive_after_copies(at)

  fetch(
    (x_ref, list(w_refs), x_smem.at[slot], w_smem.at[slot]),
    bars,
    sources,
    (layer, begin, step, slot, turn),
  )


def _for_gatherers(shape: _Shape, items) -> Array:
  """`items` in the warps that gather, 0 in the others of the producer."""

  @plgpu.inline_mgpu(
    arg_types=(_SCALAR,),
    return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
  )
  def share(ctx, items):
    del ctx
    gathers = ptx.less(ptx.rem(ptx.thread(), 128), shape.gatherers)
    return ptx.give(ptx.select(gathers, ptx.scalar(items), 0))

  return share(items)


def _produce(shape: _Shape, refs, order_ref, layer, plan, block) -> None:
  """The producer: all tiles of this block, one after the other."""

  def tile(i, turn):
    item = plan.item(i)
    sources = _sources(shape, order_ref, item, block)

    def step(k, turn):
      _fetch(shape, refs, item, layer, sources, k, turn)
      return turn + 1

    return jax.lax.fori_loop(0, shape.steps, step, turn)

  items = _for_gatherers(shape, plan.items)
  jax.lax.fori_loop(0, items, tile, jnp.int32(0))


# --- the consumers -----------------------------------------------------------


def _await(shape: _Shape, bars, turn) -> None:
  """Until a stage is full."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
  def wait(ctx, bars, turn):
    del ctx
    turn = ptx.scalar(turn)
    stages = shape.tiles.stages
    slot, phase = ptx.rem(turn, stages), ptx.div(turn, stages)
    barriers = ptx.Barriers(ptx.pointer(bars))
    barriers.wait(ptx.add(slot, shape.bars[0]), ptx.rem(phase, 2))
    ptx.fence_async()  # x came by copies of the generic proxy

  wait(bars, turn)


def _release(shape: _Shape, bars, turn, *, together: bool = False) -> None:
  """This consumer is done with a stage; tells all blocks of the cluster."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
  def release(ctx, bars, turn):
    del ctx
    barriers = ptx.Barriers(ptx.pointer(bars))
    if together:  # else wgmma keeps the warps together
      ptx.sync_warpgroup()
    me = ptx.rem(ptx.thread(), 128)
    slot = ptx.rem(ptx.scalar(turn), shape.tiles.stages)
    at = ptx.add(slot, shape.bars[1])
    with ptx.when(ptx.less(me, shape.tiles.cluster)):
      barriers.arrive_at(at, me)

  release(bars, turn)


def _consume(shape, x_smem, w_smem, bars, order_ref, out_ref, plan, block, me):
  """A consumer: its rows of all tiles of this block."""
  rows = 64 * shape.tiles.row_tiles
  stages = jnp.int32(shape.tiles.stages)

  def tile(i, turn):
    item = plan.item(i)
    first, count = _first_row(shape, item, block)
    works = me * rows < count
    after = turn + shape.steps

    @pl.when(works)
    def _():
      begin = first + me * rows
      places = epilogue.places(shape, order_ref, item, begin)

      def multiply(acc_ref):
        def step(k, turn):
          slot = jax.lax.rem(turn, stages)
          _await(shape, bars, turn)
          w = w_smem.at[slot]
          plgpu.wgmma(
            acc_ref,
            x_smem.at[slot, pl.ds(me * rows, rows)],
            w.T if shape.transposed else w,
          )
          plgpu.wgmma_wait(1)

          @pl.when(k > 0)
          def _():
            _release(shape, bars, turn - 1)

          return turn + 1

        end = jax.lax.fori_loop(0, shape.steps, step, turn)
        value = acc_ref[...]
        _release(shape, bars, end - 1)
        return value

      acc = pl.run_scoped(
        multiply, plgpu.ACC((rows, shape.tiles.block_n), jnp.float32)
      )
      epilogue.write(shape, out_ref, item, places, acc)

    @pl.when(jnp.logical_not(works))
    def _():
      def step(_, turn):
        _await(shape, bars, turn)
        _release(shape, bars, turn, together=True)
        return turn + 1

      jax.lax.fori_loop(0, shape.steps, step, turn)

    return after

  jax.lax.fori_loop(0, plan.items, tile, jnp.int32(0))


# --- the kernel --------------------------------------------------------------


def _kernel(x_ref, *refs, shape: _Shape, weights: int):
  w_refs, refs = refs[:weights], refs[weights:]
  order_ref, start_ref, layer_ref, out_ref, *scratch = refs
  x_smem, w_smem, bars, table = scratch
  cluster = jax.lax.axis_index("cluster")
  block = jax.lax.axis_index("block")
  role = jax.lax.axis_index("role")
  _prepare(shape, bars, table, start_ref)

  def make_plan():
    return schedule.Schedule.make(
      table,
      cluster,
      groups=shape.groups,
      clusters=shape.clusters,
      unit=shape.unit,
      columns=shape.columns,
    )

  @pl.when(role < 2)
  def _():
    plgpu.set_max_registers(_REGISTERS[0], action="increase")
    _consume(
      shape, x_smem, w_smem, bars, order_ref, out_ref, make_plan(), block, role
    )

  @pl.when(role == 2)
  def _():
    plgpu.set_max_registers(_REGISTERS[1], action="decrease")
    if shape.fill:
      number = cluster * shape.tiles.cluster + block
      epilogue.zeros(shape, order_ref, table, out_ref, number)
    stage = (x_ref, w_refs, x_smem, w_smem, bars)
    _produce(shape, stage, order_ref, layer_ref[0], make_plan(), block)

  _leave(shape)


def rows_out(
  problem: Problem, tiles: Tiles, x, weights, plan, layer, *, fill: bool
) -> Array:
  """[M, N] of the N-sparse kernel; unwritten where dropped unless `fill`."""
  shape = _Shape(
    tiles=tiles,
    groups=problem.groups,
    tokens=problem.tokens,
    k=problem.k,
    n=problem.n,
    column=plan.batch,
    transposed=problem.transposed,
    gated=problem.op == "gated_ffn",
    joined=problem.joined,
    fill=fill,
    clusters=processors() // tiles.cluster,
  )
  block = (tiles.block_n, _DEPTH)
  run = plgpu.kernel(
    functools.partial(_kernel, shape=shape, weights=len(weights)),
    out_type=jax.ShapeDtypeStruct((shape.tokens, shape.n), x.dtype),
    scratch_types=[
      plgpu.SMEM(
        (tiles.stages, shape.rows, _DEPTH), x.dtype, transforms=_TRANSFORMS
      ),
      plgpu.SMEM(
        (tiles.stages, *(block if shape.transposed else block[::-1])),
        x.dtype,
        transforms=_TRANSFORMS,
      ),
      plgpu.SMEM((4 * tiles.stages,), jnp.int32),
      plgpu.SMEM((schedule.WORDS,), jnp.int32),
    ],
    grid=(shape.clusters,),
    grid_names=("cluster",),
    cluster=(tiles.cluster,),
    cluster_names=("block",),
    num_threads=_THREADS // 128,
    thread_name="role",
    kernel_name="wide_gate_up" if shape.gated else "wide_n_sparse",
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      unsafe_no_auto_barriers=True,
    ),
  )
  weights = [w.reshape(-1, *w.shape[-2:]) for w in weights]
  return run(x, *weights, plan.group_order_GM, plan.group_start_GB, layer[None])


def processors() -> int:
  """Multiprocessors of the device that is traced for."""
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    return abstract.num_cores
  first = jax.devices()[0]
  return getattr(first, "core_count", None) or 132
