"""Dots whose epilogues TMA can or cannot store; BM, BN are powers of two, K is one block of 64."""

import minitriton.language as tl

K = tl.constexpr(64)


def plain(
    a, b, c, M, N, sc, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """C = A B; KIND says how C is addressed and masked."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, K)
    x = tl.load(a + rm[:, None] * K + rk[None, :], mask=rm[:, None] < M, other=0.0)
    y = tl.load(b + rk[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0.0)
    acc = tl.dot(x, y).to(c.dtype.element_ty)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    at = c + rm[:, None] * sc + rn[None, :]
    if KIND == "rows":  # no mask along columns
        inside = rm[:, None] < M
    elif KIND == "columns first":
        at = c + rm[:, None] + rn[None, :] * sc
    elif KIND == "wrapped":  # the mask keeps what is not wrapped
        at = c + (rm % M)[:, None] * sc + rn[None, :]
    elif KIND == "wrapped, seen":
        at = c + (rm % M)[:, None] * sc + rn[None, :]
        inside = (rm[:, None] < 2 * M) & (rn[None, :] < N)
    elif KIND == "triangle":
        inside = rm[:, None] >= rn[None, :]
    elif KIND == "gathered":
        at = c + (rm ^ 1)[:, None] * sc + rn[None, :]
    elif KIND == "shifted":  # it may start before the matrix
        at = c + (rm - 16)[:, None] * sc + rn[None, :]
        inside = (rm[:, None] < M) & (rm[:, None] >= 16) & (rn[None, :] < N)
    elif KIND == "strided":
        at = c + rm[:, None] * sc + rn[None, :] * 2
    tl.store(at, acc, mask=inside)


def cached(a, b, c, N):
    r, rn = tl.arange(0, 64), tl.arange(0, 64)
    at = r[:, None] * 64 + rn[None, :]
    acc = tl.dot(tl.load(a + at), tl.load(b + at)).to(tl.float16)
    tl.store(c + at, acc, cache_modifier=".cs")


def others(a, b, c, d, n, KIND: tl.constexpr):
    """What else happens to memory around a store of C."""
    r, rn = tl.arange(0, 64), tl.arange(0, 64)
    at = r[:, None] * 64 + rn[None, :]
    acc = tl.dot(tl.load(a + at), tl.load(b + at)).to(tl.float16)
    if KIND == "read before":
        acc += tl.load(c + at)
    elif KIND == "stored before":
        tl.store(c + rn, rn.to(tl.float16))
    elif KIND == "other stored":
        tl.store(d + rn, rn)
    elif KIND == "atomic before":
        tl.atomic_add(d, 1)
    if KIND == "branches":
        if n > 0:
            tl.store(c + at, acc)
        else:
            tl.store(c + rn, rn.to(tl.float16))
    else:
        tl.store(c + at, acc)
    if KIND == "read after":
        tl.store(d + rn, tl.load(c + rn).to(tl.int32))
    elif KIND == "argument read after":
        tl.store(d + rn, tl.load(a + rn).to(tl.int32))
    elif KIND == "other stored after":
        tl.store(d + rn, rn)
    elif KIND == "twice":
        tl.store(c + 64 * 64 + at, acc * 2)
    elif KIND == "atomic after":
        tl.atomic_add(d, 1)


def looped(
    a, b, c, n, PROMISED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TWO: tl.constexpr,
    LAST: tl.constexpr = False,
):  # fmt: skip
    """Tiles in a loop; TWO: each is stored twice, to C and further on; LAST: and a sum after it."""
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, K)
    total = tl.zeros((BM, BN), tl.float32)
    for tile in tl.range(0, n, num_stages=3 if PROMISED else None):
        x = tl.load(a + (tile * BM + rm)[:, None] * K + rk[None, :])
        y = tl.load(b + rk[:, None] * BN + rn[None, :])
        acc = tl.dot(x, y)
        at = (tile * BM + rm)[:, None] * BN + rn[None, :]
        tl.store(c + at, acc.to(tl.float16))
        if TWO:
            tl.store(c + n * BM * BN + at, (acc * 2).to(tl.float16))
        total += acc
    if LAST:
        at = (n * BM + rm)[:, None] * BN + rn[None, :]
        tl.store(c + at, total.to(tl.float16))


def in_halves(
    a, b, c, n, N, first, BM: tl.constexpr, BN: tl.constexpr, OVER: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles in a loop, each stored half by half; OVER: so many columns of these overlap."""
    rm, rn, rk, half = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, K), tl.arange(0, BN // 2)
    out = tl.make_tensor_descriptor(c, [n * BM, N], [N, 1], [BM, BN // 2])
    for tile in tl.range(0, n, flatten=True):
        x = tl.load(a + (tile * BM + rm)[:, None] * K + rk[None, :])
        acc = tl.dot(x, tl.load(b + rk[:, None] * BN + rn[None, :])).to(tl.float16)
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        if MASKED:
            out.store([tile * BM, first], left)
            out.store([tile * BM, first + (BN // 2 - OVER)], right)
        else:
            at = c + (tile * BM + rm)[:, None] * N + half[None, :]
            tl.store(at, left)
            tl.store(at + (BN // 2 - OVER), right)


def pipelined(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One tile of C = A B, by a loop over K."""
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * K + k + rk[None, :])
        y = tl.load(b + (k + rk)[:, None] * BN + rn[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + rm[:, None] * BN + rn[None, :], acc.to(tl.float16))
