"""KDA backward, chunk by chunk: gradients of v and beta, then those of q, k and the gate.

With S the state that enters a chunk, D the gradient of the one that leaves it, V' the values of
`kda_forward`, X as in `kda_backward_scan`, E = e^G and L = e^(G_last - G), elementwise:

    A = lower(dO V'^T)    B = -strict_lower(X V'^T)    dv = beta X    dbeta = rowsum(X V') / beta
    dq = E (dO S^T) + A : k
    dk = L (V' D^T) - beta E (X S^T) + beta (B : k) + A^T : q + B^T : (beta k)

where `:` sums over pairs of tokens, each with its decay, level by level as in `kda_tiles`. From
V' = beta (v - k_in S - M V') follows the gradient of M without one of the inverse: it is beta B.

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
def _store(ptr, x, stride, rows, columns, COLUMNS: tl.constexpr):
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
    v_token, v_head, beta_batch, beta_token, beta_head, dout_batch, dout_token, dout_head, tokens,
    heads, keys, columns, L2: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
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
    beta_ptr += batch * beta_batch + token * beta_token + head * beta_head
    beta = tiles.load_beta(beta_ptr, beta_token, rows, SIGMOID)
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
        _store(dv_ptr + at, beta[:, None] * x, stride, rows, width, BV)
        x_values += tl.sum(x * values.to(tl.float32), axis=1)
        if L2:
            x_v += tl.sum(x * tiles.load_rows(v_ptr + start, v_token, rows, width, BV), axis=1)
            out = tiles.load_rows(out_ptr + at, stride, rows, width, BV)
            along_q += tl.sum(out * dout.to(tl.float32), axis=1)
    row = tl.arange(0, tiles.CHUNK)
    column = row[None, :]
    square = (
        ab_ptr + program * (2 * tiles.CHUNK * tiles.CHUNK) + row[:, None] * tiles.CHUNK + column
    )
    tl.store(square, tl.where(row[:, None] >= column, a, 0.0).to(DTYPE))
    b = tl.where(row[:, None] > column, -b, 0.0).to(DTYPE)
    tl.store(square + tiles.CHUNK * tiles.CHUNK, b)
    inside, at = row < rows, place + row * heads
    dbeta = x_values * (1 - beta) if SIGMOID else x_values / tl.where(inside, beta, 1.0)
    tl.store(dbeta_ptr + at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)
    if L2:
        norm_ptr += 4 * at
        tl.store(norm_ptr + 1, along_q, mask=inside)
        tl.store(norm_ptr + 3, 2 * x_values - beta * x_v, mask=inside)
        q_ptr += batch * q_batch + token * q_token + head * q_head
        tl.store(norm_ptr, _l2_scale(q_ptr, q_token, rows, keys, BK), mask=inside)
        k_ptr += batch * k_batch + token * k_token + head * k_head
        tl.store(norm_ptr + 2, _l2_scale(k_ptr, k_token, rows, keys, BK), mask=inside)


@triton.jit
def _span(decay, low, high, DTYPE: tl.constexpr):
    """[CHUNK, ..]: per row the sum of the rows of decay above `low` up to `high`, each [CHUNK, 1].

    A product with a matrix of zeros and ones, exact in bf16. So is decay as a sum of three, of
    which two do for operands in bf16.
    """
    row = tl.arange(0, tiles.CHUNK)[None, :]
    chosen = tl.where((row > low) & (row <= high), 1.0, 0.0).to(tl.bfloat16)
    TERMS: tl.constexpr = 3 if tl.float32 == DTYPE else 2
    total = tl.zeros(decay.shape, tl.float32)
    for _ in tl.static_range(TERMS):
        part = decay.to(tl.bfloat16)
        total = tl.dot(chosen, part, total)
        decay -= part.to(tl.float32)
    return total


@triton.jit
def _pairs(q, k, beta, left, right, pairs, ab_ptr, dq, dk, dtotal, PRECISION: tl.constexpr):
    """Adds what `pairs`, [CHUNK, CHUNK] of int1, give. ab_ptr: A and then B."""
    DTYPE: tl.constexpr = ab_ptr.dtype.element_ty
    row, column = tl.arange(0, tiles.CHUNK)[:, None], tl.arange(0, tiles.CHUNK)[None, :]
    ab_ptr += row * tiles.CHUNK + column
    a = tl.where(pairs, tl.load(ab_ptr), 0.0)
    right_k, left_q = (k * right).to(DTYPE), (q * left).to(DTYPE)
    dots = tl.dot(a, right_k, input_precision=PRECISION)
    dq += left * dots
    dtotal += left_q.to(tl.float32) * dots
    of_right = tl.dot(tl.trans(a), left_q, input_precision=PRECISION)
    b = tl.where(pairs, tl.load(ab_ptr + tiles.CHUNK * tiles.CHUNK), 0.0)
    dots = tl.dot(b, right_k, input_precision=PRECISION)
    left_k = (beta * k * left).to(DTYPE)
    dk += beta * left * dots
    dtotal += left_k.to(tl.float32) * dots
    of_right = tl.dot(tl.trans(b), left_k, of_right, input_precision=PRECISION)
    dk += right * of_right
    dtotal -= right_k.to(tl.float32) * of_right
    return dq, dk, dtotal


@triton.jit
def _all_pairs(q, k, beta, decay, ab_ptr, dq, dk, dtotal, FINEST: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """`_pairs` over all pairs of a chunk."""
    DTYPE: tl.constexpr = ab_ptr.dtype.element_ty
    row, column = tl.arange(0, tiles.CHUNK)[:, None], tl.arange(0, tiles.CHUNK)[None, :]
    for bit in tl.range(4 if FINEST == 16 else 0, 6):
        level = 1 << bit  # as in kda_tiles.level_factor
        anchor = (row // (2 * level)) * (2 * level) + level
        factor = tl.exp2(_span(decay, tl.minimum(row, anchor), tl.maximum(row, anchor), DTYPE))
        pairs = (row // level == column // level + 1) & ((row // level) % 2 == 1)
        dq, dk, dtotal = _pairs(
            q, k, beta, factor, factor, pairs, ab_ptr, dq, dk, dtotal, PRECISION
        )
    if FINEST == 16:  # as kda_tiles.diagonal_factors
        tile = row // tiles.TILE
        span = _span(decay, tile * tiles.TILE, row, DTYPE)
        left, right = tl.exp2(span + tiles.RAISED), tl.exp2(-tiles.RAISED - span)
        pairs = tile == column // tiles.TILE
        dq, dk, dtotal = _pairs(q, k, beta, left, right, pairs, ab_ptr, dq, dk, dtotal, PRECISION)
    else:
        own = tl.load(ab_ptr + row * (tiles.CHUNK + 1)).to(tl.float32)
        dq += own * k
        dk += own * q
    return dq, dk, dtotal


@triton.jit
def _through_states(dout_ptr, dout_stride, x_ptr, values_ptr, stride, state_ptr, dstate_ptr, rows,
                    width, columns, BK: tl.constexpr, BV: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """dO S^T, X S^T and V' D^T, [CHUNK, BK] each, and the sum of S D over V, [BK]."""
    read = tl.zeros([tiles.CHUNK, BK], tl.float32)
    known = tl.zeros([tiles.CHUNK, BK], tl.float32)
    written = tl.zeros([tiles.CHUNK, BK], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for start in tl.range(0, columns, BV):
        left = columns - start
        state = _load(state_ptr + start, columns, width, left, BK, BV)
        dout = _load(dout_ptr + start, dout_stride, rows, left, tiles.CHUNK, BV).to(state.dtype)
        read = tl.dot(dout, tl.trans(state), read, input_precision=PRECISION)
        x = _load(x_ptr + start, stride, rows, left, tiles.CHUNK, BV)
        known = tl.dot(x, tl.trans(state), known, input_precision=PRECISION)
        dstate = _load(dstate_ptr + start, columns, width, left, BK, BV)
        values = _load(values_ptr + start, stride, rows, left, tiles.CHUNK, BV)
        written = tl.dot(values, tl.trans(dstate), written, input_precision=PRECISION)
        kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
    return read, known, written, kept


@triton.jit
def _gate_slopes(dg, z, decay, sharpness, floor, rows, GATE: tl.constexpr):
    """The gradients of z and, element by element, of A_log."""
    dg = tl.where(tl.arange(0, tiles.CHUNK)[:, None] < rows, dg, 0.0)
    if GATE == 1:
        s = tl.sigmoid(sharpness * z)
        dz = dg * (floor * sharpness) * s * (1 - s)
        slope = dz * z
    else:
        dz = dg * -sharpness * tl.sigmoid(z)
        slope = dg * decay * (1 / tiles.LOG2_E)
    return dz, slope


@triton.jit(do_not_specialize=["tokens"])
def keys_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, sharpness_ptr, bias_ptr, dout_ptr, x_ptr, values_ptr,
    states_ptr, dstates_ptr, ab_ptr, norm_ptr, chunk_ptr, dq_ptr, dk_ptr, dg_ptr, sums_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, g_batch, g_token, g_head, beta_batch,
    beta_token, beta_head, dout_batch, dout_token, dout_head, tokens, heads, keys, columns, scale,
    floor, GATE: tl.constexpr, BIASED: tl.constexpr, L2: tl.constexpr, SIGMOID: tl.constexpr,
    FINEST: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BK channels of one chunk of one head: dq, dk, dg, and a share of the gate's parameters."""
    blocks = tl.cdiv(keys, BK)
    program, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BK
    chunk, head, width = program // heads, program % heads, keys - start
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    place = first.to(tl.int64) * heads + head  # in contiguous [tokens, heads] arrays
    q_ptr += batch * q_batch + token * q_token + head * q_head
    k_ptr += batch * k_batch + token * k_token + head * k_head
    beta_ptr += batch * beta_batch + token * beta_token + head * beta_head
    beta = tiles.load_beta(beta_ptr, beta_token, rows, SIGMOID)[:, None]
    row = tl.arange(0, tiles.CHUNK)[:, None]
    q = tiles.load_rows(q_ptr + start, q_token, rows, width, BK) * scale
    k = tiles.load_rows(k_ptr + start, k_token, rows, width, BK)
    if L2:
        norm_ptr += 4 * (place + row * heads)
        q *= tl.load(norm_ptr, mask=row < rows, other=0.0)
        k *= tl.load(norm_ptr + 2, mask=row < rows, other=0.0)
    g_ptr += batch * g_batch + token * g_token + head * g_head + start
    bias_ptr += head * keys + start
    z = tiles.load_gate_input(g_ptr, bias_ptr, g_token, rows, width, BIASED, BK)
    sharpness = tl.exp(tl.load(sharpness_ptr + head).to(tl.float32)) if GATE > 0 else 1.0
    decay = tiles.log2_decay(z, sharpness, floor, rows, width, GATE, BK)

    state_at = (program * keys + start) * columns
    dout_at = batch * dout_batch + token * dout_token + head * dout_head
    read, known, written, kept = _through_states(
        dout_ptr + dout_at, dout_token, x_ptr + place * columns, values_ptr + place * columns,
        heads * columns, states_ptr + state_at, dstates_ptr + state_at, rows, width, columns, BK,
        BV, PRECISION,
    )  # fmt: skip
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    entering = tl.exp2(_span(decay, -1, row, DTYPE))
    dq = read * entering
    known *= entering * beta
    written *= tl.exp2(_span(decay, row, tiles.CHUNK, DTYPE))
    dk = written - known
    dtotal = q * dq - k * (known + written)
    dlast = tl.sum(k * written, axis=0) + tl.exp2(tl.sum(decay, axis=0)) * kept
    dtotal += tl.where(row == tiles.CHUNK - 1, dlast[None, :], 0.0)
    ab_ptr += program * (2 * tiles.CHUNK * tiles.CHUNK)
    dq, dk, dtotal = _all_pairs(q, k, beta, decay, ab_ptr, dq, dk, dtotal, FINEST, PRECISION)

    at, stride = place * keys + start, heads * keys
    if L2:
        along_q = tl.load(norm_ptr + 1, mask=row < rows, other=0.0) / (scale * scale)
        dq = tl.load(norm_ptr, mask=row < rows, other=0.0) * (dq - q * along_q)
        along_k = tl.load(norm_ptr + 3, mask=row < rows, other=0.0)
        dk = tl.load(norm_ptr + 2, mask=row < rows, other=0.0) * (dk - k * along_k)
    _store(dq_ptr + at, scale * dq, stride, rows, width, BK)
    _store(dk_ptr + at, dk, stride, rows, width, BK)
    dg = tl.cumsum(dtotal, axis=0, reverse=True)
    if GATE > 0:
        # read again: in registers it would not fit
        z = tiles.load_gate_input(g_ptr, bias_ptr, g_token, rows, width, BIASED, BK)
        dg, slope = _gate_slopes(dg, z, decay, sharpness, floor, rows, GATE)
        sums_ptr += program * (blocks + keys)
        tl.store(sums_ptr + start // BK, tl.sum(tl.sum(slope, axis=0), axis=0))
        column = tl.arange(0, BK)
        tl.store(sums_ptr + blocks + start + column, tl.sum(dg, axis=0), mask=column < width)
    _store(dg_ptr + at, dg, stride, rows, width, BK)
