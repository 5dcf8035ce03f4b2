"""Plans of reductions and scans along one axis of a distributed tile.

A plan says which registers combine, which shuffles follow, and what crosses warps through
shared memory; code generation fills in the combine region. The simulators define the meaning.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minitriton.ir import f2
from minitriton.ir.axis import (
    SCRATCH_ALIGNMENT,
    CrossWarp,
    axis_bits,
    cross_warp,
    is_separable,
    register_lines,
)
from minitriton.ir.linear_layout import (
    DISTRIBUTED,
    LinearLayout,
    granule,
    log2_exact,
    normalize_dim,
)

if TYPE_CHECKING:
    import numpy as np

Combine = Callable[["np.ndarray", "np.ndarray"], "np.ndarray"]


@dataclass(frozen=True)
class ReductionPlan:
    """Steps of a reduction; the combine function must be associative and commutative.

    1. groups: per register that `result` has, the source registers to fold, in axis order.
    2. lane_masks: fold with the value of lane ^ mask (shfl.bfly), mask by mask.
    3. cross_warp: write the partial, barrier, read and fold `count` partials; None if not needed.
       Of many, each of `readers` lanes in a row reads an equal part and folds it with the others'.
    Afterwards every thread holds the result in layout `result` = source.slice(axis).
    """

    result: LinearLayout
    groups: tuple[tuple[int, ...], ...]
    lane_masks: tuple[int, ...]
    cross_warp: CrossWarp | None
    readers: int = 1

    @property
    def scratch_bytes(self) -> int:
        return self.cross_warp.scratch_bytes if self.cross_warp else 0

    @property
    def reader_masks(self) -> tuple[int, ...]:
        """The lanes to fold with, as in lane_masks, after a lane folded the partials it read."""
        return tuple(1 << bit for bit in range(log2_exact(self.readers)))


@functools.lru_cache(maxsize=1024)
def plan_reduction(
    layout: LinearLayout, axis: int, elem_bytes: tuple[int, ...] = (4,)
) -> ReductionPlan:
    """Reduce along `axis`. elem_bytes: bytes of each operand (several are reduced together).

    ValueError where bits of the layout mix the axis with others (convert to
    `scan_layout(layout, axis)` first).
    """
    axis = normalize_dim(axis, layout.rank)
    bits = axis_bits(layout, axis)
    exchange = cross_warp(layout, axis, bits, elem_bytes)
    return ReductionPlan(
        layout.slice(axis),
        register_lines(layout, axis, bits),
        tuple(1 << bit for bit, _ in bits.lane),
        exchange,
        1 if exchange is None else _readers(exchange, max(elem_bytes)),
    )


def _readers(exchange: CrossWarp, elem_bytes: int) -> int:
    """As few lanes as read all in one access each, where it takes one lane four and more."""
    accesses = exchange.count * elem_bytes // SCRATCH_ALIGNMENT
    return accesses if accesses >= 4 and not any(exchange.lane_bases) else 1


@dataclass(frozen=True)
class LaneStep:
    """One butterfly step of an exclusive scan over lanes.

    Each lane fetches its partner's total (lane ^ mask). A lane whose `mask` bit is set (clear in
    a reverse scan) lies behind its partner: its prefix becomes combine(fetched, prefix), or
    fetched where it has none yet; it has one where lane & earlier is nonzero (in a reverse scan:
    differs from `earlier`). Totals become combine(front total, back total).
    """

    mask: int
    earlier: int


@dataclass(frozen=True)
class ScanPlan:
    """Steps of an inclusive scan; the combine function must be associative.

    1. lines: per line, the registers in scan order; combine along them one by one. The last
       one's value is the thread's total.
    2. lane_steps: exclusive prefix and total over the lanes.
    3. cross_warp: write totals, barrier, read `count` totals per line; put those of positions
       below the warp's own (above it in a reverse scan) in front of the prefix, nearest first.
    4. Where the axis is cut into blocks (`cut`) each line lies in one of them; a chain has the
       lines side by side along the axis, in scan order. The totals of those before a line, folded,
       go in front of its prefix.
    5. combine the prefix, where there is one, in front of every register.
    The result has the source's layout. `result_line` is the layout of one total per line.
    """

    reverse: bool
    lines: tuple[tuple[int, ...], ...]
    lane_steps: tuple[LaneStep, ...]
    cross_warp: CrossWarp | None
    result_line: LinearLayout
    duplicates: tuple[tuple[int, int], ...]
    chains: tuple[tuple[int, ...], ...]

    @property
    def scratch_bytes(self) -> int:
        return self.cross_warp.scratch_bytes if self.cross_warp else 0

    @functools.cached_property
    def carried(self) -> frozenset[int]:
        """The lines that have others of their chain before them."""
        return frozenset(line for chain in self.chains for line in chain[1:])


def cut(layout: LinearLayout, axis: int) -> tuple[LinearLayout, int]:
    """The tile with the axis cut in two, blocks and their elements, and where the latter lie.

    As it is where the size is a power of two or a thread holds all along the axis."""
    axis = normalize_dim(axis, layout.rank)
    size = layout.shape[axis]
    block = granule(size)
    mask = layout.dim_mask(axis)
    shared = any(value & mask for name in ("lane", "warp") for value in layout.flat(name))
    if block == size or not shared:
        return layout, axis
    shape = (*layout.shape[:axis], size // block, block, *layout.shape[axis + 1 :])
    return layout.reshape(shape), axis + 1


def is_scannable(layout: LinearLayout, axis: int) -> bool:
    """Registers hold the lowest bits of the axis, then lanes, then warps, in each block."""
    if not is_separable(layout, axis):
        return False
    try:
        bits = axis_bits(*cut(layout, axis))
    except ValueError:
        return False
    steps = [step for _, step in (*bits.register, *bits.lane, *bits.warp)]
    return steps == sorted(steps)


@functools.lru_cache(maxsize=1024)
def plan_scan(
    layout: LinearLayout, axis: int, elem_bytes: tuple[int, ...] = (4,), reverse: bool = False
) -> ScanPlan:
    """Inclusive scan along `axis`. ValueError unless `is_scannable` (see `scan_layout`)."""
    axis = normalize_dim(axis, layout.rank)
    if not is_scannable(layout, axis):
        raise ValueError(f"{layout} does not order dimension {axis} by register, lane, warp")
    whole, (layout, axis) = layout, cut(layout, axis)
    bits = axis_bits(layout, axis)
    lines = register_lines(layout, axis, bits)
    masks = [1 << bit for bit, _ in bits.lane]
    steps = tuple(LaneStep(mask, sum(masks[:index])) for index, mask in enumerate(masks))
    if reverse:
        lines = tuple(line[::-1] for line in lines)
    zeros = [bit for bit, value in enumerate(layout.flat("register")) if value == 0]
    zero_mask = sum(1 << bit for bit in zeros)
    duplicates = tuple(
        (register, register & ~zero_mask)
        for register in range(layout.num_registers)
        if register & zero_mask
    )
    exchange = cross_warp(layout, axis, bits, elem_bytes)
    result = layout.slice(axis)
    chains = () if layout is whole else _chains(result, axis - 1, reverse)
    return ScanPlan(reverse, lines, steps, exchange, result, duplicates, chains)


def _chains(lines: LinearLayout, blocks: int, reverse: bool) -> tuple[tuple[int, ...], ...]:
    """Lines that differ in their place along the dimension `blocks` alone, in order of that."""
    steps = lines.coordinate_bases("register", blocks)
    along = sum(1 << bit for bit, step in enumerate(steps) if step)
    chains: dict[int, list[tuple[int, int]]] = {}
    for index, register in enumerate(lines.registers):
        place = f2.combine(steps, register)
        chains.setdefault(register & ~along, []).append((place, index))
    return tuple(
        tuple(index for _, index in sorted(chain, reverse=reverse)) for chain in chains.values()
    )


def scan_layout(layout: LinearLayout, axis: int) -> LinearLayout:
    """The nearest layout that plan_scan (and plan_reduction) accepts: the same number of axis
    bits in registers, lanes and warps, handed out in order. Itself where it already fits."""
    axis = normalize_dim(axis, layout.rank)
    if is_scannable(layout, axis):
        return layout
    return _reordered(*cut(layout, axis)).reshape(layout.shape)


def _reordered(layout: LinearLayout, axis: int) -> LinearLayout:
    """Give each owning input bit that touches the axis the next step along it."""
    axis_mask = layout.dim_mask(axis)
    shift = layout.dim_shifts[axis]
    span, outside = f2.Span(), f2.Span()
    steps = iter(range(log2_exact(layout.shape[axis])))
    flat: dict[str, list[int]] = {}
    for name in DISTRIBUTED:
        flat[name] = []
        for value in layout.flat(name):
            rest = value & ~axis_mask
            owns = span.add(value)
            keeps = owns and rest and outside.add(rest)
            new = rest if keeps else 1 << (shift + next(steps)) if owns else 0
            flat[name].append(new)
    flat["register"] = [value for value in flat["register"] if value]
    return LinearLayout.from_flat(layout.shape, flat)


def _exchange(plan: CrossWarp, partials: np.ndarray) -> np.ndarray:
    """Write and read partials [lines, lanes, warps]; returns [count, lines, lanes, warps]."""
    import numpy as np

    own = np.array(f2.span_elements(plan.lane_bases))[:, None]
    own = own ^ np.array(f2.span_elements(plan.warp_bases))
    position = np.array(f2.span_elements(plan.position_bases))
    lane, warp = np.ogrid[: own.shape[0], : own.shape[1]]
    writes = (lane & plan.idle_lanes | warp & plan.idle_warps) == 0
    memory: dict[int, object] = {}
    for register, offset in enumerate(plan.register_offsets):
        for index in np.argwhere(writes):
            address = int((own ^ offset ^ position)[tuple(index)])
            memory[address] = partials[(register, *index)]
    read = np.stack([own ^ offset for offset in plan.register_offsets])
    fetch = np.vectorize(lambda address: memory[address], otypes=[partials.dtype])
    found: np.ndarray = np.stack([fetch(read + w) for w in range(plan.count)])
    return found


def simulate_reduction(plan: ReductionPlan, values: np.ndarray, combine: Combine) -> np.ndarray:
    """Execute on [registers, lanes, warps]; returns [result registers, lanes, warps]."""
    import numpy as np

    folded = [functools.reduce(combine, values[list(group)]) for group in plan.groups]
    partial: np.ndarray = np.stack(folded)
    lanes = np.arange(values.shape[1])
    for mask in plan.lane_masks:
        partial = combine(partial, partial[:, lanes ^ mask])
    if plan.cross_warp:
        found = _exchange(plan.cross_warp, partial)
        part = plan.cross_warp.count // plan.readers
        start = (lanes % plan.readers * part)[None, None, :, None]
        mine = [np.take_along_axis(found, start + w, 0)[0] for w in range(part)]
        partial = functools.reduce(combine, mine)
    for mask in plan.reader_masks:
        partial = combine(partial, partial[:, lanes ^ mask])
    return partial


def simulate_scan(
    plan: ScanPlan, layout: LinearLayout, axis: int, values: np.ndarray, combine: Combine
) -> np.ndarray:
    """Execute on [registers, lanes, warps] of `layout`; the same for the result."""
    import numpy as np

    result = values.copy()
    for line in plan.lines:
        for before, register in itertools.pairwise(line):
            result[register] = combine(result[before], result[register])
    total = result[[line[-1] for line in plan.lines]]
    lanes = np.arange(values.shape[1])
    prefix, has = np.zeros_like(total), np.zeros(total.shape, bool)
    for step in plan.lane_steps:
        fetched = total[:, lanes ^ step.mask]
        behind = (((lanes & step.mask) != 0) != plan.reverse)[:, None]
        known = ((lanes & step.earlier) != (step.earlier if plan.reverse else 0))[:, None]
        joined = np.where(known, combine(fetched, prefix), fetched)
        prefix = np.where(behind, joined, prefix)
        has = has | behind
        total = np.where(behind, combine(fetched, total), combine(total, fetched))
    if plan.cross_warp:
        totals = _exchange(plan.cross_warp, total)
        place = np.array(f2.span_elements(plan.cross_warp.position_bases))
        order = range(plan.cross_warp.count)
        for w in order if plan.reverse else reversed(order):
            applies = (w > place) if plan.reverse else (w < place)
            joined = np.where(has, combine(totals[w], prefix), totals[w])
            prefix = np.where(applies, joined, prefix)
            has = has | applies
        ordered = totals[::-1] if plan.reverse else totals
        total = functools.reduce(combine, ordered)
    for chain in plan.chains:
        carry = total[chain[0]]
        for index in chain[1:]:
            prefix[index] = np.where(has[index], combine(carry, prefix[index]), carry)
            has[index] = True
            carry = combine(carry, total[index])
    for line, before, known in zip(plan.lines, prefix, has, strict=True):
        for register in line:
            result[register] = np.where(known, combine(before, result[register]), result[register])
    for register, original in plan.duplicates:
        result[register] = result[original]
    return result
