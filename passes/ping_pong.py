"""Ping-pong: two warpgroups with programs of their own, that multiply in turns.

    before: split_warps; for %t = cta_id to grid size, cta_count { loop; store }
    after:  split_warps; for %t = cta_id + group_id * cta_count to ..., group_count * cta_count {
              turn_wait; loop; turn_pass; store; (slot, parity) past the other's next program }

A kernel of four warps is launched with two such groups. Each runs every other program of a
persistent CTA, so that one stores its results while the other multiplies; the producer copies for
both, program after program. The turns also keep a group from waiting for a slot's second next
phase, whose parity is that of the one before.
Source: the "ping-pong" kernels of CUTLASS, as described in its documentation.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.mlir import ir
from minitriton.ir.warp_roles import GROUPS
from minitriton.passes import persist
from minitriton.passes.multi_buffer import EQ, Staged, compare
from minitriton.passes.op_classes import is_pure
from minitriton.passes.producer_slice import Slice
from minitriton.passes.products_in_flight import after
from minitriton.passes.traversal import Value, kernel_of, ops_of, origin, walk

NUM_GROUPS = 2


def i32() -> ir.Type:
    """The type of all numbers of programs and slots."""
    return ir.IntegerType.get_signless(32)


def refusal(module: ir.Module, loop: ir.Operation, staged: Sequence[Staged]) -> str | None:
    """Why the programs of a kernel cannot be dealt to two warpgroups; None if they can.

    loop: the one that a producer is to copy for; staged: what it copies.
    """
    function = kernel_of(module)
    body = loop.regions[0].blocks[0]
    if loop.block != function.regions[0].blocks[0]:
        return "it is inside another loop or a branch"
    dots = [op for op in walk(function) if op.name == "mt.dot"]
    if any(dot.block != body for dot in dots):
        return "the kernel multiplies elsewhere, too"
    loads = [s.load for s in staged]
    if any(origin(value) not in loads for dot in dots for value in list(dot.operands)[:2]):
        return "threads calculate an operand, which would not overlap with products"
    reason = persist.refusal(function, [loop], [])
    if reason is not None:
        return f"not persistent: {reason}"
    if any(op.block != loop.block or not is_pure(op.name) for op in _bounds(loop)):
        return "how often it runs is not known before the first program"
    return None


def _bounds(loop: ir.Operation) -> list[ir.Operation]:
    """The ops behind a loop's bounds and step, in order."""
    found = Slice()
    for value in list(loop.operands)[:3]:
        found.add_value(value)
    return [op for op in ops_of(loop.block) if op in found.ops]


def take_turns(module: ir.Module, loop: ir.Operation, split: ir.Operation) -> None:
    """Says that there are two groups; each waits for its turn before `loop`, the first one has it
    when warps part at `split`."""
    module.operation.attributes[GROUPS] = i32_attr(NUM_GROUPS)
    after(split).create("mt.turn_pass", [], [], {"mt.group": i32_attr(1)})
    Builder(ir.InsertionPoint(loop), loop.location).create("mt.turn_wait", [])
    after(loop).create("mt.turn_pass", [])


class Dealing:
    """Which programs of a CTA a group runs, and where in the ring they begin. Values are i32.

    `moves`, in [0, 2 * stages): by how many slots a program moves the ring on, which is as at its
    beginning after 2 * stages of them.
    """

    def __init__(self, loop: ir.Operation, stages: int, split: ir.Operation) -> None:
        """loop: the one with the ring; its bounds are moved before `split`, where warps part."""
        here = ops_of(loop.block)
        for op in _bounds(loop):
            if here.index(op) > here.index(split):
                op.move_before(split)
        self._stages = stages
        builder = Builder(ir.InsertionPoint(split), loop.location)
        lower, upper, step = list(loop.operands)[:3]
        wide = lower.type
        distance = builder.op("arith.subi", wide, [upper, lower])
        distance = builder.op("arith.maxsi", wide, [distance, builder.constant(wide, 0)])
        less = builder.op("arith.subi", wide, [step, builder.constant(wide, 1)])
        distance = builder.op("arith.addi", wide, [distance, less])
        trips = builder.op("arith.divui", wide, [distance, step])
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
        own = builder.op("arith.divui", i32(), [rest, count])
        turn = builder.op("arith.andi", i32(), [own, one])
        chosen = compare(EQ, turn, builder.op("mt.group_id", i32()), builder)
        branch = builder.create("scf.if", [], [chosen], None, 2)
        inside = Builder(ir.InsertionPoint(branch.regions[0].blocks.append()), builder.loc)
        inside.create("mt.turn_wait", [])
        inside.create("scf.yield", [])
