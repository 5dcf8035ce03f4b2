"""Accuracy of the expanded math functions, executed by the emulator, in units in the last place."""

import mpmath
import numpy as np
import pytest

from tests.codegen.elementwise_kernel import apply
from tests.codegen.tile_kernel import ALL_TARGETS, check_assembles

SIZE = 1024
REFERENCE = {
    "exp": mpmath.exp, "exp2": lambda x: mpmath.power(2, x), "log": mpmath.log,
    "log2": lambda x: mpmath.log(x, 2), "sin": mpmath.sin, "cos": mpmath.cos,
    "tanh": mpmath.tanh, "erf": mpmath.erf, "sqrt": mpmath.sqrt,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
}  # fmt: skip
NUMPY = {"f32": np.float32, "f64": np.float64}
POSITIVE = ("log", "log2", "sqrt", "rsqrt")


def ulps(got, name, inputs, element):
    """Largest error in units of the last place of the exact result."""
    dtype = NUMPY[element]
    mantissa, lowest = (23, -149) if element == "f32" else (52, -1074)
    worst = 0
    with mpmath.workprec(200):
        for x, y in zip(inputs, got, strict=True):
            exact = REFERENCE[name](mpmath.mpf(float(x)))
            rounded = dtype(float(exact))
            if rounded == 0 or np.isinf(rounded):
                assert y == rounded or abs(exact) < 2.0**-120, (x, y, exact)
                continue
            unit = mpmath.ldexp(
                1, max(int(mpmath.floor(mpmath.log(abs(exact), 2))) - mantissa, lowest)
            )
            worst = max(worst, abs(mpmath.mpf(float(y)) - exact) / unit)
    return float(worst)


def evaluate(name, inputs, element, target="sm_80"):
    out, ptx = apply(f"math.{name}", element, [(element, inputs)], target=target)
    return out.view(NUMPY[element]), ptx


def sample(name, element, rng):
    dtype = NUMPY[element]
    if name in POSITIVE:
        top = 126 if element == "f32" else 1020
        wide = np.exp2(rng.uniform(-top, top, SIZE // 2))
        return np.concatenate([wide, 1 + rng.normal(size=SIZE // 2) * 0.1]).astype(dtype)
    if name in ("sin", "cos"):
        near = rng.uniform(-10, 10, SIZE // 2)
        return np.concatenate([near, rng.uniform(-9e4, 9e4, SIZE // 2)]).astype(dtype)
    if name in ("exp", "exp2"):
        return rng.uniform(-60, 60, SIZE).astype(dtype)
    small = np.exp2(rng.uniform(-20, 1, SIZE // 2)) * rng.choice([-1, 1], SIZE // 2)
    return np.concatenate([small, rng.uniform(-7, 7, SIZE // 2)]).astype(dtype)


BOUNDS = {
    ("exp", "f32"): 92, ("exp2", "f32"): 2, ("log", "f32"): 1.5, ("log2", "f32"): 2,
    ("tanh", "f32"): 2.5, ("erf", "f32"): 2.5, ("sqrt", "f32"): 1.1, ("rsqrt", "f32"): 2,
    ("exp", "f64"): 1.5, ("exp2", "f64"): 1.5, ("log", "f64"): 1.5, ("log2", "f64"): 2,
    ("tanh", "f64"): 2, ("erf", "f64"): 2, ("sqrt", "f64"): 0.51, ("rsqrt", "f64"): 1.5,
}  # fmt: skip


@pytest.mark.parametrize(("name", "element"), BOUNDS)
def test_error_in_ulp(name, element):
    rng = np.random.default_rng(hash(name) % 1000)
    inputs = sample(name, element, rng)
    got, _ = evaluate(name, inputs, element)
    assert ulps(got, name, inputs, element) <= BOUNDS[name, element]
    if name == "exp":  # the error grows with the argument, 2 + 1.5 |x|
        near = np.abs(inputs) < 2
        assert ulps(got[near], name, inputs[near], element) <= 5


@pytest.mark.parametrize("element", ["f32", "f64"])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles(name, element):
    rng = np.random.default_rng(5)
    inputs = sample(name, element, rng)
    got, _ = evaluate(name, inputs, element)
    exact = np.array([float(REFERENCE[name](mpmath.mpf(float(x)))) for x in inputs])
    unit = 2.0**-24 if element == "f32" else 2.0**-53
    assert np.abs(got - exact).max() <= 2.5 * unit
    near = slice(0, SIZE // 2)
    assert ulps(got[near], name, inputs[near], element) <= 2


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_large_angles_in_single_precision(name):
    rng = np.random.default_rng(6)
    inputs = np.exp2(rng.uniform(15, 49, SIZE)).astype(np.float32)
    inputs[:4] = [np.inf, -np.inf, np.nan, 1e5]
    got, _ = evaluate(name, inputs, "f32")
    assert np.isnan(got[:3]).all()
    exact = np.array([float(REFERENCE[name](mpmath.mpf(float(x)))) for x in inputs[3:]])
    assert np.abs(got[3:] - exact).max() <= 2.0**-22
    beyond, _ = evaluate(name, np.full(SIZE, 3e38, np.float32), "f32")
    assert np.abs(beyond).max() <= 1


@pytest.mark.parametrize("element", ["f32", "f64"])
def test_special_values(element):
    dtype = NUMPY[element]
    tiny = np.finfo(dtype).smallest_subnormal
    inputs = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, tiny] * 8, dtype)
    with np.errstate(all="ignore"):
        for name, reference in (
            ("exp", np.exp), ("exp2", np.exp2), ("log", np.log), ("log2", np.log2),
            ("tanh", np.tanh), ("sqrt", np.sqrt), ("rsqrt", lambda x: 1 / np.sqrt(x)),
        ):  # fmt: skip
            got, _ = evaluate(name, inputs, element)
            expected = reference(inputs)
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-30, err_msg=name)
            signed = ~np.isnan(expected)
            assert (np.signbit(got) == np.signbit(expected))[signed].all(), name
        got, _ = evaluate("erf", inputs, element)
        np.testing.assert_allclose(
            got[:7], [0, -0.0, 1, -1, np.nan, 0.8427007929, -0.8427007929], rtol=1e-6
        )


def test_exp2_has_no_subnormal_results():
    inputs = np.repeat(np.array([-149, -127, -126.5, -140, -126, -125, 0, 127], np.float32), 8)
    got, ptx = evaluate("exp2", inputs, "f32")
    expected = np.exp2(inputs)
    assert (got[inputs < -126] == 0).all() and (expected[inputs < -126] > 0).all()
    np.testing.assert_allclose(got[32:], expected[32:], rtol=2e-7)
    assert "ex2.approx.ftz.f32" in ptx


def test_f64_exp_at_the_ends_of_the_range():
    inputs = np.linspace(-746, 711, 64)
    with np.errstate(all="ignore"):
        expected = np.exp(inputs)
    got, _ = evaluate("exp", inputs, "f64")
    np.testing.assert_allclose(got, expected, rtol=1e-15, atol=1e-323)


@pytest.mark.parametrize("element", ["f32", "f64"])
def test_division_and_remainder(element):
    dtype, rng = NUMPY[element], np.random.default_rng(3)
    a = (rng.normal(size=SIZE) * 1000).astype(dtype)
    b = rng.normal(size=SIZE).astype(dtype)
    b[:3], a[0], a[1] = [np.inf, 3, -3], 7, 9
    a[2] = -9
    a[3], b[3] = 5, 0
    operands = [(element, a), (element, b)]
    quotient = apply("arith.divf", element, operands)[0].view(dtype)
    with np.errstate(all="ignore"):
        tolerance = 2.5e-7 if element == "f32" else 0
        np.testing.assert_allclose(quotient, a / b, rtol=tolerance)
        remainder = apply("arith.remf", element, operands)[0].view(dtype)
        np.testing.assert_array_equal(remainder, np.fmod(a, b))
    exact = apply("mt.precise", element, operands, {"function": '"div"'})[0].view(dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(exact, a / b)


def test_divisions_use_the_fast_instruction_and_the_precise_one():
    ones = np.ones(64, np.float32)
    operands = [("f32", ones), ("f32", ones)]
    assert "div.full.f32" in apply("arith.divf", "f32", operands)[1]
    assert "div.rn.f32" in apply("mt.precise", "f32", operands, {"function": '"div"'})[1]
    assert "sqrt.rn.f32" in apply("mt.precise", "f32", operands[:1], {"function": '"sqrt"'})[1]
    assert "sqrt.approx.f32" in apply("math.sqrt", "f32", operands[:1])[1]


@pytest.mark.parametrize(
    ("arch", "element"), [(a, "f32") for a in ALL_TARGETS] + [("sm_90a", "f64")]
)
def test_every_function_assembles(arch, element):
    for name in REFERENCE:
        _, ptx = evaluate(name, np.ones(64, NUMPY[element]), element, arch)
        check_assembles(ptx, arch)
