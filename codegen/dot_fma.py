"""mt.dot without tensor cores: every thread multiplies out its part of the result.

Layouts: `ir/fma_layout.py`. A thread holds the full K of the rows and columns it needs.
"""

from __future__ import annotations

from collections.abc import Callable

from minitriton.codegen.emit import width_of
from minitriton.codegen.fp8_upcast import fp8_to_f16
from minitriton.codegen.lower import Lowering
from minitriton.codegen.tile import Tile
from minitriton.ir.fma_layout import fma_operand_registers
from minitriton.ir.mlir import ir


def lower_dot_fma(lowering: Lowering, op: ir.Operation) -> None:
    a, b, c = (lowering.tile(value) for value in op.operands)
    depth = op.operands[0].type.shape[-1]
    result = c.element
    computed = result
    if result in (lowering.f16, lowering.bf16):
        computed = lowering.f32
    sides = [
        _widened(lowering, op.operands[index], tile, computed, f"mt.unsigned_{'ab'[index]}", op)
        for index, tile in enumerate((a, b))
    ]
    multiply_add = _multiply_add(lowering, computed)
    places = [fma_operand_registers(c.layout, index, depth) for index in range(2)]
    registers = []
    exact = isinstance(computed, ir.IntegerType)
    zero = lowering.zero(computed)
    for register in c.layout.registers:
        before = _extended(lowering, c.registers[register], computed)
        row, column = (place[register] for place in places)
        total = before if exact else zero
        for k in range(depth):
            total = multiply_add(sides[0][row + k], sides[1][column + k], total)
        if not exact:  # as a sum of its own: less is rounded than when all products go into one
            total = lowering.binary("addf", before, total)
        if computed != result:
            total = lowering.op("arith.truncf", result, (total,))
        registers.append(total)
    lowering.set_registers(op.results[0], registers)


def _multiply_add(
    lowering: Lowering, type_: ir.Type
) -> Callable[[ir.Value, ir.Value, ir.Value], ir.Value]:
    if isinstance(type_, ir.IntegerType):
        return lambda a, b, c: lowering.add(lowering.mul(a, b), c)
    return lambda a, b, c: lowering.op("math.fma", type_, (a, b, c))


def _extended(lowering: Lowering, value: ir.Value, type_: ir.Type) -> ir.Value:
    if value.type == type_:
        return value
    return lowering.op("arith.extf", type_, (value,))


def _widened(
    lowering: Lowering,
    operand: ir.Value,
    tile: Tile,
    type_: ir.Type,
    unsigned: str,
    op: ir.Operation,
) -> list[ir.Value]:
    """The operand's registers in the type in which products are summed."""
    element = operand.type.element_type
    registers = list(tile.registers)
    if isinstance(element, (ir.Float8E4M3FNType, ir.Float8E5M2Type)):
        registers = fp8_to_f16(lowering, registers, element)
    elif isinstance(element, ir.IntegerType):
        if width_of(element) == width_of(type_):
            return registers
        extend = "arith.extui" if unsigned in op.attributes else "arith.extsi"
        return [lowering.op(extend, type_, (value,)) for value in registers]
    return [_extended(lowering, value, type_) for value in registers]
