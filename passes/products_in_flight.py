"""How long the products of warpgroup_dots run on beside the threads of a pipelined loop.

    before: %s = warpgroup_dot; %t = warpgroup_dot; exp2 %s
    after:  %s = warpgroup_dot {mt.in_flight}; %t = warpgroup_dot {mt.in_flight};
            %u = warpgroup_result %s {pending = 1}; exp2 %u

A product is waited for where its result is first used, which may be in the next iteration. Products
end in the order in which they were issued, so one wait ends all that came before. One that only
feeds the accumulator of the next product needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.dialect import MemType, element_of
from minitriton.ir.mlir import ir
from minitriton.passes.traversal import (
    Value,
    around_in,
    block_of,
    defining_op,
    ops_of,
    origin,
    terminator_of,
)
from minitriton.passes.warpgroup_dots import ADJACENT_ROWS

ACCUMULATOR = 2  # operand number of a dot


@dataclass(frozen=True)
class _Landing:
    """Before `user`, `value` is waited for: the result of dot number `dot`, of the last iteration
    if `carried`."""

    value: Value
    user: ir.Operation
    dot: int
    carried: bool


@dataclass
class Flights:
    """What `keep_in_flight` did to the dots of a body."""

    crossing: list[ir.Operation] = field(default_factory=list)  # the last ones, which run on
    pending: int = 0  # products of an iteration that may be in flight
    met: ir.Operation | None = None  # first op after which those of the last iteration are done
    # of each dot: the op after which it is done, and whether that is in the next iteration
    ended: dict[ir.Operation, tuple[ir.Operation, bool]] = field(default_factory=dict)


def keep_in_flight(body: ir.Block, dots: Sequence[ir.Operation]) -> Flights:
    """Marks the dots that run on, and inserts the waits for them inside `body`.

    If some cross iterations, the caller must `meet_again` before their slots are filled anew and
    `take_results` after the loop.
    """
    if not dots:
        return Flights()
    plan = _Plan(body, dots)  # complete before ops change: their hashes depend on attributes
    flying = plan.flying
    crossing = [dot for number, dot in enumerate(plan.dots) if plan.crosses(number)]
    pending = [plan.pending(landing) for landing in plan.landings]
    meeting = [(plan.place[dot], dot) for dot in plan.dots if dot not in flying]
    places = [plan.place[landing.user] for landing in plan.landings]
    ends = [
        _End(plan.place[dot], dot, number, False)
        for number, dot in enumerate(plan.dots)
        if dot not in flying
    ]
    for number, dot in enumerate(plan.dots):
        if dot in flying and ADJACENT_ROWS in dot.attributes:  # it waits for all before itself
            meeting.append((plan.place[dot], dot))
            ends.append(_End(plan.place[dot], dot, number - 1, False))
    own = [plan.place[dot] for dot in plan.dots]
    for dot in flying:
        dot.attributes["mt.in_flight"] = ir.UnitAttr.get()
    for landing, place, count in zip(plan.landings, places, pending, strict=True):
        wait = _land(landing, count)
        ends.append(_End(place, wait, landing.dot, landing.carried))
        if plan.ends_last_iteration(landing):
            meeting.append((place, wait))
    met = min(meeting, key=lambda found: found[0], default=(0, None))[1]
    found = {dot: _end_of(number, own[number], ends) for number, dot in enumerate(plan.dots)}
    ended = {dot: end for dot, end in found.items() if end is not None}
    return Flights(crossing, len(flying), met, ended)


@dataclass(frozen=True)
class _End:
    """After `op` at `place` of the body, dot number `dot` and those before it are done: those of
    the last iteration if `carried`, else all of that one, too."""

    place: int
    op: ir.Operation
    dot: int
    carried: bool


def _end_of(number: int, place: int, ends: Sequence[_End]) -> tuple[ir.Operation, bool] | None:
    here = [e for e in ends if not e.carried and e.dot >= number and e.place >= place]
    later = [e for e in ends if not e.carried or e.dot >= number]
    if not (here or later):
        return None
    return min(here or later, key=lambda end: end.place).op, not here


class _Plan:
    """Which dots fly, and where they land."""

    def __init__(self, body: ir.Block, dots: Sequence[ir.Operation]) -> None:
        self.body = body
        ops = ops_of(body)
        numbers = [ops.index(dot) for dot in dots]
        self.dots = [ops[number] for number in numbers]
        self.end = ops[-1]
        self.place = {op: number for number, op in enumerate(ops)}
        found = [self._landing(number) for number in range(len(dots))]
        self.landings = [landing for landing in found if landing is not None]
        self.grounded: set[int] = set()
        for number, dot in enumerate(self.dots):
            unused = not any(True for _ in dot.results[0].uses)
            if unused or (self.crosses(number) and self._may_overwrite_left(dot)):
                self.grounded.add(number)
        self.landings = [x for x in self.landings if x.dot not in self.grounded]

    @property
    def flying(self) -> list[ir.Operation]:
        return [dot for number, dot in enumerate(self.dots) if number not in self.grounded]

    def crosses(self, number: int) -> bool:
        """Whether a dot may still run when its iteration ends."""
        ended = [x.dot for x in self.landings if not x.carried] + list(self.grounded)
        return not any(other >= number for other in ended)

    def ends_last_iteration(self, landing: _Landing) -> bool:
        """Whether all products of the iteration before are done after it."""
        return not landing.carried or landing.dot == len(self.dots) - 1

    def pending(self, landing: _Landing) -> int:
        """Dots issued between the landing one and its landing."""
        flying = set(self.flying)
        later = {dot for dot in self.dots[landing.dot + 1 :] if dot in flying}
        before = {dot for dot in flying if self.place[dot] < self.place[landing.user]}
        return len(later) + len(before) if landing.carried else len(later & before)

    def _landing(self, number: int) -> _Landing | None:
        result = self.dots[number].results[0]
        uses = list(result.uses)
        inside = [use for use in uses if use.owner.operation != self.end]
        if inside:
            if len(uses) == 1 and self._accumulates(uses[0]):
                return None
            return _Landing(result, self._first(inside), number, False)
        if len(uses) != 1:
            return _Landing(result, self.end, number, False) if uses else None
        argument = self.body.arguments[uses[0].operand_number + 1]
        uses = list(argument.uses)
        if any(use.owner.operation == self.end for use in uses):
            return _Landing(result, self.end, number, False)
        alone = len(uses) == 1 and self._accumulates(uses[0])
        if not uses or (alone and self._sums_into(number) == argument):
            return None
        return _Landing(argument, self._first(uses), number, True)

    def _accumulates(self, use: ir.OpOperand) -> bool:
        return use.owner.operation in self.dots and use.operand_number == ACCUMULATOR

    def _sums_into(self, number: int) -> Value:
        """What the accumulator of a chain of dots was before the first one."""
        value = self.dots[number].operands[ACCUMULATOR]
        while (maker := defining_op(value)) is not None and maker in self.dots:
            value = maker.operands[ACCUMULATOR]
        return value

    def _first(self, uses: Sequence[ir.OpOperand]) -> ir.Operation:
        """The first op of the body that uses a value or has such an op inside."""
        owners = [around_in(self.body, use.owner.operation) for use in uses]
        return min(owners, key=self.place.__getitem__)

    def _may_overwrite_left(self, dot: ir.Operation) -> bool:
        """Whether A is in registers that the next iteration may write before it waits: those of
        another product, or that do not depend on one."""
        left = dot.operands[0]
        if isinstance(left.type, MemType) or block_of(left) != self.body:
            return False
        maker, is_half = origin(left), isinstance(element_of(left.type), ir.F16Type)
        if is_half and maker is not None and maker in self.dots:
            return True  # sums of fp16 become a left operand as they are
        seen, pending, blocks = set(), [left], {self.body}
        while pending:
            value = pending.pop()
            maker = defining_op(value)
            if maker is None or value in seen or block_of(value) not in blocks:
                continue
            if maker in self.dots:
                return False
            seen.add(value)
            pending += maker.operands
            if maker.name == "scf.if":
                number = ir.OpResult(value).result_number
                inside = [block for region in maker.regions for block in region.blocks]
                blocks.update(inside)
                pending += [terminator_of(block).operands[number] for block in inside]
        return True


def _land(landing: _Landing, pending: int) -> ir.Operation:
    builder = Builder(ir.InsertionPoint(landing.user), landing.user.location)
    value = landing.value
    users = [(use.owner.operation, use.operand_number) for use in value.uses]
    attributes = {"pending": i32_attr(pending)}
    landed = builder.op("mt.warpgroup_result", value.type, [value], attributes)
    for user, number in users:
        user.operands[number] = landed
    return landed.owner.operation


def meet_again(flights: Flights, issue: Callable[[Builder], None]) -> None:
    """As soon as all threads see the products of the iteration before done, `issue`."""
    builder = after(last_met(flights))
    builder.create("mt.barrier", [])
    issue(builder)


def last_met(flights: Flights) -> ir.Operation:
    """The op after which the products of the iteration before are done; a wait if there is none."""
    if flights.met is None:
        builder = after(flights.crossing[-1])
        pending = {"pending": i32_attr(flights.pending)}
        flights.met = builder.create("mt.warpgroup_wait", [], [], pending)
    return flights.met


def after(op: ir.Operation) -> Builder:
    """Builds behind `op`."""
    following = ops_of(op.block)[ops_of(op.block).index(op) + 1]
    return Builder(ir.InsertionPoint(following), op.location)


def take_results(loop: ir.Operation, flights: Flights, builder: Builder) -> None:
    """After the loop: what is in flight ends."""
    end = terminator_of(loop.regions[0].blocks[0])
    for index, value in enumerate(loop.results):
        maker = defining_op(end.operands[index])
        if maker is None or maker not in flights.crossing:
            continue
        users = [(use.owner.operation, use.operand_number) for use in value.uses]
        taken = builder.op("mt.warpgroup_result", value.type, [value], {"pending": i32_attr(0)})
        for user, number in users:
            user.operands[number] = taken
