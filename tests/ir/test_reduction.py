"""Reductions and scans, executed step by step as planned, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minitriton.ir.axis import is_separable
from minitriton.ir.f2 import span_elements
from minitriton.ir.layouts import default_blocked, mma_accumulator, mma_operand
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.reduction import (
    is_scannable,
    plan_reduction,
    plan_scan,
    scan_layout,
    simulate_reduction,
    simulate_scan,
)


def spread(tile, layout):
    table = layout.table()
    return tile[tuple(table[..., dim] for dim in range(layout.rank))]


def follow(first, second):
    """Composition of maps x -> a x + b mod 2^31 - 1, packed as a * 2^32 + b: associative,
    not commutative."""
    prime = 2**31 - 1
    a, b = first >> 32, first & 0xFFFFFFFF
    c, d = second >> 32, second & 0xFFFFFFFF
    return (a * c % prime << 32) + (b * c + d) % prime


def random_tile(layout, top=1000):
    return np.random.default_rng().integers(1, top, layout.shape)


@settings(max_examples=150)
@given(st.data())
def test_reduction(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    axis = data.draw(st.integers(0, layout.rank - 1))
    assume(is_separable(layout, axis))
    tile = random_tile(layout)
    plan = plan_reduction(layout, axis)
    assert plan.result == layout.slice(axis)
    result = simulate_reduction(plan, spread(tile, layout), np.add)
    assert (result == spread(tile.sum(axis=axis), plan.result)).all()


@settings(max_examples=60)
@given(st.data())
def test_every_layout_can_be_made_to_reduce(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    axis = data.draw(st.integers(0, layout.rank - 1))
    fit = scan_layout(layout, axis)
    assert fit.is_surjective and fit.shape == layout.shape
    assert (fit.num_lanes, fit.num_warps) == (layout.num_lanes, layout.num_warps)
    assert is_scannable(fit, axis) and (fit == layout or not is_scannable(layout, axis))
    assert scan_layout(fit, axis) == fit
    tile = random_tile(fit)
    result = simulate_reduction(plan_reduction(fit, axis), spread(tile, fit), np.add)
    assert (result == spread(tile.sum(axis=axis), fit.slice(axis))).all()


@settings(max_examples=150)
@given(st.data())
def test_scan_of_a_non_commutative_function(some_layouts, data):
    (layout,) = data.draw(some_layouts(1))
    axis = data.draw(st.integers(0, layout.rank - 1))
    reverse = data.draw(st.booleans())
    layout = scan_layout(layout, axis)
    tile = (random_tile(layout, 2**30) << 32) + random_tile(layout, 2**30)
    expected = np.flip(tile, axis).copy() if reverse else tile.copy()
    moved = np.moveaxis(expected, axis, 0)
    for index in range(1, len(moved)):
        moved[index] = follow(moved[index - 1], moved[index])
    expected = np.flip(expected, axis) if reverse else expected
    plan = plan_scan(layout, axis, (8,), reverse)
    result = simulate_scan(plan, layout, axis, spread(tile, layout), follow)
    assert (result == spread(expected, layout)).all()


def test_reduction_folds_in_axis_order_within_a_thread():
    layout = default_blocked((4, 128), 1, vec=4)
    plan = plan_reduction(layout, 1)
    assert plan.groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert plan.lane_masks == (1, 2, 4, 8, 16)
    assert plan.cross_warp is None and plan.scratch_bytes == 0


def test_accumulator_rows_need_two_shuffles():
    plan = plan_reduction(mma_accumulator((64, 64), (4, 1)), 1)
    assert plan.lane_masks == (1, 2) and plan.cross_warp is None
    assert len(plan.groups) == 2 and all(len(group) == 16 for group in plan.groups)
    across = plan_reduction(mma_accumulator((64, 64), (2, 2)), 1)
    assert across.cross_warp.count == 2 and across.scratch_bytes == 64 * 2 * 4


def test_replicas_are_counted_once():
    layout = mma_operand((16, 16), 0, (1, 4), 16)  # every warp holds all of A
    plan = plan_reduction(layout, 0)
    assert plan.cross_warp is None
    small = default_blocked((8,), 4)
    plan = plan_reduction(small, 0)
    assert plan.lane_masks == (1, 2, 4) and plan.cross_warp is None
    repeated = mma_accumulator((8, 8), (1, 1))  # register bit 1 repeats row 0..7
    tile = random_tile(repeated)
    result = simulate_reduction(plan_reduction(repeated, 0), spread(tile, repeated), np.add)
    assert (result == spread(tile.sum(axis=0), repeated.slice(0))).all()


def test_scratch_of_several_operands():
    layout = default_blocked((1024,), 8)
    plan = plan_reduction(layout, 0, (4, 8, 1))
    exchange = plan.cross_warp
    assert exchange.count == 8
    assert exchange.operand_bytes == (0, 32, 96) and exchange.scratch_bytes == 112
    assert exchange.idle_lanes == 31 and exchange.idle_warps == 0


@pytest.mark.parametrize(
    ("warps", "sizes", "readers"),
    [(8, (4,), 1), (8, (4, 8), 4), (16, (4,), 4), (32, (4, 4), 8), (32, (8,), 16), (16, (2,), 1)],
)
def test_many_partials_are_shared_among_lanes(warps, sizes, readers):
    """As few as read 16 bytes each of the widest operand; each folds its part with the others'."""
    layout = default_blocked((4096,), warps)
    plan = plan_reduction(layout, 0, sizes)
    assert plan.readers == readers and len(plan.reader_masks) == readers.bit_length() - 1
    tile = random_tile(layout)
    result = simulate_reduction(plan, spread(tile, layout), np.add)
    assert (result == tile.sum()).all()
    rows = default_blocked((64, 64), warps)  # lanes along the rows read other lines
    assert plan_reduction(rows, 0, sizes).readers == 1


@settings(max_examples=300)
@given(st.data())
def test_each_partial_has_one_writer(plain_layouts, data):
    """Two threads must not store to one address, not even the same value: that is a race."""
    (layout,) = data.draw(plain_layouts(1))
    axis = data.draw(st.integers(0, layout.rank - 1))
    exchange = plan_reduction(layout, axis).cross_warp
    if exchange is None:
        return
    written = [
        lane_offset ^ warp_offset ^ place ^ offset
        for lane, lane_offset in enumerate(span_elements(exchange.lane_bases))
        for warp, (warp_offset, place) in enumerate(
            zip(
                span_elements(exchange.warp_bases),
                span_elements(exchange.position_bases),
                strict=True,
            )
        )
        if not lane & exchange.idle_lanes and not warp & exchange.idle_warps
        for offset in exchange.register_offsets
    ]
    entries = exchange.count << layout.slice(axis).num_bits
    assert sorted(written) == list(range(entries))


def test_unordered_layouts_are_refused():
    mixed = LinearLayout.from_flat(
        (2, 64), {"register": [1, 2], "lane": [4, 8, 16, 32, 65], "warp": []}
    )
    assert not is_separable(mixed, 1)
    with pytest.raises(ValueError, match="mix dimension 1"):
        plan_reduction(mixed, 1)
    strided = LinearLayout.from_flat(
        (64,), {"register": [32], "lane": [1, 2, 4, 8, 16], "warp": []}
    )
    with pytest.raises(ValueError, match="does not order"):
        plan_scan(strided, 0)
    assert scan_layout(strided, 0).to_flat() == {
        "register": [1],
        "lane": [2, 4, 8, 16, 32],
        "warp": [],
    }
