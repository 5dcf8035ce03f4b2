"""Approximate instructions: ex2, lg2, sin, cos, tanh, rcp, rsqrt, sqrt and div on raw bits.

The hardware's tables are not public. Each result here is the float64 value rounded once, which
lies inside every error bound of the PTX ISA; special operands give the documented results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.alu_float import SINGLE_RULES, modified
from minitriton.runtime.emulator.alu_integer import Operation, with_out
from minitriton.runtime.emulator.formats import (
    F32,
    F64,
    FORMATS,
    U64,
    Bits,
    canonical_f32,
    narrow,
    widen,
)


def _reciprocal_root(x: Any) -> Any:
    return np.reciprocal(np.sqrt(x))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "rsqrt": _reciprocal_root,
    "sqrt": np.sqrt,
}
_HUGE, _TOP_WORD = np.float32(2.0**126), np.uint64(0xFFFFFFFF00000000)


def _unary(op: str) -> Callable[[str, frozenset[str]], Operation]:
    function = FUNCTIONS[op]

    def rule(ptx_type: str, mods: frozenset[str]) -> Operation:
        if op in ("rcp", "sqrt") and "approx" not in mods:
            return SINGLE_RULES[op](ptx_type, mods)
        if ptx_type == "f64" and op in ("rcp", "rsqrt"):
            return _double(function)
        if ptx_type == "f32":
            return modified(
                lambda a: canonical_f32(np.asarray(function(widen(a, "f32"))).astype(F32)),
                ptx_type,
                mods,
            )
        if ptx_type == "f64" or op not in ("ex2", "tanh"):
            raise KeyError(ptx_type)
        fmt = FORMATS[ptx_type]
        return modified(lambda a: narrow(function(widen(a, ptx_type)), fmt), ptx_type, mods)

    return rule


def _double(function: Callable[[Any], Any]) -> Operation:
    """rcp/rsqrt.approx.ftz.f64: subnormals flushed, only the upper 32 bits significant."""

    def run(a: Bits) -> Bits:
        value = a.view(F64)
        value = np.where(np.abs(value) < 2.0**-1022, np.copysign(0.0, value), value)
        result = np.asarray(function(value))
        result = np.where(np.abs(result) < 2.0**-1022, np.copysign(0.0, result), result)
        kept = np.asarray(result).view(U64) & _TOP_WORD
        return np.where(result != result, np.uint64(0x7FFFFFFF00000000), kept)

    return with_out(run, U64)


def _divide(ptx_type: str, mods: frozenset[str]) -> Operation:
    if ptx_type != "f32" or "approx" not in mods:
        return SINGLE_RULES["div"](ptx_type, mods)

    def core(a: Bits, b: Bits) -> Bits:
        left, right = a.view(F32), b.view(F32)
        quotient = np.divide(left, right)
        # The reciprocal of a divisor this large flushes to zero before it is multiplied.
        huge = np.isfinite(right) & (np.abs(right) > _HUGE)
        signed_zero = np.copysign(np.float32(0), quotient) * left
        return canonical_f32(np.where(huge, signed_zero, quotient))

    return modified(core, "f32", mods)


APPROXIMATE_RULES: dict[str, Callable[[str, frozenset[str]], Operation]] = {
    **{name: _unary(name) for name in FUNCTIONS},
    "div": _divide,
}
