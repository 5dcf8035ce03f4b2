"""KDA backward where no token decays below e^-5: gradients of q, k and the gate, tile by tile.

With a_I the sum G before tile I, row r of tile I and token j of tile J, J <= I, have

    e^(G_r - G_j) = left_r e^(a_I - a_J) right_j
    left_r = 2^MIDDLE e^(G_r - a_I)    right_j = 2^-MIDDLE e^(a_J - G_j)

Both lie within 2^-65 and 2^65, and what stands between them, one number per channel, scales
products and not operands. So a row has one rounded operand of each kind, and in the gate's gradient
pairs cancel as `kda_backward_chunk` wants it. The decays from and to the states are
e^(G_r) = left_r 2^-MIDDLE e^(a_I) and e^(G_last - G_j) = 2^MIDDLE e^(G_last - a_J) right_j.

A program has some channels of one chunk of one head. It walks down the tiles for their operands,
which wait in global memory, that is in cache, and up again for products and gradients. Strides are
constants, and a walk counts its tiles by an xor, which compilers do not see through: else every row
of every array keeps an address of its own in registers from tile to tile.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_tiles as tiles

TILES = tl.constexpr(4)
MIDDLE = tl.constexpr(50.0)  # of 16 * 5 * log2(e) = 115


@triton.jit
def _per_row(ptr, stride, skip, rows):
    """[TILE] in fp32: a number of every token from row `skip` on; zero beyond `rows`."""
    row = tl.arange(0, tiles.TILE) + skip
    return tl.load(ptr + row * stride, mask=row < rows, other=0.0)


@triton.jit
def _decay(ptr, stride, bias, sharpness, floor, skip, rows, columns, BK: tl.constexpr):
    """[TILE, BK]: log2 of decays, zero beyond `rows`."""
    z = tiles.load_tile(ptr + skip * stride, stride, rows - skip, columns, BK) + bias[None, :]
    lowest = tl.where(tl.arange(0, tiles.TILE) < rows - skip, floor * tiles.LOG2_E, 0.0)
    return lowest[:, None] / (1.0 + tl.exp2(z * (-tiles.LOG2_E * sharpness)))


@triton.jit
def _write_operands(
    q_ptr, k_ptr, g_ptr, token_stride, bias, sharpness, floor, scale, norm_ptr, norm_token,
    written_ptr, left_q_ptr, left_k_ptr, right_ptr, anchor_ptr, rows, width, L2: tl.constexpr,
    BLOCK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The walk down. Returns G_last and the sum of k_out (V' D^T) over tokens, [BK] each."""
    total = tl.zeros([BK], tl.float32)
    wrote = tl.zeros([BK], tl.float32)
    for step in tl.range(TILES - 1, -1, -1):
        i = step ^ (TILES - 1)
        skip = i * tiles.TILE
        at, here = skip * token_stride, skip * BLOCK
        q = tiles.load_tile(q_ptr + at, token_stride, rows - skip, width, BK)
        k = tiles.load_tile(k_ptr + at, token_stride, rows - skip, width, BK)
        written = tiles.load_columns(written_ptr + here, BK)
        decay = _decay(g_ptr, token_stride, bias, sharpness, floor, skip, rows, width, BK)
        if L2:
            q *= (scale * _per_row(norm_ptr, norm_token, skip, rows))[:, None]
            k *= _per_row(norm_ptr + 2, norm_token, skip, rows)[:, None]
        else:
            q *= scale
        span = tl.cumsum(decay, axis=0)
        left = tl.exp2(span + MIDDLE)
        tiles.store_columns(left_q_ptr + here, q * left, BK)
        tiles.store_columns(left_k_ptr + here, k * left, BK)
        tiles.store_columns(right_ptr + here, k * tl.exp2(-MIDDLE - span), BK)
        tl.store(anchor_ptr + i * BLOCK + tl.arange(0, BK), total)
        wrote += tl.sum(tiles.load_columns(right_ptr + here, BK) * written, axis=0)  # rounded
        decay = tl.sum(decay, axis=0)
        total += decay
        wrote *= tl.exp2(decay)
    return total, wrote * 2.0**MIDDLE


@triton.jit
def _square(ptr, i, j):
    """Tile (i, j) of a [CHUNK, CHUNK] matrix."""
    row, column = tl.arange(0, tiles.TILE)[:, None], tl.arange(0, tiles.TILE)[None, :]
    return tl.load(ptr + (i * tiles.TILE + row) * tiles.CHUNK + j * tiles.TILE + column)


@triton.jit
def _operand(ptr, i, BLOCK: tl.constexpr, BK: tl.constexpr):
    """[TILE, BK]: tile i of operands, for a product."""
    row, column = tl.arange(0, tiles.TILE)[None, :], tl.arange(0, BK)[:, None]
    return tl.trans(tl.load(ptr + i * (tiles.TILE * BLOCK) + column * tiles.TILE + row))


@triton.jit
def _of_left(i, anchor, a_ptr, b_ptr, right_ptr, anchor_ptr, read_ptr, known_ptr,
             BLOCK: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The gradients of the left operands of q and of k in tile i, [TILE, BK] each."""
    right = _operand(right_ptr, i, BLOCK, BK)
    of_q, of_k = tl.dot(_square(a_ptr, i, i), right), tl.dot(_square(b_ptr, i, i), right)
    for j in tl.range(0, i, num_stages=1):
        right = _operand(right_ptr, j, BLOCK, BK)
        decay = tl.exp2(anchor - tl.load(anchor_ptr + j * BLOCK + tl.arange(0, BK)))[None, :]
        of_q += decay * tl.dot(_square(a_ptr, i, j), right)
        of_k += decay * tl.dot(_square(b_ptr, i, j), right)
    of_q, of_k = tl.split(tl.join(of_q, of_k))  # so they take the layout of what they meet
    entering, here = tl.exp2(anchor - MIDDLE)[None, :], i * (tiles.TILE * BLOCK)
    of_q = entering * tiles.load_columns(read_ptr + here, BK) + of_q
    return of_q, -entering * tiles.load_columns(known_ptr + here, BK) + of_k


@triton.jit
def _of_right(i, anchor, last, a_ptr, b_ptr, left_q_ptr, left_k_ptr, anchor_ptr, written_ptr,
              BLOCK: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The gradient of the right operands in tile i, [TILE, BK]."""
    total = tl.dot(tl.trans(_square(a_ptr, i, i)), _operand(left_q_ptr, i, BLOCK, BK))
    total = tl.dot(tl.trans(_square(b_ptr, i, i)), _operand(left_k_ptr, i, BLOCK, BK), total)
    for j in tl.range(i + 1, TILES, num_stages=1):
        decay = tl.exp2(tl.load(anchor_ptr + j * BLOCK + tl.arange(0, BK)) - anchor)[None, :]
        dots = tl.dot(tl.trans(_square(a_ptr, j, i)), _operand(left_q_ptr, j, BLOCK, BK))
        dots = tl.dot(tl.trans(_square(b_ptr, j, i)), _operand(left_k_ptr, j, BLOCK, BK), dots)
        total += decay * dots
    total, _ = tl.split(tl.join(total, total))  # as in _of_left
    leaving = tl.exp2(last - anchor + MIDDLE)[None, :]
    return leaving * tiles.load_columns(written_ptr + i * (tiles.TILE * BLOCK), BK) + total


@triton.jit
def _of_input(dx, x_ptr, stride, norm_ptr, norm_token, scale, skip, rows, width, L2: tl.constexpr,
              BK: tl.constexpr):  # fmt: skip
    """The gradient of a tile of q or k, given that of `scale` times it, divided by its length."""
    if not L2:
        return scale * dx
    scales = scale * _per_row(norm_ptr, norm_token, skip, rows)
    along = _per_row(norm_ptr + 1, norm_token, skip, rows) * scales / (scale * scale)
    x = tiles.load_tile(x_ptr + skip * stride, stride, rows - skip, width, BK)
    return scales[:, None] * (dx - x * along[:, None])


@triton.jit
def _of_tile(
    of_q, of_k, of_right, below, left_q_ptr, left_k_ptr, right_ptr, q_ptr, k_ptr, g_ptr,
    token_stride, bias, sharpness, floor, scale, norm_ptr, norm_token, dq_ptr, dk_ptr, dg_ptr,
    stride, skip, rows, width, L2: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes gradients of a tile, given those of its operands. Sums over its rows, [BK] each:
    `below` with the gradient of G added, gradients of z and, channel by channel, of a_log."""
    here, there, inside = skip * BLOCK, skip * stride, rows - skip
    dtotal = tiles.load_columns(left_q_ptr + here, BK) * of_q
    dtotal += tiles.load_columns(left_k_ptr + here, BK) * of_k
    dtotal -= tiles.load_columns(right_ptr + here, BK) * of_right
    decay = _decay(g_ptr, token_stride, bias, sharpness, floor, skip, rows, width, BK)
    left = tl.exp2(tl.cumsum(decay, axis=0) + MIDDLE)
    dq, dk = left * of_q, left * of_k + of_right / left
    dq = _of_input(dq, q_ptr, token_stride, norm_ptr, norm_token, scale, skip, rows, width, L2, BK)
    tiles.store_tile(dq_ptr + there, dq, stride, inside, width, BK)
    dk = left * of_k + of_right / left
    dk = _of_input(
        dk, k_ptr, token_stride, norm_ptr + 2, norm_token, 1.0, skip, rows, width, L2, BK
    )
    tiles.store_tile(dk_ptr + there, dk, stride, inside, width, BK)
    dg = tl.cumsum(dtotal, axis=0, reverse=True) + below[None, :]
    below += tl.sum(dtotal, axis=0)
    # decay, which is 0 beyond `rows`, is floor log2(e) s with s a sigmoid of slope s (1 - s)
    steepness = sharpness / (floor * tiles.LOG2_E * tiles.LOG2_E)
    dz = dg * decay * (sharpness / tiles.LOG2_E - decay * steepness)
    tiles.store_tile(dg_ptr + there, dz, stride, inside, width, BK)
    # read again: in registers it would not fit
    z = tiles.load_tile(g_ptr + skip * token_stride, token_stride, inside, width, BK)
    slope = tl.sum(dz * (z + bias[None, :]), axis=0)
    return below, tl.sum(dz, axis=0), slope


@triton.jit(do_not_specialize=["tokens"])
def bounded_keys_kernel(
    q_ptr, k_ptr, g_ptr, a_log_ptr, bias_ptr, read_ptr, known_ptr, written_ptr, kept_ptr, ab_ptr,
    norm_ptr, operand_ptr, anchor_ptr, chunk_ptr, dq_ptr, dk_ptr, dg_ptr, sums_ptr, in_batch,
    in_head, tokens, scale, floor, heads: tl.constexpr, keys: tl.constexpr,
    token_stride: tl.constexpr, BIASED: tl.constexpr, L2: tl.constexpr, BLOCK: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of BK channels of one chunk of one head, and sums for the gate's parameters.

    operand, anchor: scratch, [NC, H, 3, CHUNK, BLOCK] in the products' dtype, and
    [NC, H, TILES, BLOCK] fp32.
    """
    R: tl.constexpr = tiles.TILE
    C: tl.constexpr = tiles.CHUNK
    blocks: tl.constexpr = (keys + BK - 1) // BK
    program, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BK
    chunk, head, width = program // heads, program % heads, keys - start
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    place, channel = first.to(tl.int64) * heads + head, tl.arange(0, BK)
    at = batch * in_batch + token * token_stride + head * in_head + start
    q_ptr, k_ptr, g_ptr = q_ptr + at, k_ptr + at, g_ptr + at
    at = program * (C * BLOCK) + start * R
    read_ptr, known_ptr, written_ptr = read_ptr + at, known_ptr + at, written_ptr + at
    left_q_ptr = operand_ptr + program * (3 * C * BLOCK) + start * R
    left_k_ptr, right_ptr = left_q_ptr + C * BLOCK, left_q_ptr + 2 * C * BLOCK
    anchor_ptr += program * (TILES * BLOCK) + start
    a_ptr = ab_ptr + program * (2 * C * C)
    b_ptr = a_ptr + C * C
    norm_ptr += 4 * place
    at, stride, norm_token = place * keys + start, heads * keys, 4 * heads
    dq_ptr, dk_ptr, dg_ptr = dq_ptr + at, dk_ptr + at, dg_ptr + at
    sharpness = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.zeros([BK], tl.float32)
    if BIASED:
        bias_ptr += head * keys + start
        bias = tl.load(bias_ptr + channel, mask=channel < width, other=0.0).to(tl.float32)

    last, below = _write_operands(
        q_ptr, k_ptr, g_ptr, token_stride, bias, sharpness, floor, scale, norm_ptr, norm_token,
        written_ptr, left_q_ptr, left_k_ptr, right_ptr, anchor_ptr, rows, width, L2, BLOCK, BK,
    )  # fmt: skip
    tl.debug_barrier()  # other threads read what was written
    # the gradient of G, summed over all rows below
    below += tl.load(kept_ptr + program * BLOCK + start + channel)
    dbias = tl.zeros([BK], tl.float32)
    slopes = tl.zeros([BK], tl.float32)
    for step in tl.range(0, TILES):
        i = step ^ (TILES - 1)
        anchor = tl.load(anchor_ptr + i * BLOCK + channel)
        of_q, of_k = _of_left(
            i, anchor, a_ptr, b_ptr, right_ptr, anchor_ptr, read_ptr, known_ptr, BLOCK, BK
        )
        of_right = _of_right(
            i, anchor, last, a_ptr, b_ptr, left_q_ptr, left_k_ptr, anchor_ptr, written_ptr, BLOCK,
            BK,
        )  # fmt: skip
        below, dz, slope = _of_tile(
            of_q, of_k, of_right, below, left_q_ptr, left_k_ptr, right_ptr, q_ptr, k_ptr, g_ptr,
            token_stride, bias, sharpness, floor, scale, norm_ptr, norm_token, dq_ptr, dk_ptr,
            dg_ptr, stride, i * R, rows, width, L2, BLOCK, BK,
        )  # fmt: skip
        dbias += dz
        slopes += slope
    sums_ptr += program * (blocks + keys)
    tl.store(sums_ptr + start // BK, tl.sum(slopes, axis=0))
    tl.store(sums_ptr + blocks + start + channel, dbias, mask=channel < width)
