"""Attention as other models write it: windows, soft caps, biases, sigmoids (wgmma, sm_90a).

Loops that begin and end where a program says, and may not run at all, with products in flight.
"""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from tests.kernels.test_warp_split import once

pytestmark = pytest.mark.usefixtures("hopper")
HD = 64


@triton.jit
def variant_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, S, scale, first, window, cap,
    KIND: tl.constexpr, FORM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One head, [S, D]. window: a query sees so many keys up to its own, none before `first`;
    bias: [S, S] added to the scores; sigmoid: of the scores instead of softmax."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn, rd = tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(q_ptr + rm[:, None] * D + rd[None, :])
    peak = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    begin, end = 0, S
    if KIND == "window":
        begin = tl.maximum(first, (tl.program_id(0) * BM - window) // BN * BN)
        end = (tl.program_id(0) + 1) * BM
    for start in range(begin, end, BN):
        at = start + rn
        k = tl.load(k_ptr + at[None, :] * D + rd[:, None])
        s = tl.dot(q, k) * scale
        if KIND == "window":
            s = cap * (2 * tl.sigmoid(2 * s / cap) - 1)
            seen = (rm[:, None] >= at[None, :]) & (rm[:, None] - at[None, :] < window)
            s = tl.where(seen, s, -1e30)
        else:
            s += tl.load(bias_ptr + rm[:, None] * S + at[None, :])
        v = tl.load(v_ptr + at[:, None] * D + rd[None, :])
        if KIND == "sigmoid":
            acc += tl.dot(tl.sigmoid(s).to(v.dtype), v)
        else:
            higher = tl.maximum(peak, tl.max(s, 1))
            p, less = tl.exp(s - higher[:, None]), tl.exp(peak - higher)
            total = total * less + tl.sum(p, 1)
            if FORM == "operand":
                acc = tl.dot(p.to(v.dtype), v, acc * less[:, None])
            elif FORM == "assigned":
                acc = acc * less[:, None] + tl.dot(p.to(v.dtype), v)
            else:
                acc = acc * less[:, None]
                acc += tl.dot(p.to(v.dtype), v)
            peak = higher
    if KIND != "sigmoid":
        acc = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + rm[:, None] * D + rd[None, :], acc.to(out_ptr.dtype.element_ty))


def run(device, kind, form, size, blocks, warps, first=0, window=100, cap=8.0):
    q, k, v = (torch.randn(size, HD, device=device, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(size, size, device=device)
    out = torch.full_like(q, float("nan"))
    bm, bn = blocks
    compiled = variant_kernel[(size // bm,)](
        q, k, v, bias, out, size, 0.3, first, window, cap,
        KIND=kind, FORM=form, D=HD, BM=bm, BN=bn, num_warps=warps, num_stages=2,
    )  # fmt: skip
    s = q.double() @ k.double().T * 0.3
    i = torch.arange(size, device=device)
    if kind == "window":
        key = i[None, :]
        seen = (i[:, None] >= key) & (i[:, None] - key < window) & (key >= first)
        s = torch.where(seen, cap * torch.tanh(s / cap), float("-inf"))
    else:
        s += bias.double()
    p = s.sigmoid() if kind == "sigmoid" else torch.softmax(s, 1).nan_to_num(0)
    expected = p @ v.double()
    assert (out.double() - expected).abs().max() < 1e-2 * expected.abs().max()
    assert "wgmma.mma_async" in compiled.ptx
    return compiled


BLOCKS = [((128, 64), 8), ((64, 64), 4)]


@pytest.mark.parametrize("form", ["operand", "assigned", "added"])
@pytest.mark.parametrize(("blocks", "warps"), BLOCKS, ids=str)
def test_windows(device, form, blocks, warps):
    """Programs whose keys begin at 0, later, and, for `first` past its end, that have none."""
    run(device, "window", form, 256, blocks, warps)
    run(device, "window", form, 256, blocks, warps, first=128)


@once
@pytest.mark.parametrize("kind", ["bias", "sigmoid"])
@pytest.mark.parametrize(("blocks", "warps"), BLOCKS, ids=str)
def test_scores_with_a_bias(device, at_random, kind, blocks, warps):
    run(device, kind, "added", 256, blocks, warps)
