"""Dropout whose mask is drawn again wherever it is needed, from a seed that lies on the device.

Philox 4x32-10 with the 64-bit seed as its key and the counter (column // 4, row, 0, 0); element
(row, column) takes word column % 4 of the four and is kept where that word is at least
round(2^32 probability). Nothing is stored; the plain torch twin `keep_mask` draws the same mask.
A seed in device memory lets a captured CUDA graph draw other masks at every replay.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.operator import operator
from minitriton.kernels.philox import philox_words, threshold_of
from minitriton.kernels.rows import new_like, rows_of

ROWS, COLUMNS = 4, 256


@triton.jit
def kept(seed, rows, first_column, threshold, COLUMNS: tl.constexpr):
    """What dropout keeps, [rows, COLUMNS]; rows: int32 [R], first_column: a multiple of 4."""
    column = first_column // 4 + tl.arange(0, COLUMNS // 4)
    zero = tl.zeros([rows.shape[0], COLUMNS // 4], tl.int32)
    c0, c1 = zero + column[None, :], zero + rows[:, None]
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, zero, zero)
    limit = threshold.to(tl.uint32)
    even = tl.join((w0 >= limit).to(tl.int8), (w2 >= limit).to(tl.int8))
    odd = tl.join((w1 >= limit).to(tl.int8), (w3 >= limit).to(tl.int8))
    return tl.reshape(tl.join(even, odd), [rows.shape[0], COLUMNS]) != 0


@triton.jit
def _dropout_kernel(
    x_ptr, out_ptr, seed_ptr, stride, rows, columns, threshold: tl.uint32, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    at = first + tl.arange(0, COLUMNS)[None, :]
    mask = (row[:, None] < rows) & (at < columns)
    keep = kept(tl.load(seed_ptr), row, first, threshold, COLUMNS)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + at, mask=mask, other=0.0)
    out = tl.where(keep, x.to(tl.float32) * scale, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * columns + at, out, mask=mask)


def dropout(x: torch.Tensor, probability: float, seed: torch.Tensor) -> torch.Tensor:
    """x / (1 - probability) where the mask keeps it, else 0; differentiable in x.

    x: [..., columns], fp32, bf16 or fp16; leading dimensions count as rows of the mask, fewer than
    2^31. probability: 0 <= p < 1; seed: int64 [1] on the device of x, read when the kernel runs
    (give the backward pass the same value). The result is contiguous in x's shape and dtype.
    KernelArgumentError names the argument that does not fit.
    """
    checks.float_tensor("x", x)
    checks.fraction("probability", probability)
    check_seed(seed, x)
    return _dropout_op(x, float(probability), seed)


def dropout_reference(x: torch.Tensor, probability: float, seed: torch.Tensor) -> torch.Tensor:
    """`dropout` in plain torch, in the dtype of x."""
    keep = keep_mask(seed, x.shape, probability)
    return torch.where(keep, x / (1 - probability), torch.zeros((), dtype=x.dtype, device=x.device))


def keep_mask(seed: torch.Tensor, shape: torch.Size, probability: float) -> torch.Tensor:
    """True where dropout with this seed keeps an element of a tensor of this shape."""
    columns = shape[-1]
    rows = torch.Size(shape[:-1]).numel()
    row = torch.arange(rows, device=seed.device)[:, None]
    column = torch.arange(columns, device=seed.device)[None, :]
    words = philox_words(seed, [column // 4, row, row * 0, row * 0])
    chosen = torch.gather(words, 0, (column % 4).expand(1, rows, columns))[0]
    return (chosen >= threshold_of(probability)).view(shape)


def check_seed(seed: object, x: torch.Tensor) -> torch.Tensor:
    """`seed` if it is an int64 tensor of one element on the device of x."""
    if not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64 or seed.numel() != 1:
        shown = (
            f"{seed.dtype} {tuple(seed.shape)}" if isinstance(seed, torch.Tensor) else repr(seed)
        )
        raise checks.KernelArgumentError(
            f"argument 'seed': must be an int64 tensor of one element, got {shown}"
        )
    if seed.device != x.device:
        raise checks.KernelArgumentError(
            f"argument 'seed': device {seed.device} differs from that of the input, {x.device}"
        )
    return seed


def masked_gradient(grad: torch.Tensor, probability: float, seed: torch.Tensor) -> torch.Tensor:
    """What `dropout` makes of a gradient on its way back. For callers inside the library."""
    return _dropout_op(grad, probability, seed)


@operator("dropout")
def _dropout_op(x: torch.Tensor, probability: float, seed: torch.Tensor) -> torch.Tensor:
    out = new_like(x)
    if out.numel() == 0:
        return out
    m = rows_of(x)
    grid = (triton.cdiv(m.shape[0], ROWS), triton.cdiv(m.shape[1], COLUMNS))
    _dropout_kernel[grid](
        m, out, seed, m.stride(0), *m.shape, threshold_of(probability), 1 / (1 - probability),
        ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return out


_dropout_op.register_fake(lambda x, probability, seed: new_like(x))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.probability = inputs[1]
    ctx.save_for_backward(inputs[2])


def _differentiate(ctx: Any, grad: torch.Tensor) -> Any:
    return _dropout_op(grad, ctx.probability, *ctx.saved_tensors), None, None


_dropout_op.register_autograd(_differentiate, setup_context=_save)
