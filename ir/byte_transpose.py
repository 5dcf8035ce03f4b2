"""Plans for ldmatrix.trans on bytes: A of an 8-bit product out of memory along M.

.trans moves pairs of bytes, here two rows of A at one K: a lane gets, of block j, the pairs at two
neighbouring K. Two blocks make up the words of two rows, whose bytes are four K in a row:

    block 0: K 0,1 | 4,5 | 10,11 | 14,15 of lanes 0..3     block 1: 2,3 | 6,7 | 8,9 | 12,13
    a row's word: its bytes of block 0, then of block 1; the other way round in lanes 2, 3

So the eight rows of a block are K with eight different low three bits (but for bit 1, which bit 3
flips): a swizzle by those keeps them in different banks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.shared_access import Displacement, conflict_degree, offsets_of, reachable

ROW_BYTES = 16  # of a block
BLOCKS = 4  # of one instruction: 16 rows of A, 32 deep


@dataclass(frozen=True)
class ByteBlocks(Displacement):
    """One ldmatrix.x4.trans, whose four words become the 16 registers from `first` on."""

    first: int


@dataclass(frozen=True)
class ByteTransposePlan:
    """Byte offsets; a lane's row address is the XOR of lane_bases and warp_bases over set bits.

    conflicts: wavefronts per block, 1 where its rows are free of bank conflicts.
    """

    lane_bases: tuple[int, ...]
    warp_bases: tuple[int, ...]
    instructions: tuple[ByteBlocks, ...]
    conflicts: int


@functools.lru_cache(maxsize=256)
def byte_transpose_plan(shared: LinearLayout, operand: LinearLayout) -> ByteTransposePlan | None:
    """How an operand in `adjacent_rows` is loaded; None for any other tile."""
    offsets = offsets_of(shared, operand)
    registers, lanes, warps = offsets["register"], offsets["lane"], offsets["warp"]
    if len(registers) < 4 or len(lanes) != 5 or (registers[2], *lanes[2:]) != (1, 2, 4, 8):
        return None
    low, next_low, _, half = registers[:4]
    bases = (low, lanes[0], lanes[1] ^ next_low, next_low, half)
    apart = (*bases, *warps, *registers[4:])
    if any(offset % ROW_BYTES or not offset for offset in apart):
        return None
    touched = reachable((*bases, *warps))
    found = []
    for index in range(1 << len(registers) - 4):
        offset = f2.combine(registers[4:], index)
        found.append(ByteBlocks(offset & touched, offset & ~touched, BLOCKS * 4 * index))
    rows = f2.span_elements(bases[:3])
    return ByteTransposePlan(bases, warps, tuple(found), conflict_degree(rows, ROW_BYTES))
