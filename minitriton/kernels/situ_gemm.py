"""A dense linear layer with SiTU-GLU in its epilogue, and the activation's tile functions.

    gate = x W13[:ff]^T    up = x W13[ff:]^T    out = SiTU(gate) * b2 tanh(up / b2)

Source: Kimi K3 technical report, eq. 12; the layer is the first half of its dense layer 0 and of
its shared experts. One kernel computes both halves of each output tile, so that gate and up are
written (rounded, for the backward pass) only where a gradient will be needed, and never read again
in the forward pass. The backward pass is one elementwise kernel and two products of `gemm.py`.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.gemm import gemm
from minitriton.kernels.operator import operator
from minitriton.kernels.row_blocks import row_block, row_blocks
from minitriton.kernels.rows import dense, rows_of
from minitriton.kernels.situ import situ_glu_reference, situ_of, situ_slope, tanh_of_share

BLOCK = 1024  # elements of a row per program of the elementwise backward kernel
GROUP = 8  # blocks of rows that walk through the columns together and share weights in L2


@triton.jit
def glu(gate, up, beta1, beta2, CAPPED: tl.constexpr, EXACT: tl.constexpr):
    """SiTU-GLU of fp32 tiles."""
    if CAPPED:
        up = beta2 * tanh_of_share(up, beta2, EXACT)
    return situ_of(gate, beta1, EXACT) * up


@triton.jit
def glu_backward(gate, up, beta1, beta2, CAPPED: tl.constexpr, EXACT: tl.constexpr):
    """(SiTU-GLU, its slope in gate, its slope in up) of fp32 tiles."""
    s = situ_of(gate, beta1, EXACT)
    slope = s
    if CAPPED:
        t = tanh_of_share(up, beta2, EXACT)
        up = beta2 * t
        slope = s * (1 - t * t)
    return s * up, situ_slope(gate, beta1, EXACT) * up, slope


@triton.jit
def product(
    a_ptrs, b_ptrs, acc, depth, a_stride, b_stride,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + A B over `depth`; EVEN promises that BLOCK_K divides it."""
    k = tl.arange(0, BLOCK_K)
    for i in tl.range(tl.cdiv(depth, BLOCK_K)):
        if EVEN:
            a, b = tl.load(a_ptrs), tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=k[None, :] < depth - i * BLOCK_K, other=0.0)
            b = tl.load(b_ptrs, mask=k[:, None] < depth - i * BLOCK_K, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * a_stride
        b_ptrs += BLOCK_K * b_stride
    return acc


@triton.jit
def store_glu(
    gate, up, act_ptr, h_ptr, row, n, columns, mask, beta1, beta2,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Writes SiTU-GLU of gate and up, rounded, and with SAVE these side by side, to columns n of
    the rows from `row` on."""
    element = act_ptr.dtype.element_ty
    gate, up = gate.to(element), up.to(element)  # what the backward pass reads
    r = tl.arange(0, gate.shape[0])[:, None]  # 32 bits do within a tile
    start = row.to(tl.int64) * columns
    act = glu(gate.to(tl.float32), up.to(tl.float32), beta1, beta2, CAPPED, EXACT)
    tl.store(act_ptr + start + (r * columns + n[None, :]), act.to(element), mask=mask)
    if SAVE:
        h_ptrs = h_ptr + 2 * start + (r * (2 * columns) + n[None, :])
        tl.store(h_ptrs, gate, mask=mask)
        tl.store(h_ptrs + columns, up, mask=mask)


@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, act_ptr, h_ptr, x_stride, n_stride, k_stride, rows, columns, depth, beta1, beta2,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, SAVE: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of SiTU-GLU(x W13^T). WHOLE promises that tiles divide rows and columns."""
    blocks = tl.cdiv(columns, BLOCK_N)
    pid = tl.program_id(0)
    tile, block = tl.swizzle2d(pid // blocks, pid % blocks, tl.cdiv(rows, ROWS), blocks, GROUP)
    row = tile * ROWS + tl.arange(0, ROWS)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    gate_ptrs = w_ptr + n.to(tl.int64)[None, :] * n_stride + k[:, None] * k_stride
    up_ptrs = gate_ptrs + columns.to(tl.int64) * n_stride
    gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for i in tl.range(tl.cdiv(depth, BLOCK_K)):
        left = depth - i * BLOCK_K
        x = tl.load(x_ptrs, mask=(row < rows)[:, None] & (k[None, :] < left), other=0.0)
        inside = (n < columns)[None, :] & (k[:, None] < left)
        gate = tl.dot(
            x, tl.load(gate_ptrs, mask=inside, other=0.0), gate, input_precision=PRECISION
        )
        up = tl.dot(x, tl.load(up_ptrs, mask=inside, other=0.0), up, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K * k_stride
        up_ptrs += BLOCK_K * k_stride
    mask = None if WHOLE else (row < rows)[:, None] & (n < columns)[None, :]
    store_glu(
        gate, up, act_ptr, h_ptr, tile * ROWS, n, columns, mask, beta1, beta2, CAPPED, EXACT, SAVE
    )


@triton.jit
def _backward_kernel(
    grad_ptr, h_ptr, dh_ptr, grad_stride, rows, columns, beta1, beta2,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first = row_block(BLOCK)
    if row >= rows:
        return
    row = row.to(tl.int64)
    at = first + tl.arange(0, BLOCK)
    mask = at < columns
    grad = tl.load(grad_ptr + row * grad_stride + at, mask=mask).to(tl.float32)
    h_ptr += row * (2 * columns)
    gate = tl.load(h_ptr + at, mask=mask).to(tl.float32)
    up = tl.load(h_ptr + columns + at, mask=mask).to(tl.float32)
    _, dgate, dup = glu_backward(gate, up, beta1, beta2, CAPPED, EXACT)
    dh_ptr += row * (2 * columns)
    element = dh_ptr.dtype.element_ty
    tl.store(dh_ptr + at, (grad * dgate).to(element), mask=mask)
    tl.store(dh_ptr + columns + at, (grad * dup).to(element), mask=mask)


def situ_glu_linear(
    x: torch.Tensor, w13: torch.Tensor, beta1: float = 4.0, beta2: float | None = 25.0
) -> torch.Tensor:
    """SiTU(x W1^T) * b2 tanh(x W3^T / b2) with W1, W3 the halves of w13; differentiable in both.

    x: [..., d]; w13: [2 ff, d], the ff rows of the gate first, then those of `up`; one dtype out of
    fp32, bf16, fp16 and one device; d, ff >= 1. A transposed w13 is read in place. The result is
    [..., ff], contiguous, in that dtype. beta2 = None leaves `up` uncapped. Gate and up are rounded
    to that dtype, and kept where a gradient is wanted (2 ff numbers per row). fp32 is multiplied as
    three tf32 products. KernelArgumentError names the argument that does not fit.
    """
    checks.float_tensor("x", x)
    checks.float_tensor("w13", w13)
    if w13.dim() != 2 or w13.shape[0] % 2 or 0 in w13.shape or w13.shape[1] != x.shape[-1]:
        raise checks.KernelArgumentError(
            f"argument 'w13': shape {tuple(w13.shape)}; 'x' of shape {tuple(x.shape)} needs "
            f"(2 ff, {x.shape[-1]})"
        )
    checks.like_but_shape("w13", w13, "x", x)
    cap = None if beta2 is None else checks.positive("beta2", beta2)
    save = torch.is_grad_enabled() and (x.requires_grad or w13.requires_grad)
    return _situ_glu_linear_op(x, w13, checks.positive("beta1", beta1), cap, save)[0]


def situ_glu_linear_reference(
    x: torch.Tensor, w13: torch.Tensor, beta1: float = 4.0, beta2: float | None = 25.0
) -> torch.Tensor:
    """`situ_glu_linear` in plain torch, in the dtype of its arguments."""
    gate, up = (x @ w13.T).chunk(2, -1)
    return situ_glu_reference(gate, up, beta1, beta2)


def glu_config(
    dtype: torch.dtype, rows: int, columns: int, depth: int, whole: bool, save: bool = False
) -> dict[str, int]:
    """Launch configuration for `rows` rows per tile (16, 64 or 128) of two products; whole: stores
    need no masks if BLOCK_N divides the columns; save: there are three of them, and TMA copies."""
    config = {"BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4 if rows < 128 else 8, "num_stages": 4}
    if dtype == torch.float32 or columns % 16 or depth % 16:  # odd sizes go element by element
        return config | {"BLOCK_N": 32, "BLOCK_K": 16 if dtype == torch.float32 else 32}
    config["BLOCK_K"] = 64
    if rows > 16 and whole and columns % 128 == 0 and dtype == torch.bfloat16:
        config["BLOCK_N"] = 128  # both accumulators fill the registers
        if save:
            config["num_stages"] = 3  # which leaves room for what TMA stores
    return config


def _tile_rows(rows: int) -> int:
    return 16 if rows <= 16 else 64 if rows <= 64 else 128


def strided_weight(w: torch.Tensor) -> torch.Tensor:
    """w with contiguous rows or columns: itself where its strides allow it."""
    return w if 1 in w.stride()[-2:] else w.contiguous()


@operator("situ_glu_linear")
def _situ_glu_linear_op(
    x: torch.Tensor, w13: torch.Tensor, beta1: float, beta2: float | None, save: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, h = _empty_outputs(x, w13, save)
    if out.numel() == 0:
        return out, h
    a, w = dense(rows_of(x)), strided_weight(w13)
    rows, (columns, depth) = a.shape[0], (w.shape[0] // 2, w.shape[1])
    tile = _tile_rows(rows)
    config = glu_config(x.dtype, tile, columns, depth, rows % tile == 0, save)
    whole = rows % tile == 0 and columns % config["BLOCK_N"] == 0
    grid = (triton.cdiv(rows, tile) * triton.cdiv(columns, config["BLOCK_N"]),)
    _forward_kernel[grid](
        a, w, out, h, a.stride(0), *w.stride(), rows, columns, depth, beta1, beta2 or 1.0,
        CAPPED=beta2 is not None, EXACT=x.dtype != torch.bfloat16, SAVE=save,
        WHOLE=whole, PRECISION="tf32x3", ROWS=tile, GROUP=GROUP, **config,
    )  # fmt: skip
    return out, h


@operator("situ_glu_linear_backward")
def _backward_op(
    grad: torch.Tensor, x: torch.Tensor, w13: torch.Tensor, h: torch.Tensor, beta1: float,
    beta2: float | None, wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of x and w13; one that is not wanted is empty."""
    dx, dw = _empty_gradients(x, w13, wanted)
    if h.numel() == 0:
        return dx, dw.zero_()
    dh, dy = torch.empty_like(h), dense(rows_of(grad))
    rows, columns = dy.shape
    _backward_kernel[row_blocks(rows, columns, BLOCK)](
        dy, h, dh, dy.stride(0), rows, columns, beta1, beta2 or 1.0, CAPPED=beta2 is not None,
        EXACT=h.dtype != torch.bfloat16, BLOCK=BLOCK,
    )  # fmt: skip
    if wanted[0]:
        gemm(dh, w13, dx.view(rows, -1))
    if wanted[1]:
        gemm(dh.T, x.reshape(rows, -1), dw)
    return dx, dw


def _empty_gradients(
    x: torch.Tensor, w13: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if wanted[0] else 0), w13.new_empty(w13.shape if wanted[1] else 0)


def _empty_outputs(
    x: torch.Tensor, w13: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out = x.new_empty(*x.shape[:-1], w13.shape[0] // 2)
    return out, x.new_empty(x.numel() // x.shape[-1] if save else 0, w13.shape[0])


_situ_glu_linear_op.register_fake(lambda x, w13, beta1, beta2, save: _empty_outputs(x, w13, save))
_backward_op.register_fake(
    lambda grad, x, w13, h, beta1, beta2, wanted: _empty_gradients(x, w13, wanted)
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.betas = inputs[2:4]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any) -> Any:
    if grad is None:
        return (None,) * 5
    wanted = list(ctx.needs_input_grad[:2])
    dx, dw = _backward_op(grad, *ctx.saved_tensors, *ctx.betas, wanted)
    return dx if wanted[0] else None, dw if wanted[1] else None, None, None, None


_situ_glu_linear_op.register_autograd(_differentiate, setup_context=_save)
