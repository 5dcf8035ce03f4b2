"""Blocks of rows over a grid: each is one program's, whose neighbours lie in the same row."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import row_blocks as grids
from minitriton.kernels import situ_glu, situ_glu_reference
from minitriton.kernels.row_blocks import row_block, row_blocks


@triton.jit
def _count_kernel(out_ptr, rows, columns, BLOCK: tl.constexpr):
    row, first = row_block(BLOCK)
    if row >= rows:
        return
    at = first + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + row * columns + at, 1, mask=at < columns)


@pytest.mark.parametrize("most", [1, 2, 3, 65535])
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 17), (4, 100), (2, 48)])
def test_each_element_has_one_program(device, monkeypatch, shape, most):
    monkeypatch.setattr(grids, "MOST", most)
    grid = row_blocks(*shape, 16)
    assert grid[0] == -(-shape[1] // 16) and grid[1] <= most
    assert shape[0] <= grid[1] * grid[2] < shape[0] + grid[2]
    out = torch.zeros(shape, dtype=torch.int32, device=device)
    _count_kernel[grid](out, *shape, BLOCK=16)
    assert (out == 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_more_rows_than_the_second_dimension_of_a_grid():
    shape = (65536 * 2 + 3, 24)
    gate, up = (torch.randn(shape, device="cuda", requires_grad=True) for _ in "gu")
    out = situ_glu(gate, up)
    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    expected = situ_glu_reference(*exact)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad(expected.sum(), exact)
    for mine, true in zip(torch.autograd.grad(out.sum(), (gate, up)), wanted, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-4)
