"""Layer normalisation over the last dimension, fused with the residual sum and dropout before it.

    total = x + dropout(branch)                     branch = None: total = x
    out   = (total - mean) / sqrt(variance + eps) * weight + bias

Source: Ba, Kiros, Hinton, arXiv 1607.06450. A program holds whole rows and reads each input once;
mean and 1 / sqrt(variance + eps) are saved in fp32, the dropout mask is drawn again. fp32 inside.
The gradients of weight and bias are summed per program, then over programs, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.dropout import check_seed, dropout_reference, kept
from minitriton.kernels.gemm import DEEP_SUM, sum_partials, sum_parts
from minitriton.kernels.operator import operator
from minitriton.kernels.philox import threshold_of
from minitriton.kernels.rows import (
    ADD_LAYER_NORM_TILES,
    LAYER_NORM_TILES,
    backward_warps,
    new_like,
    norm_tile,
    row_programs,
    row_tile,
    rows_of,
)

MAX_COLUMNS = 8192


@triton.jit
def _forward_kernel(
    x_ptr, branch_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr, stats_ptr, seed_ptr, x_stride,
    branch_stride, rows, columns, eps, threshold: tl.uint32, scale,
    DROPOUT: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if FULL:  # no masks
        columns = BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (at < columns)
    wide = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + wide * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    # before any store, which they could not pass
    weight = tl.load(weight_ptr + at, mask=at < columns, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at, mask=at < columns, other=0.0)
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + wide * branch_stride + at, mask=mask, other=0.0)
        branch = branch.to(tl.float32)
        if DROPOUT:
            keep = kept(tl.load(seed_ptr), row, 0, threshold, BLOCK)
            branch = tl.where(keep, branch * scale, 0.0)
        x += branch
    if total_ptr is not None:
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + wide * columns + at, x, mask=mask)
        x = x.to(tl.float32)  # the backward pass sees the rounded sum
    mean = tl.sum(x, 1) / columns
    centred = tl.where(mask, x - mean[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, 1) / columns + eps)
    out = centred * r[:, None] * weight.to(tl.float32)
    if bias_ptr is not None:
        out += bias.to(tl.float32)
    tl.store(out_ptr + wide * columns + at, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(stats_ptr + row, mean, mask=row < rows)
    tl.store(stats_ptr + rows + row, r, mask=row < rows)


@triton.jit
def _total(x_row, branch_row, at, columns, HINT: tl.constexpr):
    """A block of a row of x + branch in fp32, rounded as it is stored."""
    x = tl.load(x_row + at, mask=at < columns, other=0.0, eviction_policy=HINT)
    if branch_row is not None:
        branch = tl.load(branch_row + at, mask=at < columns, other=0.0, eviction_policy=HINT)
        x = (x.to(tl.float32) + branch.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _reread_kernel(
    x_ptr, branch_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr, stats_ptr, x_stride,
    branch_stride, rows, columns, eps, FULL: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program, without dropout: in STEPS blocks, which are read again for the result."""
    if FULL:  # no masks
        columns = STEPS * BLOCK
    keep: tl.constexpr = "evict_last"  # what will be read again
    row = tl.program_id(0).to(tl.int64)
    x_row, branch_row = x_ptr + row * x_stride, branch_ptr
    if branch_ptr is not None:
        branch_row = branch_ptr + row * branch_stride
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        total += _total(x_row, branch_row, step * BLOCK + tl.arange(0, BLOCK), columns, keep)
    mean = tl.sum(total, 0) / columns
    square = tl.zeros([BLOCK], tl.float32)
    # one block is still in registers: the compiler merges reads that have the same hint
    again: tl.constexpr = keep if STEPS == 1 else ""
    for step in tl.static_range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)
        x = _total(x_row, branch_row, at, columns, again)
        centred = tl.where(at < columns, x - mean, 0.0)
        square += centred * centred
    r = tl.rsqrt(tl.sum(square, 0) / columns + eps)
    for step in tl.static_range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)
        mask = at < columns
        x = _total(x_row, branch_row, at, columns, "evict_first")
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0, eviction_policy=keep)
        out = (x - mean) * r * weight.to(tl.float32)
        if bias_ptr is not None:
            out += tl.load(bias_ptr + at, mask=mask, other=0.0, eviction_policy=keep).to(tl.float32)
        if total_ptr is not None:
            tl.store(total_ptr + row * columns + at, x.to(total_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptr + row * columns + at, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(stats_ptr + row, mean)
    tl.store(stats_ptr + rows + row, r)


@triton.jit
def _backward_kernel(
    dout_ptr, dtotal_ptr, total_ptr, weight_ptr, stats_ptr, seed_ptr, dx_ptr, dbranch_ptr,
    partial_ptr, dout_stride, dtotal_stride, total_stride, rows, columns, threshold: tl.uint32,
    scale, BIASED: tl.constexpr, DROPOUT: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row at a time, while the next STAGES - 1 are on their way to shared memory."""
    if FULL:  # no masks
        columns = BLOCK
    at = tl.arange(0, BLOCK)
    mask = at < columns
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        row = i.to(tl.int64)
        total = tl.load(total_ptr + row * total_stride + at, mask=mask, other=0.0).to(tl.float32)
        mean, r = tl.load(stats_ptr + row), tl.load(stats_ptr + rows + row)
        n = tl.where(mask, (total - mean) * r, 0.0)
        dout = tl.load(dout_ptr + row * dout_stride + at, mask=mask, other=0.0).to(tl.float32)
        dweight += dout * n
        if BIASED:
            dbias += dout
        dn = dout * weight
        d = (dn - tl.sum(dn) / columns - n * (tl.sum(dn * n) / columns)) * r
        if dtotal_ptr is not None:
            dtotal = tl.load(dtotal_ptr + row * dtotal_stride + at, mask=mask, other=0.0)
            d += dtotal.to(tl.float32)
        tl.store(dx_ptr + row * columns + at, d.to(dx_ptr.dtype.element_ty), mask=mask)
        if dbranch_ptr is not None:
            if DROPOUT:
                keep = kept(tl.load(seed_ptr), i + tl.arange(0, 1), 0, threshold, BLOCK)
                d = tl.where(tl.reshape(keep, [BLOCK]), d * scale, 0.0)
            to = dbranch_ptr + row * columns + at
            tl.store(to, d.to(dbranch_ptr.dtype.element_ty), mask=mask)
    to = partial_ptr + tl.program_id(0).to(tl.int64) * columns + at
    tl.store(to, dweight, mask=mask)
    if BIASED:
        tl.store(to + tl.num_programs(0).to(tl.int64) * columns, dbias, mask=mask)


@triton.jit
def _sum_both_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, parts, columns, DEPTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums [2, parts, columns] over the parts: for the weight, and for the bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    which = tl.program_id(1)
    source = partial_ptr + which.to(tl.int64) * parts * columns
    total = sum_parts(source, columns, parts, at, mask, DEPTH)
    total = total.to(dweight_ptr.dtype.element_ty)
    if which == 0:
        tl.store(dweight_ptr + at, total, mask=mask)
    else:
        tl.store(dbias_ptr + at, total, mask=mask)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; differentiable.

    x: [..., d] with 1 <= d <= 8192, fp32, bf16 or fp16; weight, bias: [d], both fp32 or x's dtype,
    on its device. The result is contiguous in x's shape, in out_dtype (x's dtype by default).
    KernelArgumentError names the argument that does not fit.
    """
    _check(x, weight, bias)
    checks.positive("eps", eps)
    return _op(x, None, weight, bias, False, 0.0, None, eps, out_dtype or x.dtype)[1]


def add_layer_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, layer_norm(total)) of total = x + dropout(branch); differentiable in all four.

    x: as for `layer_norm`; branch: x's shape and device, fp32, bf16 or fp16, or None (total is then
    a copy of x, so that the gradients of its two uses meet here); total has x's dtype.
    dropout and seed: as for `dropout`, whose mask it has. Where a gradient comes in for one of the
    two results only, no pass over memory is spent on the other.
    """
    _check(x, weight, bias)
    if branch is not None:
        checks.float_tensor("branch", branch)
        if branch.shape != x.shape or branch.device != x.device:
            raise checks.KernelArgumentError(
                f"argument 'branch': shape {tuple(branch.shape)} on {branch.device} differs from "
                f"that of 'x', {tuple(x.shape)} on {x.device}"
            )
    checks.positive("eps", eps)
    probability = checks.fraction("dropout", dropout)
    if probability > 0:
        check_seed(seed, x)
    return _op(
        x, branch, weight, bias, True, probability, seed if probability > 0 else None, eps,
        out_dtype or x.dtype,
    )[:2]  # fmt: skip


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """`layer_norm` in plain torch, in the dtype of its arguments."""
    centred = x - x.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return out if bias is None else out + bias


def add_layer_norm_reference(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_layer_norm` in plain torch, in the dtype of its arguments."""
    total = x
    if branch is not None:
        total = x + (branch if seed is None else dropout_reference(branch, dropout, seed))
    return total, layer_norm_reference(total, weight, bias, eps)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    columns = checks.float_tensor("x", x).shape[-1]
    if not 0 < columns <= MAX_COLUMNS:
        raise checks.KernelArgumentError(
            f"argument 'x': rows of {columns} elements; 1 to {MAX_COLUMNS} are supported"
        )
    checks.row_vector("weight", weight, "x", x)
    if bias is not None:
        checks.like("bias", bias, "weight", weight)


@operator("add_layer_norm")
def _op(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    keep_total: bool, dropout: float, seed: torch.Tensor | None, eps: float, out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The sum (empty unless kept), the normed sum, and mean and 1 / deviation of each row."""
    total, out, stats = _outputs(x, keep_total, out_dtype)
    if out.numel() == 0:
        return total, out, stats
    m = rows_of(x)
    b = None if branch is None else rows_of(branch)
    rows, columns = m.shape
    tiles = ADD_LAYER_NORM_TILES if keep_total else LAYER_NORM_TILES
    tile = norm_tile(columns, x.dtype, {} if dropout > 0 else tiles)
    bias = None if bias is None else bias.contiguous()
    if tile.reread:
        _reread_kernel[(rows,)](
            m, b, weight.contiguous(), bias, total if keep_total else None, out, stats,
            m.stride(0), 0 if b is None else b.stride(0), rows, columns, eps,
            FULL=tile.fits(columns), STEPS=tile.steps(columns), BLOCK=tile.block,
            num_warps=tile.warps,
        )  # fmt: skip
        return total, out, stats
    _forward_kernel[(triton.cdiv(rows, tile.rows),)](
        m, b, weight.contiguous(), bias, total if keep_total else None, out, stats, seed,
        m.stride(0), 0 if b is None else b.stride(0), rows, columns, eps, threshold_of(dropout),
        1 / (1 - dropout), DROPOUT=dropout > 0, FULL=tile.fits(columns), ROWS=tile.rows,
        BLOCK=tile.block, num_warps=tile.warps,
    )  # fmt: skip
    return total, out, stats


@operator("add_layer_norm_backward")
def _backward_op(
    dtotal: torch.Tensor | None, dout: torch.Tensor, total: torch.Tensor, weight: torch.Tensor,
    stats: torch.Tensor, branch_dtype: torch.dtype | None, biased: bool, dropout: float,
    seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of x, branch (empty where it is that of x), weight and bias."""
    dx, dbranch, dweight, dbias = _gradients(total, branch_dtype, weight, biased, dropout)
    if dx.numel() == 0:
        return dx, dbranch, dweight.zero_(), dbias.zero_()
    dy, m = rows_of(dout), rows_of(total)
    dt = None if dtotal is None else rows_of(dtotal)
    block = row_tile(m.shape[1])[1]
    programs = row_programs(m.shape[0], block)
    partial = torch.empty(2, programs, m.shape[1], dtype=torch.float32, device=m.device)
    _backward_kernel[(programs,)](
        dy, dt, m, weight.contiguous(), stats, seed, dx, dbranch if dbranch.numel() > 0 else None,
        partial, dy.stride(0), 0 if dt is None else dt.stride(0), m.stride(0), *m.shape,
        threshold_of(dropout), 1 / (1 - dropout), BIASED=biased, DROPOUT=dropout > 0,
        FULL=block == m.shape[1], STAGES=2, BLOCK=block, num_warps=backward_warps(block),
    )  # fmt: skip
    if not biased:
        sum_partials(partial[0], dweight)
        return dx, dbranch, dweight, dbias
    depth, width = DEEP_SUM
    _sum_both_kernel[(triton.cdiv(m.shape[1], width), 2)](
        partial, dweight, dbias, programs, m.shape[1], DEPTH=depth, BLOCK=width
    )
    return dx, dbranch, dweight, dbias


def _outputs(
    x: torch.Tensor, keep_total: bool, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = new_like(x) if keep_total else x.new_empty(0)
    stats = torch.empty(2, x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    return total, new_like(x, out_dtype), stats


def _gradients(
    total: torch.Tensor, branch_dtype: torch.dtype | None, weight: torch.Tensor, biased: bool,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dx = new_like(total)
    own = branch_dtype is not None and (dropout > 0 or branch_dtype != total.dtype)
    dbranch = new_like(total, branch_dtype) if own else total.new_empty(0, dtype=branch_dtype)
    dweight = new_like(weight)
    return dx, dbranch, dweight, new_like(weight) if biased else weight.new_empty(0)


_op.register_fake(
    lambda x, branch, weight, bias, keep_total, dropout, seed, eps, out_dtype: _outputs(
        x, keep_total, out_dtype
    )
)
_backward_op.register_fake(
    lambda dtotal, dout, total, weight, stats, branch_dtype, biased, dropout, seed: _gradients(
        total, branch_dtype, weight, biased, dropout
    )
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, branch, weight, bias, keep_total, dropout, seed, _, _ = inputs
    total, _, stats = output
    ctx.save_for_backward(total if keep_total else x, weight, stats, seed)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.options = (None if branch is None else branch.dtype, bias is not None, dropout)


def _differentiate(ctx: Any, dtotal: Any, dout: Any, _: Any) -> Any:
    total, weight, stats, seed = ctx.saved_tensors
    if dout is None:
        if dtotal is None:
            return (None,) * 9
        dout = torch.zeros_like(total)
    dx, dbranch, dweight, dbias = _backward_op(
        dtotal, dout, total, weight, stats, *ctx.options, seed
    )
    branch_dtype, biased, _ = ctx.options
    if branch_dtype is None:
        dbranch = None
    elif dbranch.numel() == 0:
        dbranch = dx
    return dx, dbranch, dweight, dbias if biased else None, None, None, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
