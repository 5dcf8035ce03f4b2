"""Reshaping, transposing, joining, splitting, broadcasting and indexing of tiles."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def transpose_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + n[:, None] * M + m[None, :], tl.trans(x))


@pytest.mark.parametrize("shape", [(4, 4), (16, 64), (128, 32), (1, 256), (64, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.bool], ids=str)
def test_transpose(device, shape, dtype):
    x = (torch.randn(shape, device=device) * 10).to(dtype)
    out = torch.empty(shape[::-1], dtype=dtype, device=device)
    transpose_kernel[(1,)](x, out, *shape)
    assert torch.equal(out, x.T)


@triton.jit
def permute_kernel(x_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A), tl.arange(0, B), tl.arange(0, C)
    x = tl.load(x_ptr + a[:, None, None] * (B * C) + b[None, :, None] * C + c[None, None, :])
    y = tl.permute(x, (2, 0, 1))
    tl.store(out_ptr + c[:, None, None] * (A * B) + a[None, :, None] * B + b[None, None, :], y)


def test_permute(device):
    x = torch.randn(4, 8, 16, device=device)
    out = torch.empty(16, 4, 8, device=device)
    permute_kernel[(1,)](x, out, 4, 8, 16)
    assert torch.equal(out, x.permute(2, 0, 1))


@triton.jit
def reshape_kernel(
    x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, Q: tl.constexpr
):
    m, n = tl.arange(0, M), tl.arange(0, N)
    p, q = tl.arange(0, P), tl.arange(0, Q)
    x = tl.load(x_ptr + n[None, :] * M + m[:, None])
    tl.store(out_ptr + p[:, None] * Q + q[None, :], tl.reshape(x, (P, Q)))


@pytest.mark.parametrize("to", [(32, 32), (8, 128), (1024, 1), (1, 1024)], ids=str)
def test_reshape_keeps_c_order(device, to):
    x = torch.randn(16, 64, device=device)
    out = torch.empty(to, device=device)
    reshape_kernel[(1,)](x.T.contiguous(), out, 16, 64, *to)
    assert torch.equal(out, x.reshape(to))


@triton.jit
def join_split_kernel(a_ptr, b_ptr, out_ptr, even_ptr, odd_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    a, b = tl.load(a_ptr + n), tl.load(b_ptr + n)
    joined = tl.join(a, b)
    tl.store(out_ptr + n[:, None] * 2 + tl.arange(0, 2)[None, :], joined)
    both = tl.interleave(a, b)
    even, odd = tl.split(tl.reshape(both * 2, (N, 2)))
    tl.store(even_ptr + n, even)
    tl.store(odd_ptr + n, odd)


@pytest.mark.parametrize("n", [2, 64, 512])
def test_join_split_interleave(device, n):
    a, b = torch.randn(n, device=device), torch.randn(n, device=device)
    out = torch.empty(n, 2, device=device)
    even, odd = torch.empty_like(a), torch.empty_like(a)
    join_split_kernel[(1,)](a, b, out, even, odd, N=n)
    assert torch.equal(out, torch.stack([a, b], -1))
    assert torch.equal(even, a * 2) and torch.equal(odd, b * 2)


@triton.jit
def cat_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    both = tl.cat(tl.load(a_ptr + n), tl.load(b_ptr + n), can_reorder=True)
    tl.store(out_ptr, tl.sum(both * both))


def test_cat(device):
    a, b = torch.randn(128, device=device), torch.randn(128, device=device)
    out = torch.empty(1, device=device)
    cat_kernel[(1,)](a, b, out, N=128)
    torch.testing.assert_close(out[0], (a * a).sum() + (b * b).sum(), rtol=1e-5, atol=1e-4)


@triton.jit
def broadcast_kernel(x_ptr, y_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m)[:, None]
    y = tl.expand_dims(tl.load(y_ptr + n), 0)
    x_wide = tl.broadcast_to(x, (M, N))
    x2, y2 = tl.broadcast(x, y)
    tl.store(out_ptr + m[:, None] * N + n[None, :], x_wide * y + (x2 - y2) + tl.ravel(x)[:, None])


def test_broadcast(device):
    x, y = torch.randn(32, device=device), torch.randn(64, device=device)
    out = torch.empty(32, 64, device=device)
    broadcast_kernel[(1,)](x, y, out, 32, 64)
    expected = x[:, None] * y + (x[:, None] - y) + x[:, None]
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@triton.jit
def outer_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    row = tl.sum(x[:, None] * x[None, :], axis=1)
    tl.store(out_ptr + n, row.view(N) + tl.zeros((N,), tl.float32))


@pytest.mark.parametrize("n", [8, 128])
def test_broadcast_then_reduce(device, n):
    x = torch.randn(n, device=device)
    out = torch.empty_like(x)
    outer_kernel[(1,)](x, out, N=n)
    torch.testing.assert_close(out, x * x.sum(), rtol=1e-4, atol=1e-4)


@triton.jit
def strided_kernel(
    x_ptr, out_ptr, rows, cols, stride_r, stride_c, R: tl.constexpr, C: tl.constexpr
):
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    mask = (r < rows) & (c < cols)
    x = tl.load(x_ptr + r * stride_r + c * stride_c, mask=mask, other=0)
    tl.store(out_ptr + r * cols + c, x, mask=mask)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64], ids=str
)
@pytest.mark.parametrize("view", ["plain", "transposed", "sliced", "broadcast"])
def test_strided_copy(device, dtype, view):
    base = (torch.randn(70, 90, device=device) * 9).to(dtype)
    x = {
        "plain": base, "transposed": base.T, "sliced": base[3:, 1:80:2],
        "broadcast": base[0:1].expand(33, 90),
    }[view]  # fmt: skip
    out = torch.empty(x.shape, dtype=dtype, device=device)
    grid = (triton.cdiv(x.shape[0], 32), triton.cdiv(x.shape[1], 32))
    strided_kernel[grid](x, out, *x.shape, *x.stride(), R=32, C=32)
    assert torch.equal(out, x)
