"""Forward kernel of flash attention: online softmax in base 2 over tiles of keys.

    s = scale q k^T,    p = exp(s - max),    out = (p v) / sum(p),    lse = max + log sum(p)

A program owns BLOCK_M queries of one head. It walks over the keys that its queries see, with masks
at the diagonal and at the end. out may be multiplied by
sigmoid(gate) on its way out. Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.attention_tiles import (
    LOG2E,
    UNSPECIALIZED,
    Operands,
    Plan,
    at_head,
    changed,
    kept,
    load_tile,
    locate,
    store_tile,
    strides_of,
    tiles_of,
    visible_keys,
)

SHORT = 1024  # keys of a causal sequence: of fewer, much lies in the tiles on the diagonal


@triton.jit
def _hide(scores, row, start, queries, keys, C: tl.constexpr):
    """Scores of keys that a query does not see become -inf. A row behind the last query, which is
    not stored, may see keys behind the last one: those are zeros."""
    column = start + tl.arange(0, C.BLOCK_N)[None, :]
    seen = column <= row + (keys - queries) if C.CAUSAL else column < keys
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _load_queries(q_ptr, q_token, first, queries, C: tl.constexpr):
    """Both tiles of channels; the first twice if there is no second."""
    q1 = load_tile(q_ptr, q_token, first, queries, C.BLOCK_M, C.HEAD_READ, C.TILE, True)
    q2 = q1
    if C.REST > 0:
        q2 = load_tile(
            q_ptr + C.HEAD, q_token, first, queries, C.BLOCK_M, C.REST_READ, C.REST, True
        )
    return q1, q2


@triton.jit
def _walk(
    acc, total, peak, held1, held2, q_ptr, k_ptr, rest_ptr, v_ptr, q_token, k_token, rest_token,
    v_token, first, low, full, end, queries, keys, scale, seed, plane, threshold,
    HIDES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `low` to `end` into the running sums; HIDES: "none", "all", or "some",
    those from `full` on. Unless HELD, q is loaded where it is used: the compiler copies it to
    shared memory once, and registers stay free."""
    row = first + tl.arange(0, C.BLOCK_M)[:, None]
    for start in tl.range(low, end, C.BLOCK_N):
        q1, q2 = held1, held2
        if not C.HELD:
            q1, q2 = _load_queries(q_ptr, q_token, first, queries, C)
        k1 = load_tile(k_ptr, k_token, start, keys, C.BLOCK_N, C.HEAD_READ, C.TILE, True)
        scores = tl.dot(q1, tl.trans(k1), input_precision=C.PRECISION)
        if C.REST > 0:
            k2 = load_tile(rest_ptr, rest_token, start, keys, C.BLOCK_N, C.REST_READ, C.REST, True)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=C.PRECISION)
        if HIDES == "all":
            scores = _hide(scores, row, start, queries, keys, C)
        if HIDES == "some" and start >= full:
            scores = _hide(scores, row, start, queries, keys, C)
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        centre = higher
        if HIDES != "none":
            centre = tl.where(higher == -float("inf"), 0.0, higher)  # has seen nothing yet
        weights = tl.exp2(scores * scale - centre[:, None])
        rescale = tl.exp2(peak - centre)
        total = total * rescale + tl.sum(weights, 1)
        if C.DROPOUT:
            keep = kept(seed, plane, first, start, threshold, C.BLOCK_M, C.BLOCK_N, False)
            weights = tl.where(keep, weights, 0.0)
        v = load_tile(v_ptr, v_token, start, keys, C.BLOCK_N, C.V_READ, C.V_TILE, True)
        p = weights.to(v_ptr.dtype.element_ty)
        acc = tl.dot(p, v, acc * rescale[:, None], input_precision=C.PRECISION)
        peak = higher
    return acc, total, peak


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "g_batch", "g_token", "g_head"))
def _forward_kernel(
    q_ptr, k_ptr, rest_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, cu_ptr, seed_ptr, q_batch, q_token,
    q_head, k_batch, k_token, k_head, rest_batch, rest_token, rest_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, tokens, keys, heads, share, sequences, threshold: tl.uint32, scale,
    kept_scale, C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if C.CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest come first
    head = tl.program_id(1)
    batch, sequence, first, begin, queries, keys = locate(
        tile, cu_ptr, sequences, tokens, keys, C.BLOCK_M, C.PACKED
    )
    if C.PACKED and first >= queries:
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
    full, end = visible_keys(first, queries, keys, C)
    q1, q2 = _load_queries(q_ptr, q_token, first, queries, C) if C.HELD else (0, 0)
    if C.PEELED:
        acc, total, peak = _walk(
            acc, total, peak, q1, q2, q_ptr, k_ptr, rest_ptr, v_ptr, q_token, k_token, rest_token,
            v_token, first, 0, full, full, queries, keys, scale, seed, plane, threshold, "none", C,
        )  # fmt: skip
        acc, total, peak = _walk(
            acc, total, peak, q1, q2, q_ptr, k_ptr, rest_ptr, v_ptr, q_token, k_token, rest_token,
            v_token, first, full, full, end, queries, keys, scale, seed, plane, threshold, "all", C,
        )  # fmt: skip
    else:
        acc, total, peak = _walk(
            acc, total, peak, q1, q2, q_ptr, k_ptr, rest_ptr, v_ptr, q_token, k_token, rest_token,
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
    block_m, block_n, warps, stages = _tile(plan, call.q.element_size(), call.k.shape[1])
    # packed sequences and tiles of 64 x 64 are faster with one loop, on an H200
    peeled = plan.WARPGROUPS and not plan.PACKED and (block_m, block_n) != (64, 64)
    plan = changed(
        plan, BLOCK_M=block_m, BLOCK_N=block_n, PEELED=peeled, HELD=peeled and block_m == 128
    )  # fmt: skip
    gate = call.q if call.gate is None else call.gate
    grid = (tiles_of(call.q.shape[1], block_m, call.cu_seqlens), call.q.shape[2], call.q.shape[0])
    _forward_kernel[grid](
        call.q, call.k, call.rest, call.v, gate, out, lse, *call.lists(), *call.strides(),
        *strides_of(gate), *call.numbers(), C=plan, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _tile(plan: Plan, element_size: int, keys: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages): measured, so that nothing spills and all fits in
    the 99 KB of the smallest GPU, with WARPGROUPS in 227 KB."""
    widest = max(plan.TILE + plan.REST, plan.V_TILE)
    if plan.WARPGROUPS and widest <= 192 and plan.V_TILE <= 128:
        if widest <= 64:
            narrow = plan.PACKED or plan.DROPOUT or (plan.CAUSAL and keys <= SHORT)
            return 64, 64 if narrow else 128, 4, 2
        return (128, 64 if plan.DROPOUT or widest > 128 else 128, 8, 2)
    if plan.WARPGROUPS and widest <= 256 and not plan.DROPOUT:
        return 128, 64, 8, 2
    if element_size == 4:
        return (64, 32, 8, 2) if widest <= 64 else (64 if widest <= 128 else 32, 16, 8, 2)
    if widest <= 64:
        return (64, 64, 4, 3) if plan.DROPOUT else (128, 32, 4, 3)
    return (128, 32, 8, 2) if plan.TILE <= 128 and plan.V_TILE <= 128 else (64, 16, 8, 2)
