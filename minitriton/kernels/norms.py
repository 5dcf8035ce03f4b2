"""RMS normalisation over the last dimension, plain or under a sigmoid gate, forward and backward.

    r = 1 / sqrt(mean(x^2) + eps),    n = x r,    y = n weight                 (rms_norm)
                                                  y = n weight sigmoid(gate)   (gated_rms_norm)

Norm first, gate second, as behind the heads of Kimi K3's KDA (technical report, section 2.1), where
one weight serves all heads. A program holds a tile of whole rows, several where rows are short, and
reads every input once; the backward pass computes r again from x instead of storing it. fp32
inside. The gradient of the weight is summed per program and then over programs, always in one
order, so that equal inputs give equal bits.
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
from minitriton.kernels.rows import (
    RMS_NORM_TILES,
    backward_warps,
    new_like,
    norm_tile,
    row_programs,
    row_tile,
    rows_in_place,
)

MAX_COLUMNS = 8192
MAX_ROWS = 2**31 - 1024  # row numbers are int32


@triton.jit
def _start(row, inner, outer_stride, stride):
    """Where rows begin that lie in groups of `inner`; see `kernels/rows.py`."""
    group = row // inner
    return group.to(tl.int64) * outer_stride + (row - group * inner).to(tl.int64) * stride


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, x_outer, x_stride, gate_outer, gate_stride, inner, rows,
    columns, eps,
    GATED: tl.constexpr, WEIGHTED: tl.constexpr, REREAD: tl.constexpr, FULL: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Two reads of a row where REREAD, in STEPS blocks; else one of a row of one block."""
    if FULL:  # no masks along rows
        columns = STEPS * BLOCK
    keep: tl.constexpr = "evict_last" if REREAD else ""  # what will be read again
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    x_row = x_ptr + _start(row, inner, x_outer, x_stride)
    square = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (row < rows) & (at < columns)
        x = tl.load(x_row + at, mask=mask, other=0.0, eviction_policy=keep)
        x = x.to(tl.float32)
        square += x * x
    r = tl.rsqrt(tl.sum(square, axis=1) / columns + eps)[:, None]
    for step in tl.static_range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (row < rows) & (at < columns)
        if REREAD:
            x = tl.load(x_row + at, mask=mask, other=0.0, eviction_policy="evict_first")
            x = x.to(tl.float32)
        out = x * r
        if WEIGHTED:
            weight = tl.load(weight_ptr + at, mask=at < columns, other=0.0, eviction_policy=keep)
            out = out * weight.to(tl.float32)
        if GATED:
            gate_row = gate_ptr + _start(row, inner, gate_outer, gate_stride)
            gate = tl.load(gate_row + at, mask=mask, other=0.0)
            out = out * tl.sigmoid(gate.to(tl.float32))
        to = out_ptr + row.to(tl.int64) * columns + at
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, partial_ptr, grad_outer, grad_stride,
    x_outer, x_stride, gate_outer, gate_stride, inner, rows, columns, eps,
    GATED: tl.constexpr, WEIGHTED: tl.constexpr, DWEIGHT: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if FULL:  # no masks along rows
        columns = BLOCK
    at = tl.arange(0, BLOCK)[None, :]
    if WEIGHTED:
        weight = tl.load(weight_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    if DWEIGHT:
        dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (at < columns)
        x_row = x_ptr + _start(row, inner, x_outer, x_stride)
        x = tl.load(x_row + at, mask=mask, other=0.0).to(tl.float32)
        grad_row = grad_ptr + _start(row, inner, grad_outer, grad_stride)
        grad = tl.load(grad_row + at, mask=mask, other=0.0).to(tl.float32)
        to = row.to(tl.int64) * columns + at
        slope = grad
        if GATED:
            gate_row = gate_ptr + _start(row, inner, gate_outer, gate_stride)
            gate = tl.load(gate_row + at, mask=mask, other=0.0)
            s = tl.sigmoid(gate.to(tl.float32))
            slope = slope * s
        if WEIGHTED:
            slope = slope * weight
        # both sums of a row in one exchange between warps: the second waits for no r
        square, along = tl.sum(x * x, axis=1), tl.sum(slope * x, axis=1)
        r = tl.rsqrt(square / columns + eps)
        along = tl.where(r == 0, 0.0, r * (along / columns))  # where squares overflowed, so may it
        r = r[:, None]
        n = x * r
        if GATED:
            dgate = slope * n * (1 - s)
            tl.store(dgate_ptr + to, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
            grad = grad * s
        if DWEIGHT:
            dweight += grad * n
        dx = r * (slope - n * along[:, None])
        tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if DWEIGHT:
        column = tl.arange(0, BLOCK)
        to = partial_ptr + tl.program_id(0) * columns + column
        tl.store(to, tl.sum(dweight, axis=0), mask=column < columns)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension; differentiable in x and weight.

    x: [..., d] with d <= 8192, fp32, bf16 or fp16, on a GPU or the CPU; slices with rows at one
    distance, or two (heads of tokens), are read in place. weight: [d] in fp32 or x's dtype, or None
    for ones. The result is contiguous in x's shape and dtype. A row whose mean square exceeds the
    range of fp32 gives zeros, as in plain fp32. KernelArgumentError for anything else and for
    eps <= 0.
    """
    _check_rows(x)
    return _norm_op(x, None, _check_weight(weight, x), checks.positive("eps", eps))


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """sigmoid(gate) * rms_norm(x, weight, eps); differentiable in x, gate and weight.

    x, gate: [..., d] with d <= 8192, one shape, one dtype (fp32, bf16 or fp16), one device; slices
    with rows at one distance, or two (heads of tokens), are read in place. gate = None is
    `rms_norm`. weight: [d] in fp32 or x's dtype, or None for ones. The result is contiguous in x's
    shape and dtype. KernelArgumentError names the argument that does not fit.
    """
    _check_rows(x)
    if gate is not None:
        checks.like("gate", gate, "x", x)
    return _norm_op(x, gate, _check_weight(weight, x), checks.positive("eps", eps))


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """`rms_norm` in plain torch, in the dtype of its arguments."""
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return out if weight is None else out * weight


def gated_rms_norm_reference(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`gated_rms_norm` in plain torch, in the dtype of its arguments."""
    out = rms_norm_reference(x, weight, eps)
    return out if gate is None else out * torch.sigmoid(gate)


def _check_rows(x: object) -> None:
    shape = checks.float_tensor("x", x).shape
    if shape[-1] > MAX_COLUMNS or shape[:-1].numel() > MAX_ROWS:
        raise KernelArgumentError(
            f"argument 'x': {shape[:-1].numel()} rows of {shape[-1]} elements; "
            f"at most {MAX_ROWS} of {MAX_COLUMNS} are supported"
        )


def _check_weight(weight: object, x: torch.Tensor) -> torch.Tensor | None:
    if weight is None:
        return None
    return checks.row_vector("weight", weight, "x", x)


def _forward(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    out = new_like(x)
    if out.numel() == 0:
        return out
    inner, found = rows_in_place(x) if gate is None else rows_in_place(x, gate)
    m, g = found[0], found[-1]
    columns = x.shape[-1]
    tile = norm_tile(columns, x.dtype, RMS_NORM_TILES)
    rows = x.numel() // columns
    _forward_kernel[(triton.cdiv(rows, tile.rows),)](
        m.tensor, g.tensor, x if weight is None else weight.contiguous(), out, m.outer_stride,
        m.stride, g.outer_stride, g.stride, inner, rows, columns, eps, GATED=gate is not None,
        WEIGHTED=weight is not None, REREAD=tile.reread, FULL=tile.fits(columns),
        STEPS=tile.steps(columns), ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.warps,
    )  # fmt: skip
    return out


def _backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None,
    eps: float, train_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dx, dgate, dweight = _gradients(x, gate, weight, train_weight)
    if dx.numel() == 0:
        return dx, dgate, dweight.zero_()
    inner, found = rows_in_place(grad, x) if gate is None else rows_in_place(grad, x, gate)
    dy, m, g = found[0], found[1], found[-1]
    columns = x.shape[-1]
    height, block, _ = row_tile(columns)
    rows = x.numel() // columns
    programs = row_programs(triton.cdiv(rows, height), block)
    sums = (programs, columns) if train_weight else (1, 1)
    partial = torch.empty(sums, dtype=torch.float32, device=x.device)
    _backward_kernel[(programs,)](
        dy.tensor, m.tensor, g.tensor, x if weight is None else weight.contiguous(), dx,
        dx if gate is None else dgate, partial, dy.outer_stride, dy.stride, m.outer_stride,
        m.stride, g.outer_stride, g.stride, inner, rows, columns, eps, GATED=gate is not None,
        WEIGHTED=weight is not None, DWEIGHT=train_weight, FULL=block == columns, STAGES=2,
        ROWS=height, BLOCK=block, num_warps=backward_warps(block),
    )  # fmt: skip
    if train_weight:
        sum_partials(partial, dweight)
    return dx, dgate, dweight


def _gradients(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, train_weight: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the gradients; an empty tensor stands for one that nobody asks for."""
    dx = new_like(x)
    dgate = dx.new_empty(0) if gate is None else new_like(x)
    if weight is None or not train_weight:
        return dx, dgate, dx.new_empty(0)
    return dx, dgate, new_like(weight)


@operator("gated_rms_norm")
def _norm_op(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return _forward(x, gate, weight, eps)


@operator("gated_rms_norm_backward")
def _norm_backward_op(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None,
    eps: float, train_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward(grad, x, gate, weight, eps, train_weight)


_norm_op.register_fake(lambda x, gate, weight, eps: new_like(x))
_norm_backward_op.register_fake(
    lambda grad, x, gate, weight, eps, train_weight: _gradients(x, gate, weight, train_weight)
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.eps = inputs[3]


def _differentiate(ctx: Any, grad: torch.Tensor) -> Any:
    _, gate, weight = ctx.saved_tensors
    train_weight = weight is not None and ctx.needs_input_grad[2]
    dx, dgate, dweight = _norm_backward_op(grad, *ctx.saved_tensors, ctx.eps, train_weight)
    return dx, None if gate is None else dgate, dweight if train_weight else None, None


_norm_op.register_autograd(_differentiate, setup_context=_save)
