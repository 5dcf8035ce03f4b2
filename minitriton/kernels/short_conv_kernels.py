"""Kernels of the short convolution: how a program walks along time, forward and backward.

A program holds ROWS segments of `length` consecutive tokens, SPAN channels wide, and steps through
the tokens of all its segments at once; the last inputs stay in registers, so that each input is
read once (a segment reads WIDTH - 1 earlier tokens, and in the backward pass as many later ones).
A *tap* k weighs the input k tokens back. Packed sequences come with a table `where`: int32
[2, tokens], the position of each token in its sequence and the number of that sequence.
"""

from __future__ import annotations

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.gemm import sum_parts

NORM_EPS = tl.constexpr(1e-6)  # of the L2 norm, under the root
WALK = ("batches", "tokens", "length")  # one variant of a kernel serves all of them


@triton.jit
def _taps(weight_ptr, bias_ptr, column, ok, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """Weights of taps 0 to 3 (zeros beyond the width) and the bias, each [1, BLOCK] in fp32."""
    at = weight_ptr + column * WIDTH + (WIDTH - 1)
    w0 = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    w1 = tl.load(at - 1, mask=ok, other=0.0).to(tl.float32)
    w2, w3, bias = tl.zeros_like(w0), tl.zeros_like(w0), tl.zeros_like(w0)
    if WIDTH > 2:
        w2 = tl.load(at - 2, mask=ok, other=0.0).to(tl.float32)
    if WIDTH > 3:
        w3 = tl.load(at - 3, mask=ok, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=ok, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, bias


@triton.jit
def _convolve(x, h1, h2, h3, taps, WIDTH: tl.constexpr):
    out = taps[4] + taps[0] * x + taps[1] * h1
    if WIDTH > 2:
        out += taps[2] * h2
    if WIDTH > 3:
        out += taps[3] * h3
    return out


@triton.jit
def _activate(conv, SILU: tl.constexpr, NORM: tl.constexpr):
    out = conv * tl.sigmoid(conv) if SILU else conv
    if NORM:
        out = out * tl.rsqrt(tl.sum(out * out, axis=1)[:, None] + NORM_EPS)
    return out


@triton.jit
def _activate_backward(conv, grad, SILU: tl.constexpr, NORM: tl.constexpr):
    """The gradient of the convolution's sum, given that of the result."""
    s = tl.sigmoid(conv)
    if NORM:
        out = conv * s if SILU else conv
        r = tl.rsqrt(tl.sum(out * out, axis=1)[:, None] + NORM_EPS)
        n = out * r
        grad = r * (grad - n * tl.sum(grad * n, axis=1)[:, None])
    if SILU:
        grad = grad * s * (1 + conv * (1 - s))
    return grad


@triton.jit
def _back(
    BACK: tl.constexpr, x_row, x_token, state_row, state_time, position, mask,
    WIDTH: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """The input BACK tokens before x_row: from x, or before its sequence's start from the state."""
    inside = position >= BACK
    out = tl.load(x_row - BACK * x_token, mask=mask & inside, other=0.0).to(tl.float32)
    if STATE:
        at = state_row + (WIDTH - 1 - BACK + position) * state_time
        out += tl.load(at, mask=mask & (position < BACK), other=0.0).to(tl.float32)
    return out


@triton.jit
def _history(
    x_row, x_token, state_row, state_time, position, mask,
    WIDTH: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """The three inputs before x_row (as far as the width needs them), the nearest first."""
    h1 = _back(1, x_row, x_token, state_row, state_time, position, mask, WIDTH, STATE)
    h2, h3 = tl.zeros_like(h1), tl.zeros_like(h1)
    if WIDTH > 2:
        h2 = _back(2, x_row, x_token, state_row, state_time, position, mask, WIDTH, STATE)
    if WIDTH > 3:
        h3 = _back(3, x_row, x_token, state_row, state_time, position, mask, WIDTH, STATE)
    return h1, h2, h3


@triton.jit
def _restart(
    h, state_ptr, state_slot, state_time, state_channel, where_at, tokens, position, live, column,
    ok, WIDTH: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """The history `h`, replaced by the state or zeros where a packed sequence starts."""
    start = position == 0
    h1, h2, h3 = tl.zeros_like(h[0]), tl.zeros_like(h[0]), tl.zeros_like(h[0])
    if STATE:
        begins = start & live
        sequence = tl.load(where_at + tokens, mask=begins, other=0).to(tl.int64)
        at = state_ptr + sequence * state_slot + column * state_channel
        mask = begins & ok
        h1 = tl.load(at + (WIDTH - 2) * state_time, mask=mask, other=0.0).to(tl.float32)
        if WIDTH > 2:
            h2 = tl.load(at + (WIDTH - 3) * state_time, mask=mask, other=0.0).to(tl.float32)
        if WIDTH > 3:
            h3 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(start, h1, h[0]), tl.where(start, h2, h[1]), tl.where(start, h3, h[2])


@triton.jit
def _read(row, stride, token, end, ok, COUNT: tl.constexpr):
    """COUNT tiles, those of `token` and the ones after it, as a tuple; zeros from `end` on."""
    return [tl.load(row + j * stride, mask=ok & (token + j < end), other=0.0) for j in range(COUNT)]


@triton.jit
def _place(batches, tokens, columns, length, ROWS: tl.constexpr, SPAN: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """(columns, their mask, batch, first token, end of the segment, end of the batch) here."""
    blocks = tl.cdiv(columns, SPAN)
    lane = tl.arange(0, BLOCK)[None, :]
    column = tl.program_id(0) % blocks * SPAN + lane
    per_batch = tl.cdiv(tokens, length)
    segment = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    batch = segment // per_batch
    first = segment % per_batch * length
    end = tl.where(batch < batches, tokens, 0)
    ok = (lane < SPAN) & (column < columns)
    return column, ok, batch.to(tl.int64), first, tl.minimum(first + length, end), end


@triton.jit(do_not_specialize=WALK)
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, where_ptr, out_ptr, x_batch, x_token, state_slot,
    state_time, state_channel, batches, tokens, columns, length,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    SILU: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    column, ok, batch, first, last, _ = _place(batches, tokens, columns, length, ROWS, SPAN, BLOCK)
    taps = _taps(weight_ptr, bias_ptr, column, ok, WIDTH, BIAS)
    sequence, position, where_at = batch, first, where_ptr + first
    if PACKED:
        position = tl.load(where_at, mask=first < last, other=0)
        sequence = tl.load(where_at + tokens, mask=first < last, other=0).to(tl.int64)
    x_row = x_ptr + batch * x_batch + first.to(tl.int64) * x_token + column
    out_row = out_ptr + (batch * tokens + first) * columns + column
    state_row = state_ptr + sequence * state_slot + column * state_channel
    h = _history(x_row, x_token, state_row, state_time, position, ok & (first < last), WIDTH, STATE)
    for step in range(0, length, AHEAD):
        xs = _read(x_row, x_token, first + step, last, ok, AHEAD)
        for j in tl.static_range(AHEAD):
            live = first + step + j < last
            if PACKED:
                h = _restart(
                    h, state_ptr, state_slot, state_time, state_channel, where_at + j, tokens,
                    tl.load(where_at + j, mask=live, other=1), live, column, ok, WIDTH, STATE,
                )  # fmt: skip
            x = xs[j].to(tl.float32)
            out = _activate(_convolve(x, h[0], h[1], h[2], taps, WIDTH), SILU, NORM)
            tl.store(out_row + j * columns, out.to(out_ptr.dtype.element_ty), mask=live & ok)
            h = (x, h[0], h[1])
        x_row += AHEAD * x_token
        out_row += AHEAD * columns
        where_at += AHEAD


@triton.jit(do_not_specialize=WALK)
def backward_kernel(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, where_ptr, dx_ptr, partial_ptr, grad_batch,
    grad_token, x_batch, x_token, state_slot, state_time, state_channel, batches, tokens, columns,
    length, WIDTH: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    SILU: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    column, ok, batch, first, last, end = _place(
        batches, tokens, columns, length, ROWS, SPAN, BLOCK
    )
    taps = _taps(weight_ptr, bias_ptr, column, ok, WIDTH, BIAS)
    sequence, position, where_at = batch, first, where_ptr + first
    if PACKED:
        position = tl.load(where_at, mask=first < last, other=0)
        sequence = tl.load(where_at + tokens, mask=first < last, other=0).to(tl.int64)
    x_row = x_ptr + batch * x_batch + first.to(tl.int64) * x_token + column
    grad_row = grad_ptr + batch * grad_batch + first.to(tl.int64) * grad_token + column
    dx_row = dx_ptr + (batch * tokens + first) * columns + column
    state_row = state_ptr + sequence * state_slot + column * state_channel
    h = _history(x_row, x_token, state_row, state_time, position, ok & (first < last), WIDTH, STATE)
    zero = tl.zeros([ROWS, BLOCK], tl.float32)
    sums = (zero, zero, zero, zero, zero)  # of the taps and the bias
    due = (zero, zero, zero)  # gradients so far of the inputs 1, 2 and 3 tokens back
    for step in range(0, length + WIDTH - 1, AHEAD):
        xs = _read(x_row, x_token, first + step, end, ok, AHEAD)
        grads = _read(grad_row, grad_token, first + step, end, ok, AHEAD)
        for j in tl.static_range(AHEAD):
            token = first + step + j
            position = tl.full([ROWS, 1], WIDTH, tl.int32)
            if PACKED:
                position = tl.load(where_at + j, mask=token < end, other=1)
                h = _restart(
                    h, state_ptr, state_slot, state_time, state_channel, where_at + j, tokens,
                    position, token < end, column, ok, WIDTH, STATE,
                )  # fmt: skip
            x = xs[j].to(tl.float32)
            conv = _convolve(x, h[0], h[1], h[2], taps, WIDTH)
            grad = _activate_backward(conv, grads[j].to(tl.float32), SILU, NORM)
            sums = _add_to_sums(sums, tl.where(token < last, grad, 0.0), x, h, WIDTH, BIAS)
            dx, due = _pass_on(due, grad, position, taps, WIDTH)
            to = token - (WIDTH - 1)
            tl.store(
                dx_row + (j - (WIDTH - 1)) * columns, dx.to(dx_ptr.dtype.element_ty),
                mask=(to >= first) & (to < last) & ok,
            )  # fmt: skip
            h = (x, h[0], h[1])
        x_row += AHEAD * x_token
        grad_row += AHEAD * grad_token
        dx_row += AHEAD * columns
        where_at += AHEAD
    _store_sums(sums, partial_ptr, columns, WIDTH, SPAN, BLOCK)


@triton.jit
def _add_to_sums(sums, grad, x, h, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    s2, s3, bias = sums[2], sums[3], sums[4]
    if WIDTH > 2:
        s2 += grad * h[1]
    if WIDTH > 3:
        s3 += grad * h[2]
    if BIAS:
        bias += grad
    return sums[0] + grad * x, sums[1] + grad * h[0], s2, s3, bias


@triton.jit
def _pass_on(due, grad, position, taps, WIDTH: tl.constexpr):
    """(The finished gradient of the input WIDTH - 1 back, those of nearer ones so far)."""
    d1 = due[0] + taps[1] * tl.where(position >= 1, grad, 0.0)
    d2, d3 = d1, d1
    if WIDTH > 2:
        d2 = due[1] + taps[2] * tl.where(position >= 2, grad, 0.0)
        d3 = d2
    if WIDTH > 3:
        d3 = due[2] + taps[3] * tl.where(position >= 3, grad, 0.0)
    return d3, (taps[0] * grad, d1, d2)


@triton.jit
def _store_sums(
    sums, partial_ptr, columns, WIDTH: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    """This program's share of the gradients of weight and bias: row W - 1 - k for tap k, row W."""
    blocks = tl.cdiv(columns, SPAN)
    lane = tl.arange(0, BLOCK)
    column = tl.program_id(0) % blocks * SPAN + lane
    ok = (lane < SPAN) & (column < columns)
    row = (tl.program_id(0) // blocks).to(tl.int64) * (WIDTH + 1)
    to = partial_ptr + row * columns + column
    for k in tl.static_range(WIDTH):
        tl.store(to + (WIDTH - 1 - k) * columns, tl.sum(sums[k], axis=0), mask=ok)
    tl.store(to + WIDTH * columns, tl.sum(sums[4], axis=0), mask=ok)


@triton.jit(do_not_specialize=("parts",))
def sums_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, parts, columns,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of weight [columns, WIDTH] and bias from what `_store_sums` wrote, a row each."""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    stride = columns.to(tl.int64) * (WIDTH + 1)
    total = sum_parts(partial_ptr + row * columns, stride, parts, column, mask, DEPTH)
    if row < WIDTH:
        to = dweight_ptr + column * WIDTH + row
        tl.store(to, total.to(dweight_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(dbias_ptr + column, total.to(dbias_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("tokens", "sequences", "steps"))
def where_kernel(cu_ptr, where_ptr, tokens, sequences, steps, BLOCK: tl.constexpr):
    """Fills `where` by bisection of the bounds `cu`: `steps` halvings for so many sequences."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)  # cu[low] <= token < cu[high]
    high = tl.zeros([BLOCK], tl.int32) + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(cu_ptr + middle).to(tl.int32) <= token
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    mask = token < tokens
    tl.store(where_ptr + token, token - tl.load(cu_ptr + low).to(tl.int32), mask=mask)
    tl.store(where_ptr + tokens + token, low, mask=mask)


@triton.jit
def _sequence(cu_ptr, tokens, columns, sequences, PACKED: tl.constexpr, ROWS: tl.constexpr,
              SPAN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(columns, their mask, sequence, whether there is one, its batch, first token, length)."""
    blocks = tl.cdiv(columns, SPAN)
    lane = tl.arange(0, BLOCK)[None, :]
    column = tl.program_id(0) % blocks * SPAN + lane
    sequence = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    inside = sequence < sequences
    batch, start, size = sequence, tl.zeros_like(sequence), tl.zeros_like(sequence) + tokens
    if PACKED:
        batch = tl.zeros_like(sequence)
        start = tl.load(cu_ptr + sequence, mask=inside, other=0).to(tl.int32)
        size = tl.load(cu_ptr + sequence + 1, mask=inside, other=0).to(tl.int32) - start
    ok = (lane < SPAN) & (column < columns)
    sequence, batch = sequence.to(tl.int64), batch.to(tl.int64)
    return column, ok, sequence, inside, batch, start.to(tl.int64), size


@triton.jit(do_not_specialize=("sequences", "tokens"))
def final_state_kernel(
    x_ptr, state_ptr, cu_ptr, final_ptr, x_batch, x_token, state_slot, state_time, state_channel,
    sequences, tokens, columns, WIDTH: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last WIDTH - 1 inputs of each sequence, counting those of its initial state."""
    column, ok, sequence, inside, batch, start, size = _sequence(
        cu_ptr, tokens, columns, sequences, PACKED, ROWS, SPAN, BLOCK
    )
    mask = ok & inside
    end_row = x_ptr + batch * x_batch + (start + size) * x_token + column
    state_row = state_ptr + sequence * state_slot + column * state_channel
    for j in tl.static_range(WIDTH - 1):
        x = _back(WIDTH - 1 - j, end_row, x_token, state_row, state_time, size, mask, WIDTH, STATE)
        to = final_ptr + (sequence * (WIDTH - 1) + j) * columns + column
        tl.store(to, x.to(final_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("sequences", "tokens"))
def state_backward_kernel(
    grad_ptr, dfinal_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, cu_ptr, dx_ptr, dstate_ptr,
    grad_batch, grad_token, x_batch, x_token, state_slot, state_time, state_channel, sequences,
    tokens, columns, WIDTH: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr,
    FINAL: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the backward kernel leaves out: the gradients of the initial and from the final state.

    The first adds up what the first WIDTH - 1 tokens pass on to inputs before them; the second goes
    to the last inputs, on top of what `dx` holds, or for short sequences to the initial state.
    """
    column, ok, sequence, inside, batch, start, size = _sequence(
        cu_ptr, tokens, columns, sequences, PACKED, ROWS, SPAN, BLOCK
    )
    state_at = sequence * (WIDTH - 1) * columns + column
    if FINAL:
        dx_row = dx_ptr + (batch * tokens + start + size - (WIDTH - 1)) * columns + column
        for j in tl.static_range(WIDTH - 1):
            mask = ok & inside & (size >= WIDTH - 1 - j)
            more = tl.load(dfinal_ptr + state_at + j * columns, mask=mask, other=0.0)
            dx = tl.load(dx_row + j * columns, mask=mask, other=0.0).to(tl.float32)
            dx += more.to(tl.float32)
            tl.store(dx_row + j * columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if STATE:
        taps = _taps(weight_ptr, bias_ptr, column, ok, WIDTH, BIAS)
        x_row = x_ptr + batch * x_batch + start * x_token + column
        grad_row = grad_ptr + batch * grad_batch + start * grad_token + column
        state_row = state_ptr + sequence * state_slot + column * state_channel
        h = _history(x_row, x_token, state_row, state_time, size * 0, ok & inside, WIDTH, STATE)
        grads = ()
        for j in tl.static_range(WIDTH - 1):
            mask = ok & inside & (j < size)
            x = tl.load(x_row + j * x_token, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_row + j * grad_token, mask=mask, other=0.0).to(tl.float32)
            conv = _convolve(x, h[0], h[1], h[2], taps, WIDTH)
            grad = _activate_backward(conv, grad, SILU, NORM)
            grads = grads + (tl.where(j < size, grad, 0.0),)
            h = (x, h[0], h[1])
        for slot in tl.static_range(WIDTH - 1):
            dstate = tl.zeros([ROWS, BLOCK], tl.float32)
            for j in tl.static_range(slot + 1):
                dstate += taps[WIDTH - 1 - slot + j] * grads[j]
            if FINAL:
                at = dfinal_ptr + state_at + (slot - size) * columns
                dstate += tl.load(at, mask=ok & inside & (size <= slot), other=0.0).to(tl.float32)
            to = dstate_ptr + state_at + slot * columns
            tl.store(to, dstate.to(dstate_ptr.dtype.element_ty), mask=ok & inside)


@triton.jit(do_not_specialize=("batches", "q_len"))
def step_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, slots_ptr, out_ptr, x_batch, x_token, state_slot,
    state_time, state_channel, batches, q_len, columns,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, SLOTS: tl.constexpr, SILU: tl.constexpr,
    NORM: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """A few more tokens of each sequence: reads the state, walks q_len tokens, writes the state.

    The first AHEAD tokens are read with the state, and later ones while AHEAD before are computed.
    """
    column, ok, batch, inside, _, _, _ = _sequence(
        slots_ptr, q_len, columns, batches, False, ROWS, SPAN, BLOCK
    )
    slot = batch
    if SLOTS:
        slot = tl.load(slots_ptr + batch, mask=inside, other=-1).to(tl.int64)
    live = ok & inside & (slot >= 0)
    x_row = x_ptr + batch * x_batch + column
    xs = _read(x_row, x_token, 0, q_len, live, AHEAD)
    out_row = out_ptr + batch * q_len * columns + column
    state_row = state_ptr + slot * state_slot + column * state_channel
    h = _history(x_row, x_token, state_row, state_time, slot * 0, live, WIDTH, True)
    taps = _taps(weight_ptr, bias_ptr, column, ok, WIDTH, BIAS)
    for token in range(0, q_len, AHEAD):
        x_row += AHEAD * x_token
        following = _read(x_row, x_token, token + AHEAD, q_len, live, AHEAD)
        for j in tl.static_range(AHEAD):
            if token + j < q_len:
                x = xs[j].to(tl.float32)
                out = _activate(_convolve(x, h[0], h[1], h[2], taps, WIDTH), SILU, NORM)
                out = tl.where(slot >= 0, out, 0.0)
                tl.store(out_row, out.to(out_ptr.dtype.element_ty), mask=ok & inside)
                h = (x, h[0], h[1])
                out_row += columns
        xs = following
    for k in tl.static_range(WIDTH - 1):
        to = state_row + (WIDTH - 2 - k) * state_time
        tl.store(to, h[k].to(state_ptr.dtype.element_ty), mask=live)
