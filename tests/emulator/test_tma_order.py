"""Rings of stages between warps, and stores: right ones are clean, each seeded defect is found."""

from __future__ import annotations

import re

import numpy as np
import pytest

from minitriton.runtime.emulator import (
    Deadlock,
    EmulatorError,
    SharedRace,
    TensorMap,
    UninitialisedRead,
)
from tests.emulator.tma_harness import (
    INIT,
    LOAD_2D,
    assembles,
    init_barriers,
    kernel,
    launch,
    model_load,
    tensor_of,
    wait,
)

LANDINGS = ("late", "early", "random")
POLICIES = [("late", "round_robin"), ("early", "reverse"), ("random", "random")]

# -- a ring of stages between a producer warp and consumer warps
STAGES, ROWS = 3, 8
RING = f"""
    shr.u32 %r7, %r1, 5;
    @%p1 bra READY;
    {init_barriers(1, 1, 1, 3, 3, 3)}
    fence.mbarrier_init.release.cluster; // init fence
READY:
    bar.sync 0; // first barrier
    mov.u32 %r20, 0;
    mov.u32 %r22, 0;
    setp.ne.u32 %p2, %r7, 0;
    @%p2 bra CONSUMER;
    mov.u32 %r21, 1;
    elect.sync _|%p3, -1;
    @!%p3 bra DONE;
PRODUCE:
    mad.lo.u32 %r25, %r20, 8, %r11;
    add.u32 %r27, %r25, {8 * STAGES};
    // <empty>
    {wait("%r27", "%r21")}
    // </empty>
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r25], 512; // expect
    mad.lo.u32 %r26, %r20, 512, %r10;
    shl.b32 %r28, %r22, 3;
    {LOAD_2D}.L2::cache_hint [%r26], [%d20, {{0, %r28}}], [%r25], %d30; // copy
    add.u32 %r20, %r20, 1;
    setp.eq.u32 %p5, %r20, {STAGES};
    @%p5 mov.u32 %r20, 0;
    @%p5 xor.b32 %r21, %r21, 1;
    add.u32 %r22, %r22, 1;
    setp.lt.u32 %p6, %r22, %r9;
    @%p6 bra PRODUCE;
    bra DONE;
CONSUMER:
    mov.u32 %r21, 0;
    mov.u32 %r30, 0;
    sub.u32 %r31, %r1, 32;
    shl.b32 %r32, %r31, 2;
    and.b32 %r33, %r1, 31;
    setp.eq.u32 %p7, %r33, 0;
CONSUME:
    mad.lo.u32 %r25, %r20, 8, %r11;
    // <full>
    {wait("%r25", "%r21")}
    // </full>
    mad.lo.u32 %r26, %r20, 512, %r10;
    add.u32 %r26, %r26, %r32;
    ld.shared.u32 %r34, [%r26];
    mad.lo.u32 %r30, %r30, 3, %r34;
    bar.warp.sync -1;
    @%p7 mbarrier.arrive.shared::cta.b64 _, [%r25+{8 * STAGES}]; // release
    add.u32 %r20, %r20, 1;
    setp.eq.u32 %p5, %r20, {STAGES};
    @%p5 mov.u32 %r20, 0;
    @%p5 xor.b32 %r21, %r21, 1;
    add.u32 %r22, %r22, 1;
    setp.lt.u32 %p6, %r22, %r9;
    @%p6 bra CONSUME;
    mad.lo.u32 %r5, %r3, 96, %r31;
    mad.wide.u32 %d6, %r5, 4, %d10;
    st.global.u32 [%d6], %r30;
DONE:
""".replace("elect.sync", "createpolicy.fractional.L2::evict_first.b64 %d30, 1.0;\n    elect.sync")


def run_ring(body: str, tiles: int = 11, **options) -> bool:
    """Whether each consumer thread has met its word of every tile in order, in 5 CTAs."""
    data, box = tensor_of((16, ROWS * tiles), 4, (0,), (16, ROWS), 64)
    out = np.zeros((5, 96), np.uint32)
    launch(body, out, np.zeros(4, np.uint32), (box,), (data,), tiles, 5, **options)
    expected = np.zeros(96, np.uint32)
    for k in range(tiles):
        tile = model_load(data, box, (0, ROWS * k)).view(np.uint32)
        expected = expected * np.uint32(3) + tile[:96]
    return bool((out == expected).all())


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
def test_a_ring_is_right_and_clean(landing: str, schedule: str) -> None:
    assert run_ring(assembles(RING), landing=landing, schedule=schedule)


def test_waiting_is_cheap() -> None:
    data, box = tensor_of((16, ROWS * 40), 4, (0,), (16, ROWS), 64)
    out = np.zeros((1, 96), np.uint32)
    report = launch(kernel(RING), out, np.zeros(4, np.uint32), (box,), (data,), 40)
    assert report.steps < 40 * 40
    assert report.bytes["load_bulk"] == 40 * box.box_bytes


def without(body: str, name: str) -> str:
    """The body without the line or the lines marked ``name``."""
    if f"// <{name}>" in body:
        return re.sub(f"// <{name}>.*?// </{name}>", "", body, flags=re.S)
    assert f"// {name}\n" in body
    return re.sub(rf"[^\n]*// {name}\n", "\n", body)


RING_DEFECTS = {
    "no wait for a free stage": (without(RING, "empty"), "shared-race|mbarrier"),
    "no wait for a full stage": (without(RING, "full"), "shared-race|uninitialised-read"),
    "no release": (without(RING, "release"), "deadlock"),
    "no expect": (without(RING, "expect"), "deadlock"),
    "no copy": (without(RING, "copy"), "deadlock"),
    "no init fence": (without(RING, "init fence"), "shared-race"),
    "no first barrier": (without(RING, "first barrier"), "mbarrier|shared-race"),
    "too few bytes": (RING.replace("%r25], 512", "%r25], 496"), "mbarrier"),
    "too many bytes": (RING.replace("%r25], 512", "%r25], 528"), "deadlock"),
    "producer starts with parity 0": (RING.replace("%r21, 1;\n    create", "%r21, 0;\n    create"),
                                      "deadlock"),
    "consumers start with parity 1": (RING.replace("CONSUMER:\n    mov.u32 %r21, 0",
                                                   "CONSUMER:\n    mov.u32 %r21, 1"),
                                      "shared-race|uninitialised-read|deadlock"),
    "released by one warp of three": (RING.replace("], 3;", "], 1;"), "mbarrier|shared-race"),
    "released before the read": (
        RING.replace("    ld.shared.u32 %r34, [%r26];\n", "").replace(
            "// release\n", "\n ld.shared.u32 %r34, [%r26];\n"),
        "shared-race"),
    "phase never flips": (RING.replace("@%p5 xor.b32 %r21, %r21, 1;", ""),
                          "deadlock|shared-race|mbarrier"),
}  # fmt: skip


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
@pytest.mark.parametrize("defect", RING_DEFECTS)
def test_defects_of_a_ring_are_found(defect: str, landing: str, schedule: str) -> None:
    body, rules = RING_DEFECTS[defect]
    assert body != RING
    with pytest.raises(EmulatorError) as caught:
        run_ring(kernel(body), landing=landing, schedule=schedule)
    assert caught.value.rule in rules.split("|"), str(caught.value)
    assert caught.value.ptx_line


# -- stores
STORE = f"""{INIT}
    @%p1 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bars], 1024;
    {LOAD_2D} [tile], [%d20, {{0, 0}}], [bars];
LOADED:
    {wait("%r11", "0")}
    shl.b32 %r5, %r1, 3;
    add.u32 %r5, %r5, %r10;
    ld.shared.v2.u32 {{%r6, %r7}}, [%r5];
    not.b32 %r6, %r6;
    not.b32 %r7, %r7;
    st.shared.v2.u32 [%r5+1024], {{%r6, %r7}};
    fence.proxy.async.shared::cta; // fence
    bar.sync 0; // before the store
    @%p1 bra STORED;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d21, {{0, 0}}], [tile+1024];
    cp.async.bulk.commit_group; // commit
    cp.async.bulk.wait_group.read 0; // wait
STORED:
    bar.sync 0; // before the reuse
    st.shared.v2.u32 [%r5+1024], {{%r1, %r1}};
"""


def run_store(body: str, **options) -> bool:
    data, source = tensor_of((32, 8), 4, (0,), (32, 8), 128)
    result, target = tensor_of((32, 8), 4, (1,), (32, 8), 128)
    out = np.zeros(4, np.uint32)
    launch(body, out, out, (source, target), (data, result), **options)
    rows = result.reshape(8, 144)[:, :128]
    return bool((rows == ~data.reshape(8, 128)).all())


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
def test_a_store_is_right_and_clean(landing: str, schedule: str) -> None:
    assert run_store(assembles(STORE), landing=landing, schedule=schedule)


@pytest.mark.parametrize("landing", LANDINGS)
@pytest.mark.parametrize(
    "removed", ["fence", "before the store", "commit", "wait", "before the reuse"]
)
def test_defects_of_a_store_are_found(removed: str, landing: str) -> None:
    with pytest.raises(SharedRace) as caught:
        run_store(kernel(without(STORE, removed)), landing=landing, checks=("race",))
    assert caught.value.hint


def test_defects_show_in_values_without_checks() -> None:
    for removed in ("commit", "wait"):
        assert not run_store(kernel(without(STORE, removed)), checks=())
    assert run_store(kernel(STORE), checks=())


def test_a_cta_may_not_end_before_its_copies() -> None:
    copied = STORE.split("    bar.sync 0; // before the reuse")[0]
    with pytest.raises(SharedRace, match="CTA ends while"):
        run_store(kernel(without(copied, "wait")))
    assert run_store(kernel(copied))
    unread = INIT + STORE.split("LOADED:")[0].split(INIT)[1] + "LOADED:\n"
    with pytest.raises(SharedRace, match="CTA ends while"):
        run_store(kernel(unread))


def test_a_store_of_unwritten_bytes() -> None:
    body = STORE.replace(
        "    st.shared.v2.u32 [%r5+1024], {%r6, %r7};",
        "    @%p1 st.shared.v2.u32 [%r5+1024], {%r6, %r7};",
    )
    with pytest.raises(UninitialisedRead, match="bulk store"):
        run_store(kernel(body))


# -- a warpgroup of tensor cores behind a ring, whose stages one lane releases for all four warps
SPAN, N = 64, 8  # f16 to a 128-byte row; columns of the product
STAGE = (64 + N) * 128
PRODUCTS = f"""
    shr.u32 %r7, %r1, 5;
    @%p1 bra READY;
    {init_barriers(1, 1, 1, 1)}
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    mov.u32 %r20, 0;
    mov.u32 %r22, 0;
    mov.u32 %r21, 0;
    setp.lt.u32 %p2, %r7, 4;
    @%p2 bra CONSUMER;
    elect.sync _|%p3, -1;
    @!%p3 bra DONE;
PRODUCE:
    mad.lo.u32 %r25, %r20, 8, %r11;
    add.u32 %r27, %r25, 16;
    xor.b32 %r29, %r21, 1;
    {wait("%r27", "%r29")}
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r25], {STAGE};
    mad.lo.u32 %r26, %r20, {1024 * -(-STAGE // 1024)}, %r10;
    shl.b32 %r28, %r22, 6;
    {LOAD_2D} [%r26], [%d20, {{%r28, 0}}], [%r25];
    add.u32 %r26, %r26, 8192;
    {LOAD_2D} [%r26], [%d21, {{%r28, 0}}], [%r25];
    xor.b32 %r20, %r20, 1;
    setp.eq.u32 %p5, %r20, 0;
    @%p5 xor.b32 %r21, %r21, 1;
    add.u32 %r22, %r22, 1;
    setp.lt.u32 %p6, %r22, %r9;
    @%p6 bra PRODUCE;
    bra DONE;
CONSUMER:
    setp.ne.u32 %p8, %r1, 0;
    mov.f32 %f1, 0f00000000;
    mov.f32 %f2, %f1;
    mov.f32 %f3, %f1;
    mov.f32 %f4, %f1;
CONSUME:
    mad.lo.u32 %r25, %r20, 8, %r11;
    {wait("%r25", "%r21")}
    mad.lo.u32 %r26, %r20, {1024 * -(-STAGE // 1024)}, %r10;
    shr.u32 %r26, %r26, 4;
    cvt.u64.u32 %d5, %r26;
    or.b64 %d5, %d5, 0x4000004000010000;
    add.s64 %d6, %d5, 512;
    wgmma.fence.sync.aligned;
    STEPS
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0; // products
    @!%p8 mbarrier.arrive.shared::cta.b64 _, [%r25+16]; // release
    xor.b32 %r20, %r20, 1;
    setp.eq.u32 %p5, %r20, 0;
    @%p5 xor.b32 %r21, %r21, 1;
    add.u32 %r22, %r22, 1;
    setp.lt.u32 %p6, %r22, %r9;
    @%p6 bra CONSUME;
    wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %d7, %r1, 16;
    add.s64 %d7, %d7, %d10;
    st.global.v4.f32 [%d7], {{%f1, %f2, %f3, %f4}};
DONE:
""".replace(
    "STEPS",
    "".join(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %d5, %d6, 1, 1, 1,"
        " 0, 0; add.s64 %d5, %d5, 2; add.s64 %d6, %d6, 2;\n"
        for _ in range(4)
    ),
)


def run_products(body: str, tiles: int = 7, **options) -> float:
    """Largest error of the product of two matrices of small integers."""
    rng = np.random.default_rng(8)
    a, b = (rng.integers(-3, 4, (n, SPAN * tiles)).astype(np.float16) for n in (64, N))
    maps = tuple(
        TensorMap(
            x.ctypes.data, 2, (SPAN * tiles, len(x)), (2 * SPAN * tiles,), (SPAN, len(x)), 128
        )
        for x in (a, b)
    )
    out = np.full((128, 4), np.nan, np.float32)
    launch(body, out, np.zeros(4, np.uint32), maps, (a, b), tiles, block=160, **options)
    # Register 2h + i of a lane is row lane / 4 + 8h of its warp's 16, column 2 (lane % 4) + i.
    got = out.reshape(4, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(64, N)
    return float(np.abs(got - a.astype(np.float64) @ b.astype(np.float64).T).max())


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
def test_one_lane_answers_for_its_warpgroup(landing: str, schedule: str) -> None:
    assert run_products(assembles(PRODUCTS), landing=landing, schedule=schedule) == 0


@pytest.mark.parametrize("landing", LANDINGS)
def test_a_stage_released_before_its_products_are_done(landing: str) -> None:
    with pytest.raises(SharedRace, match="wgmma in flight"):
        run_products(kernel(without(PRODUCTS, "products")), landing=landing)
    # A wait by another warpgroup's products, or one too many left over, does not help either.
    late = PRODUCTS.replace("aligned 0; // products", "aligned 1; // products")
    with pytest.raises(SharedRace, match="wgmma in flight"):
        run_products(kernel(late), landing=landing)
    with pytest.raises(Deadlock, match="1 of 1 arrivals"):
        run_products(kernel(without(PRODUCTS, "release")), landing=landing)


def test_a_warpgroup_that_is_not_together() -> None:
    away = "    setp.eq.u32 %p9, %r7, 3;\n    @%p9 bra AWAY;\n"
    split = PRODUCTS.replace("    wgmma.commit_group", away + "    wgmma.commit_group")
    split = split.replace("DONE:", "AWAY:\n    bar.sync 3, 64;\nDONE:")
    with pytest.raises(Deadlock, match="wgmma group 1: its warpgroup has committed only 0"):
        run_products(kernel(split))
