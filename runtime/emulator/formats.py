"""Binary floating-point formats and exact rounding between them, on arrays of raw bits.

Everything that narrows a value goes through `narrow`, which takes a float64 carrying either the
exact value or its round-to-odd image: a float64 rounded to odd keeps enough information for one
correct rounding to any format of 51 or fewer significant bits, so no result is rounded twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[Any]

F64: Final = np.dtype(np.float64)
F32: Final = np.dtype(np.float32)
U64: Final = np.dtype(np.uint64)
U32: Final = np.dtype(np.uint32)

_WIDTHS: Final = {
    "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "tf32": 32, "f16x2": 32, "bf16x2": 32,
    "u16x2": 32, "s16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64,
    "e4m3x2": 16, "e5m2x2": 16,
}  # fmt: skip


def width(ptx_type: str) -> int:
    """Bits of a value of a PTX type; KeyError for an unknown type."""
    return _WIDTHS[ptx_type]


def bits_dtype(ptx_type: str) -> np.dtype[Any]:
    """The unsigned dtype that holds raw bits of a PTX type (bool for pred)."""
    return np.dtype(bool) if ptx_type == "pred" else np.dtype(f"u{width(ptx_type) // 8}")


def value_dtype(ptx_type: str) -> np.dtype[Any]:
    """The dtype whose numpy arithmetic matches an integer, f32 or f64 PTX type."""
    if ptx_type == "pred":
        return np.dtype(bool)
    return np.dtype(f"{ {'s': 'i', 'f': 'f'}.get(ptx_type[0], 'u') }{width(ptx_type) // 8}")


@dataclass(frozen=True, slots=True)
class Format:
    """A format: stored `dtype`, explicit mantissa bits, least normal exponent, special bits.

    `shift` places the pattern in the stored word (tf32 lives in the upper 19 bits of 32).
    `overflow` is the pattern of a value too large; `largest` the greatest finite pattern.
    """

    name: str
    dtype: np.dtype[Any]
    mantissa: int
    least_exponent: int
    sign: int
    overflow: int
    largest: int
    nan: int
    shift: int = 0


_U8, _U16 = np.dtype(np.uint8), np.dtype(np.uint16)
FORMATS: Final = {
    f.name: f
    for f in (
        Format("f16", _U16, 10, -14, 0x8000, 0x7C00, 0x7BFF, 0x7FFF),
        Format("bf16", _U16, 7, -126, 0x8000, 0x7F80, 0x7F7F, 0x7FFF),
        Format("f32", U32, 23, -126, 0x80000000, 0x7F800000, 0x7F7FFFFF, 0x7FFFFFFF),
        Format("tf32", U32, 10, -126, 0x80000000, 0x3FC00, 0x3FBFF, 0x7FFFFFFF, 13),
        Format("e5m2", _U8, 2, -14, 0x80, 0x7C, 0x7B, 0x7F),
        Format("e4m3", _U8, 3, -6, 0x80, 0x7F, 0x7E, 0x7F),
    )
}

NAN32: Final = np.uint32(0x7FFFFFFF)
NAN16: Final = np.uint16(0x7FFF)
_MANTISSA64: Final = np.uint64((1 << 52) - 1)
_HIDDEN64: Final = np.uint64(1 << 52)
_SIGN64: Final = np.uint64(1 << 63)
_ONE64: Final = np.uint64(1)


def quiet() -> np.errstate:
    """The context in which every callable of this package runs: no floating-point warnings.

    The emulator enters it once per launch; entering it per instruction would cost as much as
    the instruction.
    """
    return np.errstate(all="ignore")


def narrow(
    value: NDArray[np.float64], fmt: Format, mode: str = "rn", satfinite: bool = False
) -> Bits:
    """Round float64 values (exact, or rounded to odd) once to a format; NaN becomes `fmt.nan`.

    mode: rn (ties to even), rna (ties away), rz, rm, rp. satfinite replaces overflow and
    infinity by the largest finite value.
    """
    value = np.asarray(value)
    word = value.view(U64)
    negative = (word >> np.uint64(63)).astype(bool)
    magnitude = word & ~_SIGN64
    biased = (magnitude >> np.uint64(52)).astype(np.int64)
    significand = (magnitude & _MANTISSA64) | np.where(biased > 0, _HIDDEN64, np.uint64(0))
    exponent = np.maximum(biased, 1) - 1023
    # A subnormal result drops more bits; 54 dropped bits already leave nothing but sticky.
    dropped = 52 - fmt.mantissa + np.maximum(fmt.least_exponent - exponent, 0)
    dropped = np.minimum(dropped, 54).astype(np.uint64)
    kept = significand >> dropped
    rest = significand - (kept << dropped)
    half = _ONE64 << (dropped - _ONE64)
    if mode == "rn":
        up = (rest > half) | ((rest == half) & (kept & _ONE64).astype(bool))
    elif mode == "rna":
        up = rest >= half
    elif mode == "rz":
        up = np.zeros(np.shape(value), bool)
    else:
        up = (rest > 0) & (negative if mode == "rm" else ~negative)
    scale = np.maximum(exponent - fmt.least_exponent, 0).astype(np.uint64)
    pattern = kept + up + (scale << np.uint64(fmt.mantissa))
    too_large = pattern > np.uint64(fmt.largest)
    pattern = np.where(too_large, np.uint64(fmt.overflow), pattern)
    if satfinite:
        pattern = np.where(too_large, np.uint64(fmt.largest), pattern)
    elif mode not in ("rn", "rna"):
        # Directed rounding never carries a finite value past infinity from the wrong side.
        toward = {"rz": np.bool_(True), "rm": ~negative, "rp": negative}[mode]
        finite = np.isfinite(value) & toward
        pattern = np.where(too_large & finite, np.uint64(fmt.largest), pattern)
    out = (pattern << np.uint64(fmt.shift)).astype(fmt.dtype)
    out = np.where(negative, out | fmt.dtype.type(fmt.sign), out)
    return np.where(np.isnan(value), fmt.dtype.type(fmt.nan), out)


def add_to_odd(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """a + b (both float64 or both float32) rounded to odd: an inexact sum gets an odd last bit."""
    total = np.asarray(a + b)
    back = total - a
    error = (a - (total - back)) + (b - back)
    unsigned = U64 if total.dtype == F64 else U32
    one = unsigned.type(1)
    word = total.view(unsigned)
    # NaN and infinite sums give a NaN error; they must stay as they are.
    fix = (error != 0) & (error == error) & ((word & one) == 0)
    if np.count_nonzero(fix):
        step = np.where((error > 0) == (total > 0), one, np.invert(unsigned.type(0)))
        word = np.where(fix, word + step, word)
    return np.asarray(word).view(total.dtype)


def odd_to_f32(value: NDArray[np.float64]) -> NDArray[np.float32]:
    """Float64 (exact or rounded to odd) to float32 rounded to odd; overflow becomes infinity.

    Correct as input of a further rounding to f16 or bf16 only.
    """
    rounded = np.asarray(value.astype(F32))
    error = value - rounded
    word = rounded.view(U32)
    fix = (error != 0) & np.isfinite(error) & ((word & np.uint32(1)) == 0)
    if np.count_nonzero(fix):
        # A value rounded to zero has no sign to compare with: step away from zero.
        grow = ((error > 0) == (value > 0)) | (rounded == 0)
        word = np.where(fix, np.where(grow, word + np.uint32(1), word - np.uint32(1)), word)
    return np.asarray(word).view(F32)


def bf16_from_f32(value: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 to bf16 bits, to nearest even, NaN canonical."""
    value = np.asarray(value)
    word = value.view(U32)
    rounded = (word + (np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(
        16
    )
    out = np.asarray(rounded.astype(np.uint16))
    unordered = value != value
    if np.count_nonzero(unordered):
        np.putmask(out, unordered, NAN16)
    return out


def f16_from_f32(value: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 to f16 bits, to nearest even, NaN canonical."""
    value = np.asarray(value)
    out = np.asarray(value.astype(np.float16)).view(np.uint16)
    unordered = value != value
    if np.count_nonzero(unordered):
        np.putmask(out, unordered, NAN16)
    return out


def widen(bits: Bits, ptx_type: str) -> NDArray[np.float64]:
    """Raw bits of f16, bf16, f32, tf32 or f64 to the float64 of the same value."""
    if ptx_type in ("f16", "bf16"):
        return to_f32(bits, ptx_type).astype(F64)
    if ptx_type == "f64":
        return np.asarray(bits).view(F64)
    return np.asarray(bits).view(F32).astype(F64)


def to_f32(bits: Bits, ptx_type: str) -> NDArray[np.float32]:
    """Raw bits of f16 or bf16 to float32 values."""
    if ptx_type == "f16":
        return np.asarray(bits).view(np.float16).astype(F32)
    return np.asarray(np.asarray(bits).astype(U32) << np.uint32(16)).view(F32)


def canonical_f32(value: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Float32 values to bits with every NaN replaced by 0x7fffffff, in place where possible."""
    value = np.asarray(value)
    out = value.view(U32)
    unordered = value != value
    if np.count_nonzero(unordered):
        np.putmask(out, unordered, NAN32)
    return out


def flush_f32(bits: Bits) -> NDArray[np.uint32]:
    """Subnormal f32 to zero of the same sign (.ftz)."""
    bits = np.asarray(bits)
    tiny = (bits & np.uint32(0x7F800000)) == 0
    if not np.count_nonzero(tiny):
        return bits
    return np.where(tiny, bits & np.uint32(0x80000000), bits)
