"""Kernels that get a producer warp on sm_90a: Triton's tutorial product, and attention."""

import minitriton as triton
import minitriton.language as tl


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As in Triton's tutorial."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_group = GROUP * tiles_n
    first = pid // per_group * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m, tile_n = first + pid % per_group % height, pid % per_group // height
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (rows[:, None] * stride_am + k[None, :] * stride_ak)
    b_ptrs = b_ptr + (k[:, None] * stride_bk + columns[None, :] * stride_bn)
    whole: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty.is_int() else tl.float32
    total = tl.zeros((BLOCK_M, BLOCK_N), whole)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=k[None, :] < K - step * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=k[:, None] < K - step * BLOCK_K, other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + stride_cm * rows[:, None] + stride_cn * columns[None, :]
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """[heads, T, D] in base 2; tiles of keys, under a mask at the diagonal and at the end."""
    first, base = tl.program_id(0) * BM, tl.program_id(1) * T * D
    rows, dims = first + tl.arange(0, BM), tl.arange(0, D)
    q_ptrs = q_ptr + base + rows[:, None] * D + dims[None, :]
    peak = tl.full([BM], -float("inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for start in range(0, min(T, first + BM) if CAUSAL else T, BN):
        keys = start + tl.arange(0, BN)
        q = tl.load(q_ptrs, mask=rows[:, None] < T, other=0.0)
        k = tl.load(
            k_ptr + base + keys[None, :] * D + dims[:, None], mask=keys[None, :] < T, other=0.0
        )
        scores = tl.dot(q, k) * scale
        if CAUSAL:
            scores = tl.where(rows[:, None] >= keys[None, :], scores, -float("inf"))
        elif start + BN > T:
            scores = tl.where(keys[None, :] < T, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        p = tl.math.exp2(scores - higher[:, None])
        alpha = tl.math.exp2(peak - higher)
        weight = weight * alpha + tl.sum(p, 1)
        v = tl.load(
            v_ptr + base + keys[:, None] * D + dims[None, :], mask=keys[:, None] < T, other=0.0
        )
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        peak = higher
    out = (acc / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + base + rows[:, None] * D + dims[None, :], out, mask=rows[:, None] < T)
