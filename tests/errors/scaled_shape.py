"""Scales of rhs the wrong way round."""

# ruff: noqa
import minitriton.language as tl


def kernel(p, q):
    i = tl.arange(0, 64)
    a = tl.load(q + i[:, None] * 64 + i[None, :])
    s = tl.load(q + i[:, None] * 2 + tl.arange(0, 2)[None, :])
    tl.dot_scaled(a, s, "e4m3", a, tl.trans(s), "e5m2")


ARGUMENTS = dict(p="*fp32", q="*u8")
