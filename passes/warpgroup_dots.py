"""Dots on whole warpgroups (wgmma): which ones qualify, and their form in a pipelined loop.

    before: for { %x = local_load %slot; %acc = dot %a, %x, %acc }
    after:  for { %acc = warpgroup_dot %a, %slot, %acc {mt.in_flight} }; warpgroup_result

B must be a tile that the loop's copies bring into shared memory; A is one too, or in registers.
The accumulator has the fragments of mma.sync with all warps along M, so a dot that does not
qualify in the end can stay what it was. `orient_dots` has turned tf32 and int8 dots, which need
the depth of B contiguous; wgmma takes fp32 as tf32 without rounding, so TMA must round it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from minitriton.ir import layouts
from minitriton.ir.builder import Builder
from minitriton.ir.dialect import element_of
from minitriton.ir.encoding import mem_layout
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.matrix_descriptor import MatrixDescriptor, matrix_descriptor, operand_span
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes.op_classes import DIVISIONS, LOOPS, MOVES, WRITES_IN_LOOP, is_tile
from minitriton.passes.shared_usage import buffer_of
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    defining_op,
    int_array,
    int_attribute,
    integer_constant,
    is_used,
    ops_of,
    splat_constant,
    walk,
)

GROUP_WARPS = 4
WARP_ROWS = 16  # of the 64 that an instruction has
OPERANDS = (ir.F16Type, ir.BF16Type, ir.Float8E4M3FNType, ir.Float8E5M2Type)
ORIENTED = "mt.oriented"  # a dot of other types has a B that wgmma can read
ADJACENT_ROWS = "mt.adjacent_rows"  # A is stored along M: see layouts.adjacent_rows
MIN_COLUMNS, MAX_COLUMNS = 8, 256  # of an instruction, which has all columns of the tile
MAX_ACCUMULATORS = 192  # registers per thread; with a third more everything else is spilled


def available(function: ir.Operation, target: Target, options: PassOptions) -> bool:
    """Whether the kernel may use wgmma: not next to calls, for which ptxas serialises it.

    It does so for want of registers, which in loops are taken; what is called before them may stay.
    """
    if not (options.wgmma and options.pipeline_loads and target.has("wgmma")):
        return False
    return not any(_is_call(op) for op in walk(function))


def _is_call(op: ir.Operation) -> bool:
    """Ops that end in a call: ptxas has no inline form of them."""
    if op.name in ("mt.print", "mt.precise", "arith.remf"):
        return True
    if "asm" in op.attributes:
        return "call" in ir.StringAttr(op.attributes["asm"]).value
    if not len(op.results):
        return False
    element = element_of(op.results[0].type)
    if op.name in DIVISIONS and element.width == 64 and _is_beside_dots(op):
        divisor = op.operands[1]
        constant = splat_constant(defining_op(divisor)) if is_tile(divisor) else None
        return constant is None and integer_constant(divisor) is None
    if isinstance(element, ir.F64Type):
        return op.name.startswith("math.") or op.name == "arith.divf"
    return False


def _is_beside_dots(op: ir.Operation) -> bool:
    """Whether a loop around `op` multiplies matrices."""
    while op.parent is not None and op.parent.operation.name != "func.func":
        op = op.parent.operation
        if op.name in LOOPS and any(inner.name == "mt.dot" for inner in walk(op)):
            return True
    return False


def suits_warpgroups(op: ir.Operation, num_warps: int) -> bool:
    """Before layouts: an mt.dot that can run on warpgroups if its B (and A) become copies."""
    if not _has_form(op, num_warps) or not is_pipelined(op):
        return False
    return loop_load(op.operands[1], op) is not None


def is_pipelined(op: ir.Operation) -> bool:
    """Before layouts: whether the loads beside a dot are likely to become copies."""
    loop = op.parent
    if loop is None or loop.operation.name != "scf.for" or _stages(loop.operation) < 2:
        return False
    # `pipeline_loads` knows exactly; with all warps along M for nothing, mma.sync reads more of B
    writes = any(inner.name in WRITES_IN_LOOP for inner in walk(loop.operation))
    return not writes or "mt.num_stages" in loop.operation.attributes


def loop_load(value: Value, dot: ir.Operation) -> ir.Operation | None:
    """Before layouts: the load beside `dot` that an operand comes from, maybe transposed."""
    source = defining_op(value)
    if source is not None and source.name == "mt.trans":
        source = defining_op(source.operands[0])
    is_load = source is not None and source.name == "mt.load" and source.block == dot.block
    return source if is_load else None


def _stages(loop: ir.Operation) -> int:
    top = loop
    while top.parent is not None:
        top = top.parent.operation
    return int_attribute(loop, "mt.num_stages", int_attribute(top, "mt.num_stages", 1))


def operand_slots(
    loads: Sequence[tuple[ir.Operation, Sequence[int]]],
) -> dict[ir.Operation, LinearLayout]:
    """Those of the loads to be pipelined that warpgroup_dots will read, and their slots' layouts.

    loads: each with its dimensions, fastest first.
    """
    slots, readers = {}, {}
    for load, order in loads:
        shape = tuple(load.results[0].type.shape)
        element = load.results[0].type.element_type
        size = element.width // 8 if _may_be_read(load) else 0
        span = operand_span(shape, tuple(order), size) if size and len(shape) == 2 else 0
        if span:
            slots[load] = layouts.shared_tma(shape, order, 8 * size, span)
            readers[load] = _readers(load.results[0], slots[load])
    qualified = {dot for found in readers.values() for dot, position in found if position == 1}
    return {
        load: slot
        for load, slot in slots.items()
        if any(dot in qualified for dot, _ in readers[load])
    }


def _readers(value: Value, slot: LinearLayout) -> list[tuple[ir.Operation, int]]:
    """Dots that could take `value` out of a slot, and as which operand."""
    found = []
    for use in value.uses:
        user = use.owner.operation
        if user.name == "mt.convert_layout":
            for inner in user.results[0].uses:
                dot, position = inner.owner.operation, inner.operand_number
                if (
                    position < 2
                    and fits(dot)
                    and dot.block == user.block
                    and _can_read(dot, user.results[0].type.element_type, slot, position)
                ):
                    found.append((dot, position))
        elif user.name == "mt.trans" and all(
            inner.owner.operation.name == "mt.convert_layout" for inner in user.results[0].uses
        ):
            found += _readers(user.results[0], slot.transpose(int_array(user, "order")))
    return found


def _may_be_read(load: ir.Operation) -> bool:
    """Whether wgmma has the type of what is loaded, and nothing else wants it in fp32."""
    element = load.results[0].type.element_type
    if isinstance(element, ir.F32Type):
        return is_only_multiplied(load)
    return isinstance(element, OPERANDS) or _is_byte(element)


def is_only_multiplied(load: ir.Operation) -> bool:
    """Whether all that is done with loaded fp32 are products in tf32."""
    pending = [load.results[0]]
    while pending:
        for use in pending.pop().uses:
            user = use.owner.operation
            if user.name in MOVES:
                pending.append(user.results[0])
            elif user.name != "mt.dot" or use.operand_number > 1 or not is_oriented_kind(user):
                return False
    return True


def _can_read(dot: ir.Operation, element: ir.Type, slot: LinearLayout, op_index: int) -> bool:
    """Whether wgmma reads an operand out of a slot, or threads without bank conflicts."""
    by_rows = op_index == 0 and ADJACENT_ROWS in dot.attributes
    return by_rows or _descriptor(element, slot, op_index) is not None


def _descriptor(element: ir.Type, slot: LinearLayout, op_index: int) -> MatrixDescriptor | None:
    return matrix_descriptor(slot, op_index, element.width // 8)


def _has_form(op: ir.Operation, warps: int) -> bool:
    """Whether a dot has the shape and types of a warpgroup_dot with `warps` warps along M."""
    rows, *columns = op.results[0].type.shape
    bits = element_of(op.results[0].type).width
    return len(columns) == 1 and tile_fits(rows, columns[0], warps, bits) and _has_types(op)


def tile_fits(rows: int, columns: int, warps: int, bits: int = 32) -> bool:
    """Whether wgmma makes results of this size, of `bits`, with `warps` warps along the rows."""
    return (
        warps % GROUP_WARPS == 0
        and rows % (WARP_ROWS * warps) == 0
        and MIN_COLUMNS <= columns <= MAX_COLUMNS
        and rows * columns * bits // 32 <= MAX_ACCUMULATORS * 32 * warps
    )


def _has_types(op: ir.Operation) -> bool:
    a, b, c = (element_of(value.type) for value in op.operands)
    if is_oriented_kind(op):
        return ORIENTED in op.attributes
    if not (isinstance(a, OPERANDS) and isinstance(b, OPERANDS)):
        return False
    if isinstance(c, ir.F16Type):  # keeps fewer bits than any sum within an instruction
        return not isinstance(a, ir.BF16Type)
    return isinstance(c, ir.F32Type) and (a.width == 16 or _may_be_imprecise(op))


def result_words(op: ir.Operation) -> int:
    """How many 32-bit registers, of all threads together, the results of a dot take."""
    type_ = op.results[0].type
    return prod(type_.shape) * element_of(type_).width // 32


def is_oriented_kind(op: ir.Operation) -> bool:
    """Whether an mt.dot multiplies matrices of fp32 as tf32 or of bytes."""
    a, c = (element_of(op.operands[index].type) for index in (0, 2))
    if len(op.results[0].type.shape) != 2:
        return False
    if isinstance(a, ir.F32Type):
        return ir.StringAttr(op.attributes["input_precision"]).value == "tf32"
    return _is_byte(a) and isinstance(c, ir.IntegerType) and c.width == 32


def _is_byte(element: ir.Type) -> bool:
    return isinstance(element, ir.IntegerType) and element.width == 8


def _may_be_imprecise(op: ir.Operation) -> bool:
    """Whether a dot allows all of its depth to be summed as Hopper sums fp8 products, with some 14
    bits. It must say so: mma.sync, which multiplies them as fp16 there, is exact."""
    return int_attribute(op, "max_imprecise", 0) >= op.operands[0].type.shape[-1]


def fits(op: ir.Operation) -> bool:
    """Whether an op is an mt.dot that may become a warpgroup_dot, for all but its operands."""
    if op.name != "mt.dot" or "mt.warps" not in op.attributes:
        return False
    rows, *columns = int_array(op, "mt.warps")
    return columns == [1] and _has_form(op, rows)


def use_warpgroups(body: ir.Block) -> list[ir.Operation]:
    """Turns the dots of a pipelined loop's body whose B is in a slot into warpgroup_dots."""
    return [dot for op in ops_of(body) if fits(op) and (dot := _convert(op)) is not None]


def _convert(op: ir.Operation) -> ir.Operation | None:
    b = _slot_behind(op.operands[1], 1)
    if b is None:
        return None
    a = _slot_behind(op.operands[0], 0) or _slot_of_rows(op)
    loads = [defining_op(op.operands[index]) for index in (0, 1)]
    builder = Builder(ir.InsertionPoint(op), op.location)
    operands = [op.operands[0] if a is None else a, b, op.operands[2]]
    kept = ("mt.warps", "mt.unsigned_a", "mt.unsigned_b", ADJACENT_ROWS if a else "")
    attributes = {name: op.attributes[name] for name in kept if name in op.attributes}
    new = builder.create("mt.warpgroup_dot", [op.results[0].type], operands, attributes)
    op.results[0].replace_all_uses_with(new.results[0])
    op.erase()
    for load in dict.fromkeys(loads):
        if load is not None and load.name == "mt.local_load" and not is_used(load):
            load.erase()
    return new


def _slot_behind(value: Value, op_index: int) -> Value | None:
    """The slot that a dot operand was loaded from, if wgmma can read it there."""
    slot = _aligned_slot(value)
    if slot is None:
        return None
    return slot if _descriptor(value.type.element_type, mem_layout(slot.type), op_index) else None


def _slot_of_rows(dot: ir.Operation) -> Value | None:
    """The slot out of which threads load A along M."""
    return _aligned_slot(dot.operands[0]) if ADJACENT_ROWS in dot.attributes else None


def _aligned_slot(value: Value) -> Value | None:
    """The slot that a tile was loaded from, if it was laid out, and rounded, for wgmma."""
    load = defining_op(value)
    if load is None or load.name != "mt.local_load":
        return None
    slot = load.operands[0]
    return slot if "mt.alignment" in buffer_of(slot).attributes else None
