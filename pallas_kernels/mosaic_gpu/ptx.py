"""Device instructions that Pallas Mosaic GPU does not offer, as MLIR.

All functions are called while a kernel is lowered, inside plgpu.inline_mgpu,
by every thread of a warpgroup. Values are MLIR values: i32 unless said.
"""

import dataclasses
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf, vector

CLUSTER_AXIS = gpu.Dimension.x

_ALL_LANES = 0xFFFFFFFF


def i32() -> ir.Type:
  return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
  return ir.IntegerType.get_signless(64)


def const(value: int) -> ir.Value:
  """An i32 constant."""
  return utils.c(value, i32())


def scalar(value) -> ir.Value:
  """The i32 that Pallas passed."""
  return value.registers.item()


def give(value: ir.Value):
  """An i32, the same in all threads, as Pallas takes it back."""
  return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def give_each(values: list[ir.Value]):
  """An i32 array of 128 * len(values): every thread keeps its own values."""
  one = ir.VectorType.get((1,), i32())
  registers = np.array([vector.broadcast(one, v) for v in values])
  layout = mgpu.WGStridedFragLayout((128 * len(values),), 1)
  return mgpu.FragmentedArray(
    _registers=registers, _layout=layout, _is_signed=True
  )


def take_each(array) -> list[ir.Value]:
  """What give_each was given."""
  return [llvm.extractelement(r, const(0)) for r in array.registers.flat]


def add(a, b):
  return arith.addi(a, _as_i32(b))


def sub(a, b):
  return arith.subi(a, _as_i32(b))


def mul(a, b):
  return arith.muli(a, _as_i32(b))


def div(a, b: int):
  return arith.divui(a, _as_i32(b))


def rem(a, b: int):
  return arith.remui(a, _as_i32(b))


def less(a, b):
  a = _as_i32(a)
  return arith.cmpi(arith.CmpIPredicate.slt, a, _as_i32(b))


def equal(a, b):
  return arith.cmpi(arith.CmpIPredicate.eq, a, _as_i32(b))


def select(cond, a, b):
  return arith.select(cond, _as_i32(a), _as_i32(b))


def _as_i32(x) -> ir.Value:
  return const(x) if isinstance(x, int) else x


def thread() -> ir.Value:
  """Of the block."""
  return utils.thread_idx()


def pointer(ref: ir.Value) -> ir.Value:
  """To the first byte of a memref."""
  return utils.memref_ptr(ref)


def offset(ptr: ir.Value, count: ir.Value, unit: int) -> ir.Value:
  """ptr + count * unit bytes; count is an i32 that is not negative.

  Pointers to shared memory stay 32 bits wide in registers.
  """
  wide = arith.extui(i64(), count)
  wide = arith.muli(wide, utils.c(unit, i64()))
  return llvm.getelementptr(
    ptr.type,
    ptr,
    [wide],
    [_DYNAMIC],
    ir.IntegerType.get_signless(8),
    llvm.GEPNoWrapFlags.none,
  )


_DYNAMIC = -(2**31)


def load(ptr: ir.Value, ty: ir.Type | None = None) -> ir.Value:
  return llvm.load(i32() if ty is None else ty, ptr)


def store(value: ir.Value, ptr: ir.Value) -> None:
  llvm.store(value, ptr)


def shuffle_xor(value: ir.Value, distance: int) -> ir.Value:
  return utils.shfl_bfly(value, distance)


def _asm(text: str, constraints: str, args, result=None):
  return llvm.inline_asm(
    ir.Type.parse("!llvm.void") if result is None else result,
    args,
    text,
    f"{constraints},~{{memory}}" if constraints else "~{memory}",
    has_side_effects=True,
  )


def shuffle_up(value: ir.Value, distance: int) -> ir.Value:
  """From the lane `distance` below; lanes below that keep their own."""
  text = f"shfl.sync.up.b32 $0, $1, {distance}, 0, {_ALL_LANES};"
  return _asm(text, "=r,r", [value], i32())


def shuffle(value: ir.Value, lane) -> ir.Value:
  """From one lane."""
  text = f"shfl.sync.idx.b32 $0, $1, $2, 31, {_ALL_LANES};"
  return _asm(text, "=r,r,r", [value, _as_i32(lane)], i32())


def votes(predicate: ir.Value) -> ir.Value:
  """How many lanes of the warp say yes."""
  flag = arith.extui(i32(), predicate)
  text = (
    "{ .reg .pred p; .reg .b32 v; setp.ne.b32 p, $1, 0; "
    f"vote.sync.ballot.b32 v, p, {_ALL_LANES}; popc.b32 $0, v; }}"
  )
  return _asm(text, "=r,r", [flag], i32())


def sync_block(threads: int) -> None:
  """All `threads` of the block."""
  _asm(f"barrier.sync.aligned 0, {threads};", "", [])


def sync_cluster() -> None:
  """All threads of all blocks of the cluster."""
  _asm("barrier.cluster.arrive.release.aligned;", "", [])
  _asm("barrier.cluster.wait.acquire.aligned;", "", [])


def sync_warpgroup() -> None:
  utils.warpgroup_barrier()


# --- asynchronous copies and barriers ----------------------------------------


def copy16(to: ir.Value, source: ir.Value, size: ir.Value) -> None:
  """16 bytes to shared memory; beyond the first `size` they are zeros."""
  to = llvm.ptrtoint(i32(), to)
  text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
  _asm(text, "r,l,r", [to, source, size])


def fence_async() -> None:
  """What this thread wrote to shared memory is seen by wgmma and TMA."""
  _asm("fence.proxy.async.shared::cta;", "", [])


@dataclasses.dataclass(frozen=True)
class Barriers:
  """An array of mbarriers in shared memory."""

  base: ir.Value

  def at(self, index: ir.Value) -> utils.BarrierRef:
    """One barrier, as Mosaic's copies take it."""
    no_phases: Any = None  # every wait is told its parity
    return utils.BarrierRef(self.base, index, no_phases, 1)

  def init(self, index: int, arrivals: int) -> None:
    """By one thread."""
    at = self.at(const(index)).get_ptr()
    _asm(f"mbarrier.init.shared.b64 [$0], {arrivals};", "r", [_int(at)])

  def wait(self, index: ir.Value, parity: ir.Value) -> None:
    """Until the phase of this parity is complete."""
    bit = arith.trunci(ir.IntegerType.get_signless(1), parity)
    self.at(index).wait_parity(bit)

  def arrive_expect(self, index: ir.Value, size: int) -> None:
    """Likewise; `size` bytes of TMA copies will come."""
    at = _int(self.at(index).get_ptr())
    text = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;"
    _asm(text, "r,n", [at, const(size)])

  def arrive_after_copies(self, index: ir.Value) -> None:
    """This thread arrives as soon as its copies so far are there."""
    at = _int(self.at(index).get_ptr())
    _asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", [at])

  def arrive_at(self, index: ir.Value, block: ir.Value) -> None:
    """Likewise, at the barrier of a block of the cluster; orders nothing.

    What wgmma read is read once it was waited for. With release semantics at
    the cluster's scope the compiler puts a fence of the whole GPU here, which
    took a quarter of the matmul's time.
    """
    at = _int(self.at(index).get_ptr())
    text = (
      "{ .reg .b32 far; mapa.shared::cluster.u32 far, $0, $1; "
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [far]; }"
    )
    _asm(text, "r,r", [at, block])


def _int(ptr: ir.Value) -> ir.Value:
  return llvm.ptrtoint(i32(), ptr)


def elected() -> ir.Value:
  """i1: one thread of the warp."""
  return nvvm.elect_sync()


def when(cond: ir.Value):
  """A context whose body runs where cond (i1) holds."""
  return utils.when(cond)


def loop(count: ir.Value, body) -> None:
  """body(i) for i in range(count)."""
  index = ir.IndexType.get()
  bound = arith.index_cast(index, count)
  op = scf.ForOp(utils.c(0, index), bound, utils.c(1, index), [])
  with ir.InsertionPoint(op.body):
    body(arith.index_cast(i32(), op.induction_variable))
    scf.yield_([])


def both(a: ir.Value, b: ir.Value) -> ir.Value:
  """i1 and."""
  return arith.andi(a, b)


def xor(a, b):
  return arith.xori(a, _as_i32(b))


def index(value: ir.Value) -> ir.Value:
  """As MLIR indexes."""
  return arith.index_cast(ir.IndexType.get(), value)


def row_offset(ptr: ir.Value, row: ir.Value, size: int) -> ir.Value:
  """ptr + row * size; as offset, by its own name for the reader."""
  return offset(ptr, row, size)


def store16(words: list[ir.Value], ptr: ir.Value) -> None:
  """Four i32 to global memory, 16 bytes aligned."""
  text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
  _asm(text, "l,r,r,r,r", [ptr, *words])


def fence_barrier_init() -> None:
  """Barriers just initialised are seen by the cluster and by copies."""
  _asm("fence.mbarrier_init.release.cluster;", "", [])
