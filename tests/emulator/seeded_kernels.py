"""Kernels that defects are seeded into: small shapes on which every stage of a pipeline is reused.

`SUBJECTS` names them; each builds its PTX and a function that runs any variant of it on fresh data.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton import execute
from minitriton.compiled import CompiledKernel
from minitriton.jit import Kernel
from minitriton.passes import warp_split
from tests.emulator import cluster_gemm, seeded_ptx
from tests.emulator.defects import Policy, Subject, Trial

BF16 = torch.bfloat16


def compiled_subject(
    kernel: Kernel,
    arguments: Callable[[int], tuple[Any, ...]],
    is_right: Callable[..., bool],
    grid: tuple[int, ...],
    *,
    target: str = "sm_90a",
    tma: bool = True,
    specialize: bool = False,
    ctas: int = 1,
    **options: Any,
) -> Subject:
    """``arguments`` of a seed are made with torch's generator; ``is_right`` judges the results.

    specialize: with a producer warp, however small the tiles; ctas: of a persistent kernel."""
    environment = {"MINITRITON_CHECK": "all"}
    compiling = {**environment, "MINITRITON_CACHE": "0"}  # what is patched is in no key
    least = dict.fromkeys(("ONE_DOT_PRODUCTS", "PRODUCTS"), 0 if specialize else 1 << 30)
    with mock.patch.multiple(warp_split, **least), mock.patch.dict(os.environ, compiling):
        compiled = kernel.warmup(*arguments(0), grid=grid, target=target, **options)
    compiled = compiled if tma else compiled.without_tma()

    def load(ptx: str) -> Trial:
        variant = CompiledKernel(
            compiled.source, compiled.spec, compiled.target, ptx, compiled.metadata, None
        )

        def trial(seed: int, policy: Policy) -> bool:
            torch.manual_seed(seed)
            values = arguments(seed)
            policies = {
                "MINITRITON_LANDING": policy.landing,
                "MINITRITON_SCHEDULE": policy.schedule,
                "MINITRITON_SEED": str(policy.seed),
            }
            with (
                mock.patch.object(execute, "EMULATED_CTAS", ctas),
                mock.patch.dict(os.environ, environment | policies),
            ):
                variant[grid](*values)
            return is_right(*values)

        return trial

    plain = re.sub(r"^\s*(\.loc|//).*\n|^\s*\n", "", compiled.ptx, flags=re.MULTILINE)
    return Subject(plain, load)


def steps_of(seed: int, least: int, specialize: bool) -> int:
    """Iterations of a loop: ``least`` or one more, so that the last stage is another one; of rings,
    that go on from program to program, also one alone."""
    return (1, least, least + 1)[seed % 3] if specialize else least + seed % 2


# -- a product: tiles taken in turn, so that the loop over K begins anew in used shared memory
@triton.jit
def _tile(a_ptr, b_ptr, c_ptr, tile, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One tile of C = A @ B as in Triton's tutorial."""
    columns = tl.cdiv(N, BN)
    rm, rn = tile // columns * BM + tl.arange(0, BM), tile % columns * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a_ptrs = a_ptr + ((rm % M)[:, None] * K + rk[None, :])
    b_ptrs = b_ptr + (rk[:, None] * N + (rn % N)[None, :])
    acc = tl.zeros((BM, BN), tl.int32 if a_ptr.dtype.element_ty.is_int() else tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=rk[None, :] < K - k * BK, other=0.0)
        b = tl.load(b_ptrs, mask=rk[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BK
        b_ptrs += BK * N
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(c_ptr + rm[:, None] * N + rn[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), tl.num_programs(0)):
        _tile(a_ptr, b_ptr, c_ptr, tile, M, N, K, BM, BN, BK)


@triton.jit
def program_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A program for each tile: several of them run in a CTA of a persistent kernel."""
    _tile(a_ptr, b_ptr, c_ptr, tl.program_id(0), M, N, K, BM, BN, BK)


def matmul_subject(
    shape: tuple[int, int, int], blocks: tuple[int, int, int], result: torch.dtype,
    specialize: bool = False, operands: torch.dtype = BF16, turned: bool = False, **options: Any,
) -> Subject:  # fmt: skip
    """One CTA takes all tiles; shape's K is the least. turned: odd seeds have as many tiles along M
    as others have along N."""
    *sizes, least = shape

    def matrix(*shape: int) -> torch.Tensor:
        if operands.is_floating_point:
            return torch.randn(shape).to(operands)
        return torch.randint(-128, 128, shape).to(operands)

    def arguments(seed: int) -> tuple[Any, ...]:
        k = steps_of(seed, least // blocks[2], specialize) * blocks[2]
        m, n = sizes
        if turned and seed % 2:
            m, n = n // blocks[1] * blocks[0], m // blocks[0] * blocks[1]
        nothing = float("nan") if result.is_floating_point else 7
        return (
            matrix(m, k),
            matrix(k, n),
            torch.full((m, n), nothing, dtype=result),
            m,
            n,
            k,
            *blocks,
        )

    def is_right(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *_: int) -> bool:
        scale = a.double().abs() @ b.double().abs()
        bound = 1e-6 if result.itemsize == 4 and operands.itemsize < 4 else 2**-8  # of bf16
        return bool(((c.double() - a.double() @ b.double()).abs() / scale).max() < bound)

    if specialize:
        grid = (triton.cdiv(sizes[0], blocks[0]) * triton.cdiv(sizes[1], blocks[1]),)
        return compiled_subject(
            program_kernel, arguments, is_right, grid, specialize=True, **options
        )
    return compiled_subject(matmul_kernel, arguments, is_right, (1,), **options)


# -- the same with a loop over tiles in the source, whose ends depend on each other
@triton.jit
def tiles_kernel(
    a_ptr, b_ptr, c_ptr, seen_ptr, tiles, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Two tiles each go to the same rows, where the second one stays; the order is written down."""
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    for tile in tl.range(0, tiles, flatten=True):
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = tl.load(a_ptr + (tile * BM + rm)[:, None] * K + (k + rk)[None, :])
            b = tl.load(b_ptr + (k + rk)[:, None] * BN + rn[None, :])
            acc = tl.dot(a, b, acc)
        at = c_ptr + (tile // 2 * BM + rm)[:, None] * BN + rn[None, :]
        tl.store(at, acc.to(c_ptr.dtype.element_ty))
        tl.store(seen_ptr, tl.load(seen_ptr) * 3 + tile)


def tiles_subject(least: int, blocks: tuple[int, int, int], **options: Any) -> Subject:
    """`least` tiles or one more, of 1 to 3 iterations."""
    bm, bn, bk = blocks

    def arguments(seed: int) -> tuple[Any, ...]:
        tiles, k = least + seed % 2, (1 + seed % 3) * bk
        c = torch.full((-(-tiles // 2) * bm, bn), float("nan")).to(BF16)
        a, b = torch.randn(tiles * bm, k).to(BF16), torch.randn(k, bn).to(BF16)
        return a, b, c, torch.ones(1, dtype=torch.int32), tiles, k, *blocks

    def is_right(*arguments: Any) -> bool:
        a, b, c, seen, tiles, *_ = arguments
        products = (a.double() @ b.double()).reshape(tiles, bm, bn)
        number = functools.reduce(lambda n, tile: n * 3 + tile, range(tiles), 1)
        kept = torch.cat([products[min(2 * n + 1, tiles - 1)] for n in range(-(-tiles // 2))])
        return bool((c.double() - kept).abs().max() < 0.2) and seen.item() == number

    return compiled_subject(tiles_kernel, arguments, is_right, (1,), specialize=True, **options)


# -- attention: two products in turn, the second's left operand in registers
@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, T,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """INSIDE: q is loaded where it is used, to stay in shared memory."""
    rows, dims, keys = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :])
    peak = tl.full([BM], -float("inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for start in range(0, T, BN):
        if INSIDE:
            q = tl.load(q_ptr + rows[:, None] * D + dims[None, :])
        k = tl.load(k_ptr + (start + keys)[None, :] * D + dims[:, None])
        scores = tl.dot(q, k) * scale
        higher = tl.maximum(peak, tl.max(scores, 1))
        p = tl.math.exp2(scores - higher[:, None])
        alpha = tl.math.exp2(peak - higher)
        weight = weight * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + (start + keys)[:, None] * D + dims[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        peak = higher
    out = acc / weight[:, None]
    tl.store(out_ptr + rows[:, None] * D + dims[None, :], out.to(out_ptr.dtype.element_ty))


def attention_subject(
    least: int, width: int, blocks: tuple[int, int], programs: int = 1, **options: Any
) -> Subject:
    """All keys, of which there are ``least`` or a block more."""

    def arguments(seed: int) -> tuple[Any, ...]:
        length = steps_of(seed, least // blocks[1], programs > 1) * blocks[1]
        q = torch.randn(programs * blocks[0], width).to(BF16)
        k, v = (torch.randn(length, width).to(BF16) for _ in range(2))
        return q, k, v, torch.full_like(q, float("nan")), 0.25, length, width, *blocks, programs > 1

    def is_right(*arguments: Any) -> bool:
        q, k, v, out = (x.double() for x in arguments[:4])
        expected = torch.softmax(q @ k.T * (0.25 * math.log(2)), 1) @ v
        return bool((out - expected).abs().max() < 2e-2)

    return compiled_subject(attention_kernel, arguments, is_right, (programs,), **options)


# -- shared memory as scratch: reductions, a scan and changes of layout, again and again
@triton.jit
def rows_kernel(x_ptr, w_ptr, out_ptr, sums_ptr, rows, N: tl.constexpr):
    """Layer norm of rows, their softmax and the running sum of that."""
    i = tl.arange(0, N)
    w = tl.load(w_ptr + i)
    for row in range(rows):
        x = tl.load(x_ptr + row * N + i)
        x -= tl.sum(x, 0) / N
        y = x * tl.rsqrt(tl.sum(x * x, 0) / N + 1e-5) * w
        e = tl.exp(y - tl.max(y, 0))
        p = e / tl.sum(e, 0)
        tl.store(out_ptr + row * N + i, p)
        tl.store(sums_ptr + row * N + i, tl.cumsum(p, 0))


def rows_subject(rows: int, n: int, **options: Any) -> Subject:
    def arguments(seed: int) -> tuple[Any, ...]:
        x, w = torch.randn(rows, n), torch.randn(n)
        return x, w, torch.full_like(x, float("nan")), torch.full_like(x, float("nan")), rows, n

    def is_right(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, *_: int
    ) -> bool:
        y = torch.nn.functional.layer_norm(x.double(), x.shape[1:], eps=1e-5) * w
        p = torch.softmax(y, 1)
        pairs = ((out, p), (sums, p.cumsum(1)))
        return all(bool((mine - right).abs().max() < 1e-5) for mine, right in pairs)

    return compiled_subject(rows_kernel, arguments, is_right, (1,), **options)


@triton.jit
def turns_kernel(x_ptr, out_ptr, steps, M: tl.constexpr, N: tl.constexpr):
    """A tile turned over, summed both ways and gathered from, so that its layout changes."""
    i, j = tl.arange(0, M), tl.arange(0, N)
    for step in range(steps):
        at = step * M * N
        x = tl.load(x_ptr + at + i[:, None] * N + j[None, :])
        turned = tl.trans(x) + tl.cumsum(tl.trans(x), 1)
        turned = turned * tl.sum(turned, 0)[None, :] + tl.max(turned, 1)[:, None]
        tl.store(out_ptr + at + j[:, None] * M + i[None, :], turned)


def turns_subject(steps: int, m: int, n: int, **options: Any) -> Subject:
    def arguments(seed: int) -> tuple[Any, ...]:
        return torch.randn(steps, m, n), torch.full((steps, n, m), float("nan")), steps, m, n

    def is_right(x: torch.Tensor, out: torch.Tensor, *_: int) -> bool:
        t = x.double().transpose(1, 2)
        t = t + t.cumsum(2)
        t = t * t.sum(1, keepdim=True) + t.amax(2, keepdim=True)
        return bool((out - t).abs().max() < 1e-3)

    return compiled_subject(turns_kernel, arguments, is_right, (1,), **options)


SMALL, WIDE = (64, 32, 32), (128, 32, 32)
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "matmul, TMA": functools.partial(
        matmul_subject, (64, 64, 96), SMALL, torch.float32, num_warps=4, num_stages=2
    ),
    "matmul, TMA, two warpgroups": functools.partial(
        matmul_subject, (128, 64, 128), WIDE, BF16, num_warps=8, num_stages=3
    ),
    "matmul, cp.async, two warpgroups": functools.partial(
        matmul_subject, (128, 64, 128), WIDE, BF16, num_warps=8, num_stages=3, tma=False
    ),
    "matmul, sm_80": functools.partial(
        matmul_subject, (32, 64, 128), (32, 32, 32), BF16, num_stages=3, target="sm_80"
    ),
    "attention, sm_90a": functools.partial(attention_subject, 96, 32, (64, 32), num_stages=2),
    "attention, cp.async": functools.partial(
        attention_subject, 96, 32, (64, 32), num_stages=2, tma=False
    ),
    "attention, sm_80": functools.partial(
        attention_subject, 96, 32, (32, 32), num_stages=2, target="sm_80"
    ),
    "matmul, specialised": functools.partial(
        matmul_subject, (128, 64, 128), WIDE, BF16, specialize=True, num_warps=8, num_stages=2
    ),
    "matmul, ping-pong": functools.partial(
        matmul_subject,
        (256, 32, 128),
        (64, 32, 64),
        BF16,
        specialize=True,
        num_warps=4,
        num_stages=3,
    ),
    "matmul, tiles in turns": functools.partial(
        tiles_subject, 4, (64, 32, 64), num_warps=4, num_stages=3
    ),
    "matmul, pairs": functools.partial(
        matmul_subject,
        (512, 32, 128),
        WIDE,
        BF16,
        specialize=True,
        turned=True,
        num_warps=8,
        num_stages=2,
        num_ctas=2,
    ),
    "matmul, ping-pong, pairs": functools.partial(
        matmul_subject,
        (512, 32, 128),
        (64, 32, 64),
        BF16,
        specialize=True,
        turned=True,
        num_warps=4,
        num_stages=3,
        num_ctas=2,
    ),
    "matmul of bytes": functools.partial(
        matmul_subject,
        (32, 128, 192),
        (32, 64, 64),
        torch.int32,
        operands=torch.int8,
        num_warps=4,
        num_stages=2,
    ),
    "matmul in tf32, specialised": functools.partial(
        matmul_subject,
        (64, 128, 128),
        (32, 128, 32),
        torch.float32,
        operands=torch.float32,
        specialize=True,
        num_warps=8,
        num_stages=2,
    ),
    "attention, specialised": functools.partial(
        attention_subject, 64, 32, (128, 32), 2, specialize=True, num_warps=8, num_stages=2
    ),
    "matmul, three groups": functools.partial(
        matmul_subject,
        (384, 32, 64),
        (192, 32, 32),
        BF16,
        specialize=True,
        num_warps=12,
        num_stages=2,
    ),
    "attention, three groups": functools.partial(
        attention_subject, 64, 32, (192, 32), 2, specialize=True, num_warps=12, num_stages=2
    ),
    "warp-specialised": lambda: Subject(seeded_ptx.PTX, seeded_ptx.load),
    "matmul, cluster": lambda: Subject(cluster_gemm.PTX, cluster_gemm.load),
    "rows": functools.partial(rows_subject, 3, 256, target="sm_80"),
    "turns": functools.partial(turns_subject, 2, 16, 32, target="sm_80"),
}
