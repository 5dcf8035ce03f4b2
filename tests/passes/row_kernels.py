"""Kernels whose rows three groups of warps can or cannot share (never called from Python)."""

import minitriton.language as tl


def product(
    a, b, c, d, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """C = A @ B; KIND: what else there is."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn, rk = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    if KIND == "promises":
        rm = tl.max_contiguous(tl.multiple_of(rm, BM), BM)
    if KIND == "one range":
        rm = rn
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(
            a + rm[:, None] * sa + (k + rk)[None, :],
            mask=(rm < M)[:, None] & (k + rk < K)[None, :], other=0.0,
        )  # fmt: skip
        y = tl.load(
            b + (k + rk)[:, None] * sb + rn[None, :],
            mask=(k + rk < K)[:, None] & (rn < N)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(x, y, acc)
    if KIND == "sums of columns":
        tl.atomic_add(d + rn, tl.sum(acc, 0))
    elif KIND == "a row":
        tl.store(d + rn, tl.load(d + rn) + 1)
    elif KIND == "a number":
        tl.store(d, K)
    elif KIND == "a ticket":
        tl.atomic_add(d, 1)
    elif KIND == "a barrier":
        tl.debug_barrier()
    elif KIND == "a message":
        tl.device_print("sums", acc)
    elif KIND == "flattened":
        acc = tl.reshape(tl.reshape(acc, (BM * BN,)) * 2, (BM, BN))
    elif KIND == "joined":
        acc = tl.sum(tl.join(acc, acc), 2) * 0.5
    elif KIND == "transposed":
        tl.store(d + rn[:, None] * M + rm[None, :], tl.trans(acc), mask=tl.trans(inside))
    elif KIND == "rows of sums":
        tl.store(d + rm, tl.sum(acc, 1), mask=rm < M)
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=inside)


def gram(a, c, n, B: tl.constexpr, BK: tl.constexpr):
    """A A^T, by one program: the rows are columns, too, from different ranges."""
    r, s, rk = tl.arange(0, B), tl.arange(0, B), tl.arange(0, BK)
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, n, BK):
        x = tl.load(a + r[:, None] * n + (k + rk)[None, :])
        y = tl.load(a + s[None, :] * n + (k + rk)[:, None])
        acc = tl.dot(x, y, acc)
    tl.store(c + r[:, None] * B + s[None, :], acc)


def without_products(a, c, B: tl.constexpr):
    """A row."""
    r = tl.arange(0, B)
    tl.store(c + r, tl.load(a + r) * 2)


def one_product(a, b, c, B: tl.constexpr, D: tl.constexpr):
    """A product without a loop."""
    r, s = tl.arange(0, B), tl.arange(0, D)
    x = tl.load(a + r[:, None] * D + s[None, :])
    y = tl.load(b + s[:, None] * D + s[None, :])
    tl.store(c + r[:, None] * D + s[None, :], tl.dot(x, y))


def by_hand(a, c, n, B: tl.constexpr, D: tl.constexpr, BK: tl.constexpr):
    """What is multiplied is computed, so that no copy brings it."""
    r, s, rk = tl.arange(0, B), tl.arange(0, D), tl.arange(0, BK)
    acc = tl.zeros((B, D), tl.float32)
    for k in range(0, n, BK):
        x = tl.load(a + r[:, None] * n + (k + rk)[None, :])
        y = ((rk[:, None] + s[None, :] + k) % 3).to(tl.float16)
        acc = tl.dot(x, y, acc)
    tl.store(c + r[:, None] * D + s[None, :], acc)
