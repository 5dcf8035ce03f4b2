"""Softmax over the last dimension, forward and backward.

    y_ij = exp(x_ij - peak_i) / sum_i    peak_i = max_j x_ij    sum_i = sum_j exp(x_ij - peak_i)
    dx_ij = y_ij (dy_ij - sum_j y_ij dy_ij)

A program holds one row, or several short ones. Rows of 16 bits from 4096 elements on are read again
from L1 for the sum and for the result, instead of staying in registers: more programs, and so more
bytes on their way, fit a processor. Rows of more than 16384 elements go through in blocks, twice:
online maximum and sum (M. Milakov and N. Gimelshein, arXiv 1805.02867), then the result. fp32
inside, every sum in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.devices import has_warpgroups
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import new_like, row_tile, rows_of

MAX_ROWS = 2**31 - 1024  # row numbers are int32
WHOLE = 16384  # elements of the longest row that a program holds
LOG2E = tl.constexpr(1.4426950216293335)  # log2(e) in fp32, and what that leaves of it
LOG2E_REST = tl.constexpr(1.92596299e-8)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def shifted_exp(x, centre, EXACT: tl.constexpr):
    """exp(x - centre) of x <= centre, 0 where that is subnormal. The product with log2(e) rounds,
    so the error grows with the distance; EXACT makes up for that: two units of the last place,
    which fp32 gradients that nearly cancel need."""
    x = x - centre
    if EXACT:
        x = tl.maximum(x, -150.0, propagate_nan=tl.PropagateNan.ALL)
        t = x * LOG2E
        rest = tl.fma(x, LOG2E, -t) + x * LOG2E_REST
        return tl.exp2(t) * (1 + rest * LN2)
    return tl.exp2(x * LOG2E)


@triton.jit
def peak_and_sum(
    x_ptrs, row, rows, columns, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of rows [ROWS] that begin at x_ptrs [ROWS, 1]: the maximum, and the sum of exp(x - maximum).
    A block of a row at a time, while the next STAGES - 1 are on their way to shared memory."""
    EXACT: tl.constexpr = x_ptrs.dtype.element_ty == tl.float32
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, columns, BLOCK, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)[None, :]
        mask = (row[:, None] < rows) & (at < columns)
        x = tl.load(x_ptrs + at, mask=mask, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 1), propagate_nan=tl.PropagateNan.ALL)
        centre = tl.where(higher == -float("inf"), 0.0, higher)
        scale = shifted_exp(peak, centre, EXACT)
        total = total * scale + tl.sum(shifted_exp(x, centre[:, None], EXACT), 1)
        peak = higher
    return peak, total


@triton.jit
def _forward_kernel(
    x_ptr, out_ptr, stride, rows, columns,
    READS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask, lowest = (row < rows) & (at < columns), -float("inf")
    x_ptrs = x_ptr + row.to(tl.int64) * stride + at
    # reads with one hint are merged; those with another one take registers anew
    keep: tl.constexpr = "evict_last" if READS > 1 else ""
    last: tl.constexpr = "evict_first" if READS == 3 else ""
    x = tl.load(x_ptrs, mask=mask, other=lowest, eviction_policy=keep).to(tl.float32)
    peak = tl.max(x, 1)[:, None]
    x = tl.load(x_ptrs, mask=mask, other=lowest).to(tl.float32)
    total = tl.sum(shifted_exp(x, peak, EXACT), 1)[:, None]
    x = tl.load(x_ptrs, mask=mask, other=lowest, eviction_policy=last).to(tl.float32)
    _store(out_ptr, row, columns, at, mask, shifted_exp(x, peak, EXACT), total, EXACT)


@triton.jit
def _store(out_ptr, row, columns, at, mask, e, total, EXACT: tl.constexpr):
    y = e / total if EXACT else e * (1 / total)
    to = out_ptr + row.to(tl.int64) * columns + at
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _long_forward_kernel(
    x_ptr, out_ptr, stride, rows, columns, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0) + tl.arange(0, 1)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride
    peak, total = peak_and_sum(x_ptrs, row, rows, columns, STAGES, 1, BLOCK)
    steps = tl.cdiv(columns, BLOCK)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)[None, :]  # L2 holds the end, if any
        x = tl.load(x_ptrs + at, mask=at < columns, other=0.0, eviction_policy="evict_first")
        e = shifted_exp(x.to(tl.float32), peak[:, None], EXACT)
        _store(out_ptr, row[:, None], columns, at, at < columns, e, total[:, None], EXACT)


@triton.jit
def _backward_kernel(
    grad_ptr, y_ptr, dx_ptr, stride, rows, columns,
    READS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (at < columns)
    grad_ptrs = grad_ptr + row.to(tl.int64) * stride + at
    to = row.to(tl.int64) * columns + at
    keep: tl.constexpr = "evict_last" if READS > 1 else ""
    last: tl.constexpr = "evict_first" if READS > 1 else ""
    y = tl.load(y_ptr + to, mask=mask, other=0.0, eviction_policy=keep).to(tl.float32)
    grad = tl.load(grad_ptrs, mask=mask, other=0.0, eviction_policy=keep).to(tl.float32)
    along = tl.sum(y * grad, 1)[:, None]
    y = tl.load(y_ptr + to, mask=mask, other=0.0, eviction_policy=last).to(tl.float32)
    grad = tl.load(grad_ptrs, mask=mask, other=0.0, eviction_policy=last).to(tl.float32)
    tl.store(dx_ptr + to, (y * (grad - along)).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _long_backward_kernel(
    grad_ptr, y_ptr, dx_ptr, stride, columns, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * stride
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, columns, BLOCK, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
        total += y * tl.load(grad_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    along = tl.sum(total)
    last: tl.constexpr = "evict_first"
    steps = tl.cdiv(columns, BLOCK)
    for step in tl.range(0, steps, num_stages=STAGES):
        at = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        mask, to = at < columns, row * columns + at
        y = tl.load(y_ptr + to, mask=mask, other=0.0, eviction_policy=last).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0, eviction_policy=last).to(tl.float32)
        tl.store(dx_ptr + to, (y * (grad - along)).to(dx_ptr.dtype.element_ty), mask=mask)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum(exp(x)) over the last dimension; differentiable in x.

    x: [..., d], fp32, bf16 or fp16, on a GPU or the CPU, fewer than 2^31 - 1024 rows. The result is
    contiguous in x's shape and dtype. As in torch, a row that holds NaN or infinity, or nothing but
    -infinity, is NaN. KernelArgumentError for anything else.
    """
    rows = checks.float_tensor("x", x).shape[:-1].numel()
    if rows > MAX_ROWS:
        raise KernelArgumentError(f"argument 'x': {rows} rows; at most {MAX_ROWS} are supported")
    return _op(x)


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """`softmax` in plain torch, in the dtype of x."""
    return torch.softmax(x, -1)


class Tile(NamedTuple):
    """Rows and columns of a program, its warps, how often the forward pass reads its rows, and the
    warps of the backward pass, which reads them twice if the other does so at all."""

    rows: int
    block: int
    warps: int
    reads: int
    backward_warps: int


# by the power of two that a row of bf16 or fp16 fits in, measured on an H200
TILES = {
    4096: Tile(1, 4096, 8, 2, 16), 8192: Tile(1, 8192, 16, 2, 16),
    16384: Tile(1, 16384, 16, 3, 8),
}  # fmt: skip


@functools.cache
def _tile(columns: int, size: int) -> Tile:
    """Of rows of up to `WHOLE` columns of `size` bytes each."""
    rows, block, warps = row_tile(columns)
    found = Tile(rows, block, warps, 1, warps)
    return TILES.get(found.block, found) if size == 2 else found


@operator("softmax")
def _op(x: torch.Tensor) -> torch.Tensor:
    out = new_like(x)
    if out.numel() == 0:
        return out
    m = rows_of(x)
    rows, columns = m.shape
    if columns > WHOLE:
        # so few programs on a processor that L2 holds their rows for the second pass
        _long_forward_kernel[(rows,)](
            m, out, m.stride(0), rows, columns, STAGES=2, BLOCK=32768 // m.element_size(),
            num_warps=16,
        )  # fmt: skip
        return out
    tile = _tile(columns, m.element_size())
    _forward_kernel[(triton.cdiv(rows, tile.rows),)](
        m, out, m.stride(0), rows, columns, READS=tile.reads, ROWS=tile.rows, BLOCK=tile.block,
        num_warps=tile.warps,
    )  # fmt: skip
    return out


@operator("softmax_backward")
def _backward_op(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y: what the forward pass returned."""
    dx = new_like(y)
    if dx.numel() == 0:
        return dx
    dy = rows_of(grad)
    rows, columns = dy.shape
    if columns > WHOLE:
        _long_backward_kernel[(rows,)](
            dy, y, dx, dy.stride(0), columns, STAGES=5 if has_warpgroups(dy.device) else 3,
            BLOCK=16384 // dy.element_size(), num_warps=16,
        )  # fmt: skip
        return dx
    tile = _tile(columns, dy.element_size())
    _backward_kernel[(triton.cdiv(rows, tile.rows),)](
        dy, y, dx, dy.stride(0), rows, columns, READS=min(2, tile.reads), ROWS=tile.rows,
        BLOCK=tile.block, num_warps=tile.backward_warps,
    )  # fmt: skip
    return dx


_op.register_fake(new_like)
_backward_op.register_fake(lambda grad, y: new_like(y))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return _backward_op(grad, *ctx.saved_tensors)


_op.register_autograd(_differentiate, setup_context=_save)
