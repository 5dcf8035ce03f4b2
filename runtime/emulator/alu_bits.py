"""Bit-field, permutation and funnel-shift instructions on arrays of raw register bits.

Each rule maps (type, modifiers) to a function of operand bits and the dtype of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from minitriton.runtime.emulator.formats import Bits, bits_dtype, value_dtype, width

Rule = Callable[[str, frozenset[str]], tuple[Callable[..., Any], np.dtype[Any]]]
_U32 = np.dtype(np.uint32)


def _mask(length: Bits, dtype: np.dtype[Any]) -> Bits:
    """(1 << length) - 1 with length clamped to the word."""
    one = dtype.type(1)
    return np.subtract(np.left_shift(one, length.astype(dtype)), one)


def _field(position: Bits, length: Bits, dtype: np.dtype[Any]) -> tuple[Bits, Bits]:
    """Position and length of a bit field: their low 8 bits, as the word's dtype."""
    low = np.uint32(0xFF)
    return np.bitwise_and(position, low).astype(dtype), np.bitwise_and(length, low).astype(dtype)


def _extract(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    dtype, bits = bits_dtype(ptx_type), width(ptx_type)
    signed = value_dtype(ptx_type).kind == "i"
    one, top = dtype.type(1), dtype.type(bits - 1)

    def run(a: Bits, position: Bits, length: Bits) -> Bits:
        start, count = _field(position, length, dtype)
        mask = _mask(count, dtype)
        value = np.bitwise_and(np.right_shift(a, start), mask)
        if not signed:
            return value
        # The sign is the field's top bit, or the word's when the field runs past it.
        last = np.minimum(np.subtract(np.add(start, count), one), top)
        negative = np.bitwise_and(np.right_shift(a, last), one).astype(bool) & (count != 0)
        inside = np.where(start > top, dtype.type(0), np.subtract(np.add(last, one), start))
        return np.where(negative, value | np.invert(_mask(inside, dtype)), value)

    return run, dtype


def _insert(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    dtype = bits_dtype(ptx_type)

    def run(a: Bits, b: Bits, position: Bits, length: Bits) -> Bits:
        start, count = _field(position, length, dtype)
        mask = np.left_shift(_mask(count, dtype), start)
        return (np.left_shift(a, start) & mask) | (b & np.invert(mask))

    return run, dtype


def leading_zeros(a: Bits, bits: int) -> Bits:
    """Zeros above the highest set bit of each word of `bits` bits, as uint32."""
    if bits == 64:
        word = np.asarray(a).astype(np.uint64)
        high = leading_zeros(np.asarray(word >> np.uint64(32)), 32)
        low = leading_zeros(np.asarray(word & np.uint64(0xFFFFFFFF)), 32)
        return np.where(high == 32, low + np.uint32(32), high)
    # A float64 holds every 32-bit integer exactly, so its exponent is the index of the top bit.
    exponent = np.asarray(np.asarray(a).astype(np.float64)).view(np.uint64) >> np.uint64(52)
    return np.where(a == 0, np.uint32(32), np.uint32(32 + 1022) - exponent.astype(np.uint32))


def _count_leading(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    bits = width(ptx_type)
    return lambda a: leading_zeros(a, bits), _U32


def _find(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    bits = width(ptx_type)
    signed = value_dtype(ptx_type)
    missing = np.uint32(0xFFFFFFFF)

    def run(a: Bits) -> Bits:
        if signed.kind == "i":
            a = np.where(a.view(signed) < 0, np.invert(a), a)
        zeros = leading_zeros(a, bits)
        found = zeros if "shiftamt" in mods else np.subtract(np.uint32(bits - 1), zeros)
        return np.where(a == 0, missing, found)

    return run, _U32


def _population(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    return np.bitwise_count, _U32


def _reverse(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    dtype, bits = bits_dtype(ptx_type), width(ptx_type)
    full = (1 << bits) - 1
    steps = []
    step = 1
    while step < bits:
        steps.append((dtype.type(step), dtype.type(full // ((1 << step) + 1))))
        step *= 2

    def run(a: Bits) -> Bits:
        for amount, mask in steps:
            a = np.bitwise_and(np.right_shift(a, amount), mask) | np.left_shift(a & mask, amount)
        return a

    return run, dtype


_PERMUTE_MODES: dict[str, tuple[int, ...]] = {
    # Selector nibbles, byte 0 first, packed as hex with byte 3 leftmost; index = c & 3.
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def _permute(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    mode = next((name for name in _PERMUTE_MODES if name in mods), None)
    table = None if mode is None else np.array(_PERMUTE_MODES[mode], np.uint32)

    def run(a: Bits, b: Bits, selector: Bits) -> Bits:
        if table is not None:
            selector = table[np.bitwise_and(selector, np.uint32(3))]
        pool = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
        result = np.uint32(0)
        for byte in range(4):
            nibble = np.bitwise_and(np.right_shift(selector, np.uint32(4 * byte)), np.uint32(15))
            place = np.left_shift(np.bitwise_and(nibble, np.uint32(7)), np.uint32(3))
            value = np.right_shift(pool, place.astype(np.uint64)) & np.uint64(0xFF)
            if table is None:
                spread = np.where(value & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
                value = np.where(np.bitwise_and(nibble, np.uint32(8)), spread, value)
            result = result | np.left_shift(value.astype(np.uint32), np.uint32(8 * byte))
        return result

    return run, _U32


def _funnel(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    """shf: [b, a] is the 64-bit pool with b above a; .l keeps the upper word, .r the lower."""
    clamp, left = "clamp" in mods, "l" in mods

    def run(a: Bits, b: Bits, amount: Bits) -> Bits:
        pool = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
        count = (
            np.minimum(amount, np.uint32(32)) if clamp else np.bitwise_and(amount, np.uint32(31))
        ).astype(np.uint64)
        if left:
            return (np.left_shift(pool, count) >> np.uint64(32)).astype(np.uint32)
        return np.right_shift(pool, count).astype(np.uint32)

    return run, _U32


@cache
def _logic(table: int) -> Callable[[Bits, Bits, Bits], Bits]:
    """Three-input logic: bit (a << 2 | b << 1 | c) of `table` is the result."""

    def pair(b: Bits, c: Bits, four: int) -> Bits:
        terms = np.uint32(0)
        for index in range(4):
            if four >> index & 1:
                left = b if index & 2 else np.invert(b)
                right = c if index & 1 else np.invert(c)
                terms = terms | np.bitwise_and(left, right)
        return terms

    def run(a: Bits, b: Bits, c: Bits) -> Bits:
        return np.bitwise_and(a, pair(b, c, table >> 4)) | np.bitwise_and(
            np.invert(a), pair(b, c, table & 15)
        )

    return run


def _lop3(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    return lambda a, b, c, table: _logic(int(table) & 0xFF)(a, b, c), _U32


def _bit_mask(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    """bmsk: `length` ones from bit `position` up; clamp limits both to 32, wrap takes mod 32."""
    wrap = "wrap" in mods

    def run(position: Bits, length: Bits) -> Bits:
        if wrap:
            position = np.bitwise_and(position, np.uint32(31))
            length = np.bitwise_and(length, np.uint32(31))
        return np.left_shift(_mask(np.asarray(length), _U32), position)

    return run, _U32


def _sign_extend(ptx_type: str, mods: frozenset[str]) -> tuple[Callable[..., Any], np.dtype[Any]]:
    """szext: keep the low `length` bits, sign- or zero-extended by the type."""
    signed, wrap = ptx_type[0] == "s", "wrap" in mods

    def run(a: Bits, length: Bits) -> Bits:
        count = np.bitwise_and(length, np.uint32(31)) if wrap else np.minimum(length, np.uint32(32))
        mask = _mask(np.asarray(count), _U32)
        value = np.bitwise_and(a, mask)
        if not signed:
            return value
        top = np.left_shift(np.uint32(1), np.subtract(count, np.uint32(1)))
        negative = (np.bitwise_and(a, top) != 0) & (count != 0)
        return np.where(negative, value | np.invert(mask), value)

    return run, _U32


BIT_RULES: dict[str, Rule] = {
    "bfe": _extract,
    "bfi": _insert,
    "bfind": _find,
    "clz": _count_leading,
    "popc": _population,
    "brev": _reverse,
    "prmt": _permute,
    "shf": _funnel,
    "lop3": _lop3,
    "bmsk": _bit_mask,
    "szext": _sign_extend,
}
