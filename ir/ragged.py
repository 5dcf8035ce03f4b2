"""Tiles whose sizes are no powers of two: their parts, and where they lie in shared memory.

192 = 3 * 64: along such a dimension a tile is three blocks of a granule (64) side by side. In a
distributed layout each block is the same tile of powers of two, `core`, in registers of its own,
`blocks`. In shared memory the offset counts the elements of the hull (256); `gaps` say how many
of those there are no places for, so that what follows comes closer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout, granule


def core(layout: LinearLayout) -> LinearLayout:
    """The layout of one block, which all have; of powers of two."""
    if not layout.is_ragged:
        return layout
    shape = tuple(map(granule, layout.shape))
    keep = [not value & layout.ragged_mask for value in layout.flat("register")]
    bases = {
        name: [v for bit, v in enumerate(vectors) if name != "register" or keep[bit]]
        for name, vectors in layout.bases
    }
    return layout.with_shape(shape, bases)


def blocks(layout: LinearLayout) -> tuple[tuple[int, ...], ...]:
    """Per block, in C order, the registers of `layout` that are those of `core`."""
    flat, mask = layout.flat("register"), layout.ragged_mask
    inner = f2.span_elements([1 << bit for bit, value in enumerate(flat) if not value & mask])
    outer = sorted((value, 1 << bit) for bit, value in enumerate(flat) if value & mask)
    places = f2.span_elements([value for value, _ in outer])
    starts = f2.span_elements([register for _, register in outer])
    return tuple(
        tuple(start | register for register in inner)
        for place, start in zip(places, starts, strict=True)
        if layout.exists(place)
    )


@dataclass(frozen=True)
class Gap:
    """An offset in the hull has `skipped` places too many for each unit of offset >> above."""

    above: int
    skipped: int


@functools.lru_cache(maxsize=1024)
def gaps(shared: LinearLayout) -> tuple[Gap, ...]:
    """Of a shared-memory layout, from the highest bits down; none for powers of two."""
    found = []
    steps = shared.flat("offset")
    for dim, (size, whole) in enumerate(zip(shared.shape, shared.hulls, strict=True)):
        alone = [
            value
            for value in steps
            if value & (value - 1) == 0 and sum(bool(step & value) for step in steps) == 1
        ]  # the bits that no swizzle changes
        step = whole // 2
        if size == whole or step << shared.dim_shifts[dim] not in alone:
            continue
        high = low = steps.index(step << shared.dim_shifts[dim])
        while step > granule(size) and low and steps[low - 1] == steps[low] >> 1:
            if steps[low - 1] not in alone:
                break
            low, step = low - 1, step // 2
        missing = whole // step - -(-size // step)
        if missing:
            found.append(Gap(high + 1, missing << low))
    return tuple(sorted(found, key=lambda gap: -gap.above))


def place_of(offset: int, between: Sequence[Gap]) -> int:
    """Where the element at `offset` of the hull lies."""
    for gap in between:
        offset -= (offset >> gap.above) * gap.skipped
    return offset


def extent(shared: LinearLayout) -> int:
    """Elements of shared memory that a tile takes."""
    return place_of(1 << shared.num_bits, gaps(shared))
