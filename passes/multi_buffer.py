"""The loop rewrite of `pipeline_loads`: buffers, copies ahead of time, waits.

The loop keeps its structure; it gains iter args: copies of the address recurrences that run
stages-1 iterations ahead, and the slot numbers to fill and to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.encoding import mem_type
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.passes.affine import AffineAnalysis
from minitriton.passes.ahead_of_time import AheadOfTime
from minitriton.passes.loop_arguments import give_results, with_arguments, yield_also
from minitriton.passes.op_classes import is_elementwise
from minitriton.passes.products_in_flight import (
    Flights,
    keep_in_flight,
    meet_again,
    take_results,
)
from minitriton.passes.slots import allocate_slots
from minitriton.passes.tensor_maps import MapPlan
from minitriton.passes.tma_copies import TmaCopies
from minitriton.passes.traversal import (
    Value,
    attributes_of,
    fills_with_zero,
    int_array,
    is_used,
    terminator_of,
)
from minitriton.passes.warpgroup_dots import use_warpgroups

EQ, NE, SLT = 0, 1, 2  # arith.cmpi predicates


@dataclass(frozen=True)
class Staged:
    """A load to be multi-buffered, the shared layout of its slots, bytes of one. tiles: in a slot,
    one for each of the groups that share a program's rows.

    alignment: that of the buffer where wgmma is to read it, else 1. map: of the tensor, if TMA is
    to copy it; order: the load's dimensions, fastest first. private: every thread reads what it
    copied itself, so that no barrier is needed; of_warp: what its warp copied.
    """

    load: ir.Operation
    slot: LinearLayout
    bytes: int
    alignment: int = 1
    map: MapPlan | None = None
    order: tuple[int, ...] = ()
    private: bool = False
    of_warp: bool = False
    tiles: int = 1


class _Buffer:
    """The multi-buffer of one load; a load that is the same in every iteration has one slot."""

    def __init__(self, staged: Staged, stages: int, fixed: bool, builder: Builder) -> None:
        self.load, self.bytes, self.of_warp = staged.load, staged.bytes, staged.of_warp
        self.map, self.order, self.private = staged.map, staged.order, staged.private
        self.slot = slot = staged.slot
        self.fixed = fixed
        element = self.load.results[0].type.element_type
        self.slot_type = mem_type(slot.shape, element, slot)
        count = 1 if fixed else stages
        self.value = allocate_slots(count, slot, element, staged.alignment, builder)

    def at(self, index: Value, builder: Builder) -> Value:
        if self.fixed:
            index = builder.constant(index.type, 0)
        return builder.op("mt.mem_index", self.slot_type, [self.value, index])


class _Copies:
    """Everything that fills the buffers of one loop."""

    def __init__(
        self, buffers: Sequence[_Buffer], ahead: AheadOfTime, upper: Value, tma: TmaCopies | None
    ) -> None:
        self.buffers, self.tma = buffers, tma
        self._ahead, self._upper = ahead, upper
        self.by_threads = [buffer for buffer in buffers if buffer.map is None]

    def issue(
        self, known: dict[Value, Value], slot: Value, builder: Builder, *, first: bool
    ) -> None:
        """Copies of one iteration into slot `slot`; nothing past the loop's end. `first`: with the
        tiles that are the same in every iteration."""
        ahead = self._ahead
        runs = compare(SLT, known[ahead.induction], self._upper, builder)
        ahead.runs = runs
        if self.tma is not None:
            self.tma.issue(
                slot, runs, lambda value: ahead.clone(value, known, builder), builder, first=first
            )
        if self.by_threads:
            filled = [buffer for buffer in self.by_threads if first or not buffer.fixed]
            _copy_by_threads(filled, ahead, known, slot, builder)

    def wait(self, slot: Value, parity: Value | None, stages: int, builder: Builder) -> None:
        """Until what slot number `slot` is to hold is there."""
        if self.by_threads:
            meets = {"of_warp": ir.UnitAttr.get()} if any(b.of_warp for b in self.buffers) else {}
            builder.create("mt.async_wait", [], [], {"pending": i32_attr(stages - 2), **meets})
            if any("mt.alignment" in b.value.owner.attributes for b in self.by_threads):
                builder.create("mt.proxy_fence", [])
        if self.tma is not None and parity is not None:
            self.tma.wait(slot, parity, builder)
        if not all(buffer.private for buffer in self.buffers):
            builder.create("mt.barrier", [])

    def end(self, builder: Builder) -> None:
        """After the loop."""
        if self.by_threads:
            builder.create("mt.async_wait", [], [], {"pending": i32_attr(0)})
        for buffer in self.buffers:
            builder.create("mt.local_dealloc", [], [buffer.value])
        if self.tma is not None:
            self.tma.end(builder)


def rewrite_loop(
    module: ir.Module,
    loop: ir.Operation,
    staged: Sequence[Staged],
    ahead: AheadOfTime,
    analysis: AffineAnalysis,
    stages: int,
) -> ir.Operation:
    """Replaces `loop`; `ahead` has checked the addresses and masks of the loads (of TMA copies, the
    scalars in their coordinates); stages >= 2."""
    builder = Builder(ir.InsertionPoint(loop), loop.location)
    i32 = ir.IntegerType.get_signless(32)
    buffers = [_Buffer(s, stages, is_fixed(s.load, ahead), builder) for s in staged]
    with_tma = any(s.map is not None for s in staged)
    tma = TmaCopies(module, buffers, analysis, stages, builder) if with_tma else None
    lower, upper, step, *inits = loop.operands
    copies = _Copies(buffers, ahead, upper, tma)
    # prologue: iterations 0 .. stages-2
    state = {ahead.arguments[index]: inits[index] for index in ahead.carried}
    induction = lower
    for stage in range(stages - 1):
        known = {**state, ahead.induction: induction}
        copies.issue(known, builder.constant(i32, stage), builder, first=stage == 0)
        state, induction = _advance(ahead, known, step, builder)
    distance = builder.op("arith.muli", step.type, [step, builder.constant(step.type, stages - 1)])
    carried = [state[ahead.arguments[index]] for index in ahead.carried]
    slots = [builder.constant(i32, stages - 1), builder.constant(i32, 0)]
    if with_tma:
        slots.append(builder.constant(i32, 0))  # the parity to wait for
    new, arguments = with_arguments(loop, [*carried, *slots])
    flights = _fill_body(new, arguments, copies, ahead, distance, stages)
    give_results(loop, new)
    take_results(new, flights, builder)
    copies.end(builder)
    loop.erase()
    return new


def is_fixed(load: ir.Operation, ahead: AheadOfTime) -> bool:
    """Whether the tile that `load` reads is the same in every iteration."""
    return all(map(ahead.is_invariant, list(load.operands)[:2]))


def _fill_body(
    new: ir.Operation,
    arguments: list[Value],
    copies: _Copies,
    ahead: AheadOfTime,
    distance: Value,
    stages: int,
) -> Flights:
    """Returns the products that are in flight from one iteration to the next."""
    body, location = new.regions[0].blocks[0], new.location
    *carried, fill, read = arguments[:-1] if copies.tma is not None else arguments
    parity = arguments[-1] if copies.tma is not None else None
    builder = Builder(ir.InsertionPoint.at_block_begin(body), location)
    copies.wait(read, parity, stages, builder)
    induction = builder.op("arith.addi", distance.type, [ahead.induction, distance])
    known = {ahead.arguments[index]: v for index, v in zip(ahead.carried, carried, strict=True)}
    known[ahead.induction] = induction
    for buffer in copies.buffers:
        (_read_own if buffer.private else read_from)(buffer, read)
    flights = keep_in_flight(body, use_warpgroups(body))
    if flights.crossing:  # they may still read the slot to be filled
        meet_again(flights, lambda at: copies.issue(known, fill, at, first=False))
    else:
        copies.issue(known, fill, builder, first=False)
    tail = Builder(ir.InsertionPoint(terminator_of(body)), location)
    updates = [ahead.clone(ahead.updates[index], known, tail) for index in ahead.carried]
    slots = [next_slot(fill, stages, tail), next_slot(read, stages, tail)]
    if parity is not None:
        slots.append(next_parity(parity, read, stages, tail))
    yield_also(new, [*updates, *slots])
    for buffer in copies.buffers:
        buffer.load.erase()
    return flights


def _copy_by_threads(
    buffers: Sequence[_Buffer],
    ahead: AheadOfTime,
    known: dict[Value, Value],
    slot: Value,
    builder: Builder,
) -> None:
    """cp.async of one iteration into slot `slot`, as one group."""
    i1 = ir.IntegerType.get_signless(1)
    assert ahead.runs is not None, "copies are made for an iteration"
    for buffer in buffers:
        load = buffer.load
        with builder.at(builder.ip, load.location):
            pointer = ahead.clone(load.operands[0], known, builder)
            type_ = load.results[0].type
            mask_type = ir.RankedTensorType.get(list(type_.shape), i1, encoding=type_.encoding)
            mask = builder.op("mt.splat", mask_type, [ahead.runs])
            if len(load.operands) > 1:
                own = ahead.clone(load.operands[1], known, builder)
                mask = builder.op("arith.andi", mask_type, [own, mask])
            attributes = attributes_of(load)
            attributes.pop("operandSegmentSizes")
            other = [] if fills_with_zero(load) else list(load.operands)[2:]
            operands = [pointer, buffer.at(slot, builder), mask, *other]
            builder.create("mt.async_copy", [], operands, attributes)
    builder.create("mt.async_commit", [])


def _advance(
    ahead: AheadOfTime, known: dict[Value, Value], step: Value, builder: Builder
) -> tuple[dict[Value, Value], Value]:
    """Carried values and induction variable of the next iteration."""
    state = {
        ahead.arguments[index]: ahead.clone(ahead.updates[index], known, builder)
        for index in ahead.carried
    }
    return state, builder.op("arith.addi", step.type, [known[ahead.induction], step])


def next_slot(slot: Value, stages: int, builder: Builder) -> Value:
    """The slot to use after `slot`."""
    following = builder.op("arith.addi", slot.type, [slot, builder.constant(slot.type, 1)])
    wraps = is_equal(following, stages, builder)
    return builder.op("arith.select", slot.type, [wraps, builder.constant(slot.type, 0), following])


def next_parity(parity: Value, slot: Value, stages: int, builder: Builder) -> Value:
    """The parity to wait for after slot number `slot` was waited for with `parity`."""
    other = builder.op("arith.xori", parity.type, [parity, builder.constant(parity.type, 1)])
    return builder.op(
        "arith.select", parity.type, [is_equal(slot, stages - 1, builder), other, parity]
    )


def is_equal(value: Value, number: int, builder: Builder) -> Value:
    """i1: whether an integer has this value."""
    return compare(EQ, value, builder.constant(value.type, number), builder)


def compare(predicate: int, a: Value, b: Value, builder: Builder) -> Value:
    """i1: arith.cmpi of two integers."""
    attribute = {"predicate": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), predicate)}
    return builder.op("arith.cmpi", ir.IntegerType.get_signless(1), [a, b], attribute)


class Slots(Protocol):
    """A load's multi-buffer and the layout of its slots."""

    @property
    def load(self) -> ir.Operation: ...

    @property
    def slot(self) -> LinearLayout: ...

    def at(self, index: Value, builder: Builder) -> Value:
        """The slot with this number."""


def read_from(buffer: Slots, slot: Value) -> Value:
    """Replaces the uses of a load by reads of a slot, the result, in the layouts that its users
    want."""
    load = buffer.load
    builder = Builder(ir.InsertionPoint(load), load.location)
    view = buffer.at(slot, builder)
    _replace_uses(load.results[0], view, buffer.slot, builder)
    return view


def _read_own(buffer: Slots, slot: Value) -> None:
    """Replaces the result of a load by what this thread copied to a slot."""
    value = buffer.load.results[0]
    builder = Builder(ir.InsertionPoint(buffer.load), buffer.load.location)
    view = buffer.at(slot, builder)
    value.replace_all_uses_with(builder.op("mt.local_load", value.type, [view]))


def _replace_uses(value: Value, view: Value, slot: LinearLayout, builder: Builder) -> None:
    users = {use.owner.operation for use in value.uses}
    plain = False
    for user in users:
        if user.name == "mt.convert_layout":
            result = user.results[0]
            reader = Builder(ir.InsertionPoint(user), user.location)
            result.replace_all_uses_with(reader.op("mt.local_load", result.type, [view]))
            user.erase()
        elif user.name == "mt.trans" and _only_converted(user.results[0]):
            turned = slot.transpose(int_array(user, "order"))
            type_ = mem_type(turned.shape, value.type.element_type, turned)
            mover = Builder(ir.InsertionPoint(user), user.location)
            moved = mover.op("mt.mem_trans", type_, [view], attributes_of(user))
            _replace_uses(user.results[0], moved, turned, mover)
            user.erase()
        elif not _has_effect(user):
            user.erase()
        else:
            plain = True
    if plain:
        value.replace_all_uses_with(builder.op("mt.local_load", value.type, [view]))


def _only_converted(value: Value) -> bool:
    users = [use.owner.operation for use in value.uses]
    return all(user.name == "mt.convert_layout" or not _has_effect(user) for user in users)


def _has_effect(user: ir.Operation) -> bool:
    """Whether an op does anything: layouts leave casts behind that others have replaced."""
    return is_used(user) or not is_elementwise(user.name)
