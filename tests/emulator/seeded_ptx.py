"""A persistent, warp-specialised matmul written by hand, for what no other seeded kernel has.

One warp copies stages of A and B with TMA, two warpgroups multiply them and store their halves of
each tile with TMA: setmaxnreg, full and empty mbarriers, named barriers, bulk stores.
"""

from __future__ import annotations

import numpy as np

from minitriton.runtime.emulator import Allocation, Emulator, TensorMap
from tests.emulator.defects import Policy, Trial
from tests.emulator.ptx_harness import HEADER, REGISTERS
from tests.emulator.tma_harness import LOAD_2D, aligned, init_barriers, wait

TILES, STEPS = 2, 3  # tiles of 64 rows, K blocks of 64 elements in each
COLUMNS, HALF = 16, 8  # of a tile, and of a warpgroup's half of it
_A, _B = 64 * 128, COLUMNS * 128  # bytes of a stage's operands: rows of 128 bytes
_STAGE, _STAGES = _A + _B, 2
_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
_PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %d5, %d6,"
_NEXT = f"""
    xor.b32 %r20, %r20, 1;
    setp.eq.u32 %p5, %r20, 0;
    @%p5 xor.b32 %r21, %r21, 1;
    add.u32 %r22, %r22, 1;
    setp.lt.u32 %p6, %r22, {STEPS};"""

_PRODUCER = f"""
PRODUCE_TILE:
    mov.u32 %r22, 0;
PRODUCE:
    mad.lo.u32 %r25, %r20, 8, %r11;
    add.u32 %r27, %r25, {8 * _STAGES};
    xor.b32 %r29, %r21, 1;
    {wait("%r27", "%r29")}
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r25], {_STAGE};
    mad.lo.u32 %r26, %r20, {_STAGE}, %r10;
    shl.b32 %r28, %r22, 6;
    shl.b32 %r30, %r23, 6;
    {LOAD_2D} [%r26], [%d20, {{%r28, %r30}}], [%r25];
    add.u32 %r31, %r26, {_A};
    {LOAD_2D} [%r31], [%d21, {{%r28, 0}}], [%r25];
    {_NEXT}
    @%p6 bra PRODUCE;
    add.u32 %r23, %r23, 1;
    setp.lt.u32 %p6, %r23, {TILES};
    @%p6 bra PRODUCE_TILE;
    bra END;
"""

# %r5 the warpgroup's number, %p8 false in its first thread, %r13 its half's place, %r14 its barrier
_CONSUMER = f"""
    sub.u32 %r5, %r7, 4;
    shr.u32 %r5, %r5, 2;
    and.b32 %r6, %r1, 127;
    setp.ne.u32 %p8, %r6, 0;
    mad.lo.u32 %r13, %r5, {64 * HALF * 4}, {_STAGES * _STAGE};
    add.u32 %r13, %r13, %r10;
    add.u32 %r14, %r5, 1;
    shl.b32 %r15, %r5, 3;
    shr.u32 %r16, %r6, 5;
    shl.b32 %r16, %r16, 4;
    and.b32 %r17, %r6, 31;
    shr.u32 %r18, %r17, 2;
    add.u32 %r16, %r16, %r18;
    and.b32 %r17, %r17, 3;
    shl.b32 %r17, %r17, 3;
    mad.lo.u32 %r16, %r16, {HALF * 4}, %r17;
    add.u32 %r16, %r16, %r13;
CONSUME_TILE:
    mov.u32 %r22, 0;
CONSUME:
    mad.lo.u32 %r25, %r20, 8, %r11;
    {wait("%r25", "%r21")}
    mad.lo.u32 %r26, %r20, {_STAGE}, %r10;
    mad.lo.u32 %r31, %r5, {HALF * 128}, {_A};
    add.u32 %r31, %r31, %r26;
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
    wgmma.wait_group.sync.aligned 1;
    @%p8 bra KEPT;
    @%p9 mbarrier.arrive.shared::cta.b64 _, [%r32];
KEPT:
    add.u32 %r32, %r25, {8 * _STAGES};
    {_NEXT}
    @%p6 bra CONSUME;
    wgmma.wait_group.sync.aligned 0;
    @!%p8 mbarrier.arrive.shared::cta.b64 _, [%r32];
    @%p8 bra READ;
    cp.async.bulk.wait_group.read 0;
READ:
    bar.sync %r14, 128;
    st.shared.v2.f32 [%r16], {{%f1, %f2}};
    st.shared.v2.f32 [%r16+{8 * HALF * 4}], {{%f3, %f4}};
    fence.proxy.async.shared::cta;
    bar.sync %r14, 128;
    @%p8 bra STORED;
    shl.b32 %r33, %r23, 6;
    {_STORE} [%d22, {{%r15, %r33}}], [%r13];
    cp.async.bulk.commit_group;
STORED:
    add.u32 %r23, %r23, 1;
    setp.lt.u32 %p6, %r23, {TILES};
    @%p6 bra CONSUME_TILE;
    @%p8 bra END;
    cp.async.bulk.wait_group 0;
""".replace(
    "PRODUCTS",
    3 * f"add.s64 %d5, %d5, 2;\n    add.s64 %d6, %d6, 2;\n    {_PRODUCT} %p10, 1, 1, 0, 0;\n    ",
)

PTX = f"""{HEADER}
.visible .entry k(.param .align 64 .b8 m0[128], .param .align 64 .b8 m1[128],
                  .param .align 64 .b8 m2[128]) .reqntid 384, 1, 1 .minnctapersm 1
{{{REGISTERS}
    .shared .align 1024 .b8 tile[{_STAGES * _STAGE + 2 * 64 * HALF * 4}];
    .shared .align 8 .b8 bars[{16 * _STAGES}];
    mov.b64 %d20, m0;
    cvta.param.u64 %d20, %d20;
    mov.b64 %d21, m1;
    cvta.param.u64 %d21, %d21;
    mov.b64 %d22, m2;
    cvta.param.u64 %d22, %d22;
    mov.u32 %r1, %tid.x;
    mov.u32 %r10, tile;
    mov.u32 %r11, bars;
    shr.u32 %r7, %r1, 5;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    {init_barriers(1, 1, 2, 2)}
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    mov.u32 %r20, 0;
    mov.u32 %r21, 0;
    mov.u32 %r23, 0;
    setp.ge.u32 %p2, %r7, 4;
    @%p2 bra CONSUMER;
    setmaxnreg.dec.sync.aligned.u32 40;
    setp.ne.u32 %p3, %r7, 0;
    @%p3 bra END;
    elect.sync _|%p4, -1;
    @!%p4 bra END;
    {_PRODUCER}
CONSUMER:
    setmaxnreg.inc.sync.aligned.u32 232;
    {_CONSUMER}
END:
    ret;
}}
"""


def load(ptx: str) -> Trial:
    """Trials of the product of two matrices of small integers."""
    emulator = Emulator(ptx)

    def trial(seed: int, policy: Policy) -> bool:
        rng, depth = np.random.default_rng(seed), 64 * STEPS
        shapes = ((64 * TILES, depth), (COLUMNS, depth))
        a, b = (aligned(2 * rows * k).view(np.float16).reshape(rows, k) for rows, k in shapes)
        c = aligned(4 * 64 * TILES * COLUMNS).view(np.float32).reshape(64 * TILES, COLUMNS)
        a[:], b[:], c[:] = rng.integers(-3, 4, a.shape), rng.integers(-3, 4, b.shape), np.nan
        forms = ((a, (64, 64), 128), (b, (64, COLUMNS), 128), (c, (HALF, 64), 0))
        maps = [
            TensorMap(x.ctypes.data, x.itemsize, x.shape[::-1], (x.strides[0],), box, swizzle)
            for x, box, swizzle in forms
        ]
        emulator.launch(
            "k",
            grid=(1, 1, 1),
            block=(384, 1, 1),
            params=[image.pack() for image in maps],
            allocations=[Allocation(x.ctypes.data, x.nbytes, "abc") for x in (a, b, c)],
            landing=policy.landing,
            schedule=policy.schedule,
            seed=policy.seed,
        )
        return bool((c == a.astype(np.float32) @ b.astype(np.float32).T).all())

    return trial
