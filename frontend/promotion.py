"""Which type an operator computes in: Triton's promotion rules, on element types alone."""

from __future__ import annotations

from minitriton.frontend.errors import NotConstexpr
from minitriton.frontend.errors_semantic import MixedSigns, OperandTypes
from minitriton.ir import dtypes
from minitriton.ir.dtypes import dtype

_RANK = {"bool": 0, "int": 1, "uint": 1, "float": 2}
_SMALLEST_FP32 = 2.0**-126
_LARGEST_FP32 = (2 - 2.0**-23) * 2.0**127


def literal_type(value: bool | int | float) -> dtype:
    """Type of a literal: int1, the first of int32 uint32 int64 uint64 that holds it, fp32, fp64."""
    if isinstance(value, bool):
        return dtypes.int1
    if isinstance(value, int):
        for candidate in (dtypes.int32, dtypes.uint32, dtypes.int64, dtypes.uint64):
            low, high = int_range(candidate)
            if low <= value <= high:
                return candidate
        raise NotConstexpr("an integer literal", str(value), "of at most 64 bits")
    magnitude = abs(value)
    fits = value != value or magnitude in (0.0, float("inf"))
    return (
        dtypes.float32 if fits or _SMALLEST_FP32 <= magnitude <= _LARGEST_FP32 else dtypes.float64
    )


def int_range(type_: dtype) -> tuple[int, int]:
    """Smallest and largest value of an integer type."""
    if type_.kind == "int":
        return -(1 << (type_.bits - 1)), (1 << (type_.bits - 1)) - 1
    return 0, (1 << type_.bits) - 1


def integer_promote(a: dtype, b: dtype) -> dtype:
    """C's usual conversions without widening to int: wider wins, at equal width unsigned wins."""
    if a.is_int_unsigned() == b.is_int_unsigned():
        return a if a.bits > b.bits else b
    if a.is_int_unsigned():
        return a if a.bits >= b.bits else b
    return b if b.bits >= a.bits else a


def computation_type(
    a: dtype, b: dtype, operator: str, a_literal: bool = False, b_literal: bool = False
) -> dtype:
    """Element type in which `a operator b` is computed.

    A literal of no higher kind than the other operand takes the other's type. Division and modulo
    of floats below fp32 are computed in fp32; of integers they need equal signedness.
    """
    divides = operator in ("/", "//", "%")
    if a_literal != b_literal:
        literal, other = (a, b) if a_literal else (b, a)
        if _RANK[literal.kind] <= _RANK[other.kind]:
            narrow = other.is_floating() and other.bits < 32
            return dtypes.float32 if divides and narrow else other
    if dtypes.float64 in (a, b):
        return dtypes.float64
    if dtypes.float32 in (a, b) or (divides and (a.is_floating() or b.is_floating())):
        return dtypes.float32
    if dtypes.float16 in (a, b):
        return dtypes.float16
    if a == b == dtypes.bfloat16:
        return a
    if dtypes.bfloat16 in (a, b):
        return dtypes.float32
    if a.is_fp8() and b.is_fp8():
        return a if a == b else dtypes.float16
    if not (a.is_int() and b.is_int()):
        raise OperandTypes(operator, str(a), str(b), "cast the fp8 side to fp16 or fp32 first")
    if divides and a.is_int_unsigned() != b.is_int_unsigned():
        raise MixedSigns(operator, str(a), str(b))
    return integer_promote(a, b)


def sum_type(type_: dtype) -> dtype:
    """Type in which sums of `type_` are formed: narrow integers are widened to 32 bits."""
    if type_.is_int() and type_.bits < 32:
        return dtypes.int32 if type_.is_int_signed() else dtypes.uint32
    return type_
