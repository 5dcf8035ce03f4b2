"""Elementwise and row kernels: one program a row or a block, as in Triton's tutorials."""

import minitriton as triton
import minitriton.language as tl


@triton.jit
def nop_kernel(x_ptr, y_ptr, n, m):
    pass


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    dout = tl.load(dout_ptr + offsets, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    share = tl.sigmoid(gate)
    dgate = dout * up * share * (1.0 + gate * (1.0 - share))
    dup = dout * gate * share
    tl.store(dgate_ptr + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + offsets, dup.to(dup_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_kernel(out_ptr, in_ptr, in_stride, out_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(in_ptr + row * in_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * out_stride + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / n + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    w = tl.load(w_ptr + cols, mask=mask).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask).to(tl.float32)
    y = centred * rstd * w + b
    tl.store(y_ptr + row * stride + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_part_ptr, db_part_ptr,
    stride, rows, n, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of x, and one partial sum a program of those of weight and bias."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        normal = tl.where(mask, (x - mean) * rstd, 0.0)
        slope = w * dy
        along = tl.sum(normal * slope, axis=0) / n
        dx = (slope - tl.sum(slope, axis=0) / n - normal * along) * rstd
        tl.store(dx_ptr + row * stride + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * normal
        db += dy
    tl.store(dw_part_ptr + program * n + cols, dw, mask=mask)
    tl.store(db_part_ptr + program * n + cols, db, mask=mask)


@triton.jit
def rms_norm_kernel(x_ptr, y_ptr, w_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n + eps)
    tl.store(rstd_ptr + row, rstd)
    w = tl.load(w_ptr + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * stride + cols, (x * rstd * w).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_part_ptr, stride, rows, n,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of x, and one partial sum a program of that of the weight."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normal = x * rstd
        slope = w * dy
        dx = (slope - normal * (tl.sum(normal * slope, axis=0) / n)) * rstd
        tl.store(dx_ptr + row * stride + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * normal
    tl.store(dw_part_ptr + program * n + cols, dw, mask=mask)


@triton.jit
def column_sum_kernel(
    part_ptr, out_ptr, parts, n, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Sums over the rows of matrices [parts, n], one after the other."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    part_ptr += tl.program_id(1) * parts * n
    out_ptr += tl.program_id(1) * n
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in tl.range(0, parts, BLOCK_R, num_stages=3):
        rows = start + tl.arange(0, BLOCK_R)
        inside = (rows[:, None] < parts) & (cols[None, :] < n)
        total += tl.load(part_ptr + rows[:, None] * n + cols[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def cross_entropy_kernel(
    logits_ptr, target_ptr, loss_ptr, lse_ptr, stride, n, BLOCK: tl.constexpr
):  # fmt: skip
    """Loss of a row and the logarithm of its sum of exponentials, read once."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    largest = -1.0e30
    total = 0.0
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), axis=0)
        largest = new
    lse = largest + tl.log(total)
    at_target = tl.load(row_ptr + tl.load(target_ptr + row)).to(tl.float32)
    tl.store(loss_ptr + row, lse - at_target)
    tl.store(lse_ptr + row, lse)


@triton.jit
def mean_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr, tl.sum(total, axis=0) / n)


@triton.jit
def cross_entropy_backward_kernel(
    grad_ptr, logits_ptr, target_ptr, lse_ptr, out_ptr, stride, rows, n, BLOCK: tl.constexpr
):  # fmt: skip
    """Gradient of the mean loss in a block of a row."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * stride + cols
    x = tl.load(logits_ptr + at, mask=cols < n, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(lse_ptr + row))
    hit = tl.where(cols == tl.load(target_ptr + row), 1.0, 0.0)
    slope = (share - hit) * (tl.load(grad_ptr) / rows)
    tl.store(out_ptr + at, slope.to(out_ptr.dtype.element_ty), mask=cols < n)
