"""Libdevice's functions against torch in fp64, at and beyond the ends of their domains."""

import math

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.language.extra import libdevice

INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0, INF, -INF, NAN]


@triton.jit
def unary_kernel(x_ptr, out_ptr, n, FN: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=1)
    tl.store(out_ptr + offsets, FN(x), mask=offsets < n)


@triton.jit
def pair_kernel(x_ptr, y_ptr, out_ptr, n, FN: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=1)
    y = tl.load(y_ptr + offsets, mask=offsets < n, other=1)
    tl.store(out_ptr + offsets, FN(x, y), mask=offsets < n)


def run(name, *inputs, dtype=None):
    x = inputs[0]
    out = torch.empty_like(x, dtype=dtype or x.dtype)
    kernel = unary_kernel if len(inputs) == 1 else pair_kernel
    grid = (triton.cdiv(len(x), 256),)
    kernel[grid](*inputs, out, len(x), FN=getattr(libdevice, name), BLOCK=256)
    return out


def spread(dtype, device, low, high):
    """Random values within the bounds, values of all magnitudes, and special ones."""
    even = torch.rand(500, dtype=torch.float64, device=device) * (high - low) + low
    tiny = even[:200] * torch.exp2(-60 * torch.rand(200, dtype=torch.float64, device=device))
    special = torch.tensor(SPECIAL, dtype=torch.float64, device=device)
    return torch.cat([even, tiny, special]).to(dtype)


UNARY = {
    "acos": (torch.acos, -1, 1), "asin": (torch.asin, -1, 1), "atan": (torch.atan, -1e3, 1e3),
    "acosh": (torch.acosh, 1, 1e3), "asinh": (torch.asinh, -1e3, 1e3),
    "atanh": (torch.atanh, -1, 1), "erfinv": (torch.erfinv, -0.99, 0.99),
    "cbrt": (lambda x: x.abs().pow(1 / 3).copysign(x), -1e3, 1e3),
    "exp10": (lambda x: torch.pow(10.0, x), -30, 30), "nearbyint": (torch.round, -9, 9),
    "saturatef": (lambda x: x.nan_to_num(0.0, INF).clamp(0, 1), -2, 2),
    "rcp_rn": (torch.reciprocal, -9, 9), "normcdf": (torch.special.ndtr, -4, 4),
}  # fmt: skip
LOOSE = {"normcdf": 2.0**-15, "exp10": 2.0**-20}  # relative, of fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(device, name, dtype):
    reference, low, high = UNARY[name]
    x = spread(dtype, device, low, high)
    expected = reference(x.double())
    tolerance = LOOSE.get(name, 2.0**-21) if dtype == torch.float32 else 2.0**-43
    torch.testing.assert_close(
        run(name, x).double(), expected, rtol=tolerance, atol=1e-16, equal_nan=True
    )


def test_erfc_keeps_its_precision_where_it_is_tiny(device):
    x = torch.cat([torch.linspace(-4, 9, 700), torch.tensor([INF, -INF, NAN])]).to(device)
    expected = torch.special.erfc(x.double())
    torch.testing.assert_close(
        run("erfc", x).double(), expected, rtol=2.0**-16, atol=0, equal_nan=True
    )


BINARY = {
    "atan2": torch.atan2, "copysign": torch.copysign, "hypot": torch.hypot,
    "fdim": lambda x, y: torch.where(x <= y, 0.0, x - y), "fast_dividef": torch.div,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(device, name, dtype):
    x, y = (spread(dtype, device, -20, 20) for _ in range(2))
    special = torch.tensor(SPECIAL, dtype=dtype, device=device)
    x = torch.cat([x, special.repeat(len(SPECIAL))])
    y = torch.cat([y, special.repeat_interleave(len(SPECIAL))])
    found, expected = run(name, x, y).double(), BINARY[name](x.double(), y.double())
    tolerance = 2.0**-21 if dtype == torch.float32 else 2.0**-49
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, equal_nan=True)
    known = ~expected.isnan()
    assert torch.equal(found.signbit()[known], expected.signbit()[known])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bits(device, dtype):
    bits, info = torch.iinfo(dtype).bits, torch.iinfo(dtype)
    x = torch.randint(info.min, info.max, (300,), dtype=dtype, device=device)
    x = torch.cat([x, x >> 20, torch.tensor([0, 1, -1, info.min], dtype=dtype, device=device)])
    texts = [f"{value % 2**bits:0{bits}b}" for value in x.tolist()]
    lengths = [len(text.rstrip("0")) for text in texts]
    wanted = {
        "popc": [text.count("1") for text in texts],
        "clz": [bits - len(text.lstrip("0")) for text in texts],
        "ffs": [bits + 1 - length if length else 0 for length in lengths],
    }
    for name, values in wanted.items():
        assert run(name, x, dtype=torch.int32).tolist() == values, name
    turned = [int(text[::-1], 2) for text in texts]
    assert [value % 2**bits for value in run("brev", x).tolist()] == turned


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scaling_by_powers_of_two(device, dtype):
    x = torch.randn(400, dtype=dtype, device=device)
    limit = 300 if dtype == torch.float32 else 2200
    n = torch.randint(-limit, limit, (400,), dtype=torch.int32, device=device)
    exact = [
        math.ldexp(a, b) if math.frexp(a)[1] + b <= 1024 else math.copysign(INF, a)
        for a, b in zip(x.tolist(), n.tolist(), strict=True)
    ]
    expected = torch.tensor(exact, dtype=torch.float64, device=device).to(dtype)
    found = run("ldexp", x, n)
    normal = expected.abs() >= torch.finfo(dtype).tiny
    assert torch.equal(found[normal], expected[normal])
    assert (found[~normal].abs() <= torch.finfo(dtype).tiny).all()


@triton.jit
def unfused_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    square = libdevice.mul_rn(x, x)
    tl.store(out_ptr + offsets, libdevice.sub_rn(square, 1.0 + libdevice.add_rn(x, x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_arithmetic_that_is_not_fused(device, dtype):
    x = torch.rand(128, dtype=dtype, device=device)
    out = torch.empty_like(x)
    unfused_kernel[(1,)](x, out, 128)
    assert torch.equal(out, (x * x) - (1.0 + (x + x)))
