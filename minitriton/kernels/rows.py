"""How the library sees a tensor of any rank: as a matrix of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix with contiguous rows: a view where its strides allow one."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


@dataclass(frozen=True)
class Rows:
    """Rows at two distances: row r starts at (r // inner) * outer_stride + (r % inner) * stride."""

    tensor: torch.Tensor
    outer_stride: int
    stride: int


def rows_in_place(*tensors: torch.Tensor) -> tuple[int, list[Rows]]:
    """(inner, rows of each) for tensors of one shape: views where one `inner` fits, else copies.

    A slice [B, T, H, d] of a fused projection has rows at two distances, one from head to head and
    one from token to token. inner = 1 where one distance is enough for all.
    """
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
