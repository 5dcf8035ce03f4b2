"""Atomic read-modify-write and compare-and-swap; each returns the old value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minitriton.frontend import arithmetic, constants
from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.casting import bitcast, cast, like, retag
from minitriton.frontend.errors_semantic import ConstPointer, WrongDtype
from minitriton.frontend.lang_memory import fitting, mask_operand, require_pointer
from minitriton.frontend.values import Tensor, is_number, unwrap
from minitriton.ir import dtypes

_SEMANTICS = ("acq_rel", "acquire", "release", "relaxed")
_SCOPES = ("gpu", "cta", "sys")
_INTEGERS = tuple(t for t in dtypes.ALL if t.is_int() and t.bits in (32, 64))
_FLOATS = (dtypes.float32, dtypes.float64)
_ALLOWED = {
    "add": (*_INTEGERS, *_FLOATS, dtypes.float16, dtypes.bfloat16),
    "max": (*_INTEGERS, *_FLOATS),
    "min": (*_INTEGERS, *_FLOATS),
    "and": _INTEGERS,
    "or": _INTEGERS,
    "xor": _INTEGERS,
    "xchg": (*_INTEGERS, *_FLOATS),
}


def _pointer(function: str, pointer: Any, allowed: tuple[dtypes.dtype, ...]) -> Tensor:
    checked = require_pointer(function, pointer)
    if checked.dtype.const:
        raise ConstPointer(function, str(checked.dtype))
    element = checked.dtype.element_ty
    if element not in allowed:
        raise WrongDtype(function, f"a pointer to {element}", ", ".join(map(str, allowed)))
    return checked


def _order(sem: Any, scope: Any) -> dict[str, Any]:
    e = emitter()
    ordering = "acq_rel" if unwrap(sem) is None else constants.choice("sem", sem, _SEMANTICS)
    reach = "gpu" if unwrap(scope) is None else constants.choice("scope", scope, _SCOPES)
    return {"sem": e.string(ordering), "scope": e.string(reach)}


def _converted(pointer: Tensor, value: Any, what: str) -> Tensor:
    e = emitter()
    element = pointer.dtype.element_ty
    if is_number(value) and not (element.is_int() and isinstance(value, float)):
        return e.constant(like(pointer.type, element), value)
    return cast(e, fitting(pointer, value, what), element)


def _rmw(kind: str, pointer: Tensor, value: Tensor, mask: Tensor | None, order: Any) -> Tensor:
    e = emitter()
    operands = [pointer, value] if mask is None else [pointer, value, mask]
    attributes = {"kind": e.string(kind), **order}
    return e.op("mt.atomic_rmw", value.type, operands, attributes)


def _atomic(
    name: str, pick: Callable[[dtypes.dtype], str], description: str
) -> Callable[..., Tensor]:
    @builtin
    def function(
        pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None
    ) -> Tensor:
        target = _pointer(f"tl.atomic_{name}", pointer, _ALLOWED[name])
        value = _converted(target, unwrap(val), "val")
        checked = None if mask is None else mask_operand(target, mask)
        order = _order(sem, scope)
        if name in ("max", "min") and value.dtype.is_floating():
            return _float_extreme(name, target, value, checked, order)
        return _rmw(pick(value.dtype), target, value, checked, order)

    function.__name__ = function.__qualname__ = f"atomic_{name}"
    function.__doc__ = (
        f"{description}. `mask` false: nothing happens, the result is undefined. `sem`: acq_rel "
        "(default), acquire, release, relaxed; `scope`: gpu (default), cta, sys."
    )
    return function


def _float_extreme(
    name: str, pointer: Tensor, value: Tensor, mask: Tensor | None, order: Any
) -> Tensor:
    """Maximum (minimum) of floats by integer atomics on their bits.

    Bits of non-negative floats are ordered as signed integers, those of negative ones in reverse
    as unsigned integers, and every negative float is larger than any other one as unsigned.
    """
    e = emitter()
    signed, unsigned = (
        (dtypes.int32, dtypes.uint32) if value.dtype.is_fp32() else (dtypes.int64, dtypes.uint64)
    )
    negative = arithmetic.is_negative(e, value)
    positive = arithmetic.invert(e, negative)
    bits = bitcast(e, value, signed)
    address = cast(e, pointer, dtypes.pointer_type(signed))
    kinds = ("max", "umin") if name == "max" else ("min", "umax")
    lanes = [x if mask is None else arithmetic.and_(e, mask, x) for x in (positive, negative)]
    for_positive = _rmw(kinds[0], address, bits, lanes[0], order)
    for_negative = retag(
        _rmw(
            kinds[1],
            cast(e, pointer, dtypes.pointer_type(unsigned)),
            retag(bits, unsigned),
            lanes[1],
            order,
        ),
        signed,
    )
    return bitcast(e, arithmetic.select(e, positive, for_positive, for_negative), value.dtype)


atomic_add = _atomic("add", lambda t: "fadd" if t.is_floating() else "add", "Adds `val`")
atomic_max = _atomic("max", lambda t: "max" if t.is_int_signed() else "umax", "Keeps the larger")
atomic_min = _atomic("min", lambda t: "min" if t.is_int_signed() else "umin", "Keeps the smaller")
atomic_and = _atomic("and", lambda t: "and", "Bitwise and with `val`")
atomic_or = _atomic("or", lambda t: "or", "Bitwise or with `val`")
atomic_xor = _atomic("xor", lambda t: "xor", "Bitwise exclusive or with `val`")
atomic_xchg = _atomic("xchg", lambda t: "xchg", "Replaces by `val`")


@builtin
def atomic_cas(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Tensor:
    """Stores `val` where the memory holds `cmp`, bit for bit; elements of 16, 32 or 64 bits."""
    e = emitter()
    wide = tuple(t for t in dtypes.ALL if t.bits in (16, 32, 64))
    target = _pointer("tl.atomic_cas", pointer, wide)
    compare = _converted(target, unwrap(cmp), "cmp")
    value = _converted(target, unwrap(val), "val")
    operands = [target, compare, value]
    return e.op("mt.atomic_cas", value.type, operands, _order(sem, scope))
