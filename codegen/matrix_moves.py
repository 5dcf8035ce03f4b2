"""ldmatrix and stmatrix: 8x8 blocks of 16-bit values between shared memory and fragments."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen.emit import attribute, type_named
from minitriton.codegen.lower import Lowering
from minitriton.codegen.shared_address import (
    ThreadAddress,
    from_storage,
    storage_type,
    to_storage,
)
from minitriton.ir.ldmatrix import LdmatrixPlan, ldmatrix_plan
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir

_SHAPE = "#nvvm.ld_st_matrix_shape<m = 8, n = 8>"
_ELEMENT = "#nvvm.ld_st_matrix_elt_type<b16>"


def load_matrices_plan(
    lowering: Lowering, shared: LinearLayout, layout: LinearLayout, bits: int, plain_vec: int
) -> LdmatrixPlan | None:
    """The ldmatrix plan, where it takes fewer instructions than loads of `plain_vec` elements."""
    if not lowering.target.has("ldmatrix"):
        return None
    return _better_plan(shared, layout, bits, plain_vec)


def store_matrices_plan(
    lowering: Lowering, shared: LinearLayout, layout: LinearLayout, bits: int, plain_vec: int
) -> LdmatrixPlan | None:
    """The same for stmatrix, which has no way to leave replicas out."""
    if not lowering.target.has("stmatrix") or not layout.is_injective:
        return None
    return _better_plan(shared, layout, bits, plain_vec)


def _better_plan(
    shared: LinearLayout, layout: LinearLayout, bits: int, plain_vec: int
) -> LdmatrixPlan | None:
    plan = ldmatrix_plan(shared, layout, bits)
    if plan is None or plan.conflicts > 1 or 32 * plan.matrices <= plain_vec * bits:
        return None
    return plan


def _attributes(transposed: bool) -> dict[str, ir.Attribute]:
    order = "col" if transposed else "row"
    return {
        "layout": attribute(f"#nvvm.mma_layout<{order}>"),
        "shape": attribute(_SHAPE),
        "eltType": attribute(_ELEMENT),
    }


def load_matrices(
    lowering: Lowering, plan: LdmatrixPlan, pointer: ir.Value, element: ir.Type, count: int
) -> list[ir.Value]:
    """The `count` registers of the fragment layout, from the tile at `pointer`."""
    stored = storage_type(lowering, element)
    address = _address(lowering, plan, pointer)
    result: list[ir.Value | None] = [None] * count
    for instruction in plan.instructions:
        place = address.at(instruction.offset)
        words = load_blocks(lowering, place, plan.matrices, transposed=plan.transposed)
        for word, registers in zip(words, instruction.registers, strict=True):
            values = lowering.split_bits(word, stored, len(registers))
            for register, value in zip(registers, values, strict=True):
                result[register] = from_storage(lowering, value, element)
    return [value for value in result if value is not None]


def load_blocks(
    lowering: Lowering, place: ir.Value, count: int, *, transposed: bool
) -> list[ir.Value]:
    """One ldmatrix: the i32 words of `count` blocks (1, 2 or 4), whose rows begin at `place`."""
    attributes = _attributes(transposed) | {"num": ir.IntegerAttr.get(lowering.i32, count)}
    if count == 1:
        return [lowering.op("nvvm.ldmatrix", lowering.i32, (place,), attributes)]
    type_ = type_named(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    loaded = lowering.op("nvvm.ldmatrix", type_, (place,), attributes)
    return [extract(lowering, loaded, index) for index in range(count)]


def store_matrices(
    lowering: Lowering, plan: LdmatrixPlan, pointer: ir.Value, registers: Sequence[ir.Value]
) -> None:
    """Writes a fragment to the tile at `pointer`."""
    address = _address(lowering, plan, pointer)
    attributes = _attributes(plan.transposed)
    for instruction in plan.instructions:
        words = [
            lowering.join_bits([to_storage(lowering, registers[r]) for r in block], lowering.i32)
            for block in instruction.registers
        ]
        place = address.at(instruction.offset)
        lowering.create("nvvm.stmatrix", [], [place, *words], attributes)


def _address(lowering: Lowering, plan: LdmatrixPlan, pointer: ir.Value) -> ThreadAddress:
    size = plan.elem_bits // 8
    return ThreadAddress(lowering, pointer, plan.lane_bases, plan.warp_bases, size, plan.gaps)


def extract(lowering: Lowering, struct: ir.Value, index: int) -> ir.Value:
    """Member `index` of an LLVM struct whose members are i32."""
    position = {"position": ir.DenseI64ArrayAttr.get([index])}
    return lowering.op("llvm.extractvalue", lowering.i32, (struct,), position)
