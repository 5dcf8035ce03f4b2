"""Triton functions that the tests of this folder compile (never called from Python)."""

import minitriton.language as tl


def matmul(a, b, c, M, N, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    pa = a + rm[:, None] * sa + rk[None, :]
    pb = b + rk[:, None] * sb + rn[None, :]
    wide: tl.constexpr = tl.float64 if a.dtype.element_ty == tl.float64 else tl.float32
    acc = tl.zeros((BM, BN), dtype=wide)
    for k in range(0, tl.cdiv(K, BK)):
        left = K - k * BK
        x = tl.load(pa, mask=(rk[None, :] < left) & (rm[:, None] < M), other=0.0)
        y = tl.load(pb, mask=(rk[:, None] < left) & (rn[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc)
        pa += BK
        pb += BK * sb
    out = c + rm[:, None] * sc + rn[None, :]
    tl.store(out, acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


def softmax(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * n + at, mask=at < n, other=float("-inf"))
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(y + row * n + at, value / tl.sum(value, axis=0), mask=at < n)


def attention(q, k, v, o, n, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    rm, rn, rd = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    query = tl.load(q + rm[:, None] * D + rd[None, :])
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, n, BN):
        keys = tl.load(k + (start + rn)[:, None] * D + rd[None, :])
        score = tl.dot(query, tl.trans(keys))
        score = tl.where((start + rn)[None, :] < n, score, float("-inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - peak[:, None])
        scale = tl.exp2(top - peak)
        total = total * scale + tl.sum(p, 1)
        values = tl.load(v + (start + rn)[:, None] * D + rd[None, :])
        acc = tl.dot(p.to(tl.float16), values, acc * scale[:, None])
        top = peak
    tl.store(o + rm[:, None] * D + rd[None, :], acc / total[:, None])


def attention_gradient(
    q, k, v, do, row, dk, dv, n, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    BRANCH: tl.constexpr = False,
):  # fmt: skip
    """Both products of two loaded tiles first, then those of what is computed from them; BRANCH:
    one of those comes out of an if."""
    rm, rn, rd = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    keys = tl.load(k + rn[:, None] * D + rd[None, :])
    values = tl.load(v + rn[:, None] * D + rd[None, :])
    sum_k, sum_v = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for start in range(0, n, BM):
        query = tl.load(q + (start + rm)[:, None] * D + rd[None, :])
        grad = tl.load(do + (start + rm)[:, None] * D + rd[None, :])
        score = tl.dot(keys, tl.trans(query))
        slope = tl.dot(values, tl.trans(grad))
        p = tl.exp2(score - tl.load(row + start + rm)[None, :])
        if BRANCH and start + BM > n:
            p = tl.where((start + rm < n)[None, :], p, 0.0)
        sum_v = tl.dot(p.to(tl.float16), grad, sum_v)
        sum_k = tl.dot((p * slope).to(tl.float16), query, sum_k)
    tl.store(dk + rn[:, None] * D + rd[None, :], sum_k)
    tl.store(dv + rn[:, None] * D + rd[None, :], sum_v)


def masked_in_a_branch(x, y, out, n, B: tl.constexpr):
    """Two products; what lies between goes through an if."""
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    left, right = tl.load(x + at), tl.load(y + at)
    score = tl.dot(left, right)
    if n < B:
        score = tl.where(tl.arange(0, B)[None, :] < n, score, 0.0)
    tl.store(out + at, tl.dot(score.to(tl.float16), right))


def product_of_the_last_iteration(
    x, y, out, n, FORM: tl.constexpr, B: tl.constexpr, K: tl.constexpr
):
    """A comes from the iteration before, from this one without a product, or from a product."""
    i, k = tl.arange(0, B), tl.arange(0, K)
    acc, left = tl.zeros((B, K), tl.float32), tl.zeros((B, B), tl.float16)
    for start in range(0, n, B):
        tile = tl.load(y + (start + i)[:, None] * K + k[None, :])
        if FORM == 0:
            acc = tl.dot(left, tile, acc) * 0.5
            left = tl.dot(tile, tl.trans(tile)).to(tl.float16)
        elif FORM == 1:
            factor = tl.load(x + i[:, None] * B + i[None, :]) * 2
            acc = tl.dot(factor.to(tl.float16), tile, acc)
        else:
            acc = tl.dot(tl.dot(tile, tl.trans(tile)).to(tl.float16), tile, acc)
    tl.store(out + i[:, None] * K + k[None, :], acc)


def add(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(z + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


def transpose(x, y, N: tl.constexpr):
    r = tl.arange(0, N)
    tile = tl.load(x + r[:, None] * N + r[None, :])
    tl.store(y + r[:, None] * N + r[None, :], tl.trans(tile))


def moments(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    total = tl.sum(value, axis=0)
    squares = tl.sum(value * value, axis=0)
    tl.store(y, total)
    tl.store(y + 1, squares)


def branches(x, y, n, N: tl.constexpr):
    r = tl.arange(0, N)
    tile = tl.load(x + r[:, None] * N + r[None, :])
    rows = tl.sum(tile, 1)
    if n > 3:
        tile = tile - rows[:, None]
    else:
        tile = tl.trans(tile)
    i = 0
    while i < n:
        tile = tile * 0.5 + 1.0
        i += 1
    for j in range(n):
        tile += tl.load(x + r[:, None] + r[None, :] * N)
        tl.store(y + j * N * N + r[:, None] * N + r[None, :], tile)


def in_place(a, n, B: tl.constexpr):
    r = tl.arange(0, B)
    at = a + r[:, None] * B + r[None, :]
    acc = tl.zeros((B, B), tl.float32)
    for _ in range(n):
        tile = tl.load(at)
        acc = tl.dot(tile, tile, acc)
        tl.store(at, acc.to(tl.float16))


def stores_each_step(a, c, n, B: tl.constexpr, INTO_C: tl.constexpr):
    r = tl.arange(0, B)
    at = r[:, None] * B + r[None, :]
    for i in tl.range(n, num_stages=2):
        tile = tl.load(a + i * (B * B) + at)
        to = c if INTO_C else a
        tl.store(to + i * (B * B) + at, tl.dot(tile, tile).to(tl.float16))


def indirect(table, a, b, c, n, B: tl.constexpr):
    r = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for i in range(n):
        page = tl.load(table + i)
        x = tl.load(a + page * B * B + r[:, None] * B + r[None, :])
        y = tl.load(b + i * B * B + r[:, None] * B + r[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + r[:, None] * B + r[None, :], acc)


def gathered(table, a, b, c, n, B: tl.constexpr):
    r = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for i in range(n):
        page = tl.load(table + i + 0 * r)
        x = tl.load(a + page[:, None] * B * B + r[:, None] * B + r[None, :])
        y = tl.load(b + i * B * B + r[:, None] * B + r[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + r[:, None] * B + r[None, :], acc)


def fixed_operand(table, a, b, c, n, B: tl.constexpr):
    r = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for i in range(n):
        x = tl.load(a + r[:, None] * B + r[None, :])
        y = tl.load(b + i * B * B + r[:, None] * B + r[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + r[:, None] * B + r[None, :], acc)


def table_of_pages_written(table, a, b, c, n, B: tl.constexpr):
    r = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for i in tl.range(n, num_stages=3):
        page = tl.load(table + i)
        x = tl.load(a + page * B * B + r[:, None] * B + r[None, :])
        y = tl.load(b + i * B * B + r[:, None] * B + r[None, :])
        acc = tl.dot(x, y, acc)
        tl.store(table + i + 1, (page + 1) % 3)
    tl.store(c + r[:, None] * B + r[None, :], acc)


def scaled_bytes(a, b, c, n, B: tl.constexpr):
    r = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for i in range(n):
        x = tl.load(a + i * B * B + r[:, None] * B + r[None, :])
        y = tl.load(b + i * B * B + r[:, None] * B + r[None, :])
        acc = tl.dot((x.to(tl.float32) * 0.5).to(tl.float16), y, acc)
    tl.store(c + r[:, None] * B + r[None, :], acc)


def scores_in_two_parts(q, k, o, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    rm, rn, rd = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    at_q, at_k = q + rm[:, None] * 2 * D + rd[None, :], k + rn[None, :] * 2 * D + rd[:, None]
    score = tl.dot(tl.load(at_q), tl.load(at_k))
    score = tl.dot(tl.load(at_q + D), tl.load(at_k + D), score)
    tl.store(o + rm, tl.max(score, 1))


def matmul_with_a_call(a, b, c, K, offset, CALL: tl.constexpr, B: tl.constexpr):
    """What happens beside the products may end in a function call of the assembler's."""
    r, k = tl.arange(0, B), tl.arange(0, 32)
    first = offset % K.to(tl.int64) if CALL == 1 else offset % 48
    acc = tl.zeros((B, B), tl.float32)
    for start in range(0, K, 32):
        x = tl.load(a + r[:, None] * 1024 + (start + k)[None, :])
        row = (start + k).to(tl.int64) % K.to(tl.int64) if CALL == 5 else start + k
        acc = tl.dot(x, tl.load(b + row[:, None] * 1024 + r[None, :]), acc)
    if CALL == 2:
        acc = tl.sqrt_rn(acc)
    if CALL == 3:
        acc = (acc.to(tl.float64) / first.to(tl.float64)).to(tl.float32)
    if CALL == 4:
        acc = tl.sin(acc) / K
    tl.store(c + first + r[:, None] * B + r[None, :], acc)


def log_sum_exp(x, y, n, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Of each row of one program, block after block."""
    top, total = -1e30, 0.0
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=float("-inf"))
        higher = tl.maximum(top, tl.max(value, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher), axis=0)
        top = higher
    tl.store(y, top + tl.log(total))


def scaled_rows(x, scale, y, total, rows, n, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Stores each row times its scale, and the sum of all rows in the end."""
    at = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(0, rows, num_stages=STAGES):
        value = tl.load(x + row * n + at, mask=at < n, other=1.0)
        tl.store(y + row * n + at, tl.load(scale + row) * value, mask=at < n)
        acc += value
    tl.store(total + at, acc)


def rows_of_a_table(table, x, w, y, rows, BLOCK: tl.constexpr):
    """Sum of the rows of x that a table names, each times w."""
    at = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(0, rows, num_stages=3):
        acc += tl.load(x + tl.load(table + i) * BLOCK + at) * tl.load(w + at)
    tl.store(y + at, acc)


def block_sums(
    x, y, parts, columns, STAGES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Sum over the rows of a matrix with at most C columns."""
    at = tl.arange(0, C)
    acc = tl.zeros((R, C), tl.float32)
    for first in tl.range(0, parts, R, num_stages=STAGES):
        row = first + tl.arange(0, R)[:, None]
        inside = (row < parts) & (at[None, :] < columns)
        acc += tl.load(x + row * columns + at[None, :], mask=inside, other=0.0)
    tl.store(y + at, tl.sum(acc, 0))


def half_sums(
    x, y, out, n, CHAIN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Sums in fp16 of x [M, n] times y [n, N]; CHAIN: of each product times the first rows of y."""
    rm, rn, rk = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float16)
    for k in range(0, n, K):
        left = tl.load(x + rm[:, None] * n + (k + rk)[None, :])
        right = tl.load(y + (k + rk)[:, None] * N + rn[None, :])
        if CHAIN:
            left = tl.dot(left, right, out_dtype=tl.float16)
            right = tl.load(y + rn[:, None] * N + rn[None, :])
        acc = tl.dot(left, right, acc, out_dtype=tl.float16)
    tl.store(out + rm[:, None] * N + rn[None, :], acc)


def picked_rows(x, index, y, M: tl.constexpr, N: tl.constexpr):
    """Rows in an order that a table gives, transposed."""
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    places = tl.broadcast_to(tl.load(index + tl.arange(0, M))[:, None], (M, N))
    tl.store(y + tl.trans(at), tl.trans(tl.gather(tl.load(x + at), places, 0)))


def counted(x, y, n, N: tl.constexpr, BINS: tl.constexpr):
    """How often each number is in x, and twice that."""
    at = tl.arange(0, N)
    counts = tl.histogram(tl.load(x + at, mask=at < n, other=0), BINS, at < n)
    tl.store(y + tl.arange(0, BINS), counts)
    tl.store(y + BINS + tl.arange(0, BINS), counts * 2)


def reversed_rows(x, y, z, M: tl.constexpr, N: tl.constexpr):
    """Sums from the last row up, and the transpose with its rows reversed."""
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at)
    tl.store(y + at, tl.flip(tl.cumsum(tl.flip(value, 0), 0), 0))
    tl.store(z + at, tl.flip(tl.load(x + tl.trans(at)), 1))
