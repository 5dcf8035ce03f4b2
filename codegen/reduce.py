"""mt.reduce: registers, then lanes by butterfly shuffles, then warps through shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen.combine import (
    Combine,
    Operands,
    combine_of,
    exchange,
    fold,
    fold_registers,
    shuffle_operands,
)
from minitriton.codegen.emit import attribute
from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.shared_address import storage_bytes
from minitriton.ir.mlir import ir
from minitriton.ir.reduction import ReductionPlan, plan_reduction

# combine op -> redux.sync kind: one instruction for a whole warp of i32
REDUX = {
    "arith.addi": "add",
    "arith.maxsi": "max",
    "arith.minsi": "min",
    "arith.maxui": "umax",
    "arith.minui": "umin",
    "arith.andi": "and",
    "arith.ori": "or",
    "arith.xori": "xor",
}
WHOLE_WARP = {1, 2, 4, 8, 16}


def lower_reduce(lowering: Lowering, op: ir.Operation) -> None:
    tiles = [lowering.tile(value) for value in op.operands]
    sizes = tuple(storage_bytes(tile.element) for tile in tiles)
    plan = plan_reduction(tiles[0].layout, integer_attribute(op, "axis"), sizes)
    combine = combine_of(lowering, op)
    partials: list[Operands] = []
    for group in plan.groups:
        partials.append(fold_registers([[t.registers[r] for t in tiles] for r in group], combine))
    redux = redux_kind(lowering, op, plan)
    if redux:
        partials = [[_redux(lowering, redux, values[0])] for values in partials]
    else:
        partials = _fold_lanes(lowering, partials, plan.lane_masks, combine)
    if plan.cross_warp is not None:
        scratch = lowering.scratch(op)
        lines = list(exchange(lowering, plan.cross_warp, scratch, partials, plan.readers))
        partials = [fold(line, combine) for line in lines]
        partials = _fold_lanes(lowering, partials, plan.reader_masks, combine)
    for index, result in enumerate(op.results):
        lowering.set_registers(result, [values[index] for values in partials])


def _fold_lanes(
    lowering: Lowering, partials: list[Operands], masks: Sequence[int], combine: Combine
) -> list[Operands]:
    for mask in masks:
        others = [shuffle_operands(lowering, values, mask) for values in partials]
        partials = [combine(a, b) for a, b in zip(partials, others, strict=True)]
    return partials


def redux_kind(lowering: Lowering, op: ir.Operation, plan: ReductionPlan) -> str | None:
    """The kind of redux.sync that does all lane steps at once, if there is one."""
    if not lowering.target.has("redux") or set(plan.lane_masks) != WHOLE_WARP:
        return None
    block = op.regions[0].blocks[0]
    body = [inner.operation for inner in block.operations]
    if len(body) != 2 or len(op.operands) != 1 or op.operands[0].type.element_type != lowering.i32:
        return None
    step, end = body
    if set(step.operands) != set(block.arguments) or end.operands[0] != step.results[0]:
        return None
    return REDUX.get(step.name)


def _redux(lowering: Lowering, kind: str, value: ir.Value) -> ir.Value:
    no = ir.BoolAttr.get(False)
    attributes = {"kind": attribute(f"#nvvm<reduction_kind {kind}>"), "abs": no, "nan": no}
    operands = (value, lowering.int32(-1))
    return lowering.op("nvvm.redux.sync", lowering.i32, operands, attributes)


RULES = {"mt.reduce": lower_reduce}
