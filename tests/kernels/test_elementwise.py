"""Elementwise arithmetic, comparisons, casts and math functions against torch, at odd sizes."""

import math

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.language.extra import libdevice

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


def random(n: int, dtype: torch.dtype, device: str, low: float = -3.0, high: float = 3.0):
    """Random values of any dtype; integers use their whole range."""
    if dtype == torch.bool:
        return torch.rand(n, device=device) > 0.5
    if dtype.is_floating_point:
        return (torch.rand(n, device=device, dtype=torch.float64) * (high - low) + low).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (n,), device=device, dtype=dtype)


@triton.jit
def binary_kernel(x_ptr, y_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=1)
    y = tl.load(y_ptr + offsets, mask=mask, other=1)
    if OP == "add":
        out = x + y
    elif OP == "sub":
        out = x - y
    elif OP == "mul":
        out = x * y
    elif OP == "div":
        out = x / y
    elif OP == "floordiv":
        out = x // y
    elif OP == "mod":
        out = x % y
    elif OP == "and":
        out = x & y
    elif OP == "or":
        out = x | y
    elif OP == "xor":
        out = x ^ y
    elif OP == "shl":
        out = x << y
    elif OP == "shr":
        out = x >> y
    elif OP == "max":
        out = tl.maximum(x, y)
    elif OP == "min":
        out = tl.minimum(x, y)
    elif OP == "lt":
        out = x < y
    elif OP == "le":
        out = x <= y
    elif OP == "gt":
        out = x > y
    elif OP == "ge":
        out = x >= y
    elif OP == "eq":
        out = x == y
    else:
        out = x != y
    tl.store(out_ptr + offsets, out, mask=mask)


def run_binary(op, x, y, out_dtype):
    out = torch.empty(x.numel(), dtype=out_dtype, device=x.device)
    n = x.numel()
    binary_kernel[(triton.cdiv(n, 256),)](x, y, out, n, OP=op, BLOCK=256)
    return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "max", "min"])
def test_float_arithmetic(device, dtype, op):
    x, y = random(777, dtype, device), random(777, dtype, device)
    expected = {
        "add": x + y, "sub": x - y, "mul": x * y,
        "max": torch.maximum(x, y), "min": torch.minimum(x, y),
    }[op]  # fmt: skip
    assert torch.equal(run_binary(op, x, y, dtype), expected)


def test_float_division(device):
    x, y = random(1000, torch.float32, device), random(1000, torch.float32, device, 0.5, 4)
    torch.testing.assert_close(run_binary("div", x, y, x.dtype), x / y, rtol=3e-7, atol=0)
    x, y = x.double(), y.double()
    assert torch.equal(run_binary("div", x, y, x.dtype), x / y)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "and", "or", "xor", "max", "min"])
def test_int_arithmetic(device, dtype, op):
    x, y = random(513, dtype, device), random(513, dtype, device)
    expected = {
        "add": x + y, "sub": x - y, "mul": x * y, "and": x & y, "or": x | y, "xor": x ^ y,
        "max": torch.maximum(x, y), "min": torch.minimum(x, y),
    }[op]  # fmt: skip
    assert torch.equal(run_binary(op, x, y, dtype), expected)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_int_division_truncates_like_c(device, dtype):
    x, y = random(600, dtype, device), random(600, dtype, device)
    y[y == 0] = 3
    y[y == -1] = 5
    quotient = torch.div(x, y, rounding_mode="trunc")
    assert torch.equal(run_binary("floordiv", x, y, dtype), quotient)
    assert torch.equal(run_binary("mod", x, y, dtype), x - quotient * y)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_shifts(device, dtype):
    x = random(300, dtype, device)
    y = torch.randint(0, torch.iinfo(dtype).bits, (300,), device=device).to(dtype)
    assert torch.equal(run_binary("shl", x, y, dtype), x << y)
    assert torch.equal(run_binary("shr", x, y, dtype), x >> y)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int32, torch.uint8, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons(device, dtype, op):
    x, y = random(400, dtype, device), random(400, dtype, device)
    y[::3] = x[::3]
    if dtype.is_floating_point:
        x[5] = math.nan
    expected = getattr(torch, op)(x, y)
    assert torch.equal(run_binary(op, x, y, torch.bool), expected)


@triton.jit
def unary_kernel(x_ptr, out_ptr, n, FN: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=1.0)
    tl.store(out_ptr + offsets, FN(x), mask=mask)


MATH = {
    "exp": (tl.exp, torch.exp, -20, 20, 2e-6), "exp2": (tl.exp2, torch.exp2, -30, 30, 4e-7),
    "log": (tl.log, torch.log, 1e-6, 50, 2e-6), "log2": (tl.log2, torch.log2, 1e-6, 50, 2e-6),
    "sin": (tl.sin, torch.sin, -30, 30, 2e-6), "cos": (tl.cos, torch.cos, -30, 30, 2e-6),
    "sqrt": (tl.sqrt, torch.sqrt, 0, 100, 3e-7), "rsqrt": (tl.rsqrt, torch.rsqrt, 0.01, 9, 3e-7),
    "abs": (tl.abs, torch.abs, -5, 5, 0), "floor": (tl.floor, torch.floor, -9, 9, 0),
    "ceil": (tl.ceil, torch.ceil, -9, 9, 0), "erf": (tl.erf, torch.erf, -4, 4, 2e-6),
    "sigmoid": (tl.sigmoid, torch.sigmoid, -20, 20, 3e-6),
    "sqrt_rn": (tl.sqrt_rn, torch.sqrt, 0, 100, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MATH)
def test_math_functions(device, name):
    ours, reference, low, high, tolerance = MATH[name]
    x = random(999, torch.float32, device, low, high)
    out = torch.empty_like(x)
    unary_kernel[(triton.cdiv(999, 128),)](x, out, 999, FN=ours, BLOCK=128)
    expected = reference(x.double())
    error = (out.double() - expected).abs()
    bound = tolerance * expected.abs().clamp(
        min=1.0 if name in ("sin", "cos", "log", "log2") else 0
    )
    half_ulp = expected.abs() * 2**-24 + 1e-38
    assert (error <= bound + half_ulp).all(), (name, error.max().item())


def test_fast_tanh(device):
    x = random(999, torch.float32, device, -6, 6)
    out = torch.empty_like(x)
    unary_kernel[(8,)](x, out, 999, FN=libdevice.fast_tanhf, BLOCK=128)
    expected = torch.tanh(x.double())
    assert ((out.double() - expected).abs() <= expected.abs() * 2**-10.9).all()


def test_fast_exp2(device):
    ends = torch.tensor([-float("inf"), 200.0], device=device)
    x = torch.cat([random(998, torch.float32, device, -127, 120), ends])
    out = torch.empty_like(x)
    unary_kernel[(8,)](x, out, 1000, FN=libdevice.fast_exp2f, BLOCK=128)
    expected = torch.exp2(x.double())
    expected[expected < 2**-126] = 0
    assert ((out.double() - expected).abs()[:998] <= expected[:998] * 2**-22).all()
    assert out[998] == 0 and out[999] == float("inf")


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "rsqrt", "abs", "floor", "sin", "cos"])
def test_math_functions_fp64(device, name):
    ours, reference, low, high, _ = MATH[name]
    x = random(200, torch.float64, device, low, high)
    out = torch.empty_like(x)
    unary_kernel[(2,)](x, out, 200, FN=ours, BLOCK=128)
    torch.testing.assert_close(out, reference(x), rtol=1e-14, atol=1e-14)


@triton.jit
def cast_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=mask)


CASTS = [
    (torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32), (torch.float64, torch.float32), (torch.float32, torch.float64),
    (torch.int32, torch.float32), (torch.int64, torch.float32), (torch.uint8, torch.float16),
    (torch.int8, torch.bfloat16), (torch.int32, torch.int8), (torch.int8, torch.int64),
    (torch.uint8, torch.int32), (torch.float16, torch.bfloat16), (torch.bool, torch.float32),
    (torch.int32, torch.bool), (torch.float32, torch.float8_e5m2),
    (torch.float32, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.float32),
    (torch.float8_e5m2, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("source", "dest"), CASTS, ids=str)
def test_casts(device, source, dest):
    if source.itemsize == 1 and source.is_floating_point:
        bits = torch.arange(256, device=device, dtype=torch.uint8)
        x = bits.view(source)
        x = x[torch.isfinite(x.float())]
    else:
        x = random(500, source, device, -100, 100)
    out = torch.empty(x.numel(), dtype=dest, device=device)
    cast_kernel[(1,)](x, out, x.numel(), BLOCK=512)
    assert torch.equal(out.double(), x.to(dest).double())


@pytest.mark.parametrize("dest", [torch.int32, torch.int64, torch.int8, torch.uint8], ids=str)
def test_float_to_int_truncates(device, dest):
    low = 0 if dest == torch.uint8 else -100
    x = random(500, torch.float32, device, low, 100)
    out = torch.empty(500, dtype=dest, device=device)
    cast_kernel[(1,)](x, out, 500, BLOCK=512)
    assert torch.equal(out, x.to(dest))


@triton.jit
def bitcast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, x.to(tl.int32, bitcast=True) ^ 0x40000000)


def test_bitcast(device):
    x = random(256, torch.float32, device)
    out = torch.empty(256, dtype=torch.int32, device=device)
    bitcast_kernel[(1,)](x, out, BLOCK=256)
    assert torch.equal(out, x.view(torch.int32) ^ 0x40000000)


@triton.jit
def select_clamp_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    z = tl.where((x > 0) & (y < 1.0) | (x < -2.0), tl.clamp(x, -1.0, 1.0), tl.fma(x, y, 0.5))
    tl.store(out_ptr + offsets, -z + 2 * tl.abs(y), mask=mask)


def test_where_clamp_fma(device):
    x, y = random(1001, torch.float32, device), random(1001, torch.float32, device)
    out = torch.empty_like(x)
    select_clamp_kernel[(triton.cdiv(1001, 512),)](x, y, out, 1001, BLOCK=512)
    fma = (x.double() * y.double() + 0.5).float()
    z = torch.where((x > 0) & (y < 1.0) | (x < -2.0), x.clamp(-1, 1), fma)
    torch.testing.assert_close(out, -z + 2 * y.abs(), rtol=1e-6, atol=1e-6)


@triton.jit
def scalar_kernel(out_ptr, a, b, c, flag):
    pid = tl.program_id(0)
    value = a * b + c
    if flag:
        value = value - 1
    tl.store(out_ptr + pid, value + tl.num_programs(0))


@pytest.mark.parametrize("a", [1, 16, 7, -3, 2**33])
def test_scalar_arguments(device, a):
    out = torch.zeros(5, dtype=torch.float64, device=device)
    scalar_kernel[(5,)](out, a, 2, 0.5, a > 10)
    expected = torch.tensor(float(a * 2)) + 0.5 - float(a > 10) + 5.0  # int + float is fp32
    assert (out == expected.item()).all()


@triton.jit
def promotion_kernel(h_ptr, i_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    h = tl.load(h_ptr + offsets)
    i = tl.load(i_ptr + offsets)
    tl.static_assert((h * 2).dtype == tl.float16)
    tl.static_assert((h + i).dtype == tl.float16)
    tl.static_assert((i / 2).dtype == tl.float32)
    tl.store(out_ptr + offsets, (h + i).to(tl.float32) + i / 2)


def test_promotion(device):
    h, i = random(64, torch.float16, device), torch.randint(-9, 9, (64,), device=device).int()
    out = torch.empty(64, device=device)
    promotion_kernel[(1,)](h, i, out, BLOCK=64)
    assert torch.equal(out, (h + i.half()).float() + i / 2)


@triton.jit
def divide_rows_kernel(x_ptr, d_ptr, out_ptr, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * COLUMNS + columns)
    tl.store(out_ptr + row * COLUMNS + columns, x / tl.load(d_ptr + row))


def test_a_divisor_of_a_row(device):
    """It is inverted once; its reciprocal alone would be subnormal or infinite at the ends."""
    divisors = [3.0, -0.7, 2.0**127, -(2.0**126), 2.0**-126, -(2.0**-149), 1.5 * 2.0**-127, 0.0]
    d = torch.tensor([*divisors, math.inf, -math.inf, math.nan, 3.0e38], device=device)
    x = torch.randn(len(d), 256, device=device) * d.abs().clamp(2.0**-100, 2.0**100)[:, None]
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 0.0, math.inf, math.nan, 3.0e38
    x[5, 64:] = torch.randn(192, device=device) * 2.0**-140
    out = torch.empty_like(x)
    compiled = divide_rows_kernel[(len(d),)](x, d, out, 256, num_warps=1)
    expected = (x.double() / d.double()[:, None]).float()
    torch.testing.assert_close(out, expected, rtol=2.5e-7, atol=2.0**-148, equal_nan=True)
    assert compiled.asm["ptx"].count("rcp.approx.ftz.f32") == 1
