"""Reductions and scans along any axis, simple and generic, against torch."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def reduce_kernel(
    x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, OP: tl.constexpr
):
    rows = tl.arange(0, M)
    cols = tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    if OP == "sum":
        out = tl.sum(x, axis=AXIS)
    elif OP == "max":
        out = tl.max(x, axis=AXIS)
    elif OP == "min":
        out = tl.min(x, axis=AXIS)
    elif OP == "argmax":
        out = tl.argmax(x, axis=AXIS)
    elif OP == "argmin":
        out = tl.argmin(x, axis=AXIS)
    else:
        out = tl.xor_sum(x, axis=AXIS)
    if AXIS == 0:
        tl.store(out_ptr + cols, out)
    else:
        tl.store(out_ptr + rows, out)


SHAPES = [(16, 32), (128, 64), (1, 256), (4, 1024), (64, 1), (2, 2)]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_warps", [1, 4])
def test_sum(device, shape, axis, num_warps):
    x = torch.randn(shape, device=device)
    out = torch.empty(shape[1 - axis], device=device)
    reduce_kernel[(1,)](x, out, *shape, AXIS=axis, OP="sum", num_warps=num_warps)
    torch.testing.assert_close(out, x.sum(axis), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int32, torch.int8, torch.int64]
)
@pytest.mark.parametrize("op", ["max", "min"])
def test_max_min(device, dtype, op, axis):
    x = (torch.randn(32, 128, device=device) * 50).to(dtype)
    out = torch.empty((128, 32)[axis], dtype=dtype, device=device)
    reduce_kernel[(1,)](x, out, 32, 128, AXIS=axis, OP=op)
    assert torch.equal(out, getattr(torch, "a" + op)(x, dim=axis))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["argmax", "argmin"])
@pytest.mark.parametrize("ties", [False, True])
def test_arg_reductions_take_the_first(device, op, axis, ties):
    x = (
        torch.randint(0, 4, (64, 32), device=device).float()
        if ties
        else torch.randn(64, 32, device=device)
    )
    out = torch.empty((32, 64)[axis], dtype=torch.int32, device=device)
    reduce_kernel[(1,)](x, out, 64, 32, AXIS=axis, OP=op)
    best = x.amax(axis, keepdim=True) if op == "argmax" else x.amin(axis, keepdim=True)
    first = (x == best).int().argmax(axis)
    assert torch.equal(out.long(), first)


@pytest.mark.parametrize("axis", [0, 1])
def test_xor_sum(device, axis):
    x = torch.randint(-(2**31), 2**31 - 1, (32, 64), dtype=torch.int32, device=device)
    out = torch.empty((64, 32)[axis], dtype=torch.int32, device=device)
    reduce_kernel[(1,)](x, out, 32, 64, AXIS=axis, OP="xor")
    expected = x[0].clone() if axis == 0 else x[:, 0].clone()
    for i in range(1, x.shape[axis]):
        expected ^= x.select(axis, i)
    assert torch.equal(out, expected)


@triton.jit
def sum_dtype_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    s = tl.sum(x)
    tl.static_assert(s.dtype == tl.int32)
    tl.store(out_ptr, s)


def test_sum_of_small_ints_widens(device):
    x = torch.full((512,), 100, dtype=torch.int8, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    sum_dtype_kernel[(1,)](x, out, N=512)
    assert out.item() == 51200


@triton.jit
def rows_1d_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=float("-inf"))
    tl.store(out_ptr + row, tl.max(x, axis=0))


@pytest.mark.parametrize("n", [1, 31, 33, 500, 1025])
def test_1d_to_scalar(device, n):
    x = torch.randn(7, n, device=device)
    out = torch.empty(7, device=device)
    rows_1d_kernel[(7,)](x, out, n, BLOCK=triton.next_power_of_2(n))
    assert torch.equal(out, x.amax(1))


@triton.jit
def welford_combine(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    delta = mean_b - mean_a
    count = count_a + count_b
    weight = tl.where(count == 0.0, 0.0, count_b / count)
    return mean_a + delta * weight, m2_a + m2_b + delta * delta * count_a * weight, count


@triton.jit
def welford_kernel(x_ptr, mean_ptr, var_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    mean, m2, count = tl.reduce(
        (x, tl.zeros_like(x), tl.full((M, N), 1.0, tl.float32)), 1, welford_combine
    )
    tl.store(mean_ptr + rows, mean)
    tl.store(var_ptr + rows, m2 / count)


def test_generic_reduction_with_three_operands(device):
    x = torch.randn(16, 256, device=device) + 3
    mean, var = torch.empty(16, device=device), torch.empty(16, device=device)
    welford_kernel[(1,)](x, mean, var, M=16, N=256)
    torch.testing.assert_close(mean, x.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(var, x.var(1, unbiased=False), rtol=1e-4, atol=1e-5)


@triton.jit
def keep_dims_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    centred = x - tl.max(x, axis=1, keep_dims=True)
    total = tl.sum(tl.sum(centred, axis=1), axis=0)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], centred / total)


def test_keep_dims_and_nested(device):
    x = torch.randn(8, 64, device=device)
    out = torch.empty_like(x)
    keep_dims_kernel[(1,)](x, out, M=8, N=64)
    centred = x - x.amax(1, keepdim=True)
    torch.testing.assert_close(out, centred / centred.sum(), rtol=1e-4, atol=1e-6)


@triton.jit
def three_d_kernel(
    x_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr
):
    a, b, c = tl.arange(0, A), tl.arange(0, B), tl.arange(0, C)
    x = tl.load(x_ptr + a[:, None, None] * (B * C) + b[None, :, None] * C + c[None, None, :])
    s = tl.sum(x, axis=AXIS)
    if AXIS == 0:
        tl.store(out_ptr + b[:, None] * C + c[None, :], s)
    elif AXIS == 1:
        tl.store(out_ptr + a[:, None] * C + c[None, :], s)
    else:
        tl.store(out_ptr + a[:, None] * B + b[None, :], s)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reduce_rank_3(device, axis):
    x = torch.randn(4, 8, 32, device=device)
    expected = x.sum(axis)
    out = torch.empty_like(expected)
    three_d_kernel[(1,)](x, out, 4, 8, 32, AXIS=axis)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@triton.jit
def scan_kernel(
    x_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    AXIS: tl.constexpr,
    OP: tl.constexpr,
    REVERSE: tl.constexpr,
):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    offsets = rows[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + offsets)
    if OP == "sum":
        out = tl.cumsum(x, axis=AXIS, reverse=REVERSE)
    else:
        out = tl.cumprod(x, axis=AXIS, reverse=REVERSE)
    tl.store(out_ptr + offsets, out)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(8, 128), (64, 16), (1, 512), (128, 1)], ids=str)
def test_cumsum(device, shape, axis, reverse):
    x = torch.randint(-100, 100, shape, dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    scan_kernel[(1,)](x, out, *shape, AXIS=axis, OP="sum", REVERSE=reverse)
    flipped = x.flip(axis) if reverse else x
    expected = flipped.cumsum(axis).int()
    assert torch.equal(out, expected.flip(axis) if reverse else expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_cumprod(device, axis):
    x = torch.rand(16, 32, device=device) + 0.5
    out = torch.empty_like(x)
    scan_kernel[(1,)](x, out, 16, 32, AXIS=axis, OP="prod", REVERSE=False)
    torch.testing.assert_close(out, x.cumprod(axis), rtol=1e-5, atol=1e-6)


@triton.jit
def linear_recurrence(a_left, b_left, a_right, b_right):
    return a_left * a_right, b_left * a_right + b_right


@triton.jit
def recurrence_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    offsets = rows[:, None] * N + cols[None, :]
    a = tl.load(a_ptr + offsets)
    b = tl.load(b_ptr + offsets)
    _, h = tl.associative_scan((a, b), 1, linear_recurrence)
    tl.store(out_ptr + offsets, h)


@pytest.mark.parametrize("shape", [(4, 64), (2, 256), (32, 32)], ids=str)
def test_non_commutative_scan(device, shape):
    a = torch.rand(shape, device=device)
    b = torch.randn(shape, device=device)
    out = torch.empty_like(a)
    recurrence_kernel[(1,)](a, b, out, *shape)
    h, expected = torch.zeros(shape[0], device=device), []
    for t in range(shape[1]):
        h = h * a[:, t] + b[:, t]
        expected.append(h)
    torch.testing.assert_close(out, torch.stack(expected, 1), rtol=1e-4, atol=1e-4)


@triton.jit
def two_sums_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=0.0)
    total = tl.sum(x, axis=0)
    squares = tl.sum(x * x, axis=0)
    tl.store(out_ptr + row * 2, total)
    tl.store(out_ptr + row * 2 + 1, squares)


def test_two_reductions_of_one_tile(device):
    x = torch.randn(5, 300, device=device)
    out = torch.empty(5, 2, device=device)
    two_sums_kernel[(5,)](x, out, 300, BLOCK=512)
    torch.testing.assert_close(
        out, torch.stack([x.sum(1), (x * x).sum(1)], 1), rtol=1e-4, atol=1e-3
    )


@triton.jit
def squares(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(x * x))


def test_products_are_summed_by_fma(device):
    """32 elements per thread, in four chains: a product starts each, the rest is fused."""
    x, out = torch.randn(1024, device=device), torch.empty(1, device=device)
    compiled = squares[(1,)](x, out, BLOCK=1024, num_warps=1)
    torch.testing.assert_close(out[0], x.square().sum())
    assert compiled.ptx.count("fma.rn.f32") == 28
