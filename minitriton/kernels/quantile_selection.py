"""The key that a given number of tokens reach, per expert: exact, and in one pass over the scores.

A *key* is the `sort_key` of a margin s - alpha; `wanted` tokens of an expert reach the result and
no greater key. Up to SAMPLE tokens fit into registers and are bisected there. More take four steps:

bracket   SAMPLE tokens at equal distances tell per expert between which keys the result lies,
          SIGMAS standard deviations of its rank in the sample to either side;
gather    the one pass: counts the keys above the bracket and writes those inside it to a buffer;
select    bisects the buffer, unless the bracket missed the result or the buffer overflowed;
repair    bisects all tokens of the experts where it did.

The order within a buffer is that of the atomics; only counts of it reach the result.
"""

from __future__ import annotations

import math

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.moe_router import (
    HIGHEST,
    LOWEST,
    mean_key,
    sort_key,
    threshold,
    value_of_key,
)

SAMPLE = 2048  # at most what the registers of a program hold for NARROW experts
SIGMAS = 6.0
NARROW = 8  # experts of a program that bisects: 32 bytes of a row of fp32 scores
LINE = 128  # bytes of a row that one that gathers reads
HELD = 1024  # scores that it holds: 32 per thread
ACROSS = 4  # rows of it that the threads of a warp cover
APART: tl.constexpr = tl.constexpr(8)  # int32 from counter to counter: a sector of L2 each
FAR: tl.constexpr = tl.constexpr(1 << 30)  # a place where there is no room, wherever it is added to
BLOCK = 1024  # keys of a buffer that are read at once
COARSE = 20  # halvings for the bracket's ends, that leave 2^12 keys between


@triton.jit
def _margin_key(scores_ptr, cutoff_ptr, row, expert, row_stride, inside, experts):
    """Keys [rows, experts] of the rows `inside`, and which of them there are."""
    mask = inside[:, None] & (expert < experts)[None, :]
    where = row.to(tl.int64)[:, None] * row_stride + expert[None, :]
    margin = tl.load(scores_ptr + where, mask=mask, other=0.0).to(tl.float32)
    margin -= tl.load(cutoff_ptr + row, mask=inside, other=0.0)[:, None]
    return sort_key(margin), mask


@triton.jit
def _bisect(key, mask, wanted, STEPS: tl.constexpr):
    """(low, high) [experts] around the greatest key that `wanted` rows reach; 32 steps: equal."""
    low = tl.full([key.shape[1]], LOWEST, tl.int32)
    high = tl.full([key.shape[1]], HIGHEST, tl.int32)
    for _ in tl.range(STEPS):
        middle = mean_key(low, high)
        reached = tl.sum(((key >= middle[None, :]) & mask).to(tl.int32), axis=0)
        low = tl.where(reached >= wanted, middle, low)
        high = tl.where(reached >= wanted, high, middle - 1)
    return low, high


@triton.jit
def direct_kernel(
    scores_ptr, cutoff_ptr, out_ptr, row_stride, tokens, experts, wanted,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Requires: tokens <= ROWS."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.arange(0, ROWS)
    key, mask = _margin_key(scores_ptr, cutoff_ptr, row, expert, row_stride, row < tokens, experts)
    low, _ = _bisect(key, mask, wanted, 32)
    tl.store(out_ptr + expert, -value_of_key(low), mask=expert < experts)


@triton.jit
def bracket_kernel(
    scores_ptr, cutoff_ptr, bracket_ptr, above_ptr, inside_ptr, row_stride, experts, spacing,
    fewest, most, ROWS: tl.constexpr, EXPERTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """[2, E]: below what `most` rows of the sample reach, above what `fewest` do; zeros counters.

    The ends of all keys where the sample has no such rank.
    """
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.arange(0, ROWS)
    key, mask = _margin_key(
        scores_ptr, cutoff_ptr, row * spacing, expert, row_stride, row < ROWS, experts
    )
    low, _ = _bisect(key, mask, most, STEPS)
    _, high = _bisect(key, mask, fewest, STEPS)
    exists = expert < experts
    tl.store(bracket_ptr + expert, low, mask=exists)
    tl.store(bracket_ptr + experts + expert, high, mask=exists)
    tl.store(above_ptr + expert, 0, mask=exists)
    tl.store(inside_ptr + expert * APART, 0, mask=exists)


@triton.jit
def gather_kernel(
    scores_ptr, cutoff_ptr, bracket_ptr, above_ptr, inside_ptr, kept_ptr, row_stride, tokens,
    experts, room, DEEP: tl.constexpr, ACROSS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Counts keys above the bracket, and keeps those inside as long as there is room.

    A warp holds [DEEP, ACROSS] rows, of which a thread has all DEEP: it numbers its own keys and
    reserves their places with one atomic per expert.
    """
    blocks = tl.cdiv(experts, EXPERTS)
    column = tl.program_id(0) % blocks * EXPERTS
    expert = column + tl.arange(0, EXPERTS)[None, None, :]
    first = tl.program_id(0) // blocks * (DEEP * ACROSS)
    row = tl.arange(0, DEEP)[:, None, None] * ACROSS + tl.arange(0, ACROSS)[None, :, None]
    exists, live = expert < experts, first + row < tokens
    scores_ptr += first.to(tl.int64) * row_stride
    where = row.to(tl.int64) * row_stride + expert
    margin = tl.load(scores_ptr + where, mask=live & exists, other=-float("inf")).to(tl.float32)
    margin -= tl.load(cutoff_ptr + first + row, mask=live, other=0.0)
    key = sort_key(margin)
    none = sort_key(tl.full([], -float("inf"), tl.float32))  # of rows that are not live
    low = tl.maximum(tl.load(bracket_ptr + expert, mask=exists, other=HIGHEST), none + 1)
    high = tl.load(bracket_ptr + experts + expert, mask=exists, other=LOWEST)
    reached = key >= low
    inside = reached & (key <= high)
    number = tl.cumsum(inside.to(tl.int32), axis=0)
    number = tl.where(inside, number - 1, FAR)
    count = tl.sum(inside.to(tl.int32), axis=0)[None, :, :]
    counter = inside_ptr + expert * APART + tl.zeros_like(count)
    place = number + tl.atomic_add(counter, count, mask=count > 0, sem="relaxed")
    kept_ptr += expert.to(tl.int64) * room
    tl.store(kept_ptr + place, key, mask=place < room)
    above = tl.sum(tl.sum(reached.to(tl.int32), axis=0)[None, :, :] - count, axis=1)
    expert = column + tl.arange(0, EXPERTS)
    mask = expert < experts
    tl.atomic_add(above_ptr + expert, tl.sum(above, axis=0), mask=mask, sem="relaxed")


@triton.jit
def select_kernel(
    bracket_ptr, above_ptr, inside_ptr, kept_ptr, missed_ptr, out_ptr, experts, room, wanted,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Requires: room is a multiple of BLOCK."""
    expert = tl.program_id(0)
    low, high = tl.load(bracket_ptr + expert), tl.load(bracket_ptr + experts + expert)
    above = tl.load(above_ptr + expert)
    count = tl.load(inside_ptr + expert * APART)
    missed = (count > room) | (above >= wanted) | (above + count < wanted)
    tl.store(missed_ptr + expert, missed.to(tl.int32))
    if not missed:
        kept_ptr += expert.to(tl.int64) * room
        at = tl.arange(0, BLOCK)
        reaching = above + count  # `low`
        while (reaching != wanted) & (low < high):
            middle = mean_key(low, high)
            reached = tl.zeros([BLOCK], tl.int32)
            for first in tl.range(0, count, BLOCK):
                key = tl.load(kept_ptr + first + at)  # whole blocks: there is room
                reached += ((key >= middle) & (first + at < count)).to(tl.int32)
            total = above + tl.sum(reached)
            if total >= wanted:
                low = middle
                reaching = total
            else:
                high = middle - 1
        least = tl.full([BLOCK], HIGHEST, tl.int32)
        for first in tl.range(0, count, BLOCK):
            key = tl.load(kept_ptr + first + at)
            key = tl.where((key >= low) & (first + at < count), key, HIGHEST)
            least = tl.minimum(least, key)
        tl.store(out_ptr + expert, -value_of_key(tl.min(least)))


@triton.jit
def repair_kernel(
    scores_ptr, cutoff_ptr, missed_ptr, out_ptr, row_stride, tokens, experts, wanted,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    missed = tl.load(missed_ptr + expert, mask=expert < experts, other=0)
    if tl.max(missed) > 0:
        low = tl.full([EXPERTS], LOWEST, tl.int32)
        high = tl.full([EXPERTS], HIGHEST, tl.int32)
        for _ in tl.range(32):
            middle = mean_key(low, high)
            reached = tl.zeros([ROWS, EXPERTS], tl.int32)
            for first in tl.range(0, tokens, ROWS):
                row = first + tl.arange(0, ROWS)
                key, mask = _margin_key(
                    scores_ptr, cutoff_ptr, row, expert, row_stride, row < tokens, experts
                )
                reached += ((key >= middle[None, :]) & mask).to(tl.int32)
            enough = tl.sum(reached, axis=0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        tl.store(out_ptr + expert, -value_of_key(low), mask=missed != 0)


@triton.jit
def _nth(key, wanted, low, high):
    """The `wanted`-th greatest key of a tile. Requires: it lies within [low, high]."""
    count = tl.sum((key >= low).to(tl.int32))
    low, _ = threshold(key, count, wanted, low, high, wanted)
    return tl.min(tl.where(key >= low, key, HIGHEST))


@triton.jit
def cutoff_kernel(
    scores_ptr, bias_ptr, cutoff_ptr, row_stride, experts, wanted, DEEP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The `wanted`-th greatest s + b of a token, as `moe_route` finds it.

    The `wanted`-th greatest of the greatest per group, a few per thread, is a bound from below that
    is not far off; so most steps look at those alone.
    """
    at = tl.arange(0, DEEP)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    bias = tl.load(bias_ptr + at, mask=at < experts, other=0.0)
    token = tl.program_id(0)
    row_ptr = scores_ptr + token.to(tl.int64) * row_stride
    score = tl.load(row_ptr + at, mask=at < experts, other=-float("inf")).to(tl.float32)
    key = sort_key(score + bias)
    best = tl.max(key, axis=0)
    high = tl.max(best)
    low = _nth(best, wanted, tl.min(best), high)
    none = sort_key(tl.full([], -float("inf"), tl.float32))
    last = tl.maximum(_nth(key, wanted, low, high), none)
    tl.store(cutoff_ptr + token, value_of_key(last))


def cutoffs(scores: torch.Tensor, bias: torch.Tensor, topk: int) -> torch.Tensor:
    """[m] fp32: the (topk + 1)-th greatest of s + b of each token, `moe_route`'s cutoff.

    scores: [m, E] with contiguous rows, 1 <= m; bias: [E] fp32, contiguous; topk < E.
    """
    tokens, experts = scores.shape
    out = torch.empty(tokens, dtype=torch.float32, device=scores.device)
    deep = triton.next_power_of_2(triton.cdiv(experts, 128))
    groups = max(128, triton.next_power_of_2(topk + 1))
    cutoff_kernel[(tokens,)](
        scores, bias, out, scores.stride(0), experts, topk + 1,
        DEEP=max(1, deep * 128 // groups), GROUPS=groups, num_warps=1,
    )  # fmt: skip
    return out


def negated_quantiles(scores: torch.Tensor, cutoff: torch.Tensor, wanted: int) -> torch.Tensor:
    """[E] fp32: minus the `wanted`-th greatest of s - alpha over the tokens.

    scores: [m, E] with contiguous rows, 1 <= wanted <= m; cutoff: [m] fp32, contiguous.
    """
    tokens, experts = scores.shape
    out = torch.empty(experts, dtype=torch.float32, device=scores.device)
    narrow = (triton.cdiv(experts, NARROW),)
    if tokens <= SAMPLE:
        rows = max(64, triton.next_power_of_2(tokens))
        direct_kernel[narrow](
            scores, cutoff, out, scores.stride(0), tokens, experts, wanted, ROWS=rows,
            EXPERTS=NARROW, num_warps=_warps(rows),
        )  # fmt: skip
        return out
    fewest, most, room = sample_ranks(tokens, wanted)
    ints = torch.empty((4 + APART.value, experts), dtype=torch.int32, device=scores.device)
    bracket, above, missed, inside = ints[:2], ints[2], ints[3], ints[4:]
    kept = torch.empty((experts, room), dtype=torch.int32, device=scores.device)
    bracket_kernel[narrow](
        scores, cutoff, bracket, above, inside, scores.stride(0), experts, tokens // SAMPLE, fewest,
        most, ROWS=SAMPLE, EXPERTS=NARROW, STEPS=COARSE, num_warps=_warps(SAMPLE),
    )  # fmt: skip
    wide = max(16, min(LINE // scores.element_size(), triton.next_power_of_2(experts)))
    deep = HELD // (ACROSS * wide)
    gather_kernel[(triton.cdiv(experts, wide) * triton.cdiv(tokens, deep * ACROSS),)](
        scores, cutoff, bracket, above, inside, kept, scores.stride(0), tokens, experts, room,
        DEEP=deep, ACROSS=ACROSS, EXPERTS=wide, num_warps=1,
    )  # fmt: skip
    select_kernel[(experts,)](
        bracket, above, inside, kept, missed, out, experts, room, wanted, BLOCK=BLOCK, num_warps=4
    )
    repair_kernel[narrow](
        scores, cutoff, missed, out, scores.stride(0), tokens, experts, wanted, ROWS=512,
        EXPERTS=NARROW, num_warps=8,
    )  # fmt: skip
    return out


def sample_ranks(tokens: int, wanted: int) -> tuple[int, int, int]:
    """(ranks in the sample that enclose the wanted one, keys that a buffer holds per expert).

    A rank below 1 or above SAMPLE stands for the end of all keys.
    """
    share = wanted / tokens
    reach = SIGMAS * max(1.0, math.sqrt(SAMPLE * share * (1 - share)))
    fewest = math.floor(SAMPLE * share - reach)
    most = math.ceil(SAMPLE * share + reach) + 1
    among = (min(most, SAMPLE) - max(fewest, 0) + 1) / SAMPLE
    return fewest, most, BLOCK * triton.cdiv(math.ceil(1.5 * among * tokens), BLOCK)


def _warps(rows: int) -> int:
    """Of a program that holds NARROW keys of so many rows: up to 64 keys per thread."""
    return min(16, max(4, rows // 256))
