"""Backward kernels of flash attention: probabilities again from q, k and the saved lse.

    delta = rowsum(out dout) - dlse       p = exp(s - lse)        ds = p (dout v^T - delta)
    dv = p^T dout                         dk = scale ds^T q       dq = scale ds k

With out' = out sigmoid(gate): dgate = dout' out' (1 - sigmoid(gate)), dout = dout' sigmoid(gate),
and delta = rowsum(out' dout'). One kernel prepares delta (and dout, dgate, lse in base 2); one owns
tiles of keys and walks over queries for dk and dv, for wide heads in a launch each; one owns tiles
of queries and walks over keys for dq. No atomics: equal inputs give equal bits. Source: Dao,
FlashAttention-2, arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.attention_backward_tiles import Tile, choose, heads_together
from minitriton.kernels.attention_tiles import (
    LOG2E,
    UNSPECIALIZED,
    Operands,
    Plan,
    aligned,
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
from minitriton.kernels.gemm import sum_partials
from minitriton.kernels.rows import new_like

PREPARED_ROWS = 32
_DO = ("do_batch", "do_token", "do_head")


@triton.jit(do_not_specialize=("g_batch", "g_token", "g_head", "tokens", *_DO))
def _prepare_kernel(
    out_ptr, grad_ptr, lse_ptr, dlse_ptr, gate_ptr, power_ptr, delta_ptr, dout_ptr, dgate_ptr,
    do_batch, do_token, do_head, g_batch, g_token, g_head, tokens, heads, V: tl.constexpr,
    V_READ: tl.constexpr, V_TILE: tl.constexpr, GATED: tl.constexpr, REWRITTEN: tl.constexpr,
    HAS_DLSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta [B, H, T] and lse in base 2, infinite, hence without probabilities, where a row has no
    keys; dout in the inputs' dtype if REWRITTEN; dgate."""
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    plane_row = batch.to(tl.int64) * tokens * heads + head
    offset = plane_row * V
    row = first + tl.arange(0, ROWS)
    grad_ptr = at_head(grad_ptr, do_batch, do_token, do_head, batch, 0, head, 4)
    do_token = tl.multiple_of(do_token, 4)
    out = load_tile(out_ptr + offset, heads * V, first, tokens, ROWS, V, V_TILE, True)
    grad = load_tile(grad_ptr, do_token, first, tokens, ROWS, V, V_TILE, True).to(tl.float32)
    product = out.to(tl.float32) * grad
    delta = tl.sum(product, 1)
    plane = (batch * heads + head).to(tl.int64) * tokens + row
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + plane, mask=row < tokens, other=0.0)
    tl.store(delta_ptr + plane, delta, mask=row < tokens)
    lse = tl.load(lse_ptr + plane, mask=row < tokens, other=0.0)
    power = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
    tl.store(power_ptr + plane, power, mask=row < tokens)
    if GATED:
        gate_ptr = at_head(gate_ptr, g_batch, g_token, g_head, batch, 0, head, 4)
        g_token = tl.multiple_of(g_token, 4)
        gate = load_tile(gate_ptr, g_token, first, tokens, ROWS, V, V_TILE, True)
        s = tl.sigmoid(gate.to(tl.float32))
        grad = grad * s
        dgate = product * (1 - s)
        store_tile(dgate_ptr + offset, heads * V, first, tokens, dgate, ROWS, V, V_TILE)
    if REWRITTEN:
        dout_ptr += plane_row * V_READ
        store_tile(dout_ptr, heads * V_READ, first, tokens, grad, ROWS, V_READ, V_TILE)


@triton.jit
def _over_queries(
    dk1, dk2, dv, q_ptr, k_ptr, rest_ptr, v_ptr, do_ptr, power_ptr, delta_ptr, q_token, k_token,
    rest_token, v_token, do_token, q_head, do_head, tokens, low, first, queries, keys, scale,
    kept_scale, seed, plane, threshold, C: tl.constexpr,
):  # fmt: skip
    """Takes the queries from `low` on, of SHARE heads, into dk and dv; tiles are transposed:
    [keys, queries]. k and v are loaded where they are used: the compiler copies them to shared
    memory once. Products that need nothing from each other stand together: on Hopper they run while
    p is computed."""
    column = tl.arange(0, C.BLOCK_N)[:, None]
    ahead = keys - queries - first  # a query sees columns up to this many behind its own number
    tiles = tl.cdiv(queries - low, C.BLOCK_M)
    for step in tl.range(0, tiles * C.SHARE):
        # One loop, so that one head's copies begin beside the products of another. From the end, as
        # all programs have that, and one head after the other: what they read at a time are few
        # tokens, of all heads, which stay in L2.
        turn = step % C.SHARE
        start = tl.maximum(low + (tiles - 1 - step // C.SHARE) * C.BLOCK_M, 0)
        head = turn.to(tl.int64)
        q_at, do_at = q_ptr + head * q_head, do_ptr + head * do_head
        power_at, delta_at = power_ptr + head * tokens, delta_ptr + head * tokens
        plane_at = plane + turn
        row = start + tl.arange(0, C.BLOCK_M)
        k1 = load_tile(k_ptr, k_token, first, keys, C.BLOCK_N, C.HEAD_READ, C.TILE, True)
        q1 = load_tile(q_at, q_token, start, queries, C.BLOCK_M, C.HEAD_READ, C.TILE, True)
        scores = tl.dot(k1, tl.trans(q1), input_precision=C.PRECISION)
        if C.REST > 0:
            k2 = load_tile(rest_ptr, rest_token, first, keys, C.BLOCK_N, C.REST_READ, C.REST, True)
            q2 = load_tile(
                q_at + C.HEAD, q_token, start, queries, C.BLOCK_M, C.REST_READ, C.REST, True
            )
            scores = tl.dot(k2, tl.trans(q2), scores, input_precision=C.PRECISION)
        do = load_tile(do_at, do_token, start, queries, C.BLOCK_M, C.V_READ, C.V_TILE, True)
        if C.FOR_K:
            v = load_tile(v_ptr, v_token, first, keys, C.BLOCK_N, C.V_READ, C.V_TILE, True)
            dp = tl.dot(v, tl.trans(do), input_precision=C.PRECISION)
        power = tl.load(power_at + row, mask=row < queries, other=0.0)
        p = tl.exp2(scores * scale - power[None, :])
        if C.CAUSAL:
            if start + ahead < C.BLOCK_N - 1:
                p = tl.where(column <= (row + ahead)[None, :], p, 0.0)
        elif start + C.BLOCK_M > queries:  # without a branch ptxas waits for dp before the exp2
            p = tl.where((row < queries)[None, :], p, 0.0)
        dropped = p
        if C.DROPOUT:
            keep = kept(seed, plane_at, start, first, threshold, C.BLOCK_M, C.BLOCK_N, True)
            dropped = tl.where(keep, p, 0.0)
        if C.FOR_K:
            if C.DROPOUT:
                dp = tl.where(keep, dp * kept_scale, 0.0)
            delta = tl.load(delta_at + row, mask=row < queries, other=0.0)
            ds = (p * (dp - delta[None, :])).to(q1.dtype)
        if C.FOR_V:
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=C.PRECISION)
        if C.FOR_K:
            dk1 = tl.dot(ds, q1, dk1, input_precision=C.PRECISION)
            if C.REST > 0:
                dk2 = tl.dot(ds, q2, dk2, input_precision=C.PRECISION)
    return dk1, dk2, dv


@triton.jit
def tile_and_head(together, LAST_FIRST: tl.constexpr, C: tl.constexpr):
    """What a program works on. If CAUSAL, the longest programs come first, those of the first tiles
    or of the last ones; tiles of `together` heads take turns."""
    number, head = tl.program_id(0), tl.program_id(1)
    if C.CAUSAL:
        if LAST_FIRST:
            number = tl.num_programs(0) - 1 - number
            tl.assume(number >= 0)
        # one number for the compiler, so that a tensor map has one dimension for it
        head = tl.maximum(head * together + number % together, 0)
        number = number // together
    return number, head


@triton.jit(do_not_specialize=(*UNSPECIALIZED, *_DO, "together", "own_heads"))
def _dkdv_kernel(
    q_ptr, k_ptr, rest_ptr, v_ptr, do_ptr, power_ptr, delta_ptr, dk_ptr, drest_ptr, dv_ptr, cu_ptr,
    seed_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head, rest_batch, rest_token,
    rest_head, v_batch, v_token, v_head, do_batch, do_token, do_head, together, own_heads, tokens,
    keys, heads, share, sequences, threshold: tl.uint32, scale, kept_scale, C: tl.constexpr,
):  # fmt: skip
    """dk if FOR_K, dv if FOR_V of BLOCK_N keys of one of own_heads heads of k; if SHARED, the
    channels of k from HEAD on go to drest [H, B, T, R], to be summed."""
    key_tokens, batches = keys, tl.num_programs(2)
    tile, own = tile_and_head(together, False, C)
    batch, sequence, first, begin, queries, keys = locate(
        tile, cu_ptr, sequences, tokens, keys, C.BLOCK_N, C.PACKED
    )
    if C.PACKED and first >= keys:
        return
    q_token, k_token = tl.multiple_of(q_token, C.ALIGN), tl.multiple_of(k_token, C.ALIGN)
    rest_token = tl.multiple_of(rest_token, C.ALIGN)
    v_token, do_token = tl.multiple_of(v_token, C.ALIGN), tl.multiple_of(do_token, C.ALIGN)
    low = 0
    if C.CAUSAL:  # the first query that sees any of these keys
        low = tl.maximum(0, first + queries - keys) // C.BLOCK_M * C.BLOCK_M
    seed = tl.load(seed_ptr) if C.DROPOUT else 0
    head = own * C.SHARE
    q_head, do_head = tl.multiple_of(q_head, C.ALIGN), tl.multiple_of(do_head, C.ALIGN)
    q_ptr = at_head(q_ptr, q_batch, q_token, q_head, batch, begin, head, C.ALIGN)
    k_ptr = at_head(k_ptr, k_batch, k_token, k_head, batch, begin, own, C.ALIGN)
    v_ptr = at_head(v_ptr, v_batch, v_token, v_head, batch, begin, own, C.ALIGN)
    do_ptr = at_head(do_ptr, do_batch, do_token, do_head, batch, begin, head, C.ALIGN)
    rest_ptr = at_head(rest_ptr, rest_batch, rest_token, rest_head, batch, begin, own, C.ALIGN)
    at = (batch * heads + head).to(tl.int64) * tokens + begin
    REST: tl.constexpr = C.REST if C.REST > 0 else 16
    dk1 = tl.zeros([C.BLOCK_N, C.TILE], tl.float32)
    dk2 = tl.zeros([C.BLOCK_N, REST], tl.float32)
    dv = tl.zeros([C.BLOCK_N, C.V_TILE], tl.float32)
    dk1, dk2, dv = _over_queries(
        dk1, dk2, dv, q_ptr, k_ptr, rest_ptr, v_ptr, do_ptr, power_ptr + at, delta_ptr + at,
        q_token, k_token, rest_token, v_token, do_token, q_head, do_head, tokens, low,
        first, queries, keys, scale, kept_scale, seed, sequence * heads + head, threshold, C,
    )  # fmt: skip
    to = tl.cast(batch * key_tokens + begin, tl.int64)
    _store_dkdv(
        dk1, dk2, dv, dk_ptr, dv_ptr, to * (own_heads * C.APART), own, own_heads, first, keys,
        scale, kept_scale, C,
    )  # fmt: skip
    if C.SHARED and C.FOR_K:
        to += own.to(tl.int64) * batches * key_tokens
        width: tl.constexpr = C.QK - C.HEAD
        drest = dk2 * (scale / LOG2E)
        store_tile(drest_ptr + to * width, width, first, keys, drest, C.BLOCK_N, width, REST)


@triton.jit
def _store_dkdv(
    dk1, dk2, dv, dk_ptr, dv_ptr, row, head, heads, first, keys, scale, kept_scale, C: tl.constexpr
):
    """Writes dk and dv of one head, of `heads`; `row`: rows in front of the sequence."""
    WIDTH: tl.constexpr = C.HEAD if C.SHARED else C.QK
    stride = heads * C.APART
    if C.FOR_K:
        dk = dk_ptr + (row + head) * WIDTH
        dk1 *= scale / LOG2E
        store_tile(dk, stride * WIDTH, first, keys, dk1, C.BLOCK_N, C.HEAD, C.TILE)
        if C.REST > 0 and not C.SHARED:
            dk2 *= scale / LOG2E
            store_tile(
                dk + C.HEAD, stride * WIDTH, first, keys, dk2, C.BLOCK_N, C.QK - C.HEAD, C.REST
            )  # fmt: skip
    if C.FOR_V:
        dv_at = dv_ptr + (row + head) * C.V
        store_tile(dv_at, stride * C.V, first, keys, dv * kept_scale, C.BLOCK_N, C.V, C.V_TILE)


@triton.jit
def _over_keys(
    dq1, dq2, power, delta, q_ptr, k_ptr, rest_ptr, v_ptr, do_ptr, q_token, k_token, rest_token,
    v_token, do_token, first, queries, keys, scale, kept_scale, seed, plane, threshold,
    C: tl.constexpr,
):  # fmt: skip
    """Takes all keys that these queries see into dq."""
    row = first + tl.arange(0, C.BLOCK_M)[:, None]
    full, end = visible_keys(first, queries, keys, C)
    for start in tl.range(0, end, C.BLOCK_N):
        q1 = load_tile(q_ptr, q_token, first, queries, C.BLOCK_M, C.HEAD_READ, C.TILE, True)
        k1 = load_tile(k_ptr, k_token, start, keys, C.BLOCK_N, C.HEAD_READ, C.TILE, True)
        scores = tl.dot(q1, tl.trans(k1), input_precision=C.PRECISION)
        if C.REST > 0:
            q2 = load_tile(
                q_ptr + C.HEAD, q_token, first, queries, C.BLOCK_M, C.REST_READ, C.REST, True
            )
            k2 = load_tile(rest_ptr, rest_token, start, keys, C.BLOCK_N, C.REST_READ, C.REST, True)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=C.PRECISION)
        v = load_tile(v_ptr, v_token, start, keys, C.BLOCK_N, C.V_READ, C.V_TILE, True)
        do = load_tile(do_ptr, do_token, first, queries, C.BLOCK_M, C.V_READ, C.V_TILE, True)
        dp = tl.dot(do, tl.trans(v), input_precision=C.PRECISION)
        p = tl.exp2(scores * scale - power[:, None])
        if start >= full:
            column = start + tl.arange(0, C.BLOCK_N)[None, :]
            seen = (column < keys) & (row >= 0)
            if C.CAUSAL:
                seen = seen & (column <= row + keys - queries)
            p = tl.where(seen, p, 0.0)
        if C.DROPOUT:
            keep = kept(seed, plane, first, start, threshold, C.BLOCK_M, C.BLOCK_N, False)
            dp = tl.where(keep, dp * kept_scale, 0.0)
        ds = (p * (dp - delta[:, None])).to(k1.dtype)
        dq1 = tl.dot(ds, k1, dq1, input_precision=C.PRECISION)
        if C.REST > 0:
            dq2 = tl.dot(ds, k2, dq2, input_precision=C.PRECISION)
    return dq1, dq2


@triton.jit(do_not_specialize=(*UNSPECIALIZED, *_DO, "together"))
def _dq_kernel(
    q_ptr, k_ptr, rest_ptr, v_ptr, do_ptr, power_ptr, delta_ptr, dq_ptr, cu_ptr, seed_ptr, q_batch,
    q_token, q_head, k_batch, k_token, k_head, rest_batch, rest_token, rest_head, v_batch,
    v_token, v_head, do_batch, do_token, do_head, together, tokens, keys, heads, share, sequences,
    threshold: tl.uint32, scale, kept_scale, C: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head."""
    tile, head = tile_and_head(together, True, C)
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
    do_ptr = at_head(do_ptr, do_batch, do_token, do_head, batch, begin, head, C.ALIGN)
    q_token, k_token = tl.multiple_of(q_token, C.ALIGN), tl.multiple_of(k_token, C.ALIGN)
    rest_token = tl.multiple_of(rest_token, C.ALIGN)
    v_token, do_token = tl.multiple_of(v_token, C.ALIGN), tl.multiple_of(do_token, C.ALIGN)
    at = (batch * heads + head).to(tl.int64) * tokens + begin
    row = first + tl.arange(0, C.BLOCK_M)
    power = tl.load(power_ptr + at + row, mask=row < queries, other=0.0)
    delta = tl.load(delta_ptr + at + row, mask=row < queries, other=0.0)
    dq1 = tl.zeros([C.BLOCK_M, C.TILE], tl.float32)
    dq2 = tl.zeros([C.BLOCK_M, C.REST if C.REST > 0 else 16], tl.float32)
    seed = tl.load(seed_ptr) if C.DROPOUT else 0
    dq1, dq2 = _over_keys(
        dq1, dq2, power, delta, q_ptr, k_ptr, rest_ptr, v_ptr, do_ptr, q_token, k_token,
        rest_token, v_token, do_token, first, queries, keys, scale, kept_scale, seed,
        sequence * heads + head, threshold, C,
    )  # fmt: skip
    row_heads = heads * C.APART
    dq_ptr += ((tl.cast(batch, tl.int64) * tokens + begin) * row_heads + head) * C.QK
    dq1, dq2, stride = dq1 * (scale / LOG2E), dq2 * (scale / LOG2E), row_heads * C.QK
    store_tile(dq_ptr, stride, first, queries, dq1, C.BLOCK_M, C.HEAD, C.TILE)
    if C.REST > 0:
        dq_ptr += C.HEAD
        store_tile(dq_ptr, stride, first, queries, dq2, C.BLOCK_M, C.QK - C.HEAD, C.REST)


def prepare(
    call: Operands, plan: Plan, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor,
    dlse: torch.Tensor | None, dgate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(lse in base 2 and delta, [B, H, T], gradient of the ungated output in q's dtype); fills
    dgate."""
    batch, tokens, heads, width = out.shape
    power, delta = new_like(lse), new_like(lse)
    rewritten = plan.GATED or grad.dtype != call.q.dtype
    grad = aligned(grad)
    shape = (batch, tokens, heads, plan.V_READ)
    dout = torch.empty(shape, dtype=call.q.dtype, device=out.device) if rewritten else grad
    gate = grad if call.gate is None else call.gate
    _prepare_kernel[triton.cdiv(tokens, PREPARED_ROWS), heads, batch](
        out, grad, lse, lse if dlse is None else dlse, gate, power, delta, dout, dgate,
        *strides_of(grad), *strides_of(gate), tokens, heads, V=width, V_READ=plan.V_READ,
        V_TILE=plan.V_TILE, GATED=plan.GATED, REWRITTEN=rewritten, HAS_DLSE=dlse is not None,
        ROWS=PREPARED_ROWS,
    )  # fmt: skip
    return power, delta, dout


def backward(
    call: Operands, plan: Plan, power: torch.Tensor, delta: torch.Tensor, dout: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, drest: torch.Tensor, dv: torch.Tensor,
) -> None:  # fmt: skip
    """Fills dq, dk, dv, contiguous or with tokens plan.APART times as far from each other; drest
    [B, T, R], what the heads share, if plan.SHARED."""
    tiles = choose(plan, call.q.element_size())
    batch, tokens, heads, _ = call.q.shape
    own_heads = call.k.shape[2]
    plan = changed(plan, GATED=False, SHARE=call.share)
    partial = drest
    if plan.SHARED:
        partial = torch.empty((heads, *drest.shape), dtype=torch.float32, device=dq.device)
    strides = (*call.strides(), *strides_of(dout))
    launches = [(tiles.keys, changed(plan, FOR_V=tiles.values is None))]
    if tiles.values is not None:
        launches.append((tiles.values, changed(plan, FOR_K=False)))
    row = call.q.element_size() * (plan.QK + plan.V)  # of q and dout, or of k and v
    grid, together = _grid(plan, own_heads, batch, row * tokens * call.share)
    for tile, own in launches:
        _dkdv_kernel[grid(tiles_of(call.k.shape[1], tile.keys, call.cu_seqlens))](
            call.q, call.k, call.rest, call.v, dout, power, delta, dk, partial, dv,
            *call.lists(), *strides, together, own_heads, *call.numbers(), C=_tiled(own, tile),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    tile, own = tiles.queries, changed(plan, SHARE=1)
    grid, together = _grid(plan, heads, batch, row * call.k.shape[1])
    _dq_kernel[grid(tiles_of(tokens, tile.queries, call.cu_seqlens))](
        call.q, call.k, call.rest, call.v, dout, power, delta, dq, *call.lists(), *strides,
        together, *call.numbers(), C=_tiled(own, tile), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    if plan.SHARED:
        sum_partials(partial, drest)


def _grid(
    plan: Plan, heads: int, batch: int, streamed: int
) -> tuple[Callable[[int], tuple[int, int, int]], int]:
    """The grid by how many tiles a head has, and how many heads' tiles take turns, where some of
    them take longer. streamed: bytes that the programs of one head walk over."""
    turns = plan.CAUSAL and not plan.PACKED
    together = heads_together(heads, streamed) if turns else 1
    return lambda tiles: (tiles * together, heads // together, batch), together


def _tiled(plan: Plan, tile: Tile) -> Plan:
    return changed(plan, BLOCK_M=tile.queries, BLOCK_N=tile.keys)
