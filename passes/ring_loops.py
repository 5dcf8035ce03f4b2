"""Pipelined loops whose copies a producer warp makes: warp specialisation.

    before: for { %a = load %p; dot(convert %a) }
    after:  for { wait empty; expect full; tma_copy {all mt.producer}
                  wait full; warpgroup_dot slot; arrive empty }

Both kinds of warps run the loop, each its part of it (`producer_slice`), so that the producer is up
to `stages` iterations ahead and the others never meet at a barrier: one warpgroup multiplies while
another does arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.encoding import mem_type
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.tensor_map_specs import add_spec
from minitriton.ir.warp_roles import PRODUCER
from minitriton.passes.affine import AffineAnalysis
from minitriton.passes.ahead_of_time import AheadOfTime
from minitriton.passes.loop_arguments import give_results, with_arguments, yield_also
from minitriton.passes.map_terms import Rebuild
from minitriton.passes.multi_buffer import (
    NE,
    SLT,
    Staged,
    compare,
    is_equal,
    next_parity,
    next_slot,
    read_from,
)
from minitriton.passes.op_classes import MOVES, is_tile
from minitriton.passes.products_in_flight import (
    ACCUMULATOR,
    Flights,
    after,
    keep_in_flight,
    last_met,
    take_results,
)
from minitriton.passes.rings import Ring, RingSet, SlotSpec
from minitriton.passes.shared_usage import VIEWS, scratch_of
from minitriton.passes.slots import barrier_at
from minitriton.passes.tensor_maps import MapPlan
from minitriton.passes.tma_copies import copy_boxes, described
from minitriton.passes.traversal import Value, around_in, defining_op, ops_of, terminator_of, walk
from minitriton.passes.warpgroup_dots import use_warpgroups


@dataclass(frozen=True)
class _Place:
    """Where a load's tiles go: buffer number `index` of a ring."""

    ring: Ring
    index: int
    load: ir.Operation
    map: MapPlan | None
    order: tuple[int, ...]
    bytes: int
    slot: LinearLayout
    tiles: int

    def at(self, index: Value, builder: Builder) -> Value:
        """For those that hold tiles: their group's in slot number `index`."""
        group = builder.op("mt.group_id", index.type) if self.tiles > 1 else None
        return self.ring.tile(self.index, index, group, builder)

    def of_groups(self, index: Value, builder: Builder) -> list[tuple[Value | None, Value]]:
        """All tiles of slot number `index`, each with the number of its group if it has one."""
        groups: list[Value | None] = [None]
        if self.tiles > 1:
            groups = [builder.constant(index.type, number) for number in range(self.tiles)]
        return [(group, self.ring.tile(self.index, index, group, builder)) for group in groups]


def groups_of(loop: ir.Operation, staged: Sequence[Staged]) -> list[list[Staged]]:
    """The loads by what reads them: those that are needed together share a ring."""
    body = loop.regions[0].blocks[0]
    place = {op: number for number, op in enumerate(ops_of(body))}
    groups: dict[tuple[int, ...], list[Staged]] = {}
    for s in staged:
        readers = {place[around_in(body, user)] for user in _users(s.load.results[0])}
        groups.setdefault(tuple(sorted(readers)), []).append(s)
    return list(groups.values())


def _users(value: Value) -> list[ir.Operation]:
    """What uses `value`, also through changes of layout."""
    found = []
    for use in value.uses:
        user = use.owner.operation
        found += _users(user.results[0]) if user.name in MOVES else [user]
    return found


def waited_for(loop: ir.Operation, group: Sequence[Staged]) -> bool:
    """Whether all products that read these loads end in their own iteration: something there
    needs what they make."""
    body = loop.regions[0].blocks[0]
    end = terminator_of(body)

    def is_needed(use: ir.OpOperand) -> bool:
        user = use.owner.operation
        sums = user.name == "mt.dot" and use.operand_number == ACCUMULATOR
        return user != end and not sums

    users = [user for s in group for user in _users(s.load.results[0])]
    return all(
        user.name == "mt.dot" and user.block == body and any(map(is_needed, user.results[0].uses))
        for user in users
    )


def specialize_loop(
    module: ir.Module, loop: ir.Operation, moving: Sequence[Rows], fixed: Rows | None,
    ahead: AheadOfTime, analysis: AffineAnalysis,
) -> tuple[ir.Operation, bool]:  # fmt: skip
    """Replaces `loop`: the copies of `moving` loads go through their rings in every iteration,
    those of `fixed` ones once; rings of one slot are for loads that are `waited_for`. The new loop,
    and whether warpgroups take turns in it."""
    builder = Builder(ir.InsertionPoint(loop), loop.location)
    new, carried = with_arguments(loop, [value for rows in moving for value in rows.rings.state])
    body = new.regions[0].blocks[0]
    if fixed is not None:
        _copy_once(module, new, fixed, ahead, analysis)
    turning = [_Turning(rows, *carried[2 * i : 2 * i + 2]) for i, rows in enumerate(moving)]
    for each in turning:
        each.produce(module, body, analysis)
    views = [each.views() for each in turning]
    flights = keep_in_flight(body, use_warpgroups(body))
    tail = Builder(ir.InsertionPoint(terminator_of(body)), loop.location)
    yield_also(new, [value for each in turning for value in each.following(tail)])
    consumer = _Consumer(new, flights)
    late = [consumer.consume(each, found) for each, found in zip(turning, views, strict=True)]
    turns = _take_turns(new, flights)
    for rows in (*moving, *([fixed] if fixed is not None else [])):
        for s in rows.loads:
            s.load.erase()
    kept = len(loop.results)
    give_results(loop, new)
    take_results(new, flights, builder)
    for i, rows in enumerate(moving):
        rows.rings.left_off((new.results[kept + 2 * i], new.results[kept + 2 * i + 1]))
    if any(late) or fixed is not None:
        builder.create("mt.warpgroup_wait", [], [], {"pending": i32_attr(0)})
    for rows, rings in zip(moving, late, strict=True):
        if rings:
            _release_last(rings, new, rows.rings.state[0], rows.rings.stages, builder)
    if fixed is not None:
        _release_once(fixed.rings, builder)
    loop.erase()
    return new, turns


@dataclass(frozen=True)
class Rows:
    """Loads in groups and the rings that they go through, one for each group."""

    groups: Sequence[Sequence[Staged]]
    rings: RingSet

    @property
    def loads(self) -> list[Staged]:
        return [s for group in self.groups for s in group]

    def places(self) -> list[list[_Place]]:
        return [
            [
                _Place(ring, index, s.load, s.map, s.order, s.bytes, s.slot, s.tiles)
                for index, s in enumerate(group)
            ]
            for ring, group in zip(self.rings.rings, self.groups, strict=True)
        ]


@dataclass(frozen=True)
class _Turning:
    """Loads of one loop and where their rings stand in an iteration."""

    rows: Rows
    slot: Value
    parity: Value

    def produce(self, module: ir.Module, body: ir.Block, analysis: AffineAnalysis) -> None:
        """The copies, each group's before the last of its loads."""
        for group in self.rows.places():
            ops = ops_of(body)
            last = max((place.load for place in group), key=ops.index)
            at = Builder(ir.InsertionPoint(last), last.location)
            _produce(module, group, self.slot, self.parity, analysis, lambda value: value, at)

    def views(self) -> list[list[Value]]:
        """Of each group: the slots that are read in place of its loads."""
        return [[read_from(p, self.slot) for p in group] for group in self.rows.places()]

    def following(self, builder: Builder) -> list[Value]:
        """Slot and parity of the next iteration."""
        stages = self.rows.rings.stages
        return [
            next_slot(self.slot, stages, builder),
            next_parity(self.parity, self.slot, stages, builder),
        ]


def _copy_once(
    module: ir.Module, loop: ir.Operation, fixed: Rows, ahead: AheadOfTime,
    analysis: AffineAnalysis,
) -> None:  # fmt: skip
    """Before the loop: copies of tiles that are the same in every iteration, and the wait."""
    builder = Builder(ir.InsertionPoint(loop), loop.location)
    slot, parity = fixed.rings.state
    known: dict[Value, Value] = {}
    for group in fixed.places():
        _produce(
            module, group, slot, parity, analysis,
            lambda value: ahead.clone(value, known, builder), builder,
        )  # fmt: skip
        for place in group:
            read_from(place, slot)
        full = barrier_at(group[0].ring.full, slot, builder)
        builder.create("mt.mbarrier_wait", [], [full, parity])


def _release_once(rings: RingSet, builder: Builder) -> None:
    """After the loop: the tiles that were the same in every iteration."""
    slot, parity = rings.state
    always = builder.constant(ir.IntegerType.get_signless(1), 1)
    for ring in rings.rings:
        builder.create("mt.mbarrier_arrive", [], [barrier_at(ring.empty, slot, builder), always])
    one = builder.constant(parity.type, 1)
    rings.left_off((slot, builder.op("arith.xori", parity.type, [parity, one])))


def _produce(
    module: ir.Module, group: Sequence[_Place], slot: Value, parity: Value,
    analysis: AffineAnalysis, rebuild: Rebuild, builder: Builder,
) -> None:  # fmt: skip
    """The copies into one ring's slot, where all their coordinates are known."""
    ring = group[0].ring
    mark = {PRODUCER: ir.UnitAttr.get()}
    always = builder.constant(ir.IntegerType.get_signless(1), 1)
    other = builder.op("arith.xori", parity.type, [parity, builder.constant(parity.type, 1)])
    empty, full = (barrier_at(b, slot, builder) for b in (ring.empty, ring.full))
    builder.create("mt.mbarrier_wait", [], [empty, other], mark)
    count = {"bytes": i32_attr(sum(place.bytes for place in group))}
    builder.create("mt.mbarrier_expect", [], [full, always], mark | count)
    for place in group:
        number = add_spec(module.operation, described(place, analysis))
        for own, to in place.of_groups(slot, builder):
            found = _for_group(rebuild, own)
            copy = copy_boxes(place, to, full, always, number, analysis, found, builder)
            copy.attributes[PRODUCER] = ir.UnitAttr.get()


def is_group_id(value: Value) -> bool:
    """Whether a scalar is the number of the group of warps."""
    maker = defining_op(value)
    return maker is not None and maker.name == "mt.group_id"


def _for_group(rebuild: Rebuild, group: Value | None) -> Rebuild:
    """`rebuild` for the tile of a group: the producer copies for all of them."""
    if group is None:
        return rebuild
    return lambda value: group if is_group_id(value) else rebuild(value)


def _take_turns(loop: ir.Operation, flights: Flights) -> bool:
    """Where products are waited for before arithmetic, the warpgroups take turns: one multiplies
    while others calculate. A loop begins, and ends, with the turn of the first warpgroup
    (`Rings.take_turns`). Whether they do: not where all would have to meet during a turn.
    Source: Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.1."""
    ops = ops_of(loop.regions[0].blocks[0])
    dots = [op for op in ops if op.name == "mt.warpgroup_dot"]
    if len(dots) < 2 or dots[0] not in flights.ended:
        return False
    end, carried = flights.ended[dots[0]]
    if carried or end == dots[0]:
        return False
    before = [dot for dot in dots if ops.index(dot) < ops.index(end)]
    later = dots[len(before) :]
    first, last = ops.index((later or dots)[0]), ops.index(before[-1])
    turn = [*ops[: last + 1], *ops[first:]] if later else ops[first : last + 1]
    if any(map(_meets, turn)):
        return False
    # those after the arithmetic go together with those before it, of the next iteration
    Builder(ir.InsertionPoint((later or dots)[0]), loop.location).create("mt.turn_wait", [], [])
    after(before[-1]).create("mt.turn_pass", [], [])
    if later:
        around = Builder(ir.InsertionPoint(loop), loop.location)
        around.create("mt.turn_wait", [], [])
        after(loop).create("mt.turn_pass", [], [])
    return True


def _meets(op: ir.Operation) -> bool:
    """Whether all warps that hold tiles may have to meet for `op`; stores do in copies by TMA."""
    if op.name in ("mt.store", "mt.barrier"):
        return len(op.operands) == 0 or is_tile(op.operands[0])
    scratch = scratch_of(op)
    return any(map(_meets, walk(op))) or (scratch is not None and scratch.barrier)


class _Consumer:
    """The waits and arrivals of the warps that multiply, in the body of one loop."""

    def __init__(self, loop: ir.Operation, flights: Flights) -> None:
        self._loop, self._flights = loop, flights
        self._body = loop.regions[0].blocks[0]

    def consume(self, turning: _Turning, views: Sequence[Sequence[Value]]) -> list[Ring]:
        """Waits for each ring's slot before its first reader, gives it back after the last. The
        rings that are given back in the next iteration."""
        rings = turning.rows.rings
        late = [
            ring
            for ring, found in zip(rings.rings, views, strict=True)
            if self._consume(ring, found, turning)
        ]
        assert not late or rings.stages > 1, "the producer would wait for the next iteration"
        return late

    def _consume(self, ring: Ring, views: Sequence[Value], turning: _Turning) -> bool:
        slot, ops = turning.slot, ops_of(self._body)
        readers = {around_in(self._body, op) for view in views for op in _readers(view)}
        first = min(readers, key=ops.index)
        builder = Builder(ir.InsertionPoint(first), first.location)
        full = barrier_at(ring.full, slot, builder)
        builder.create("mt.mbarrier_wait", [], [full, turning.parity])
        ends = [self._end(op) for op in readers]
        late = any(carried for _, carried in ends)
        ops = ops_of(self._body)
        last = max((op for op, carried in ends if carried == late), key=ops.index)
        builder = after(last)
        if late:
            lower = self._loop.operands[0]
            runs = compare(NE, self._body.arguments[0], lower, builder)
            slot = _slot_before(slot, turning.rows.rings.stages, builder)
        else:
            runs = builder.constant(ir.IntegerType.get_signless(1), 1)
        arrive = [barrier_at(ring.empty, slot, builder), runs]
        builder.create("mt.mbarrier_arrive", [], arrive)
        return late

    def _end(self, reader: ir.Operation) -> tuple[ir.Operation, bool]:
        """The op after which a reader is done, and whether that is in the next iteration."""
        if "mt.in_flight" not in reader.attributes:
            return reader, False
        return self._flights.ended.get(reader) or (last_met(self._flights), True)


def _readers(view: Value) -> list[ir.Operation]:
    found = []
    for use in view.uses:
        user = use.owner.operation
        found += _readers(user.results[0]) if user.name in VIEWS else [user]
    return found


def _release_last(
    rings: Sequence[Ring], loop: ir.Operation, slot: Value, stages: int, builder: Builder
) -> None:
    """After the loop: the slots that its last iteration still read."""
    lower, upper = list(loop.operands)[:2]
    runs = compare(SLT, lower, upper, builder)
    before = _slot_before(slot, stages, builder)
    for ring in rings:
        arrive = [barrier_at(ring.empty, before, builder), runs]
        builder.create("mt.mbarrier_arrive", [], arrive)


def _slot_before(slot: Value, stages: int, builder: Builder) -> Value:
    last = builder.constant(slot.type, stages - 1)
    less = builder.op("arith.subi", slot.type, [slot, builder.constant(slot.type, 1)])
    return builder.op("arith.select", slot.type, [is_equal(slot, 0, builder), last, less])


def slots_of(groups: Sequence[Sequence[Staged]]) -> tuple[tuple[SlotSpec, ...], ...]:
    """What rings such loads need."""
    return tuple(
        tuple(
            SlotSpec(
                mem_type(s.slot.shape, s.load.results[0].type.element_type, s.slot),
                s.alignment,
                s.tiles,
            )
            for s in group
        )
        for group in groups
    )
