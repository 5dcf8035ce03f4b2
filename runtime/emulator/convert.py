"""cvt between all integer, floating-point and packed types, on arrays of raw bits.

Each form rounds exactly once. Float-to-integer clamps to the destination; NaN becomes 0, or the
top bit alone when the source is f64 or the destination has 64 bits, as the PTX ISA says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitriton.runtime.emulator import minifloat
from minitriton.runtime.emulator.alu_float import flush, is_nan, rectify, saturate
from minitriton.runtime.emulator.formats import (
    F32,
    F64,
    FORMATS,
    U32,
    U64,
    Bits,
    bf16_from_f32,
    bits_dtype,
    f16_from_f32,
    narrow,
    to_f32,
    value_dtype,
    widen,
    width,
)

Converter = Callable[..., Bits]
_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGERS = frozenset(f"{kind}{bits}" for kind in "usb" for bits in (8, 16, 32, 64))
_ROUND_INTEGER: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip
_NAN64 = np.uint64(0x7FF8 << 48)


def conversion(
    dst: str, src: str, rounding: str | None, sat: bool, ftz: bool, relu: bool, satfinite: bool
) -> Converter:
    """Resolve one cvt; KeyError names the part that is unknown."""
    mode = rounding or "rn"
    if mode not in ("rn", "rz", "rm", "rp", "rna", *_ROUND_INTEGER):
        raise KeyError(mode)
    if dst in _INTEGERS and src in _INTEGERS:
        return _integer_to_integer(dst, src, sat)
    if dst in _INTEGERS and src in _FLOATS:
        return _float_to_integer(dst, src, mode, ftz)
    if dst in _FLOATS and src in _INTEGERS:
        return _finish(_integer_to_float(dst, src, mode), dst, sat, False, False)
    if dst in _FLOATS and src in _FLOATS:
        body = _float_to_float(dst, src, mode, ftz, satfinite)
        return _finish(body, dst, sat, ftz, relu)
    if dst == "tf32" and src == "f32":
        return _to_tf32(mode, relu, satfinite)
    if dst in ("f16x2", "bf16x2") and src == "f32":
        return _pack(conversion(dst[:-2], "f32", mode, sat, ftz, relu, satfinite))
    if dst in ("e4m3x2", "e5m2x2") and src in ("f32", "f16x2", "bf16x2"):
        return _to_fp8(dst[:-2], src, relu)
    if dst in ("f16x2", "bf16x2") and src in ("e4m3x2", "e5m2x2"):
        return _from_fp8(dst[:-2], src[:-2], relu)
    raise KeyError(src if dst in (*_INTEGERS, *_FLOATS) else dst)


def _truncated(bits: Bits, dtype: np.dtype[Any]) -> Bits:
    """The low bits of a register as `dtype`."""
    return bits if bits.dtype == dtype else bits.astype(dtype)


def _integer_to_integer(dst: str, src: str, sat: bool) -> Converter:
    source, source_value = bits_dtype(src), value_dtype(src)
    target, target_value = bits_dtype(dst), value_dtype(dst)
    if not sat:
        return lambda a: np.asarray(_truncated(a, source)).view(source_value).astype(target)
    low, high = np.iinfo(source_value), np.iinfo(target_value)
    minimum = source_value.type(max(low.min, high.min))
    maximum = source_value.type(min(low.max, high.max))

    def run(a: Bits) -> Bits:
        value = np.asarray(_truncated(a, source)).view(source_value)
        return np.clip(value, minimum, maximum).astype(target_value).view(target)

    return run


def _float_to_integer(dst: str, src: str, mode: str, ftz: bool) -> Converter:
    function = _ROUND_INTEGER[mode + "i" if len(mode) == 2 else mode]
    target, viewed, bits = bits_dtype(dst), value_dtype(dst), width(dst)
    limits = np.iinfo(viewed)
    wide_nan = src == "f64" or bits == 64
    nan = target.type(1 << (bits - 1) if wide_nan else 0)
    # 2^63 and 2^64 are the first values out of range; the limits themselves are not float64s.
    beyond, below = np.float64(limits.max + 1), np.float64(limits.min)

    def run(a: Bits) -> Bits:
        if ftz and src == "f32":
            a = flush(a, "f32")
        value = np.asarray(function(widen(a, src)))
        inside = (value >= below) & (value < beyond)
        result = np.where(inside, value, 0).astype(viewed if bits == 64 else np.int64)
        result = result.astype(viewed)
        result = np.where(value >= beyond, viewed.type(limits.max), result)
        result = np.where(value < below, viewed.type(limits.min), result)
        return np.where(value != value, nan, np.asarray(result).view(target))

    return run


def _integer_to_float(dst: str, src: str, mode: str) -> Converter:
    source, viewed = bits_dtype(src), value_dtype(src)
    if mode == "rn" and dst in ("f32", "f64"):
        target = np.dtype(f"f{width(dst) // 8}")
        result = bits_dtype(dst)
        return lambda a: np.asarray(_truncated(a, source)).view(viewed).astype(target).view(result)

    def run(a: Bits) -> Bits:
        value = np.atleast_1d(_truncated(a, source)).view(viewed)
        if width(src) < 64:
            exact = value.astype(F64)
        elif dst == "f64":
            return _wide_to_f64(value, mode).reshape(np.shape(a))
        else:
            exact = _sticky(value)
        if dst == "f64":
            return exact.view(U64).reshape(np.shape(a))
        return narrow(exact, FORMATS[dst], mode).reshape(np.shape(a))

    return run


def _magnitude(value: Bits) -> tuple[Bits, Bits]:
    word = value.view(U64)
    negative = value < 0
    return negative, np.where(negative, np.negative(word), word)


def _sticky(value: Bits) -> Bits:
    """64-bit integers to float64 with all bits below the top 53 merged into the last one."""
    negative, word = _magnitude(value)
    low = np.uint64(0x7FF)
    merged = (word & ~low) | np.where(word & low, np.uint64(0x800), np.uint64(0))
    exact = np.where(word >> np.uint64(53), merged, word).astype(F64)
    return np.where(negative, -exact, exact)


def _wide_to_f64(value: Bits, mode: str) -> Bits:
    """64-bit integers to float64 bits with directed rounding: keep 53 bits, maybe add one."""
    negative, word = _magnitude(value)
    drop = np.zeros(word.shape, np.uint64)
    for step in range(11):
        drop += (word >> np.uint64(53 + step)) != 0
    kept = word >> drop
    up = (kept << drop) != word
    if mode == "rz":
        up = np.zeros_like(up)
    else:
        up &= negative if mode == "rm" else ~negative
    exact = np.ldexp((kept + up).astype(F64), drop.astype(np.int64))
    return np.asarray(np.where(negative, -exact, exact)).view(U64)


def _float_to_float(dst: str, src: str, mode: str, ftz: bool, satfinite: bool) -> Converter:
    """Width changes, and rounding to an integral value within or across formats."""
    flush_in = ftz and src == "f32"
    if mode in _ROUND_INTEGER:
        integral = _ROUND_INTEGER[mode]
        exact: Callable[[Bits], Any] = lambda a: np.asarray(integral(widen(a, src)))  # noqa: E731
    elif dst == src:
        return lambda a: _quieted(flush(a, src) if flush_in else a, src)
    else:
        exact = lambda a: widen(a, src)  # noqa: E731
        fast = _fast_path(dst, src) if mode == "rn" and not satfinite else None
        if fast is not None:
            return (lambda a: fast(flush(a, "f32"))) if flush_in else fast

    def run(a: Bits) -> Bits:
        value = exact(flush(a, "f32") if flush_in else a)
        if dst == "f64":
            word = value.view(U64)
            return np.where(value != value, _NAN64, word)
        return narrow(value, FORMATS[dst], "rn" if mode in _ROUND_INTEGER else mode, satfinite)

    return run


def _quieted(bits: Bits, ptx_type: str) -> Bits:
    if ptx_type == "f64":
        return np.where(is_nan(bits, "f64"), bits | np.uint64(1 << 51), bits)
    nan = bits_dtype(ptx_type).type(FORMATS[ptx_type].nan)
    return np.where(is_nan(bits, ptx_type), nan, bits)


def _fast_path(dst: str, src: str) -> Converter | None:
    if src == "f32" and dst == "f16":
        return lambda a: f16_from_f32(np.asarray(a).view(F32))
    if src == "f32" and dst == "bf16":
        return lambda a: bf16_from_f32(np.asarray(a).view(F32))
    if dst == "f32" and src in ("f16", "bf16"):
        return lambda a: _quieted(to_f32(a, src).view(U32), "f32")
    if dst == "f32" and src == "f64":
        return lambda a: _quieted(np.asarray(np.asarray(a).view(F64).astype(F32)).view(U32), "f32")
    return None


def _finish(body: Converter, dst: str, sat: bool, ftz: bool, relu: bool) -> Converter:
    """Output modifiers: .ftz concerns f32 results only."""
    flush_out = ftz and dst == "f32"
    if not (sat or flush_out or relu):
        return body

    def run(a: Bits) -> Bits:
        result = body(a)
        if flush_out:
            result = flush(result, dst)
        if relu:
            result = rectify(result, dst)
        return saturate(result, dst) if sat else result

    return run


def _to_tf32(mode: str, relu: bool, satfinite: bool) -> Converter:
    fmt = FORMATS["tf32"]

    def run(a: Bits) -> Bits:
        result = narrow(widen(a, "f32"), fmt, mode, satfinite)
        return rectify(result, "f32") if relu else result

    return run


def _pack(single: Converter) -> Converter:
    amount = np.uint32(16)

    def run(upper: Bits, lower: Bits) -> Bits:
        high, low = np.asarray(single(upper)), np.asarray(single(lower))
        return np.left_shift(high.astype(U32), amount) | low.astype(U32)

    return run


def _to_fp8(name: str, src: str, relu: bool) -> Converter:
    def encode(value: Any) -> Bits:
        pattern = minifloat.encode(value, name).astype(np.uint16)
        if relu:
            keep = ((pattern & np.uint16(0x80)) == 0) | (value != value)
            pattern = np.where(keep, pattern, np.uint16(0))
        return pattern

    def join(upper: Any, lower: Any) -> Bits:
        return np.left_shift(encode(upper), np.uint16(8)) | encode(lower)

    if src == "f32":
        return lambda upper, lower: join(widen(upper, "f32"), widen(lower, "f32"))
    half, low = src[:-2], np.uint32(0xFFFF)

    def run(packed: Bits) -> Bits:
        upper = np.right_shift(packed, np.uint32(16)).astype(np.uint16)
        lower = np.bitwise_and(packed, low).astype(np.uint16)
        return join(widen(upper, half), widen(lower, half))

    return run


def _from_fp8(half: str, name: str, relu: bool) -> Converter:
    fmt = FORMATS[half]
    values = minifloat.table(name).astype(F64)
    patterns = narrow(values, fmt)
    if relu:
        patterns = rectify(patterns, half)
    patterns = patterns.astype(U32)

    def run(packed: Bits) -> Bits:
        packed = np.asarray(packed)
        upper = patterns[(packed >> np.uint16(8)) & np.uint16(0xFF)]
        return np.left_shift(upper, np.uint32(16)) | patterns[packed & np.uint16(0xFF)]

    return run
