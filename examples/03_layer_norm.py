"""Layer norm, forward and backward, as a torch autograd function.

The backward pass of a row needs two sums over it; the gradients of weight and bias are summed over
rows in two steps: partial sums in fp32 by groups of rows, then one small reduction.
Run: python examples/03_layer_norm.py
"""

import torch

import minitriton as triton
import minitriton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def forward_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / n + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    w = tl.load(w_ptr + cols, mask=mask)
    b = tl.load(b_ptr + cols, mask=mask)
    tl.store(y_ptr + row * stride + cols, centred * rstd * w + b, mask=mask)


@triton.jit
def backward_kernel(
    dx_ptr, dy_ptr, dw_ptr, db_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, stride, rows, n,
    ROWS_PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    first = pid * ROWS_PER_PROGRAM
    for row in range(first, min(first + ROWS_PER_PROGRAM, rows)):
        x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        xhat = tl.where(mask, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        wdy = w * dy
        c1 = tl.sum(xhat * wdy, axis=0) / n
        c2 = tl.sum(wdy, axis=0) / n
        tl.store(dx_ptr + row * stride + cols, (wdy - (xhat * c1 + c2)) * rstd, mask=mask)
        dw += dy * xhat
        db += dy
    tl.store(dw_ptr + pid * n + cols, dw, mask=mask)
    tl.store(db_ptr + pid * n + cols, db, mask=mask)


class LayerNorm(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension of [rows, n]."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        rows, n = x.shape
        y = torch.empty_like(x)
        mean = torch.empty(rows, dtype=torch.float32, device=x.device)
        rstd = torch.empty_like(mean)
        block = triton.next_power_of_2(n)
        forward_kernel[(rows,)](x, y, weight, bias, mean, rstd, x.stride(0), n, eps, BLOCK=block)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        rows, n = x.shape
        programs = triton.cdiv(rows, 16)
        dx = torch.empty_like(x)
        dw = torch.empty((programs, n), dtype=torch.float32, device=x.device)
        db = torch.empty_like(dw)
        backward_kernel[(programs,)](
            dx, dy.contiguous(), dw, db, x, weight, mean, rstd, x.stride(0), rows, n,
            ROWS_PER_PROGRAM=16, BLOCK=triton.next_power_of_2(n),
        )  # fmt: skip
        return dx, dw.sum(0).to(weight.dtype), db.sum(0).to(weight.dtype), None


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(151, 781, device=DEVICE) * 2 + 0.5
    weight, bias = torch.rand(781, device=DEVICE), torch.rand(781, device=DEVICE)
    dy = torch.randn_like(x)
    ours = [t.clone().requires_grad_() for t in (x, weight, bias)]
    theirs = [t.double().clone().requires_grad_() for t in (x, weight, bias)]
    y = LayerNorm.apply(*ours, 1e-5)
    reference = torch.nn.functional.layer_norm(theirs[0], (781,), theirs[1], theirs[2], 1e-5)
    y.backward(dy)
    reference.backward(dy.double())
    torch.testing.assert_close(y.double(), reference, atol=1e-5, rtol=1e-5)
    for a, b, name in zip(ours, theirs, ("dx", "dweight", "dbias"), strict=True):
        error = (a.grad.double() - b.grad).norm() / b.grad.norm()
        assert error < 1e-6, (name, error)
    print(f"layer norm on {DEVICE}: 151 x 781, forward and 3 gradients agree with torch in fp64")


if __name__ == "__main__":
    main()
