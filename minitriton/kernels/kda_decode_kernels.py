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


@triton.jit(do_not_specialize=("tokens", "sequences"))
def recurrent_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, state_ptr, final_ptr, slots_ptr,
    cu_ptr, gate_ptr, weight_ptr, o_ptr, q_stride, k_stride, v_stride, g_stride, beta_stride,
    gate_stride, state_stride, final_stride, tokens, heads, keys, values, scale, floor, eps,
    GATE: tl.constexpr, BIASED: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
    VALUE_MAJOR: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(values, V_BLOCK)
    key = tl.arange(0, K_BLOCK)
    value = tl.program_id(0) % blocks * V_BLOCK + tl.arange(0, V_BLOCK)
    head = tl.program_id(0) // blocks % heads
    sequence = tl.program_id(0) // blocks // heads
    in_keys, in_values = key < keys, value < values
    batch, first, last, slot = sequence.to(tl.int64), 0, tokens, sequence.to(tl.int64)
    if PACKED:
        batch = sequence.to(tl.int64) * 0
        first = tl.load(cu_ptr + sequence).to(tl.int32)
        last = tl.load(cu_ptr + sequence + 1).to(tl.int32)
    if SLOTS:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
    inner = _over_keys(in_keys, VALUE_MAJOR) & _over_values(in_values, VALUE_MAJOR) & (slot >= 0)
    if VALUE_MAJOR:
        row, column = value[:, None], key[None, :]
    else:
        row, column = key[:, None], value[None, :]
    if INITIAL:
        at = state_ptr + slot * state_stride[0] + head * state_stride[1]
        state = _load(at + (row * state_stride[2] + column), inner)
    else:
        state = tl.zeros_like(row + column).to(tl.float32)
    sharpness, bias = 1.0, tl.zeros([K_BLOCK], tl.float32)
    if GATE > 0:
        sharpness = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if BIASED:
        bias = _load(dt_bias_ptr + head * keys + key, in_keys)
    if WEIGHTED:
        weight = _load(weight_ptr + value, in_values)
    q_row = q_ptr + batch * q_stride[0] + first.to(tl.int64) * q_stride[1] + head * q_stride[2]
    k_row = k_ptr + batch * k_stride[0] + first.to(tl.int64) * k_stride[1] + head * k_stride[2]
    v_row = v_ptr + batch * v_stride[0] + first.to(tl.int64) * v_stride[1] + head * v_stride[2]
    g_row = g_ptr + batch * g_stride[0] + first.to(tl.int64) * g_stride[1] + head * g_stride[2]
    beta_at = beta_ptr + batch * beta_stride[0] + first.to(tl.int64) * beta_stride[1]
    beta_at += head * beta_stride[2]
    gate_row = gate_ptr + batch * gate_stride[0] + first.to(tl.int64) * gate_stride[1]
    gate_row += head * gate_stride[2]
    o_row = o_ptr + ((batch * tokens + first) * heads + head) * values
    for _ in range(first, last):
        q, k = _load(q_row + key, in_keys), _load(k_row + key, in_keys)
        v = _load(v_row + value, in_values)
        decay = tl.exp2(log2_gate(_load(g_row + key, in_keys) + bias, sharpness, floor, GATE))
        beta = tl.load(beta_at).to(tl.float32)
        if SIGMOID:
            beta = tl.sigmoid(beta)
        if L2NORM:
            q = q * tl.rsqrt(tl.sum(q * q) + L2_EPS)
            k = k * tl.rsqrt(tl.sum(k * k) + L2_EPS)
        q = q * scale
        # o = S'^T q with S' = S + k u^T, u = beta (v - S^T k): both sums over keys at once
        state *= _over_keys(decay, VALUE_MAJOR)
        seen = tl.sum(state * _over_keys(k, VALUE_MAJOR), axis=1 if VALUE_MAJOR else 0)
        o = tl.sum(state * _over_keys(q, VALUE_MAJOR), axis=1 if VALUE_MAJOR else 0)
        update = beta * (v - seen)
        o += tl.sum(q * k) * update
        state += _over_keys(k, VALUE_MAJOR) * _over_values(update, VALUE_MAJOR)
        if GATED:
            o = o * tl.rsqrt(tl.sum(o * o) / values + eps)
            if WEIGHTED:
                o = o * weight
            o = o * tl.sigmoid(_load(gate_row + value, in_values))
        o = tl.where(slot >= 0, o, 0.0)
        tl.store(o_row + value, o.to(o_ptr.dtype.element_ty), mask=in_values)
        q_row += q_stride[1]
        k_row += k_stride[1]
        v_row += v_stride[1]
        g_row += g_stride[1]
        beta_at += beta_stride[1]
        gate_row += gate_stride[1]
        o_row += heads * values
    if FINAL:
        at = final_ptr + slot * final_stride[0] + head * final_stride[1]
        at += row * final_stride[2] + column
        tl.store(at, state.to(final_ptr.dtype.element_ty), mask=inner)
