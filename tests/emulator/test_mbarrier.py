"""mbarriers, cluster barriers and register pools: waiting, ordering, and every misuse."""

from __future__ import annotations

import numpy as np
import pytest

from minitriton.runtime.emulator import (
    Deadlock,
    DivergentAligned,
    EmulatorError,
    MbarrierMisuse,
    Misaligned,
    OutOfBounds,
    RegisterPool,
    SharedRace,
    UninitialisedRead,
    UnsupportedPTX,
)
from tests.emulator.tma_harness import assembles, kernel, launch, wait

SCHEDULES = ("round_robin", "reverse", "random")
STORE = "mad.lo.u32 %r5, %r3, %r4, %r1; mul.wide.u32 %d5, %r5, 4; add.s64 %d5, %d5, %d10;"


def init(count: int, name: str = "bars", where: str = "%p1") -> str:
    return f"""
    @{where} bra READY;
    mbarrier.init.shared::cta.b64 [{name}], {count};
READY:
    bar.sync 0; // after init
"""


def run(ptx: str, block: int = 64, grid: int = 3, **options) -> np.ndarray:
    out = np.zeros((grid, block), np.uint32)
    launch(ptx, out, np.zeros(4, np.uint32), block=block, grid=grid, **options)
    return out


# -- right programs
#: Threads hand words to the neighbouring warp through two slots of shared memory.
EXCHANGE = f"""{init(64)}
    {STORE}
    shl.b32 %r12, %r1, 2;
    xor.b32 %r13, %r12, 128;
    add.u32 %r12, %r12, %r10;
    add.u32 %r13, %r13, %r10;
    mov.u32 %r14, 0;
    mov.u32 %r15, %r1;
ROUND:
    and.b32 %r16, %r14, 1;
    shl.b32 %r17, %r16, 9;
    add.u32 %r18, %r12, %r17;
    st.shared.u32 [%r18], %r15;
    mbarrier.arrive.shared::cta.b64 %d6, [bars]; // arrive
    // <wait>
    {{ .reg .pred done;
LAB_WAIT:
    WAITING
    @done bra DONE;
    bra LAB_WAIT;
DONE: }}
    // </wait>
    add.u32 %r18, %r13, %r17;
    ld.shared.u32 %r19, [%r18];
    add.u32 %r15, %r19, 1;
    add.u32 %r14, %r14, 1;
    setp.lt.u32 %p2, %r14, 7;
    @%p2 bra ROUND;
    st.global.u32 [%d5], %r15;
"""
WAITS = {
    "parity": "mbarrier.try_wait.parity.shared::cta.b64 done, [bars], %r16;",
    "hint": "mbarrier.try_wait.parity.shared.b64 done, [bars], %r16, 1000;",
    "state": "mbarrier.try_wait.shared::cta.b64 done, [bars], %d6;",
    "test": "mbarrier.test_wait.parity.shared::cta.b64 done, [bars], %r16;",
    "test state": "mbarrier.test_wait.acquire.cta.shared::cta.b64 done, [bars], %d6;",
    "generic": "mbarrier.try_wait.parity.b64 done, [%d8], %r16;",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", WAITS)
def test_rounds_of_both_parities(form: str, schedule: str) -> None:
    body = EXCHANGE.replace("WAITING", WAITS[form])
    if form == "generic":
        body = "cvt.u64.u32 %d8, %r11; cvta.shared.u64 %d8, %d8;" + body
    got = run(assembles(body), schedule=schedule)
    np.testing.assert_array_equal(got, np.tile((np.arange(64) ^ 32) + 7, (3, 1)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_missing_waits_and_arrivals_are_found(schedule: str) -> None:
    body = EXCHANGE.replace("WAITING", WAITS["parity"])
    start, end = body.index("// <wait>"), body.index("// </wait>")
    with pytest.raises(EmulatorError) as caught:
        run(kernel(body[:start] + body[end:]), schedule=schedule)
    assert caught.value.rule in ("shared-race", "uninitialised-read", "mbarrier")
    with pytest.raises(Deadlock, match="64 of 64 arrivals and 0 bytes"):
        run(kernel(body.replace("mbarrier.arrive.shared::cta.b64 %d6, [bars]; // arrive", "")))
    # Relaxed operations complete the phase and order nothing.
    relaxed = body.replace("mbarrier.arrive", "mbarrier.arrive.relaxed.cta")
    with pytest.raises(SharedRace):
        run(kernel(relaxed), schedule=schedule)
    with pytest.raises(SharedRace):
        run(kernel(body.replace("try_wait.parity", "try_wait.parity.relaxed.cta")))


def test_bytes_and_arrivals_by_hand() -> None:
    body = f"""{init(64 + 1)}
    {STORE}
    mbarrier.arrive.shared::cta.b64 _, [bars];
    @%p1 bra WAIT;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bars], 100;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bars], 150;
    mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [bars], 50;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bars], 100;
WAIT:
    {wait("%r11", "0")}
    {wait("%r11", "1")}
    st.global.u32 [%d5], %r1;
"""
    # Parity 1 is of the phase before the first one, which counts as complete until phase 1 runs.
    with pytest.raises(Deadlock, match="phase 1, 65 of 65 arrivals and 0 bytes outstanding"):
        run(kernel(body))
    assert (run(assembles(body.replace(wait("%r11", "1"), ""))) == np.arange(64)).all()
    for old, new, message in (
        ("150", "151", "0 of 65 arrivals and 1 bytes outstanding, parity 0"),
        ("mbarrier.arrive.shared", "@%p1 mbarrier.arrive.shared", "1 of 65 arrivals and 0 bytes"),
    ):
        with pytest.raises(Deadlock, match=message) as caught:
            run(kernel(body.replace(old, new)))
        assert "mbarrier at shared offset 0x8000" in str(caught.value)
        assert "try_wait" in caught.value.details["ptx"]


def test_the_bytes_are_free_after_inval() -> None:
    body = f"""{init(1)}
    {STORE}
    @%p1 bra OVER;
    mbarrier.inval.shared::cta.b64 [bars];
    mbarrier.init.shared::cta.b64 [bars], 7;
    mbarrier.inval.shared::cta.b64 [bars];
    st.shared.u32 [bars], %r4;
OVER:
    bar.sync 0;
    ld.shared.u32 %r6, [bars];
    st.global.u32 [%d5], %r6;
"""
    assert (run(assembles(body)) == 64).all()
    with pytest.raises(UninitialisedRead):
        run(kernel(body.replace("st.shared.u32 [bars], %r4;", "")))


# -- misuse
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [bars];"
TRY = "mbarrier.try_wait.parity.shared::cta.b64 %p5, [bars], 0;"
FIRST = "@%p1 bra END;"  # only thread 0 goes on
MISUSES = {
    "twice": (init(1) + FIRST + "mbarrier.init.shared::cta.b64 [bars], 1;", "initialised twice"),
    "count 0": (init(0), "count 0 is not in 1"),
    "count 2**20": (init(1 << 20), "count 1048576 is not in 1"),
    "arrive before init": (ARRIVE, "no mbarrier has been init"),
    "wait before init": (TRY, "no mbarrier has been init"),
    "expect before init": ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bars], 16;", "no mb"),
    "inval before init": (FIRST + "mbarrier.inval.shared::cta.b64 [bars];", "no mbarrier has been"),
    "copy before init": (
        FIRST + "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [tile], [%d11], 16, [bars];", "no mbarrier has been init"),
    "after inval": (
        init(1) + FIRST + "mbarrier.inval.shared::cta.b64 [bars];" + ARRIVE, "no mbarrier has"),
    "other place": (init(1) + ARRIVE.replace("bars]", "bars+8]"), "offset 0x8008: no mbarrier"),
    "over-arrival": (init(63) + ARRIVE, "1 arrivals too many in phase 0"),
    "count operand": (
        init(3) + FIRST + "mbarrier.arrive.shared::cta.b64 %d6, [bars], 4;", "1 arrivals too many"),
    "tx overflow": (
        init(1) + FIRST + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bars], 1048575;" * 2,
        "tx-count 2097150 is beyond 1048575"),
    "tx underflow": (
        init(1) + FIRST + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bars], 32;"
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bars], 48;", "16 bytes more than"),
    "early bytes": (
        init(1) + FIRST + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bars], 48;" + ARRIVE,
        "48 bytes more than expected"),
    "inval while waited": (
        init(1) + f"@!%p1 bra OTHER; {TRY} bra END; OTHER: bar.warp.sync 1;"
        "mbarrier.inval.shared::cta.b64 [bars];",
        "invalidated while threads wait"),
    "inval while copied to": (
        init(1) + FIRST + "fence.mbarrier_init.release.cluster;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [tile], [%d11], 16, [bars];"
        "mbarrier.inval.shared::cta.b64 [bars];", "while a copy is in flight"),
    "plain load": (init(1) + "ld.shared.u32 %r5, [bars+4];", "accessed as plain memory"),
    "plain store": (init(1) + "st.shared.u8 [bars+7], %r1;", "accessed as plain memory"),
    "vector load": (
        init(1, "bars+8") + "ld.shared.v4.u32 {%r5,%r6,%r7,%r8}, [bars];", "offset 0x8008: acc"),
    "atomic": (init(1) + "red.shared.add.u32 [bars], 1;", "accessed as plain memory"),
    "parity 2": (init(1) + TRY.replace("], 0", "], 2"), "parity 2 is neither"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_named(case: str) -> None:
    body, message = MISUSES[case]
    with pytest.raises(MbarrierMisuse, match=message) as caught:
        run(kernel(body + "\nEND:\n"))
    assert caught.value.ptx_line and caught.value.details["ptx"]


def test_misaligned_and_outside() -> None:
    with pytest.raises(Misaligned, match="0x8004 is not 8-byte"):
        run(kernel(init(1, "bars+4")))
    with pytest.raises(OutOfBounds):
        run(kernel(init(1, "bars+128")))
    with pytest.raises(OutOfBounds, match="not in shared memory"):
        run(kernel("mbarrier.init.b64 [%d10], 1;"))


def test_use_without_a_barrier_after_init_is_a_race() -> None:
    body = init(64).replace("bar.sync 0; // after init", "") + ARRIVE
    with pytest.raises(SharedRace, match="use of an mbarrier"):
        run(kernel(body))


@pytest.mark.parametrize("text", ["mbarrier.arrive.noComplete.shared.b64 %d6, [bars], 1;",
                                  "mbarrier.arrive_drop.shared.b64 %d6, [bars];"])  # fmt: skip
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedPTX):
        run(kernel(text))


def test_deadlock_names_what_keeps_the_lanes_of_a_warp() -> None:
    lonely = f"{init(2)} @%p1 bra HERE; {wait('%r11', '0')} HERE: bar.warp.sync -1;"
    with pytest.raises(Deadlock, match="warp 0 lane 0 waits at .* mbarrier at shared offset"):
        run(kernel(lonely), block=32, grid=1)


# -- cluster of one CTA
CLUSTER = f"""
    {STORE}
    shl.b32 %r12, %r1, 2;
    xor.b32 %r13, %r12, 192;
    add.u32 %r12, %r12, %r10;
    mapa.shared::cluster.u32 %r14, %r10, 0;
    add.u32 %r13, %r13, %r14;
    st.shared.u32 [%r12], %r1;
    barrier.cluster.arrive.release.aligned; // arrive
    add.u32 %r15, %r1, 1;
    barrier.cluster.wait.acquire.aligned; // wait
    ld.shared.u32 %r16, [%r13];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    st.global.u32 [%d5], %r16;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cluster_barriers(schedule: str) -> None:
    got = run(assembles(CLUSTER), schedule=schedule)
    np.testing.assert_array_equal(got, np.tile(np.arange(64) ^ 48, (3, 1)))
    gone = "setp.ge.u32 %p3, %r1, 32; @%p3 exit;" + CLUSTER.replace("192", "64")
    assert (run(kernel(gone), schedule=schedule)[:, :32] == np.arange(32) ^ 16).all()
    with pytest.raises(SharedRace):
        run(kernel(CLUSTER.replace(".release", ".relaxed")), schedule=schedule)


def test_cluster_misuse() -> None:
    with pytest.raises(Deadlock, match="twice without"):
        run(kernel(CLUSTER.replace("barrier.cluster.wait.acquire.aligned; // wait", "")), checks=())
    with pytest.raises(Deadlock, match="without barrier.cluster.arrive"):
        run(kernel(CLUSTER.replace("barrier.cluster.arrive.release.aligned; // arrive", "")))
    half = CLUSTER.replace("barrier.cluster.arrive.rel", "@!%p3 bra HERE; bar.sync 1, 64; HERE:"
                           "barrier.cluster.arrive.rel")  # fmt: skip
    with pytest.raises(Deadlock, match="the cluster barrier: 32 of 64 threads arrived"):
        run(kernel("setp.ge.u32 %p3, %r1, 32;" + half))
    with pytest.raises(OutOfBounds, match="beyond the cluster"):
        run(kernel(CLUSTER.replace("%r10, 0", "%r10, 1")))


# -- registers
POOL = f"""
    {STORE}
    setp.ge.u32 %p3, %r1, 128;
    @%p3 bra CONSUMER;
    setmaxnreg.dec.sync.aligned.u32 40; // give
    bra END;
CONSUMER:
    setmaxnreg.inc.sync.aligned.u32 232; // take
    st.global.u32 [%d5], %r1;
END:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_register_pool(schedule: str) -> None:
    # 384 threads start with 168: 40 + 2 * 232 = 3 * 168.
    got = run(kernel(POOL), 384, schedule=schedule)
    np.testing.assert_array_equal(got[:, 128:], np.tile(np.arange(128, 384), (3, 1)))


def test_register_pool_misuse() -> None:
    with pytest.raises(Deadlock, match="8192 more registers, of which the CTA has 0 free"):
        run(
            kernel(POOL.replace("setmaxnreg.dec.sync.aligned.u32 40; // give", "bar.sync 1, 160;")),
            384,
        )
    with pytest.raises(
        Deadlock, match="9216 more registers, of which the CTA has 8192 free|more registers"
    ):
        run(kernel(POOL.replace("232", "240")), 384)
    with pytest.raises(DivergentAligned, match="different register counts"):
        odd = "setp.ge.u32 %p4, %r1, 96; @%p4 bra ODD;" + POOL + "bra LAST; ODD:"
        run(kernel(odd.replace("END:", "END: bar.sync 2, 384; ") +
                   "setmaxnreg.dec.sync.aligned.u32 48; LAST:"), 128)  # fmt: skip
    with pytest.raises(RegisterPool, match="168 registers cannot go to 176 by setmaxnreg.dec"):
        run(kernel(POOL.replace(" 40;", " 176;")), 384)
    with pytest.raises(RegisterPool, match="cannot go to 160 by setmaxnreg.inc"):
        run(kernel(POOL.replace(" 232;", " 160;")), 384)
    for count in ("20", "260", "44"):
        with pytest.raises(UnsupportedPTX, match="multiple of 8"):
            run(kernel(POOL.replace(" 40;", f" {count};")), 384)


def test_part_of_a_warpgroup_at_setmaxnreg() -> None:
    body = """
    setp.ge.u32 %p3, %r1, 96;
    @%p3 bra WAITING;
    setmaxnreg.dec.sync.aligned.u32 40;
    bra END;
WAITING:
    bar.sync 1, 64;
END:
"""
    with pytest.raises(Deadlock, match="3 of 4 warps of the warpgroup arrived"):
        run(kernel(body), 128)
