"""fp8 operands of a dot widened to f16, which holds every fp8 value exactly."""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen.lower import Lowering
from minitriton.ir.mlir import ir

BYTES_PER_WORD = 4


def fp8_pairs(lowering: Lowering, values: Sequence[ir.Value], element: ir.Type) -> list[ir.Value]:
    """Carried fp8 values (i8, a multiple of 4 of them) as i32 words of two f16 each, in order."""
    words = []
    for start in range(0, len(values), BYTES_PER_WORD):
        word = lowering.join_bits(values[start : start + BYTES_PER_WORD], lowering.i32)
        words += _widen_word(lowering, word, element)
    return words


def fp8_to_f16(lowering: Lowering, values: Sequence[ir.Value], element: ir.Type) -> list[ir.Value]:
    """Carried fp8 values as f16 values."""
    words = []
    for start in range(0, len(values), BYTES_PER_WORD):
        # by shifts: LLVM turns vectors of unrelated bytes into permutes of undefined registers
        word = lowering.int32(0)
        for index, value in enumerate(values[start : start + BYTES_PER_WORD]):
            wide = lowering.op("arith.extui", lowering.i32, (value,))
            word = lowering.or_(word, lowering.shl(wide, 8 * index))
        words += _widen_word(lowering, word, element)
    halves = [half for word in words for half in lowering.split_bits(word, lowering.f16, 2)]
    return halves[: len(values)]


def _widen_word(lowering: Lowering, word: ir.Value, element: ir.Type) -> list[ir.Value]:
    is_e5m2 = isinstance(element, ir.Float8E5M2Type)
    if lowering.target.has("fp8_cvt"):
        name = "e5m2" if is_e5m2 else "e4m3"
        return [
            lowering.asm(
                f"cvt.rn.f16x2.{name}x2 $0, $1;", "=r,h", [lowering.i32], (half,), effects=False
            )[0]
            for half in lowering.split_bits(word, lowering.i16, 2)
        ]
    low = lowering.or_(
        lowering.and_(lowering.shl(word, 8), 0x0000FF00),
        lowering.and_(lowering.shl(word, 16), 0xFF000000),
    )
    high = lowering.or_(
        lowering.and_(lowering.shr(word, 8), 0x0000FF00), lowering.and_(word, 0xFF000000)
    )
    # the upper byte of an f16 has e5m2's fields
    return [low, high] if is_e5m2 else [_e4m3_pair(lowering, pair) for pair in (low, high)]


def _e4m3_pair(lowering: Lowering, pair: ir.Value) -> ir.Value:
    """Two e4m3 values in the upper bytes of their halves, as two f16."""
    magnitude = lowering.and_(pair, 0x7F007F00)
    # one exponent bit less: the fields move down by one, and f16's bias is larger by 8
    moved = lowering.or_(lowering.shr(magnitude, 1), lowering.and_(pair, 0x80008000))
    halves = ir.VectorType.get([2], lowering.f16)
    two_to_8 = lowering.bitcast(lowering.int32(0x5C005C00), halves)
    scaled = lowering.binary("mulf", lowering.bitcast(moved, halves), two_to_8)
    # 0x7F is NaN: only there the addition carries into the sign's place
    carry = lowering.and_(lowering.add(magnitude, 0x01000100), 0x80008000)
    nan = lowering.mul(lowering.shr(carry, 15), 0x7E00)
    return lowering.or_(lowering.bitcast(scaled, lowering.i32), nan)
