"""Ping-pong: two warpgroups with programs of their own, that multiply in turns.

    before: split_warps; for %t = cta_id to grid size, cta_count { loop; store }
    after:  split_warps; for %t = cta_id + group_id * cta_count to ..., group_count * cta_count {
              turn_wait; loop; turn_pass; store; (slot, parity) past the other's next program }

A kernel of four warps is launched with two such groups. Each runs every other program of a
persistent CTA, so that one stores its results while the other multiplies; the producer copies for
both, program after program. Of a loop over tiles that the kernel has itself each runs every other
iteration (`tile_loops`). The turns also keep a group from waiting for a slot's second next
phase, whose parity is that of the one before.
Source: the "ping-pong" kernels of CUTLASS, as described in its documentation.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.mlir import ir
from minitriton.ir.warp_roles import ENDS, GROUPS
from minitriton.passes import persist, tile_loops
from minitriton.passes.multi_buffer import EQ, Staged, compare
from minitriton.passes.op_classes import is_pure
from minitriton.passes.producer_slice import Slice
from minitriton.passes.products_in_flight import after
from minitriton.passes.traversal import Value, kernel_of, ops_of, origin, terminator_of, walk

NUM_GROUPS = 2


def i32() -> ir.Type:
    """The type of all numbers of programs and slots."""
    return ir.IntegerType.get_signless(32)


def refusal(module: ir.Module, loop: ir.Operation, staged: Sequence[Staged]) -> str | None:
    """Why the programs of a kernel, or the iterations of the loop around `loop`, cannot be dealt to
    two warpgroups; None if they can.

    loop: the one that a producer is to copy for; staged: what it copies.
    """
    function = kernel_of(module)
    entry, body = function.regions[0].blocks[0], loop.regions[0].blocks[0]
    tiles = tile_loops.around(loop)
    if (tiles or loop).block != entry:
        return "it is inside another loop or a branch"
    dots = [op for op in walk(function) if op.name == "mt.dot"]
    if any(dot.block != body for dot in dots):
        return "the kernel multiplies elsewhere, too"
    loads = [s.load for s in staged]
    if any(origin(value) not in loads for dot in dots for value in list(dot.operands)[:2]):
        return "threads calculate an operand, which would not overlap with products"
    if tiles is None:
        reason = persist.refusal(function, [loop], [])
        reason = None if reason is None else f"not persistent: {reason}"
    else:
        reason = tile_loops.refusal(function, tiles, loop)
    if reason is not None:
        return reason
    if any(op.block != entry or not is_pure(op.name) for op in _behind_bounds(loop)):
        return f"how often it runs is not known before the first {'tile' if tiles else 'program'}"
    return None


def _behind_bounds(loop: ir.Operation) -> set[ir.Operation]:
    """The ops that a loop's bounds and step need."""
    found = Slice()
    for value in list(loop.operands)[:3]:
        found.add_value(value)
    return found.ops


def trip_count(lower: Value, upper: Value, step: Value, builder: Builder) -> Value:
    """How often a loop runs whose step is positive, in its own type."""
    wide = lower.type
    distance = builder.op("arith.subi", wide, [upper, lower])
    distance = builder.op("arith.maxsi", wide, [distance, builder.constant(wide, 0)])
    less = builder.op("arith.subi", wide, [step, builder.constant(wide, 1)])
    distance = builder.op("arith.addi", wide, [distance, less])
    return builder.op("arith.divui", wide, [distance, step])


def take_turns(module: ir.Module, loop: ir.Operation, split: ir.Operation) -> None:
    """Says that there are two groups; each waits for its turn before `loop`, the first one has it
    when warps part at `split`."""
    module.operation.attributes[GROUPS] = i32_attr(NUM_GROUPS)
    after(split).create("mt.turn_pass", [], [], {"mt.group": i32_attr(1)})
    Builder(ir.InsertionPoint(loop), loop.location).create("mt.turn_wait", [])
    after(loop).create("mt.turn_pass", [])


def deal_iterations(loop: ir.Operation, dealing: Dealing, split: ir.Operation) -> None:
    """The iterations of the loop over tiles around `loop` go to both groups, and end in order: from
    its first access to memory after `loop` on, one waits until the one before it has ended.

    before: for %t = lower to upper, step { turn_wait; loop; turn_pass; store }
    after:  for %i = group_id to count, group_count { %t = lower + %i * step; turn_wait; loop;
              turn_pass; turn_wait {ends}; store; turn_pass {ends}; slot past the other's }
    """
    tiles = tile_loops.around(loop)
    assert tiles is not None, "its iterations have been found fit to be dealt"
    body, ends = tiles.regions[0].blocks[0], {ENDS: ir.UnitAttr.get()}
    after(split).create("mt.turn_pass", [], [], {"mt.group": i32_attr(1), **ends})
    builder = Builder(ir.InsertionPoint(tiles), tiles.location)
    lower, upper, step = list(tiles.operands)[:3]
    count = trip_count(lower, upper, step, builder)
    starts = [builder.op(f"mt.group_{name}", i32()) for name in ("id", "count")]
    first, stride = (_cast(value, count.type, builder) for value in starts)
    place = len(tiles.operands) - 2
    for index, value in enumerate([first, count, stride]):
        tiles.operands[index] = value
    for index, value in enumerate(dealing.first_place(builder)):
        tiles.operands[place + index] = value
    inner = Builder(ir.InsertionPoint.at_block_begin(body), tiles.location)
    number = body.arguments[0]
    distance = inner.op("arith.muli", number.type, [number, step])
    tile = inner.op("arith.addi", number.type, [lower, distance])
    number.replace_all_uses_except(tile, distance.owner.operation)
    end = terminator_of(body)
    inner.ip = ir.InsertionPoint(tile_loops.first_access(body, loop) or end)
    inner.create("mt.turn_wait", [], [], ends)
    inner.ip = ir.InsertionPoint(end)
    inner.create("mt.turn_pass", [], [], ends)
    state = list(end.operands)[place - 3 :]
    for index, value in enumerate(dealing.next_place(state, inner)):
        end.operands[place - 3 + index] = value
    final = after(tiles)
    take_last_turns(_cast(count, i32(), final), [{}, ends], final)


def _cast(value: Value, type_: ir.Type, builder: Builder) -> Value:
    """A number that is not negative and fits, as another type."""
    if value.type == type_:
        return value
    wider = ir.IntegerType(type_).width > ir.IntegerType(value.type).width
    return builder.op("arith.extui" if wider else "arith.trunci", type_, [value])


class Dealing:
    """Which programs of a CTA a group runs, and where in the ring they begin. Values are i32.

    `moves`, in [0, 2 * stages): by how many slots a program moves the ring on, which is as at its
    beginning after 2 * stages of them.
    """

    def __init__(self, loop: ir.Operation, stages: int, split: ir.Operation) -> None:
        """loop: the one with the ring; its bounds are moved before `split`, where warps part."""
        here, needed = ops_of(split.block), _behind_bounds(loop)
        for op in here[here.index(split) :]:
            if op in needed:
                op.move_before(split)
        self._stages = stages
        builder = Builder(ir.InsertionPoint(split), loop.location)
        lower, upper, step = list(loop.operands)[:3]
        trips = trip_count(lower, upper, step, builder)
        wide = trips.type
        self._moves = builder.op("arith.remui", wide, [trips, builder.constant(wide, 2 * stages)])
        if wide != i32():
            self._moves = builder.op("arith.trunci", i32(), [self._moves])

    def first_place(self, builder: Builder) -> list[Value]:
        """(slot, parity) of the group's first program."""
        group = builder.op("mt.group_id", i32())
        return self._place(builder.op("arith.muli", i32(), [group, self._moves]), builder)

    def next_place(self, state: Sequence[Value], builder: Builder) -> list[Value]:
        """(slot, parity) of its next program, past the other group's: from those after the last."""
        slot, parity = state
        count = builder.op("mt.group_count", i32())
        others = builder.op("arith.subi", i32(), [count, builder.constant(i32(), 1)])
        skipped = builder.op("arith.muli", i32(), [others, self._moves])
        rounds = builder.op("arith.muli", i32(), [parity, builder.constant(i32(), self._stages)])
        place = builder.op("arith.addi", i32(), [slot, rounds])
        return self._place(builder.op("arith.addi", i32(), [place, skipped]), builder)

    def _place(self, moved: Value, builder: Builder) -> list[Value]:
        stages, period = (builder.constant(i32(), n * self._stages) for n in (1, 2))
        moved = builder.op("arith.remui", i32(), [moved, period])
        return [builder.op(f"arith.{name}ui", i32(), [moved, stages]) for name in ("rem", "div")]

    def programs(self, first: Value, count: Value, builder: Builder) -> tuple[Value, Value]:
        """The group's first program and the step to its next one, from those of the CTA."""
        group, groups = builder.op("mt.group_id", i32()), builder.op("mt.group_count", i32())
        before = builder.op("arith.muli", i32(), [group, count])
        step = builder.op("arith.muli", i32(), [groups, count])
        return builder.op("arith.addi", i32(), [first, before]), step

    def end(self, first: Value, total: Value, count: Value, builder: Builder) -> None:
        """After all programs: the group whose turn it would be takes it. first: the CTA's first
        program; total: how many there are; count: of CTAs."""
        one = builder.constant(i32(), 1)
        rest = builder.op("arith.subi", i32(), [total, first])
        less = builder.op("arith.subi", i32(), [count, one])
        rest = builder.op("arith.addi", i32(), [rest, less])
        take_last_turns(builder.op("arith.divui", i32(), [rest, count]), [{}], builder)


def take_last_turns(own: Value, kinds: Sequence[dict[str, ir.Attribute]], builder: Builder) -> None:
    """The group that would run number `own`, an i32, takes the turns of these kinds."""
    turn = builder.op("arith.andi", i32(), [own, builder.constant(i32(), 1)])
    chosen = compare(EQ, turn, builder.op("mt.group_id", i32()), builder)
    branch = builder.create("scf.if", [], [chosen], None, 2)
    inside = Builder(ir.InsertionPoint(branch.regions[0].blocks.append()), builder.loc)
    for kind in kinds:
        inside.create("mt.turn_wait", [], [], kind)
    inside.create("scf.yield", [])
