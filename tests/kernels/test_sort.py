"""tl.sort and tl.topk against torch: sizes, types, dimensions, orders, equal elements."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl

TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64]


@triton.jit
def sort_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr,
                DOWN: tl.constexpr):  # fmt: skip
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.sort(tl.load(x_ptr + at), DIM, DOWN))


def values(shape, dtype, device):
    """Some of them equal, some negative where there are such."""
    x = torch.randint(-90, 90, shape, device=device).abs_()
    return x.to(dtype) if dtype == torch.uint8 else (x * torch.randn(shape).sign().to(x)).to(dtype)


def check_sort(device, shape, dtype, dim, down, warps=4):
    x = values(shape, dtype, device)
    out = torch.empty_like(x)
    sort_kernel[(1,)](x, out, *shape, dim, down, num_warps=warps)
    assert torch.equal(out, x.sort(-1 if dim is None else dim, descending=down)[0])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("down", [False, True])
def test_types(device, dtype, down):
    check_sort(device, (4, 64), dtype, None, down)


@pytest.mark.parametrize(
    ("shape", "dim", "warps"),
    [
        ((1, 512), 1, 4), ((8, 1), 1, 1), ((2, 2), -1, 2), ((32, 16), 0, 1), ((128, 4), 0, 4),
        ((48, 16), 1, 4), ((16, 48), 0, 4),
    ],
    ids=str,
)  # fmt: skip
def test_shapes(device, shape, dim, warps):
    check_sort(device, shape, torch.float32, dim, warps == 4, warps)


def test_infinities_and_extremes(device):
    x = torch.randn(2, 32, device=device)
    x[:, ::5], x[:, 1::7] = float("inf"), -float("inf")
    out = torch.empty_like(x)
    sort_kernel[(1,)](x, out, 2, 32, None, False)
    assert torch.equal(out, x.sort(-1)[0])


@triton.jit
def topk_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                DIM: tl.constexpr):  # fmt: skip
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    best = tl.topk(x, K, DIM)
    rows: tl.constexpr = best.shape[0]
    columns: tl.constexpr = best.shape[1]
    to = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    tl.store(out_ptr + to, best)


@pytest.mark.parametrize(
    ("shape", "k", "dim"),
    [((4, 64), 8, None), ((2, 128), 1, 1), ((1, 256), 64, 1), ((4, 16), 16, -1), ((64, 4), 2, 0)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_topk(device, shape, k, dim, dtype):
    x = values(shape, dtype, device)
    expected = x.topk(k, -1 if dim is None else dim)[0]
    out = torch.empty_like(expected)
    topk_kernel[(1,)](x, out, *shape, k, dim)
    assert torch.equal(out, expected)


@triton.jit
def line_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.sort(x))
    tl.store(out_ptr + N + tl.arange(0, 4), tl.topk(x, 4))


def test_lines(device):
    x = torch.randperm(128, device=device).int()
    out = torch.empty(132, dtype=torch.int32, device=device)
    line_kernel[(1,)](x, out, 128)
    assert torch.equal(out, torch.cat((x.sort()[0], x.topk(4)[0])))
