"""Persistent kernels: each CTA runs several programs, so that the producer warp copies the next
program's first tiles while the others still finish the last one.

    before: split_warps; %p = program_id; ...     after: split_warps
                                                         for %t = cta_id to grid size, cta_count {
                                                           %p = %t % num_programs; ... }

The launcher starts as many CTAs as the GPU holds at a time and passes the grid's sizes as further
parameters: mt.num_programs keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.mlir import ir
from minitriton.passes.global_order import PROGRAMS
from minitriton.passes.op_classes import names_special_register
from minitriton.passes.producer_slice import Slice
from minitriton.passes.rings import RingSet
from minitriton.passes.traversal import (
    Value,
    block_of,
    int_attribute,
    kernel_of,
    ops_of,
    terminator_of,
    walk,
)

if TYPE_CHECKING:
    from minitriton.passes.ping_pong import Dealing

ATTRIBUTE = "mt.persistent"
# With these a program may wait for another one, or say where in the grid it is.
_REFUSED = frozenset(("scf.while", "mt.atomic_cas", "mt.assert", "mt.print", "mt.effectful_asm"))


def refusal(
    function: ir.Operation, loops: Sequence[ir.Operation], sets: Sequence[RingSet]
) -> str | None:
    """Why a kernel had better have a CTA for each program; None if it can be persistent.

    loops: those with rings. Programs of different lengths are left to the GPU's own scheduler,
    which starts the next one wherever there is room.
    """
    for op in walk(function):
        if op.name in _REFUSED or names_special_register(op):
            return f"it has {op.name}"
    if any(block_of(found.state[1]) != function.regions[0].blocks[0] for found in sets):
        return "some programs may skip its loops"
    for loop in loops:
        bounds = Slice()
        bounds.add(loop)  # with those around it
        for op in bounds.ops:
            if op.name in ("mt.program_id", "mt.load"):
                return "its programs may differ in length"
    return None


def make_persistent(
    module: ir.Module, split: ir.Operation, sets: Sequence[RingSet], dealing: Dealing | None = None
) -> None:
    """Wraps all that follows `split`; the rings' states are carried from program to program.
    dealing: of a CTA's programs to two groups of warps."""
    module.operation.attributes[ATTRIBUTE] = i32_attr(1)
    body = kernel_of(module).regions[0].blocks[0]
    ops = ops_of(body)
    moved = ops[ops.index(split) + 1 :]
    if moved[0].name == "mt.turn_pass":  # of the whole kernel, like the wait at its end
        moved = moved[1:]
    last = len(moved)
    while moved[last - 1].name in ("func.return", "mt.local_dealloc", "mt.turn_wait"):
        last -= 1
    ends, moved = moved[last], moved[:last]
    builder = Builder(ir.InsertionPoint(moved[0] if moved else ends), split.location)
    i32 = ir.IntegerType.get_signless(32)
    sizes = [builder.op("mt.num_programs", i32, (), {"axis": i32_attr(axis)}) for axis in range(3)]
    plane = builder.op("arith.muli", i32, sizes[:2])
    total = builder.op("arith.muli", i32, [plane, sizes[2]])
    first, count = builder.op("mt.cta_id", i32), builder.op("mt.cta_count", i32)
    carried = [value for found in sets for value in found.initial]
    starts = [builder.constant(i32, 0) for _ in carried]
    own, step = first, count
    if dealing is not None:
        starts = dealing.first_place(builder)
        own, step = dealing.programs(first, count, builder)
    loop = builder.create(
        "scf.for", [i32] * len(carried), [own, total, step, *starts],
        {PROGRAMS: ir.UnitAttr.get()}, 1,
    )  # fmt: skip
    block = loop.regions[0].blocks.append(
        *[i32] * (1 + len(carried)), arg_locs=[split.location] * (1 + len(carried))
    )
    program, *arguments = block.arguments
    inner = Builder(ir.InsertionPoint(block), split.location)
    ids = _ids(program, sizes, plane, inner)
    inner.create("scf.yield", [], [value for found in sets for value in found.state])
    end = terminator_of(block)
    for op in moved:
        op.move_before(end)
    if dealing is not None:
        after = Builder(ir.InsertionPoint(end), split.location)
        end.operands[0], end.operands[1] = dealing.next_place(list(end.operands), after)
        after.ip = ir.InsertionPoint(ends)
        dealing.end(first, total, count, after)
    for value, argument in zip(carried, arguments, strict=True):
        value.replace_all_uses_with(argument)
    for op in [op for op in walk(loop) if op.name == "mt.program_id"]:
        op.results[0].replace_all_uses_with(ids[int_attribute(op, "axis")])
        op.erase()


def _ids(program: Value, sizes: Sequence[Value], plane: Value, builder: Builder) -> list[Value]:
    """The program's place in the grid, along x, y and z."""
    i32 = program.type
    x = builder.op("arith.remui", i32, [program, sizes[0]])
    rest = builder.op("arith.divui", i32, [program, sizes[0]])
    y = builder.op("arith.remui", i32, [rest, sizes[1]])
    z = builder.op("arith.divui", i32, [program, plane])
    return [x, y, z]
