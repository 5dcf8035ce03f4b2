"""Conversions between element types against ml_dtypes and numpy, executed by the emulator."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from minitriton.ir.context import use
from minitriton.ir.dialect import with_element
from minitriton.ir.layouts import blocked
from minitriton.ir.mlir import ir
from tests.codegen.elementwise_kernel import WARPS, apply
from tests.codegen.tile_kernel import ALL_TARGETS, TileKernel, check_assembles, run

FLOATS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn, "f8E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f8E4M3FN": 8, "f8E5M2": 8}
LARGEST = {"f8E4M3FN": 448.0, "f8E5M2": 57344.0}
INTS = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}
SIZE = 512


def floats(element, rng):
    """Values of all magnitudes, halfway cases of narrower formats, zeros, infinities, a NaN."""
    exponents = rng.uniform(-20, 17, SIZE)
    values = np.exp2(exponents) * rng.choice([-1, 1], SIZE)
    values[: SIZE // 4] = (rng.integers(1, 64, SIZE // 4) + 0.5) * np.exp2(
        rng.integers(-18, 4, SIZE // 4)
    )
    nudge = 1 + rng.choice([-1, 0, 1], SIZE // 4) * 2.0**-40  # double rounding shows here
    values[: SIZE // 4] *= nudge
    values[-6:] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30]
    with np.errstate(all="ignore"):
        return values.astype(FLOATS[element])


def expected_cast(values, target):
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        if target in LARGEST:
            wide = np.clip(wide, -LARGEST[target], LARGEST[target])
        return one_rounding(wide if target in LARGEST else values, target)


def one_rounding(values, target):
    """ml_dtypes rounds f64 through f32; this rounds once."""
    if target not in ("bf16", *LARGEST) or values.dtype != np.float64:
        return values.astype(FLOATS[target])
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32)
        inexact = np.isfinite(values) & (narrow.astype(np.float64) != values)
        away = np.abs(narrow.astype(np.float64)) > np.abs(values)
        bits = narrow.view(np.uint32)
        toward_zero = np.where(inexact & away, bits - 1, bits)
        odd = np.where(inexact, toward_zero | 1, toward_zero).astype(np.uint32)
        return odd.view(np.float32).astype(FLOATS[target])


def assert_same(got, expected):
    both_nan = np.isnan(got.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[got.itemsize]
    same = got.view(bits) == expected.view(bits)
    wrong = np.flatnonzero(~(same | both_nan))
    assert not len(wrong), [(got[i], expected[i]) for i in wrong[:5]]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("source", "result"), list(itertools.permutations(FLOATS, 2)))
def test_float_to_float(source, result, target):
    rng = np.random.default_rng(2)
    values = floats(source, rng)
    plain = WIDTH[source] != WIDTH[result] and 8 not in (WIDTH[source], WIDTH[result])
    if plain:
        name = "arith.extf" if WIDTH[result] > WIDTH[source] else "arith.truncf"
        attributes = {}
    else:
        name, attributes = "mt.fp_cast", {"rounding": '"rtne"'}
    out, _ = apply(name, result, [(source, values)], attributes, target)
    assert_same(out.view(FLOATS[result]), expected_cast(values, result))


@pytest.mark.parametrize(
    ("source", "result"),
    [("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f64", "f16"), ("f64", "bf16"),
     ("f32", "f8E4M3FN"), ("f32", "f8E5M2"), ("f64", "f8E5M2"), ("bf16", "f16")],
)  # fmt: skip
def test_toward_zero(source, result):
    values = floats(source, np.random.default_rng(4))
    out, _ = apply("mt.fp_cast", result, [(source, values)], {"rounding": '"rtz"'})
    got = out.view(FLOATS[result]).astype(np.float64)
    exact = values.astype(np.float64)
    finite = np.isfinite(exact)
    assert (np.abs(got) <= np.abs(exact))[finite].all()
    nearest = expected_cast(values, result)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[nearest.itemsize]
    away = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    closest = np.where(away, nearest.view(bits) - away.astype(bits), nearest.view(bits))
    mine = out.view(bits)
    assert (mine == closest)[finite].all()


@pytest.mark.parametrize("result", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("source", INTS)
def test_int_to_float(source, signed, result):
    rng = np.random.default_rng(7)
    dtype = INTS[source]
    bits = 8 * np.dtype(dtype).itemsize
    values = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), SIZE, dtype=dtype)
    values[: SIZE // 2] >>= rng.integers(0, bits - 1, SIZE // 2).astype(dtype)
    if bits == 64:  # just above the middle of two bf16 or f32 numbers
        values[:4] = [(0x101 << 40) + (1 << 39) + 1, (0x1000001 << 30) + (1 << 29) + 1, -1, 1]
    seen = values if signed else values.view(f"u{values.dtype.name}"[0] + f"{bits // 8}")
    out, _ = apply(f"arith.{'s' if signed else 'u'}itofp", result, [(source, values)])
    got = out.view(FLOATS[result])
    for value, number in zip(seen.tolist(), got.tolist(), strict=True):
        # no neighbour is closer
        near = np.array([number]).astype(FLOATS[result])
        code = near.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[near.itemsize])
        for step in (1, -1):
            other = (code + np.array(step).astype(code.dtype)).view(near.dtype)
            if np.isinf(near.astype(np.float64)[0]):
                assert abs(value) >= 65520
                continue
            if np.isfinite(other.astype(np.float64)[0]) and number != 0:
                other_error = abs(int(other.astype(np.float64)[0]) - value)
                assert abs(int(number) - value) <= other_error + 1, (value, number)


NARROW = {  # (mask, what is taken away)
    "four bits": (15, 8), "seven": (127, 0), "seven, signed": (127, 64), "eight": (255, 0),
    "far away": (127, -200), "ten": (1023, 512), "farther": (1023, -2000), "twenty": (2**20 - 1, 9),
}  # fmt: skip


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("result", ["f16", "bf16"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("source", ["i16", "i32", "i64"])
@pytest.mark.parametrize("case", NARROW)
def test_integers_known_to_be_small(source, signed, result, case, target):
    """All numbers of a range, or some of many, to nearest even; i16 wraps around."""
    mask, less = NARROW[case]
    with use():
        kernel = TileKernel([source, result], WARPS, target)
        build = kernel.builder
        given = kernel.load(0, blocked((SIZE,), (2,), (32,), (WARPS,), (0,)))
        low, taken = (build.constant(given.type, number) for number in (mask, less))
        small = build.op("arith.andi", given.type, (given, low))
        small = build.op("arith.subi", given.type, (small, taken))
        type_ = with_element(given.type, ir.Type.parse(result))
        kernel.store(1, build.op(f"arith.{'s' if signed else 'u'}itofp", type_, (small,)))
        ptx = kernel.ptx()
    dtype = INTS[source]
    values = np.arange(SIZE).astype(dtype)
    values[values > mask] = np.random.default_rng(1).integers(0, 2**15, (values > mask).sum())
    out = np.zeros(SIZE * 2, np.uint8)
    run(ptx, [values, out], WARPS)
    number = (values & dtype(mask & int(np.iinfo(dtype).max))) - dtype(less)
    number = number if signed else number.view(np.dtype(dtype).str.replace("i", "u"))
    with np.errstate(over="ignore"):
        expected = number.astype(np.float64).astype(FLOATS[result])
    np.testing.assert_array_equal(out.view(FLOATS[result]), expected)
    assert "f64" not in ptx or source == "i64"


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("result", [*INTS, "i1"])
def test_float_to_int(source, signed, result):
    rng = np.random.default_rng(8)
    low, high = (-100.0, 100.0) if signed else (0.0, 200.0)
    values = rng.uniform(low, high, SIZE).astype(FLOATS[source])
    out, _ = apply(f"arith.fpto{'s' if signed else 'u'}i", result, [(source, values)])
    if result == "i1":
        np.testing.assert_array_equal(out, values != 0)
        return
    dtype = INTS[result] if signed else np.dtype(INTS[result]).str.replace("i", "u")
    np.testing.assert_array_equal(out.view(dtype), values.astype(np.float64).astype(dtype))


def test_bitcast_of_every_width():
    rng = np.random.default_rng(1)
    for source, result in (("f32", "i32"), ("i64", "f64"), ("f16", "i16"), ("i16", "bf16")):
        size = WIDTH.get(source) or 8 * np.dtype(INTS[source]).itemsize
        values = rng.integers(0, 255, 64 * size // 8).astype(np.uint8)
        typed = values.view(FLOATS.get(source) or INTS[source])
        out, _ = apply("arith.bitcast", result, [(source, typed)])
        np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("arch", ALL_TARGETS)
def test_casts_assemble(arch):
    for source, result in (("f32", "f8E4M3FN"), ("f8E5M2", "bf16"), ("f64", "f8E5M2")):
        values = np.ones(64, FLOATS[source])
        _, ptx = apply("mt.fp_cast", result, [(source, values)], {"rounding": '"rtne"'}, arch)
        check_assembles(ptx, arch)


def test_narrowing_casts_are_packed():
    values = np.ones(256, np.float32)
    assert "cvt.rn.f16x2.f32" in apply("arith.truncf", "f16", [("f32", values)])[1]
    assert "cvt.rn.bf16x2.f32" in apply("arith.truncf", "bf16", [("f32", values)])[1]
