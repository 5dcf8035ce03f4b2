"""Plain arithmetic on tiles, executed by the emulator and compared with numpy."""

import re

import ml_dtypes
import numpy as np
import pytest

from tests.codegen.elementwise_kernel import apply
from tests.codegen.tile_kernel import ALL_TARGETS, check_assembles

SIZE = 256
INTS = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}
FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


def integers(element, rng):
    info = np.iinfo(INTS[element])
    values = rng.integers(info.min, info.max, SIZE, dtype=INTS[element], endpoint=True)
    values[:2] = info.min, info.max
    return values


def unsigned(values):
    return values.view(values.dtype.str.replace("i", "u"))


BINARY = {
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "andi": np.bitwise_and,
    "ori": np.bitwise_or, "xori": np.bitwise_xor, "maxsi": np.maximum, "minsi": np.minimum,
}  # fmt: skip


@pytest.mark.parametrize("element", INTS)
@pytest.mark.parametrize("name", BINARY)
def test_integers(name, element):
    rng = np.random.default_rng(1)
    a, b = integers(element, rng), integers(element, rng)
    out, _ = apply(f"arith.{name}", element, [(element, a), (element, b)])
    np.testing.assert_array_equal(out.view(a.dtype), BINARY[name](a, b))


@pytest.mark.parametrize("element", INTS)
def test_unsigned_and_division(element):
    rng = np.random.default_rng(2)
    a, b = integers(element, rng), integers(element, rng)
    b[b == 0] = 3
    b[b == -1] = 5  # the smallest number divided by -1 overflows
    operands = [(element, a), (element, b)]
    quotient = apply("arith.divsi", element, operands)[0].view(a.dtype)
    expected = (
        np.sign(a).astype(object) * np.sign(b) * (abs(a.astype(object)) // abs(b.astype(object)))
    )
    np.testing.assert_array_equal(quotient, expected.astype(a.dtype))
    rest = apply("arith.remsi", element, operands)[0].view(a.dtype)
    np.testing.assert_array_equal(rest, np.fmod(a, b))
    ua, ub = unsigned(a), unsigned(b)
    for name, reference in (
        ("divui", np.floor_divide), ("remui", np.mod), ("maxui", np.maximum), ("minui", np.minimum)
    ):  # fmt: skip
        got = apply(f"arith.{name}", element, operands)[0].view(ua.dtype)
        np.testing.assert_array_equal(got, reference(ua, ub))


def test_division_by_zero_compiles_and_runs():
    zeros, ones = np.zeros(SIZE, np.int32), np.ones(SIZE, np.int32)
    for name in ("divsi", "divui", "remsi", "remui"):
        apply(f"arith.{name}", "i32", [("i32", ones), ("i32", zeros)])


@pytest.mark.parametrize("element", INTS)
def test_shifts_past_the_width(element):
    rng = np.random.default_rng(3)
    a = integers(element, rng)
    width = 8 * a.itemsize
    amount = rng.integers(0, 2 * width, SIZE).astype(a.dtype)
    amount[:3] = 0, width, -1
    operands = [(element, a), (element, amount)]
    counts = [min(int(c), width) for c in unsigned(amount)]
    modulus = 1 << width
    left = [(int(x) << c) % modulus for x, c in zip(unsigned(a), counts, strict=True)]
    logical = [int(x) >> c for x, c in zip(unsigned(a), counts, strict=True)]
    arithmetic = [int(x) >> c for x, c in zip(a, counts, strict=True)]
    for name, expected in (("shli", left), ("shrui", logical)):
        got = unsigned(apply(f"arith.{name}", element, operands)[0].view(a.dtype))
        assert got.tolist() == expected, name
    assert apply("arith.shrsi", element, operands)[0].view(a.dtype).tolist() == arithmetic


@pytest.mark.parametrize("element", ["i32", "i64"])
def test_upper_half_of_products_and_absolute_value(element):
    rng = np.random.default_rng(4)
    a, b = integers(element, rng), integers(element, rng)
    width = 8 * a.itemsize
    got = unsigned(apply("mt.mulhi", element, [(element, a), (element, b)])[0].view(a.dtype))
    assert got.tolist() == [
        (int(x) * int(y)) >> width for x, y in zip(unsigned(a), unsigned(b), strict=True)
    ]
    np.testing.assert_array_equal(
        apply("math.absi", element, [(element, a)])[0].view(a.dtype), np.abs(a)
    )


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("element", FLOATS)
def test_floats_round_once(element, target):
    rng = np.random.default_rng(5)
    dtype = FLOATS[element]
    a, b = (rng.normal(size=SIZE).astype(dtype) for _ in range(2))
    operands = [(element, a), (element, b)]
    wide = np.float64 if element == "f64" else np.float32
    for name, function in (
        ("addf", np.add), ("subf", np.subtract), ("mulf", np.multiply),
        ("maxnumf", np.fmax), ("minnumf", np.fmin),
    ):  # fmt: skip
        got, ptx = apply(f"arith.{name}", element, operands, {}, target)
        expected = function(a.astype(wide), b.astype(wide)).astype(dtype)
        np.testing.assert_array_equal(got.view(dtype), expected)
        check_assembles(ptx, target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("element", FLOATS)
def test_maximum_with_nan(element, target):
    dtype = FLOATS[element]
    a = np.array([1, np.nan, 2, np.nan] * 16, dtype)
    b = np.array([np.nan, 3, 1, np.nan] * 16, dtype)
    operands = [(element, a), (element, b)]
    for name, expected in (
        ("maximumf", [np.nan, np.nan, 2, np.nan]), ("minimumf", [np.nan, np.nan, 1, np.nan]),
        ("maxnumf", [1, 3, 2, np.nan]), ("minnumf", [1, 3, 1, np.nan]),
    ):  # fmt: skip
        got = apply(f"arith.{name}", element, operands, {}, target)[0].view(dtype)
        np.testing.assert_array_equal(got[:4].astype(float), expected)


def test_float_unary():
    rng = np.random.default_rng(6)
    for element, dtype in (("f32", np.float32), ("f64", np.float64), ("f16", np.float16)):
        a = (rng.normal(size=SIZE) * 10).astype(dtype)
        for name, function in (
            ("math.absf", np.abs), ("math.floor", np.floor), ("math.ceil", np.ceil),
            ("arith.negf", np.negative),
        ):  # fmt: skip
            got = apply(name, element, [(element, a)])[0].view(dtype)
            np.testing.assert_array_equal(got, function(a))


def test_comparisons_and_select():
    rng = np.random.default_rng(7)
    a = rng.integers(-5, 5, SIZE, dtype=np.int32)
    b = rng.integers(-5, 5, SIZE, dtype=np.int32)
    predicates = [np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal]
    for index, function in enumerate(predicates):
        got = apply("arith.cmpi", "i1", [("i32", a), ("i32", b)], {"predicate": f"{index} : i64"})[
            0
        ]
        np.testing.assert_array_equal(got, function(a, b))
    x = a.astype(np.float32)
    x[::7] = np.nan
    got = apply("arith.cmpf", "i1", [("f32", x), ("f32", x)], {"predicate": "1 : i64"})[0]
    np.testing.assert_array_equal(got, ~np.isnan(x))


@pytest.mark.parametrize("arch", ALL_TARGETS)
def test_bfloat_arithmetic_assembles(arch):
    values = np.ones(SIZE, ml_dtypes.bfloat16)
    for name in ("addf", "mulf", "maximumf"):
        _, ptx = apply(f"arith.{name}", "bf16", [("bf16", values), ("bf16", values)], {}, arch)
        check_assembles(ptx, arch)


def test_fma_is_exact():
    rng = np.random.default_rng(8)
    a, b, c = (rng.normal(size=SIZE).astype(np.float32) for _ in range(3))
    got, ptx = apply("math.fma", "f32", [("f32", a), ("f32", b), ("f32", c)])
    exact = a.astype(np.float64) * b + c  # 48 bits of product: one more rounding at most
    np.testing.assert_allclose(got.view(np.float32), exact, rtol=1.2e-7)
    assert re.search(r"fma\.rn\.f32", ptx)
