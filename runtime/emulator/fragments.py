"""Which lane and register hold which matrix element: mma.sync, ldmatrix, stmatrix, movmatrix.

One rule covers every mma shape: lane = 4 * group + t, a register packs `e` neighbours along k,
and registers step first over rows g and g + 8, then over blocks of 4 * e along k.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.intp]


def _lanes() -> tuple[Indices, Indices]:
    lane = np.arange(32)
    return lane // 4, lane % 4


@cache
def a_positions(rows: int, depth: int, packed: int) -> Indices:
    """Index [rows, depth] of each A element in values flattened as [register, lane, packed]."""
    group, t = _lanes()
    index: Indices = np.empty((rows, depth), np.intp)
    halves = rows // 8
    for register in range(halves * depth // (4 * packed)):
        for item in range(packed):
            row = group + 8 * (register % halves)
            column = (register // halves) * 4 * packed + packed * t + item
            index[row, column] = (register * 32 + np.arange(32)) * packed + item
    return index


@cache
def b_positions(depth: int, columns: int, packed: int) -> Indices:
    """Index [depth, columns] of each B element in values flattened as [register, lane, packed]."""
    group, t = _lanes()
    index: Indices = np.empty((depth, columns), np.intp)
    for register in range(depth // (4 * packed)):
        for item in range(packed):
            row = register * 4 * packed + packed * t + item
            index[row, group] = (register * 32 + np.arange(32)) * packed + item
    return index


@cache
def c_elements(rows: int, columns: int) -> Indices:
    """Index into a flattened [rows, columns] matrix of accumulator [pair, lane, 2].

    An accumulator of 32 or 64 bits puts the two elements of a pair in consecutive registers;
    f16 packs them in one.
    """
    group, t = _lanes()
    pairs = []
    for pair in range(rows // 8):
        first = (group + 8 * pair) * columns + 2 * t
        pairs.append(np.stack([first, first + 1], axis=-1))
    return np.stack(pairs)


@cache
def ldmatrix_gather(num: int, trans: bool) -> tuple[Indices, Indices]:
    """Where ldmatrix.m8n8.x{num}.b16 reads: (address_lane, byte_offset).

    Without trans both are [num, 32]: register i of a lane is the 4 bytes at
    address[address_lane] + byte_offset. With trans both are [2, num, 32]: the first axis is the
    lower and upper 16-bit half, each 2 bytes from its own row. stmatrix writes there instead.
    """
    group, t = _lanes()
    first: Indices = 8 * np.arange(num)[:, None]
    if not trans:
        return first + group, np.broadcast_to(4 * t, (num, 32)).copy()
    lanes = np.stack([first + 2 * t, first + 2 * t + 1])
    return lanes, np.broadcast_to(2 * group, (2, num, 32)).copy()


stmatrix_scatter = ldmatrix_gather


def movmatrix(registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """movmatrix.trans.m8n8.b16: transpose the 8x8 matrix in [..., 32] registers of a warp."""
    group, t = _lanes()
    halves = np.ascontiguousarray(registers).view(np.uint16)
    lower = halves[..., (2 * t * 4 + group // 2) * 2 + group % 2].astype(np.uint32)
    upper = halves[..., ((2 * t + 1) * 4 + group // 2) * 2 + group % 2].astype(np.uint32)
    return lower | upper << np.uint32(16)
