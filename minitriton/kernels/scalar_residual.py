"""A residual connection with one learned scale, forward and backward: out = x + alpha * skip.

The simplest residual over depth, h_n = f(h_(n-1)) + alpha h_(n-3); Kimi K3 itself mixes all depths
(`attn_res_mix`). One read of each input; the gradient of alpha is summed per program and then over
programs, always in one order. fp32 inside.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.gemm import sum_partials
from minitriton.kernels.operator import operator
from minitriton.kernels.row_blocks import row_block, row_blocks
from minitriton.kernels.rows import new_like, rows_of

BLOCK = 1024  # elements of a row per program
PROGRAMS = 1056  # of the backward pass: enough for any GPU, few enough to keep partial sums small


@triton.jit
def _forward_kernel(
    x_ptr, skip_ptr, alpha_ptr, out_ptr, x_stride, skip_stride, rows, columns, BLOCK: tl.constexpr
):
    row, first = row_block(BLOCK)
    if row >= rows:
        return
    row = row.to(tl.int64)
    at = first + tl.arange(0, BLOCK)
    mask = at < columns
    x = tl.load(x_ptr + row * x_stride + at, mask=mask).to(tl.float32)
    skip = tl.load(skip_ptr + row * skip_stride + at, mask=mask).to(tl.float32)
    out = tl.fma(tl.load(alpha_ptr).to(tl.float32), skip, x)
    tl.store(out_ptr + row * columns + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles"])
def _backward_kernel(
    grad_ptr, skip_ptr, alpha_ptr, dskip_ptr, partial_ptr, grad_stride, skip_stride, tiles, columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    alpha = tl.load(alpha_ptr).to(tl.float32)
    across = tl.cdiv(columns, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        row = tile // across
        at = (tile % across).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        mask = at < columns
        grad = tl.load(grad_ptr + row * grad_stride + at, mask=mask, other=0.0).to(tl.float32)
        skip = tl.load(skip_ptr + row * skip_stride + at, mask=mask, other=0.0).to(tl.float32)
        total += grad * skip
        dskip = (alpha * grad).to(dskip_ptr.dtype.element_ty)
        tl.store(dskip_ptr + row * columns + at, dskip, mask=mask)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total))


def scalar_residual(x: torch.Tensor, skip: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """x + alpha * skip with one rounding; differentiable in x, skip and alpha.

    x, skip: one shape of rank >= 1, one dtype (fp32, bf16 or fp16), one device; alpha: a tensor of
    one element and rank 0 or 1, fp32, bf16 or fp16, on that device. The result is contiguous in the
    shape and dtype of x. KernelArgumentError names the argument that does not fit.
    """
    checks.float_tensor("x", x)
    checks.like("skip", skip, "x", x)
    if not isinstance(alpha, torch.Tensor) or alpha.numel() != 1 or alpha.dim() > 1:
        shown = tuple(alpha.shape) if isinstance(alpha, torch.Tensor) else type(alpha).__name__
        raise KernelArgumentError(f"argument 'alpha': must be a tensor of one element, got {shown}")
    checks.float_tensor("alpha", alpha.reshape(1))
    if alpha.device != x.device:
        raise KernelArgumentError(
            f"argument 'alpha': device {alpha.device} differs from that of 'x', {x.device}"
        )
    return _residual_op(x, skip, alpha)


def scalar_residual_reference(
    x: torch.Tensor, skip: torch.Tensor, alpha: torch.Tensor
) -> torch.Tensor:
    """`scalar_residual` in plain torch, in the dtype of its arguments."""
    return x + alpha * skip


@operator("scalar_residual")
def _residual_op(x: torch.Tensor, skip: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    out = new_like(x)
    if out.numel() > 0:
        a, b = rows_of(x), rows_of(skip)
        rows, columns = a.shape
        _forward_kernel[row_blocks(rows, columns, BLOCK)](
            a, b, alpha, out, a.stride(0), b.stride(0), rows, columns, BLOCK=BLOCK
        )
    return out


@operator("scalar_residual_backward")
def _residual_backward_op(
    grad: torch.Tensor, skip: torch.Tensor, alpha: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dskip, dalpha = new_like(skip), new_like(alpha)
    if dskip.numel() == 0:
        return dskip, dalpha.zero_()
    dy, b = rows_of(grad), rows_of(skip)
    rows, columns = b.shape
    tiles = rows * triton.cdiv(columns, BLOCK)
    partial = b.new_empty(min(tiles, PROGRAMS), dtype=torch.float32)
    _backward_kernel[(partial.numel(),)](
        dy, b, alpha, dskip, partial, dy.stride(0), b.stride(0), tiles, columns, BLOCK=BLOCK
    )
    sum_partials(partial[:, None], dalpha.view(1))
    return dskip, dalpha


_residual_op.register_fake(lambda x, skip, alpha: new_like(x))
_residual_backward_op.register_fake(lambda grad, skip, alpha: (new_like(skip), new_like(alpha)))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, grad: torch.Tensor) -> Any:
    return grad, *_residual_backward_op(grad, *ctx.saved_tensors)


_residual_op.register_autograd(_differentiate, setup_context=_save)
