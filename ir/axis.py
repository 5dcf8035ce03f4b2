"""How the bits of a layout relate to one axis: what reductions and scans share."""

from __future__ import annotations

from dataclasses import dataclass

from minitriton.ir import f2
from minitriton.ir.linear_layout import DISTRIBUTED, LinearLayout, log2_exact, normalize_dim

SCRATCH_ALIGNMENT = 16


@dataclass(frozen=True)
class AxisBits:
    """Per input, (bit, step along the axis) of the bits that own positions along it, in order
    of the step. Bits that replicate data are left out."""

    register: tuple[tuple[int, int], ...]
    lane: tuple[tuple[int, int], ...]
    warp: tuple[tuple[int, int], ...]


def is_separable(layout: LinearLayout, axis: int) -> bool:
    """Each input bit moves either along the axis or not, by one power of two or not at all
    along it, and none moves along it twice. All constructors give such layouts."""
    axis = normalize_dim(axis, layout.rank)
    mask = layout.dim_mask(axis)
    along = [value for value in layout.flat_all if value & mask]
    return len(set(along)) == len(along) and all(value.bit_count() == 1 for value in along)


def axis_bits(layout: LinearLayout, axis: int) -> AxisBits:
    """The bits that walk along the axis. ValueError where they are not separable."""
    axis = normalize_dim(axis, layout.rank)
    if not is_separable(layout, axis):
        raise ValueError(f"the bits of {layout} mix dimension {axis} with others")
    found = {
        name: tuple(
            sorted(
                (
                    (bit, step)
                    for bit, step in enumerate(layout.coordinate_bases(name, axis))
                    if step
                ),
                key=lambda pair: pair[1],
            )
        )
        for name in DISTRIBUTED
    }
    return AxisBits(**found)


def register_lines(layout: LinearLayout, axis: int, bits: AxisBits) -> tuple[tuple[int, ...], ...]:
    """Per register that layout.slice(axis) has: the source registers along the axis, in order."""
    taken = [bit for bit, _ in bits.register]
    vectors = dict(layout.bases)["register"]
    starts = [1 << bit for bit, v in enumerate(vectors) if any(v) and bit not in taken]
    along = f2.span_elements([1 << bit for bit in taken])
    held = frozenset(layout.registers)
    lines = (
        tuple(register for step in along if (register := start ^ step) in held)
        for start in f2.span_elements(starts)
    )
    return tuple(line for line in lines if line)


@dataclass(frozen=True)
class CrossWarp:
    """Exchange of per-warp partial results through shared memory.

    Element (line, w) of an operand lies at index line * count + w: `count` partials of one
    result element are consecutive, w being the warp's position along the axis. The index a
    thread writes is the XOR of an entry of register_offsets, one for each register that the result
    has, the lane_bases and warp_bases of its set bits and the position_bases of its warp; the
    partials it reads start at the same index without position_bases. Threads with lane &
    idle_lanes or warp & idle_warps do not write. operand_bytes: where each operand's region starts.
    """

    count: int
    register_offsets: tuple[int, ...]
    lane_bases: tuple[int, ...]
    warp_bases: tuple[int, ...]
    position_bases: tuple[int, ...]
    idle_lanes: int
    idle_warps: int
    operand_bytes: tuple[int, ...]
    scratch_bytes: int


def cross_warp(
    layout: LinearLayout, axis: int, bits: AxisBits, elem_bytes: tuple[int, ...]
) -> CrossWarp | None:
    """The exchange needed along the axis, or None where one warp holds each line.

    elem_bytes: bytes per partial of every operand.
    """
    if not bits.warp:
        return None
    result = layout.slice(axis)
    count_bits = len(bits.warp)
    scaled = {name: tuple(v << count_bits for v in result.flat(name)) for name in DISTRIBUTED}
    position = {bit: index for index, (bit, _) in enumerate(bits.warp)}
    entries = 1 << (result.num_bits + count_bits)
    starts, end = [], 0
    for size in elem_bytes:
        starts.append(end)
        end += -(-entries * size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    axis_warps = sum(1 << bit for bit, _ in bits.warp)
    return CrossWarp(
        1 << count_bits,
        tuple(f2.combine(scaled["register"], register) for register in result.registers),
        scaled["lane"],
        scaled["warp"],
        tuple(
            1 << position[b] if b in position else 0 for b in range(log2_exact(layout.num_warps))
        ),
        result.free_bits("lane"),
        result.free_bits("warp") & ~axis_warps,
        tuple(starts),
        end,
    )
