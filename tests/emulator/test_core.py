"""Execution: arithmetic, predicates, control flow, memory spaces, calls, launch errors."""

from __future__ import annotations

import io

import numpy as np
import pytest

from minitriton.runtime.emulator import (
    AssertFailed,
    Emulator,
    LaunchError,
    Misaligned,
    OutOfBounds,
    StepLimit,
    Trap,
    UnsupportedPTX,
)
from tests.emulator.ptx_harness import evaluate, kernel, run

RNG = np.random.default_rng(7)


def words(count: int = 32) -> np.ndarray:
    return RNG.integers(0, 2**32, count, dtype=np.uint32)


def test_masked_elementwise_odd_size() -> None:
    body = """
    ld.param.u32 %r5, [n];
    setp.ge.s32 %p1, %r2, %r5;
    @%p1 bra DONE;
    ld.global.f32 %f1, [%d2];
    fma.rn.f32 %f2, %f1, 0f40000000, 0f3F800000;
    st.global.f32 [%d1], %f2;
DONE:
"""
    for n in (1, 31, 33, 700, 1000):
        x = RNG.standard_normal(n).astype(np.float32)
        out = np.full(n, -5, np.float32)
        run(kernel(body), out, x, n, grid=(n + 127) // 128, block=128)
        np.testing.assert_array_equal(out, x * np.float32(2) + np.float32(1))


def test_predicated_load_and_store_leave_other_lanes_alone() -> None:
    x = words()
    body = """
    and.b32 %r5, %r1, 3;
    setp.eq.u32 %p1, %r5, 1;
    mov.u32 %r6, 77;
    @%p1 ld.global.u32 %r6, [%d2];
    @!%p1 add.u32 %r6, %r6, %r1;
    st.global.u32 [%d1], %r6;
    @%p1 st.global.u32 [%d1], %r1;
"""
    lane = np.arange(32)
    np.testing.assert_array_equal(evaluate(body, x), np.where(lane % 4 == 1, lane, 77 + lane))


@pytest.mark.parametrize("mods", ["relaxed.gpu.", "volatile.", "", "weak."])
def test_qualified_accesses(mods: str) -> None:
    x = words()
    body = f"ld.{mods}global.u32 %r5, [%d2];\nst.{mods}global.b32 [%d1], %r5;"
    np.testing.assert_array_equal(evaluate(body, x), x)


def test_vector_and_narrow_accesses() -> None:
    x = words(128)
    body = """
    mul.wide.u32 %d4, %r1, 16;
    add.s64 %d5, %d11, %d4;
    ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%r5, %r6, %r7, %r8}, [%d5];
    ld.global.v2.u64 {%d6, %d7}, [%d5];
    ld.global.s8 %r9, [%d5+3];
    ld.global.u8 %h1, [%d5+2];
    cvt.u32.u16 %r10, %h1;
    ld.global.v4.u16 {%h2, %h3, %h4, %h5}, [%d5+8];
    cvt.u32.u16 %r11, %h5;
    cvt.u32.u64 %r12, %d7;
    xor.b32 %r13, %r5, %r6;
    xor.b32 %r13, %r13, %r7;
    xor.b32 %r13, %r13, %r8;
    add.u32 %r13, %r13, %r9;
    add.u32 %r13, %r13, %r10;
    add.u32 %r13, %r13, %r11;
    add.u32 %r13, %r13, %r12;
    st.global.u32 [%d1], %r13;
"""
    v = x.reshape(32, 4)
    signed = v.view(np.int8).reshape(32, 16)[:, 3].astype(np.int32).view(np.uint32)
    expected = v[:, 0] ^ v[:, 1] ^ v[:, 2] ^ v[:, 3]
    expected = expected + signed + v.view(np.uint8).reshape(32, 16)[:, 2]
    expected = expected + v.view(np.uint16).reshape(32, 8)[:, 7] + v[:, 2]
    np.testing.assert_array_equal(evaluate(body, x), expected)


def test_divergent_loop_reconverges_before_shuffle() -> None:
    body = """
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
LOOP:
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra OUT;
    add.u32 %r6, %r6, %r5;
    add.u32 %r5, %r5, 1;
    bra.uni LOOP;
OUT:
    shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1;
    add.u32 %r6, %r6, %r7;
    st.global.u32 [%d1], %r6;
"""
    lane = np.arange(64)
    total = lane * (lane - 1) // 2
    expected = total + total.reshape(-1, 2)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(evaluate(body, words(64), block=64), expected)


def test_nested_branches_and_jump_table() -> None:
    body = """
    and.b32 %r5, %r1, 3;
    mov.u32 %r6, 1000;
    setp.gt.u32 %p1, %r1, 20;
    @%p1 bra JOIN;
TABLE: .branchtargets C0, C1, C2, C3;
    brx.idx %r5, TABLE;
C0: mov.u32 %r6, 10;
    bra JOIN;
C1: mov.u32 %r6, 11;
    setp.lt.u32 %p2, %r1, 8;
    @%p2 bra JOIN;
    add.u32 %r6, %r6, 100;
    bra JOIN;
C2: mov.u32 %r6, 12;
    bra JOIN;
C3: mov.u32 %r6, 13;
JOIN:
    activemask.b32 %r7;
    setp.ne.u32 %p3, %r7, -1;
    @%p3 trap;
    st.global.u32 [%d1], %r6;
"""
    lane = np.arange(32)
    expected = 10 + lane % 4 + np.where((lane % 4 == 1) & (lane >= 8), 100, 0)
    np.testing.assert_array_equal(evaluate(body, words()), np.where(lane > 20, 1000, expected))


def test_setp_with_two_results_and_combination() -> None:
    x = words()
    body = """
    ld.global.s32 %r5, [%d2];
    setp.gt.u32 %p1, %r1, 15;
    setp.lt.and.s32 %p2|%p3, %r5, 0, %p1;
    selp.u32 %r6, 1, 0, %p2;
    selp.u32 %r7, 2, 0, %p3;
    xor.pred %p4, %p2, !%p3;
    selp.u32 %r8, 4, 0, %p4;
    add.u32 %r6, %r6, %r7;
    add.u32 %r6, %r6, %r8;
    st.global.u32 [%d1], %r6;
"""
    negative, late = x.view(np.int32) < 0, np.arange(32) > 15
    p, q = negative & late, ~negative & late
    np.testing.assert_array_equal(evaluate(body, x), p + 2 * q + 4 * (p ^ ~q))


def test_pack_unpack_and_inline_asm_scope() -> None:
    x = words()
    body = """
    ld.global.u32 %r5, [%d2];
    mov.b32 {%h1, %h2}, %r5;
    mov.b32 %r6, {%h2, %h1};
    {
        .reg .b32 t;
        .reg .pred p;
        mov.u32 t, 5;
        setp.eq.u32 p, %r1, 0;
        @p add.u32 %r6, %r6, t;
    }
    {
        .reg .b32 t;
        mov.b64 %d4, {%r6, %r5};
        mov.b64 {_, t}, %d4;
        xor.b32 %r6, %r6, t;
    }
    st.global.u32 [%d1], %r6;
"""
    swapped = (x >> np.uint32(16)) | (x << np.uint32(16))
    swapped[0] += np.uint32(5)
    np.testing.assert_array_equal(evaluate(body, x), swapped ^ x)


def test_shared_local_const_and_generic_addresses() -> None:
    x = words(64)
    declarations = """
    .shared .align 4 .b8 buffer[256];
    .local .align 8 .b8 depot[16];
    .reg .b64 %SP, %SPL;
"""
    body = """
    ld.global.u32 %r5, [%d2];
    mov.u32 %r6, buffer;
    shl.b32 %r7, %r1, 2;
    add.u32 %r8, %r6, %r7;
    st.shared.u32 [%r8], %r5;
    bar.sync 0;
    xor.b32 %r9, %r7, 128;
    add.u32 %r9, %r9, %r6;
    cvt.u64.u32 %d4, %r9;
    cvta.shared.u64 %d5, %d4;
    mov.u64 %SPL, depot;
    cvta.local.u64 %SP, %SPL;
    st.local.u32 [%SPL+4], %r1;
    add.s64 %d6, %SP, 4;
    setp.lt.u32 %p1, %r1, 40;
    selp.b64 %d7, %d5, %d6, %p1;
    ld.u32 %r10, [%d7];
    isspacep.shared %p2, %d7;
    @!%p2 add.u32 %r10, %r10, 1000;
    ld.const.u32 %r11, [table+4];
    add.u32 %r10, %r10, %r11;
    st.u32 [%d1], %r10;
"""
    ptx = kernel(body, declarations, ".const .align 4 .u32 table[2] = {3, 40};\n")
    out = np.zeros(64, np.uint32)
    run(ptx, out, x, block=64)
    t = np.arange(64)
    expected = np.where(t < 40, x[t ^ 32], t + 1000).astype(np.uint32) + np.uint32(40)
    np.testing.assert_array_equal(out, expected)


def test_global_variable_persists_between_launches() -> None:
    body = """
    atom.global.add.u32 %r5, [counter], 1;
    st.global.u32 [%d1], %r5;
"""
    program = Emulator(kernel(body, extra=".global .align 4 .u32 counter = 5;\n"))
    first, second = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    run(program, first, words())
    run(program, second, words())
    np.testing.assert_array_equal(first, 5 + np.arange(32))
    np.testing.assert_array_equal(second, 37 + np.arange(32))


def test_device_function_is_expanded() -> None:
    function = """
.func (.param .b32 res) twice(.param .b32 a)
{
    .reg .b32 %r<4>;
    .reg .pred %p<2>;
    ld.param.b32 %r1, [a];
    setp.gt.u32 %p1, %r1, 100;
    @%p1 ret;
    add.u32 %r2, %r1, %r1;
    st.param.b32 [res], %r2;
    ret;
}
"""
    body = """
    {
    .param .b32 param0;
    .param .b32 retval0;
    st.param.b32 [retval0], 1;
    st.param.b32 [param0], %r2;
    call.uni (retval0), twice, (param0);
    ld.param.b32 %r6, [retval0];
    }
    st.global.u32 [%d1], %r6;
"""
    out = np.zeros(128, np.uint32)
    run(kernel(body, extra=function), out, words(128), block=128)
    t = np.arange(128)
    np.testing.assert_array_equal(out, np.where(t > 100, 1, 2 * t))


PRINT = """
    .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
    .global .align 1 .b8 text[14] = {37, 100, 32, 37, 46, 50, 102, 32, 37, 108, 108, 120, 10, 0};
"""


def test_printf() -> None:
    declarations = ".local .align 8 .b8 depot[24];\n.reg .b64 %SP, %SPL;\n"
    body = """
    setp.ne.u32 %p1, %r1, 3;
    @%p1 bra DONE;
    mov.u64 %SPL, depot;
    cvta.local.u64 %SP, %SPL;
    st.local.u32 [%SPL], -7;
    mov.f64 %g1, 0d3FF8000000000000;
    st.local.f64 [%SPL+8], %g1;
    mov.u64 %d5, 0x123456789a;
    st.local.u64 [%SPL+16], %d5;
    mov.u64 %d6, text;
    cvta.global.u64 %d6, %d6;
    {
    .param .b64 param0;
    .param .b64 param1;
    .param .b32 retval0;
    st.param.b64 [param0], %d6;
    st.param.b64 [param1], %SP;
    call.uni (retval0), vprintf, (param0, param1);
    ld.param.b32 %r9, [retval0];
    }
DONE:
"""
    text = io.StringIO()
    run(kernel(body, declarations, PRINT), words(), words(), stdout=text)
    assert text.getvalue() == "-7 1.50 123456789a\n"


def test_assert_failure_names_place() -> None:
    extra = """
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d,
                            .param .b64 e);
.global .align 1 .b8 what[6] = {120, 32, 62, 32, 48, 0};
.global .align 1 .b8 where[5] = {107, 46, 112, 121, 0};
"""
    call = """
    setp.ne.u32 %p1, %r1, 9;
    @%p1 bra DONE;
    mov.u64 %d5, what;
    mov.u64 %d6, where;
    {
    .param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4;
    st.param.b64 [p0], %d5; st.param.b64 [p1], %d6; st.param.b32 [p2], 12;
    st.param.b64 [p3], %d6; st.param.b64 [p4], 1;
    call.uni __assertfail, (p0, p1, p2, p3, p4);
    }
DONE:
"""
    with pytest.raises(AssertFailed, match=r"x > 0 \(k.py:12") as caught:
        run(kernel(call, extra=extra), words(), words())
    assert "lane 9" in str(caught.value)


def test_trap_and_step_limit() -> None:
    with pytest.raises(Trap):
        run(kernel("trap;"), words(), words())
    with pytest.raises(StepLimit):
        run(kernel("L: add.u32 %r5, %r1, 1; bra L;"), words(), words(), max_steps=500)


def test_out_of_bounds_names_allocation_and_python_line() -> None:
    extra = '.file 1 "kernel.py"\n'
    body = """
    .loc 1 42 7
    ld.global.u32 %r5, [%d2];
    st.global.u32 [%d1], %r5;
"""
    out, x = np.zeros(64, np.uint32), words(60)
    with pytest.raises(OutOfBounds) as caught:
        run(kernel(body, extra=extra), out, x, block=64, checks=())
    error = caught.value
    assert error.python_location == ("kernel.py", 42, 7)
    assert "4 bytes past the end of 'inp' (240 bytes)" in str(error)
    assert error.details["count"] == 4 and "warp 1 lane 28" in error.details["examples"][0]
    assert error.ptx_line > 0 and "ld.global" in error.details["ptx"]


def test_null_misaligned_read_only_and_shared_bounds() -> None:
    x = words()
    with pytest.raises(OutOfBounds, match="null"):
        run(kernel("mov.u64 %d4, 0; ld.global.u32 %r5, [%d4];"), words(), x)
    with pytest.raises(Misaligned, match="4-byte aligned"):
        run(kernel("ld.global.u32 %r5, [%d2+2];"), words(), x)
    with pytest.raises(OutOfBounds, match="read-only"):
        run(kernel("st.global.u32 [%d2], %r1;"), words(), x)
    shared = ".shared .align 4 .b8 s[64];"
    body = "shl.b32 %r5, %r1, 2; st.shared.u32 [%r5], %r1;"
    with pytest.raises(OutOfBounds, match="shared access at offset 0x40 of 64"):
        run(kernel(body, shared), words(), x)


def test_unsupported_instruction_names_line() -> None:
    with pytest.raises(UnsupportedPTX, match="tcgen05") as caught:
        Emulator(kernel("tcgen05.wait::ld.sync.aligned;"))
    assert caught.value.ptx_line > 10
    with pytest.raises(UnsupportedPTX, match="cannot parse"):
        Emulator(kernel("add.u32 %r1 %r2 ]] ;;;;{{"))
    with pytest.raises(UnsupportedPTX, match="not declared"):
        Emulator(kernel("mov.u32 %r1, %q9; @%zz bra X; X:"))


def test_launch_errors() -> None:
    program = Emulator(kernel("mov.u32 %r5, 1;"))
    with pytest.raises(LaunchError, match="no entry"):
        program.launch("nope", grid=(1, 1, 1), block=(1, 1, 1), params=[])
    with pytest.raises(LaunchError, match="3 parameters"):
        program.launch("k", grid=(1, 1, 1), block=(1, 1, 1), params=[])
    with pytest.raises(LaunchError, match="1024"):
        run(program, words(), words(), block=2048)
    with pytest.raises(LaunchError, match="unknown check"):
        run(program, words(), words(), checks=("speed",))
    assert run(program, words(), words(), grid=0).lane_instructions == 0


def test_special_registers_of_3d_launch() -> None:
    body = """
    mov.u32 %r5, %tid.y;
    mov.u32 %r6, %ctaid.y;
    mov.u32 %r7, %ctaid.z;
    mad.lo.u32 %r5, %r6, 10, %r5;
    mad.lo.u32 %r5, %r7, 100, %r5;
    mov.u32 %r6, %nctaid.y;
    mad.lo.u32 %r5, %r6, 1000, %r5;
    mov.u32 %r6, %laneid;
    mad.lo.u32 %r5, %r6, 10000, %r5;
    mov.u32 %r8, %ctaid.x;
    mad.lo.u32 %r9, %r7, 3, %r6;
    mov.u32 %r10, %ctaid.y;
    mad.lo.u32 %r11, %r7, 3, %r10;
    mad.lo.u32 %r11, %r11, 2, %r8;
    mov.u32 %r12, %tid.x;
    mov.u32 %r14, %tid.y;
    mad.lo.u32 %r13, %r14, 8, %r12;
    mad.lo.u32 %r13, %r11, 16, %r13;
    mul.wide.u32 %d4, %r13, 4;
    add.s64 %d5, %d10, %d4;
    st.global.u32 [%d5], %r5;
"""
    from minitriton.runtime.emulator import Allocation, parameter

    out = np.zeros((2, 3, 2, 2, 8), np.uint32)
    address = parameter(out.ctypes.data)
    Emulator(kernel(body)).launch(
        "k", grid=(2, 3, 2), block=(8, 2, 1), params=[address, address, b""],
        allocations=[Allocation(out.ctypes.data, out.nbytes)],
    )  # fmt: skip
    z, y, _, ty, tx = np.indices(out.shape)
    np.testing.assert_array_equal(out, ty + 10 * y + 100 * z + 3000 + 10000 * (ty * 8 + tx))


def test_counters() -> None:
    body = "ld.global.f32 %f1, [%d2]; fma.rn.f32 %f2, %f1, %f1, %f1; st.global.f32 [%d1], %f2;"
    out, x = np.zeros(64, np.float32), np.ones(64, np.float32)
    report = run(kernel(body), out, x, grid=2, block=32)
    assert report.bytes["load_global"] == 256 and report.bytes["store_global"] == 256
    assert report.flops["f32"] == 128 and report.mix["fma"] == 64
    assert report.lane_instructions == 64 * 13 and report.instructions == 2 * 13


def test_carry_chain_adds_and_multiplies_wide_integers() -> None:
    x = words(64)
    body = """
    add.s64 %d4, %d2, 128;
    ld.global.u32 %r5, [%d2];
    ld.global.u32 %r6, [%d4];
    mul.lo.u32 %r7, %r5, %r6;
    mad.lo.cc.u32 %r8, %r5, %r6, %r5;
    madc.hi.u32 %r9, %r5, %r6, 0;
    sub.cc.u32 %r10, %r5, %r6;
    subc.u32 %r11, 0, 0;
    add.cc.u32 %r12, %r5, %r6;
    addc.u32 %r13, 0, 0;
    xor.b32 %r8, %r8, %r9;
    add.u32 %r8, %r8, %r11;
    mad.lo.u32 %r8, %r13, 1000, %r8;
    st.global.u32 [%d1], %r8;
"""
    out = np.zeros(32, np.uint32)
    run(kernel(body), out, x)
    for lane in range(32):
        a, b = int(x[lane]), int(x[lane + 32])
        wide = a * b + a
        expected = ((wide & 0xFFFFFFFF) ^ (wide >> 32)) - (a < b) + 1000 * (a + b >> 32)
        assert out[lane] == expected % 2**32


@pytest.mark.parametrize(
    "text",
    [
        "ld.global.b128 %d4, [%d2];",
        "shfl.sync.up.b64 %r5, %r1;",
        "atom.global.foo.u32 %r5;",
        "add.u32 %r5, %r1, %r1, %r1;",
        "popc.b32 %r5, %r1, %r1;",
        "mov.u32 %r5, %nowhere;",
        "add.u32 %r5, %r1, %r1 %r1;",
        "add.u32 %r5, %r1, %r1\nadd.u32 %r5, %r1, %r1;",
    ],
)
def test_odd_forms_are_refused_not_crashed(text: str) -> None:
    with pytest.raises(UnsupportedPTX) as caught:
        Emulator(kernel(text))
    assert caught.value.ptx_line
