"""Weights of four bits, several in a word, unpacked by shifts of words that neighbours share.

As kernels of GPTQ and of quantised experts are written: a weight has the address of its word.
"""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from tests.kernels.test_warp_split import once


@triton.jit
def packed_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, out_ptr, M, N, K, stride_wk, stride_wn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PACK: tl.constexpr,
    GROUP: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """w: PACK weights along K in a word; scale: [K / GROUP, N]; zero: two along N in a byte."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    w_ptrs = w_ptr + (rk[:, None] // PACK) * stride_wk + rn[None, :] * stride_wn
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + rm[:, None] * K + (k + rk)[None, :], mask=rm[:, None] < M, other=0.0)
        if CARRIED:
            words = tl.load(w_ptrs)
            w_ptrs += BK // PACK * stride_wk
        else:
            at = (k + rk)[:, None] // PACK * stride_wk + rn[None, :] * stride_wn
            words = tl.load(w_ptr + at, mask=rn[None, :] < N, other=0)
        group = (k + rk)[:, None] // GROUP
        scale = tl.load(scale_ptr + group * N + rn[None, :])
        zero = tl.load(zero_ptr + group * (N // 2) + rn[None, :] // 2)
        zero = (zero >> (rn % 2 * 4)[None, :]) & 15
        w = (words >> ((rk % PACK) * 4)[:, None]) & 15
        w = w.to(tl.int32) - zero.to(tl.int32)
        acc += tl.dot(x, (w.to(tl.float32) * scale).to(x.dtype))
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(out_ptr + rm[:, None] * N + rn[None, :], acc.to(x_ptr.dtype.element_ty), mask=inside)


def packed(numbers, dtype):
    """[rows, columns] of four bits as words of so many along the rows, of the first lowest."""
    bits = torch.iinfo(dtype).bits
    rows, columns = numbers.shape
    places = torch.arange(0, bits, 4, device=numbers.device)[None, :, None]
    words = (numbers.view(rows * 4 // bits, bits // 4, columns) << places).sum(1)
    if dtype.is_signed:
        words = torch.where(words >= 2 ** (bits - 1), words - 2**bits, words)
    return words.to(dtype)


def run(device, word, shape, blocks, warps, group, *, along_k=False, carried=False):
    m, n, k = shape
    pack = torch.iinfo(word).bits // 4
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    w = torch.randint(0, 16, (k, n), device=device)
    zero = torch.randint(0, 16, (k // group, n), device=device)
    scale = torch.rand(k // group, n, device=device) + 0.1
    words = packed(w, word)
    words = words.T.contiguous().T if along_k else words
    zeros = packed(zero.T.contiguous(), torch.uint8).T.contiguous()
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    grid = (triton.cdiv(m, blocks[0]), triton.cdiv(n, blocks[1]))
    names = dict(zip(("BM", "BN", "BK"), blocks, strict=True))
    compiled = packed_kernel[grid](
        x, words, scale, zeros, out, m, n, k, *words.stride(), **names, PACK=pack, GROUP=group,
        CARRIED=carried, num_warps=warps, num_stages=3,
    )  # fmt: skip
    each = [t.repeat_interleave(group, 0) for t in (zero, scale)]
    used = ((w - each[0]).float() * each[1]).bfloat16().double()
    expected = x.double() @ used
    assert (out.double() - expected).abs().max() < 8e-3 * expected.abs().max()
    remarks = compiled.metadata["remarks"]
    rows = blocks[2] // pack
    assert f"load of {rows}x{blocks[1]} elements" in remarks  # words
    assert f"load of {max(1, blocks[2] // group)}x{blocks[1] // 2} elements" in remarks  # zeros
    return compiled


@once
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("along_k", [False, True])
@pytest.mark.parametrize("word", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_words_that_weights_share(hopper, device, word, along_k, carried):
    shape, blocks = (80, 64, 256), (64, 64, 64)
    compiled = run(device, word, shape, blocks, 4, 128, along_k=along_k, carried=carried)
    assert "wgmma.mma_async" in compiled.ptx
    assert "loads pipelined in 3 stages: 1 with TMA and" in compiled.metadata["remarks"]


@once
@pytest.mark.parametrize(
    ("shape", "blocks", "warps", "group"),
    [((16, 128, 128), (16, 64, 64), 4, 32), ((130, 128, 128), (128, 128, 32), 8, 32)],
    ids=str,
)
def test_groups_shorter_than_a_tile(at_random, device, shape, blocks, warps, group):
    run(device, torch.int32, shape, blocks, warps, group)
