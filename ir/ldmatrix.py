"""Plans for ldmatrix and stmatrix: 8x8 blocks of 16-bit values between shared memory and the
fragments of tensor-core instructions.

In one ldmatrix, lanes 8j..8j+7 give the addresses of the 16-byte rows of block j. Lane l
receives in register j the l % 4-th 32-bit word of row l / 4, or with .trans the 16-bit
elements of rows 2 * (l % 4) and the next in column l / 4. stmatrix is the mirror image, so
one plan serves both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout, log2_exact
from minitriton.ir.ragged import Gap, gaps
from minitriton.ir.shared_access import Displacement, conflict_degree, offsets_of, reachable


@dataclass(frozen=True)
class LdmatrixInstruction(Displacement):
    """registers: per block, the element registers packed in its 32-bit register, low bits first.

    A lane's row address is the base displaced as `Displacement` says.
    """

    registers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LdmatrixPlan:
    """Offsets in elements of elem_bits; base = XOR of lane_bases and warp_bases over set bits.

    matrices: 1, 2 or 4 blocks per instruction (.x1, .x2, .x4). lane_bases give the row address
    that a lane supplies; lanes beyond 8 * matrices repeat addresses of the first ones.
    conflicts: wavefronts per block, 1 where its rows are free of bank conflicts.
    """

    elem_bits: int
    transposed: bool
    matrices: int
    lane_bases: tuple[int, ...]
    warp_bases: tuple[int, ...]
    instructions: tuple[LdmatrixInstruction, ...]
    conflicts: int
    gaps: tuple[Gap, ...] = ()


@functools.lru_cache(maxsize=4096)
def ldmatrix_plan(
    shared: LinearLayout, operand: LinearLayout, elem_bits: int
) -> LdmatrixPlan | None:
    """How ldmatrix loads `operand` (or stmatrix stores it), or None where it cannot.

    The fragment's 32-bit registers must hold consecutive low register bits. Without .trans any
    element of 8, 16 or 32 bits will do; .trans moves 16-bit elements only.
    """
    if elem_bits not in (8, 16, 32) or operand.in_bits("lane") != 5:
        return None
    offsets = offsets_of(shared, operand)
    registers, lanes, warps = offsets["register"], offsets["lane"], offsets["warp"]
    chunk = [1 << bit for bit in range(log2_exact(128 // elem_bits))]
    pack = log2_exact(32 // elem_bits)
    # what must walk through the 16 bytes of a row, and what picks the row within a block
    direct = [*registers[:pack], *lanes[:2]], [*lanes[2:]]
    crossed = [*lanes[2:]], [*registers[:1], *lanes[:2]]
    if direct[0] == chunk:
        transposed, rows = False, direct[1]
    elif elem_bits == 16 and crossed[0] == chunk and len(registers) >= 1:
        transposed, rows = True, crossed[1]
    else:
        return None
    if any(basis & sum(chunk) for basis in (*rows, *registers[pack:], *warps)):
        return None
    blocks = _block_bits(registers, operand, pack)
    lane_bases = (*rows, *(registers[bit] for bit in blocks), 0, 0)[:5]
    touched = reachable((*lane_bases, *warps))
    inside = f2.span_elements([1 << bit for bit in range(pack)])
    places = f2.span_elements([1 << bit for bit in blocks])
    outer = [1 << b for b in range(pack, len(registers)) if b not in blocks]
    instructions, held = [], frozenset(operand.registers)
    for start in f2.span_elements(outer):
        if start not in held:
            continue
        offset = f2.combine(registers, start)
        groups = tuple(tuple(start ^ place ^ i for i in inside) for place in places)
        instructions.append(LdmatrixInstruction(offset & touched, offset & ~touched, groups))
    row_bytes = [offset * elem_bits // 8 for offset in f2.span_elements(rows)]
    return LdmatrixPlan(
        elem_bits,
        transposed,
        1 << len(blocks),
        lane_bases,
        warps,
        tuple(instructions),
        conflict_degree(row_bytes, 16),
        gaps(shared),
    )


def _block_bits(registers: tuple[int, ...], operand: LinearLayout, pack: int) -> list[int]:
    """Up to two register bits that select the blocks of one instruction, which exist as one."""
    steps = operand.flat("register")
    bits = [
        bit
        for bit in range(pack, len(registers))
        if registers[bit] and not steps[bit] & operand.ragged_mask
    ]
    return bits[:2]
