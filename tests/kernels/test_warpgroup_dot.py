"""tl.dot on whole warpgroups (wgmma, sm_90a): shapes, orders, dtypes, stages, chains, epilogues."""

import math

import pytest
import torch

import minitriton as triton
import minitriton.language as tl

pytestmark = pytest.mark.usefixtures("hopper")


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        left = K - k * BLOCK_K
        a = tl.load(a_ptrs, mask=(offs_m[:, None] < M) & (offs_k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(offs_k[:, None] < left) & (offs_n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    acc = tl.maximum(acc + tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :], 0.0)
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :], acc, mask=inside)


def run_matmul(device, shape, blocks, dtype, a_t=False, b_t=False, **options):
    """(error relative to the sum of magnitudes, the compiled kernel)."""
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    a = (a.T.contiguous().T if a_t else a).to(device)
    b = (b.T.contiguous().T if b_t else b).to(device)
    bias = torch.randn(n, device=device)
    c = torch.full((m, n), float("nan"), device=device)
    grid = (triton.cdiv(m, blocks[0]), triton.cdiv(n, blocks[1]))
    compiled = matmul_kernel[grid](
        a, b, c, bias, m, n, k, *a.stride(), *b.stride(), n, *blocks, **options
    )
    expected = (a.double() @ b.double() + bias).clamp(min=0)
    scale = a.double().abs() @ b.double().abs() + bias.abs()
    return ((c.double() - expected).abs() / scale).max().item(), compiled


def instructions(compiled):
    return compiled.asm["ptx"].count("wgmma.mma_async")


BLOCKS = [  # blocks, warps, instructions
    ((64, 16, 16), 4, 1), ((64, 256, 32), 4, 2), ((128, 128, 32), 4, 4), ((128, 32, 128), 8, 8),
    ((256, 64, 64), 8, 8), ((128, 256, 64), 8, 4), ((256, 16, 64), 16, 4),
]  # fmt: skip


@pytest.mark.parametrize(("blocks", "warps", "count"), BLOCKS, ids=str)
def test_blocks(device, blocks, warps, count):
    m, n, k = blocks
    shape = (m + 16, n + 16, 3 * k + 16)
    error, compiled = run_matmul(device, shape, blocks, torch.bfloat16, num_warps=warps)
    assert error < 1e-6 and instructions(compiled) >= count
    assert "mma.sync" not in compiled.asm["ptx"]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("a_t", [False, True])
@pytest.mark.parametrize("b_t", [False, True])
def test_operand_orders_and_stages(device, stages, a_t, b_t):
    dtype = torch.float16 if (stages % 2 == 0) ^ a_t ^ b_t else torch.bfloat16
    error, compiled = run_matmul(
        device, (80, 48, 176), (64, 32, 32), dtype, a_t, b_t, num_warps=4, num_stages=stages
    )
    assert error < 1e-6 and (instructions(compiled) > 0) == (stages > 1)


@pytest.mark.parametrize("k", [0, 16, 32, 64])
def test_short_loops(device, k):
    error, _ = run_matmul(device, (64, 32, k), (64, 32, 32), torch.float16, num_warps=4)
    assert error < 1e-6


def test_runs_are_bitwise_equal(device):
    """On a GPU a race would show as a run that differs."""
    m, n, k = (2048, 2048, 1024) if device == "cuda" else (128, 64, 96)
    a = torch.randn(m, k, device=device).bfloat16()
    b = torch.randn(k, n, device=device).bfloat16()
    bias, results = torch.zeros(n, device=device), []
    for _ in range(200 if device == "cuda" else 2):
        c = torch.empty(m, n, device=device)
        matmul_kernel[(m // 128, n // 64)](
            a, b, c, bias, m, n, k, *a.stride(), *b.stride(), n, 128, 64, 32,
            num_warps=8, num_stages=4,
        )  # fmt: skip
        results.append(c)
    assert all(torch.equal(c, results[0]) for c in results)


def test_rows_that_allow_only_narrow_copies(device):
    error, compiled = run_matmul(
        device, (64, 34, 66), (64, 32, 32), torch.float16, b_t=True, num_warps=4
    )
    assert error < 1e-6 and "mma" in compiled.asm["ptx"]


def test_the_switch(device, monkeypatch):
    monkeypatch.setenv("MINITRITON_WGMMA", "0")
    error, compiled = run_matmul(device, (64, 32, 80), (64, 32, 16), torch.float16, num_warps=4)
    assert error < 1e-6 and instructions(compiled) == 0


@triton.jit
def forms_kernel(
    x_ptr, y_ptr, c_ptr, K, stride, FORM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Loops around tl.dot that differ in who touches the accumulator and where A comes from."""
    i, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    c_ptrs = c_ptr + i[:, None] * BLOCK + i[None, :]
    x_ptrs = x_ptr + i[:, None] * stride + k[None, :]
    y_ptrs = y_ptr + i[:, None] * stride + k[None, :]
    first = tl.zeros((BLOCK, BLOCK), tl.float32)
    second = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK_K):
        x, y = tl.load(x_ptrs + start), tl.load(y_ptrs + start)
        if FORM == "two sums":
            first = tl.dot(x, y.T, first)
            second = tl.dot(y, x.T, second)
        elif FORM == "a sum of two":
            first = tl.dot(y, y.T, tl.dot(x, x.T, first))
        elif FORM == "computed left":
            first = tl.dot((x * 2).to(x.dtype), y.T, first)
        elif FORM == "scaled":
            first = tl.dot(x, y.T, first * 0.5)
        elif FORM == "read":
            first = tl.dot(x, y.T, first)
            second += first
        elif FORM == "chain":
            product = tl.dot(x, y.T)
            first += tl.dot(product.to(x.dtype), tl.load(y_ptr + i[:, None] * stride + i[None, :]))
        else:
            first += tl.dot(x, y.T)
    tl.store(c_ptrs, first)
    tl.store(c_ptrs + BLOCK * BLOCK, second)


def expected_forms(form, x, y, k, step, block):
    first = torch.zeros(block, block, dtype=torch.float64)
    second = first.clone()
    for start in range(0, k, step):
        a, b = x[:, start : start + step], y[:, start : start + step]
        if form == "two sums":
            first, second = first + a @ b.T, second + b @ a.T
        elif form == "a sum of two":
            first = first + a @ a.T + b @ b.T
        elif form == "computed left":
            first = first + 2 * a @ b.T
        elif form == "scaled":
            first = first * 0.5 + a @ b.T
        elif form == "read":
            first = first + a @ b.T
            second = second + first
        elif form == "chain":
            first = first + (a @ b.T).half().double() @ y[:, :block]
        else:
            first = first + a @ b.T
    return torch.stack([first, second])


FORMS = ("two sums", "a sum of two", "computed left", "scaled", "read", "chain", "added")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stages", [2, 3])
def test_forms_of_the_loop(device, form, stages):
    block, step, k = 64, 32, 192
    x, y = (torch.randn(block, k).half() for _ in range(2))
    c = torch.full((2, block, block), float("nan"), device=device)
    compiled = forms_kernel[(1,)](
        x.to(device), y.to(device), c, k, k, FORM=form, BLOCK=block, BLOCK_K=step,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    expected = expected_forms(form, x.double(), y.double(), k, step, block)
    assert (c.cpu().double() - expected).abs().max() < (0.5 if form == "chain" else 1e-3)
    assert instructions(compiled) > 0


@triton.jit
def two_loops_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, whole, length, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    """Attention: keys of whole blocks first, then those that need a mask."""
    rows, keys, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :])
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for start in range(0, whole, N):
        s = tl.dot(q, tl.load(k_ptr + (start + keys)[None, :] * D + d[:, None]))
        new = tl.maximum(peak, tl.max(s, 1))
        scale, p = tl.exp2(peak - new), tl.exp2(s - new[:, None])
        total, peak = total * scale + tl.sum(p, 1), new
        acc = acc * scale[:, None]
        acc += tl.dot(p.to(q.dtype), tl.load(v_ptr + (start + keys)[:, None] * D + d[None, :]))
    for start in range(whole, length, N):
        inside = start + keys < length
        k = tl.load(
            k_ptr + (start + keys)[None, :] * D + d[:, None], mask=inside[None, :], other=0.0
        )
        s = tl.where(inside[None, :], tl.dot(q, k), float("-inf"))
        new = tl.maximum(peak, tl.max(s, 1))
        scale, p = tl.exp2(peak - new), tl.exp2(s - new[:, None])
        total, peak = total * scale + tl.sum(p, 1), new
        v = tl.load(
            v_ptr + (start + keys)[:, None] * D + d[None, :], mask=inside[:, None], other=0.0
        )
        acc = tl.dot(p.to(q.dtype), v, acc * scale[:, None])
    tl.store(out_ptr + rows[:, None] * D + d[None, :], acc / total[:, None])


@pytest.mark.parametrize("length", [10, 200])
def test_a_sum_of_two_loops(device, length):
    """The first adds a product to it; ptxas would wait for each wgmma of the second otherwise."""
    q, k, v = (torch.randn(n, 64, device=device).half() for n in (64, length, length))
    out = torch.full((64, 64), float("nan"), device=device)
    compiled = two_loops_kernel[(1,)](
        q, k, v, out, length // 96 * 96, length, 64, 96, 64, num_warps=4, num_stages=2
    )
    weights = torch.softmax(q.double() @ k.double().T * math.log(2.0), 1)
    assert (out.double() - weights @ v.double()).abs().max() < 1e-2
    assert instructions(compiled) == 20


@triton.jit
def rows_kernel(
    q_ptr, x_ptr, k_ptr, row_ptr, out_ptr, length, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    """Sums whose left operands are computed of rows of numbers that cp.async copies."""
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    keys = tl.load(k_ptr + n[:, None] * D + d[None, :])
    one = tl.zeros((N, D), tl.float32)
    two = tl.zeros((N, D), tl.float32)
    for start in range(0, length, M):
        at = start + m
        q = tl.load(q_ptr + at[:, None] * D + d[None, :], mask=at[:, None] < length, other=0.0)
        x = tl.load(x_ptr + at[:, None] * D + d[None, :], mask=at[:, None] < length, other=0.0)
        row = tl.load(row_ptr + at, mask=at < length, other=0.0)
        later = tl.load(row_ptr + length + at, mask=at < length, other=0.0)
        one = tl.dot((row[None, :] * (n % 3)[:, None]).to(q.dtype), x, one)
        s = tl.dot(keys, tl.trans(q)) - later[None, :]
        two = tl.dot(s.to(q.dtype), q, two)
    tl.store(out_ptr + n[:, None] * D + d[None, :], one + two)


@pytest.mark.parametrize("rows", [16, 48, 64, 80])
@pytest.mark.parametrize(("keys", "warps"), [(64, 4), (128, 8)])
def test_rows_that_few_threads_copy(device, rows, keys, warps):
    """Beside products in flight: for a branch there, ptxas would wait for them."""
    length, d = 2 * rows + 3, 64
    q, x, k = (torch.randint(-2, 3, (n, d), device=device).half() for n in (length, length, keys))
    row = torch.randint(-2, 3, (2 * length,), device=device).float()
    out = torch.full((keys, d), float("nan"), device=device)
    compiled = rows_kernel[(1,)](
        q, x, k, row, out, length, rows, keys, d, num_warps=warps, num_stages=2
    )
    n = torch.arange(keys, device=device) % 3
    expected = torch.outer(n.double(), row[:length].double()) @ x.double()
    expected += (k.double() @ q.double().T - row[length:].double()) @ q.double()
    assert (out.double() == expected).all() and instructions(compiled) > 0


@triton.jit
def persistent_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * columns, PROGRAMS):
        m = tile // columns * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :])
            b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :])
            acc = tl.dot(a, b, acc)
        tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(tl.bfloat16))


def test_persistent(device):
    """The epilogue's scratch lies where the next tile's operands will."""
    m, n, k = 256, 192, 64
    a, b = (torch.randn(s, device=device).bfloat16() for s in ((m, k), (k, n)))
    c = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
    compiled = persistent_kernel[(3,)](
        a, b, c, m, n, k, BLOCK_M=128, BLOCK_N=64, BLOCK_K=16, PROGRAMS=3, num_warps=8
    )
    expected = (a.double() @ b.double()).float()
    assert (c.float() - expected).abs().max() < 0.2 and instructions(compiled) > 0


@triton.jit
def fp8_kernel(
    a_ptr, b_ptr, c_ptr, K, FORM: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :])
        b = tl.load(b_ptr + n[:, None] * K + (start + k)[None, :]).T
        if FORM == "computed left":
            a = (a.to(tl.float32) * 2).to(a.dtype)
        if FORM == "partial sums":
            acc += tl.dot(a, b, max_num_imprecise_acc=CHAIN) * (1 + start)
        else:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=CHAIN)
    tl.store(c_ptr + m[:, None] * BLOCK_N + n[None, :], acc)


@pytest.mark.parametrize("form", ["running sum", "computed left", "partial sums"])
@pytest.mark.parametrize("blocks", [(64, 16, 256), (128, 32, 64)], ids=str)
def test_fp8(device, blocks, form):
    """fp8 goes to warpgroups unless the dot says that its whole depth must be summed precisely."""
    (m, n, step), k = blocks, 512
    types = (torch.float8_e4m3fn, torch.float8_e5m2)
    a, b = (torch.randn(s, k, device=device).to(t) for s, t in zip((m, n), types, strict=True))
    c = torch.full((m, n), float("nan"), device=device)
    left = a.double() * (2 if form == "computed left" else 1)
    if form == "partial sums":
        left *= (1 + torch.arange(k, device=device) // step * step)[None, :]
    expected = left @ b.double().T
    on_warpgroups = m // 64 * step // 32
    for chain, count in ((None, on_warpgroups), (step, on_warpgroups), (step // 2, 0), (0, 0)):
        compiled = fp8_kernel[(1,)](a, b, c, k, form, chain, *blocks, num_stages=3)
        assert instructions(compiled) == count
        assert ((c - expected).norm() / expected.norm()).item() < 1e-3


@triton.jit
def packed_kernel(w_ptr, x_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr):
    """Weights of 16 bits, two in a word, next to each other in the depth: bf16 without rounding."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, 32):
        words = tl.load(w_ptr + m[:, None] * (K // 2) + (start // 2 + tl.arange(0, 16))[None, :])
        x = tl.load(x_ptr + n[:, None] * K + (start + tl.arange(0, 32))[None, :])
        pairs = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(
            tl.bfloat16, bitcast=True
        )
        acc = tl.dot((pairs * 2).to(tl.bfloat16).reshape(M, 32), x.T, acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_words_unpacked_in_registers(device, target, monkeypatch):
    """The words come through cp.async, and what they hold stays in its warp and is packed anew."""
    if device == "cpu":
        monkeypatch.setenv("MINITRITON_TARGET", target)
    w, x = (torch.randn(s, 256, device=device).bfloat16() for s in (64, 32))
    out = torch.full((64, 32), float("nan"), device=device)
    compiled = packed_kernel[(1,)](w.view(torch.int32), x, out, 256, 64, 32, num_stages=3)
    assert (out - 2 * w.double() @ x.double().T).abs().max() < 1e-3
    assert "loads pipelined in 3 stages: " in str(compiled.metadata["remarks"])
    if target == "sm_90a":
        assert instructions(compiled) == 2 and "bf16x2" in compiled.asm["ptx"]
