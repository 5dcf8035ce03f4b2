"""A tile as if condition."""

# ruff: noqa
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit


def kernel(p, n):
    x = tl.arange(0, 8)
    if x > n:
        tl.store(p, 1.0)


ARGUMENTS = dict(p="*fp32", n="i32")
