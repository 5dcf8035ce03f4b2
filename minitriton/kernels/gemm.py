"""Matrix product with a fused epilogue: the one GEMM behind `linear` and its gradients.

    C[M, N] = epilogue(A[M, K] B[K, N])        A, B: any strides

Tensor cores, fp32 accumulation; fp32 operands as three tf32 products (error near fp32's) or, where
asked for, as one. Where M x N gives too few tiles for the SMs, K is cut into slices whose fp32
partial sums a second kernel adds in a fixed order: no atomics, equal inputs give equal bits.
"""

from __future__ import annotations

import functools

import torch

import minitriton as triton
import minitriton.language as tl

SPLIT_K = 512  # no slice of K is shorter
DEEP_SUM, FLAT_SUM = (128, 16), (1, 1024)  # partial sums and elements that a program holds


@triton.jit
def _gelu(x):
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_slope(x):
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density


@triton.jit
def _epilogue(acc, bias_ptr, extra_ptr, pre_ptr, at, columns, mask, N, EPILOGUE: tl.constexpr):
    """What is written for a tile of sums; `at` are offsets into contiguous [M, N] matrices."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "gelu":
        if pre_ptr is not None:
            tl.store(pre_ptr + at, acc.to(pre_ptr.dtype.element_ty), mask=mask)
            acc = acc.to(pre_ptr.dtype.element_ty).to(tl.float32)  # what the backward pass reads
        acc = _gelu(acc)
    if EPILOGUE == "gelu_backward":
        acc *= _gelu_slope(tl.load(pre_ptr + at, mask=mask, other=0.0).to(tl.float32))
    if extra_ptr is not None:
        acc += tl.load(extra_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _gemm_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, extra_ptr, pre_ptr, M, N, K, K_SLICE,
    stride_am, stride_ak, stride_bk, stride_bn, split_stride,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    pid, split = tl.program_id(0), tl.program_id(1)
    pid_m, pid_n = tl.swizzle2d(
        pid // tl.cdiv(N, BLOCK_N), pid % tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M),
        tl.cdiv(N, BLOCK_N), GROUP_M,
    )  # fmt: skip
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    k_first = split * K_SLICE
    depth = min(K - k_first, K_SLICE)
    a_ptr += k_first.to(tl.int64) * stride_ak
    b_ptr += k_first.to(tl.int64) * stride_bk
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + k.to(tl.int64)[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(0, tl.cdiv(depth, BLOCK_K)):
        left = depth - i * BLOCK_K
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < left) & (columns[None, :] < N), other=0.0)
        if EXACT:  # tensor cores truncate long sums: they get short ones
            acc += tl.dot(a, b, input_precision=PRECISION)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    acc = _epilogue(acc, bias_ptr, extra_ptr, pre_ptr, at, columns, mask, N, EPILOGUE)
    c_ptr += split.to(tl.int64) * split_stride
    tl.store(c_ptr + at, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(
    partial_ptr, c_ptr, bias_ptr, extra_ptr, pre_ptr, n, N, splits,
    EPILOGUE: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    acc = tl.zeros([DEPTH, BLOCK], tl.float32)
    for first in range(0, splits, DEPTH):
        s = first + tl.arange(0, DEPTH)[:, None]
        source = partial_ptr + s.to(tl.int64) * n + at[None, :]
        acc += tl.load(source, mask=(s < splits) & mask[None, :], other=0.0)
    column = (at % N).to(tl.int32)
    acc = _epilogue(
        tl.sum(acc, 0)[None, :], bias_ptr, extra_ptr, pre_ptr, at[None, :], column,
        mask[None, :], N, EPILOGUE,
    )  # fmt: skip
    tl.store(c_ptr + at[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask[None, :])


@functools.cache
def _processors(device: torch.device) -> int:
    """SMs of the device; the emulator plans for the 132 of an H100 or H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def _plan(m: int, n: int, k: int, wide: bool, processors: int) -> tuple[dict[str, int], int]:
    """(launch configuration, slices of K): the largest tile that leaves no SM without one."""
    for block_m, block_n in ((128, 128), (128, 64), (64, 64)):
        tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
        if tiles >= processors and not (wide and block_n * block_m > 64 * 64):
            break
    splits = 1
    if tiles < processors:
        splits = max(1, min(2 * processors // tiles, k // SPLIT_K))
    stages = 3 if wide else 4
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 32, "GROUP_M": 8}
    return blocks | {"num_warps": 4, "num_stages": stages}, splits


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
    config, splits = _plan(m, n, k, a.dtype == torch.float32, _processors(a.device))
    slice_ = triton.cdiv(triton.cdiv(max(k, 1), splits), config["BLOCK_K"]) * config["BLOCK_K"]
    splits = max(1, triton.cdiv(k, slice_))
    grid = (triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"]), splits)
    strides = (*a.stride(), *b.stride())
    exact = a.dtype == torch.float32 and precision != "tf32"
    if splits == 1:
        _gemm_kernel[grid](
            a, b, out, bias, extra, pre, m, n, k, slice_, *strides, 0, EPILOGUE=epilogue,
            PRECISION=precision, EXACT=exact, **config,
        )  # fmt: skip
        return out
    partial = torch.empty(splits, m, n, dtype=torch.float32, device=a.device)
    _gemm_kernel[grid](
        a, b, partial, None, None, None, m, n, k, slice_, *strides, m * n, EPILOGUE="none",
        PRECISION=precision, EXACT=exact, **config,
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
