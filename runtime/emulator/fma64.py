"""Exactly rounded float64 fused multiply-add and directed-rounding float64 arithmetic.

The vectorised path splits the product and both sums into error-free parts (Dekker, Knuth) and
rounds once with a round-to-odd step (Boldo and Melquiond). Lanes whose exponents could overflow
or underflow inside that path, and all directed roundings, take exact integers lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from minitriton.runtime.emulator.formats import U64, Bits, add_to_odd

Doubles: TypeAlias = NDArray[np.float64]
_SPLITTER = np.float64((1 << 27) + 1)
_NAN = 0xFFF8 << 48
_INF = 0x7FF0 << 48
_SIGN = 1 << 63


def _split(a: Doubles) -> tuple[Doubles, Doubles]:
    scaled = a * _SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def _two_product(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    product = a * b
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return product, error


def _two_sum(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _moderate(value: Doubles, product: bool = False) -> NDArray[np.bool_]:
    """Lanes whose error terms neither overflow nor underflow (|x| about 2^-450 to 2^450)."""
    exponent = (value.view(U64) >> np.uint64(52)) & np.uint64(0x7FF)
    span = np.uint64(900 if product else 450)
    return (exponent - np.uint64(1023) + span) <= span + span


def fma(a: Doubles, b: Doubles, c: Doubles) -> Doubles:
    """a * b + c rounded once to nearest even, for float64 arrays that broadcast."""
    a, b, c = (np.ascontiguousarray(x) for x in np.broadcast_arrays(a, b, c))
    product, product_error = _two_product(a, b)
    low_high, low_low = _two_sum(c, product_error)
    high, rest = _two_sum(product, low_high)
    result = high + add_to_odd(rest, low_low)
    plain = product + c
    safe = _moderate(a) & _moderate(b) & _moderate(c)
    # A zero or non-finite operand needs no error terms, except that 0 * b + c is just c.
    special = ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c) | (a == 0) | (b == 0)
    result = np.where(special, plain, result)
    hard = ~(safe | special)
    if np.count_nonzero(hard):
        lanes = zip(
            a[hard].view(U64).tolist(), b[hard].view(U64).tolist(), c[hard].view(U64).tolist(),
            strict=True,
        )  # fmt: skip
        result = np.array(result)
        result.view(U64)[hard] = [_fma_exact(x, y, z, "rn") for x, y, z in lanes]
    return result


def _decode(bits: int) -> tuple[int, int]:
    """A finite float64 as (signed integer, exponent): value = integer * 2**exponent."""
    biased = bits >> 52 & 0x7FF
    significand = bits & ((1 << 52) - 1)
    if biased:
        significand |= 1 << 52
    return (-significand if bits >> 63 else significand), max(biased, 1) - 1075


def encode(value: int, exponent: int, mode: str, sticky: bool = False) -> int:
    """Round value * 2**exponent (plus a nonzero tail below when sticky) to float64 bits."""
    sign = _SIGN if value < 0 else 0
    magnitude = abs(value) << 2 | sticky
    exponent -= 2
    shift = max(magnitude.bit_length() - 53, -1074 - exponent)
    if shift <= 0:
        kept, rest, half = magnitude << -shift, 0, 1
    else:
        kept = magnitude >> shift
        rest, half = magnitude - (kept << shift), 1 << (shift - 1)
    if mode == "rn":
        kept += rest > half or (rest == half and kept & 1)
    elif mode != "rz":
        kept += bool(rest) and (mode == "rm") == bool(sign)
    pattern = kept if kept < 1 << 52 else kept + ((exponent + shift + 1074) << 52)
    if pattern >= _INF:
        away = mode == "rn" or (mode != "rz" and (mode == "rm") == bool(sign))
        pattern = _INF if away else _INF - 1
    return sign | pattern


def _zero(mode: str, a_sign: int, b_sign: int) -> int:
    """Sign of an exact zero sum: common sign, else plus (minus when rounding down)."""
    if a_sign == b_sign:
        return a_sign
    return _SIGN if mode == "rm" else 0


def _special(value: float) -> int:
    """Bits of a result that needs no rounding (NaN or infinity)."""
    return _NAN if value != value else int(np.float64(value).view(U64))


def _fma_exact(a: int, b: int, c: int, mode: str) -> int:
    x, y, z = (float(np.uint64(bits).view(np.float64)) for bits in (a, b, c))
    if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)):
        with np.errstate(all="ignore"):
            product = np.float64(x) * np.float64(y)
            if np.isfinite(x) and np.isfinite(y):  # an overflow of the exact product is no infinity
                product = np.float64(0)
            return _special(float(product + np.float64(z)))
    (x_int, x_exp), (y_int, y_exp), (z_int, z_exp) = _decode(a), _decode(b), _decode(c)
    exponent = min(x_exp + y_exp, z_exp)
    total = (x_int * y_int << x_exp + y_exp - exponent) + (z_int << z_exp - exponent)
    if total == 0:
        return _zero(mode, (a ^ b) & _SIGN, c & _SIGN)
    return encode(total, exponent, mode)


def _divide_exact(a: int, b: int, mode: str) -> int:
    x, y = (float(np.uint64(bits).view(np.float64)) for bits in (a, b))
    if not (np.isfinite(x) and np.isfinite(y)) or x == 0 or y == 0:
        with np.errstate(all="ignore"):
            return _special(float(np.float64(x) / np.float64(y)))
    (x_int, x_exp), (y_int, y_exp) = _decode(a), _decode(b)
    quotient, rest = divmod(abs(x_int) << 120, abs(y_int))
    signed = -quotient if (x_int < 0) != (y_int < 0) else quotient
    return encode(signed, x_exp - y_exp - 120, mode, rest != 0)


def _sqrt_exact(a: int, mode: str) -> int:
    x = float(np.uint64(a).view(np.float64))
    if not np.isfinite(x) or x <= 0:
        with np.errstate(all="ignore"):
            return _special(float(np.sqrt(x)))
    value, exponent = _decode(a)
    value <<= 120 + (exponent & 1)
    root = isqrt(value)
    return encode(root, (exponent - (exponent & 1) - 120) // 2, mode, root * root != value)


_ONE = 0x3FF0 << 48
_EXACT: dict[str, Callable[..., int]] = {
    "add": lambda mode, a, b: _fma_exact(a, _ONE, b, mode),
    "sub": lambda mode, a, b: _fma_exact(a, _ONE, b ^ _SIGN, mode),
    "mul": lambda mode, a, b: _fma_exact(a, b, (a ^ b) & _SIGN, mode),
    "fma": lambda mode, a, b, c: _fma_exact(a, b, c, mode),
    "div": lambda mode, a, b: _divide_exact(a, b, mode),
    "rcp": lambda mode, a: _divide_exact(_ONE, a, mode),
    "sqrt": lambda mode, a: _sqrt_exact(a, mode),
}


def directed(op: str, mode: str) -> Callable[..., Bits]:
    """add, sub, mul, fma, div, rcp or sqrt of f64 bits rounded by mode (rz, rm, rp, rn)."""
    scalar = _EXACT[op]

    def run(*operands: Bits) -> Bits:
        arrays = np.broadcast_arrays(*operands)
        lanes = zip(*(array.ravel().tolist() for array in arrays), strict=True)
        values = [scalar(mode, *lane) for lane in lanes]
        return np.array(values, np.uint64).reshape(arrays[0].shape)

    return run
