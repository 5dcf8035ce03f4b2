"""Integer, bit, comparison, atomic and special-value rules against Python's integers."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest

from minitriton.runtime.emulator import numerics
from minitriton.runtime.emulator.formats import bits_dtype, value_dtype

INTEGERS = ["u16", "s16", "u32", "s32", "u64", "s64"]


@pytest.fixture(autouse=True)
def _quiet():
    with numerics.quiet():
        yield


def sample(ptx_type: str, seed: int, count: int = 500) -> np.ndarray:
    """Raw words of mixed magnitude and both signs, with the edge values first."""
    bits = int(ptx_type[1:])
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 1 << 64, count, dtype=np.uint64) >> rng.integers(0, 64, count).astype(
        "u8"
    )
    raw = np.where(rng.random(count) < 0.5, raw, ~raw)
    edges = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 2]
    raw[: 6 * 6] = np.repeat(edges, 6) if seed % 2 else np.tile(edges, 6)
    return (raw & np.uint64((1 << bits) - 1)).astype(bits_dtype(ptx_type))


def ints(raw: np.ndarray, ptx_type: str) -> list[int]:
    return raw.view(value_dtype(ptx_type)).tolist()


def run(op: str, ptx_type: str, mods: str, *operands: np.ndarray) -> list[int]:
    function = numerics.arith(op, ptx_type, frozenset(mods.split()))
    got = function(*operands)
    # The same into `out`, and with an operand as `out`, must give the same bits.
    out = np.zeros_like(got)
    assert function(*operands, out=out) is out
    assert np.array_equal(out, got)
    for position, operand in enumerate(operands):
        if operand.dtype == got.dtype and operand.shape == got.shape:
            copies = list(operands)
            copies[position] = operand.copy()
            function(*copies, out=copies[position])
            assert np.array_equal(copies[position], got), (op, position)
    return got.tolist()


def truncated_division(a: int, b: int, bits: int) -> int:
    if b == 0:
        return (1 << bits) - 1
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def remainder(a: int, b: int, bits: int) -> int:
    return a if b == 0 else a - b * truncated_division(a, b, bits)


BINARY: dict[tuple[str, str], Callable[[int, int, int], int]] = {
    ("add", ""): lambda a, b, n: a + b,
    ("sub", ""): lambda a, b, n: a - b,
    ("mul", "lo"): lambda a, b, n: a * b,
    ("mul", "hi"): lambda a, b, n: a * b >> n,
    ("div", ""): truncated_division,
    ("rem", ""): remainder,
    ("min", ""): lambda a, b, n: min(a, b),
    ("max", ""): lambda a, b, n: max(a, b),
    ("and", ""): lambda a, b, n: a & b,
    ("or", ""): lambda a, b, n: a | b,
    ("xor", ""): lambda a, b, n: a ^ b,
}


@pytest.mark.parametrize("ptx_type", INTEGERS)
@pytest.mark.parametrize(("op", "mods"), BINARY)
def test_binary(op: str, mods: str, ptx_type: str) -> None:
    bits = int(ptx_type[1:])
    a, b = sample(ptx_type, 1), sample(ptx_type, 2)
    rule = BINARY[op, mods]
    pairs = zip(ints(a, ptx_type), ints(b, ptx_type), strict=True)
    want = [rule(x, y, bits) & ((1 << bits) - 1) for x, y in pairs]
    assert run(op, ptx_type, mods, a, b) == want


@pytest.mark.parametrize("ptx_type", INTEGERS)
def test_multiply_add(ptx_type: str) -> None:
    bits = int(ptx_type[1:])
    a, b, c = (sample(ptx_type, seed) for seed in (1, 2, 3))
    triples = list(zip(*(ints(x, ptx_type) for x in (a, b, c)), strict=True))
    mask = (1 << bits) - 1
    assert run("mad", ptx_type, "lo", a, b, c) == [(x * y + z) & mask for x, y, z in triples]
    want = [((x * y >> bits) + z) & mask for x, y, z in triples]
    assert run("mad", ptx_type, "hi", a, b, c) == want
    want = [(abs(x - y) + z) & mask for x, y, z in triples]
    assert run("sad", ptx_type, "", a, b, c) == want
    if bits < 64:
        wide_mask = (1 << 2 * bits) - 1
        want = [x * y & wide_mask for x, y, _ in triples]
        assert run("mul", ptx_type, "wide", a, b) == want
        d = sample(f"{ptx_type[0]}{2 * bits}", 5)
        want = [(x * y + z) & wide_mask for (x, y, _), z in zip(triples, d.tolist(), strict=True)]
        assert run("mad", ptx_type, "wide", a, b, d) == want


def test_saturating() -> None:
    a, b, c = (sample("s32", seed) for seed in (1, 2, 3))

    def clamp(value: int) -> int:
        return min(max(value, -(1 << 31)), (1 << 31) - 1) & 0xFFFFFFFF

    triples = list(zip(*(ints(x, "s32") for x in (a, b, c)), strict=True))
    assert run("add", "s32", "sat", a, b) == [clamp(x + y) for x, y, _ in triples]
    assert run("sub", "s32", "sat", a, b) == [clamp(x - y) for x, y, _ in triples]
    want = [clamp((x * y >> 32) + z) for x, y, z in triples]
    assert run("mad", "s32", "hi sat", a, b, c) == want


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_clamp(bits: int) -> None:
    amount = np.array([0, 1, bits - 1, bits, bits + 1, 255, 1 << 16, (1 << 32) - 1], np.uint32)
    amount = np.resize(amount, 500)
    mask = (1 << bits) - 1
    for ptx_type in (f"b{bits}", f"u{bits}", f"s{bits}"):
        a = sample(ptx_type, 3)
        values = ints(a, ptx_type)
        shifts = [min(s, bits) for s in amount.tolist()]
        pairs = list(zip(values, shifts, strict=True))
        assert run("shr", ptx_type, "", a, amount) == [x >> s & mask for x, s in pairs]
        if ptx_type[0] == "b":
            assert run("shl", ptx_type, "", a, amount) == [x << s & mask for x, s in pairs]


def test_funnel_shift() -> None:
    a, b = sample("u32", 1), sample("u32", 2)
    amount = np.resize(np.array([0, 1, 31, 32, 33, 64, 255], np.uint32), 500)
    for side in "lr":
        for limit in ("wrap", "clamp"):
            want = []
            for x, y, s in zip(a.tolist(), b.tolist(), amount.tolist(), strict=True):
                pool = y << 32 | x
                count = s & 31 if limit == "wrap" else min(s, 32)
                want.append((pool << count >> 32 if side == "l" else pool >> count) & 0xFFFFFFFF)
            assert run("shf", "b32", f"{side} {limit}", a, b, amount) == want


@pytest.mark.parametrize("ptx_type", INTEGERS)
def test_unary(ptx_type: str) -> None:
    bits = int(ptx_type[1:])
    mask = (1 << bits) - 1
    a = sample(ptx_type, 1)
    values = ints(a, ptx_type)
    assert run("not", f"b{bits}", "", a) == [~x & mask for x in values]
    assert run("cnot", f"b{bits}", "", a) == [int(x == 0) for x in values]
    if ptx_type[0] == "s":
        assert run("neg", ptx_type, "", a) == [-x & mask for x in values]
        assert run("abs", ptx_type, "", a) == [abs(x) & mask for x in values]


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_counts(bits: int) -> None:
    unsigned, signed = sample(f"u{bits}", 1), sample(f"s{bits}", 1)
    values = unsigned.tolist()
    assert run("popc", f"b{bits}", "", unsigned) == [x.bit_count() for x in values]
    assert run("clz", f"b{bits}", "", unsigned) == [bits - x.bit_length() for x in values]
    want = [int(f"{x:0{bits}b}"[::-1], 2) for x in values]
    assert run("brev", f"b{bits}", "", unsigned) == want
    top = [x.bit_length() - 1 for x in values]
    assert run("bfind", f"u{bits}", "", unsigned) == [t & 0xFFFFFFFF for t in top]
    shift = [bits - 1 - t if t >= 0 else 0xFFFFFFFF for t in top]
    assert run("bfind", f"u{bits}", "shiftamt", unsigned) == shift
    flipped = [(~x if x < 0 else x).bit_length() - 1 for x in ints(signed, f"s{bits}")]
    assert run("bfind", f"s{bits}", "", signed) == [t & 0xFFFFFFFF for t in flipped]


@pytest.mark.parametrize("ptx_type", ["u32", "s32", "u64", "s64"])
def test_bit_fields(ptx_type: str) -> None:
    bits = int(ptx_type[1:])
    mask = (1 << bits) - 1
    a, b = sample(ptx_type, 1), sample(ptx_type, 2)
    rng = np.random.default_rng(4)
    start = rng.integers(0, bits + 8, 500).astype(np.uint32)
    length = rng.integers(0, bits + 8, 500).astype(np.uint32)
    start[:4], length[:4] = [0, 255, 256, 5], [255, 255, 256, 0]
    extracted, inserted = [], []
    for x, y, p, n in zip(a.tolist(), b.tolist(), start.tolist(), length.tolist(), strict=True):
        p, n = p & 255, n & 255
        sign = 0
        if ptx_type[0] == "s" and n:
            sign = x >> min(p + n - 1, bits - 1) & 1
        picked = 0
        for i in range(bits):
            bit = x >> (p + i) & 1 if i < n and p + i < bits else sign
            picked |= bit << i
        extracted.append(picked)
        merged = y
        for i in range(n):
            if p + i < bits:
                merged = merged & ~(1 << (p + i)) | (x >> i & 1) << (p + i)
        inserted.append(merged & mask)
    assert run("bfe", ptx_type, "", a, start, length) == extracted
    assert run("bfi", f"b{bits}", "", a, b, start, length) == inserted


def test_permute() -> None:
    a, b, c = sample("u32", 1), sample("u32", 2), sample("u32", 3)
    want = []
    for x, y, s in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        pool = (y << 32 | x).to_bytes(8, "little")
        picked = []
        for i in range(4):
            nibble = s >> 4 * i & 15
            byte = pool[nibble & 7]
            picked.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
        want.append(int.from_bytes(bytes(picked), "little"))
    assert run("prmt", "b32", "", a, b, c) == want
    x, y = np.array([0x33221100], np.uint32), np.array([0x77665544], np.uint32)
    # Bytes 3..0 of the result for selector values 0..3, as the PTX ISA tabulates them.
    expected = {
        "f4e": "3210 4321 5432 6543", "b4e": "5670 6701 7012 0123", "rc8": "0000 1111 2222 3333",
        "ecl": "3210 3211 3222 3333", "ecr": "0000 1110 2210 3210", "rc16": "1010 3232 1010 3232",
    }  # fmt: skip
    for mode, rows in expected.items():
        for selector, row in enumerate(rows.split()):
            got = run("prmt", "b32", mode, x, y, np.array([selector], np.uint32))[0]
            assert f"{got:08x}" == "".join(digit * 2 for digit in row), (mode, selector)


def test_lop3_and_masks() -> None:
    a, b, c = (sample("u32", seed) for seed in (1, 2, 3))
    for table in range(256):
        want = np.zeros_like(a)
        for bit in range(32):
            index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
            want |= (np.uint32(table) >> index & np.uint32(1)) << np.uint32(bit)
        assert np.array_equal(numerics.arith("lop3", "b32")(a, b, c, table), want), table
    start = np.array([0, 4, 31, 32, 0, 3], np.uint32)
    count = np.array([32, 3, 5, 4, 0, 33], np.uint32)
    assert run("bmsk", "b32", "clamp", start, count) == [
        0xFFFFFFFF, 0x70, 0x80000000, 0, 0, 0xFFFFFFF8,
    ]  # fmt: skip
    raw = np.array([0x1FF, 0x80, 0x80, 5, 9], np.uint32)
    keep = np.array([8, 8, 7, 0, 40], np.uint32)
    assert run("szext", "s32", "clamp", raw, keep) == [0xFFFFFFFF, 0xFFFFFF80, 0, 0, 9]
    assert run("szext", "u32", "clamp", raw, keep) == [0xFF, 0x80, 0, 0, 9]


def test_dot_product_of_bytes() -> None:
    a, b, c = (sample("u32", seed) for seed in (1, 2, 3))
    for left in "us":
        for right in "us":
            want = []
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
                pair = []
                for word, sign in ((x, left), (y, right)):
                    data = word.to_bytes(4, "little")
                    pair.append([v - 256 if sign == "s" and v > 127 else v for v in data])
                want.append((sum(map(operator.mul, *pair)) + z) & 0xFFFFFFFF)
            assert run("dp4a", f"{left}32.{right}32", "", a, b, c) == want


def test_packed_integers_and_select() -> None:
    a, b = sample("u32", 1), sample("u32", 2)
    for op, rule in (("add", operator.add), ("min", min), ("max", max)):
        for kind in "us":
            want = []
            for x, y in zip(a.tolist(), b.tolist(), strict=True):
                word = 0
                for shift in (0, 16):
                    pair = [v >> shift & 0xFFFF for v in (x, y)]
                    if kind == "s":
                        pair = [v - 0x10000 if v > 0x7FFF else v for v in pair]
                    word |= (rule(*pair) & 0xFFFF) << shift
                want.append(word)
            assert run(op, f"{kind}16x2", "", a, b) == want
    chosen = a > b
    assert run("selp", "b32", "", a, b, chosen) == np.where(chosen, a, b).tolist()
    for op, rule in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        assert run(op, "pred", "", chosen, a > 5) == rule(chosen, a > 5).tolist()
    assert run("not", "pred", "", chosen) == (~chosen).tolist()


def test_scalar_operands() -> None:
    row = np.arange(64, dtype=np.uint32)
    assert run("mad", "s32", "lo", row, np.uint32(3), np.uint32(7)) == (row * 3 + 7).tolist()
    assert int(numerics.arith("add", "u32")(np.uint32(0xFFFFFFFF), np.uint32(2))) == 1
    one = np.float32(1).view(np.uint32)
    for op, count in (("add", 2), ("fma", 3), ("max", 2), ("neg", 1)):
        got = numerics.arith(op, "f32", frozenset({"rn"}))(*[one] * count)
        assert np.ndim(got) == 0
    pair = np.uint32(0x3C003C00)
    got = numerics.arith("add", "f16x2")(np.resize(pair, 5), pair)
    assert got.tolist() == [0x40004000] * 5
    assert int(numerics.arith("add", "f16x2")(pair, pair)) == 0x40004000


FLOATS = {"f32": np.float32, "f64": np.float64, "f16": np.float16}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.5, np.inf, -np.inf, np.nan, -np.nan, 1e-7, 65504.0]


def specials(ptx_type: str) -> tuple[np.ndarray, np.ndarray]:
    value = np.array(SPECIAL, FLOATS[ptx_type])
    a, b = np.repeat(value, len(value)), np.tile(value, len(value))
    return a.view(bits_dtype(ptx_type)), b.view(bits_dtype(ptx_type))


@pytest.mark.parametrize("ptx_type", ["f16", "f32", "f64"])
def test_extrema(ptx_type: str) -> None:
    a, b = specials(ptx_type)
    dtype = FLOATS[ptx_type]
    for op, pick in (("min", min), ("max", max)):
        for mods in ("", "NaN"):
            got = numerics.arith(op, ptx_type, frozenset(mods.split()))(a, b)
            for x, y, word in zip(a.view(dtype), b.view(dtype), got, strict=True):
                result = word.view(dtype)
                nans = int(np.isnan(x)) + int(np.isnan(y))
                if nans == 2 or (nans and mods):
                    assert np.isnan(result)
                elif nans:
                    assert result == (y if np.isnan(x) else x)
                else:  # order -0 before +0
                    want = pick((x, y), key=lambda v: (float(v), not np.signbit(v)))
                    assert (result, np.signbit(result)) == (want, np.signbit(want))


def test_f32_special_results() -> None:
    nan = 0x7FFFFFFF
    payload = np.array([0x7FC12345, 0xFF812345], np.uint32)
    one = np.float32(1).view(np.uint32)
    for op, count in (("add", 2), ("mul", 2), ("fma", 3), ("div", 2), ("sqrt", 1)):
        function = numerics.arith(op, "f32", frozenset({"rn"}))
        assert function(*[payload, one, one][:count]).tolist() == [nan, nan]
    tiny = np.array([1e-40, -1e-40], np.float32).view(np.uint32)
    ftz = frozenset({"rn", "ftz"})
    assert numerics.arith("add", "f32", ftz)(tiny, tiny).tolist() == [0, 1 << 31]
    small = np.array([2.0**-100, -(2.0**-100)], np.float32).view(np.uint32)
    factor = np.float32(2.0**-40).view(np.uint32)
    assert numerics.arith("mul", "f32", ftz)(small, factor).tolist() == [0, 1 << 31]
    values = np.array([2, -1, 0.25, np.nan, -0.0], np.float32).view(np.uint32)
    zero = np.uint32(0)
    got = numerics.arith("add", "f32", frozenset({"rn", "sat"}))(values, zero)
    assert got.view(np.float32).tolist() == [1, 0, 0.25, 0, 0]
    down = numerics.arith("add", "f32", frozenset({"rm"}))
    assert int(down(one, one ^ np.uint32(1 << 31))) == 1 << 31
    magnitude, sign = np.float32(3).view(np.uint32), np.float32(-2).view(np.uint32)
    assert float(numerics.arith("copysign", "f32")(sign, magnitude).view(np.float32)) == -3
    got = numerics.arith("min", "f32", frozenset({"xorsign", "abs"}))(sign, magnitude)
    assert float(got.view(np.float32)) == -2
    half = np.array([0x4200C000], np.uint32)
    relu = numerics.arith("fma", "f16x2", frozenset({"rn", "relu"}))
    assert relu(half, np.uint32(0x3C003C00), np.uint32(0)).tolist() == [0x42000000]


def test_properties() -> None:
    raw = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F800000, 0x7F800001, 0xFF7FFFFF], np.uint32)
    expected = {
        "finite": "1111001", "infinite": "0000100", "number": "1111101", "notanumber": "0000010",
        "normal": "0001001", "subnormal": "0110000",
    }  # fmt: skip
    for name, row in expected.items():
        got = numerics.arith("testp", "f32", frozenset({name}))(raw)
        assert "".join(str(int(flag)) for flag in got) == row, name


def test_approximations_stay_in_the_documented_bounds() -> None:
    rng = np.random.default_rng(6)
    value = rng.uniform(-3, 3, 5000).astype(np.float32)
    exact = value.astype(np.float64)
    functions = {
        "ex2": (np.exp2, value, 2**-22), "sin": (np.sin, value, 2**-20),
        "cos": (np.cos, value, 2**-20), "tanh": (np.tanh, value, 2**-11),
        "rcp": (np.reciprocal, value, 2**-23),
    }  # fmt: skip
    for op, (function, operand, bound) in functions.items():
        got = numerics.arith(op, "f32", frozenset({"approx"}))(operand.view(np.uint32))
        error = np.abs(got.view(np.float32) - function(exact)) / np.maximum(
            1, np.abs(function(exact))
        )
        assert error.max() <= bound, op
    positive = np.abs(exact).astype(np.float32)
    for op, function in (("lg2", np.log2), ("rsqrt", lambda x: x**-0.5), ("sqrt", np.sqrt)):
        got = numerics.arith(op, "f32", frozenset({"approx"}))(positive.view(np.uint32))
        assert np.allclose(got.view(np.float32), function(positive.astype(float)), 2**-22, 2**-22)
    edge = np.array([0, -0.0, np.inf, -np.inf, np.nan, -1], np.float32).view(np.uint32)
    root = numerics.arith("rsqrt", "f32", frozenset({"approx"}))(edge)
    assert root.tolist() == [0x7F800000, 0xFF800000, 0] + [0x7FFFFFFF] * 3
    log = numerics.arith("lg2", "f32", frozenset({"approx"}))(edge)
    assert log.tolist() == [0xFF800000, 0xFF800000, 0x7F800000] + [0x7FFFFFFF] * 3
    huge, inf = np.float32(2.0**127).view(np.uint32), np.float32(np.inf).view(np.uint32)
    divide = numerics.arith("div", "f32", frozenset({"approx"}))
    assert (int(divide(huge, huge)), int(divide(inf, huge))) == (0, 0x7FFFFFFF)
    halves = np.arange(1 << 16, dtype=np.uint16)
    want = np.tanh(halves.view(np.float16).astype(np.float64)).astype(np.float16)
    got = numerics.arith("tanh", "f16", frozenset({"approx"}))(halves).view(np.float16)
    assert np.array_equal(got, want, equal_nan=True)


ORDERS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


@pytest.mark.parametrize("ptx_type", INTEGERS)
def test_integer_comparisons(ptx_type: str) -> None:
    a, b = sample(ptx_type, 1), sample(ptx_type, 2)
    pairs = list(zip(ints(a, ptx_type), ints(b, ptx_type), strict=True))
    for op, rule in ORDERS.items():
        assert numerics.compare(op, ptx_type)(a, b).tolist() == [rule(x, y) for x, y in pairs]
    if ptx_type[0] == "u":
        for op, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
            want = [ORDERS[same](x, y) for x, y in pairs]
            assert numerics.compare(op, ptx_type)(a, b).tolist() == want


@pytest.mark.parametrize("ptx_type", ["f16", "f32", "f64"])
def test_float_comparisons(ptx_type: str) -> None:
    a, b = specials(ptx_type)
    pairs = list(zip(a.view(FLOATS[ptx_type]), b.view(FLOATS[ptx_type]), strict=True))
    for op, rule in ORDERS.items():
        unordered = [bool(np.isnan(x) or np.isnan(y)) for x, y in pairs]
        plain = [bool(rule(x, y)) for x, y in pairs]
        want = [p and not u for p, u in zip(plain, unordered, strict=True)]
        assert numerics.compare(op, ptx_type)(a, b).tolist() == want, op
        want = [p or u for p, u in zip(plain, unordered, strict=True)]
        assert numerics.compare(op + "u", ptx_type)(a, b).tolist() == want, op
    assert numerics.compare("nan", ptx_type)(a, b).tolist() == unordered
    assert numerics.compare("num", ptx_type)(a, b).tolist() == [not u for u in unordered]


def test_comparison_flushes() -> None:
    tiny = np.array([1e-40], np.float32).view(np.uint32)
    zero = np.zeros(1, np.uint32)
    assert numerics.compare("gt", "f32")(tiny, zero).tolist() == [True]
    assert numerics.compare("gt", "f32", ftz=True)(tiny, zero).tolist() == [False]


def test_atomics() -> None:
    old, value = sample("u32", 1), sample("u32", 2)
    pairs = list(zip(old.tolist(), value.tolist(), strict=True))
    want = {
        "exch": [y for _, y in pairs],
        "add": [x + y & 0xFFFFFFFF for x, y in pairs],
        "inc": [0 if x >= y else x + 1 for x, y in pairs],
        "dec": [y if x == 0 or x > y else x - 1 for x, y in pairs],
        "max": [max(x, y) for x, y in pairs],
    }
    for op, expected in want.items():
        assert numerics.atomic(op, "u32")(old, value).tolist() == expected, op
    swapped = numerics.atomic("cas", "b32")(old, value, np.uint32(9))
    assert swapped.tolist() == [9 if x == y else x for x, y in pairs]
    signed = numerics.atomic("min", "s64")(sample("s64", 1), sample("s64", 2))
    expected = map(min, ints(sample("s64", 1), "s64"), ints(sample("s64", 2), "s64"))
    assert ints(signed, "s64") == list(expected)
    half = np.array([0x3C004000], np.uint32)
    assert numerics.atomic("add", "f16x2")(half, half).tolist() == [0x40004400]
    one = np.array([1.0], np.float64).view(np.uint64)
    assert numerics.atomic("add", "f64")(one, one).view(float).tolist() == [2.0]


def test_unknown_operations_are_named() -> None:
    with pytest.raises(numerics.UnsupportedOperation, match=r"frob.*f32"):
        numerics.arith("frob", "f32")
    with pytest.raises(numerics.UnsupportedOperation, match=r"setp\.lo\.f32"):
        numerics.compare("lo", "f32")
    with pytest.raises(numerics.UnsupportedOperation, match=r"atom\.mul\.u32"):
        numerics.atomic("mul", "u32")
    with pytest.raises(numerics.UnsupportedOperation):
        numerics.arith("div", "f16")
    with pytest.raises(numerics.UnsupportedOperation, match="cc"):
        numerics.arith("add", "u32", frozenset({"cc"}))
