"""A conditional expression of two types."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.arange(0, 4) if n > 1 else tl.load(p)
    tl.store(p, tl.sum(x))


ARGUMENTS = dict(p="*fp32", n="i32")
