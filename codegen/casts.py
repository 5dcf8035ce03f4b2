"""Conversions between element types.

fp8 is held in i8. From sm_89 on fp8 goes through the cvt instructions (via f16x2), below through
integer arithmetic. Casts to fp8 round to nearest even and saturate; f64 and bf16 reach fp8, and
integers reach bf16 and f16, without double rounding. Of integers that lie close together (weights
of a few bits) the bits of a float are put together: 2^m + n, from which 2^m is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minitriton.codegen import fp8
from minitriton.codegen.elementwise import is_float, map_registers, rule
from minitriton.codegen.fp8_upcast import fp8_to_f16
from minitriton.codegen.tile import Tile, carried
from minitriton.ir.dialect import element_of
from minitriton.ir.encoding import layout_of
from minitriton.ir.int_range import Range, range_of, unsigned
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering


def _is_fp8(type_: ir.Type) -> bool:
    return is_float(type_) and type_.width == 8


def _extf(lowering: Lowering, op: ir.Operation) -> None:
    type_ = carried(element_of(op.results[0].type))
    map_registers(lowering, op, lambda values: lowering.op("arith.extf", type_, values))


def _truncf(lowering: Lowering, op: ir.Operation) -> None:
    """f32 -> 16 bits goes in pairs, for cvt.rn.f16x2.f32 and cvt.rn.bf16x2.f32."""
    source = element_of(op.operands[0].type)
    type_ = carried(element_of(op.results[0].type))
    registers = lowering.registers(op.operands[0])
    if source != lowering.f32 or type_.width != 16 or len(registers) < 2:
        map_registers(lowering, op, lambda values: narrow(lowering, values[0], type_, rtz=False))
        return
    vector = ir.VectorType.get([2], type_)
    results: list[ir.Value] = []
    for i in range(0, len(registers), 2):
        pair = lowering.pack([registers[i], registers[i + 1]])
        results += lowering.unpack(lowering.op("arith.truncf", vector, (pair,)))
    lowering.set_registers(op.results[0], results)


def narrow(lowering: Lowering, value: ir.Value, type_: ir.Type, *, rtz: bool) -> ir.Value:
    """A float as a narrower standard float, to nearest even or toward zero."""
    if not rtz:
        if value.type == lowering.f64 and type_ == lowering.bf16:
            value = to_f32_odd(lowering, value)
        return lowering.op("arith.truncf", type_, (value,))
    if type_ == lowering.bf16:
        if value.type == lowering.f64:
            value = _cvt(lowering, "cvt.rz.f32.f64", value, lowering.f32)
        return _bf16_toward_zero(lowering, value)
    if value.type == lowering.f64:
        if type_ == lowering.f32:
            return _cvt(lowering, "cvt.rz.f32.f64", value, type_)
        value = _cvt(lowering, "cvt.rz.f32.f64", value, lowering.f32)
    bits = _cvt(lowering, "cvt.rz.f16.f32", value, lowering.i16)
    return lowering.bitcast(bits, type_)


def _bf16_toward_zero(lowering: Lowering, value: ir.Value) -> ir.Value:
    """The upper half of an f32; a NaN keeps a mantissa bit."""
    bits = lowering.bitcast(value, lowering.i32)
    upper = lowering.op("arith.trunci", lowering.i16, (lowering.shr(bits, 16),))
    is_nan = lowering.compare("ugt", lowering.and_(bits, 0x7FFFFFFF), 0x7F800000)
    result = lowering.select(is_nan, lowering.constant(lowering.i16, 0x7FFF), upper)
    return lowering.bitcast(result, lowering.bf16)


EXACT_F32 = 1 << 24  # up to here every integer is an f32
_MANTISSA = {"bf16": 7, "f16": 10}  # bits of it in memory
_LETTERS = {"f32": "f", "f64": "d", "i16": "h", "i32": "r", "i64": "l"}


def _cvt(lowering: Lowering, instruction: str, value: ir.Value, result: ir.Type) -> ir.Value:
    letters = _LETTERS[str(result)], _LETTERS[str(value.type)]
    (converted,) = lowering.asm(
        f"{instruction} $0, $1;", f"={letters[0]},{letters[1]}", [result], [value], effects=False
    )
    return converted


def to_f32_odd(lowering: Lowering, value: ir.Value) -> ir.Value:
    """f64 -> f32 toward zero with the last bit set if inexact: a later rounding to 16 or 8 bits
    then gives what one rounding would have given."""
    truncated = _cvt(lowering, "cvt.rz.f32.f64", value, lowering.f32)
    back = lowering.op("arith.extf", lowering.f64, (truncated,))
    index = ir.IntegerAttr.get(lowering.i64, 6)  # one: ordered and not equal
    inexact = lowering.op("arith.cmpf", lowering.i1, (back, value), {"predicate": index})
    bits = lowering.bitcast(truncated, lowering.i32)
    sticky = lowering.op("arith.extui", lowering.i32, (inexact,))
    return lowering.bitcast(lowering.or_(bits, sticky), lowering.f32)


# Integers


def _int_to_float(signed: bool) -> Callable[[Lowering, ir.Operation], None]:
    name = "arith.sitofp" if signed else "arith.uitofp"

    def lower(lowering: Lowering, op: ir.Operation) -> None:
        type_ = carried(element_of(op.results[0].type))
        width = element_of(op.operands[0].type).width
        found = range_of(op.operands[0])
        found = found if signed else unsigned(found, width)
        if _fits_in_bits(lowering, type_, found) and len(lowering.registers(op.operands[0])) > 1:
            _from_bits(lowering, op, type_, found[0], signed=signed)
            return
        is_exact = max(map(abs, found)) <= EXACT_F32

        def scalar(values: Sequence[ir.Value]) -> ir.Value:
            (value,) = values
            if type_.width > 16 or (width <= 16 and type_ == lowering.f16):
                return lowering.op(name, type_, (value,))
            if is_exact:
                middle = lowering.op(name, lowering.f32, (value,))
            else:
                middle = _to_float_odd(lowering, value, signed)
            return narrow(lowering, middle, type_, rtz=False)

        map_registers(lowering, op, scalar)

    return lower


def _fits_in_bits(lowering: Lowering, type_: ir.Type, found: Range) -> bool:
    """Whether integers in this range differ in their last bits only from 2^m, the least but for
    them; and whether what lies between 2^m and the least of them is exact, too."""
    if type_.width != 16 or (type_ == lowering.bf16 and not lowering.target.has("bf16_add")):
        return False
    least, greatest = found
    base = 1 << _MANTISSA[str(type_)]
    return greatest - least < base and abs(base - least) <= 2 * base


def _from_bits(
    lowering: Lowering, op: ir.Operation, type_: ir.Type, least: int, *, signed: bool
) -> None:
    """Integers from `least` on as 2^m + (n - least) in pairs, less 2^m - least."""
    mantissa = _MANTISSA[str(type_)]
    base = 1 << mantissa
    exponent = (15 if type_ == lowering.f16 else 127) + mantissa
    bits = exponent << mantissa
    vector = ir.VectorType.get([2], type_)
    splat = lowering.constant(type_, float(base - least))
    offset = lowering.pack([splat, splat])
    halves = []
    for value in lowering.registers(op.operands[0]):
        if value.type.width < 32:
            extend = "arith.extsi" if signed else "arith.extui"
            value = lowering.op(extend, lowering.i32, (value,))
        elif value.type.width > 32:
            value = lowering.op("arith.trunci", lowering.i32, (value,))
        halves.append(lowering.add(value, -least) if least else value)
    results: list[ir.Value] = []
    for low, high in zip(halves[::2], halves[1::2], strict=True):
        word = lowering.or_(lowering.or_(low, lowering.shl(high, 16)), bits << 16 | bits)
        pair = lowering.bitcast(word, vector)
        results += lowering.unpack(lowering.op("arith.subf", vector, (pair, offset)))
    lowering.set_registers(op.results[0], results)


def _to_float_odd(lowering: Lowering, value: ir.Value, signed: bool) -> ir.Value:
    """i32 -> f32, i64 -> f64, toward zero, last bit set if inexact (see `to_f32_odd`)."""
    width = value.type.width
    type_ = {32: lowering.f32, 64: lowering.f64}[width]
    kind = f"{'s' if signed else 'u'}{width}"
    truncated = _cvt(lowering, f"cvt.rz.f{width}.{kind}", value, type_)
    # integers differ from their truncation only in their low bits
    name = "arith.fptosi" if signed else "arith.fptoui"
    back = lowering.op(name, value.type, (truncated,))
    sticky = lowering.op("arith.extui", value.type, (lowering.compare("ne", back, value),))
    return lowering.bitcast(lowering.or_(lowering.bitcast(truncated, value.type), sticky), type_)


def _float_to_int(signed: bool) -> Callable[[Lowering, ir.Operation], None]:
    """Toward zero, saturating at the ends of the type, NaN to 0: as PTX cvt does."""

    def lower(lowering: Lowering, op: ir.Operation) -> None:
        type_ = carried(element_of(op.results[0].type))

        def scalar(values: Sequence[ir.Value]) -> ir.Value:
            (value,) = values
            if value.type.width == 16:
                value = lowering.op("arith.extf", lowering.f32, (value,))
            if type_.width == 1:
                index = ir.IntegerAttr.get(lowering.i64, 13)  # une: true for NaN as in C
                zero = lowering.zero(value.type)
                return lowering.op("arith.cmpf", lowering.i1, (value, zero), {"predicate": index})
            wide = lowering.i64 if type_.width == 64 else lowering.i32
            kind = ("s" if signed else "u") + str(wide.width)
            source = "f64" if value.type == lowering.f64 else "f32"
            result = _cvt(lowering, f"cvt.rzi.{kind}.{source}", value, wide)
            if type_.width < wide.width:
                return lowering.op("arith.trunci", type_, (result,))
            return result

        map_registers(lowering, op, scalar)

    return lower


# fp8


def _fp_cast(lowering: Lowering, op: ir.Operation) -> None:
    source = element_of(op.operands[0].type)
    target = element_of(op.results[0].type)
    rtz = ir.StringAttr(op.attributes["rounding"]).value == "rtz"
    if not _is_fp8(source) and not _is_fp8(target):
        type_ = carried(target)
        name = "arith.extf" if type_.width > source.width else None

        def scalar(values: Sequence[ir.Value]) -> ir.Value:
            if name or type_ == source:
                return lowering.op(name, type_, values) if name else values[0]
            if type_.width == source.width:  # f16 <-> bf16
                wide = lowering.op("arith.extf", lowering.f32, values)
                return narrow(lowering, wide, type_, rtz=rtz)
            return narrow(lowering, values[0], type_, rtz=rtz)

        map_registers(lowering, op, scalar)
        return
    registers = list(lowering.registers(op.operands[0]))
    if source == target:
        results = registers
    else:
        if _is_fp8(source):
            registers = fp8_to_f16(lowering, registers, source)
        if _is_fp8(target):
            wide = [_to_f32(lowering, v, rtz) for v in registers]
            results = fp8.encode(lowering, wide, target, rtz=rtz)
        else:
            results = [_from_f16(lowering, v, carried(target)) for v in registers]
    lowering.set_registers(op.results[0], results)


def _from_f16(lowering: Lowering, value: ir.Value, type_: ir.Type) -> ir.Value:
    """An f16 that was fp8 (and so is exact in bf16 too) as another standard float."""
    if type_ == lowering.f16:
        return value
    wide = lowering.f32 if type_ == lowering.bf16 else type_
    widened = lowering.op("arith.extf", wide, (value,))
    return widened if wide == type_ else lowering.op("arith.truncf", type_, (widened,))


def _to_f32(lowering: Lowering, value: ir.Value, rtz: bool) -> ir.Value:
    if value.type == lowering.f64:
        if rtz:
            return _cvt(lowering, "cvt.rz.f32.f64", value, lowering.f32)
        return to_f32_odd(lowering, value)
    if value.type == lowering.f32:
        return value
    return lowering.op("arith.extf", lowering.f32, (value,))


# The same bits


def _bitcast(lowering: Lowering, op: ir.Operation) -> None:
    type_ = carried(element_of(op.results[0].type))
    map_registers(lowering, op, lambda values: lowering.bitcast(values[0], type_))


def _ptr_to_int(lowering: Lowering, value: ir.Value) -> ir.Value:
    return lowering.op("llvm.ptrtoint", lowering.i64, (value,))


def _int_to_ptr(lowering: Lowering, value: ir.Value) -> ir.Value:
    return lowering.op("llvm.inttoptr", lowering.pointer, (value,))


def _same(lowering: Lowering, op: ir.Operation) -> None:
    """All pointers are alike in LLVM."""
    value = lowering.value(op.operands[0])
    if isinstance(value, Tile):
        value = Tile(layout_of(op.results[0].type), value.element, value.registers)
    lowering.set(op.results[0], value)
    lowering.keep_lazy()


RULES = {
    "arith.extf": _extf,
    "arith.truncf": _truncf,
    "arith.sitofp": _int_to_float(True),
    "arith.uitofp": _int_to_float(False),
    "arith.fptosi": _float_to_int(True),
    "arith.fptoui": _float_to_int(False),
    "arith.bitcast": _bitcast,
    "mt.fp_cast": _fp_cast,
    "mt.ptr_to_int": rule(_ptr_to_int),
    "mt.int_to_ptr": rule(_int_to_ptr),
    "mt.ptr_cast": _same,
}
