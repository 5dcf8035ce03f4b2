"""A tile as while condition."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.arange(0, 8)
    while x > 0:
        x -= 1
    tl.store(p, tl.sum(x))


ARGUMENTS = dict(p="*fp32", n="i32")
