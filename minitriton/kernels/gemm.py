"""Matrix product with a fused epilogue: the one GEMM behind `linear` and its gradients.

    C[M, N] = epilogue(A[M, K] B[K, N])        A, B: any strides

Tensor cores, fp32 accumulation; fp32 operands as three tf32 products (error near fp32's) or, where
asked for, as one (`gemm_operands.py` makes copies that wgmma can read). Where M x N gives too few
tiles for the SMs, K is cut into slices whose fp32 partial sums a second kernel adds in a fixed
order: no atomics, equal inputs give equal bits.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.devices import has_warpgroups, processors
from minitriton.kernels.gemm_operands import for_wgmma
from minitriton.kernels.gemm_plan import plan
from minitriton.language.extra import libdevice

DEEP_SUM, FLAT_SUM = (128, 16), (1, 1024)  # partial sums and elements that a program holds


@triton.jit
def _normal(x, FAST: tl.constexpr):
    """Distribution function of the normal distribution at x.

    FAST: as a tanh of an odd polynomial, fitted to within 2e-5, in one instruction with an error of
    2^-11: 2.5e-4 in all, well below what bf16 rounds.
    """
    if FAST:
        square = tl.minimum(x * x, 30.0)  # beyond, the polynomial would turn back
        slope = (square * -3.15807047e-4 + 3.67982560e-2) * square + 0.797717834
        return 0.5 * libdevice.fast_tanhf(x * slope) + 0.5
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _own(acc, bias_ptr, pre_ptr, at, columns, mask, N, EPILOGUE: tl.constexpr, FAST: tl.constexpr):
    """The part of an epilogue that reads no matrix: bias and GELU, of a tile of sums at `at`."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "gelu":
        if pre_ptr is not None:
            tl.store(pre_ptr + at, acc.to(pre_ptr.dtype.element_ty), mask=mask)
            acc = acc.to(pre_ptr.dtype.element_ty).to(tl.float32)  # what the backward pass reads
        acc *= _normal(acc, FAST)
    return acc


@triton.jit
def _beside(acc, extra_ptr, pre_ptr, at, mask, EPILOGUE: tl.constexpr, FAST: tl.constexpr):
    """The rest: the derivative of GELU at a matrix, and a matrix to add."""
    if EPILOGUE == "gelu_backward":
        x = tl.load(pre_ptr + at, mask=mask, other=0.0).to(tl.float32)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        acc *= _normal(x, FAST) + x * density
    if extra_ptr is not None:
        acc += tl.load(extra_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _gemm_kernel(
    a_ptr, b_ptr, a_low_ptr, b_low_ptr, c_ptr, bias_ptr, extra_ptr, pre_ptr, M, N, K, K_SLICE,
    stride_am, stride_ak, stride_bk, stride_bn, split_stride,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """With a_low and b_low these and a and b are the low and high parts of fp32, as tf32."""
    pid = tl.program_id(0)
    pid_m, pid_n = tl.swizzle2d(
        pid // tl.cdiv(N, BLOCK_N), pid % tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M),
        tl.cdiv(N, BLOCK_N), GROUP_M,
    )  # fmt: skip
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    depth = K
    if SPLIT:  # K_SLICE is a multiple of BLOCK_K
        k_first = tl.program_id(1) * K_SLICE
        depth -= k_first
        a_ptr += k_first.to(tl.int64) * stride_ak
        b_ptr += k_first.to(tl.int64) * stride_bk
        if a_low_ptr is not None:
            a_low_ptr += k_first.to(tl.int64) * stride_ak
            b_low_ptr += k_first.to(tl.int64) * stride_bk
        c_ptr += tl.program_id(1).to(tl.int64) * split_stride
    a_at = rows.to(tl.int64)[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ak
    b_at = k.to(tl.int64)[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # all slices alike, though the last may be shorter: a CTA can run several of them
    for i in range(0, tl.cdiv(K_SLICE if SPLIT else K, BLOCK_K)):
        left = depth - i * BLOCK_K
        a_mask = (rows[:, None] < M) & (k[None, :] < left)
        b_mask = (k[:, None] < left) & (columns[None, :] < N)
        a = tl.load(a_ptr + a_at, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + b_at, mask=b_mask, other=0.0)
        if a_low_ptr is None:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        else:  # tensor cores truncate: all of a step is summed apart, small products by themselves
            low = tl.dot(tl.load(a_low_ptr + a_at, mask=a_mask, other=0.0), b)
            low = tl.dot(a, tl.load(b_low_ptr + b_at, mask=b_mask, other=0.0), low)
            acc += tl.dot(a, b) + tl.where(low == low, low, 0.0)  # infinities make it NaN
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    at = tl.arange(0, BLOCK_M)[:, None] * N + columns[None, :]  # 32 bits do within a tile
    start = pid_m.to(tl.int64) * BLOCK_M * N
    c_ptr += start
    if extra_ptr is not None:
        extra_ptr += start
    if pre_ptr is not None:
        pre_ptr += start
    FAST: tl.constexpr = c_ptr.dtype.element_ty == tl.bfloat16
    acc = _own(acc, bias_ptr, pre_ptr, at, columns, mask, N, EPILOGUE, FAST)
    READS: tl.constexpr = EPILOGUE == "gelu_backward" or extra_ptr is not None
    if READS and BLOCK_N >= 128:  # half by half, which takes fewer registers
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        left = _half(left, extra_ptr, pre_ptr, rows, pid_n * BLOCK_N, M, N, EPILOGUE, FAST)
        middle = pid_n * BLOCK_N + BLOCK_N // 2
        right = _half(right, extra_ptr, pre_ptr, rows, middle, M, N, EPILOGUE, FAST)
        acc = tl.join(left, right).permute(0, 2, 1).reshape(BLOCK_M, BLOCK_N)
    elif READS:
        acc = _beside(acc, extra_ptr, pre_ptr, at, mask, EPILOGUE, FAST)
    tl.store(c_ptr + at, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _half(
    acc, extra_ptr, pre_ptr, rows, column, M, N, EPILOGUE: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """`_beside` of the columns of a tile from `column` on."""
    columns = column + tl.arange(0, acc.shape[1])
    at = tl.arange(0, acc.shape[0])[:, None] * N + columns[None, :]
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    return _beside(acc, extra_ptr, pre_ptr, at, mask, EPILOGUE, FAST)


@triton.jit
def sum_parts(part_ptr, stride, parts, at, mask, DEPTH: tl.constexpr):
    """Sums of `parts` fp32 rows `stride` elements apart, at the elements `at`, in a fixed order."""
    acc = tl.zeros([DEPTH, at.shape[0]], tl.float32)
    for first in tl.range(0, parts, DEPTH, num_stages=3):
        part = first + tl.arange(0, DEPTH)[:, None]
        source = part_ptr + part.to(tl.int64) * stride + at[None, :]
        acc += tl.load(source, mask=(part < parts) & mask[None, :], other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def _sum_kernel(
    partial_ptr, c_ptr, bias_ptr, extra_ptr, pre_ptr, n, N, splits,
    EPILOGUE: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    acc = sum_parts(partial_ptr, n, splits, at, mask, DEPTH)
    acc, to, mask = acc[None, :], at[None, :], mask[None, :]
    FAST: tl.constexpr = c_ptr.dtype.element_ty == tl.bfloat16
    acc = _own(acc, bias_ptr, pre_ptr, to, (at % N).to(tl.int32), mask, N, EPILOGUE, FAST)
    acc = _beside(acc, extra_ptr, pre_ptr, to, mask, EPILOGUE, FAST)
    tl.store(c_ptr + to, acc.to(c_ptr.dtype.element_ty), mask=mask)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    extra: torch.Tensor | None = None,
    pre: torch.Tensor | None = None,
    epilogue: str = "none",
    precision: str = "tf32x3",
) -> torch.Tensor:
    """out = epilogue(a @ b + bias) + extra, in place; returns out.

    a: [M, K], b: [K, N], one dtype (fp32, bf16 or fp16), any strides; out: [..., N], M rows,
    contiguous, in any of these dtypes; bias: [N]; extra and pre: as out. epilogue: "none"; "gelu"
    (exact, and pre, if given, gets what GELU is applied to, so that the backward pass can use it);
    "gelu_backward" (the product times GELU'(pre)). precision says how fp32 is multiplied: "tf32",
    "tf32x3" or "ieee". For callers inside the library: arguments are not checked.
    """
    (m, k), n = a.shape, b.shape[1]
    if m * n == 0:
        return out
    wgmma, a_low, b_low = has_warpgroups(a.device), None, None
    if a.dtype == torch.float32 and wgmma:
        wgmma, a, b, a_low, b_low = for_wgmma(a, b, precision)
        k = a.shape[1]
    strides = (*a.stride(), *b.stride())
    if a_low is not None:
        kind, precision = "thrice", "tf32"
    else:
        kind = "reads" if extra is not None or epilogue == "gelu_backward" else epilogue
    chosen = plan(m, n, k, strides, a.dtype, out.dtype, processors(a.device), kind, wgmma)
    config, slices = chosen.config, chosen.slices
    tiles = triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"])
    if slices == 1:
        _gemm_kernel[(tiles,)](
            a, b, a_low, b_low, out, bias, extra, pre, m, n, k, k, *strides, 0, EPILOGUE=epilogue,
            PRECISION=precision, SPLIT=False, **config,
        )  # fmt: skip
        return out
    partial = torch.empty(slices, m, n, dtype=torch.float32, device=a.device)
    _gemm_kernel[(tiles, slices)](
        a, b, a_low, b_low, partial, None, None, None, m, n, k, chosen.depth, *strides, m * n,
        EPILOGUE="none", PRECISION=precision, SPLIT=True, **config,
    )  # fmt: skip
    return sum_partials(partial, out, bias=bias, extra=extra, pre=pre, epilogue=epilogue)


def sum_partials(
    partial: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    extra: torch.Tensor | None = None,
    pre: torch.Tensor | None = None,
    epilogue: str = "none",
) -> torch.Tensor:
    """out = epilogue(sum of partial [S, ...] over S), in a fixed order; the rest as `gemm`."""
    size, splits = out.numel(), partial.shape[0]
    depth, block = DEEP_SUM if splits > 32 else FLAT_SUM
    _sum_kernel[(triton.cdiv(size, block),)](
        partial, out, bias, extra, pre, size, out.shape[-1], splits, EPILOGUE=epilogue,
        DEPTH=depth, BLOCK=block,
    )  # fmt: skip
    return out
