"""Device code of the mix over depth: one program per token forward, one per set of tokens backward.

A read has a bank of sources and a last source, which comes first in the softmax because it is at
hand: it may be the sum `last + delta`, which is then written as well. While a source is reduced the
rows of the next STAGES - 1 are on their way to shared memory. Sources lie behind a tuple of
pointers, of which a run-time index selects one (one specialisation serves every number of sources
up to the length of the tuple), or behind one pointer at `source_stride` from each other.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.gemm import sum_parts

SLACK: tl.constexpr = 16.0  # how far a logit may exceed the softmax's reference; e^16 fits fp32


@triton.jit
def pick(pointers, i):
    """pointers[i] for an index known at run time; i may be a tile."""
    chosen = pointers[0]
    for j in tl.static_range(1, len(pointers)):
        chosen = tl.where(i == j, pointers[j], chosen)
    return chosen


@triton.jit
def query_kernel(query_ptr, weight_ptr, u_ptr, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """u = query * norm_weight, fp32 or in two bf16 parts, `size` elements each."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    u = tl.load(query_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u *= tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SPLIT:
        high = u.to(tl.bfloat16)
        tl.store(u_ptr + at, high, mask=mask)
        tl.store(u_ptr + size + at, (u - high.to(tl.float32)).to(tl.bfloat16), mask=mask)
    else:
        tl.store(u_ptr + at, u, mask=mask)


@triton.jit
def _row(pointers, i, source_stride, token_offset):
    return pick(pointers, i) + (i.to(tl.int64) * source_stride + token_offset)


@triton.jit
def _logit(v, u, columns, eps):
    squares, dot = tl.sum(v * v), tl.sum(v * u)  # side by side: one exchange between warps
    scale = tl.rsqrt(squares / columns + eps)
    return dot * scale, scale


@triton.jit
def _last_source(last_row, delta_row, sum_row, at, mask, ADD: tl.constexpr):
    last = tl.load(last_row + at, mask=mask, other=0.0)
    if ADD:
        delta = tl.load(delta_row + at, mask=mask, other=0.0).to(tl.float32)
        last = (last.to(tl.float32) + delta).to(sum_row.dtype.element_ty)
        tl.store(sum_row + at, last, mask=mask)
    return last


@triton.jit
def _write_mix(
    h, mixed_row, out_row, weight_ptr, at, mask, columns, eps, NORM: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    if MIXED:
        tl.store(mixed_row + at, h.to(mixed_row.dtype.element_ty), mask=mask)
    if NORM:
        h = h * tl.rsqrt(tl.sum(h * h) / columns + eps)
        h = h * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_row + at, h.to(out_row.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bank"])
def forward_kernel(
    bank_ptrs, last_ptr, delta_ptr, query_ptr, weight_ptr, out_weight_ptr, out_ptr, sum_ptr,
    mixed_ptr, stats_ptr, source_stride, token_stride, last_stride, delta_stride, bank, columns,
    eps, out_eps, ADD: tl.constexpr, NORM: tl.constexpr, MIXED: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: mix, then RMS norm if NORM; MIXED: the mix before the norm is written too."""
    if FULL:  # no masks
        columns = BLOCK
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    out = token * columns
    h = _last_source(
        last_ptr + token * last_stride, delta_ptr + token * delta_stride, sum_ptr + out, at, mask,
        ADD,
    ).to(tl.float32)  # fmt: skip
    u = tl.load(query_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = u * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    stats_ptr += token * (2 * bank + 4)
    peak, scale = _logit(h, u, columns, eps)
    tl.store(stats_ptr + 2 + bank, peak)
    tl.store(stats_ptr + 3 + bank + bank, scale)
    total = tl.full([], 1.0, tl.float32)
    for j in tl.range(bank, num_stages=STAGES):
        row_ptr = _row(bank_ptrs, j, source_stride, token * token_stride)
        v = tl.load(row_ptr + at, mask=mask, other=0.0).to(tl.float32)
        logit, scale = _logit(v, u, columns, eps)
        tl.store(stats_ptr + 2 + j, logit)
        tl.store(stats_ptr + 3 + bank + j, scale)
        if logit > peak + SLACK:  # seldom, unlike in the usual online softmax
            keep = tl.exp(peak - logit)
            total *= keep
            h *= keep
            peak = logit
        add = tl.exp(logit - peak)
        total += add
        h += v * add
    tl.store(stats_ptr, peak)
    tl.store(stats_ptr + 1, total)
    _write_mix(
        h / total, mixed_ptr + out, out_ptr + out, out_weight_ptr, at, mask, columns, out_eps,
        NORM, MIXED,
    )  # fmt: skip


@triton.jit
def merge_kernel(
    peak_ptr, total_ptr, acc_ptr, last_ptr, delta_ptr, query_ptr, weight_ptr, out_weight_ptr,
    out_ptr, sum_ptr, mixed_ptr, acc_stride, last_stride, delta_stride, columns, eps, out_eps,
    ADD: tl.constexpr, NORM: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`forward_kernel` where the bank's share of the softmax is known from a first phase."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    out = token * columns
    acc = tl.load(acc_ptr + token * acc_stride + at, mask=mask, other=0.0)
    v = _last_source(
        last_ptr + token * last_stride, delta_ptr + token * delta_stride, sum_ptr + out, at, mask,
        ADD,
    ).to(tl.float32)  # fmt: skip
    u = tl.load(query_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = u * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    before, total = tl.load(peak_ptr + token), tl.load(total_ptr + token)
    logit, _ = _logit(v, u, columns, eps)
    peak = tl.maximum(before, logit)
    keep, add = tl.exp(before - peak), tl.exp(logit - peak)
    h = (acc.to(tl.float32) * keep + v * add) / (total * keep + add)
    _write_mix(
        h, mixed_ptr + out, out_ptr + out, out_weight_ptr, at, mask, columns, out_eps, NORM, MIXED
    )


@triton.jit
def _norm_gradient(grad, mixed_row, weight_ptr, partial_ptr, again, at, mask, columns, eps):
    """Gradient before the output norm; that of its weight is added to this program's own row."""
    h = tl.load(mixed_row + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(h * h) / columns + eps)
    h = h * r
    dweight = tl.load(partial_ptr + at, mask=mask & again, other=0.0)
    tl.store(partial_ptr + at, dweight + grad * h, mask=mask)
    grad = grad * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return r * (grad - h * (tl.sum(grad * h) / columns))


@triton.jit
def _source_gradient(grad, v, u_ptr, slope_ptr, at, mask, SOURCES: tl.constexpr):
    """Gradient of a source, through its weight in the mix and through its logit; and dlogit."""
    weight, dlogit = tl.load(slope_ptr), tl.load(slope_ptr + SOURCES)
    decay = tl.load(slope_ptr + 2 * SOURCES)
    # read again for each source, from L1: registers for it would spill
    u = tl.load(u_ptr + at, mask=mask, other=0.0)
    return weight * grad + dlogit * u - decay * v, dlogit


@triton.jit(do_not_specialize=["bank", "tokens"])
def backward_kernel(
    grad_ptr, grad_sum_ptr, grad_mixed_ptr, mixed_ptr, bank_ptrs, last_ptr, u_ptr, out_weight_ptr,
    stats_ptr, slopes_ptr, dsources_ptr, du_ptr, dout_weight_ptr, grad_stride, grad_sum_stride,
    grad_mixed_stride, source_stride, token_stride, last_stride, bank, tokens, columns, out_eps,
    SUM: tl.constexpr, MIXED: tl.constexpr, NORM: tl.constexpr, SOURCES: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th token; SUM and MIXED: gradients of the sum and the mix come in too."""
    at = tl.arange(0, BLOCK)
    mask = at < columns
    source = tl.arange(0, SOURCES)
    sources = bank + 1
    program = tl.program_id(0)
    partial = program.to(tl.int64) * columns
    slopes_ptr += program * 3 * SOURCES
    du = tl.zeros([BLOCK], tl.float32)
    for t in tl.range(program, tokens, tl.num_programs(0)):
        token = t.to(tl.int64)
        offset = token * token_stride
        last = tl.load(last_ptr + token * last_stride + at, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + token * grad_stride + at, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            grad = _norm_gradient(
                grad, mixed_ptr + token * columns, out_weight_ptr, dout_weight_ptr + partial,
                t != program, at, mask, columns, out_eps,
            )  # fmt: skip
        if MIXED:
            more = tl.load(grad_mixed_ptr + token * grad_mixed_stride + at, mask=mask, other=0.0)
            grad += more.to(tl.float32)
        dots = tl.where(source == bank, tl.sum(grad * last.to(tl.float32)), 0.0)
        for j in tl.range(bank, num_stages=STAGES):
            row_ptr = _row(bank_ptrs, j, source_stride, offset)
            v = tl.load(row_ptr + at, mask=mask, other=0.0).to(tl.float32)
            dots = tl.where(source == j, tl.sum(grad * v), dots)
        at_stats = stats_ptr + token * (2 * sources + 2)
        peak, total = tl.load(at_stats), tl.load(at_stats + 1)
        logits = tl.load(at_stats + 2 + source, mask=source < sources, other=-float("inf"))
        scales = tl.load(at_stats + 2 + sources + source, mask=source < sources, other=0.0)
        weights = tl.exp(logits - peak) / total
        # relative to the source of the highest logit: no cancellation where it takes all
        dots -= tl.max(tl.where(logits == tl.max(logits), dots, -float("inf")))
        dlogits = weights * (dots - tl.sum(weights * dots)) * scales
        # through memory, of which each program has its own: no exchange for each source below
        tl.store(slopes_ptr + source, weights)
        tl.store(slopes_ptr + SOURCES + source, dlogits)
        tl.store(slopes_ptr + 2 * SOURCES + source, dlogits * logits * scales / columns)
        tl.debug_barrier()
        to = dsources_ptr + token * columns
        stride = tokens.to(tl.int64) * columns
        for j in tl.range(bank, num_stages=STAGES):  # backwards: what was read last is in cache
            i = bank - 1 - j
            v = tl.load(_row(bank_ptrs, i, source_stride, offset) + at, mask=mask, other=0.0)
            dv, dlogit = _source_gradient(
                grad, v.to(tl.float32), u_ptr, slopes_ptr + i, at, mask, SOURCES
            )
            du += dlogit * v.to(tl.float32)
            tl.store(to + i * stride + at, dv.to(dsources_ptr.dtype.element_ty), mask=mask)
        v = tl.load(last_ptr + token * last_stride + at, mask=mask, other=0.0).to(tl.float32)
        dv, dlogit = _source_gradient(grad, v, u_ptr, slopes_ptr + bank, at, mask, SOURCES)
        du += dlogit * v
        if SUM:
            more = tl.load(grad_sum_ptr + token * grad_sum_stride + at, mask=mask, other=0.0)
            dv += more.to(tl.float32)
        tl.store(to + bank * stride + at, dv.to(dsources_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + partial + at, du, mask=mask)


@triton.jit(do_not_specialize=["programs"])
def parameters_kernel(
    partial_ptr, query_ptr, weight_ptr, dquery_ptr, dweight_ptr, dout_weight_ptr, programs, columns,
    NORM: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of query and norm_weight, and of out_weight if NORM, from the programs' shares."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    du = sum_parts(partial_ptr, columns, programs, at, mask, DEPTH)
    dquery = du * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dquery_ptr + at, dquery.to(dquery_ptr.dtype.element_ty), mask=mask)
    dweight = du * tl.load(query_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dweight_ptr + at, dweight.to(dweight_ptr.dtype.element_ty), mask=mask)
    if NORM:
        partial_ptr += programs.to(tl.int64) * columns
        total = sum_parts(partial_ptr, columns, programs, at, mask, DEPTH)
        tl.store(dout_weight_ptr + at, total.to(dout_weight_ptr.dtype.element_ty), mask=mask)
