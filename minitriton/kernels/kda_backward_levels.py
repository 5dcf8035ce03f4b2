"""KDA backward for any gate and for fp32: gradients of q, k and the gate, level by level.

The formulas are those of `kda_backward_chunk`, the levels those of `kda_tiles`: a pair's decay is a
product of factors of at most 1, whatever the gate. In 16 bits and with a bound on the decay
`kda_backward_pairs` is faster.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_tiles as tiles
from minitriton.kernels.kda_backward_chunk import store_rows


@triton.jit
def _pairs(q, k, decay, level, ab_ptr, dq, dk, dtotal, PRECISION: tl.constexpr):
    """Adds what the pairs of a level give. ab_ptr: A and then B."""
    DTYPE: tl.constexpr = ab_ptr.dtype.element_ty
    row, column = tl.arange(0, tiles.CHUNK)[:, None], tl.arange(0, tiles.CHUNK)[None, :]
    ab_ptr += row * tiles.CHUNK + column
    pairs = tiles.in_level(level)
    factor = tiles.span_factor(decay, level, 3 if tl.float32 == DTYPE else 2)
    a = tl.where(pairs, tl.load(ab_ptr), 0.0)
    right_k, left_q = (k * factor).to(DTYPE), (q * factor).to(DTYPE)
    dots = tl.dot(a, right_k, input_precision=PRECISION)
    dq += factor * dots
    dtotal += left_q.to(tl.float32) * dots
    of_right = tl.dot(tl.trans(a), left_q, input_precision=PRECISION)
    b = tl.where(pairs, tl.load(ab_ptr + tiles.CHUNK * tiles.CHUNK), 0.0)
    dots = tl.dot(b, right_k, input_precision=PRECISION)
    dk += factor * dots
    dtotal += right_k.to(tl.float32) * dots
    of_right = tl.dot(tl.trans(b), right_k, of_right, input_precision=PRECISION)
    dk += factor * of_right
    dtotal -= right_k.to(tl.float32) * of_right
    return dq, dk, dtotal


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
    q_ptr, k_ptr, g_ptr, a_log_ptr, bias_ptr, read_ptr, known_ptr, written_ptr, kept_ptr, ab_ptr,
    norm_ptr, chunk_ptr, dq_ptr, dk_ptr, dg_ptr, sums_ptr, q_batch, q_token, q_head, k_batch,
    k_token, k_head, g_batch, g_token, g_head, tokens, heads, keys, scale, floor,
    GATE: tl.constexpr, BIASED: tl.constexpr, L2: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of BK channels of one chunk of one head, and sums for the gate's parameters."""
    blocks = tl.cdiv(keys, BK)
    program, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BK
    chunk, head, width = program // heads, program % heads, keys - start
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    place = first.to(tl.int64) * heads + head  # in contiguous [tokens, heads] arrays
    q_ptr += batch * q_batch + token * q_token + head * q_head
    k_ptr += batch * k_batch + token * k_token + head * k_head
    row, column = tl.arange(0, tiles.CHUNK)[:, None], tl.arange(0, BK)
    q = tiles.load_rows(q_ptr + start, q_token, rows, width, BK) * scale
    k = tiles.load_rows(k_ptr + start, k_token, rows, width, BK)
    if L2:
        norm_ptr += 4 * (place + row * heads)
        q *= tl.load(norm_ptr, mask=row < rows, other=0.0)
        k *= tl.load(norm_ptr + 2, mask=row < rows, other=0.0)
    g_ptr += batch * g_batch + token * g_token + head * g_head + start
    bias_ptr += head * keys + start
    z = tiles.load_gate_input(g_ptr, bias_ptr, g_token, rows, width, BIASED, BK)
    sharpness = tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) if GATE > 0 else 1.0
    decay = tiles.log2_decay(z, sharpness, floor, rows, width, GATE, BK)

    at = program * (tiles.CHUNK * BLOCK) + (start + column) * tiles.TILE
    at += row // tiles.TILE * (tiles.TILE * BLOCK) + row % tiles.TILE
    inside = (row < rows) & (column < width)
    entering = tl.exp2(tl.cumsum(decay, axis=0))
    dq = tl.load(read_ptr + at, mask=inside, other=0.0).to(tl.float32) * entering
    known = tl.load(known_ptr + at, mask=inside, other=0.0).to(tl.float32) * entering
    written = tl.load(written_ptr + at, mask=inside, other=0.0).to(tl.float32)
    written *= tl.exp2(tl.cumsum(decay, axis=0, reverse=True) - decay)
    dk = written - known
    dtotal = q * dq - k * (known + written)
    kept = tl.load(kept_ptr + program * BLOCK + start + column, mask=column < width, other=0.0)
    dlast = tl.sum(k * written, axis=0) + kept
    dtotal += tl.where(row == tiles.CHUNK - 1, dlast[None, :], 0.0)
    ab_ptr += program * (2 * tiles.CHUNK * tiles.CHUNK)
    for bit in tl.range(0, 6):
        dq, dk, dtotal = _pairs(q, k, decay, 1 << bit, ab_ptr, dq, dk, dtotal, PRECISION)
    own = tl.load(ab_ptr + row * (tiles.CHUNK + 1)).to(tl.float32)
    dq += own * k
    dk += own * q

    at, stride = place * keys + start, heads * keys
    if L2:
        along_q = tl.load(norm_ptr + 1, mask=row < rows, other=0.0) / (scale * scale)
        dq = tl.load(norm_ptr, mask=row < rows, other=0.0) * (dq - q * along_q)
        along_k = tl.load(norm_ptr + 3, mask=row < rows, other=0.0)
        dk = tl.load(norm_ptr + 2, mask=row < rows, other=0.0) * (dk - k * along_k)
    store_rows(dq_ptr + at, scale * dq, stride, rows, width, BK)
    store_rows(dk_ptr + at, dk, stride, rows, width, BK)
    dg = tl.cumsum(dtotal, axis=0, reverse=True)
    if GATE > 0:
        # read again: in registers it would not fit
        z = tiles.load_gate_input(g_ptr, bias_ptr, g_token, rows, width, BIASED, BK)
        dg, slope = _gate_slopes(dg, z, decay, sharpness, floor, rows, GATE)
        sums_ptr += program * (blocks + keys)
        tl.store(sums_ptr + start // BK, tl.sum(tl.sum(slope, axis=0), axis=0))
        tl.store(sums_ptr + blocks + start + column, tl.sum(dg, axis=0), mask=column < width)
    store_rows(dg_ptr + at, dg, stride, rows, width, BK)
