"""Kernels whose copies a producer warp can or cannot make (never called from Python)."""

import minitriton as triton
import minitriton.language as tl


@triton.jit
def multiply(
    a, b, c, rm, rn, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Rows rm and columns rn of C = A @ B."""
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(
            a + rm[:, None] * sa + (k + rk)[None, :],
            mask=(rm[:, None] < M) & ((k + rk)[None, :] < K), other=0.0,
        )  # fmt: skip
        y = tl.load(
            b + (k + rk)[:, None] * sb + rn[None, :],
            mask=((k + rk)[:, None] < K) & (rn[None, :] < N), other=0.0,
        )  # fmt: skip
        acc = tl.dot(x, y, acc)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=mask)


def product(
    a, b, c, ends, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """C = A @ B as in Triton's tutorial; KIND: what else there is."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    pa = a + ((rm % M)[:, None] * sa + rk[None, :])
    pb = b + (rk[:, None] * sb + (rn % N)[None, :])
    out = c + rm[:, None] * N + rn[None, :]
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    steps = tl.cdiv(K, BK)
    if KIND == "a write before":
        tl.store(out, tl.zeros((BM, BN), tl.float32), mask=inside)
    elif KIND == "a wait before":
        tl.extra.cuda.gdc_wait()
    elif KIND == "an end by program":
        steps = min(steps, tl.program_id(0) + 1)
    elif KIND == "an end that falls":
        steps = tl.num_programs(0) - tl.program_id(0)
    elif KIND == "an end from memory":
        steps = tl.load(ends + 1)
    elif KIND == "an end from a tile":
        steps = tl.max(tl.load(ends + tl.arange(0, 4)), 0)
    elif KIND == "an end from a while":
        steps = 0
        while steps * BK < K:
            steps += 1
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, steps):
        columns = rk[None, :] < K - k * BK
        if KIND == "a mask of no box":
            columns = columns & ((rm[:, None] < 3) | (rk[None, :] < 16))
        x = tl.load(pa, mask=columns, other=0.0)
        y = tl.load(pb, mask=rk[:, None] < K - k * BK, other=0.0)
        if KIND == "a scaled operand":
            x = x * 2
        acc = tl.dot(x, y, acc)
        if KIND == "an operand used twice":
            acc += tl.sum(x.to(tl.float32), 1)[:, None]
        pa += BK
        pb += BK * sb
    if KIND == "a lock":
        while tl.atomic_cas(ends, 0, 0) == 9:
            pass
    tl.store(out, acc, mask=inside)


def early_return(
    a, b, c, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Programs past the last row end at once."""
    if tl.program_id(0) * BM >= M:
        return
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    multiply(a, b, c, rm, rn, M, N, K, sa, sb, BM, BN, BK)


def tile_after_tile(
    a, b, c, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Each program takes several tiles of rows, in a loop of its own."""
    rn = tl.arange(0, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0)):
        rm = tile * BM + tl.arange(0, BM)
        multiply(a, b, c, rm, rn, M, N, K, sa, sb, BM, BN, BK)


def two_products(
    a, b, c, n, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr,
    TWICE: tl.constexpr = False,
):  # fmt: skip
    """A [BM, n] times two blocks of columns of B [n, BN + WIDE], in one loop. TWICE: the first is
    added twice, so that one dot goes on with the sum of another."""
    rm, rn, rw, rk = (
        tl.arange(0, BM), tl.arange(0, BN), BN + tl.arange(0, WIDE), tl.arange(0, BK),
    )  # fmt: skip
    width: tl.constexpr = BN + WIDE
    left, right = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, WIDE), tl.float32)
    for k in range(0, n, BK):
        x = tl.load(a + rm[:, None] * n + (k + rk)[None, :])
        y = tl.load(b + (k + rk)[:, None] * width + rn[None, :])
        if TWICE:
            left = tl.dot(x, y, left)
        left = tl.dot(x, y, left)
        right = tl.dot(x, tl.load(b + (k + rk)[:, None] * width + rw[None, :]), right)
    tl.store(c + rm[:, None] * width + rn[None, :], left)
    tl.store(c + rm[:, None] * width + rw[None, :], right)


def pages(a, b, c, table, n, B: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr):
    """C = sum of A's tiles times the tiles of B that a table names; KIND: what writes the table."""
    rm, rn = tl.arange(0, B), tl.arange(0, N)
    acc = tl.zeros((B, N), tl.float32)
    for step in tl.range(0, n, num_stages=3):
        page = tl.load(table + step)
        x = tl.load(a + (step * B + rm)[:, None] * B + rm[None, :])
        at = (page * B + rm)[:, None]
        y = tl.load(b + at * N + rn[None, :], mask=(at >= 0) & (at < B * n), other=0.0)
        acc = tl.dot(x, y, acc)
        if KIND == "another array":
            tl.store(c + B * N + step, page.to(tl.float32))
        elif KIND == "the table":
            tl.store(table + step + 1, page)
    tl.store(c + rm[:, None] * N + rn[None, :], acc)


def attention(
    q, k, v, o, T, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, INSIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Two loops over keys, before the diagonal and at it; INSIDE: q is loaded where it is used."""
    first = tl.program_id(0) * BM
    base = tl.program_id(1) * T * D
    rows, rd = first + tl.arange(0, BM), tl.arange(0, D)
    at = q + base + rows[:, None] * D + rd[None, :]
    query = tl.load(at, mask=rows[:, None] < T, other=0.0)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for part in tl.static_range(2):
        begin, end = (0, first) if part == 0 else (first, first + BM)
        if not CAUSAL:
            begin, end = (0, T // 2 // BN * BN) if part == 0 else (T // 2 // BN * BN, T)
        for start in tl.range(begin, end, BN):
            rn = start + tl.arange(0, BN)
            if INSIDE:
                query = tl.load(at, mask=rows[:, None] < T, other=0.0)
            keys = tl.load(
                k + base + rn[:, None] * D + rd[None, :], mask=rn[:, None] < T, other=0.0
            )
            score = tl.dot(query, tl.trans(keys))
            if part == 1:
                seen = rows[:, None] >= rn[None, :] if CAUSAL else rn[None, :] < T
                score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(peak, tl.max(score, 1))
            p = tl.exp2(score - higher[:, None])
            scale = tl.exp2(peak - higher)
            total = total * scale + tl.sum(p, 1)
            values = tl.load(
                v + base + rn[:, None] * D + rd[None, :], mask=rn[:, None] < T, other=0.0
            )
            acc = tl.dot(p.to(tl.float16), values, acc * scale[:, None])
            peak = higher
    tl.store(
        o + base + rows[:, None] * D + rd[None, :], acc / total[:, None], mask=rows[:, None] < T
    )


def gradient(
    q, k, do, row, other, out, n, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Products with a row of numbers between them; KIND: how the row is found and used."""
    rm, rn, rd = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    keys = tl.load(k + rn[:, None] * D + rd[None, :])
    total = tl.zeros((BN, D), tl.float32)
    width: tl.constexpr = D + (KIND == "odd widths")
    for start in range(0, n, BM):
        at = start + rm
        query = tl.load(q + at[:, None] * width + rd[None, :], mask=at[:, None] < n, other=0.0)
        grad = tl.load(do + at[:, None] * width + rd[None, :], mask=at[:, None] < n, other=0.0)
        score = tl.dot(keys, tl.trans(query))
        if KIND == "through a table":
            at = tl.load(other + at, mask=at < n, other=0)
        line = tl.load(row + at, mask=at < n, other=0.0)
        p = tl.exp2(score - line[None, :])
        if KIND == "two rows":
            p = p * tl.load(row + at + n, mask=at < n, other=0.0)[None, :]
        total = tl.dot(p.to(tl.float16), grad, total)
    tl.store(out + rn[:, None] * D + rd[None, :], total)


def held_operand(
    q, k, out, T, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """A tile of keys that all tiles of queries are multiplied by; KIND: what else there is."""
    rm, rn, rd = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    at = rn[:, None] * D + rd[None, :]
    if KIND == "masked":
        keys = tl.load(k + at, mask=rn[:, None] < T, other=0.0)
    elif KIND == "masked with ones":
        keys = tl.load(k + at, mask=rn[:, None] < T, other=1.0)
    elif KIND == "volatile":
        keys = tl.load(k + at, volatile=True)
    else:
        keys = tl.load(k + at)
    if KIND == "a write between":
        tl.store(k + at, tl.zeros((BN, D), tl.float16))
    acc = tl.zeros((BN, D), tl.float32)
    for part in range(0, 2 if KIND == "nested" else 1):
        for start in range(part * BM, T, 2 * BM if KIND == "nested" else BM):
            x = tl.load(q + (start + rm)[:, None] * D + rd[None, :])
            p = tl.dot(keys, tl.trans(x))
            acc = tl.dot(p.to(tl.float16), x, acc)
            if KIND == "a write inside":
                tl.store(out + at, acc)
    if KIND == "used elsewhere":
        acc += keys.to(tl.float32)
    if KIND == "two loops":
        for start in range(0, T, BM):
            x = tl.load(q + (start + rm)[:, None] * D + rd[None, :])
            acc = tl.dot(tl.dot(keys, tl.trans(x)).to(tl.float16), x, acc)
    tl.store(out + at, acc)


def carried(
    a, b, c, table, n, M, FIRST: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """C = the sum of A's tiles times tiles of B whose number is carried from step to step; KIND:
    where the first one comes from."""
    rm = tl.arange(0, B)
    pid = tl.program_id(0)
    page = pid % FIRST
    if KIND == "a branch":
        page = 0
        if pid < FIRST:
            page = 1
    elif KIND == "a table":
        page = tl.load(table + pid)
    acc = tl.zeros((B, B), tl.float32)
    for step in range(0, n):
        if KIND == "a table in the loop":
            page = tl.load(table + pid + step)
        x = tl.load(a + (step * B + rm)[:, None] * B + rm[None, :])
        at = (page * B + rm)[:, None]
        y = tl.load(b + at * B + rm[None, :], mask=(at >= 0) & (at < B * M), other=0.0)
        acc = tl.dot(x, y, acc)
        if KIND != "a table in the loop":
            page = (page * 3 + 1) % M
    tl.store(c + (pid * B + rm)[:, None] * B + rm[None, :], acc)


def recurrence(
    b, v, out, last, table, n, T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """S <- S + (v^T - S b^T) b, tile by tile, with S [V, K]; KIND: what else there is."""
    rt, rk, rv = tl.arange(0, T), tl.arange(0, K), tl.arange(0, V)
    state = tl.zeros((V, K), tl.float32)
    for step in tl.range(0, n, num_stages=2, warp_specialize=True):
        first = tl.load(table + step)
        tl.assume(first >= 0)
        x = tl.load(b + (step * T + rt)[:, None] * K + rk[None, :])
        y = tl.load(v + (first + rt)[:, None] * V + rv[None, :])
        if KIND == "used as it comes":
            y = tl.where(rt[:, None] < 7, y, -y)
        if KIND == "masked":
            state = tl.dot(tl.where(rt[None, :] < 7, tl.trans(y), 0.0), x, state)
        left = tl.trans(y).to(tl.float32) - tl.dot(state.to(b.dtype.element_ty), tl.trans(x))
        left = (left * 0.125).to(b.dtype.element_ty)
        state = tl.dot(left, x, state)
        if KIND == "stored":
            tl.store(out + (step * T + rt)[:, None] * V + rv[None, :], tl.trans(left))
        elif KIND == "the table":
            tl.store(table + step + n, first)
    tl.store(last + rv[:, None] * K + rk[None, :], state)
