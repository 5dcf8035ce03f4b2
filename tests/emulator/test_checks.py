"""Each check must find its defect and must stay silent on the corrected program."""

from __future__ import annotations

import numpy as np
import pytest

from minitriton.runtime.emulator import OutOfBounds, SharedRace, UninitialisedRead
from tests.emulator.ptx_harness import evaluate, kernel, run

RNG = np.random.default_rng(5)
SHARED = ".shared .align 16 .b8 s[4096];"


def words(count: int = 128) -> np.ndarray:
    return RNG.integers(0, 2**32, count, dtype=np.uint32)


TREE = """
    ld.global.u32 %r5, [%d2];
    shl.b32 %r6, %r1, 2;
    st.shared.u32 [%r6], %r5;
    bar.sync 0; // 0
    mov.u32 %r7, 64;
LOOP:
    setp.ge.u32 %p1, %r1, %r7;
    @%p1 bra NEXT;
    shl.b32 %r8, %r7, 2;
    add.u32 %r8, %r8, %r6;
    ld.shared.u32 %r9, [%r8];
    ld.shared.u32 %r10, [%r6];
    add.u32 %r10, %r10, %r9;
    st.shared.u32 [%r6], %r10;
NEXT:
    bar.sync 0; // 1
    shr.u32 %r7, %r7, 1;
    setp.ne.u32 %p2, %r7, 0;
    @%p2 bra LOOP;
    ld.shared.u32 %r11, [s];
    bar.sync 0; // 2
    add.u32 %r11, %r11, 1;
    st.shared.u32 [%r6], %r11;
    bar.sync 0; // 3
    xor.b32 %r12, %r6, 256;
    ld.shared.u32 %r13, [%r12];
    st.global.u32 [%d1], %r13;
"""


@pytest.mark.parametrize("schedule", ["round_robin", "reverse", "random"])
def test_tree_reduction_is_clean(schedule: str) -> None:
    x = words(256)
    got = evaluate(TREE, x, 128, 2, declarations=SHARED, schedule=schedule)
    total = x.reshape(2, 128).sum(1, dtype=np.uint32).repeat(128)
    np.testing.assert_array_equal(got, total + np.uint32(1))


@pytest.mark.parametrize("removed", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["round_robin", "reverse"])
def test_every_removed_barrier_is_found(removed: int, schedule: str) -> None:
    body = TREE.replace(f"bar.sync 0; // {removed}", "")
    checks = ("race",)
    with pytest.raises(SharedRace) as caught:
        evaluate(body, words(256), 128, 2, declarations=SHARED, schedule=schedule, checks=checks)
    assert caught.value.ptx_line and caught.value.details["other_line"]


def test_same_value_and_disjoint_halves_are_no_race() -> None:
    body = """
    mov.u32 %r5, 7;
    st.shared.u32 [s], %r5;
    shl.b32 %r6, %r1, 1;
    cvt.u16.u32 %h1, %r1;
    st.shared.u16 [%r6+16], %h1;
    bar.sync 0;
    ld.shared.u16 %h2, [%r6+16];
    cvt.u32.u16 %r7, %h2;
    ld.shared.u32 %r8, [s];
    add.u32 %r7, %r7, %r8;
    st.global.u32 [%d1], %r7;
"""
    got = evaluate(body, words(), 128, declarations=SHARED)
    np.testing.assert_array_equal(got, np.arange(128) + 7)


def test_different_values_in_one_store_race() -> None:
    body = "st.shared.u32 [s], %r1;"
    with pytest.raises(SharedRace, match="another lane"):
        evaluate(body, words(), 32, declarations=SHARED, checks=("race",))


def test_atomics_do_not_race_with_one_another_but_with_plain_reads() -> None:
    init = "mov.u32 %r5, 0; st.shared.u32 [s], %r5; bar.sync 0;"
    body = init + "red.shared.add.u32 [s], 1;"
    evaluate(body, words(), 128, declarations=SHARED)
    with pytest.raises(SharedRace):
        evaluate(body + "ld.shared.u32 %r6, [s];", words(), 128, declarations=SHARED)
    evaluate(body + "bar.sync 0; ld.shared.u32 %r6, [s];", words(), 128, declarations=SHARED)


def test_named_barrier_orders_only_its_members() -> None:
    body = """
    shl.b32 %r5, %r1, 2;
    st.shared.u32 [%r5], %r1;
    shr.u32 %r6, %r1, 6;
    add.u32 %r6, %r6, 1;
    bar.sync %r6, 64;
    xor.b32 %r7, %r5, {stride};
    ld.shared.u32 %r8, [%r7];
    st.global.u32 [%d1], %r8;
"""
    got = evaluate(body.format(stride=128), words(), 128, declarations=SHARED)
    np.testing.assert_array_equal(got, np.arange(128) ^ 32)
    with pytest.raises(SharedRace):
        evaluate(body.format(stride=256), words(), 128, declarations=SHARED)


COPY = """
    shl.b32 %r5, %r1, 4;
    mul.wide.u32 %d4, %r1, 16;
    add.s64 %d5, %d11, %d4;
    cp.async.cg.shared.global [%r5], [%d5], 16;
    cp.async.commit_group;
    add.u32 %r6, %r5, 2048;
    cp.async.ca.shared.global [%r6], [%d5+4], 4;
    cp.async.ca.shared.global [%r6+8], [%d5+8], 8, 4;
    cp.async.commit_group;
    cp.async.wait_group 1; // A
    ld.shared.u32 %r7, [%r5+12];
    cp.async.wait_group 0; // B
    bar.sync 0; // C
    xor.b32 %r8, %r6, 1024;
    ld.shared.u32 %r9, [%r8];
    ld.shared.v2.u32 {%r10, %r11}, [%r8+8];
    add.u32 %r7, %r7, %r9;
    xor.b32 %r7, %r7, %r10;
    add.u32 %r7, %r7, %r11;
    st.global.u32 [%d1], %r7;
"""


@pytest.mark.parametrize("landing", ["late", "early", "random"])
def test_async_copies(landing: str) -> None:
    x = words(128 * 4)
    got = evaluate(COPY, x, 128, declarations=SHARED, landing=landing)
    v = x.reshape(128, 4)
    other = v[np.arange(128) ^ 64]
    np.testing.assert_array_equal(got, (v[:, 3] + other[:, 1]) ^ other[:, 2])


@pytest.mark.parametrize(
    "removed", ["cp.async.wait_group 1; // A", "cp.async.wait_group 0; // B", "bar.sync 0; // C"]
)
@pytest.mark.parametrize("landing", ["late", "early"])
def test_async_copies_without_waits_are_found(removed: str, landing: str) -> None:
    body = COPY.replace(removed, "")
    with pytest.raises(SharedRace) as caught:
        evaluate(body, words(512), 128, declarations=SHARED, landing=landing, checks=("race",))
    assert "not ordered" in str(caught.value)


def test_missing_wait_shows_in_values_when_landing_late() -> None:
    body = COPY.replace("cp.async.wait_group 1; // A", "")
    x = words(512)
    late, early = (
        evaluate(body, x, 128, declarations=SHARED, landing=landing, checks=())
        for landing in ("late", "early")
    )
    assert (late != early).any()


def test_async_copy_ignored_source_and_bounds() -> None:
    body = """
    shl.b32 %r5, %r1, 4;
    mul.wide.u32 %d4, %r1, 16;
    add.s64 %d5, %d11, %d4;
    setp.lt.u32 %p1, %r1, 4;
    selp.u32 %r6, 16, {fallback}, %p1;
    cp.async.cg.shared.global [%r5], [%d5], 16, %r6;
    cp.async.wait_all;
    ld.shared.u32 %r7, [%r5+8];
    st.global.u32 [%d1], %r7;
"""
    x = words(16)
    got = evaluate(body.format(fallback=0), x, 32, declarations=SHARED)
    np.testing.assert_array_equal(got, np.r_[x.reshape(4, 4)[:, 2], np.zeros(28, np.uint32)])
    with pytest.raises(OutOfBounds, match="'inp'"):
        evaluate(body.format(fallback=16), x, 32, declarations=SHARED)


# -- undefined values
def test_undefined_register_matters_only_where_it_is_used() -> None:
    quiet = """
    setp.lt.u32 %p1, %r1, 16;
    @%p1 ld.global.u32 %r5, [%d2];
    add.u32 %r6, %r5, 1;
    selp.u32 %r7, %r6, 9, %p1;
    st.global.u32 [%d1], %r7;
"""
    x = words(32)
    expected = np.where(np.arange(32) < 16, x + np.uint32(1), 9)
    np.testing.assert_array_equal(evaluate(quiet, x), expected)
    with pytest.raises(UninitialisedRead, match="stored to memory") as caught:
        evaluate(quiet.replace("9, %p1", "%r6, %p1"), x)
    assert "lane 16" in str(caught.value)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("setp.eq.u32 %p1, %r5, 0; @%p1 bra X; X:", "decides what executes"),
        ("cvt.u64.u32 %d5, %r5; add.s64 %d5, %d5, %d10; ld.global.u32 %r6, [%d5];", "address"),
        ("add.u32 %r6, %r5, %r1; st.global.u32 [%d1], %r6;", "stored"),
        ("shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1; st.global.u32 [%d1], %r6;", "stored"),
        ("st.shared.u32 [%r7+512], %r5; ld.shared.u32 %r6, [%r7+512];"
         "st.global.u32 [%d1], %r6;", "stored"),
    ],
)  # fmt: skip
def test_undefined_shared_bytes_reach_a_use(use: str, message: str) -> None:
    load = "shl.b32 %r7, %r1, 2; ld.shared.u32 %r5, [%r7];"
    with pytest.raises(UninitialisedRead, match=message):
        evaluate(load + use, words(32), declarations=SHARED, checks=("uninit",))
    store = "shl.b32 %r7, %r1, 2; mov.u32 %r8, 0; st.shared.u32 [%r7], %r8;"
    evaluate(store + load + use, words(32), declarations=SHARED)


def test_partly_written_bytes_are_undefined() -> None:
    body = """
    shl.b32 %r7, %r1, 2;
    mov.u16 %h1, 3;
    st.shared.u16 [%r7], %h1;
    ld.shared.u{width} %r8, [%r7];
    st.global.u32 [%d1], %r8;
"""
    np.testing.assert_array_equal(
        evaluate(body.format(width=16), words(32), declarations=SHARED), np.full(32, 3)
    )
    with pytest.raises(UninitialisedRead):
        evaluate(body.format(width=32), words(32), declarations=SHARED)


def test_garbage_of_idle_lanes_may_be_loaded() -> None:
    # A warp reduction over 4 partial results: lanes 4-31 read bytes that nobody wrote.
    body = """
    shl.b32 %r7, %r1, 2;
    setp.lt.u32 %p1, %r1, 4;
    @%p1 st.shared.u32 [%r7], %r1;
    bar.sync 0;
    ld.shared.u32 %r8, [%r7];
    shfl.sync.bfly.b32 %r9, %r8, 2, 31, -1;
    add.u32 %r8, %r8, %r9;
    shfl.sync.bfly.b32 %r9, %r8, 1, 31, -1;
    add.u32 %r8, %r8, %r9;
    @%p1 st.global.u32 [%d1], %r8;
"""
    got = evaluate(body, words(32), declarations=SHARED)
    np.testing.assert_array_equal(got, np.where(np.arange(32) < 4, 6, 0))


def test_checks_can_be_chosen() -> None:
    body = "ld.shared.u32 %r5, [s]; st.global.u32 [%d1], %r5;"
    run(kernel(body, SHARED), np.zeros(32, np.uint32), words(32), checks=("race", "align"))
    with pytest.raises(UninitialisedRead):
        run(kernel(body, SHARED), np.zeros(32, np.uint32), words(32), checks=("uninit",))


def test_equal_vector_stores_of_nan_bits_are_no_race() -> None:
    body = """
    mov.u32 %r5, 0x7ff80000;
    mov.b32 %r6, {last};
    st.shared.v4.b32 [s], {{%r5, %r5, %r5, %r6}};
"""
    evaluate(body.format(last="%r5"), words(32), declarations=SHARED, checks=("race",))
    with pytest.raises(SharedRace):
        evaluate(body.format(last="%r1"), words(32), declarations=SHARED, checks=("race",))


@pytest.mark.parametrize(
    ("pick", "defined"),
    [
        ("mov.b32 %r6, {%h1, %h2}; prmt.b32 %r6, %r6, 0, 0x7710;", True),
        ("mov.b32 %r6, {%h1, %h2}; prmt.b32 %r6, %r6, 0, 0x7720;", False),
        ("mov.b32 %r6, {%h2, %h1}; mov.b32 {%h3, %h4}, %r6; cvt.u32.u16 %r6, %h4;", True),
        ("mov.b32 %r6, {%h2, %h1}; mov.b32 {%h3, %h4}, %r6; cvt.u32.u16 %r6, %h3;", False),
        ("mov.b32 %r6, {%h2, %h1}; shr.u32 %r6, %r6, 16;", True),
        ("mov.b32 %r6, {%h2, %h1}; shr.u32 %r6, %r6, 8;", False),
        ("mov.b32 %r6, {%h1, %h2}; and.b32 %r6, %r6, 0xffff;", True),
        ("mov.b32 %r6, {%h1, %h2}; and.b32 %r6, %r6, 0x1ffff;", False),
        ("mov.b32 %r6, {%h1, %h2}; cvt.s32.s16 %r6, %r6;", True),
        ("mov.b32 %r6, {%h1, %h2}; bfi.b32 %r6, 9, %r6, 16, 16;", True),
        ("mov.b32 %r6, {%h1, %h2}; bfi.b32 %r6, 9, %r6, 8, 16;", False),
        ("mul.lo.u32 %r6, %r5, 256; bfi.b32 %r6, 7, %r6, 8, 24; shr.u32 %r6, %r6, 8;", True),
        ("mul.lo.u32 %r6, %r5, 256; bfi.b32 %r6, 7, %r6, 0, 8;", False),
        ("mov.b32 %r6, {%h1, %h2}; st.shared.b32 [%r7], %r6; ld.shared.u16 %r6, [%r7];", True),
        ("mov.b32 %r6, {%h1, %h2}; st.shared.b32 [%r7], %r6; ld.shared.u16 %r6, [%r7+2];", False),
        ("st.shared.v2.b16 [%r7], {%h1, %h2}; ld.shared.v2.u16 {%h3, %h4}, [%r7];"
         "cvt.u32.u16 %r6, %h3;", True),
        ("st.shared.v2.b16 [%r7], {%h1, %h2}; ld.shared.v2.u16 {%h3, %h4}, [%r7];"
         "cvt.u32.u16 %r6, %h4;", False),
    ],
)  # fmt: skip
def test_undefined_bytes_beside_defined_ones(pick: str, defined: bool) -> None:
    body = f"shl.b32 %r7, %r1, 2; mov.b16 %h1, 7; {pick} st.global.u32 [%d1], %r6;"
    if defined:
        out = evaluate(body, words(32), declarations=SHARED, checks=("uninit",))
        assert (out & 0xFF == 7).all()
        return
    with pytest.raises(UninitialisedRead, match="stored"):
        evaluate(body, words(32), declarations=SHARED, checks=("uninit",))
