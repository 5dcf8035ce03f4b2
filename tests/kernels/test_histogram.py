"""tl.histogram against torch.bincount: sizes, types, masks, values without a bin, loops."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def histogram_kernel(x_ptr, out_ptr, n, N: tl.constexpr, BINS: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + tl.arange(0, BINS), tl.histogram(x, BINS, mask=at < n))


def counts(x, bins):
    x = x.long()
    return torch.bincount(x[(x >= 0) & (x < bins)], minlength=bins).int()


@pytest.mark.parametrize(
    ("size", "bins", "warps"),
    [(1024, 16, 4), (64, 256, 4), (32, 2, 1), (2048, 512, 8), (176, 48, 4), (16, 1, 2)],
)
def test_sizes(device, size, bins, warps):
    for n in (size, size // 2 + 1):
        x = torch.randint(0, bins, (size,), dtype=torch.int32, device=device)
        out = torch.full((bins,), -1, dtype=torch.int32, device=device)
        histogram_kernel[(1,)](x, out, n, size, bins, num_warps=warps)
        assert torch.equal(out, counts(x[:n], bins))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64], ids=str)
def test_types_and_values_without_a_bin(device, dtype):
    info = torch.iinfo(dtype)
    x = torch.randint(0, 40, (512,), device=device)
    extremes = torch.tensor([info.min, info.max, info.max - 1, 33], device=device)
    x = torch.where(x > 35, extremes[x % 4], x).to(dtype)
    out = torch.full((32,), -1, dtype=torch.int32, device=device)
    histogram_kernel[(1,)](x, out, 512, 512, 32)
    assert torch.equal(out, counts(x, 32))


def test_more_bins_than_values(device):
    """A byte has fewer values than there are bins."""
    x = torch.randint(0, 256, (256,), dtype=torch.uint8, device=device)
    out = torch.full((512,), -1, dtype=torch.int32, device=device)
    histogram_kernel[(1,)](x, out, 256, 256, 512)
    assert torch.equal(out, counts(x, 512))


@triton.jit
def rows_kernel(x_ptr, out_ptr, rows, N: tl.constexpr, BINS: tl.constexpr):
    """Of all rows, counted twice by one histogram after the other."""
    at = tl.arange(0, N)
    total = tl.zeros((BINS,), tl.int32)
    for row in range(rows):
        x = tl.load(x_ptr + row * N + at)
        total += tl.histogram(x, BINS) + tl.cast(x, tl.int32).histogram(BINS, True)
    tl.store(out_ptr + tl.arange(0, BINS), total)


@pytest.mark.parametrize("warps", [1, 4])
def test_loop(device, warps):
    x = torch.randint(0, 100, (5, 128), dtype=torch.int16, device=device)
    out = torch.empty(64, dtype=torch.int32, device=device)
    rows_kernel[(1,)](x, out, 5, 128, 64, num_warps=warps)
    assert torch.equal(out, 2 * counts(x.flatten(), 64))
