"""Scans along sizes that are no powers of two, whose blocks carry their totals on."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def scan_kernel(
    x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, OP: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    if OP == "sum":
        out = tl.cumsum(x, axis=AXIS, reverse=REVERSE)
    else:
        out = tl.cumprod(x, axis=AXIS, reverse=REVERSE)
    tl.store(out_ptr + at, out)


def backwards(x, axis, reverse, scan):
    return scan(x.flip(axis), axis).flip(axis) if reverse else scan(x, axis)


SCANS = [  # shape, warps
    ((4, 48), 1), ((2, 192), 4), ((48, 80), 8), ((176, 4), 4), ((96, 16), 8), ((1, 176), 8),
    ((80, 1), 4),
]  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("shape", "warps"), SCANS, ids=str)
def test_cumsum(device, shape, warps, axis, reverse):
    x = torch.randint(-100, 100, shape, dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    scan_kernel[(1,)](x, out, *shape, axis, "sum", reverse, num_warps=warps)
    assert torch.equal(out, backwards(x, axis, reverse, torch.cumsum).int())


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("axis", [0, 1])
def test_floats(device, axis, reverse):
    x = torch.rand(48, 96, device=device) * 0.2 + 0.9
    for name, scan in (("sum", torch.cumsum), ("prod", torch.cumprod)):
        out = torch.empty_like(x)
        scan_kernel[(1,)](x, out, 48, 96, axis, name, reverse)
        expected = backwards(x, axis, reverse, scan)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@triton.jit
def line_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.cumsum(tl.load(x_ptr + i), 0))


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("n", [48, 80, 176, 192, 1008])
def test_lines(device, n, warps):
    x = torch.randint(-100, 100, (n,), dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    line_kernel[(1,)](x, out, n, num_warps=warps)
    assert torch.equal(out, x.cumsum(0).int())


@triton.jit
def linear_recurrence(a_left, b_left, a_right, b_right):
    return a_left * a_right, b_left * a_right + b_right


@triton.jit
def recurrence_kernel(
    a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    _, h = tl.associative_scan((a, b), AXIS, linear_recurrence, reverse=REVERSE)
    tl.store(out_ptr + at, h)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(
    ("shape", "axis", "warps"),
    [((4, 192), 1, 4), ((80, 48), 1, 8), ((176, 2), 0, 4), ((96, 64), 0, 8), ((2, 48), 1, 1)],
    ids=str,
)
def test_non_commutative(device, shape, axis, warps, reverse):
    a, b = torch.rand(shape, device=device), torch.randn(shape, device=device)
    out = torch.empty_like(a)
    recurrence_kernel[(1,)](a, b, out, *shape, axis, reverse, num_warps=warps)

    def recurrence(pairs, dim):
        h, steps = 0, []
        for a_t, b_t in zip(*(part.unbind(dim) for part in pairs), strict=True):
            h = h * a_t + b_t
            steps.append(h)
        return torch.stack(steps, dim)

    if reverse:
        expected = recurrence((a.flip(axis), b.flip(axis)), axis).flip(axis)
    else:
        expected = recurrence((a, b), axis)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@triton.jit
def scattered_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    x = tl.trans(tl.load(x_ptr + j[:, None] * M + i[None, :]))
    y = tl.dot(x, tl.trans(x)).to(tl.float16)
    tl.store(out_ptr + i[:, None] * M + i[None, :], tl.cumsum(y.to(tl.float32), 1))


@pytest.mark.parametrize("m", [48, 96])
def test_of_product(device, m):
    """Fragments of mma have the axis in no order of registers and lanes."""
    x = torch.randint(-2, 3, (32, m), device=device).half()
    out = torch.empty(m, m, device=device)
    scattered_kernel[(1,)](x, out, m, 32, num_warps=4)
    assert torch.equal(out, (x.T.float() @ x.float()).cumsum(1))
