"""Attention over depth (AttnRes): each token mixes its rows of L sources, forward and backward.

    r_i = rsqrt(mean(v_i^2) + eps)    logit_i = r_i (v_i . u)    u = query * norm_weight
    a = softmax_i(logit)              out = sum_i a_i v_i

Source: Kimi K3 technical report, section 2.2; the logits have no 1/sqrt(d) and the values mixed are
not normalised. The forward pass reads each value once (online softmax over the sources) and saves
2 L + 2 numbers per token; the backward pass reads each value twice. fp32 inside, deterministic.
"""

from __future__ import annotations

from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks

WIDEST = 8192  # elements of a row, all of them in one tile
PARTIALS = 264 * WIDEST  # elements of the partial sums of u's gradient: two CTAs per SM at WIDEST


@triton.jit
def _forward_kernel(
    values_ptr, query_ptr, weight_ptr, out_ptr, stats_ptr, source_stride, token_stride,
    sources, columns, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    u = tl.load(query_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = u * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    row_ptr = values_ptr + token * token_stride
    stats_ptr += token * (2 * sources + 2)
    peak = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(sources):
        v = tl.load(row_ptr + at, mask=mask, other=0.0).to(tl.float32)
        row_ptr += source_stride
        scale = tl.rsqrt(tl.sum(v * v) / columns + eps)
        logit = tl.sum(v * u) * scale
        tl.store(stats_ptr + 2 + i, logit)
        tl.store(stats_ptr + 2 + sources + i, scale)
        higher = tl.maximum(peak, logit)
        keep, add = tl.exp(peak - higher), tl.exp(logit - higher)
        total = total * keep + add
        acc = acc * keep + v * add
        peak = higher
    tl.store(stats_ptr, peak)
    tl.store(stats_ptr + 1, total)
    tl.store(out_ptr + token * columns + at, (acc / total).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, values_ptr, query_ptr, weight_ptr, stats_ptr, dvalues_ptr, du_ptr, grad_stride,
    source_stride, token_stride, sources, tokens, columns,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    mask = at < columns
    source = tl.arange(0, SOURCES)
    du = tl.zeros([BLOCK], tl.float32)
    for t in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = t.to(tl.int64)
        grad = tl.load(grad_ptr + token * grad_stride + at, mask=mask, other=0.0).to(tl.float32)
        row_ptr = values_ptr + token * token_stride
        at_stats = stats_ptr + token * (2 * sources + 2)
        peak, total = tl.load(at_stats), tl.load(at_stats + 1)
        dots = tl.zeros([SOURCES], tl.float32)
        for i in tl.range(sources):
            v = tl.load(row_ptr + i * source_stride + at, mask=mask, other=0.0).to(tl.float32)
            dots = tl.where(source == i, tl.sum(grad * v), dots)
        logits = tl.load(at_stats + 2 + source, mask=source < sources, other=-float("inf"))
        scales = tl.load(at_stats + 2 + sources + source, mask=source < sources, other=0.0)
        weights = tl.exp(logits - peak) / total
        # relative to the source of the highest logit: no cancellation where it takes all
        dots -= tl.max(tl.where(logits == peak, dots, -float("inf")))
        dlogits = weights * (dots - tl.sum(weights * dots)) * scales
        for j in tl.range(sources):  # the last read first: it is still in cache
            i = sources - 1 - j
            logit = tl.load(at_stats + 2 + i)
            scale = tl.load(at_stats + 2 + sources + i)
            a = tl.exp(logit - peak) / total
            dlogit = tl.sum(tl.where(source == i, dlogits, 0.0))
            v = tl.load(row_ptr + i * source_stride + at, mask=mask, other=0.0).to(tl.float32)
            # read again for each source, from L1: registers for it would spill
            u = tl.load(query_ptr + at, mask=mask, other=0.0).to(tl.float32)
            u = u * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
            dv = a * grad + dlogit * (u - v * (logit * scale / columns))
            du += dlogit * v
            drow_ptr = dvalues_ptr + (i * tokens.to(tl.int64) + token) * columns
            tl.store(drow_ptr + at, dv.to(dvalues_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + tl.program_id(0).to(tl.int64) * columns + at, du, mask=mask)


def attn_res_mix(
    values: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """sum_i a_i v_i with a = softmax_i(query . (RMSNorm(v_i) * norm_weight)); differentiable.

    values: [L, N, d], L sources (L >= 1) of N tokens of 1 <= d <= 8192 channels, fp32, bf16 or
    fp16; query, norm_weight: [d], each fp32, bf16 or fp16, on the device of values. The result is
    [N, d], contiguous, in the dtype of values. Strided sources and tokens are read in place.
    KernelArgumentError names the argument that does not fit.
    """
    checks.float_tensor("values", values)
    if values.dim() != 3 or values.shape[0] == 0 or not 0 < values.shape[2] <= WIDEST:
        raise checks.KernelArgumentError(
            f"argument 'values': shape {tuple(values.shape)}; it must be [L, N, d] "
            f"with L >= 1 and 1 <= d <= {WIDEST}"
        )
    _check_vector("query", query, values)
    _check_vector("norm_weight", norm_weight, values)
    return _attn_res_op(values, query, norm_weight, checks.positive("eps", eps))[0]


def attn_res_mix_reference(
    values: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """`attn_res_mix` in plain torch, in the dtype of its arguments."""
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    logits = (values * scale * norm_weight * query).sum(-1, keepdim=True)
    return (torch.softmax(logits, 0) * values).sum(0)


def _check_vector(name: str, value: object, values: torch.Tensor) -> None:
    tensor = checks.float_tensor(name, value)
    if tensor.shape != values.shape[2:]:
        raise checks.KernelArgumentError(
            f"argument '{name}': shape {tuple(tensor.shape)}; 'values' of shape "
            f"{tuple(values.shape)} needs {tuple(values.shape[2:])}"
        )
    if tensor.device != values.device:
        raise checks.KernelArgumentError(
            f"argument '{name}': device {tensor.device} differs from that of 'values', "
            f"{values.device}"
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows: itself where its strides allow it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _tile(columns: int) -> tuple[int, int]:
    """(BLOCK, num_warps) for rows of so many columns."""
    block = triton.next_power_of_2(columns)
    return block, max(1, block // 1024)


@torch.library.custom_op("minitriton::attn_res", mutates_args=())
def _attn_res_op(
    values: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, stats = _empty_outputs(values)
    if out.numel() > 0:
        v = _dense(values)
        block, warps = _tile(v.shape[2])
        _forward_kernel[(v.shape[1],)](
            v, query.contiguous(), norm_weight.contiguous(), out, stats, v.stride(0), v.stride(1),
            v.shape[0], v.shape[2], eps, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out, stats


@torch.library.custom_op("minitriton::attn_res_backward", mutates_args=())
def _attn_res_backward_op(
    grad: torch.Tensor, values: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor,
    stats: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dvalues, dquery, dweight = _empty_gradients(values, query, norm_weight)
    if dvalues.numel() == 0:
        return dvalues, dquery.zero_(), dweight.zero_()
    dy, v = _dense(grad), _dense(values)
    sources, tokens, columns = v.shape
    block, warps = _tile(columns)
    programs = min(tokens, max(1, PARTIALS // block))
    partial = torch.empty(programs, columns, dtype=torch.float32, device=v.device)
    _backward_kernel[(programs,)](
        dy, v, query.contiguous(), norm_weight.contiguous(), stats, dvalues, partial, dy.stride(0),
        v.stride(0), v.stride(1), sources, tokens, columns,
        SOURCES=max(32, triton.next_power_of_2(sources)), BLOCK=block, num_warps=warps,
    )  # fmt: skip
    du = partial.sum(0)
    return dvalues, dquery.copy_(du * norm_weight), dweight.copy_(du * query)


def _empty_outputs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised result and statistics; per token: peak and sum of softmax, L logits, L r_i."""
    sources, tokens, columns = values.shape
    out = torch.empty(tokens, columns, dtype=values.dtype, device=values.device)
    return out, torch.empty(tokens, 2 * sources + 2, dtype=torch.float32, device=values.device)


def _empty_gradients(
    values: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dvalues = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return dvalues, dquery, torch.empty_like(dquery, dtype=norm_weight.dtype)


_attn_res_op.register_fake(lambda values, query, norm_weight, eps: _empty_outputs(values))
_attn_res_backward_op.register_fake(
    lambda grad, values, query, norm_weight, stats: _empty_gradients(values, query, norm_weight)
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    return *_attn_res_backward_op(grad, *ctx.saved_tensors), None


_attn_res_op.register_autograd(_differentiate, setup_context=_save)
