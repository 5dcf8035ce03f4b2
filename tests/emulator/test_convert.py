"""cvt: exhaustive small formats against ml_dtypes, integers against Python, special values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from minitriton.runtime.emulator import minifloat, numerics
from minitriton.runtime.emulator.formats import bits_dtype, value_dtype

ORACLE = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "e4m3": 0x7F, "e5m2": 0x7F}


@pytest.fixture(autouse=True)
def _quiet():
    with numerics.quiet():
        yield


def canonical(value: np.ndarray, name: str) -> np.ndarray:
    bits = value.view(f"u{value.dtype.itemsize}")
    return np.where(np.isnan(value), bits.dtype.type(NAN[name]), bits)


@pytest.mark.parametrize("src", ["f16", "bf16"])
def test_every_half_to_every_float(src: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    value = bits.view(ORACLE[src])
    wide = value.astype(np.float32)
    assert np.array_equal(numerics.convert("f32", src)(bits), canonical(wide, "f32"))
    double = numerics.convert("f64", src)(bits).view(np.float64)
    assert np.array_equal(double, wide.astype(np.float64), equal_nan=True)
    assert np.array_equal(np.signbit(double), np.signbit(wide) & ~np.isnan(wide))
    other = "bf16" if src == "f16" else "f16"
    want = canonical(wide.astype(ORACLE[other]), other)
    assert np.array_equal(numerics.convert(other, src, "rn")(bits), want)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_fp8_pattern_decodes(name: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    want = bits.view(ORACLE[name]).astype(np.float32)
    assert np.array_equal(minifloat.decode(bits, name), want, equal_nan=True)
    packed = np.arange(1 << 16, dtype=np.uint16)
    got = numerics.convert("f16x2", f"{name}x2", "rn")(packed)
    halves = canonical(want.astype(np.float16), "f16").astype(np.uint32)
    assert np.array_equal(got, halves[packed >> 8] << 16 | halves[packed & 0xFF])


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_half_encodes_to_fp8(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    value = bits.view(np.float16)
    largest = float(ml_dtypes.finfo(ORACLE[name]).max)
    clamped = np.where(np.isnan(value), value, np.clip(value, -largest, largest))
    want = canonical(clamped.astype(np.float32).astype(ORACLE[name]), name).astype(np.uint16)
    packed = bits.astype(np.uint32) << 16 | np.roll(bits, 1)
    got = numerics.convert(f"{name}x2", "f16x2", "rn", satfinite=True)(packed)
    assert np.array_equal(got, want << 8 | np.roll(want, 1))
    single = value.astype(np.float32).view(np.uint32)
    got = numerics.convert(f"{name}x2", "f32", "rn", satfinite=True)(single, np.roll(single, 1))
    assert np.array_equal(got, want << 8 | np.roll(want, 1))
    relu = numerics.convert(f"{name}x2", "f32", "rn", satfinite=True, relu=True)(single, single)
    positive = np.where((value < 0) | (bits == 0x8000), 0, want)
    assert np.array_equal(relu, positive << 8 | positive)


@pytest.mark.parametrize("dst", ["f16", "bf16"])
def test_f32_to_half(dst: str) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    bits[:100_000] = rng.integers(0, 1 << 16, 100_000).astype(np.uint32) << 16
    bits[50_000:100_000] += 0x8000
    value = bits.view(np.float32)
    want = canonical(value.astype(ORACLE[dst]), dst)
    assert np.array_equal(numerics.convert(dst, "f32", "rn")(bits), want)
    lower = np.roll(bits, 7)
    packed = numerics.convert(f"{dst}x2", "f32", "rn")(bits, lower)
    wide = want.astype(np.uint32)
    assert np.array_equal(packed, wide << 16 | np.roll(wide, 7))
    relu = numerics.convert(dst, "f32", "rn", relu=True)(bits)
    assert np.array_equal(relu, np.where((bits >> 31 == 1) & (value == value), 0, want))
    sat = numerics.convert(dst, "f32", "rn", satfinite=True)(bits)
    assert not np.any((sat & 0x7FFF) == {"f16": 0x7C00, "bf16": 0x7F80}[dst])


INTEGERS = [f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("src", INTEGERS)
@pytest.mark.parametrize("dst", INTEGERS)
def test_integer_to_integer(dst: str, src: str) -> None:
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 1 << 64, 300, dtype=np.uint64) >> rng.integers(0, 64, 300).astype("u8")
    raw[:6] = [0, 1, 127, 128, (1 << 63), (1 << 64) - 1]
    raw = raw.astype(bits_dtype(src))
    values = raw.view(value_dtype(src)).tolist()
    mask = (1 << int(dst[1:])) - 1
    assert numerics.convert(dst, src)(raw).tolist() == [value & mask for value in values]
    limits = np.iinfo(value_dtype(dst))
    want = [min(max(value, limits.min), limits.max) & mask for value in values]
    assert numerics.convert(dst, src, sat=True)(raw).tolist() == want


def test_integer_source_register_is_truncated() -> None:
    raw = np.array([0x1FF80, 0x7F], np.uint32)
    assert numerics.convert("s32", "s8")(raw).tolist() == [0xFFFFFF80, 0x7F]
    assert numerics.convert("f32", "u8", "rn")(raw).view(np.float32).tolist() == [128.0, 127.0]


@pytest.mark.parametrize("src", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("dst", INTEGERS)
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer(dst: str, src: str, mode: str) -> None:
    rng = np.random.default_rng(3)
    value = np.ldexp(rng.uniform(-1, 1, 400), rng.integers(-3, 68, 400))
    value[:200] = np.round(value[:200] * 2) / 2
    special = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, np.inf, -np.inf, 2.0**31, -(2.0**31), 2.0**63]
    value[: len(special) + 2] = [*special, 2.0**64, np.nan]
    dtype = {**ORACLE, "f32": np.dtype("f4"), "f64": np.dtype("f8")}[src]
    raw = value.astype(dtype)
    limits, bits = np.iinfo(value_dtype(dst)), int(dst[1:])
    rounding = {"rni": round, "rzi": int, "rmi": lambda x: int(np.floor(x)), "rpi": None}
    rounding["rpi"] = lambda x: int(np.ceil(x))
    want = []
    for item in raw.astype(np.float64).tolist():
        if item != item:
            want.append(1 << (bits - 1) if src == "f64" or bits == 64 else 0)
        elif np.isinf(item):
            want.append((limits.max if item > 0 else limits.min) & ((1 << bits) - 1))
        else:
            whole = rounding[mode](item)
            want.append(min(max(whole, limits.min), limits.max) & ((1 << bits) - 1))
    assert numerics.convert(dst, src, mode)(raw.view(bits_dtype(src))).tolist() == want


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def test_modifiers() -> None:
    tiny = f32(1e-40, -1e-40, 1.0)
    assert numerics.convert("f32", "f32", ftz=True)(tiny).tolist() == [0, 1 << 31, 0x3F800000]
    assert numerics.convert("f16", "f32", "rp", ftz=True)(tiny).tolist() == [0, 0x8000, 0x3C00]
    assert numerics.convert("f16", "f32", "rp")(tiny).tolist() == [1, 0x8000, 0x3C00]
    double = np.array([1e-40, -1e-40], np.float64).view(np.uint64)
    assert numerics.convert("f32", "f64", "rn", ftz=True)(double).tolist() == [0, 1 << 31]
    clamp = numerics.convert("f32", "f32", sat=True)(f32(2, -3, 0.5, np.nan, -0.0))
    assert clamp.tolist() == f32(1, 0, 0.5, 0, 0).tolist()
    whole = numerics.convert("f32", "f32", "rni")(f32(2.5, -0.5, 3.7, 1e30))
    assert whole.tolist() == f32(2, -0.0, 4, 1e30).tolist()
    down = numerics.convert("f16", "f16", "rmi")(np.array([-0.5, 2.9], "f2").view("u2"))
    assert down.view("f2").tolist() == [-1.0, 2.0]


def test_tf32() -> None:
    raw = np.array([0x3F801000, 0x3F803000, 0x3F800FFF, 0x7F7FFFFF, 0x7FC00001, 0xFF800000], "u4")
    to_even = numerics.convert("tf32", "f32", "rn")(raw).tolist()
    assert to_even == [0x3F800000, 0x3F804000, 0x3F800000, 0x7F800000, 0x7FFFFFFF, 0xFF800000]
    away = numerics.convert("tf32", "f32", "rna")(raw).tolist()
    assert away == [0x3F802000, 0x3F804000, 0x3F800000, 0x7F800000, 0x7FFFFFFF, 0xFF800000]
    finite = numerics.convert("tf32", "f32", "rna", satfinite=True)(raw).tolist()
    assert finite[3:] == [0x7F7FE000, 0x7FFFFFFF, 0xFF7FE000]


def test_scalars_and_unknown_forms() -> None:
    assert int(numerics.convert("f16", "f32", "rn")(f32(1.0)[0])) == 0x3C00
    assert int(numerics.convert("s32", "f32", "rzi")(f32(-7.9)[0])) == (1 << 32) - 7
    assert int(numerics.convert("f16", "s64", "rn")(np.uint64(3))) == 0x4200
    with pytest.raises(numerics.UnsupportedOperation, match="cvt"):
        numerics.convert("f32", "f80")
    with pytest.raises(numerics.UnsupportedOperation, match="rq"):
        numerics.convert("f32", "f64", "rq")
