"""Rings of shared-memory slots between a producer warp and the warps that multiply.

A ring has `stages` slots with one tile of each of its buffers, and two mbarriers per slot: `full`
counts the bytes of the copies, `empty` the warps that have read them. All loops of a kernel that
read equal tiles share one set of rings, and go on where the last one stopped: (slot, parity) is
carried through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.dialect import MemType
from minitriton.ir.encoding import mem_layout
from minitriton.ir.mlir import ir
from minitriton.ir.warp_roles import ALL_WARPS
from minitriton.passes.loop_arguments import give_results, with_arguments, yield_also
from minitriton.passes.row_groups import row_groups
from minitriton.passes.slots import allocate_barriers, allocate_slots
from minitriton.passes.traversal import (
    Value,
    block_of,
    int_attribute,
    kernel_of,
    ops_of,
    terminator_of,
)

PRODUCER_WARPS = 4  # one copies; setmaxnreg takes registers from whole warpgroups
TURN_GROUPS = 2  # warpgroups that take turns, at least


@dataclass(frozen=True)
class SlotSpec:
    """What a buffer's slots are: the type of a tile, the alignment of the first, and how many tiles
    each has, for one group of warps each."""

    type: ir.Type
    alignment: int
    tiles: int = 1


@dataclass(frozen=True)
class Ring:
    """The buffers of tiles that are read together, and their barriers."""

    buffers: tuple[Value, ...]
    slots: tuple[SlotSpec, ...]
    full: Value
    empty: Value

    def tile(self, index: int, slot: Value, group: Value | None, builder: Builder) -> Value:
        """Slot number `slot` of buffer number `index`; of several tiles that of a group."""
        spec = self.slots[index]
        if group is not None:
            first = builder.op(
                "arith.muli", slot.type, [slot, builder.constant(slot.type, spec.tiles)]
            )
            slot = builder.op("arith.addi", slot.type, [first, group])
        return builder.op("mt.mem_index", spec.type, [self.buffers[index], slot])


Groups = tuple[tuple[SlotSpec, ...], ...]


@dataclass
class RingSet:
    """The rings of a loop. `initial`: (slot, parity) at the kernel's start; `state`: where the last
    loop left them; `once`: for tiles that are copied once for a loop; `around`: the loops that
    carry them, outer ones first."""

    rings: list[Ring]
    stages: int
    initial: tuple[Value, Value]
    state: tuple[Value, Value]
    once: bool
    around: list[_Carrier] = field(default_factory=list)

    def enter(self, loop: ir.Operation, others: Sequence[RingSet]) -> None:
        """Carries the state through the loops around `loop`, so that it goes on in each of their
        iterations where the last one stopped. others: the kernel's other rings, which such loops,
        made anew, may carry, too."""
        self.leave(loop)
        for parent in reversed(_loops_around(loop)):
            if any(carrier.loop == parent for carrier in self.around):
                continue
            sharing = [c for other in others for c in other.around if c.loop == parent]
            made = _Carrier.of(parent, self.state)
            for carrier in sharing:
                carrier.loop = made.loop
            self.around.append(made)
            self.state = made.arguments

    def leave(self, loop: ir.Operation | None = None) -> None:
        """After loops that are not around `loop`, which is next: the state that they end with."""
        kept = _loops_around(loop) if loop is not None else []
        while self.around and self.around[-1].loop not in kept:
            self.state = self.around.pop().results

    def left_off(self, state: tuple[Value, Value]) -> None:
        """A loop has left the rings in `state`."""
        self.state = state
        for carrier in reversed(self.around):
            carrier.yields(state)
            state = carrier.results


@dataclass
class _Carrier:
    """A loop that carries the state of rings as two iter args, of which `place` is the first."""

    loop: ir.Operation
    place: int

    @staticmethod
    def of(loop: ir.Operation, state: tuple[Value, Value]) -> _Carrier:
        """`loop` made anew with two further iter args, unchanged so far."""
        new, arguments = with_arguments(loop, state)
        yield_also(new, arguments)
        give_results(loop, new)
        place = len(loop.results)
        loop.erase()
        return _Carrier(new, place)

    @property
    def arguments(self) -> tuple[Value, Value]:
        _, *carried = self.loop.regions[0].blocks[0].arguments
        return carried[self.place], carried[self.place + 1]

    @property
    def results(self) -> tuple[Value, Value]:
        return self.loop.results[self.place], self.loop.results[self.place + 1]

    def yields(self, state: tuple[Value, Value]) -> None:
        end = terminator_of(self.loop.regions[0].blocks[0])
        end.operands[self.place], end.operands[self.place + 1] = state


def _loops_around(loop: ir.Operation) -> list[ir.Operation]:
    """The scf.for that `loop` is in, inner ones first."""
    found, parent = [], loop.parent.operation
    while parent.name != "func.func":
        if parent.name == "scf.for":
            found.append(parent)
        parent = parent.parent.operation
    return found


class Rings:
    """All rings of a kernel, set up at its entry: see `mt.split_warps`."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        self._sets: list[tuple[Groups, RingSet]] = []
        self._split: ir.Operation | None = None
        self._has_turns = False

    @property
    def sets(self) -> list[RingSet]:
        return [found for _, found in self._sets]

    @property
    def split(self) -> ir.Operation | None:
        """The mt.split_warps of the kernel, if it has rings."""
        return self._split

    def known(
        self, groups: Groups, stages: int, loop: ir.Operation, *, once: bool
    ) -> RingSet | None:
        """The rings of an earlier loop with such buffers, of at most so many slots, that come to
        `loop` on every path; those for tiles copied once are apart."""
        for slots, found in self._sets:
            if slots == groups and found.once == once and found.stages <= stages:
                found.leave(loop)
                if _reaches(found.state[1], loop):
                    return found
        return None

    def make(self, groups: Groups, stages: int, *, once: bool) -> RingSet:
        """New rings for a loop that has no earlier one like it."""
        function = kernel_of(self._module)
        if self._split is None:
            self._split = _split(function)
            warps = i32_attr(PRODUCER_WARPS)
            self._module.operation.attributes["mt.producer_warps"] = warps
        setup = ops_of(self._split.block)[ops_of(self._split.block).index(self._split) - 1]
        builder = Builder(ir.InsertionPoint(setup), self._split.location)
        warps = int_attribute(self._module.operation, "mt.num_warps") * row_groups(self._module)
        rings = [_ring(group, stages, warps, builder) for group in groups]
        ends = Builder(ir.InsertionPoint(terminator_of(self._split.block)), self._split.location)
        for ring in rings:
            for value in (*ring.buffers, ring.full, ring.empty):
                ends.create("mt.local_dealloc", [], [value])
        i32 = ir.IntegerType.get_signless(32)
        initial = (builder.constant(i32, 0), builder.constant(i32, 0))
        made = RingSet(rings, stages, initial, initial, once)
        self._sets.append((groups, made))
        return made

    def end_after(self, loop: ir.Operation) -> None:
        """Gives the memory of all slots back after `loop`, the last that reads them."""
        builder = Builder(ir.InsertionPoint.after(loop), loop.location)
        for buffer in [b for found in self.sets for ring in found.rings for b in ring.buffers]:
            ends = [use.owner for use in buffer.uses if use.owner.name == "mt.local_dealloc"]
            for end in ends:
                end.operation.erase()
            builder.create("mt.local_dealloc", [], [buffer])

    def take_turns(self) -> None:
        """For a kernel with loops whose warpgroups take turns: each begins with the first one's
        turn, which the last passes to it at the kernel's start and after every loop."""
        assert self._split is not None, "loops with turns have rings"
        if self._has_turns:
            return
        self._has_turns = True
        ops = ops_of(self._split.block)
        at = Builder(ir.InsertionPoint(ops[ops.index(self._split) + 1]), self._split.location)
        last = max(row_groups(self._module), TURN_GROUPS) - 1
        at.create("mt.turn_pass", [], [], {"mt.group": i32_attr(last)})
        first = ops[-1]
        while ops[ops.index(first) - 1].name == "mt.local_dealloc":
            first = ops[ops.index(first) - 1]
        end = Builder(ir.InsertionPoint(first), self._split.location)
        end.create("mt.turn_wait", [], [], {"mt.group": i32_attr(0)})


def _reaches(value: Value, loop: ir.Operation) -> bool:
    """Whether a value that was made before `loop` is known there."""
    around = loop
    while around.name != "func.func":
        if around.block == block_of(value):
            return True
        around = around.parent.operation
    return False


def _split(function: ir.Operation) -> ir.Operation:
    """Where the warps part, at the kernel's entry: everyone first sees the barriers ready."""
    body = function.regions[0].blocks[0]
    builder = Builder(ir.InsertionPoint.at_block_begin(body), function.location)
    builder.create("mt.barrier", [], [], {ALL_WARPS: ir.UnitAttr.get()})
    return builder.create("mt.split_warps", [])


def _ring(group: Sequence[SlotSpec], stages: int, warps: int, builder: Builder) -> Ring:
    buffers = []
    for slot in group:
        element = MemType(slot.type).tensor_type.element_type
        layout = mem_layout(slot.type)
        count = stages * slot.tiles
        buffers.append(allocate_slots(count, layout, element, slot.alignment, builder))
    full, empty = (allocate_barriers(stages, count, builder) for count in (1, warps))
    return Ring(tuple(buffers), tuple(group), full, empty)
