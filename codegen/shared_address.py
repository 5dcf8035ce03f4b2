"""Addresses and vector accesses of threads in shared memory, and who may write.

The byte offset of a thread is an XOR of constants selected by the bits of lane and warp; it is
made once at the kernel's entry. A register group adds a constant: as an immediate of the
instruction where no bit overlaps with the thread's, else through a second XORed offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from minitriton.codegen.emit import width_of
from minitriton.codegen.lower import Lowering
from minitriton.ir.mlir import ir
from minitriton.ir.ragged import Gap, place_of
from minitriton.ir.shared_access import SharedAccessPlan, reachable

MAX_ACCESS_BYTES = 16


def shared_word(lowering: Lowering, pointer: ir.Value) -> ir.Value:
    """i32 address of a place in shared memory, as inline PTX takes it."""
    return lowering.op("llvm.ptrtoint", lowering.i32, (pointer,))


class ThreadAddress:
    """Addresses `base ^ offset` in elements of `elem_bytes`, base being XORed by lane and warp;
    with gaps (ir/ragged.py) the places of these offsets."""

    def __init__(
        self,
        lowering: Lowering,
        pointer: ir.Value,
        lane_bases: Sequence[int],
        warp_bases: Sequence[int],
        elem_bytes: int,
        gaps: Sequence[Gap] = (),
    ) -> None:
        self._lowering = lowering
        self._pointer = pointer
        scale = elem_bytes.bit_length() - 1
        self._gaps = tuple(Gap(gap.above + scale, gap.skipped * elem_bytes) for gap in gaps)
        self._lane = tuple(basis * elem_bytes for basis in lane_bases)
        self._warp = tuple(basis * elem_bytes for basis in warp_bases)
        self._touched = reachable((*self._lane, *self._warp))
        self._elem_bytes = elem_bytes
        self._bases: dict[int, ir.Value] = {}

    def at(self, offset: int) -> ir.Value:
        """`!llvm.ptr<3>` of this thread's base XOR `offset` elements."""
        offset *= self._elem_bytes
        flipped = offset & self._touched
        if flipped not in self._bases:
            self._bases[flipped] = self._lowering.offset_pointer(
                self._pointer, self._thread_offset(flipped)
            )
        rest = place_of(offset & ~self._touched, self._gaps)
        return self._lowering.offset_pointer(self._bases[flipped], rest)

    def _thread_offset(self, flipped: int) -> ir.Value | int:
        lowering = self._lowering
        if not self._touched:
            return 0
        key = ("shared offset", self._lane, self._warp)
        base = lowering.once(
            key,
            lambda: lowering.linear(
                ((lowering.lane_id, self._lane), (lowering.warp_id, self._warp))
            ),
        )
        if flipped:
            base = lowering.once((*key, flipped), lambda: lowering.xor(base, flipped))
        crossed = tuple(gap for gap in self._gaps if self._touched >> gap.above)
        if not crossed:
            return base
        return lowering.once((*key, flipped, crossed), lambda: self._place(base, crossed))

    def _place(self, offset: ir.Value, gaps: Sequence[Gap]) -> ir.Value:
        """What `place_of` says, of a thread's offset."""
        lowering = self._lowering
        for gap in gaps:
            above = lowering.shr(offset, gap.above)
            offset = lowering.add(offset, lowering.mul(above, -gap.skipped))
        return offset


def to_storage(lowering: Lowering, value: ir.Value) -> ir.Value:
    """A register as it lies in shared memory: i1 as i8, pointers as i64."""
    if value.type == lowering.i1:
        return lowering.op("arith.extui", lowering.i8, (value,))
    if value.type == lowering.pointer:
        return lowering.op("llvm.ptrtoint", lowering.i64, (value,))
    return value


def from_storage(lowering: Lowering, value: ir.Value, element: ir.Type) -> ir.Value:
    """The inverse of `to_storage` for an element of carried type `element`."""
    if element == lowering.i1:
        return lowering.op("arith.trunci", lowering.i1, (value,))
    if element == lowering.pointer:
        return lowering.op("llvm.inttoptr", lowering.pointer, (value,))
    return value


def storage_type(lowering: Lowering, element: ir.Type) -> ir.Type:
    """The type in shared memory of an element of carried type `element`."""
    if element == lowering.i1:
        return lowering.i8
    return lowering.i64 if element == lowering.pointer else element


def storage_bytes(element: ir.Type) -> int:
    """Bytes of an element of carried type `element` in shared memory."""
    return max(1, width_of(element) // 8)


def store_plan(
    lowering: Lowering, plan: SharedAccessPlan, pointer: ir.Value, registers: Sequence[ir.Value]
) -> None:
    """Writes registers (numbered as in the plan) to the tile at `pointer`; each element once."""
    elem_bytes = plan.elem_bits // 8
    address = ThreadAddress(
        lowering, pointer, plan.lane_bases, plan.warp_bases, elem_bytes, plan.gaps
    )
    vectors = []
    for group in plan.groups:
        values = [to_storage(lowering, registers[r]) for r in group.registers]
        data = lowering.pack(values) if len(values) > 1 else values[0]
        vectors.append((data, address.at(group.offset)))
    with writers(lowering, plan.free_lane_mask, plan.free_warp_mask):
        for data, place in vectors:
            lowering.store(data, place, plan.vec * elem_bytes)


def load_plan(
    lowering: Lowering, plan: SharedAccessPlan, pointer: ir.Value, element: ir.Type, count: int
) -> list[ir.Value]:
    """Reads the `count` registers of the plan's layout from the tile at `pointer`."""
    elem_bytes = plan.elem_bits // 8
    stored = storage_type(lowering, element)
    address = ThreadAddress(
        lowering, pointer, plan.lane_bases, plan.warp_bases, elem_bytes, plan.gaps
    )
    result: list[ir.Value | None] = [None] * count
    for group in plan.groups:
        values = load_vector(
            lowering, stored, len(group.registers), address.at(group.offset), plan.vec * elem_bytes
        )
        for register, value in zip(group.registers, values, strict=True):
            result[register] = from_storage(lowering, value, element)
    for register, original in plan.duplicates:
        result[register] = result[original]
    return [value for value in result if value is not None]


def load_vector(
    lowering: Lowering, stored: ir.Type, count: int, pointer: ir.Value, alignment: int
) -> list[ir.Value]:
    """`count` consecutive elements in one access."""
    if count == 1:
        return [lowering.load(stored, pointer, alignment)]
    return lowering.unpack(lowering.load(ir.VectorType.get([count], stored), pointer, alignment))


def thread_mask_is_clear(lowering: Lowering, lanes: int, warps: int) -> ir.Value | None:
    """i1: this thread's lane and warp have none of the given bits; None where that is known."""

    def make() -> ir.Value:
        checks = [
            lowering.compare("eq", lowering.and_(index, mask), 0)
            for mask, index in ((lanes, lowering.lane_id), (warps, lowering.warp_id))
            if mask
        ]
        return checks[0] if len(checks) == 1 else lowering.and_(*checks)

    return lowering.once(("clear", lanes, warps), make) if lanes or warps else None


@contextmanager
def writers(lowering: Lowering, idle_lanes: int, idle_warps: int) -> Iterator[None]:
    """What is emitted inside runs only on threads without any of the idle bits."""
    condition = thread_mask_is_clear(lowering, idle_lanes, idle_warps)
    if condition is None:
        yield
        return
    branch = lowering.create("scf.if", [], [condition], regions=2)
    block = branch.regions[0].blocks.append()
    with lowering.builder.at(ir.InsertionPoint(block)):
        yield
        lowering.create("scf.yield", [])


def meet(lowering: Lowering, *, warp_local: bool = False) -> None:
    """Barrier of the CTA, or of each warp where that is enough."""
    if warp_local or lowering.num_warps == 1:
        lowering.create("nvvm.bar.warp.sync", [], [lowering.int32(-1)])
    else:
        lowering.barrier()
