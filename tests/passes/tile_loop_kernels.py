"""Products whose programs take several tiles each, in a loop of their own (never called)."""

import minitriton.language as tl
from tests.passes.ring_kernels import multiply


def products(
    a, b, c, d, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """C = A @ B; d: numbers beside; KIND: what else there is."""
    rk, columns, programs = tl.arange(0, BK), tl.cdiv(N, BN), tl.num_programs(0)
    first, total, steps = tl.program_id(0), 0, tl.cdiv(K, BK)
    count, limit = tl.cdiv(M, BM) * columns, M
    if KIND == "an end from memory":
        count = tl.load(d)
    elif KIND == "a write outside":
        tl.store(d + 8 + first, first)
    elif KIND == "a wide variable":
        first = first.to(tl.int64)
    elif KIND == "a read outside":
        limit = tl.load(d + 8)
    mine = first - programs
    for tile in tl.range(first, count, programs, flatten=FLATTEN):
        rm, rn = tile // columns * BM + tl.arange(0, BM), tile % columns * BN + tl.arange(0, BN)
        if KIND == "a wide variable":  # 64-bit divisions are calls, which wgmma does not go with
            rm, rn = tile * BM + tl.arange(0, BM), tl.arange(0, BN)
        if KIND == "an end by tile":
            steps = tl.cdiv(K, BK) - tile % 2
        elif KIND == "a write before":
            tl.store(d + 8 + tile, tile)
        elif KIND == "a read before":
            limit = tl.load(d + 8)
        elif KIND == "a read of another array before":
            limit = tl.load(d)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(0, steps):
            k = step * BK + rk
            x = tl.load(
                a + rm[:, None] * sa + k[None, :], mask=(rm[:, None] < M) & (k[None, :] < K),
                other=0.0,
            )  # fmt: skip
            y = tl.load(
                b + k[:, None] * sb + rn[None, :], mask=(k[:, None] < K) & (rn[None, :] < N),
                other=0.0,
            )  # fmt: skip
            acc = tl.dot(x, y, acc)
        mine += programs
        if KIND == "a counter":
            rm, rn = mine // columns * BM + tl.arange(0, BM), mine % columns * BN + tl.arange(0, BN)
        at = c + rm[:, None] * N + rn[None, :]
        inside = (rm[:, None] < M) & (rn[None, :] < N)
        if KIND == "a carried sum":
            total += steps
        elif KIND == "a read of what came before":
            at = c + tl.arange(0, BM)[:, None] * N + tl.arange(0, BN)[None, :]
            inside = (tl.arange(0, BM)[:, None] < M) & (tl.arange(0, BN)[None, :] < N)
            acc += tl.load(at, mask=inside, other=0.0) * 2
        elif KIND == "a sum in memory":
            tl.atomic_add(d + 8, tile)
        elif KIND == "a lock":
            while tl.atomic_cas(d + 9, 0, 0) == 9:
                pass
        if KIND == "a read before" or KIND == "a read outside":
            tl.store(d + 8, limit + tile)
        if KIND == "a read of another array before":
            inside = inside & (rm[:, None] < limit)
        tl.store(at, acc, mask=inside)
    if KIND == "a carried sum":
        tl.store(d + 8 + first, total)


def nested(
    a, b, c, d, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Rows and columns of tiles in two loops."""
    for row in tl.range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0), flatten=FLATTEN):
        rm = row * BM + tl.arange(0, BM)
        for column in range(0, tl.cdiv(N, BN)):
            rn = column * BN + tl.arange(0, BN)
            multiply(a, b, c, rm, rn, M, N, K, sa, sb, BM, BN, BK)
