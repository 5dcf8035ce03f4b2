"""Kernels that defects are seeded into: small shapes on which every stage of a pipeline is reused.

`SUBJECTS` names them; each builds its PTX and a function that runs any variant of it on fresh data.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.compiled import CompiledKernel
from minitriton.jit import Kernel
from tests.emulator.defects import Run

BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Subject:
    """A right kernel and how to run PTX of its interface."""

    ptx: str
    run: Run


def compiled_subject(
    kernel: Kernel,
    arguments: Callable[[], tuple[Any, ...]],
    is_right: Callable[..., bool],
    grid: tuple[int, ...],
    *,
    target: str = "sm_90a",
    tma: bool = True,
    **options: Any,
) -> Subject:
    """``arguments`` makes random ones of torch's generator, ``is_right`` judges them afterwards."""
    environment = {"MINITRITON_TMA": str(int(tma)), "MINITRITON_CHECK": "all"}
    with mock.patch.dict(os.environ, environment):
        compiled = kernel.warmup(*arguments(), grid=grid, target=target, **options)

    def run(ptx: str, seed: int, landing: str, schedule: str) -> bool:
        torch.manual_seed(seed)
        values = arguments()
        variant = CompiledKernel(
            compiled.source, compiled.spec, compiled.target, ptx, compiled.metadata, None
        )
        policies = {"MINITRITON_LANDING": landing, "MINITRITON_SCHEDULE": schedule}
        with mock.patch.dict(os.environ, environment | policies):
            variant[grid](*values)
        return is_right(*values)

    return Subject(compiled.ptx, run)


# -- a product: tiles taken in turn, so that the loop over K begins anew in used shared memory
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """C = A @ B as in Triton's tutorial."""
    columns = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * columns, tl.num_programs(0)):
        rm, rn = tile // columns * BM + tl.arange(0, BM), tile % columns * BN + tl.arange(0, BN)
        rk = tl.arange(0, BK)
        a_ptrs = a_ptr + ((rm % M)[:, None] * K + rk[None, :])
        b_ptrs = b_ptr + (rk[:, None] * N + (rn % N)[None, :])
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            a = tl.load(a_ptrs, mask=rk[None, :] < K - k * BK, other=0.0)
            b = tl.load(b_ptrs, mask=rk[:, None] < K - k * BK, other=0.0)
            acc = tl.dot(a, b, acc)
            a_ptrs += BK
            b_ptrs += BK * N
        mask = (rm[:, None] < M) & (rn[None, :] < N)
        tl.store(c_ptr + rm[:, None] * N + rn[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


def matmul_subject(m: int, n: int, k: int, blocks: tuple[int, int, int], **options: Any) -> Subject:
    """One program takes all tiles."""

    def arguments() -> tuple[Any, ...]:
        a, b = torch.randn(m, k).to(BF16), torch.randn(k, n).to(BF16)
        return a, b, torch.full((m, n), float("nan")), m, n, k, *blocks

    def is_right(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *_: int) -> bool:
        scale = a.double().abs() @ b.double().abs()
        return bool(((c.double() - a.double() @ b.double()).abs() / scale).max() < 1e-6)

    return compiled_subject(matmul_kernel, arguments, is_right, (1,), **options)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "matmul, TMA": functools.partial(matmul_subject, 64, 128, 320, (64, 64, 64), num_stages=3),
    "matmul, cp.async and wgmma": functools.partial(
        matmul_subject, 64, 128, 160, (64, 64, 32), num_stages=3, tma=False
    ),
    "matmul, sm_80": functools.partial(
        matmul_subject, 32, 64, 160, (32, 32, 32), num_stages=3, num_warps=4, target="sm_80"
    ),
}
