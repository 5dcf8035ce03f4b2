"""Operands of fp32 as wgmma reads them.

It multiplies tf32, of which one operand has to lie along K, and the other may be anything that goes
through registers. For three products of tf32 ("tf32x3") both are copied in two parts,

    x = high + low        high: x rounded to tf32 (10 bits), low: the rest

with rows that TMA can copy. A copy costs as much as it moves, a product as much as it multiplies:
copies are made where the elements take part in enough products.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl

PACK = 64  # rows and columns of a block that is copied
ROUND = 16  # copied rows have a multiple of so many elements
MANY_PRODUCTS = 1 << 30  # from which on copies pay,
PER_ELEMENT = 256  # if each element of the operands is in so many


@triton.jit
def _pack_kernel(
    x_ptr, high_ptr, low_ptr, rows, columns, stride_row, stride_column, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A copy of x [rows, columns] as [rows, stride], zero past the columns; with low_ptr in two
    parts, of which the sum is x: rounded to tf32, and the rest."""
    blocks = tl.cdiv(stride, BLOCK)
    row = tl.program_id(0) // blocks * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row_at, column_at = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row_at * stride_row + column_at * stride_column, mask=mask, other=0.0)
    at = row_at * stride + column_at
    mask = (row[:, None] < rows) & (column[None, :] < stride)
    if low_ptr is None:
        tl.store(high_ptr + at, x, mask=mask)
    else:
        bits = x.to(tl.int32, bitcast=True)
        high = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)
        high = tl.where(x == x, high, x)
        tl.store(high_ptr + at, high, mask=mask)
        tl.store(low_ptr + at, x - high, mask=mask)


Operands = tuple[bool, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def for_wgmma(a: torch.Tensor, b: torch.Tensor, precision: str) -> Operands:
    """(whether products of fp32 run on wgmma, a, b, their low parts or None).

    a: [M, K], b: [K, N], fp32, any strides; what comes back may have more of K, which is zero.

    tf32: of a and b one has to lie along K; if neither does, the smaller is copied. tf32x3: both
    are, in two parts. Only where that takes less time than it saves.
    """
    (m, k), n = a.shape, b.shape[1]
    many = m * n * k >= MANY_PRODUCTS and m * n >= PER_ELEMENT * (m + n)
    if precision == "tf32x3" and many:
        (a, a_low), (b, b_low) = in_parts(a), in_parts(b.T)
        return True, a, b.T, a_low, b_low.T
    if precision != "tf32":
        return False, a, b, None, None
    if a.stride(1) == 1 or b.stride(0) == 1:
        return True, a, b, None, None
    if not many:
        return False, a, b, None, None
    if m < n:
        return True, packed(a), b, None, None
    return True, a, packed(b.T).T, None, None


def packed(x: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix with contiguous rows, which begin where TMA can."""
    high = _room(x)
    _launch_pack(x, high, None)
    return high[:, : x.shape[1]]


def in_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two such matrices, of which the sum is x and some columns of zeros: rounded to tf32, and the
    rest."""
    high, low = _room(x), _room(x)
    _launch_pack(x, high, low)
    return high, low


def _room(x: torch.Tensor) -> torch.Tensor:
    width = triton.cdiv(x.shape[1], ROUND) * ROUND
    return torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)


def _launch_pack(x: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None) -> None:
    rows, width = high.shape
    _pack_kernel[(triton.cdiv(rows, PACK) * triton.cdiv(width, PACK),)](
        x, high, low, rows, x.shape[1], *x.stride(), width, BLOCK=PACK
    )
