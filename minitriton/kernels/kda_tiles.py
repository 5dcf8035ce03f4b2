"""Pieces of kernels that the passes of KDA share: tiles of a chunk, gates, and pairs of tokens.

A chunk is CHUNK tokens; G is its inclusive cumulative sum of log decays per channel, in base 2. A
pair of tokens (r, j) of a chunk, r >= j, meets the decay 2^(G_r - G_j), which must be split into a
factor of row r and one of row j without ever leaving the range of fp32. The pairs are cut in
levels: level B holds those whose tokens lie in one block of 2 B tokens, r in its second half and j
in its first. With G of the second half's first row as the anchor both factors are at most 1, for
any gate, and one tile `level_factor` holds both, since no row is in both halves. Levels 32 and 16
leave the four 16x16 tiles on the diagonal. Where a token decays by at most e^-5 one product does
them (`diagonal_factors`, Kimi K3 technical report, 2.1.1); else levels 8, 4, 2, 1 and r = j do.
Anchors depend on no token later than row r, and pairs outside a level are dropped by selection: an
output does not depend on later tokens in any bit.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl

CHUNK = tl.constexpr(64)
TILE = tl.constexpr(16)  # rows of a tile on the diagonal
LOG2_E = tl.constexpr(1.4426950408889634)
# log2 of the smallest decay of one token: less is zero in fp32, and -inf would make NaN
SMALLEST = tl.constexpr(-160.0)
# log2 by which the left factors of a diagonal tile are raised, the right ones lowered: for decays
# down to e^-5 both stay within e^60 (k3: first row minus 15 tokens at half of e^-2)
RAISED = tl.constexpr(15.0 * 1.4426950408889634)
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def load_rows(ptr, stride, rows, columns, BLOCK: tl.constexpr):
    """[CHUNK, BLOCK] in fp32 from `ptr`, the first element; zero beyond `rows` and `columns`."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    at = row.to(tl.int64) * stride + column
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def l2_scale(x):
    """[CHUNK, 1]: what scales the rows of x to length 1."""
    return tl.rsqrt(tl.sum(x * x, axis=1) + L2_EPS)[:, None]


@triton.jit
def load_beta(ptr, stride, rows, SIGMOID: tl.constexpr):
    """[CHUNK] in fp32; zero beyond `rows`. `ptr`: the chunk's first token of this head."""
    row = tl.arange(0, CHUNK)
    beta = tl.load(ptr + row.to(tl.int64) * stride, mask=row < rows, other=0.0).to(tl.float32)
    if SIGMOID:
        beta = tl.where(row < rows, tl.sigmoid(beta), 0.0)
    return beta


@triton.jit
def load_gate_input(
    ptr, bias_ptr, stride, rows, columns, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    """[CHUNK, BLOCK] in fp32: g, or z + dt_bias. `bias_ptr`: the first element of this head."""
    z = load_rows(ptr, stride, rows, columns, BLOCK)
    if BIASED:
        column = tl.arange(0, BLOCK)
        z += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def log2_gate(z, sharpness, floor, GATE: tl.constexpr):
    """log2 of the decay, elementwise; the arguments are those of `log2_decay`."""
    if GATE == 1:
        decay = (floor * LOG2_E) * tl.sigmoid(sharpness * z)
    elif GATE == 2:
        softplus = tl.maximum(z, 0.0) * LOG2_E + tl.log2(1.0 + tl.exp2(-tl.abs(z) * LOG2_E))
        decay = tl.maximum(-sharpness * softplus, SMALLEST)
    else:
        decay = tl.maximum(z * LOG2_E, SMALLEST)
    return decay


@triton.jit
def log2_decay(z, sharpness, floor, rows, columns, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """[CHUNK, BLOCK]: log2 of every token's decay, 0 beyond `rows` and `columns`.

    z: as `load_gate_input` gives it; sharpness: exp(A_log) of the head. GATE 0: z is the natural
    logarithm itself; 1: floor sigmoid(sharpness z); 2: -sharpness softplus(z).
    """
    inside = (tl.arange(0, CHUNK)[:, None] < rows) & (tl.arange(0, BLOCK)[None, :] < columns)
    return tl.where(inside, log2_gate(z, sharpness, floor, GATE), 0.0)


@triton.jit
def row_of(x, ROW: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """[CHUNK, BLOCK]: in every block of SPAN rows of x its row ROW, repeated."""
    blocks = tl.reshape(x, [CHUNK // SPAN, SPAN, BLOCK])
    chosen = tl.arange(0, SPAN)[None, :, None] == ROW
    row = tl.sum(tl.where(chosen, blocks, 0.0), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(row, [CHUNK // SPAN, SPAN, BLOCK]), [CHUNK, BLOCK])


@triton.jit
def level_factor(total, LEVEL: tl.constexpr, BLOCK: tl.constexpr):
    """[CHUNK, BLOCK], at most 1: row r's factor where r is in a second half, else row j's.

    total: G. A pair's decay is the product of its two rows.
    """
    return tl.exp2(-tl.abs(total - row_of(total, LEVEL, 2 * LEVEL, BLOCK)))


@triton.jit
def span_factor(decay, level, TERMS: tl.constexpr):
    """`level_factor` for a level known at run time only, from log2 of every token's decay.

    The sums between row and anchor are products with a matrix of zeros and ones. Those are exact
    in bf16, and so is decay as a sum of three numbers; TERMS of them are taken.
    """
    row, other = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    anchor = row // (2 * level) * (2 * level) + level
    between = (other > tl.minimum(row, anchor)) & (other <= tl.maximum(row, anchor))
    chosen = tl.where(between, 1.0, 0.0).to(tl.bfloat16)
    total = tl.zeros(decay.shape, tl.float32)
    for _ in tl.static_range(TERMS):
        term = decay.to(tl.bfloat16)
        total = tl.dot(chosen, term, total)
        decay -= term.to(tl.float32)
    return tl.exp2(total)


@triton.jit
def in_level(level):
    """[CHUNK, CHUNK] of int1: whether (r, j) is a pair of the level."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    # r in a second half, j in the half before it
    return (row // level == column // level + 1) & ((row // level) % 2 == 1)


@triton.jit
def diagonal_factors(total, BLOCK: tl.constexpr):
    """The left and the right factors, each [CHUNK, BLOCK], of all 16x16 tiles on the diagonal.

    Right only for decays of at least e^-5 per token. Products for r < j reach e^75: select.
    """
    span = total - row_of(total, 0, TILE, BLOCK)
    return tl.exp2(span + RAISED), tl.exp2(-RAISED - span)


@triton.jit
def on_diagonal(STRICT: tl.constexpr):
    """[CHUNK, CHUNK] of int1: r >= j (STRICT: r > j) in one 16x16 tile on the diagonal."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    tile = (row // TILE) == (column // TILE)
    return tile & (row > column) if STRICT else tile & (row >= column)


@triton.jit
def _thread_rows(BLOCK: tl.constexpr):
    """Low and high part of the row and the even channel in [8, BLOCK / 32, 2, 16] of a tile.

    Loads and stores in this order, of two channels at once, give a warp 32 channels and a thread 8
    rows of two, so that sums along rows stay in a warp.
    """
    low, high = tl.arange(0, 8)[:, None, None, None], tl.arange(0, 2)[:, None]
    block, pair = tl.arange(0, BLOCK // 32)[:, None, None], tl.arange(0, 16)
    return low, 8 * high, 32 * block + 2 * pair


@triton.jit
def _from_threads(x, BLOCK: tl.constexpr):
    return tl.reshape(tl.trans(x, 2, 0, 1, 3, 4), [TILE, BLOCK])


@triton.jit
def _to_threads(x, dtype, BLOCK: tl.constexpr):
    return tl.trans(tl.reshape(x.to(dtype), [2, 8, BLOCK // 32, 16, 2]), 1, 2, 0, 3, 4)


@triton.jit
def _row_places(ptr, stride, rows, columns, BLOCK: tl.constexpr):
    """Pointers to a tile whose rows are `stride` apart, and which of them are inside.

    Where stride is a constant a thread has one address, and constant distances to it.
    """
    low, high, even = _thread_rows(BLOCK)
    column = even[:, :, :, None] + tl.arange(0, 2)
    low, high = low[:, :, :, :, None], high[:, :, None]
    mask = (high + low < rows) & (column < columns)
    return ptr + (high * stride + column) + low * stride, mask


@triton.jit
def load_raw(ptr, stride, rows, columns, BLOCK: tl.constexpr):
    """[TILE, BLOCK] in the dtype of memory; zero beyond `rows` and `columns`.

    BLOCK: 32 per warp. TILE rows of `stride` have 32-bit offsets.
    """
    at, mask = _row_places(ptr, stride, rows, columns, BLOCK)
    return _from_threads(tl.load(at, mask=mask, other=0.0), BLOCK)


@triton.jit
def load_tile(ptr, stride, rows, columns, BLOCK: tl.constexpr):
    """`load_raw` in fp32."""
    return load_raw(ptr, stride, rows, columns, BLOCK).to(tl.float32)


@triton.jit
def store_tile(ptr, x, stride, rows, columns, BLOCK: tl.constexpr):
    """Writes x [TILE, BLOCK] where `load_tile` reads, rounded to the dtype of memory."""
    at, mask = _row_places(ptr, stride, rows, columns, BLOCK)
    tl.store(at, _to_threads(x, ptr.dtype.element_ty, BLOCK), mask=mask)


@triton.jit
def load_columns(ptr, BLOCK: tl.constexpr):
    """[TILE, BLOCK] in fp32 from contiguous [BLOCK, TILE], where a thread's rows are one access."""
    low, high, even = _thread_rows(BLOCK)
    at = ptr + TILE * even + high + low
    return _from_threads(tl.join(tl.load(at), tl.load(at + TILE)), BLOCK).to(tl.float32)


@triton.jit
def store_columns(ptr, x, BLOCK: tl.constexpr):
    """Writes x [TILE, BLOCK] where `load_columns` reads, rounded to the dtype of memory."""
    low, high, even = _thread_rows(BLOCK)
    at = ptr + TILE * even + high + low
    x, odd = tl.split(_to_threads(x, ptr.dtype.element_ty, BLOCK))
    tl.store(at, x)
    tl.store(at + TILE, odd)
