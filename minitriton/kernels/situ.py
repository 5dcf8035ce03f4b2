"""SiTU and SiTU-GLU: bounded gated activations, forward and backward.

    SiTU(x)        = b1 tanh(x / b1) sigmoid(x)
    SiTU-GLU(g, u) = SiTU(g) * b2 tanh(u / b2)          (b2 = None: SiTU(g) * u)
    weighted       : SiTU-GLU(g, u) * w,                one routing weight w for a row

Source: Kimi K3 technical report, eq. 12 (b1 = 4, b2 = 25); b1 = 1 is sigmoid(x) tanh(x), and both
parameters towards infinity give SwiGLU. One read of the inputs and one write of the results; the
backward pass computes the activations again instead of storing them, the gradient of w included
(the sum over a row of the incoming gradient times the unweighted result). fp32 inside.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.operator import operator
from minitriton.kernels.row_blocks import row_block, row_blocks
from minitriton.kernels.rows import new_like, rows_of
from minitriton.language.extra import libdevice

BLOCK = 1024  # elements of a row per program


@triton.jit
def tanh_of_share(x, beta, EXACT: tl.constexpr):
    """tanh(x / beta). For bf16 one instruction with an error of 2^-11, below half a unit of its
    last place, will do, and one division per thread."""
    return tl.tanh(x / beta) if EXACT else libdevice.fast_tanhf(x * (1 / beta))


@triton.jit
def situ_of(x, beta, EXACT: tl.constexpr):
    return beta * tanh_of_share(x, beta, EXACT) * tl.sigmoid(x)


@triton.jit
def situ_slope(x, beta, EXACT: tl.constexpr):
    t = tanh_of_share(x, beta, EXACT)
    s = tl.sigmoid(x)
    return (1 - t * t) * s + beta * t * s * (1 - s)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, weight_ptr, out_ptr, gate_stride, up_stride, rows, columns, beta1, beta2,
    GLU: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, first = row_block(BLOCK)
    if row >= rows:
        return
    row = row.to(tl.int64)
    at = first + tl.arange(0, BLOCK)
    mask = at < columns
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask).to(tl.float32)
    out = situ_of(gate, beta1, EXACT)
    if GLU:
        up = tl.load(up_ptr + row * up_stride + at, mask=mask).to(tl.float32)
        if CAPPED:
            up = beta2 * tanh_of_share(up, beta2, EXACT)
        out = out * up
    if WEIGHTED:
        out = out * tl.load(weight_ptr + row)
    tl.store(out_ptr + row * columns + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, gate_ptr, up_ptr, weight_ptr, dgate_ptr, dup_ptr, dweight_ptr, grad_stride,
    gate_stride, up_stride, rows, columns, beta1, beta2, GLU: tl.constexpr, CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row, or with WEIGHTED, whose gradient needs it, the whole row."""
    row, first = row_block(BLOCK)
    if row >= rows:
        return
    row = row.to(tl.int64)
    if WEIGHTED:
        weight = tl.load(weight_ptr + row)
        dweight = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(first, columns, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < columns
        grad = tl.load(grad_ptr + row * grad_stride + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
        if GLU:
            up = tl.load(up_ptr + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
            act = situ_of(gate, beta1, EXACT)
            slope = act
            if CAPPED:
                t = tanh_of_share(up, beta2, EXACT)
                up = beta2 * t
                slope = act * (1 - t * t)
            if WEIGHTED:
                dweight += grad * (act * up)
                grad = grad * weight
            dup = (grad * slope).to(dup_ptr.dtype.element_ty)
            tl.store(dup_ptr + row * columns + at, dup, mask=mask)
            grad = grad * up
        dgate = grad * situ_slope(gate, beta1, EXACT)
        tl.store(dgate_ptr + row * columns + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if WEIGHTED:
        tl.store(dweight_ptr + row, tl.sum(dweight))


def situ(x: torch.Tensor, beta1: float = 4.0) -> torch.Tensor:
    """b1 tanh(x / b1) sigmoid(x), elementwise; differentiable in x.

    x: any shape of rank >= 1, fp32, bf16 or fp16, on a GPU or the CPU; the result has its shape and
    dtype and is contiguous. KernelArgumentError for anything else and for beta1 <= 0.
    """
    return _situ_op(checks.float_tensor("x", x), checks.positive("beta1", beta1))


def situ_glu(
    gate: torch.Tensor,
    up: torch.Tensor,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """SiTU(gate) * b2 tanh(up / b2) [* weight], elementwise; differentiable in gate, up and weight.

    gate, up: one shape of rank >= 1, one dtype (fp32, bf16 or fp16), one device; halves of one
    [..., 2 n] tensor are read in place. beta2 = None leaves `up` uncapped. weight: one number for a
    row, fp32, in the shape of gate without its last dimension; the product is rounded once. The
    result is contiguous in gate's shape and dtype. KernelArgumentError names the argument that does
    not fit.
    """
    checks.float_tensor("gate", gate)
    checks.like("up", up, "gate", gate)
    cap = None if beta2 is None else checks.positive("beta2", beta2)
    return _situ_glu_op(gate, up, _check_weight(weight, gate), checks.positive("beta1", beta1), cap)


def _check_weight(weight: object, gate: torch.Tensor) -> torch.Tensor | None:
    if weight is None or (
        isinstance(weight, torch.Tensor)
        and (weight.shape, weight.dtype) == (gate.shape[:-1], torch.float32)
        and weight.device == gate.device
        and weight.layout is torch.strided
    ):
        return weight
    found = type(weight).__name__
    if isinstance(weight, torch.Tensor):
        found = f"shape {tuple(weight.shape)}, {weight.dtype}, {weight.device}"
    raise checks.KernelArgumentError(
        f"argument 'weight': {found}; 'gate' of shape {tuple(gate.shape)} on {gate.device} needs "
        f"a tensor of shape {tuple(gate.shape[:-1])} in torch.float32 there"
    )


def situ_reference(x: torch.Tensor, beta1: float = 4.0) -> torch.Tensor:
    """`situ` in plain torch, in the dtype of x."""
    return beta1 * torch.tanh(x / beta1) * torch.sigmoid(x)


def situ_glu_reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """`situ_glu` in plain torch, in the dtype of its arguments."""
    capped = up if beta2 is None else beta2 * torch.tanh(up / beta2)
    out = situ_reference(gate, beta1) * capped
    return out if weight is None else out * weight[..., None]


def _forward(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor | None, beta1: float,
    beta2: float | None,
) -> torch.Tensor:  # fmt: skip
    out = new_like(gate)
    if out.numel() == 0:
        return out
    g = rows_of(gate)
    u = g if up is None else rows_of(up)
    w = g if weight is None else weight.contiguous()
    rows, columns = g.shape
    _forward_kernel[row_blocks(rows, columns, BLOCK)](
        g, u, w, out, g.stride(0), u.stride(0), rows, columns, beta1, beta2 or 1.0,
        GLU=up is not None, CAPPED=beta2 is not None, WEIGHTED=weight is not None,
        EXACT=gate.dtype != torch.bfloat16, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def _backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor | None,
    beta1: float, beta2: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dgate, dup, dweight = _gradients(gate, up, weight)
    if dgate.numel() == 0:
        return dgate, dup, dweight.zero_()
    dy, g = rows_of(grad), rows_of(gate)
    u = g if up is None else rows_of(up)
    w = g if weight is None else weight.contiguous()
    rows, columns = g.shape
    outs = dgate, dgate if up is None else dup, dgate if weight is None else dweight
    _backward_kernel[row_blocks(rows, columns, BLOCK if weight is None else columns)](
        dy, g, u, w, *outs, dy.stride(0), g.stride(0), u.stride(0), rows, columns, beta1,
        beta2 or 1.0, GLU=up is not None, CAPPED=beta2 is not None, WEIGHTED=weight is not None,
        EXACT=gate.dtype != torch.bfloat16, BLOCK=BLOCK,
    )  # fmt: skip
    return dgate, dup, dweight


def _gradients(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the gradients; an empty tensor stands for that of an absent argument."""
    dgate = new_like(gate)
    dup = dgate.new_empty(0) if up is None else new_like(up)
    return dgate, dup, dgate.new_empty(0) if weight is None else new_like(weight)


@operator("situ")
def _situ_op(x: torch.Tensor, beta1: float) -> torch.Tensor:
    return _forward(x, None, None, beta1, None)


@operator("situ_backward")
def _situ_backward_op(grad: torch.Tensor, x: torch.Tensor, beta1: float) -> torch.Tensor:
    return _backward(grad, x, None, None, beta1, None)[0]


@operator("situ_glu")
def _situ_glu_op(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, beta1: float,
    beta2: float | None,
) -> torch.Tensor:  # fmt: skip
    return _forward(gate, up, weight, beta1, beta2)


@operator("situ_glu_backward")
def _situ_glu_backward_op(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None,
    beta1: float, beta2: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward(grad, gate, up, weight, beta1, beta2)


_situ_op.register_fake(lambda x, beta1: new_like(x))
_situ_backward_op.register_fake(lambda grad, x, beta1: new_like(x))
_situ_glu_op.register_fake(lambda gate, up, weight, beta1, beta2: new_like(gate))
_situ_glu_backward_op.register_fake(
    lambda grad, gate, up, weight, beta1, beta2: _gradients(gate, up, weight)
)


def _save_situ(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.beta1 = inputs[1]


def _save_situ_glu(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.betas = inputs[3:]


def _differentiate_situ(ctx: Any, grad: torch.Tensor) -> Any:
    return _situ_backward_op(grad, *ctx.saved_tensors, ctx.beta1), None


def _differentiate_situ_glu(ctx: Any, grad: torch.Tensor) -> Any:
    gate, up, weight = ctx.saved_tensors
    dgate, dup, dweight = _situ_glu_backward_op(grad, gate, up, weight, *ctx.betas)
    return dgate, dup, None if weight is None else dweight, None, None


_situ_op.register_autograd(_differentiate_situ, setup_context=_save_situ)
_situ_glu_op.register_autograd(_differentiate_situ_glu, setup_context=_save_situ_glu)
