"""ldmatrix, stmatrix, movmatrix and mma.sync through the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from minitriton.runtime.emulator import DivergentAligned
from tests.emulator.ptx_harness import evaluate, kernel, run

RNG = np.random.default_rng(3)
SHARED = ".shared .align 128 .b8 s[8192];"

GEMM = """
    // A [16,16] f16 row-major at in[0..128), B^T [8,16] f16 at in[128..192); two warps.
    shr.u32 %r5, %r1, 5;
    and.b32 %r6, %r1, 31;
    mul.lo.u32 %r7, %r5, 1024;
    mul.wide.u32 %d4, %r5, 768;
    add.s64 %d5, %d11, %d4;
    mul.wide.u32 %d6, %r6, 16;
    add.s64 %d5, %d5, %d6;
    shl.b32 %r8, %r6, 4;
    add.u32 %r8, %r8, %r7;
    cp.async.cg.shared.global [%r8], [%d5], 16;
    setp.lt.u32 %p1, %r6, 16;
    @%p1 cp.async.cg.shared.global [%r8+512], [%d5+512], 16;
    cp.async.wait_all;
    bar.warp.sync -1;
    and.b32 %r9, %r6, 15;
    shl.b32 %r9, %r9, 5;
    shr.u32 %r10, %r6, 4;
    shl.b32 %r10, %r10, 4;
    add.u32 %r9, %r9, %r10;
    add.u32 %r9, %r9, %r7;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r11, %r12, %r13, %r14}, [%r9];
    and.b32 %r15, %r6, 7;
    shl.b32 %r15, %r15, 5;
    shr.u32 %r16, %r6, 3;
    and.b32 %r16, %r16, 1;
    shl.b32 %r16, %r16, 4;
    add.u32 %r15, %r15, %r16;
    add.u32 %r15, %r15, %r7;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r17, %r18}, [%r15+512];
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, %f1;
    mov.f32 %f3, %f1;
    mov.f32 %f4, %f1;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {%f1, %f2, %f3, %f4}, {%r11, %r12, %r13, %r14}, {%r17, %r18}, {%f1, %f2, %f3, %f4};
    shr.u32 %r19, %r6, 2;
    shl.b32 %r19, %r19, 5;
    and.b32 %r20, %r6, 3;
    shl.b32 %r20, %r20, 3;
    add.u32 %r19, %r19, %r20;
    mul.lo.u32 %r21, %r5, 512;
    add.u32 %r19, %r19, %r21;
    cvt.u64.u32 %d7, %r19;
    add.s64 %d8, %d10, %d7;
    st.global.v2.f32 [%d8], {%f1, %f2};
    st.global.v2.f32 [%d8+256], {%f3, %f4};
"""


@pytest.mark.parametrize("landing", ["late", "early"])
def test_small_matrix_product(landing: str) -> None:
    a = RNG.standard_normal((2, 16, 16)).astype(np.float16)
    b = RNG.standard_normal((2, 8, 16)).astype(np.float16)
    packed = np.concatenate([a.reshape(2, -1), b.reshape(2, -1)], axis=1)
    out = np.zeros((2, 16, 8), np.float32)
    report = run(kernel(GEMM, SHARED), out, packed, block=64, landing=landing)
    expected = a.astype(np.float64) @ b.astype(np.float64).transpose(0, 2, 1) + 1
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-5)
    assert report.flops["mma_f16"] == 2 * 2 * 16 * 8 * 16


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_then_ldmatrix(trans: str) -> None:
    x = RNG.integers(0, 2**32, 32, dtype=np.uint32)
    body = f"""
    ld.global.u32 %r5, [%d2];
    and.b32 %r6, %r1, 7;
    shl.b32 %r6, %r6, 4;
    stmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 [%r6], {{%r5}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r7}}, [%r6];
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {{%r8}}, [%r6];
    movmatrix.sync.aligned.m8n8.trans.b16 %r9, %r5;
    setp.eq.u32 %p1, {"%r8, %r5" if trans else "%r7, %r5"};
    setp.eq.and.u32 %p1, {"%r7, %r9" if trans else "%r8, %r9"}, %p1;
    selp.u32 %r10, 1, 0, %p1;
    st.global.u32 [%d1], %r10;
"""
    assert evaluate(body, x, declarations=SHARED).all()


def test_must_flag_matrix_instruction_in_divergent_code() -> None:
    body = """
    mov.u32 %r5, 0;
    setp.lt.u32 %p1, %r1, 16;
    @%p1 bra SKIP;
    movmatrix.sync.aligned.m8n8.trans.b16 %r9, %r5;
SKIP:
    bar.warp.sync -1;
"""
    with pytest.raises(DivergentAligned, match="part of a warp"):
        evaluate(body, np.zeros(32, np.uint32))
