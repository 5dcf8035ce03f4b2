"""How a dot runs: tensor-core fragments or scalar fma, and how warps share its tile."""

from __future__ import annotations

from dataclasses import dataclass

from minitriton.ir import layouts
from minitriton.ir.dialect import element_of
from minitriton.ir.fma_layout import fma_operand
from minitriton.ir.linear_layout import LinearLayout, granule
from minitriton.ir.mlir import ir
from minitriton.ir.types import bit_width
from minitriton.passes.op_classes import keeps_elements
from minitriton.passes.traversal import blocks_of, int_attribute, terminator_of
from minitriton.passes.warpgroup_dots import ADJACENT_ROWS, suits_warpgroups

MMA_M, MMA_N = 16, 8


@dataclass(frozen=True)
class DotPlan:
    """Layouts of a dot's operands and accumulator; `warps` per dimension, None on scalar fma."""

    warps: tuple[int, ...] | None
    a: LinearLayout
    b: LinearLayout
    c: LinearLayout


def mma_element_bits(op: ir.Operation) -> int | None:
    """Element width of the tensor-core instruction for a dot; None where there is none."""
    element, other = (element_of(v.type) for v in list(op.operands)[:2])
    bits = bit_width(element)
    if element != other and (bits, bit_width(other)) != (8, 8):  # two kinds of fp8 may meet
        return None
    if isinstance(element, ir.F64Type) or bits not in (8, 16, 32):
        return None
    if bits == 32:
        precision = ir.StringAttr(op.attributes["input_precision"]).value
        if not isinstance(element, ir.F32Type) or precision == "ieee":
            return None
        if precision.startswith("bf16"):  # parts of the operands
            return 16
    if bits == 16 and isinstance(element, ir.IntegerType):
        return None
    return bits


def plan_dot(op: ir.Operation, num_warps: int, *, wgmma: bool = False) -> DotPlan:
    """The layouts in which `op` (mt.dot) runs; wgmma: it may become a warpgroup_dot."""
    a, _, c = (tuple(v.type.shape) for v in op.operands)
    k = a[-1]
    bits = mma_element_bits(op)
    if bits is not None and granule(k) * bits >= 256:
        rows_first = (wgmma and suits_warpgroups(op, num_warps)) or _keeps_rows(op)
        warps = _rows_first(c, num_warps) if rows_first else None
        warps = warps or layouts.choose_mma_warps(c, num_warps)
        return mma_plan(op, warps, bits)
    accumulator = layouts.default_blocked(c, num_warps, vec=4)
    return DotPlan(
        None, fma_operand(accumulator, 0, k), fma_operand(accumulator, 1, k), accumulator
    )


def mma_plan(op: ir.Operation, warps: tuple[int, ...], bits: int) -> DotPlan:
    """The layouts of a dot on tensor cores, whose instruction has elements of `bits`."""
    a, b, c = (tuple(v.type.shape) for v in op.operands)
    order = None
    if ADJACENT_ROWS in op.attributes:
        order = layouts.adjacent_rows(c[0], bits)
    return DotPlan(
        warps,
        layouts.mma_operand(a, 0, warps, bits, order),
        layouts.mma_operand(b, 1, warps, bits),
        layouts.mma_accumulator(c, warps, row_order=order),
    )


def _rows_first(shape: tuple[int, ...], num_warps: int) -> tuple[int, ...]:
    """All warps along M as far as it goes, so that each row of the tile stays in one warp."""
    batch = min(shape[0], num_warps) if len(shape) == 3 else 1
    left = num_warps // batch
    rows = min(left, max(1, granule(shape[-2]) // MMA_M))
    columns = min(left // rows, max(1, granule(shape[-1]) // MMA_N))
    rows *= left // (rows * columns)  # warps that nothing can use replicate rows
    return (batch, rows, columns) if len(shape) == 3 else (rows, columns)


def _keeps_rows(op: ir.Operation) -> bool:
    """Whether rows of the result are reduced, or it becomes the left operand of another dot, or
    the left operand comes from another dot or is put together in registers (unpacked weights):
    then a row should not be spread over warps."""
    return _reaches_row_consumer(op) or _left_comes_from_dot(op) or _left_is_joined(op)


def _reaches_row_consumer(op: ir.Operation) -> bool:
    seen, pending = set(), [op.results[0]]
    while pending:
        value = pending.pop()
        for use in value.uses:
            user = use.owner.operation
            name = user.name
            if name == "mt.dot":
                if use.operand_number == 0:
                    return True
                if use.operand_number == 2:  # a sum of dots has one layout
                    pending.append(user.results[0])
            elif name == "mt.reduce":
                if int_attribute(user, "axis") == len(value.type.shape) - 1:
                    return True
            elif name == "scf.yield" and user.parent.operation.name == "scf.if":
                pending.append(user.parent.operation.results[use.operand_number])
            elif keeps_elements(name) and user not in seen:
                seen.add(user)
                pending.append(user.results[0])
    return False


def _left_is_joined(op: ir.Operation) -> bool:
    value = op.operands[0]
    while not isinstance(value, ir.BlockArgument):
        maker = value.owner.operation
        if maker.name == "mt.join":
            return True
        if maker.name not in ("mt.reshape", "mt.trans", "arith.bitcast"):
            return False
        value = maker.operands[0]
    return False


def _left_comes_from_dot(op: ir.Operation) -> bool:
    seen, pending = set(), [op.operands[0]]
    while pending:
        value = pending.pop()
        if isinstance(value, ir.BlockArgument) or value in seen:
            continue
        seen.add(value)
        maker = value.owner.operation
        if maker.name == "mt.dot":
            return True
        if maker.name == "scf.if":
            index = list(maker.results).index(value)
            pending += [terminator_of(block).operands[index] for block in blocks_of(maker)]
        if keeps_elements(maker.name):
            pending += [v for v in maker.operands if isinstance(v.type, ir.RankedTensorType)]
    return False
