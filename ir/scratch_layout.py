"""The shared-memory layout of a conversion's scratch: vectorised on both sides, then swizzled
so that neither side has bank conflicts.

Elements are vectors over F2 (bits of the linear index). The low offset bits V are directions
that registers hold on either side. Two lanes of one access conflict exactly where their
difference lies in H, the directions of the offset bits above the 128 bytes of a bank row (plus
what one word or vector covers). So H is chosen as a common complement of both sides' lane
spaces. That always exists: pair leftover directions of one side with those of the other and
add what neither side spans ("Linear Layouts", 2025, section on optimal swizzling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minitriton.ir import f2
from minitriton.ir.linear_layout import LinearLayout, log2_exact
from minitriton.ir.shared_access import (
    MAX_VECTOR_BITS,
    bank_conflicts,
    phase_lanes,
    shared_access_plan,
)
from minitriton.ir.shared_layouts import BANK_ROW_BYTES


@dataclass(frozen=True)
class Chunk:
    """Registers of the source and result tile that each register of a part stands for."""

    src_registers: tuple[int, ...]
    dst_registers: tuple[int, ...]


def choose_chunks(
    src: LinearLayout, dst: LinearLayout, bits: int, limit: int
) -> tuple[tuple[Chunk, ...], LinearLayout, LinearLayout]:
    """Cut a tile along index bits that one register bit of each side alone decides.

    Returns the chunks, and both layouts restricted to one chunk. As few cuts as keep a chunk
    within `limit` bytes, or all possible ones where that is not enough.
    """
    candidates = [
        (step, src_bit, dst.flat("register").index(step))
        for src_bit, step in enumerate(src.flat("register"))
        if step.bit_count() == 1
        and step in dst.flat("register")
        and _users(src, step) == _users(dst, step) == 1
    ]
    # low register bits are worth more as vectors
    candidates.sort(key=lambda cut: -min(cut[1], cut[2]))
    total = (bits << src.num_bits) // 8
    cuts = candidates[: max(0, (total - 1) // limit).bit_length()] if total > limit else []
    src_cuts, dst_cuts = [cut[1] for cut in cuts], [cut[2] for cut in cuts]
    src_inner, dst_inner = _other_registers(src, src_cuts), _other_registers(dst, dst_cuts)
    src_starts = f2.span_elements([1 << bit for bit in src_cuts])
    dst_starts = f2.span_elements([1 << bit for bit in dst_cuts])
    chunks = tuple(
        Chunk(tuple(s ^ i for i in src_inner), tuple(d ^ i for i in dst_inner))
        for s, d in zip(src_starts, dst_starts, strict=True)
    )
    steps = [cut[0] for cut in cuts]
    return chunks, _restrict(src, steps, src_cuts), _restrict(dst, steps, dst_cuts)


def _users(layout: LinearLayout, step: int) -> int:
    return sum(1 for basis in layout.flat_all if basis & step)


def _other_registers(layout: LinearLayout, cut: Sequence[int]) -> list[int]:
    count = layout.in_bits("register")
    return f2.span_elements([1 << bit for bit in range(count) if bit not in cut])


def _restrict(layout: LinearLayout, steps: Sequence[int], cut: Sequence[int]) -> LinearLayout:
    """The layout of the elements whose index bits `steps` are 0, as a tile of rank 1."""
    kept = [b for b in range(layout.num_bits) if not any(step >> b & 1 for step in steps)]

    def squeeze(basis: int) -> int:
        return sum((basis >> bit & 1) << position for position, bit in enumerate(kept))

    flat = {name: list(map(squeeze, values)) for name, values in layout.to_flat().items()}
    flat["register"] = [v for bit, v in enumerate(flat["register"]) if bit not in cut]
    return LinearLayout.from_flat((1 << len(kept),), flat)


def scratch_layout(src: LinearLayout, dst: LinearLayout, bits: int) -> LinearLayout:
    """The swizzled layout with the cheapest accesses, both sides taken together."""
    widest = log2_exact(MAX_VECTOR_BITS // bits)
    shared_regs = f2.intersection(src.flat("register"), dst.flat("register"))
    common = f2.independent(_low_first(shared_regs, src, dst), modulo=_threads(src))
    common = f2.independent(common, modulo=_threads(dst))[:widest]
    best = None
    for side in (None, src, dst):
        vector = common
        if side is not None:
            vector = f2.independent((*common, *side.flat("register")), modulo=_threads(side))
        layout = _swizzle(src, dst, vector[:widest], bits)
        cost = _cost(layout, src, bits) + _cost(layout, dst, bits)
        if best is None or cost < best[0]:
            best = cost, layout
    assert best is not None
    return best[1]


def _threads(layout: LinearLayout) -> tuple[int, ...]:
    return layout.flat("lane") + layout.flat("warp")


def _low_first(directions: Sequence[int], src: LinearLayout, dst: LinearLayout) -> tuple[int, ...]:
    """Generators of the same space, those that are low register bits of a side in front."""
    space = f2.Span(directions)
    preferred = (v for v in (*dst.flat("register"), *src.flat("register")) if v and v in space)
    return (*preferred, *directions)


def _cost(shared: LinearLayout, side: LinearLayout, bits: int) -> int:
    """Issue slots plus wavefronts of one side's accesses."""
    plan = shared_access_plan(shared, side, bits)
    wavefronts = max(1, plan.vec * bits // 32) * bank_conflicts(shared, side, plan.vec, bits)
    return len(plan.groups) * (1 + wavefronts)


def _swizzle(
    src: LinearLayout, dst: LinearLayout, vector: Sequence[int], bits: int
) -> LinearLayout:
    size = src.num_bits
    units = [1 << bit for bit in range(size)]
    lanes = (*src.flat("lane"), *dst.flat("lane"))
    word = log2_exact(max(1, 32 // bits))
    low = list(vector)
    if len(low) < word:  # a word holds several lanes' elements
        low += f2.independent((*lanes, *units), modulo=low)[: word - len(low)]
    high = max(0, size - max(log2_exact(BANK_ROW_BYTES * 8 // bits), len(low)))
    first = _lane_space(src, _threads(dst), low, word, bits)
    second = _lane_space(dst, _threads(src), low, word, bits)
    above = _common_complement(first, second, size)[:high]
    inside = f2.independent((*lanes, *units), modulo=(*low, *above))
    return LinearLayout.from_flat(src.shape, {"offset": [*low, *inside, *above]})


def _lane_space(
    layout: LinearLayout, other_threads: Sequence[int], low: Sequence[int], word: int, bits: int
) -> list[int]:
    """Directions that one access of a warp phase covers: its lanes and its vector (or word).

    Lanes that are threads of the other side too come first: paired in the swizzle, they keep
    the other side's threads from touching its vectors.
    """
    registers = f2.Span(layout.flat("register"))
    width = 0
    while width < len(low) and low[width] in registers:
        width += 1
    lanes = layout.flat("lane")[: log2_exact(phase_lanes((bits << width) // 8))]
    others = f2.Span(other_threads)
    ordered = sorted(lanes, key=lambda lane: lane not in others)
    return f2.independent(ordered, modulo=low[: max(width, word)]) + list(low[: max(width, word)])


def _common_complement(first: Sequence[int], second: Sequence[int], size: int) -> list[int]:
    """As many independent vectors as span a space that meets neither given span."""
    both = f2.intersection(first, second)
    only_first = f2.independent(first, modulo=both)
    only_second = f2.independent(second, modulo=both)
    outside = f2.complement((*first, *second), size)
    return outside + [a ^ b for a, b in zip(only_first, only_second, strict=False)]
