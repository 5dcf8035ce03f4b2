"""Products of bf16 rows and weights in fewer bits, as inference engines write them."""

import minitriton as triton
import minitriton.language as tl


@triton.jit
def w8a16_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, M, N, K, stride_wk, stride_wn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """w: int8 [K, N] in either order; scale: [N]."""
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_k[:, None] * stride_wk + offs_n[None, :] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, tl.cdiv(K, BLOCK_K)):
        x = tl.load(x_ptrs, mask=offs_m[:, None] < M, other=0.0)
        w = tl.load(w_ptrs)
        acc = tl.dot(x, w.to(x.dtype), acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk
    acc *= tl.load(scale_ptr + offs_n)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < M)


@triton.jit
def w4a16_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """w: int32 [K / 8, N], in a word eight numbers along K, the first lowest: 0 to 15 for -8 to 7;
    scale: [K / GROUP, N]."""
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + (offs_k[:, None] // 8) * N + offs_n[None, :]
    shift = (offs_k % 8) * 4
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        x = tl.load(x_ptrs, mask=offs_m[:, None] < M, other=0.0)
        words = tl.load(w_ptrs)
        scale = tl.load(scale_ptr + (k * BLOCK_K // GROUP) * N + offs_n)
        w = ((words >> shift[:, None]) & 15) - 8
        acc = tl.dot(x, w.to(x.dtype) * scale[None, :], acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // 8 * N
    out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
