"""Promotion of every pair of element types, against a table written from Triton's rules."""

from __future__ import annotations

import itertools
import operator

import pytest

import minitriton.language as tl
from minitriton.frontend.errors import Mistake
from minitriton.frontend.promotion import computation_type, literal_type
from minitriton.frontend.source import DeviceFunction as jit
from minitriton.ir import dtypes
from minitriton.ir.diagnostics import CompileError
from tests.frontend.support import build

# Result of `row + column`; columns in the order of NAMES. `-` marks a refused pair.
NAMES = [
    "i1",
    "i8",
    "i16",
    "i32",
    "i64",
    "u8",
    "u16",
    "u32",
    "u64",
    "e5",
    "e4",
    "f16",
    "bf",
    "f32",
    "f64",
]
TABLE = """
i1   i1  i8  i16 i32 i64 u8  u16 u32 u64 -   -   f16 f32 f32 f64
i8   i8  i8  i16 i32 i64 u8  u16 u32 u64 -   -   f16 f32 f32 f64
i16  i16 i16 i16 i32 i64 i16 u16 u32 u64 -   -   f16 f32 f32 f64
i32  i32 i32 i32 i32 i64 i32 i32 u32 u64 -   -   f16 f32 f32 f64
i64  i64 i64 i64 i64 i64 i64 i64 i64 u64 -   -   f16 f32 f32 f64
u8   u8  u8  i16 i32 i64 u8  u16 u32 u64 -   -   f16 f32 f32 f64
u16  u16 u16 u16 i32 i64 u16 u16 u32 u64 -   -   f16 f32 f32 f64
u32  u32 u32 u32 u32 i64 u32 u32 u32 u64 -   -   f16 f32 f32 f64
u64  u64 u64 u64 u64 u64 u64 u64 u64 u64 -   -   f16 f32 f32 f64
e5   -   -   -   -   -   -   -   -   -   e5  f16 f16 f32 f32 f64
e4   -   -   -   -   -   -   -   -   -   f16 e4  f16 f32 f32 f64
f16  f16 f16 f16 f16 f16 f16 f16 f16 f16 f16 f16 f16 f16 f32 f64
bf   f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f16 bf  f32 f64
f32  f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f32 f64
f64  f64 f64 f64 f64 f64 f64 f64 f64 f64 f64 f64 f64 f64 f64 f64
"""
TYPES = dict(zip(NAMES, dtypes.ALL, strict=True))
ROWS = {line.split()[0]: line.split()[1:] for line in TABLE.strip().splitlines()}
PAIRS = [(a, b, ROWS[a][NAMES.index(b)]) for a, b in itertools.product(NAMES, NAMES)]


@pytest.mark.parametrize("a,b,expected", PAIRS)
def test_sum_of_tensors(a: str, b: str, expected: str) -> None:
    if expected == "-":
        with pytest.raises(Mistake, match="fp8"):
            raise_text(a, b)
    else:
        assert computation_type(TYPES[a], TYPES[b], "+") == TYPES[expected]


def raise_text(a: str, b: str) -> None:
    try:
        computation_type(TYPES[a], TYPES[b], "+")
    except Mistake as mistake:
        mistake.args = (mistake.text(mistake.title),)
        raise


@pytest.mark.parametrize("a,b,expected", PAIRS)
def test_quotient_of_tensors(a: str, b: str, expected: str) -> None:
    x, y = TYPES[a], TYPES[b]
    if x.is_int() and y.is_int():
        if x.is_int_unsigned() != y.is_int_unsigned():
            with pytest.raises(Mistake):
                computation_type(x, y, "/")
            return
        assert computation_type(x, y, "/") == TYPES[expected]
    else:
        wanted = dtypes.float64 if "f64" in (a, b) else dtypes.float32
        assert computation_type(x, y, "/") == wanted


@pytest.mark.parametrize("name", NAMES)
def test_literals_are_weak(name: str) -> None:
    type_ = TYPES[name]
    for value in (True, 3, 2.5):
        literal = literal_type(value)
        higher = {"bool": 0, "float": 2}.get(literal.kind, 1) > {"bool": 0, "float": 2}.get(
            type_.kind, 1
        )
        got = computation_type(type_, literal, "*", b_literal=True)
        assert got == (computation_type(type_, literal, "*") if higher else type_)
        assert computation_type(literal, type_, "*", a_literal=True) == got


def test_literal_types() -> None:
    expected = {
        True: tl.int1, 2**31 - 1: tl.int32, -(2**31): tl.int32, 2**31: tl.uint32,
        2**32: tl.int64, -(2**31) - 1: tl.int64, 2**63: tl.uint64,
        0.5: tl.float32, float("inf"): tl.float32, 1e300: tl.float64, 1e-300: tl.float64,
    }  # fmt: skip
    for value, type_ in expected.items():
        assert literal_type(value) == type_, value
    with pytest.raises(Mistake):
        literal_type(2**64)


@jit
def operators(p, x, y, OP: tl.constexpr, WANTED: tl.constexpr):
    z = apply(OP, x, y)
    tl.static_assert(z.dtype == WANTED, f"{z.dtype}")
    tl.store(p, z)


@jit
def apply(OP: tl.constexpr, x, y):
    if OP == "+":
        return x + y
    if OP == "-":
        return x - y
    if OP == "*":
        return x * y
    if OP == "/":
        return x / y
    if OP == "//":
        return x // y
    if OP == "%":
        return x % y
    if OP == "<<":
        return x << y
    if OP == ">>":
        return x >> y
    if OP == "&":
        return x & y
    if OP == "<":
        return x < y
    return x != y


CASES = [
    ("+", "i32", "i32", tl.int32, "arith.addi"), ("+", "fp16", "fp16", tl.float16, "addf"),
    ("-", "fp32", "i32", tl.float32, "arith.sitofp"), ("*", "u8", "fp32", tl.float32, "uitofp"),
    ("/", "i32", "i64", tl.float32, "arith.divf"), ("/", "fp16", "fp16", tl.float32, "extf"),
    ("//", "i32", "i32", tl.int32, "divsi"), ("//", "u32", "u16", tl.uint32, "divui"),
    ("%", "i64", "i32", tl.int64, "remsi"), ("%", "u64", "u64", tl.uint64, "remui"),
    ("%", "fp32", "fp32", tl.float32, "remf"), (">>", "i32", "i32", tl.int32, "shrsi"),
    (">>", "u32", "u32", tl.uint32, "shrui"), (">>", "i32", "u32", tl.uint32, "shrsi"),
    (">>", "u32", "i32", tl.uint32, "shrui"), ("<<", "i16", "i16", tl.int16, "shli"),
    ("&", "i1", "i1", tl.int1, "andi"), ("<", "u32", "i32", tl.int1, "cmpi ult"),
    ("<", "i32", "i32", tl.int1, "cmpi slt"), ("<", "fp32", "fp32", tl.int1, "cmpf olt"),
    ("!=", "fp32", "fp32", tl.int1, "cmpf une"), ("+", "fp8e5", "fp8e5", tl.float8e5, "mt.fp_cast"),
    ("*", "bf16", "fp16", tl.float16, "mulf"), ("+", "i1", "i32", tl.int32, "extui"),
]  # fmt: skip


@pytest.mark.parametrize("op,x,y,wanted,operation", CASES)
def test_operators(op: str, x: str, y: str, wanted: dtypes.dtype, operation: str) -> None:
    text = build(operators, p=f"*{wanted}", x=x, y=y, OP="=" + op, WANTED=wanted)
    assert operation in text


@pytest.mark.parametrize(
    "op,x,y",
    [("//", "fp32", "i32"), ("&", "fp32", "i32"), ("//", "i32", "u32"), ("+", "fp8e5", "i32")],
)
def test_refused_operators(op: str, x: str, y: str) -> None:
    with pytest.raises(CompileError):
        build(operators, p="*i32", x=x, y=y, OP="=" + op, WANTED=tl.int32)


@jit
def literals(p, x8, u8, h):
    tl.static_assert((x8 + 1).dtype == tl.int8)
    tl.static_assert((x8 * 1.5).dtype == tl.float32)
    tl.static_assert((h * 2.0).dtype == tl.float16)
    tl.static_assert((h / 2).dtype == tl.float32)
    tl.static_assert((2**40 + tl.arange(0, 4).to(tl.int64)).dtype == tl.int64)
    tl.static_assert(tl.maximum(h, 0.0).dtype == tl.float32)
    tl.static_assert(tl.where(u8 > 3, h, 0.0).dtype == tl.float16)
    tl.static_assert(-7 // 2 == -4)


def test_literals_in_kernels() -> None:
    build(literals, p="*fp32", x8="i8", u8="u8", h="fp16")


def test_constexpr_folds_on_the_host() -> None:
    three = tl.constexpr(3)
    for fn in (operator.add, operator.mul, operator.sub, operator.floordiv, operator.lshift):
        assert fn(three, 2).value == fn(3, 2)
        assert fn(7, three).value == fn(7, 3)
    assert (-three).value == -3 and three > 2 and list(range(three)) == [0, 1, 2]
