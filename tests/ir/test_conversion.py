"""Conversions: every plan, executed, delivers every element; and the plans are the cheap ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitriton.ir import f2
from minitriton.ir.conversion import (
    NoMove,
    RegisterMove,
    SharedRoundTrip,
    WarpShuffle,
    plan_conversion,
    simulate,
)
from minitriton.ir.layouts import default_blocked, mma_accumulator, mma_operand
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.shared_access import conflict_degree


def check(src, dst, bits, limit=None):
    """Plan, execute on distinct values, and compare with the definition of `dst`."""
    plan = plan_conversion(src, dst, bits, limit)
    scale = np.random.default_rng().permutation(1 << src.num_bits)
    result = simulate(plan, src, dst, scale[src.flat_table()])
    assert (result == scale[dst.flat_table()]).all()
    return plan


def degree(access):
    addresses = [o * access.elem_bits // 8 for o in f2.span_elements(access.lane_bases)]
    return conflict_degree(addresses, access.vec * access.elem_bits // 8)


@settings(max_examples=400)
@given(st.data())
def test_any_pair_of_layouts(some_layouts, data):
    src, dst = data.draw(some_layouts(2))
    bits = data.draw(st.sampled_from([1, 8, 16, 32, 64]))
    limit = data.draw(st.sampled_from([None, 256, 1024]))
    plan = check(src, dst, bits, limit)
    assert isinstance(plan, NoMove) == (src == dst)
    if isinstance(plan, SharedRoundTrip):
        width = max(8, bits)
        assert plan.bytes == (width << plan.shared.num_bits) // 8
        assert plan.bytes * len(plan.chunks) == (width << src.num_bits) // 8
        for side, layout in (("src", src), ("dst", dst)):
            covered = [r for chunk in plan.chunks for r in getattr(chunk, f"{side}_registers")]
            assert sorted(covered) == list(range(layout.num_registers))
        if plan.warp_local:
            assert_warp_local(plan, src, dst)


def assert_warp_local(plan, src, dst):
    """No warp loads an offset that another warp stored."""
    stored = {}
    for access, fill in ((plan.store, True), (plan.load, False)):
        lanes = np.array(f2.span_elements(access.lane_bases))
        for warp, start in enumerate(f2.span_elements(access.warp_bases)):
            for group in access.groups:
                for offset in (
                    (lanes ^ start ^ group.offset)[:, None] + np.arange(access.vec)
                ).flat:
                    if fill:
                        assert stored.setdefault(offset, warp) == warp
                    else:
                        assert stored[offset] == warp


@settings(max_examples=150)
@given(st.data())
def test_round_trips_of_blocked_tiles_have_no_bank_conflicts(plain_layouts, data):
    src, dst = data.draw(plain_layouts(2))
    bits = data.draw(st.sampled_from([8, 16, 32, 64]))
    plan = plan_conversion(src, dst, bits)
    if isinstance(plan, SharedRoundTrip):
        assert degree(plan.store) <= 2 and degree(plan.load) <= 2
        if src.is_injective and dst.is_injective:
            assert degree(plan.store) == degree(plan.load) == 1


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_accumulator_to_rows_is_wide_on_both_sides(bits):
    acc, rows = mma_accumulator((64, 64), (2, 2)), default_blocked((64, 64), 4, vec=128 // bits)
    plan = check(acc, rows, bits)
    assert isinstance(plan, SharedRoundTrip)
    assert degree(plan.store) == degree(plan.load) == 1
    widths = sorted((plan.store.vec * bits, plan.load.vec * bits))
    assert widths[0] >= 32 and widths[1] == 128


def test_accumulator_is_the_operand_of_the_next_dot():
    """Flash attention: P leaves the first dot in the registers the second one reads."""
    acc = mma_accumulator((64, 64), (4, 1))
    assert isinstance(check(acc, mma_operand((64, 64), 0, (4, 1), 16), 16), NoMove)
    fp8 = check(acc, mma_operand((64, 64), 0, (4, 1), 8), 8)
    assert isinstance(fp8, WarpShuffle)
    assert sum(not fp8.is_local(fetch) for fetch in fp8.rounds) <= 2 * 32 * 8 // 32
    assert isinstance(check(acc, mma_operand((64, 64), 1, (4, 1), 16), 16), SharedRoundTrip)


def test_registers_may_be_renamed():
    src = LinearLayout.from_flat(
        (256,), {"register": [1, 2, 4], "lane": [8, 16, 32, 64, 128], "warp": []}
    )
    dst = LinearLayout.from_flat(
        (256,), {"register": [4, 1, 2], "lane": [8, 16, 32, 64, 128], "warp": []}
    )
    plan = check(src, dst, 32)
    assert plan == RegisterMove((0, 4, 1, 5, 2, 6, 3, 7))


def test_lane_permutation_is_one_shuffle_per_register():
    src = LinearLayout.from_flat((64,), {"register": [1], "lane": [2, 4, 8, 16, 32], "warp": [0]})
    dst = LinearLayout.from_flat((64,), {"register": [1], "lane": [32, 16, 8, 4, 2], "warp": [0]})
    plan = check(src, dst, 32)
    assert isinstance(plan, WarpShuffle) and len(plan.rounds) == 2
    packed = check(src, dst, 16)
    assert isinstance(packed, WarpShuffle) and len(packed.rounds) == 1
    assert not packed.before and not packed.after


def test_register_and_lane_bit_exchange():
    """Needs selects around butterfly shuffles."""
    src = LinearLayout.from_flat((64,), {"register": [1], "lane": [2, 4, 8, 16, 32], "warp": []})
    dst = LinearLayout.from_flat((64,), {"register": [2], "lane": [1, 4, 8, 16, 32], "warp": []})
    plan = check(src, dst, 32)
    assert isinstance(plan, WarpShuffle) and plan.is_butterfly
    assert len(plan.before) == len(plan.after) == 1
    assert [plan.is_local(fetch) for fetch in plan.rounds] == [True, False]


def test_replication_costs_no_memory():
    wide = default_blocked((32,), 4)
    assert wide.free_bits("warp") == 3
    turned = LinearLayout.from_flat(
        (32,), {"register": [], "lane": [16, 8, 4, 2, 1], "warp": [0, 0]}
    )
    assert isinstance(check(wide, turned, 32), WarpShuffle)


def test_scratch_is_cut_into_chunks():
    src, dst = mma_accumulator((128, 128), (2, 2)), default_blocked((128, 128), 4, vec=4)
    whole = check(src, dst, 32, 1 << 20)
    assert len(whole.chunks) == 1 and whole.bytes == 65536
    halves = check(src, dst, 32)
    assert halves.bytes == 32768 and len(halves.chunks) == 2
    small = check(src, dst, 32, 10000)
    assert small.bytes == 8192 and len(small.chunks) == 8
    for plan in (whole, halves):
        assert (plan.store.vec, plan.load.vec) == (4, 4)
    # the cuts use up three of the four register bits that both sides share
    assert {small.store.vec, small.load.vec} == {4, 2}


def test_each_side_of_a_transposition_stays_conflict_free():
    for bits in (8, 16, 32, 64):
        rows = default_blocked((64, 64), 4, vec=128 // bits)
        columns = default_blocked((64, 64), 4, order=(0, 1), vec=128 // bits)
        plan = check(rows, columns, bits)
        assert degree(plan.store) == degree(plan.load) == 1
        assert max(plan.store.vec, plan.load.vec) == 128 // bits
