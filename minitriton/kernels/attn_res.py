"""Attention over depth (AttnRes): each token mixes its rows of L sources, forward and backward.

    r_i = rsqrt(mean(v_i^2) + eps)    logit_i = r_i (v_i . u)    u = query * norm_weight
    a = softmax_i(logit)              h = sum_i a_i v_i

Source: Kimi K3 technical report, section 2.2; the logits have no 1/sqrt(d) and the values mixed are
not normalised. Around the mix, in the same kernel: `prefix + delta` as last source, and an RMS norm
of h. The forward pass reads each value once (online softmax over the sources) and saves 2 L + 2
numbers per token; the backward pass reads each value twice, the second time mostly from cache. fp32
inside, deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import minitriton as triton
from minitriton.kernels import checks
from minitriton.kernels.attn_res_kernels import (
    backward_kernel,
    forward_kernel,
    parameters_kernel,
    query_kernel,
)
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.devices import has_warpgroups
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import rows_of

WIDEST = 8192  # elements of a row, all of them in one tile
LONGEST = 17  # tensors in a list of sources
PARTIALS = 264 * WIDEST  # elements of the partial sums of u's gradient: two CTAs per SM at WIDEST


def attn_res_mix(
    sources: torch.Tensor | Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-5,
    *,
    delta: torch.Tensor | None = None,
    out_weight: torch.Tensor | None = None,
    out_eps: float | None = None,
    return_mixed: bool = False,
) -> Any:
    """h = sum_i a_i v_i with a = softmax_i(query . (RMSNorm(v_i) * norm_weight)); differentiable.

    sources: 1 to 17 tensors [..., d] of one shape, dtype (fp32, bf16, fp16) and device, or one
    tensor [L, ..., d]; 1 <= d <= 8192. Sources whose rows lie at the distance that those of the
    first have are read in place, others are copied. query, norm_weight: [d], fp32, bf16 or fp16.

    delta, like the last source: the last source is last + delta, rounded to their dtype, which is
    a result as well. out_weight, [d]: the result is RMSNorm(h) * out_weight with out_eps (None:
    eps). All of that is one kernel in each direction. Results are contiguous, in the dtype of the
    sources: the mix (normed if out_weight is given); with delta or return_mixed a tuple of it,
    then last + delta, then h before the norm, as asked for.

    KernelArgumentError names the argument that does not fit.
    """
    given = _check_sources(sources)
    stacked = isinstance(sources, torch.Tensor)
    if stacked and delta is not None:
        given, stacked = check_list("sources", list(given[0]), LONGEST), False
    last = given[0][-1] if stacked else given[-1]
    checks.vector("query", query, "sources", last)
    checks.vector("norm_weight", norm_weight, "sources", last)
    if delta is not None:
        checks.like("delta", delta, "sources[-1]", last)
    if out_weight is not None:
        checks.vector("out_weight", out_weight, "sources", last)
    eps = checks.positive("eps", eps)
    out_eps = eps if out_eps is None else checks.positive("out_eps", out_eps)
    inputs = (*given, query, norm_weight, delta, out_weight)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    keep = out_weight is not None and (return_mixed or trained)
    out, total, mixed, _ = _mix_op(
        given, query, norm_weight, delta, out_weight, eps, out_eps, stacked, keep
    )
    return results(out, total, mixed if keep else out, delta is not None, return_mixed)


def attn_res_mix_reference(
    sources: torch.Tensor | Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-5,
    *,
    delta: torch.Tensor | None = None,
    out_weight: torch.Tensor | None = None,
    out_eps: float | None = None,
    return_mixed: bool = False,
) -> Any:
    """`attn_res_mix` in plain torch, in the dtype of its arguments."""
    parts = list(sources)
    if delta is not None:
        parts[-1] = parts[-1] + delta
    values = torch.stack(parts)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    logits = (values * scale * norm_weight * query).sum(-1, keepdim=True)
    mixed = out = (torch.softmax(logits, 0) * values).sum(0)
    if out_weight is not None:
        norm = mixed.square().mean(-1, keepdim=True) + (eps if out_eps is None else out_eps)
        out = mixed * torch.rsqrt(norm) * out_weight
    return results(out, parts[-1], mixed, delta is not None, return_mixed)


def results(
    out: torch.Tensor, total: torch.Tensor, mixed: torch.Tensor, added: bool, return_mixed: bool
) -> Any:
    """The results asked for: one tensor, or a tuple of several."""
    chosen = (out, *([total] if added else ()), *([mixed] if return_mixed else ()))
    return chosen if len(chosen) > 1 else out


def _check_sources(sources: object) -> list[torch.Tensor]:
    """The sources as a list; one stacked tensor is a list of one."""
    if isinstance(sources, torch.Tensor):
        checks.float_tensor("sources", sources)
        if sources.dim() < 2 or sources.shape[0] == 0 or not 0 < sources.shape[-1] <= WIDEST:
            raise KernelArgumentError(
                f"argument 'sources': shape {tuple(sources.shape)}; it must be [L, ..., d] "
                f"with L >= 1 and 1 <= d <= {WIDEST}"
            )
        return [sources]
    return check_list("sources", sources, LONGEST)


def check_list(name: str, sources: object, longest: int) -> list[torch.Tensor]:
    """`sources` as a list of tensors [..., d] of one shape, dtype and device."""
    if not isinstance(sources, list | tuple) or not 1 <= len(sources) <= longest:
        found = len(sources) if isinstance(sources, list | tuple) else type(sources).__name__
        raise KernelArgumentError(
            f"argument '{name}': expected 1 to {longest} tensors in a list, or one tensor "
            f"[L, ..., d] (any L: torch.stack makes it), got {found}"
        )
    first = checks.float_tensor(f"{name}[0]", sources[0])
    if not 0 < first.shape[-1] <= WIDEST:
        raise KernelArgumentError(
            f"argument '{name}[0]': shape {tuple(first.shape)}; it must be [..., d] "
            f"with 1 <= d <= {WIDEST}"
        )
    for i, source in enumerate(sources):
        checks.like(f"{name}[{i}]", source, f"{name}[0]", first)
    return list(sources)


@dataclass(frozen=True)
class Bank:
    """All sources but the last, as the kernels take them, and the last."""

    pointers: tuple[torch.Tensor, ...]  # padded to one of a few lengths, or one stacked tensor
    last: torch.Tensor  # [tokens, d]
    count: int
    source_stride: int
    token_stride: int

    @staticmethod
    def of(sources: Sequence[torch.Tensor], stacked: bool) -> Bank:
        """Sources as checked; where their strides do not fit, copies."""
        if stacked:
            values = sources[0].reshape(sources[0].shape[0], -1, sources[0].shape[-1])
            if values.stride(2) != 1 and values.shape[2] != 1:
                values = values.contiguous()
            count = values.shape[0] - 1
            return Bank((values[0],), values[count], count, values.stride(0), values.stride(1))
        *bank, last = map(rows_of, sources)
        # of the longest table only does the backward kernel never spill
        pointers, token_stride = table(bank, (16,)) if bank else ((last,), last.stride(0))
        return Bank(pointers, last, len(bank), 0, token_stride)


def table(
    bank: list[torch.Tensor], lengths: tuple[int, ...] = (4, 8, 16)
) -> tuple[tuple[torch.Tensor, ...], int]:
    """As many matrices as the first of `lengths` that is enough, and the distance of their rows."""
    stride = bank[0].stride(0)
    if any(x.stride(0) != stride for x in bank):
        bank = [x.contiguous() for x in bank]
        stride = bank[0].stride(0)
    length = next(n for n in lengths if n >= len(bank))
    return (*bank, *[bank[0]] * (length - len(bank))), stride


def shape_of_program(values: torch.Tensor, light: bool) -> dict[str, int]:
    """Launch options for programs that hold rows of `values`: 16 elements per thread.

    For the plain mix in bf16 on Hopper 32, in 128 registers: then two programs of the widest
    rows fit an SM. Other targets, more work and rows that are not copied ahead would spill.
    """
    block, aligned = triton.next_power_of_2(values.shape[-1]), values.shape[-1] % 16 == 0
    if light and aligned and values.dtype == torch.bfloat16 and has_warpgroups(values.device):
        return {"BLOCK": block, "num_warps": max(1, block // 1024), "maxnreg": 128}
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def forward_shape(values: torch.Tensor) -> dict[str, int]:
    """Launch options for the mix of rows of `values`.

    In bf16 on Hopper 64 elements a thread, whose registers hold the mix and the query, and no
    more of the row than there is where its blocks are full.
    """
    columns = values.shape[-1]
    block = triton.next_power_of_2(columns)
    if values.dtype != torch.bfloat16 or not has_warpgroups(values.device):
        return {"FULL": block == columns, "STAGES": 3, **shape_of_program(values, False)}
    warps = max(1, block // 2048)
    if columns % (warps * 32 * 8) == 0:  # 16 bytes at a time, of every thread as many
        block = columns
    return {"BLOCK": block, "FULL": block == columns, "STAGES": 4, "num_warps": warps}


def effective_query(query: torch.Tensor, weight: torch.Tensor, split: bool) -> torch.Tensor:
    """query * weight in fp32, or with `split` as two bf16 parts, [2, ...]; both contiguous."""
    shape = (2, *query.shape) if split else query.shape
    u = query.new_empty(shape, dtype=torch.bfloat16 if split else torch.float32)
    query_kernel[(triton.cdiv(query.numel(), 1024),)](
        query, weight, u, query.numel(), SPLIT=split, BLOCK=1024
    )
    return u


@operator("attn_res")
def _mix_op(
    sources: Sequence[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor,
    delta: torch.Tensor | None, out_weight: torch.Tensor | None, eps: float, out_eps: float,
    stacked: bool, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    out, total, mixed, stats = _empty_outputs(sources, delta is not None, stacked, keep)
    if out.numel() == 0:
        return out, total, mixed, stats
    bank = Bank.of(sources, stacked)
    more = bank.last if delta is None else rows_of(delta)
    tokens, columns = bank.last.shape
    forward_kernel[(tokens,)](
        bank.pointers, bank.last, more, query.contiguous(), norm_weight.contiguous(),
        query if out_weight is None else out_weight.contiguous(), out, total, mixed, stats,
        bank.source_stride, bank.token_stride, bank.last.stride(0), more.stride(0), bank.count,
        columns, eps, out_eps, ADD=delta is not None, NORM=out_weight is not None, MIXED=keep,
        **forward_shape(out),
    )  # fmt: skip
    return out, total, mixed, stats


def _empty_outputs(
    sources: Sequence[torch.Tensor], added: bool, stacked: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the result, last + delta, h, and the statistics; empty where not asked for.

    Statistics of a token: peak and sum of its softmax, L logits, L r_i; the last source is last.
    """
    shape = sources[0].shape[stacked:]
    count = sources[0].shape[0] if stacked else len(sources)
    out = sources[0].new_empty(shape)
    total, mixed = (out.new_empty(shape if present else 0) for present in (added, keep))
    stats = out.new_empty(shape[:-1].numel(), 2 * count + 2, dtype=torch.float32)
    return out, total, mixed, stats


@operator("attn_res_backward")
def _mix_backward_op(
    grad: torch.Tensor, grad_sum: torch.Tensor | None, grad_mixed: torch.Tensor | None,
    sources: Sequence[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor,
    out_weight: torch.Tensor | None, mixed: torch.Tensor, stats: torch.Tensor, out_eps: float,
    stacked: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    made = _empty_gradients(sources, query, norm_weight, out_weight, stacked)
    dsources, dquery, dweight, dout_weight = made
    if dsources.numel() == 0:
        return dsources, dquery.zero_(), dweight.zero_(), dout_weight.zero_()
    bank = Bank.of(sources, stacked)
    tokens, columns = bank.last.shape
    light = grad_sum is None and grad_mixed is None and out_weight is None
    options = shape_of_program(dsources, light)
    programs = min(tokens, max(1, PARTIALS // options["BLOCK"]))
    query, norm_weight = query.contiguous(), norm_weight.contiguous()
    u = effective_query(query, norm_weight, False)
    partial = u.new_empty(1 if out_weight is None else 2, programs, columns)
    height = max(32, triton.next_power_of_2(bank.count + 1))
    slopes = u.new_empty(programs, 3, height)
    dy = rows_of(grad)
    more, also = (dy if x is None else rows_of(x) for x in (grad_sum, grad_mixed))
    backward_kernel[(programs,)](
        dy, more, also, mixed, bank.pointers, bank.last, u,
        u if out_weight is None else out_weight.contiguous(), stats, slopes, dsources,
        partial[0], partial[-1], dy.stride(0), more.stride(0), also.stride(0), bank.source_stride,
        bank.token_stride, bank.last.stride(0), bank.count, tokens, columns, out_eps,
        SUM=grad_sum is not None, MIXED=grad_mixed is not None, NORM=out_weight is not None,
        SOURCES=height, STAGES=3, **options,
    )  # fmt: skip
    parameters_kernel[(triton.cdiv(columns, 32),)](
        partial, query, norm_weight, dquery, dweight, dout_weight, programs, columns,
        NORM=out_weight is not None, DEPTH=32, BLOCK=32,
    )  # fmt: skip
    return dsources, dquery, dweight, dout_weight


def _empty_gradients(
    sources: Sequence[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor,
    out_weight: torch.Tensor | None, stacked: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Room for the gradients; those of the sources in one tensor [L, ..., d]."""
    shape = sources[0].shape if stacked else (len(sources), *sources[0].shape)
    dsources = sources[0].new_empty(shape)
    dout_weight = query.new_empty(0) if out_weight is None else out_weight.new_empty(query.shape)
    return dsources, query.new_empty(query.shape), norm_weight.new_empty(query.shape), dout_weight


_mix_op.register_fake(
    lambda sources, query, norm_weight, delta, out_weight, eps, out_eps, stacked, keep: (
        _empty_outputs(sources, delta is not None, stacked, keep)
    )
)
_mix_backward_op.register_fake(
    lambda grad, grad_sum, grad_mixed, sources, query, norm_weight, out_weight, mixed, stats,
    out_eps, stacked: _empty_gradients(sources, query, norm_weight, out_weight, stacked)
)  # fmt: skip


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    sources, query, norm_weight, delta, out_weight, _, ctx.out_eps, ctx.stacked, ctx.keep = inputs
    _, total, mixed, stats = output
    ctx.added = delta is not None
    read = (*sources[:-1], total if ctx.added else sources[-1])
    ctx.save_for_backward(*read, query, norm_weight, out_weight, mixed, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Any, grad_sum: Any, grad_mixed: Any, _: Any) -> Any:
    *sources, query, norm_weight, out_weight, mixed, stats = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(sources[-1])
    dsources, dquery, dweight, dout_weight = _mix_backward_op(
        grad, grad_sum if ctx.added else None, grad_mixed if ctx.keep else None, sources, query,
        norm_weight, out_weight, mixed, stats, ctx.out_eps, ctx.stacked,
    )  # fmt: skip
    parts = [dsources] if ctx.stacked else list(dsources.unbind(0))
    ddelta = parts[-1] if ctx.added else None
    last = None if out_weight is None else dout_weight
    return parts, dquery, dweight, ddelta, last, None, None, None, None


_mix_op.register_autograd(_differentiate, setup_context=_save)
