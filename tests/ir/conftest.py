"""Hypothesis strategies for layouts, handed to the tests of this folder as fixtures."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from minitriton.ir.layouts import (
    blocked,
    choose_mma_warps,
    default_blocked,
    mma_accumulator,
    mma_operand,
)
from minitriton.ir.linear_layout import LinearLayout

settings.register_profile("layouts", deadline=None, derandomize=False)
settings.load_profile("layouts")


@st.composite
def shapes(draw, max_rank=3, max_bits=9):
    rank = draw(st.integers(1, max_rank))
    bits = draw(st.lists(st.integers(0, 6), min_size=rank, max_size=rank))
    while sum(bits) > max_bits:
        bits[bits.index(max(bits))] -= 1
    return tuple(1 << b for b in bits)


@st.composite
def blocked_layouts(draw, shape, warps):
    rank = len(shape)

    def spread(total):
        counts = [0] * rank
        for _ in range(total):
            counts[draw(st.integers(0, rank - 1))] += 1
        return [1 << c for c in counts]

    order = draw(st.permutations(range(rank)))
    size = [1 << draw(st.integers(0, 3)) for _ in shape]
    return blocked(shape, size, spread(5), spread(warps.bit_length() - 1), order)


@st.composite
def arbitrary_layouts(draw, shape, warps):
    """Surjective, with random bases (mixed bits, duplicates and zeros included)."""
    layout = draw(blocked_layouts(shape, warps))
    flat = layout.to_flat()
    places = [(name, i) for name in flat for i in range(len(flat[name]))]
    for _ in range(draw(st.integers(0, 6))):
        (to, i), (source, j) = draw(st.sampled_from(places)), draw(st.sampled_from(places))
        if (to, i) != (source, j):
            flat[to][i] ^= flat[source][j]
    flat["register"] = draw(st.permutations(flat["register"]))
    return LinearLayout.from_flat(shape, flat)


@st.composite
def layouts(draw, shape, warps):
    kinds = ["blocked", "default", "arbitrary"]
    if len(shape) >= 2:
        kinds += ["accumulator", "operand"]
    kind = draw(st.sampled_from(kinds))
    if kind == "blocked":
        return draw(blocked_layouts(shape, warps))
    if kind == "arbitrary":
        return draw(arbitrary_layouts(shape, warps))
    if kind == "default":
        return default_blocked(shape, warps, vec=draw(st.sampled_from([1, 2, 4, 8])))
    grid = choose_mma_warps(shape, warps)
    if draw(st.booleans()):
        grid = (*([1] * (len(shape) - 2)), warps, 1)
    if kind == "accumulator":
        return mma_accumulator(shape, grid)
    index, bits = draw(st.integers(0, 1)), draw(st.sampled_from([8, 16, 32]))
    if shape[-1 - index] < 256 // bits:
        return mma_accumulator(shape, grid)
    return mma_operand(shape, index, grid, bits)


@st.composite
def layout_lists(draw, count, max_rank=3, kind=layouts):
    shape = draw(shapes(max_rank))
    warps = draw(st.sampled_from([1, 2, 4, 8]))
    return [draw(kind(shape, warps)) for _ in range(count)]


@pytest.fixture(scope="session")
def some_layouts():
    """some_layouts(n): strategy of n distributed layouts of one tile and number of warps."""
    return layout_lists


@pytest.fixture(scope="session")
def plain_layouts():
    """plain_layouts(n): the same, blocked ones only."""
    return lambda count, max_rank=3: layout_lists(count, max_rank, kind=blocked_layouts)
