"""A matmul for clusters of two CTAs written by hand: each loads half of B for both (multicast).

Warp 0 copies stages, two warpgroups multiply 64 rows each and tell the producers of both CTAs when
a stage is free; CTAs of a cluster lie along M.
"""

from __future__ import annotations

import numpy as np

from minitriton.runtime.emulator import Allocation, Emulator, Report, TensorMap, parameter
from tests.emulator.defects import Policy, Trial
from tests.emulator.ptx_harness import HEADER, REGISTERS
from tests.emulator.tma_harness import LOAD_2D, aligned, init_barriers, wait

ROWS, COLUMNS = 128, 16  # of a CTA's tile
TILES, STEPS = 2, 5  # tiles along N, one after the other, and K blocks of 64 elements in each
_A, _B = ROWS * 128, COLUMNS * 128  # bytes of a stage's operands: rows of 128 bytes
STAGE, _STAGES = _A + _B, 2
_N = TILES * COLUMNS
_PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
    "{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, %d5, %d6,"
)
_NEXT = f"""
    xor.b32 %r20, %r20, 1;
    setp.eq.u32 %p5, %r20, 0;
    @%p5 xor.b32 %r21, %r21, 1;
    add.u32 %r22, %r22, 1;
    setp.lt.u32 %p6, %r22, {STEPS};"""
_NEXT_TILE = f"""
    add.u32 %r23, %r23, 1;
    setp.lt.u32 %p6, %r23, {TILES};"""

# %r40 the rank, %r42 the CTA, %r43 the place of this CTA's half of B
_PRODUCER = f"""
    setp.ne.u32 %p3, %r7, 0;
    @%p3 bra END;
    elect.sync _|%p4, -1;
    @!%p4 bra END;
    mov.b16 %h1, 3; // mask
    mad.lo.u32 %r43, %r40, {_B // 2}, {_A};
PRODUCE_TILE:
    mov.u32 %r22, 0;
PRODUCE:
    mad.lo.u32 %r25, %r20, 8, %r11;
    add.u32 %r27, %r25, {8 * _STAGES};
    xor.b32 %r29, %r21, 1;
    // <empty>
    {wait("%r27", "%r29")}
    // </empty>
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r25], {STAGE}; // expect
    mad.lo.u32 %r26, %r20, {STAGE}, %r10;
    shl.b32 %r28, %r22, 6;
    shl.b32 %r30, %r42, 7;
    {LOAD_2D} [%r26], [%d20, {{%r28, %r30}}], [%r25];
    add.u32 %r31, %r26, %r43;
    shl.b32 %r32, %r23, 4;
    mad.lo.u32 %r32, %r40, 8, %r32;
    {LOAD_2D}.multicast::cluster [%r31], [%d21, {{%r28, %r32}}], [%r25], %h1;
    {_NEXT}
    @%p6 bra PRODUCE;
    {_NEXT_TILE}
    @%p6 bra PRODUCE_TILE;
    bra END;
"""

# %r5 the warpgroup, %p8 its two threads that release, %r14 the first empty barrier of their CTA
_CONSUMER = f"""
    sub.u32 %r5, %r7, 4;
    shr.u32 %r5, %r5, 2;
    and.b32 %r6, %r1, 127;
    setp.lt.u32 %p8, %r6, 2;
    and.b32 %r12, %r6, 1;
    add.u32 %r13, %r11, {8 * _STAGES};
    mapa.shared::cluster.u32 %r14, %r13, %r12; // whose
    and.b32 %r17, %r1, 31;
    shr.u32 %r18, %r17, 2;
    and.b32 %r16, %r7, 3;
    mad.lo.u32 %r18, %r16, 16, %r18;
    mad.lo.u32 %r18, %r5, 64, %r18;
    mad.lo.u32 %r18, %r42, {ROWS}, %r18;
    and.b32 %r17, %r17, 3;
    shl.b32 %r17, %r17, 1;
    mad.lo.u32 %r18, %r18, {_N}, %r17;
CONSUME_TILE:
    mov.u32 %r22, 0;
CONSUME:
    mad.lo.u32 %r25, %r20, 8, %r11;
    // <full>
    {wait("%r25", "%r21")}
    // </full>
    mad.lo.u32 %r26, %r20, {STAGE}, %r10;
    add.u32 %r31, %r26, {_A};
    mad.lo.u32 %r26, %r5, {64 * 128}, %r26;
    shr.u32 %r26, %r26, 4;
    cvt.u64.u32 %d5, %r26;
    or.b64 %d5, %d5, 0x4000004000010000;
    shr.u32 %r31, %r31, 4;
    cvt.u64.u32 %d6, %r31;
    or.b64 %d6, %d6, 0x4000004000010000;
    setp.ne.u32 %p9, %r22, 0;
    setp.eq.u32 %p10, 0, 0;
    wgmma.fence.sync.aligned;
    {_PRODUCT} %p9, 1, 1, 0, 0;
    PRODUCTS
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0; // products
    mad.lo.u32 %r33, %r20, 8, %r14;
    @%p8 mbarrier.arrive.shared::cluster.b64 _, [%r33]; // release
    {_NEXT}
    @%p6 bra CONSUME;
    mad.lo.u32 %r34, %r23, {COLUMNS}, %r18;
    mul.wide.u32 %d7, %r34, 4;
    add.s64 %d7, %d7, %d10;
    st.global.v2.f32 [%d7], {{%f0, %f1}};
    st.global.v2.f32 [%d7+32], {{%f4, %f5}};
    st.global.v2.f32 [%d7+{32 * _N}], {{%f2, %f3}};
    st.global.v2.f32 [%d7+{32 * _N + 32}], {{%f6, %f7}};
    {_NEXT_TILE}
    @%p6 bra CONSUME_TILE;
""".replace(
    "PRODUCTS",
    3 * f"add.s64 %d5, %d5, 2;\n    add.s64 %d6, %d6, 2;\n    {_PRODUCT} %p10, 1, 1, 0, 0;\n    ",
)

PTX = f"""{HEADER}
.visible .entry k(.param .align 64 .b8 m0[128], .param .align 64 .b8 m1[128], .param .u64 out)
    .reqntid 384, 1, 1 .minnctapersm 1 .explicitcluster .reqnctapercluster 2, 1, 1
{{{REGISTERS}
    .shared .align 1024 .b8 tile[{_STAGES * STAGE}];
    .shared .align 8 .b8 bars[{16 * _STAGES}];
    mov.b64 %d20, m0;
    cvta.param.u64 %d20, %d20;
    mov.b64 %d21, m1;
    cvta.param.u64 %d21, %d21;
    ld.param.u64 %d10, [out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r42, %ctaid.x;
    mov.u32 %r40, %cluster_ctarank;
    mov.u32 %r10, tile;
    mov.u32 %r11, bars;
    shr.u32 %r7, %r1, 5;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    {init_barriers(1, 1, 4, 4)}
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed.aligned; // begin
    barrier.cluster.wait.acquire.aligned; // begun
    mov.u32 %r20, 0;
    mov.u32 %r21, 0;
    mov.u32 %r23, 0;
    setp.ge.u32 %p2, %r7, 4;
    @%p2 bra CONSUMER;
{_PRODUCER}
CONSUMER:
{_CONSUMER}
END:
    bar.warp.sync -1;
    barrier.cluster.arrive.aligned; // end
    barrier.cluster.wait.aligned; // ended
    ret;
}}
"""


def multiply(
    ptx: str | Emulator, clusters: int, seed: int, policy: Policy, max_steps: int | None = None
) -> tuple[bool, Report]:
    """Whether a product of matrices of small integers is right, and the launch's report."""
    rng = np.random.default_rng(seed)
    depth, rows = 64 * STEPS, 2 * ROWS * clusters
    matrices, maps = [], []
    for height, box in ((rows, ROWS), (_N, COLUMNS // 2)):
        raw = aligned(2 * depth * height)
        matrix = raw.view(np.float16).reshape(height, depth)
        matrix[:] = rng.integers(-3, 4, (height, depth))
        matrices.append(matrix)
        address = raw.ctypes.data
        maps.append(TensorMap(address, 2, (depth, height), (2 * depth,), (64, box), 128))
    out = np.full((rows, _N), np.nan, np.float32)
    program = Emulator(ptx) if isinstance(ptx, str) else ptx
    report = program.launch(
        "k",
        grid=(2 * clusters, 1, 1),
        block=(384, 1, 1),
        params=[*(m.pack() for m in maps), parameter(out.ctypes.data)],
        allocations=[Allocation(a.ctypes.data, a.nbytes) for a in (*matrices, out)],
        landing=policy.landing,
        schedule=policy.schedule,
        seed=policy.seed,
        max_steps=max_steps,
    )
    a, b = (m.astype(np.float32) for m in matrices)
    return bool((out == a @ b.T).all()), report


def load(ptx: str) -> Trial:
    """Trials of one cluster's product."""
    program = Emulator(ptx)
    return lambda seed, policy: multiply(program, 1, seed, policy)[0]
