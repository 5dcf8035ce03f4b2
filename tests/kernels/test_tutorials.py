"""Kernels in the style of Triton's tutorials: add, softmax, matmul, dropout, layer norm, attention.

They use what such kernels use (host wrappers, meta-parameters, grid functions, locks), small.
"""

import math

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def vector_sum_kernel(left_ptr, right_ptr, result_ptr, count, BLOCK_SIZE: tl.constexpr):
    block = tl.program_id(axis=0)
    where = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    valid = where < count
    left = tl.load(left_ptr + where, mask=valid)
    right = tl.load(right_ptr + where, mask=valid)
    tl.store(result_ptr + where, left + right, mask=valid)


@pytest.mark.parametrize("count", [1, 1023, 1024, 5000])
def test_vector_add(device, count):
    left, right = torch.rand(count, device=device), torch.rand(count, device=device)
    result = torch.empty_like(left)
    grid = lambda meta: (triton.cdiv(count, meta["BLOCK_SIZE"]),)
    vector_sum_kernel[grid](left, right, result, count, BLOCK_SIZE=1024)
    assert torch.equal(result, left + right)


@triton.jit
def row_softmax_kernel(
    out_ptr, in_ptr, in_stride, out_stride, rows, cols,
    BLOCK_SIZE: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=num_stages):
        col = tl.arange(0, BLOCK_SIZE)
        valid = col < cols
        values = tl.load(in_ptr + row * in_stride + col, mask=valid, other=-float("inf"))
        shifted = values - tl.max(values, axis=0)
        powers = tl.exp(shifted)
        tl.store(out_ptr + row * out_stride + col, powers / tl.sum(powers, axis=0), mask=valid)


@pytest.mark.parametrize("shape", [(1, 1), (37, 781), (20, 64)], ids=str)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_warps", [1, 8])
def test_persistent_softmax(device, shape, num_stages, num_warps):
    x = torch.randn(shape[0], shape[1] + 3, device=device)[:, : shape[1]]
    y = torch.empty(shape, device=device)
    row_softmax_kernel[(4,)](
        y, x, x.stride(0), y.stride(0), *shape,
        BLOCK_SIZE=triton.next_power_of_2(shape[1]), num_stages=num_stages, num_warps=num_warps,
    )  # fmt: skip
    torch.testing.assert_close(y, torch.softmax(x, 1), rtol=1e-5, atol=1e-6)


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def tiled_matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(axis=0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_group = GROUP * tiles_n
    first = (pid // per_group) * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m = first + ((pid % per_group) % height)
    tile_n = (pid % per_group) // height
    tl.assume(tile_m >= 0)
    tl.assume(stride_am > 0)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    col = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    k = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + (row[:, None] * stride_am + k[None, :] * stride_ak)
    b_tile = b_ptr + (k[:, None] * stride_bk + col[None, :] * stride_bn)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_tile, mask=k[None, :] < K - step * BLOCK_K, other=0.0)
        b = tl.load(b_tile, mask=k[:, None] < K - step * BLOCK_K, other=0.0)
        total = tl.dot(a, b, total)
        a_tile += BLOCK_K * stride_ak
        b_tile += BLOCK_K * stride_bk
    if ACTIVATION == "leaky_relu":
        total = leaky_relu(total)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_tile = c_ptr + stride_cm * row[:, None] + stride_cn * col[None, :]
    tl.store(c_tile, total.to(tl.float16), mask=(row[:, None] < M) & (col[None, :] < N))


@pytest.mark.parametrize("activation", ["", "leaky_relu"])
@pytest.mark.parametrize("shape", [(200, 136, 72), (64, 64, 64), (17, 250, 40)], ids=str)
@pytest.mark.parametrize("num_warps, num_stages", [(4, 3), (8, 2)])
def test_grouped_matmul(device, shape, activation, num_warps, num_stages):
    m, n, k = shape
    a, b = torch.randn(m, k, device=device).half(), torch.randn(k, n, device=device).half()
    c = torch.empty(m, n, device=device, dtype=torch.float16)
    grid = lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)
    tiled_matmul_kernel[grid](
        a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), BLOCK_M=64, BLOCK_N=64,
        BLOCK_K=32, GROUP=2, ACTIVATION=activation, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    expected = a.double() @ b.double()
    expected = torch.nn.functional.leaky_relu(expected) if activation else expected
    torch.testing.assert_close(c.double(), expected, rtol=2e-3, atol=1e-2)


@triton.jit
def dropout_kernel(x_ptr, out_ptr, count, p, seed, BLOCK_SIZE: tl.constexpr):
    place = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + place, mask=place < count)
    keep = tl.rand(seed, place) > p
    tl.store(out_ptr + place, tl.where(keep, x / (1 - p), 0.0), mask=place < count)


def test_seeded_dropout(device):
    x = torch.randn(3000, device=device) + 5
    outs = [torch.empty_like(x) for _ in range(3)]
    for out, seed in zip(outs, (123, 123, 512), strict=True):
        dropout_kernel[(3,)](x, out, 3000, 0.3, seed, BLOCK_SIZE=1024)
    kept = outs[0] != 0
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert abs(kept.float().mean().item() - 0.7) < 0.05
    torch.testing.assert_close(outs[0][kept], x[kept] / 0.7)


@triton.jit
def norm_forward_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, stride, N, eps, BLOCK_SIZE: tl.constexpr
):
    row = tl.program_id(0)
    y_ptr += row * stride
    x_ptr += row * stride
    running = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, N, BLOCK_SIZE):
        col = start + tl.arange(0, BLOCK_SIZE)
        running += tl.load(x_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    mean = tl.sum(running, axis=0) / N
    squares = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, N, BLOCK_SIZE):
        col = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + col, mask=col < N, other=0.0).to(tl.float32)
        x = tl.where(col < N, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK_SIZE):
        col = start + tl.arange(0, BLOCK_SIZE)
        w = tl.load(w_ptr + col, mask=col < N)
        b = tl.load(b_ptr + col, mask=col < N)
        x = tl.load(x_ptr + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + col, (x - mean) * rstd * w + b, mask=col < N)


@triton.jit
def norm_backward_kernel(
    dx_ptr, dy_ptr, dw_ptr, db_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, lock_ptr, stride, N,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK_SIZE)
    valid = col < N
    slot = row % GROUP
    lock = lock_ptr + slot
    seen = lock + GROUP
    dw_ptrs, db_ptrs = dw_ptr + slot * N + col, db_ptr + slot * N + col
    x = tl.load(x_ptr + row * stride + col, mask=valid, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride + col, mask=valid, other=0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=valid).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    xhat = tl.where(valid, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    wdy = tl.where(valid, w * dy, 0.0)
    c1 = tl.sum(xhat * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    tl.store(dx_ptr + row * stride + col, (wdy - (xhat * c1 + c2)) * rstd, mask=valid)
    dw_part = (dy * xhat).to(w.dtype)
    db_part = dy.to(w.dtype)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    count = tl.load(seen)
    if count == 0:
        tl.atomic_xchg(seen, 1)
    else:
        dw_part += tl.load(dw_ptrs, mask=valid)
        db_part += tl.load(db_ptrs, mask=valid)
    tl.store(dw_ptrs, dw_part, mask=valid)
    tl.store(db_ptrs, db_part, mask=valid)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def norm_weights_kernel(
    dw_ptr, db_ptr, out_dw_ptr, out_db_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(0, M, BLOCK_M):
        row = i + tl.arange(0, BLOCK_M)
        valid = (row[:, None] < M) & (col[None, :] < N)
        place = row[:, None] * N + col[None, :]
        dw += tl.load(dw_ptr + place, mask=valid, other=0.0)
        db += tl.load(db_ptr + place, mask=valid, other=0.0)
    tl.store(out_dw_ptr + col, tl.sum(dw, axis=0), mask=col < N)
    tl.store(out_db_ptr + col, tl.sum(db, axis=0), mask=col < N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(11, 200), (5, 64)], ids=str)
def test_layer_norm_forward_and_backward_with_locks(device, shape, dtype):
    (m, n), group = shape, 3
    x = (torch.randn(shape, device=device) * 2 + 0.5).to(dtype)
    dy = (torch.randn(shape, device=device) * 0.1).to(dtype)
    w, b = torch.rand(n, device=device).to(dtype), torch.rand(n, device=device).to(dtype)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(m, device=device), torch.empty(m, device=device)
    norm_forward_kernel[(m,)](x, y, w, b, mean, rstd, x.stride(0), n, 1e-5, BLOCK_SIZE=128)
    parts = torch.zeros(2, group, n, device=device)
    locks = torch.zeros(2 * group, dtype=torch.int32, device=device)
    norm_backward_kernel[(m,)](
        dx,
        dy,
        parts[0],
        parts[1],
        x,
        w,
        mean,
        rstd,
        locks,
        x.stride(0),
        n,
        GROUP=group,
        BLOCK_SIZE=256,
    )
    dw, db = torch.empty(n, device=device), torch.empty(n, device=device)
    norm_weights_kernel[(triton.cdiv(n, 64),)](
        parts[0], parts[1], dw, db, group, n, BLOCK_M=4, BLOCK_N=64
    )
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    expected = torch.nn.functional.layer_norm(leaves[0], (n,), leaves[1], leaves[2], 1e-5)
    expected.backward(dy.double())
    tolerance = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    pairs = ((y, expected), (dx, leaves[0].grad), (dw, leaves[1].grad), (db, leaves[2].grad))
    for got, wanted in pairs:
        torch.testing.assert_close(got.double(), wanted.detach(), **tolerance)


@triton.jit
def attention_pass(
    acc,
    l_i,
    m_i,
    q,
    k_ptrs,
    v_ptrs,
    lo,
    hi,
    T,
    rows,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
):
    keys = tl.arange(0, BLOCK_N)
    for start in range(lo, hi, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        inside = start + keys < T
        k = tl.load(k_ptrs + start * D, mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k)
        if MASKED:
            scores = tl.where(
                (rows[:, None] >= (start + keys)[None, :]) & inside[None, :], scores, -1.0e6
            )
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p = tl.math.exp2(scores - m_new[:, None])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_ptrs + start * D, mask=inside[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, T,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    base = head.to(tl.int64) * T * D
    rows, dims, keys = (
        tile * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.arange(0, D),
        tl.arange(0, BLOCK_N),
    )
    place = base + rows[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + place, mask=rows[:, None] < T, other=0.0)
    q = (q * (scale * 1.44269504)).to(q_ptr.dtype.element_ty)
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    k_ptrs = k_ptr + base + keys[None, :] * D + dims[:, None]
    v_ptrs = v_ptr + base + keys[:, None] * D + dims[None, :]
    if CAUSAL:
        middle = tile * BLOCK_M
        acc, l_i, m_i = attention_pass(
            acc, l_i, m_i, q, k_ptrs, v_ptrs, 0, middle, T, rows, BLOCK_N, False, D
        )
        acc, l_i, m_i = attention_pass(
            acc, l_i, m_i, q, k_ptrs, v_ptrs, middle, middle + BLOCK_M, T, rows, BLOCK_N, True, D
        )
    else:
        acc, l_i, m_i = attention_pass(
            acc, l_i, m_i, q, k_ptrs, v_ptrs, 0, T, T, rows, BLOCK_N, False, D
        )
    acc = acc / l_i[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=rows[:, None] < T)


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flash_attention(device, dim, causal, num_stages, dtype):
    heads, length = 2, 128
    q, k, v = (torch.randn(heads, length, dim, device=device).to(dtype) for _ in range(3))
    out = torch.empty_like(q)
    attention_kernel[(triton.cdiv(length, 64), heads)](
        q, k, v, out, 1 / math.sqrt(dim), length,
        D=dim, BLOCK_M=64, BLOCK_N=32, CAUSAL=causal, num_stages=num_stages,
    )  # fmt: skip
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [40, 100])
def test_flash_attention_of_odd_length(device, length):
    q, k, v = (torch.randn(1, length, 32, device=device).half() for _ in range(3))
    out = torch.empty_like(q)
    attention_kernel[(triton.cdiv(length, 32), 1)](
        q,
        k,
        v,
        out,
        1 / math.sqrt(32),
        length,
        D=32,
        BLOCK_M=32,
        BLOCK_N=16,
        CAUSAL=True,
        num_warps=2,
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3)
