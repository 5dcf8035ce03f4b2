"""Kernels with mistakes, and what the emulator says about them in docs/emulator.md."""

import minitriton as triton
import minitriton.language as tl


@triton.jit
def copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x)  # the mask is missing


# Each thread stores one word and loads its neighbour's without a barrier in between.
RACE = """
.version 7.4
.target sm_80
.address_size 64
.visible .entry neighbour(.param .u64 out)
{
    .reg .b32 %r<5>;
    .reg .b64 %rd<4>;
    .shared .align 4 .b8 words[256];
    mov.u32 %r0, %tid.x;
    shl.b32 %r1, %r0, 2;
    mov.u32 %r2, words;
    add.u32 %r2, %r2, %r1;
    st.shared.b32 [%r2], %r0;
    xor.b32 %r3, %r1, 128;
    mov.u32 %r4, words;
    add.u32 %r3, %r3, %r4;
    ld.shared.b32 %r4, [%r3];
    ld.param.u64 %rd0, [out];
    cvt.u64.u32 %rd1, %r1;
    add.u64 %rd2, %rd0, %rd1;
    st.global.b32 [%rd2], %r4;
    ret;
}
"""
