"""Every float result equals the exact rational result rounded once (oracle: fractions)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from minitriton.runtime.emulator import fma64, numerics
from minitriton.runtime.emulator.formats import FORMATS, bits_dtype

# precision, least normal exponent, largest finite value
SHAPE = {
    "f16": (11, -14, Fraction(65504)),
    "bf16": (8, -126, Fraction(255) * 2**120),
    "f32": (24, -126, Fraction((1 << 24) - 1) * 2**104),
    "f64": (53, -1022, Fraction((1 << 53) - 1) * 2**971),
    "tf32": (11, -126, Fraction(2047) * 2**117),
}
INF = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF << 52, "tf32": 0x7F800000}
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32}


@pytest.fixture(autouse=True)
def _quiet():
    with numerics.quiet():
        yield


def rounded(value: Fraction, name: str, mode: str = "rn") -> int:
    """Bits of a nonzero rational rounded to a format (independent of the product's code)."""
    precision, least, largest = SHAPE[name]
    sign = 1 << (WIDTH[name] - 1) if value < 0 else 0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    steps = size / unit
    whole = math.floor(steps)
    rest = steps - whole
    if mode == "rn":
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    elif mode == "rna":
        up = rest >= Fraction(1, 2)
    else:
        up = rest > 0 and mode == ("rm" if sign else "rp")
    whole += up
    size = whole * unit
    nearest = mode in ("rn", "rna", "rm" if sign else "rp")
    if size > largest:
        top = INF[name] if nearest else INF[name] - (0x2000 if name == "tf32" else 1)
        return sign | top
    if size == 0:
        return sign
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    field = max(exponent, least) - least
    pattern = int(size / Fraction(2) ** (max(exponent, least) - precision + 1)) + (
        field << (precision - 1)
    )
    return sign | (pattern << 13 if name == "tf32" else pattern)


def number(bits: int, name: str) -> float:
    if name == "f64":
        return float(np.uint64(bits).view(np.float64))
    if name == "f16":
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits << 16 if name == "bf16" else bits).view(np.float32))


def patterns(rng: np.random.Generator, name: str, count: int) -> np.ndarray:
    """Raw bits rich in edges: uniform patterns, near-equal exponents, few mantissa bits."""
    dtype = bits_dtype(name)
    bits = rng.integers(0, 1 << WIDTH[name], count, dtype=np.uint64).astype(dtype)
    mantissa = SHAPE[name][0] - 1
    one = INF[name] >> 1 & ~((1 << mantissa) - 1)
    near = bits & dtype.type((1 << mantissa) - 1) | dtype.type(one)
    near += (rng.integers(-8, 8, count).astype(dtype)) << dtype.type(mantissa)
    near ^= bits & dtype.type(1 << (WIDTH[name] - 1))
    coarse = near >> dtype.type(mantissa - 2) << dtype.type(mantissa - 2)
    tiny = bits & dtype.type((1 << (1 + WIDTH[name])) // 2 - 1 - INF[name] // 2)
    edge = np.array([0, 1, 2, INF[name], INF[name] - 1, INF[name] + 1, 1 << (mantissa), one], dtype)
    edge = np.concatenate([edge, edge | dtype.type(1 << (WIDTH[name] - 1))])
    pools = np.stack([bits, near, near, coarse, tiny, rng.choice(edge, count)])
    return pools[rng.integers(0, len(pools), count), np.arange(count)]


def exact(op: str, values: list[float]) -> Fraction | None:
    """The rational result; None where the oracle has nothing to say (NaN, infinity, zero)."""
    if not all(map(math.isfinite, values)):
        return None
    x = [Fraction(value) for value in values]
    if op in ("div", "rcp"):
        numerator, denominator = x if op == "div" else (Fraction(1), x[0])
        return numerator / denominator if denominator and numerator else None
    result = {
        "add": lambda: x[0] + x[1],
        "sub": lambda: x[0] - x[1],
        "mul": lambda: x[0] * x[1],
        "fma": lambda: x[0] * x[1] + x[2],
    }[op]()
    return result or None


ARITHMETIC = [
    (op, name, mode)
    for name in ("f16", "bf16", "f32", "f64")
    for op in ("add", "sub", "mul", "fma", "div", "rcp")
    for mode in ("rn", "rz", "rm", "rp")
    if name in ("f32", "f64") or (mode == "rn" and op not in ("div", "rcp"))
]


@pytest.mark.parametrize(("op", "name", "mode"), ARITHMETIC)
def test_arithmetic_rounds_once(op: str, name: str, mode: str) -> None:
    rng = np.random.default_rng(len(op) * 7 + len(name))
    count = 1500
    arity = {"fma": 3, "rcp": 1}.get(op, 2)
    operands = [patterns(rng, name, count) for _ in range(arity)]
    got = numerics.arith(op, name, frozenset({mode}))(*operands)
    checked = 0
    for lane in range(count):
        values = [number(int(operand[lane]), name) for operand in operands]
        result = exact(op, values)
        if result is None:
            continue
        checked += 1
        want = rounded(result, name, mode)
        assert int(got[lane]) == want, (op, name, mode, values, hex(int(got[lane])), hex(want))
    assert checked > count // 3


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "f64"])
def test_fma_at_ties_and_cancellation(name: str) -> None:
    """Addends chosen within a few units of minus the product, or half a unit around it."""
    rng = np.random.default_rng(5)
    count = 1500
    a, b = (patterns(rng, name, count) for _ in range(2))
    product = numerics.arith("mul", name, frozenset({"rn"}))(a, b)
    shift = rng.integers(0, SHAPE[name][0] + 3, count).astype(product.dtype)
    mantissa = product.dtype.type(SHAPE[name][0] - 1)
    c = product + rng.integers(-3, 4, count).astype(product.dtype) - (shift << mantissa)
    c ^= rng.integers(0, 2, count).astype(product.dtype) << product.dtype.type(WIDTH[name] - 1)
    got = numerics.arith("fma", name, frozenset({"rn"}))(a, b, c)
    for lane in range(count):
        values = [number(int(operand[lane]), name) for operand in (a, b, c)]
        result = exact("fma", values)
        if result is not None:
            assert int(got[lane]) == rounded(result, name), (values, hex(int(got[lane])))


def test_known_double_rounding_of_f32_fma() -> None:
    """1 + 2^-23 + (2^-24 - 2^-70) lies just below a tie; the float64 sum lands on it."""
    a = np.array([1 + 2.0**-23], np.float32)
    b = np.array([2.0**-24 * (1 - 2.0**-23)], np.float32)
    naive = (a.astype(float) * b + a).astype(np.float32).view(np.uint32)
    assert int(naive[0]) == 0x3F800002
    words = [operand.view(np.uint32) for operand in (a, b, a)]
    assert int(numerics.arith("fma", "f32", frozenset({"rn"}))(*words)[0]) == 0x3F800001


def test_f64_fma_extreme_exponents() -> None:
    rng = np.random.default_rng(11)
    a, b, c = (rng.integers(0, 1 << 64, 1500, dtype=np.uint64) for _ in range(3))
    exponent = np.uint64(0x7FF)
    wanted = (a >> np.uint64(52) & exponent) + (b >> np.uint64(52) & exponent) - np.uint64(1023)
    field = (wanted + rng.integers(-60, 60, 1500).astype(np.uint64)) & exponent
    c = c & ~(exponent << np.uint64(52)) | field << np.uint64(52)
    got = fma64.fma(a.view(float), b.view(float), c.view(float)).view(np.uint64)
    for lane in range(1500):
        values = [number(int(o[lane]), "f64") for o in (a, b, c)]
        result = exact("fma", values)
        if result is not None:
            assert int(got[lane]) == rounded(result, "f64"), values


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["f32", "f64"])
def test_square_root(name: str, mode: str) -> None:
    rng = np.random.default_rng(3)
    bits = patterns(rng, name, 600) & bits_dtype(name).type((1 << (WIDTH[name] - 1)) - 1)
    got = numerics.arith("sqrt", name, frozenset({mode}))(bits)
    for lane in range(600):
        value = number(int(bits[lane]), name)
        if not math.isfinite(value) or value == 0:
            continue
        scaled = Fraction(value) * Fraction(4) ** 1200
        root = math.isqrt(math.floor(scaled))
        # The root is within one unit 2^-1200 above `root`; a sticky half-unit keeps it inexact.
        inexact = root * root != scaled
        near = (Fraction(root) + (Fraction(1, 2) if inexact else 0)) / Fraction(2) ** 1200
        assert int(got[lane]) == rounded(near, name, mode), value


@pytest.mark.parametrize("dst", ["f16", "bf16", "f32", "tf32"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp", "rna"])
def test_narrowing_conversions(dst: str, mode: str) -> None:
    if (mode in ("rm", "rp") and dst == "tf32") or (mode == "rna" and dst != "tf32"):
        pytest.skip("not a PTX form")
    rng = np.random.default_rng(17)
    sources = ["f32"] if dst == "tf32" else [s for s in ("f32", "f64") if s != dst]
    for src in sources:
        bits = patterns(rng, src, 1500)
        # Half of the sample lies at or next to a tie of the destination.
        drop = SHAPE[src][0] - SHAPE[dst][0]
        dtype = bits.dtype.type
        tie = (bits >> dtype(drop) << dtype(drop)) + dtype(1 << (drop - 1))
        tie += rng.integers(-1, 2, 1500).astype(bits.dtype)
        bits = np.where(rng.random(1500) < 0.5, tie, bits)
        if src == "f64":  # move most values into the destination's range, subnormals included
            value = np.ldexp(np.frexp(bits.view(float))[0], rng.integers(-160, 130, 1500))
            if dst == "f16":
                value = np.ldexp(np.frexp(bits.view(float))[0], rng.integers(-28, 18, 1500))
            bits = value.view(np.uint64)
        got = numerics.convert(dst, src, mode)(bits)
        for lane in range(1500):
            value = number(int(bits[lane]), src)
            if math.isfinite(value) and value != 0:
                want = rounded(Fraction(value), dst, mode)
                assert int(got[lane]) == want, (value, hex(int(got[lane])), hex(want))


@pytest.mark.parametrize("dst", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("src", ["s8", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integers_to_floats(dst: str, src: str, mode: str) -> None:
    rng = np.random.default_rng(23)
    bits = int(src[1:])
    dtype = np.dtype(f"{'i' if src[0] == 's' else 'u'}{bits // 8}")
    value = rng.integers(0, 1 << bits, 400, dtype=np.uint64)
    value >>= rng.integers(0, bits, 400).astype(np.uint64)
    # Ties: a short significand, then one bit at some distance, then maybe a far sticky bit.
    top = rng.integers(12, bits, 400).astype(np.uint64) if bits > 12 else np.uint64(bits - 1)
    value |= np.uint64(1) << top
    sparse = (np.uint64(1) << top) | (np.uint64(1) << top >> np.uint64(SHAPE[dst][0] % bits))
    sparse |= rng.integers(0, 2, 400).astype(np.uint64)
    value = np.where(rng.random(400) < 0.4, sparse, value)
    limits = np.iinfo(dtype)
    value[:4] = [0, limits.max, 1, (1 << bits) - 1]
    raw = value.astype(f"u{bits // 8}")
    got = numerics.convert(dst, src, mode)(raw)
    for lane, integer in enumerate(raw.view(dtype).tolist()):
        want = rounded(Fraction(integer), dst, mode) if integer else 0
        assert int(got[lane]) == want, (integer, hex(int(got[lane])), hex(want))


def test_formats_agree_with_this_oracle() -> None:
    for name in ("f16", "bf16", "f32"):
        largest = FORMATS[name].largest
        assert Fraction(number(largest, name)) == SHAPE[name][2]
