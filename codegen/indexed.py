"""Tiles as indices into shared memory.

mt.gather: the source lies there in C order, threads read what their indices name. mt.histogram: the
bins lie there, and each element adds one to its own; integers, so the order of additions is free.
"""

from __future__ import annotations

from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.memory import both
from minitriton.codegen.shared_address import (
    from_storage,
    load_plan,
    meet,
    shared_word,
    storage_bytes,
    storage_type,
    store_plan,
)
from minitriton.ir.encoding import layout_of
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


def lower_histogram(lowering: Lowering, op: ir.Operation) -> None:
    value, mask = (lowering.tile(operand) for operand in op.operands)
    bins, scratch = layout_of(op.results[0].type), lowering.scratch(op)
    plan = shared_access_plan(shared_plain(bins.shape), bins, 32)
    store_plan(lowering, plan, scratch, [lowering.int32(0)] * bins.num_registers)
    meet(lowering)
    layout, owner = value.layout, lowering.owns_elements(value.layout)
    again = layout.free_bits("register")
    for register in layout.registers:
        if register & again:
            continue
        place = lowering.offset_pointer(scratch, value.registers[register], lowering.i32)
        counted = both(lowering, mask.registers[register], owner)
        lowering.asm(
            "@$1 red.shared.add.u32 [$0], 1;",
            "r,b,~{memory}", [], [shared_word(lowering, place), counted],
        )  # fmt: skip
    meet(lowering)
    count = bins.num_registers
    lowering.set_registers(op.results[0], load_plan(lowering, plan, scratch, lowering.i32, count))


RULES = {"mt.gather": lower_gather, "mt.histogram": lower_histogram}
