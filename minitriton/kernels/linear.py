"""Linear layers: x W^T with fused bias, and the two-layer perceptron with GELU between.

    linear(x)   = x weight^T + bias
    gelu_mlp(x) = GELU(x up^T + up_bias) down^T + down_bias    GELU(t) = t (1 + erf(t / sqrt 2)) / 2

Forward and backward are GEMMs of `gemm.py`. GELU is part of the first GEMM, and its derivative part
of the GEMM that computes the gradient before it, so no pass over memory is spent on either.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.gemm import gemm, sum_partials

PRECISIONS = ("tf32", "tf32x3", "ieee")
SUM_ROWS, SUM_COLUMNS = 32, 64
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


def column_sum(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums over the rows of a matrix, in fp32 and in a fixed order: [columns]."""
    rows, columns = x.shape
    out = torch.empty(columns, dtype=dtype, device=x.device)
    if rows == 0:
        return out.zero_()
    parts = min(triton.cdiv(rows, SUM_ROWS), MOST_PARTIALS)
    partial = torch.empty(parts, columns, dtype=torch.float32, device=x.device)
    _column_sum_kernel[(triton.cdiv(columns, SUM_COLUMNS), parts)](
        x, partial, *x.stride(), rows, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS
    )
    return sum_partials(partial, out)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    precision: str = "tf32x3",
) -> torch.Tensor:
    """x weight^T + bias over the last dimension; differentiable in all three.

    x: [..., K]; weight: [N, K]; bias: [N] or None; one dtype (fp32, bf16 or fp16) and one device,
    any strides. The result is [..., N], contiguous. Sums are fp32; precision says how fp32 is
    multiplied: "tf32x3" (three tensor-core products, about fp32's error), "tf32" (10 bits) or
    "ieee" (no tensor cores). KernelArgumentError names the argument that does not fit.
    """
    _check(x, weight, "weight", bias, "bias", precision)
    return _linear_op(x, weight, bias, precision)


def gelu_mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    precision: str = "tf32x3",
) -> torch.Tensor:
    """GELU(x up^T + up_bias) down^T + down_bias with the exact (erf) GELU; differentiable in all.

    x: [..., K]; up: [F, K]; down: [N, F]; up_bias: [F]; down_bias: [N]; dtypes, devices, precision
    and errors as for `linear`. What GELU is applied to is saved for the backward pass, [..., F].
    """
    _check(x, up, "up", up_bias, "up_bias", precision)
    checks.like_but_shape("down", down, "x", x)
    if down.dim() != 2 or down.shape[1] != up.shape[0]:
        raise checks.KernelArgumentError(
            f"argument 'down': shape {tuple(down.shape)}; 'up' of shape {tuple(up.shape)} "
            f"needs [N, {up.shape[0]}]"
        )
    _check_bias("down_bias", down_bias, "down", down)
    return _mlp_op(x, up, down, up_bias, down_bias, precision)[0]


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


def _check(
    x: Any, weight: Any, weight_name: str, bias: Any, bias_name: str, precision: str
) -> None:
    checks.float_tensor("x", x)
    checks.like_but_shape(weight_name, weight, "x", x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise checks.KernelArgumentError(
            f"argument '{weight_name}': shape {tuple(weight.shape)}; 'x' of shape "
            f"{tuple(x.shape)} needs [N, {x.shape[-1]}]"
        )
    _check_bias(bias_name, bias, weight_name, weight)
    if precision not in PRECISIONS:
        raise checks.KernelArgumentError(
            f"argument 'precision': must be one of {', '.join(PRECISIONS)}, got {precision!r}"
        )


def _check_bias(name: str, bias: Any, weight_name: str, weight: torch.Tensor) -> None:
    if bias is None:
        return
    checks.like_but_shape(name, bias, weight_name, weight)
    if bias.shape != weight.shape[:1]:
        raise checks.KernelArgumentError(
            f"argument '{name}': shape {tuple(bias.shape)}; '{weight_name}' of shape "
            f"{tuple(weight.shape)} needs ({weight.shape[0]},)"
        )


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """[rows, last dimension], a view where strides allow; either may be 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _new(x: torch.Tensor, width: int) -> torch.Tensor:
    return torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)


def _dense(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.contiguous()


@torch.library.custom_op("minitriton::linear", mutates_args=())
def _linear_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, precision: str
) -> torch.Tensor:
    out = _new(x, weight.shape[0])
    a = _matrix(x)
    gemm(a, weight.T, _matrix(out), bias=_dense(bias), precision=precision)
    return out


@torch.library.custom_op("minitriton::linear_backward", mutates_args=())
def _linear_backward_op(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool], precision: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight and bias; those that are not wanted are empty."""
    dy, a = _matrix(grad), _matrix(x)
    dx, dweight, dbias = _linear_gradients(grad, x, weight, wanted)
    if wanted[0]:
        gemm(dy, weight, dx.view(a.shape), precision=precision)
    if wanted[1]:
        gemm(dy.T, a, dweight, precision=precision)
    if wanted[2]:
        dbias.copy_(column_sum(dy, dbias.dtype))
    return dx, dweight, dbias


def _linear_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised gradients; empty ones where none is wanted."""
    shapes = (x.shape, weight.shape, weight.shape[:1])
    dx, dw, db = (
        torch.empty(shape if want else 0, dtype=x.dtype, device=x.device)
        for shape, want in zip(shapes, wanted, strict=True)
    )
    return dx, dw, db


@torch.library.custom_op("minitriton::gelu_mlp", mutates_args=())
def _mlp_op(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None, precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result, what GELU is applied to, and what it gives."""
    out, pre, inner = _new(x, down.shape[0]), _new(x, up.shape[0]), _new(x, up.shape[0])
    a = _matrix(x)
    flat = _matrix(inner)
    gemm(
        a, up.T, flat, bias=_dense(up_bias), pre=pre.view(flat.shape), epilogue="gelu",
        precision=precision,
    )  # fmt: skip
    gemm(flat, down.T, _matrix(out), bias=_dense(down_bias), precision=precision)
    return out, pre, inner


@torch.library.custom_op("minitriton::gelu_mlp_backward", mutates_args=())
def _mlp_backward_op(
    grad: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, pre: torch.Tensor,
    inner: torch.Tensor, wanted: list[bool], precision: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of x, up, down, up_bias and down_bias; those that are not wanted are empty."""
    gradients = _mlp_gradients(grad, x, up, down, wanted)
    dx, dup, ddown, dup_bias, ddown_bias = gradients
    dy, a = _matrix(grad), _matrix(x)
    hidden = _matrix(inner)
    if wanted[2]:
        gemm(dy.T, hidden, ddown, precision=precision)
    if wanted[4]:
        ddown_bias.copy_(column_sum(dy, x.dtype))
    dpre = torch.empty_like(hidden)
    gemm(dy, down, dpre, pre=pre.view(hidden.shape), epilogue="gelu_backward", precision=precision)
    if wanted[0]:
        gemm(dpre, up, dx.view(a.shape), precision=precision)
    if wanted[1]:
        gemm(dpre.T, a, dup, precision=precision)
    if wanted[3]:
        dup_bias.copy_(column_sum(dpre, x.dtype))
    return gradients


def _mlp_gradients(
    grad: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, wanted: list[bool]
) -> list[torch.Tensor]:
    shapes = (x.shape, up.shape, down.shape, up.shape[:1], down.shape[:1])
    return [
        torch.empty(shape if want else 0, dtype=x.dtype, device=x.device)
        for shape, want in zip(shapes, wanted, strict=True)
    ]


_linear_op.register_fake(lambda x, weight, bias, precision: _new(x, weight.shape[0]))
_linear_backward_op.register_fake(
    lambda grad, x, weight, wanted, precision: _linear_gradients(grad, x, weight, wanted)
)
_mlp_op.register_fake(
    lambda x, up, down, up_bias, down_bias, precision: (
        _new(x, down.shape[0]), _new(x, up.shape[0]), _new(x, up.shape[0])
    )
)  # fmt: skip
_mlp_backward_op.register_fake(
    lambda grad, x, up, down, pre, inner, wanted, precision: _mlp_gradients(
        grad, x, up, down, wanted
    )
)


def _save_linear(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.precision = inputs[3]


def _differentiate_linear(ctx: Any, grad: torch.Tensor) -> Any:
    wanted = list(ctx.needs_input_grad[:3])
    gradients = _linear_backward_op(grad, *ctx.saved_tensors, wanted, ctx.precision)
    return *_only(gradients, wanted), None


def _save_mlp(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.precision = inputs[5]


def _differentiate_mlp(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
    wanted = list(ctx.needs_input_grad[:5])
    gradients = _mlp_backward_op(grad, *ctx.saved_tensors, wanted, ctx.precision)
    return *_only(gradients, wanted), None


def _only(gradients: Any, wanted: list[bool]) -> list[torch.Tensor | None]:
    return [g if want else None for g, want in zip(gradients, wanted, strict=True)]


_linear_op.register_autograd(_differentiate_linear, setup_context=_save_linear)
_mlp_op.register_autograd(_differentiate_mlp, setup_context=_save_mlp)
