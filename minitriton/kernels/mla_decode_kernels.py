"""Kernels of mla_decode: one split of a sequence for a tile of query rows, and the merge of splits.

A tile of rows holds (new token, head) pairs. The queries stay in shared memory; pages of the cache
follow one another through it, each read once: its rows are first keys, then values.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _extent(lens_ptr, sequence, width, splits, PAGE: tl.constexpr):
    """(tokens, pages, pages per split) of a sequence; splits share its true length equally."""
    length = tl.minimum(tl.maximum(tl.load(lens_ptr + sequence), 0), width * PAGE)
    pages = tl.cdiv(length, PAGE)
    return length, pages, tl.cdiv(pages, splits)


@triton.jit
def _latent_chunks(
    row_ptr, scale_ptr, held, dtype: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """The latent part of the rows, as a tuple of tiles [tokens, CHUNK]."""
    chunks = ()
    at = tl.arange(0, CHUNK)[None, :]
    for c in tl.static_range(CHUNKS):
        chunk = tl.load(row_ptr + c * CHUNK + at, mask=held[:, None], other=0.0)
        if FP8:  # one scale per chunk
            scale = tl.load(scale_ptr + c, mask=held, other=0.0)
            chunk = (chunk.to(tl.float32) * scale[:, None]).to(dtype)
        chunks = chunks + (chunk,)
    return chunks


@triton.jit
def _scores(
    q_ptr, inside, chunks, shared, LATENT: tl.constexpr, SHARED: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . row; the loads of q are the same in every iteration, so they stay in shared memory."""
    at = tl.arange(0, SHARED)[None, :]
    q = tl.load(q_ptr + LATENT + at, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(shared), input_precision=PRECISION)
    at = tl.arange(0, CHUNK)[None, :]
    for c in tl.static_range(CHUNKS):
        q = tl.load(q_ptr + c * CHUNK + at, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(chunks[c]), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _rescaled(scores, peak, total):
    """(weights, factor for what was summed before, peak, total) of the base-2 online softmax."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    origin = tl.where(higher == -float("inf"), 0.0, higher)  # no token seen yet: weights of 0
    weights = tl.exp2(scores - origin[:, None])
    keep = tl.exp2(peak - origin)
    return weights, keep, higher, total * keep + tl.sum(weights, 1)


@triton.jit
def _store_tile(
    acc, peak, total, out_ptr, lse_ptr, left, LATENT: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Output and natural log-sum-exp of the first `left` rows of the tile."""
    inside = tl.arange(0, ROWS) < left
    lse = tl.where(total > 0, (peak + tl.log2(total)) * LN_2, -float("inf"))
    tl.store(lse_ptr + tl.arange(0, ROWS), lse, mask=inside)
    total = tl.where(total > 0, total, 1.0)
    to_row = out_ptr + tl.arange(0, ROWS)[:, None] * LATENT
    for c in tl.static_range(LATENT // CHUNK):
        out = (acc[c] / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(to_row + c * CHUNK + tl.arange(0, CHUNK)[None, :], out, mask=inside[:, None])


@triton.jit(do_not_specialize=["table_stride", "blocks", "width", "heads", "rows", "splits"])
def decode_kernel(
    q_ptr, latent_ptr, scale_ptr, shared_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, scale,
    latent_block, scale_block, shared_block, table_stride, blocks, width, heads, rows, splits,
    LATENT_ROW: tl.constexpr, SCALE_ROW: tl.constexpr, SHARED_ROW: tl.constexpr,
    LATENT: tl.constexpr, SHARED: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = PAGE // TOKENS
    CHUNKS: tl.constexpr = LATENT // CHUNK
    tile, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, pages, share = _extent(lens_ptr, sequence, width, splits, PAGE)
    first, last = split * share, tl.minimum((split + 1) * share, pages)
    if (split > 0) & (first >= last):
        return  # the merge knows
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    behind = (rows - 1 - row) // heads if CAUSAL else row * 0
    q_row = q_ptr + (sequence.to(tl.int64) * rows + row)[:, None] * (LATENT + SHARED)
    token = tl.arange(0, TOKENS)
    table_ptr += sequence.to(tl.int64) * table_stride
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    acc = (tl.zeros([ROWS, CHUNK], tl.float32),) * CHUNKS
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for step in tl.range(first * STEPS, tl.minimum(last * STEPS, tl.cdiv(length, TOKENS))):
        block = tl.load(table_ptr + step // STEPS)
        block = tl.minimum(tl.maximum(block, 0), blocks - 1).to(tl.int64)
        begin = step % STEPS * TOKENS
        left = length - step * TOKENS
        held = token < left
        shared_row = shared_ptr + block * shared_block + begin * SHARED_ROW
        shared_row += (token * SHARED_ROW)[:, None] + tl.arange(0, SHARED)[None, :]
        shared = tl.load(shared_row, mask=held[:, None], other=0.0)
        latent_row = latent_ptr + block * latent_block + begin * LATENT_ROW
        latent_row += (token * LATENT_ROW)[:, None]
        scale_row = scale_ptr + block * scale_block + begin * SCALE_ROW + token * SCALE_ROW
        chunks = _latent_chunks(latent_row, scale_row, held, dtype, CHUNKS, CHUNK, FP8)
        scores = _scores(
            q_row, inside, chunks, shared, LATENT, SHARED, CHUNKS, CHUNK, PRECISION
        )  # fmt: skip
        scores = tl.where(token[None, :] < (left - behind)[:, None], scores * scale, -float("inf"))
        weights, keep, peak, total = _rescaled(scores, peak, total)
        # reshaped, so that the compiler places the product's warps along its wide side
        weights = tl.reshape(tl.reshape(weights.to(dtype), [ROWS * TOKENS]), [ROWS, TOKENS])
        kept = ()
        for c in tl.static_range(CHUNKS):
            kept = kept + (acc[c] * keep[:, None],)
        acc = ()
        for c in tl.static_range(CHUNKS):
            acc = acc + (tl.dot(weights, chunks[c], kept[c], input_precision=PRECISION),)
    # rows are counted anew from here: fewer registers live through the loop
    to = (split.to(tl.int64) * tl.num_programs(2) + sequence) * rows + tile * ROWS
    _store_tile(
        acc, peak, total, out_ptr + to * LATENT, lse_ptr + to, rows - tile * ROWS, LATENT, ROWS,
        CHUNK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "rows", "splits"])
def combine_kernel(
    partial_ptr, partial_lse_ptr, lens_ptr, out_ptr, lse_ptr, width, rows, splits,
    LATENT: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One query row: the splits' results, weighted by their shares of the softmax's sum."""
    row = tl.program_id(0)
    sequence = row // rows
    apart = tl.num_programs(0).to(tl.int64)  # rows of all sequences
    _, pages, share = _extent(lens_ptr, sequence, width, splits, PAGE)
    used = tl.cdiv(pages, tl.maximum(share, 1))
    split = tl.arange(0, SPLITS)
    lse = tl.load(
        partial_lse_ptr + split * apart + row, mask=split < used, other=-float("inf")
    )  # fmt: skip
    peak = tl.max(lse)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp2((lse - origin) * LOG2_E))
    at = tl.arange(0, LATENT)
    acc = tl.zeros([LATENT], tl.float32)
    for i in tl.range(used):
        weight = tl.exp2((tl.load(partial_lse_ptr + i * apart + row) - origin) * LOG2_E)
        acc += weight * tl.load(partial_ptr + (i * apart + row) * LATENT + at)
    acc /= tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row.to(tl.int64) * LATENT + at, acc.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row, tl.where(total > 0, origin + tl.log2(total) * LN_2, -float("inf")))
