"""KDA over chunks of 64 tokens: `prepare` on all chunks at once, `scan` in order of the chunks.

With G the cumulative log decay of a chunk and S the state before it (Kimi Linear, arXiv 2510.26692,
equations 6 to 9; Kimi K3 technical report, equation 4):

    q_in = scale q e^G    k_in = k e^G    k_out = k e^(G_last - G)    decay = e^(G_last)
    M_rj = sum_d k_rd k_jd e^(G_rd - G_jd)  (j < r)     scores P: the same with scale q_r  (j <= r)
    inverse T = (I + diag(beta) M)^-1
    values V' = T diag(beta) (V - k_in S)    O = q_in S + P V'    S <- diag(decay) S + k_out^T V'

Products take bf16 operands for bf16 and fp16 inputs, tf32x3 for fp32, and add in fp32; T is found
in tf32 at least. The state stays in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels import kda_states
from minitriton.kernels import kda_tiles as tiles
from minitriton.kernels.devices import has_warpgroups, since_hopper
from minitriton.kernels.kda_chunks import CHUNK, Chunks
from minitriton.kernels.kda_prepare import bounded_kernel, inverse_kernel
from minitriton.kernels.kda_states import ScanTile

WIDEST = 64  # columns of V that a program of the scan holds, at most
REGISTERS = 168  # of a thread of bounded_kernel: three programs fit a processor; 12 bytes spill
TURNED = 64  # columns of V that a warpgroup holds as rows
FARTHEST = 2**25  # tokens closer than this, in elements, have 32-bit offsets within a chunk
PROGRAMS = 132  # that the scan should have at least, an H200's processors: else narrower ones


class Options(NamedTuple):
    """What `chunk_kda` was asked for, checked."""

    scale: float
    gate: int  # GATE of kda_tiles.log2_decay
    floor: float  # of gate 1
    qk_l2norm: bool
    beta_sigmoid: bool
    value_major: bool  # states are [N, H, V, K]

    @property
    def finest(self) -> int:
        """The finest level of pairs: 16 where no token decays below e^-5 (kda_tiles), else 1."""
        return 16 if self.gate == 1 and self.floor >= -5 else 1


class Operands(NamedTuple):
    """What `prepare` writes; C = 64 tokens, BK = `block(K)` channels, zeros beyond K."""

    q_in: torch.Tensor  # [NC, H, C, BK] in the products' dtype, as k_in and k_out
    k_in: torch.Tensor
    k_out: torch.Tensor
    decay: torch.Tensor  # [NC, H, BK] fp32
    inverse: torch.Tensor  # [NC, H, C, C] in the products' dtype, as scores
    scores: torch.Tensor
    beta: torch.Tensor  # [NC, H, C] fp32, zeros beyond a chunk's rows


@triton.jit
def _unit_inverse(lower, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower [CHUNK, CHUNK].

    The 16x16 tiles on the diagonal by (I - L)(I + L^2)(I + L^4)(I + L^8), since L^16 = 0. With D
    their inverse and E = D (lower - its diagonal tiles), E^4 = 0: (I - E)(I + E^2) D.
    """
    C: tl.constexpr = tiles.CHUNK
    R: tl.constexpr = tiles.TILE
    N: tl.constexpr = C // R
    at = tl.arange(0, R)
    own = (tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :])[:, None, :, None]
    blocks = tl.reshape(lower, [N, R, N, R])
    power = tl.sum(tl.where(own, blocks, 0.0), axis=2)
    one = tl.where(at[:, None] == at[None, :], 1.0, 0.0)[None, :, :]
    inner = one - power
    for _ in tl.static_range(3):
        power = tl.dot(power, power, input_precision="tf32x3")
        inner += tl.dot(inner, power, input_precision="tf32x3")
    outer = tl.reshape(tl.where(own, 0.0, blocks), [N, R, C])
    e = tl.reshape(tl.dot(inner, outer, input_precision=PRECISION), [C, C])
    square = tl.dot(e, e, input_precision=PRECISION)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    left = tl.where(row == column, 1.0, 0.0) - e
    left += tl.dot(left, square, input_precision=PRECISION)
    diagonal = tl.where(own, tl.expand_dims(inner, 2), 0.0)
    return tl.dot(left, tl.reshape(diagonal, [C, C]), input_precision=PRECISION)


@triton.jit
def _add_pairs(m, p, q, k, left, right, of_m, of_p, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """m and p plus the products of q and k with their factors, where of_m and of_p say so."""
    right_k = tl.trans((k * right).to(DTYPE))
    dots = tl.dot((k * left).to(DTYPE), right_k, input_precision=PRECISION)
    m += tl.where(of_m, dots, 0.0)
    dots = tl.dot((q * left).to(DTYPE), right_k, input_precision=PRECISION)
    return m, p + tl.where(of_p, dots, 0.0)


@triton.jit
def _pair_products(m, p, q, k, decay, total, FINEST: tl.constexpr, PRECISION: tl.constexpr,
                   DTYPE: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """M and P with the products of PART channels added; q is scaled, total is G."""
    if FINEST == 16:
        for i in tl.static_range(2):
            factor, keep = tiles.level_factor(total, 32 >> i, PART), tiles.in_level(32 >> i)
            m, p = _add_pairs(m, p, q, k, factor, factor, keep, keep, PRECISION, DTYPE)
        left, right = tiles.diagonal_factors(total, PART)
        strict, keep = tiles.on_diagonal(True), tiles.on_diagonal(False)
        m, p = _add_pairs(m, p, q, k, left, right, strict, keep, PRECISION, DTYPE)
    else:
        TERMS: tl.constexpr = 2 if PRECISION == "tf32" else 3
        for bit in tl.range(0, 6):
            factor = tiles.span_factor(decay, 1 << bit, TERMS)
            keep = tiles.in_level(1 << bit)
            m, p = _add_pairs(m, p, q, k, factor, factor, keep, keep, PRECISION, DTYPE)
        at = tl.arange(0, tiles.CHUNK)
        p += tl.where(at[:, None] == at[None, :], tl.sum(q * k, axis=1)[:, None], 0.0)
    return m, p


@triton.jit
def _lengths(q_ptr, k_ptr, q_token, k_token, rows, columns, BLOCK: tl.constexpr,
             PART: tl.constexpr):  # fmt: skip
    """What scales the rows of q and of k to length 1, each [CHUNK, 1]."""
    of_q, of_k = tl.zeros([tiles.CHUNK], tl.float32), tl.zeros([tiles.CHUNK], tl.float32)
    for start in tl.range(0, BLOCK, PART):
        q = tiles.load_rows(q_ptr + start, q_token, rows, columns - start, PART)
        k = tiles.load_rows(k_ptr + start, k_token, rows, columns - start, PART)
        of_q += tl.sum(q * q, axis=1)
        of_k += tl.sum(k * k, axis=1)
    return tl.rsqrt(of_q + tiles.L2_EPS)[:, None], tl.rsqrt(of_k + tiles.L2_EPS)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _prepare_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, a_log_ptr, bias_ptr, chunk_ptr, q_in_ptr, k_in_ptr,
    k_out_ptr, decay_ptr, inverse_ptr, scores_ptr, betas_ptr, q_batch, q_token, q_head, k_batch,
    k_token, k_head, g_batch, g_token, g_head, beta_batch, beta_token, beta_head, tokens, heads,
    columns, scale, floor, GATE: tl.constexpr, BIASED: tl.constexpr, L2: tl.constexpr,
    SIGMOID: tl.constexpr, FINEST: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
    batch, token = (first // tokens).to(tl.int64), (first % tokens).to(tl.int64)
    DTYPE: tl.constexpr = q_in_ptr.dtype.element_ty
    row, column = tl.arange(0, tiles.CHUNK)[:, None], tl.arange(0, PART)
    q_ptr += batch * q_batch + token * q_token + head * q_head
    k_ptr += batch * k_batch + token * k_token + head * k_head
    g_ptr += batch * g_batch + token * g_token + head * g_head
    beta_ptr += batch * beta_batch + token * beta_token + head * beta_head
    bias_ptr += head * columns
    decay_ptr += program * BLOCK
    sharpness = tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) if GATE > 0 else 1.0
    q_scale, k_scale = scale, 1.0
    if L2:
        q_scale, k_scale = _lengths(q_ptr, k_ptr, q_token, k_token, rows, columns, BLOCK, PART)
        q_scale *= scale

    m = tl.zeros([tiles.CHUNK, tiles.CHUNK], tl.float32)
    p = tl.zeros([tiles.CHUNK, tiles.CHUNK], tl.float32)
    for start in tl.range(0, BLOCK, PART):
        left = columns - start
        z = tiles.load_gate_input(
            g_ptr + start, bias_ptr + start, g_token, rows, left, BIASED, PART
        )
        decay = tiles.log2_decay(z, sharpness, floor, rows, left, GATE, PART)
        total, last = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
        tl.store(decay_ptr + start + column, tl.exp2(last))
        k = tiles.load_rows(k_ptr + start, k_token, rows, left, PART) * k_scale
        q = tiles.load_rows(q_ptr + start, q_token, rows, left, PART) * q_scale
        entering = tl.exp2(total)
        at = program * (tiles.CHUNK * BLOCK) + start + (row * BLOCK + column[None, :])
        tl.store(q_in_ptr + at, (q * entering).to(DTYPE))
        tl.store(k_in_ptr + at, (k * entering).to(DTYPE))
        tl.store(k_out_ptr + at, (k * tl.exp2(last[None, :] - total)).to(DTYPE))
        m, p = _pair_products(m, p, q, k, decay, total, FINEST, PRECISION, DTYPE, PART)
    other = tl.arange(0, tiles.CHUNK)[None, :]
    at = program * (tiles.CHUNK * tiles.CHUNK) + (row * tiles.CHUNK + other)
    tl.store(scores_ptr + at, p.to(DTYPE))
    beta = tiles.load_beta(beta_ptr, beta_token, rows, SIGMOID)
    tl.store(betas_ptr + program * tiles.CHUNK + tl.arange(0, tiles.CHUNK), beta)
    inverse = _unit_inverse(m * beta[:, None], PRECISION)
    tl.store(inverse_ptr + at, inverse.to(DTYPE))


@triton.jit
def _read(entering, v, k_in_at, q_in_at, STORE_OUT: tl.constexpr, TURNED: tl.constexpr,
          PRECISION: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """What the keys and, with STORE_OUT, the queries of a chunk read from the state before it. If
    not TURNED, less v for the keys: then v takes no registers, and must be waited for at once."""
    out = tl.zeros(kda_states.turn(v, TURNED).shape, tl.float32)
    known = out if TURNED else -v.to(tl.float32)
    for p in tl.static_range(PARTS):
        k_in = tl.load(k_in_at + p * PART)
        held = entering[p].to(k_in.dtype)
        known = kda_states.times(k_in, held, known, TURNED, PRECISION)
        if STORE_OUT:
            q_in = tl.load(q_in_at + p * PART)
            out = kda_states.times(q_in, held, out, TURNED, PRECISION)
    return known, out


@triton.jit
def _decays(at, EARLY: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """The decays of the parts, or only where they are: registers may not do for both."""
    parts = ()
    for p in tl.static_range(PARTS):
        parts = parts + (tl.load(at + p * PART) if EARLY else at + p * PART,)
    return parts


@triton.jit
def _residual(v, known, beta, TURNED: tl.constexpr):
    """beta (v - known), fp32, given the result of `_read`; if TURNED, v may be anything at all
    where beta is 0."""
    if TURNED:
        left = (tl.trans(v).to(tl.float32) - known) * beta[None, :]
        return tl.where(beta[None, :] != 0.0, left, 0.0)
    return known * -beta[:, None]


@triton.jit
def _advance(state, values, k_out_at, decays, TURNED: tl.constexpr, PRECISION: tl.constexpr,
             PARTS: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """The state after a chunk, in parts like `state`."""
    leaving = ()
    for p in tl.static_range(PARTS):
        k_out = tl.load(k_out_at + p * PART)
        decay = decays[p] if TURNED else tl.load(decays[p])
        decayed = state[p] * kda_states.down(decay, TURNED)
        left, right = (values, k_out) if TURNED else (tl.trans(k_out), values)
        leaving = leaving + (tl.dot(left, right, decayed, input_precision=PRECISION),)
    return leaving


@triton.jit(do_not_specialize=["tokens"])
def _scan_kernel(
    q_in_ptr, k_in_ptr, k_out_ptr, decay_ptr, inverse_ptr, scores_ptr, beta_ptr, v_ptr, chunk_ptr,
    sequence_ptr, initial_ptr, out_ptr, final_ptr, states_ptr, values_ptr, v_batch, v_token, v_head,
    tokens, heads, keys: tl.constexpr, columns: tl.constexpr, key_stride: tl.constexpr,
    column_stride: tl.constexpr, INITIAL: tl.constexpr, STORE_OUT: tl.constexpr,
    STORE_STATES: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, VALUES: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TURNED: the state and all that has V columns is held transposed, so that whole warpgroups
    multiply what they hold in registers with operands as they lie in memory.
    Sizes and strides of a state are constants, since offsets in it would take registers.
    """
    DTYPE: tl.constexpr = q_in_ptr.dtype.element_ty
    PARTS: tl.constexpr = BLOCK // PART
    KEPT: tl.constexpr = STORE_STATES and TURNED
    sequence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    row, key = tl.arange(0, tiles.CHUNK), tl.arange(0, PART)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    inside = column[None, :] < columns
    state_at = (sequence * heads + head) * (keys * columns)
    # the state in parts of K, which products take one after the other: registers would spill
    state = kda_states.load_state(
        initial_ptr + state_at, key, column, keys, columns, key_stride, column_stride, INITIAL,
        TURNED, PARTS, PART,
    )  # fmt: skip
    operand_at = row[:, None] * BLOCK + key[None, :]
    square_at = row[:, None] * tiles.CHUNK + row[None, :]
    begin, count = tl.load(sequence_ptr + 2 * sequence), tl.load(sequence_ptr + 2 * sequence + 1)
    tl.assume(begin >= 0)
    rounded = kda_states.rounded(state, DTYPE, PARTS)
    for chunk in tl.range(begin, begin + count, num_stages=STAGES):
        first, rows = tl.load(chunk_ptr + 3 * chunk + 1), tl.load(chunk_ptr + 3 * chunk + 2)
        tl.assume(first >= 0)
        batch, token = (first // tokens).to(tl.int64), first % tokens
        tile = chunk.to(tl.int64) * heads + head
        operand, square = tile * (tiles.CHUNK * BLOCK), tile * (tiles.CHUNK * tiles.CHUNK)
        beta = tl.load(beta_ptr + tile * tiles.CHUNK + row)
        decays = _decays(decay_ptr + tile * BLOCK + key, TURNED, PARTS, PART)
        v_at = v_ptr + batch * v_batch + head.to(tl.int64) * v_head
        v_at += (token + row).to(tl.int64)[:, None] * v_token + column[None, :]
        # with rows of the next sequence: TMA leaves out only what is outside of the tensor
        left = tokens - token if TURNED else rows
        v = tl.load(v_at, mask=(row < left)[:, None] & inside, other=0.0)
        entering = rounded if KEPT else state
        if STORE_STATES:
            kda_states.store_state(
                states_ptr + tile * (keys * columns), entering, key, column, keys, columns, columns,
                1, TURNED, TURNED, PARTS, PART,
            )  # fmt: skip
        known, out = _read(
            entering, v, k_in_ptr + operand + operand_at, q_in_ptr + operand + operand_at,
            STORE_OUT, TURNED, PRECISION, PARTS, PART)  # fmt: skip
        residual = _residual(v, known, beta, TURNED).to(DTYPE)
        inverse = tl.load(inverse_ptr + square + square_at)
        values = kda_states.times(inverse, residual, None, TURNED, PRECISION).to(DTYPE)
        place, stride = (first.to(tl.int64) * heads + head) * columns, heads * columns
        if STORE_OUT:
            scores = tl.load(scores_ptr + square + square_at)
            out = kda_states.times(scores, values, out, TURNED, PRECISION)
        at = k_out_ptr + operand + operand_at
        state = _advance(state, values, at, decays, TURNED, PRECISION, PARTS, PART)
        if STORE_OUT:
            kda_states.store_rows(out_ptr + place, out, rows, column, columns, stride, TURNED)
        rounded = kda_states.rounded(state, DTYPE, PARTS) if KEPT else rounded  # lands here
        if STORE_STATES:
            kda_states.store_rows(values_ptr + place, values, rows, column, columns, stride, TURNED)
    kda_states.store_state(
        final_ptr + state_at, state, key, column, keys, columns, key_stride, column_stride, TURNED,
        False, PARTS, PART,
    )  # fmt: skip


def block(keys: int) -> int:
    """Channels of a tile that holds `keys` of them."""
    return max(32, triton.next_power_of_2(keys))


def prepare(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    a_log: torch.Tensor | None, dt_bias: torch.Tensor | None, options: Options, chunks: Chunks,
) -> Operands:  # fmt: skip
    """All that depends on one chunk only. q, k, g: [B, T, H, K], last stride 1; beta: [B, T, H]."""
    count, heads, keys = len(chunks.chunk), q.shape[2], q.shape[3]
    exact = q.dtype == torch.float32
    dtype, width = torch.float32 if exact else torch.bfloat16, block(keys)
    q_in, k_in, k_out = (q.new_empty(count, heads, CHUNK, width, dtype=dtype) for _ in range(3))
    decay = q.new_empty(count, heads, width, dtype=torch.float32)
    inverse, scores = (q.new_empty(count, heads, CHUNK, CHUNK, dtype=dtype) for _ in range(2))
    betas = q.new_empty(count, heads, CHUNK, dtype=torch.float32)
    made = Operands(q_in, k_in, k_out, decay, inverse, scores, betas)
    if not count * heads:
        return made
    if options.finest == 16 and not exact:
        prepare_bounded(q, k, g, beta, a_log, dt_bias, options, chunks, made)
    else:
        _prepare_kernel[(count * heads,)](
            q, k, g, beta, g if a_log is None else a_log, g if dt_bias is None else dt_bias,
            chunks.chunk, *made, *q.stride()[:3], *k.stride()[:3], *g.stride()[:3],
            *beta.stride(), q.shape[1], heads, keys, options.scale, options.floor,
            GATE=options.gate, BIASED=dt_bias is not None, L2=options.qk_l2norm,
            SIGMOID=options.beta_sigmoid, FINEST=options.finest,
            PRECISION="tf32x3" if exact else "tf32", BLOCK=width, PART=16,
            num_warps=8,
        )  # fmt: skip
    return made


def prepare_bounded(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    a_log: torch.Tensor | None, dt_bias: torch.Tensor | None, options: Options, chunks: Chunks,
    made: Operands,
) -> None:  # fmt: skip
    """Fills `made` where a token decays by e^-5 at most, with operands in 16 bits."""
    count, heads, _, width = made.q_in.shape
    q, k, g = (x if x.stride(1) < FARTHEST else x.contiguous() for x in (q, k, g))
    # rows of length 1 make a triangle that fp16 holds; it has the digits of tf32
    lower_dtype = torch.float16 if options.qk_l2norm else torch.float32
    lower = torch.empty(made.inverse.shape, dtype=lower_dtype, device=q.device)
    bounded_kernel[(count * heads,)](
        q, k, g, beta, a_log, g if dt_bias is None else dt_bias, chunks.chunk, *made[:4], lower,
        made.scores, made.beta, *q.stride()[:3:2], *k.stride()[:3:2], *g.stride()[:3:2],
        *beta.stride(), q.shape[1], heads, options.scale, options.floor, q.stride(1), k.stride(1),
        g.stride(1), q.shape[3], BIASED=dt_bias is not None, L2=options.qk_l2norm,
        SIGMOID=options.beta_sigmoid, BLOCK=width, num_warps=width // 32,
        maxnreg=REGISTERS if q.shape[3] == 128 and since_hopper(q) else None,
    )  # fmt: skip
    inverse_kernel[(count * heads,)](lower, made.inverse, num_warps=1)


class Results(NamedTuple):
    """What `scan` writes; None is not wanted."""

    out: torch.Tensor | None  # [B, T, H, V], as values
    final: torch.Tensor  # fp32 [N, H, K, V], or [N, H, V, K] with value_major
    states: torch.Tensor | None  # [NC, H, K, V] in the products' dtype: S before every chunk
    values: torch.Tensor | None  # V' in the products' dtype; wanted if and only if states are


def scan(
    operands: Operands, v: torch.Tensor, initial: torch.Tensor | None, options: Options,
    chunks: Chunks, results: Results,
) -> None:  # fmt: skip
    """Fills `results`. v: [B, T, H, V], last stride 1; initial: contiguous, laid out as `final`."""
    heads, columns = v.shape[2], v.shape[3]
    final = results.final
    keys = final.numel() // max(1, final.shape[0] * heads * columns)
    if final.numel() == 0:
        return
    out = final if results.out is None else results.out
    states = final if results.states is None else results.states
    values = final if results.values is None else results.values
    exact = v.dtype == torch.float32
    tile = scan_tile(final.shape[0] * heads, operands.q_in.shape[3], columns, v.dtype, v.device)
    _scan_kernel[(final.shape[0] * heads, triton.cdiv(columns, tile.columns))](
        *operands, v, chunks.chunk, chunks.sequence, final if initial is None else initial,
        out, final, states, values, *v.stride()[:3], v.shape[1], heads, keys,
        columns, *((1, keys) if options.value_major else (columns, 1)),
        INITIAL=initial is not None, STORE_OUT=results.out is not None,
        STORE_STATES=results.states is not None, TURNED=tile.turned,
        PRECISION="tf32x3" if exact else "tf32", BLOCK=operands.q_in.shape[3],
        VALUES=tile.columns, PART=tile.part, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def scan_tile(
    sequences: int, width: int, columns: int, dtype: torch.dtype, device: torch.device
) -> ScanTile:
    """For so many sequences times heads, K padded to `width`."""
    if dtype == torch.float32:
        return ScanTile(16, 8, width, 1, False)
    if has_warpgroups(device) and columns > TURNED // 2:
        wide = TURNED if columns <= TURNED or 2 * sequences <= PROGRAMS else 2 * TURNED
        return ScanTile(wide, wide // 16, width, 2, True)
    wide = min(WIDEST, max(16, triton.next_power_of_2(columns)))
    while wide > 16 and 2 * sequences * triton.cdiv(columns, wide) <= PROGRAMS:
        wide //= 2
    return ScanTile(wide, 8 if wide >= 32 else 4, min(64, width), 2, False)  # 4: it would spill
