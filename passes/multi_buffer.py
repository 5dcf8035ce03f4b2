"""The loop rewrite of `pipeline_loads`: buffers, copies ahead of time, waits.

The loop keeps its structure; it gains iter args: copies of the address recurrences that run
stages-1 iterations ahead, and the slot numbers to fill and to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.dialect import MemType
from minitriton.ir.encoding import encode
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.passes.ahead_of_time import AheadOfTime
from minitriton.passes.products_in_flight import (
    Flights,
    keep_in_flight,
    meet_again,
    take_results,
)
from minitriton.passes.traversal import (
    Value,
    attributes_of,
    int_array,
    terminator_of,
)
from minitriton.passes.warpgroup_dots import use_warpgroups

SLT = 2  # arith.cmpi predicates
EQ = 0


@dataclass(frozen=True)
class Staged:
    """A load to be multi-buffered, the shared layout of its slots, bytes of one.

    alignment: that of the buffer where wgmma is to read it, else 1.
    """

    load: ir.Operation
    slot: LinearLayout
    bytes: int
    alignment: int = 1


class _Buffer:
    """The multi-buffer of one load; a load that is the same in every iteration has one slot."""

    def __init__(self, staged: Staged, stages: int, fixed: bool, builder: Builder) -> None:
        self.load = staged.load
        self.slot = slot = staged.slot
        self.fixed = fixed
        element = self.load.results[0].type.element_type
        self.slot_type = _mem_type(list(slot.shape), element, slot)
        attributes: dict[str, ir.Attribute] = {"mt.pipelined": ir.UnitAttr.get()}
        if staged.alignment > 1:
            attributes["mt.alignment"] = i32_attr(staged.alignment)
        whole = _mem_type([1 if fixed else stages, *slot.shape], element, slot)
        self.value = builder.op("mt.local_alloc", whole, (), attributes)

    def at(self, index: Value, builder: Builder) -> Value:
        if self.fixed:
            index = builder.constant(index.type, 0)
        return builder.op("mt.mem_index", self.slot_type, [self.value, index])


def _mem_type(shape: list[int], element: ir.Type, slot: LinearLayout) -> ir.Type:
    tensor = ir.RankedTensorType.get(shape, element, encoding=encode(slot))
    return MemType.get(ir.TypeAttr.get(tensor))


def rewrite_loop(
    loop: ir.Operation,
    staged: Sequence[Staged],
    ahead: AheadOfTime,
    stages: int,
) -> ir.Operation:
    """Replaces `loop`; `ahead` has checked the addresses and masks of the loads; stages >= 2."""
    builder = Builder(ir.InsertionPoint(loop), loop.location)
    i32 = ir.IntegerType.get_signless(32)
    buffers = [_Buffer(s, stages, is_fixed(s.load, ahead), builder) for s in staged]
    lower, upper, step, *inits = loop.operands
    # prologue: iterations 0 .. stages-2
    state = {ahead.arguments[index]: inits[index] for index in ahead.carried}
    induction = lower
    for stage in range(stages - 1):
        known = {**state, ahead.induction: induction}
        filled = [buffer for buffer in buffers if stage == 0 or not buffer.fixed]
        _issue(filled, ahead, known, upper, builder.constant(i32, stage), builder)
        state, induction = _advance(ahead, known, step, builder)
    distance = builder.op("arith.muli", step.type, [step, builder.constant(step.type, stages - 1)])
    carried = [state[ahead.arguments[index]] for index in ahead.carried]
    slots = [builder.constant(i32, stages - 1), builder.constant(i32, 0)]
    new = builder.create(
        "scf.for",
        [v.type for v in (*inits, *carried, *slots)],
        [lower, upper, step, *inits, *carried, *slots],
        attributes_of(loop),
        1,
    )
    loop.regions[0].blocks[0].append_to(new.regions[0])
    flights = _fill_body(new, buffers, ahead, upper, distance, stages)
    for index, result in enumerate(loop.results):
        result.replace_all_uses_with(new.results[index])
    take_results(new, flights, builder)
    builder.create("mt.async_wait", [], [], {"pending": i32_attr(0)})
    for buffer in buffers:
        builder.create("mt.local_dealloc", [], [buffer.value])
    loop.erase()
    return new


def is_fixed(load: ir.Operation, ahead: AheadOfTime) -> bool:
    """Whether the tile that `load` reads is the same in every iteration."""
    return all(map(ahead.is_invariant, list(load.operands)[:2]))


def _fill_body(
    new: ir.Operation,
    buffers: Sequence[_Buffer],
    ahead: AheadOfTime,
    upper: Value,
    distance: Value,
    stages: int,
) -> Flights:
    """Returns the products that are in flight from one iteration to the next."""
    body, location = new.regions[0].blocks[0], new.location
    extra = list(new.operands)[3 + len(ahead.arguments) :]
    arguments = [body.add_argument(value.type, location) for value in extra]
    *carried, fill, read = arguments
    builder = Builder(ir.InsertionPoint.at_block_begin(body), location)
    builder.create("mt.async_wait", [], [], {"pending": i32_attr(stages - 2)})
    if any("mt.alignment" in b.value.owner.attributes for b in buffers):
        builder.create("mt.proxy_fence", [])
    builder.create("mt.barrier", [])
    induction = builder.op("arith.addi", distance.type, [ahead.induction, distance])
    known = {ahead.arguments[index]: v for index, v in zip(ahead.carried, carried, strict=True)}
    known[ahead.induction] = induction
    moving = [buffer for buffer in buffers if not buffer.fixed]
    for buffer in buffers:
        _read_from(buffer, read)
    flights = keep_in_flight(body, use_warpgroups(body))
    if flights.crossing:  # they may still read the slot to be filled
        meet_again(flights, lambda at: _issue(moving, ahead, known, upper, fill, at))
    else:
        _issue(moving, ahead, known, upper, fill, builder)
    end = terminator_of(body)
    tail = Builder(ir.InsertionPoint(end), location)
    updates = [ahead.clone(ahead.updates[index], known, tail) for index in ahead.carried]
    slots = [_next_slot(fill, stages, tail), _next_slot(read, stages, tail)]
    tail.create("scf.yield", [], [*end.operands, *updates, *slots])
    end.erase()
    for buffer in buffers:
        buffer.load.erase()
    return flights


def _issue(
    buffers: Sequence[_Buffer],
    ahead: AheadOfTime,
    known: dict[Value, Value],
    upper: Value,
    slot: Value,
    builder: Builder,
) -> None:
    """Copies of one iteration into slot `slot`, as one group; nothing past the loop's end."""
    i1 = ir.IntegerType.get_signless(1)
    predicate = {"predicate": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), SLT)}
    runs = builder.op("arith.cmpi", i1, [known[ahead.induction], upper], predicate)
    ahead.runs = runs
    for buffer in buffers:
        load = buffer.load
        with builder.at(builder.ip, load.location):
            pointer = ahead.clone(load.operands[0], known, builder)
            type_ = load.results[0].type
            mask_type = ir.RankedTensorType.get(list(type_.shape), i1, encoding=type_.encoding)
            mask = builder.op("mt.splat", mask_type, [runs])
            if len(load.operands) > 1:
                own = ahead.clone(load.operands[1], known, builder)
                mask = builder.op("arith.andi", mask_type, [own, mask])
            attributes = attributes_of(load)
            attributes.pop("operandSegmentSizes")
            builder.create(
                "mt.async_copy", [], [pointer, buffer.at(slot, builder), mask], attributes
            )
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


def _next_slot(slot: Value, stages: int, builder: Builder) -> Value:
    i1 = ir.IntegerType.get_signless(1)
    one, count = builder.constant(slot.type, 1), builder.constant(slot.type, stages)
    following = builder.op("arith.addi", slot.type, [slot, one])
    predicate = {"predicate": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), EQ)}
    wraps = builder.op("arith.cmpi", i1, [following, count], predicate)
    return builder.op("arith.select", slot.type, [wraps, builder.constant(slot.type, 0), following])


def _read_from(buffer: _Buffer, slot: Value) -> None:
    """Replaces the uses of a load by reads of the slot in the layouts that its users want."""
    load = buffer.load
    builder = Builder(ir.InsertionPoint(load), load.location)
    view = buffer.at(slot, builder)
    _replace_uses(load.results[0], view, buffer.slot, builder)


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
            type_ = _mem_type(list(turned.shape), value.type.element_type, turned)
            mover = Builder(ir.InsertionPoint(user), user.location)
            moved = mover.op("mt.mem_trans", type_, [view], attributes_of(user))
            _replace_uses(user.results[0], moved, turned, mover)
            user.erase()
        else:
            plain = True
    if plain:
        value.replace_all_uses_with(builder.op("mt.local_load", value.type, [view]))


def _only_converted(value: Value) -> bool:
    return all(use.owner.operation.name == "mt.convert_layout" for use in value.uses)
