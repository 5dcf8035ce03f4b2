"""f32 -> fp8, rounding and saturating to the largest finite value; NaN becomes 0x7F."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minitriton.codegen.floats import Floats
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

NAN = 0x7F


@dataclass(frozen=True)
class _Format:
    name: str
    mantissa: int  # explicit bits
    min_exponent: int  # of the smallest normal number
    largest: int  # code of the largest finite number


E4M3 = _Format("e4m3", 3, -6, 0x7E)
E5M2 = _Format("e5m2", 2, -14, 0x7B)


def encode(
    lowering: Lowering, values: Sequence[ir.Value], type_: ir.Type, *, rtz: bool
) -> list[ir.Value]:
    """i8 codes of f32 values; round to nearest even, or toward zero."""
    form = E5M2 if isinstance(type_, ir.Float8E5M2Type) else E4M3
    if rtz or not lowering.target.has("fp8_cvt"):
        return [_encode_by_hand(lowering, value, form, rtz) for value in values]
    codes: list[ir.Value] = []
    for i in range(0, len(values), 2):
        pair = (*values[i : i + 2], values[i])[:2]
        (packed,) = lowering.asm(
            f"cvt.rn.satfinite.{form.name}x2.f32 $0, $2, $1;",
            "=h,f,f",
            [lowering.i16],
            pair,
            effects=False,
        )
        codes += lowering.split_bits(packed, lowering.i8, 2)
    return codes[: len(values)]


def _encode_by_hand(lowering: Lowering, value: ir.Value, form: _Format, rtz: bool) -> ir.Value:
    f = Floats(lowering, lowering.f32)
    low = lowering
    magnitude = low.and_(f.bits(value), 0x7FFFFFFF)
    dropped = 23 - form.mantissa
    rounded = magnitude
    if not rtz:
        last = low.and_(low.shr(magnitude, dropped), 1)
        rounded = low.add(low.add(magnitude, (1 << (dropped - 1)) - 1), last)
    # the exponent field moves from bias 127 to the format's, whose code 1 is min_exponent
    rebias = (127 + form.min_exponent - 1) << form.mantissa
    normal = low.binary("subi", low.shr(rounded, dropped), rebias)
    # below, adding a number whose last place is the smallest subnormal rounds to a multiple of it
    ruler = 2.0 ** (form.min_exponent - form.mantissa + 23)
    rounding = "add.rz.f32" if rtz else "add.rn.f32"
    total = f.bits(f.approximate(rounding, f.from_bits(magnitude), f.value(ruler)))
    subnormal = low.binary("subi", total, f.bits(f.value(ruler)))
    is_normal = low.compare("uge", magnitude, (127 + form.min_exponent) << 23)
    code = low.select(is_normal, normal, subnormal)
    code = low.op("arith.minui", low.i32, (code, low.int32(form.largest)))
    is_nan = low.compare("ugt", magnitude, 0x7F800000)
    code = low.select(is_nan, low.int32(NAN), code)
    sign = low.and_(low.shr(f.bits(value), 24), 0x80)
    return low.op("arith.trunci", low.i8, (low.or_(code, sign),))
