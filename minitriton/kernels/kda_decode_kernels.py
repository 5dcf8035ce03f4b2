"""The kernel of recurrent KDA: a program keeps a block of one head's state in registers.

A program owns V_BLOCK values of a head of a sequence and with them the whole columns of the state
that belong to them, K x V_BLOCK in fp32; it reads the block once, walks the tokens and writes the
block once. Both layouts are read along their own rows, so that threads fetch 16 bytes each.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.kda_tiles import L2_EPS, log2_gate


@triton.jit
def _over_keys(x, VALUE_MAJOR: tl.constexpr):
    return x[None, :] if VALUE_MAJOR else x[:, None]


@triton.jit
def _over_values(x, VALUE_MAJOR: tl.constexpr):
    return x[:, None] if VALUE_MAJOR else x[None, :]


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _place(cu_ptr, slots_ptr, sequence, tokens, PACKED: tl.constexpr, SLOTS: tl.constexpr):
    """(batch, first token, end, slot of the state) of a sequence; slot -1: skip it."""
    batch = sequence.to(tl.int64)
    slot, first, last = batch, tokens * 0, tokens
    if PACKED:
        batch = batch * 0
        first = tl.load(cu_ptr + sequence).to(tl.int32)
        last = tl.load(cu_ptr + sequence + 1).to(tl.int32)
    if SLOTS:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
    return batch, first, last, slot


@triton.jit
def _row(ptr, stride, batch, token, head):
    return ptr + batch * stride[0] + token.to(tl.int64) * stride[1] + head * stride[2]


@triton.jit
def _step(
    state, decay, q, k, v, beta, scale, L2NORM: tl.constexpr, VALUE_MAJOR: tl.constexpr
):  # fmt: skip
    """(o, next state) of one token."""
    axis: tl.constexpr = 1 if VALUE_MAJOR else 0
    if L2NORM:
        q = q * tl.rsqrt(tl.sum(q * q) + L2_EPS)
        k = k * tl.rsqrt(tl.sum(k * k) + L2_EPS)
    q = q * scale
    # o = S'^T q with S' = S + k u^T, u = beta (v - S^T k): both sums over the state at once
    state *= _over_keys(decay, VALUE_MAJOR)
    seen = tl.sum(state * _over_keys(k, VALUE_MAJOR), axis=axis)
    o = tl.sum(state * _over_keys(q, VALUE_MAJOR), axis=axis)
    update = beta * (v - seen)
    o += tl.sum(q * k) * update
    return o, state + _over_keys(k, VALUE_MAJOR) * _over_values(update, VALUE_MAJOR)


@triton.jit(do_not_specialize=("tokens",))
def recurrent_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, state_ptr, final_ptr, slots_ptr,
    cu_ptr, gate_ptr, weight_ptr, o_ptr, q_stride, k_stride, v_stride, g_stride, beta_stride,
    gate_stride, state_stride, final_stride, tokens, heads, scale, floor, eps,
    GATE: tl.constexpr, BIASED: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
    VALUE_MAJOR: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, STATE_ROW: tl.constexpr, FINAL_ROW: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(VALUES, V_BLOCK)
    key = tl.arange(0, K_BLOCK)
    value = tl.program_id(0) % blocks * V_BLOCK + tl.arange(0, V_BLOCK)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    sequence = tl.program_id(0) // blocks // heads
    in_keys, in_values = key < KEYS, value < VALUES
    batch, first, last, slot = _place(cu_ptr, slots_ptr, sequence, tokens, PACKED, SLOTS)
    inner = _over_keys(in_keys, VALUE_MAJOR) & _over_values(in_values, VALUE_MAJOR) & (slot >= 0)
    if VALUE_MAJOR:
        row, column = value[:, None], key[None, :]
    else:
        row, column = key[:, None], value[None, :]
    if INITIAL:
        at = state_ptr + slot * state_stride[0] + head * state_stride[1]
        state = _load(at + (row * STATE_ROW + column), inner)
    else:
        state = tl.zeros_like(row + column).to(tl.float32)
    sharpness, bias = 1.0, tl.zeros([K_BLOCK], tl.float32)
    if GATE > 0:
        sharpness = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if BIASED:
        bias = _load(dt_bias_ptr + head * KEYS + key, in_keys)
    if WEIGHTED:
        weight = _load(weight_ptr + value, in_values)
    q_row = _row(q_ptr, q_stride, batch, first, head)
    k_row = _row(k_ptr, k_stride, batch, first, head)
    v_row = _row(v_ptr, v_stride, batch, first, head)
    g_row = _row(g_ptr, g_stride, batch, first, head)
    beta_row = _row(beta_ptr, beta_stride, batch, first, head)
    gate_row = _row(gate_ptr, gate_stride, batch, first, head)
    o_row = o_ptr + ((batch * tokens + first) * heads + head) * VALUES
    for _ in range(first, last):
        decay = tl.exp2(log2_gate(_load(g_row + key, in_keys) + bias, sharpness, floor, GATE))
        beta = tl.load(beta_row).to(tl.float32)
        if SIGMOID:
            beta = tl.sigmoid(beta)
        o, state = _step(
            state, decay, _load(q_row + key, in_keys), _load(k_row + key, in_keys),
            _load(v_row + value, in_values), beta, scale, L2NORM, VALUE_MAJOR,
        )  # fmt: skip
        if GATED:
            o = o * tl.rsqrt(tl.sum(o * o) / VALUES + eps)
            if WEIGHTED:
                o = o * weight
            o = o * tl.sigmoid(_load(gate_row + value, in_values))
        o = tl.where(slot >= 0, o, 0.0)
        tl.store(o_row + value, o.to(o_ptr.dtype.element_ty), mask=in_values)
        q_row += q_stride[1]
        k_row += k_stride[1]
        v_row += v_stride[1]
        g_row += g_stride[1]
        beta_row += beta_stride[1]
        gate_row += gate_stride[1]
        o_row += heads * VALUES
    if FINAL:
        at = final_ptr + slot * final_stride[0] + head * final_stride[1]
        at += row * FINAL_ROW + column
        tl.store(at, state.to(final_ptr.dtype.element_ty), mask=inner)
