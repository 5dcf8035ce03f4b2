"""Mean cross-entropy of logits, forward and backward, without storing probabilities.

    peak_i = max_j x_ij    sum_i = sum_j exp(x_ij - peak_i)
    loss  = mean over rows that count of (peak_i - x_i,target) + log sum_i
    dx_ij = (exp(x_ij - peak_i) / sum_i - [j = target_i]) / rows that count

A program owns one row, or several short ones, and reads it once (online maximum and sum); the
backward pass computes the probabilities again from peak and sum: they add up to 1 as no logarithm
would let them. All sums are fp32, in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.operator import operator
from minitriton.kernels.row_blocks import row_block, row_blocks
from minitriton.kernels.rows import dense, new_like
from minitriton.kernels.softmax import peak_and_sum, shifted_exp

TILE = 2048  # elements that a program holds
READ_AHEAD = 8192  # bytes of a row that the forward pass takes at a time, where rows are longer


@triton.jit
def _forward_kernel(
    x_ptr, target_ptr, stats_ptr, loss_ptr, stride, rows, columns, ignored,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride
    target = tl.load(target_ptr + row, mask=row < rows, other=0).to(tl.int64)
    peak, total = peak_and_sum(x_ptrs, row, rows, columns, STAGES, ROWS, BLOCK)
    # a target that is no class: a loss that nobody overlooks
    is_class = (row < rows) & (target >= 0) & (target < columns)
    chosen = tl.load(x_ptr + row.to(tl.int64) * stride + target, mask=is_class, other=float("nan"))
    chosen = chosen.to(tl.float32)
    loss = tl.where(target == ignored, 0.0, (peak - chosen) + tl.log(total))
    tl.store(stats_ptr + row, peak, mask=row < rows)
    tl.store(stats_ptr + rows + row, total, mask=row < rows)
    tl.store(loss_ptr + row, loss, mask=row < rows)


@triton.jit
def _mean_kernel(loss_ptr, target_ptr, mean_ptr, counted_ptr, rows, ignored, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + row, mask=row < rows, other=0).to(tl.int64)
        total += tl.load(loss_ptr + row, mask=row < rows, other=0.0)
        count += ((target != ignored) & (row < rows)).to(tl.int32)
    counted = tl.sum(count, 0).to(tl.float32)
    tl.store(mean_ptr, tl.sum(total, 0) / counted)
    tl.store(counted_ptr, counted)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, target_ptr, stats_ptr, counted_ptr, dx_ptr, stride, rows, columns, width,
    ignored, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, first = row_block(BLOCK)
    row = tile * ROWS + tl.arange(0, ROWS)
    at = first + tl.arange(0, BLOCK)[None, :]
    inside = row < rows
    mask = inside[:, None] & (at < columns)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + at, mask=mask, other=-float("inf"))
    target = tl.load(target_ptr + row, mask=inside, other=0).to(tl.int64)
    peak = tl.load(stats_ptr + row, mask=inside, other=0.0)[:, None]
    total = tl.load(stats_ptr + rows + row, mask=inside, other=1.0)[:, None]
    scale = tl.load(grad_ptr).to(tl.float32) / tl.load(counted_ptr)
    scale = tl.where(target == ignored, 0.0, scale)
    EXACT: tl.constexpr = x.dtype == tl.float32
    e = shifted_exp(x.to(tl.float32), peak, EXACT)
    hot = at == target[:, None]
    if EXACT:
        dx = (e / total - hot.to(tl.float32)) * scale[:, None]
    else:
        dx = e * (scale[:, None] / total)
        dx = tl.where(hot, dx - scale[:, None], dx)
    to = dx_ptr + row.to(tl.int64)[:, None] * width + at
    tl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=inside[:, None] & (at < width))


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, classes: int | None = None, ignore: int = -100
) -> torch.Tensor:
    """Mean over the rows whose target is not `ignore` of -log softmax(logits)[target]: fp32 scalar.

    logits: [N, V], fp32, bf16 or fp16, differentiable; classes <= V: only so many columns take
    part, the others may hold anything and get gradient 0. targets: [N], int64 or int32, on the
    device of logits; a target that is neither a class nor `ignore` makes the loss NaN, and so does
    a batch without any counted row, as in torch. KernelArgumentError names the argument that does
    not fit.
    """
    checks.float_tensor("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise KernelArgumentError(
            f"argument 'logits': shape {tuple(logits.shape)}; it must be [N, V] with V >= 1"
        )
    checks.integers("targets", targets, logits.shape[:1], logits.device)
    classes = logits.shape[1] if classes is None else classes
    if (
        isinstance(classes, bool)
        or not isinstance(classes, int)
        or not 0 < classes <= logits.shape[1]
    ):
        raise KernelArgumentError(
            f"argument 'classes': must be in 1 to {logits.shape[1]}, got {classes!r}"
        )
    return _op(logits, targets, classes, ignore)[0]


def cross_entropy_reference(
    logits: torch.Tensor, targets: torch.Tensor, *, classes: int | None = None, ignore: int = -100
) -> torch.Tensor:
    """`cross_entropy` in plain torch, in the dtype of logits."""
    return torch.nn.functional.cross_entropy(
        logits[:, :classes], targets.long(), ignore_index=ignore
    )


@functools.cache
def _tile(columns: int, most: int = TILE) -> tuple[int, int]:
    """(rows, columns) of a program's tile; `most`: columns at a time."""
    block = min(most, max(16, triton.next_power_of_2(columns)))
    return max(1, 1024 // block), block


@operator("cross_entropy")
def _op(
    logits: torch.Tensor, targets: torch.Tensor, classes: int, ignore: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss and counted rows, fp32 scalars; peak and sum of every row as fp32 [2, N]."""
    mean, counted, stats = _outputs(logits)
    x, t = dense(logits), targets.contiguous()
    rows, block = _tile(classes, READ_AHEAD // x.element_size())
    loss = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0] > 0:
        _forward_kernel[(triton.cdiv(x.shape[0], rows),)](
            x, t, stats, loss, x.stride(0), x.shape[0], classes, ignore,
            STAGES=3 if classes > block else 1, ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip
    _mean_kernel[(1,)](
        loss, t, mean, counted, x.shape[0], ignore,
        BLOCK=min(8192, max(16, triton.next_power_of_2(x.shape[0]))), num_warps=16,
    )  # fmt: skip
    return mean, counted, stats


@operator("cross_entropy_backward")
def _backward_op(
    grad: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor,
    stats: torch.Tensor, classes: int, ignore: int,
) -> torch.Tensor:  # fmt: skip
    dx = new_like(logits)
    x, t = dense(logits), targets.contiguous()
    rows, block = _tile(x.shape[1])
    if x.shape[0] > 0:
        _backward_kernel[row_blocks(triton.cdiv(x.shape[0], rows), x.shape[1], block)](
            grad, x, t, stats, counted, dx, x.stride(0), x.shape[0], classes, x.shape[1], ignore,
            ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return dx


def _outputs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stats = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    return stats.new_empty(()), stats.new_empty(()), stats


_op.register_fake(lambda logits, targets, classes, ignore: _outputs(logits))
_backward_op.register_fake(
    lambda grad, logits, targets, counted, stats, classes, ignore: new_like(logits)
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.options = inputs[2:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient


def _differentiate(ctx: Any, grad: torch.Tensor | None, *_: Any) -> Any:
    if grad is None:
        return None, None, None, None
    return _backward_op(grad, *ctx.saved_tensors, *ctx.options), None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
