"""mt.unpack_e2m1: four bytes at a time to pairs of bf16 or f16.

The fields of a code are moved to where the wider type has sign, exponent and mantissa, which gives
a number too small by a power of two: one exact multiplication mends that, subnormal codes included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minitriton.codegen.per_element import Group, in_groups
from minitriton.codegen.tile import carried
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

BYTES = 4  # of a word
SIGNS = 0x80008000
# by element: lowest mantissa bit that is used, mask of the three bits, the missing power of two
_BF16 = 6, 0x01C001C0, 0x7E807E80
_F16 = 9, 0x0E000E00, 0x74007400


def _unpack(lowering: Lowering, op: ir.Operation) -> None:
    element = carried(op.results[0].type.element_type)

    def run(group: Group) -> Group:
        word = lowering.join_bits(group[0], lowering.i32)
        halves = [_bytes_apart(lowering, word, selector) for selector in (0x4140, 0x4342)]
        return [
            [
                value
                for pair in halves
                for value in lowering.split_bits(_widen(lowering, pair, at, element), element, 2)
            ]
            for at in (0, 4)
        ]

    in_groups(lowering, op, BYTES, run)


def _bytes_apart(lowering: Lowering, word: ir.Value, selector: int) -> ir.Value:
    """Two bytes of a word, each the lower half of 16 bits."""
    operands = (word, lowering.int32(0), lowering.int32(selector))
    return lowering.intrinsic("llvm.nvvm.prmt", lowering.i32, operands)


def _widen(lowering: Lowering, pair: ir.Value, at: int, element: ir.Type) -> ir.Value:
    """The two codes at bit `at` of both halves of an i32, as a pair of `element`s."""
    place, mask, power = _BF16 if element == lowering.bf16 else _F16
    sign = lowering.and_(lowering.shl(pair, 12 - at), SIGNS)
    number = lowering.or_(sign, lowering.and_(lowering.shl(pair, place - at), mask))
    type_ = ir.VectorType.get([2], element)
    values = [lowering.bitcast(v, type_) for v in (number, lowering.int32(power))]
    # x * p - 0: sm_80 has fma of two bf16, but no mul
    return lowering.op("math.fma", type_, (*values, lowering.bitcast(lowering.int32(SIGNS), type_)))


RULES = {"mt.unpack_e2m1": _unpack}
