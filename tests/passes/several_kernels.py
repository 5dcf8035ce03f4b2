"""Kernels whose values go through inline PTX and functions of scalars."""

# mypy: ignore-errors
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction


@DeviceFunction
def clipped(x, y):
    if x > y:
        return y, x
    return x, y


@DeviceFunction
def divided(x, y):
    return x // y


def product(a, b, c, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            KIND: tl.constexpr):  # fmt: skip
    """c = a @ b, with something done to the result, or to where it is."""
    first = tl.program_id(0)
    if KIND == "program by PTX":
        first = tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], tl.int32, True, 1)
    m, n, k = first * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    n += tl.program_id(1) * BN
    a_ptrs, b_ptrs = a + m[:, None] * sa + k[None, :], b + k[:, None] * sb + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, K, BK):
        x = tl.load(a_ptrs, mask=(m[:, None] < M) & (i + k[None, :] < K), other=0)
        y = tl.load(b_ptrs, mask=(i + k[:, None] < K) & (n[None, :] < N), other=0)
        acc = tl.dot(x, y, acc)
        a_ptrs += BK
        b_ptrs += BK * sb
    if KIND == "map":
        acc, _ = tl.map_elementwise(clipped, acc, 0.5)
    if KIND == "pure":
        acc = tl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [acc], tl.float32, True, 1)
    if KIND == "effects":
        acc = tl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [acc], tl.float32, False, 1)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=inside)


def repeated(x, out, n, PURE: tl.constexpr):
    """The same text twice in a loop, on values from before it, and once unused."""
    i = tl.arange(0, 32)
    v = tl.load(x + i)
    for j in range(n):
        a = tl.inline_asm_elementwise("neg.s32 $0, $1;", "=r,r", [v], tl.int32, PURE, 1)
        b = tl.inline_asm_elementwise("neg.s32 $0, $1;", "=r,r", [v], tl.int32, PURE, 1)
        tl.inline_asm_elementwise("not.b32 $0, $1;", "=r,r", [v], tl.int32, PURE, 1)
        tl.store(out + j * 32 + i, a + b)


def mapped(x, y, out, n, KIND: tl.constexpr):
    """A function of scalars in a loop, of values from before it; in two layouts."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    a, b = tl.load(x + row * 32 + column), tl.load(y + row + column * 16)
    for j in range(n):
        if KIND == "divides":
            low = tl.map_elementwise(divided, a, b)
        else:
            low, high = tl.map_elementwise(clipped, a, b)
            low += high * 2
        tl.store(out + j * 512 + row * 32 + column, low)
