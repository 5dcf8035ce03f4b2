"""Functions of the language that make tiles and convert values."""

from __future__ import annotations

import math
from typing import Any

from minitriton.frontend import casting, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.arithmetic import broadcast_to
from minitriton.frontend.errors import kind_of
from minitriton.frontend.errors_semantic import EmptyRange, RankMismatch, WrongDtype
from minitriton.frontend.values import Tensor, is_number, unwrap
from minitriton.ir import dtypes
from minitriton.ir.dtypes import block_type


@builtin
def arange(start: Any, end: Any) -> Tensor:
    """start, start + 1, ..., end - 1 as int32; constants, their difference a power of two or a
    multiple of 16."""
    low = constants.integer(start, "the start of tl.arange")
    high = constants.integer(end, "the end of tl.arange")
    if high <= low:
        raise EmptyRange(low, high)
    constants.tile_size(high - low, "the length of tl.arange")
    constants.limit((high - low,))
    e = emitter()
    attributes = {"start": e.i32(low), "end": e.i32(high)}
    return e.op("mt.make_range", block_type(dtypes.int32, (high - low,)), (), attributes)


@builtin
def full(shape: Any, value: Any, dtype: Any) -> Tensor:
    """A tile of `shape` with every element `value` (a scalar) cast to `dtype`."""
    e = emitter()
    dims = constants.shape(shape)
    element = constants.element_type(dtype)
    if element.is_ptr() or element.is_void():
        raise WrongDtype("tl.full", str(element), "numbers", "cast integers: x.to(pointer_type)")
    plain = unwrap(value)
    if is_number(plain):
        if element.is_bool():
            plain = bool(plain)
        type_ = block_type(element, dims) if dims else element
        return e.constant(type_, int(plain) if element.is_int() else float(plain))
    tensor = casting.to_tensor(e, plain, "the value of tl.full")
    if math.prod(tensor.shape) != 1:
        raise RankMismatch("tl.full", "a scalar value", kind_of(tensor))
    return broadcast_to(e, casting.cast(e, tensor, element), dims)


@builtin
def zeros(shape: Any, dtype: Any) -> Tensor:
    """A tile of zeros."""
    return full(shape, 0, dtype)


@builtin
def zeros_like(input: Any) -> Tensor:
    """Zeros of the shape and type of `input`."""
    return full_like(input, 0)


@builtin
def full_like(input: Any, value: Any) -> Tensor:
    """`value` in the shape and type of `input`."""
    like = casting.to_tensor(emitter(), unwrap(input))
    return full(like.shape, value, like.dtype)


@builtin
def to_tensor(x: Any) -> Tensor:
    """A run-time value of a constant; run-time values as they are."""
    return casting.to_tensor(emitter(), unwrap(x))


@builtin
def cast(input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Tensor:
    """`input` converted to `dtype`, or its bits reinterpreted."""
    e = emitter()
    target = constants.element_type(dtype)
    value = unwrap(input)
    rounding = unwrap(fp_downcast_rounding)
    if is_number(value) and not constants.flag(bitcast, "bitcast") and target.is_int():
        return e.constant(target, int(bool(value)) if target.is_bool() else int(value))
    tensor = casting.to_tensor(e, value)
    if constants.flag(bitcast, "bitcast"):
        return casting.bitcast(e, tensor, target)
    return casting.cast(e, tensor, target, rounding)


@builtin
def to(input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Tensor:
    """Method form of `cast`."""
    return cast(input, dtype, fp_downcast_rounding, bitcast)
