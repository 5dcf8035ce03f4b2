"""tl.flip and tl.cat of tiles of sizes that are no powers of two."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def flip_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.flip(tl.load(x_ptr + at), AXIS))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("shape", "warps"),
    [((4, 48), 1), ((2, 192), 4), ((48, 80), 8), ((176, 4), 4), ((96, 16), 8), ((80, 1), 4)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_flip(device, shape, warps, axis, dtype):
    x = torch.randn(shape, device=device).to(dtype)
    out = torch.empty_like(x)
    flip_kernel[(1,)](x, out, *shape, axis, num_warps=warps)
    assert torch.equal(out, x.flip(axis))


@triton.jit
def line_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.flip(tl.load(x_ptr + i))
    tl.store(out_ptr + tl.arange(0, 2 * N), tl.cat(x, tl.load(y_ptr + i) * 2))


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("n", [48, 80, 176, 192])
def test_lines(device, n, warps):
    x, y = torch.randn(2, n, device=device)
    out = torch.empty(2 * n, device=device)
    line_kernel[(1,)](x, y, out, n, num_warps=warps)
    assert torch.equal(out, torch.cat((x.flip(0), y * 2)))


@triton.jit
def cat_kernel(
    x_ptr, y_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    both = tl.cat(tl.load(x_ptr + at), tl.load(y_ptr + at), dim=AXIS)
    R: tl.constexpr = both.shape[0]
    C: tl.constexpr = both.shape[1]
    tl.store(out_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :], both)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("shape", "warps"), [((4, 48), 1), ((48, 80), 8), ((176, 4), 4), ((96, 16), 8)], ids=str
)
def test_cat(device, shape, warps, axis):
    x, y = torch.randn(2, *shape, device=device)
    expected = torch.cat((x, y), axis)
    out = torch.empty_like(expected)
    cat_kernel[(1,)](x, y, out, *shape, axis, num_warps=warps)
    assert torch.equal(out, expected)


@triton.jit
def products_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i, k = tl.arange(0, N), tl.arange(0, 16)
    x = tl.load(x_ptr + i[:, None] * 16 + k[None, :])
    y = tl.cat(tl.flip(tl.dot(x, tl.trans(x)), 1), tl.dot(x, tl.trans(x)), dim=1)
    j = tl.arange(0, 2 * N)
    tl.store(out_ptr + i[:, None] * (2 * N) + j[None, :], tl.flip(y, 0))


@pytest.mark.parametrize("n", [48, 96])
def test_of_products(device, n):
    x = torch.randint(-3, 4, (n, 16), device=device).half()
    out = torch.empty(n, 2 * n, device=device)
    products_kernel[(1,)](x, out, n, num_warps=4)
    product = x.float() @ x.T.float()
    assert torch.equal(out, torch.cat((product.flip(1), product), 1).flip(0))


@triton.jit
def types_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + j[None, :])
    sums = tl.cumsum(x + tl.flip(x, AXIS), AXIS).to(x.dtype)
    at = i[:, None] * (2 * N) + tl.arange(0, 2 * N)[None, :]
    tl.store(out_ptr + at, tl.cat(x, sums, dim=1))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64], ids=str
)
def test_types(device, dtype, axis):
    x = torch.randint(-1, 2, (48, 80), device=device).to(dtype)
    out = torch.empty(48, 160, device=device, dtype=dtype)
    types_kernel[(1,)](x, out, 48, 80, axis, num_warps=8)
    sums = (x + x.flip(axis)).double().cumsum(axis)
    assert torch.equal(out.double(), torch.cat((x.double(), sums), 1))
