"""Functions that launch kernels, to be called in what torch compiles."""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x * factor, mask=offsets < n)


configs = [triton.Config({"BLOCK": block}, num_warps=1) for block in (64, 128)]
tuned_kernel = triton.autotune(configs, key=["n"])(scale_kernel)
guided_kernel = triton.heuristics({"BLOCK": lambda given: 64 if given["n"] < 500 else 128})(
    scale_kernel
)


def direct(x, out):
    n = x.numel()
    scale_kernel[(triton.cdiv(n, 64),)](x, out, n, 3.0, BLOCK=64)


def by_function(x, out):
    n = x.numel()
    scale_kernel[lambda given: (triton.cdiv(n, given["BLOCK"]),)](x, out, n, 3.0, BLOCK=64)


def tuned(x, out):
    n = x.numel()
    tuned_kernel[lambda given: (triton.cdiv(n, given["BLOCK"]),)](x, out, n, 3.0)


def guided(x, out):
    n = x.numel()
    guided_kernel[lambda given: (triton.cdiv(n, given["BLOCK"]),)](x, out, n, 3.0)


def once_more(x, out):
    n = x.numel()
    compiled = scale_kernel[(1,)](x, out, n, 2.0, BLOCK=64)
    compiled[(triton.cdiv(n, 64), 1, 1)](x, out, n, 3.0, 64)
