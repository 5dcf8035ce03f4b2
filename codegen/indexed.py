"""mt.gather: the source lies in shared memory in C order; threads read what their indices name."""

from __future__ import annotations

from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.shared_address import (
    from_storage,
    meet,
    storage_bytes,
    storage_type,
    store_plan,
)
from minitriton.ir.mlir import ir
from minitriton.ir.shared_access import shared_access_plan
from minitriton.ir.shared_layouts import shared_plain


def lower_gather(lowering: Lowering, op: ir.Operation) -> None:
    source, index = (lowering.tile(value) for value in op.operands)
    axis, shape, scratch = integer_attribute(op, "axis"), source.layout.shape, lowering.scratch(op)
    size, stored = storage_bytes(source.element), storage_type(lowering, source.element)
    plan = shared_access_plan(shared_plain(shape), source.layout, 8 * size)
    store_plan(lowering, plan, scratch, source.registers)
    meet(lowering)
    strides = [1]
    for dim in shape[:0:-1]:
        strides.insert(0, strides[0] * dim)
    values = []
    for register in index.layout.registers:
        place = lowering.mul(index.registers[register], strides[axis])
        for dim, stride in enumerate(strides):
            if dim != axis and shape[dim] > 1:
                coordinate = lowering.coordinate(index.layout, dim, register)
                place = lowering.add(place, lowering.mul(coordinate, stride))
        pointer = lowering.offset_pointer(scratch, place, stored)
        values.append(from_storage(lowering, lowering.load(stored, pointer, size), source.element))
    lowering.set_registers(op.results[0], values)


RULES = {"mt.gather": lower_gather}
