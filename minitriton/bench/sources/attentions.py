"""Flash attention forward and backward after Triton's tutorial, with grouped queries (GQA).

q, o: [batch, tokens, heads, head_dim], k, v with heads / GROUP heads; all with strides (batch, row,
head) of their own and dense channels. The number of tokens is a multiple of every block, but in the
forward pass with RAGGED.
"""

import minitriton as triton
import minitriton.language as tl


@triton.jit
def attend_keys(
    acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_k, stride_v, lo, hi, offs_m, tokens, scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    k_ptrs += lo * stride_k
    v_ptrs += lo * stride_v
    for start in range(lo, hi, BLOCK_N):
        keys = start + offs_n
        if RAGGED:
            k = tl.load(k_ptrs, mask=keys[None, :] < tokens, other=0.0)
        else:
            k = tl.load(k_ptrs)
        scores = tl.dot(q, k)
        if MASKED:
            seen = offs_m[:, None] >= keys[None, :] if CAUSAL else keys[None, :] < tokens
            scores = tl.where(seen, scores, -1.0e30)
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        if RAGGED:
            v = tl.load(v_ptrs, mask=keys[:, None] < tokens, other=0.0)
        else:
            v = tl.load(v_ptrs)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
        k_ptrs += BLOCK_N * stride_k
        v_ptrs += BLOCK_N * stride_v
    return acc, l_i, m_i


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sm_scale, heads, tokens,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr = False,
):  # fmt: skip
    start_m = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    q_start = batch.to(tl.int64) * stride_qb + head * stride_qh
    k_start = batch.to(tl.int64) * stride_kb + (head // GROUP) * stride_kh
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    q_at = q_start + offs_m[:, None] * stride_qm + offs_d[None, :]
    if RAGGED:
        q = tl.load(q_ptr + q_at, mask=offs_m[:, None] < tokens, other=0.0)
    else:
        q = tl.load(q_ptr + q_at)
    k_ptrs = k_ptr + k_start + offs_n[None, :] * stride_kn + offs_d[:, None]
    v_ptrs = v_ptr + k_start + offs_n[:, None] * stride_kn + offs_d[None, :]
    m_i = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    scale = sm_scale * 1.4426950408889634  # exponentials to base 2
    full_end = start_m if CAUSAL else tokens
    end = start_m + BLOCK_M if CAUSAL else tokens
    if RAGGED:
        full_end, end = full_end // BLOCK_N * BLOCK_N, tl.minimum(end, tokens)
    acc, l_i, m_i = attend_keys(
        acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, stride_kn, 0, full_end, offs_m, tokens, scale,
        BLOCK_N, False, CAUSAL, RAGGED,
    )  # fmt: skip
    if CAUSAL or RAGGED:
        acc, l_i, m_i = attend_keys(
            acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, stride_kn, full_end, end, offs_m, tokens,
            scale, BLOCK_N, True, CAUSAL, RAGGED,
        )  # fmt: skip
    acc = acc / l_i[:, None]
    lse = m_i + tl.log2(l_i)
    lse_ptr += tl.program_id(1) * tokens
    if RAGGED:
        tl.store(o_ptr + q_at, acc.to(o_ptr.dtype.element_ty), mask=offs_m[:, None] < tokens)
        tl.store(lse_ptr + offs_m, lse, mask=offs_m < tokens)
    else:
        tl.store(o_ptr + q_at, acc.to(o_ptr.dtype.element_ty))
        tl.store(lse_ptr + offs_m, lse)


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, heads, tokens, stride_b, stride_m, stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = sum over channels of o * do."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = batch.to(tl.int64) * stride_b + head * stride_h
    at += offs_m[:, None] * stride_m + tl.arange(0, HEAD_DIM)[None, :]
    o = tl.load(o_ptr + at).to(tl.float32)
    do = tl.load(do_ptr + at).to(tl.float32)
    tl.store(delta_ptr + tl.program_id(1) * tokens + offs_m, tl.sum(o * do, axis=1))


@triton.jit
def walk_queries(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qm, lo, hi, offs_n, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offs_d = tl.arange(0, HEAD_DIM)
    for start in range(lo, hi, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        at = offs_m[:, None] * stride_qm + offs_d[None, :]
        q = tl.load(q_ptr + at)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - tl.load(lse_ptr + offs_m)[None, :])
        if MASKED:
            p = tl.where(offs_m[None, :] >= offs_n[:, None], p, 0.0)
        do = tl.load(do_ptr + at)
        dv = tl.dot(p.to(do.dtype), do, dv)
        slope = tl.dot(v, tl.trans(do)) - tl.load(delta_ptr + offs_m)[None, :]
        dk = tl.dot((p * slope).to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def attention_keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, sm_scale, heads, tokens,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of k and v; BLOCK_M divides BLOCK_N."""
    start_n = tl.program_id(0) * BLOCK_N
    kv_heads = heads // GROUP
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k_at = batch.to(tl.int64) * stride_kb + kv_head * stride_kh
    k_at += offs_n[:, None] * stride_kn + tl.arange(0, HEAD_DIM)[None, :]
    k, v = tl.load(k_ptr + k_at), tl.load(v_ptr + k_at)
    dk = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    dv = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    scale = sm_scale * 1.4426950408889634
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        q_start = batch.to(tl.int64) * stride_qb + head * stride_qh
        rows = (batch * heads + head) * tokens
        first = 0
        if CAUSAL:
            first = start_n + BLOCK_N
            dk, dv = walk_queries(
                dk, dv, k, v, q_ptr + q_start, do_ptr + q_start, lse_ptr + rows, delta_ptr + rows,
                stride_qm, start_n, start_n + BLOCK_N, offs_n, scale, HEAD_DIM, BLOCK_M, True,
            )  # fmt: skip
        dk, dv = walk_queries(
            dk, dv, k, v, q_ptr + q_start, do_ptr + q_start, lse_ptr + rows, delta_ptr + rows,
            stride_qm, first, tokens, offs_n, scale, HEAD_DIM, BLOCK_M, False,
        )  # fmt: skip
    tl.store(dk_ptr + k_at, (dk * sm_scale).to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + k_at, dv.to(dv_ptr.dtype.element_ty))


@triton.jit
def walk_keys(
    dq, q, do, lse, delta, k_ptr, v_ptr, stride_kn, lo, hi, offs_m, scale,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offs_d = tl.arange(0, HEAD_DIM)
    for start in range(lo, hi, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        at = offs_n[:, None] * stride_kn + offs_d[None, :]
        k = tl.load(k_ptr + at)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
        if MASKED:
            p = tl.where(offs_m[:, None] >= offs_n[None, :], p, 0.0)
        v = tl.load(v_ptr + at)
        slope = tl.dot(do, tl.trans(v)) - delta[:, None]
        dq = tl.dot((p * slope).to(k.dtype), k, dq)
    return dq


@triton.jit
def attention_queries_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, sm_scale, heads, tokens,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of q; BLOCK_N divides BLOCK_M."""
    start_m = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_at = batch.to(tl.int64) * stride_qb + head * stride_qh
    q_at += offs_m[:, None] * stride_qm + tl.arange(0, HEAD_DIM)[None, :]
    k_start = batch.to(tl.int64) * stride_kb + (head // GROUP) * stride_kh
    q, do = tl.load(q_ptr + q_at), tl.load(do_ptr + q_at)
    rows = tl.program_id(1) * tokens + offs_m
    lse, delta = tl.load(lse_ptr + rows), tl.load(delta_ptr + rows)
    dq = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    scale = sm_scale * 1.4426950408889634
    full_end = start_m if CAUSAL else tokens
    dq = walk_keys(
        dq, q, do, lse, delta, k_ptr + k_start, v_ptr + k_start, stride_kn, 0, full_end, offs_m,
        scale, HEAD_DIM, BLOCK_N, False,
    )  # fmt: skip
    if CAUSAL:
        dq = walk_keys(
            dq, q, do, lse, delta, k_ptr + k_start, v_ptr + k_start, stride_kn, start_m,
            start_m + BLOCK_M, offs_m, scale, HEAD_DIM, BLOCK_N, True,
        )  # fmt: skip
    tl.store(dq_ptr + q_at, (dq * sm_scale).to(dq_ptr.dtype.element_ty))
