"""How the library sees a tensor of any rank: as a matrix of rows, and as tiles of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

import minitriton as triton

TILE = 1024  # elements that a program of whole rows holds, or one row where that is longer


def dense(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows: itself where its strides allow it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix with contiguous rows: a view where its strides allow one."""
    return dense(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


def new_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Uninitialised, contiguous, on x's device, in its shape and in `dtype` or its own."""
    # half the host time of torch.empty(x.shape, ...)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@functools.cache
def row_tile(columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of the tile of a program that holds whole rows."""
    block = max(16, triton.next_power_of_2(columns))
    return max(1, TILE // block), block, max(4, block // 512)


@dataclass(frozen=True)
class NormTile:
    """What a program of a norm's forward pass takes: `rows` of them, `block` columns at once.

    reread: rows are read once more for the result, from L1, where they would else stay in
    registers. Fewer of these let more programs, and so more bytes on their way, onto a processor.
    """

    rows: int
    block: int
    warps: int
    reread: bool = False

    def steps(self, columns: int) -> int:
        """Blocks of a row; Requires: 1 unless `reread`."""
        return triton.cdiv(columns, self.block)

    def fits(self, columns: int) -> bool:
        """Whether the blocks of a row are full."""
        return columns % self.block == 0


# by the power of two that a row of bf16 or fp16 fits in; rows that are not listed take `row_tile`
RMS_NORM_TILES = {
    4096: NormTile(1, 4096, 8, reread=True),
    8192: NormTile(1, 8192, 16, reread=True),
}
ADD_LAYER_NORM_TILES = {
    512: NormTile(2, 512, 1),
    4096: NormTile(1, 4096, 8, reread=True),
    8192: NormTile(1, 4096, 16, reread=True),
}
LAYER_NORM_TILES = {
    1024: NormTile(2, 1024, 2),
    4096: NormTile(1, 4096, 4, reread=True),
    8192: NormTile(1, 8192, 16, reread=True),
}


def norm_tile(columns: int, dtype: torch.dtype, tiles: dict[int, NormTile]) -> NormTile:
    """The tile of rows of `columns` elements of x's dtype."""
    found = tiles.get(row_tile(columns)[1]) if dtype.itemsize == 2 else None
    return found or _plain_tile(columns)


@functools.cache
def _plain_tile(columns: int) -> NormTile:
    return NormTile(*row_tile(columns))


def row_programs(tiles: int, block: int) -> int:
    """Programs of a backward pass over tiles of `block` columns: as many as reside on a large GPU
    at once, few enough to keep partial sums small."""
    return min(tiles, max(132, min(1056, 132 * 8192 // block)))


def backward_warps(block: int) -> int:
    """Of such a program."""
    return 16 if block >= 4096 else max(4, block // 512)


class Rows(NamedTuple):
    """Rows at two distances: row r starts at (r // inner) * outer_stride + (r % inner) * stride."""

    tensor: torch.Tensor
    outer_stride: int
    stride: int


def rows_in_place(*tensors: torch.Tensor) -> tuple[int, list[Rows]]:
    """(inner, rows of each) for tensors of one shape: views where one `inner` fits, else copies.

    A slice [B, T, H, d] of a fused projection has rows at two distances, one from head to head and
    one from token to token. inner = 1 where one distance is enough for all.
    """
    if all(x.is_contiguous() for x in tensors):
        columns = tensors[0].shape[-1]
        return 1, [Rows(x, columns, 0) for x in tensors]
    shape = tensors[0].shape
    lengths = [1, *(shape[split:-1].numel() for split in range(len(shape) - 2, 0, -1))]
    usable = [x if any(_rows(x, n) for n in lengths) else x.contiguous() for x in tensors]
    for inner in lengths:
        rows = [row for x in usable if (row := _rows(x, inner))]
        if len(rows) == len(tensors):
            return inner, rows
    return 1, [row for x in usable if (row := _rows(x, 1) or _rows(x.contiguous(), 1))]


def _rows(x: torch.Tensor, inner: int) -> Rows | None:
    """x as rows in groups of `inner`, if its strides allow it without a copy."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return None
    try:
        view = x.view(-1, inner, x.shape[-1])
    except RuntimeError:
        return None
    outer, stride, _ = view.stride()
    return Rows(x, outer, 0 if inner == 1 else stride)
