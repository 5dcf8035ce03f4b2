"""KDA backward, chunk by chunk: gradients of v and beta, and products that other gradients need.

With S the state that enters a chunk, D the gradient of the one that leaves it, V' the values of
`kda_forward`, X as in `kda_backward_scan`, E = e^G and L = e^(G_last - G), elementwise:

    A = lower(dO V'^T)    B = -beta strict_lower(X V'^T)
    dv = beta X    dbeta = rowsum(X V') / beta
    dq = E (dO S^T) + A : k
    dk = L (V' D^T) - E (beta X S^T) + B : k + A^T : q + B^T : k

where `:` sums over pairs of tokens, each with its decay. From V' = beta (v - k_in S - M V') follows
the gradient of M without one of the inverse: it is B.

The gradient of G is, for every factor of a decay, (operand) * (its gradient) with the sign of its
exponent. What a pair (r, j) adds to row r it takes from row j, and the reverse cumulative sum must
see both cancel: both come from the same rounded operands, so they do to fp32.

With x' = x r the normalised q or k, dx = r (dx' - x' (x' . dx')), and the last sum needs no dx':
q' . dq' = o . do, and k' . dk' = 2 X . V' - beta X . v, since k' occurs in reads and writes.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_tiles as tiles


@triton.jit
def _load(ptr, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] in the dtype of memory; zero beyond `rows` and `columns`."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    return tl.load(ptr + row.to(tl.int64) * stride + column, mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, x, stride, rows, columns, COLUMNS: tl.constexpr):
    """Writes x [CHUNK, COLUMNS], rounded to the dtype of memory, within `rows` and `columns`."""
    row, column = tl.arange(0, tiles.CHUNK)[:, None], tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    to = ptr + row.to(tl.int64) * stride + column
    tl.store(to, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _l2_scale(x_ptr, stride, rows, keys, BK: tl.constexpr):
    """[CHUNK]: what scales the rows of all keys to length 1."""
    square = tl.zeros([tiles.CHUNK], tl.float32)
    for start in tl.range(0, keys, BK):
        x = tiles.load_rows(x_ptr + start, stride, rows, keys - start, BK)
        square += tl.sum(x * x, axis=1)
    return tl.rsqrt(square + tiles.L2_EPS)


@triton.jit(do_not_specialize=["tokens"])
def values_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, dout_ptr, out_ptr, x_ptr, values_ptr, chunk_ptr, dv_ptr,
    dbeta_ptr, ab_ptr, norm_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch,
    v_token, v_head, dout_batch, dout_token, dout_head, tokens, heads, keys, columns,
    L2: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: A and B, dv, dbeta, and per token what the L2 norms need."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    place, stride = first.to(tl.int64) * heads + head, heads * columns
    v_ptr += batch * v_batch + token * v_token + head * v_head
    dout_ptr += batch * dout_batch + token * dout_token + head * dout_head
    row = tl.arange(0, tiles.CHUNK)
    beta = tl.load(beta_ptr + program * tiles.CHUNK + row)
    a = tl.zeros([tiles.CHUNK, tiles.CHUNK], tl.float32)
    b = tl.zeros([tiles.CHUNK, tiles.CHUNK], tl.float32)
    x_values = tl.zeros([tiles.CHUNK], tl.float32)
    x_v = tl.zeros([tiles.CHUNK], tl.float32)
    along_q = tl.zeros([tiles.CHUNK], tl.float32)
    for start in tl.range(0, columns, BV):
        width, at = columns - start, place * columns + start
        values = _load(values_ptr + at, stride, rows, width, tiles.CHUNK, BV)
        dout = _load(dout_ptr + start, dout_token, rows, width, tiles.CHUNK, BV)
        a = tl.dot(dout.to(DTYPE), tl.trans(values), a, input_precision=PRECISION)
        x = _load(x_ptr + at, stride, rows, width, tiles.CHUNK, BV)
        b = tl.dot(x, tl.trans(values), b, input_precision=PRECISION)
        x = x.to(tl.float32)
        store_rows(dv_ptr + at, beta[:, None] * x, stride, rows, width, BV)
        x_values += tl.sum(x * values.to(tl.float32), axis=1)
        if L2:
            x_v += tl.sum(x * tiles.load_rows(v_ptr + start, v_token, rows, width, BV), axis=1)
            out = tiles.load_rows(out_ptr + at, stride, rows, width, BV)
            along_q += tl.sum(out * dout.to(tl.float32), axis=1)
    column = row[None, :]
    square = (
        ab_ptr + program * (2 * tiles.CHUNK * tiles.CHUNK) + row[:, None] * tiles.CHUNK + column
    )
    tl.store(square, tl.where(row[:, None] >= column, a, 0.0).to(DTYPE))
    b = tl.where(row[:, None] > column, b * -beta[:, None], 0.0).to(DTYPE)
    tl.store(square + tiles.CHUNK * tiles.CHUNK, b)
    inside, at = row < rows, place + row * heads
    dbeta = x_values * (1 - beta) if SIGMOID else x_values / tl.where(inside, beta, 1.0)
    tl.store(dbeta_ptr + at, tl.cast(dbeta, dbeta_ptr.dtype.element_ty), mask=inside)
    if L2:
        norm_ptr += 4 * at
        tl.store(norm_ptr + 1, along_q, mask=inside)
        tl.store(norm_ptr + 3, 2 * x_values - beta * x_v, mask=inside)
        q_ptr += batch * q_batch + token * q_token + head * q_head
        tl.store(norm_ptr, _l2_scale(q_ptr, q_token, rows, keys, BK), mask=inside)
        k_ptr += batch * k_batch + token * k_token + head * k_head
        tl.store(norm_ptr + 2, _l2_scale(k_ptr, k_token, rows, keys, BK), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def states_kernel(
    dout_ptr, x_ptr, values_ptr, beta_ptr, states_ptr, dstates_ptr, chunk_ptr, read_ptr,
    known_ptr, written_ptr, kept_ptr, dout_batch, dout_token, dout_head, tokens, heads, keys,
    columns, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dO S^T, beta X S^T and V' D^T, BK channels of one chunk of one head.

    read, known, written: [NC, H, CHUNK / TILE, BLOCK, TILE], tiles of rows with rows innermost.

    kept: [NC, H, BLOCK], e^G_last on entry, is multiplied by the sum of S D over V.
    """
    blocks = tl.cdiv(keys, BK)
    program, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BK
    chunk, head, width = program // heads, program % heads, keys - start
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    dout_ptr += batch * dout_batch + token * dout_token + head * dout_head
    place, stride = (first.to(tl.int64) * heads + head) * columns, heads * columns
    x_ptr, values_ptr = x_ptr + place, values_ptr + place
    state_at = (program * keys + start) * columns
    states_ptr, dstates_ptr = states_ptr + state_at, dstates_ptr + state_at
    read = tl.zeros([BK, tiles.CHUNK], tl.float32)
    known = tl.zeros([BK, tiles.CHUNK], tl.float32)
    written = tl.zeros([BK, tiles.CHUNK], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for at in tl.range(0, columns, BV, num_stages=STAGES):
        left = columns - at
        state = _load(states_ptr + at, columns, width, left, BK, BV)
        dout = _load(dout_ptr + at, dout_token, rows, left, tiles.CHUNK, BV).to(state.dtype)
        read = tl.dot(state, tl.trans(dout), read, input_precision=PRECISION)
        x = _load(x_ptr + at, stride, rows, left, tiles.CHUNK, BV)
        known = tl.dot(state, tl.trans(x), known, input_precision=PRECISION)
        dstate = _load(dstates_ptr + at, columns, width, left, BK, BV)
        values = _load(values_ptr + at, stride, rows, left, tiles.CHUNK, BV)
        written = tl.dot(dstate, tl.trans(values), written, input_precision=PRECISION)
        kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
    channel, row = tl.arange(0, BK), tl.arange(0, tiles.CHUNK)[None, :]
    known *= tl.load(beta_ptr + program * tiles.CHUNK + row)
    at = program * (tiles.CHUNK * BLOCK) + (start + channel[:, None]) * tiles.TILE
    at += row // tiles.TILE * (tiles.TILE * BLOCK) + row % tiles.TILE
    inside = channel[:, None] < width
    tl.store(read_ptr + at, read.to(read_ptr.dtype.element_ty), mask=inside)
    tl.store(known_ptr + at, known.to(known_ptr.dtype.element_ty), mask=inside)
    tl.store(written_ptr + at, written.to(written_ptr.dtype.element_ty), mask=inside)
    kept_ptr += program * BLOCK + start + channel
    decay = tl.load(kept_ptr, mask=channel < width, other=0.0)
    tl.store(kept_ptr, decay * kept, mask=channel < width)
