"""What the warpgroups of a matmul write: tiles from registers, and zeros."""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, vector

from pallas_kernels.mosaic_gpu import ptx

_SCALAR = plgpu.Layout.WG_SPLAT(())


def places(shape, order_ref, item, begin):
  """Tokens whose rows each thread holds, or -1: [tile of 64 rows][8 rows on].

  In the result of a wgmma, lane l of warp w holds rows 16 w + l / 4 and 8 on.
  """
  count = 2 * shape.tiles.row_tiles
  result = plgpu.ShapeDtypeStruct(
    (128 * count,),
    jnp.int32,
    layout=plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1),
  )

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR),
    return_type=result,
  )
  def find(ctx, order_ref, group, begin, kept):
    del ctx
    me = ptx.rem(ptx.thread(), 128)
    row = ptx.add(ptx.mul(ptx.div(me, 32), 16), ptx.div(ptx.rem(me, 32), 4))
    start = ptx.mul(ptx.scalar(group), shape.tokens)
    order = ptx.offset(ptx.pointer(order_ref), start, 4)
    found = []
    for i in range(count):
      at = ptx.add(ptx.add(ptx.scalar(begin), row), i // 2 * 64 + i % 2 * 8)
      inside = ptx.less(at, ptx.scalar(kept))
      token = ptx.load(ptx.offset(order, ptx.select(inside, at, 0), 4))
      found.append(ptx.select(inside, token, -1))
    return ptx.give_each(found)

  return find(order_ref, item.group, begin, item.count)


def write(shape, out_ref, item, places, acc) -> None:
  """Rows of the accumulator to their tokens; through SwiGLU first if gated."""
  begin = item.group * (shape.n // shape.groups) + item.column * shape.width

  @plgpu.inline_mgpu(
    arg_types=(
      plgpu.RefType(),
      _SCALAR,
      plgpu.Layout.WG_STRIDED(places.shape, vec_size=1),
      plgpu.Layout.WGMMA,
    )
  )
  def store(ctx, out_ref, begin, places, acc):
    del ctx
    tokens = ptx.take_each(places)
    rows, width = acc.shape
    # [tile of 64 rows, tile of 8 columns, 8 rows on] of <2 x f32>
    pairs = acc.registers.reshape(rows // 64, width // 8, 2)
    half_type = ir.MemRefType(out_ref.type).element_type
    lane = ptx.rem(ptx.thread(), 32)
    quarter = ptx.rem(lane, 4)
    base = ptx.pointer(out_ref)
    first = ptx.add(ptx.scalar(begin), ptx.mul(quarter, 8))
    for tile in range(rows // 64):
      for half in range(2):
        words = _words(pairs[tile, :, half], half_type, shape.gated)
        token = tokens[2 * tile + half]
        inside = ptx.less(-1, token)
        row = ptx.row_offset(base, ptx.select(inside, token, 0), shape.n * 2)
        row = ptx.offset(row, first, 2)
        for part in range(0, len(words), 4):
          mine = _turn(words[part : part + 4], quarter)
          with ptx.when(inside):
            ptx.store16(mine, ptx.offset(row, ptx.const(part * 16), 1))

  store(out_ref, begin, places, acc)


def _words(pairs, half_type, gated: bool) -> list[ir.Value]:
  """Pairs of f32 as i32 holding two rounded values; gate and up as one."""
  pairs = list(pairs)
  if gated:
    middle = len(pairs) // 2
    pairs = [
      _gate(g, u) for g, u in zip(pairs[:middle], pairs[middle:], strict=True)
    ]
  two = ir.VectorType.get((2,), half_type)
  one = ir.VectorType.get((1,), ptx.i32())
  words = []
  for pair in pairs:
    word = vector.bitcast(one, arith.truncf(two, pair))
    words.append(vector.extract(word, [], [0]))
  return words


def _gate(gate, up):
  """silu(gate) * up of two <2 x f32>."""
  one = arith.constant(
    gate.type,
    ir.DenseElementsAttr.get_splat(
      gate.type, ir.FloatAttr.get(ir.F32Type.get(), 1.0)
    ),
  )
  down = math.exp(arith.negf(gate))
  return arith.mulf(arith.divf(gate, arith.addf(one, down)), up)


def _turn(words, quarter) -> list[ir.Value]:
  """Transposes 4 x 4 words among four lanes: word i of lane j is word j of i.

  Lane j then holds 8 neighbouring columns of tile j.
  """
  words = list(words)
  for bit in (1, 2):
    upper = ptx.equal(ptx.rem(ptx.div(quarter, bit), 2), 1)
    for i in range(4):
      if i & bit:
        continue
      low, high = words[i], words[i | bit]
      # The lane with the bit keeps its high word and gives its low one.
      given = ptx.shuffle_xor(ptx.select(upper, low, high), bit)
      words[i] = ptx.select(upper, given, low)
      words[i | bit] = ptx.select(upper, high, given)
  return words


def zeros(shape, order_ref, table, out_ref, number) -> None:
  """Zeros for all tokens that drop a group; by the warps that do not gather.

  A warp takes 32 tokens of a group at a time.
  """
  idle = 4 - shape.gatherers // 32
  warps = idle * shape.clusters * shape.tiles.cluster
  channels = shape.n // shape.groups

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3 + (_SCALAR,))
  def clear(ctx, order_ref, table, out_ref, number):
    del ctx
    me = ptx.rem(ptx.thread(), 128)
    lane = ptx.rem(me, 32)
    mine = ptx.sub(ptx.div(me, 32), 4 - idle)
    warp = ptx.add(ptx.mul(ptx.scalar(number), idle), mine)
    base = ptx.pointer(out_ref)
    none = [ptx.const(0)] * 4

    def group(g):
      count = ptx.load(ptx.offset(ptx.pointer(table), g, 4))
      left = ptx.sub(ptx.const(shape.tokens), count)
      # Warps in another order for each group: all have about as much to do.
      turn = ptx.rem(ptx.add(warp, ptx.mul(g, 37)), warps)
      batches = ptx.div(ptx.add(left, 31), 32)
      mine = ptx.div(ptx.add(ptx.sub(batches, turn), warps - 1), warps)
      mine = ptx.select(ptx.less(turn, batches), mine, 0)
      start = ptx.offset(ptx.pointer(order_ref), ptx.mul(g, shape.tokens), 4)

      def batch(i):
        at = ptx.mul(ptx.add(turn, ptx.mul(i, warps)), 32)
        at = ptx.add(ptx.add(count, at), lane)
        inside = ptx.less(at, shape.tokens)
        token = ptx.load(ptx.offset(start, ptx.select(inside, at, 0), 4))
        token = ptx.select(inside, token, -1)

        def row(j):
          target = ptx.shuffle(token, j)
          with ptx.when(ptx.less(-1, target)):
            here = ptx.row_offset(base, target, shape.n * 2)
            here = ptx.offset(here, ptx.mul(g, channels), 2)
            here = ptx.offset(here, lane, 16)
            for part in range(0, channels * 2, 512):
              with ptx.when(ptx.less(lane, (channels * 2 - part) // 16)):
                ptx.store16(none, ptx.offset(here, ptx.const(part), 1))

        ptx.loop(ptx.const(32), row)

      ptx.loop(mine, batch)

    with ptx.when(ptx.less(shape.gatherers - 1, me)):
      ptx.loop(ptx.const(shape.groups), group)

  clear(order_ref, table, out_ref, number)
