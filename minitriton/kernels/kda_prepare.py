"""KDA's products within chunks where no token decays below e^-5: tile after tile of 16 tokens.

`kda_forward` says what is computed, `kda_tiles` why decays need anchors. With a and b the sums G
before a tile and at its last row, rows r of tile I meet tokens j of an earlier tile J by

    e^(G_r - G_j) = e^(G_r - a_I) e^(a_I - b_J) e^(b_J - G_j)

of which no factor exceeds 1: the first belongs to a row, the last to a token, and the middle one to
a pair of tiles. So two exponentials per element do for all decays of a chunk.

A program walks down the tiles of one chunk of one head, in no loop: so keys for later tiles may
wait in registers. Eight rows of two channels are a thread's, so that sums along rows hardly leave
it. The inverse is a kernel of its own, of one warp per chunk, since it needs no barriers then.
"""

from __future__ import annotations

from typing import Any

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_tiles as tiles

TILES = tl.constexpr(4)


@triton.jit
def _scale_of(ptr, stride, skip, rows, columns, L2: tl.constexpr, BLOCK: tl.constexpr):
    """[TILE, 1]: what scales the rows to length 1. Read in rows, which takes fewer shuffles."""
    if not L2:
        return tl.full([tiles.TILE, 1], 1.0, tl.float32)
    row, column = tl.arange(0, tiles.TILE)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (row < rows - skip) & (column < columns)
    x = tl.load(ptr + skip * stride + (row * stride + column), mask=mask, other=0.0)
    return tiles.l2_scale(x.to(tl.float32))


@triton.jit
def _reciprocal(x):
    """Of numbers from 1 on: what follows from a division for others is left out."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _packed(x, DTYPE: tl.constexpr):
    """x in 16 bits, of which two take one register: apart they would take one each."""
    TEXT: tl.constexpr = "bf16x2" if tl.bfloat16 == DTYPE else "f16x2"
    return tl.inline_asm_elementwise(
        "cvt.rn." + TEXT + ".f32 $0, $2, $1;", "=r,f,f", [x], dtype=DTYPE, is_pure=True, pack=2
    )


@triton.jit
def _unpacked(x):
    """x in fp32, anew at each use: kept from one to the next it would take twice the registers."""
    TEXT: tl.constexpr = "bf16" if x.dtype == tl.bfloat16 else "f16"
    return tl.inline_asm_elementwise(
        "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32." + TEXT + " $0, a; cvt.f32." + TEXT
        + " $1, b;}", "=f,=f,r", [x], dtype=tl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit
def _stack(a, b):
    """[2 N, BLOCK]: the rows of a, then those of b."""
    return tl.reshape(tl.trans(tl.join(a, b), 2, 0, 1), [2 * a.shape[0], a.shape[1]])


@triton.jit
def _tile_beta(ptr, stride, skip, rows, SIGMOID: tl.constexpr):
    """[TILE] in fp32, from row `skip` of the chunk on; anything beyond `rows`."""
    row = tl.arange(0, tiles.TILE) + skip
    beta = tl.load(ptr + row.to(tl.int64) * stride, mask=row < rows, other=0.0).to(tl.float32)
    return tl.sigmoid(beta) if SIGMOID else beta


@triton.jit
def _store_pairs(dots, beta, scores_ptr, lower_ptr, FIRST: tl.constexpr):
    """Stores a tile's rows of scores and of beta M; of M only columns that `dots` has.

    dots: [2 TILE, 16 n], of q and of k. Their diagonal begins at column FIRST; what is above it
    is dropped.
    """
    N: tl.constexpr = dots.shape[1]
    dots = tl.reshape(dots, [2, tiles.TILE, N])
    of_k = tl.arange(0, 2)[:, None, None]
    row, column = tl.arange(0, tiles.TILE)[None, :, None], tl.arange(0, N)[None, None, :]
    dots = tl.where(row + FIRST >= column + of_k, dots, 0.0)
    at = tl.broadcast_to(row * tiles.CHUNK + column, dots.shape)
    tl.store(scores_ptr + at, dots.to(scores_ptr.dtype.element_ty), mask=of_k == 0)
    dots *= beta[None, :, None]
    tl.store(lower_ptr + at, dots.to(lower_ptr.dtype.element_ty), mask=of_k == 1)
    row, column = tl.arange(0, tiles.TILE)[:, None], tl.arange(0, tiles.TILE)[None, :]
    for start in tl.static_range(N, tiles.CHUNK, tiles.TILE):
        zeros = tl.zeros([tiles.TILE, tiles.TILE], scores_ptr.dtype.element_ty)
        tl.store(scores_ptr + row * tiles.CHUNK + column + start, zeros)


@triton.jit
def _right_of(kept, ends, right, anchor, TILE: tl.constexpr):
    """[16 n, BLOCK], n = 1, 2, 4, 4: right operands of tiles 0 to TILE as TILE meets them; zeros.

    kept, ends: keys of earlier tiles and G at their ends; right: of TILE.
    """
    parts: Any = ()
    for j in tl.static_range(TILE):
        decay = tl.exp2(anchor - ends[j] - tiles.RAISED)[None, :]
        parts = parts + ((_unpacked(kept[j]) * decay).to(right.dtype),)
    parts = parts + (right,)
    if TILE == 0:
        return right
    if TILE == 1:
        return _stack(parts[0], parts[1])
    if TILE == 2:
        parts = parts + (tl.zeros(right.shape, right.dtype),)
    return _stack(_stack(parts[0], parts[1]), _stack(parts[2], parts[3]))


@triton.jit
def _scales(q_ptr, k_ptr, q_token, k_token, skip, rows, columns, L2: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """`_scale_of` q and k."""
    of_q = _scale_of(q_ptr, q_token, skip, rows, columns, L2, BLOCK)
    return of_q, _scale_of(k_ptr, k_token, skip, rows, columns, L2, BLOCK)


@triton.jit
def _log2_decay(z, steep, bias, floor, rows):
    """[TILE, BLOCK], zero beyond `rows`. steep: of the sigmoid, in base 2; bias: steep times it."""
    lowest = tl.where(tl.arange(0, tiles.TILE) < rows, floor * tiles.LOG2_E, 0.0)[:, None]
    return lowest * _reciprocal(1.0 + tl.exp2(z.to(tl.float32) * steep + bias[None, :]))


@triton.jit
def _store_whole(ptr, x, BLOCK: tl.constexpr):
    """Writes a tile of an operand, [CHUNK, BLOCK]."""
    tiles.store_tile(ptr, x, BLOCK, tiles.TILE, BLOCK, BLOCK)


@triton.jit(do_not_specialize=["tokens"])
def bounded_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, a_log_ptr, bias_ptr, chunk_ptr, q_in_ptr, k_in_ptr,
    k_out_ptr, decay_ptr, lower_ptr, scores_ptr, betas_ptr, q_batch, q_head, k_batch, k_head,
    g_batch, g_head, beta_batch, beta_token, beta_head, tokens, heads, scale, floor,
    q_token: tl.constexpr, k_token: tl.constexpr, g_token: tl.constexpr, columns: tl.constexpr,
    BIASED: tl.constexpr, L2: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Operands, scores and beta M of one chunk of one head.

    lower: beta M, [NC, H, CHUNK, CHUNK], of which only tiles on and below the diagonal are written.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    DTYPE: tl.constexpr = q_in_ptr.dtype.element_ty
    KEPT: tl.constexpr = tl.float16 if lower_ptr.dtype.element_ty == tl.float16 else DTYPE
    R: tl.constexpr = tiles.TILE
    C: tl.constexpr = tiles.CHUNK
    q_ptr += batch * q_batch + token * q_token + head * q_head
    k_ptr += batch * k_batch + token * k_token + head * k_head
    g_ptr += batch * g_batch + token * g_token + head * g_head
    beta_ptr += batch * beta_batch + token * beta_token + head * beta_head
    operand, square = program * (C * BLOCK), program * (C * C)
    q_in_ptr, k_in_ptr, k_out_ptr = q_in_ptr + operand, k_in_ptr + operand, k_out_ptr + operand
    scores_ptr, lower_ptr = scores_ptr + square, lower_ptr + square
    betas_ptr += program * C
    steep = -tiles.LOG2_E * tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    row, column = tl.arange(0, R), tl.arange(0, BLOCK)
    bias = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        bias = tl.load(bias_ptr + head * columns + column, mask=column < columns, other=0.0)

    bias *= steep
    scales = _scales(q_ptr, k_ptr, q_token, k_token, 0, rows, columns, L2, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)  # G so far
    kept, ends = (), ()
    for i in tl.static_range(TILES):
        z = tiles.load_raw(g_ptr + i * R * g_token, g_token, rows - i * R, columns, BLOCK)
        q = tiles.load_raw(q_ptr + i * R * q_token, q_token, rows - i * R, columns, BLOCK)
        k = tiles.load_raw(k_ptr + i * R * k_token, k_token, rows - i * R, columns, BLOCK)
        of_q, of_k = scales
        if i + 1 < TILES:  # brings the next rows near
            scales = _scales(q_ptr, k_ptr, q_token, k_token, (i + 1) * R, rows, columns, L2, BLOCK)
        beta = _tile_beta(beta_ptr, beta_token, i * R, rows, SIGMOID)
        tl.store(betas_ptr + i * R + row, tl.where(row < rows - i * R, beta, 0.0))
        decay = _log2_decay(z, steep, bias, floor, rows - i * R)
        span = tl.cumsum(decay, axis=0) + tiles.RAISED
        whole, anchor = tl.sum(decay, axis=0), total
        total += whole
        left, entering = tl.exp2(span), tl.exp2(anchor - tiles.RAISED)[None, :]
        q = q.to(tl.float32) * (scale * of_q) * left
        _store_whole(q_in_ptr + i * R * BLOCK, q * entering, BLOCK)
        k = k.to(tl.float32) * of_k
        right = k * tl.exp2(-span)
        far = right * tl.exp2(whole + tiles.RAISED)[None, :]
        k *= left
        _store_whole(k_in_ptr + i * R * BLOCK, k * entering, BLOCK)
        right = _right_of(kept, ends, right.to(DTYPE), anchor, i)
        if i + 1 < TILES:
            kept, ends = kept + (_packed(far, KEPT),), ends + (total,)
        else:  # they leave here
            _store_whole(k_out_ptr + i * R * BLOCK, far, BLOCK)
        dots = tl.dot(_stack(q.to(DTYPE), k.to(DTYPE)), tl.trans(right))
        _store_pairs(dots, beta, scores_ptr + i * R * C, lower_ptr + i * R * C, i * R)
    for i in tl.static_range(TILES - 1):
        far = _unpacked(kept[i]) * tl.exp2(total - ends[i])[None, :]
        _store_whole(k_out_ptr + i * R * BLOCK, far, BLOCK)
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
