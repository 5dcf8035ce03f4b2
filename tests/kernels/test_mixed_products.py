"""tl.dot of activations and weights in fewer bits, which threads turn into bf16 (wgmma, sm_90a).

wgmma takes only its left operand from registers, so these dots are made of their transposes, from
64 rows of activations on.
"""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from tests.kernels.test_warp_split import once

pytestmark = pytest.mark.usefixtures("hopper")


@triton.jit
def weights_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x times weights of a type that converts to that of x; a scale for each column."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    x_ptrs = x_ptr + rm[:, None] * stride_xm + rk[None, :] * stride_xk
    w_ptrs = w_ptr + rk[:, None] * stride_wk + rn[None, :] * stride_wn
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        left = K - k * BK
        x = tl.load(x_ptrs, mask=(rm[:, None] < M) & (rk[None, :] < left), other=0.0)
        w = tl.load(w_ptrs, mask=(rk[:, None] < left) & (rn[None, :] < N), other=0.0)
        acc += tl.dot(x, w.to(x.dtype))
        x_ptrs += BK * stride_xk
        w_ptrs += BK * stride_wk
    acc *= tl.load(scale_ptr + rn, mask=rn < N, other=0.0)[None, :]
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(out_ptr + rm[:, None] * N + rn[None, :], acc.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def groups_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, out_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x times weights of four bits, eight of the depth in an int32; scale and zero for a group."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + rm[:, None] * K + (k + rk)[None, :], mask=rm[:, None] < M, other=0.0)
        words = tl.load(w_ptr + ((k + rk) // 8)[:, None] * N + rn[None, :])
        scale = tl.load(scale_ptr + k // GROUP * N + rn)
        zero = tl.load(zero_ptr + k // GROUP * N + rn)
        w = ((words >> ((rk % 8) * 4)[:, None]) & 15) - zero[None, :]
        acc += tl.dot(x, w.to(x.dtype) * scale[None, :])
    inside = rm[:, None] < M
    tl.store(out_ptr + rm[:, None] * N + rn[None, :], acc.to(x_ptr.dtype.element_ty), mask=inside)


def check(out, x, w, compiled, rows):
    expected = x.double() @ w
    assert (out.double() - expected).abs().max() < 8e-3 * expected.abs().max()
    for text, where in (
        ("wgmma.mma_async", compiled.ptx),
        ("dot turned", compiled.metadata["remarks"]),
    ):
        assert (text in where) == (rows >= 64)


def stored(x, turned):
    return x.T.contiguous().T if turned else x


@pytest.mark.parametrize("weights", [torch.int8, torch.float8_e4m3fn, torch.float16], ids=str)
@pytest.mark.parametrize("orders", ["xw", "xW", "Xw"])
@pytest.mark.parametrize(
    ("shape", "blocks", "warps"),
    [((80, 144, 208), (64, 64, 64), 4), ((16, 128, 128), (16, 128, 64), 8)],
    ids=str,
)
def test_weights_of_other_types(device, weights, orders, shape, blocks, warps):
    m, n, k = shape
    x = stored(torch.randn(m, k, device=device, dtype=torch.bfloat16), orders[0] == "X")
    w = stored((torch.randn(k, n, device=device) * 20).to(weights), orders[1] == "W")
    scale, out = torch.rand(n, device=device), torch.empty_like(x[:, :1].expand(m, n))
    grid = (triton.cdiv(m, blocks[0]), triton.cdiv(n, blocks[1]))
    names = dict(zip(("BM", "BN", "BK"), blocks, strict=True))
    compiled = weights_kernel[grid](
        x, w, scale, out, m, n, k, *x.stride(), *w.stride(), **names, num_warps=warps, num_stages=3
    )
    w_used = w.float().bfloat16().double()
    check(out, x, w_used * scale.double(), compiled, blocks[0])


@once
@pytest.mark.parametrize(
    ("m", "blocks", "warps"), [(80, (64, 64, 64), 4), (130, (128, 128, 32), 8)], ids=str
)
def test_four_bits_in_groups(device, at_random, m, blocks, warps):
    n, k, group = 128, 256, 128
    x = torch.randn(m, k, device=device, dtype=torch.float16)
    w = torch.randint(0, 16, (k, n), device=device)
    zero = torch.randint(0, 16, (k // group, n), device=device, dtype=torch.int32)
    scale = torch.rand(k // group, n, device=device).half()
    places = torch.arange(0, 32, 4, device=device)[None, :, None]
    words = (w.view(k // 8, 8, n) << places).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    out = torch.empty(m, n, device=device, dtype=torch.float16)
    grid = (triton.cdiv(m, blocks[0]), triton.cdiv(n, blocks[1]))
    names = dict(zip(("BM", "BN", "BK"), blocks, strict=True))
    compiled = groups_kernel[grid](
        x, words, scale, zero, out, m, n, k, **names, GROUP=group, num_warps=warps, num_stages=3
    )
    each = [t.repeat_interleave(group, 0) for t in (zero, scale)]
    check(out, x, ((w - each[0]).half() * each[1]).double(), compiled, blocks[0])
