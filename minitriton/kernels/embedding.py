"""Token and position embeddings with dropout, forward and backward.

    out[.., t] = dropout(weight[ids[.., t]] + positions[t])

The gradient of `weight` adds rows of equal ids (`embedding_gradient.py`), that of `positions` rows
of equal places: fp32, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.dropout import (
    check_seed,
    dropout_reference,
    kept,
    masked_gradient,
)
from minitriton.kernels.embedding_gradient import weight_gradient
from minitriton.kernels.operator import operator
from minitriton.kernels.philox import threshold_of
from minitriton.kernels.rows import new_like

TOKENS, CHANNELS = 4, 256  # tile of the forward kernel


@triton.jit
def _forward_kernel(
    ids_ptr, weight_ptr, positions_ptr, out_ptr, seed_ptr, tokens, length, vocabulary, columns,
    threshold: tl.uint32, scale, DROPOUT: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * CHANNELS
    at = first + tl.arange(0, CHANNELS)[None, :]
    inside = row < tokens
    index = tl.load(ids_ptr + row, mask=inside, other=0).to(tl.int64)
    known = inside & (index >= 0) & (index < vocabulary)
    source = weight_ptr + index[:, None] * columns + at
    out = tl.load(source, mask=known[:, None] & (at < columns), other=float("nan")).to(tl.float32)
    if positions_ptr is not None:
        place = positions_ptr + (row % length).to(tl.int64)[:, None] * columns + at
        mask = inside[:, None] & (at < columns)
        out += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if DROPOUT:
        keep = kept(tl.load(seed_ptr), row, first, threshold, CHANNELS)
        out = tl.where(keep, out * scale, 0.0)
    to = out_ptr + row.to(tl.int64)[:, None] * columns + at
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (at < columns))


@triton.jit
def _position_gradient_kernel(grad_ptr, out_ptr, batch, length, columns, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    used = at < length.to(tl.int64) * columns
    for b in tl.range(batch, num_stages=3):
        source = grad_ptr + b.to(tl.int64) * length * columns + at
        acc += tl.load(source, mask=used, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=at < size)


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """dropout(weight[ids] + positions[:T]); differentiable in weight and positions.

    ids: [..., T], int64 or int32, fewer than 2^31 in all; weight: [V, d]; positions: [P, d] with
    P >= T, in weight's dtype (fp32, bf16 or fp16), both contiguous. Result: [..., T, d], in
    out_dtype (weight's dtype by default). dropout and seed: as for `dropout`. An id outside 0..V-1
    gives a row of NaN. KernelArgumentError names the argument that does not fit.
    """
    checks.float_tensor("weight", weight)
    if weight.dim() != 2 or 0 in weight.shape:
        raise KernelArgumentError(
            f"argument 'weight': shape {tuple(weight.shape)}; it must be [V, d]"
        )
    checks.integers("ids", ids, None, weight.device)
    if positions is not None:
        checks.like_but_shape("positions", positions, "weight", weight)
        if positions.shape[1:] != weight.shape[1:] or positions.shape[0] < ids.shape[-1]:
            raise KernelArgumentError(
                f"argument 'positions': shape {tuple(positions.shape)}; ids of length "
                f"{ids.shape[-1]} need at least [{ids.shape[-1]}, {weight.shape[1]}]"
            )
    probability = checks.fraction("dropout", dropout)
    if probability > 0:
        check_seed(seed, weight)
    return _op(
        ids, weight, positions, probability, seed if probability > 0 else None,
        out_dtype or weight.dtype,
    )  # fmt: skip


def tied_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`embedding`, and weight once more for the output head; arguments and errors as there.

    The gradient that the head gives to the second result is added where the gradient of the first
    is computed, in one kernel, instead of by autograd in a pass of its own. Not for torch.compile,
    which has no operators that return their argument.
    """
    with torch.no_grad():
        out = embedding(ids, weight, positions, dropout=dropout, seed=seed, out_dtype=out_dtype)
    head: tuple[torch.Tensor, torch.Tensor] = _Tied.apply(
        ids, weight, positions, out, float(dropout), seed if dropout > 0 else None
    )
    return head


class _Tied(torch.autograd.Function):
    """Attaches gradients to an embedding that has been looked up."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor | None,
        out: torch.Tensor, dropout: float, seed: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.save_for_backward(ids, weight, positions, seed)
        ctx.dropout = dropout
        ctx.set_materialize_grads(False)
        return out.view_as(out), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, head: torch.Tensor | None) -> Any:
        ids, weight, positions, seed = ctx.saved_tensors
        dweight, dpositions = _gradients(weight, positions)
        if grad is None or ids.numel() == 0:
            dweight = dweight.zero_() if head is None else head
            dpositions.zero_()
        else:
            extra = None if head is None else head.contiguous()
            embedding_gradients(grad, ids, dweight, dpositions, ctx.dropout, seed, extra=extra)
        return None, dweight, None if positions is None else dpositions, None, None, None


def embedding_reference(
    ids: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """`embedding` in plain torch, in the dtype of weight."""
    out = torch.nn.functional.embedding(ids, weight)
    if positions is not None:
        out = out + positions[: ids.shape[-1]]
    return out if seed is None else dropout_reference(out, dropout, seed)


def _out(ids: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*ids.shape, weight.shape[1], dtype=out_dtype, device=weight.device)


@operator("embedding")
def _op(
    ids: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor | None, dropout: float,
    seed: torch.Tensor | None, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    out = _out(ids, weight, out_dtype)
    if ids.numel() == 0:
        return out
    grid = (triton.cdiv(ids.numel(), TOKENS), triton.cdiv(weight.shape[1], CHANNELS))
    table = None if positions is None else positions.contiguous()
    _forward_kernel[grid](
        ids.contiguous(), weight.contiguous(), table, out, seed, ids.numel(), ids.shape[-1],
        *weight.shape, threshold_of(dropout), 1 / (1 - dropout), DROPOUT=dropout > 0,
        TOKENS=TOKENS, CHANNELS=CHANNELS,
    )  # fmt: skip
    return out


@operator("embedding_backward")
def _backward_op(
    grad: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor | None,
    dropout: float, seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dweight, dpositions = _gradients(weight, positions)
    if ids.numel() == 0:
        return dweight.zero_(), dpositions.zero_()
    return embedding_gradients(grad, ids, dweight, dpositions, dropout, seed)


def embedding_gradients(
    grad: torch.Tensor, ids: torch.Tensor, dweight: torch.Tensor, dpositions: torch.Tensor,
    dropout: float, seed: torch.Tensor | None, *, extra: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Writes both gradients (dpositions may be empty); `extra` [V, d] is added to dweight, which
    serves an embedding tied to the output head. For callers inside the library: no checks."""
    d = grad.contiguous() if seed is None else masked_gradient(grad, dropout, seed)
    weight_gradient(d, ids.contiguous(), dweight, extra)
    if dpositions.numel() > 0:
        length, columns = ids.shape[-1], dweight.shape[1]
        _position_gradient_kernel[(triton.cdiv(dpositions.numel(), 1024),)](
            d, dpositions, ids.numel() // length, length, columns, dpositions.numel(), BLOCK=1024
        )
    return dweight, dpositions


def _gradients(
    weight: torch.Tensor, positions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dweight = new_like(weight)
    shape = (0,) if positions is None else positions.shape
    return dweight, torch.empty(shape, dtype=weight.dtype, device=weight.device)


_op.register_fake(
    lambda ids, weight, positions, dropout, seed, out_dtype: _out(ids, weight, out_dtype)
)
_backward_op.register_fake(
    lambda grad, ids, weight, positions, dropout, seed: _gradients(weight, positions)
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ids, weight, positions, dropout, seed, _ = inputs
    ctx.save_for_backward(ids, weight, positions, seed)
    ctx.dropout = dropout


def _differentiate(ctx: Any, grad: torch.Tensor) -> Any:
    ids, weight, positions, seed = ctx.saved_tensors
    dweight, dpositions = _backward_op(grad, ids, weight, positions, ctx.dropout, seed)
    return None, dweight, None if positions is None else dpositions, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
