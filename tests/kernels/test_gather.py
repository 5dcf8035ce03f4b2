"""tl.gather against torch.gather: shapes, element and index types, layouts, loops."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool]


@triton.jit
def gather_kernel(
    x_ptr, index_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, IM: tl.constexpr,
    IN: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    at = tl.arange(0, IM)[:, None] * IN + tl.arange(0, IN)[None, :]
    tl.store(out_ptr + at, tl.gather(x, tl.load(index_ptr + at), AXIS))


def gathered(device, shape, index_shape, axis, dtype, warps, index_dtype=torch.int32):
    x = torch.randint(-100, 100, shape, device=device).to(dtype)
    index = torch.randint(0, shape[axis], index_shape, device=device).to(index_dtype)
    out = torch.empty(index_shape, dtype=dtype, device=device)
    gather_kernel[(1,)](x, index, out, *shape, *index_shape, axis, num_warps=warps)
    assert torch.equal(out, x.gather(axis, index.long()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_element_types(device, dtype, axis):
    gathered(device, (32, 64), (32, 64), axis, dtype, 4)


@pytest.mark.parametrize(
    ("shape", "index_shape", "axis", "warps"),
    [
        ((16, 64), (16, 256), 1, 4), ((16, 256), (16, 4), 1, 8), ((64, 8), (2, 8), 0, 1),
        ((1, 128), (1, 128), 1, 4), ((48, 80), (16, 80), 0, 4), ((48, 80), (48, 176), 1, 8),
        ((4, 1), (4, 32), 1, 2), ((2, 2), (2, 2), -1, 8),
    ],
    ids=str,
)  # fmt: skip
def test_shapes(device, shape, index_shape, axis, warps):
    gathered(device, shape, index_shape, axis, torch.float32, warps)


@pytest.mark.parametrize("index_dtype", [torch.uint8, torch.int16, torch.int64], ids=str)
def test_index_types(device, index_dtype):
    gathered(device, (4, 256), (4, 128), 1, torch.float16, 4, index_dtype)


@triton.jit
def lines_kernel(x_ptr, out_ptr, R: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    """Along each axis of a tile of rank 3, in turn, and along the only one of rank 1."""
    r, s, t = tl.arange(0, R), tl.arange(0, S), tl.arange(0, T)
    at = (r[:, None, None] * S + s[None, :, None]) * T + t[None, None, :]
    x = tl.load(x_ptr + at)
    x = tl.gather(x, (at * 7 + 3) % R, 0)
    x = tl.gather(x, (at * 5 + 1) % S, axis=1)
    x = x.gather((at * 3 + 2) % T, 2)
    line = tl.gather(tl.arange(0, T) * 10, T - 1 - t, 0)
    tl.store(out_ptr + at, x + line)


@pytest.mark.parametrize("shape", [(4, 8, 16), (2, 48, 16)], ids=str)
def test_ranks(device, shape):
    x = torch.randint(0, 1000, shape, dtype=torch.int32, device=device)
    at = torch.arange(x.numel(), device=device).view(shape)
    expected = x
    for axis, (a, b) in enumerate([(7, 3), (5, 1), (3, 2)]):
        expected = expected.gather(axis, (at * a + b) % shape[axis])
    expected = expected + (shape[2] - 1 - torch.arange(shape[2], device=device)) * 10
    out = torch.empty_like(x)
    lines_kernel[(1,)](x, out, *shape)
    assert torch.equal(out, expected.int())


@triton.jit
def chase_kernel(next_ptr, out_ptr, steps, N: tl.constexpr):
    """Where each place leads to after `steps` steps: each gather needs the one before."""
    at = tl.arange(0, N)
    following = tl.load(next_ptr + at)
    place = at
    for _ in range(steps):
        place = tl.gather(following, place, 0)
    tl.store(out_ptr + at, place)


@pytest.mark.parametrize("warps", [1, 4])
def test_loop(device, warps):
    following = torch.randperm(256, device=device).int()
    out = torch.empty_like(following)
    chase_kernel[(1,)](following, out, 5, N=256, num_warps=warps)
    expected = torch.arange(256, device=device)
    for _ in range(5):
        expected = following[expected.long()]
    assert torch.equal(out, expected.int())


@triton.jit
def product_kernel(x_ptr, order_ptr, out_ptr, N: tl.constexpr):
    """Rows of a product in another order: from and to layouts of tensor cores."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    order = tl.broadcast_to(tl.load(order_ptr + tl.arange(0, N))[:, None], (N, N))
    y = tl.gather(tl.dot(x, x), order, 0)
    tl.store(out_ptr + at, tl.dot(y.to(x.dtype), x))


def test_products(device):
    x = torch.randint(-2, 3, (64, 64), device=device).to(torch.float16)
    order = torch.randperm(64, device=device).int()
    out = torch.empty(64, 64, device=device)
    product_kernel[(1,)](x, order, out, 64)
    expected = (x.float() @ x.float())[order.long()] @ x.float()
    assert torch.equal(out, expected)
