"""Who computes what: the tiles of a persistent kernel, found on the device.

A cluster computes, at a time, two units of rows (a full tile) of one group and
one of its column tiles, or one unit (a half tile). A unit is 64 rows for every
consumer's 64 of every block of the cluster. The tokens that keep a group make
ceil(count / unit) units; pairs of them are full tiles, an odd one is left.

Clusters take full tiles in turn, ordered by group, column tile, rows: those
running together share weights. Full tiles that do not fill a last round, and
odd units, go last, so that all clusters finish at about the same time:

* where all of them, as units, fit one round, each cluster takes a unit;
* else each of the `rest` full tiles goes to a cluster of its own, the first
  odd units to the others, one each, then round by round from those on.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import ptx

MAX_GROUPS = 128
_FAR = 2**30
WORDS = 4 * MAX_GROUPS  # int32 of shared memory: see write_table
_COUNT, _FULL, _ODD, _SCRATCH = 0, MAX_GROUPS, 2 * MAX_GROUPS, 3 * MAX_GROUPS

_SCALAR = plgpu.Layout.WG_SPLAT(())
_OUT = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)


def write_table(table, start_ref, *, groups, column, unit, columns, threads):
  """MLIR: fills the table from the counts; by all threads of the block.

  table[0:], [128:], [256:]: for every group how many tokens keep it, and how
  many full tiles and odd units there are up to and with it, over its column
  tiles; far too many behind the last group.
  """
  me = ptx.thread()
  base = ptx.pointer(table)
  source = ptx.pointer(start_ref)
  width = column + 1

  def at(where, index):
    return ptx.offset(base, ptx.add(index, where), 4)

  with ptx.when(ptx.less(me, MAX_GROUPS)):
    known = ptx.less(me, groups)
    read = ptx.add(ptx.mul(ptx.select(known, me, 0), width), column)
    count = ptx.load(ptx.offset(source, read, 4))
    count = ptx.select(known, count, 0)
    ptx.store(count, at(_COUNT, me))
    units = ptx.div(ptx.add(count, unit - 1), unit)
    full = ptx.mul(ptx.div(units, 2), columns)
    odd = ptx.mul(ptx.rem(units, 2), columns)
    lane = ptx.rem(me, 32)
    for distance in (1, 2, 4, 8, 16):
      takes = ptx.less(ptx.const(distance - 1), lane)
      below = [ptx.shuffle_up(v, distance) for v in (full, odd)]
      full = ptx.add(full, ptx.select(takes, below[0], 0))
      odd = ptx.add(odd, ptx.select(takes, below[1], 0))
    with ptx.when(ptx.equal(lane, 31)):
      warp = ptx.div(me, 32)
      ptx.store(full, at(_SCRATCH, warp))
      ptx.store(odd, at(_SCRATCH + 4, warp))
    ptx.store(full, at(_FULL, me))
    ptx.store(odd, at(_ODD, me))
  ptx.sync_block(threads)
  with ptx.when(ptx.less(me, MAX_GROUPS)):
    warp = ptx.div(me, 32)
    known = ptx.less(me, groups)
    for part, place in ((0, _FULL), (4, _ODD)):
      total = ptx.load(at(place, me))
      for w in range(3):
        more = ptx.load(at(_SCRATCH + part, ptx.const(w)))
        total = ptx.add(
          total, ptx.select(ptx.less(ptx.const(w), warp), more, 0)
        )
      ptx.store(ptx.select(known, total, _FAR), at(place, me))
  ptx.sync_block(threads)


def _read(table, index) -> Array:
  """table[index], an int32 [] known to all threads."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=_OUT)
  def read(ctx, table, index):
    del ctx
    at = ptx.offset(ptx.pointer(table), ptx.scalar(index), 4)
    return ptx.give(ptx.load(at))

  return read(table, index)


def _find(table, first: int, index) -> Array:
  """The group with table[first + group - 1] <= index < table[first + group]."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=_OUT)
  def find(ctx, table, index):
    del ctx
    lane = ptx.rem(ptx.thread(), 32)
    index = ptx.scalar(index)
    group = ptx.const(0)
    for part in range(0, MAX_GROUPS, 32):
      at = ptx.add(lane, first + part)
      bound = ptx.load(ptx.offset(ptx.pointer(table), at, 4))
      passed = ptx.less(bound, ptx.add(index, 1))
      group = ptx.add(group, ptx.votes(passed))
    return ptx.give(group)

  return find(table, index)


@dataclasses.dataclass(frozen=True)
class Item:
  """One tile of a cluster; all int32 [].

  Attributes:
    group, column: which, the column tile counted within the group.
    unit: its first unit among those of the group.
    units: how many, 1 or 2.
    count: tokens that keep the group.
  """

  group: Array
  column: Array
  unit: Array
  units: Array
  count: Array


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The tiles of one cluster; int32 [] but for the static sizes.

  Attributes:
    table: of write_table, in shared memory.
    cluster: which cluster this is, of `clusters`.
    unit, columns: rows of a unit; column tiles of a group.
    rounds: full tiles that every cluster takes first.
    rest, odd: full tiles beyond these, and odd units, of all clusters.
    items: tiles of this cluster.
  """

  table: object
  cluster: Array
  clusters: int
  unit: int
  columns: int
  rounds: Array
  rest: Array
  odd: Array
  items: Array

  @staticmethod
  def make(table, cluster, *, groups, clusters, unit, columns) -> "Schedule":
    """Reads the totals of a table that is written."""
    full = _read(table, jnp.int32(_FULL + groups - 1))
    odd = _read(table, jnp.int32(_ODD + groups - 1))
    rounds, rest, extra = split(full, odd, cluster, clusters)
    return Schedule(
      table, cluster, clusters, unit, columns, rounds, rest, odd, rounds + extra
    )

  def item(self, index) -> Item:
    """Tile number `index` of this cluster."""
    is_odd, place, half, units = pick(
      index, self.cluster, self.clusters, self.rounds, self.rest, self.odd
    )
    first = jnp.where(is_odd, _ODD, _FULL)
    by_full = _find(self.table, _FULL, place)
    by_odd = _find(self.table, _ODD, place)
    group = jnp.where(is_odd, by_odd, by_full)
    below = _read(self.table, jnp.maximum(first + group - 1, 0))
    place = place - jnp.where(group > 0, below, 0)
    count = _read(self.table, group)
    units_of = _div(count + (self.unit - 1), self.unit)
    pairs = _div(units_of, 2)
    per_column = jnp.where(is_odd, 1, jnp.maximum(pairs, 1))
    column = jax.lax.div(place, per_column)
    unit = jnp.where(is_odd, 2 * pairs, 2 * (place - column * per_column))
    return Item(group, column, unit + half, units, count)


def _div(a, b: int):
  """a / b rounded towards 0, without a floor's corrections."""
  return jax.lax.div(a, jnp.int32(b))


def split(full, odd, cluster, clusters: int):
  """(rounds, rest, tiles of this cluster beyond the rounds)."""
  rounds = _div(full, clusters)
  rest = full - rounds * clusters
  free = clusters - rest
  in_units = (2 * rest + odd <= clusters).astype(jnp.int32)
  by_unit = (cluster < 2 * rest + odd).astype(jnp.int32)
  has_full = (cluster < rest).astype(jnp.int32)
  turn = jnp.where(cluster < rest, free + cluster, cluster - rest)
  has_first = (1 - has_full) * (turn < odd).astype(jnp.int32)
  more = _div(jnp.maximum(odd - free - turn + clusters - 1, 0), clusters)
  by_tile = has_full + has_first + more
  return rounds, rest, jnp.where(in_units == 1, by_unit, by_tile)


def pick(index, cluster, clusters: int, rounds, rest, odd):
  """(is odd, place in its list, half of a full tile, units) of one tile."""
  free = clusters - rest
  late = index - rounds
  in_units = 2 * rest + odd <= clusters
  has_full = cluster < rest
  turn = jnp.where(has_full, free + cluster, cluster - rest)
  # Without units: full tile or first odd unit, then odd ones round by round.
  later_odd = free + turn + (late - 1) * clusters
  tile_odd = jnp.where(late == 0, cluster - rest, later_odd)
  tile_is_odd = (late > 0) | ~has_full
  unit_is_odd = cluster >= 2 * rest
  early = late < 0
  is_odd = ~early & jnp.where(in_units, unit_is_odd, tile_is_odd)
  rest_full = rounds * clusters + jnp.where(in_units, _div(cluster, 2), cluster)
  full_place = jnp.where(early, index * clusters + cluster, rest_full)
  odd_place = jnp.where(in_units, cluster - 2 * rest, tile_odd)
  place = jnp.where(is_odd, odd_place, full_place)
  halved = ~early & in_units
  half = jnp.where(halved & ~is_odd, cluster & 1, 0)
  units = jnp.where(halved | is_odd, 1, 2)
  return is_odd, place, half, units
