"""setp comparisons and the update functions of atomics, on arrays of raw bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minitriton.runtime.emulator.alu_float import SINGLE_RULES, flush
from minitriton.runtime.emulator.alu_integer import INTEGER_RULES, paired
from minitriton.runtime.emulator.formats import (
    F32,
    F64,
    Bits,
    bits_dtype,
    to_f32,
    value_dtype,
    width,
)

Predicate: TypeAlias = NDArray[np.bool_]
_ORDERED = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_INTEGER = {
    **_ORDERED, "ne": np.not_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
# An unordered comparison is true exactly when the opposite ordered one is false.
_NEGATED = {
    "neu": np.equal, "ltu": np.greater_equal, "leu": np.greater, "gtu": np.less_equal,
    "geu": np.less,
}  # fmt: skip


def _float_test(op: str) -> Callable[[Any, Any], Any]:
    if op in _ORDERED:
        return _ORDERED[op]
    if op in _NEGATED:
        opposite = _NEGATED[op]
        return lambda a, b: np.logical_not(opposite(a, b))
    if op == "ne":
        return lambda a, b: np.less(a, b) | np.greater(a, b)
    if op == "equ":
        return lambda a, b: np.logical_not(np.less(a, b) | np.greater(a, b))
    ordered: Callable[[Any, Any], Any] = lambda a, b: np.equal(a, a) & np.equal(b, b)  # noqa: E731
    return ordered if op == "num" else lambda a, b: np.logical_not(ordered(a, b))


FLOAT_COMPARISONS = frozenset((*_ORDERED, *_NEGATED, "ne", "equ", "num", "nan"))
INTEGER_COMPARISONS = frozenset(_INTEGER)


def comparison(op: str, ptx_type: str, ftz: bool = False) -> Callable[..., Predicate]:
    """A setp comparison as callable(a_bits, b_bits) -> bool array; KeyError when unknown."""
    if ptx_type in ("f16", "bf16", "f32", "f64"):
        if op not in FLOAT_COMPARISONS:
            raise KeyError(op)
        test = _float_test(op)
        if ftz:
            return lambda a, b: test(
                _number(flush(a, ptx_type), ptx_type), _number(flush(b, ptx_type), ptx_type)
            )
        if ptx_type in ("f32", "f64"):
            dtype = F32 if ptx_type == "f32" else F64
            return lambda a, b: test(a.view(dtype), b.view(dtype))
        return lambda a, b: test(to_f32(a, ptx_type), to_f32(b, ptx_type))
    function, viewed = _INTEGER[op], value_dtype(ptx_type)
    if viewed == bits_dtype(ptx_type):
        return function
    return lambda a, b: function(a.view(viewed), b.view(viewed))


def _number(bits: Bits, ptx_type: str) -> Any:
    if ptx_type in ("f16", "bf16"):
        return to_f32(bits, ptx_type)
    return np.asarray(bits).view(F32 if ptx_type == "f32" else F64)


def update(op: str, ptx_type: str, ftz: bool = False) -> Callable[..., Bits]:
    """The new value of an atomic: callable(old, operand), for cas callable(old, compare, new)."""
    dtype = bits_dtype(ptx_type)
    zero, one = dtype.type(0), dtype.type(1)
    special: dict[str, Callable[..., Bits]] = {
        "exch": lambda old, value: np.broadcast_to(value, np.shape(old)),
        "cas": lambda old, compare, value: np.where(old == compare, value, old),
        "inc": lambda old, limit: np.where(old >= limit, zero, np.add(old, one)),
        "dec": lambda old, limit: np.where(
            (old == 0) | (old > limit), limit, np.subtract(old, one)
        ),
    }
    if op in special:
        return special[op]
    if op not in ("add", "min", "max", "and", "or", "xor"):
        raise KeyError(op)
    mods = frozenset({"ftz"} if ftz else ())
    if ptx_type in ("f16x2", "bf16x2"):
        return paired(SINGLE_RULES[op](ptx_type[:-2], mods))
    if ptx_type[0] in "uefb" and ptx_type in ("f16", "bf16", "f32", "f64"):
        return SINGLE_RULES[op](ptx_type, mods)
    if width(ptx_type) < 16:
        raise KeyError(ptx_type)
    return INTEGER_RULES[op](ptx_type, frozenset())
