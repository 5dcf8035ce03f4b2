"""Conversions between element types: value casts, bit casts, and constants to run-time values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minitriton.frontend.errors import NotConstexpr, kind_of
from minitriton.frontend.errors_semantic import BadOption, CastRefused
from minitriton.frontend.promotion import literal_type
from minitriton.frontend.values import Tensor, is_number
from minitriton.ir import dtypes
from minitriton.ir.dtypes import AnyType, Scalar, block_type, dtype, pointer_type

if TYPE_CHECKING:
    from minitriton.frontend.emitter import Emitter


def like(type_: AnyType, element: Scalar) -> AnyType:
    """`type_` with another element type."""
    return block_type(element, type_.shape) if isinstance(type_, block_type) else element


def to_tensor(e: Emitter, value: Any, what: str = "operand") -> Tensor:
    """A run-time value; literals get the smallest fitting type of `literal_type`."""
    if isinstance(value, Tensor):
        return value
    if is_number(value):
        return e.constant(literal_type(value), value)
    raise NotConstexpr(what, kind_of(value), "a tile, a scalar or a number")


def scalar(e: Emitter, value: Any, type_: dtype) -> Tensor:
    """`value`, a number or a scalar, as a scalar of `type_`."""
    if is_number(value):
        return e.constant(type_, value)
    return cast(e, value, type_)


def retag(value: Tensor, element: Scalar) -> Tensor:
    """The same handle under another language type (they share the MLIR type)."""
    return Tensor(value.handle, like(value.type, element))


def cast(e: Emitter, value: Tensor, target: Scalar, rounding: str | None = None) -> Tensor:
    """Value conversion of every element to `target`; `rounding` is None, "rtne" or "rtz"."""
    source = value.dtype
    if rounding is not None:
        if rounding not in ("rtne", "rtz"):
            raise BadOption("fp_downcast_rounding", rounding, ("rtne", "rtz"))
        narrows = source.is_floating() and target.is_floating() and source.bits > target.bits
        if source != target and not narrows:
            raise CastRefused(
                str(source), str(target), "fp_downcast_rounding is for narrowing floats only"
            )
    if source == target:
        return value
    if isinstance(source, pointer_type) or isinstance(target, pointer_type):
        return _cast_pointer(e, value, target)
    if source.is_floating():
        if target.is_floating():
            return _float_to_float(e, value, target, rounding)
        return _float_to_int(e, value, target)
    if target.is_floating():
        if target.is_fp8():
            return _float_to_float(e, cast(e, value, dtypes.float32), target, rounding)
        name = "arith.sitofp" if source.is_int_signed() else "arith.uitofp"
        return e.op(name, like(value.type, target), [value])
    return _int_to_int(e, value, target)


def _float_to_float(e: Emitter, value: Tensor, target: dtype, rounding: str | None) -> Tensor:
    source = value.dtype
    result = like(value.type, target)
    if source.is_fp8() or target.is_fp8() or (rounding == "rtz" and source.bits > target.bits):
        if source.is_fp64() or target.is_fp64():
            return cast(e, _float_to_float(e, value, dtypes.float32, None), target, rounding)
        return e.op("mt.fp_cast", result, [value], {"rounding": e.string(rounding or "rtne")})
    if source.bits < target.bits:
        return e.op("arith.extf", result, [value])
    if source.bits > target.bits:
        return e.op("arith.truncf", result, [value])
    return cast(e, cast(e, value, dtypes.float32), target)  # fp16 and bf16


def _float_to_int(e: Emitter, value: Tensor, target: dtype) -> Tensor:
    if value.dtype.is_fp8():
        value = cast(e, value, dtypes.float32)
    result = like(value.type, target)
    if target.is_bool():
        return compare_to_zero(e, value)
    return e.op("arith.fptosi" if target.is_int_signed() else "arith.fptoui", result, [value])


def _int_to_int(e: Emitter, value: Tensor, target: dtype) -> Tensor:
    source = value.dtype
    result = like(value.type, target)
    if target.is_bool():
        return compare_to_zero(e, value)
    if source.bits == target.bits:
        return retag(value, target)
    if source.bits > target.bits:
        return e.op("arith.trunci", result, [value])
    return e.op("arith.extsi" if source.is_int_signed() else "arith.extui", result, [value])


def compare_to_zero(e: Emitter, value: Tensor) -> Tensor:
    """`value != 0` as int1."""
    zero = e.constant(value.type, 0)
    if value.dtype.is_floating():
        name, predicate = "arith.cmpf", 13  # une
    else:
        name, predicate = "arith.cmpi", 1  # ne
    return e.op(name, like(value.type, dtypes.int1), [value, zero], {"predicate": e.i64(predicate)})


def _cast_pointer(e: Emitter, value: Tensor, target: Scalar) -> Tensor:
    source = value.dtype
    result = like(value.type, target)
    if source.is_ptr() and target.is_ptr():
        if e.type(source) == e.type(target):
            return retag(value, target)
        return e.op("mt.ptr_cast", result, [value])
    if source.is_ptr():
        if not target.is_int():
            raise CastRefused(str(source), str(target), "addresses are integers of 64 bits")
        address = e.op("mt.ptr_to_int", like(value.type, dtypes.int64), [value])
        return cast(e, address, target)
    if not source.is_int():
        raise CastRefused(str(source), str(target), "only integers become pointers")
    e.makes_pointers = True
    return e.op("mt.int_to_ptr", result, [cast(e, value, dtypes.int64)])


def bitcast(e: Emitter, value: Tensor, target: Scalar) -> Tensor:
    """The same bits as another type of equal width."""
    source = value.dtype
    if source == target:
        return value
    if source.is_ptr() or target.is_ptr():
        return _cast_pointer(e, value, target)
    if source.bits != target.bits:
        raise CastRefused(
            str(source), str(target), f"a bitcast keeps the width ({source.bits} bits)"
        )
    if source.is_int() and target.is_int():
        return retag(value, target)
    return e.op("arith.bitcast", like(value.type, target), [value])
