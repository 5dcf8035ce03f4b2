"""KDA backward, everything inside the chunks: gradients of q, k, v, gate and beta, chunk-parallel.

With S the state that enters a chunk, D the gradient of the one that leaves it, V' the
pseudo-values, X as in `kda_backward_scan` and E = 2^G, L = 2^(G_last - G) (elementwise):

    A = lower(dO V'^T)    B = -strict_lower(X V'^T)    dv = beta X
    dq = E (dO S^T) + A : k          dk = -beta E (X S^T) + L (V' D^T) + beta (B : k) + (A^T, B^T) : (q, beta k)
    dbeta = rowsum(X v - k E (X S^T) + k (B : k))

where `:` is the sum over the pairs of tokens, each with its decay, level by level as in
`kda_tiles`. X and V' make the gradients of the triangular inverse two rank-V products: from
V' = beta (v - K+ S - M V') follows dM = -strict_lower((beta X) V'^T).

Every factor of a decay gets (operand) * (its gradient), with the sign of its exponent. A pair
(r, j) adds the same number to row r and subtracts it from row j, which must cancel in the reverse
cumulative sum: both are computed from the same rounded operands, so that they cancel to fp32.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_tiles as tiles


@triton.jit
def load_tile(ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, stride):
    """[ROWS, COLUMNS] in the dtype of memory; zero beyond `rows` and `columns`."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    return tl.load(ptr + row * stride + column, mask=(row < rows) & (column < columns), other=0.0)


@triton.jit
def store_tile(ptr, x, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, stride):
    """Writes x [ROWS, COLUMNS], rounded to the dtype of memory, within `rows` and `columns`."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    tl.store(ptr + row * stride + column, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _through_values(v_ptr, v_stride, dout_ptr, dout_stride, x_ptr, values_ptr, dv_ptr, stride, beta,
                    rows, columns, BV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Writes dv; A and B of the module's formula in the products' dtype; dbeta through beta v."""
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    a = tl.zeros([tiles.CHUNK, tiles.CHUNK], tl.float32)
    b = tl.zeros([tiles.CHUNK, tiles.CHUNK], tl.float32)
    dbeta = tl.zeros([tiles.CHUNK], tl.float32)
    for start in tl.range(0, columns, BV):
        width = columns - start
        values = tl.trans(load_tile(values_ptr + start, rows, width, tiles.CHUNK, BV, stride))
        dout = load_tile(dout_ptr + start, rows, width, tiles.CHUNK, BV, dout_stride)
        a = tl.dot(dout.to(DTYPE), values, a, input_precision=PRECISION)
        x = load_tile(x_ptr + start, rows, width, tiles.CHUNK, BV, stride)
        b = tl.dot(x, values, b, input_precision=PRECISION)
        x = x.to(tl.float32)
        store_tile(dv_ptr + start, beta[:, None] * x, rows, width, tiles.CHUNK, BV, stride)
        dbeta += tl.sum(x * tiles.load_rows(v_ptr + start, v_stride, rows, width, BV), axis=1)
    row, column = tl.arange(0, tiles.CHUNK)[:, None], tl.arange(0, tiles.CHUNK)[None, :]
    a = tl.where(row >= column, a, 0.0).to(DTYPE)
    return a, tl.where(row > column, -b, 0.0).to(DTYPE), dbeta


@triton.jit
def _l2_scales(q_ptr, q_stride, k_ptr, k_stride, rows, keys, BK: tl.constexpr):
    """What scales the rows of q and of k to length 1, each [CHUNK, 1]."""
    q_square = tl.zeros([tiles.CHUNK, 1], tl.float32)
    k_square = tl.zeros([tiles.CHUNK, 1], tl.float32)
    for start in tl.range(0, keys, BK):
        q = tiles.load_rows(q_ptr + start, q_stride, rows, keys - start, BK)
        q_square += tl.sum(q * q, axis=1, keep_dims=True)
        k = tiles.load_rows(k_ptr + start, k_stride, rows, keys - start, BK)
        k_square += tl.sum(k * k, axis=1, keep_dims=True)
    return tl.rsqrt(q_square + tiles.L2_EPS), tl.rsqrt(k_square + tiles.L2_EPS)


@triton.jit
def _pairs(q, k, beta, left, right, a, b, dq, dk, dtotal, dbeta, PRECISION: tl.constexpr):
    """Adds what pairs of tokens give; a, b: A and B at these pairs, 0 elsewhere."""
    left_q = (q * left).to(a.dtype)
    left_k = (beta * k * left).to(a.dtype)
    right_k = (k * right).to(a.dtype)
    of_q = tl.dot(a, right_k, input_precision=PRECISION)
    dq += left * of_q
    dtotal += left_q.to(tl.float32) * of_q
    of_left = tl.dot(b, right_k, input_precision=PRECISION)
    dk += beta * left * of_left
    dtotal += left_k.to(tl.float32) * of_left
    dbeta += tl.sum(k * left * of_left, axis=1)
    of_right = tl.dot(tl.trans(a), left_q, input_precision=PRECISION)
    of_right = tl.dot(tl.trans(b), left_k, of_right, input_precision=PRECISION)
    dk += right * of_right
    dtotal -= right_k.to(tl.float32) * of_right
    return dq, dk, dtotal, dbeta


@triton.jit
def _all_pairs(q, k, beta, total, a, b, dq, dk, dtotal, dbeta, FINEST: tl.constexpr,
               PRECISION: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """`_pairs` over all pairs of a chunk."""
    LOWEST: tl.constexpr = 4 if FINEST == 16 else 0
    for bit in tl.static_range(LOWEST, 6):
        pairs = tiles.in_level(1 << bit)
        factor = tiles.level_factor(total, 1 << bit, BK)
        dq, dk, dtotal, dbeta = _pairs(
            q, k, beta, factor, factor, tl.where(pairs, a, 0.0), tl.where(pairs, b, 0.0),
            dq, dk, dtotal, dbeta, PRECISION,
        )  # fmt: skip
    if FINEST == 16:
        left, right = tiles.diagonal_factors(total, BK)
        pairs = tiles.on_diagonal(False)
        dq, dk, dtotal, dbeta = _pairs(
            q, k, beta, left, right, tl.where(pairs, a, 0.0), tl.where(pairs, b, 0.0),
            dq, dk, dtotal, dbeta, PRECISION,
        )  # fmt: skip
    else:
        at = tl.arange(0, tiles.CHUNK)
        own = tl.where(at[:, None] == at[None, :], a.to(tl.float32), 0.0)
        own = tl.sum(own, axis=1, keep_dims=True)
        dq += own * k
        dk += own * q
    return dq, dk, dtotal, dbeta


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
        state = load_tile(state_ptr + start, width, left, BK, BV, columns)
        dout = load_tile(dout_ptr + start, rows, left, tiles.CHUNK, BV, dout_stride)
        state_t = tl.trans(state)
        read = tl.dot(dout.to(state.dtype), state_t, read, input_precision=PRECISION)
        x = load_tile(x_ptr + start, rows, left, tiles.CHUNK, BV, stride)
        known = tl.dot(x, state_t, known, input_precision=PRECISION)
        dstate = load_tile(dstate_ptr + start, width, left, BK, BV, columns)
        values = load_tile(values_ptr + start, rows, left, tiles.CHUNK, BV, stride)
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


@triton.jit
def _finish_l2(x_ptr, dx_ptr, stride, dx_stride, scale, along, rows, keys, BK: tl.constexpr):
    """dx = r (dy - y (y . dy)) in place of dy; scale: r, along: y . dy."""
    for start in range(0, keys, BK):
        width = keys - start
        y = tiles.load_rows(x_ptr + start, stride, rows, width, BK) * scale
        dy = tiles.load_rows(dx_ptr + start, dx_stride, rows, width, BK)
        dx = scale * (dy - y * along[:, None])
        store_tile(dx_ptr + start, dx, rows, width, tiles.CHUNK, BK, dx_stride)


@triton.jit(do_not_specialize=["tokens"])
def chunk_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, sharpness_ptr, bias_ptr, dout_ptr, x_ptr, values_ptr,
    states_ptr, dstates_ptr, chunk_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, sums_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, beta_batch, beta_token, beta_head, dout_batch, dout_token, dout_head,
    tokens, heads, keys, columns, scale, floor, GATE: tl.constexpr, BIASED: tl.constexpr,
    L2: tl.constexpr, SIGMOID: tl.constexpr, FINEST: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One chunk of one head; BK of its channels at a time."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    q_ptr += batch * q_batch + token * q_token + head * q_head
    k_ptr += batch * k_batch + token * k_token + head * k_head
    g_ptr += batch * g_batch + token * g_token + head * g_head
    dout_ptr += batch * dout_batch + token * dout_token + head * dout_head
    place = first.to(tl.int64) * heads + head  # in contiguous [tokens, heads] arrays
    keys_at, values_at = place * keys, place * columns
    x_ptr += values_at
    values_ptr += values_at
    sums_ptr += program * (1 + keys)

    beta_ptr += batch * beta_batch + token * beta_token + head * beta_head
    beta = tiles.load_beta(beta_ptr, beta_token, rows, SIGMOID)
    v_ptr += batch * v_batch + token * v_token + head * v_head
    a, b, dbeta = _through_values(
        v_ptr, v_token, dout_ptr, dout_token, x_ptr, values_ptr, dv_ptr + values_at,
        heads * columns, beta, rows, columns, BV, PRECISION,
    )  # fmt: skip
    sharpness = tl.exp(tl.load(sharpness_ptr + head).to(tl.float32)) if GATE > 0 else 1.0
    if L2:
        q_scale, k_scale = _l2_scales(q_ptr, q_token, k_ptr, k_token, rows, keys, BK)
        along_q = tl.zeros([tiles.CHUNK], tl.float32)
        along_k = tl.zeros([tiles.CHUNK], tl.float32)
    dsharp = tl.zeros([BK], tl.float32)
    for start in tl.range(0, keys, BK, disable_licm=True):
        width = keys - start
        q = tiles.load_rows(q_ptr + start, q_token, rows, width, BK) * scale
        k = tiles.load_rows(k_ptr + start, k_token, rows, width, BK)
        if L2:
            q, k = q * q_scale, k * k_scale
        z = tiles.load_gate_input(
            g_ptr + start, bias_ptr + head * keys + start, g_token, rows, width, BIASED, BK
        )
        decay = tiles.log2_decay(z, sharpness, floor, rows, width, GATE, BK)
        total = tl.cumsum(decay, axis=0)
        state_at = (program * keys + start) * columns
        read, known, written, kept = _through_states(
            dout_ptr, dout_token, x_ptr, values_ptr, heads * columns, states_ptr + state_at,
            dstates_ptr + state_at, rows, width, columns, BK, BV, PRECISION,
        )  # fmt: skip
        decayed = tl.exp2(total)
        dq = read * decayed
        known *= decayed
        dbeta -= tl.sum(k * known, axis=1)
        last = tl.sum(decay, axis=0)
        written *= tl.exp2(last[None, :] - total)
        dk = written - beta[:, None] * known
        dtotal = q * dq - k * (beta[:, None] * known + written)
        dlast = tl.sum(k * written, axis=0) + tl.exp2(last) * kept
        dq, dk, dtotal, dbeta = _all_pairs(
            q, k, beta[:, None], total, a, b, dq, dk, dtotal, dbeta, FINEST, PRECISION, BK
        )
        if L2:
            along_q += tl.sum(q * dq, axis=1)
            along_k += tl.sum(k * dk, axis=1)
        store_tile(dq_ptr + keys_at + start, scale * dq, rows, width, tiles.CHUNK, BK, heads * keys)
        store_tile(dk_ptr + keys_at + start, dk, rows, width, tiles.CHUNK, BK, heads * keys)
        dg = tl.cumsum(dtotal, axis=0, reverse=True) + dlast[None, :]
        if GATE > 0:
            dg, slope = _gate_slopes(dg, z, decay, sharpness, floor, rows, GATE)
            dsharp += tl.sum(slope, axis=0)
            at = tl.arange(0, BK)
            tl.store(sums_ptr + 1 + start + at, tl.sum(dg, axis=0), mask=at < width)
        store_tile(dg_ptr + keys_at + start, dg, rows, width, tiles.CHUNK, BK, heads * keys)
    if GATE > 0:
        tl.store(sums_ptr, tl.sum(dsharp, axis=0))
    if SIGMOID:
        dbeta *= beta * (1 - beta)
    row = tl.arange(0, tiles.CHUNK)
    tl.store(dbeta_ptr + place + row * heads, dbeta.to(dbeta_ptr.dtype.element_ty), mask=row < rows)
    if L2:
        tl.debug_barrier()  # read below is what other threads wrote above
        _finish_l2(q_ptr, dq_ptr + keys_at, q_token, heads * keys, q_scale, along_q, rows, keys, BK)
        _finish_l2(k_ptr, dk_ptr + keys_at, k_token, heads * keys, k_scale, along_k, rows, keys, BK)
