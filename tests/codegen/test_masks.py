"""Masks: one predicate for all elements that must agree, and none where that is not certain."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def centred_kernel(x_ptr, out_ptr, n, shift, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, tl.where(mask, x - shift, 0.0))


@triton.jit
def rows_kernel(x_ptr, out_ptr, rows, columns, R: tl.constexpr, C: tl.constexpr):
    row, column = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * C + column)
    tl.store(out_ptr + row * C + column, tl.where(mask, x, -x))


@triton.jit
def quotient_kernel(out_ptr, below, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.where((at - below) // 8 < 0, 1, 0))


@triton.jit
def carried_kernel(out_ptr, below, times, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    place = at - below
    for _ in range(times):
        place = place // 8
    tl.store(out_ptr + at, tl.where(place < 0, 1, 0))


@pytest.mark.parametrize(("n", "predicates"), [(768, 2), (761, 8)])
def test_a_mask_takes_one_predicate_for_a_vector(n, predicates):
    """768 is a multiple of 16, so 4 elements of 16 bytes are in or out together."""
    x, out = torch.randn(1024), torch.full((1024,), torch.nan)
    kernel = centred_kernel[(1,)](x, out, n, 0.25, BLOCK=1024, num_warps=4)
    expected = torch.where(torch.arange(1024) < n, x - 0.25, 0.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert kernel.asm["ptx"].count("setp.") == predicates


@pytest.mark.parametrize("columns", [16, 32, 31, 5])
def test_masks_of_two_dimensions(columns):
    x, out = torch.randn(8, 64), torch.full((8, 64), torch.nan)
    rows_kernel[(1,)](x, out, 5, columns, R=8, C=64)
    inside = (torch.arange(8)[:, None] < 5) & (torch.arange(64)[None, :] < columns)
    torch.testing.assert_close(out, torch.where(inside, x, -x), rtol=0, atol=0)


@pytest.mark.parametrize("below", [16, 32])
def test_negative_dividends_are_not_taken_as_equal(below):
    """-7 // 8 is 0 here, as in Triton: within an aligned group of 8 the quotients differ."""
    at = torch.arange(256)
    expected = (torch.div(at - below, 8, rounding_mode="trunc") < 0).int()
    out = torch.empty(256, dtype=torch.int32)
    quotient_kernel[(1,)](out, below, BLOCK=256)
    assert torch.equal(out, expected)
    carried_kernel[(1,)](out, below, 1, BLOCK=256)
    assert torch.equal(out, expected)
