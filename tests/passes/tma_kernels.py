"""Loops of one dot whose operands a TMA copy can or cannot fetch; BM = BN = BK = 64."""

import minitriton.language as tl

B = tl.constexpr(64)


def tutorial(a, b, c, M, N, K, sa, sb, MASKED: tl.constexpr, SUMMED: tl.constexpr):
    """Offsets that wrap round; MASKED: what they compute is not stored; SUMMED: it is added up."""
    rm = tl.program_id(0) * B + tl.arange(0, B)
    rn = tl.program_id(1) * B + tl.arange(0, B)
    rk = tl.arange(0, B)
    pa = a + ((rm % M)[:, None] * sa + rk[None, :])
    pb = b + (rk[:, None] * sb + (rn % N)[None, :])
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, tl.cdiv(K, B)):
        x = tl.load(pa, mask=rk[None, :] < K - k * B, other=0.0)
        y = tl.load(pb, mask=rk[:, None] < K - k * B, other=0.0)
        acc = tl.dot(x, y, acc)
        pa += B
        pb += B * sb
    if SUMMED:
        acc += tl.sum(acc, 0)[None, :]
    mask = (
        (rm[:, None] < M) & (rn[None, :] < N) if MASKED else (rn[None, :] < N) & (rm[:, None] >= 0)
    )
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=mask)


def batched(a, b, c, M, N, K, sa, sb, za, zb):
    """A third dimension, addresses made anew in every iteration, an unmasked K."""
    z = tl.program_id(2)
    rm = tl.program_id(0) * B + tl.arange(0, B)
    rn = tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        rk = k + tl.arange(0, B)
        x = tl.load(a + z * za + rm[:, None] * sa + rk[None, :], mask=rm[:, None] < M, other=0.0)
        y = tl.load(b + z * zb + rk[:, None] * sb + rn[None, :], mask=rn[None, :] < N, other=0.0)
        acc = tl.dot(x, y, acc)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(c + z * M * N + rm[:, None] * N + rn[None, :], acc, mask=inside)


def shifted(a, b, c, M, N, K, sa, sb, SHIFT: tl.constexpr, GUARDED: tl.constexpr):
    """Rows that start before the matrix; GUARDED: the mask says that these are zeros."""
    rm = tl.program_id(0) * B + tl.arange(0, B) - SHIFT
    rn, rk = tl.arange(0, B), tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, tl.cdiv(K, B)):
        inside = (rm[:, None] < M) & (rk[None, :] + k * B < K)
        if GUARDED:
            inside = inside & (rm[:, None] >= 0)
        x = tl.load(a + rm[:, None] * sa + rk[None, :] + k * B, mask=inside, other=0.0)
        inside = (rk[:, None] + k * B < K) & (rn[None, :] < N)
        y = tl.load(b + (rk[:, None] + k * B) * sb + rn[None, :], mask=inside, other=0.0)
        acc = tl.dot(x, y, acc)
    stored = (rm[:, None] < M) & (rm[:, None] >= 0) & (rn[None, :] < N)
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=stored)


def counting_down(a, b, c, M, N, K, sa, sb, MASKED: tl.constexpr):
    """The first program takes the last rows."""
    rm = (tl.num_programs(0) - 1 - tl.program_id(0)) * B + tl.arange(0, B)
    rn, rk = tl.arange(0, B), tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        at = a + rm[:, None] * sa + (k + rk)[None, :]
        x = tl.load(at, mask=rm[:, None] < M, other=0.0) if MASKED else tl.load(at)
        acc = tl.dot(x, tl.load(b + (k + rk)[:, None] * sb + rn[None, :]), acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=rm[:, None] < M)


def loop_down(a, b, c, counts, sa):
    """The last of so many pairs of matrices first; those of A are `sa` elements apart."""
    rm, rn, rk = tl.arange(0, B), tl.arange(0, B), tl.arange(0, B)
    count = tl.load(counts)
    acc = tl.zeros((B, B), tl.float32)
    for i in range(0, count):
        pair = count - 1 - i
        x = tl.load(a + pair * sa + rm[:, None] * B + rk[None, :])
        y = tl.load(b + pair * (B * B) + rk[:, None] * B + rn[None, :])
        acc = tl.dot(x, y, acc * 0.5)
    tl.store(c + rm[:, None] * B + rn[None, :], acc)


def slices(a, b, c, M, N, K, sa, sb, slice):
    """Every program along axis 2 takes `slice` (a multiple of B) of K."""
    rm = tl.program_id(0) * B + tl.arange(0, B)
    rn = tl.program_id(1) * B + tl.arange(0, B)
    rk = tl.arange(0, B)
    first = tl.program_id(2) * slice
    pa = a + first + rm[:, None] * sa + rk[None, :]
    pb = b + first * sb + rk[:, None] * sb + rn[None, :]
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, tl.cdiv(min(K - first, slice), B)):
        left = K - first - k * B
        x = tl.load(pa, mask=(rm[:, None] < M) & (rk[None, :] < left), other=0.0)
        y = tl.load(pb, mask=(rk[:, None] < left) & (rn[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc)
        pa += B
        pb += B * sb
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(c + tl.program_id(2) * M * N + rm[:, None] * N + rn[None, :], acc, mask=inside)


def odd_masks(a, b, c, lengths, M, N, K, sa, sb, KIND: tl.constexpr, PROMISE: tl.constexpr):
    """A mask or address of A that no tensor map has, unless a promise helps."""
    rm, rn, rk = tl.arange(0, B), tl.arange(0, B), tl.arange(0, B)
    rows = tl.load(lengths)
    if PROMISE == "rows >= 0":
        tl.assume(rows >= 0)
    elif PROMISE == "0 <= rows":
        tl.assume(0 <= rows)  # noqa: SIM300
    elif PROMISE == "rows > -1":
        tl.assume(rows > -1)
    elif PROMISE == "rows > -2":
        tl.assume(rows > -2)
    elif PROMISE == "rows < 9":
        tl.assume(rows < 9)
    elif PROMISE == "sometimes":  # noqa: SIM102
        if M > 5:
            tl.assume(rows >= 0)
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, tl.cdiv(K, B)):
        mask = (rk[None, :] + k * B < K) & (rm[:, None] < M)
        at = a + rm[:, None] * sa + rk[None, :] + k * B
        if KIND == 0:
            mask = mask & (rm[:, None] < rows)
        elif KIND == 1:
            mask = mask & ((rm[:, None] < 3) | (rk[None, :] < 5))
        elif KIND == 2:
            at = a + tl.where(rm % 7 == 0, rm, 63 - rm)[:, None] * sa + rk[None, :] + k * B
        elif KIND == 3:
            at = a + rows * sa + rm[:, None] * sa + rk[None, :] + k * B
            mask = (rk[None, :] + k * B < K) & (rm[:, None] < M - 4)
        elif KIND == 4:
            at = a + rm[:, None] * sa + rk[None, :] + k * B + rows
            mask = (rk[None, :] + k * B + rows < K) & (rm[:, None] < M)
        x = tl.load(at, mask=mask, other=0.0)
        inside = (rk[:, None] + k * B < K) & (rn[None, :] < N)
        y = tl.load(b + (rk[:, None] + k * B) * sb + rn[None, :], mask=inside, other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


def groups(a, b, c, firsts, counts, N, K, sa, sb, zb, KIND: tl.constexpr, SEEN: tl.constexpr):
    """Program i multiplies the rows firsts[i], ..., of which counts[i] are stored, with matrix i
    from the back of b; all numbers are loaded. KIND: what happens to the other rows."""
    i = tl.program_id(0)
    first, rows = tl.load(firsts + i).to(tl.int64), tl.load(counts + i)
    rm, rn, rk = tl.arange(0, B), tl.arange(0, B), tl.arange(0, B)
    group = tl.load(firsts + i + tl.num_programs(0))
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, tl.cdiv(K, B)):
        inside = rk[None, :] < K - k * B
        if KIND == "wrapped":
            at = a + first * sa + (rm % rows)[:, None] * sa
        else:
            at = a + first * sa + rm[:, None] * sa
            inside = inside & (rm[:, None] < rows)
            if KIND == "both ends":
                inside = inside & (rm[:, None] >= rows - 9)
            elif KIND == "endless":
                inside = rm[:, None] < rows
        if KIND == "two strides":
            at += tl.load(counts + i) * zb - rows * zb + tl.load(firsts) * zb
        x = tl.load(at + rk[None, :] + k * B, mask=inside, other=0.0)
        y = tl.load(
            b + group * zb + (rk[:, None] + k * B) * sb + (rn % N)[None, :],
            mask=rk[:, None] < K - k * B, other=0.0,
        )  # fmt: skip
        acc = tl.dot(x, y, acc)
    if SEEN:
        acc += tl.sum(acc, 0)[None, :]
    to = c + i * B * N + rm[:, None] * N + rn[None, :]
    tl.store(to, acc, mask=(rm[:, None] < rows) & (rn[None, :] < N))


def offsets(out, i, j, n, FORM: tl.constexpr):
    """Index tiles of many forms, for the comparison of affine forms with what is computed."""
    r, c = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    at = r * 16 + c
    if FORM == 0:
        value = (r + i) * j - c * 3 + 7
    elif FORM == 1:
        value = tl.trans(tl.arange(4, 20)[:, None] * (i * j) + tl.arange(0, 8)[None, :]) + n
    elif FORM == 2:
        value = (r.to(tl.int64) * n + (c - i) * (j - 2)).to(tl.int64) + (i + j) * n
    elif FORM == 3:
        value = r * 0 + c
        for step in range(2, 2 + 3 * n, 3):
            tl.store(out + at, value + r * step)
            value += i * 6
        value = r + c + i
    elif FORM == 4:
        value = (r + (c - r) * 1) - (tl.program_id(0) - 5) * j
    else:
        value = tl.where(c + i < n + i, c + i, 5)
    tl.store(out + at, value)


def last_first(out, n):
    """Programs that count backwards: from the last, from before that, and with an argument."""
    left = tl.num_programs(0) - 1 - tl.program_id(0)
    tl.store(out + left * 4 + tl.arange(0, 4), left)
    tl.store(out + (left - 1) * 4 + tl.arange(0, 4), left)
    tl.store(out + (left + n) * 4 + tl.arange(0, 4), left)


def descending(out, n, m):
    """Loops that count backwards: from the last, from before that, an argument apart, and two."""
    for i in range(0, n):
        tl.store(out + (n - 1 - i) * 4 + tl.arange(0, 4), i)
        tl.store(out + (n - 2 - i) * 4 + tl.arange(0, 4), i)
        tl.store(out + (n - 1 - i) * m + tl.arange(0, 4), i)
        for j in range(0, n - i):
            tl.store(out + (n - 1 - i - j) * 4 + tl.arange(0, 4), j)
            tl.store(out + (n - 1 - j - 2 * i) * 4 + tl.arange(0, 4), j)


def filled(a, b, c, M, N, K, sa, sb, FILL: tl.constexpr):
    """Rows of A past the end are `FILL`, and what comes of them is stored."""
    rm, rn, rk = tl.arange(0, B), tl.arange(0, B), tl.arange(0, B)
    element: tl.constexpr = a.dtype.element_ty
    if FILL == "another NaN":
        other = tl.full((B, B), 0x7E01, tl.int16).to(tl.float16, bitcast=True)
    elif FILL == "-NaN":
        other = tl.full((B, B), -0x200, tl.int16).to(tl.float16, bitcast=True)
    else:
        other = tl.full((B, B), FILL, element)
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        x = tl.load(a + rm[:, None] * sa + (k + rk)[None, :], mask=rm[:, None] < M, other=other)
        y = tl.load(b + (k + rk)[:, None] + rn[None, :] * sb, mask=rn[None, :] < N, other=0)
        acc = tl.dot(x, y, acc.to(tl.float32))
    tl.store(c + rm[:, None] * B + rn[None, :], acc)
