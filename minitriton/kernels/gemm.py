"""Matrix product with a fused epilogue: the one GEMM behind `linear` and its gradients.

    C[M, N] = epilogue(A[M, K] B[K, N])        A, B: any strides

Tensor cores, fp32 accumulation; fp32 operands as three tf32 products (error near fp32's) or, where
asked for, as one. Where M x N gives too few tiles for the SMs, K is cut into slices whose fp32
partial sums a second kernel adds in a fixed order: no atomics, equal inputs give equal bits.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.devices import has_warpgroups, processors
from minitriton.language.extra import libdevice

WIDEST = (128, 256)  # tile of wgmma: accumulators of 128 registers per thread
FEW_ROWS = 64  # up to here, a product takes as long as B takes to read
SPLIT_K = 512  # no slice of K is shorter
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
def _epilogue(
    acc, c_ptr, bias_ptr, extra_ptr, pre_ptr, at, columns, mask, N, EPILOGUE: tl.constexpr
):  # fmt: skip
    """Writes a tile of sums to c_ptr + at, and so on: offsets into contiguous [M, N] matrices."""
    FAST: tl.constexpr = c_ptr.dtype.element_ty == tl.bfloat16
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "gelu":
        if pre_ptr is not None:
            tl.store(pre_ptr + at, acc.to(pre_ptr.dtype.element_ty), mask=mask)
            acc = acc.to(pre_ptr.dtype.element_ty).to(tl.float32)  # what the backward pass reads
        acc *= _normal(acc, FAST)
    if EPILOGUE == "gelu_backward":
        x = tl.load(pre_ptr + at, mask=mask, other=0.0).to(tl.float32)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        acc *= _normal(x, FAST) + x * density
    if extra_ptr is not None:
        acc += tl.load(extra_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(c_ptr + at, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gemm_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, extra_ptr, pre_ptr, M, N, K, K_SLICE,
    stride_am, stride_ak, stride_bk, stride_bn, split_stride,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
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
        c_ptr += tl.program_id(1).to(tl.int64) * split_stride
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + k.to(tl.int64)[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(0, tl.cdiv(min(depth, K_SLICE) if SPLIT else depth, BLOCK_K)):
        left = depth - i * BLOCK_K
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < left) & (columns[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    at = tl.arange(0, BLOCK_M)[:, None] * N + columns[None, :]  # 32 bits do within a tile
    start = pid_m.to(tl.int64) * BLOCK_M * N
    c_ptr += start
    if extra_ptr is not None:
        extra_ptr += start
    if pre_ptr is not None:
        pre_ptr += start
    _epilogue(acc, c_ptr, bias_ptr, extra_ptr, pre_ptr, at, columns, mask, N, EPILOGUE)


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
    tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    acc = sum_parts(partial_ptr, n, splits, at, mask, DEPTH)
    column = (at % N).to(tl.int32)
    _epilogue(
        acc[None, :], c_ptr, bias_ptr, extra_ptr, pre_ptr, at[None, :], column,
        mask[None, :], N, EPILOGUE,
    )  # fmt: skip


def _plan(
    m: int, n: int, k: int, wide: bool, processors: int, *, gelu: bool = False, odd: bool = False,
    warpgroups: bool = False,
) -> tuple[dict[str, int], int]:  # fmt: skip
    """(launch configuration, slices of K): the largest tile that keeps the SMs busy.

    wide: fp32 operands; gelu: an epilogue that needs registers and time, and so a second CTA on the
    SM that multiplies meanwhile; odd: operands are read element by element; warpgroups: products
    run on wgmma, which a CTA alone on its SM can keep busy with a tile of 128 x 256.
    """
    if m <= FEW_ROWS and not (wide or odd):
        return _plan_few_rows(m, n, k, processors)
    config = {"GROUP_M": 8, "BLOCK_K": 32 if wide or odd else 64, "num_stages": 3}
    if warpgroups and not (wide or gelu or odd) and _fills_widest(m, n, processors):
        return config | {"BLOCK_M": WIDEST[0], "BLOCK_N": WIDEST[1], "num_warps": 8}, 1
    blocks = [(64, 64)] if wide else [(128, 128), (128, 64), (64, 64)]
    for block in blocks[1:] if gelu and not wide else blocks:
        tiles = triton.cdiv(m, block[0]) * triton.cdiv(n, block[1])
        splits = 1 if tiles > processors else max(1, min(2 * processors // tiles, k // SPLIT_K))
        if tiles * splits > 2 * processors // 3:
            break
    config |= {"BLOCK_M": block[0], "BLOCK_N": block[1]}
    config["num_warps"] = 8 if wide or block[0] == 128 else 4
    if gelu and block == (128, 64):
        config["maxnreg"] = 128
    return config, splits


def _plan_few_rows(m: int, n: int, k: int, processors: int) -> tuple[dict[str, int], int]:
    """`_plan` where reading B is all that counts: deep tiles in four stages, twice as deep where
    each has an SM to itself; no slices of K if tiles of 32 columns are enough for most SMs."""
    enough = 2 * processors // 3
    width = 64 if triton.cdiv(n, 64) > enough else 32
    tiles = triton.cdiv(n, width)
    splits = 1 if tiles > enough else min(triton.cdiv(processors, tiles), k // SPLIT_K)
    deep = m <= 16 and tiles <= processors
    depth = min(256 if deep else 128, max(64, triton.next_power_of_2(k)))
    height = max(16, triton.next_power_of_2(m))
    blocks = {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": depth, "GROUP_M": 8}
    return blocks | {"num_warps": 4, "num_stages": 4}, max(1, splits)


def _fills_widest(m: int, n: int, processors: int) -> bool:
    """Whether tiles of WIDEST give most SMs one, and waste less than an eighth of their columns."""
    rows, columns = triton.cdiv(m, WIDEST[0]), triton.cdiv(n, WIDEST[1])
    return rows * columns > 2 * processors // 3 and 8 * columns * WIDEST[1] < 9 * n


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

    a: [M, K], b: [K, N], one dtype (fp32, bf16 or fp16), any strides; out: [M, N] contiguous in any
    of these dtypes; bias: [N]; extra and pre: [M, N] contiguous. epilogue: "none"; "gelu" (exact,
    and pre, if given, gets what GELU is applied to, so that the backward pass can use it);
    "gelu_backward" (the product times GELU'(pre)). precision says how fp32 is multiplied: "tf32",
    "tf32x3" or "ieee". For callers inside the library: arguments are not checked.
    """
    (m, k), n = a.shape, b.shape[1]
    if m * n == 0:
        return out
    config, splits = _plan(
        m, n, k, a.dtype == torch.float32, processors(a.device), gelu=epilogue != "none",
        odd=any(stride != 1 and stride % 16 for stride in (*a.stride(), *b.stride())),
        warpgroups=has_warpgroups(a.device) and extra is None,  # which takes registers, too
    )  # fmt: skip
    slice_ = triton.cdiv(triton.cdiv(max(k, 1), splits), config["BLOCK_K"]) * config["BLOCK_K"]
    splits = max(1, triton.cdiv(k, slice_))
    grid = (triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"]), splits)
    strides = (*a.stride(), *b.stride())
    if splits == 1:
        _gemm_kernel[grid](
            a, b, out, bias, extra, pre, m, n, k, slice_, *strides, 0, EPILOGUE=epilogue,
            PRECISION=precision, SPLIT=False, **config,
        )  # fmt: skip
        return out
    partial = torch.empty(splits, m, n, dtype=torch.float32, device=a.device)
    _gemm_kernel[grid](
        a, b, partial, None, None, None, m, n, k, slice_, *strides, m * n, EPILOGUE="none",
        PRECISION=precision, SPLIT=True, **config,
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
        DEPTH=depth, BLOCK=block, launch_pdl=True,
    )  # fmt: skip
    return out
