"""A narrow result."""

# ruff: noqa
import minitriton.language as tl


def kernel(p, q):
    i = tl.arange(0, 64)
    a = tl.load(q + i[:, None] * 64 + i[None, :])
    s = tl.load(q + i[:, None] * 2 + tl.arange(0, 2)[None, :])
    tl.dot_scaled(a, s, "e4m3", a, s, "e5m2", out_dtype=tl.float16)


ARGUMENTS = dict(p="*fp32", q="*u8")
