"""Linear layers: x W^T with fused bias, and the two-layer perceptron with GELU between.

    linear(x)   = x weight^T + bias
    gelu_mlp(x) = GELU(x up^T + up_bias) down^T + down_bias    GELU(t) = t (1 + erf(t / sqrt 2)) / 2

A weight may be an fp32 master with a copy in the dtype of x beside it: the copy is multiplied, the
gradient is the master's, in fp32. Forward and backward are GEMMs of `gemm.py`. GELU is part of the
first GEMM, and its derivative part of the GEMM that computes the gradient before it, so no pass
over memory is spent on either.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.gemm import gemm, sum_partials
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import new_like

PRECISIONS = ("tf32", "tf32x3", "ieee")
SUM_ROWS = 32
MOST_PARTIALS = 64


@triton.jit
def _column_sum_kernel(
    x_ptr,
    partial_ptr,
    stride_row,
    stride_column,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    step = tl.num_programs(1) * ROWS
    for first in range(tl.program_id(1) * ROWS, rows, step):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        acc += tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    to = partial_ptr + tl.program_id(1).to(tl.int64) * columns + column
    tl.store(to, tl.sum(acc, 0), mask=column < columns)


def column_sum(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Sums over the rows of a matrix into out [columns], in fp32 and in a fixed order."""
    rows, columns = x.shape
    if rows == 0:
        return out.zero_()
    parts = min(triton.cdiv(rows, SUM_ROWS), MOST_PARTIALS)
    partial = torch.empty(parts, columns, dtype=torch.float32, device=x.device)
    width = 256 if columns > 1024 else 64  # so that there are programs enough
    _column_sum_kernel[(triton.cdiv(columns, width), parts)](
        x, partial, *x.stride(), rows, columns, ROWS=SUM_ROWS, COLUMNS=width
    )
    return sum_partials(partial, out)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    low: torch.Tensor | None = None,
    precision: str = "tf32x3",
) -> torch.Tensor:
    """x weight^T + bias over the last dimension; differentiable in all three.

    x: [..., K]; weight: [N, K]; bias: [N] or None; one dtype (fp32, bf16 or fp16) and one device,
    any strides. low: a copy of weight in x's dtype, which is multiplied in its place; weight and
    bias may then have another of the three dtypes, and so have their gradients. The result is
    [..., N], contiguous. Sums are fp32; precision says how fp32 is multiplied: "tf32x3" (three
    tensor-core products, about fp32's error), "tf32" (10 bits) or "ieee" (no tensor cores). Large
    products of fp32 as "tf32x3" need room on Hopper for copies of both operands, of twice their
    size.
    KernelArgumentError names the argument that does not fit.
    """
    _check_input(x, precision)
    _check_layer(x, x.shape[-1], ("weight", weight), ("low", low), ("bias", bias))
    return _linear_op(x, weight, low, bias, precision)


def gelu_mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    low_up: torch.Tensor | None = None,
    low_down: torch.Tensor | None = None,
    precision: str = "tf32x3",
) -> torch.Tensor:
    """GELU(x up^T + up_bias) down^T + down_bias with the exact (erf) GELU; differentiable in all.

    x: [..., K]; up: [F, K]; down: [N, F]; up_bias: [F]; down_bias: [N]; low_up, low_down: copies of
    up and down in x's dtype; dtypes, devices, precision and errors as for `linear`. What GELU is
    applied to and what it gives are saved for the backward pass, [..., F] each.
    """
    _check_input(x, precision)
    _check_layer(x, x.shape[-1], ("up", up), ("low_up", low_up), ("up_bias", up_bias))
    layer = (("down", down), ("low_down", low_down), ("down_bias", down_bias))
    _check_layer(x, up.shape[0], *layer)
    return _mlp_op(x, up, down, low_up, low_down, up_bias, down_bias, precision)[0]


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` in plain torch, in the dtype of its arguments."""
    return torch.nn.functional.linear(x, weight, bias)


def gelu_mlp_reference(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gelu_mlp` in plain torch, in the dtype of its arguments."""
    inner = torch.nn.functional.gelu(linear_reference(x, up, up_bias))
    return linear_reference(inner, down, down_bias)


def _check_input(x: Any, precision: str) -> None:
    checks.float_tensor("x", x)
    if precision not in PRECISIONS:
        raise checks.KernelArgumentError(
            f"argument 'precision': must be one of {', '.join(PRECISIONS)}, got {precision!r}"
        )


def _check_layer(
    x: torch.Tensor, width: int, weight: tuple[str, Any], low: tuple[str, Any],
    bias: tuple[str, Any],
) -> None:  # fmt: skip
    """Each of weight, low and bias is a name and a value."""
    name, w = weight[0], checks.float_tensor(*weight)
    shape = w.shape
    if len(shape) != 2 or shape[1] != width:
        raise checks.KernelArgumentError(
            f"argument '{name}': shape {tuple(shape)}; it must be [N, {width}]"
        )
    if w.device != x.device:
        raise checks.differs("device", name, w, "x", x)
    if low[1] is not None:
        checks.like_but_shape(*low, "x", x)
        if low[1].shape != shape:
            raise checks.differs("shape", *low, name, w)
    elif w.dtype != x.dtype:
        raise checks.differs("dtype", name, w, "x", x)
    if bias[1] is not None:
        checks.like_but_shape(*bias, name, w)
        if bias[1].shape != shape[:1]:
            raise checks.KernelArgumentError(
                f"argument '{bias[0]}': shape {tuple(bias[1].shape)}; '{name}' of shape "
                f"{tuple(shape)} needs ({shape[0]},)"
            )


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """[rows, last dimension], a view where strides allow; either may be 0."""
    if x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _new(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], width)


def _dense(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.contiguous()


def _room(
    like: list[torch.Tensor], layers: list[torch.Tensor], wanted: list[bool]
) -> list[torch.Tensor]:
    """Uninitialised gradients of tensors, and of biases beside weights; empty ones where none is
    wanted."""
    tensors = [
        new_like(x) if want else x.new_empty(0) for x, want in zip(like, wanted, strict=False)
    ]
    biases = [
        w.new_empty(w.shape[0] if want else 0)
        for w, want in zip(layers, wanted[len(like) :], strict=True)
    ]
    return tensors + biases


@operator("linear")
def _linear_op(
    x: torch.Tensor, weight: torch.Tensor, low: torch.Tensor | None, bias: torch.Tensor | None,
    precision: str,
) -> torch.Tensor:  # fmt: skip
    out = _new(x, weight.shape[0])
    factor = weight if low is None else low
    gemm(_matrix(x), factor.T, out, bias=_dense(bias), precision=precision)
    return out


@operator("linear_backward")
def _linear_backward_op(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, low: torch.Tensor | None,
    wanted: list[bool], precision: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of x, weight and bias; those that are not wanted are empty."""
    dx, dweight, dbias = gradients = _room([x, weight], [weight], wanted)
    dy, a = _matrix(grad), _matrix(x)
    if wanted[0]:
        gemm(dy, weight if low is None else low, dx, precision=precision)
    if wanted[1]:
        gemm(dy.T, a, dweight, precision=precision)
    if wanted[2]:
        column_sum(dy, dbias)
    return gradients


@operator("gelu_mlp")
def _mlp_op(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, low_up: torch.Tensor | None,
    low_down: torch.Tensor | None, up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result, what GELU is applied to, and what it gives."""
    out, pre, inner = _new(x, down.shape[0]), _new(x, up.shape[0]), _new(x, up.shape[0])
    first, second = (up if low_up is None else low_up), (down if low_down is None else low_down)
    gemm(
        _matrix(x), first.T, inner, bias=_dense(up_bias), pre=pre, epilogue="gelu",
        precision=precision,
    )  # fmt: skip
    bias = _dense(down_bias)
    gemm(_matrix(inner), second.T, out, bias=bias, precision=precision)
    return out, pre, inner


@operator("gelu_mlp_backward")
def _mlp_backward_op(
    grad: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    low_up: torch.Tensor | None, low_down: torch.Tensor | None, pre: torch.Tensor,
    inner: torch.Tensor, wanted: list[bool], precision: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of x, up, down, up_bias and down_bias; those that are not wanted are empty."""
    gradients = _room([x, up, down], [up, down], wanted)
    dx, dup, ddown, dup_bias, ddown_bias = gradients
    first, second = (up if low_up is None else low_up), (down if low_down is None else low_down)
    dy, a, hidden = _matrix(grad), _matrix(x), _matrix(inner)
    if wanted[2]:
        gemm(dy.T, hidden, ddown, precision=precision)
    if wanted[4]:
        column_sum(dy, ddown_bias)
    dpre = torch.empty_like(hidden)
    gemm(dy, second, dpre, pre=pre, epilogue="gelu_backward", precision=precision)
    if wanted[0]:
        gemm(dpre, first, dx, precision=precision)
    if wanted[1]:
        gemm(dpre.T, a, dup, precision=precision)
    if wanted[3]:
        column_sum(dpre, dup_bias)
    return gradients


_linear_op.register_fake(lambda x, weight, low, bias, precision: _new(x, weight.shape[0]))
_linear_backward_op.register_fake(
    lambda grad, x, weight, low, wanted, precision: _room([x, weight], [weight], wanted)
)
_mlp_op.register_fake(
    lambda x, up, down, low_up, low_down, up_bias, down_bias, precision: (
        _new(x, down.shape[0]), _new(x, up.shape[0]), _new(x, up.shape[0])
    )
)  # fmt: skip
_mlp_backward_op.register_fake(
    lambda grad, x, up, down, low_up, low_down, pre, inner, wanted, precision: _room(
        [x, up, down], [up, down], wanted
    )
)


def _save_linear(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.precision = inputs[4]


def _differentiate_linear(ctx: Any, grad: torch.Tensor) -> Any:
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[3]]
    gradients = _linear_backward_op(grad, *ctx.saved_tensors, wanted, ctx.precision)
    dx, dweight, dbias = _only(gradients, wanted)
    return dx, dweight, None, dbias, None


def _save_mlp(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.precision = inputs[7]


def _differentiate_mlp(ctx: Any, grad: torch.Tensor | None, *_: Any) -> Any:
    if grad is None:
        return (None,) * 8
    needs = ctx.needs_input_grad
    wanted = [*needs[:3], *needs[5:7]]
    gradients = _mlp_backward_op(grad, *ctx.saved_tensors, wanted, ctx.precision)
    dx, dup, ddown, dup_bias, ddown_bias = _only(gradients, wanted)
    return dx, dup, ddown, None, None, dup_bias, ddown_bias, None


def _only(gradients: list[torch.Tensor], wanted: list[bool]) -> list[torch.Tensor | None]:
    return [g if want else None for g, want in zip(gradients, wanted, strict=True)]


_linear_op.register_autograd(_differentiate_linear, setup_context=_save_linear)
_mlp_op.register_autograd(_differentiate_mlp, setup_context=_save_mlp)
