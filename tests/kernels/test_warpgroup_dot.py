"""tl.dot on whole warpgroups (wgmma, sm_90a): shapes, orders, dtypes, stages, chains, epilogues."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@pytest.fixture(autouse=True)
def hopper(device, monkeypatch):
    """CPU tensors run what a Hopper GPU would."""
    monkeypatch.setenv("MINITRITON_TARGET", "sm_90a")


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
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("a_t", [False, True])
@pytest.mark.parametrize("b_t", [False, True])
def test_operand_orders_and_stages(device, stages, dtype, a_t, b_t):
    error, compiled = run_matmul(
        device, (80, 48, 176), (64, 32, 32), dtype, a_t, b_t, num_warps=4, num_stages=stages
    )
    assert error < 1e-6 and (instructions(compiled) > 0) == (stages > 1)


@pytest.mark.parametrize("k", [0, 16, 32, 64])
def test_short_loops(device, k):
    error, _ = run_matmul(device, (64, 32, k), (64, 32, 32), torch.float16, num_warps=4)
    assert error < 1e-6


def test_rows_that_allow_only_narrow_copies(device):
    error, compiled = run_matmul(
        device, (64, 34, 66), (64, 32, 32), torch.float16, b_t=True, num_warps=4
    )
    assert error < 1e-6 and "mma" in compiled.asm["ptx"]


def test_the_switch(device, monkeypatch):
    monkeypatch.setenv("MINITRITON_WGMMA", "0")
    error, compiled = run_matmul(device, (64, 32, 80), (64, 32, 16), torch.float16, num_warps=4)
    assert error < 1e-6 and instructions(compiled) == 0
