"""mt.dot on tensor cores: the mma.sync m16n8 instructions that the layouts describe.

Operand registers are packed into the 32-bit registers of the instructions; where they come from
ldmatrix, LLVM cancels the packing. Dots marked `mt.fma` go to dot_fma.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen import dot_fma, dot_parts
from minitriton.codegen.dot_parts import Accumulators, pick, to_tf32
from minitriton.codegen.emit import width_of
from minitriton.codegen.fp8_upcast import fp8_pairs
from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.mma import MmaKind, mma_instruction
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.encoding import layout_of
from minitriton.ir.layouts import MmaTile, mma_tiles
from minitriton.ir.mlir import ir

Words = dict[tuple[int, ...], list[ir.Value]]


def lower_dot(lowering: Lowering, op: ir.Operation) -> None:
    if "mt.fma" in op.attributes:
        return dot_fma.lower_dot_fma(lowering, op)
    result, c = op.results[0], op.operands[2]
    tiles = _tiles(op)
    each = 2 if result.type.element_type == lowering.f16 else 1  # elements in a register
    sums = lowering.words(c) if each == 2 else lowering.held(c)
    number = {register: n // each for n, register in enumerate(layout_of(c.type).registers)}
    accumulators = {
        tile.c: [sums[number[register]] for register in tile.c[::each]] for tile in tiles
    }
    if op.operands[0].type.element_type == lowering.f32:
        _fp32(lowering, op, tiles, accumulators)
    elif _is_fp8(op):
        _fp8(lowering, op, tiles, accumulators)
    else:
        _plain(lowering, op, tiles, accumulators)
    for registers, values in accumulators.items():
        for register, value in zip(registers[::each], values, strict=True):
            sums[number[register]] = value
    return lowering.set_words(result, sums) if each == 2 else lowering.set_registers(result, sums)


def _tiles(op: ir.Operation) -> list[MmaTile]:
    a, b = (tuple(value.type.shape) for value in op.operands[:2])
    warps = tuple(ir.DenseI32ArrayAttr(op.attributes["mt.warps"]))
    shape = (*a[:-2], a[-2], b[-1], a[-1])
    element = op.operands[0].type.element_type
    bits = dot_parts.BITS.get(_precision(op)) if isinstance(element, ir.F32Type) else None
    return list(mma_tiles(shape, warps, bits or width_of(element)))


def _precision(op: ir.Operation) -> str:
    return ir.StringAttr(op.attributes["input_precision"]).value


def _is_fp8(op: ir.Operation) -> bool:
    return isinstance(op.operands[0].type.element_type, (ir.Float8E4M3FNType, ir.Float8E5M2Type))


def _packed(lowering: Lowering, value: ir.Value, fragments: Sequence[tuple[int, ...]]) -> Words:
    """Per fragment its 32-bit words, packed once however many instructions read it."""
    per_word = 32 // width_of(value.type.element_type)
    words: Words = {}
    for registers in fragments:
        if registers not in words:
            values = pick(lowering, value, registers)
            words[registers] = [
                lowering.join_bits(values[i : i + per_word], lowering.i32)
                for i in range(0, len(values), per_word)
            ]
    return words


def _plain(
    lowering: Lowering,
    op: ir.Operation,
    tiles: Sequence[MmaTile],
    accumulators: Accumulators,
) -> None:
    """f16, bf16 and int8: one instruction per tile."""
    mma = mma_instruction(lowering, _kind(lowering, op), op.results[0].type.element_type)
    a = _packed(lowering, op.operands[0], [tile.a for tile in tiles])
    b = _packed(lowering, op.operands[1], [tile.b for tile in tiles])
    for tile in tiles:
        accumulators[tile.c] = mma(a[tile.a], b[tile.b], accumulators[tile.c])


def _kind(lowering: Lowering, op: ir.Operation) -> MmaKind:
    element = op.operands[0].type.element_type
    if element == lowering.i8:
        names = ["u8" if f"mt.unsigned_{side}" in op.attributes else "s8" for side in "ab"]
        return MmaKind(names[0], names[1], 32)
    if element == lowering.f16 or element == lowering.bf16:
        return MmaKind(str(element), str(element), 16)
    raise InternalError("codegen", f"no tensor-core dot of {element} at {op.location}")


# fp8


def _fp8(
    lowering: Lowering,
    op: ir.Operation,
    tiles: Sequence[MmaTile],
    accumulators: Accumulators,
) -> None:
    """Natively, or as two f16 instructions per tile after widening in registers."""
    native = lowering.target.has("fp8_mma") and op.results[0].type.element_type == lowering.f32
    if native:
        _fp8_native(lowering, op, tiles, accumulators)
        return
    mma = mma_instruction(lowering, MmaKind("f16", "f16", 16), op.results[0].type.element_type)
    a = _widened(lowering, op.operands[0], [tile.a for tile in tiles])
    b = _widened(lowering, op.operands[1], [tile.b for tile in tiles])
    for tile in tiles:
        # any order of K will do as long as both sides agree: low and high pairs of each word
        # take the places of the two K halves
        words_a, words_b = a[tile.a], b[tile.b]
        for half in range(2):
            first, second = words_a[4 * half : 4 * half + 2], words_a[4 * half + 2 : 4 * half + 4]
            fragment = [first[0], second[0], first[1], second[1]]
            accumulators[tile.c] = mma(
                fragment, words_b[2 * half : 2 * half + 2], accumulators[tile.c]
            )


def _widened(lowering: Lowering, value: ir.Value, fragments: Sequence[tuple[int, ...]]) -> Words:
    """Per fragment: for each of its 32-bit words the two f16 pairs in it."""
    element = value.type.element_type
    words: Words = {}
    for registers in fragments:
        if registers not in words:
            values = pick(lowering, value, registers)
            words[registers] = fp8_pairs(lowering, values, element)
    return words


def _fp8_native(
    lowering: Lowering,
    op: ir.Operation,
    tiles: Sequence[MmaTile],
    accumulators: Accumulators,
) -> None:
    """Tensor cores sum fp8 products with few bits; `max_imprecise` bounds such a chain."""
    names = [fp8_name(value.type.element_type) for value in op.operands[:2]]
    mma = mma_instruction(lowering, MmaKind(names[0], names[1], 32), lowering.f32)
    a = _packed(lowering, op.operands[0], [tile.a for tile in tiles])
    b = _packed(lowering, op.operands[1], [tile.b for tile in tiles])
    limit = integer_attribute(op, "max_imprecise", 0)
    steps = max(1, limit // 32) if 0 < limit < op.operands[0].type.shape[-1] else 0
    if not steps:
        for tile in tiles:
            accumulators[tile.c] = mma(a[tile.a], b[tile.b], accumulators[tile.c])
        return
    partial: Accumulators = {}
    zeros = [lowering.zero(lowering.f32)] * 4
    last = max(tile.k for tile in tiles)
    for tile in tiles:
        partial[tile.c] = mma(a[tile.a], b[tile.b], partial.get(tile.c, zeros))
        if (tile.k + 1) % steps == 0 or tile.k == last:
            accumulators[tile.c] = [
                lowering.binary("addf", total, part)
                for total, part in zip(accumulators[tile.c], partial.pop(tile.c), strict=True)
            ]


def fp8_name(element: ir.Type) -> str:
    """What PTX calls an fp8 type."""
    return "e5m2" if isinstance(element, ir.Float8E5M2Type) else "e4m3"


# f32


def _fp32(
    lowering: Lowering, op: ir.Operation, tiles: Sequence[MmaTile], accumulators: Accumulators
) -> None:
    """Rounded to tf32, or as sums of narrower numbers."""
    if _precision(op) in dot_parts.BITS:
        dot_parts.multiply(lowering, op, _precision(op), tiles, accumulators)
        return
    mma = mma_instruction(lowering, MmaKind("tf32", "tf32", 8), lowering.f32)
    words_a, words_b = (
        {
            registers: [to_tf32(lowering, value) for value in pick(lowering, operand, registers)]
            for registers in dict.fromkeys(fragments)
        }
        for operand, fragments in (
            (op.operands[0], [tile.a for tile in tiles]),
            (op.operands[1], [tile.b for tile in tiles]),
        )
    )
    for tile in tiles:
        accumulators[tile.c] = mma(words_a[tile.a], words_b[tile.b], accumulators[tile.c])


RULES = {"mt.dot": lower_dot}
