"""KDA's products within chunks where no token decays below e^-5: tile after tile of 16 tokens.

`kda_forward` says what is computed, `kda_tiles` why decays need anchors. With a and b the sums G at
the first and the last row of a tile, rows r of tile I meet tokens j of an earlier tile J by

    e^(G_r - G_j) = e^(G_r - a_I) e^(a_I - b_J) e^(b_J - G_j)

of which no factor exceeds 1: the first belongs to a row, the last to a token, and the middle one to
a pair of tiles. So two exponentials per element do for all decays of a chunk.

A program walks down the tiles of one chunk of one head. Eight rows of two channels are a thread's,
so that sums along rows hardly leave it. Keys for later tiles wait in `k_out`. The inverse is a
kernel of its own, of one warp per chunk, since it needs no barriers then.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_tiles as tiles

TILES = tl.constexpr(4)


@triton.jit
def _places(stride, BLOCK: tl.constexpr):
    """Row, channel and place of a tile's elements, [8, 2, BLOCK / 2, 2]: see `bounded_kernel`."""
    row = tl.arange(0, 8)[:, None, None, None] + 8 * tl.arange(0, 2)[None, :, None, None]
    column = 2 * tl.arange(0, BLOCK // 2)[None, None, :, None] + tl.arange(0, 2)
    return row, column, row * stride + column


@triton.jit
def _load_tile(ptr, stride, skip, rows, columns, BLOCK: tl.constexpr):
    """[TILE, BLOCK] in the dtype of memory, zero beyond `rows` and `columns`."""
    row, column, _ = _places(BLOCK, BLOCK)
    mask = (row + skip < rows) & (column < columns)
    x = tl.load(ptr + ((row + skip) * stride + column), mask=mask, other=0.0)
    return tl.reshape(tl.trans(x, 1, 0, 2, 3), [tiles.TILE, BLOCK])


@triton.jit
def _load_far(ptr, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """[TILE, BLOCK] of keys that wait in k_out, in KEPT; the products between hold barriers."""
    _, _, at = _places(BLOCK, BLOCK)
    x = tl.reshape(tl.trans(tl.load(ptr + at), 1, 0, 2, 3), [tiles.TILE, BLOCK])
    return x.to(KEPT, bitcast=True).to(tl.float32)


@triton.jit
def _store_tile(ptr, x, BLOCK: tl.constexpr):
    x = tl.reshape(x.to(ptr.dtype.element_ty), [2, 8, BLOCK // 2, 2])
    _, _, at = _places(BLOCK, BLOCK)
    tl.store(ptr + at, tl.trans(x, 1, 0, 2, 3))


@triton.jit
def _scale_of(ptr, stride, skip, rows, columns, L2: tl.constexpr, BLOCK: tl.constexpr):
    """[TILE, 1]: what scales the rows to length 1. Read in rows, which takes fewer shuffles."""
    if not L2:
        return tl.full([tiles.TILE, 1], 1.0, tl.float32)
    row, column = tl.arange(0, tiles.TILE)[:, None] + skip, tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(ptr + row * stride + column, mask=mask, other=0.0)
    return tiles.l2_scale(x.to(tl.float32))


@triton.jit
def _row(x, ROW: tl.constexpr):
    """[BLOCK]: a row of a tile."""
    return tl.sum(tl.where(tl.arange(0, tiles.TILE)[:, None] == ROW, x, 0.0), axis=0)


@triton.jit
def _pair(left, right, beta, scores_ptr, lower_ptr, DIAGONAL: tl.constexpr):
    """Stores 16x16 scores, and beta M; on the diagonal what lies above it is dropped.

    left: [2, TILE, BLOCK], of q and of k.
    """
    right = tl.trans(right)[None, :, :]
    dots = tl.dot(left, tl.broadcast_to(right, [2, right.shape[1], tiles.TILE]))
    of_k = tl.arange(0, 2)[:, None, None]
    row, column = tl.arange(0, tiles.TILE)[None, :, None], tl.arange(0, tiles.TILE)[None, None, :]
    if DIAGONAL:
        dots = tl.where(row >= column + of_k, dots, 0.0)
    at = tl.broadcast_to(row * tiles.CHUNK + column, dots.shape)
    tl.store(scores_ptr + at, dots.to(scores_ptr.dtype.element_ty), mask=of_k == 0)
    dots *= beta[None, :, None]
    tl.store(lower_ptr + at, dots.to(lower_ptr.dtype.element_ty), mask=of_k == 1)


@triton.jit
def _tile_beta(ptr, stride, skip, rows, SIGMOID: tl.constexpr):
    """[TILE] in fp32, from row `skip` of the chunk on; anything beyond `rows`."""
    row = tl.arange(0, tiles.TILE) + skip
    beta = tl.load(ptr + row.to(tl.int64) * stride, mask=row < rows, other=0.0).to(tl.float32)
    return tl.sigmoid(beta) if SIGMOID else beta


@triton.jit
def _earlier_pairs(left, anchor, beta, i, k_out_ptr, sums_ptr, scores_ptr, lower_ptr,
                   KEPT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Row i of the 16x16 tiles but for the diagonal: products to the left of it, zeros beyond."""
    R: tl.constexpr = tiles.TILE
    DTYPE: tl.constexpr = k_out_ptr.dtype.element_ty
    row, column = tl.arange(0, R), tl.arange(0, BLOCK)
    for j in tl.range(0, i):
        far = _load_far(k_out_ptr + j * R * BLOCK, KEPT, BLOCK)
        far *= tl.exp2(anchor - tl.load(sums_ptr + j * BLOCK + column) - tiles.RAISED)[None, :]
        _pair(left, far.to(DTYPE), beta, scores_ptr + j * R, lower_ptr + j * R, False)
    for j in tl.range(i + 1, TILES):
        above = j * R + row[:, None] * tiles.CHUNK + row[None, :]
        tl.store(scores_ptr + above, tl.zeros([R, R], DTYPE))


@triton.jit
def _leave(k_out_ptr, sums_ptr, total, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Decays the keys in k_out from the end of their tile to that of the chunk."""
    for j in tl.range(0, TILES):
        at = k_out_ptr + j * tiles.TILE * BLOCK
        known = tl.load(sums_ptr + j * BLOCK + tl.arange(0, BLOCK))
        _store_tile(at, _load_far(at, KEPT, BLOCK) * tl.exp2(total - known)[None, :], BLOCK)


@triton.jit(do_not_specialize=["tokens"])
def bounded_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, a_log_ptr, bias_ptr, chunk_ptr, q_in_ptr, k_in_ptr,
    k_out_ptr, decay_ptr, lower_ptr, scores_ptr, betas_ptr, sums_ptr, q_batch, q_token, q_head,
    k_batch, k_token, k_head, g_batch, g_token, g_head, beta_batch, beta_token, beta_head, tokens,
    heads, columns, scale, floor, BIASED: tl.constexpr, L2: tl.constexpr, SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Operands, scores and beta M of one chunk of one head.

    lower: beta M, [NC, H, CHUNK, CHUNK], of which only tiles on and below the diagonal are written.
    sums: scratch, [NC, H, TILES, BLOCK] fp32.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    DTYPE: tl.constexpr = q_in_ptr.dtype.element_ty
    KEPT: tl.constexpr = tl.float16 if lower_ptr.dtype.element_ty == tl.float16 else DTYPE
    R: tl.constexpr = tiles.TILE
    q_ptr += batch * q_batch + token * q_token + head * q_head
    k_ptr += batch * k_batch + token * k_token + head * k_head
    g_ptr += batch * g_batch + token * g_token + head * g_head
    beta_ptr += batch * beta_batch + token * beta_token + head * beta_head
    operand, square = program * (tiles.CHUNK * BLOCK), program * (tiles.CHUNK * tiles.CHUNK)
    q_in_ptr, k_in_ptr, k_out_ptr = q_in_ptr + operand, k_in_ptr + operand, k_out_ptr + operand
    scores_ptr, lower_ptr = scores_ptr + square, lower_ptr + square
    sums_ptr, betas_ptr = sums_ptr + program * (TILES * BLOCK), betas_ptr + program * tiles.CHUNK
    sharpness = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    row, column = tl.arange(0, R), tl.arange(0, BLOCK)
    bias = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        bias = tl.load(bias_ptr + head * columns + column, mask=column < columns, other=0.0)

    total = tl.zeros([BLOCK], tl.float32)  # G so far
    for i in tl.range(0, TILES):
        left_rows = rows - i * R
        z = _load_tile(g_ptr, g_token, i * R, rows, columns, BLOCK).to(tl.float32) + bias[None, :]
        # all at once, before barriers: to wait once
        q = _load_tile(q_ptr, q_token, i * R, rows, columns, BLOCK)
        k = _load_tile(k_ptr, k_token, i * R, rows, columns, BLOCK)
        q_scale = scale * _scale_of(q_ptr, q_token, i * R, rows, columns, L2, BLOCK)
        k_scale = _scale_of(k_ptr, k_token, i * R, rows, columns, L2, BLOCK)
        decay = tl.sigmoid(sharpness * z)
        decay *= tl.where(row < left_rows, floor * tiles.LOG2_E, 0.0)[:, None]
        span = tl.cumsum(tl.where(row[:, None] == 0, 0.0, decay), axis=0)
        anchor = total + _row(decay, 0)
        total = anchor + _row(span, R - 1)
        left = tl.exp2(span + tiles.RAISED)
        entering = tl.exp2(anchor - tiles.RAISED)[None, :]
        q = q.to(tl.float32) * q_scale * left
        at = i * (R * BLOCK)
        _store_tile(q_in_ptr + at, q * entering, BLOCK)
        k = k.to(tl.float32) * k_scale
        right = k * tl.exp2(-tiles.RAISED - span)
        k *= left
        _store_tile(k_in_ptr + at, k * entering, BLOCK)
        left_qk = tl.trans(tl.join(q.to(DTYPE), k.to(DTYPE)), 2, 0, 1)
        far = right * tl.exp2(total - anchor + tiles.RAISED)[None, :]
        _store_tile(k_out_ptr + at, far.to(KEPT).to(DTYPE, bitcast=True), BLOCK)
        tl.store(sums_ptr + i * BLOCK + column, total)
        beta = _tile_beta(beta_ptr, beta_token, i * R, rows, SIGMOID)
        tl.store(betas_ptr + i * R + row, tl.where(row < left_rows, beta, 0.0))
        at = i * (R * tiles.CHUNK)
        _pair(left_qk, right.to(DTYPE), beta, scores_ptr + at + i * R, lower_ptr + at + i * R, True)
        _earlier_pairs(
            left_qk, anchor, beta, i, k_out_ptr, sums_ptr, scores_ptr + at, lower_ptr + at, KEPT,
            BLOCK,
        )  # fmt: skip
    _leave(k_out_ptr, sums_ptr, total, KEPT, BLOCK)
    tl.store(decay_ptr + program * BLOCK + column, tl.exp2(total))


@triton.jit
def _quarters(a, b, c, d):
    """[.., 2 N, 2 N] of four [B, N, N], row by row."""
    B: tl.constexpr = a.shape[0]
    N: tl.constexpr = a.shape[1]
    x = tl.join(tl.join(a, c), tl.join(b, d))  # [B, row, column, lower, right]
    return tl.reshape(tl.trans(x, 0, 3, 1, 4, 2), [B, 2 * N, 2 * N])


@triton.jit
def _pick(x):
    """The even and the odd entries along the first dimension of [B, N, N], [B / 2, N, N] each."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.split(tl.trans(tl.reshape(x, [B // 2, 2, N, N]), 0, 2, 3, 1))


@triton.jit
def _blocks(ptr, down, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """[COUNT, SIZE, SIZE]: blocks of a [CHUNK, CHUNK] matrix, each `down` after the last."""
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    return ptr + tl.arange(0, COUNT)[:, None, None] * down + row * tiles.CHUNK + column


@triton.jit
def inverse_kernel(lower_ptr, inverse_ptr):
    """(I + L)^-1 for a strictly lower [CHUNK, CHUNK], doubling the blocks that are inverted.

    From the inverses A, B of neighbours and what lies below A in L, C: -B C A. Entries stay small,
    as those of powers of L do not.
    """
    C: tl.constexpr = tiles.CHUNK
    R: tl.constexpr = tiles.TILE
    DTYPE: tl.constexpr = lower_ptr.dtype.element_ty
    OUT: tl.constexpr = inverse_ptr.dtype.element_ty
    lower_ptr += tl.program_id(0).to(tl.int64) * (C * C)
    inverse_ptr += tl.program_id(0).to(tl.int64) * (C * C)
    row, column = tl.arange(0, R)[None, :, None], tl.arange(0, R)[None, None, :]
    lower = tl.load(_blocks(lower_ptr, R * C + R, 4, R))
    x = tl.where(row == column, 1.0, 0.0)
    x = x - tl.where((row // 2 == column // 2) & (row > column), lower.to(tl.float32), 0.0)
    for bit in tl.static_range(1, 4):
        pairs = (row >> bit == (column >> bit) + 1) & ((row >> bit) % 2 == 1)
        part = tl.where(pairs, lower, 0.0).to(DTYPE)
        known = x.to(DTYPE)
        x -= tl.dot(tl.dot(known, part).to(DTYPE), known)
    even, odd = _pick(x)
    below = tl.load(_blocks(lower_ptr + R * C, 2 * (R * C + R), 2, R))
    below = -tl.dot(tl.dot(odd.to(DTYPE), below).to(DTYPE), even.to(DTYPE))
    a, b = _pick(_quarters(even, tl.zeros([2, R, R], tl.float32), below, odd))
    below = tl.load(_blocks(lower_ptr + 2 * R * C, 0, 1, 2 * R))
    below = tl.dot(tl.dot(b.to(DTYPE), below).to(DTYPE), a.to(DTYPE))
    tl.store(_blocks(inverse_ptr, 0, 1, 2 * R), a.to(OUT))
    tl.store(_blocks(inverse_ptr + 2 * R, 0, 1, 2 * R), tl.zeros([1, 2 * R, 2 * R], OUT))
    tl.store(_blocks(inverse_ptr + 2 * R * C, 0, 1, 2 * R), (-below).to(OUT))
    tl.store(_blocks(inverse_ptr + 2 * R * (C + 1), 0, 1, 2 * R), b.to(OUT))
