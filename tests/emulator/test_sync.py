"""Warp-wide instructions, barriers, atomics, divergence across warps, spin loops, deadlock."""

from __future__ import annotations

import numpy as np
import pytest

from minitriton.runtime.emulator import Deadlock, DivergentAligned, SharedRace
from tests.emulator.ptx_harness import evaluate, kernel, run

RNG = np.random.default_rng(11)
LANE = np.arange(32)
SCHEDULES = ("round_robin", "reverse", "random")


def words(count: int = 32) -> np.ndarray:
    return RNG.integers(0, 2**32, count, dtype=np.uint32)


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("up", 3, 0, np.where(LANE >= 3, LANE - 3, LANE)),
        ("down", 5, 31, np.where(LANE < 27, LANE + 5, LANE)),
        ("bfly", 16, 31, LANE ^ 16),
        ("idx", 7, 31, np.full(32, 7)),
        ("idx", 2, 0x181F, (LANE & 24) | 2),
        ("down", 4, 0x181F, np.where(LANE % 8 < 4, LANE + 4, LANE)),
        ("up", 2, 0x1C00, np.where(LANE % 4 >= 2, LANE - 2, LANE)),
    ],
)
def test_shuffles(mode: str, b: int, c: int, source: np.ndarray) -> None:
    x = words()
    body = f"""
    ld.global.u32 %r5, [%d2];
    shfl.sync.{mode}.b32 %r6|%p1, %r5, {b}, {c}, -1;
    @!%p1 not.b32 %r6, %r6;
    st.global.u32 [%d1], %r6;
"""
    valid = source != LANE if mode in ("up", "down") else np.ones(32, bool)
    np.testing.assert_array_equal(evaluate(body, x), np.where(valid, x[source], ~x[source]))


def test_shuffle_with_register_operands() -> None:
    x = words()
    body = """
    ld.global.u32 %r5, [%d2];
    add.u32 %r7, %r1, 9;
    mov.u32 %r8, 31;
    shfl.sync.idx.b32 %r6, %r5, %r7, %r8, 0xffffffff;
    st.global.u32 [%d1], %r6;
"""
    np.testing.assert_array_equal(evaluate(body, x), x[(LANE + 9) % 32])


def test_votes_match_redux_elect() -> None:
    x = (words() % 5).astype(np.uint32)
    body = """
    ld.global.u32 %r5, [%d2];
    setp.gt.u32 %p1, %r5, 2;
    vote.sync.ballot.b32 %r6, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, !%p1, -1;
    match.any.sync.b32 %r7, %r5, -1;
    redux.sync.add.u32 %r8, %r5, -1;
    redux.sync.max.s32 %r9, %r5, -1;
    elect.sync %r10|%p4, -1;
    xor.b32 %r6, %r6, %r7;
    mad.lo.u32 %r6, %r8, 7, %r6;
    mad.lo.u32 %r6, %r9, 1001, %r6;
    @%p2 add.u32 %r6, %r6, 3;
    @%p3 add.u32 %r6, %r6, 5;
    @%p4 add.u32 %r6, %r6, 17;
    st.global.u32 [%d1], %r6;
"""
    big = x > 2
    ballot = np.uint32((big.astype(np.uint64) << LANE.astype(np.uint64)).sum())
    bits = np.uint64(1) << LANE.astype(np.uint64)
    match = np.array([bits[x == v].sum() for v in x]).astype(np.uint32)
    expected = (ballot ^ match) + x.sum(dtype=np.uint32) * np.uint32(7)
    expected = expected + x.max() * np.uint32(1001) + np.uint32(3 * big.any() + 5 * (~big).all())
    np.testing.assert_array_equal(evaluate(body, x), expected + np.where(LANE == 0, 17, 0))


def test_signed_redux_and_match_all() -> None:
    x = words()
    body = """
    ld.global.u32 %r5, [%d2];
    redux.sync.min.s32 %r6, %r5, -1;
    redux.sync.xor.b32 %r7, %r5, -1;
    match.all.sync.b32 %r8|%p1, %r6, -1;
    match.all.sync.b32 %r9|%p2, %r5, -1;
    add.u32 %r6, %r6, %r7;
    @%p1 add.u32 %r6, %r6, %r8;
    @!%p2 add.u32 %r6, %r6, %r9;
    st.global.u32 [%d1], %r6;
"""
    low = x.view(np.int32).min().astype(np.int32).view(np.uint32)
    expected = (int(low) + int(np.bitwise_xor.reduce(x)) - 1) % 2**32
    np.testing.assert_array_equal(evaluate(body, x), np.full(32, expected, np.uint32))


def test_subwarp_masks_in_divergent_branches() -> None:
    x = words()
    body = """
    ld.global.u32 %r5, [%d2];
    setp.lt.u32 %p1, %r1, 16;
    @%p1 bra LOW;
    shfl.sync.bfly.b32 %r6, %r5, 1, 31, 0xffff0000;
    add.u32 %r6, %r6, 1;
    bra JOIN;
LOW:
    shfl.sync.bfly.b32 %r6, %r5, 2, 31, 0x0000ffff;
JOIN:
    st.global.u32 [%d1], %r6;
"""
    expected = np.where(LANE < 16, x[LANE ^ 2], x[LANE ^ 1] + np.uint32(1))
    np.testing.assert_array_equal(evaluate(body, x), expected)


def test_warp_barrier_gathers_lanes_from_both_sides() -> None:
    # Lanes reach one bar.warp.sync at different times; the flag lanes then read shared memory.
    x = words()
    body = """
    ld.global.u32 %r5, [%d2];
    shl.b32 %r6, %r1, 2;
    st.shared.u32 [%r6], %r5;
    setp.lt.u32 %p1, %r1, 10;
    mov.u32 %r7, 0;
    @%p1 bra SKIP;
LOOP:
    add.u32 %r7, %r7, 1;
    setp.lt.u32 %p2, %r7, %r1;
    @%p2 bra LOOP;
SKIP:
    bar.warp.sync -1;
    xor.b32 %r6, %r6, 124;
    ld.shared.u32 %r8, [%r6];
    add.u32 %r8, %r8, %r7;
    st.global.u32 [%d1], %r8;
"""
    got = evaluate(body, x, declarations=".shared .align 4 .b8 s[128];")
    np.testing.assert_array_equal(got, x[::-1] + np.where(LANE < 10, 0, LANE).astype(np.uint32))


def test_must_flag_shuffle_in_divergent_branch() -> None:
    body = """
    setp.lt.u32 %p1, %r1, 16;
    @%p1 bra SKIP;
    shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1;
    st.global.u32 [%d1], %r6;
SKIP:
    exit;
"""
    # The lower half exits without the shuffle; hardware leaves the result undefined only while
    # those lanes live, so a spinning lower half is the clear error.
    spin = body.replace("SKIP:", "SKIP:\n    bar.sync 1, 64;")
    with pytest.raises(DivergentAligned):
        run(kernel(spin), words(), words(), checks=("align",))


def test_must_flag_lane_outside_its_mask_and_partial_barrier() -> None:
    with pytest.raises(DivergentAligned, match="membermask"):
        evaluate("shfl.sync.bfly.b32 %r6, %r1, 1, 31, 0xffff;", words())
    body = """
    setp.lt.u32 %p1, %r1, 5;
    @%p1 bra A;
    bar.sync 0;
A:
    mov.u32 %r5, 1;
"""
    with pytest.raises(DivergentAligned, match="part of a warp"):
        evaluate(body, words())
    evaluate(
        body.replace("bar.sync", "barrier.cta.sync").replace("5;\n    @", "0;\n    @"), words()
    )


def test_named_barriers_with_counts_and_roles() -> None:
    # Warps 0-1 produce, warps 2-3 consume: arrive on one side, sync on the other.
    declarations = ".shared .align 4 .b8 s[256];"
    body = """
    setp.ge.u32 %p1, %r1, 64;
    shl.b32 %r5, %r1, 2;
    @%p1 bra CONSUME;
    ld.global.u32 %r6, [%d2];
    st.shared.u32 [%r5], %r6;
    bar.arrive 3, 128;
    st.global.u32 [%d1], %r6;
    bra DONE;
CONSUME:
    bar.sync 3, 128;
    sub.u32 %r5, %r5, 256;
    xor.b32 %r5, %r5, 252;
    ld.shared.u32 %r6, [%r5];
    st.global.u32 [%d1], %r6;
DONE:
"""
    x = words(128 * 3)
    for schedule in SCHEDULES:
        got = evaluate(body, x, 128, 3, declarations=declarations, schedule=schedule)
        v = x.reshape(3, 128)
        expected = np.concatenate([v[:, :64], v[:, :64][:, ::-1]], axis=1)
        np.testing.assert_array_equal(got.reshape(3, 128), expected)


def test_barrier_reductions() -> None:
    x = words(96)
    body = """
    ld.global.u32 %r5, [%d2];
    and.b32 %r5, %r5, 1;
    setp.eq.u32 %p1, %r5, 1;
    barrier.cta.red.popc.aligned.u32 %r6, 0, %p1;
    bar.red.or.pred %p2, 1, %p1;
    bar.red.and.pred %p3, 2, %p1;
    @%p2 add.u32 %r6, %r6, 1000;
    @%p3 add.u32 %r6, %r6, 5000;
    st.global.u32 [%d1], %r6;
"""
    for schedule in SCHEDULES:
        got = evaluate(body, x, 96, schedule=schedule)
        np.testing.assert_array_equal(got, np.full(96, (x & 1).sum() + 1000))


def test_barrier_ignores_exited_warps_and_padding() -> None:
    body = """
    setp.ge.u32 %p1, %r1, 40;
    @%p1 exit;
    bar.sync 0;
    st.global.u32 [%d1], %r1;
"""
    # 40 is inside warp 1: its upper lanes exit, its lower lanes arrive for the whole warp.
    got = evaluate(body, words(70), block=70, checks=("race", "oob"))
    np.testing.assert_array_equal(got, np.where(np.arange(70) < 40, np.arange(70), 0))


def test_deadlocks_are_explained() -> None:
    body = """
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra B;
    bar.sync 1, 64;
    bra END;
B:
    bar.sync 2, 64;
END:
"""
    with pytest.raises(Deadlock, match="barrier 1: 32 of 64 threads arrived") as caught:
        evaluate(body, words(64), block=64)
    assert "barrier 2: 32 of 64" in str(caught.value)
    with pytest.raises(Deadlock, match="counts 64 and 96"):
        evaluate(body.replace("2, 64", "1, 96"), words(96), block=96)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_atomics_on_few_addresses(schedule: str) -> None:
    x = (words(256) % 3).astype(np.uint32)
    body = """
    ld.global.u32 %r5, [%d2];
    mul.wide.u32 %d4, %r5, 4;
    add.s64 %d5, %d10, %d4;
    atom.global.add.u32 %r6, [%d5], 1;
    red.global.max.u32 [%d10+12], %r1;
    atom.global.inc.u32 %r7, [%d10+16], 9;
    red.relaxed.gpu.global.add.f32 [%d10+20], 0f3F000000;
    red.global.xor.b32 [%d10+24], %r1;
    atom.global.exch.b32 %r8, [%d10+28], 5;
"""
    out = np.zeros(256, np.uint32)
    run(kernel(body), out, x, block=128, grid=2, schedule=schedule)
    np.testing.assert_array_equal(out[:3], np.bincount(x, minlength=3))
    assert out[3] == 127 and out[4] == 256 % 10 and out[7] == 5
    assert out[20 // 4 : 6].view(np.float32)[0] == 128.0
    assert out[6] == 0


def test_atomic_returns_are_a_permutation_in_lane_order() -> None:
    body = """
    atom.shared.add.u32 %r5, [cnt], 3;
    st.global.u32 [%d1], %r5;
"""
    init = "mov.u32 %r6, 0; st.shared.u32 [cnt], %r6; bar.sync 0;"
    declared = ".shared .align 4 .b8 cnt[4];"
    got = evaluate(init + body, words(64), 64, declarations=declared)
    np.testing.assert_array_equal(got, 3 * np.arange(64))
    shuffled = evaluate(init + body, words(64), 64, declarations=declared, schedule="random")
    np.testing.assert_array_equal(np.sort(shuffled), 3 * np.arange(64))


def test_packed_half_and_wide_atomics() -> None:
    body = """
    mov.b32 %r5, 0x3C004000;
    red.global.add.noftz.f16x2 [%d10], %r5;
    mov.f64 %g1, 0d3FE0000000000000;
    red.global.add.f64 [%d10+8], %g1;
    mov.u64 %d6, 0x100000001;
    atom.global.add.u64 %d7, [%d10+16], %d6;
    mov.u16 %h1, 0;
    mov.u16 %h2, 7;
    atom.global.cas.b16 %h3, [%d10+24], %h1, %h2;
"""
    out = np.zeros(32, np.uint32)
    run(kernel(body), out, words())
    assert out[0] == 0x50005400 and out[2:4].view(np.float64)[0] == 16.0
    assert out[4] == 32 and out[5] == 32 and out[6] == 7


def test_spin_lock_between_warps_and_ctas() -> None:
    # Every thread 0 of a warp takes a lock by compare-and-swap and increments without atomics.
    body = """
    and.b32 %r5, %r1, 31;
    setp.ne.u32 %p1, %r5, 0;
    @%p1 bra DONE;
LOCK:
    atom.acquire.gpu.global.cas.b32 %r6, [%d10+4], 0, 1;
    setp.ne.u32 %p2, %r6, 0;
    @%p2 bra LOCK;
    ld.volatile.global.u32 %r7, [%d10];
    add.u32 %r7, %r7, 1;
    st.volatile.global.u32 [%d10], %r7;
    atom.release.gpu.global.exch.b32 %r8, [%d10+4], 0;
DONE:
"""
    for schedule in SCHEDULES:
        out = np.zeros(4, np.uint32)
        run(kernel(body), out, words(), block=128, grid=20, schedule=schedule)
        assert out[0] == 80 and out[1] == 0


def test_lock_between_lanes_of_one_warp() -> None:
    # The winner waits behind the spinning lanes' pc; independent thread scheduling frees it.
    body = """
LOCK:
    atom.global.cas.b32 %r6, [%d10+4], 0, 1;
    setp.ne.u32 %p2, %r6, 0;
    @%p2 bra LOCK;
    ld.volatile.global.u32 %r7, [%d10];
    add.u32 %r7, %r7, 1;
    st.volatile.global.u32 [%d10], %r7;
    atom.global.exch.b32 %r8, [%d10+4], 0;
"""
    out = np.zeros(4, np.uint32)
    run(kernel(body), out, words(), block=4)
    assert out[0] == 4 and out[1] == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ctas_in_a_chain_wait_for_earlier_and_later_ones(schedule: str) -> None:
    # CTA i waits for the flag of CTA i-1 (mod order), also when that CTA is in a later chunk.
    chain = """
    setp.eq.u32 %p1, %r3, {last};
    shl.b32 %r8, %r3, 2;
    cvt.u64.u32 %d4, %r8;
    add.s64 %d5, %d10, %d4;
    @%p1 bra GO;
WAIT:
    ld.acquire.gpu.global.u32 %r5, [%d5{neighbour}];
    setp.eq.u32 %p2, %r5, 0;
    @%p2 bra WAIT;
GO:
    mov.u32 %r6, 1;
    bar.sync 0;
    st.release.gpu.global.u32 [%d5], %r6;
"""
    for last, neighbour in ((0, "-4"), (11, "+4")):
        out = np.zeros(12, np.uint32)
        body = chain.format(last=last, neighbour=neighbour)
        run(kernel(body), out, words(), block=512, grid=12, schedule=schedule)
        assert out.all()


def test_hopeless_spin_is_a_deadlock() -> None:
    body = """
WAIT:
    ld.acquire.gpu.global.u32 %r5, [%d10];
    setp.eq.u32 %p2, %r5, 0;
    @%p2 bra WAIT;
"""
    with pytest.raises(Deadlock, match="spin"):
        run(kernel(body), np.zeros(4, np.uint32), words(), block=64, grid=2)


TURNS = """
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra OTHER;
    bar.arrive 1, 64;
    // FIRST
    bar.arrive 1, 64;
    bra DONE;
OTHER:
    bar.sync 1, 64;
    // SECOND
    bar.sync 1, 64;
DONE:
    st.global.u32 [%d1], %r1;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_is_not_used_again_before_all_passed_it(schedule: str) -> None:
    with pytest.raises(Deadlock, match="barrier 1 is used again"):
        evaluate(TURNS, words(64), 64, schedule=schedule, checks=("race",))
    ordered = TURNS.replace("// FIRST", "bar.sync 2, 64;").replace("// SECOND", "bar.arrive 2, 64;")
    got = evaluate(ordered, words(64), 64, schedule=schedule, checks=("race",))
    np.testing.assert_array_equal(got, np.arange(64))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_only_arrives_learns_nothing(schedule: str) -> None:
    declarations = ".shared .align 4 .b8 s[256];"
    body = """
    shl.b32 %r5, %r1, 2;
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra OTHER;
    bar.arrive 1, 64;
    ld.shared.u32 %r6, [%r5+128];
    bra DONE;
OTHER:
    st.shared.u32 [%r5], %r1;
    bar.sync 1, 64;
DONE:
"""
    with pytest.raises(SharedRace):
        evaluate(
            body, words(64), 64, declarations=declarations, schedule=schedule, checks=("race",)
        )
