"""Tiles of sizes that are no powers of two: elementwise work, reductions, moves, products."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def tile_kernel(
    x_ptr, y_ptr, t_ptr, rows_ptr, columns_ptr, best_ptr, m, n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    at, inside = i[:, None] * n + j[None, :], (i[:, None] < m) & (j[None, :] < n)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    y = tl.where(x > 0, x * 2 + 1, tl.exp(x))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(t_ptr + j[:, None] * m + i[None, :], tl.trans(x), mask=tl.trans(inside))
    tl.store(rows_ptr + i, tl.sum(x, axis=1), mask=i < m)
    tl.store(columns_ptr + j, tl.max(x, axis=0), mask=j < n)
    tl.store(best_ptr, tl.max(x))
    tl.store(best_ptr + 1, tl.sum(tl.where(inside, 1.0, 0.0)))


TILES = [  # blocks, sizes, warps
    ((64, 192), (64, 192), 4), ((64, 192), (50, 190), 8), ((192, 64), (192, 60), 8),
    ((16, 176), (16, 176), 1), ((80, 48), (77, 48), 4), ((1, 1008), (1, 1000), 4),
]  # fmt: skip


@pytest.mark.parametrize(("blocks", "sizes", "warps"), TILES, ids=str)
def test_tiles(device, blocks, sizes, warps):
    m, n = sizes
    x = torch.randn(sizes, device=device)
    y = torch.empty(sizes, device=device, dtype=torch.float16)
    t, best = torch.empty(n, m, device=device), torch.empty(2, device=device)
    rows, columns = torch.empty(m, device=device), torch.empty(n, device=device)
    tile_kernel[(1,)](x, y, t, rows, columns, best, m, n, *blocks, num_warps=warps)
    torch.testing.assert_close(y, torch.where(x > 0, x * 2 + 1, x.exp()).half())
    assert torch.equal(t, x.T)
    torch.testing.assert_close(rows, x.sum(1), rtol=1e-4, atol=1e-4)
    most = x.amax(0) if m == blocks[0] else x.amax(0).clamp(min=0)
    assert torch.equal(columns, most)
    assert best[1] == m * n and best[0] == x.max()


@triton.jit
def moves_kernel(x_ptr, out_ptr, where_ptr, count_ptr, N: tl.constexpr, LOOPS: tl.constexpr):
    i, j = tl.arange(0, 16), tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + j[None, :])
    tl.store(where_ptr + i, tl.argmax(x, axis=1))
    tl.store(where_ptr + 16 + j, tl.argmin(x, axis=0))
    total = tl.zeros((16, N), tl.float32)
    for step in range(LOOPS):
        if step % 2 == 0:
            total += tl.cumsum(x, axis=0)
        else:
            total -= x * step
    pairs = tl.join(total, x)
    flat = tl.reshape(tl.trans(pairs, (1, 0, 2)), (2 * N, 16))
    r, c = tl.arange(0, 2 * N), tl.arange(0, 16)
    tl.store(out_ptr + r[:, None] * 16 + c[None, :], flat)
    old = tl.atomic_add(count_ptr + j % 16, 1)
    tl.device_assert(old >= 0)
    tl.atomic_max(count_ptr + 16 + j, (j * 3) % 7)


@pytest.mark.parametrize("n", [48, 80, 176, 192])
def test_moves(device, n):
    x = torch.randn(16, n, device=device)
    out = torch.empty(2 * n, 16, device=device)
    where = torch.empty(16 + n, device=device, dtype=torch.int32)
    count = torch.zeros(16 + n, device=device, dtype=torch.int32)
    moves_kernel[(1,)](x, out, where, count, n, 3)
    assert torch.equal(where[:16].long(), x.argmax(1))
    assert torch.equal(where[16:].long(), x.argmin(0))
    total = 2 * x.cumsum(0) - x
    expected = torch.stack([total, x], -1).permute(1, 0, 2).reshape(2 * n, 16)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert (count[:16] == n // 16).all()
    j = torch.arange(n, device=device, dtype=torch.int32)
    assert torch.equal(count[16:], (j * 3) % 7)


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + i[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + j[None, :])
    c = tl.dot(a, b, input_precision=PRECISION)
    c = tl.dot((c * 0.5).to(a.dtype), tl.trans(b), input_precision=PRECISION)
    tl.store(c_ptr + i[:, None] * K + k[None, :], c)


PRODUCTS = [
    (torch.float16, "ieee", 2e-3), (torch.bfloat16, "ieee", 2e-2), (torch.float32, "tf32", 2e-3),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "precision", "tolerance"), PRODUCTS, ids=str)
@pytest.mark.parametrize("shape", [(64, 48, 32), (48, 32, 80), (96, 80, 16)], ids=str)
def test_products(device, shape, dtype, precision, tolerance):
    check_products(device, shape, dtype, precision, tolerance)


def test_exact_products(device):
    check_products(device, (64, 48, 32), torch.float32, "tf32x3", 1e-6)
    check_products(device, (48, 16, 16), torch.float32, "ieee", 1e-6)
    check_products(device, (16, 48, 16), torch.float32, "ieee", 1e-6)


def check_products(device, shape, dtype, precision, tolerance):
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype).to(device), torch.randn(k, n).to(dtype).to(device)
    c = torch.full((m, k), float("nan"), device=device)
    product_kernel[(1,)](a, b, c, m, n, k, precision, num_warps=4)
    once = ((a.double() @ b.double()) * 0.5).to(dtype).double()
    expected = once @ b.double().T
    assert ((c - expected).norm() / expected.norm()).item() < tolerance


@triton.jit
def bytes_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + i[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + j[None, :])
    c = tl.dot(a, b)
    tl.store(c_ptr + i[:, None] * N + j[None, :], c)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_products_of_bytes(device, dtype):
    m, n, k = 32, 80, 96
    a, b = (torch.randint(-8, 8, shape, device=device) for shape in ((m, k), (k, n)))
    exact = a.double() @ b.double()
    out = torch.int32 if dtype == torch.int8 else torch.float32
    c = torch.zeros(m, n, device=device, dtype=out)
    bytes_kernel[(1,)](a.to(dtype), b.to(dtype), c, m, n, k)
    assert torch.equal(c.double(), exact)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = tl.program_id(0) % tl.cdiv(M, BLOCK_M), tl.program_id(0) // tl.cdiv(M, BLOCK_M)
    offs_am = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_bn = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    offs_cm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_cn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    c_ptrs = c_ptr + offs_cm[:, None] * stride_cm + offs_cn[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=inside)


def run_matmul(device, shape, blocks, dtype=torch.bfloat16, a_t=False, b_t=False, **options):
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    a = (a.T.contiguous().T if a_t else a).to(device)
    b = (b.T.contiguous().T if b_t else b).to(device)
    c = torch.full((m, n), float("nan"), device=device, dtype=dtype)
    grid = (triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1]),)
    compiled = matmul_kernel[grid](
        a, b, c, m, n, k, *a.stride(), *b.stride(), n, *blocks, **options
    )
    expected = (a.double() @ b.double()).to(dtype)
    error = ((c.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < (2e-3 if dtype == torch.bfloat16 else 3e-4)
    return compiled


MATMULS = [  # blocks, warps, stages
    ((128, 192, 64), 8, 3), ((128, 96, 32), 4, 3), ((128, 160, 64), 8, 2), ((64, 176, 64), 4, 3),
    ((192, 64, 32), 4, 3), ((64, 64, 48), 4, 3), ((48, 80, 112), 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("b_t", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize(("blocks", "warps", "stages"), MATMULS, ids=str)
def test_matmul(device, blocks, warps, stages, b_t):
    m, n, k = blocks
    run_matmul(
        device, (m + 16, n + 48, 4 * k + 16), blocks, b_t=b_t, num_warps=warps, num_stages=stages
    )


HOPPER = [  # blocks, warps, instructions
    ((128, 192, 64), 8, "n192k16"), ((64, 176, 64), 4, "n176k16"), ((128, 160, 128), 8, "n160k16"),
    ((64, 96, 48), 4, "n96k16"), ((192, 64, 32), 4, "n64k16"), ((64, 48, 64), 4, "n48k16"),
    ((320, 48, 32), 4, "n48k16"),  # A comes in boxes of 160 rows
]  # fmt: skip


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("a_t", "b_t"), [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(("blocks", "warps", "name"), HOPPER, ids=str)
def test_matmul_by_warpgroups(device, blocks, warps, name, a_t, b_t):
    m, n, k = blocks
    shape = (2 * m + 16, n + 48, 5 * k + 16)
    compiled = run_matmul(
        device, shape, blocks, torch.float16, a_t, b_t, num_warps=warps, num_stages=2
    )
    text = compiled.asm["ptx"]
    assert name in text and "mma.sync" not in text
    assert "cp.async.bulk.tensor" in text


@pytest.mark.usefixtures("hopper")
def test_matmul_of_special_warps(device):
    """128x192 tiles: a producer warp, several programs per CTA, pieces stored by TMA."""
    shape = (384, 576, 448)
    compiled = run_matmul(device, shape, (128, 192, 64), num_warps=8, num_stages=4)
    remarks = compiled.metadata["remarks"]
    for what in ("warp specialised: a producer warp copies 4 stages by TMA", "store by TMA"):
        assert what in remarks


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("b_t", [False, True], ids=["kn", "nk"])
def test_threads_copy_for_warpgroups(device, monkeypatch, b_t):
    """They put the panels of B where wgmma looks for them, without the hull's gaps."""
    monkeypatch.setenv("MINITRITON_TMA", "0")
    compiled = run_matmul(
        device, (128, 192, 400), (64, 96, 128), b_t=b_t, num_warps=4, num_stages=2
    )
    text = compiled.asm["ptx"]
    assert "n96k16" in text and "cp.async.cg" in text and "bulk" not in text


@triton.jit
def unmasked_kernel(
    a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + i[:, None] * K + (start + k)[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + j[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + i[:, None] * N + j[None, :], acc)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("n", [48, 96, 160, 176])
def test_boxes_end_with_the_tile(device, n):
    """Beyond the last column of the last row there is no memory."""
    a, b = torch.randn(64, 256, device=device).half(), torch.randn(256, n, device=device).half()
    c = torch.empty(64, n, device=device)
    compiled = unmasked_kernel[(1,)](a, b, c, 256, 64, n, 64, num_warps=4, num_stages=2)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-3)
    assert f"n{n}k16" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, tokens, stride_m, stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IN_LOOP: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(1) * stride_h
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    q_at = start + offs_m[:, None] * stride_m + offs_d[None, :]
    inside = (offs_m < tokens)[:, None]
    if not IN_LOOP:
        q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    k_ptrs = k_ptr + start + offs_n[None, :] * stride_m + offs_d[:, None]
    v_ptrs = v_ptr + start + offs_n[:, None] * stride_m + offs_d[None, :]
    m_i = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for n in range(0, tokens, BLOCK_N):
        here = n + offs_n < tokens
        if IN_LOOP:  # a tile that stays in shared memory
            q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
        k = tl.load(k_ptrs, mask=here[None, :], other=0.0)
        scores = tl.where(here[None, :], tl.dot(q, k), -1.0e30)
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_ptrs, mask=here[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
        k_ptrs += BLOCK_N * stride_m
        v_ptrs += BLOCK_N * stride_m
    tl.store(o_ptr + q_at, (acc / l_i[:, None]).to(o_ptr.dtype.element_ty), mask=inside)


def run_attention(device, tokens, heads, dim, blocks, in_loop=False, **options):
    q, k, v = (torch.randn(tokens, heads, dim, device=device).bfloat16() for _ in range(3))
    o = torch.full_like(q, float("nan"))
    scale = dim**-0.5 * 1.4426950408889634
    compiled = attention_kernel[(triton.cdiv(tokens, blocks[0]), heads)](
        q, k, v, o, scale, tokens, *q.stride()[:2], dim, *blocks, in_loop, **options
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.float().transpose(0, 1) for x in (q, k, v))
    ).transpose(0, 1)
    assert ((o.float() - expected).norm() / expected.norm()).item() < 5e-3
    return compiled


@pytest.mark.parametrize(
    ("blocks", "dim"), [((64, 96), 64), ((64, 48), 96), ((32, 80), 32)], ids=str
)
def test_attention(device, blocks, dim):
    run_attention(device, 3 * blocks[1] - 20, 2, dim, blocks, num_warps=4, num_stages=2)


@pytest.mark.parametrize("block_n", [160, 176])
def test_attention_by_warpgroups(device, hopper, block_n):
    """64 columns per head keep few registers; scores are 64 x 160 and 64 x 176."""
    compiled = run_attention(device, 400, 1, 64, (64, block_n), num_warps=4, num_stages=2)
    text = compiled.asm["ptx"]
    assert f"m64n{block_n}k16" in text and text.count("wgmma.mma_async") >= 4 + block_n // 16
    assert "mma.sync" not in text


@pytest.mark.parametrize("block_n", [160, 176])
def test_wide_attention_by_warpgroups(device, hopper, block_n):
    """Two warpgroups, 128 columns per head: queries come from shared memory."""
    compiled = run_attention(
        device, 400, 1, 128, (128, block_n), in_loop=True, num_warps=8, num_stages=2
    )
    assert f"m64n{block_n}k16" in compiled.asm["ptx"]


@triton.jit
def descriptor_kernel(
    x_ptr, y_ptr, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BLOCK_M, BLOCK_N])
    y = tl.make_tensor_descriptor(y_ptr, [m, n], [n, 1], [BLOCK_M, BLOCK_N])
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    y.store(at, x.load(at) + 1)


@triton.jit
def described_kernel(x, y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    y.store(at, x.load(at) * 2)


def test_descriptors_of_the_host(device):
    x = torch.randn(100, 144, device=device)
    y = torch.empty_like(x)
    of = TensorDescriptor.from_tensor
    described_kernel[3, 2](of(x, [48, 96]), of(y, [48, 96]), 48, 96)
    assert torch.equal(y, x * 2)


@pytest.mark.parametrize("blocks", [(16, 48), (80, 64)], ids=str)
def test_descriptors(device, blocks):
    m, n = 100, 144
    x = torch.randn(m, n, device=device)
    y = torch.empty_like(x)
    descriptor_kernel[triton.cdiv(m, blocks[0]), triton.cdiv(n, blocks[1])](x, y, m, n, *blocks)
    assert torch.equal(y, x + 1)
