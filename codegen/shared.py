"""Buffers in shared memory: a `!mt.mem` value is carried as the `!llvm.ptr<3>` of its slot 0."""

from __future__ import annotations

from math import prod

from minitriton.codegen.emit import width_of
from minitriton.codegen.lower import Lowering
from minitriton.codegen.matrix_moves import (
    load_matrices,
    load_matrices_plan,
    store_matrices,
    store_matrices_plan,
)
from minitriton.codegen.shared_address import load_plan, storage_bytes, store_plan
from minitriton.codegen.tile import Tile, carried
from minitriton.ir.conversion import storage_bits
from minitriton.ir.encoding import layout_of, mem_layout
from minitriton.ir.mlir import ir
from minitriton.ir.shared_access import shared_access_plan


def lower_local_alloc(lowering: Lowering, op: ir.Operation) -> None:
    pointer = lowering.scratch(op)
    lowering.set(op.results[0], pointer)
    if len(op.operands):
        write_tile(lowering, lowering.tile(op.operands[0]), pointer, op.results[0].type)


def lower_local_store(lowering: Lowering, op: ir.Operation) -> None:
    value, buffer = op.operands
    write_tile(lowering, lowering.tile(value), lowering.scalar(buffer), buffer.type)


def write_tile(lowering: Lowering, tile: Tile, pointer: ir.Value, buffer: ir.Type) -> None:
    """Stores a tile into a buffer of type `buffer`, every element once."""
    shared, bits = mem_layout(buffer), storage_bits(width_of(tile.element))
    plan = shared_access_plan(shared, tile.layout, bits)
    matrices = store_matrices_plan(lowering, shared, tile.layout, bits, plan.vec)
    if matrices is not None:
        store_matrices(lowering, matrices, pointer, tile.registers)
    else:
        store_plan(lowering, plan, pointer, tile.registers)


def lower_local_load(lowering: Lowering, op: ir.Operation) -> None:
    buffer, result = op.operands[0], op.results[0]
    layout, element = layout_of(result.type), carried(result.type.element_type)
    shared, bits = mem_layout(buffer.type), storage_bits(width_of(element))
    pointer, count = lowering.scalar(buffer), layout.num_registers
    plan = shared_access_plan(shared, layout, bits)
    matrices = load_matrices_plan(lowering, shared, layout, bits, plan.vec)
    if matrices is not None:
        registers = load_matrices(lowering, matrices, pointer, element, count)
    else:
        registers = load_plan(lowering, plan, pointer, element, count)
    lowering.set_registers(result, registers)


def lower_mem_index(lowering: Lowering, op: ir.Operation) -> None:
    buffer, index = op.operands
    slot = op.results[0].type.tensor_type
    size = prod(slot.shape) * storage_bytes(carried(slot.element_type))
    offset = lowering.mul(lowering.scalar(index), size)
    lowering.set(op.results[0], lowering.offset_pointer(lowering.scalar(buffer), offset))


def lower_mem_trans(lowering: Lowering, op: ir.Operation) -> None:
    lowering.set(op.results[0], lowering.scalar(op.operands[0]))


def lower_local_dealloc(lowering: Lowering, op: ir.Operation) -> None:
    """Only allocation reads it."""


RULES = {
    "mt.local_alloc": lower_local_alloc,
    "mt.local_store": lower_local_store,
    "mt.local_load": lower_local_load,
    "mt.local_dealloc": lower_local_dealloc,
    "mt.mem_index": lower_mem_index,
    "mt.mem_trans": lower_mem_trans,
}
