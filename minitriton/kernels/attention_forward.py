"""Forward kernel of flash attention: online softmax in base 2 over tiles of keys.

    s = scale q k^T,    p = exp(s - max),    out = (p v) / sum(p),    lse = max + log sum(p)

A program owns BLOCK_M queries of one head. It walks over the keys that its queries see, with masks
at the diagonal and at the end. out may be multiplied by
sigmoid(gate) on its way out. Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

import dataclasses

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.attention_tiles import (
    LOG2E,
    UNSPECIALIZED,
    Operands,
    Plan,
    at_head,
    kept,
    load_tile,
    locate,
    store_tile,
    strides_of,
    tiles_of,
    visible_keys,
)

LONG = 1024  # keys from which one more iteration does not count


@triton.jit
def _hide(scores, row, start, queries, keys, C: tl.constexpr):
    """Scores of keys that a query does not see become -inf."""
    column = start + tl.arange(0, C.BLOCK_N)[None, :]
    seen = (column < keys) & (row >= 0)
    if C.CAUSAL:
        seen = seen & (column <= row + keys - queries)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _walk(
    acc, total, peak, pending, q_ptr, k_ptr, rest_ptr, v_ptr, q_token, k_token, rest_token,
    v_token, first, low, full, end, queries, keys, scale, seed, plane, threshold,
    HIDES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `low` to `end` into the running sums; HIDES: "none", "all", or "some",
    those from `full` on. q is loaded where it is used: the compiler copies it to shared memory
    once, and registers stay free. If AHEAD, p of one iteration, `pending`, meets v in the next,
    beside the softmax there; one more iteration than there are keys for ends that."""
    row = first + tl.arange(0, C.BLOCK_M)[:, None]
    further = C.BLOCK_N if C.AHEAD and HIDES != "none" else 0
    for start in tl.range(low, end + further, C.BLOCK_N):
        q1 = load_tile(q_ptr, q_token, first, queries, C.BLOCK_M, C.HEAD_READ, C.TILE, True)
        k1 = load_tile(k_ptr, k_token, start, keys, C.BLOCK_N, C.HEAD_READ, C.TILE, True)
        scores = tl.dot(q1, tl.trans(k1), input_precision=C.PRECISION)
        if C.REST > 0:
            q2 = load_tile(
                q_ptr + C.HEAD, q_token, first, queries, C.BLOCK_M, C.REST_READ, C.REST, True
            )
            k2 = load_tile(rest_ptr, rest_token, start, keys, C.BLOCK_N, C.REST_READ, C.REST, True)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=C.PRECISION)
        if C.AHEAD:
            before = start - C.BLOCK_N  # rows before the first are zeros
            v = load_tile(v_ptr, v_token, before, keys, C.BLOCK_N, C.V_READ, C.V_TILE, True, True)
            acc = tl.dot(pending, v, acc, input_precision=C.PRECISION)
        rescale = tl.full([C.BLOCK_M], 1.0, tl.float32)
        if further == 0 or start < end:
            if HIDES == "all":
                scores = _hide(scores, row, start, queries, keys, C)
            if HIDES == "some" and start >= full:
                scores = _hide(scores, row, start, queries, keys, C)
            higher = tl.maximum(peak, tl.max(scores, 1) * scale)
            centre = tl.where(higher == -float("inf"), 0.0, higher)  # has seen nothing yet
            weights = tl.exp2(scores * scale - centre[:, None])
            rescale = tl.exp2(peak - centre)
            total = total * rescale + tl.sum(weights, 1)
            if C.DROPOUT:
                keep = kept(seed, plane, first, start, threshold, C.BLOCK_M, C.BLOCK_N, False)
                weights = tl.where(keep, weights, 0.0)
            p = weights.to(v_ptr.dtype.element_ty)
            peak = higher
            if C.AHEAD:
                pending = p
        acc = acc * rescale[:, None]
        if not C.AHEAD:
            v = load_tile(v_ptr, v_token, start, keys, C.BLOCK_N, C.V_READ, C.V_TILE, True)
            acc = tl.dot(p, v, acc, input_precision=C.PRECISION)
    return acc, total, peak, pending


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "g_batch", "g_token", "g_head"))
def _forward_kernel(
    q_ptr, k_ptr, rest_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, cu_ptr, seed_ptr, q_batch, q_token,
    q_head, k_batch, k_token, k_head, rest_batch, rest_token, rest_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, tokens, keys, heads, share, sequences, threshold: tl.uint32, scale,
    kept_scale, C: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # with a causal mask the longest come first
    head = tl.program_id(1)
    batch, sequence, first, begin, queries, keys = locate(
        tile, cu_ptr, sequences, tokens, keys, C.BLOCK_M, C.PACKED
    )
    if first >= queries:
        return
    q_ptr = at_head(q_ptr, q_batch, q_token, q_head, batch, begin, head, C.ALIGN)
    own = head // share
    k_ptr = at_head(k_ptr, k_batch, k_token, k_head, batch, begin, own, C.ALIGN)
    rest_ptr = at_head(rest_ptr, rest_batch, rest_token, rest_head, batch, begin, own, C.ALIGN)
    v_ptr = at_head(v_ptr, v_batch, v_token, v_head, batch, begin, own, C.ALIGN)
    q_token = tl.multiple_of(q_token, C.ALIGN)
    k_token = tl.multiple_of(k_token, C.ALIGN)
    rest_token = tl.multiple_of(rest_token, C.ALIGN)
    v_token = tl.multiple_of(v_token, C.ALIGN)
    acc = tl.zeros([C.BLOCK_M, C.V_TILE], tl.float32)
    total = tl.zeros([C.BLOCK_M], tl.float32)
    peak = tl.full([C.BLOCK_M], -float("inf"), tl.float32)
    seed = tl.load(seed_ptr) if C.DROPOUT else 0
    plane = sequence * heads + head
    pending = tl.zeros([C.BLOCK_M, C.BLOCK_N], v_ptr.dtype.element_ty) if C.AHEAD else 0
    full, end = visible_keys(first, queries, keys, C)
    if C.PEELED:
        acc, total, peak, pending = _walk(
            acc, total, peak, pending, q_ptr, k_ptr, rest_ptr, v_ptr, q_token, k_token, rest_token,
            v_token, first, 0, full, full, queries, keys, scale, seed, plane, threshold, "none", C,
        )  # fmt: skip
        acc, total, peak, pending = _walk(
            acc, total, peak, pending, q_ptr, k_ptr, rest_ptr, v_ptr, q_token, k_token, rest_token,
            v_token, first, full, full, end, queries, keys, scale, seed, plane, threshold, "all", C,
        )  # fmt: skip
    else:
        acc, total, peak, pending = _walk(
            acc, total, peak, pending, q_ptr, k_ptr, rest_ptr, v_ptr, q_token, k_token, rest_token,
            v_token, first, 0, full, end, queries, keys, scale, seed, plane, threshold, "some", C,
        )  # fmt: skip
    row = first + tl.arange(0, C.BLOCK_M)
    to = lse_ptr + (batch * heads + head).to(tl.int64) * tokens + begin + row
    tl.store(to, (peak + tl.log2(total)) / LOG2E, mask=row < queries)
    out = acc * (kept_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    if C.GATED:
        gate_ptr = at_head(gate_ptr, g_batch, g_token, g_head, batch, begin, head, 4)
        g_token = tl.multiple_of(g_token, 4)
        gate = load_tile(gate_ptr, g_token, first, queries, C.BLOCK_M, C.V, C.V_TILE, True)
        out = out * tl.sigmoid(gate.to(tl.float32))
    out_ptr += ((tl.cast(batch, tl.int64) * tokens + begin) * heads + head) * C.V
    store_tile(out_ptr, heads * C.V, first, queries, out, C.BLOCK_M, C.V, C.V_TILE)


def forward(call: Operands, plan: Plan, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fills out [B, T, H, V], contiguous, and lse [B, H, T]."""
    block_m, block_n, warps, stages = _tile(plan, call.q.element_size())
    ahead = plan.WARPGROUPS and not plan.DROPOUT and call.k.shape[1] >= LONG
    # with narrow heads the arithmetic takes longer than the products, with wide ones registers end
    ahead = ahead and 64 < plan.TILE <= 128
    # offsets of packed sequences and dropout's words take the registers of a second loop
    peeled = plan.WARPGROUPS and warps == 8 and not (plan.PACKED or plan.DROPOUT)
    plan = dataclasses.replace(
        plan, BLOCK_M=block_m, BLOCK_N=block_n, AHEAD=ahead, PEELED=peeled
    )  # fmt: skip
    gate = call.q if call.gate is None else call.gate
    grid = (tiles_of(call.q.shape[1], block_m, call.cu_seqlens), call.q.shape[2], call.q.shape[0])
    _forward_kernel[grid](
        call.q, call.k, call.rest, call.v, gate, out, lse, *call.lists(), *call.strides(),
        *strides_of(gate), *call.numbers(), C=plan, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _tile(plan: Plan, element_size: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages): measured, so that nothing spills and all fits in
    the 99 KB of the smallest GPU, with WARPGROUPS in 227 KB."""
    widest = max(plan.TILE + plan.REST, plan.V_TILE)
    if plan.WARPGROUPS and widest <= 192 and plan.V_TILE <= 128:
        if widest <= 64:
            return 64, 64, 4, 2
        return (128, 64 if plan.DROPOUT or widest > 128 else 128, 8, 2)
    if plan.WARPGROUPS and widest <= 256 and not plan.DROPOUT:
        return 128, 64, 8, 2
    if element_size == 4:
        return (64, 32, 8, 2) if widest <= 64 else (64 if widest <= 128 else 32, 16, 8, 2)
    if widest <= 64:
        return (64, 64, 4, 3) if plan.DROPOUT else (128, 32, 4, 3)
    return (128, 32, 8, 2) if plan.TILE <= 128 and plan.V_TILE <= 128 else (64, 16, 8, 2)
