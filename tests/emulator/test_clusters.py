"""Clusters: registers, addresses of other CTAs, arrivals, multicast, and what must be found."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from minitriton.runtime import assembler
from minitriton.runtime.emulator import (
    Deadlock,
    Emulator,
    LaunchError,
    MbarrierMisuse,
    OutOfBounds,
    SharedRace,
    UninitialisedRead,
    UnsupportedPTX,
)
from tests.emulator import tma_harness
from tests.emulator.ptx_harness import kernel
from tests.emulator.ptx_harness import run as run_grid
from tests.emulator.tma_harness import LOAD_2D, init_barriers, launch, model_load, tensor_of, wait

SCHEDULES = ("round_robin", "reverse", "random")
POLICIES = [("late", "round_robin"), ("early", "reverse"), ("random", "random")]
PAIR = ".explicitcluster .reqnctapercluster 2, 1, 1"
BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
#: %r40 the rank, %r41 the other's, %d5 this thread's place in the output
RANK = """
    mov.u32 %r40, %cluster_ctarank;
    xor.b32 %r41, %r40, 1;
    mad.lo.u32 %r5, %r3, %r4, %r1;
    mul.wide.u32 %d4, %r5, 4;
    add.s64 %d5, %d10, %d4;
"""


def pair(body: str, directives: str = PAIR) -> str:
    """tma_harness.kernel with ``directives``, the prologue above and a body."""
    text = tma_harness.kernel(RANK + body)
    return text.replace(".param .u32 n)\n", f".param .u32 n) {directives}\n")


@functools.cache
def assembles(body: str) -> str:
    """`pair` of the body, which ptxas has accepted."""
    ptx = pair(body)
    assembler.assemble(ptx, "sm_90a", "k")
    return ptx


def run(ptx: str, ctas: int = 6, block: int = 64, **options: Any) -> np.ndarray:
    """What each thread of each CTA stored."""
    out = np.zeros((ctas, block), np.uint32)
    launch(ptx, out, np.zeros(4, np.uint32), grid=ctas, block=block, **options)
    return out


# -- launches
def special(name: str) -> str:
    body = f"mov.u32 %r5, %{name}; st.global.u32 [%d1], %r5;"
    if name == "is_explicit_cluster":
        body = (
            "mov.pred %p1, %is_explicit_cluster; selp.u32 %r5, 1, 0, %p1; st.global.u32 [%d1], %r5;"
        )
    flat = "mov.u32 %r6, %ctaid.y; mov.u32 %r7, %nctaid.x; mad.lo.u32 %r3, %r6, %r7, %r3;"
    place = "mad.lo.s32 %r2, %r3, %r4, %r1; mul.wide.u32 %d3, %r2, 4; add.s64 %d1, %d10, %d3;"
    return kernel(flat + place + body)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ctaid.x", lambda x, y: x), ("ctaid.y", lambda x, y: y),
        ("clusterid.x", lambda x, y: x // 2), ("clusterid.y", lambda x, y: y // 2),
        ("nclusterid.x", lambda x, y: 3), ("nclusterid.y", lambda x, y: 2),
        ("cluster_ctaid.x", lambda x, y: x % 2), ("cluster_ctaid.y", lambda x, y: y % 2),
        ("cluster_nctaid.y", lambda x, y: 2), ("cluster_nctaid.z", lambda x, y: 1),
        ("cluster_ctarank", lambda x, y: y % 2 * 2 + x % 2),
        ("cluster_nctarank", lambda x, y: 4), ("is_explicit_cluster", lambda x, y: 1),
    ],
)  # fmt: skip
def test_special_registers(name: str, expected: Any) -> None:
    out = np.zeros((4, 6, 32), np.uint32)
    parameters = [np.uint64(out.ctypes.data).tobytes()] * 2 + [bytes(4)]
    allocation = tma_harness.Allocation(out.ctypes.data, out.nbytes)
    ptx = special(name)
    assembler.assemble(ptx, "sm_90a", "k")
    Emulator(ptx).launch("k", grid=(6, 4, 1), block=(32, 1, 1), params=parameters,
                         allocations=[allocation], cluster=(2, 2, 1))  # fmt: skip
    y, x = np.indices((4, 6))
    assert (out == np.broadcast_to(expected(x, y), (4, 6))[..., None]).all()


def test_without_a_cluster_each_cta_is_one() -> None:
    for name, expected in (("cluster_nctarank", 1), ("clusterid.x", 2), ("is_explicit_cluster", 0)):
        out = np.zeros((3, 32), np.uint32)
        run_grid(special(name), out, np.zeros(1, np.uint32), grid=3)
        assert (out[2] == expected).all()


@pytest.mark.parametrize(
    ("directives", "cluster", "ctas", "message"),
    [
        (PAIR, None, 3, "no multiple of the cluster"),
        (PAIR, (4, 1, 1), 4, "requires clusters"),
        (".explicitcluster", None, 2, "must be launched in clusters"),
        (".maxclusterrank 2", (4, 1, 1), 4, "limit 2"),
        ("", (16, 1, 1), 16, "limit 8"),
        ("", (0, 1, 1), 2, "limit 8"),
        (".reqntid 64, 1, 1 .reqnctapercluster 2, 1, 1 .blocksareclusters", None, 2, "not supp"),
    ],
)
def test_launches_that_are_refused(directives: str, cluster: Any, ctas: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run(pair("", directives), ctas, cluster=cluster)


# -- memory of other CTAs
#: Each CTA reads what the other has written.
EXCHANGE = f"""
    shl.b32 %r12, %r1, 2;
    add.u32 %r13, %r10, %r12;
    add.u32 %r6, %r5, 100;
    st.shared.u32 [%r13], %r6;
    mapa.shared::cluster.u32 %r14, %r13, %r41;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; // first
    ld.shared::cluster.u32 %r7, [%r14];
    {BARRIER} // last
    st.global.u32 [%d5], %r7;
"""


def others(ctas: int = 6, block: int = 64) -> np.ndarray:
    numbers = np.arange(ctas * block).reshape(ctas // 2, 2, block)
    return numbers[:, ::-1].reshape(ctas, block)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cta_reads_what_the_other_has_written(schedule: str) -> None:
    got = run(assembles(EXCHANGE), schedule=schedule)
    np.testing.assert_array_equal(got, others() + 100)
    many = run(pair(EXCHANGE), 200, schedule=schedule)  # several chunks
    np.testing.assert_array_equal(many, others(200) + 100)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "old, new, message",
    [
        ("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; // first",
         "bar.sync 0;", "not ordered after the write"),
        ("arrive.release", "arrive.relaxed", "of CTA .* is not ordered after the write"),
        (f"{BARRIER} // last", "", "may end before this access|which has ended"),
        (f"{BARRIER} // last", "bar.sync 0;", "may end before this access|which has ended"),
    ],
)  # fmt: skip
def test_missing_order_is_found(schedule: str, old: str, new: str, message: str) -> None:
    assert old in EXCHANGE
    with pytest.raises((SharedRace, OutOfBounds), match=message):
        run(pair(EXCHANGE.replace(old, new)), schedule=schedule)


def test_fence_releases_for_a_relaxed_arrival() -> None:
    fenced = "fence.acq_rel.cluster;\n    barrier.cluster.arrive.relaxed"
    got = run(assembles(EXCHANGE.replace("barrier.cluster.arrive.release", fenced)))
    np.testing.assert_array_equal(got, others() + 100)


def test_writes_to_another_cta() -> None:
    """A write after an unordered read of its owner; then one that a barrier orders."""
    body = EXCHANGE.replace("ld.shared::cluster.u32 %r7, [%r14];",
                            "ld.shared.u32 %r7, [%r13]; ORDER st.shared::cluster.u32 [%r14], %r5;"
                            f"{BARRIER} ld.shared.u32 %r7, [%r13];")  # fmt: skip
    got = run(assembles(body.replace("ORDER", BARRIER)))
    np.testing.assert_array_equal(got, others())
    with pytest.raises(SharedRace, match="write of shared memory of CTA .* after the read"):
        run(pair(body.replace("ORDER", "bar.sync 0;")))


def test_generic_addresses_and_atomics() -> None:
    body = f"""
    cvt.u64.u32 %d12, %r10;
    cvta.shared.u64 %d12, %d12;
    mapa.u64 %d13, %d12, %r41;
    getctarank.u64 %r15, %d13;
    getctarank.shared::cluster.u32 %r16, %r10;
    isspacep.shared::cta %p3, %d13;
    isspacep.shared::cluster %p4, %d13;
    setp.ne.u32 %p5, %r15, %r41;
    setp.ne.or.u32 %p5, %r16, %r40, %p5;
    or.pred %p5, %p5, %p3;
    not.pred %p4, %p4;
    or.pred %p5, %p5, %p4;
    @%p5 trap;
    @!%p1 st.shared.u32 [tile], 7;
    {BARRIER}
    atom.add.u32 %r6, [%d13], 1;
    mapa.shared::cluster.u64 %d14, tile, %r41;
    red.shared::cluster.add.u32 [%d14], %r1;
    {BARRIER}
    ld.shared.u32 %r7, [tile];
    st.u32 [%d13+64], %r7;
    {BARRIER}
    ld.u32 %r7, [%d12+64];
    st.global.u32 [%d5], %r7;
    """
    got = run(assembles(body.replace("mapa.shared::cluster.u64 %d14, tile",
                                     "cvt.u64.u32 %d14, %r10;"
                                     "mapa.shared::cluster.u64 %d14, %d14")))  # fmt: skip
    assert (got == 7 + 64 + 63 * 32).all()


def test_addresses_that_are_refused() -> None:
    ahead = "mapa.shared::cluster.u32 %r14, %r10, %r41;"
    with pytest.raises(OutOfBounds, match=r"only \.shared::cluster and generic"):
        run(pair(ahead + "st.shared::cta.u32 [%r14], %r1;"))
    with pytest.raises(OutOfBounds, match="beyond the cluster, which has 2"):
        run(pair("mapa.shared::cluster.u32 %r14, %r10, 2;"))
    with pytest.raises(OutOfBounds, match="is in no CTA of the cluster"):
        run(pair(ahead + "add.u32 %r14, %r14, 0x2000000; st.shared::cluster.u32 [%r14], %r1;"))
    with pytest.raises(OutOfBounds, match="4-byte shared access at offset 0x10000"):
        run(pair(ahead + "add.u32 %r14, %r14, 0x10000; ld.shared::cluster.u32 %r7, [%r14];"))
    with pytest.raises(OutOfBounds, match="is not in shared memory"):
        run(pair("mapa.u64 %d14, %d10, 0;"))
    with pytest.raises(UninitialisedRead):
        run(
            pair(ahead + f"ld.shared::cluster.u32 %r7, [%r14]; {BARRIER} st.global.u32 [%d5], %r7;")
        )


def test_memory_of_an_ended_cta() -> None:
    body = """
    mapa.shared::cluster.u32 %r14, %r10, %r41;
    setp.eq.u32 %p3, %r40, 1;
    @%p3 exit;
    st.shared::cluster.u32 [%r14], %r1;
    """
    with pytest.raises(OutOfBounds, match=r"CTA \(1, 0, 0\), which has ended"):
        run(pair(body), checks=())


# -- cluster barriers
def test_cluster_barriers_wait_for_all_ctas() -> None:
    half = "setp.eq.u32 %p3, %r40, 1; @%p3 bra THERE; barrier.cluster.arrive; THERE: "
    with pytest.raises(Deadlock, match="without barrier.cluster.arrive"):
        run(pair(half + "barrier.cluster.wait;"))
    stuck = "setp.eq.u32 %p3, %r40, 1; @%p3 bar.sync 1, 96; " + BARRIER
    with pytest.raises(Deadlock, match="the cluster barrier: 64 of 128 threads arrived"):
        run(pair(stuck), 2)
    gone = "setp.eq.u32 %p3, %r40, 1; @%p3 exit; " + BARRIER + "st.global.u32 [%d5], 5;"
    assert (run(pair(gone))[::2] == 5).all()


# -- arrivals in other CTAs
#: Rank 0 waits until every warp of both CTAs has written its word and arrived.
ARRIVE = f"""
    shr.u32 %r7, %r1, 5;
    and.b32 %r8, %r1, 31;
    setp.ne.u32 %p2, %r8, 0;
    @%p1 bra READY;
    {init_barriers(4)}
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; // begin
    mad.lo.u32 %r12, %r40, 2, %r7;
    shl.b32 %r13, %r12, 2;
    add.u32 %r13, %r13, %r10;
    mapa.shared::cluster.u32 %r13, %r13, 0;
    mapa.shared::cluster.u32 %r14, %r11, 0;
    @!%p2 st.shared::cluster.u32 [%r13], %r12;
    @!%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r14]; // arrive
    setp.ne.u32 %p3, %r40, 0;
    @%p3 bra END;
    {wait("%r11", "0")}
    ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [tile];
    mad.lo.u32 %r20, %r21, 10, %r20;
    mad.lo.u32 %r20, %r22, 100, %r20;
    mad.lo.u32 %r20, %r23, 1000, %r20;
    st.global.u32 [%d5], %r20;
END:
    bar.warp.sync -1;
    {BARRIER} // end
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrivals_in_another_cta(schedule: str) -> None:
    got = run(assembles(ARRIVE), schedule=schedule)
    assert (got[::2] == 3210).all()
    # Rank 0 knows that all accesses to its memory are over, and nobody uses that of rank 1.
    got = run(pair(ARRIVE.replace(f"{BARRIER} // end", "")), schedule=schedule)
    assert (got[::2] == 3210).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; // begin",
         "bar.sync 0;", (SharedRace, MbarrierMisuse), "of CTA|initialised"),
        ("fence.mbarrier_init.release.cluster;", "", SharedRace, "use of an mbarrier"),
        ("[bars+0], 4;", "[bars+0], 3;", (MbarrierMisuse, SharedRace), "of CTA|read of shared"),
        ("[bars+0], 4;", "[bars+0], 5;", Deadlock, r"of CTA \(0, 0, 0\): phase 0, 1 of 5 arrivals"),
        (" done, [%r11], 0;", " done, [%r11], 1;", (Deadlock, SharedRace, UninitialisedRead), None),
        ("arrive.release.cluster.sh", "arrive.relaxed.cluster.sh", SharedRace, "after the write"),
        ("arrive.release.cluster.sh", "arrive.sh", SharedRace, "was not released to the cluster"),
        ("%r14, %r11, 0;", "%r14, %r11, %r40;", Deadlock, "2 of 4 arrivals"),
    ],
)  # fmt: skip
def test_defects_of_arrivals(
    schedule: str, old: str, new: str, error: Any, message: str | None
) -> None:
    assert old in ARRIVE
    with pytest.raises(error, match=message):
        run(pair(ARRIVE.replace(old, new)), schedule=schedule)


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.arrive.shared::cluster.b64 %d6, [%r11];",
        "mbarrier.try_wait.parity.shared::cluster.b64 %p3, [%r11], 0;",
        "mbarrier.init.shared::cluster.b64 [%r11], 1;",
    ],
)
def test_forms_that_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedPTX):
        Emulator(pair(text))


# -- multicast
#: Each CTA loads half of the tile for both, and all threads check all of it.
MULTICAST = f"""
    @%p1 bra READY;
    {init_barriers(1)}
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; // begin
    mov.b16 %h1, 3; // mask
    shl.b32 %r12, %r40, 9;
    add.u32 %r13, %r10, %r12;
    shl.b32 %r14, %r40, 3;
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r11], 1024; // expect
    {LOAD_2D}.multicast::cluster [%r13], [%d20, {{0, %r14}}], [%r11], %h1; // copy
WAIT:
    {wait("%r11", "0")}
    shl.b32 %r16, %r1, 2;
    add.u32 %r16, %r16, %r10;
    ld.shared.u32 %r17, [%r16];
    st.global.u32 [%d5], %r17;
    {BARRIER} // end
"""


def run_multicast(ptx: str, **options: Any) -> bool:
    data, box = tensor_of((16, 16), 4, (0,), (16, 8), 64)
    out = np.zeros((4, 256), np.uint32)
    launch(ptx, out, np.zeros(4, np.uint32), (box,), (data,), grid=4, block=256, **options)
    halves = [model_load(data, box, (0, 8 * k), 512 * k) for k in range(2)]
    return bool((out == np.concatenate(halves).view(np.uint32)).all())


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
def test_multicast(landing: str, schedule: str) -> None:
    assert run_multicast(assembles(MULTICAST), landing=landing, schedule=schedule)


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("1024; // expect", "512; // expect", (MbarrierMisuse, SharedRace, UninitialisedRead),
         None),
        ("1024; // expect", "2048; // expect", Deadlock, "1024 bytes outstanding"),
        ("%h1, 3; // mask", "%h1, 1; // mask", (Deadlock, MbarrierMisuse), "CTA"),
        ("%h1, 3; // mask", "%h1, 5; // mask", OutOfBounds, "mask 0x5 in a cluster of 2"),
        ("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; // begin",
         "bar.sync 0;", (SharedRace, MbarrierMisuse), "mbarrier"),
        (" done, [%r11], 0;", " done, [%r11], 1;", (Deadlock, SharedRace, UninitialisedRead), None),
        ("shl.b32 %r12, %r40, 9;", "mov.b32 %r12, 0;", SharedRace, "copy"),
    ],
)  # fmt: skip
def test_defects_of_multicast(
    landing: str, schedule: str, old: str, new: str, error: Any, message: str | None
) -> None:
    assert old in MULTICAST
    with pytest.raises(error, match=message):
        run_multicast(pair(MULTICAST.replace(old, new)), landing=landing, schedule=schedule)


EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r11], 1024; // expect"
OTHERS = "mapa.shared::cluster.u32 %r20, %r11, %r41;"


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r20], 1024;",
        "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r20], 1024;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r20], 1;",
    ],
)
def test_bytes_expected_for_the_other_cta(text: str) -> None:
    assert run_multicast(assembles(MULTICAST.replace(EXPECT, OTHERS + text)))
    with pytest.raises((MbarrierMisuse, Deadlock)):
        run_multicast(pair(MULTICAST.replace(EXPECT, OTHERS + text.replace("1024", "1040"))))


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
def test_multicast_of_straight_bytes(landing: str, schedule: str) -> None:
    start = MULTICAST.index(LOAD_2D)
    body = (
        MULTICAST[:start]
        + "cvt.u64.u32 %d12, %r12; add.s64 %d12, %d12, %d11;"
        + "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        + " [%r13], [%d12], 512, [%r11], %h1;"
        + MULTICAST[MULTICAST.index("// copy") :]
    )
    inp = tma_harness.aligned(1024).view(np.uint32)
    inp[:] = np.arange(256)
    out = np.zeros((4, 256), np.uint32)
    launch(assembles(body), out, inp, grid=4, block=256, landing=landing, schedule=schedule)
    assert (out == inp).all()


def test_copy_needs_its_mbarrier_beside_it() -> None:
    body = MULTICAST.replace("%r13, %r10, %r12;", "%r13, %r10, %r12;"
                             "mapa.shared::cluster.u32 %r13, %r13, %r41;")  # fmt: skip
    body = body.replace(".multicast::cluster", "").replace(", %h1; // copy", ";")
    with pytest.raises(MbarrierMisuse, match="different CTAs"):
        run_multicast(pair(body))


@pytest.mark.parametrize("landing", ["late", "early"])
def test_cta_that_ends_before_a_copy_to_it_lands(landing: str) -> None:
    body = MULTICAST.replace("WAIT:", "WAIT: setp.eq.u32 %p3, %r40, 1; @%p3 exit;")
    found = {"late": "ends while a bulk copy still uses its shared", "early": "may end before"}
    with pytest.raises(SharedRace, match=found[landing]):
        run_multicast(pair(body), landing=landing)


# -- copies between CTAs
COPY = f"""
    @%p1 bra READY;
    {init_barriers(1)}
    fence.mbarrier_init.release.cluster;
READY:
    {BARRIER}
    shl.b32 %r12, %r1, 2;
    add.u32 %r13, %r10, %r12;
    st.shared.u32 [%r13], %r5;
    fence.proxy.async.shared::cta; // fence
    bar.sync 0;
    mapa.shared::cluster.u32 %r14, %r10, %r41;
    mapa.shared::cluster.u32 %r15, %r11, %r41;
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r11], 256;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [%r14+1024], [%r10], 256, [%r15];
WAIT:
    // changed
    {wait("%r11", "0")}
    ld.shared.u32 %r7, [%r13+1024];
    st.global.u32 [%d5], %r7;
    {BARRIER} // end
"""


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
def test_copies_between_ctas(landing: str, schedule: str) -> None:
    got = run(assembles(COPY), landing=landing, schedule=schedule)
    np.testing.assert_array_equal(got, others())
    with pytest.raises(SharedRace, match=r"no fence\.proxy\.async"):
        run(pair(COPY.replace("fence.proxy.async.shared::cta; // fence", "")), schedule=schedule)


def test_defects_of_copies_between_ctas() -> None:
    with pytest.raises(SharedRace, match="bulk store in flight|bulk copy"):
        run(pair(COPY.replace("// changed", "bar.sync 0; st.shared.u32 [%r13], 0;")))
    with pytest.raises(OutOfBounds, match="the source of a copy"):
        run(pair(COPY.replace("[%r10], 256", "[%r14], 256")))
    with pytest.raises(UninitialisedRead):
        run(pair(COPY.replace("st.shared.u32 [%r13], %r5;", "")))
