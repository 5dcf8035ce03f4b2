"""The mix over depth in two phases, for inference: all queries of a block against its bank at once.

Within a block of layers the finished blocks (the bank) do not change, only the partial sum does.
Phase 1 answers Q queries against the bank together: (m, l, acc) of query q and a token are

    m = max_i logit_qi        l = sum_i exp(logit_qi - m)        acc = sum_i exp(logit_qi - m) v_i

Phase 2 adds the partial sum, one more source, by online softmax when its turn comes. Source: Kimi
K3 technical report, section 5.4.2. A read then moves 3 rows per token instead of L + 1. Phase 1 is
two launches on tensor cores: logits of a tile of rows for all queries (split along d where there
are few rows), and the weighted sums. Both go over the bank, the second from its last token
backwards, so that what L2 holds (50 MB of an H200: 430 tokens of K3 at L = 8) is read from memory
once. One launch that keeps its tokens' rows on chip would lose more: it has room for one or two
tokens, and the Q queries, three times as large as a token's L rows, would pass through L2 for each.
Weights and queries are split in two bf16 parts where the bank is bf16, products are tf32x3
otherwise, so that only acc is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import checks
from minitriton.kernels.attn_res import (
    LONGEST,
    check_list,
    effective_query,
    results,
    shape_of_program,
    table,
)
from minitriton.kernels.attn_res_kernels import merge_kernel, pick
from minitriton.kernels.operator import operator
from minitriton.kernels.rows import new_like, rows_of

MOST_QUERIES = 32
ROWS = 64  # of a source in a tile of the logits
WIDTH = 128  # elements of d that a program of the weighted sums holds at a time
ENOUGH = 264  # programs that fill any GPU


@triton.jit(do_not_specialize=["bank", "tokens", "parts", "steps", "queries"])
def _logits_kernel(
    bank_ptrs, u_ptr, logits_ptr, squares_ptr, token_stride, bank, tokens, columns, parts, steps,
    queries, SPLIT: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Dot products with all queries, and sums of squares, over `steps` chunks of rows."""
    source, part = tl.program_id(0) % bank, tl.program_id(0) // bank % parts
    row = tl.program_id(0) // (bank * parts) * ROWS + tl.arange(0, ROWS)
    query = tl.arange(0, QUERIES)
    row_ptr = pick(bank_ptrs, source) + row.to(tl.int64)[:, None] * token_stride
    u_row = u_ptr + query.to(tl.int64)[None, :] * columns
    low = u_row + queries.to(tl.int64) * columns  # the second parts follow the first
    acc = tl.zeros([ROWS, QUERIES], tl.float32)
    squares = tl.zeros([ROWS, CHUNK], tl.float32)
    for step in tl.range(part * steps, tl.minimum(tl.cdiv(columns, CHUNK), (part + 1) * steps)):
        at = step * CHUNK + tl.arange(0, CHUNK)
        mask = (row < tokens)[:, None] & (at < columns)[None, :]
        v = tl.load(row_ptr + at[None, :], mask=mask, other=0.0)
        mask = (at < columns)[:, None] & (query < queries)[None, :]
        u = tl.load(u_row + at[:, None], mask=mask, other=0.0)
        if SPLIT:
            acc = tl.dot(v, u, acc)
            acc = tl.dot(v, tl.load(low + at[:, None], mask=mask, other=0.0), acc)
        else:
            acc = tl.dot(v.to(tl.float32), u, acc, input_precision="tf32x3")
        wide = v.to(tl.float32)
        squares += wide * wide
    to = ((part * bank + source).to(tl.int64) * tokens + row).to(tl.int64)
    tl.store(squares_ptr + to, tl.sum(squares, axis=1), mask=row < tokens)
    mask = (row < tokens)[:, None] & (query < queries)[None, :]
    tl.store(logits_ptr + to[:, None] * queries + query[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["bank", "tokens", "parts", "queries"])
def _sums_kernel(
    bank_ptrs, logits_ptr, squares_ptr, peak_ptr, total_ptr, acc_ptr, token_stride, bank, tokens,
    columns, parts, queries, eps,
    SPLIT: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token, all queries, every num_programs(1)-th piece of a row."""
    token = (tokens - 1 - tl.program_id(0)).to(tl.int64)  # what was read last is still in L2
    query = tl.arange(0, QUERIES)
    source = tl.arange(0, SOURCES)
    logits = tl.zeros([QUERIES, SOURCES], tl.float32)
    squares = tl.zeros([SOURCES], tl.float32)
    mask = (query < queries)[:, None] & (source < bank)[None, :]
    for part in tl.range(parts):
        at = (part * bank + source).to(tl.int64) * tokens + token
        squares += tl.load(squares_ptr + at, mask=source < bank, other=0.0)
        dots_ptr = logits_ptr + at[None, :] * queries + query[:, None]
        logits += tl.load(dots_ptr, mask=mask, other=0.0)
    logits = logits * tl.rsqrt(squares / columns + eps)[None, :]
    logits = tl.where((source < bank)[None, :], logits, -float("inf"))
    peak = tl.max(logits, axis=1)
    weights = tl.exp(logits - peak[:, None])
    piece = tl.program_id(1)
    to = query.to(tl.int64) * tokens + token
    first = (query < queries) & (piece == 0)
    tl.store(peak_ptr + to, peak, mask=first)
    tl.store(total_ptr + to, tl.sum(weights, axis=1), mask=first)
    row_ptr = (pick(bank_ptrs, source) + token * token_stride)[:, None]
    high = weights.to(tl.bfloat16)
    low = (weights - high.to(tl.float32)).to(tl.bfloat16)
    for start in tl.range(piece * WIDTH, columns, tl.num_programs(1) * WIDTH):
        at = start + tl.arange(0, WIDTH)[None, :]
        mask = (source < bank)[:, None] & (at < columns)
        v = tl.load(row_ptr + at, mask=mask, other=0.0)
        if SPLIT:
            acc = tl.dot(low, v, tl.dot(high, v))
        else:
            acc = tl.dot(weights, v.to(tl.float32), input_precision="tf32x3")
        mask = (query < queries)[:, None] & (at < columns)
        out = acc_ptr + to[:, None] * columns + at
        tl.store(out, acc.to(acc_ptr.dtype.element_ty), mask=mask)


def attn_res_phase1(
    bank: Sequence[torch.Tensor],
    queries: torch.Tensor,
    norm_weights: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, l, acc) of Q queries against a bank of sources; see the module's docstring.

    bank: 1 to 16 tensors [..., d] of one shape, dtype (fp32, bf16, fp16) and device, d <= 8192;
    queries, norm_weights: [Q, d] with 1 <= Q <= 32, fp32, bf16 or fp16. m, l: [Q, ...] fp32; acc:
    [Q, ..., d] in the dtype of the bank; `attn_res_merge` takes m[q], l[q], acc[q] as they are.
    For inference: no gradients; training uses `attn_res_mix`. KernelArgumentError names the
    argument that does not fit.
    """
    given = check_list("bank", bank, LONGEST - 1)
    for name, value in (("queries", queries), ("norm_weights", norm_weights)):
        checks.float_tensor(name, value)
        if value.dim() != 2 or not 1 <= value.shape[0] <= MOST_QUERIES:
            raise checks.KernelArgumentError(
                f"argument '{name}': shape {tuple(value.shape)}; it must be [Q, d] "
                f"with 1 <= Q <= {MOST_QUERIES}"
            )
        checks.vector(f"{name}[0]", value[0], "bank[0]", given[0])
    if queries.shape != norm_weights.shape:
        raise checks.KernelArgumentError(
            f"argument 'norm_weights': shape {tuple(norm_weights.shape)} differs from that of "
            f"'queries', {tuple(queries.shape)}"
        )
    checks.no_gradient(TRAIN, bank=given, queries=queries, norm_weights=norm_weights)
    return _phase1_op(given, queries, norm_weights, checks.positive("eps", eps))


TRAIN = "train with attn_res_mix, or call this under torch.no_grad()"


def attn_res_merge(
    m: torch.Tensor,
    l: torch.Tensor,  # noqa: E741
    acc: torch.Tensor,
    prefix: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-5,
    *,
    delta: torch.Tensor | None = None,
    out_weight: torch.Tensor | None = None,
    out_eps: float | None = None,
    return_mixed: bool = False,
) -> Any:
    """`attn_res_mix([*bank, prefix], query, norm_weight, ...)`, given phase 1 of that query.

    m, l: [...] fp32, and acc [..., d], as `attn_res_phase1` returns them for the query; prefix,
    delta: [..., d] in acc's dtype. The other arguments and the results are those of
    `attn_res_mix`: one kernel adds delta to prefix, merges and norms. For inference: no gradients.
    KernelArgumentError names the argument that does not fit.
    """
    checks.float_tensor("prefix", prefix)
    checks.like("acc", acc, "prefix", prefix)
    for name, value in (("m", m), ("l", l)):
        if not isinstance(value, torch.Tensor):
            raise checks.KernelArgumentError(
                f"argument '{name}': expected a tensor, got {type(value).__name__}"
            )
        found = (tuple(value.shape), value.dtype, value.device)
        wanted = (tuple(prefix.shape[:-1]), torch.float32, prefix.device)
        if found != wanted:
            raise checks.KernelArgumentError(
                f"argument '{name}': {found[0]}, {found[1]}, {found[2]}; 'prefix' of shape "
                f"{tuple(prefix.shape)} needs {wanted[0]}, {wanted[1]}, {wanted[2]}"
            )
    checks.vector("query", query, "prefix", prefix)
    checks.vector("norm_weight", norm_weight, "prefix", prefix)
    if delta is not None:
        checks.like("delta", delta, "prefix", prefix)
    if out_weight is not None:
        checks.vector("out_weight", out_weight, "prefix", prefix)
    eps = checks.positive("eps", eps)
    out_eps = eps if out_eps is None else checks.positive("out_eps", out_eps)
    checks.no_gradient(
        TRAIN, m=m, l=l, acc=acc, prefix=prefix, query=query, norm_weight=norm_weight, delta=delta,
        out_weight=out_weight,
    )  # fmt: skip
    keep = out_weight is not None and return_mixed
    out, total, mixed = _merge_op(
        m, l, acc, prefix, query, norm_weight, delta, out_weight, eps, out_eps, keep
    )
    return results(out, total, mixed if keep else out, delta is not None, return_mixed)


def attn_res_phase1_reference(
    bank: Sequence[torch.Tensor],
    queries: torch.Tensor,
    norm_weights: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attn_res_phase1` in plain torch, in the dtype of its arguments."""
    values = torch.stack(list(bank))
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    logits = torch.einsum("l...d,qd->ql...", keys, queries * norm_weights)
    m = logits.amax(1)
    weights = torch.exp(logits - m[:, None])
    return m, weights.sum(1), torch.einsum("ql...,l...d->q...d", weights, values)


@operator("attn_res_phase1")
def _phase1_op(
    bank: Sequence[torch.Tensor], queries: torch.Tensor, norm_weights: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, total, acc = _empty_phase1(bank, queries)
    if acc.numel() == 0:
        return m, total, acc
    pointers, stride = table([rows_of(x) for x in bank])
    tokens, columns = pointers[0].shape
    count, split = queries.shape[0], acc.dtype == torch.bfloat16
    u = effective_query(queries.contiguous(), norm_weights.contiguous(), split)
    tiles = triton.cdiv(tokens, ROWS)
    chunk = 64 if split else 32
    steps = triton.cdiv(columns * tiles * len(bank), chunk * ENOUGH)  # chunks of a program
    parts = triton.cdiv(columns, chunk * steps)
    logits = u.new_empty(parts, len(bank), tokens, count, dtype=torch.float32)
    squares = u.new_empty(parts, len(bank), tokens, dtype=torch.float32)
    width = {"SPLIT": split, "QUERIES": max(16, triton.next_power_of_2(count))}
    _logits_kernel[(tiles * parts * len(bank),)](
        pointers, u, logits, squares, stride, len(bank), tokens, columns, parts, steps, count,
        **width, ROWS=ROWS, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    pieces = min(triton.cdiv(columns, WIDTH), max(1, 4 * ENOUGH // tokens))
    _sums_kernel[(tokens, pieces)](
        pointers, logits, squares, m, total, acc, stride, len(bank), tokens, columns, parts, count,
        eps, **width, SOURCES=16, WIDTH=WIDTH, num_warps=4,
    )  # fmt: skip
    return m, total, acc


def _empty_phase1(
    bank: Sequence[torch.Tensor], queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (queries.shape[0], *bank[0].shape)
    m = bank[0].new_empty(shape[:-1], dtype=torch.float32)
    return m, torch.empty_like(m), bank[0].new_empty(shape)


@operator("attn_res_merge")
def _merge_op(
    m: torch.Tensor, total: torch.Tensor, acc: torch.Tensor, prefix: torch.Tensor,
    query: torch.Tensor, norm_weight: torch.Tensor, delta: torch.Tensor | None,
    out_weight: torch.Tensor | None, eps: float, out_eps: float, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    out, added, mixed = _empty_merge(prefix, delta is not None, keep)
    if out.numel() == 0:
        return out, added, mixed
    rows, last = rows_of(acc), rows_of(prefix)
    more = last if delta is None else rows_of(delta)
    merge_kernel[(last.shape[0],)](
        m.contiguous(), total.contiguous(), rows, last, more, query.contiguous(),
        norm_weight.contiguous(), query if out_weight is None else out_weight.contiguous(), out,
        added, mixed, rows.stride(0), last.stride(0), more.stride(0), last.shape[1], eps, out_eps,
        ADD=delta is not None, NORM=out_weight is not None, MIXED=keep,
        **shape_of_program(prefix, True),
    )  # fmt: skip
    return out, added, mixed


def _empty_merge(
    prefix: torch.Tensor, added: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = new_like(prefix)
    total, mixed = (out.new_empty(out.shape if present else 0) for present in (added, keep))
    return out, total, mixed


_phase1_op.register_fake(lambda bank, queries, norm_weights, eps: _empty_phase1(bank, queries))
_merge_op.register_fake(
    lambda m, total, acc, prefix, query, norm_weight, delta, out_weight, eps, out_eps, keep: (
        _empty_merge(prefix, delta is not None, keep)
    )
)
