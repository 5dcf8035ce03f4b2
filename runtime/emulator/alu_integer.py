"""Integer, bit and predicate instructions on arrays of raw register bits.

`integer(op, type, mods)` resolves one instruction to a callable(*bits, out=None) -> bits. All
arithmetic wraps; shift amounts clamp as PTX does; division by zero gives what the hardware does
(all ones, remainder = dividend).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator.alu_bits import BIT_RULES
from minitriton.runtime.emulator.formats import Bits, bits_dtype, value_dtype, width

Operation = Callable[..., Bits]


def with_out(function: Callable[..., Any], dtype: np.dtype[Any]) -> Operation:
    """Give a function of bits an `out=` argument and a result of exactly `dtype`."""

    def run(*operands: Bits, out: Bits | None = None) -> Bits:
        result = np.asarray(function(*operands))
        if out is not None:
            out[...] = result
            return out
        return result.astype(dtype, copy=False)

    return run


def ufunc(function: np.ufunc, view: np.dtype[Any], store: np.dtype[Any]) -> Operation:
    """One ufunc on operands seen as `view`, written straight into `out` (may alias)."""
    if view == store:

        def run(*operands: Bits, out: Bits | None = None) -> Bits:
            return function(*operands, out=out)
    else:

        def run(*operands: Bits, out: Bits | None = None) -> Bits:
            viewed = [operand.view(view) for operand in operands]
            if out is None:
                return function(*viewed).view(store)
            function(*viewed, out=out.view(view))
            return out

    return run


def _wrapping(function: np.ufunc) -> Callable[[str, frozenset[str]], Operation]:
    def rule(ptx_type: str, mods: frozenset[str]) -> Operation:
        dtype = bits_dtype(ptx_type)
        if "sat" in mods:
            return _saturating(function, ptx_type)
        if ptx_type.endswith("x2"):
            return with_out(paired(function), dtype)
        return ufunc(function, dtype, dtype)

    return rule


def paired(function: Callable[..., Any], half: str = "u2") -> Callable[..., Bits]:
    """Lift a function of 16-bit lanes to packed 32-bit words (both halves, one call)."""

    def run(*operands: Bits) -> Bits:
        shape = np.broadcast_shapes(*(np.shape(operand) for operand in operands))
        full = [np.ascontiguousarray(np.broadcast_to(o, shape or (1,))) for o in operands]
        result = np.asarray(function(*(operand.view(half) for operand in full)))
        return result.view(np.uint32).reshape(shape)

    return run


def _saturating(function: np.ufunc, ptx_type: str) -> Operation:
    signed = value_dtype(ptx_type)
    limits = np.iinfo(signed)

    def run(a: Bits, b: Bits) -> Bits:
        exact = function(a.view(signed).astype(np.int64), b.view(signed).astype(np.int64))
        return np.asarray(np.clip(exact, limits.min, limits.max).astype(signed)).view(
            bits_dtype(ptx_type)
        )

    return with_out(run, bits_dtype(ptx_type))


def _multiply_high_u64(a: Bits, b: Bits) -> Bits:
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + ((a_low * b_low) >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


def _multiply_high_s64(a: Bits, b: Bits) -> Bits:
    high = _multiply_high_u64(a, b)
    high = high - np.where(a >> np.uint64(63), b, np.uint64(0))
    return high - np.where(b >> np.uint64(63), a, np.uint64(0))


def _product(ptx_type: str, part: str) -> Callable[[Bits, Bits], Bits]:
    """The lo, hi or wide part of a product, as a plain function of two operands."""
    dtype, viewed, bits = bits_dtype(ptx_type), value_dtype(ptx_type), width(ptx_type)
    if part == "lo":
        return np.multiply
    if bits == 64:
        wide = _multiply_high_s64 if viewed.kind == "i" else _multiply_high_u64
        return lambda a, b: wide(np.atleast_1d(a), np.atleast_1d(b)).reshape(
            np.broadcast_shapes(np.shape(a), np.shape(b))
        )
    double = np.dtype(f"{viewed.kind}{bits // 4}")
    double_bits = np.dtype(f"u{bits // 4}")

    def full(a: Bits, b: Bits) -> Bits:
        product = np.multiply(a.view(viewed).astype(double), b.view(viewed).astype(double))
        return product.view(double_bits)

    if part == "wide":
        return full
    amount = double_bits.type(bits)
    return lambda a, b: (full(a, b) >> amount).astype(dtype)


def _part(mods: frozenset[str]) -> str:
    return next((part for part in ("wide", "hi") if part in mods), "lo")


def _mul(ptx_type: str, mods: frozenset[str]) -> Operation:
    part, dtype = _part(mods), bits_dtype(ptx_type)
    if part == "lo":
        return ufunc(np.multiply, dtype, dtype)
    result = np.dtype(f"u{width(ptx_type) // 4}") if part == "wide" else dtype
    return with_out(_product(ptx_type, part), result)


def _mad(ptx_type: str, mods: frozenset[str]) -> Operation:
    part, dtype = _part(mods), bits_dtype(ptx_type)
    product = _product(ptx_type, part)
    if "sat" in mods:
        signed = np.dtype(np.int32)

        def saturated(a: Bits, b: Bits, c: Bits) -> Bits:
            high = np.asarray(product(a, b)).view(signed).astype(np.int64)
            exact = high + c.view(signed).astype(np.int64)
            return np.clip(exact, -(1 << 31), (1 << 31) - 1).astype(signed).view(dtype)

        return with_out(saturated, dtype)

    def run(a: Bits, b: Bits, c: Bits, out: Bits | None = None) -> Bits:
        return np.add(product(a, b), c, out=out)

    return run


def _division(ptx_type: str, remainder: bool) -> Operation:
    dtype, viewed = bits_dtype(ptx_type), value_dtype(ptx_type)
    one = dtype.type(1)
    ones = dtype.type((1 << width(ptx_type)) - 1)

    def unsigned(a: Bits, b: Bits) -> Bits:
        zero = b == 0
        quotient = np.where(zero, ones, np.floor_divide(a, np.where(zero, one, b)))
        return np.where(zero, a, a - quotient * b) if remainder else quotient

    def signed(a: Bits, b: Bits) -> Bits:
        a_negative, b_negative = a.view(viewed) < 0, b.view(viewed) < 0
        magnitude = unsigned(
            np.where(a_negative, np.negative(a), a), np.where(b_negative, np.negative(b), b)
        )
        flip = a_negative if remainder else (a_negative ^ b_negative) & (b != 0)
        return np.where(flip, np.negative(magnitude), magnitude)

    return with_out(signed if viewed.kind == "i" else unsigned, dtype)


def _extremum(function: np.ufunc) -> Callable[[str, frozenset[str]], Operation]:
    def rule(ptx_type: str, mods: frozenset[str]) -> Operation:
        dtype = bits_dtype(ptx_type)
        if ptx_type.endswith("x2"):
            function_of = paired(function, "i2" if ptx_type[0] == "s" else "u2")
            run: Callable[..., Bits] = function_of
            if "relu" in mods:
                run = lambda *o: paired(np.maximum, "i2")(function_of(*o), np.uint32(0))  # noqa: E731
            return with_out(run, dtype)
        if "relu" in mods:
            signed = value_dtype(ptx_type)
            return with_out(
                lambda a, b: np.asarray(
                    np.maximum(function(a.view(signed), b.view(signed)), signed.type(0))
                ).view(dtype),
                dtype,
            )
        return ufunc(function, value_dtype(ptx_type), dtype)

    return rule


def _unary(function: np.ufunc) -> Callable[[str, frozenset[str]], Operation]:
    return lambda ptx_type, mods: ufunc(function, value_dtype(ptx_type), bits_dtype(ptx_type))


def _bitwise(function: np.ufunc) -> Callable[[str, frozenset[str]], Operation]:
    return lambda ptx_type, mods: ufunc(function, bits_dtype(ptx_type), bits_dtype(ptx_type))


def _cnot(ptx_type: str, mods: frozenset[str]) -> Operation:
    dtype = bits_dtype(ptx_type)
    return with_out(lambda a: np.equal(a, 0), dtype)


def _shift_left(ptx_type: str, mods: frozenset[str]) -> Operation:
    dtype, bits = bits_dtype(ptx_type), width(ptx_type)
    if bits == 32:  # numpy defines shifts by the width or more as zero, exactly as PTX clamps
        return ufunc(np.left_shift, dtype, dtype)

    def run(a: Bits, amount: Bits, out: Bits | None = None) -> Bits:
        clamped = np.minimum(amount, np.uint32(bits)).astype(dtype)
        return np.left_shift(a, clamped, out=out)

    return run


def _shift_right(ptx_type: str, mods: frozenset[str]) -> Operation:
    dtype, viewed, bits = bits_dtype(ptx_type), value_dtype(ptx_type), width(ptx_type)
    if viewed.kind == "u" and bits == 32:
        return ufunc(np.right_shift, dtype, dtype)
    # An arithmetic shift by the width or more fills with the sign, as a shift by width - 1 does.
    limit = np.uint32(bits - 1 if viewed.kind == "i" else bits)

    def run(a: Bits, amount: Bits, out: Bits | None = None) -> Bits:
        clamped = np.minimum(amount, limit).astype(viewed)
        if out is None:
            return np.right_shift(a.view(viewed), clamped).view(dtype)
        np.right_shift(a.view(viewed), clamped, out=out.view(viewed))
        return out

    return run


def _sad(ptx_type: str, mods: frozenset[str]) -> Operation:
    dtype, viewed = bits_dtype(ptx_type), value_dtype(ptx_type)

    def run(a: Bits, b: Bits, c: Bits) -> Bits:
        less = np.less(a.view(viewed), b.view(viewed))
        return np.add(c, np.where(less, np.subtract(b, a), np.subtract(a, b)))

    return with_out(run, dtype)


def _select(ptx_type: str, mods: frozenset[str]) -> Operation:
    """selp: operands a, b and a predicate."""

    def run(a: Bits, b: Bits, chosen: Bits, out: Bits | None = None) -> Bits:
        return _store(np.where(chosen, a, b), out)

    return run


def _store(value: Bits, out: Bits | None) -> Bits:
    if out is None:
        return value
    out[...] = value
    return out


def _dot_product(ptx_type: str, mods: frozenset[str]) -> Operation:
    """dp4a: ptx_type is 'atype.btype' or one type for both; c and the sum are 32-bit."""
    a_type, _, b_type = ptx_type.partition(".")
    a_view = np.int8 if a_type[0] == "s" else np.uint8
    b_view = np.int8 if (b_type or a_type)[0] == "s" else np.uint8

    def run(a: Bits, b: Bits, c: Bits) -> Bits:
        total = np.asarray(c)
        for byte in range(4):
            amount = np.uint32(8 * byte)
            left = np.right_shift(a, amount).astype(a_view).astype(np.int32)
            right = np.right_shift(b, amount).astype(b_view).astype(np.int32)
            total = np.add(total, np.multiply(left, right).view(np.uint32))
        return total

    return with_out(run, np.dtype(np.uint32))


INTEGER_RULES: dict[str, Callable[[str, frozenset[str]], Operation]] = {
    "add": _wrapping(np.add),
    "sub": _wrapping(np.subtract),
    "mul": _mul,
    "mad": _mad,
    "div": lambda t, m: _division(t, remainder=False),
    "rem": lambda t, m: _division(t, remainder=True),
    "min": _extremum(np.minimum),
    "max": _extremum(np.maximum),
    "neg": _unary(np.negative),
    "abs": _unary(np.absolute),
    "and": _bitwise(np.bitwise_and),
    "or": _bitwise(np.bitwise_or),
    "xor": _bitwise(np.bitwise_xor),
    "not": _bitwise(np.invert),
    "cnot": _cnot,
    "shl": _shift_left,
    "shr": _shift_right,
    "sad": _sad,
    "selp": _select,
    "dp4a": _dot_product,
    **{
        name: (lambda t, m, rule=rule: with_out(*rule(t, m)))  # type: ignore[misc]  # a default binds
        for name, rule in BIT_RULES.items()
    },
}
